"""Why there is no slice yet, at any time: one sentence for each thing that could bring one, such as a candidate."""

from __future__ import annotations

from collections.abc import Callable


class Waiting:
    """`changed` is called after each change, for whoever shows it elsewhere."""

    def __init__(self, changed: Callable[[], None] | None = None) -> None:
        self._sentences: dict[str, str] = {}
        self._changed = changed or (lambda: None)

    @property
    def sentences(self) -> dict[str, str]:
        """The sentence by what it is about, in the order in which they were first said."""
        return dict(self._sentences)

    def lines(self) -> list[str]:
        return [f"{about}: {sentence}" for about, sentence in self._sentences.items()]

    def say(self, about: str, sentence: str) -> bool:
        """Replace the sentence about something; True if it is another one than before."""
        if self._sentences.get(about) == sentence:
            return False
        self._sentences[about] = sentence
        self._changed()
        return True

    def clear(self) -> None:
        """Nothing is waited for any more."""
        if self._sentences:
            self._sentences.clear()
            self._changed()

"""One run of a pack in its program: its part of the segment contract, and how it ends without the others."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tpu.runtime import segment
from tpu.runtime.events import EventLog
from tpu.train.packs import Member

# Why a lane does nothing any more. What has `left` goes on in the next attempt; the others do not.
End = Literal["finished", "failed", "diverged", "fenced out", "left"]


class Lane:
    """What goes wrong with a run ends its lane; `end` says how, and is None as long as it trains.

    `step` and `count` are of the call that `next_call` has found: do the updates step … step+count-1.
    """

    def __init__(
        self,
        member: Member,
        events: Path | None,
        environment: Callable[[], Mapping[str, str]],
        noticed: Callable[[int], bool],
    ) -> None:
        self.member = member
        self.end: End | None = None
        self.step = self.count = 0
        self._events = EventLog(events, member.name)
        self._segment = segment.start(noticed, environment, member.plan(events))
        self._calls: Iterator[tuple[int, int]] | None = None

    @property
    def committed(self) -> int:
        return self._segment.committed

    def phase(self, name: segment.Phase) -> None:
        self._segment.phase(name)

    def restore(self, state: Any) -> Any:
        """The state to go on from: that of the newest checkpoint, or the one given, also if the lane has ended here."""
        found = self._do(lambda: self._segment.restore(state))
        return state if found is None else found

    def next_call(self, steps_per_call: int) -> None:
        """Find out what comes next; behind its last step the lane ends."""
        if self._calls is None:
            self._calls = self._segment.calls(steps_per_call)
        calls = self._calls
        found = self._do(lambda: next(calls, (self._segment.last_step, 0)))
        self.step, self.count = found or (self.step, 0)
        if found is not None and not self.count:
            self.leave(None)

    def log(self, step: int, **values: Any) -> None:
        self._do(lambda: self._segment.log(step, **values))

    def due(self, leaving: bool) -> bool:
        """Whether the state after the call is to be saved."""
        return leaving or self.step + self.count in self._segment.plan.stop_steps

    def save(self, state: Any) -> None:
        """Begin to save the state after the call."""
        self._do(lambda: self._segment.save(self.step + self.count, state))

    def checkpoint(self, state: Any) -> None:
        """As Segment.checkpoint after the call."""
        self._do(lambda: self._segment.checkpoint(self.step + self.count, state))

    def _do(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (Exception, SystemExit) as error:  # whatever it is, the other lanes go on
            self.leave(error)
            return None

    def leave(self, error: BaseException | None, end: End | None = None) -> None:
        """End the run's part of this attempt; `error` is why, None after its last step.

        `end` is what becomes of the run if that is not its own affair.
        """
        try:
            self._segment.__exit__(None if error is None else type(error), error, None)
        except (Exception, SystemExit) as late:
            error = late
        self.end, self.count = end or _end(error), 0
        reason = str(error) or type(error).__name__ if self.end in ("failed", "diverged") else ""
        self._events.write("ended", end=self.end, reason=reason)
        self._events.close()
        if self.end == "failed":
            traceback.print_exception(error)
        print(f"{self.member.name}: {self.end}{reason and f': {reason}'}", file=sys.stderr, flush=True)


def _end(error: BaseException | None) -> End:
    match error:
        case None:
            return "finished"
        case SystemExit(code=segment.EXIT_NOTICED):
            return "left"
        case SystemExit(code=segment.EXIT_FENCED_OUT):
            return "fenced out"
        case segment.DivergedError():
            return "diverged"
        case _:
            return "failed"

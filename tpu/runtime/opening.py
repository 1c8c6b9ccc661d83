"""Fetching the fence and the newest checkpoint beside the program's own start."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tpu.checkpoint.fence import Fence, load_fence
from tpu.checkpoint.restore import Restored, Skipped, newest_verified


@dataclass(frozen=True)
class Opened:
    """What an attempt begins with."""

    fence: Fence
    restored: Restored | None
    skipped: tuple[Skipped, ...]

    @property
    def why_none(self) -> str:
        """A sentence for a run that begins at step 0."""
        if self.skipped:
            return "no committed checkpoint is whole: beginning at step 0"
        return "nothing is committed yet: beginning at step 0"


class Opening:
    """Begins to fetch when made; `result` waits for it.

    The imports of the storage libraries and the download run while the program imports its framework and
    builds its model, so that a restart after a preemption does not pay for both one after the other.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._opened: Opened | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fetch, name="checkpoint-fetcher", daemon=True)
        self._thread.start()

    def result(self) -> Opened:
        """Fence and newest whole checkpoint.

        Raises:
            StorageUnavailable, MalformedFence: the bucket does not answer, or holds no fence that can be
            read.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._opened is not None
        return self._opened

    def _fetch(self) -> None:
        try:
            fence = load_fence(self._run_dir)
            restored, skipped = newest_verified(self._run_dir, fence)
            self._opened = Opened(fence, restored, skipped)
        except BaseException as error:  # raised again where the program waits for the result
            self._error = error

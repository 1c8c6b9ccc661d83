"""What a person sees while a run trains: one line an event, and a progress artifact that moves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from prefect.settings import get_current_settings

from tpu.hosts.address import HostAddress
from tpu.runs.config import RunConfig


@dataclass(frozen=True)
class Rates:
    """How much the Prefect server hears of one run: it stores each line and each update, and Prefect Cloud takes so
    many a minute of a whole account and answers 429 above. The whole log is in the bucket."""

    lines_at_once: float
    lines_a_second: float
    first_pause_s: float


OWN_SERVER = Rates(lines_at_once=500, lines_a_second=20, first_pause_s=3)
# Twenty runs whose programs print without end stay below 500 lines a minute, those of the smallest account.
PREFECT_CLOUD = Rates(lines_at_once=50, lines_a_second=0.35, first_pause_s=15)
# A long run tells of its progress less often: after an hour every 3 minutes, at last every 5.
LONGEST_PAUSE_S, PAUSE_SHARE = 300.0, 0.05
LAST_LINES, EBB_S = 50, 2.0


def rates() -> Rates:
    return PREFECT_CLOUD if get_current_settings().connected_to_cloud else OWN_SERVER


def pause_s(elapsed_s: float, first_s: float) -> float:
    """Seconds between two progress lines when a run has gone on for `elapsed_s`."""
    return min(max(first_s, elapsed_s * PAUSE_SHARE), LONGEST_PAUSE_S)


class Room:
    """Lines that all hosts of a run may say: so many at once and so many a second."""

    def __init__(self, told: Rates, now: Callable[[], float] = time.monotonic) -> None:
        self._told, self._now = told, now
        self._lines, self._at = told.lines_at_once, now()

    def wait_s(self, lines: int) -> float:
        """Seconds until there is room for so many lines; 0 if there is."""
        now = self._now()
        self._lines = min(
            self._told.lines_at_once, self._lines + (now - self._at) * self._told.lines_a_second
        )
        self._at = now
        return max(0.0, min(lines, self._told.lines_at_once) - self._lines) / self._told.lines_a_second

    def take(self, lines: int) -> None:
        self._lines -= lines


class LineTap:
    """Lets lines of one host pass while there is room; of a flood, the last ones come once it ebbs, with the number
    left out."""

    def __init__(self, say: Callable[[str], None], room: Room) -> None:
        self._say = say
        self._room = room
        self._held: deque[str] = deque(maxlen=LAST_LINES)
        self._flood = 0

    def line(self, text: str) -> bool:
        """Take a line; True if it is held back and `ebb` is to be called once there is room."""
        if not self._flood and self._room.wait_s(1) == 0:
            self._room.take(1)
            self._say(text)
            return False
        self._flood += 1
        self._held.append(text)
        return True

    def wait_s(self) -> float:
        """Seconds until there is room for what is held back."""
        return self._room.wait_s(len(self._held) + 1)

    def ebb(self) -> None:
        """Say what is held back."""
        self._room.take(len(self._held) + 1)
        if left_out := self._flood - len(self._held):
            self._say(f"… {left_out:,} lines are left out here; `relay logs` shows all of them")
        for text in self._held:
            self._say(text)
        self._held.clear()
        self._flood = 0


class Progress:
    """Hears a gang and tells Prefect: program lines and events into the log, the step into an artifact."""

    def __init__(
        self, run: RunConfig, log: logging.Logger | logging.LoggerAdapter[Any], whose: str = ""
    ) -> None:
        self._run = run
        self._log = log
        self._whose = whose  # before the host's number, if a run has several gangs
        self._artifact: UUID | None = None
        self._began = self._updated = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._update: asyncio.Task[None] | None = None
        self._rates = rates()
        self._room = Room(self._rates)
        self._taps: dict[int, LineTap] = {}
        self._ebbs: dict[int, asyncio.TimerHandle] = {}

    def on_log(self, host: HostAddress, line: str) -> None:
        index = host.index
        if index not in self._taps:
            self._taps[index] = LineTap(
                lambda text: self._log.info("%sw%d | %s", self._whose, index, text), self._room
            )
        if self._taps[index].line(line) and index not in self._ebbs:
            self._ebb_in(EBB_S, index)

    def _ebb_in(self, seconds: float, index: int) -> None:
        self._ebbs[index] = asyncio.get_running_loop().call_later(seconds, self._ebb, index)

    def _ebb(self, index: int) -> None:
        if (wait_s := self._taps[index].wait_s()) > 0:
            self._ebb_in(wait_s, index)
            return
        del self._ebbs[index]
        self._taps[index].ebb()

    def on_end(self) -> None:
        """Say now what of a flood of lines is held back: the next gang's flood would take its place."""
        for index in list(self._ebbs):
            self._ebbs.pop(index).cancel()
            self._taps[index].ebb()

    def on_event(self, host: HostAddress, record: dict[str, Any]) -> None:
        if host.index != 0:
            return
        match record["event"]:
            case "commit":
                self._log.info("committed step %s", record["step"])
            case "skipped":
                self._log.warning("checkpoint of step %s (attempt %s) is not used: %s",
                                  record["step"], record["attempt"], record["reason"])  # fmt: skip
            case "notice":
                self._log.warning("preemption notice: saving step %s", record["step"])
            case "restored":
                step, self._first = record["step"] or 0, None
                self._log.info("restored step %s", step) if step else self._log.info(
                    record.get("reason") or "starts from step 0"
                )
            case "step":
                self._on_step(record)

    def _on_step(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        self._first = self._first or (now, record["step"])
        busy = self._update is not None and not self._update.done()
        last = record["step"] >= self._run.steps
        if not last and (busy or now - self._updated < pause_s(now - self._began, self._rates.first_pause_s)):
            return
        self._updated = now
        text = describe(record, self._run.steps, now - self._first[0], record["step"] - self._first[1])
        self._log.info(text)
        self._update = asyncio.create_task(self._show(100 * record["step"] / self._run.steps, text))

    async def _show(self, percent: float, text: str) -> None:
        try:
            if self._artifact is None:
                created = await acreate_progress_artifact(
                    percent, key=f"progress-{self._run.name}", description=text
                )
                self._artifact = created if isinstance(created, UUID) else created.id
            else:
                await aupdate_progress_artifact(self._artifact, progress=percent, description=text)
        except Exception as error:  # a picture of progress must never end a training
            self._log.debug("the progress artifact was not updated: %r", error)


def describe(record: dict[str, Any], steps: int, seconds: float, done: int) -> str:
    """`step 400 of 1000, loss 0.512, 8.1 steps/s, 74 s to go`, from `done` steps in `seconds`."""
    parts = [f"step {record['step']} of {steps}"]
    parts += [
        f"{k} {v:.4g}"
        for k, v in record.items()
        if k not in ("t", "event", "step") and isinstance(v, int | float)
    ]
    if done > 0 and seconds > 0:
        rate = done / seconds
        parts += [f"{rate:.3g} steps/s", f"{_duration((steps - record['step']) / rate)} to go"]
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

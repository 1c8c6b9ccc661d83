"""The run's own history: one small object an event, in order of (term, number), never changed.

Budgets are counted from it and the report is made of it, so it must survive any crash of the flow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

from tpu.checkpoint import files, objects
from tpu.slices.candidate import Candidate
from tpu.slices.zone_health import EARLY_DEATH_S

READERS = 8
# The number of what others than the driver write: behind all events of its term, before those of the next driver.
_BEHIND_ALL = "999999"


class MalformedEvent(ValueError):
    """An event cannot be read; the message names its object."""


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run at `time`, seconds since 1970 on the clock of the flow's machine."""

    time: float
    kind: str
    detail: dict[str, Any]


class EventLog:
    """Appends events under `runs/<name>/events/`; one writer a term.

    `told` gets the whole history, the new event last, after each one; in whatever thread, so it must not take long.
    """

    def __init__(
        self,
        run_dir: str,
        term: int,
        now: Callable[[], float],
        told: Callable[[Sequence[RunEvent]], None] = lambda _: None,
    ) -> None:
        self._folder = f"{run_dir}/events"
        self._term = term
        self._now = now
        self._told = told
        self.events: list[RunEvent] = load_events(run_dir)
        self._number = 0
        self._lock = threading.Lock()

    def append(self, kind: str, **detail: Any) -> RunEvent:
        """Write one event; blocks until it is in the bucket.

        Raises:
            tpu.checkpoint.objects.ObjectExists: another process writes under the same term.
        """
        with self._lock:
            event = RunEvent(self._now(), kind, detail)
            self._number += 1
            objects.create_exclusive(
                f"{self._folder}/{self._term:06}-{self._number:06}.json", _to_json(event)
            )
            self.events.append(event)
            self._told(self.events)
            return event

    async def note(self, kind: str, **detail: Any) -> None:
        """`append` beside the event loop."""
        await asyncio.to_thread(lambda: self.append(kind, **detail))


def load_events(run_dir: str) -> list[RunEvent]:
    """All events of a run in order; empty for a run that has none yet.

    Raises:
        MalformedEvent: one cannot be read. A run without a part of its history might leave a slice behind.
    """
    urls = sorted(files.names(f"{run_dir}/events"))
    with ThreadPoolExecutor(READERS) as readers:
        return [
            _event(url, content) for url, content in zip(urls, readers.map(files.read, urls), strict=True)
        ]


def highest_term(run_dir: str) -> int:
    """The highest term under which the run's history was written; 0 if there is none."""
    terms = (url.rpartition("/")[2].partition("-")[0] for url in files.names(f"{run_dir}/events"))
    return max((int(term) for term in terms if term.isdigit()), default=0)


def note_from_outside(run_dir: str, key: str, time: float, kind: str, **detail: Any) -> None:
    """Write an event into the history of a run that nobody drives; the same `key` twice in a term is one event.

    So a slice that the reaper deleted costs the run nothing any more. A run without a history has none to be mended,
    and gets none. `time` is seconds since 1970.
    """
    if (term := highest_term(run_dir)) == 0:
        return
    with contextlib.suppress(objects.ObjectExists):
        url = f"{run_dir}/events/{term:06}-{_BEHIND_ALL}-{key}.json"
        objects.create_exclusive(url, _to_json(RunEvent(time, kind, detail)))


def _to_json(event: RunEvent) -> bytes:
    return json.dumps(vars(event)).encode()


def _event(url: str, content: bytes) -> RunEvent:
    try:
        return RunEvent(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise MalformedEvent(f"{url} cannot be understood ({error!r}): {content[:200]!r}") from error


def undeleted(events: Sequence[RunEvent]) -> list[str]:
    """Slices that were asked for or taken from the pool, and neither given back nor confirmed as deleted, in order."""
    names: dict[str, None] = {}
    for event in events:
        if event.kind in ("slice-intended", "slice-leased"):
            names[event.detail["slice"]] = None
        elif event.kind in ("slice-deleted", "slice-released"):
            names.pop(event.detail["slice"], None)
    return list(names)


def candidate_of(events: Sequence[RunEvent], name: str) -> Candidate:
    """As what a slice was asked for, by this run or by whoever put it into the pool.

    Raises:
        KeyError: no such slice was.
    """
    for event in events:
        if event.kind in ("slice-intended", "slice-leased") and event.detail["slice"] == name:
            return candidate_in(event.detail)
    raise KeyError(f"no slice {name} was asked for")


def candidate_in(detail: Mapping[str, Any]) -> Candidate:
    """The candidate that an event of a slice names."""
    return Candidate(**{field.name: detail[field.name] for field in fields(Candidate)})


def early_death(events: Sequence[RunEvent], name: str) -> float | None:
    """When a slice was asked for that was preempted soon after it was ready and has served for nothing; else None.

    One in whose time the run got on to a new checkpoint was worth having, however short its life was.
    """
    ready = next((e.time for e in events if e.kind == "slice-ready" and e.detail["slice"] == name), None)
    ended = [e for e in events if e.kind == "attempt-ended" and e.detail["slice"] == name]
    if ready is None or not ended or any(e.detail["last_commit"] is not None for e in ended):
        return None
    early = ended[-1].detail["verdict"] == "preempted" and ended[-1].time - ready <= EARLY_DEATH_S
    return (
        next(e.time for e in events if e.kind == "slice-intended" and e.detail["slice"] == name)
        if early
        else None
    )


def given_up(events: Sequence[RunEvent], name: str) -> bool:
    """Whether the end of the last attempt on a slice was the end of its use: an earlier driver died before it was rid
    of it."""
    ends = [e.detail for e in events if e.kind == "attempt-ended" and e.detail["slice"] == name]
    return bool(ends) and ends[-1].get("slice_given_up", False)


def in_repair(events: Sequence[RunEvent], name: str) -> bool:
    """Whether an earlier driver was waiting for the repair of a slice, and did not see the end of it."""
    waits = [e.kind for e in events if e.kind.startswith("repair-wait-") and e.detail["slice"] == name]
    return bool(waits) and waits[-1] == "repair-wait-started"

"""What a run's program printed, out of the bucket: whole, or as it comes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from tpu.checkpoint import files
from tpu.checkpoint.fence import load_fence
from tpu.runs.controller import observe
from tpu.runs.event_log import RunEvent, load_events
from tpu.runs.parts import part_names
from tpu.runs.record import load_record
from tpu.topology import accelerator_type

# How often the bucket is looked at while a log is followed.
LOOK_S = 2.0
# Hosts bring what they have every 10 s; the first part may need a moment more.
FIRST_PART_S = 15.0


class NoLog(LookupError):
    """There is no such log; the message says what there is."""


def log_parts(run_dir: str, attempt: int, host: int) -> list[str]:
    """URLs of the parts of one host's log of one attempt, in order."""
    wanted = re.compile(rf"-w{host}-(\d+)\.log$")
    found = {url: match for url in files.names(f"{run_dir}/logs/{attempt}") if (match := wanted.search(url))}
    return sorted(found, key=lambda url: int(found[url][1]))


def read_log(
    run_dir: str, run: str, attempt: int | None, host: int, now: Callable[[], float] = time.time
) -> Iterator[bytes]:
    """The parts of one host's log; of the newest attempt if none is named.

    Raises:
        NoLog: there is none (yet), or no such attempt or host.
    """
    _refuse_over_slices(run_dir, run)
    number = _attempt(run_dir, run, attempt)
    _check_host(run_dir, run, host)
    parts = log_parts(run_dir, number, host)
    if not parts:
        start = next((e for e in load_events(run_dir) if _starts(e, number)), None)
        if start is not None and (pack := start.detail.get("pack")) is not None:
            raise NoLog(
                f"attempt {number} of {run} trained in a pack, whose program has one log: relay logs {pack}"
            )
        started = start.time if start is not None else float("-inf")
        if not _ended(run_dir, number) and (age_s := now() - started) < FIRST_PART_S:
            raise NoLog(
                f"attempt {number} of {run} began {max(age_s, 0):.0f} s ago, and hosts bring their logs every "
                "10 s: try again, or use --follow"
            )
        raise NoLog(f"host {host} of attempt {number} of {run} has no log in the bucket")
    return (files.read(part) for part in parts)


def follow_log(
    run_dir: str, run: str, attempt: int | None, host: int, sleep: Callable[[float], None] = time.sleep
) -> Iterator[bytes]:
    """The parts as they come, from attempt to attempt, until nobody drives the run; of one attempt, until it ended."""
    _refuse_over_slices(run_dir, run)
    number = _attempt(run_dir, run, attempt) if attempt is not None or load_fence(run_dir).attempt else 1
    _check_host(run_dir, run, host)
    seen = 0
    while True:
        # Asked before the parts: what came before the end is still read.
        ended, driven = _ended(run_dir, number), _driven(run_dir)
        parts = log_parts(run_dir, number, host)
        for part in parts[seen:]:
            yield files.read(part)
        seen = len(parts)
        if ended and attempt is None and load_fence(run_dir).attempt > number:
            number, seen = number + 1, 0
        elif (ended and attempt is not None) or not driven:
            return
        else:
            sleep(LOOK_S)


def _refuse_over_slices(run_dir: str, run: str) -> None:
    if parts := part_names(load_record(run_dir).config):
        raise NoLog(
            f"{run} trains on several slices, each of which has a log: relay logs {' or '.join(parts)}"
        )


def _attempt(run_dir: str, run: str, attempt: int | None) -> int:
    newest = load_fence(run_dir).attempt
    if newest == 0:
        raise NoLog(f"{run} has had no attempt yet, so there is no log")
    if attempt is not None and not 1 <= attempt <= newest:
        raise NoLog(f"{run} has no attempt {attempt}: it has 1 to {newest}")
    return attempt or newest


def _check_host(run_dir: str, run: str, host: int) -> None:
    types = load_record(run_dir).config.slice.types
    hosts = max(accelerator_type(name).hosts for name in types)
    if host >= hosts:
        raise NoLog(f"{run} has 1 host: 0" if hosts == 1 else f"{run} has {hosts} hosts: 0 to {hosts - 1}")


def _starts(event: RunEvent, attempt: int) -> bool:
    return event.kind == "attempt-started" and event.detail["attempt"] == attempt


def _ended(run_dir: str, attempt: int) -> bool:
    fence = load_fence(run_dir)
    return fence.attempt > attempt or (fence.attempt == attempt and not fence.open)


def _driven(run_dir: str) -> bool:
    seen = observe(run_dir)
    return seen is not None and seen[0].drives

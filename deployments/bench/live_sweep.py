"""A real sweep on emulated slices: what its process costs a trial, how soon a chip is refilled, what Prefect keeps.

`flows.sweep` carries it as it would carry any: real leases in a local storage server, real SSH, a real Prefect server.
Of two sweeps the larger one's process has so many more live trials, and the memory and CPU it has more are theirs.
The trainer saves through the real contract and sleeps in its steps, so that the hosts' part takes little of the cores.

How many trials live at once is bounded by what the emulated hosts need of this machine: it is told, and nothing here
is extrapolated to more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.bench.lab import FOLDER, BenchFailed, Lab, open_lab, say
from deployments.bench.sweep_fleet import spread
from deployments.bench.worker import TRAINER, Memory, memory_of, spent
from tpu.runs.event_log import RunEvent, load_events
from tpu.runs.record import run_directory
from tpu.slices.lease_book import GcsLeaseBook
from tpu.slices.pool_settings import PoolSettings
from tpu.sweeps.book import SweepBook, sweep_directory

CHIPS = 4
SEGMENTS = 5
ROUNDS = 2
END_S = 1500.0
LOOK_S = 2.0
# A gang's start takes about so long of two cores; the last one has to be at work before the first has ended.
START_S, FIRST_S = 1.5, 40


@dataclass(frozen=True)
class Live:
    """One sweep: so many trials at once and in all, and the process that drives it."""

    at_once: int
    trials: int
    memory: Memory  # the most that was seen while all places were taken
    cpu_s: float
    seconds: float
    taken_s: list[float]
    started_s: list[float]
    records: dict[str, int]


def sweep_file(name: str, at_once: int, steps: int) -> Path:
    """A sweep over the pause between steps: what is measured is not the training."""
    trials = at_once * ROUNDS
    values = {
        "run": {
            "name": name,
            "command": [sys.executable, "-c", TRAINER],
            "contract": True,
            "steps": steps,
            "checkpoints": {"every": steps // SEGMENTS},
            "evaluate": "never",
            "slice": {"accelerator_type": "v6e-4", "zone": "us-east5-b", "chips": 1},
            "pool": name,
        },
        # So that not all end at once.
        "parameters": {
            "variables.STEP_S": {"values": [f"{1 + number / 100:.2f}" for number in range(trials)]}
        },
        "at_once": at_once,
    }
    file = FOLDER / f"{name}.yaml"
    file.write_text(json.dumps(values))  # JSON is YAML
    return file


def live(small: int, large: int) -> dict[str, Any]:
    """The figures of sweeps with so many trials at once.

    Raises:
        BenchFailed: one did not end well, or never had all of its trials at work at once.
    """
    with open_lab(hosts_alone=False) as lab:
        return figures_of(measure(lab, small), measure(lab, large))


def measure(lab: Lab, at_once: int) -> Live:
    """Carry one sweep to its end.

    Raises:
        BenchFailed: it did not end well, or never had all of its trials at work at once.
    """
    steps = SEGMENTS * round((FIRST_S + START_S * at_once) / SEGMENTS)
    name, trials = f"live-{at_once}", at_once * ROUNDS
    say(f"{trials} trials, {at_once} at once, on {at_once // CHIPS} emulated slices")
    bucket = lab.emulator.env["TPU_RELAY_BUCKET"]
    settings = PoolSettings(max_slices=at_once // CHIPS)
    asyncio.run(GcsLeaseBook(bucket).set_settings(name, lambda _: settings))
    book = SweepBook(sweep_directory(bucket, name))
    program = FOLDER / "program"
    program.mkdir(exist_ok=True)
    began, log = time.monotonic(), FOLDER / f"{name}.log"
    with log.open("wb") as output:
        flow = subprocess.Popen(
            [sys.executable, "-m", "flows.sweep", str(sweep_file(name, at_once, steps))],
            env=lab.environment, cwd=program, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    most, cpu_s = Memory(0, 0, 0), 0.0
    try:
        while flow.poll() is None:
            if time.monotonic() - began > END_S:
                raise BenchFailed(f"{END_S:.0f} s were over before {name} had ended; its log: {log}")
            time.sleep(LOOK_S)  # a sample, not a wait for something
            with contextlib.suppress(OSError, IndexError):  # it has just ended
                cpu_s = max(cpu_s, spent(flow.pid).own)
                if _live(lab, book) == at_once:
                    most = max(most, memory_of([flow.pid]), key=lambda memory: memory.pss)
    finally:
        if flow.poll() is None:
            flow.terminate()
            flow.wait()
    if flow.returncode:
        raise BenchFailed(f"{name} ended with {flow.returncode}; its log: {log}")
    if not most.processes:
        raise BenchFailed(f"{at_once} trials were never at work at once; the log is {log}")
    histories = [load_events(run_directory(bucket, trial.run)) for trial in book.trials()]
    taken, started = refills(histories)
    return Live(
        at_once, trials, most, cpu_s, round(time.monotonic() - began, 1), taken, started,
        asyncio.run(records(lab, name)),
    )  # fmt: skip


def _live(lab: Lab, book: SweepBook) -> int:
    """How many trials have committed and not ended."""
    ended = book.outcomes()
    return sum(
        lab.fence(trial.run).newest() is not None for trial in book.trials() if trial.number not in ended
    )


def refills(histories: Iterable[list[RunEvent]]) -> tuple[list[float], list[float]]:
    """Seconds from a chip being given back to the next trial taking it, and to that one's gang being started."""
    given: dict[tuple[str, int], list[float]] = defaultdict(list)
    stays: list[tuple[str, tuple[int, ...], float, float]] = []
    for events in histories:
        chips: dict[str, tuple[int, ...]] = {}
        since: dict[str, float] = {}
        for event in events:
            name = event.detail.get("slice", "")
            match event.kind:
                case "slice-leased":
                    chips[name], since[name] = tuple(event.detail["chips"]), event.time
                case "attempt-started" if name in since:
                    stays.append((name, chips[name], since.pop(name), event.time))
                case "slice-released":
                    for chip in chips.get(name, (0,)):  # who made the slice has its first chip
                        given[name, chip].append(event.time)
                case _:
                    pass
    taken: list[float] = []
    started: list[float] = []
    for name, chips_of, at, start in stays:
        free = [max(given[name, chip], default=None, key=lambda t: (t <= at, t)) for chip in chips_of]
        before = [t for t in free if t is not None and t <= at]
        if before:
            taken.append(at - max(before))
            started.append(start - max(before))
    return taken, started


async def records(lab: Lab, name: str) -> dict[str, int]:
    """How many task runs Prefect has of the sweep's trials, by state."""
    found: dict[str, int] = defaultdict(int)
    with temporary_settings({PREFECT_API_URL: lab.environment["PREFECT_API_URL"]}):
        async with get_client() as client:
            asked = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
            offset = 0
            while page := await client.read_task_runs(flow_run_filter=asked, limit=200, offset=offset):
                offset += len(page)
                for run in page:
                    if run.name.startswith("trial "):
                        found[run.state_name or "?"] += 1
    return dict(found)


def figures_of(small: Live, large: Live) -> dict[str, Any]:
    """The aims' fields first; `sweeps` has what they come of."""
    more = large.at_once - small.at_once
    return {
        "mb_per_live_trial": round((large.memory.pss - small.memory.pss) / more / 1e6, 2),
        "cpu_s_per_trial": round((large.cpu_s - small.cpu_s) / (large.trials - small.trials), 2),
        "refill_s": spread(large.taken_s),
        "refill_and_start_s": spread(large.started_s),
        "records_complete": all(one.records == {"Completed": one.trials} for one in (small, large)),
        "most_live_trials": large.at_once,
        "sweeps": [
            {
                "at_once": one.at_once,
                "trials": one.trials,
                "pss_mb": round(one.memory.pss / 1e6, 1),
                "cpu_s": round(one.cpu_s, 1),
                "seconds": one.seconds,
                "refills": len(one.taken_s),
                "refill_s": spread(one.taken_s),
                "records": one.records,
            }
            for one in (small, large)
        ],
    }

"""Plays many histories, several at a time, and sums up what came of them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from deployments.bench.chaos.judge import judge
from deployments.bench.chaos.plan import WITHOUT_CAPACITY, WITHOUT_QUOTA, History, make_history
from deployments.bench.chaos.play import Played, Stage, bucket_folder, play
from deployments.bench.chaos.warm import warm_starts
from tpu.emulator.emulator import Emulator

REPOSITORY = Path(__file__).parents[3]
LEAVING_S = 10.0


@dataclass(frozen=True)
class Judged:
    """A history that was played, and what is wrong with it (nothing if it holds)."""

    history: History
    complaints: Sequence[str]
    played: Played | None = None

    @property
    def leaks(self) -> int:
        return len(self.played.outcome.left) if self.played is not None else 0


@contextlib.contextmanager
def open_stage(emulator: Emulator, environment: Mapping[str, str], folder: Path) -> Iterator[Stage]:
    """A stage on an emulated cloud; `environment` leads flows there and to a Prefect server."""
    emulator.set_quota(*WITHOUT_QUOTA, 0)
    emulator.stockout(*WITHOUT_CAPACITY)
    # Outside of any repository, so that all that is in it is the program's working tree.
    with tempfile.TemporaryDirectory(prefix="relay-chaos-") as program:
        _copy_trainers(Path(program))
        # Of a flow's own arithmetic there is none, and threads do not outlive a fork.
        with warm_starts({**environment, "OPENBLAS_NUM_THREADS": "1"}) as flows:
            yield Stage(emulator, flows, folder, Path(program))


def _copy_trainers(program: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "tests/trainers", program / "tests/trainers", ignore=ignored)
    shutil.copy(REPOSITORY / "tests/__init__.py", program / "tests")


def play_all(stage: Stage, seeds: Sequence[int], at_once: int, report: Callable[[str], None]) -> list[Judged]:
    """Play the histories of all seeds. One that cannot be played to its end counts as one that does not hold."""
    judged = []
    with ThreadPoolExecutor(at_once) as players:
        playing = {players.submit(play_and_judge, stage, make_history(seed)): seed for seed in seeds}
        for number, done in enumerate(as_completed(playing), 1):
            judged.append(one := done.result())
            report(f"{number} of {len(seeds)}: {told(one)}")
    return sorted(judged, key=lambda one: one.history.seed)


def play_and_judge(stage: Stage, history: History) -> Judged:
    try:
        played = play(stage, history)
    except Exception as error:  # the other histories are played all the same
        return Judged(history, [f"it could not be played: {error!r}"])
    judged = Judged(history, judge(history, played.outcome), played)
    if (
        not judged.complaints
    ):  # what went wrong can be looked at; of the rest there would be too much at the end
        shutil.rmtree(bucket_folder(stage, history), ignore_errors=True)
    return judged


def left_in_all(emulator: Emulator) -> list[str]:
    """What is left of anything when all histories are over."""
    end = time.monotonic() + LEAVING_S
    while True:
        status = emulator.status()
        left = [f"node {node['node']}" for node in status["nodes"]]
        left += [f"queued resource {queued['queued_resource']}" for queued in status["queued_resources"]]
        left += [f"process {pid}" for pid in emulator.processes()]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def told(one: Judged) -> str:
    """One line about a history."""
    seed, played = one.history.seed, one.played
    if played is None:
        return f"seed {seed} FAILED: {'; '.join(one.complaints)}"
    made = ", ".join(f"{fault} ({injected})" for fault, injected in _made(played)) or "nothing struck it"
    doom = f"; cannot end well: {one.history.doom}" if one.history.doom else ""
    missed = f"; too late: {', '.join(played.missed)}" if played.missed else ""
    how = "held" if not one.complaints else "FAILED: " + "; ".join(one.complaints) + ";"
    return (
        f"seed {seed} {how} in {played.seconds:.0f} s, {played.attempts} attempt(s), {played.starts} start(s): "
        f"{made}{doom}{missed}"
    )


def _made(played: Played) -> list[tuple[str, str]]:
    return [(injected.fault, injected.told) for injected in played.outcome.injected]


def by_fault(judged: Sequence[Judged]) -> dict[str, dict[str, int]]:
    """How often each kind of trouble was made, in how many histories, and how many of these hold."""
    kinds: dict[str, dict[str, int]] = {}
    for one in judged:
        for fault, times in (one.played.faults if one.played is not None else Counter()).items():
            counts = kinds.setdefault(fault, {"times": 0, "histories": 0, "held": 0})
            counts["times"] += times
            counts["histories"] += 1
            counts["held"] += not one.complaints
    return dict(sorted(kinds.items()))


def summary(judged: Sequence[Judged], left: Sequence[str]) -> dict[str, Any]:
    """Figures of all histories: share of those that hold, leaks, medians, and how each kind of trouble fared."""
    held = [one for one in judged if not one.complaints]
    played = [one.played for one in judged if one.played is not None]
    return {
        "ratio": round(len(held) / len(judged), 4),
        "histories": len(judged),
        # What a history left is still there at the end, or has left with its host.
        "leaks": max(len(left), sum(one.leaks for one in judged)),
        "attempts": median(one.attempts for one in played) if played else None,
        "starts": median(one.starts for one in played) if played else None,
        "seconds": round(median(one.seconds for one in played), 1) if played else None,
        "finished": sum(one.outcome.exit_code == 0 for one in played),
        "gave_up": sum(one.outcome.exit_code not in (0, None) for one in played),
        "by_fault": by_fault(judged),
        "failures": [
            {"seed": one.history.seed, "why": list(one.complaints)} for one in judged if one.complaints
        ],
        "left": list(left),
    }

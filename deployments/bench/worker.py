"""What a run costs the machine of its worker, beside what Prefect itself costs there.

Twenty runs are started at once through one `cloud-tpu` worker, each on an emulated slice of its own with a small
trainer that saves through the real contract and sleeps in its steps. Counted is what the machine of the worker has to
bear: the processes of the flow runs and the worker itself; not the gangs, which live on slices, nor the servers.

The floor: flows with no work in them, as many at once and alive for as long, through Prefect's own process worker.
Beside it the same empty flows through ours.

Memory is the proportional set size (what processes share is counted once) when all are at work, a run: the processes
of the runs and the worker's, divided by the number of runs. CPU seconds are those of the worker and of all that it
started, from the first start until all have ended, divided likewise; most of it is the start. `ratio` is the larger of
the two ratios.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.deployments import arun_deployment
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.bench.empty_flow import empty
from deployments.bench.lab import FOLDER, BenchFailed, Lab, machine, open_lab, parser, say, tell
from deployments.bench.worker_process import Worker
from flows.train import train
from tpu.runs.config import RunConfig, parse_run_config

# Twice what Prefect needs for nothing.
GOAL = 2.0
RUNS, SHORT_RUNS = 20, 4
# Starting twenty takes two minutes on two cores, and all have to be at work at once.
WORK_S, SHORT_WORK_S = 240, 45
START_S = 600.0
TICK = os.sysconf("SC_CLK_TCK")
TRAINER = """
import os, time
import numpy as np
from tpu.runtime import segment

pause_s = float(os.environ.get("STEP_S", "1"))
state = {"w": np.zeros(64, np.float32)}
with segment.start() as seg:
    state = seg.restore(state)
    for step in seg.steps():
        state = {"w": state["w"] * np.float32(0.9) + np.float32(step)}
        time.sleep(pause_s)  # stands for the work of a step, which costs this machine nothing
        seg.log(step + 1, loss=float(state["w"].mean()))
        seg.checkpoint(step + 1, state)
"""


@dataclass(frozen=True)
class Cost:
    """What one flow run costs, on average over those that ran at once."""

    memory_mib: float
    rss_mib: float
    processes: float
    cpu_s: float
    worker_memory_mib: float
    worker_cpu_s: float
    started_within_s: float


def main() -> None:
    arguments = parser("worker", __doc__)
    arguments.add_argument("--runs", type=int, help=f"how many at once (default {RUNS}, short {SHORT_RUNS})")
    chosen = arguments.parse_args()
    number = chosen.runs or (SHORT_RUNS if chosen.short else RUNS)
    work_s = SHORT_WORK_S if chosen.short else WORK_S
    about = machine()
    say("starting the Prefect server and the emulated Cloud TPU")
    with (
        open_lab(hosts_alone=False) as lab,
        temporary_settings({PREFECT_API_URL: lab.environment["PREFECT_API_URL"]}),
    ):
        ours = asyncio.run(measure(lab, "cloud-tpu", "train", number, work_s))
        same = asyncio.run(measure(lab, "cloud-tpu", "empty", number, work_s))
        floor = asyncio.run(measure(lab, "process", "empty", number, work_s))
    memory, cpu = ours.memory_mib / floor.memory_mib, ours.cpu_s / floor.cpu_s
    tell(
        {
            "bench": "worker",
            "ratio": round(max(memory, cpu), 3),
            "goal": GOAL,
            "memory_ratio": round(memory, 3),
            "cpu_ratio": round(cpu, 3),
            "train": asdict(ours),
            "empty": asdict(same),
            "empty_by_prefects_worker": asdict(floor),
            "runs": number,
            "work_s": work_s,
            "machine": about,
        }
    )


async def measure(
    lab: Lab, kind: Literal["cloud-tpu", "process"], flow: Literal["train", "empty"], number: int, work_s: int
) -> Cost:
    """Start so many flow runs at once through a worker, look at them while all are at work, and see them end."""
    pool = f"{kind}-{flow}"
    say(f"{pool}: {number} flow runs at once")
    folder = FOLDER / pool
    folder.mkdir(exist_ok=True)
    program = FOLDER / "program"
    program.mkdir(exist_ok=True)
    worker = Worker(pool, lab.environment, folder, program, kind)
    await worker.make_pool()
    await worker.deploy_flow(pool, train if flow == "train" else empty)
    worker.start()
    try:
        await until(lambda: "started!" in worker.log.read_text(), "the worker", 120.0)
        before, began = spent(worker.pid), time.monotonic()
        flow_runs = [await start(flow, pool, n, work_s) for n in range(number)]
        if flow == "train":
            at_work = [lambda n=n: lab.fence(f"bench-{n}").newest() is not None for n in range(number)]
            for n, works in enumerate(at_work):
                await until(lambda works=works: asyncio.to_thread(works), f"a commit of run {n}", START_S)
        else:
            await until(lambda: in_state(flow_runs, "Running"), "all flows", START_S)
        started_s = time.monotonic() - began
        if await in_state(flow_runs, "Completed", some=True):
            raise BenchFailed(f"the first ended before the last began; logs are in {folder}")
        carried, own = memory_of(descendants(worker.pid)), memory_of([worker.pid])
        await until(lambda: in_state(flow_runs, "Completed"), "the end of all", START_S)
        # A worker waits for what it started, so that its children's time is in its own account.
        await until(lambda: not descendants(worker.pid), "the end of all processes", 60.0)
        after = spent(worker.pid)
    finally:
        left = descendants(worker.pid)
        worker.stop()
        for pid in left:  # flow runs outlive their worker
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return Cost(
        memory_mib=round((carried.pss + own.pss) / number / 2**20, 1),
        rss_mib=round((carried.rss + own.rss) / number / 2**20, 1),
        processes=round(carried.processes / number, 2),
        cpu_s=round((after.own + after.children - before.own - before.children) / number, 2),
        worker_memory_mib=round(own.pss / 2**20, 1),
        worker_cpu_s=round(after.own - before.own, 2),
        started_within_s=round(started_s, 1),
    )


async def start(flow: str, pool: str, number: int, work_s: int) -> UUID:
    parameters: dict[str, Any] = {"seconds": work_s}
    if flow == "train":
        parameters = {"run": configuration(number, work_s).model_dump(mode="json", exclude_unset=True)}
    return (await arun_deployment(f"{flow}/{pool}", parameters=parameters, timeout=0)).id


def configuration(number: int, work_s: int) -> RunConfig:
    """A run of one step a second, saved every quarter of a minute."""
    return parse_run_config(
        {
            "name": f"bench-{number}",
            "command": [sys.executable, "-c", TRAINER],
            "contract": True,
            "steps": work_s,
            "checkpoints": {"every": 15},
            "evaluate": "never",
        }
    )


async def in_state(flow_runs: list[UUID], name: str, some: bool = False) -> bool:
    """Whether all (or some) flow runs are in this state.

    Raises:
        BenchFailed: one has ended otherwise than well.
    """
    async with get_client() as client:
        found = await client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=flow_runs)))
    states = [run.state for run in found if run.state is not None]
    if bad := [state for state in states if state.is_final() and not state.is_completed()]:
        raise BenchFailed(f"a flow run ended in {bad[0].name}: {bad[0].message}")
    return (any if some else all)(state.name == name for state in states) and len(states) == len(flow_runs)


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, within_s: float) -> None:
    """Poll until the condition holds.

    Raises:
        BenchFailed: the time is over.
    """
    deadline = time.monotonic() + within_s
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        if time.monotonic() > deadline:
            raise BenchFailed(f"{within_s:.0f} s were over before {what}; logs are in {FOLDER}")
        await asyncio.sleep(0.5)


# --- what processes use ---


@dataclass(frozen=True)
class Memory:
    pss: int
    rss: int
    processes: int


@dataclass(frozen=True)
class Spent:
    """CPU seconds of a process, and of the children it has waited for."""

    own: float
    children: float


def spent(pid: int) -> Spent:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, children = (sum(map(int, fields[first : first + 2])) / TICK for first in (11, 13))
    return Spent(own, children)


def descendants(pid: int) -> list[int]:
    """All processes below one; those that have ended and were not waited for do not count."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                parents[int(path.parent.name)] = int(fields[1])
    return [one for one in parents if pid in _above(one, parents)]


def _above(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while (pid := parents.get(pid, 0)) > 1:
        yield pid


def memory_of(pids: list[int]) -> Memory:
    pss = rss = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            values = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            )
            pss += 1024 * int(values["Pss"].split()[0])
            rss += 1024 * int(values["Rss"].split()[0])
    return Memory(pss, rss, len(pids))


if __name__ == "__main__":
    try:
        main()
    except BenchFailed as error:
        sys.exit(str(error))

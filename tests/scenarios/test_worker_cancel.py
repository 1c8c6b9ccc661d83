"""O4: a run that is cancelled in the UI, in whatever phase it is: no slice, no process, Cancelled, within 30 s."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled, Suspended

from deployments.bench.worker_process import Worker
from tests.scenarios.conftest import Lab
from tests.scenarios.prefect_record import log_with
from tests.scenarios.test_kill_matrix import LARGE
from tests.trainers.gate import Gate
from tpu.checkpoint import files
from tpu.runs.config import RunConfig

# 30 s are promised; this machine may have more to do than one run.
CANCEL_S = 60.0
SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


@dataclass
class Case:
    """A run that is on its way, to be cancelled where it is."""

    lab: Lab
    worker: Worker
    run: RunConfig
    flow_run: UUID

    async def state(self, kind: StateType) -> None:
        """Return once the flow run is in a state of this type."""
        await self.worker.until_flow_run(
            self.flow_run, lambda now: now.state is not None and now.state.type is kind
        )

    async def event(self, kind: str) -> None:
        await self.lab.until(lambda: self.lab.events(self.run.name, kind), kind)

    async def node(self, state: str) -> None:
        await self.lab.until(lambda: self.lab.nodes_in(state), f"a node in {state}")

    async def written(self, path: str) -> None:
        """Return once there is an object whose path in the run's folder begins so."""
        where = f"{self.lab.directory(self.run.name)}/{path}"
        await self.lab.until(
            lambda: any(url.startswith(where) for url in files.names(where.rpartition("/")[0])), path
        )


@dataclass(frozen=True)
class Phase:
    """`there` returns when the run is in it; `hold` keeps it there, `values` are the run's."""

    there: Callable[[Case], Awaitable[None]]
    values: Mapping[str, Any] = field(default_factory=dict)
    hold: Callable[[Lab], None] = lambda lab: None
    verdicts: tuple[str, ...] = ()


async def starting_process(case: Case) -> None:
    await case.worker.until_flow_run(case.flow_run, lambda now: now.infrastructure_pid is not None)


async def training(case: Case) -> None:
    await case.lab.until_step(case.run.name, 20)


async def between(case: Case) -> None:
    await case.lab.until_step(case.run.name, 20)
    await case.lab.preempt()
    await case.event("attempt-ended")


async def after_the_kill(case: Case) -> None:
    await case.lab.until_step(case.run.name, 20)
    case.worker.kill_flow(case.flow_run)
    await case.state(StateType.SCHEDULED)


PHASES = {
    "pending": Phase(lambda case: case.state(StateType.PENDING)),
    "flow starting": Phase(starting_process),
    "opening": Phase(lambda case: case.state(StateType.RUNNING)),
    "provisioning": Phase(lambda case: case.node("CREATING"), hold=lambda lab: lab.emulator.set_delay(600)),
    "syncing": Phase(lambda case: case.event("sync-started")),
    "starting": Phase(
        lambda case: case.event("attempt-started"), {"command": SLEEPS}, verdicts=("cancelled",)
    ),
    "training": Phase(training, verdicts=("cancelled",)),
    "saving": Phase(
        lambda case: case.written("checkpoints/20/1/"), {"variables": LARGE}, verdicts=("cancelled",)
    ),
    "evaluating": Phase(
        lambda case: case.event("evaluation-wait-started"),
        {"steps": 40, "evaluate": "final", "evaluate_command": SLEEPS}, verdicts=("finished",),
    ),
    "cleaning up": Phase(
        lambda case: case.node("DELETING"), {"steps": 40},
        hold=lambda lab: lab.emulator.set_delete_delay(3), verdicts=("finished",),
    ),
    "between preemption and retry": Phase(between, verdicts=("preempted",)),
    "killed and not yet started again": Phase(after_the_kill, verdicts=("cancelled",)),
}  # fmt: skip
# The others are in the long form.
SHORT = {"flow starting", "provisioning", "training"}


async def cancelled(case: Case) -> None:
    """Cancel, and return once nothing is left of the run anywhere."""
    began = time.monotonic()
    await case.worker.cancel(case.flow_run)
    try:
        async with asyncio.timeout(CANCEL_S):
            state = await case.worker.ended(case.flow_run)
            await case.lab.until(
                lambda: not (case.lab.emulator.nodes() or case.lab.emulator.processes()), "nothing"
            )
    finally:
        print(f"== {case.run.name}: {time.monotonic() - began:.1f} s from the cancellation to its end")
    assert state.is_cancelled(), state
    case.lab.assert_nothing_left()


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in PHASES]
)
async def test_O4_cancelled_in_the_ui(worker: Worker, lab: Lab, name: str):
    phase = PHASES[name]
    run = lab.numpy_run(
        name.replace(" ", "-"), **{"steps": 4000, "every": 20, "step_s": 0.05, **phase.values}
    )
    phase.hold(lab)
    case = Case(lab, worker, run, await worker.submit(run))
    await phase.there(case)
    await cancelled(case)
    begun = f"{lab.directory(run.name)}/run.json" in files.names(lab.directory(run.name))
    verdicts = tuple(lab.verdicts(run.name))
    # Between two looks it may have gone on to a gang, which was ended then.
    assert verdicts in (phase.verdicts, (*phase.verdicts, "cancelled")) or not begun
    assert not begun or not lab.fence(run.name).open
    if name == "training":
        assert "Crash" not in await log_with(run.name, "Finished in state Cancelled")


async def test_O4_cancelled_before_a_worker_takes_it_nothing_is_started(worker: Worker, lab: Lab):
    run = lab.numpy_run("too-early", steps=10, every=10)
    with worker.paused():
        flow_run = await worker.submit(run)
        await worker.cancel(flow_run)
    assert (await worker.ended(flow_run)).is_cancelled()
    assert (await worker.flow_run(flow_run)).infrastructure_pid is None
    assert files.names(lab.directory(run.name)) == []


@pytest.mark.slow
async def test_O4_a_flow_that_began_although_it_was_cancelled_does_not_go_on(worker: Worker, lab: Lab):
    """Prefect lets a flow begin that somebody has set to Cancelled while its process started."""
    run = lab.numpy_run("deaf", steps=4000, every=20, step_s=0.05)
    case = Case(lab, worker, run, await worker.submit(run))
    await starting_process(case)
    with worker.paused():
        async with get_client() as client:
            await client.set_flow_run_state(case.flow_run, Cancelled())
        await case.event("attempt-started")
    await cancelled_already(case)


@pytest.mark.slow
async def test_O4_cancelled_while_no_worker_runs_the_flow_hears_it_itself(worker: Worker, lab: Lab):
    run = lab.numpy_run("on-its-own", steps=4000, every=20, step_s=0.05)
    case = Case(lab, worker, run, await worker.submit(run))
    await training(case)
    worker.stop()
    await worker.cancel(case.flow_run)
    await case.state(StateType.CANCELLED)
    lab.assert_nothing_left()
    assert lab.verdicts(run.name) == ["cancelled"]
    worker.start()
    await cancelled_already(case)


async def cancelled_already(case: Case) -> None:
    state = await case.worker.ended(case.flow_run, CANCEL_S)
    assert state.is_cancelled(), state
    case.lab.assert_nothing_left()


async def test_O4_suspended_in_the_ui_it_saves_and_resumed_it_goes_on(
    worker: Worker, lab: Lab, tmp_path: Path
):
    gate = Gate(tmp_path / "gate", before=25)
    run = lab.numpy_run("suspended", steps=40, every=20, variables=gate.variables, grace_seconds=1)
    case = Case(lab, worker, run, await worker.submit(run))
    await training(case)
    async with get_client() as client:
        await client.set_flow_run_state(case.flow_run, Suspended(timeout_seconds=3600))
        await lab.until(lambda: not (lab.emulator.nodes() or lab.emulator.processes()), "nothing")
        await lab.until(lambda: not list(worker.folder.rglob("record.json")), "a worker that is done with it")
        assert (await worker.flow_run(case.flow_run)).state_name == "Suspended"
        gate.open()
        await client.resume_flow_run(case.flow_run)
    assert (await worker.ended(case.flow_run)).is_completed()
    assert lab.verdicts(run.name) == ["cancelled", "finished"]
    lab.assert_as_undisturbed(run)

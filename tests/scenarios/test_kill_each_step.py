"""SIGKILL of the flow at each of its steps; started again it goes on, nothing is done twice and nothing is left."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.bench.chaos.judge import done_twice
from deployments.bench.chaos.warm import Flow, WarmStarts
from tests.scenarios.conftest import WAIT_S, Lab, Pool
from tpu.runs.config import RunConfig
from tpu.runs.evaluation import load_evaluation
from tpu.slices.lease import LeaseState

STEPS, EVERY = 20, 10
# Between two looks: a kill comes before the step that the event announces has got far.
LOOK_S = 0.005


class Stopped:
    """A flow of a run, and what the bucket's own folder and the cloud show of it."""

    def __init__(self, lab: Lab, run: RunConfig, flow: Flow, hold: Path) -> None:
        self.lab, self.run, self.flow, self.hold = lab, run, flow, hold
        self._folder = lab.emulator.state_dir / f"gcs/relay-emulated/runs/{run.name}"

    def after(self, kind: str, delay_s: float = 0.0) -> None:
        """Return `delay_s` after an event of this kind was written."""
        self.until(lambda: kind in self._kinds())
        time.sleep(delay_s)

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert self.flow.poll() is None, self.flow.log.read_text()
            assert time.monotonic() < end, self.flow.log.read_text()
            time.sleep(LOOK_S)

    def until_node(self, state: str) -> None:
        self.until(lambda: self.lab.nodes_in(state))

    def until_written(self, path: str) -> None:
        self.until(lambda: any(self._folder.glob(path)))

    def _kinds(self) -> set[str]:
        kinds = set()
        for file in self._folder.glob("events/*.json"):
            try:
                kinds.add(json.loads(file.read_bytes())["kind"])
            except ValueError:
                continue  # it is being written
        return kinds


def refused(stopped: Stopped) -> None:
    """The intent is written, and the cloud refuses to hear of it."""
    stopped.lab.emulator.fail_next("CreateQueuedResource", "UNAVAILABLE", "try again", times=4)
    stopped.after("slice-intended", 0.5)


def creating(stopped: Stopped) -> None:
    stopped.lab.emulator.set_delay(2)
    stopped.until_node("CREATING")


def deleting(stopped: Stopped) -> None:
    stopped.lab.emulator.set_delete_delay(1)
    stopped.until_node("DELETING")


MOMENTS: dict[str, tuple[Callable[[Stopped], None], int, set[int]]] = {
    # Where it is killed; how many slices are asked for in all; how many attempts there may be.
    "opening": (lambda stopped: stopped.after("driver-started"), 1, {1}),
    "intending": (lambda stopped: stopped.after("slice-intended"), 2, {1}),
    "refused": (refused, 2, {1}),
    "creating": (creating, 1, {1}),
    "ready": (lambda stopped: stopped.after("slice-ready"), 1, {1}),
    "syncing": (lambda stopped: stopped.after("sync-started", 0.05), 1, {1}),
    "starting": (lambda stopped: stopped.after("attempt-started"), 1, {2}),
    "training": (lambda stopped: stopped.until_written("checkpoints/10/1/manifest.json"), 1, {1}),
    "saving": (lambda stopped: stopped.until_written("checkpoints/10/1/*"), 1, {1}),
    "evaluating": (lambda stopped: stopped.until(lambda: stopped.hold.with_name("evaluated").exists()), 1, {1}),
    "concluding": (lambda stopped: stopped.after("attempt-ended"), 1, {1}),
    "deleting": (deleting, 1, {1}),
    "reporting": (lambda stopped: stopped.after("slice-deleted"), 1, {1}),
}  # fmt: skip


# Each commit is held to the steps themselves; the moments between them are in the long form.
BETWEEN = {"opening", "intending", "refused", "ready", "concluding", "reporting"}


@pytest.mark.parametrize(
    "moment", [pytest.param(m, marks=pytest.mark.slow) if m in BETWEEN else m for m in MOMENTS]
)
async def test_O1_killed_at_each_step_it_goes_on_with_nothing_twice_and_nothing_left(
    lab: Lab, warm_flows: WarmStarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    kill_there, slices, attempts = MOMENTS[moment]
    hold = tmp_path / "hold"
    environment = {"EVALUATED": str(tmp_path / "evaluated"), "HOLD": str(hold)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = lab.numpy_run(
        f"killed-{moment}", steps=STEPS, every=EVERY, step_s=0.04, evaluate="final",
        evaluate_command=[sys.executable, "-m", "tests.trainers.evaluator"],
    )  # fmt: skip
    if moment == "evaluating":
        hold.touch()
    file = tmp_path / "run.yaml"
    file.write_text(run.model_dump_json())
    flow = warm_flows.start([str(file)], Path.cwd(), tmp_path / "flow.log", **environment)
    try:
        await asyncio.to_thread(kill_there, Stopped(lab, run, flow, hold))
    finally:
        flow.kill()
    assert flow.wait() < 0, flow.log.read_text()

    lab.emulator.set_delay(0)
    lab.emulator.set_delete_delay(0)
    hold.unlink(missing_ok=True)
    report = await lab.train(run)
    assert report["verdict"] == "finished"
    assert list(done_twice(lab.events(run.name), deaths=1)) == []
    assert len(lab.events(run.name, "attempt-started")) in attempts
    assert len(lab.events(run.name, "slice-intended")) <= slices
    assert load_evaluation(lab.directory(run.name), STEPS) is not None
    # An answer that died with the flow is asked for once more.
    assert len((tmp_path / "evaluated").read_text().split()) <= 2
    lab.assert_as_undisturbed(run)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param("slice-leased", marks=pytest.mark.slow),
        pytest.param("attempt-started", marks=pytest.mark.slow),
        pytest.param("attempt-ended", marks=pytest.mark.slow),
        "slice-released",
    ],
)
async def test_O1_killed_with_a_slice_of_the_pool_it_takes_it_up_through_its_lease(
    lab: Lab, pool: Pool, warm_flows: WarmStarts, tmp_path: Path, after: str
):
    await pool.set(idle_minutes=5)
    await lab.train(lab.numpy_run("before", steps=2, every=2, step_s=0.0))
    (idle,) = lab.ready_nodes()
    run = lab.numpy_run(f"held-{after}", steps=STEPS, every=EVERY, step_s=0.04)
    file = tmp_path / "run.yaml"
    file.write_text(run.model_dump_json())
    flow = warm_flows.start([str(file)], Path.cwd(), tmp_path / "flow.log")
    try:
        stopped = Stopped(lab, run, flow, tmp_path / "hold")
        await asyncio.to_thread(stopped.after, after)
    finally:
        flow.kill()
    assert flow.wait() < 0, flow.log.read_text()

    await lab.train(run)
    assert list(done_twice(lab.events(run.name), deaths=1)) == []
    # It was had once, from the pool; nobody made another one, and it is back there for the next.
    assert lab.events(run.name, "slice-intended") == []
    assert {event.detail["slice"] for event in lab.events(run.name, "slice-leased")} == {idle}
    assert len(lab.events(run.name, "attempt-started")) <= (2 if after == "attempt-started" else 1)
    assert lab.ready_nodes() == [idle]
    (lease,) = await pool.leases()
    assert (lease.state, lease.holders) == (LeaseState.READY, ())
    lab.assert_as_undisturbed(run)

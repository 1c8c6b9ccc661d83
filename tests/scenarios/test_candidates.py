"""Several ways to a slice, seen from the flow: failover, races, what is refused, and why it waits."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from deployments.bench.chaos.warm import WarmStarts
from tests.scenarios.conftest import STAYS, Lab
from tests.scenarios.terminal import started
from tpu.cloud import CloudError, ErrorKind
from tpu.runs.config import RunConfig
from tpu.runs.showing import status_of

KIND = "v6e-1"
FIRST, SECOND, ABROAD = "us-east5-a", "us-east5-b", "europe-west4-a"


def run_of(
    lab: Lab, name: str, *zones: str, steps: int = 10, variables: dict[str, str] | None = None, **slice: Any
) -> RunConfig:
    wanted = {
        "accelerator_type": KIND,
        "zone": zones[0],
        "candidates": [{"zone": zone} for zone in zones],
        "price_an_hour": 1.0,
    }
    return lab.numpy_run(name, steps=steps, every=10, variables=variables or {}, slice=wanted | slice)


def zones_in(lab: Lab, name: str, kind: str) -> list[str]:
    """Zones of the slices of these events."""
    zone = {e.detail["slice"]: e.detail["zone"] for e in lab.events(name, "slice-intended")}
    return [zone[event.detail["slice"]] for event in lab.events(name, kind)]


def block(lab: Lab, *zones: str) -> None:
    """Let whoever asks there wait in the queue for ever."""
    for zone in zones:
        lab.emulator.set_capacity(zone, KIND, 0)


async def test_V1_a_sold_out_zone_is_left_for_the_next_and_a_preemption_asks_the_first_again(lab: Lab):
    run = run_of(lab, "failover", FIRST, SECOND, steps=30, variables=STAYS)
    lab.emulator.stockout(FIRST, KIND)
    async with lab.training(run) as task:
        await lab.until_step(run.name, 10, task)
        assert zones_in(lab, run.name, "slice-ready") == [SECOND]
        lab.emulator.stockout(FIRST, KIND, on=False)
        lab.emulator.stockout(SECOND, KIND)
        await lab.preempt(run)
    assert zones_in(lab, run.name, "slice-ready") == [SECOND, FIRST]
    assert lab.verdicts(run.name) == ["preempted", "finished"]
    lab.assert_as_undisturbed(run)


@pytest.mark.parametrize("then", ["goes on", pytest.param("is killed", marks=pytest.mark.slow)])
async def test_V6_the_winner_of_a_race_trains_while_the_loser_is_deleted(
    lab: Lab, warm_flows: WarmStarts, tmp_path: Path, then: str
):
    run = run_of(lab, f"race-{then.replace(' ', '-')}", FIRST, SECOND, race=2)
    block(lab, FIRST, SECOND)
    lab.emulator.set_delete_delay(8)
    file = tmp_path / "run.yaml"
    file.write_text(run.model_dump_json())
    flow = warm_flows.start([str(file)], Path.cwd(), tmp_path / "flow.log")
    try:
        await lab.until(lambda: len(lab.emulator.queued_resources()) == 2, "both are asked for")
        lab.emulator.set_capacity(SECOND, KIND, None)
        await lab.until(lambda: lab.events(run.name, "attempt-started"), "the start")
        lab.emulator.set_delete_delay(0)
        assert zones_in(lab, run.name, "slice-deleted") == []
        if then == "is killed":
            flow.kill()
        await asyncio.to_thread(flow.wait)
    finally:
        flow.kill()
    if then == "is killed":
        await lab.train(run)
    assert zones_in(lab, run.name, "slice-ready") == [SECOND]
    assert sorted(zones_in(lab, run.name, "slice-intended")) == [FIRST, SECOND]
    # Confirmed before the run is over, by whoever drives it then.
    assert sorted(zones_in(lab, run.name, "slice-deleted")) == [FIRST, SECOND]
    lab.assert_nothing_left()
    lab.assert_as_undisturbed(run)


@pytest.mark.parametrize("then", ["goes on", pytest.param("is cancelled", marks=pytest.mark.slow)])
async def test_V6_a_flow_that_died_in_a_race_left_slices_of_which_one_is_used_and_none_is_left(
    lab: Lab, tmp_path: Path, then: str
):
    run = run_of(lab, f"died-{then.replace(' ', '-')}", FIRST, SECOND, race=2)
    block(lab, FIRST, SECOND)
    file = tmp_path / "run.yaml"
    file.write_text(run.model_dump_json())
    async with started(tmp_path, str(file)) as flow:
        await lab.until(lambda: len(lab.emulator.queued_resources()) == 2, "both are asked for")
        flow.signal(signal.SIGKILL)
        await flow.exit_code()
    # One of them becomes ready while nobody looks.
    lab.emulator.set_capacity(SECOND, KIND, None)
    await lab.until(lab.ready_nodes, "one is ready")
    task = asyncio.create_task(lab.train(run))
    if then == "goes on":
        await task
        assert zones_in(lab, run.name, "slice-ready") == [SECOND]
        assert len(lab.events(run.name, "slice-intended")) == 2  # and no third
        lab.assert_as_undisturbed(run)
    else:
        await lab.until(lambda: len(lab.events(run.name, "driver-started")) == 2, "the second start", task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert sorted(zones_in(lab, run.name, "slice-deleted")) == [FIRST, SECOND]
    lab.assert_nothing_left()


async def test_V7_cancelled_in_a_race_both_are_gone_when_the_flow_ends(lab: Lab):
    run = run_of(lab, "race-cancelled", FIRST, SECOND, race=2)
    block(lab, FIRST)
    lab.emulator.set_delay(30)
    task = asyncio.create_task(lab.train(run))
    await lab.until(
        lambda: lab.nodes_in("CREATING") and len(lab.emulator.queued_resources()) == 2, "both", task
    )
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    lab.assert_nothing_left()
    assert sorted(zones_in(lab, run.name, "slice-deleted")) == [FIRST, SECOND]


async def test_while_it_waits_another_process_can_see_why(lab: Lab):
    run = run_of(lab, "waits", FIRST, SECOND, "us-east1-d", race=2)
    block(lab, FIRST)
    lab.emulator.stockout(SECOND, KIND)
    lab.emulator.set_quota("us-east1-d", KIND, 0)
    directory = lab.directory(run.name)
    async with lab.training(run) as task:

        def told() -> list[str] | None:
            lines = status_of(directory) if lab.events(run.name) else []
            return lines if len(lines) == 5 and "given up" in lines[4] else None

        lines = await lab.until(told, "a sentence for each", task)
        assert lines[0].startswith("waits: driven by process")
        assert lines[1].startswith("waits for a slice (as of ")
        assert lines[2] == f"  spot {KIND} in {FIRST}: waiting for capacity"
        assert lines[3].startswith(f"  spot {KIND} in {SECOND}: ")
        assert "TPUV6EPreemptiblePerProjectPerRegionForTPUAPI" in lines[4]
        lab.emulator.set_capacity(FIRST, KIND, None)
    (line,) = status_of(directory)
    assert line.startswith("waits: finished; step 10 of 10")


async def test_V13_a_candidate_abroad_is_refused_before_anything_is_made(lab: Lab):
    run = run_of(lab, "abroad", FIRST, ABROAD)
    with pytest.raises(
        CloudError, match=r"the bucket is in us.*\$0\.05 a GB.*allow_regions=\[europe-west4\]"
    ) as caught:
        await lab.train(run)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert lab.events(run.name, "slice-intended") == []
    assert status_of(lab.directory(run.name))[0].startswith("abroad: failed: no slice: ")


async def test_V13_allowed_by_name_its_traffic_is_in_the_ledger(lab: Lab):
    run = run_of(lab, "abroad-allowed", ABROAD, steps=20, allow_regions=["europe-west4"])
    report = await lab.train(run)
    assert report["verdict"] == "finished"
    (egress,) = lab.events(run.name, "egress")
    assert egress.detail["egress_gb"] > 0
    assert egress.detail["dollars"] == pytest.approx(0.05 * egress.detail["egress_gb"])
    assert egress.detail["slice"] == lab.events(run.name, "slice-ready")[0].detail["slice"]


async def test_V14_hosts_that_could_not_be_reached_are_not_made(lab: Lab):
    run = run_of(lab, "no-address", FIRST, external_ips=False)
    with pytest.raises(CloudError, match="set TPU_RELAY_SSH_ROUTE to internal"):
        await lab.train(run)
    assert lab.events(run.name, "slice-intended") == []


async def test_a_zone_without_queued_resources_trains_on_a_plain_node(lab: Lab):
    run = run_of(lab, "plain", FIRST, steps=30, variables=STAYS)
    lab.emulator.set_queues(FIRST, False)
    async with lab.training(run) as task:
        await lab.until_step(run.name, 10, task)
        assert lab.emulator.queued_resources() == []
        await lab.preempt(run)
    assert lab.verdicts(run.name) == ["preempted", "finished"]
    lab.assert_as_undisturbed(run)

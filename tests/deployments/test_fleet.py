"""The fleet bench in short: nothing leaks, a seed comes again, the judge sees what it is there to see."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deployments.bench import fleet
from deployments.bench.fleet_judge import Audit, Held, held_by, idle_s
from deployments.bench.fleet_runs import HOUR, Run, Stay, Work, kept_s, make_runs
from deployments.bench.fleet_scale import measure
from tpu.clock import Clock
from tpu.cloud import NodeRequest, QueuedResourceRequest
from tpu.emulator.simulation import Simulation, simulate
from tpu.emulator.simulation_clock import VirtualClock
from tpu.emulator.simulation_hosts import ScriptedAt, ScriptedHost
from tpu.emulator.simulation_weather import (
    TYPICAL,
    HostWeather,
    Lognormal,
    PlaceWeather,
    Weather,
    stream,
)

# Some hours in weather so rough that all happens in them.
HOURS = replace(
    fleet.SHORT,
    steady=1, spot=5, spot_a_zone=2, runs=30, median_run_s=HOUR / 2, hours=12.0, keeper_killed_every_s=HOUR / 2,
    weather=replace(
        TYPICAL,
        hosts=HostWeather(Lognormal(150, 0.6), mean_life_s=HOUR, mean_to_hang_s=10 * HOUR),
        places=PlaceWeather(every_s=2 * HOUR, lasts_s=HOUR / 4, takes_share=0.5),
    ),
)  # fmt: skip


def without_cpu(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "cpu_s"}


def test_a_fleet_leaks_nothing_though_its_keeper_is_killed_and_comes_again_from_its_seed():
    found = fleet.our_week(HOURS)
    assert found["leaked_slice_hours"] == 0
    assert found["left_in_cloud"] == 0
    assert found["runs_finished"] == 30
    assert found["happened"]["preempt"] >= 2
    assert found["keeper_killed"] >= 2
    assert found["calls_a_minute"]["create"]["most"] <= 91
    trained_h = sum(run.length_s for run in HOURS.make_runs()) / HOUR
    assert found["productive_chip_hours"] == pytest.approx(trained_h, abs=0.1)
    assert 0 < found["goodput"] <= found["goodput_of_a_run"] <= 1
    assert without_cpu(fleet.our_week(HOURS)) == without_cpu(found)
    assert without_cpu(fleet.our_week(replace(HOURS, seed=2))) != without_cpu(found)


def test_the_peer_trains_the_same_runs():
    found = fleet.week_by_hand(replace(HOURS, hours=60.0))
    trained_h = sum(run.length_s for run in HOURS.make_runs()) / HOUR
    assert found["runs_finished"] == 30
    assert found["productive_chip_hours"] == pytest.approx(trained_h, abs=0.1)


def test_lists_do_not_grow_with_the_fleet():
    small, large = (measure(size, fleet.SPOT, TYPICAL, 1, 0.2) for size in (30, 120))
    assert small["lists_a_minute_and_zone"] == pytest.approx(large["lists_a_minute_and_zone"], rel=0.05)
    assert large["ready_mean"] > 110


@pytest.mark.parametrize(
    ("orphan_is_known", "died", "leaked_minutes"),
    [(True, False, 0), (False, False, 60), (True, True, 50)],
)
def test_the_audit_finds_what_nobody_knows_and_what_is_dead_and_not_deleted(
    orphan_is_known, died, leaked_minutes
):
    life_s = 60.0 if died else None
    weather = Weather(hosts=HostWeather(mean_life_s=life_s))

    async def story(simulation: Simulation) -> float:
        async def known(zone: str, name: str) -> bool:
            return orphan_is_known

        node = NodeRequest(fleet.KIND, "v2-alpha-tpuv6e", "spot", intent="orphan")
        await simulation.cloud.create_queued_resource(fleet.ZONES[0], "orphan", QueuedResourceRequest(node))
        await simulation.clock.sleep(3000)
        audit = Audit(simulation, known)
        auditing = asyncio.create_task(audit.run())
        await simulation.clock.sleep(HOUR + 1)
        auditing.cancel()
        return audit.leaked_s / 60

    assert simulate(story, seed=1, weather=weather) == leaked_minutes


def test_held_and_idle_time():
    history = [(0.0, "boot a/b"), (5.0, "stockout x"), (10.0, "boot a/c"), (60.0, "down a/b")]
    held = held_by(history, 100.0)
    assert held == [Held("b", 0.0, 60.0), Held("c", 10.0, 100.0)]
    stays = [Stay("r", "b", 10, 30, 0), Stay("s", "b", 20, 25, 0), Stay("t", "b", 40, 80, 0)]
    assert idle_s(held, stays) == 10 + 10 + 90


def host(**events: float) -> ScriptedHost:
    clock: Clock = VirtualClock()
    made = ScriptedHost(ScriptedAt(0, "10.0.0.1"), clock, ssh_s=1.0)
    for name, at in events.items():
        setattr(made, name, at)
    return made


@pytest.mark.parametrize(
    ("events", "now", "kept"),
    [
        ({}, 1250.0, 1100.0),  # all of it: it is finished
        ({}, 750.0, 600.0),  # two checkpoints of 300 s
        ({"dead_at": 750.0}, 900.0, 600.0),
        ({"hung_at": 450.0, "dead_at": 1900.0}, 1900.0, 300.0),
        ({"noticed_at": 700.0, "dead_at": 730.0}, 732.0, 600.0),  # it has saved itself: see below
        ({"noticed_at": 850.0, "dead_at": 880.0}, 882.0, 750.0),
        ({"noticed_at": 850.0, "dead_at": 852.0}, 882.0, 600.0),  # no time to save
        ({"noticed_at": 850.0, "hung_at": 800.0, "dead_at": 880.0}, 882.0, 600.0),
    ],
)
def test_what_a_run_keeps(events, now, kept):
    run = Run("r", length_s=1200.0, done_s=100.0)
    assert kept_s(run, host(**events), 100.0, now, Work(checkpoint_s=300.0, save_s=5.0)) == kept


def test_a_run_that_wakes_at_its_end_is_finished_also_late_in_a_week():
    clock = 525_000.0
    for run in make_runs(500, 20 * HOUR, stream(1, "late")):
        first_step = clock + run.length_s / 7
        now = clock + (first_step + run.length_s - clock)  # as the loop's timer has it
        assert kept_s(run, host(), first_step, now, Work()) == run.length_s


def test_a_run_that_hears_no_notice_keeps_its_last_checkpoint():
    run = Run("r", length_s=1200.0)
    work = Work(checkpoint_s=300.0, hears_notice=False)
    assert kept_s(run, host(noticed_at=850.0, dead_at=880.0), 100.0, 882.0, work) == 600.0


def test_runs_have_the_lengths_that_were_asked_for():
    lengths = sorted(run.length_s for run in make_runs(5000, 20 * HOUR, stream(1, "runs")))
    assert lengths[2500] == pytest.approx(20 * HOUR, rel=0.05)
    assert lengths[0] > 0
    assert lengths[-1] == 60 * HOUR


def test_a_run_is_finished_however_its_seconds_add_up():
    luck = stream(1, "pieces")
    for run in make_runs(200, 20 * HOUR, luck):
        assert not run.keep(Stay(run.name, "node", 0, 1, run.length_s * luck.random() / 2))
        assert run.keep(Stay(run.name, "node", 0, 1, run.left_s))

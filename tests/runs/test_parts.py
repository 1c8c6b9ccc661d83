"""Runs over several slices: what is refused, what each slice's part is told, and one report of all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.test_trainer import TINY_ICL
from tpu.elastic.part import Role
from tpu.hosts.address import HostAddress
from tpu.hosts.gang import Tenant
from tpu.runs.config import RunConfig, RunConfigError, parse_run_config
from tpu.runs.event_log import RunEvent
from tpu.runs.launch import gang_spec
from tpu.runs.parts import Part, part_config, part_names, role_of
from tpu.runs.record import RunRecord, check_same
from tpu.runs.report import make_report
from tpu.runs.report_of_parts import with_parts
from tpu.runs.sync import Installed
from tpu.slices.request import SliceRequest

OWN = {"command": "python train.py", "contract": True}


def config(**values: Any) -> RunConfig:
    return parse_run_config({"name": "r", "steps": 40, "mode": "elastic", "slices": 3} | (OWN | values))


def record_of(run: RunConfig) -> RunRecord:
    return RunRecord(run, None, {"source": "here", "sha256": "5" * 64}, 0.0)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"mode": None}, "slices: 3 slices need a mode: write `mode: elastic`"),
        ({"mode": None, "slices": 1, "elastic": {}}, "no mode is given"),
        ({"mode": "spmd"}, "mode: spmd is not offered yet"),
        (
            {"mode": "spmd", "slice": {"accelerator_type": "v3-8"}},
            "v3-8 does not support one program over several",
        ),
        ({"elastic": {"units": 2}}, "2 work units cannot be shared by 3 slices"),
        ({"elastic": {"least_slices": 4}}, "least_slices: 4 are more than the run's 3 slices"),
        ({"elastic": {"unit_devices": 8}}, "a v4-8 has 4 chips"),
        ({"name": "a" * 33}, "at most 32 characters with a mode"),
        ({"contract": False}, "mode: elastic needs a command that takes part"),
        ({"slice": {"chips": 1}}, "takes whole slices"),
        ({"slice": {"accelerator_type": "v4-16"}}, "v4-16 has 2 hosts"),
        ({"framework": "xla"}, "for JAX programs"),
        (
            {"command": None, "contract": False, "training": TINY_ICL | {"shard_parameters": True}},
            "whole parameters",
        ),
        (
            {"command": None, "contract": False, "training": TINY_ICL, "elastic": {"units": 7}},
            "cannot be cut into 7",
        ),
        ({"slices": 65}, "slices"),
    ],
)
def test_what_several_slices_cannot_do_is_refused_in_one_sentence(values: dict[str, Any], told: str):
    with pytest.raises(RunConfigError) as refused:
        config(**values)
    assert told in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_how_many_slices_there_are_is_no_other_run_but_how_a_step_is_cut_is():
    check_same(record_of(config(slices=3)), record_of(config(slices=1)))
    with pytest.raises(ValueError, match=r"elastic\.units: 8 → 24"):
        check_same(record_of(config()), record_of(config(elastic={"units": 24})))


def test_a_part_is_a_run_without_what_the_run_does_itself():
    run = config(
        max_cost=5, slice={"price_an_hour": 1.0}, checkpoints={"every": 10}, evaluate_command="python e.py"
    )
    assert part_names(run) == ["r-slice0", "r-slice1", "r-slice2"]
    part = part_config(record_of(run), "gs://b/runs/r", 2)
    assert (part.name, part.slices, part.mode, part.max_cost, part.commits) == (
        "r-slice2",
        1,
        None,
        None,
        False,
    )
    assert part.code == f"gs://b/runs/r/code/{'5' * 64}.tar.gz"
    assert part_names(part) == []


def test_G3_a_part_is_told_its_role_and_all_of_megascale_is_set():
    whole = record_of(config(checkpoints={"every": 10}))
    part = Part(whole, "gs://b/runs/r", 1)
    role = Role.of({"elastic": role_of(part, "a-node")})
    assert (role.title, role.names) == ("slice1 on a-node", ("slice0", "slice1", "slice2"))
    assert role.stuck_s < whole.config.progress_minutes * 60
    host = HostAddress("a-node", 0, "10.0.0.1")
    request = SliceRequest("us-central2-b", "v4-8")
    ready: Any = SimpleNamespace(
        name="a-node", request=request, hosts=(host,)
    )  # of the node nothing is asked
    installed = Installed("/home/code", ("/home/code",), "/venv/bin/python", "/venv/bin")
    spec = gang_spec(
        RunRecord(part_config(whole, "gs://b/runs/r", 1), None, whole.code, 0.0, part_of="r"),
        "gs://b/runs/r-slice1", 3, None, ready, Tenant(1, (0, 1, 2, 3)), installed, {}, part=part,
    )  # fmt: skip
    told = spec.environments[host]
    assert {name: told[name] for name in told if name.startswith("MEGASCALE_")} == dict.fromkeys(
        ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_PORT", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"), ""
    )
    assert (told["RELAY_RUN_DIR"], told["RELAY_STOP_STEPS"]) == ("gs://b/runs/r", "10,20,30,40")
    assert told["RELAY_ATTEMPT"] == "3"
    assert spec.argv[-2:] == ["python", "train.py"]


def test_the_report_sums_the_slices_to_the_wall_time_and_names_their_attempts():
    run = config(slices=2)

    def history(slice_name: str, price: float, ended: float, verdict: str, upto: int) -> list[RunEvent]:
        candidate = {
            "zone": "us-central2-b", "accelerator_type": "v4-8", "provisioning": "spot", "price_an_hour": price,
        }  # fmt: skip
        end = {
            "attempt": 1, "slice": slice_name, "verdict": verdict, "reason": "", "evidence": [], "last_commit": None,
            "phases": [(20.0, "step")], "ended": ended, "resume": 0, "reached": upto, "steps": 40,
            "waste_from": None, "commits": [],
        }  # fmt: skip
        return [
            RunEvent(0.0, "driver-started", {}),
            RunEvent(0.0, "slice-wanted", {}),
            RunEvent(0.0, "slice-intended", {"slice": slice_name, "chips": [0, 1, 2, 3], **candidate}),
            RunEvent(10.0, "slice-ready", {"slice": slice_name}),
            RunEvent(20.0, "attempt-started", {"attempt": 1, "slice": slice_name, "resume": None}),
            RunEvent(ended, "attempt-ended", end),
            RunEvent(ended, "slice-deleted", {"slice": slice_name, "why": "done"}),
        ]

    own = [RunEvent(0.0, "driver-started", {})]
    made = make_report(record_of(run), own, 40, None, {}, [], None, 100.0, False)
    parts = [history("a", 3600.0, 60.0, "preempted", 20), history("b", 3600.0, 100.0, "finished", 40)]
    report = with_parts(made, parts, 40, 100.0)
    assert report.wall_s == pytest.approx(100.0)
    assert report.seconds["step"] == pytest.approx((40 + 80) / 2)
    assert report.ledger.dollars == pytest.approx(50 + 90)
    assert [one["attempt"] for one in report.attempts] == ["slice0.1", "slice1.1"]
    assert [end for row in report.segments for end in row.ends] == ["slice0.1: preempted"]
    assert [bar.slice for bar in report.timeline.bars] == ["a", "b"]

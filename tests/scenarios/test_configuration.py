"""What is refused before anything is made, and what the cloud refuses: one clear error, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.arguments import describe, train_from_terminal
from flows.train import train
from tests.scenarios.conftest import Lab
from tests.scenarios.prefect_record import flow_runs, log_with
from tests.scenarios.terminal import said
from tpu.checkpoint import files
from tpu.checkpoint.objects import BucketUnusable
from tpu.cloud import CloudError, ErrorKind
from tpu.connection import Connection
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runs.driver import AttemptEnded

GOOD = "name: wrong\ncommand: python train.py\nsteps: 10\n"
# Nobody listens there: whatever is called fails loudly.
NOBODY = {
    "TPU_RELAY_API_ENDPOINT": "127.0.0.1:9",
    "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9",
    "PREFECT_API_URL": "http://127.0.0.1:9/api",
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    return file


@pytest.fixture
def folder(tmp_path: Path, good: Path) -> Path:
    """Files that are wrong in one way each, beside a good one."""
    for name, content in {
        "binary": b"\xff\xfe\x00",
        "broken": b"name: [\n",
        "list": b"- 1\n",
        "empty": b"",
        "field": GOOD.encode() + b"stepz: 3\n",
        "two": GOOD.encode() + b"seed: -1\nslice: {accelerator_type: v4-9}\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "give a configuration file"),
        ("missing.yaml", "cannot read missing.yaml"),
        (".", "cannot read ."),
        ("binary.yaml", "is not a text file"),
        ("broken.yaml", "is not YAML"),
        ("list.yaml", "is a mapping of fields"),
        ("empty.yaml --set name=x", "is a mapping of fields"),
        ("field.yaml", "stepz: there is no such field"),
        ("two.yaml", "slice.accelerator_type"),
        ("good.yaml --set steps", "write FIELD=VALUE"),
        ("good.yaml --set steps=[", "steps: the value is not YAML"),
        ("good.yaml --set steps=0", "steps: Input should be greater than or equal to 1 (found 0)"),
        ("good.yaml --resume wrong", "give a configuration file"),
        ("--resume wrong --set steps=5", "relay fork wrong@STEP"),
        ("good.yaml --no-such-option", "unrecognized arguments"),
        ("good.yaml", "no project: set TPU_RELAY_PROJECT"),
    ],
)
def test_wrong_arguments_are_one_clear_error_and_exit_code_2(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    words: str,
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["flows.train", *arguments.split()])
    for name, value in (NOBODY | {"TPU_RELAY_PROJECT": "", "GOOGLE_CLOUD_PROJECT": ""}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        train_from_terminal(train)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


async def test_a_process_without_arguments_ends_with_2_and_no_traceback(tmp_path: Path):
    code, output = await said(tmp_path, environment=NOBODY)
    assert code == 2
    assert output.count("\n") == 1, output
    assert "give a configuration file" in output


def test_a_dry_run_says_what_would_be_made_and_calls_nothing(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        "sys.argv",
        ["flows.train", str(good), "--dry-run", "--set", "slice.price_an_hour=12.88", "--name", "other"],
    )
    for name, value in (NOBODY | {"TPU_RELAY_PROJECT": "", "TPU_RELAY_BUCKET": ""}).items():
        monkeypatch.setenv(name, value)
    train_from_terminal(train)
    output = capsys.readouterr().out
    for words in (
        "run        other: python train.py\n",
        "segments   one: the command is started again until it exits 0",
        "spot v4-8 in us-central2-b: 4 chips, 1 host",
        "$12.88 an hour",
        "nothing was made",
    ):
        assert words in output


def test_a_dry_run_shows_every_candidate_with_its_price_and_what_would_be_refused():
    run = parse_run_config(
        {
            "name": "many",
            "command": "python train.py",
            "slice": {
                "accelerator_type": "v6e-8",
                "zone": "us-east5-a",
                "price_an_hour": 8.2,
                "candidates": [{}, {"zone": "europe-west4-a"}, {"provisioning": "on-demand"}],
                "race": 2,
                "external_ips": False,
            },
        }
    )
    lines = describe(run, Connection("p", "gs://b", grant="v6e:us-east5-a:spot=16")).splitlines()
    assert [line[11:] for line in lines[1:6]] == [
        "1. spot v6e-8 in us-east5-a: 8 chips, 1 host(s), image v2-alpha-tpuv6e, $8.20 an hour",
        "2. spot v6e-8 in europe-west4-a: 8 chips, 1 host(s), image v2-alpha-tpuv6e, $8.20 an hour",
        "3. on-demand v6e-8 in us-east5-a: 8 chips, 1 host(s), image v2-alpha-tpuv6e, price not known: set "
        "price_an_hour",
        "2 are asked at once, and the first that is ready is kept; each waits 10 minutes in its zone's queue before "
        "the next",
        "given up when none is ready after 90 minutes",
    ]
    refused = [line for line in lines if line.startswith("refused")]
    assert len(refused) == 3
    assert "slice.external_ips is false" in refused[0]
    assert "spot v6e-8 in europe-west4-a: the grant" in refused[1]
    assert "on-demand v6e-8 in us-east5-a: the grant" in refused[2]


async def test_a_bucket_that_is_not_there_is_named_and_nothing_is_made(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TPU_RELAY_BUCKET", "gs://not-there")
    with pytest.raises(BucketUnusable, match="there is no bucket gs://not-there: create it, or set"):
        await lab.train(lab.numpy_run("no-bucket"))


async def test_a_damaged_record_is_one_line(lab: Lab, tmp_path: Path):
    files.write(f"{lab.directory('damaged')}/run.json", b"[1")
    code, output = await said(tmp_path, "--resume", "damaged")
    assert code == 2
    assert output.count("\n") == 1, output
    assert "run.json cannot be understood" in output


async def test_V1_a_stockout_that_ends_costs_no_budget(lab: Lab):
    budget = {"infrastructure": 0, "preemption": 0, "user_failure": 0}
    run = lab.numpy_run("stockout", steps=10, every=10, budget=budget)
    lab.emulator.stockout("us-central2-b", "v4-8")
    async with lab.training(run) as task:
        await lab.until(lambda: len(lab.events(run.name, "provision-failed")) >= 1, "a refusal", task)
        lab.emulator.stockout("us-central2-b", "v4-8", on=False)
    assert lab.verdicts(run.name) == ["finished"]
    assert "no more capacity" in lab.events(run.name, "provision-failed")[0].detail["reason"]
    lab.assert_as_undisturbed(run)


async def test_V4_a_cloud_that_refuses_for_longer_than_the_deadline_ends_the_run(lab: Lab):
    run = lab.numpy_run("no-slice", steps=10, every=10, slice={"ready_minutes": 0.05})
    lab.emulator.stockout("us-central2-b", "v4-8")
    with pytest.raises(
        CloudError, match=r"none within 0.05 minutes: spot v4-8 in us-central2-b: .*no capacity"
    ):
        await lab.train(run)
    assert len(lab.events(run.name, "provision-failed")) >= 2


async def refused_for_good(lab: Lab, run: RunConfig, kind: ErrorKind, asked: int) -> str:
    """The run fails by one refusal, after `asked` slices were asked for; returns what was said."""
    with pytest.raises(CloudError) as refused:
        await lab.train(run)
    assert refused.value.kind is kind
    assert len(lab.events(run.name, "slice-intended")) == asked
    (flow_run,) = await flow_runs(run.name)
    assert flow_run.state is not None
    assert flow_run.state.is_failed()
    return str(refused.value)


async def test_V2_no_quota_is_one_error_and_nothing_is_left(lab: Lab):
    lab.emulator.set_quota("us-central2-b", "v4-8", 0)
    said = await refused_for_good(lab, lab.numpy_run("no-quota"), ErrorKind.NO_QUOTA, asked=1)
    assert "Quota limit" in said
    assert "Limit: 0" in said


@pytest.mark.parametrize(
    ("slice", "kind", "words"),
    [
        ({"zone": "us-east5-b"}, ErrorKind.NOT_OFFERED, "us-east5-b has no accelerator type v4-8"),
        ({"zone": "us-east5-z"}, ErrorKind.PERMISSION, "us-east5-z"),
        ({"runtime_version": "tpu-windows"}, ErrorKind.NOT_OFFERED, "us-central2-b has no image tpu-windows"),
    ],
    ids=["type", "zone", "image"],
)
async def test_V11_what_the_zone_does_not_have_is_one_error_before_anything_is_made(
    lab: Lab, slice: dict[str, str], kind: ErrorKind, words: str
):
    run = lab.numpy_run(f"not-offered-{next(iter(slice))[0]}{kind.name[0].lower()}", slice=slice)
    said = await refused_for_good(lab, run, kind, asked=0)
    assert words in said
    assert (await log_with(run.name, said, "Finished in state Failed")).count(said) == 1


async def test_requirements_that_are_not_there_or_cannot_be_had_name_the_file(lab: Lab, program_folder: Path):
    (program_folder / "bad.txt").write_text("./no-such-wheel-1.0-py3-none-any.whl\n")
    for name, path, words in (
        ("no-file", "nowhere.txt", "nowhere.txt"),
        ("no-wheel", "bad.txt", "no-such-wheel"),
    ):
        run = lab.numpy_run(name, environment={"requirements": path}, budget={"user_failure": 0})
        with pytest.raises((AttemptEnded, ValueError), match=words):
            await lab.train(run)
    assert files.names(f"{lab.directory('no-file')}/checkpoints") == []

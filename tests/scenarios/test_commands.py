"""Any command as a run, the environment that is built for it, and where its code comes from."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.conftest import Lab
from tests.scenarios.prefect_record import log_with
from tests.scenarios.terminal import started
from tpu.checkpoint import files
from tpu.runs.code import pack
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runs.driver import AttemptEnded

# A program that knows nothing of us: it keeps its own checkpoint in the bucket, and resumes from it.
PROGRAM = """
import json, os, time
import gcsfs

print("ENVIRONMENT " + json.dumps(dict(os.environ)), flush=True)
bucket = gcsfs.GCSFileSystem(endpoint_url=os.environ["STORAGE_EMULATOR_HOST"], token="anon", use_listings_cache=False)
own = os.environ["RELAY_RUN_DIR"] + "/own/progress.txt"
done = int(bucket.cat_file(own)) if bucket.exists(own) else 0
print(f"goes on at {done}", flush=True)
while done < 4:
    done += 1
    bucket.pipe_file(own, str(done).encode())
    if done == 2:
        time.sleep(3600)
print("all done")
"""


def command_run(name: str, command: str, **values: Any) -> RunConfig:
    return parse_run_config({"name": name, "command": command, "steps": 1, "evaluate": "never"} | values)


def printed(lab: Lab, name: str, attempt: int) -> str:
    parts = [url for url in files.names(f"{lab.directory(name)}/logs/{attempt}") if url.endswith(".log")]
    return b"".join(files.read(url) for url in sorted(parts)).decode()


def environment_of(lab: Lab, name: str, attempt: int) -> dict[str, str]:
    """What the program saw, without what tells one emulated machine from another: home, addresses, names."""
    found = re.search("ENVIRONMENT (.*)", printed(lab, name, attempt))
    assert found, printed(lab, name, attempt)
    variables: dict[str, str] = json.loads(found[1])
    machine = re.compile(rf"127\.\d+\.\d+\.\d+(:\d+)?|{re.escape(variables['HOME'])}|relay-{name}-\d-\w+")
    return {
        key: machine.sub("*", value)
        for key, value in variables.items()
        if key not in ("TMPDIR", "RELAY_CHIP_DEVICES") and not key.startswith(("SSH_", "TPU_EMULATOR_"))
    }


async def test_any_command_has_the_same_environment_after_a_preemption_and_resumes_by_its_own_means(
    lab: Lab, program_folder: Path
):
    (program_folder / "own.py").write_text(PROGRAM)
    run = command_run("own", "python own.py", variables={"COLOUR": "blue"})
    own = f"{lab.directory(run.name)}/own/progress.txt"
    async with lab.training(run) as task:
        await lab.until(
            lambda: files.filesystem().exists(own) and files.read(own) == b"2", "its own checkpoint", task
        )
        await log_with(run.name, "goes on at 0")
        await lab.until(lambda: "ENVIRONMENT" in printed(lab, run.name, 1), "the log in the bucket", task)
        await lab.preempt()
    assert lab.verdicts(run.name) == ["preempted", "finished"]
    assert "goes on at 2" in printed(lab, run.name, 2)
    before, after = environment_of(lab, run.name, 1), environment_of(lab, run.name, 2)
    assert before["COLOUR"] == "blue"
    different = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    # The attempt, its rendezvous port, and where its own files lie.
    assert different == {
        "RELAY_ATTEMPT", "RELAY_ATTEMPT_ID", "RELAY_ATTEMPT_DIR",
        "RELAY_CONFIG", "RELAY_EVENTS", "JAX_COORDINATOR_PORT",
    }  # fmt: skip


# Saves and leaves in order when it is told to, as programs of other schedulers do: that is no end of the training.
OBEDIENT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("begins", flush=True)
time.sleep(3600 if os.environ["RELAY_ATTEMPT"] == "1" else 0)
"""


@pytest.mark.slow
async def test_a_command_that_exits_0_at_the_notice_goes_on_after_it(lab: Lab, program_folder: Path):
    (program_folder / "obedient.py").write_text(OBEDIENT)
    run = command_run("obedient", "python obedient.py")
    async with lab.training(run) as task:
        await lab.until(lambda: "begins" in printed(lab, run.name, 1), "its first words", task)
        await lab.preempt(notice=True)
    assert lab.verdicts(run.name) == ["preempted", "finished"]


async def test_a_program_of_the_contract_that_leaves_early_is_to_blame(lab: Lab):
    run = command_run("early", "true", contract=True, budget={"user_failure": 0})
    with pytest.raises(AttemptEnded, match="exited with 0, but the last step was not committed"):
        await lab.train(run)
    assert lab.verdicts(run.name) == ["user failure"]


# Fails in the attempt that it is told to, SECONDS after its start.
TRAIN = """
import os, sys, time, tinypackage
built = os.stat(sys.prefix + "/.complete").st_mtime_ns
print("runs", open("version.txt").read().strip(), "with", tinypackage.NAME, "built at", built, flush=True)
if os.environ.get("FAIL_ATTEMPT") == os.environ["RELAY_ATTEMPT"]:
    time.sleep(float(os.environ.get("SECONDS", "0")))
    sys.exit(1)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project with a package of its own in a wheel, so that building an environment needs no network."""
    folder = tmp_path / "project"
    (folder / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(folder / "wheels" / "tinypackage-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tinypackage.py", "NAME = 'tiny'\n")
        information = "tinypackage-1.0.dist-info"
        wheel.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: tinypackage\nVersion: 1.0\n")
        wheel.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{information}/RECORD", "tinypackage.py,,\n")
    (folder / "requirements.txt").write_text("./wheels/tinypackage-1.0-py3-none-any.whl\n")
    (folder / "train.py").write_text(TRAIN)
    (folder / "version.txt").write_text("one\n")
    return folder


def commit(folder: Path) -> str:
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    if not (folder / ".git").exists():
        subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "a version"], check=True)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.parametrize("source", ["working-tree", "git", pytest.param("bundle", marks=pytest.mark.slow)])
async def test_code_from_every_source_with_packages_built_once_a_host(
    lab: Lab, project: Path, monkeypatch: pytest.MonkeyPatch, source: str
):
    committed = commit(project)
    (project / "version.txt").write_text("two, not committed\n")
    monkeypatch.chdir(project)
    bundle = f"{lab.emulator.env['TPU_RELAY_BUCKET']}/code/project.tar.gz"
    paths = [path for path in project.rglob("*") if path.is_file() and ".git" not in path.parts]
    files.write(bundle, pack([(str(p.relative_to(project)), p.read_bytes(), False) for p in paths], "x").data)
    code, version = {
        "working-tree": ("working-tree", "two, not committed"),
        "git": (f"{project}@{committed}", "one"),
        "bundle": (bundle, "two, not committed"),
    }[source]
    run = command_run(
        f"code-{source}", "python train.py", code=code, environment={"requirements": "requirements.txt"},
        variables={"FAIL_ATTEMPT": "1"},
    )  # fmt: skip
    await lab.train(run)
    assert lab.verdicts(run.name) == ["user failure", "finished"]
    for attempt in (1, 2):
        assert f"runs {version} with tiny" in printed(lab, run.name, attempt)
    log = await log_with(run.name, "Finished in state Completed")
    # The second attempt is on the same host: nothing is brought or built again.
    assert log.count("sync: environment") == 1
    assert len(lab.events(run.name, "sync-started")) == 1
    record = json.loads(files.read(f"{lab.directory(run.name)}/run.json"))
    source_recorded = {
        "working-tree": "working tree project",
        "git": f"{project}@{committed}",
        "bundle": bundle,
    }
    assert record["code"]["source"] == source_recorded[source]
    assert record["code"]["sha256"][:16] in files.read(f"{lab.directory(run.name)}/report/report.md").decode()


async def test_an_environment_that_a_host_has_is_not_built_again_by_the_next_flow(
    lab: Lab, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(project)
    run = command_run(
        "cached", "python train.py", environment={"requirements": "requirements.txt"},
        variables={"FAIL_ATTEMPT": "1", "SECONDS": "5"},
    )  # fmt: skip
    file = tmp_path / "cached.yaml"
    file.write_text(run.model_dump_json())
    async with started(tmp_path, str(file)) as flow:
        await lab.until(lambda: "w0 | runs one with tiny" in flow.output, "the program runs")
        flow.signal(signal.SIGKILL)
        await flow.exit_code()
    await lab.train(run)
    assert lab.verdicts(run.name) == ["user failure", "finished"]
    assert len(lab.events(run.name, "slice-intended")) == 1
    assert len(lab.events(run.name, "sync-started")) == 2
    assert printed(lab, run.name, 1) == printed(lab, run.name, 2)  # with the moment at which it was built

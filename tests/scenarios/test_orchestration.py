"""O keys through the whole flow: a flow that dies or is stopped, its log, secrets, and the user's own failures."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

import pytest
from prefect.exceptions import CancelledRun

from tests.scenarios.conftest import STAYS, Lab
from tests.scenarios.prefect_record import artifacts, flow_runs, log_with
from tests.scenarios.terminal import started
from tests.trainers.gate import Gate
from tpu.checkpoint import files
from tpu.connection import Connection
from tpu.hosts.connect import connect_all
from tpu.hosts.gang import GangSpec, end_gang
from tpu.hosts.identity import ensure_identity
from tpu.runs.config import RunConfig
from tpu.runs.driver import AttemptEnded
from tpu.runs.remote import hosts_of
from tpu.runs.stopping import stop_run


def configuration(folder: Path, run: RunConfig) -> str:
    file = folder / f"{run.name}.yaml"
    file.write_text(run.model_dump_json())  # JSON is YAML
    return str(file)


async def killed_flow(lab: Lab, folder: Path, run: RunConfig) -> None:
    """Start the flow as a process, and kill it once it has committed; its slice and its gang live on."""
    async with lab.flow_process(run, folder) as flow:
        await lab.until_step(run.name, 10)
        flow.kill()
        await flow.wait()
    assert lab.ready_nodes()


async def test_O1_a_killed_flow_is_started_again_and_takes_the_gang_up(lab: Lab, tmp_path: Path):
    gate = Gate(tmp_path / "gate", before=15)
    run = lab.numpy_run("taken-up", steps=30, every=10, variables=gate.variables)
    await killed_flow(lab, tmp_path, run)
    async with lab.flow_process(run, tmp_path) as flow:
        await lab.until(lambda: "taking up attempt 1" in flow.output, "taken up")
        gate.open()
        assert await flow.wait() == 0, flow.output
    assert [event.detail["attempt"] for event in lab.events(run.name, "attempt-started")] == [1]
    assert lab.verdicts(run.name) == ["finished"]
    lab.assert_as_undisturbed(run)


async def test_O1_a_gang_that_finished_while_nobody_watched_is_not_started_again(lab: Lab, tmp_path: Path):
    gate = Gate(tmp_path / "gate", before=15)
    run = lab.numpy_run("finished-alone", steps=20, every=10, variables=gate.variables)
    await killed_flow(lab, tmp_path, run)
    gate.open()
    await lab.until_step(run.name, run.steps)
    await lab.train(run)
    assert lab.verdicts(run.name) == ["finished"]
    lab.assert_as_undisturbed(run)


@pytest.mark.slow
async def test_O1_a_gang_that_the_dead_driver_had_ended_is_charged_to_nobody(lab: Lab, tmp_path: Path):
    run = lab.numpy_run(
        "ended", steps=30, every=10, budget={"user_failure": 0}, variables=STAYS
    )  # fmt: skip
    await killed_flow(lab, tmp_path, run)
    connection = Connection.from_environment()
    hosts = await hosts_of(connection, lab.directory(run.name))
    async with connect_all(hosts, ensure_identity(connection.home), connection, 10.0, print) as group:
        assert await end_gang(group, GangSpec(run.name, 1), 0.5)
    saved = lab.newest_step(run.name)
    await lab.train(run)
    assert lab.verdicts(run.name) == ["infrastructure", "finished"]
    first, second = (event.detail for event in lab.events(run.name, "attempt-ended"))
    assert "was ended by us" in first["reason"]
    assert (second["resume"], second["slice"]) == (saved, first["slice"])
    lab.assert_as_undisturbed(run)


async def test_a_cancellation_while_cleaning_up_does_not_leave_it_half_done(lab: Lab):
    run = lab.numpy_run("impatient", steps=10, every=10)
    lab.emulator.set_delete_delay(3)
    task = asyncio.create_task(lab.train(run))
    await lab.until(lambda: any(n["state"] == "DELETING" for n in lab.emulator.nodes()), "the deletion", task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    lab.assert_nothing_left()
    assert lab.events(run.name, "slice-deleted")


@pytest.mark.parametrize("then", ["goes on", pytest.param("is cancelled", marks=pytest.mark.slow)])
async def test_V6_a_flow_that_died_while_provisioning_left_a_slice_that_is_found(
    lab: Lab, tmp_path: Path, then: str
):
    run = lab.numpy_run("found", steps=10, every=10)
    lab.emulator.set_delay(3 if then == "goes on" else 600)
    async with lab.flow_process(run, tmp_path) as flow:
        (made,) = await lab.until(lab.emulator.nodes, "a node in creation")
        flow.kill()
        await flow.wait()
    task = asyncio.create_task(lab.train(run))
    if then == "goes on":
        await task
        assert [e.detail["slice"] for e in lab.events(run.name, "slice-ready")] == [made["node"]]
        lab.assert_as_undisturbed(run)
    else:
        await lab.until(lambda: len(lab.events(run.name, "driver-started")) == 2, "the second start", task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(lab.events(run.name, "slice-intended")) == 1
    lab.assert_nothing_left()


async def test_stopped_on_request_it_saves_deletes_and_goes_on_later(lab: Lab):
    run = lab.numpy_run("asked", steps=200, every=50, step_s=0.1)
    task = asyncio.create_task(lab.train(run))
    await lab.until(lambda: lab.events(run.name, "attempt-started"), "an attempt", task)
    told: list[str] = []
    stopping = stop_run(Connection.from_environment(), lab.directory(run.name), told.append)
    _, failure = await asyncio.gather(stopping, task, return_exceptions=True)
    assert isinstance(failure, CancelledRun)
    assert "stopped by request; started again it goes on" in str(failure)
    lab.assert_nothing_left()
    assert lab.verdicts(run.name) == ["cancelled"]
    assert told[-1].startswith("stopped: no gang and no slice is left")
    assert (lab.directory(run.name) + "/report/report.md") in files.names(lab.directory(run.name))
    assert not lab.fence(run.name).open


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(signal.SIGINT, signal.SIGTERM, id="INT-TERM"),
        pytest.param(signal.SIGTERM, signal.SIGINT, id="TERM-INT", marks=pytest.mark.slow),
    ],
)
async def test_O4_stopped_by_a_signal_while_provisioning_and_while_training(
    lab: Lab, tmp_path: Path, first: signal.Signals, second: signal.Signals
):
    gate = Gate(tmp_path / "gate", before=25)
    run = lab.numpy_run("stopped", steps=60, every=20, variables=gate.variables, grace_seconds=1)
    file = configuration(tmp_path, run)
    lab.emulator.set_delay(60)
    async with started(tmp_path, file) as flow:
        await lab.until(lab.emulator.nodes, "a node in creation")
        flow.signal(first)
        assert await flow.exit_code() == 128 + first, flow.output
    lab.assert_nothing_left()
    assert lab.verdicts(run.name) == []

    lab.emulator.set_delay(0)
    async with started(tmp_path, file) as flow:
        await lab.until_step(run.name, 20)
        flow.signal(second)
        assert await flow.exit_code() == 128 + second, flow.output
    lab.assert_nothing_left()
    assert lab.verdicts(run.name) == ["cancelled"]
    stopped_at = lab.newest_step(run.name)
    assert not lab.fence(run.name).open

    if first == signal.SIGINT:
        gate.open()
        await lab.train(run)
        assert lab.verdicts(run.name) == ["cancelled", "finished"]
        assert lab.events(run.name, "attempt-ended")[-1].detail["resume"] == stopped_at
        lab.assert_as_undisturbed(run)


@pytest.mark.slow
async def test_a_second_ctrl_c_does_not_leave_a_slice_behind(lab: Lab, tmp_path: Path):
    run = lab.numpy_run("pressed-twice", steps=60, every=20, step_s=0.1)
    lab.emulator.set_delete_delay(6)
    async with started(tmp_path, configuration(tmp_path, run)) as flow:
        await lab.until_step(run.name, 20)
        flow.signal(signal.SIGINT)
        await lab.until(lambda: lab.nodes_in("DELETING"), "the deletion")
        flow.signal(signal.SIGINT)
        assert await flow.exit_code() == 128 + signal.SIGINT, flow.output
    assert "still cleaning up" in flow.output
    assert lab.verdicts(run.name) == ["cancelled"]
    lab.assert_nothing_left()


TALKS = "import os; [print('word', i) for i in range(300)]; print('last words', flush=True); os._exit(3)"


async def test_O6_the_last_lines_before_an_exit_are_in_the_prefect_log(lab: Lab):
    run = lab.numpy_run("last-words", command=[sys.executable, "-c", TALKS], contract=False, steps=1,
                        budget={"user_failure": 0})  # fmt: skip
    with pytest.raises(AttemptEnded, match=r"exit code 3.*last words"):
        await lab.train(run)
    log = await log_with(run.name, "w0 | last words")
    assert [line for line in log.splitlines() if "| word" in line] == [f"w0 | word {i}" for i in range(300)]


FLOOD = "[print('flood', i) for i in range(300_000)]; print('the end', flush=True)"


@pytest.mark.slow  # in short form: test_worker.py, O6
async def test_a_program_that_prints_without_end_holds_nobody_up(lab: Lab):
    run = lab.numpy_run("flood", command=[sys.executable, "-c", FLOOD], contract=False, steps=1)
    async with asyncio.timeout(60):
        await lab.train(run)
    log = await log_with(run.name, "w0 | the end")
    assert "lines are left out here" in log
    assert log.count("w0 | flood") < 3000


LEAKS = """
import json, os, runpy, sys
token, password = os.environ["API_TOKEN"], os.environ["PASSWORD"]
print("token", token, "and", password)
print(json.dumps(dict(os.environ)), file=sys.stderr)
sys.stdout.write("x" * 9000 + token + "\\n")
if os.environ["RELAY_ATTEMPT"] == "1":
    raise ValueError("cannot log in with " + password)
runpy.run_module("tests.trainers.numpy_trainer", run_name="__main__")
"""


@pytest.mark.slow  # in short form: test_worker.py
async def test_O7_a_secret_is_seen_by_the_program_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    from prefect.blocks.system import Secret

    secrets = ("hf_5ecret/t0ken+value==", 'pass"word \\ with $signs')
    monkeypatch.setenv("MY_TOKEN", secrets[0])
    await Secret(value=secrets[1]).save("o7-password", overwrite=True)  # type: ignore[misc]
    run = lab.numpy_run("secretive", steps=20, command=[sys.executable, "-c", LEAKS], step_s=0.1,
                        secrets={"API_TOKEN": "env:MY_TOKEN", "PASSWORD": "block:o7-password"})  # fmt: skip
    seen: dict[str, str] = {}
    async with lab.training(run) as task:
        await lab.until(lambda: len(lab.events(run.name, "attempt-started")) > 1, "the second attempt", task)
        while not task.done():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen[f"command line {path}"] = path.read_bytes().decode(errors="replace")
                except OSError:
                    continue
            seen["cloud"] = json.dumps(lab.emulator.status())
            await asyncio.sleep(0.05)
    assert lab.verdicts(run.name) == ["user failure", "finished"]
    seen["prefect log"] = await log_with(run.name, "w0 | token", "Finished in state Completed")
    for flow_run in await flow_runs(run.name):
        seen[f"flow run {flow_run.id}"] = flow_run.model_dump_json()
    seen |= {f"artifact {found.key}": found.model_dump_json() for found in await artifacts()}
    for path in files.filesystem().find(lab.emulator.env["TPU_RELAY_BUCKET"]):
        seen[path] = files.read(f"gs://{path}").decode(errors="replace")
    assert any("logs/2/" in url for url in seen)
    for where, text in seen.items():
        for secret in secrets:
            for form in (secret, json.dumps(secret)[1:-1]):
                assert form not in text, f"a secret is in {where}"


async def test_O7_a_secret_that_is_not_there_stops_the_run_before_anything_is_made(lab: Lab):
    for source, words in (
        ("env:NOT_SET", "the variable NOT_SET is not set"),
        ("block:no-such", "no Prefect Secret block"),
    ):
        with pytest.raises(LookupError, match=words):
            await lab.train(lab.numpy_run("no-secret", secrets={"TOKEN": source}))
    assert files.names(lab.directory("no-secret")) == []


@pytest.mark.slow  # in short form: test_worker.py
async def test_O8_the_users_exception_costs_the_failure_budget_and_then_the_run(lab: Lab):
    run = lab.numpy_run("excepts", variables={"NUMPY_FAIL": "exception@25"})
    with pytest.raises(
        AttemptEnded, match=r"failed on demand at step 25.*3 times user failure, and the budget"
    ):
        await lab.train(run)
    assert lab.verdicts(run.name) == ["user failure"] * 3
    assert lab.newest_step(run.name) == 20
    # The slice is well, so the tries share it.
    assert len(lab.events(run.name, "slice-intended")) == 1
    log = await log_with(run.name, "Finished in state Failed")
    # What ended the run is said by its attempt, and once more by the flow run's state, which the UI shows first.
    assert log.count("and the budget") == 1
    assert log.count("user failure: tried again") == 2
    assert "Retry" not in log
    assert log.count("w0 | Traceback (most recent call last)") == 3
    assert log.count("w0 | RuntimeError: the user's code failed on demand at step 25") == 3
    (flow_run,) = await flow_runs(run.name)
    assert flow_run.state is not None
    assert flow_run.state.is_failed()
    assert str(flow_run.state.message).startswith("user failure: ")


def test_the_ui_asks_the_server_that_it_came_from(prefect_environment: dict[str, str]):
    base = prefect_environment["PREFECT_API_URL"].removesuffix("api")
    with urllib.request.urlopen(f"{base}ui-settings") as answer:
        api = urljoin(base, json.load(answer)["api_url"])
    with urllib.request.urlopen(f"{api}/health") as answer:
        assert answer.status == 200
    assert api == prefect_environment["PREFECT_API_URL"]

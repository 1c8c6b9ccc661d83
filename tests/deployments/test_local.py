"""As a new user would: make up, a run from the form, one by command, make down."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.browser import CHROMIUM, page
from tpu.runs.controller import process_start

ROOT = Path(__file__).parents[2]
END_S = 1800.0  # 2,000 steps of the form's default, however many others use this machine
CHANGES = '{"steps": 40, "checkpoints.every": 20, "evaluate": "never"}'


def local(folder: Path, do: str, **variables: str) -> str:
    """What `make up`, `make down` and `make status` run."""
    ours = ("PREFECT_", "TPU_RELAY_", "TPU_EMULATOR_", "STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT")
    done = subprocess.run(
        [sys.executable, "-m", "deployments.local", do, "--folder", folder], cwd=ROOT, text=True, check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith(ours)} | variables,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a server, an emulator and a worker that run; afterwards nothing of them does."""
    made = tmp_path_factory.mktemp("local")
    pids: list[int] = []
    try:
        told = local(made, "up")
        pids = [int(pid) for pid in re.findall(r"process (\d+)", told)]
        assert len(pids) == 2, told
        with temporary_settings({PREFECT_API_URL: (made / "background/address").read_text()}):
            yield made
    finally:
        local(made, "down")
    assert [pid for pid in pids if process_start(pid)] == []
    assert list(made.rglob("record.json")) == []
    assert "worker    –" in local(made, "status")


async def completed(flow_run_id: UUID) -> dict[str, object]:
    """The parameters of a flow run once it is Completed."""
    state = await final_state(flow_run_id)
    assert state.is_completed(), state
    async with get_client() as client:
        return (await client.read_flow_run(flow_run_id)).parameters


async def final_state(flow_run_id: UUID) -> State:
    async with get_client() as client, asyncio.timeout(END_S):
        while True:
            now = await client.read_flow_run(flow_run_id)
            if now.state is not None and now.state.is_final():
                return now.state
            await asyncio.sleep(0.5)


@pytest.mark.slow
async def test_a_run_by_command(folder: Path):
    asked = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prefect", "deployment", "run", "train/icl", "--param", f"changes={CHANGES}",
        env=os.environ | {"PREFECT_API_URL": PREFECT_API_URL.value()}, stdout=subprocess.PIPE,
    )  # fmt: skip
    said = (await asked.communicate())[0].decode()
    parameters = await completed(UUID(re.findall(r"UUID: (\S+)", said)[0]))
    assert parameters["run"]["steps"] == 40  # type: ignore[index]
    name = parameters["run"]["name"]  # type: ignore[index]
    judged = await run_deployment("evaluate/checkpoint", parameters={"checkpoint": name}, timeout=0)
    assert (await completed(judged.id))["checkpoint"] == name


async def done_with(flow_run_id: UUID, folder: Path) -> None:
    """Return when the worker is done with a flow run."""
    async with asyncio.timeout(END_S):
        while True:
            if not list(folder.rglob(f"{flow_run_id}/record.json")):
                return
            await asyncio.sleep(0.5)


async def started_from_the_form(browser_folder: Path, **fields: str) -> UUID:
    """A flow run of train/icl that was started in the UI, with these fields of the form changed."""
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("train/icl")
        before = {run.id for run in await client.read_flow_runs()}
        async with page(ui(f"deployments/deployment/{deployment.id}/run"), browser_folder) as form:
            await form.until("document.body?.innerText.includes('fresh_name')")
            await form.settled()
            for label, value in fields.items():
                await form.fill(label, value)
            await form.settled()
            await form.click("Submit")
            await form.until("!location.pathname.endsWith('/run')")
        (mine,) = [
            run for run in await client.read_flow_runs()
            if run.id not in before and run.deployment_id == deployment.id
        ]  # fmt: skip
    return mine.id


def ui(path: str) -> str:
    return f"{PREFECT_API_URL.value().removesuffix('/api')}/{path}"


FORM = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")]


class TestInTheUi:
    pytestmark = FORM

    async def test_a_run_from_the_form(self, folder: Path, tmp_path: Path):
        mine = await started_from_the_form(
            tmp_path / "browser", **{"Run Name": "my first", "Steps (Optional)": "400"}
        )
        parameters = await completed(mine)
        async with get_client() as client:
            assert (await client.read_flow_run(mine)).name == "my first"
        run = cast(dict[str, Any], parameters["run"])
        assert run["name"] == f"icl-{str(mine)[:8]}"
        assert run["steps"] == 400
        # What nobody filled in is the work pool's to say.
        assert "@" in run["code"]
        assert run["slice"]["zone"] == "us-central2-b"
        assert (run["slice"]["price_an_hour"], run["slice"]["external_ips"]) == (5.16, True)

    async def test_a_wrong_value_is_refused_with_a_sentence(self, folder: Path, tmp_path: Path):
        mine = await started_from_the_form(tmp_path / "browser", **{"Zone (Optional)": "us-central9-z"})
        state = await final_state(mine)
        assert state.is_failed()
        assert "us-central9-z" in str(state.message)

    async def test_the_cancel_button_leaves_nothing(self, folder: Path, tmp_path: Path):
        mine = await started_from_the_form(tmp_path / "browser", **{"Steps (Optional)": "200000"})
        async with page(ui(f"runs/flow-run/{mine}"), tmp_path / "second") as shown:
            await shown.until("document.body?.innerText.includes('Running')")
            await shown.click("Cancel")
            await shown.click("Confirm")
        assert (await final_state(mine)).is_cancelled()
        await done_with(mine, folder)
        assert "icl-" not in await asyncio.to_thread(local, folder, "status")

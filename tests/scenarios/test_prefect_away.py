"""O2: the Prefect server is away for a while and comes back. Training does not notice; states are caught up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.prefect_server import free_port, prefect_server
from tests.scenarios.conftest import Lab
from tests.scenarios.prefect_record import flow_runs, log_with, until_task_runs
from tests.trainers.gate import Gate


@contextlib.asynccontextmanager
async def serving(folder: Path, port: int) -> AsyncIterator[dict[str, str]]:
    """A Prefect server of this test's own, started and stopped beside the event loop."""
    server = prefect_server(folder, port)
    environment = await asyncio.to_thread(server.__enter__)
    try:
        yield environment
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


async def test_O2_the_server_is_away_from_the_first_commit_until_all_is_done(
    lab: Lab, tmp_path: Path, prefect_tables: Path
):
    folder, port = tmp_path / "prefect", free_port()
    shutil.copytree(prefect_tables.parent, folder)
    gate = Gate(tmp_path / "gate", before=15)
    run = lab.numpy_run("unwatched", steps=40, every=10, variables=gate.variables)
    async with contextlib.AsyncExitStack() as stack:
        async with serving(folder, port) as environment:
            own = dataclasses.replace(lab, environment=lab.environment | environment)
            flow = await stack.enter_async_context(own.cold_process(run, tmp_path))
            said = asyncio.create_task(flow.communicate())
            await lab.until_step(run.name, 10)
        gate.open()
        # Nobody hears what the flow does now: it trains to the end, and deletes its slice.
        await lab.until_step(run.name, run.steps)
        await lab.until(lambda: lab.events(run.name, "slice-deleted"), "the end of its slice")
        assert flow.returncode is None
        lab.assert_as_undisturbed(run)
        async with serving(folder, port):
            output, _ = await said
            assert flow.returncode == 0, output.decode()
            with temporary_settings({PREFECT_API_URL: environment["PREFECT_API_URL"]}):
                (flow_run,) = await flow_runs(run.name)
                assert flow_run.state is not None
                assert flow_run.state.is_completed()
                await log_with(run.name, "committed step 10")
                await until_task_runs(run.name, "segment 1: steps 0-10, attempt 1", "report")
    assert lab.verdicts(run.name) == ["finished"]

"""O2 and O9 for runs that a worker carries: a server that is away, or answers 429 or 503, stops neither of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.bench.worker_process import Worker, is_completed
from deployments.postgres import own_postgres
from deployments.prefect_server import free_port, prefect_server
from flows.train import train
from tests.scenarios.conftest import Lab
from tests.scenarios.prefect_proxy import PrefectProxy, prefect_proxy
from tests.scenarios.prefect_record import log_with, until_task_runs
from tests.trainers.gate import Gate

SETTLED_S = 180.0


@contextlib.asynccontextmanager
async def working(lab: Lab, api_url: str, folder: Path, program_folder: Path) -> AsyncIterator[Worker]:
    """A worker that finds its server under an address of its own."""
    environment = lab.emulator.env | lab.environment | {"PREFECT_API_URL": api_url}
    made = Worker(f"away-{os.getpid()}-{free_port()}", environment, folder, program_folder)
    await made.make_pool()
    await made.deploy_flow(made.pool, train)
    made.start()
    try:
        yield made
    finally:
        made.stop()
        made.kill_all()
        print(made.log.read_text())


@pytest.fixture
async def proxy(lab: Lab) -> AsyncIterator[PrefectProxy]:
    async with prefect_proxy(lab.environment["PREFECT_API_URL"]) as made:
        yield made


# More tries of the report than Prefect's client would make, and than eight.
@pytest.mark.parametrize(
    ("status", "retry_after", "tries"),
    [(429, "1", 12), pytest.param(503, None, 9, marks=pytest.mark.slow)],
)
async def test_O9_a_busy_server_stops_neither_worker_nor_flow_and_nothing_is_lost(
    lab: Lab, proxy: PrefectProxy, tmp_path: Path, program_folder: Path,
    status: int, retry_after: str | None, tries: int,
):  # fmt: skip
    gate = Gate(tmp_path / "gate", before=25)
    run = lab.numpy_run(f"busy-{status}", steps=60, every=20, variables=gate.variables)
    late = lab.numpy_run(f"late-{status}", steps=20, every=10)
    async with working(lab, proxy.api_url, tmp_path, program_folder) as worker:
        first = await worker.submit(run)
        await lab.until_step(run.name, 20)
        await proxy.close(status, retry_after)
        second = await worker.submit(late)  # past the proxy, as a schedule would
        gate.open()
        # It trains to its end, deletes its slice, and then cannot bring its report.
        await lab.until_step(run.name, run.steps)
        await lab.until(lambda: lab.events(run.name, "slice-deleted"), "the end of its slice")
        await proxy.until_refused("POST /api/artifacts/", tries, SETTLED_S)
        assert worker.alive
        proxy.open()
        assert is_completed(await worker.ended(first, SETTLED_S))
        assert (await worker.flow_run(first)).run_count == 1
        assert is_completed(await worker.ended(second, SETTLED_S))
    for step in range(20, run.steps + 1, 20):
        await log_with(run.name, f"committed step {step}")
    await until_task_runs(
        run.name, "segment 1: steps 0-20, attempt 1", "segment 3: steps 40-60, attempt 1", "report"
    )
    assert lab.verdicts(run.name) == ["finished"]
    lab.assert_as_undisturbed(run)


@pytest.mark.slow  # in short form, with a server that cannot be reached: test_prefect_away.py
async def test_O2_a_restarted_server_finds_the_worker_at_work_and_runs_as_they_are(
    lab: Lab, tmp_path: Path, program_folder: Path
):
    port, folder = free_port(), tmp_path / "prefect"
    ends = lab.numpy_run("server-restarted", steps=200, every=20, step_s=0.1)
    lasts = lab.numpy_run("server-forgotten", steps=100_000, every=50, step_s=0.1)
    async with contextlib.AsyncExitStack() as stack:
        on_postgres = os.environ.get("TPU_RELAY_TEST_DB") == "postgres"
        database = stack.enter_context(own_postgres()) if on_postgres else None

        @contextlib.asynccontextmanager
        async def serving() -> AsyncIterator[str]:
            server = prefect_server(folder, port, database)
            environment = await asyncio.to_thread(server.__enter__)
            try:
                yield environment["PREFECT_API_URL"]
            finally:
                await asyncio.to_thread(server.__exit__, None, None, None)

        async with serving() as api_url:
            stack.enter_context(temporary_settings({PREFECT_API_URL: api_url}))
            worker = await stack.enter_async_context(working(lab, api_url, tmp_path, program_folder))
            flow_runs = [await worker.submit(run) for run in (ends, lasts)]
            await lab.until_step(ends.name, 20)
            await lab.until_step(lasts.name, 50)
        # Nobody hears of it.
        await lab.until_step(ends.name, ends.steps)
        await lab.until(lambda: lab.events(ends.name, "slice-deleted"), "the end of its slice")
        before = lab.newest_step(lasts.name)
        async with serving():
            assert is_completed(await worker.ended(flow_runs[0], SETTLED_S))
            assert (await worker.flow_run(flow_runs[0])).run_count == 1
            await log_with(ends.name, *(f"committed step {step}" for step in range(20, ends.steps + 1, 20)))
            await until_task_runs(ends.name, "segment 1: steps 0-20, attempt 1", "report")
            await lab.until_step(lasts.name, before + 50)
            await worker.cancel(flow_runs[1])
            assert (await worker.ended(flow_runs[1])).is_cancelled()
            assert worker.alive
            worker.stop()
    lab.assert_nothing_left()
    assert lab.verdicts(ends.name) == ["finished"]
    lab.assert_as_undisturbed(ends)

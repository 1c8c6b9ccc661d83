"""O2: the Prefect server is away for a while and comes back. Training does not notice; states are caught up.

The server itself is ended and started again in the long form, under a worker: test_worker_prefect_away.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from tests.scenarios.conftest import Lab
from tests.scenarios.prefect_proxy import prefect_proxy
from tests.scenarios.prefect_record import flow_runs, log_with, until_task_runs
from tests.trainers.gate import Gate


async def test_O2_the_server_is_away_from_the_first_commit_until_all_is_done(lab: Lab, tmp_path: Path):
    gate = Gate(tmp_path / "gate", before=15)
    run = lab.numpy_run("unwatched", steps=40, every=10, variables=gate.variables)
    async with prefect_proxy(lab.environment["PREFECT_API_URL"]) as proxy:
        own = dataclasses.replace(lab, environment=lab.environment | {"PREFECT_API_URL": proxy.api_url})
        async with own.cold_process(run, tmp_path) as flow:
            said = asyncio.create_task(flow.communicate())
            await lab.until_step(run.name, 10)
            await proxy.close(None)
            gate.open()
            # Nobody hears what the flow does now: it trains to the end, and deletes its slice.
            await lab.until_step(run.name, run.steps)
            await lab.until(lambda: lab.events(run.name, "slice-deleted"), "the end of its slice")
            assert flow.returncode is None
            lab.assert_as_undisturbed(run)
            proxy.open()
            output, _ = await said
            assert flow.returncode == 0, output.decode()
    (flow_run,) = await flow_runs(run.name)
    assert flow_run.state is not None
    assert flow_run.state.is_completed()
    await log_with(run.name, "committed step 10")
    await until_task_runs(run.name, "segment 1: steps 0-10, attempt 1", "report")
    assert lab.verdicts(run.name) == ["finished"]

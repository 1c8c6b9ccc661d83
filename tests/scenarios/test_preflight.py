"""Prefect's server and work pools, as `relay preflight` sees them."""

from __future__ import annotations

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.preflight_prefect import look_at_prefect
from tpu.readiness.finding import State


async def said(pool: str | None) -> tuple[State, str, str]:
    """State, text and mend of the last finding, which is the worst if one is."""
    last = (await look_at_prefect(pool))[-1]
    return last.state, last.text, last.mend


async def test_a_server_that_is_not_there_is_said():
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        state, text, mend = await said("tpu")
    assert (state, mend) == (State.WRONG, "make up")
    assert text.startswith("none answers at http://127.0.0.1:9/api")


async def test_without_a_server_runs_from_a_terminal_start_their_own_and_a_pool_is_missing():
    with temporary_settings({PREFECT_API_URL: None}):
        assert (await said(None))[0] is State.HOLDS
        assert (await said("tpu"))[0] is State.WRONG


async def test_a_pool_that_cannot_run_anything_is_said_with_what_mends_it(
    prefect_environment: dict[str, str],
):
    with temporary_settings({PREFECT_API_URL: prefect_environment["PREFECT_API_URL"]}):
        assert await said("nowhere") == (
            State.WRONG, "there is none", "prefect work-pool create nowhere --type cloud-tpu"
        )  # fmt: skip
        async with get_client() as client:
            for name, kind in (("of-processes", "process"), ("of-slices", "cloud-tpu")):
                await client.create_work_pool(WorkPoolCreate(name=name, type=kind))
            state, text, mend = await said("of-processes")
            assert (state, "of the type process" in text) == (State.WRONG, True)
            assert mend == "prefect work-pool create of-processes-cloud-tpu --type cloud-tpu"
            assert (await said("of-slices"))[2] == "prefect worker start --pool of-slices"
            await client.update_work_pool("of-slices", WorkPoolUpdate(is_paused=True))
            assert (await said("of-slices"))[2] == "prefect work-pool resume of-slices"
            await client.update_work_pool("of-slices", WorkPoolUpdate(is_paused=False))
            await client.send_worker_heartbeat("of-slices", "mine", heartbeat_interval_seconds=60)
            state, text, _ = await said("of-slices")
            assert (state, text) == (State.HOLDS, "of the type cloud-tpu, with mine online")

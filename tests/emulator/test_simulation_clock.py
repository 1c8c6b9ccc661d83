"""Virtual time: it jumps, it stands still while somebody computes, and it says when nothing can happen any more."""

import asyncio
import time

import pytest

from tpu.emulator.simulation_clock import (
    ACCOUNT,
    NothingToWaitFor,
    ScaledClock,
    VirtualClock,
    VirtualTimeLoop,
    run_virtual,
)


def test_a_simulated_day_passes_at_once_and_in_order():
    clock = VirtualClock()

    async def day() -> tuple[list[str], float]:
        seen: list[str] = []

        async def say(after_s: float, word: str) -> None:
            await clock.sleep(after_s)
            seen.append(word)

        await asyncio.gather(say(86_400, "evening"), say(3_600, "morning"), say(43_200, "noon"))
        return seen, clock.monotonic()

    began = time.monotonic()
    assert run_virtual(day()) == (["morning", "noon", "evening"], 86_400.0)
    assert time.monotonic() - began < 5


def test_time_outs_go_by_virtual_time():
    async def wait() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(500):
                await asyncio.sleep(1000)
        await asyncio.wait_for(asyncio.sleep(100), timeout=101)
        return asyncio.get_running_loop().time()

    assert run_virtual(wait()) == 600.0


def test_no_time_passes_while_a_thread_would_work():
    async def work() -> tuple[int, float]:
        ticks = asyncio.create_task(asyncio.sleep(10))
        found = await asyncio.to_thread(lambda: time.sleep(0.05) or 7)
        at = asyncio.get_running_loop().time()
        await ticks
        return found, at

    assert run_virtual(work()) == (7, 0.0)


def test_an_error_of_a_thread_s_work_arrives():
    async def work() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    run_virtual(work())


def test_waiting_for_what_never_comes_is_an_error_and_not_a_hang():
    with pytest.raises(NothingToWaitFor):
        run_virtual(asyncio.Event().wait())  # type: ignore[arg-type]


def test_cpu_time_goes_to_the_account_of_who_computes():
    def compute() -> None:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    async def quiet() -> None:
        compute()

    async def story() -> dict[str, float]:
        mine = asyncio.create_task(asyncio.sleep(5))
        ACCOUNT.set("cloud")
        await asyncio.create_task(quiet())
        await mine
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return loop.cpu_s()

    cpu_s = run_virtual(story())
    assert 0.08 <= cpu_s["cloud"] < 0.3
    assert cpu_s["controller"] < 0.05


async def test_a_scaled_clock_runs_faster_by_its_speed():
    clock = ScaledClock(100.0)
    began, at = time.monotonic(), clock.monotonic()
    await clock.sleep(20)
    passed = clock.monotonic() - at
    assert 20 <= passed == pytest.approx(100 * (time.monotonic() - began), rel=0.05)
    with pytest.raises(ValueError, match="speed"):
        ScaledClock(0)

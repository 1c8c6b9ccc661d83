"""Time that does not wait: an event loop that jumps to its next timer whenever nothing else is to be done.

Simulated days pass in the seconds of CPU that their events need. Everything that goes by the loop's time takes part:
`asyncio.sleep`, time-outs, and a VirtualClock. What runs in the loop may be slow, but takes no simulated time.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from time import perf_counter
from typing import Any, TypeVar

Result = TypeVar("Result")

# On whose account a task computes; tasks inherit it from who starts them.
ACCOUNT: ContextVar[str] = ContextVar("account", default="controller")


class NothingToWaitFor(RuntimeError):
    """All tasks wait for something that no timer will bring about."""


class _Jump(selectors.DefaultSelector):
    """In place of waiting, moves the time."""

    def __init__(self, move: Callable[[float], None]) -> None:
        super().__init__()
        self._move = move

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout <= 0:
            return []
        ready = super().select(0)  # a signal wakes the loop this way
        if not ready:
            if timeout is None:
                raise NothingToWaitFor("no task can go on, and no timer is set")
            self._move(timeout)
        return ready


class _Accounts:
    """CPU seconds by account.

    The kernel is slow to say what a thread has used, so each step is timed by the wall clock, which is quick, and what
    the whole process has used is divided in proportion: other programs take from all accounts alike.
    """

    def __init__(self) -> None:
        self.wall_s: defaultdict[str, float] = defaultdict(float)
        self._cpu_s: defaultdict[str, float] = defaultdict(float)
        self._wall, self._cpu = perf_counter(), time.process_time()

    def cpu_s(self) -> dict[str, float]:
        wall, cpu = perf_counter(), time.process_time()
        share = (cpu - self._cpu) / max(1e-9, wall - self._wall)
        for account, seconds in self.wall_s.items():
            self._cpu_s[account] += seconds * share
        self.wall_s.clear()
        self._wall, self._cpu = wall, cpu
        return dict(self._cpu_s)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop, and who used how much CPU in it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._accounts = _Accounts()
        super().__init__(_Jump(self._move))
        self.set_task_factory(self._metered_task)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of tasks' own code so far, by account (see ACCOUNT)."""
        return self._accounts.cpu_s()

    def time(self) -> float:
        return self._now

    def _move(self, seconds: float) -> None:
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run it here and now: time must not move while a thread works, nor depend on how long it takes."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # whoever awaits the thread gets it
            future.set_exception(error)
        return future

    def _metered_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        context = context or copy_context()
        metered = _Metered(work, self._accounts.wall_s, context.get(ACCOUNT, ACCOUNT.get()))
        return asyncio.Task(metered, loop=loop, context=context, **options)


class _Metered(Coroutine[Any, Any, Any]):
    """A coroutine whose time is added to an account."""

    __slots__ = ("_account", "_spent", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any], spent: dict[str, float], account: str) -> None:
        self._work = work
        self._spent = spent
        self._account = account

    def send(self, value: Any) -> Any:
        begin = perf_counter()
        try:
            return self._work.send(value)
        finally:
            self._spent[self._account] += perf_counter() - begin

    def throw(self, *error: Any) -> Any:
        begin = perf_counter()
        try:
            return self._work.throw(*error)
        finally:
            self._spent[self._account] += perf_counter() - begin

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)  # names and frames, for messages about tasks


def account(name: str, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start `work` as a task on an account of its own."""
    return asyncio.get_running_loop().create_task(work, context=context_of(name))


def context_of(name: str) -> Context:
    """Return a copy of the present context in which tasks are started on this account."""
    context = copy_context()
    context.run(ACCOUNT.set, name)
    return context


class VirtualClock:
    """A Clock by the running VirtualTimeLoop. `time()` begins at a date of its own."""

    EPOCH = 1_800_000_000.0

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        return self.EPOCH + self.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class ScaledClock:
    """A Clock on which `speed` seconds pass in one real second."""

    def __init__(self, speed: float) -> None:
        if speed <= 0:
            raise ValueError(f"speed must be above 0, found {speed:g}")
        self._speed = speed
        self._began, self._epoch = time.monotonic(), time.time()

    def monotonic(self) -> float:
        return (time.monotonic() - self._began) * self._speed

    def time(self) -> float:
        return self._epoch + self.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) / self._speed)


def run_virtual(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` in a loop of its own on virtual time, and return what it returns."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)

"""Carry a run over several slices: the part of each slice is a run of its own, begun anew as often as it is lost.

Nothing of a part's end is the run's: it goes on with the slices that are left, and ends without its last commit only
if no part may be begun again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, overload

from tpu.checkpoint import files
from tpu.checkpoint.fence import close_attempt, load_fence, update_fence
from tpu.cloud import CloudError
from tpu.runs.carrying import CLOUD_AGAIN_S
from tpu.runs.code import Bundle
from tpu.runs.controller import ControllerLost
from tpu.runs.crew import Crew, clean_up
from tpu.runs.driver import AttemptEnded, RunDriver
from tpu.runs.event_log import RunEvent
from tpu.runs.lanes import Lane
from tpu.runs.opening import open_run
from tpu.runs.overview import reached
from tpu.runs.parts import Part, part_config, slice_name
from tpu.runs.record import RunNotFound, code_url, extend, load_record, renew_code, run_directory
from tpu.runs.watch import Listener
from tpu.unbroken import unbroken

# The fence is looked at so often beside what the parts say.
LOOK_S = 2.0
# From the last commit to the end of all programs that took part.
LAST_WORDS_S = 60.0


class Histories(Sequence[RunEvent]):
    """The events of all parts so far; grows."""

    def __init__(self) -> None:
        self._all: dict[int, Sequence[RunEvent]] = {}

    def put(self, number: int, events: Sequence[RunEvent]) -> None:
        self._all[number] = events

    def __iter__(self) -> Iterator[RunEvent]:
        return (event for events in self._all.values() for event in list(events))

    def __len__(self) -> int:
        return sum(map(len, self._all.values()))

    @overload
    def __getitem__(self, index: int) -> RunEvent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RunEvent]: ...
    def __getitem__(self, index: int | slice) -> RunEvent | Sequence[RunEvent]:
        return list(self)[index]


class SlicePart:
    """One slice's part while this process carries it. `driver` is that of its run, once it is open."""

    def __init__(self, run: OverSlices, number: int) -> None:
        self.number = number
        self.name = slice_name(number)
        self.driver: RunDriver | None = None
        self.failure: BaseException | None = None
        self.ended = False
        self.last: AttemptEnded | None = (
            None  # how its last attempt ended, if that was before the run's last step
        )
        self._run = run

    @property
    def trains(self) -> bool:
        view = self.driver.view if self.driver is not None and self.driver.attempt is not None else None
        return view is not None and view.resumed is not None

    @property
    def title(self) -> str:
        """`slice2: steps 120–480`, as far as is known."""
        view = self.driver.view if self.driver is not None else None
        if view is None or view.resumed is None:
            return self.name
        return f"{self.name}: steps {view.resumed}–{view.step}"

    async def attempt(self, begun: Callable[[], None]) -> None:
        """Take part once, as long as it goes well: with a slice that is got, or the gang that trains already.

        Raises:
            AttemptEnded: it ended before the run's last step.
            CloudError: no slice can be had.
        """
        driver = self.driver
        assert driver is not None
        while driver.attempt is None:
            await driver.back_off()
            try:
                async with driver.preparing():
                    await driver.provision()
                    await driver.sync()
                    await driver.start_attempt()
            except CloudError as error:
                if not error.retryable:
                    raise
                driver.report(f"trying again for a slice: {error}")
                await driver.pause(CLOUD_AGAIN_S)
        begun()
        await driver.wait_for_end()


class OverSlices:
    """All parts of the run that `lane` has the right to act for.

    `listener` makes one for each part's number; `told` hears of their histories, as EventLog says.
    """

    def __init__(
        self,
        lane: Lane,
        crew: Crew,
        histories: Histories,
        listener: Callable[[int, OverSlices], Listener],
        told: Callable[[Sequence[RunEvent]], None] = lambda _: None,
    ) -> None:
        self.record, self.run_dir, self.log = lane.record, lane.run_dir, lane.log
        self.parts = [SlicePart(self, number) for number in range(lane.record.config.slices)]
        self.committed = 0
        self.stepped = 0  # the furthest step of which a part has told
        self._lane, self._crew, self._histories, self._listener = lane, crew, histories, listener
        self._told = told
        self._news = asyncio.Event()
        self._over = False
        self._why = ""  # the run ends before its last step
        self._abandoned = False

    # --- the run's commits ---

    def hear_commit(self, step: int) -> None:
        """A part says that everything up to `step` is committed."""
        if step > self.committed:
            self._lane.tracker.committed()
        self.committed = max(self.committed, step)
        self._news.set()

    async def wait_for_commit(self, step: int) -> None:
        """Wait until a checkpoint of `step` or later counts.

        Raises:
            What ended the last part that could have come so far, or ends the run early.
        """
        while not await self._is_committed(step):
            await self._lane.tenure.still_wanted()
            if all(part.ended for part in self.parts):
                if await self._is_committed(step):
                    return
                raise self._why_ended()
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            waited: list[asyncio.Future[Any]] = [news]
            if self._lane.tenure.interruption is not None:
                waited.append(self._lane.tenure.interruption)
            await asyncio.wait(waited, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()

    async def _is_committed(self, step: int) -> bool:
        if self.committed < step:
            fence = await asyncio.to_thread(load_fence, self.run_dir)
            self.committed = max(self.committed, reached(self.record, fence, ()))
        return self.committed >= step

    def _why_ended(self) -> BaseException:
        failures = [part.failure for part in self.parts if part.failure is not None]
        final = [one for one in failures if isinstance(one, AttemptEnded) and one.verdict.final]
        return (final or failures or [RuntimeError("every slice's part has ended before the last step")])[0]

    # --- its parts ---

    @contextlib.asynccontextmanager
    async def taking_part(
        self, stint: Callable[[SlicePart], Awaitable[AttemptEnded | None]]
    ) -> AsyncIterator[None]:
        """Keep every slice's part going for the block, by `stint` after `stint`; they have ended after it."""
        self._over = await self._is_committed(self.record.config.steps)
        keeping = [asyncio.create_task(self._keep(part, stint)) for part in self.parts]
        try:
            yield
            await self._until_left(keeping)
        except ControllerLost:
            self._abandoned = True  # another process drives the run now: nothing here may be cleaned up
            raise
        except BaseException as error:
            self._why = str(error) or "cancelled"
            raise
        finally:
            self._over = True
            for task in keeping:
                task.cancel()
            await unbroken(self._until_ended(keeping))

    async def _until_ended(self, keeping: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.wait(keeping)
        if not self._abandoned:  # no program of the run is left
            await asyncio.to_thread(update_fence, self.run_dir, close_attempt)

    async def _until_left(self, keeping: Sequence[asyncio.Task[None]]) -> None:
        """The last step is committed: those that train end by themselves, the others are not needed any more."""
        self._over = True
        for part, task in zip(self.parts, keeping, strict=True):
            if part.driver is None or part.driver.attempt is None:
                task.cancel()
        await asyncio.wait(keeping, timeout=LAST_WORDS_S)

    async def _keep(
        self, part: SlicePart, stint: Callable[[SlicePart], Awaitable[AttemptEnded | None]]
    ) -> None:
        try:
            await self._carry(part, stint)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever it is, the other slices go on
            part.failure = error
            if not self._over:
                self._crew.report(
                    f"{part.name} takes part no more: {str(error) or type(error).__name__}; the others go on"
                )
        finally:
            part.ended = True
            self._news.set()

    async def _carry(
        self, part: SlicePart, stint: Callable[[SlicePart], Awaitable[AttemptEnded | None]]
    ) -> None:
        crew, config = self._crew, part_config(self.record, self.run_dir, part.number)
        await asyncio.to_thread(self._follow_the_run, run_directory(crew.connection.bucket, config.name))
        own = Part(self.record, self.run_dir, part.number, lambda: self._others_train(part))
        async with open_run(
            config, crew.owner, secrets=crew.secrets, report=lambda text: crew.report(f"{part.name}: {text}"),
            listener=self._listener(part.number, self), connection=crew.connection, folder=crew.folder,
            clock=crew.clock, shared=crew.shared, told=self._tell, part=own,
        ) as driver:  # fmt: skip
            part.driver = driver
            self._histories.put(part.number, driver.log.events)
            failure: BaseException | None = None
            try:
                await driver.take_up()
                while not self._over:
                    ended = await stint(part)
                    if ended is None:
                        break
                    if not ended.retry:
                        raise ended
            except ControllerLost:
                raise
            except BaseException as error:
                failure = error
            if self._abandoned:
                raise failure or ControllerLost("another process drives the run now")
            why = self._why or ("training is done" if self._over or failure is None else str(failure))
            await unbroken(clean_up(driver, crew, why, keep=False, save=True))
            if failure is not None:
                raise failure

    def _tell(self, history: Sequence[RunEvent]) -> None:
        """What becomes of its slices is told of the run; that a slice is back is no restart of it."""
        if history[-1].kind != "attempt-started":
            self._told(history)

    def _others_train(self, part: SlicePart) -> bool:
        return any(one.trains for one in self.parts if one is not part)

    def _follow_the_run(self, part_dir: str) -> None:
        """A part that exists has the run's code and length, also if they have changed since."""
        with contextlib.suppress(RunNotFound):
            known, steps = load_record(part_dir), self.record.config.steps
            if known.code["sha256"] != self.record.code["sha256"]:
                renew_code(part_dir, self._bundle())
            if known.config.steps < steps:
                extend(part_dir, steps)

    def _bundle(self) -> Bundle:
        code = self.record.code
        return Bundle(files.read(code_url(self.run_dir, code)), code["sha256"], code["source"])

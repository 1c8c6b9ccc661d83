"""Get one slice out of several candidates: in order, or several at once, of which the first ready one wins.

A candidate that has no capacity is left for the next one at once; all of them together are asked again less and less
often. Whatever was asked for and is not the slice in the end is deleted, and deleted means that the cloud says so; who
has won a race need not wait for that.
Why there is no slice yet stands at any time in `Waiting`, one sentence a candidate.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from tpu.clock import Clock
from tpu.cloud import CloudError, ErrorKind, TpuCloud
from tpu.slices.candidate import Candidate
from tpu.slices.dead import free_quota
from tpu.slices.deletion import DeletionUnconfirmed, delete_slice
from tpu.slices.project_memory import ProjectMemory, Result, remembered
from tpu.slices.provision import NoLongerWanted, NotReady, ReadySlice, provision
from tpu.slices.request import SliceRequest
from tpu.slices.waiting import Waiting
from tpu.slices.zone_health import Closed, Fine, Paused
from tpu.unbroken import unbroken

# Between two tries of one candidate: the first pause, doubled with each refusal up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 120.0
# While nothing else happens it is asked so often whether the slice is still wanted.
_ASK_AGAIN_S = 5.0
# A place that may not be asked now is looked at again after so long at the latest.
_LOOK_AGAIN_S = 10.0
_DELETE_S = 900.0


class IntentBook(Protocol):
    """Where it is written down what is asked for, before it is asked for, and what became of it."""

    async def intended(self, candidate: Candidate) -> str:
        """Write down that a slice will be asked for, and return its name, which no slice ever had."""
        ...

    async def given_up(self, name: str, why: str) -> None:
        """Write down that an intended slice is not wanted any more; that it has `ended` comes later."""
        ...

    async def ended(self, name: str, why: str, *, deleted: bool, preempted: bool) -> None:
        """Write down that an intended slice is none of ours.

        `deleted`: the cloud says that it is gone, or it was never made. `preempted`: the cloud took it while it was
        being made.
        """
        ...


@dataclass(frozen=True)
class Wish:
    """What is wanted: `request` in any of the ways of `candidates`, within its `deadline_s` altogether.

    `race` candidates are asked at once. `queue_patience_s` is how long one is waited for in its zone's queue while
    there is another one to go to.

    Raises:
        ValueError: no candidate, or a race of fewer than one.
    """

    candidates: Sequence[Candidate]
    request: SliceRequest
    race: int = 1
    queue_patience_s: float | None = None

    def __post_init__(self) -> None:
        if not self.candidates or self.race < 1:
            raise ValueError(f"a wish has candidates and a race of at least 1, found {self}")


class Answer(Enum):
    """What follows from a refusal."""

    DROP = "never ask this candidate again"
    FREE_QUOTA = "delete what is dead of ours, then ask again"
    SLOWER = "the project creates too fast"
    AGAIN = "ask again at once"
    LATER = "ask the next one, and this one later"


_ANSWERS = {
    ErrorKind.NO_QUOTA: Answer.DROP,
    ErrorKind.NOT_OFFERED: Answer.DROP,
    ErrorKind.NO_QUEUE: Answer.DROP,
    ErrorKind.PERMISSION: Answer.DROP,
    ErrorKind.BAD_REQUEST: Answer.DROP,
    ErrorKind.CONFLICT: Answer.DROP,
    ErrorKind.QUOTA_EXHAUSTED: Answer.FREE_QUOTA,
    ErrorKind.RATE_LIMITED: Answer.SLOWER,
    ErrorKind.PREEMPTED: Answer.AGAIN,
}


def answer_to(kind: ErrorKind) -> Answer:
    """What follows from a refusal of this kind."""
    return _ANSWERS.get(kind, Answer.LATER)


async def acquire(
    cloud: TpuCloud,
    wish: Wish,
    book: IntentBook,
    memory: ProjectMemory,
    clock: Clock,
    report: Callable[[str], None],
    still_wanted: Callable[[], Awaitable[None]],
    *,
    waiting: Waiting | None = None,
    chance: random.Random | None = None,
    beside: Callable[[Coroutine[Any, Any, None]], object] | None = None,
) -> ReadySlice:
    """The first ready slice of the wish's candidates.

    What has lost the race against it is given up in the book by then. `beside` is given the work that deletes it, to be
    run to its end while the slice is used already; without it that is waited for here. Cancelled, or no longer wanted,
    it returns only when all that was asked for is gone; what cannot be confirmed as gone stays in the book. If
    `still_wanted` says that the right to act is lost, all is left as it is.

    Raises:
        NotReady: none was ready within the deadline; says of each candidate why.
        CloudError: every candidate is refused for good.
    """
    told = waiting or Waiting()
    acquisition = _Acquisition(
        cloud, wish, book, memory, clock, report, still_wanted, told, chance or random.Random(), beside
    )
    try:
        return await acquisition.run()
    finally:
        told.clear()


@dataclass
class _Way:
    """How it goes with one candidate; `not_before` is monotonic, `asked` since the epoch, in seconds."""

    candidate: Candidate
    order: int
    tries: int = 0
    asked: float = 0.0
    not_before: float = 0.0
    dropped: CloudError | None = None


class _Acquisition:
    def __init__(
        self,
        cloud: TpuCloud,
        wish: Wish,
        book: IntentBook,
        memory: ProjectMemory,
        clock: Clock,
        report: Callable[[str], None],
        still_wanted: Callable[[], Awaitable[None]],
        waiting: Waiting,
        chance: random.Random,
        beside: Callable[[Coroutine[Any, Any, None]], object] | None,
    ) -> None:
        self._cloud = cloud
        self._wish = wish
        self._book = book
        self._memory = memory
        self._clock = clock
        self._report = report
        self._still_wanted = still_wanted
        self._waiting = waiting
        self._chance = chance
        self._beside = beside
        self._end = clock.monotonic() + wish.request.deadline_s
        self._ways = [_Way(candidate, order) for order, candidate in enumerate(wish.candidates)]
        self._won: ReadySlice | None = None
        self._running: dict[asyncio.Task[ReadySlice | None], _Way] = {}
        self._names: set[str] = set()  # of slices that are being made, or were ready too late
        for way in self._ways:
            waiting.say(str(way.candidate), "not asked yet")

    async def run(self) -> ReadySlice:
        try:
            while True:
                await self._still_wanted()
                if self._clock.monotonic() >= self._end:
                    raise self._too_late()
                self._start_more()
                if not self._running and all(way.dropped for way in self._ways):
                    raise self._nothing_left()
                await self._until_something_happens()
                if (won := self._collect()) is not None:
                    way, self._won = won
                    self._names.discard(self._won.name)
                    await self._remembered(self._memory.note(way.candidate, "success", way.asked), None)
                    await self._give_up_losers(f"{self._won.name} was ready first")
                    return self._won
        except BaseException as error:  # also a cancellation: nothing may be left, and it is raised again
            late, self._won = self._won, None
            await unbroken(self._end_all(str(error) or "cancelled", late))
            raise

    # --- who is asked when --------------------------------------------------------------------------

    def _start_more(self) -> None:
        """Let as many candidates run as may race: the least tried first, and of these in order."""
        now = self._clock.monotonic()
        ready = [way for way in self._idle() if way.not_before <= now]
        for way in sorted(ready, key=lambda way: (way.tries, way.order)):
            if len(self._running) >= self._wish.race:
                return
            self._running[asyncio.create_task(self._try(way))] = way

    def _idle(self) -> list[_Way]:
        """Candidates that may be asked, now or later, and are not being asked."""
        running = list(self._running.values())
        return [way for way in self._ways if way.dropped is None and way not in running]

    async def _until_something_happens(self) -> None:
        """Wait for the end of a try, or until another candidate's time has come."""
        now = self._clock.monotonic()
        wait_s = min(_ASK_AGAIN_S, self._end - now)
        if len(self._running) < self._wish.race:
            wait_s = min([wait_s, *(way.not_before - now for way in self._idle())])
        timer = asyncio.ensure_future(self._clock.sleep(max(0.0, wait_s)))
        try:
            await asyncio.wait({*self._running, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    def _collect(self) -> tuple[_Way, ReadySlice] | None:
        """Take note of the tries that have ended; the first ready slice, in the candidates' order, if there is one.

        Raises:
            Exception: what a try could not answer for itself.
        """
        done = sorted((task for task in self._running if task.done()), key=lambda t: self._running[t].order)
        for task in done:
            ready = task.result()
            way = self._running.pop(task)
            if ready is not None:
                return way, ready
        return None

    async def _give_up_losers(self, why: str) -> None:
        for name in sorted(self._names):
            await self._book.given_up(name, why)
        ending = unbroken(self._end_all(why))
        if self._running and self._beside is not None:
            self._beside(ending)
        else:
            await ending

    async def _end_all(self, why: str, also: ReadySlice | None = None) -> None:
        """End every try, and delete the slices of those that were ready a moment too late, and this one."""
        tasks = list(self._running)
        self._running.clear()
        for task in tasks:
            task.cancel(why)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        late = [ready for ready in (*ended, also) if isinstance(ready, ReadySlice)]
        await asyncio.gather(*(self._delete(ready, why) for ready in late))

    async def _delete(self, ready: ReadySlice, why: str) -> None:
        try:
            await self._still_wanted()
        except NoLongerWanted:
            pass  # that would be why we delete
        except Exception:  # the right to act is lost: all is left as it is
            return
        self._report(f"deleting {ready.name} in {ready.zone}: {why}")
        try:
            await delete_slice(self._cloud, ready.zone, ready.name, self._clock, _DELETE_S)
        except (CloudError, DeletionUnconfirmed) as error:
            self._report(str(error))
            await self._book.ended(ready.name, why, deleted=False, preempted=False)
        else:
            await self._book.ended(ready.name, why, deleted=True, preempted=False)

    # --- one try ------------------------------------------------------------------------------------

    async def _try(self, way: _Way) -> ReadySlice | None:
        """A ready slice of one candidate; None if it is refused, or not to be asked now."""
        if not await self._let_through(way):
            return None
        wait_s = await self._remembered(self._memory.reserve_creation(), 0.0)
        if wait_s > 0:
            self._say(way, f"the project creates many slices: its turn comes in {wait_s:.0f} s")
            await self._clock.sleep(wait_s)
            await self._still_wanted()
        way.asked = self._clock.time()
        try:
            # Nothing may be waited for after it: a cancellation would lose a slice that is there.
            return await self._create(way)
        except CloudError as error:
            await self._answer(way, error)
            return None

    async def _let_through(self, way: _Way) -> bool:
        match await self._remembered(self._memory.let_through(way.candidate), Fine()):
            case Fine():
                return True
            case Closed(quota):
                zone = way.candidate.zone
                way.dropped = CloudError(
                    ErrorKind.NO_QUOTA, 8,
                    f"the project has none of the quota '{quota}', as it was told before; if it has now: "
                    f"relay zones --forget {zone}",
                    wanted=f"get {way.candidate}",
                )  # fmt: skip
                self._say(way, f"given up: {way.dropped.message}")
                return False
            case Paused(until, why):
                wait_s, how = until - self._clock.time(), f"not asked for at present: {why}"
            case slowed:
                wait_s, how = slowed.wait_s, f"asked for more slowly: {slowed.why}"
        # Somebody else's success opens the place at once. Those who wait do not all come back at the same moment.
        wait_s = min(max(0.1, wait_s), _LOOK_AGAIN_S) * self._chance.uniform(1.0, 1.2)
        way.not_before = self._clock.monotonic() + wait_s
        self._say(way, how)
        return False

    async def _create(self, way: _Way) -> ReadySlice:
        left_s = self._end - self._clock.monotonic()
        request = dataclasses.replace(self._wish.request.of(way.candidate), deadline_s=max(1.0, left_s))
        names: list[str] = []

        async def intend() -> None:
            names.append(await self._book.intended(way.candidate))

        try:
            await unbroken(intend())
            self._names.update(names)
            return await provision(
                self._cloud,
                request,
                names[0],
                self._clock,
                self._report,
                self._still_wanted,
                queue_patience_s=self._wish.queue_patience_s if self._idle() else None,
                waits_for=lambda reason: self._waiting.say(str(way.candidate), reason),
            )
        except (CloudError, NoLongerWanted, asyncio.CancelledError) as error:
            for name in names:
                await unbroken(self._note_end(name, error))
                self._names.discard(name)
            raise

    async def _note_end(self, name: str, error: BaseException) -> None:
        await self._book.ended(
            name,
            str(error) or "cancelled",
            # A note on the error says that its deletion is not confirmed.
            deleted=not getattr(error, "__notes__", None),
            # Of one that has lost a race nobody need hear.
            preempted=isinstance(error, CloudError) and error.kind is ErrorKind.PREEMPTED and not self._won,
        )

    async def _answer(self, way: _Way, error: CloudError) -> None:
        """Do what follows from a refusal."""
        candidate, asked = way.candidate, way.asked
        if error.kind in (ErrorKind.STOCKOUT, ErrorKind.RESERVATION_FULL):
            await self._remembered(self._memory.note(candidate, "stockout", asked), None)
        answer = answer_to(error.kind)
        if answer is Answer.DROP:
            way.dropped = error
            if error.kind is ErrorKind.NO_QUOTA:
                quota = error.quota or error.message
                await self._remembered(self._memory.note_no_quota(candidate, quota), None)
            self._say(way, f"given up: {error}")
            return
        if answer is Answer.FREE_QUOTA:
            freed = await free_quota(
                self._cloud, candidate.zone, self._wish.request.labels, self._clock, self._names
            )
            if freed:
                self._say(way, f"quota used up; deleted {', '.join(freed)}, which was dead, and asking again")
                return
        if answer is Answer.SLOWER:
            await self._remembered(self._memory.creation_refused(), None)
        if answer is Answer.AGAIN:
            await self._remembered(self._memory.note(candidate, "early death", asked), None)
        way.tries += 1
        wait_s = 0.0 if answer is Answer.AGAIN else self._pause_s(way.tries)
        way.not_before = self._clock.monotonic() + wait_s
        if not isinstance(error, NotReady):  # what it waited for says more
            later = f"asking again in {wait_s:.0f} s" if wait_s else "asking again"
            self._say(way, f"{error.kind.value}: {error.message}; {later}")

    def _pause_s(self, tries: int) -> float:
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries - 1, 32))
        return longest * self._chance.uniform(0.8, 1.2)

    async def _remembered(self, asked: Awaitable[Result], otherwise: Result) -> Result:
        return await remembered(asked, otherwise, self._report)

    # --- what is said -------------------------------------------------------------------------------

    def _say(self, way: _Way, sentence: str) -> None:
        if self._waiting.say(str(way.candidate), sentence):
            self._report(f"{way.candidate}: {sentence}")

    def _too_late(self) -> NotReady:
        minutes = self._wish.request.deadline_s / 60
        return NotReady(f"none within {minutes:g} minutes: " + "; ".join(self._waiting.lines()), "a slice")

    def _nothing_left(self) -> CloudError:
        errors = [way.dropped for way in self._ways if way.dropped is not None]
        if len(errors) == 1:
            return errors[0]
        said = "; ".join(f"{way.candidate}: {way.dropped.message}" for way in self._ways if way.dropped)
        return CloudError(errors[0].kind, errors[0].code, said, wanted="get a slice of any candidate")

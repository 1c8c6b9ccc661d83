"""A small value that all processes of a project share: one object of the bucket, changed by compare-and-set.

The bucket takes about one update a second of one object, so changes of a process that come close together are
written as one, and a process that lost against another comes back after a pause of random length.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from tpu.checkpoint import objects
from tpu.checkpoint.objects import ObjectExists, StaleGeneration
from tpu.clock import Clock

State = TypeVar("State")
Answer = TypeVar("Answer")

# Between two writes of this process to one object.
WRITE_EVERY_S = 1.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0
_GIVE_UP_AFTER = 40


class MalformedShared(ValueError):
    """A shared object cannot be understood; the message names it and says what becomes of deleting it."""


class SharedContended(RuntimeError):
    """Other processes changed a shared object before us each time we tried."""


class Shared(Protocol[State]):
    """A value that others change, too."""

    async def read(self) -> State: ...

    async def change(self, step: Callable[[State], tuple[State, Answer]]) -> Answer:
        """Replace the value by what `step` makes of it, and return the answer that `step` gives beside it.

        `step` must be pure: it is run again when somebody else was quicker.
        """
        ...


class MemoryShared(Generic[State]):
    """Shared by the tasks of one process, for simulations."""

    def __init__(self, value: State) -> None:
        self.value = value

    async def read(self) -> State:
        return self.value

    async def change(self, step: Callable[[State], tuple[State, Answer]]) -> Answer:
        self.value, answer = step(self.value)
        return answer


class BucketShared(Generic[State]):
    """Shared by all processes that use the bucket. Belongs to the event loop in which it is used."""

    def __init__(
        self,
        url: str,
        to_json: Callable[[State], Any],
        from_json: Callable[[Any], State],
        empty: State,
        clock: Clock,
        chance: random.Random | None = None,
    ) -> None:
        self._url = url
        self._to_json = to_json
        self._from_json = from_json
        self._empty = empty
        self._clock = clock
        self._chance = chance or random.Random()
        self._waiting: list[tuple[Callable[[State], tuple[State, Any]], asyncio.Future[Any]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._next_write = clock.monotonic()

    async def read(self) -> State:
        """The value as it is in the bucket.

        Raises:
            MalformedShared: the object is damaged.
            tpu.checkpoint.retry.StorageUnavailable: the bucket does not answer.
        """
        return (await self._load())[0]

    async def change(self, step: Callable[[State], tuple[State, Answer]]) -> Answer:
        """As Shared.change.

        Raises:
            MalformedShared: the object is damaged.
            SharedContended: others were quicker, again and again.
            tpu.checkpoint.retry.StorageUnavailable: the bucket does not answer.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((step, answer))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all())
        return await answer

    async def _write_all(self) -> None:
        while self._waiting:
            if (wait_s := self._next_write - self._clock.monotonic()) > 0:
                await self._clock.sleep(wait_s)
            batch, self._waiting = self._waiting, []
            try:
                answers = await self._apply([step for step, _ in batch])
            except Exception as error:  # each of those who wait gets it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():  # who was cancelled meanwhile does not care
                        future.set_result(answer)

    async def _apply(self, steps: list[Callable[[State], tuple[State, Any]]]) -> list[Any]:
        pause_s = _FIRST_RETRY_S
        for _ in range(_GIVE_UP_AFTER):
            before, generation = await self._load()
            value, answers = before, []
            for step in steps:
                value, answer = step(value)
                answers.append(answer)
            if value == before:
                return answers
            try:
                await asyncio.to_thread(self._store, value, generation)
            except (ObjectExists, StaleGeneration):
                await self._clock.sleep(pause_s * self._chance.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
                continue
            self._next_write = self._clock.monotonic() + WRITE_EVERY_S
            return answers
        raise SharedContended(f"{self._url} was changed by others before each of {_GIVE_UP_AFTER} tries")

    def _store(self, value: State, generation: int | None) -> None:
        data = json.dumps(self._to_json(value)).encode()
        if generation is None:
            objects.create_exclusive(self._url, data)
        else:
            objects.compare_and_set(self._url, data, generation)

    async def _load(self) -> tuple[State, int | None]:
        found = await asyncio.to_thread(objects.read, self._url)
        if found is None:
            return self._empty, None
        data, generation = found
        try:
            return self._from_json(json.loads(data)), generation
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise MalformedShared(
                f"{self._url} cannot be understood ({error!r}); it is only a memory of how zones have served, and "
                "may be deleted"
            ) from error

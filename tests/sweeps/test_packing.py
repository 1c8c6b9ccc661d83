"""Which sweeps can be packed, which trials train together, and what becomes of them: decisions without a machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tpu.emulator.gcs import GcsServer
from tpu.runs.lanes import lane_verdict
from tpu.slices.verdict import Verdict, VerdictKind
from tpu.sweeps.board import Live
from tpu.sweeps.book import SweepBook, sweep_directory
from tpu.sweeps.config import Search, Sweep, SweepError, parse_search, parse_sweep
from tpu.sweeps.outcome import Outcome
from tpu.sweeps.packing import pack_name, pack_run, runs_of
from tpu.sweeps.pruning import Judge
from tpu.sweeps.queue import Queue, Running
from tpu.sweeps.search import Searcher
from tpu.sweeps.trial import NAME_LENGTH, Trial, trial_run
from tpu.sweeps.wishes import WishBox

RATE, CLIP = "training.optimizer.learning_rate", "training.optimizer.clip_norm"
ICL = {"training": {"workload": {"kind": "icl"}}, "slice": {"chips": 1}}
COMMAND = {"command": "python train.py ${args}", "slice": {"chips": 1}}


def parse(run: dict[str, Any] | None = None, **values: Any) -> Sweep:
    space = {"run": ICL | (run or {}), "parameters": {RATE: {"values": [0.1, 0.2]}}, "pack": 2}
    return parse_sweep(space | values, "mine")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"parameters": {"training.workload.tasks": {"values": [1, 2, 4]}, "steps": {"values": [10, 20]}}},
        {"parameters": {RATE: {"values": [0.1]}, "training.workload.batch": {"value": 8}}, "seeds": 2},
        {"parameters": {CLIP: {"values": [0.5, 1.0]}}},
        {"run": {"slice": {"accelerator_type": "v5litepod-1"}}},
        {"method": "random", "trials": 9, "parameters": {RATE: {"min": 0.1, "max": 0.2}}, "at_once": 4},
    ],
)  # fmt: skip
def test_what_differs_in_numbers_can_be_packed(values: dict[str, Any]):
    assert parse(**values).search.pack == 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"pack": 1}, "pack: Input should be greater than or equal to 2 (found 1)"),
        ({"pack": 100}, "pack: Input should be less than or equal to 64 (found 100)"),
        ({"at_once": 1}, "at_once: 1 trial(s) at once cannot be 2 to a program"),
        (
            {"run": COMMAND | {"training": None}, "parameters": {"lr": {"values": [1, 2]}}},
            "leave pack out for a program of your own",
        ),
        (
            {"run": {"framework": "xla"}},
            "pack: only framework jax trains several trials in one program; found xla",
        ),
        ({"run": {"slice": {"chips": 2}}}, "found 2 a trial: set run.slice.chips: 1"),
        ({"run": {"slice": {}}}, "found 4 a trial: set run.slice.chips: 1"),
        (
            {"parameters": {"training.workload.batch": {"values": [8, 16]}}},
            "parameters: training.workload.batch cannot differ within a pack",
        ),
        (
            {"parameters": {"variables.X": {"values": ["1", "2"]}}},
            "parameters: variables.X cannot differ within a pack",
        ),
        (
            {"parameters": {CLIP: {"values": [None, 1.0]}}},
            f"parameters: {CLIP} is null in one trial and a number in another",
        ),
        (
            {"run": {"training": ICL["training"] | {"shard_parameters": True}}},
            "training.shard_parameters: the runs of a pack are whole on one chip",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused_at_once_in_one_sentence(values: dict[str, Any], sentence: str):
    with pytest.raises(SweepError) as refused:
        parse(**values)
    assert sentence in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_pack_is_a_run_that_trains_no_more_than_its_trials():
    base = parse({"max_cost": 5, "slice": {"chips": 1, "price_an_hour": 1.0}, "steps": 100}).run
    trials = [trial_run(base, {"steps": steps}, None) for steps in (100, 300)]
    pack = pack_run(base, 7, trials)
    assert (pack.name, pack.steps, pack.commits, pack.max_cost) == ("mine-pack0007", 300, False, None)
    assert pack.slice == base.slice
    assert len(pack_name("s" * NAME_LENGTH, 4999)) == 40
    begun = [Trial(n, n, {}, None, f"t{n}", pack=pack) for n, pack in enumerate([None, 0, 0, 1])]
    assert runs_of("s", begun) == ["s-pack0000", "s-pack0001", "t0", "t1", "t2", "t3"]


@pytest.mark.parametrize(
    ("said", "gang", "wanted"),
    [
        ("finished", VerdictKind.PREEMPTED, VerdictKind.FINISHED),
        ("diverged", VerdictKind.FINISHED, VerdictKind.USER_FAILURE),
        ("failed", VerdictKind.PREEMPTED, VerdictKind.USER_FAILURE),
        ("left", VerdictKind.PREEMPTED, VerdictKind.PREEMPTED),
        (None, VerdictKind.USER_FAILURE, VerdictKind.USER_FAILURE),
        (None, VerdictKind.FINISHED, VerdictKind.INFRASTRUCTURE),
    ],
)
def test_the_verdict_on_a_run_of_a_pack(said: str | None, gang: VerdictKind, wanted: VerdictKind):
    word = None if said is None else {"end": said, "reason": "why"}
    verdict = lane_verdict(word, Verdict(gang, "the gang"))
    assert verdict.kind is wanted
    assert verdict.final == (said == "diverged")


class Trainer:
    """Ends each gang's trials when it is told to."""

    def __init__(self) -> None:
        self.gangs: list[tuple[list[int], list[int]]] = []  # trials that train, and all of their pack
        self.ends: dict[int, asyncio.Future[Outcome]] = {}
        self.hands_on: dict[int, Callable[[], bool]] = {}
        self.live: dict[int, Live] = {}

    def __call__(
        self, batch: Sequence[Running], pack: Sequence[Trial], hands_on: Callable[[], bool]
    ) -> Sequence[Coroutine[Any, Any, Outcome]]:
        self.gangs.append(([one.trial.number for one in batch], [one.number for one in pack]))
        for one in batch:
            self.ends[one.trial.number] = asyncio.get_running_loop().create_future()
            self.hands_on[one.trial.number] = hands_on
            self.live[one.trial.number] = one.live
            one.live.placed = True
        return [self._train(one.trial.number) for one in batch]

    async def _train(self, number: int) -> Outcome:
        return await self.ends[number]

    def end(self, number: int, state: Any = "finished") -> None:
        self.ends[number].set_result(Outcome(state, value=1.0, logged=("loss",)))


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a local server, which the environment leads to."""
    server = GcsServer(tmp_path / "objects", tmp_path / "log")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.start())
    yield "gs://relay-emulated"
    server.stop()


def queue_of(bucket: str, name: str, search: Search, folder: Path) -> Queue:
    sweep_dir = sweep_directory(bucket, name)
    searcher = Searcher(search, name, f"sqlite:///{folder}/study.db")
    return Queue(
        name,
        search,
        SweepBook(sweep_dir),
        searcher,
        Judge(None, name, search.metric),
        WishBox(sweep_dir),
        print,
    )


async def until(condition: Callable[[], bool], carrying: asyncio.Task[None]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            assert not carrying.done(), carrying.exception()
            await asyncio.sleep(0.05)


async def test_trials_train_a_pack_at_a_place_and_go_on_in_the_pack_that_they_began_in(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tpu.sweeps.queue.LOOK_S", 0.05)
    search = parse_search({"parameters": {RATE: {"values": [1e-3, 2e-3, 3e-3, 4e-3, 5e-3]}}, "pack": 2})

    async def two() -> int:
        return 2

    async def nothing() -> None: ...

    trainer, queue = Trainer(), queue_of(bucket, "packs", search, tmp_path)
    await queue.take_up()
    carrying = asyncio.create_task(queue.carry(trainer, two, nothing))
    await until(lambda: len(trainer.gangs) == 2, carrying)
    trainer.end(0)
    book = SweepBook(sweep_directory(bucket, "packs"))
    await until(lambda: 0 in book.outcomes(), carrying)
    assert trainer.gangs == [([0, 1], [0, 1]), ([2, 3], [2, 3])]  # trial 1 has the chip still
    assert trainer.hands_on[1]()  # one trial is left
    assert not trainer.hands_on[2]()
    carrying.cancel()
    await asyncio.gather(carrying, return_exceptions=True)

    trainer, queue = Trainer(), queue_of(bucket, "packs", search, tmp_path)
    await queue.take_up()
    carrying = asyncio.create_task(queue.carry(trainer, two, nothing))
    await until(lambda: len(trainer.gangs) == 2, carrying)
    trainer.end(2)
    assert trainer.hands_on[3]()
    trainer.live[3].free()  # what is left of it needs no chip: the next pack begins
    await until(lambda: len(trainer.gangs) == 3, carrying)
    assert trainer.gangs == [([1], [0, 1]), ([2, 3], [2, 3]), ([4], [4])]
    assert not trainer.hands_on[1]()
    trainer.live[4].placed = False  # it has begun, and still looks for its chip
    assert trainer.hands_on[1]()
    for number in (1, 3, 4):
        trainer.end(number)
    await carrying
    assert [trial.pack for trial in queue.board.began.values()] == [0, 0, 1, 1, 2]

import concurrent.futures
from dataclasses import replace

import pytest

from tests.runs.conftest import Track
from tpu.checkpoint import objects
from tpu.checkpoint.fence import open_attempt, update_fence
from tpu.runs.config import parse_run_config
from tpu.runs.record import (
    RunNameTaken,
    RunNotFound,
    RunRecord,
    TooFewSteps,
    check_startable,
    correct,
    create_or_take_up,
    data_hash,
    extend,
    load_record,
)

CODE = {"source": "a tree", "sha256": "ab" * 32}


def record(steps=1000, parent=None, extensions=(), **checkpoints) -> RunRecord:
    config = parse_run_config(
        {"name": "r", "training": {"workload": {"kind": "icl"}}, "steps": steps, "checkpoints": checkpoints}
    )
    return RunRecord(config, None, CODE, 1.7e9, parent, extensions)


@pytest.mark.parametrize(
    ("made", "stops"),
    [
        (record(every=300), (300, 600, 900, 1000)),
        (record(), (200, 400, 600, 800, 1000)),
        # An extension moves no border, and goes on in steps of the same length.
        (record(1500, extensions=((1000, 1500),), every=300), (300, 600, 900, 1000, 1200, 1500)),
        (record(1500, extensions=((1000, 1500),)), (200, 400, 600, 800, 1000, 1200, 1400, 1500)),
        (record(90, extensions=((40, 60), (60, 90)), every=20), (20, 40, 60, 80, 90)),
        (record(10000, extensions=((1000, 10000),), log_spaced=4), (1, 10, 100, 1000, 10000)),
        (record(50, extensions=((30, 50),), at=[7, 30]), (7, 30, 50)),
        # A fork begins where its parent was.
        (record(parent={"run": "p", "step": 600, "hash": "h"}, every=300), (900, 1000)),
        (record(parent={"run": "p", "step": 650, "hash": "h"}, every=300), (900, 1000)),
    ],
)
def test_segments(made, stops):
    assert made.segments == stops


def test_a_record_comes_back_whole():
    made = record(1500, {"run": "p", "step": 600, "hash": "h"}, ((1000, 1500),), every=300)
    assert RunRecord.from_json(made.to_json()) == made


def test_a_hash_covers_the_parent_but_not_how_far_the_run_goes():
    assert record(every=300).hash == record(1500, extensions=((1000, 1500),), every=20).hash
    of_600 = record(parent={"run": "p", "step": 600, "hash": "h"})
    assert of_600.hash != record().hash
    assert of_600.hash != record(parent={"run": "p", "step": 400, "hash": "h"}).hash
    assert of_600.hash == record(parent={"run": "another name", "step": 600, "hash": "h"}).hash


def test_a_run_is_created_once_and_taken_up_by_its_equal(track: Track):
    first = track.record("one", steps=60)
    again = track.record("one", steps=60, every=7)
    assert again == first
    with pytest.raises(RunNameTaken, match=r'variables.NUMPY_SIZE: null → "9"'):
        track.record("one", steps=60, variables={"NUMPY_SIZE": "9"})
    with pytest.raises(RunNameTaken, match=r"has 60 steps, not 80.*relay extend one --steps 80"):
        track.record("one", steps=80)
    assert load_record(track.directory("one")) == first


def test_of_many_that_create_a_run_at_once_one_wins(track: Track):
    run_dir = track.directory("race")

    def create(number: int) -> RunRecord:
        return create_or_take_up(run_dir, replace(record(every=100), created=float(number)))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(create, range(8)))
    assert len({answer.created for answer in answers}) == 1


def test_a_run_that_never_began_takes_another_configuration(track: Track):
    run_dir = track.directory("typo")
    first = track.record("typo", steps=60, slice={"zone": "us-central2-a"})
    wanted = replace(first, config=track.numpy_run("typo", steps=80), created=first.created + 1)
    check_startable(run_dir, first, wanted)
    made, changed = correct(run_dir, wanted)
    assert (made.config, made.uid) == (wanted.config, first.uid)
    assert changed == ['slice.zone: "us-central2-a" → "us-central2-b"', "steps: 60 → 80"]
    assert load_record(run_dir) == made
    # Once a gang was started its name stands for its numbers, whether it committed anything or not.
    update_fence(run_dir, lambda fence: open_attempt(fence, 1))
    other = replace(made, config=track.numpy_run("typo", steps=20))
    for refused in (lambda: check_startable(run_dir, made, other), lambda: correct(run_dir, other)):
        with pytest.raises(RunNameTaken, match="has 80 steps, not 20"):
            refused()
    assert load_record(run_dir) == made


def test_a_run_is_extended_and_remembers_it(track: Track):
    track.record("long", steps=40)
    extend(track.directory("long"), 60)
    made = extend(track.directory("long"), 80)
    assert (made.config.steps, made.extensions) == (80, ((40, 60), (60, 80)))
    assert load_record(track.directory("long")) == made
    with pytest.raises(TooFewSteps, match="long has 80 steps already"):
        extend(track.directory("long"), 80)
    with pytest.raises(RunNotFound, match=r"no run none in gs://.*relay runs"):
        extend(track.directory("none"), 80)


def test_two_extensions_at_once_never_lose_one(track: Track):
    track.record("both", steps=40)
    run_dir = track.directory("both")

    def one(steps: int) -> bool:
        try:
            extend(run_dir, steps)
        except (objects.StaleGeneration, TooFewSteps):
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        done = sum(pool.map(one, (50, 60, 70, 80)))
    assert done == len(load_record(run_dir).extensions) >= 1


def test_only_text_has_a_hash(tmp_path):
    def config(text):
        training = {"workload": {"kind": "bytelm", "text": [str(text)]}}
        return parse_run_config({"name": "r", "training": training})

    file = tmp_path / "text"
    file.write_bytes(b"abc")
    before = data_hash(config(file))
    file.write_bytes(b"abd")
    assert before != data_hash(config(file))
    assert data_hash(record().config) is None

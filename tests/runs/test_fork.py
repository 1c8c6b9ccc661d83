"""Extended and forked runs, trained on emulated slices."""

from __future__ import annotations

import asyncio

import pytest

from tests.runs.conftest import Track
from tpu.checkpoint import files, objects
from tpu.checkpoint.digest import NoSuchCheckpoint
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.paths import checkpoint_url
from tpu.checkpoint.restore import Damaged, read_manifest
from tpu.checkpoint.verify import verify_run
from tpu.connection import Connection
from tpu.runs.config import RunConfigError, parse_run_config
from tpu.runs.controller import this_process
from tpu.runs.fork import fork
from tpu.runs.opening import ForkUnfinished, open_run
from tpu.runs.record import (
    RunNameTaken,
    RunRecord,
    TooFewSteps,
    code_url,
    create_or_take_up,
    data_hash,
    extend,
    load_record,
)
from tpu.runs.stopping import NoListener

SIZES = {"NUMPY_SIZE": "32"}


async def test_an_extended_run_has_the_bits_of_one_that_was_long_from_the_start(track: Track):
    await asyncio.gather(
        track.train(track.numpy_run("long", steps=80, variables=SIZES)),
        track.train(track.numpy_run("short", steps=40, variables=SIZES)),
    )
    assert track.digest("short") == track.digest("long", 40) != track.digest("long")
    record = extend(track.directory("short"), 80)
    assert record.segments == (20, 40, 60, 80)
    await track.train(record.config)
    assert track.digest("short") == track.digest("long")
    assert track.losses("short") == track.losses("long")
    assert [commit.attempt for commit in track.fence("short").commits] == [1, 1, 2, 2]
    track.assert_nothing_left()


async def test_a_fork_goes_on_from_its_parent_under_other_settings(track: Track):
    parent = await track.train(track.numpy_run("parent", steps=40, variables=SIZES))
    parent_dir, same_dir, other_dir = (track.directory(name) for name in ("parent", "same", "other"))

    same = fork(parent_dir, 20, same_dir, "same", {"variables.NUMPY_STEP_SECONDS": "0.001"})
    other = fork(parent_dir, 20, other_dir, "other", {"seed": 5, "steps": 60, "name": "ignored"})
    assert same.parent == other.parent == {"run": "parent", "step": 20, "hash": parent.hash}
    assert len({parent.hash, same.hash, other.hash}) == 3
    assert (other.config.name, other.config.steps, other.segments) == ("other", 60, (40, 60))
    assert [(c.step, c.attempt) for c in track.fence("other").commits] == [(20, 0)]
    assert track.digest("other") == track.digest("parent", 20)

    await asyncio.gather(*(track.train(load_record(each).config) for each in (same_dir, other_dir)))
    assert track.digest("same") == track.digest("parent")  # how long a step lasts changes no number
    assert track.digest("other", 40) != track.digest("parent", 40)
    assert [step for step, _ in track.losses("other")] == list(range(21, 61))

    child_dir = track.directory("grandchild")
    child = fork(
        other_dir, 20, child_dir, "grandchild", {"steps": 30}
    )  # of the very checkpoint it was forked at
    assert child.parent == {"run": "other", "step": 20, "hash": other.hash}
    await track.train(child.config)
    assert track.digest("grandchild", 20) == track.digest("parent", 20)
    manifest = read_manifest(child_dir, track.fence("grandchild").commits[0])
    assert (manifest.attempt, manifest.parent) == (0, "other@20")
    assert all(
        verdict.whole for name in ("other", "grandchild") for verdict in verify_run(track.directory(name))
    )
    track.assert_nothing_left()


@pytest.fixture
async def parent(track: Track) -> str:
    """The directory of a run whose first segment of two is trained."""
    run = track.numpy_run("parent", steps=40)
    async with track.driving(run) as driver:
        await track.segment(driver, 20)
        await driver.clean_up("enough")
    return track.directory("parent")


async def test_a_fork_that_cannot_be_changes_nothing(track: Track, parent: str):
    taken = track.directory("taken")
    track.record("taken")
    before = files.names(taken), objects.read(f"{taken}/run.json")
    with pytest.raises(RunNameTaken, match="there is a run taken already; nothing was changed"):
        fork(parent, 20, taken, "taken", {})
    assert (files.names(taken), objects.read(f"{taken}/run.json")) == before

    fresh = track.directory("fresh")
    with pytest.raises(NoSuchCheckpoint, match="no checkpoint at step 33; it has: 20"):
        fork(parent, 33, fresh, "fresh", {})
    with pytest.raises(TooFewSteps, match="begins at step 20 and would end at 20: --set steps=N"):
        fork(parent, 20, fresh, "fresh", {"steps": 20})
    with pytest.raises(RunConfigError, match="stepz: there is no such field"):
        fork(parent, 20, fresh, "fresh", {"stepz": 50})
    with pytest.raises(RunConfigError, match="name: "):
        fork(parent, 20, fresh, "Not A Name", {})
    shard = next(url for url in files.names(checkpoint_url(parent, 20, 1)) if url.endswith(".safetensors"))
    files.write(shard, b"\0" + files.read(shard)[1:])
    with pytest.raises(Damaged):
        fork(parent, 20, fresh, "fresh", {})
    assert files.names(fresh) == []


async def test_an_interrupted_fork_never_begins_at_step_0_and_is_finished_by_the_same_fork(
    track: Track, parent: str
):
    run_dir = track.directory("half")
    record = fork(parent, 20, run_dir, "half", {"seed": 3})
    fence = load_fence(run_dir)
    files.remove([f"{run_dir}/fence.json"])  # as if its process had died just before
    with pytest.raises(ForkUnfinished, match=r"the same `relay fork parent@20 half …` finishes it"):
        async with open_run(
            record.config,
            this_process("t"),
            secrets={},
            report=print,
            listener=NoListener(),
            connection=Connection.from_environment(track.emulator.env),
        ):
            pass
    with pytest.raises(RunNameTaken):
        fork(parent, 20, run_dir, "half", {"seed": 4})
    assert fork(parent, 20, run_dir, "half", {"seed": 3}) == record
    assert load_fence(run_dir) == fence


async def test_a_fork_takes_the_hash_of_the_text_that_it_trains_on(track: Track, tmp_path):
    """The text belongs to the fork's own numbers: it may have changed since, or be another one."""
    texts = [tmp_path / name for name in ("one", "two")]
    for text in texts:
        text.write_text(f"this is text {text.name} " * 20)
    training = {"workload": {"kind": "bytelm", "text": [str(texts[0])]}}
    run = track.numpy_run("reads", steps=40).model_dump(mode="json") | {"training": training}
    config = parse_run_config(run | {"command": None, "contract": False})
    made = RunRecord(config, data_hash(config), {"source": "nowhere", "sha256": "0" * 64}, 0.0)
    run_dir = track.directory("reads")
    create_or_take_up(run_dir, made)
    files.write(code_url(run_dir, made.code), b"")
    await _commit_something(track, run_dir)

    same = fork(run_dir, 20, track.directory("same"), "same", {})
    other = fork(run_dir, 20, track.directory("other"), "other", {"training.workload.text": [str(texts[1])]})
    assert same.data_sha256 == made.data_sha256
    assert other.data_sha256 not in (None, made.data_sha256)
    texts[0].write_text("changed")
    changed = fork(run_dir, 20, track.directory("changed"), "changed", {})
    assert changed.data_sha256 not in (made.data_sha256, other.data_sha256)


async def _commit_something(track: Track, run_dir: str) -> None:
    """A checkpoint of step 20 out of a run of its own: what is in it does not matter here."""
    async with track.driving(track.numpy_run("source", steps=40)) as driver:
        await track.segment(driver, 20)
        await driver.clean_up("enough")
    source = track.directory("source")
    for url in files.names(f"{source}/checkpoints"):
        files.write(url.replace(source, run_dir), files.read(url))
    files.write(f"{run_dir}/fence.json", files.read(f"{source}/fence.json"))

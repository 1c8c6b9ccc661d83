"""What is restored: the newest commit whose bytes are what was written, and nothing that the fence does not name."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.checkpoint.bucket import Bucket, opened
from tests.checkpoint.saving import assert_holds, save_steps, saver_of, state_at
from tpu.checkpoint import files
from tpu.checkpoint.digest import NoSuchCheckpoint, parameters_digest, run_digest
from tpu.checkpoint.export import export
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.paths import checkpoint_url
from tpu.checkpoint.restore import restore
from tpu.checkpoint.shards import decode
from tpu.checkpoint.tree import leaves_of
from tpu.checkpoint.verify import verify_run


def test_what_was_saved_comes_back(bucket: Bucket):
    run_dir = bucket.new_run()
    save_steps(run_dir, 10, 20)
    restored = restore(run_dir, load_fence(run_dir))
    assert restored is not None
    assert (restored.step, restored.attempt, restored.skipped) == (20, 1, ())
    assert_holds(restored.arrays, 20)
    assert restored.manifest.environment == {"threads": "1"}


def test_C2_any_damaged_file_leads_to_the_commit_before(bucket: Bucket):
    """One byte of each file of the newest checkpoint in turn, behind the server's back."""
    run_dir = bucket.new_run()
    save_steps(run_dir, 10, 20)
    fence = load_fence(run_dir)
    for url in files.names(checkpoint_url(run_dir, 20, 1)):
        path, rng = bucket.file(url), random.Random(url)
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        restored = restore(run_dir, fence)
        assert restored is not None
        assert restored.step == 10
        assert_holds(restored.arrays, 10)
        (skipped,) = restored.skipped
        assert (skipped.step, skipped.attempt) == (20, 1)
        assert url.rpartition("/")[2] in skipped.reason
        path.write_bytes(whole)
    assert all(verdict.whole for verdict in verify_run(run_dir))


@pytest.mark.parametrize(
    "harm", ["every byte of the header", "cut", "longer", "empty", "gone", "other attempt"]
)
def test_C2_damage_of_every_kind_is_found(bucket: Bucket, harm: str):
    run_dir = bucket.new_run()
    save_steps(run_dir, 10)
    opened(run_dir, 2)
    save_steps(run_dir, 10, attempt=2)
    shards = next(u for u in files.names(checkpoint_url(run_dir, 10, 2)) if u.endswith(".safetensors"))
    whole = files.read(shards)
    changes = {
        "every byte of the header": [
            whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(0, 64, 7)
        ],
        "cut": [whole[:-1]],
        "longer": [whole + b"\0"],
        "empty": [b""],
        "gone": [None],
        "other attempt": [files.read(shards.replace("/10/2/", "/10/1/")) + b" "],
    }[harm]
    for content in changes:
        if content is None:
            files.remove([shards])
        else:
            files.write(shards, content)
        restored = restore(run_dir, load_fence(run_dir))
        assert restored is not None
        assert (restored.step, restored.attempt) == (10, 1)
        assert [v.whole for v in verify_run(run_dir)] == [True, False]


def test_C3_only_incomplete_checkpoints_is_nothing(bucket: Bucket):
    run_dir = bucket.new_run()
    save_steps(run_dir, 10)
    folder = checkpoint_url(run_dir, 10, 1)
    for url in files.names(folder):  # a whole checkpoint that no fence names, and a piece of one
        files.write(url.replace("/10/1/", "/30/1/"), files.read(url))
    files.write(f"{checkpoint_url(run_dir, 40, 1)}/host-0.json", b"{}")
    fence = load_fence(run_dir)
    files.remove(files.names(folder))
    assert restore(run_dir, fence) is None


def test_C4_order_is_by_step_and_attempt_not_by_time(bucket: Bucket):
    run_dir = bucket.new_run()
    save_steps(run_dir, 30)
    opened(run_dir, 2)
    save_steps(run_dir, 20, attempt=2)  # written later, but an earlier step
    restored = restore(run_dir, load_fence(run_dir))
    assert restored is not None
    assert (restored.step, restored.attempt) == (30, 1)
    save_steps(run_dir, 30, attempt=2)
    restored = restore(run_dir, load_fence(run_dir))
    assert restored is not None
    assert (restored.step, restored.attempt) == (30, 2)


def test_C4_more_steps_than_a_listing_has_in_a_page(bucket: Bucket):
    """Steps are numbers, not text: 9 is before 10."""
    run_dir = bucket.new_run()
    save_steps(run_dir, 9, 10)
    restored = restore(run_dir, load_fence(run_dir))
    assert restored is not None
    assert restored.step == 10


def test_P9_what_a_closed_attempt_wrote_is_not_restored(bucket: Bucket):
    run_dir = bucket.new_run()
    save_steps(run_dir, 10)
    with saver_of(run_dir, attempt=1) as zombie:
        opened(run_dir, 2)
        zombie.save(20, leaves_of(state_at(20)))
    assert files.names(checkpoint_url(run_dir, 20, 1)), "the zombie wrote everything"
    restored = restore(run_dir, load_fence(run_dir))
    assert restored is not None
    assert restored.step == 10


def test_export_is_plain_safetensors(bucket: Bucket, tmp_path):
    run_dir = bucket.new_run()
    save_steps(run_dir, 10)
    arrays_path, about_path = export(run_dir, 10, tmp_path)
    with open(arrays_path, "rb") as file:
        assert_holds(decode(file.read()), 10)
    with open(about_path) as file:
        assert '"step": 10' in file.read()
    with pytest.raises(NoSuchCheckpoint, match="step 11"):
        export(run_dir, 11, tmp_path)


def test_the_digest_is_of_parameters_alone(bucket: Bucket):
    run_dir = bucket.new_run()
    save_steps(run_dir, 10, 20)
    leaves = {name: np.asarray(leaf) for name, leaf in leaves_of(state_at(20)).items()}
    assert run_digest(run_dir) == run_digest(run_dir, 20) == parameters_digest(leaves)
    assert run_digest(run_dir, 10) != run_digest(run_dir, 20)
    assert parameters_digest({**leaves, "optimizer/0": np.zeros(3)}) == parameters_digest(leaves)
    assert parameters_digest(
        {**leaves, "params/b": leaves["params/b"].astype("float64")}
    ) != parameters_digest(leaves)

"""Text by its many names, and the hash that tells when it changed."""

import hashlib
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tpu.checkpoint import files
from tpu.train.bytelm import ByteLmWorkload, split
from tpu.train.settings import ByteLm
from tpu.train.text import DataChangedError, TextNotFoundError, read_text, text_sha256


def test_files_of_a_glob_come_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first ")
    assert read_text([str(tmp_path / "*.txt")]) == b"first second"
    assert read_text([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")]) == b"secondfirst "


def test_text_of_the_bucket(bucket):
    files.write(f"{bucket}/text/b.txt", b"second")
    files.write(f"{bucket}/text/a.txt", b"first ")
    assert read_text([f"{bucket}/text/*.txt"]) == b"first second"
    assert read_text([f"{bucket}/text/b.txt"]) == b"second"
    for source in (f"{bucket}/text/c.txt", f"{bucket}/other/*"):
        with pytest.raises(TextNotFoundError, match="no text at 'gs://relay-emulated/"):
            read_text([source])


def test_a_module_is_its_source():
    source = Path(pydoc_data.topics.__file__).read_bytes()
    assert text_sha256(["python:pydoc_data.topics"]) == hashlib.sha256(source).hexdigest()


@pytest.mark.parametrize(
    "source", ["/nowhere/*.txt", "/nowhere.txt", "python:no_such_module", "python:a.b", "python:sys"]
)
def test_a_source_without_text_is_named(source):
    with pytest.raises(TextNotFoundError, match=source.replace("*", r"\*")):
        read_text([source])


def test_changed_text_is_refused_with_both_hashes(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be " * 50)
    settings = ByteLm(text=[str(text)], context=8)
    recorded = text_sha256(settings.text)
    assert len(ByteLmWorkload(settings, 0, recorded).load_data()["text"]) == 855
    text.write_bytes(b"to be or not to bee" * 50)
    with pytest.raises(DataChangedError, match=f"has changed: this run started on sha256 {recorded[:16]}"):
        ByteLmWorkload(settings, 0, recorded).load_data()


def test_the_last_part_is_held_out():
    training, held_out = split(bytes(range(100)), ByteLm(held_out=0.2, context=4))
    assert bytes(training) == bytes(range(80))
    assert bytes(held_out) == bytes(range(80, 100))


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match=r"100 bytes: after holding out 0\.1"):
        split(bytes(100), ByteLm(context=64))


def test_windows_reach_both_ends_of_the_text():
    import jax

    workload = ByteLmWorkload(ByteLm(context=4, batch=64), 0)
    batch = np.asarray(workload.batch({"text": jax.numpy.arange(8, dtype=np.uint8)}, jax.random.key(0)))
    assert (np.diff(batch, axis=1) == 1).all()
    assert batch.min() == 0
    assert batch.max() == 7


def test_controller_modules_import_no_jax():
    code = "import sys, tpu.train.settings, tpu.train.text; assert not {'jax', 'gcsfs'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

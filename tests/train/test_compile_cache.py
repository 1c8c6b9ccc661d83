"""Compiled programs survive their host, and broken ones harm nobody."""

from tpu.train.compile_cache import Background, cache_key, open_cache


def test_a_fresh_host_finds_what_another_compiled(bucket, tmp_path):
    first = open_cache(tmp_path / "host-a", "key", "run-0", bucket)
    first.fetch()
    (first.working / "jit_f-123-cache").write_bytes(b"program")
    first.publish()
    fresh = open_cache(tmp_path / "host-b", "key", "run-0", bucket)
    fresh.fetch()
    assert (fresh.working / "jit_f-123-cache").read_bytes() == b"program"
    other = open_cache(tmp_path / "host-b", "another-key", "run-0", bucket)
    other.fetch()
    assert list(other.working.iterdir()) == []


def test_what_a_killed_process_wrote_in_part_is_gone_at_the_next_start(tmp_path):
    killed = open_cache(tmp_path, "key", "run-0", None)
    (killed.working / "jit_f-123-cache").write_bytes(b"prog")
    following = open_cache(tmp_path, "key", "run-0", None)
    following.fetch()
    assert list(following.working.iterdir()) == []


def test_two_runs_of_a_host_share_whole_programs_only(tmp_path):
    one, other = (open_cache(tmp_path, "key", name, None) for name in ("one", "other"))
    (one.working / "jit_f-123-cache").write_bytes(b"program")
    other.fetch()
    assert list(other.working.iterdir()) == []
    one.publish()
    one.close()
    other.fetch()
    assert (other.working / "jit_f-123-cache").read_bytes() == b"program"


def test_no_cache_is_no_failure(tmp_path, monkeypatch, capsys):
    cache = open_cache(tmp_path, "key", "run-0", "gs://relay-emulated")
    monkeypatch.setattr(
        "tpu.checkpoint.files.names", lambda url: (_ for _ in ()).throw(PermissionError("403"))
    )
    cache.fetch()
    assert "could not fetch compiled programs: PermissionError: 403" in capsys.readouterr().err


def test_a_wait_has_an_end(capsys):
    import threading

    never = threading.Event()
    Background("fetching", lambda: never.wait(60) and None).wait(0.01)
    never.set()
    assert "fetching: not done after 0.01 s, going on without" in capsys.readouterr().err


def test_keys_tell_settings_apart():
    assert cache_key({"a": 1, "b": 2}) == cache_key({"b": 2, "a": 1}) != cache_key({"a": 1, "b": 3})

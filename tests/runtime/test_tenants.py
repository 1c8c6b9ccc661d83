"""Chips of a host and who has them: earlier tenants are ended, later ones respected, foreign holders named."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.supervised import Home, eventually
from tpu.runtime import supervisor

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(100)
"""
FOREVER = "echo up; while :; do sleep 1000; done"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A host of four chips."""
    home = Home(tmp_path / "home")
    (tmp_path / "home").mkdir()
    chips = tmp_path / "chips"
    chips.mkdir()
    for chip in range(4):
        (chips / str(chip)).touch()
    home.environment["RELAY_CHIP_DEVICES"] = f"/dev/no-such-chip*:{chips}/[0-9]*"
    yield home
    home.close()


def tenant(term: int, *chips: int) -> dict:
    return {"tenant": {"term": term, "chips": list(chips)}}


def running(home: Home, run: str) -> bool:
    return home.status(run)["state"] == "running"


def test_a_new_tenant_ends_what_earlier_ones_left_on_its_chips_and_nothing_else(home: Home):
    for run, chip in (("a", 0), ("b", 1), ("c", 2)):
        assert home.start(FOREVER, run, **tenant(chip + 1, chip))["rc"] == 0
    assert home.clear(4, 0, 1) | {"ended": None} == {
        "rc": 0, "confirmed": True, "free": True, "left": [], "ended": None, "busy": "",
    }  # fmt: skip
    assert [running(home, run) for run in "abc"] == [False, False, True]
    # What was ended is not started again by a flow that knows nothing of it.
    assert home.start(FOREVER, "a", attempt=2, **tenant(1, 0))["rc"] == supervisor.REFUSED_STALE
    assert home.start(FOREVER, "d", **tenant(4, 0, 1))["rc"] == 0


def test_a_program_that_left_its_session_and_shell_is_ended_too(home: Home):
    assert home.start("setsid sleep 1000 & disown; sleep 1000", "a", **tenant(1, 0))["rc"] == 0
    eventually(lambda: sleepers(home) == 2, "both run")
    assert home.clear(2, 0)["ended"] == ["a/1"]
    assert sleepers(home) == 0


def sleepers(home: Home) -> int:
    marker = f"RELAY_ATTEMPT_DIR={home.folder('a')}".encode()
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found += marker in environment and b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()[:5]
        except OSError:
            continue
    return found


def test_an_old_lease_clears_nothing_under_a_new_one(home: Home):
    home.clear(5, 0, 1)
    home.start(FOREVER, "new", **tenant(5, 0, 1))
    refused = home.clear(4, 1, 2)
    assert refused["rc"] == supervisor.REFUSED_STALE
    assert "chip 1 by a lease of term 5" in refused["error"]
    assert running(home, "new")


def test_chips_that_a_foreign_process_holds_are_told_with_its_name_and_it_lives_on(home: Home):
    device = Path(home.environment["RELAY_CHIP_DEVICES"].rpartition(":")[2]).parent / "2"
    with subprocess.Popen([sys.executable, "-c", HOLD, device], stdout=subprocess.PIPE) as foreign:
        try:
            assert foreign.stdout is not None
            foreign.stdout.readline()
            told = home.clear(1, 2, 3)
            assert (told["rc"], told["confirmed"], told["free"]) == (1, True, False)
            assert told["busy"].startswith(f"chip 2 is held by pid {foreign.pid} (")
            refused = home.start(FOREVER, "a", **tenant(1, 2))
            assert refused["rc"] == supervisor.REFUSED_BUSY
            assert "Device or resource busy: chip 2" in refused["error"]
            assert home.start(FOREVER, "a", **tenant(1, 3))["rc"] == 0
            assert foreign.poll() is None
        finally:
            foreign.kill()
    assert home.clear(2, 2, 3)["free"]


def test_looking_at_a_chip_leaves_it_free(home: Home):
    home.clear(1, 0, 1, 2, 3)
    for device in supervisor_devices(home):
        with open(device) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def supervisor_devices(home: Home) -> list[Path]:
    return sorted(Path(home.environment["RELAY_CHIP_DEVICES"].rpartition(":")[2]).parent.iterdir())


def test_a_host_on_which_no_chip_shows_hinders_nobody(home: Home):
    home.environment["RELAY_CHIP_DEVICES"] = "/dev/no-such-chip*"
    assert home.clear(1, 0)["free"]
    assert home.start("exit 0", "a", **tenant(1, 0))["rc"] == 0
    home.follow(run="a")


def test_devices_are_numbered_as_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("accel10", "accel9", "accel0"):
        (tmp_path / name).touch()
    monkeypatch.setenv("RELAY_CHIP_DEVICES", f"{tmp_path}/accel*")
    assert [Path(path).name for path in supervisor.chip_devices()] == ["accel0", "accel9", "accel10"]

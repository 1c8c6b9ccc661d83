"""Whatever dies, nothing is left: the emulator, its guardian, or the process that forks hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.emulator.machines import alive
from tpu.emulator.processes import kill_all, marked_processes

# An emulator reduced to what starts processes: a guardian, a GCS server, a host with a detached program.
EMULATOR = """
import asyncio, json, os, sys
from pathlib import Path
from tests.emulator.machines import Room
from tpu.emulator.addresses import AddressPool
from tpu.emulator.gcs import GcsServer
from tpu.emulator.guardian import Guardian
from tpu.emulator.host_pool import HostPool

async def main(emulator_id, folder):
    state = folder / "state"
    state.mkdir()
    guardian = Guardian(emulator_id, state, remove_state=True)
    guardian.start()
    gcs = GcsServer(state / "gcs", state / "gcs.log", emulator_id=emulator_id)
    gcs.start()
    pool = HostPool(emulator_id, state)
    await pool.start()
    room = Room(pool, AddressPool.claim(), state, emulator_id)
    host = await room.boot()
    async with room.connect(host) as client:
        script = "(setsid sleep 1000 & env -i setsid sleep 1000 &) >/dev/null 2>&1 </dev/null; sleep 0"
        await client.run(script, check=True)
    print(json.dumps({"guardian": guardian.pid, "forkserver": pool.forkserver_pid, "host": host.processes()}),
          flush=True)
    for line in iter(sys.stdin.readline, ""):
        if line == "guardian\\n":
            print(guardian.pid, flush=True)
        elif line == "stop\\n":
            guardian.stop()
            print("stopped", flush=True)

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


class Running:
    def __init__(self, folder: Path) -> None:
        self.emulator_id = f"guarded-{os.getpid()}-{time.monotonic_ns()}"
        self.state = folder / "state"
        self.process = subprocess.Popen(
            [sys.executable, "-c", EMULATOR, self.emulator_id, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started = json.loads(self.read())
        self.guardian: int = started["guardian"]
        self.forkserver: int = started["forkserver"]
        self.host: list[int] = started["host"]

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, text: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.read().strip()

    def left(self) -> list[int]:
        marker = f"TPU_EMULATOR_ID={self.emulator_id}"
        return [process.pid for process in marked_processes(marker) if process.alive]


@pytest.fixture
def running(tmp_path) -> Iterator[Running]:
    emulator = Running(tmp_path)
    yield emulator
    emulator.process.kill()
    emulator.process.communicate()
    kill_all(lambda: marked_processes(f"TPU_EMULATOR_ID={emulator.emulator_id}"))


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s:g} s still not: {what}"
        time.sleep(0.02)


def nothing_left(emulator: Running, *others: int) -> Callable[[], bool]:
    pids = [*emulator.host, emulator.forkserver, *others]
    return lambda: not emulator.left() and not any(alive(pid) for pid in pids) and not emulator.state.exists()


def test_nothing_is_left_when_the_emulator_is_killed(running: Running):
    assert len(running.host) >= 3
    assert len(running.left()) >= 5
    os.kill(running.process.pid, signal.SIGKILL)
    until(nothing_left(running, running.guardian), "everything has ended and the state folder is gone")


def test_nothing_is_left_when_the_guardian_was_killed_before(running: Running):
    os.kill(running.guardian, signal.SIGKILL)
    until(lambda: int(running.ask("guardian")) not in (0, running.guardian), "another guardian is there")
    second = int(running.ask("guardian"))
    os.kill(running.process.pid, signal.SIGKILL)
    until(nothing_left(running, running.guardian, second), "everything has ended")


def test_no_process_is_left_when_emulator_and_guardian_are_killed_together(running: Running):
    os.kill(running.guardian, signal.SIGSTOP)  # it can neither act nor be replaced
    os.kill(running.process.pid, signal.SIGKILL)
    os.kill(running.guardian, signal.SIGKILL)
    until(lambda: not running.left() and not any(map(alive, running.host)), "every process has ended")


def test_nothing_is_left_when_the_forkserver_was_killed_before(running: Running):
    os.kill(running.forkserver, signal.SIGKILL)
    until(lambda: not alive(running.forkserver), "the forkserver is dead")
    assert all(alive(pid) for pid in running.host)
    os.kill(running.process.pid, signal.SIGKILL)
    until(nothing_left(running, running.guardian), "everything has ended")


def test_stopping_in_order_ends_everything_but_the_emulator_itself(running: Running):
    assert running.ask("stop") == "stopped"
    assert nothing_left(running, running.guardian)()
    assert running.process.poll() is None

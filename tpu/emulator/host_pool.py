"""Boots emulated TPU VMs and does to them what a cloud does: kill, hang, cut off, leave chips busy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tpu.emulator import chips
from tpu.emulator.host_spec import HostSpec, Machine
from tpu.emulator.metadata import MetadataServer
from tpu.emulator.processes import (
    FREEZE_DEADLINE_S,
    Process,
    ProcessTable,
    StillAlive,
    kill_step,
    signal_all,
    stop_step,
)

__all__ = ["BootError", "EmulatedHost", "HostPool", "HostSpec"]

BOOT_DEADLINE_S = 30.0  # tens of milliseconds when idle; machines that run tests are not
KILL_DEADLINE_S = 10.0
STOP_DEADLINE_S = 5.0
CHIPS_DEADLINE_S = 10.0
_POLL_S = 0.002


class BootError(RuntimeError):
    """A host did not come up; the message says which and why."""


class HostPool:
    """All hosts of one emulator, forked from one process that has asyncssh loaded.

    To be used from one event loop. `state_dir` gets a folder for each host (keys, chip locks, output of the
    startup-script), which goes when the host is killed.
    """

    def __init__(self, emulator_id: str, state_dir: Path) -> None:
        self._emulator_id = emulator_id
        self._machines = Path(state_dir) / "machines"
        self._forkserver: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._hosts: dict[str, EmulatedHost] = {}
        self._looks = _Looks()

    async def start(self) -> None:
        """Start the forkserver, so that the first boot is as fast as the others."""
        self._machines.mkdir(parents=True, exist_ok=True)
        await self._connect()

    @property
    def forkserver_pid(self) -> int | None:
        return self._forkserver.pid if self._forkserver else None

    async def stop(self) -> None:
        """Kill all hosts and the forkserver; returns when none of their processes is left."""
        await asyncio.gather(*(host.kill() for host in list(self._hosts.values())))
        await self._end_forkserver()
        shutil.rmtree(self._machines, ignore_errors=True)

    async def boot(self, spec: HostSpec) -> EmulatedHost:
        """Boot a host; returns once its SSH server and its metadata server listen.

        Raises:
            BootError: it did not come up; nothing of it is left.
        """
        boot_id = uuid.uuid4().hex[:12]  # short: Unix sockets below TMPDIR have 108 bytes for a path
        machine = Machine(spec, self._machines / boot_id, boot_id, self._emulator_id)
        _make_folders(machine)
        host = EmulatedHost(
            machine, MetadataServer(spec), self._looks, forget=lambda: self._hosts.pop(boot_id, None)
        )
        self._hosts[boot_id] = host
        try:
            await host.metadata.start()
            await host.attach(await self._fork())
        except BaseException as error:  # nothing of it may be left, a cancellation or not
            await host.kill()
            if isinstance(error, OSError | asyncio.TimeoutError):
                raise BootError(f"host {spec.name} at {spec.address} did not boot: {error!r}") from error
            raise
        return host

    async def _fork(self) -> socket.socket:
        """Have a process forked; return our end of its control socket once it has said that it lives.

        Raises:
            BootError: two forkservers ended before they could.
        """
        for _ in range(2):  # if the forkserver was killed, its hosts live on, and a new one serves the next
            requests = await self._connect()
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    socket.send_fds(requests, [b"h"], [theirs.fileno()])
                ours.setblocking(False)
                life = asyncio.get_running_loop().sock_recv(ours, 1)
                if await asyncio.wait_for(life, BOOT_DEADLINE_S):
                    return ours
            except (BrokenPipeError, ConnectionResetError):
                pass  # it died with the request in its queue
            except BaseException:
                ours.close()
                raise
            ours.close()
            if self._requests is requests:  # nobody has started another yet
                await self._end_forkserver()
        raise BootError("the process that forks hosts was killed twice while a host booted")

    async def _connect(self) -> socket.socket:
        async with self._starting:
            if (
                self._requests is not None
                and self._forkserver is not None
                and self._forkserver.poll() is None
            ):
                return self._requests
            await self._end_forkserver()
            ours, theirs = socket.socketpair()
            with theirs:
                # The kernel ends the forkserver with the thread that starts it: this loop's own.
                self._forkserver = subprocess.Popen(  # noqa: ASYNC220  it takes a millisecond
                    [sys.executable, "-m", "tpu.emulator.forkserver", str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=_forkserver_environment(self._emulator_id),
                    start_new_session=True,
                )
            ours.setblocking(False)
            ready = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 1), BOOT_DEADLINE_S)
            if not ready:
                code = await asyncio.to_thread(self._forkserver.wait)
                raise BootError(f"the process that forks hosts ended with code {code}: see its output above")
            ours.setblocking(True)
            self._requests = ours
            return ours

    async def _end_forkserver(self) -> None:
        process, self._forkserver = self._forkserver, None
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)


class _Looks:
    """Looks into /proc, one for all hosts that ask at about the same time: a look costs time for every process
    of the machine, and a node that is preempted can have a hundred hosts.
    """

    def __init__(self) -> None:
        self._next: asyncio.Future[ProcessTable] | None = None

    async def table(self) -> ProcessTable:
        """Return what a look shows that begins after this call."""
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_soon(self._look)  # after all others that are ready to run
        return await asyncio.shield(self._next)

    def _look(self) -> None:
        future, self._next = self._next, None
        assert future is not None
        try:
            future.set_result(ProcessTable.read())
        except Exception as error:  # each of those who wait gets it
            future.set_exception(error)


class EmulatedHost:
    """One booted host. After `kill` it is gone; every other method is then without effect."""

    def __init__(
        self, machine: Machine, metadata: MetadataServer, looks: _Looks, forget: Callable[[], object]
    ) -> None:
        self.spec = machine.spec
        self.host_key_public = ""  # "ssh-ed25519 AAAA…", known once it is booted
        self.metadata = metadata
        self.folder = machine.folder
        self._machine = machine
        self._looks = looks
        self._forget = forget
        self._init = 0
        self._sshd = 0
        self._control: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._killed = False

    async def attach(self, control: socket.socket) -> None:
        """Send the machine to the process at the other end and wait until its SSH server listens.

        Raises:
            BootError: it says why it could not, or ends.
            asyncio.TimeoutError: nothing within BOOT_DEADLINE_S.
        """
        reader, self._control = await asyncio.open_connection(sock=control)
        self._control.write(self._machine.to_json() + b"\n")
        self._listener = asyncio.create_task(self._listen(reader))
        self.host_key_public = await asyncio.wait_for(asyncio.shield(self._listening), BOOT_DEADLINE_S)

    async def set_attributes(self, attributes: dict[str, str]) -> None:
        """Put these instance attributes in place of all there were; a changed `ssh-keys` counts at once."""
        self.metadata.set_attributes(attributes)
        _write_keys(self._machine, attributes)

    async def set_preempted(self, preempted: bool = True) -> None:
        """Turn `instance/preempted`: the notice of a preemption. Kills nothing."""
        self.metadata.set_preempted(preempted)

    async def kill(self) -> None:
        """SIGKILL every process of this host and close its ports; returns when all are confirmed dead.

        Raises:
            StillAlive: some outlived KILL_DEADLINE_S.
        """
        self._killed = True
        # Held still first. A process that scrubbed its environment is known by its parent alone, so nobody's
        # parent may die before everybody is found, and nobody may fork meanwhile.
        with contextlib.suppress(StillAlive):
            await self._freeze(FREEZE_DEADLINE_S)
        found = {process.pid for process in await self._find()}
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._listener is not None and self._control is not None:
            if self._control.can_write_eof() and not self._control.is_closing():
                self._control.write_eof()  # a host that has not told its pid yet ends by this
            await asyncio.wait({self._listener}, timeout=KILL_DEADLINE_S)
            self._control.close()
        await self._until_none(kill_step, KILL_DEADLINE_S, looks=2, known=found)
        self._init = self._sshd = 0
        if not self._listening.done():
            self._listening.cancel()
        await self.metadata.stop()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        self._forget()

    async def hang(self) -> None:
        """SIGSTOP every process of this host; connections stay open and nothing answers."""
        await self._freeze(STOP_DEADLINE_S)

    async def resume(self) -> None:
        """Let a hung host go on."""
        signal_all(await self._find(), signal.SIGCONT)

    async def kill_ssh(self) -> None:
        """SIGKILL the SSH server alone; returns when it is dead. It is started again after a second."""
        pid, self._sshd = self._sshd, 0
        if not pid:
            return  # it is down already
        os.kill(pid, signal.SIGKILL)
        await self._until_none(lambda found: [p for p in found if p.pid == pid and p.alive], STOP_DEADLINE_S)

    async def busy_chips(self) -> None:
        """Leave a process behind that holds every chip; returns when all are held.

        A chip that a program holds now goes to the leftover as soon as that program ends.
        """
        if self._control is None or self._killed:
            return
        self._control.write(b"b")

        def free(_: Sequence[Process]) -> list[int]:
            held = chips.held_chips(self._machine.chip_locks)
            return [chip for chip in range(self.spec.chips) if chip not in held]

        await self._until_none(free, CHIPS_DEADLINE_S)

    def processes(self) -> list[int]:
        """Return the pids of all living processes of this host, its own servers too."""
        return [process.pid for process in self._own(ProcessTable.read()) if process.alive]

    async def _find(self, known: Iterable[int] = ()) -> list[Process]:
        return self._own(await self._looks.table(), known)

    def _own(self, table: ProcessTable, known: Iterable[int] = ()) -> list[Process]:
        roots = [pid for pid in (self._init, self._sshd, *known) if pid]
        return table.marked(self._machine.marker, roots)

    async def _freeze(self, deadline_s: float) -> None:
        signalled: set[int] = set()
        await self._until_none(lambda found: stop_step(found, signalled), deadline_s, looks=2)

    async def _until_none(
        self,
        step: Callable[[Sequence[Process]], Sequence[object]],
        deadline_s: float,
        looks: int = 1,
        known: Iterable[int] = (),
    ) -> None:
        """Repeat `step` on this host's processes until it returns nothing `looks` times in a row."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        clean = 0
        while clean < looks:
            found = step(await self._find(known))
            clean = 0 if found else clean + 1
            if found and loop.time() > deadline:
                raise StillAlive(f"host {self.spec.name}: after {deadline_s:g} s there is still {found}")
            if found:
                await asyncio.sleep(_POLL_S)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take in what the host says, to its end: then its first process is dead, and so is the host."""
        with contextlib.suppress(ConnectionError):  # it was killed with something of ours unread
            while line := await reader.readline():
                self._take(json.loads(line))
        self._init = self._sshd = 0  # the numbers may be given to others from now on
        self._fail("its first process ended")
        if not self._killed:
            await self._until_none(kill_step, KILL_DEADLINE_S, looks=2)

    def _take(self, message: dict[str, str]) -> None:
        if message["event"] == "init":
            self._init = int(message["pid"])
        elif message["event"] == "sshd":
            self._sshd = int(message["pid"])
        elif message["event"] == "listening" and not self._listening.done():
            self._listening.set_result(message["key"])
        elif message["event"] == "failed":
            self._fail(message["error"])

    def _fail(self, reason: str) -> None:
        if not self._listening.done():
            self._listening.set_exception(BootError(f"host {self.spec.name} did not boot: {reason}"))
            self._listening.exception()  # seen: nobody waits for it if the boot was given up


def _make_folders(machine: Machine) -> None:
    machine.spec.home.mkdir(parents=True, exist_ok=True)
    (machine.folder / "tmp").mkdir(parents=True)
    chips.create_locks(machine.chip_locks, machine.spec.chips)
    _write_keys(machine, machine.spec.attributes)


def _write_keys(machine: Machine, attributes: dict[str, str]) -> None:
    if not machine.folder.exists():
        return  # killed meanwhile
    new = machine.authorized_keys.with_suffix(".new")
    new.write_text(attributes.get("ssh-keys", ""))
    new.replace(machine.authorized_keys)  # at once: a login reads the old or the new, never half


def _forkserver_environment(emulator_id: str) -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "PYTHONPATH") if key in os.environ}
    return {**kept, "TPU_EMULATOR_ID": emulator_id}

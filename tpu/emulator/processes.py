"""Find and end every process that carries a marker in its environment, with all that descend from it.

Standard library only: the guardian loads this file alone, and host processes load it before anything else.

A program started on an emulated host may detach as thoroughly as it likes (double fork, own session): its
environment still names its host. One that scrubs its environment is found as long as its parent is known.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

FREEZE_DEADLINE_S = 1.0  # not a reason to give up: what cannot be stopped may still be killed
_MARKER = b"TPU_EMULATOR_"  # how the names of markers begin
_DEAD = frozenset("ZXx")  # zombie or dead: holds no lock, no port, no memory
_STOPPED = frozenset("Tt")


class StillAlive(RuntimeError):
    """Processes outlived repeated SIGKILLs; the message names them."""


@dataclass(frozen=True)
class Process:
    """One process as /proc shows it. `state` is the letter of proc(5), that of its first thread."""

    pid: int
    parent: int
    state: str
    threads: int

    @property
    def alive(self) -> bool:
        """True while it can hold a port, a lock or memory: its first thread may be a zombie before the
        others have ended."""
        return self.state not in _DEAD or self.threads > 1

    @property
    def stopped(self) -> bool:
        return self.state in _STOPPED


class ProcessTable:
    """All processes as one look into /proc showed them, for as many questions as there are."""

    def __init__(self, processes: Iterable[Process], entries: dict[int, list[bytes]]) -> None:
        """`entries` are those of each process's environment that can be markers."""
        self._table = {process.pid: process for process in processes}
        self._marked: dict[bytes, list[int]] = {}
        for pid, found in entries.items():
            for entry in found:
                self._marked.setdefault(entry, []).append(pid)
        self._children: dict[int, list[int]] = {}
        for process in self._table.values():
            self._children.setdefault(process.parent, []).append(process.pid)

    @classmethod
    def read(cls, proc: Path = Path("/proc")) -> ProcessTable:
        processes = list(_all_processes(proc))
        return cls(processes, {process.pid: _markers(proc, process.pid) for process in processes})

    def marked(self, marker: str, roots: Iterable[int] = (), exclude: Iterable[int] = ()) -> list[Process]:
        """Return all processes, dead ones too, with `marker` (TPU_EMULATOR_…=value) in their environment, those
        of `roots`, and all that descend from either; never those of `exclude`."""
        excluded = set(exclude)
        roots = [pid for pid in roots if pid in self._table]
        matched = {pid for pid in (*self._marked.get(marker.encode(), ()), *roots) if pid not in excluded}
        queue = list(matched)
        while queue:
            for child in self._children.get(queue.pop(), ()):
                if child not in matched and child not in excluded:
                    matched.add(child)
                    queue.append(child)
        return [self._table[pid] for pid in sorted(matched)]


def marked_processes(
    marker: str, roots: Iterable[int] = (), exclude: Iterable[int] = (), proc: Path = Path("/proc")
) -> list[Process]:
    """Look into /proc once, for one question; see `ProcessTable.marked`."""
    return ProcessTable.read(proc).marked(marker, roots, exclude)


def signal_all(processes: Iterable[Process], number: signal.Signals) -> None:
    """Send a signal to each that is still there."""
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


def stop_step(found: Iterable[Process], signalled: set[int]) -> list[Process]:
    """Send SIGSTOP once to all of these that run; return those. `signalled` is kept between the steps of one
    freeze: a process that sleeps in the kernel (it waits for its vfork'd child, say) never shows as stopped,
    but with the signal pending it does nothing more."""
    running = [
        process
        for process in found
        if process.alive and not process.stopped and not (process.state == "D" and process.pid in signalled)
    ]
    signal_all(running, signal.SIGSTOP)
    signalled.update(process.pid for process in running)
    return running


def kill_step(found: Iterable[Process]) -> list[Process]:
    """Send SIGKILL once to all of these that are alive; return those."""
    living = [process for process in found if process.alive]
    signal_all(living, signal.SIGKILL)
    return living


def kill_all(find: Callable[[], list[Process]], timeout_s: float = 10.0) -> None:
    """SIGKILL until `find` returns nothing living, twice in a row: a process that was being forked while
    the first look passed its place in /proc is seen by the second. All are stopped first: once a parent is
    dead, nobody can tell whose a child with a scrubbed environment was.

    Raises:
        StillAlive: some are alive after `timeout_s` seconds.
    """
    began = time.monotonic()
    deadline = began + timeout_s
    signalled: set[int] = set()
    clean = 0
    while clean < 2 and time.monotonic() < began + FREEZE_DEADLINE_S:
        clean = 0 if stop_step(find(), signalled) else clean + 1
    clean = 0
    while clean < 2:
        living = kill_step(find())
        clean = 0 if living else clean + 1
        if living and time.monotonic() > deadline:
            raise StillAlive(f"still alive {timeout_s:g} s after SIGKILL: {[p.pid for p in living]}")
        if living:
            time.sleep(0.002)


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends; `parent` is its pid."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call: the signal would never come
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def _all_processes(proc: Path) -> Iterator[Process]:
    for entry in os.listdir(proc):
        if not entry.isdigit():
            continue
        try:
            with open(f"{proc}/{entry}/stat", "rb") as file:
                stat = file.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name, in parentheses, may hold anything, spaces and parentheses too.
        fields = stat[stat.rindex(b")") + 2 :].split(maxsplit=18)
        yield Process(
            pid=int(entry), parent=int(fields[1]), state=fields[0].decode(), threads=int(fields[17])
        )


def _markers(proc: Path, pid: int) -> list[bytes]:
    try:
        with open(f"{proc}/{pid}/environ", "rb") as file:
            environment = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []  # gone, or another user's
    if _MARKER not in environment:
        return []
    return [entry for entry in environment.split(b"\0") if entry.startswith(_MARKER)]

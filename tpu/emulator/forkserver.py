"""Forks host processes. asyncssh takes a third of a second to import; here it is imported once for all hosts.

Run as `python -m tpu.emulator.forkserver FD PARENT`. Each message on the Unix socket FD brings one socket:
a new process is forked that becomes the host at its other end. The forkserver dies with the emulator, but
hosts do not die with the forkserver: each watches its own socket.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import sys

import asyncssh  # noqa: F401  the reason why this process exists

from tpu.emulator import host
from tpu.emulator.processes import adopt_orphans, die_with_parent


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    adopt_orphans()  # of a killed host, so that their zombies are reaped
    _raise_file_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Frozen objects are not touched by the collector, so hosts go on sharing their memory with this process.
    gc.collect()
    gc.freeze()
    requests.sendall(b"\0")  # ready
    _serve(requests)


def _serve(requests: socket.socket) -> None:
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wake:
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                    reap()
                    continue
                data, fds, _, _ = socket.recv_fds(requests, 1, 1)
                if not data:
                    return
                control = socket.socket(fileno=fds[0])
                if os.fork() == 0:
                    signal.set_wakeup_fd(-1)
                    for inherited in (requests, wake, waker):
                        inherited.close()
                    selector.close()
                    host.main(control)  # never returns
                control.close()


def reap() -> list[int]:
    """Collect all dead children; return their pids."""
    pids: list[int] = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return pids
        if pid == 0:
            return pids
        pids.append(pid)


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()

"""Processes of flow runs, found by a variable in their environment: they outlive the worker that started them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from pathlib import Path

MARK = "TPU_RELAY_FLOW_RUN"
# The module by which Prefect runs a flow.
ENGINE = "prefect.engine"


def flow_processes() -> dict[str, set[int]]:
    """Process ids by the id of the flow run that they belong to; the dead that nobody has waited for do not count."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    start = f"{MARK}=".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            for variable in path.read_bytes().split(b"\0"):
                if variable.startswith(start):
                    found[variable[len(start) :].decode()].add(int(path.parent.name))
    return dict(found)


def ask_flow(flow_run_id: str) -> set[int]:
    """Send SIGTERM to the process that runs the flow, if there is one; what it has started is its own to end."""
    asked: set[int] = set()
    for pid in flow_processes().get(flow_run_id, set()) - {os.getpid()}:
        with contextlib.suppress(OSError):
            if ENGINE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGTERM)
                asked.add(pid)
    return asked


def end_processes(flow_run_id: str, number: signal.Signals) -> set[int]:
    """Send a signal to all processes of a flow run; the ids of those that got it."""
    pids = flow_processes().get(flow_run_id, set()) - {os.getpid()}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids

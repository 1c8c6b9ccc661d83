"""Who may act for a run: owner and term in controller.json, changed by compare-and-set alone.

Two flow processes of one run can exist, for instance a zombie that was started again while it lives. The
one with the higher term acts; the other notices before its next creation, deletion or kill, and leaves
without cleaning up.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tpu.checkpoint import objects
from tpu.runs.event_log import highest_term

# The owner says with each beat when the next one comes; one that misses so many on the observer's own clock is dead.
BEAT_S, MISSED = 5.0, 4
# A process that drives more runs than this beats less often for each of them, so that its requests to the bucket grow
# less than they do. The longest is what the reaper's watch (tpu.slices.lease.LEASE_TTL_S) allows.
AT_FULL_PACE, LONGEST_BEAT_S = 16, 15.0


class ControllerLost(RuntimeError):
    """Another process acts for this run now: leave, and clean nothing up. `flow_run` is whose, if that is known."""

    def __init__(self, message: str, flow_run: str | None = None) -> None:
        super().__init__(message)
        self.flow_run = flow_run


class RunIsDriven(RuntimeError):
    """Another live process acts for this run."""


class MalformedController(ValueError):
    """controller.json cannot be read; the message shows what it holds."""


@dataclass(frozen=True)
class Owner:
    """A process that drives a run: `started` tells two processes with the same id apart."""

    flow_run: str
    host: str
    pid: int
    started: str

    def known_dead(self) -> bool:
        """True only if it ran on this machine and is gone; from elsewhere nobody can tell."""
        return self.host == socket.gethostname() and process_start(self.pid) != self.started


@dataclass(frozen=True)
class ControllerState:
    owner: Owner
    term: int
    beats: int = 0
    released: bool = False
    beat_s: float = BEAT_S

    @property
    def drives(self) -> bool:
        """Whether the owner may still act for the run, as far as can be told from here."""
        return not self.released and not self.owner.known_dead()

    @property
    def expiry_s(self) -> float:
        """Seconds of silence after which the owner is dead."""
        return MISSED * self.beat_s

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ControllerState:
        try:
            values = json.loads(data)
            return cls(Owner(**values.pop("owner")), **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedController(
                f"controller.json cannot be understood ({error!r}): {data[:200]!r}; once nothing drives the run, "
                "delete it: the next start finds the next term in the run's history"
            ) from error


def process_start(pid: int) -> str:
    """Start time of a process in the kernel's clock ticks and the boot it belongs to; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    fields = stat[stat.rindex(")") + 2 :].split()
    return "" if fields[0] == "Z" else f"{boot}/{fields[19]}"


def this_process(flow_run: str) -> Owner:
    return Owner(flow_run, socket.gethostname(), os.getpid(), process_start(os.getpid()))


class Controller:
    """This process's right to act for a run."""

    def __init__(self, run_dir: str, state: ControllerState, generation: int) -> None:
        self._url = f"{run_dir}/controller.json"
        self._state = state
        self._generation = generation
        # A beat runs in a thread, which a cancellation does not end: the release must come after it.
        self._lock = threading.Lock()

    @property
    def term(self) -> int:
        return self._state.term

    def check(self) -> None:
        """Raises ControllerLost if another process has taken over."""
        found = objects.read(self._url)
        state = ControllerState.from_json(found[0]) if found else None
        if state is None or state.term != self._state.term or state.owner != self._state.owner:
            raise ControllerLost(
                f"another process drives this run now ({_describe(state)}); this one leaves it alone",
                state and state.owner.flow_run,
            )

    def beat(self, beat_s: float = BEAT_S) -> None:
        """Show that this process lives, and will again in `beat_s`. Raises ControllerLost if another took over."""
        with self._lock:
            self._write(replace(self._state, beats=self._state.beats + 1, beat_s=beat_s))

    def release(self) -> None:
        """Give the right back, so that the next process need not wait."""
        with self._lock:
            self._write(replace(self._state, released=True))

    def _write(self, state: ControllerState) -> None:
        try:
            self._generation = objects.compare_and_set(self._url, state.to_json(), self._generation)
        except objects.StaleGeneration:
            self.check()
            raise
        self._state = state


def observe(run_dir: str) -> tuple[ControllerState, int] | None:
    """Who acts for a run, and the generation of that statement."""
    found = objects.read(f"{run_dir}/controller.json")
    return (ControllerState.from_json(found[0]), found[1]) if found else None


def claim(run_dir: str, owner: Owner, over: tuple[ControllerState, int] | None) -> Controller:
    """Become the controller, over the state that was observed.

    Where there is none the run's history tells the next term: the file may have been deleted, and nobody writes under
    a term that has been.

    Raises:
        RunIsDriven: somebody else was quicker.
    """
    url = f"{run_dir}/controller.json"
    state = ControllerState(owner, 1 + (over[0].term if over else highest_term(run_dir)))
    try:
        if over is None:
            generation = objects.create_exclusive(url, state.to_json())
        else:
            generation = objects.compare_and_set(url, state.to_json(), over[1])
    except (objects.ObjectExists, objects.StaleGeneration):
        raise RunIsDriven("another process took this run up at the same moment; this one leaves it") from None
    return Controller(run_dir, state, generation)


def may_claim(state: ControllerState, owner: Owner, silent_s: float, take_over: bool) -> tuple[bool, str]:
    """Whether `owner` may take the run from `state.owner`, silent for `silent_s` seconds, and why."""
    if state.released:
        return True, "nobody drives the run"
    if state.owner.known_dead():
        return True, f"its last driver is dead ({_describe(state)})"
    if state.owner.flow_run == owner.flow_run:
        return True, "the same flow run was started again"
    if take_over:
        return True, f"taken over by request from {_describe(state)}"
    if silent_s >= state.expiry_s:
        return True, f"its last driver was silent for {silent_s:.0f} s ({_describe(state)})"
    return False, f"driven by {_describe(state)}"


def pace_s(runs: int) -> float:
    """Seconds between two beats of each run of a process that drives so many."""
    return min(BEAT_S * max(1.0, runs / AT_FULL_PACE), LONGEST_BEAT_S)


def _describe(state: ControllerState | None) -> str:
    if state is None:
        return "controller.json is gone"
    return f"process {state.owner.pid} on {state.owner.host}, term {state.term}"

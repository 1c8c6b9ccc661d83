"""Plays one history: starts its flow, makes each trouble at its moment, starts the flow again when that was killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.bench.chaos.judge import Injected, Outcome
from deployments.bench.chaos.plan import History, Strike
from deployments.bench.chaos.warm import Flow, WarmStarts
from tests.trainers.undisturbed import undisturbed
from tpu.checkpoint.fence import Fence, load_fence
from tpu.checkpoint.restore import restore
from tpu.checkpoint.verify import verify_run
from tpu.emulator.client import ControlError
from tpu.emulator.emulator import Emulator
from tpu.emulator.processes import marked_processes
from tpu.runs.config import RunConfig
from tpu.runs.event_log import load_events
from tpu.runs.record import run_directory
from tpu.runtime.metrics import read_metrics
from tpu.slices.lease import LeaseState, from_json
from tpu.topology import accelerator_type

LOOK_S = 0.1
# A host that dies before anybody has reached it is waited for five minutes, as one that boots slowly.
LONGEST_S = 500.0
# What a flow has deleted or ended is gone at its end; on a busy machine a killed process leaves a moment later.
LEAVING_S = 10.0
# What is to be struck may come a little after the moment: the program after its attempt's event, say.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Stage:
    """What histories share: the cloud, a way to start flows, and a folder for their logs."""

    emulator: Emulator
    flows: WarmStarts
    folder: Path
    program: Path


@dataclass
class Played:
    """One history as it went."""

    history: History
    outcome: Outcome
    seconds: float
    starts: int
    missed: list[str] = field(default_factory=list)

    @property
    def attempts(self) -> int:
        return sum(event.kind == "attempt-started" for event in self.outcome.events)

    @property
    def faults(self) -> Counter[str]:
        return Counter(injected.fault for injected in self.outcome.injected)


def play(stage: Stage, history: History) -> Played:
    """Play a history to its end and gather what is left of it.

    It has a bucket of its own, so that what a project remembers of bad zones is not that of the other histories.
    """
    player = _Player(stage, history)
    began = time.monotonic()
    try:
        code = player.until_ended()
    finally:
        player.end_flows()
    seconds = time.monotonic() - began
    left = player.left()
    fence = load_fence(player.run_dir)
    outcome = Outcome(
        player.injected, code, player.last_words(), load_events(player.run_dir),
        fence.commits, list(_wrong_bits(player.run_dir, history.run, fence)), left,
    )  # fmt: skip
    return Played(history, outcome, round(seconds, 1), player.starts, player.missed)


def bucket_folder(stage: Stage, history: History) -> Path:
    """Where the local storage server keeps the history's bucket: to it, a folder is a bucket."""
    return stage.emulator.state_dir / "gcs" / history.run.name


class _Player:
    def __init__(self, stage: Stage, history: History) -> None:
        self._stage = stage
        self._history = history
        name = history.run.name
        self.bucket_folder = bucket_folder(stage, history)
        shutil.rmtree(self.bucket_folder, ignore_errors=True)
        self.bucket_folder.mkdir(parents=True)
        self.bucket = f"gs://{name}"
        self.run_dir = run_directory(self.bucket, name)
        self.log = stage.folder / f"{name}.log"
        self.log.unlink(missing_ok=True)
        self._config = stage.folder / f"{name}.yaml"
        self._config.write_text(history.run.model_dump_json())  # JSON is YAML
        self._seen = _Seen(self.bucket_folder / "runs" / name)
        self._flow: Flow | None = None
        self._rivals: list[Flow] = []
        self._timers: list[threading.Timer] = []
        self.injected: list[Injected] = []
        self.missed: list[str] = []
        self.starts = 0

    def until_ended(self) -> int | None:
        """Exit code of the flow that ended by itself; None if none did in time."""
        end = time.monotonic() + LONGEST_S
        moments = self._moments()
        struck = next(moments, None)
        self._start()
        while time.monotonic() < end:
            time.sleep(LOOK_S)
            assert self._flow is not None
            if (code := self._flow.poll()) is not None:
                if self._refused() and (rival := self._driver()) is not None:
                    self._flow = rival
                    continue
                if struck is not None:
                    self.missed += [struck.fault, *(strike.fault for strike in moments)]
                return code
            self._seen.look()
            if struck is not None and self._is_time(struck) and self._strike(struck):
                struck = next(moments, None)
        return None

    def _refused(self) -> bool:
        """Whether the flow that has ended was told that another one drives the run."""
        assert self._flow is not None
        return "is driven by" in _end_of(self._flow.log)

    def _driver(self) -> Flow | None:
        """The rival that took the run up when the flow was killed, if one did: it is the run's flow now."""
        return next((rival for rival in self._rivals if "is driven by" not in _end_of(rival.log)), None)

    def last_words(self) -> str:
        """What the flow that ended the run said at last."""
        assert self._flow is not None
        return _end_of(self._flow.log)

    def _moments(self) -> Iterator[Strike]:
        for strike in self._history.strikes:
            self._seen.arm(strike.moment)
            yield strike

    def _is_time(self, strike: Strike) -> bool:
        met = self._seen.met
        return met is not None and time.monotonic() >= met + strike.delay_s

    def _start(self) -> None:
        self.starts += 1
        self._flow = self._start_flow(self.log)

    def _start_flow(self, log: Path) -> Flow:
        known = (self.bucket_folder / "runs" / self._history.run.name / "run.json").exists()
        arguments = ["--resume", self._history.run.name] if known else [str(self._config)]
        return self._stage.flows.start(arguments, self._stage.program, log, TPU_RELAY_BUCKET=self.bucket)

    def _strike(self, strike: Strike) -> bool:
        """Make the trouble; False if what it is to be made on may still come."""
        at = time.time()  # what follows from it can be written down before the emulator has answered
        try:
            where, told = getattr(self, "_" + strike.fault.replace("-", "_"))(strike.detail)
        except (_NoTarget, ControlError) as why:
            assert self._seen.met is not None
            if time.monotonic() < self._seen.met + strike.delay_s + PATIENCE_S:
                return False
            self.missed.append(f"{strike.fault} ({why})")
        else:
            self.injected.append(Injected(at, strike.fault, where, told))
        return True

    # --- troubles: each returns the slice that it was made on, or None, and what it was ---

    def _preempt(self, how: Mapping[str, Any]) -> tuple[str, str]:
        node = self._node()
        self._stage.emulator.preempt(node, notice=how["notice"], state=how["state"], linger_s=how["linger_s"])
        return node, f"{how['state']}{' with notice' if how['notice'] else ''}"

    def _odd_state(self, how: Mapping[str, Any]) -> tuple[str, str]:
        node = self._node()
        self._stage.emulator.set_node_state(node, how["state"])
        return node, how["state"]

    def _kill_host(self, how: Mapping[str, Any]) -> tuple[str, str]:
        node, host = self._host(how)
        self._stage.emulator.kill_host(node, host)
        return node, f"host {host}"

    def _hang_host(self, how: Mapping[str, Any]) -> tuple[str, str]:
        node, host = self._host(how)
        self._stage.emulator.hang_host(node, host)
        return node, f"host {host}"

    def _drop_ssh(self, how: Mapping[str, Any]) -> tuple[str, str]:
        node, host = self._host(how)
        self._stage.emulator.kill_ssh(node, host)
        return node, f"host {host}"

    def _kill_program(self, how: Mapping[str, Any]) -> tuple[str, str]:
        return self._kill_on_host(how, f"RELAY_RUN_DIR={self.run_dir}", "tests.trainers.numpy_trainer")

    def _kill_supervisor(self, how: Mapping[str, Any]) -> tuple[str, str]:
        # It names its run on its command line; what it starts names it in the environment.
        return self._kill_on_host(how, "", "supervisor-", " start ", f"/{self._history.run.name}/")

    def _kill_on_host(self, how: Mapping[str, Any], marker: str, *words: str) -> tuple[str, str]:
        node, found = self._node(), _processes(marker, *words)
        if not found:
            raise _NoTarget(f"no {words[0]}")
        pid = found[how["host"] % len(found)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return node, f"pid {pid}"

    def _kill_flow(self, how: Mapping[str, Any]) -> tuple[None, str]:
        assert self._flow is not None
        if self._flow.poll() is not None:
            raise _NoTarget("the flow has ended")
        self._flow.kill()
        self._flow.wait()
        time.sleep(how["pause_s"])  # as long as it takes Prefect to start it again
        self._start()
        return None, f"started again after {how['pause_s']:g} s"

    def _rival_flow(self, _: Mapping[str, Any]) -> tuple[None, str]:
        log = self.log.with_suffix(f".rival-{len(self._rivals) + 1}.log")
        log.unlink(missing_ok=True)
        self._rivals.append(self._start_flow(log))
        return None, "a second flow of the same run"

    def _api_error(self, how: Mapping[str, Any]) -> tuple[None, str]:
        return self._fail_api(how, after=False)

    def _lost_answer(self, how: Mapping[str, Any]) -> tuple[None, str]:
        return self._fail_api(how, after=True)

    def _fail_api(self, how: Mapping[str, Any], after: bool) -> tuple[None, str]:
        self._stage.emulator.fail_next(how["method"], how["code"], how["message"], how["times"], after)
        return None, f"{how['method']} {how['code']} x{how['times']}"

    def _stockout(self, how: Mapping[str, Any]) -> tuple[None, str]:
        zone, kind = self._history.run.slice.zone, self._history.run.slice.accelerator_type
        self._stage.emulator.stockout(zone, kind)
        over = threading.Timer(how["seconds"], self._stage.emulator.stockout, (zone, kind, False))
        over.start()
        self._timers.append(over)
        return None, f"{kind} in {zone} for {how['seconds']:g} s"

    # --- what they are made on ---

    def _node(self) -> str:
        """The newest slice of the run, in whatever state it can be struck."""
        nodes = [node for node in self._nodes() if node["state"] in ("READY", "CREATING")]
        if not nodes:
            raise _NoTarget("no slice")
        return nodes[-1]["node"]

    def _host(self, how: Mapping[str, Any]) -> tuple[str, int]:
        node = self._node()
        hosts = accelerator_type(self._history.run.slice.accelerator_type).hosts
        return node, how["host"] % hosts

    def _nodes(self) -> list[dict[str, Any]]:
        mine = f"relay-{self._history.run.name}-"
        return [node for node in self._stage.emulator.nodes() if node["node"].startswith(mine)]

    # --- the end ---

    def end_flows(self) -> None:
        """Nothing of this history acts any more; only one that was too slow is killed here."""
        for timer in self._timers:
            timer.join()
        if self._flow is not None and self._flow.poll() is None:
            self._flow.kill()
        for rival in self._rivals:
            rival.wait(LONGEST_S)

    def left(self) -> list[str]:
        """What lives on in the cloud, on hosts and on this machine."""
        end = time.monotonic() + LEAVING_S
        while (found := self._left()) and time.monotonic() < end:
            time.sleep(LOOK_S)
        return found

    def _left(self) -> list[str]:
        mine = f"relay-{self._history.run.name}-"
        status = self._stage.emulator.status()
        return [
            *self._leases(),
            *(f"node {node['node']} ({node['state']})" for node in self._nodes()),
            *(
                f"queued resource {queued['queued_resource']} ({queued['state']})"
                for queued in status["queued_resources"]
                if queued["queued_resource"].startswith(mine)
            ),
            *(
                f"process {process.pid}: {_words(process.pid)[:100]}"
                for process in marked_processes(f"RELAY_RUN_DIR={self.run_dir}")
                if process.alive
            ),
        ]

    def _leases(self) -> list[str]:
        """Leases that somebody holds, or of slices that ought to be gone."""
        kept = [
            from_json(file.read_bytes()) for file in (self.bucket_folder / "pools").glob("*/slices/*.json")
        ]
        return [
            f"lease of {lease.slice}: {lease.state.value}, held by {[holder.run for holder in lease.holders]}"
            for lease in kept
            if lease.state is not LeaseState.GONE or lease.holders
        ]


class _NoTarget(Exception):
    """What was to be struck is not there."""


class _Seen:
    """A run as the bucket's own folder shows it: looking there costs nothing, and nobody is asked."""

    def __init__(self, folder: Path) -> None:
        self.met: float | None = None
        self._folder = folder
        self._counts: Counter[str] = Counter()
        self._known: set[str] = set()
        self._armed: tuple[str, int] | None = None

    def arm(self, moment: str) -> None:
        """Wait for the next `moment`; `met` says when it was seen."""
        self.met = None
        self._armed = (moment, self._counts[moment])

    def look(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(set(os.listdir(self._folder / "events")) - self._known):
                with contextlib.suppress(ValueError, KeyError):  # it is being written
                    self._counts[json.loads((self._folder / "events" / name).read_bytes())["kind"]] += 1
                    self._known.add(name)
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            self._counts["commit"] = len(json.loads((self._folder / "fence.json").read_bytes())["commits"])
        if self._armed is not None and self.met is None and self._counts[self._armed[0]] > self._armed[1]:
            self.met = time.monotonic()


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


def _processes(marker: str, *words: str) -> list[int]:
    """Processes with all `words` on their command line and the marker, if there is one, in their environment."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        line = _words(pid)
        if all(word in line for word in words) and marker.encode() in _environment(pid):
            found.append(pid)
    return sorted(found)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _wrong_bits(run_dir: str, run: RunConfig, fence: Fence) -> Iterator[str]:
    """Where the newest checkpoint or a logged loss differs from a training that nobody disturbed."""
    yield from (f"step {v.step}: {v.damage}" for v in verify_run(run_dir, fence) if not v.whole)
    restored = restore(run_dir, fence)
    if restored is None:
        return
    hosts = accelerator_type(run.slice.accelerator_type).hosts
    arrays, losses = undisturbed(run.seed, restored.step, hosts)
    for name, whole in arrays.items():
        if restored.arrays[name].tobytes() != whole.tobytes():
            yield f"{name} at step {restored.step}"
    logged = [(row["step"], row["loss"]) for row in read_metrics(run_dir, fence)]
    if logged != losses:
        wrong = [pair for pair in logged if pair not in losses][:3]
        yield f"losses: {len(logged)} logged, {len(losses)} expected, among them {wrong}"

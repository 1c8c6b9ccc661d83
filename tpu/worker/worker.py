"""The worker type `cloud-tpu`: `prefect worker start --pool tpu`.

A flow runs on the worker's own machine, as processes in a session of their own: slices are driven from there, so no
preemption and no restart of the worker touches it. The worker watches over the state of the flow run and over its
processes, and whichever ends first, it sees to it that the other does too and that no slice is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar
from uuid import UUID

import anyio.abc
import httpx
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed, Failed, Running
from prefect.workers.base import BaseWorker, BaseWorkerResult

from tpu.runs.announcing import failed, payload_of, resource_of
from tpu.runs.config import RunConfigError
from tpu.runs.nothing_left import VARIABLE as NOTHING_LEFT
from tpu.runs.record import run_directory
from tpu.worker.fate import (
    GIVEN_UP,
    LIVES,
    RESTARTED,
    Seen,
    act,
    begun,
    cancelled_unheard,
    end,
    may_begin,
    taken_for_dead,
    to_end,
    unwanted,
)
from tpu.worker.flow_states import FlowStates
from tpu.worker.output import Output
from tpu.worker.parameters import run_name, run_parameters
from tpu.worker.patience import passes, patient_settings, shorten_pauses
from tpu.worker.process_record import FlowFolder, FlowRecord, orphaned_records
from tpu.worker.processes import ENGINE, MARK, ask_flow, end_processes, flow_processes
from tpu.worker.template import CloudTpuConfiguration, CloudTpuVariables
from tpu.worker.where import worker_folder

Answer = TypeVar("Answer")

LOOK_S = 1.0
# Tries to leave nothing of a run, and the longest pause between two; then it is the reaper's.
TRIES, LONGEST_PAUSE_S = 20, 120.0
# So long a look for work may take; what it waits for is said then.
ASK_S = 60.0
# A flow run that is silent for some of these is taken for dead (deployments/automations.py). Prefect's shortest.
HEARTBEAT_S = "30"


class CloudTpuResult(BaseWorkerResult):
    """How a flow run's processes ended."""


class CloudTpuWorker(BaseWorker[CloudTpuConfiguration, Any, CloudTpuResult]):
    """Runs flows that train on Cloud TPU slices."""

    type = "cloud-tpu"
    job_configuration = CloudTpuConfiguration
    job_configuration_variables = CloudTpuVariables
    _display_name = "Cloud TPU"
    _description = (
        "Train on preemptible Cloud TPU slices: flows run beside the worker and drive them from there."
    )

    async def setup(self) -> None:
        shorten_pauses()
        self._exit_stack.enter_context(temporary_settings(patient_settings()))
        self._server_answers = True
        await super().setup()
        self._folder = worker_folder(self._work_pool_name)
        self._states = FlowStates(self.client, self._logger)
        # Until when each flow run is seen to, by its last start or by `_hold`.
        self._at_work: dict[UUID, asyncio.Event] = {}
        assert self._runs_task_group is not None
        self._runs_task_group.start_soon(self._states.keep_reading)
        for record in orphaned_records(self._folder):
            self._runs_task_group.start_soon(self._take_up, record)

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Look for work. Prefect's own loop ends the worker on a 429, or when the server is away for a while."""
        found: list[FlowRun] = []
        async with self._whatever_the_server_does():
            found = await super().get_and_submit_flow_runs()
        return found

    async def sync_with_backend(self) -> None:
        """Say that the worker lives, and hear of changes of its pool; as above."""
        async with self._whatever_the_server_does():
            await super().sync_with_backend()

    @contextlib.asynccontextmanager
    async def _whatever_the_server_does(self) -> AsyncIterator[None]:
        """What the server does not take now is tried again the next time."""
        try:
            async with asyncio.timeout(ASK_S):
                yield
        except (httpx.HTTPError, TimeoutError) as error:
            if not passes(error):
                raise
            if self._server_answers:
                why = str(error) or f"no answer in {ASK_S:.0f} s"
                self._logger.warning("the Prefect server is asked again and again, since: %s", why)
            self._server_answers = False
        else:
            if not self._server_answers:
                self._logger.info("the Prefect server answers again")
            self._server_answers = True

    async def _submit_run(self, flow_run: FlowRun) -> None:
        """What cannot be submitted now is found again at the next look; an error here would end the worker."""
        try:
            await super()._submit_run(flow_run)
        except Exception as error:  # whatever it is, the worker's other flow runs need it alive
            self.get_flow_run_logger(flow_run).warning("it is not submitted yet: %s", error)
            self._submitting_flow_run_ids.discard(flow_run.id)
            self._release_limit_slot(flow_run.id)
            if self._cancelling_observer is not None:
                self._cancelling_observer.remove_in_flight_flow_run_id(flow_run.id)

    async def run(
        self,
        flow_run: FlowRun,
        configuration: CloudTpuConfiguration,
        task_status: anyio.abc.TaskStatus[Any] | None = None,
    ) -> CloudTpuResult:
        """Start the flow and return when its processes are gone and nothing of its run is left."""
        started = (task_status or anyio.TASK_STATUS_IGNORED).started
        key = str(flow_run.id)
        if lives := key in await asyncio.to_thread(flow_processes):
            await self._tell(flow_run, Running(message=LIVES))
            if flow_run.id in self._at_work:
                started("lives")
                return CloudTpuResult(identifier=key, status_code=0)
        while (settling := self._at_work.get(flow_run.id)) is not None:
            await settling.wait()
        with self._working_on(flow_run.id):
            history = await self._history(flow_run.id)
            claim = next((str(one.id) for one in reversed(history) if one.type is StateType.PENDING), None)
            over = bool(history) and (
                history[-1].is_final() or not may_begin(history, configuration.restarts)
            )
            if not over and not lives and await self._refused(flow_run, configuration):
                started("refused")
                return CloudTpuResult(identifier="refused", status_code=0)
            record = FlowRecord.of_this_worker(key, run_name(flow_run.parameters), claim)
            folder = FlowFolder(self._folder, record.flow_run_id)
            folder.write(record)  # first: whatever is started is found again
            if over:
                started("over")
                code = await self._settle(flow_run, record, configuration)
                return CloudTpuResult(identifier="over", status_code=code)
            output = Output(folder.output)
            if lives:  # whoever watched over it is dead
                started("lives")
                return await self._see_to_the_end(flow_run, record, configuration, output, None)
            process = await asyncio.to_thread(_start, folder, _environment(folder, configuration, flow_run))
            started(f"{os.uname().nodename}:{process.pid}")
            return await self._see_to_the_end(flow_run, record, configuration, output, process)

    @contextlib.contextmanager
    def _working_on(self, flow_run_id: UUID) -> Iterator[None]:
        done = self._at_work[flow_run_id] = asyncio.Event()
        try:
            yield
        finally:
            del self._at_work[flow_run_id]
            done.set()

    async def _refused(self, flow_run: FlowRun, configuration: CloudTpuConfiguration) -> bool:
        """Complete the parameters; whether they make no run, which is said."""
        try:
            parameters = _parameters(flow_run, configuration)
        except RunConfigError as error:
            self.get_flow_run_logger(flow_run).error("the run cannot be: %s", error)
            await self.client.set_flow_run_state(flow_run.id, Failed(message=str(error)), force=True)
            self._say_failed(configuration, run_name(flow_run.parameters), str(error))
            return True
        if parameters != flow_run.parameters:
            await self.client.update_flow_run(flow_run.id, parameters=parameters)
            flow_run.parameters = parameters
        return False

    async def _take_up(self, record: FlowRecord) -> None:
        """Watch over a flow run that a dead worker of this machine has started."""
        record = FlowRecord.of_this_worker(record.flow_run_id, record.run, record.claim)
        FlowFolder(self._folder, record.flow_run_id).write(record)

        async def ask() -> tuple[FlowRun, CloudTpuConfiguration]:
            flow_run = await self.client.read_flow_run(UUID(record.flow_run_id))
            return flow_run, await self.job_configuration.resolve_for_flow_run(
                flow_run, client=self.client, work_pool=self.work_pool, worker_name=self.name,
                worker_id=self.backend_id,
            )  # fmt: skip

        found = await self._insist(ask, f"flow run {record.flow_run_id} cannot be taken up yet")
        if found is None:
            self._logger.warning("flow run %s was deleted; what it started is ended", record.flow_run_id)
            await asyncio.to_thread(end_processes, record.flow_run_id, signal.SIGKILL)
            await self._leave_nothing(record, dict(os.environ), self._logger)
            FlowFolder(self._folder, record.flow_run_id).remove()
            return
        flow_run, configuration = found
        self.get_flow_run_logger(flow_run).info("taken up by worker %r, which was restarted", self.name)
        if self._limiter is not None:
            with contextlib.suppress(anyio.WouldBlock, RuntimeError):
                self._limiter.acquire_on_behalf_of_nowait(flow_run.id)
        output = Output(FlowFolder(self._folder, record.flow_run_id).output)
        cut_short = record.flow_run_id not in await asyncio.to_thread(flow_processes)
        try:
            with self._working_on(flow_run.id):
                await self._see_to_the_end(flow_run, record, configuration, output, None, cut_short)
        except Exception:  # told with its traceback; the worker's other flow runs need it alive
            self._logger.exception("flow run %s is lost from sight", record.flow_run_id)
        finally:
            self._release_limit_slot(flow_run.id)

    async def _see_to_the_end(
        self,
        flow_run: FlowRun,
        record: FlowRecord,
        configuration: CloudTpuConfiguration,
        output: Output,
        process: subprocess.Popen[bytes] | None,
        cut_short: bool = False,
    ) -> CloudTpuResult:
        with self._states.watching(flow_run.id):
            await self._watch(flow_run, output, process)
        code = await self._settle(flow_run, record, configuration, cut_short)
        return CloudTpuResult(identifier=record.flow_run_id, status_code=code)

    async def _watch(
        self, flow_run: FlowRun, output: Output, process: subprocess.Popen[bytes] | None
    ) -> None:
        """Return when no process of the flow run lives; those that a cancellation does not end are killed."""
        key, log = str(flow_run.id), self.get_flow_run_logger(flow_run)
        history: list[State] = []
        since, asked, answered = None, False, None
        while True:
            # A child that was started this moment has no environment to be known by yet.
            child = process is not None and process.poll() is None
            alive = child or key in await asyncio.to_thread(flow_processes)
            output.copy()
            history = await self._newer(flow_run, history)
            if not (history and to_end(history[-1])):
                since, asked = None, False
            elif since is None:
                since = time.monotonic()
            unwanted_s = None if since is None else time.monotonic() - since
            match act(Seen(alive, begun(history), unwanted_s, taken_for_dead(history))):
                case "ended":
                    output.copy()
                    return
                case "ask" if not asked:
                    asked = bool(await asyncio.to_thread(ask_flow, key))
                case "kill":
                    if begun(history) and not history[-1].is_final():
                        log.warning("the flow did not end when it was asked to: its processes are killed")
                    await asyncio.to_thread(end_processes, key, signal.SIGKILL)
                case "say that it lives" if history[-1].id != answered:
                    answered = history[-1].id
                    log.warning("taken for dead, but its processes live: it goes on")
                    await self._tell(flow_run, Running(message=LIVES))
            await asyncio.sleep(LOOK_S)

    async def _newer(self, flow_run: FlowRun, history: list[State]) -> list[State]:
        """The states of a flow run, read again if it has another one now."""
        state = self._states.of(flow_run.id)
        if state is None or (history and history[-1].id == state.id):
            return history
        # Whatever goes wrong, it is read again at the next look.
        with contextlib.suppress(Exception), temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            history = await self._history(flow_run.id)
            if cancelled_unheard(history):
                message = "It was cancelled before it began."
                await self.client.set_flow_run_state(flow_run.id, Cancelling(message=message), force=True)
                history = await self._history(flow_run.id)
        return history

    async def _history(self, flow_run_id: UUID) -> list[State]:
        """The states of a flow run, the newest last."""
        states = await self.client.read_flow_run_states(flow_run_id)
        return sorted(states, key=lambda state: state.timestamp)

    async def _settle(
        self,
        flow_run: FlowRun,
        record: FlowRecord,
        configuration: CloudTpuConfiguration,
        cut_short: bool = False,
    ) -> int:
        """Say the flow run's last state, and leave nothing of its run unless it goes on; the exit code for Prefect."""
        log, folder = self.get_flow_run_logger(flow_run), FlowFolder(self._folder, record.flow_run_id)
        now = await self._read(flow_run)
        claim = UUID(record.claim) if record.claim else None
        verdict = end(now and now[1], configuration.restarts, claim, cut_short)
        if verdict in ("again", "again later"):
            folder.remove()
            folder.write(record)
            if verdict == "again":
                log.warning(
                    "the processes of the flow run were killed: it is started again and takes its gang up"
                )
                await self._tell(flow_run, AwaitingRetry(message=RESTARTED))
            assert self._runs_task_group is not None
            self._runs_task_group.start_soon(self._hold, flow_run, record, configuration)
            return 0
        begun_once = now is None or any(state.is_running() for state in now[1])
        if begun_once and not folder.nothing_left.exists():
            await self._leave_nothing(record, _environment(folder, configuration, flow_run), log)
        if verdict == "cancelled":
            await self._tell(flow_run, Cancelled(message="Cancelled; nothing of it is left."))
        elif verdict == "given up":
            why = f"The flow was killed, and is started again by itself {configuration.restarts} time(s) at most."
            if not begun_once:
                why = "The flow did not begin: the worker's output has what it said."
            await self._tell(flow_run, Crashed(name=GIVEN_UP, message=why))
            self._say_failed(configuration, record.run, why)
        folder.remove()
        return 0

    def _say_failed(self, configuration: CloudTpuConfiguration, run: str | None, why: str) -> None:
        """The event that the flow itself would have sent."""
        if run is None:
            return
        bucket = configuration.bucket or os.environ.get("TPU_RELAY_BUCKET", "")
        said, directory = failed(why), run_directory(bucket.rstrip("/"), run)
        emit_event(
            said.name, resource_of(run, directory), related=self._event_related_resources(configuration),
            payload=payload_of(said, run, directory),
        )  # fmt: skip

    async def _hold(
        self, flow_run: FlowRun, record: FlowRecord, configuration: CloudTpuConfiguration
    ) -> None:
        """Watch over a flow run that waits to be started again: if it is cancelled, nobody else ends its gang."""
        with self._states.watching(flow_run.id):
            while True:
                await asyncio.sleep(LOOK_S)
                if flow_run.id in self._at_work:
                    return  # started again, here
                state = self._states.of(flow_run.id)
                if self._states.deleted(flow_run.id) or unwanted(state):
                    break
                if state is not None and state.type not in (StateType.SCHEDULED, StateType.PENDING):
                    FlowFolder(self._folder, record.flow_run_id).remove()
                    return  # started again, by another worker
        with self._working_on(flow_run.id):
            try:
                await self._settle(flow_run, record, configuration)
            except Exception:  # as above
                self._logger.exception("flow run %s is lost from sight", record.flow_run_id)

    async def _tell(self, flow_run: FlowRun, state: State) -> None:
        """Set a state, however long the server takes to hear it."""
        await self._insist(
            lambda: self.client.set_flow_run_state(flow_run.id, state, force=True),
            f"flow run {flow_run.id} is not yet known to be {state.name}",
        )

    async def _read(self, flow_run: FlowRun) -> tuple[FlowRun, list[State]] | None:
        """The flow run and its states, the newest last; None if it was deleted."""

        async def ask() -> tuple[FlowRun, list[State]]:
            return await self.client.read_flow_run(flow_run.id), await self._history(flow_run.id)

        return await self._insist(ask, f"the state of flow run {flow_run.id} is not known yet")

    async def _insist(self, ask: Callable[[], Awaitable[Answer]], without: str) -> Answer | None:
        """The server's answer, however long it takes to give one; None if it knows no such flow run."""
        while True:
            try:
                return await ask()
            except ObjectNotFound:
                return None
            except Exception as error:  # of whatever kind: what is left undone here, nobody does
                self._logger.warning("%s: %s", without, error)
                await asyncio.sleep(LONGEST_PAUSE_S / 8)

    async def _leave_nothing(
        self,
        record: FlowRecord,
        environment: Mapping[str, str],
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        """End the gang and delete or give back the slices of a run whose flow is gone, until that is confirmed."""
        if record.run is None:
            return
        for number in range(TRIES):
            ending = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tpu.worker.ending", record.run, record.flow_run_id,
                env=without_mark(environment), stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            said = (await ending.communicate())[0].decode(errors="replace").strip().splitlines() or [""]
            if ending.returncode == 0:
                log.info(said[-1])
                return
            log.warning("not yet sure that nothing of %s is left: %s", record.run, said[-1])
            await asyncio.sleep(min(5.0 * 2**number, LONGEST_PAUSE_S))
        log.error("what is left of %s is left to the reaper: `relay reap`", record.run)


def _parameters(flow_run: FlowRun, configuration: CloudTpuConfiguration) -> dict[str, Any]:
    """Raises RunConfigError. A flow run that has begun before keeps what it began with."""
    if flow_run.run_count:
        return flow_run.parameters
    return run_parameters(flow_run.parameters, configuration.defaults, str(flow_run.id))


def _environment(
    folder: FlowFolder, configuration: CloudTpuConfiguration, flow_run: FlowRun
) -> dict[str, str]:
    """The environment of a flow run's processes."""
    environment = {
        **os.environ,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": os.environ.get("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", HEARTBEAT_S),
        **{setting.name: str(value) for setting, value in patient_settings().items()},
        **{name: value for name, value in configuration.env.items() if value is not None},
        **configuration.connection_environment(),
        MARK: str(flow_run.id),
        # What is killed leaves its temporary files behind, and Prefect's hold the flow's environment.
        "TMPDIR": str(folder.scratch),
        NOTHING_LEFT: str(folder.nothing_left),
        "PYTHONUNBUFFERED": "1",
    }
    if (credentials := configuration.credentials) is not None:
        if (info := credentials.service_account_info) is not None:
            file = folder.secret_file("credentials.json", json.dumps(info.get_secret_value()))
            environment["GOOGLE_APPLICATION_CREDENTIALS"] = str(file)
        elif credentials.service_account_file is not None:
            environment["GOOGLE_APPLICATION_CREDENTIALS"] = str(credentials.service_account_file)
        if credentials.project and not configuration.project:
            environment["TPU_RELAY_PROJECT"] = credentials.project
    return environment


def without_mark(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what would make a process one of the flow run's."""
    return {name: value for name, value in environment.items() if name != MARK}


def _start(folder: FlowFolder, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Prefect's engine for one flow run, in a session of its own.

    Its supervisor (`prefect flow-run execute`) would be a second process of the same size for each run, to do what the
    worker does for all of them: hear of cancellations and crashes. It works in an empty folder: a run without `code`
    takes its program from there, which must not be our own files.
    """
    folder.work.mkdir(exist_ok=True)
    folder.scratch.mkdir(mode=0o700, exist_ok=True)
    with folder.output.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", ENGINE],
            env=environment, cwd=folder.work, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip

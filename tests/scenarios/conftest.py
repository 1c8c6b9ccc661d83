"""Runs of the real flow against a real Prefect server and the emulator, for the faults of every scenario."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import RRuleSchedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.schemas.automations import Automation
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types import DateTime

from deployments.automations import PREFIX
from deployments.bench.chaos.warm import Flow, WarmStarts, warm_starts
from deployments.bench.worker_process import Worker
from deployments.postgres import own_postgres
from deployments.prefect_server import prefect_server, settings
from flows.train import train
from tests.processes import killed_at_end
from tests.trainers.undisturbed import undisturbed
from tpu.checkpoint import files
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import Fence, load_fence
from tpu.checkpoint.restore import restore
from tpu.checkpoint.verify import verify_run
from tpu.clock import SystemClock
from tpu.cloud.google import open_cloud
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runs.event_log import RunEvent
from tpu.runs.record import run_directory
from tpu.runtime.metrics import read_metrics
from tpu.slices.deletion import delete_slice
from tpu.slices.lease import Lease, LeaseState
from tpu.slices.lease_book import GcsLeaseBook
from tpu.slices.pool_settings import PoolSettings
from tpu.topology import accelerator_type

WAIT_S, LOOK_S = 90.0, 0.1
# The file in a Prefect server's folder.
DATABASE = "prefect.db"
# The first attempt comes past a commit or two and stays there, until something ends it.
STAYS = {"NUMPY_FAIL": "hang@25", "NUMPY_FAIL_ATTEMPT": "1"}
# Only the first attempt is slow: whatever ends it has time on the slowest machine, and what follows takes none.
SLOW_AT_FIRST = {"NUMPY_SLOW_ATTEMPT": "1"}


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all processes of a test session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def prefect_tables(shared_folder: Path) -> Path:
    """An empty database for a Prefect server's folder. Its migrations take longer than the start of a server, so they
    are made once for all processes of a test session."""
    with (shared_folder / "prefect-tables.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = shared_folder / "prefect-tables" / DATABASE
        if not file.exists():
            making = shared_folder / "prefect-making"
            subprocess.run(
                [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"],
                env=os.environ | settings(making), check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            making.rename(file.parent)
    return file


@contextlib.contextmanager
def session_server(shared: Path, tables: Path) -> Iterator[dict[str, str]]:
    """One Prefect server for all processes of a test session: the first that wants it starts it, and ends it when
    nobody else does any more. Its start alone takes as long as some tests."""
    told = shared / "prefect-server.json"
    with contextlib.ExitStack() as ours:
        starting = ours.enter_context((shared / "prefect.lock").open("w"))
        users = ours.enter_context((shared / "prefect.users").open("w"))
        fcntl.flock(starting, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)  # after one that is being ended has
        if not told.exists():
            on_postgres = os.environ.get("TPU_RELAY_TEST_DB") == "postgres"
            database = ours.enter_context(own_postgres()) if on_postgres else None
            folder = Path(tempfile.mkdtemp(prefix="prefect-", dir=shared))
            shutil.copy(tables, folder)
            environment = ours.enter_context(prefect_server(folder, database=database))
            told.write_text(json.dumps(environment))
            ours.callback(told.unlink)
            ours.callback(fcntl.flock, users, fcntl.LOCK_EX)
        fcntl.flock(starting, fcntl.LOCK_UN)
        yield json.loads(told.read_text())


@pytest.fixture(scope="session")
def prefect_environment(shared_folder: Path, prefect_tables: Path) -> Iterator[dict[str, str]]:
    """Where the Prefect server of the session is; on PostgreSQL with TPU_RELAY_TEST_DB=postgres."""
    with session_server(shared_folder, prefect_tables) as environment:
        yield environment
        # What Prefect still holds of logs and events: without a server it tries to send it for a minute at exit.
        APILogWorker.drain_all(timeout=10)
        EventsWorker.drain_all(timeout=10)


@pytest.fixture(scope="session")
def warm_flows(emulator_session: Emulator, prefect_environment: dict[str, str]) -> Iterator[WarmStarts]:
    """Flow processes for tests that start many: the imports are done once."""
    with warm_starts(os.environ | emulator_session.env | prefect_environment) as flows:
        yield flows


@contextlib.asynccontextmanager
async def beside(flow: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """A flow beside the block; awaited at its end, and cancelled if the block fails."""
    task = asyncio.create_task(flow)
    try:
        yield task
        await task
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


@dataclass(frozen=True)
class FlowProcess:
    """A flow that was forked from a warm process: what asyncio.subprocess.Process has of it."""

    flow: Flow

    @property
    def returncode(self) -> int | None:
        return self.flow.poll()

    @property
    def output(self) -> str:
        return self.flow.log.read_text(errors="replace")

    def kill(self) -> None:
        self.flow.kill()

    async def wait(self) -> int:
        return await asyncio.to_thread(self.flow.wait, WAIT_S)


@dataclass
class Lab:
    """An emulated cloud with a Prefect server, in which runs are started and disturbed."""

    emulator: Emulator
    environment: dict[str, str]
    warm: Callable[[], WarmStarts]
    names: Path  # of the runs of this test session
    file: str  # of the test
    read: dict[str, RunEvent] = field(default_factory=dict)  # events by where they are

    def numpy_run(
        self, name: str, *, steps: int = 60, every: int = 20, step_s: float = 0.02, **values: Any
    ) -> RunConfig:
        """A small NumPy training through the real contract."""
        self.take_name(name)
        variables = {"NUMPY_STEP_SECONDS": str(step_s)} | values.pop("variables", {})
        return parse_run_config(
            {
                "name": name,
                "command": [sys.executable, "-m", "tests.trainers.numpy_trainer"],
                "contract": True,
                "steps": steps,
                "checkpoints": {"every": every},
                "variables": variables,
                "evaluate": "never",
            }
            | values
        )

    def take_name(self, name: str) -> None:
        """Test files run at once and share a Prefect server, where their runs are found by name."""
        taken = self.names / name
        with contextlib.suppress(FileExistsError), taken.open("x") as claim:
            claim.write(self.file)
        assert taken.read_text() == self.file, f"{taken.read_text()} has a run called {name} already"

    def directory(self, name: str) -> str:
        return run_directory(self.emulator.env["TPU_RELAY_BUCKET"], name)

    async def train(self, run: RunConfig, take_over: bool = False) -> dict[str, Any]:
        return await train(run=run, take_over=take_over)

    @contextlib.asynccontextmanager
    async def training(self, run: RunConfig) -> AsyncIterator[asyncio.Task[dict[str, Any]]]:
        """The flow beside the block; awaited at its end."""
        async with beside(self.train(run)) as task:
            yield task

    @contextlib.asynccontextmanager
    async def flow_process(self, run: RunConfig, folder: Path) -> AsyncIterator[FlowProcess]:
        """`python -m flows.train` as a process; killed at the end of the block. Imports are done before it begins."""
        file = folder / f"{run.name}.yaml"
        file.write_text(run.model_dump_json())  # JSON is YAML
        flow = await asyncio.to_thread(
            self.warm().start, [str(file)], Path.cwd(), folder / f"{run.name}.log", **os.environ
        )
        async with killed_at_end(FlowProcess(flow)) as process:
            yield process

    @contextlib.asynccontextmanager
    async def cold_process(
        self, run: RunConfig, folder: Path, search: dict[str, Any] | None = None
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """`python -m flows.train` (or flows.sweep, with a search) as a person starts it; killed at the end of the
        block."""
        file = folder / f"{run.name}.yaml"
        values = run.model_dump(mode="json", exclude_unset=search is not None)
        file.write_text(json.dumps(values if search is None else {"run": values} | search))  # JSON is YAML
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "flows.train" if search is None else "flows.sweep", str(file),
            env=os.environ | self.environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with killed_at_end(process):
            yield process

    async def preempt(self, run: RunConfig | None = None, **how: Any) -> str:
        """Preempt the one slice (of a run) that is ready, as Emulator.preempt does; returns its name."""
        mine = f"relay-{run.name}-" if run is not None else ""
        (node,) = [node for node in self.ready_nodes() if node.startswith(mine)]
        await asyncio.to_thread(self.emulator.preempt, node, **how)
        return node

    def pids(self, *words: str) -> list[int]:
        """Processes on emulated hosts whose command line has all `words`."""
        found = []
        for pid in self.emulator.processes():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [pid] if all(word in line for word in words) else []
        return found

    @contextlib.contextmanager
    def frozen(self, *words: str) -> Iterator[list[int]]:
        """Stop these processes where they stand (SIGSTOP) for the block; those that live then go on."""
        pids = self.pids(*words)
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield pids
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def kill(self, pids: list[int]) -> None:
        assert pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- what can be seen ---

    def fence(self, name: str) -> Fence:
        return load_fence(self.directory(name))

    def newest_step(self, name: str) -> int:
        newest = self.fence(name).newest()
        return newest.step if newest else 0

    def events(self, name: str, kind: str | None = None) -> list[RunEvent]:
        """As `load_events`; but each is read once, since tests ask again and again, and none ever changes."""
        urls = files.names(f"{self.directory(name)}/events")
        self.read |= {url: RunEvent(**json.loads(files.read(url))) for url in urls if url not in self.read}
        return [event for event in map(self.read.__getitem__, urls) if kind in (None, event.kind)]

    def verdicts(self, name: str) -> list[str]:
        return [event.detail["verdict"] for event in self.events(name, "attempt-ended")]

    def digest(self, name: str) -> str:
        return run_digest(self.directory(name), prefix="")

    def losses(self, name: str) -> list[tuple[Any, Any]]:
        return [(row["step"], row["loss"]) for row in read_metrics(self.directory(name), self.fence(name))]

    def nodes_in(self, state: str) -> list[str]:
        return [node["node"] for node in self.emulator.nodes() if node["state"] == state]

    def ready_nodes(self) -> list[str]:
        return self.nodes_in("READY")

    async def until(
        self, condition: Callable[[], Any], what: str, task: asyncio.Task[Any] | None = None
    ) -> Any:
        """Poll until `condition` gives something true; fails after WAIT_S, or if the flow ends before."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if answer := await asyncio.to_thread(condition):
                    return answer
                if task is not None and task.done():
                    task.result()
                    raise AssertionError(f"the flow ended before {what}")
                await asyncio.sleep(LOOK_S)

    async def until_step(self, name: str, step: int, task: asyncio.Task[Any] | None = None) -> None:
        await self.until(lambda: self.newest_step(name) >= step, f"step {step} of {name} was committed", task)

    def assert_as_undisturbed(self, run: RunConfig) -> None:
        """The newest checkpoint is that of the last step with the bits of a training nobody disturbed, every loss
        is logged once, and every commit verifies."""
        hosts = accelerator_type(run.slice.accelerator_type).hosts
        with pytest.MonkeyPatch.context() as patch:
            for name, value in run.variables.items():
                patch.setenv(name, value)
            arrays, losses = undisturbed(run.seed, run.steps, hosts)
        restored = restore(self.directory(run.name), self.fence(run.name))
        assert restored is not None
        assert restored.step == run.steps
        for name, whole in arrays.items():
            assert restored.arrays[name].tobytes() == whole.tobytes(), name
        assert self.losses(run.name) == losses
        assert all(verdict.whole for verdict in verify_run(self.directory(run.name)))

    def assert_nothing_left(self) -> None:
        """No slice, no queued resource, no process on any host."""
        assert self.emulator.nodes() == []
        assert self.emulator.queued_resources() == []
        assert self.emulator.processes() == []


@pytest.fixture
async def lab(
    emulator: Emulator,
    prefect_environment: dict[str, str],
    program_folder: Path,
    shared_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Lab]:
    """The lab; after each test nothing may be left in the cloud."""
    monkeypatch.chdir(program_folder)
    for name, value in prefect_environment.items():
        monkeypatch.setenv(name, value)
    with temporary_settings({PREFECT_API_URL: prefect_environment["PREFECT_API_URL"]}):
        names = shared_folder / "run-names"
        names.mkdir(exist_ok=True)
        warm = functools.partial(request.getfixturevalue, "warm_flows")
        made = Lab(emulator, prefect_environment, warm, names, request.path.name)
        yield made
        made.assert_nothing_left()


# A secret that the worker of a module, and so every flow of it, has in its environment.
SECRET_VARIABLE, SECRET = "RELAY_TEST_TOKEN", "hf_5ecret/w0rker+value=="


@pytest.fixture(scope="module")
def worker_of_module(
    emulator_session: Emulator,
    prefect_environment: dict[str, str],
    program_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Worker]:
    """One worker for the tests of a module, on a pool of its own. Tests take `worker`."""
    pool = f"tpu-{os.getpid()}-{request.module.__name__.rpartition('.')[2].replace('_', '-')}"
    environment = emulator_session.env | prefect_environment | {SECRET_VARIABLE: SECRET}
    made = Worker(pool, environment, tmp_path_factory.mktemp("worker"), program_folder)
    with temporary_settings({PREFECT_API_URL: prefect_environment["PREFECT_API_URL"]}):
        asyncio.run(made.make_pool())
        asyncio.run(made.deploy_flow(made.pool, train))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def worker(lab: Lab, worker_of_module: Worker) -> Iterator[Worker]:
    """A worker that runs; it is left running for the next test."""
    if not worker_of_module.alive:
        worker_of_module.start()
    yield worker_of_module
    worker_of_module.kill_all()
    print(worker_of_module.log.read_text())


def soon_and_again(every_s: int) -> DeploymentScheduleCreate:
    """A schedule from in 8 s on; it comes again, since a server that is busy then passes over what is past."""
    begin = DateTime.now("UTC").add(seconds=8)
    rule = f"DTSTART:{begin:%Y%m%dT%H%M%SZ}\nRRULE:FREQ=SECONDLY;INTERVAL={every_s}"
    return DeploymentScheduleCreate(schedule=RRuleSchedule(rrule=rule), active=True)


async def until_fired(deployment: UUID, times: int = 1) -> list[FlowRun]:
    """The first flow runs that a deployment's schedule has made, once there are so many; oldest first."""
    where = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))
    async with get_client() as client, asyncio.timeout(2 * WAIT_S):
        while True:
            found = await client.read_flow_runs(
                flow_run_filter=where, sort=FlowRunSort.EXPECTED_START_TIME_ASC
            )
            if len(found) >= times:
                return found[:times]
            await asyncio.sleep(0.2)


async def our_automations() -> list[Automation]:
    async with get_client() as client:
        return [one for one in await client.read_automations() if one.name.startswith(PREFIX)]


@pytest.fixture
async def automations(lab: Lab, shared_folder: Path) -> AsyncIterator[None]:
    """None of ours before and after the test: other tests share the server, and two of these exclude each other."""
    with (shared_folder / "automations.lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        assert await our_automations() == []
        yield
        async with get_client() as client:
            for one in await our_automations():
                await client.delete_automation(one.id)


class Pool:
    """The default pool of the lab's bucket."""

    def __init__(self, bucket: str) -> None:
        self.book = GcsLeaseBook(bucket)

    async def set(self, **values: Any) -> None:
        await self.book.set_settings("default", lambda _: PoolSettings(**values))

    async def leases(self) -> list[Lease]:
        return [kept.lease for kept in await self.book.list("default", past=True)]

    async def delete_by_hand(self, lease: Lease) -> None:
        """As a person does it, past us."""
        async with open_cloud(Connection.from_environment()) as cloud:
            await delete_slice(cloud, lease.candidate.zone, lease.slice, SystemClock(), 30.0)


@pytest.fixture
async def pool(lab: Lab) -> AsyncIterator[Pool]:
    """The pool; what it keeps at the end of a test is deleted."""
    made = Pool(Connection.from_environment().bucket)
    yield made
    for lease in await made.leases():
        if lease.state is not LeaseState.GONE:
            await made.delete_by_hand(lease)

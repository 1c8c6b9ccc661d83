"""The emulator's process: puts the parts together, says when it is ready, and takes them down again."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import shutil
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from tpu.clock import SystemClock
from tpu.emulator import gcloud, rest
from tpu.emulator.addresses import AddressPool, free_port
from tpu.emulator.api_server import ApiServer
from tpu.emulator.control import Control
from tpu.emulator.dispatch import Dispatcher
from tpu.emulator.emulator import RECORD_NAME, EmulatorRecord, read_record, started
from tpu.emulator.faults import Faults
from tpu.emulator.fleet import Fleet
from tpu.emulator.gcs import GcsServer
from tpu.emulator.guardian import Guardian
from tpu.emulator.host_pool import HostPool
from tpu.emulator.nodes import Nodes
from tpu.emulator.operations import OperationStore
from tpu.emulator.project import check_call
from tpu.emulator.queued import QueuedResources
from tpu.emulator.simulation_stage import Stage, scripted_stage
from tpu.emulator.state import Settings, World
from tpu.emulator.tpu_service import TpuService
from tpu.emulator.trouble import Trouble

_log = logging.getLogger(__name__)

BUCKET = "relay-emulated"
_SSH_PORT = 2222
_METADATA_PORT = 8775


@dataclass(frozen=True)
class ServeOptions:
    """How to run: where its files lie, the project it serves, threads of each host, and when to end.

    With `speed` hosts are simulated, and so many seconds of the cloud pass in one: see tpu.emulator.simulation.
    `seed` is that of their fate.
    """

    state_dir: Path
    project: str = "relay-emulated"
    host_threads: int = 1
    temporary: bool = False
    until_stdin_closes: bool = False
    speed: float | None = None
    seed: int = 0


class AlreadyRunning(RuntimeError):
    """Another emulator uses the state folder."""


async def serve(options: ServeOptions) -> None:
    """Run an emulator until SIGTERM, SIGINT, or the end of stdin if asked so; leaves nothing behind.

    Raises:
        AlreadyRunning: the state folder is in use.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # several a host
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    if options.until_stdin_closes:
        _set_at_end_of_stdin(loop, stop)
    async with AsyncExitStack() as stack:
        record = await _start(options, stack)
        record.write(options.state_dir)
        stack.callback((options.state_dir / RECORD_NAME).unlink, missing_ok=True)
        _log.info("ready: API %s, control %s", record.env["TPU_RELAY_API_ENDPOINT"], record.control)
        await stop.wait()
        _log.info("stopping")


def _set_at_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    loop.add_reader(sys.stdin.fileno(), readable)


async def _start(options: ServeOptions, stack: AsyncExitStack) -> EmulatorRecord:
    """Start all parts; the stack takes down what has started, in reverse, whatever comes."""
    state_dir = options.state_dir
    _prepare(state_dir)
    emulator_id, key = secrets.token_hex(6), secrets.token_urlsafe(24)
    guardian = Guardian(emulator_id, state_dir, remove_state=options.temporary)
    guardian.start()
    stack.callback(guardian.stop)

    gcs_root = state_dir / "gcs"
    gcs = GcsServer(gcs_root, state_dir / "gcs.log", emulator_id=emulator_id, bucket=BUCKET)
    storage = gcs.start()  # by this thread, since the server dies with the one that starts it
    stack.callback(gcs.stop)
    addresses = AddressPool.claim()
    stack.callback(addresses.close)
    first = f"127.{addresses.network}.1.1"
    ssh_port, metadata_port = free_port(first, _SSH_PORT), free_port(first, _METADATA_PORT)
    host_environment = {"STORAGE_EMULATOR_HOST": storage, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    world = World()
    if options.speed is not None:
        stage = scripted_stage(world, options.speed, options.seed)
    else:
        pool = HostPool(emulator_id, state_dir)
        await pool.start()
        stack.push_async_callback(pool.stop)
        fleet = Fleet(
            emulator_id,
            pool,
            addresses,
            state_dir,
            ssh_port=ssh_port,
            metadata_port=metadata_port,
            threads=options.host_threads,
            environment=host_environment,
        )
        stage = Stage(SystemClock(), fleet)
    cloud = await _open_cloud(options.project, key, world, stage, gcs_root / BUCKET, stack)
    gcloud.write_token(state_dir, key)
    stack.callback(gcloud.token_file(state_dir).unlink, missing_ok=True)
    env = {
        "TPU_RELAY_PROJECT": options.project,
        "TPU_RELAY_BUCKET": f"gs://{BUCKET}",
        "TPU_RELAY_API_ENDPOINT": cloud.api,
        "TPU_RELAY_REST_ENDPOINT": cloud.rest,
        "TPU_RELAY_API_KEY": key,
        "TPU_RELAY_SSH_PORT": str(ssh_port),
        "TPU_RELAY_SSH_USER": "relay",
        "TPU_RELAY_HOST_PYTHON": sys.executable,
        "TPU_RELAY_HOME": str(state_dir / "relay-home"),
        "TPU_EMULATOR_CONTROL": cloud.control,
        "TPU_EMULATOR_GCLOUD_TOKEN": str(gcloud.token_file(state_dir)),
        **host_environment,
    }
    return EmulatorRecord(emulator_id, os.getpid(), started(os.getpid()), guardian.pid, cloud.control, env)


@dataclass(frozen=True)
class _Addresses:
    """Where the cloud is served: `host:port` of gRPC, URLs of the REST form and of the control API."""

    api: str
    rest: str
    control: str


async def _open_cloud(
    project: str, key: str, world: World, stage: Stage, bucket: Path, stack: AsyncExitStack
) -> _Addresses:
    """Open the API in both its forms, and the control API, over a fleet of hosts."""
    clock, fleet, faults = stage.clock, stage.fleet, Faults()
    nodes = Nodes(world, fleet, clock)
    stage.begin(nodes)
    queued = QueuedResources(world, nodes, clock)
    operations = OperationStore(clock, world.background)
    trouble = Trouble(world, nodes, clock)
    stack.push_async_callback(trouble.delete_everything)

    async def wipe() -> None:
        faults.clear()
        await trouble.delete_everything()
        operations.clear()
        world.settings, world.budget = Settings(), None
        await asyncio.to_thread(empty_folder, bucket)
        stage.begin(nodes)

    service = TpuService(project, world, nodes, queued, operations, clock)
    dispatcher = Dispatcher(
        service, operations, faults, key, lambda method: check_call(world.settings.project, method)
    )
    api = ApiServer(dispatcher)
    api_port = await api.start()
    stack.push_async_callback(api.stop)
    control = Control(world, trouble, faults, fleet, key, wipe)
    return _Addresses(
        api=f"127.0.0.1:{api_port}",
        rest=f"http://127.0.0.1:{await _listen(rest.application(dispatcher, project, lambda: world.settings), stack)}",
        control=f"http://127.0.0.1:{await _listen(control.application(), stack)}",
    )


def empty_folder(folder: Path) -> None:
    """Remove everything in a folder. The GCS server keeps nothing in memory, so this empties its bucket."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _prepare(state_dir: Path) -> None:
    if (other := read_record(state_dir)) is not None:
        raise AlreadyRunning(
            f"an emulator (process {other.pid}) already uses {state_dir}: "
            f"stop it with `python -m tpu.emulator down --state {state_dir}`, or choose another --state"
        )
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    state_dir.chmod(0o700)  # keys lie in it
    # Hosts live in memory only; disks of an emulator that was killed are of no use to anybody.
    shutil.rmtree(state_dir / "hosts", ignore_errors=True)
    (state_dir / RECORD_NAME).unlink(missing_ok=True)


async def _listen(application: web.Application, stack: AsyncExitStack) -> int:
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.2)
    await site.start()
    return runner.addresses[0][1]

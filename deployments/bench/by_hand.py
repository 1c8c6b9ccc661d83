"""The limit: the same trainer on the same kind of host, started by hand over SSH, with nothing of ours around it."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.bench.lab import BenchFailed
from tpu.checkpoint import files
from tpu.checkpoint.fence import load_fence, open_attempt, update_fence
from tpu.clock import SystemClock
from tpu.cloud.google import open_cloud
from tpu.connection import Connection
from tpu.hosts.connect import connect_all
from tpu.hosts.gang import Tenant
from tpu.hosts.group import HostConnection
from tpu.hosts.identity import ensure_identity
from tpu.runs import launch
from tpu.runs.config import RunConfig
from tpu.runs.record import RunRecord, data_hash
from tpu.runs.sync import Installed
from tpu.slices.deletion import delete_slice
from tpu.slices.provision import ReadySlice, provision

CONNECT_S = 60.0
DELETE_S = 60.0
CACHES = "~/.relay/compile-cache"


@dataclass(frozen=True)
class Bare:
    """A slice of one host that is made, reached, and otherwise fresh."""

    slice: ReadySlice
    host: HostConnection


@contextlib.asynccontextmanager
async def bare_slice(connection: Connection, config: RunConfig, name: str) -> AsyncIterator[Bare]:
    """A fresh slice as `config` asks for it, deleted at the end of the block."""
    identity, clock = ensure_identity(connection.home), SystemClock()
    request = launch.slice_request(config, connection, identity)

    async def wanted() -> None:
        return None

    async with open_cloud(connection) as cloud:
        try:
            ready = await provision(cloud, request, name, clock, lambda _: None, wanted)
            async with connect_all(ready.hosts, identity, connection, CONNECT_S, lambda _: None) as group:
                yield Bare(ready, group.members[0])
        finally:
            await delete_slice(cloud, request.zone, name, clock, DELETE_S)


async def bring_compiled_programs(bare: Bare, bucket: str) -> None:
    """Lay the bucket's compiled programs out where the trainer looks for them first."""
    for url in files.names(f"{bucket}/caches/jax"):
        key, name = url.split("/")[-2:]
        await bare.host.put(files.read(url), f"{CACHES}/{key}/complete/{name}")


async def train(
    bare: Bare, config: RunConfig, run_dir: str, until_event: str | None = None
) -> tuple[float, list[dict[str, Any]]]:
    """Open the run's next attempt and train it; returns when it was started, and the trainer's events.

    With `until_event` it is left at the first such event; else it is to end well.

    Raises:
        BenchFailed: it ended otherwise.
    """
    number = load_fence(run_dir).attempt + 1
    newest = update_fence(run_dir, lambda fence: open_attempt(fence, number)).newest()
    here = str(Path.cwd())
    record = RunRecord(config, data_hash(config), {}, 0.0)
    spec = launch.gang_spec(
        record, run_dir, number, newest, bare.slice, Tenant(1, ()),
        Installed(here, (here,), sys.executable, str(Path(sys.executable).parent)), {},
    )  # fmt: skip
    folder = f".by-hand/{number}"
    await bare.host.put(spec.files["config.json"].encode(), f"~/{folder}/config.json")
    home = (await bare.host.run("pwd")).stdout.strip()
    environment = dict(spec.environments[bare.slice.hosts[0]]) | {
        "RELAY_CONFIG": f"{home}/{folder}/config.json",
        "RELAY_EVENTS": f"{home}/{folder}/events.jsonl",
    }
    began = time.time()
    command = _command(environment, spec.argv, f"{home}/{folder}")
    events = []
    async with contextlib.aclosing(bare.host.stream(command)) as lines:
        async for line in lines:
            if line.startswith("{"):
                events.append(json.loads(line))
                if events[-1]["event"] == until_event:
                    return began, events
            elif line.startswith("exit "):
                if line != "exit 0":
                    raise BenchFailed(f"the trainer started by hand ended with {line}: {lines}")
                return began, events
    raise BenchFailed("the trainer started by hand ended without a word")


def _command(environment: dict[str, str], argv: Sequence[str], folder: str) -> str:
    """Start the program and follow its events, by a `tail` that sleeps until there is one."""
    words = [f"{name}={value}" for name, value in environment.items()]
    program = shlex.join(["env", *words, *argv])
    return (
        f"touch {folder}/events.jsonl; {program} >{folder}/log 2>&1 & program=$!; "
        f"tail -n +1 -F --pid=$program {folder}/events.jsonl 2>/dev/null; wait $program; echo exit $?"
    )

"""Hosts behind the nodes: addresses, cores and attributes are given out here, processes in HostPool."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from pathlib import Path

from tpu.emulator.addresses import AddressPool
from tpu.emulator.capacity import PREEMPTIBLE
from tpu.emulator.host_pool import HostPool
from tpu.emulator.host_spec import HostSpec
from tpu.emulator.processes import marked_processes
from tpu.emulator.state import NodeRecord

TPU_PORT = 8470  # what the API shows as the port of a network endpoint


class Fleet:
    """Boots and kills the hosts of nodes. `environment` is added to every process on every host."""

    def __init__(
        self,
        emulator_id: str,
        pool: HostPool,
        addresses: AddressPool,
        state_dir: Path,
        *,
        ssh_port: int,
        metadata_port: int,
        threads: int,
        environment: dict[str, str],
    ) -> None:
        self._emulator_id = emulator_id
        self._pool = pool
        self._addresses = addresses
        self._homes = state_dir / "hosts"
        self._ssh_port = ssh_port
        self._metadata_port = metadata_port
        self._threads = threads
        self._environment = environment
        self._load: Counter[int] = Counter(dict.fromkeys(sorted(os.sched_getaffinity(0)), 0))
        if not 1 <= threads <= len(self._load):
            raise ValueError(f"a host can have 1 to {len(self._load)} threads on this machine, not {threads}")

    def give_addresses(self, node: NodeRecord) -> None:
        """Give the node's hosts their addresses and write them into its message."""
        node.addresses = tuple(self._addresses.take() for _ in range(node.kind.hosts))
        show_addresses(node)

    async def boot(self, node: NodeRecord) -> None:
        """Boot all hosts of a node; returns once each of them takes SSH connections.

        If one cannot boot, those that did are killed again and the first error is raised.
        """
        specs = [self._spec(node, index, address) for index, address in enumerate(node.addresses)]
        for spec in specs:
            self._load.update(spec.cpus)
        booted = await asyncio.gather(*(self._pool.boot(spec) for spec in specs), return_exceptions=True)
        node.hosts = tuple(host for host in booted if not isinstance(host, BaseException))
        node.host_keys = tuple(host.host_key_public for host in node.hosts)
        for spec, host in zip(specs, booted, strict=True):
            if isinstance(host, BaseException):
                self._load.subtract(spec.cpus)
        errors = [host for host in booted if isinstance(host, BaseException)]
        if errors:
            await self.kill(node)
            raise errors[0]

    async def kill(self, node: NodeRecord) -> None:
        """Kill all hosts of a node; returns when none of their processes is left. Their disks go too."""
        async with node.killing:
            await asyncio.gather(*(host.kill() for host in node.hosts))
            for host in node.hosts:
                self._load.subtract(host.spec.cpus)
                await asyncio.to_thread(shutil.rmtree, self._home(node, host.spec.index), ignore_errors=True)
            node.hosts = ()
            node.has_hardware = False

    def free_addresses(self, node: NodeRecord) -> None:
        """Take the addresses back; only for a node whose hosts were killed."""
        for address in node.addresses:
            self._addresses.free(address)
        node.addresses = ()

    async def push_attributes(self, node: NodeRecord) -> None:
        """Let the metadata servers and SSH servers of a node see its changed metadata."""
        for host in node.hosts:
            await host.set_attributes(self._attributes(node, host.spec.index))

    async def processes(self) -> list[int]:
        """Return the pids of all that lives on hosts, of hosts that should be dead as well."""
        found = await asyncio.to_thread(marked_processes, f"TPU_EMULATOR_ID={self._emulator_id}")
        # Our own children are no hosts but the servers that hosts are forked from and store objects in.
        return [process.pid for process in found if process.alive and process.parent != os.getpid()]

    def _spec(self, node: NodeRecord, index: int, address: str) -> HostSpec:
        return HostSpec(
            node=node.node_id,
            zone=node.location.zone,
            project=node.location.project,
            index=index,
            address=address,
            ssh_port=self._ssh_port,
            metadata_port=self._metadata_port,
            accelerator_type=node.kind.name,
            chips=node.kind.chips_per_host,
            devices_per_chip=node.kind.devices_per_chip,
            threads=self._threads,
            cpus=self._least_loaded_cores(index),
            home=self._home(node, index),
            attributes=self._attributes(node, index),
            environment=dict(self._environment),
            preemptible=node.provisioning in PREEMPTIBLE,
        )

    def _home(self, node: NodeRecord, index: int) -> Path:
        # The id keeps a node's disk apart from that of an earlier node of the same name.
        return self._homes / f"{node.location.zone}.{node.node_id}.{node.message.id}" / str(index)

    def _least_loaded_cores(self, index: int) -> tuple[int, ...]:
        """Return the cores of host `index`: the idlest ones, the hosts of one node spread over them."""
        ordered = sorted(self._load, key=lambda core: (self._load[core], core))
        start = index * self._threads % len(ordered)
        rotated = ordered[start:] + ordered[:start]
        return tuple(sorted(rotated[: self._threads]))

    def _attributes(self, node: NodeRecord, index: int) -> dict[str, str]:
        endpoints = ",".join(f"unknown:unknown:{address}" for address in node.addresses)
        return {
            **dict(node.message.metadata),
            "accelerator-type": node.kind.name,
            "agent-worker-number": str(index),
            "instance-id": node.node_id,
            "worker-network-endpoints": endpoints,
            "tpu-env": tpu_env(node, index),
        }


def show_addresses(node: NodeRecord) -> None:
    """Write the addresses of a node's hosts into its message."""
    del node.message.network_endpoints[:]
    external = not node.message.HasField("network_config") or node.message.network_config.enable_external_ips
    for address in node.addresses:
        endpoint = node.message.network_endpoints.add(ip_address=address, port=TPU_PORT)
        if external:
            endpoint.access_config.external_ip = address


def tpu_env(node: NodeRecord, index: int) -> str:
    """Return the `tpu-env` attribute of one host: lines `KEY: 'value'`."""
    kind = node.kind
    chip_bounds = kind.chips_per_host_bounds
    values = {
        "ACCELERATOR_TYPE": kind.name,
        "CHIPS_PER_HOST_BOUNDS": chip_bounds,
        "CONSUMER_PROJECT_ID": node.location.project,
        "HOST_BOUNDS": kind.host_bounds,
        "NODE_ID": node.node_id,
        "PREEMPTIBLE": str(node.provisioning in PREEMPTIBLE).lower(),
        "RUNTIME_VERSION": node.message.runtime_version,
        "TOPOLOGY": kind.topology,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": chip_bounds,
        "TPU_PROCESS_BOUNDS": kind.host_bounds,
        "TYPE": kind.generation.upper(),
        "UID": str(node.message.id),
        "WORKER_ID": str(index),
        "ZONE": node.location.zone,
    }
    return "".join(f"{key}: '{value}'\n" for key, value in values.items())

"""The environment of a training process: which chips it may use, who its peers are, by which ports.

Pure: addresses and numbers in, variables out. Each value belongs to one attempt, so that a restarted gang can
neither meet a port of the last one nor read its coordinator's address (G1, G2, G3).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from tpu.topology import AcceleratorType

# Below the range that Linux hands out by itself (32768 and up), above the well-known ports.
FIRST_PORT, LAST_PORT = 10240, 32000
PORTS_EACH = 3
# No host has more chips; each may have a run of its own.
CHIPS_MOST = 8

# Removed from what a process would inherit before its own variables are set.
STALE_VARIABLES = (
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_HOST_BOUNDS",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    "TPU_MESH_CONTROLLER_ADDRESS",
    "TPU_MESH_CONTROLLER_PORT",
    "CLOUD_TPU_TASK_ID",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_PORT",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)

# How a part of a host's chips is laid out, by their number.
_PART_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


class ChipsError(ValueError):
    """The chips asked for do not exist on a host of this type, or cannot be joined."""


@dataclass(frozen=True)
class Ports:
    """Ports of one attempt: JAX's coordinator, libtpu's between slices, libtpu's between processes."""

    coordinator: int
    megascale: int
    process: int


def attempt_ports(run: str, attempt: int, chips: tuple[int, ...] | None = None) -> Ports:
    """Ports that differ from those of the attempts around, and from those of runs on other chips of the same VM."""
    places = (LAST_PORT - FIRST_PORT) // PORTS_EACH // CHIPS_MOST * CHIPS_MOST
    place = (zlib.crc32(run.encode()) + attempt) * CHIPS_MOST + (chips[0] if chips else 0)
    first = FIRST_PORT + place % places * PORTS_EACH
    return Ports(first, first + 1, first + 2)


def training_environment(
    accelerator: AcceleratorType,
    host_index: int,
    hostnames: Sequence[str],
    run: str,
    attempt: int,
    *,
    chips: tuple[int, ...] | None = None,
    ports: Ports | None = None,
    slice_index: int = 0,
    slice_heads: Sequence[str] = (),
) -> dict[str, str]:
    """Variables of the process on one host that depend on where it runs; what it has to do is the run's part.

    `hostnames` are the internal addresses of the slice's hosts in order. `chips` are those of the host that
    this process alone uses (it then has no peers), None for all of the slice. `ports` are those of the attempt
    unless given. `slice_heads` are the addresses of the first host of each slice of a multi-slice run.

    Raises:
        ChipsError: `chips` cannot be used so.
        ValueError: the number of hosts is not that of the accelerator type, or an index lies outside.
    """
    if len(hostnames) != accelerator.hosts or not 0 <= host_index < accelerator.hosts:
        raise ValueError(
            f"{accelerator.name} has {accelerator.hosts} host(s), "
            f"found {len(hostnames)} addresses and index {host_index}"
        )
    ports = ports or attempt_ports(run, attempt, chips)
    slices = len(slice_heads) or 1
    if not 0 <= slice_index < slices or (chips is not None and slices > 1):
        raise ValueError(f"slice {slice_index} of {slices} cannot be, with chips {chips}")
    if chips is None:
        peers, own = tuple(hostnames), host_index
        topology = _whole_slice(accelerator)
    else:
        peers, own = (hostnames[host_index],), 0
        topology = _part_of_host(accelerator, chips)
    coordinator = slice_heads[0] if slices > 1 else peers[0]
    return {
        **topology,
        **_megascale(slice_index, slices, coordinator, ports),
        "TPU_WORKER_ID": str(own),
        "TPU_WORKER_HOSTNAMES": ",".join(peers),
        "JAX_COORDINATOR_PORT": str(ports.coordinator),
        "RELAY_RUN": run,
        "RELAY_ATTEMPT": str(attempt),
        "RELAY_COORDINATOR": f"{coordinator}:{ports.coordinator}",
        "RELAY_NUM_PROCESSES": str(len(peers) * slices),
        "RELAY_PROCESS_ID": str(slice_index * len(peers) + own),
    }


def _whole_slice(accelerator: AcceleratorType) -> dict[str, str]:
    return {
        "TPU_ACCELERATOR_TYPE": accelerator.name,
        "TPU_HOST_BOUNDS": accelerator.host_bounds,
        "TPU_PROCESS_BOUNDS": accelerator.host_bounds,
        "TPU_CHIPS_PER_HOST_BOUNDS": accelerator.chips_per_host_bounds,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": accelerator.chips_per_host_bounds,
    }


def _part_of_host(accelerator: AcceleratorType, chips: tuple[int, ...]) -> dict[str, str]:
    here = accelerator.chips_per_host
    if len(set(chips)) != len(chips) or not all(0 <= chip < here for chip in chips):
        raise ChipsError(f"a host of {accelerator.name} has chips 0 to {here - 1}, found {list(chips)}")
    if len(chips) not in _PART_BOUNDS:
        raise ChipsError(f"a process takes {', '.join(map(str, _PART_BOUNDS))} chips, found {len(chips)}")
    bounds = accelerator.chips_per_host_bounds if len(chips) == here else _PART_BOUNDS[len(chips)]
    listed = ",".join(map(str, chips))
    return {
        "TPU_VISIBLE_CHIPS": listed,
        "TPU_VISIBLE_DEVICES": listed,
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
    }


def _megascale(slice_index: int, slices: int, coordinator: str, ports: Ports) -> dict[str, str]:
    """All four, always: one that is left of another gang hangs the start. Empty ones mean a single slice."""
    if slices == 1:
        address, port, number, index = "", "", "", ""
    else:
        address, port = f"{coordinator}:{ports.megascale}", str(ports.megascale)
        number, index = str(slices), str(slice_index)
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": address,
        "MEGASCALE_PORT": port,
        "MEGASCALE_NUM_SLICES": number,
        "MEGASCALE_SLICE_ID": index,
    }

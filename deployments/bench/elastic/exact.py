"""One process of a sum over processes: by the fixed tree, or by gloo's all-reduce through JAX. Both over loopback.

Started by `ratio.py`; prints one JSON object a repetition. Processes begin each repetition together.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("how", choices=["tree", "gloo"])
    for name in ("rank", "count", "elements", "repetitions", "port"):
        arguments.add_argument(f"--{name}", type=int, required=True)
    chosen = arguments.parse_args()
    barrier = Barrier(chosen.rank, chosen.count, chosen.port)
    make = tree_sum if chosen.how == "tree" else gloo_sum
    sum_once, told = make(chosen)
    for repetition in range(chosen.repetitions + 1):
        barrier.wait()
        began, sent = time.perf_counter(), told()
        sum_once(repetition)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "sent": told() - sent, "peak": peak}), flush=True)
    barrier.wait()


def gradient(elements: int, rank: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[rank, 0])).standard_normal(elements, np.float32)


def tree_sum(chosen: Any) -> tuple[Callable[[int], None], Callable[[], int]]:
    """A unit each: what is exchanged is the gradient itself."""
    from tpu.elastic.exchange import Exchange
    from tpu.elastic.table import deal

    mine = gradient(chosen.elements, chosen.rank)
    exchange = Exchange(chosen.elements, chosen.count, 1.0 / chosen.count)
    exchange.begin(chosen.rank, 0)
    exchange.set_tables([deal(0, 1 << 30, dict.fromkeys(range(chosen.count), 1.0), chosen.count)])
    listener = socket.create_server(("127.0.0.1", chosen.port + 1 + chosen.rank))
    for peer in range(chosen.rank):
        sock = connect(chosen.port + 1 + peer)
        sock.sendall(bytes([chosen.rank]))
        exchange.add_link(peer, sock)
    for _ in range(chosen.count - 1 - chosen.rank):
        sock, _ = listener.accept()
        exchange.add_link(sock.recv(1)[0], sock)

    def once(step: int) -> None:
        exchange.offer(step, (chosen.rank, chosen.rank + 1), mine)
        while exchange.wait(step, exchange.generation, 60) is None:
            pass

    return once, lambda: exchange.bytes_sent


def gloo_sum(chosen: Any) -> tuple[Callable[[int], None], Callable[[], int]]:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{chosen.port + 1}", chosen.count, chosen.rank)
    mesh = Mesh(np.array(jax.devices()), ("slices",))
    where = NamedSharding(mesh, PartitionSpec("slices"))
    mine = gradient(chosen.elements, chosen.rank)[None]
    whole = jax.make_array_from_process_local_data(where, mine, (chosen.count, chosen.elements))
    program = jax.jit(
        jax.shard_map(
            lambda part: jax.lax.psum(part, "slices"),
            mesh=mesh,
            in_specs=PartitionSpec("slices"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )

    def once(step: int) -> None:
        program(whole).block_until_ready()

    # A ring sends this much; gloo tells nobody what it sent.
    return once, lambda: 0


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)  # the other process has not begun to listen


class Barrier:
    """All processes at one place, through the first."""

    def __init__(self, rank: int, count: int, port: int) -> None:
        self._rank = rank
        if rank == 0:
            listener = socket.create_server(("127.0.0.1", port))
            self._others = [listener.accept()[0] for _ in range(count - 1)]
        else:
            self._others = [connect(port)]

    def wait(self) -> None:
        if self._rank == 0:
            for other in self._others:
                other.recv(1)
            for other in self._others:
                other.sendall(b"g")
        else:
            self._others[0].sendall(b"r")
            self._others[0].recv(1)


if __name__ == "__main__":
    main()

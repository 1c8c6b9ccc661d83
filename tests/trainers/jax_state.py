"""Saves or restores a sharded JAX state through the segment contract: `python -m tests.trainers.jax_state`.

JAX_STATE_MESH     devices along the mesh, such as 8
The state is donated to each step, right after it was saved. Several processes meet at RELAY_COORDINATOR.
"""

from __future__ import annotations

import os

from tpu.runtime import segment


def main() -> None:
    with segment.start() as seg:
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        if seg.num_processes > 1:
            jax.distributed.initialize(
                seg.coordinator, seg.num_processes, seg.process_id, coordinator_bind_address=seg.coordinator
            )
        devices = jax.devices()[: int(os.environ["JAX_STATE_MESH"])]
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))

        def put(value: np.ndarray, spec: PartitionSpec) -> jax.Array:
            return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda i: value[i])

        rng = np.random.default_rng(5)
        rows, copies = PartitionSpec("data"), PartitionSpec()
        state = {
            "params": {
                "rows": put(rng.standard_normal((16, 3), dtype=np.float32), rows),
                "columns": put(rng.standard_normal((2, 16), dtype=np.float32), PartitionSpec(None, "data")),
                "copy": put(rng.standard_normal(5).astype(jnp.bfloat16), copies),
            },
            "count": put(np.zeros((), np.int32), copies),
            "key": jax.jit(lambda: jax.random.key(3), out_shardings=NamedSharding(mesh, copies))(),
        }
        before = state
        state = seg.restore(state)
        for name in ("rows", "columns", "copy"):
            assert state["params"][name].sharding == before["params"][name].sharding, name
        train = jax.jit(
            lambda s: jax.tree.map(lambda x: x + 1 if x.dtype != s["key"].dtype else x, s), donate_argnums=0
        )
        for step in seg.steps():
            state = train(state)
            seg.checkpoint(step + 1, state)
        print(f"count {int(state['count'].addressable_shards[0].data)} step {seg.step}", flush=True)


if __name__ == "__main__":
    main()

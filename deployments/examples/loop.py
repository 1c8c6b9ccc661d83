import jax, jax.numpy as jnp, optax
from tpu.runtime import segment

with segment.start() as seg:
    truth, adam = jnp.arange(8.0), optax.adam(0.05)
    params = jnp.zeros(8)
    state = seg.restore({"params": params, "adam": adam.init(params)})
    for step in seg.steps():
        x = jax.random.normal(jax.random.fold_in(jax.random.key(seg.seed), step), (64, 8))
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ (p - truth)) ** 2))(state["params"])
        updates, opt = adam.update(grads, state["adam"])
        state = {"params": optax.apply_updates(state["params"], updates), "adam": opt}
        seg.log(step + 1, loss=loss)
        seg.checkpoint(step + 1, state)

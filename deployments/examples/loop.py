import jax
import jax.numpy as jnp
import optax

from tpu.runtime import segment

truth, adam = jnp.arange(8.0), optax.adam(0.05)


@jax.jit
def train(state, key):
    x = jax.random.normal(key, (64, 8))
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ (p - truth)) ** 2))(state["params"])
    updates, opt = adam.update(grads, state["adam"])
    return {"params": optax.apply_updates(state["params"], updates), "adam": opt}, loss


state = {"params": jnp.zeros(8), "adam": adam.init(jnp.zeros(8))}
with segment.start() as seg:
    state = seg.restore(state)
    for step in seg.steps():
        state, loss = train(state, jax.random.fold_in(jax.random.key(seg.seed), step))
        seg.log(step + 1, loss=loss)
        seg.checkpoint(step + 1, state)

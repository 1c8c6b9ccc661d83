"""A byte-level language model: predict the next byte of real text.

The last part of the text is held out for evaluation. A step trains on windows at places drawn from the
rest, so that a step's batch depends on (seed, step) and the text alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tpu.train.settings import ByteLm
from tpu.train.text import check_text, read_text, split
from tpu.train.transformer import Transformer, draw_transformer

VOCABULARY = 256


@dataclass(frozen=True)
class ByteLmWorkload:
    """What the training loop needs to know of the language model."""

    settings: ByteLm
    seed: int
    data_sha256: str | None = None

    def draw_model(self) -> Transformer:
        """The initial model, with NumPy leaves."""
        return draw_transformer(
            self.settings.model,
            inputs=VOCABULARY,
            outputs=VOCABULARY,
            length=self.settings.context,
            tokens=True,
            seed=self.seed,
        )

    def load_data(self) -> dict[str, np.ndarray]:
        """The part of the text that is trained on, as uint8. Raises DataChangedError, TextNotFoundError."""
        training, _ = self.load_split()
        return {"text": training}

    def load_split(self) -> tuple[np.ndarray, np.ndarray]:
        """The (training, held out) parts of the text, as uint8."""
        text = read_text(self.settings.text)
        check_text(text, self.data_sha256, self.settings.text)
        return split(text, self.settings)

    def batch(self, data: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        """Windows of context + 1 bytes, (B, context + 1), a function of the key."""
        text, window = data["text"], self.settings.context + 1
        starts = jax.random.randint(key, (self.settings.batch,), 0, text.shape[0] - window + 1)
        return text[starts[:, None] + jnp.arange(window)]

    def loss(self, model: Transformer, batch: jax.Array) -> jax.Array:
        """Mean cross entropy of the next byte, in nats."""
        return next_byte_losses(model, batch).mean()


def next_byte_losses(model: Transformer, windows: jax.Array) -> jax.Array:
    """Cross entropies in nats, (B, context), of each byte after the first of each window."""
    windows = windows.astype(jnp.int32)
    logits = jax.nn.log_softmax(model(windows[:, :-1]), axis=-1)
    return -jnp.take_along_axis(logits, windows[:, 1:, None], axis=-1)[..., 0]

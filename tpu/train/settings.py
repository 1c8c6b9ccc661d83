"""What a built-in training is made of: every number that shapes its parameters, with its meaning.

Plain pydantic models without JAX, since the controller reads them for its form and its checks, and the
trainer on the TPU VM reads the same ones.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tpu.train.form import form, plain_optionals

Schedule = Literal["constant", "triangle", "cosine"]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=plain_optionals)


class Transformer(_Settings):
    """A GPT-2 style causal transformer."""

    layers: int = Field(default=2, ge=1, description="Number of blocks.")
    width: int = Field(default=64, ge=1, description="Width of the residual stream; a multiple of `heads`.")
    heads: int = Field(default=2, ge=1, description="Attention heads a block.")


class Optimizer(_Settings):
    """Adam with a learning rate that is a function of the step alone."""

    learning_rate: float = Field(default=1e-3, gt=0, description="Peak learning rate.")
    schedule: Schedule = Field(
        default="triangle",
        description="Shape over `schedule_steps`: triangle and cosine warm up first and end at 0.",
    )
    warmup_fraction: float = Field(
        default=0.5, ge=0, le=1, description="Part of `schedule_steps` that warms up."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay (AdamW); 0 is Adam.")
    clip_norm: float | None = Field(default=None, gt=0, description="Clip gradients to this global norm.")


class Icl(_Settings):
    """In-context linear regression (Raventós et al. 2023, arXiv 2306.15063)."""

    kind: Literal["icl"] = Field(default="icl", description="Always icl, for this workload.")
    dimensions: int = Field(default=8, ge=1, description="D, dimensions of a regression task.")
    examples: int = Field(default=16, ge=1, description="K, examples in a sequence.")
    noise_variance: float = Field(default=0.25, gt=0, description="σ², variance of the label noise.")
    tasks: int | None = Field(
        default=64, ge=1, description="M, pretraining tasks; none (null) draws a new Gaussian task each time."
    )
    batch: int = Field(default=64, ge=1, description="Sequences a step, over all chips.")
    model: Transformer = Field(default=Transformer(), description="Size of the transformer.")


class ByteLm(_Settings):
    """A byte-level causal language model on text files."""

    kind: Literal["bytelm"] = Field(default="bytelm", description="Always bytelm, for this workload.")
    text: list[str] = Field(
        default=["python:pydoc_data.topics"],
        min_length=1,
        description="Text: local paths, globs, gs:// paths, or python:MODULE for the source of an installed module.",
    )
    held_out: float = Field(
        default=0.1, gt=0, lt=1, description="Last part of the text, kept for evaluation."
    )
    context: int = Field(default=64, ge=2, description="Bytes a sequence.")
    batch: int = Field(default=32, ge=1, description="Sequences a step, over all chips.")
    model: Transformer = Field(default=Transformer(), description="Size of the transformer.")


Workload = Annotated[Icl | ByteLm, Field(discriminator="kind")]


class Training(_Settings):
    """Everything that a built-in trainer's numbers depend on, but for the machine."""

    model_config = ConfigDict(json_schema_extra=form(("seed", "optimizer", "schedule_steps", "workload")))

    workload: Workload = Field(
        description='What is learned: {"kind": "icl", …} or {"kind": "bytelm", …} with the fields of their kind.'
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="How it is learned.")
    schedule_steps: int = Field(
        default=1000, ge=1, description="Length of the learning-rate schedule, in steps."
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of parameters, data and noise.")
    steps_per_call: int = Field(
        default=10, ge=1, le=1000, description="Steps of one compiled call; a call should last under 5 s."
    )
    log_every: int = Field(default=10, ge=1, description="Steps between logged losses.")
    shard_parameters: bool = Field(
        default=False, description="Shard parameters over the chips (FSDP) instead of copies."
    )

    def schedule_note(self, steps: int) -> str | None:
        """What a person should know of a schedule that is longer or shorter than a run of `steps` steps."""
        rate, length = self.optimizer, self.schedule_steps
        if rate.schedule == "constant" or steps == length:
            return None
        if steps > length:
            return (
                f"training.schedule_steps is {length}: from there to the last step, {steps}, the learning rate stays "
                "where it ended, at 0 or next to it"
            )
        where = "has come down only in part"
        if steps <= rate.warmup_fraction * length:
            where = f"still warms up (until step {rate.warmup_fraction * length:.0f})"
        return (
            f"training.schedule_steps is {length}, so at the last step, {steps}, the learning rate {where}; for a "
            f"whole schedule set training.schedule_steps={steps}"
        )

"""A small built-in training, cut into units."""

from __future__ import annotations

from tpu.train.elastic import unit_program
from tpu.train.jax_units import JaxProgram
from tpu.train.settings import Training
from tpu.train.workloads import Configuration, make_workload

TRAINING = Training.model_validate(
    {"workload": {"kind": "icl", "batch": 32, "model": {"layers": 1, "width": 16}}, "schedule_steps": 20}
)


def make(units: int) -> JaxProgram:
    return unit_program(TRAINING, make_workload(Configuration(TRAINING, None)), units)

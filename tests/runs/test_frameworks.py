"""What a run's framework changes: its interpreter, its packages, its trainer, and its configuration's hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu.connection import Connection
from tpu.runs.config import RunConfigError, configuration_hash, parse_run_config
from tpu.runs.launch import FRAMEWORK_VARIABLES, TRAINERS
from tpu.runs.report import graphs_told
from tpu.runs.sync import own_requirements


def values(framework: str) -> dict:
    return {"name": "a", "training": {"workload": {"kind": "icl"}}, "framework": framework}


def test_a_framework_is_a_part_of_what_changes_numbers():
    jax, xla = (parse_run_config(values(framework)) for framework in ("jax", "xla"))
    assert configuration_hash(jax.numbers(None)) != configuration_hash(xla.numbers(None))
    assert set(TRAINERS) == set(FRAMEWORK_VARIABLES) == {"jax", "xla"}
    for module in (arguments[1] for arguments in TRAINERS.values()):
        assert (Path(__file__).parents[2] / (module.replace(".", "/") + ".py")).exists()
    with pytest.raises(RunConfigError, match="framework"):
        parse_run_config(values("torch"))


def test_each_framework_has_an_interpreter_of_its_own():
    connection = Connection.from_environment(
        {
            "TPU_RELAY_PROJECT": "p",
            "TPU_RELAY_BUCKET": "gs://b",
            "TPU_RELAY_HOST_PYTHON": "/one/python",
            "TPU_RELAY_HOST_PYTHON_XLA": "/other/python",
        }
    )
    assert connection.host_python_for("jax") == "/one/python"
    assert connection.host_python_for("xla") == "/other/python"


def test_hosts_get_the_packages_of_their_framework_pinned():
    jax, xla = (set(own_requirements(framework).split()) for framework in ("jax", "xla"))  # type: ignore[arg-type]
    assert {"torch==2.9.1", "torch-xla[tpu]==2.9.0"} <= xla
    assert not any(line.startswith(("jax", "optax", "equinox")) for line in xla)
    assert not any(line.startswith("torch") for line in jax)
    assert all("==" in line for line in jax | xla)


def test_the_report_tells_of_graphs_in_sum():
    def graphs(compiled: int, recompiled: int, **fallbacks: int) -> dict:
        return {"event": "graphs", "compiled": compiled, "recompiled": recompiled, "fallbacks": fallbacks}

    assert graphs_told([(1, {"event": "start"})]) is None
    clean = graphs_told([(1, graphs(2, 0)), (1, graphs(2, 0)), (2, graphs(3, 0))])
    assert clean == "at most 3 compiled an attempt, 0 after its first call; operators none on the CPU"
    told = graphs_told([(1, graphs(4, 2)), (2, graphs(3, 1, lstsq=1))])
    assert told == "at most 4 compiled an attempt, 3 after its first call; operators on the CPU: lstsq"

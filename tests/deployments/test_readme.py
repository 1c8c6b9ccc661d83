"""The README shows programs and configurations that exist and are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tpu.runs.config import parse_run_config
from tpu.sweeps.config import parse_sweep

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "deployments/examples"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda text: f"{len(text)} characters")
def test_each_program_is_a_file_of_the_examples(block: str):
    assert block in [path.read_text() for path in EXAMPLES.glob("*.py")]


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda text: text.splitlines()[0])
def test_each_configuration_is_one_of_the_examples(block: str):
    shown = yaml.safe_load(block)
    assert parse_sweep(shown, "sweep") if "parameters" in shown else parse_run_config(shown)
    assert shown in [yaml.safe_load(path.read_text()) for path in EXAMPLES.glob("*.yaml")]


def test_every_file_and_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", README)) | set(
        re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)
    )
    assert named <= targets
    for path in re.findall(r"\b(?:deployments|flows|tpu)/[\w./-]+\.(?:py|yaml)", README):
        assert (ROOT / path).exists(), path

"""What the README has people type for a real cloud, as far as it can be looked at without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deployments.gcloud_words import INSTALLED, unknown_words

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if "gcloud " in line.partition("#")[0]
]


def test_the_readme_has_commands_for_a_real_cloud():
    assert len(COMMANDS) > 10


@pytest.mark.skipif(not INSTALLED, reason="gcloud is not installed here")
@pytest.mark.parametrize("line", COMMANDS)
def test_gcloud_knows_each_command_and_flag(line: str):
    assert unknown_words(line[line.index("gcloud ") :].removesuffix("; done")) == []

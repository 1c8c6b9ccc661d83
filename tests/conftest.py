"""One emulator for all tests of a session; each test gets it empty and leaves it empty."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpu.emulator.emulator import Emulator

# Prefect reads its settings when it is imported, which this comes before: flows that run in this process neither
# see the profiles of whoever tests, nor leave anything in that home.
# Nor does what keeps keys and caches.
for variable in ("PREFECT_HOME", "TPU_RELAY_HOME"):
    os.environ[variable] = tempfile.mkdtemp(prefix="relay-tests-")
    atexit.register(shutil.rmtree, os.environ[variable], ignore_errors=True)

# Who starts the tests in the background of a shell hands an ignored Ctrl-C on to them, and they to their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Processes take files in this order: a file of minutes that came last would run alone.
    items.sort(
        key=lambda item: (
            TESTS / "scenarios" not in item.path.parents,
            TESTS / "train" not in item.path.parents,
        )
    )


@pytest.fixture(scope="session")
def emulator_session() -> Iterator[Emulator]:
    """The emulator of this test session. Tests take `emulator`, which is reset for each of them."""
    with Emulator() as emulator:
        yield emulator


@pytest.fixture
def emulator(emulator_session: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """An emulator with nothing in it, the environment leading to it. Nothing of the test survives in it."""
    emulator_session.reset()
    for name, value in emulator_session.env.items():
        monkeypatch.setenv(name, value)
    yield emulator_session
    emulator_session.reset()
    # One that was hit by SIGKILL a moment ago may still be leaving.
    emulator_session.wait_for(lambda: not emulator_session.processes(), "an emulator without processes", 5)


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small working tree with the trainers of the tests, so that no run packs the whole repository."""
    folder = tmp_path_factory.mktemp("program")
    shutil.copytree(
        TESTS / "trainers", folder / "tests/trainers", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(TESTS / "__init__.py", folder / "tests")
    return folder

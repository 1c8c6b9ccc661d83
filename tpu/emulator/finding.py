"""Which running emulator a command means: that of a state folder, or the one that the environment leads to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu.emulator.client import ControlClient, ControlError
from tpu.emulator.emulator import EmulatorRecord, read_record

DEFAULT_STATE = Path(".relay/emulator")
_CONTROL, _KEY = "TPU_EMULATOR_CONTROL", "TPU_RELAY_API_KEY"
_ENV_PREFIXES = ("TPU_EMULATOR_", "TPU_RELAY_", "STORAGE_EMULATOR_HOST", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT")


class NotRunning(RuntimeError):
    """No emulator was found; the message says where it was looked for."""


@dataclass(frozen=True)
class Found:
    """A running emulator, and the variables that lead to it."""

    client: ControlClient
    env: Mapping[str, str]


def find(state: Path | None, environment: Mapping[str, str]) -> Found:
    """The emulator of `state`; if None, that of the default folder, or else the environment's.

    Raises:
        NotRunning: there is none.
    """
    folder = state_folder(state)
    if (record := read_record(folder)) is not None:
        return _of_record(record)
    looked = f"no emulator runs in {folder}"
    start = "start one with `python -m tpu.emulator up`"
    if state is not None:
        raise NotRunning(f"{looked}: {start}")
    if missing := [name for name in (_CONTROL, _KEY) if not environment.get(name)]:
        raise NotRunning(
            f"{looked}, and the environment leads to none ({' and '.join(missing)} not set): {start}, "
            "or give the folder of one with --state"
        )
    client = ControlClient(environment[_CONTROL], environment[_KEY])
    try:
        client.status()
    except ControlError as error:
        raise NotRunning(
            f"{looked}, and the environment leads to none ({_CONTROL}: {error}): {start}"
        ) from error
    return Found(
        client, {name: value for name, value in environment.items() if name.startswith(_ENV_PREFIXES)}
    )


def state_folder(state: Path | None) -> Path:
    return (state or DEFAULT_STATE).absolute()


def _of_record(record: EmulatorRecord) -> Found:
    return Found(ControlClient(record.control, record.key), record.env)

"""What a training process is told through its environment, and where its step borders lie."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu.checkpoint.keep import KEEP_ALL, KeepRule
from tpu.checkpoint.paths import checked_run_dir


class ContractError(ValueError):
    """The environment of the segment contract is incomplete or malformed; the message names the variable."""


@dataclass(frozen=True)
class Plan:
    """One process of one attempt. `stop_steps` are sorted and end with `last_step`.

    `member` is the run's name if the process trains several: events then say whose they are.
    """

    run_dir: str
    attempt: int
    stop_steps: tuple[int, ...]
    last_step: int
    seed: int = 0
    process_id: int = 0
    num_processes: int = 1
    coordinator: str = ""
    config_path: Path | None = None
    events_path: Path | None = None
    allow_mixed: bool = False
    keep: KeepRule = KEEP_ALL
    member: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Plan:
        """Read the RELAY_* variables.

        Raises:
            ContractError: one is missing or malformed.
        """
        numbers = {
            name: _whole(environment, name, default)
            for name, default in (
                ("RELAY_ATTEMPT", None), ("RELAY_LAST_STEP", None), ("RELAY_SEED", "0"),
                ("RELAY_PROCESS_ID", "0"), ("RELAY_NUM_PROCESSES", "1"),
            )
        }  # fmt: skip
        last = numbers["RELAY_LAST_STEP"]
        try:
            stops = {int(s) for s in environment.get("RELAY_STOP_STEPS", "").split(",") if s.strip()}
            keep = KeepRule.from_json(environment.get("RELAY_KEEP", ""))
            run_dir = checked_run_dir(_given(environment, "RELAY_RUN_DIR"))
        except ValueError as error:
            raise ContractError(f"RELAY_STOP_STEPS, RELAY_KEEP or RELAY_RUN_DIR: {error}") from error
        return cls(
            run_dir=run_dir,
            attempt=numbers["RELAY_ATTEMPT"],
            stop_steps=tuple(sorted({s for s in stops if 0 < s <= last} | {last})),
            last_step=last,
            seed=numbers["RELAY_SEED"],
            process_id=numbers["RELAY_PROCESS_ID"],
            num_processes=numbers["RELAY_NUM_PROCESSES"],
            coordinator=environment.get("RELAY_COORDINATOR", ""),
            config_path=_path(environment, "RELAY_CONFIG"),
            events_path=_path(environment, "RELAY_EVENTS"),
            allow_mixed=environment.get("RELAY_ALLOW_MIXED", "0") == "1",
            keep=keep,
        )

    @property
    def compile_cache_dir(self) -> Path:
        """A folder of this host that outlives the attempt."""
        return Path.home() / ".relay" / "compile-cache"

    def config(self) -> dict[str, object]:
        """The run's `training` section; empty if it has none."""
        return {} if self.config_path is None else json.loads(self.config_path.read_text())


def call_length(step: int, steps_per_call: int, stop_steps: tuple[int, ...]) -> int:
    """Steps of the call that begins at `step`: `steps_per_call`, or 1.

    Long calls begin at multiples of their length only. So wherever a run was interrupted, its calls come back
    to the same borders, and what is logged at them is logged at the same steps.
    """
    at = bisect.bisect_right(stop_steps, step)
    stop = stop_steps[at] if at < len(stop_steps) else step + 1
    fits = step % steps_per_call == 0 and step + steps_per_call <= stop
    return steps_per_call if fits else 1


def _given(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise ContractError(
            f"{name} is not set: this program is started by a run (relay, or flows/train.py); "
            "to start it by hand, set the RELAY_* variables of the segment contract"
        )
    return value


def _whole(environment: Mapping[str, str], name: str, default: str | None) -> int:
    text = environment.get(name) or default or _given(environment, name)
    if not text.isdigit():
        raise ContractError(f"{name} must be a whole number from 0 up, found {text!r}")
    return int(text)


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    value = environment.get(name)
    return Path(value) if value else None

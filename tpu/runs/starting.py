"""What a start of a run makes of its configuration: changes over it, and a name that nobody had before."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tpu.runs.config import apply_changes

NAME_LENGTH, MARK_LENGTH = 40, 8


def start_values(
    run: Mapping[str, Any], changes: Mapping[str, Any], fresh_name: bool, flow_run_id: str
) -> dict[str, Any]:
    """The run's values with dotted `changes` over them, and with `fresh_name` its name made that of this flow run.

    A flow run that is started again gets the same name, so that it goes on; another one never does.
    """
    values = copy.deepcopy(dict(run))
    apply_changes(values, dict(changes))
    if fresh_name and "name" not in changes and isinstance(values.get("name"), str):
        values["name"] = f"{values['name'][: NAME_LENGTH - MARK_LENGTH - 1]}-{flow_run_id[:MARK_LENGTH]}"
    return values

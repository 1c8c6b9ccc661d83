"""A flow that has cleaned up says so to the worker that started it, by a file, which then need not look itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Names the file, in the environment of the flow.
VARIABLE = "TPU_RELAY_NOTHING_LEFT"


def say_nothing_left(environment: Mapping[str, str] = os.environ) -> None:
    """The gang is confirmed dead and every slice of the run gone or given back."""
    if name := environment.get(VARIABLE):
        Path(name).touch()

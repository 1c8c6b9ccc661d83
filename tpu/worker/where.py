"""Where a worker keeps what a restarted one needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tpu.connection import relay_home


def worker_folder(pool: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of a work pool's worker on this machine: TPU_RELAY_HOME/workers/POOL."""
    return relay_home(environment) / "workers" / pool

"""Where everything is: the project, the API, the bucket and the way to the hosts.

Every address that differs between the emulator and a real project is read here, from the environment,
so that no other module knows which of the two it talks to.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class ConnectionSettingsError(ValueError):
    """A setting is missing or malformed; the message names the variable and an example."""


def relay_home(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder in which this machine keeps keys and caches: TPU_RELAY_HOME, or ~/.tpu-relay."""
    home = environment.get("TPU_RELAY_HOME")
    return Path(home) if home else Path.home() / ".tpu-relay"


@dataclass(frozen=True)
class Connection:
    """Addresses and identities of one project.

    `api_endpoint` is None for Google's own; otherwise `host:port` of a plain-text gRPC server that wants
    `api_key` as a bearer token, and `rest_endpoint` the URL of its REST form, if it has one. `ssh_route` is
    `external`, `internal`, `iap`, or a ProxyCommand in which `%h` and `%p` stand for address and port.
    `host_python` is an interpreter that the hosts already have with every package in it; None means that an
    environment is built on each host. `host_python_xla` is the same for PyTorch/XLA, which has an environment of
    its own. `grant` is the chips that may be used, as tpu.slices.grant reads them; None is any.
    `idle_minutes` is how long a run's pool keeps idle slices from its start on; None leaves that as it is.
    """

    project: str
    bucket: str
    api_endpoint: str | None = None
    api_key: str | None = None
    rest_endpoint: str | None = None
    ssh_user: str = "relay"
    ssh_port: int = 22
    ssh_route: str = "external"
    host_python: str | None = None
    host_python_xla: str | None = None
    grant: str | None = None
    idle_minutes: float | None = None
    home: Path = Path.home() / ".tpu-relay"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Connection:
        """Read the TPU_RELAY_* variables.

        Raises:
            ConnectionSettingsError: project or bucket is missing, or a value is malformed.
        """
        project = environment.get("TPU_RELAY_PROJECT") or environment.get("GOOGLE_CLOUD_PROJECT")
        if not project:
            raise ConnectionSettingsError(
                "no project: set TPU_RELAY_PROJECT (or GOOGLE_CLOUD_PROJECT) to the id of your Google Cloud project, "
                "or start the emulator with `python -m tpu.emulator up` and load what it prints"
            )
        bucket = environment.get("TPU_RELAY_BUCKET", "").rstrip("/")
        if not bucket.startswith("gs://") or len(bucket) == len("gs://"):
            raise ConnectionSettingsError(
                f"TPU_RELAY_BUCKET must name a bucket such as gs://my-runs, found {bucket!r}"
            )
        port = environment.get("TPU_RELAY_SSH_PORT", "22")
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise ConnectionSettingsError(
                f"TPU_RELAY_SSH_PORT must be a port from 1 to 65535, found {port!r}"
            )
        return cls(
            project=project,
            bucket=bucket,
            api_endpoint=environment.get("TPU_RELAY_API_ENDPOINT") or None,
            api_key=environment.get("TPU_RELAY_API_KEY") or None,
            rest_endpoint=environment.get("TPU_RELAY_REST_ENDPOINT") or None,
            ssh_user=environment.get("TPU_RELAY_SSH_USER", "relay"),
            ssh_port=int(port),
            ssh_route=environment.get("TPU_RELAY_SSH_ROUTE", "external"),
            host_python=environment.get("TPU_RELAY_HOST_PYTHON") or None,
            host_python_xla=environment.get("TPU_RELAY_HOST_PYTHON_XLA") or None,
            grant=environment.get("TPU_RELAY_GRANT") or None,
            idle_minutes=_minutes("TPU_RELAY_IDLE_MINUTES", environment.get("TPU_RELAY_IDLE_MINUTES")),
            home=relay_home(environment),
        )

    def host_python_for(self, framework: Literal["jax", "xla"]) -> str | None:
        """The interpreter that the hosts already have for a program of this framework."""
        return self.host_python_xla if framework == "xla" else self.host_python


def _minutes(name: str, text: str | None) -> float | None:
    if not text:
        return None
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 <= minutes < math.inf:  # neither holds for what is no number
        raise ConnectionSettingsError(f"{name} must be a number of minutes, 0 or more, found {text!r}")
    return minutes

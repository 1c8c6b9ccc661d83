"""What Google's own command line needs to talk to an emulator: the REST form's address, and the key.

gcloud sends what stands in a token file as its bearer token and asks for no account then. It could also be
told to send no credentials, but the emulator serves nobody without the key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_VARIABLE = "TPU_EMULATOR_GCLOUD_TOKEN"


def token_file(state_dir: Path) -> Path:
    """The file with the emulator's key alone."""
    return state_dir / "gcloud-token"


def write_token(state_dir: Path, key: str) -> None:
    """Write the key where gcloud finds it, readable by its owner only."""
    descriptor = os.open(token_file(state_dir), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables for gcloud, from those of an emulator."""
    return {
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{env['TPU_RELAY_REST_ENDPOINT']}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{env['TPU_RELAY_REST_ENDPOINT']}/compute/v1/",
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": env[_VARIABLE],
        "CLOUDSDK_CORE_PROJECT": env["TPU_RELAY_PROJECT"],
    }

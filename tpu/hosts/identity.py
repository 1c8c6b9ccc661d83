"""The key by which hosts know us: made once, kept with the settings, never sent anywhere."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import asyncssh


class IdentityError(RuntimeError):
    """The key file is there but cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Identity:
    """`public_line` is what goes into the `ssh-keys` metadata of a node, behind `<user>:`."""

    private_key_path: Path
    public_line: str


def ensure_identity(home: Path) -> Identity:
    """The identity kept in `home`, made there if there is none. Two processes at once end up with one key.

    Raises:
        IdentityError: the file is no private key, or others may read it.
    """
    path = home / "id_ed25519"
    if not path.exists():
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, fresh = tempfile.mkstemp(dir=home, prefix=".id_ed25519.")
        with open(fd, "wb") as file:
            file.write(asyncssh.generate_private_key("ssh-ed25519", comment="relay").export_private_key())
        # A link is made once: whoever comes second takes the first one's key.
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        os.unlink(fresh)
    if path.stat().st_mode & 0o077:
        raise IdentityError(f"{path} can be read by others (wanted mode 0600): chmod 600 it, or delete it")
    try:
        key = asyncssh.read_private_key(path)
    except (asyncssh.KeyImportError, OSError) as error:
        raise IdentityError(
            f"{path} is no usable private key ({error}): delete it to have a new one"
        ) from error
    kind, data = key.export_public_key("openssh").decode().split()[:2]
    return Identity(path, f"{kind} {data} relay")

"""The key by which hosts know us."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tpu.hosts.identity import IdentityError, ensure_identity


def test_a_key_is_made_once_and_kept_private(tmp_path: Path) -> None:
    first = ensure_identity(tmp_path / "home")
    assert first == ensure_identity(tmp_path / "home")
    kind, data, comment = first.public_line.split()
    assert (kind, comment) == ("ssh-ed25519", "relay")
    assert data.startswith("AAAA")
    assert first.private_key_path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["id_ed25519"]


def test_many_at_once_end_up_with_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(ensure_identity, [tmp_path] * 8))
    assert len(made) == 1


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    ensure_identity(tmp_path).private_key_path.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        ensure_identity(tmp_path)


def test_a_damaged_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "id_ed25519"
    path.write_text("nonsense")
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="delete it"):
        ensure_identity(tmp_path)

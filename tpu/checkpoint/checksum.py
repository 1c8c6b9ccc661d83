"""crc32c as eight hex digits: the one checksum that GCS itself computes of every object."""

from __future__ import annotations

import google_crc32c


def crc32c(data: bytes | bytearray | memoryview) -> str:
    """Checksum of `data`, such as '0a1b2c3d'."""
    return f"{google_crc32c.value(bytes(data) if not isinstance(data, bytes) else data):08x}"

"""What a test of provisioning needs: a cloud, a request, and somebody who listens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tpu.cloud.google import GoogleTpuCloud, open_cloud
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator


@pytest.fixture
async def cloud(emulator: Emulator) -> AsyncIterator[GoogleTpuCloud]:
    async with open_cloud(Connection.from_environment(emulator.env)) as opened:
        yield opened

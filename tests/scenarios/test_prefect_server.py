"""A Prefect server of one's own is told from another one that was quicker to take its port."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments import prefect_server
from deployments.prefect_server import wait_until_healthy
from tests.scenarios.conftest import Lab


def test_another_server_at_the_port_is_not_taken_for_ones_own(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, home = lab.environment["PREFECT_API_URL"], Path(lab.environment["PREFECT_HOME"])
    log = tmp_path / "server.log"
    log.write_text("[Errno 98] error while attempting to bind: address already in use\n")
    wait_until_healthy(lambda: True, url, home, log)
    with pytest.raises(RuntimeError, match=r"ended at its start: .*address already in use"):
        wait_until_healthy(lambda: False, url, tmp_path, log)
    monkeypatch.setattr(prefect_server, "START_S", 0.5)
    with pytest.raises(RuntimeError, match="did not come up within"):
        wait_until_healthy(lambda: True, url, tmp_path, log)

"""Addresses and settings out of the environment."""

from __future__ import annotations

import pytest

from tpu.connection import Connection, ConnectionSettingsError

GOOD = {"TPU_RELAY_PROJECT": "p", "TPU_RELAY_BUCKET": "gs://b"}


@pytest.mark.parametrize(("text", "minutes"), [("", None), ("0", 0.0), ("20", 20.0), ("1.5", 1.5)])
def test_how_long_idle_slices_are_kept_is_a_number_of_minutes(text: str, minutes: float | None):
    assert Connection.from_environment({**GOOD, "TPU_RELAY_IDLE_MINUTES": text}).idle_minutes == minutes


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "ten"])
def test_what_is_no_number_of_minutes_is_refused(text: str):
    with pytest.raises(ConnectionSettingsError, match=f"TPU_RELAY_IDLE_MINUTES .* found '{text}'"):
        Connection.from_environment({**GOOD, "TPU_RELAY_IDLE_MINUTES": text})

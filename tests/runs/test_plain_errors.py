"""What is one line for `relay` is one line in the log of a flow, too."""

from __future__ import annotations

from flows import command_errors, plain_errors
from tpu.slices.pool_settings import PoolSettingsError


def test_what_cannot_be_read_or_is_contended_in_the_bucket_is_no_traceback_in_a_flow():
    of_bucket = {
        error
        for error in command_errors.PROBLEMS
        if error.__name__.startswith("Malformed") or error.__name__.endswith("Contended")
    }
    assert len(of_bucket) > 5
    assert of_bucket | {PoolSettingsError} <= set(plain_errors.EXPECTED)

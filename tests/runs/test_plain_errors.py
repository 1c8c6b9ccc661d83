"""What is one line for `relay` is one line in the log of a flow, too."""

from __future__ import annotations

import logging

import pytest

from flows import command_errors, plain_errors
from tasks.provision import AS_OFTEN_AS_ALLOWED
from tpu.checkpoint.retry import StorageUnavailable
from tpu.runs.driver import AttemptEnded
from tpu.slices.pool_settings import PoolSettingsError
from tpu.slices.verdict import Verdict, VerdictKind

PREEMPTED = Verdict(VerdictKind.PREEMPTED, "gone")


def test_what_cannot_be_read_or_is_contended_in_the_bucket_is_no_traceback_in_a_flow():
    of_bucket = {
        error
        for error in command_errors.PROBLEMS
        if error.__name__.startswith("Malformed") or error.__name__.endswith("Contended")
    }
    assert len(of_bucket) > 5
    assert of_bucket | {PoolSettingsError} <= set(plain_errors.EXPECTED)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_task_that_ended_is_told_by_its_page_and_one_that_failed_in_a_few_words(quote: str):
    def told(message: str) -> str | None:
        record = logging.LogRecord(plain_errors.TASK_RUNS, logging.ERROR, "", 0, message, (), None)
        return record.getMessage() if plain_errors.PlainErrors().filter(record) else None

    ended = f"Finished in state Failed({quote}Task run encountered an exception %s: %s{quote})"
    assert told("Finished in state Completed()") is None
    for once in ("AttemptEnded", "CloudError", "NotReady"):
        assert told(ended % (once, "why is told by the attempt or by the flow")) == "failed"
    assert told(ended % ("OSError", "a 100%\nline")) == "failed: a 100%\nline"
    # What is to be done comes last.
    assert told(ended % ("OSError", "x" * 3000)) == f"failed: {'x' * 3000}"
    # Whoever cancels a run hears from the flow that it is; its tasks have not crashed.
    for crash in ("Crash detected! {}", "Finished in state Crashed('{}')"):
        assert told(crash.format("Execution was cancelled by the runtime environment.")) is None
    assert told("Crash detected! Execution was aborted by an interpreter exit.") is not None
    assert told("written to gs://b") == "written to gs://b"


@pytest.mark.parametrize(
    ("error", "number", "of", "when", "told"),
    [
        (AttemptEnded(PREEMPTED, True, "why"), 3, AS_OFTEN_AS_ALLOWED, "immediately", "preempted: tried again"),
        (StorageUnavailable("away\nfor long"), 1, 3, "10.0 second(s) from now", "away: tried again in 10.0 s (1 of 3)"),
        (KeyError(), 1, 2, "immediately", "KeyError: tried again (1 of 2)"),
    ],
)  # fmt: skip
def test_another_try_is_told_in_a_few_words(error, number, of, when, told):
    assert plain_errors.tried_again(error, number, of, when) == told

"""Prefect's own lines about errors, as a person reads them.

Errors that need no traceback are logged without one, each once. A program's own traceback is not touched: it comes line
by line with the program's output.
"""

from __future__ import annotations

import logging
import re

from prefect.context import TaskRunContext

from tasks.provision import AS_OFTEN_AS_ALLOWED
from tasks.secrets import SecretTooShort
from tpu.checkpoint.digest import NoSuchCheckpoint
from tpu.checkpoint.fence import FenceContended, MalformedFence
from tpu.checkpoint.objects import BucketUnusable
from tpu.checkpoint.retry import StorageUnavailable
from tpu.cloud import CloudError
from tpu.connection import ConnectionSettingsError
from tpu.hosts.errors import HostUnreachable
from tpu.runs.code import CodeError
from tpu.runs.config import RunConfigError
from tpu.runs.controller import ControllerLost, MalformedController, RunIsDriven
from tpu.runs.cost_limit import MaxCostReached
from tpu.runs.driver import AttemptEnded
from tpu.runs.evaluation import EvaluationFailed, InvalidCheckpointName, NoEvaluator
from tpu.runs.event_log import MalformedEvent
from tpu.runs.opening import ForkUnfinished, NoSuchSecret
from tpu.runs.record import MalformedRecord, RunNameTaken, RunNotFound
from tpu.runs.sync import SyncError
from tpu.runs.tenure import StopRequested
from tpu.runs.trouble import SliceLost
from tpu.slices.lease import MalformedLease
from tpu.slices.lease_book import LeaseContended
from tpu.slices.pool_names import NoSuchPool
from tpu.slices.pool_settings import PoolSettingsError
from tpu.slices.provision import NotReady
from tpu.slices.shared import MalformedShared, SharedContended
from tpu.sweeps.config import SweepError
from tpu.sweeps.search import StudyError
from tpu.sweeps.steering import SweepNotFound, WishRefused
from tpu.sweeps.trial import MalformedTrial
from tpu.sweeps.wishes import MalformedWishes, WishesContended
from tpu.train.text import TextNotFoundError

EXPECTED = (
    AttemptEnded, CloudError, CodeError, ConnectionSettingsError, ControllerLost, EvaluationFailed, RunIsDriven,
    RunNameTaken, StopRequested, BucketUnusable, SecretTooShort, MalformedRecord, MalformedController, MalformedEvent,
    MalformedFence, MaxCostReached, MalformedShared, SharedContended, SliceLost,
    HostUnreachable, SyncError, FenceContended, LeaseContended, MalformedLease, PoolSettingsError,
    NoSuchPool, RunConfigError, NoSuchSecret, ForkUnfinished, StorageUnavailable, TextNotFoundError,
    InvalidCheckpointName, NoEvaluator, NoSuchCheckpoint, RunNotFound,
    SweepError, StudyError, MalformedTrial, SweepNotFound, WishRefused, MalformedWishes, WishesContended,
)  # fmt: skip


FLOW_RUNS, TASK_RUNS = "prefect.flow_runs", "prefect.task_runs"
# How Prefect says that it tries a task again: with the error, which try it is, of how many, and when.
_AGAIN = "Task run failed with %s: %r - Retry %s/%s will start %s"
# And that a task has ended. The page shows it; why it has not ended well stands in the flow's last line, too. A run
# that is cancelled takes its tasks with it, and Prefect calls that a crash, as it does when a machine fails.
_CUT_OFF = "Execution was cancelled by the runtime environment."
_UNSAID = (
    "Finished in state Completed()", f"Crash detected! {_CUT_OFF}", f"Finished in state Crashed({_CUT_OFF!r})",
)  # fmt: skip
_FAILED = re.compile(
    r"Finished in state Failed\((?:'|\")Task run encountered an exception (\w+): (.*)(?:'|\")\)", re.DOTALL
)
# What ends a segment's task and those inside it alike: told once, by the attempt's own line or by the flow's last one.
_TOLD_ONCE = {error.__name__ for error in (AttemptEnded, CloudError, NotReady)}


class PlainErrors(logging.Filter):
    """Says an expected error once and without traceback, and names the task run as it is called now."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], EXPECTED):
            record.exc_info = None
        if record.msg == _AGAIN and isinstance(record.args, tuple):
            _, error, number, of, when = record.args
            record.msg, record.args = tried_again(error, number, of, f"{when}"), ()
        if record.name.startswith(TASK_RUNS):
            if record.msg in _UNSAID:
                return False
            if found := _FAILED.fullmatch(str(record.msg)):
                record.msg, record.args = failed(*found.groups()), ()
        # The logger of a task run keeps the name that the task run had at first; ours learns its attempt later.
        if hasattr(record, "task_run_name") and (context := TaskRunContext.get()) is not None:
            record.task_run_name = context.task_run.name
        return True


def tried_again(error: object, number: object, of: object, when: str) -> str:
    """`preempted: tried again`. Why an attempt ended stands in a line of its own."""
    why = error.verdict.kind.value if isinstance(error, AttemptEnded) else f"{error}".partition("\n")[0]
    told = f"{why or type(error).__name__}: tried again"
    if when != "immediately":
        told += f" in {when.partition(' ')[0]} s"
    return told if of == AS_OFTEN_AS_ALLOWED else f"{told} ({number} of {of})"


def failed(error: str, reason: str) -> str:
    """The whole reason, since what is to be done stands at its end; nothing of one that has a line of its own."""
    return "failed" if error in _TOLD_ONCE else f"failed: {reason}"


def log_plainly() -> None:
    """Let the loggers of flow and task runs do so from now on; a second call changes nothing."""
    for name in (FLOW_RUNS, TASK_RUNS):
        logger = logging.getLogger(name)
        if not any(isinstance(one, PlainErrors) for one in logger.filters):
            logger.addFilter(PlainErrors())

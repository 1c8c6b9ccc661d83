"""Errors that a person can read without a traceback are logged without one, by their name and message.

A program's own traceback is not touched: it comes line by line with the program's output.
"""

from __future__ import annotations

import logging

from prefect.context import TaskRunContext

from tasks.secrets import SecretTooShort
from tpu.checkpoint.fence import FenceContended, MalformedFence
from tpu.checkpoint.objects import BucketUnusable
from tpu.cloud import CloudError
from tpu.connection import ConnectionSettingsError
from tpu.hosts.errors import HostUnreachable
from tpu.runs.code import CodeError
from tpu.runs.controller import ControllerLost, MalformedController, RunIsDriven
from tpu.runs.cost_limit import MaxCostReached
from tpu.runs.driver import AttemptEnded
from tpu.runs.evaluation import EvaluationFailed
from tpu.runs.event_log import MalformedEvent
from tpu.runs.record import MalformedRecord, RunNameTaken
from tpu.runs.sync import SyncError
from tpu.runs.tenure import StopRequested
from tpu.runs.trouble import SliceLost
from tpu.slices.lease import MalformedLease
from tpu.slices.lease_book import LeaseContended
from tpu.slices.pool_settings import PoolSettingsError
from tpu.slices.shared import MalformedShared, SharedContended

EXPECTED = (
    AttemptEnded, CloudError, CodeError, ConnectionSettingsError, ControllerLost, EvaluationFailed, RunIsDriven,
    RunNameTaken, StopRequested, BucketUnusable, SecretTooShort, MalformedRecord, MalformedController, MalformedEvent,
    MalformedFence, MaxCostReached, MalformedShared, SharedContended, SliceLost,
    HostUnreachable, SyncError, FenceContended, LeaseContended, MalformedLease, PoolSettingsError,
)  # fmt: skip


class PlainErrors(logging.Filter):
    """Drops the traceback of an expected error, and names the task run as it is called now."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], EXPECTED):
            record.exc_info = None
        # The logger of a task run keeps the name that the task run had at first; ours learns its attempt later.
        if hasattr(record, "task_run_name") and (context := TaskRunContext.get()) is not None:
            record.task_run_name = context.task_run.name
        return True


def log_plainly() -> None:
    """Let the loggers of flow and task runs do so from now on; a second call changes nothing."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        if not any(isinstance(one, PlainErrors) for one in logger.filters):
            logger.addFilter(PlainErrors())

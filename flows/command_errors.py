"""Which errors of the `relay` command a user can mend, and what it exits with for them."""

from __future__ import annotations

from tpu.checkpoint.digest import NoSuchCheckpoint
from tpu.checkpoint.fence import FenceContended, MalformedFence
from tpu.checkpoint.objects import BucketUnusable, StaleGeneration
from tpu.checkpoint.restore import Damaged
from tpu.checkpoint.retry import StorageUnavailable
from tpu.cloud import CloudError
from tpu.connection import ConnectionSettingsError
from tpu.hosts.errors import HostUnreachable
from tpu.hosts.identity import IdentityError
from tpu.hosts.route import RouteError
from tpu.runs.config import RunConfigError
from tpu.runs.controller import ControllerLost, MalformedController, RunIsDriven
from tpu.runs.evaluation import InvalidCheckpointName, NoEvaluator
from tpu.runs.event_log import MalformedEvent
from tpu.runs.logs import NoLog
from tpu.runs.record import MalformedRecord, RunNameTaken, RunNotFound, TooFewSteps
from tpu.runs.remote import HostNotReady, NoSuchHost, ProfileFailed
from tpu.runs.stopping import NotStopped
from tpu.slices.lease import MalformedLease
from tpu.slices.lease_book import LeaseContended
from tpu.slices.pool_names import NoSuchPool
from tpu.slices.pool_settings import PoolSettingsError
from tpu.slices.shared import MalformedShared, SharedContended
from tpu.sweeps.steering import SweepNotFound, WishRefused
from tpu.sweeps.trial import MalformedTrial
from tpu.sweeps.wishes import MalformedWishes, WishesContended
from tpu.topology import UnknownAcceleratorType
from tpu.train.text import TextNotFoundError

PROBLEM, WRONG_USAGE = 1, 2

_WRONG_USAGE = (
    ConnectionSettingsError, RunConfigError, RunNotFound, RunNameTaken, TooFewSteps, NoSuchCheckpoint, NoSuchHost,
    NoLog, RouteError, TextNotFoundError, PoolSettingsError, UnknownAcceleratorType, InvalidCheckpointName, NoEvaluator,
    SweepNotFound, WishRefused,
)  # fmt: skip
PROBLEMS = (
    BucketUnusable, StorageUnavailable, Damaged, MalformedFence, FenceContended, StaleGeneration, CloudError,
    HostNotReady, HostUnreachable, IdentityError, ProfileFailed, NotStopped, RunIsDriven, ControllerLost, OSError,
    MalformedRecord, MalformedController, MalformedEvent, MalformedShared, SharedContended,
    MalformedLease, LeaseContended, NoSuchPool, MalformedTrial, MalformedWishes, WishesContended,
)  # fmt: skip


def exit_code(error: Exception) -> int | None:
    """The exit code for an error that its message explains; None for one that is a mistake of ours."""
    if isinstance(error, _WRONG_USAGE):
        return WRONG_USAGE
    return PROBLEM if isinstance(error, PROBLEMS) else None

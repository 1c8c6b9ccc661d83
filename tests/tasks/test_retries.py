"""Which errors a task is tried again for."""

from __future__ import annotations

import pytest
from prefect.states import Failed

from tasks import cleanup, provision, segment
from tpu.checkpoint.fence import MalformedFence
from tpu.checkpoint.retry import StorageUnavailable
from tpu.cloud import CloudError, ErrorKind
from tpu.runs.controller import ControllerLost
from tpu.runs.driver import AttemptEnded
from tpu.slices.verdict import Verdict, VerdictKind

PREEMPTED = Verdict(VerdictKind.PREEMPTED, "gone")


@pytest.mark.parametrize(
    ("decides", "error", "again"),
    [
        (cleanup.worth_another_try, CloudError(ErrorKind.UNAVAILABLE, 14, "away"), True),
        (cleanup.worth_another_try, StorageUnavailable("away"), True),
        (cleanup.worth_another_try, CloudError(ErrorKind.PERMISSION, 7, "no right"), False),
        (cleanup.worth_another_try, MalformedFence("damaged"), False),
        (cleanup.worth_another_try, ControllerLost("another drives it"), False),
        (provision.worth_another_try, CloudError(ErrorKind.STOCKOUT, 8, "none left"), True),
        (provision.worth_another_try, CloudError(ErrorKind.NO_QUOTA, 8, "Limit: 0"), False),
        (provision.worth_another_try, ValueError("a defect"), False),
        (segment.budget_allows, AttemptEnded(PREEMPTED, True, "preempted"), True),
        (segment.budget_allows, AttemptEnded(PREEMPTED, False, "budget used up"), False),
        (segment.budget_allows, ControllerLost("another drives it"), False),
    ],
)
def test_tried_again_only_where_it_can_help(decides, error, again):
    assert decides(None, None, Failed(data=error)) is again

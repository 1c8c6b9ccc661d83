"""Every wording of the API that is known, and what it means."""

from __future__ import annotations

import pytest

from tpu.cloud.errors import CloudError, ErrorKind, classify, quota_name

NO_CAPACITY = (
    'There is no more capacity in the zone "us-east5-b"; you can try in another zone where Cloud TPU Nodes '
    "are offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x1b2c3d4e5f6a7b8c]"
)
LIMIT_ZERO = (
    "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. "
    "Limit: 0 in region us-east5."
)
NOT_OFFERED = (
    'Cloud TPU received a bad request. the accelerator configuration for accelerator type, "v6e-1", '
    "could not be found; see the types that zone offers"
)

KNOWN = [
    (8, NO_CAPACITY, ErrorKind.STOCKOUT),
    (8, "Insufficient capacity.", ErrorKind.STOCKOUT),
    (9, "Not enough resources available to fulfil the request", ErrorKind.STOCKOUT),
    (14, "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", ErrorKind.STOCKOUT),
    (
        8,
        "Insufficient reserved capacity. Contact customer support to increase your reservation.",
        ErrorKind.RESERVATION_FULL,
    ),
    (
        9,
        "Insufficient reserved capacity. Contact customer support to increase your reservation.",
        ErrorKind.RESERVATION_FULL,
    ),
    (8, LIMIT_ZERO, ErrorKind.NO_QUOTA),
    (429, LIMIT_ZERO, ErrorKind.NO_QUOTA),
    (8, LIMIT_ZERO.replace("Limit: 0", "Limit: 16"), ErrorKind.QUOTA_EXHAUSTED),
    (8, LIMIT_ZERO.replace("Limit: 0", "Limit: 0.5"), ErrorKind.QUOTA_EXHAUSTED),
    (
        8,
        "Quota 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' exhausted. Limit 16 in zone us-central1-a",
        ErrorKind.QUOTA_EXHAUSTED,
    ),
    (
        8,
        "Quota 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' exhausted. Limit 0 in zone us-central1-a",
        ErrorKind.NO_QUOTA,
    ),
    (
        8,
        "Maximum number of CreateNode requests per minute (91) was reached for the project.",
        ErrorKind.RATE_LIMITED,
    ),
    (
        8,
        "Quota exceeded for quota metric 'Create requests' and limit 'Create requests per minute'",
        ErrorKind.RATE_LIMITED,
    ),
    (8, "something is exhausted", ErrorKind.STOCKOUT),
    (
        3,
        "Cloud TPU received a bad request. update is not supported while in state PREEMPTED",
        ErrorKind.PREEMPTED,
    ),
    (9, "delete is not supported while in state TERMINATED", ErrorKind.PREEMPTED),
    (9, "update is not supported while in state CREATING", ErrorKind.WRONG_STATE),
    (3, NOT_OFFERED, ErrorKind.NOT_OFFERED),
    (5, 'accelerator type "v9-8" not found in zone us-central2-b', ErrorKind.NOT_OFFERED),
    (12, "Queued resources are not supported in zone us-central1-f.", ErrorKind.NO_QUEUE),
    (3, "The location us-central1-f does not support queued resources.", ErrorKind.NO_QUEUE),
    (9, "QueuedResource is not available in this location", ErrorKind.NO_QUEUE),
    (3, "the queued resource is not supported while in state ACTIVE", ErrorKind.WRONG_STATE),
    (13, "an internal error has occurred", ErrorKind.INTERNAL),
    (7, "Permission denied on 'locations/us-east9-z' (or it may not exist)", ErrorKind.PERMISSION),
    (403, "Permission denied on 'locations/us-east9-z' (or it may not exist)", ErrorKind.PERMISSION),
    (16, "Request had invalid authentication credentials.", ErrorKind.PERMISSION),
    (3, 'invalid node id "Bad_Name"', ErrorKind.BAD_REQUEST),
    (5, "Resource 'projects/p/locations/z/nodes/n' was not found", ErrorKind.NOT_FOUND),
    (404, "Resource 'projects/p/locations/z/nodes/n' was not found", ErrorKind.NOT_FOUND),
    (6, "Resource 'projects/p/locations/z/nodes/n' already exists", ErrorKind.ALREADY_EXISTS),
    (14, "failed to connect to all addresses", ErrorKind.UNAVAILABLE),
    (4, "Deadline Exceeded", ErrorKind.UNAVAILABLE),
    (10, "the resource is being changed by another operation", ErrorKind.UNAVAILABLE),
    (1, "cancelled", ErrorKind.CANCELLED),
    (2, "Stream removed", ErrorKind.UNKNOWN),
    (77, "from the future", ErrorKind.UNKNOWN),
]


@pytest.mark.parametrize(("code", "message", "kind"), KNOWN)
def test_a_known_wording(code: int, message: str, kind: ErrorKind) -> None:
    assert classify(code, message) is kind


def test_details_decide_where_the_message_does_not() -> None:
    assert classify(8, "Resource has been exhausted.", ["RATE_LIMIT_EXCEEDED"]) is ErrorKind.RATE_LIMITED
    assert classify(8, "Resource has been exhausted.", [LIMIT_ZERO]) is ErrorKind.NO_QUOTA


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (LIMIT_ZERO, "TPUV6EPreemptiblePerProjectPerRegionForTPUAPI"),
        ("Quota 'X' exhausted. Limit 3 in zone z", "X"),
        (NO_CAPACITY, None),
    ],
)
def test_the_quota_is_named(message: str, name: str | None) -> None:
    assert quota_name(message) == name


def test_an_error_says_what_was_wanted_what_happened_and_what_to_do() -> None:
    error = CloudError(ErrorKind.NO_QUOTA, 8, LIMIT_ZERO, wanted="create v6e-8 spot in us-east5-b")
    assert error.permanent
    assert error.quota == "TPUV6EPreemptiblePerProjectPerRegionForTPUAPI"
    text = str(error)
    assert "create v6e-8 spot in us-east5-b" in text
    assert LIMIT_ZERO in text
    assert "Ask for that quota" in text


def test_what_may_pass_by_itself_is_not_permanent() -> None:
    for kind in (ErrorKind.STOCKOUT, ErrorKind.QUOTA_EXHAUSTED, ErrorKind.INTERNAL, ErrorKind.UNKNOWN):
        assert not CloudError(kind, 8, "later").permanent

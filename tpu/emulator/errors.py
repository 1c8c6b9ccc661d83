"""What the emulated API answers when it refuses, in the codes and words of the real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.rpc import error_details_pb2

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class ApiError(Exception):
    """A refusal with its canonical code (google.rpc.Code), message, and messages of details if it has any."""

    def __init__(self, code: int, message: str, details: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = tuple(details)

    @property
    def status(self) -> grpc.StatusCode:
        return _CODES[self.code]


def code_number(code: int | str) -> int:
    """Return the canonical number of `8`, `"8"` or `"RESOURCE_EXHAUSTED"`.

    Raises:
        ValueError: there is no such code; the message lists the names.
    """
    text = str(code)
    for number, status in _CODES.items():
        if text in (str(number), status.name) and number != 0:
            return number
    raise ValueError(f"unknown status code {code!r}; known: {', '.join(c.name for c in _CODES.values())}")


def bad_request(message: str) -> ApiError:
    return ApiError(3, f"Cloud TPU received a bad request. {message}")


def not_found(name: str) -> ApiError:
    return ApiError(5, f"Resource '{name}' was not found")


def already_exists(name: str) -> ApiError:
    return ApiError(6, f"Resource '{name}' already exists")


def location_denied(zone: str) -> ApiError:
    return ApiError(7, f"Permission denied on 'locations/{zone}' (or it may not exist).")


def project_denied(project: str) -> ApiError:
    return ApiError(
        7, f"Permission denied on resource project {project}. The caller has no access, or it does not exist."
    )


def unauthenticated() -> ApiError:
    return ApiError(
        16,
        "Request is missing required authentication credential. "
        "The emulator wants the metadata `authorization: Bearer <TPU_RELAY_API_KEY>`.",
        [_info("CREDENTIALS_MISSING")],
    )


def wrong_state(verb: str, state: str) -> ApiError:
    return bad_request(f"{verb} is not supported while in state {state} [EID: 0x5ca1ab1e0c0ffee0]")


def type_not_offered(accelerator_type: str, zone: str) -> ApiError:
    return bad_request(
        f'The accelerator configuration for accelerator type, "{accelerator_type}", '
        f'could not be found in zone "{zone}".'
    )


def no_queues(zone: str) -> ApiError:
    return bad_request(f'Queued resources are not supported in zone "{zone}".')


def no_capacity(zone: str) -> ApiError:
    return ApiError(
        8,
        f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes '
        "are offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x1d0c2b3a49586776]",
    )


def no_reserved_capacity() -> ApiError:
    return ApiError(
        8, "Insufficient reserved capacity. Contact customer support to increase your reservation."
    )


def quota_zero(quota: str, region: str) -> ApiError:
    return ApiError(8, f"Quota limit '{quota}' has been exceeded. Limit: 0 in region {region}.")


def quota_used_up(quota: str, limit: int, zone: str) -> ApiError:
    return ApiError(8, f"Quota '{quota}' exhausted. Limit {limit} in zone {zone}")


def too_many_creations(per_minute: int) -> ApiError:
    return ApiError(
        8,
        f"Maximum number of CreateNode requests per minute reached: the limit is {per_minute} "
        "a minute and project.",
        [_info("RATE_LIMIT_EXCEEDED")],
    )


def _info(reason: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(
        reason=reason, domain="googleapis.com", metadata={"service": "tpu.googleapis.com"}
    )

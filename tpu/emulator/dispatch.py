"""What is done with every call, whichever way it came: the key, faults on demand, the method, its errors."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.cloud.location import locations_pb2

from tpu.emulator import errors, messages, operations, tpu_service
from tpu.emulator.errors import ApiError
from tpu.emulator.faults import Faults
from tpu.emulator.operations import OperationStore
from tpu.emulator.tpu_service import TpuService

_log = logging.getLogger(__name__)

TPU, OPERATIONS, LOCATIONS = (
    "google.cloud.tpu.v2alpha1.Tpu",
    "google.longrunning.Operations",
    "google.cloud.location.Locations",
)


@dataclass(frozen=True)
class Method:
    """One method of a service: the class of its request, and what answers it."""

    service: str
    request_class: Any
    handler: Callable[[Any], Awaitable[Any]]


def method_names() -> frozenset[str]:
    """Return the names of all methods that are served."""
    return frozenset((*tpu_service.METHODS, *operations.METHODS, "ListLocations", "GetLocation"))


class Dispatcher:
    """All methods by name, for callers that bring the key as a bearer token."""

    def __init__(
        self,
        service: TpuService,
        store: OperationStore,
        faults: Faults,
        key: str,
        allow: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`allow` refuses methods, by name, that the project may not call."""
        self._faults = faults
        self._allow = allow
        self._expected = f"Bearer {key}".encode()
        self.methods: dict[str, Method] = {
            name: Method(TPU, messages.request(name), getattr(service, name)) for name in tpu_service.METHODS
        }
        for name, (request_class, attribute) in operations.METHODS.items():
            self.methods[name] = Method(OPERATIONS, request_class, getattr(store, attribute))
        for name, request_class in (
            ("ListLocations", locations_pb2.ListLocationsRequest),
            ("GetLocation", locations_pb2.GetLocationRequest),
        ):
            self.methods[name] = Method(LOCATIONS, request_class, getattr(service, name))

    def check_key(self, authorization: str) -> None:
        """Refuse a call whose authorization is not the key.

        Raises:
            ApiError: of code 16.
        """
        if not hmac.compare_digest(authorization.encode(), self._expected):
            raise errors.unauthenticated()

    async def answer(self, name: str, request: Any, authorization: str) -> Any:
        """Answer a call of the method `name`.

        Raises:
            ApiError: it is refused, meets a fault, or meets a bug of ours, which looks like one of the
                API's (code 13) and stands in the log.
        """
        self.check_key(authorization)
        self._allow(name)
        fault = self._faults.take(name)
        if fault is not None and not fault.after:
            raise fault.error
        try:
            response = await self.methods[name].handler(request)
        except ApiError:
            raise
        except Exception as error:  # whatever it is, the real API would answer all the same
            _log.exception("%s failed", name)
            raise ApiError(13, f"an internal error has occurred: {error!r}") from error
        if fault is not None:
            raise fault.error
        return response

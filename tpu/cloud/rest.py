"""Google's REST APIs: flex-start, which the client library's messages cannot say, and what a preflight asks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import google.auth
import grpc
import requests
from google.api_core import exceptions as api_exceptions
from google.auth.exceptions import DefaultCredentialsError
from google.auth.transport.requests import AuthorizedSession
from google.protobuf import json_format
from google.protobuf.any_pb2 import Any as AnyMessage

from tpu.cloud.errors import CloudError, ErrorKind
from tpu.connection import Connection

_CODES = {code.name: code for code in grpc.StatusCode}
# Before the version in the paths of a service.
_FOLDERS = {"compute": "compute/"}
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


class RestApi:
    """Sends requests with the credentials of a connection. To be closed."""

    def __init__(self, connection: Connection) -> None:
        """Raises CloudError if there are no credentials, or no address to send them to."""
        if connection.api_endpoint is None:
            self._local, self._session = None, _google_session()
        elif connection.rest_endpoint is not None:
            self._local, self._session = connection.rest_endpoint.rstrip("/"), requests.Session()
            self._session.trust_env = False  # no proxy and no .netrc stands between us and a local server
            self._session.headers["Authorization"] = f"Bearer {connection.api_key}"
        else:
            raise CloudError(
                ErrorKind.BAD_REQUEST,
                0,
                "this goes over the REST form of the API, and only the address of the other form is set: "
                "set TPU_RELAY_REST_ENDPOINT as well, such as http://127.0.0.1:8080",
                wanted="connect to the Cloud TPU API",
            )

    def close(self) -> None:
        self._session.close()

    async def post(self, path: str, query: Mapping[str, str], body: Any, timeout_s: float) -> Any:
        """Send a POST request to the Cloud TPU API; returns the JSON of the answer. Raises as `ask`."""
        url = self._url("tpu", f"v2alpha1/{path}")
        return await asyncio.to_thread(self._send, "POST", url, query, body, timeout_s)

    async def ask(
        self,
        service: str,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_s: float = 10.0,
    ) -> Any:
        """Ask a service such as `compute`, by its first name; returns the JSON of the answer.

        Raises:
            GoogleAPICallError: refused, or no answer within `timeout_s` seconds.
            GoogleAuthError: the credentials cannot be used.
        """
        url = self._url(service, path)
        return await asyncio.to_thread(self._send, verb, url, query or {}, body, timeout_s)

    async def date(self, timeout_s: float = 10.0) -> str | None:
        """The time at the Cloud TPU API, as its answers have it, whatever they say. Raises as `ask` if none comes."""
        url = self._url("tpu", "v2/")
        return (await asyncio.to_thread(self._request, "GET", url, {}, None, timeout_s)).headers.get("Date")

    def _url(self, service: str, path: str) -> str:
        """A local server serves all services, each but the Cloud TPU API in a folder of its name."""
        if self._local is None:
            return f"https://{service}.googleapis.com/{_FOLDERS.get(service, '')}{path}"
        return f"{self._local}/{path}" if service == "tpu" else f"{self._local}/{service}/{path}"

    def _request(
        self, verb: str, url: str, query: Mapping[str, str], body: Any, timeout_s: float
    ) -> requests.Response:
        try:
            return self._session.request(verb, url, params=query, json=body, timeout=timeout_s)
        except requests.Timeout as error:
            raise api_exceptions.DeadlineExceeded(f"no answer within {timeout_s:g} s") from error
        except requests.ConnectionError as error:
            raise api_exceptions.ServiceUnavailable(str(error)) from error

    def _send(self, verb: str, url: str, query: Mapping[str, str], body: Any, timeout_s: float) -> Any:
        answer = self._request(verb, url, query, body, timeout_s)
        try:
            content = answer.json()
        except ValueError:
            content = None  # a page of some server in between: its status says what there is to say
        if not answer.ok or content is None:
            raise call_error(answer.status_code, content)
        return content


def call_error(status: int, content: object) -> api_exceptions.GoogleAPICallError:
    """What a refusal in JSON says, as the error that gRPC would have brought. Pure."""
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, dict):
        return api_exceptions.from_http_status(status, f"HTTP status {status}")
    message = str(error.get("message", ""))
    details = [found for found in map(_detail, error.get("details", ())) if found is not None]
    code = _CODES.get(str(error.get("status")))
    if code is None:
        return api_exceptions.from_http_status(status, message, details=details)
    return api_exceptions.from_grpc_status(code, message, details=details)


def _detail(values: Any) -> AnyMessage | None:
    try:
        return json_format.ParseDict(values, AnyMessage())
    except (json_format.ParseError, TypeError):
        return None  # of a type that we do not know


def _google_session() -> requests.Session:
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except DefaultCredentialsError as error:
        raise no_credentials() from error
    return AuthorizedSession(credentials)


def no_credentials() -> CloudError:
    return CloudError(
        ErrorKind.PERMISSION,
        0,
        "no Google credentials: run `gcloud auth application-default login`, or set "
        "GOOGLE_APPLICATION_CREDENTIALS to a key file",
        wanted="connect to the Cloud TPU API",
    )

"""Resource names of the API: how they are written, read and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpu.emulator import errors

_ID = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_PARENT = re.compile(r"projects/([^/]+)/locations/([^/]+)")
_RESOURCE = re.compile(r"projects/([^/]+)/locations/([^/]+)/([a-zA-Z]+)/([^/]+)")


@dataclass(frozen=True, order=True)
class Location:
    """A zone of a project; zone `-` means all, where listing allows it."""

    project: str
    zone: str

    def __str__(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    def child(self, collection: str, resource_id: str) -> str:
        return f"{self}/{collection}/{resource_id}"


def parse_location(text: str) -> Location:
    """Read `projects/P/locations/Z`.

    Raises:
        ApiError: malformed.
    """
    match = _PARENT.fullmatch(text)
    if match is None:
        raise errors.bad_request(f"Malformed name: '{text}' is not projects/PROJECT/locations/ZONE.")
    return Location(match[1], match[2])


def parse_resource(text: str, collection: str) -> tuple[Location, str]:
    """Read `projects/P/locations/Z/<collection>/ID` into its location and id.

    Raises:
        ApiError: malformed, or of another collection.
    """
    match = _RESOURCE.fullmatch(text)
    if match is None or match[3] != collection:
        raise errors.bad_request(
            f"Malformed name: '{text}' is not projects/PROJECT/locations/ZONE/{collection}/ID."
        )
    return Location(match[1], match[2]), match[4]


def check_id(field: str, resource_id: str) -> None:
    """Refuse an id that the API would refuse.

    Raises:
        ApiError: empty, too long, or with characters that are not allowed.
    """
    if not _ID.fullmatch(resource_id):
        raise errors.bad_request(
            f"Invalid {field} '{resource_id}': it must match ^[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?$ "
            "(begin with a lower-case letter, at most 63 characters, no final hyphen)."
        )

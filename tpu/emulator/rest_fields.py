"""Partial answers: only the fields that a caller names, by `fields=` or the header X-Goog-FieldMask. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tpu.emulator.errors import ApiError

# Fields to keep by name, and a selection of what to keep of each; nothing named means all of it.
Selection = dict[str, Any]

_TOKEN = re.compile(r"[(),]|[^(),\s]+")


def parse(text: str) -> Selection:
    """Read `nodes(name,schedulingConfig/spot),nextPageToken`, or with dots as a field mask has them.

    Raises:
        ApiError: it cannot be read.
    """
    selection, last = _group(iter(_TOKEN.findall(text)), text)
    if last:
        raise _invalid(text)
    return selection


def _group(tokens: Iterator[str], text: str) -> tuple[Selection, str]:
    """Read fields up to a bracket or the end; returns them, and what ended them."""
    found: Selection = {}
    while True:
        path = re.split(r"[./]", next(tokens, ""))
        if not all(name and name not in "()," for name in path):
            raise _invalid(text)
        inside, token = {}, next(tokens, "")
        if token == "(":
            inside, token = _group(tokens, text)
            if token != ")":
                raise _invalid(text)
            token = next(tokens, "")
        holder = found
        for name in path[:-1]:
            holder = holder.setdefault(camel_case(name), {})
        holder[camel_case(path[-1])] = inside
        if token != ",":
            return found, token


def select(selection: Selection, value: Any) -> Any:
    """Return what a selection keeps of a JSON value."""
    if not selection:
        return value
    if isinstance(value, list):
        return [select(selection, item) for item in value]
    if not isinstance(value, dict):
        return value
    every = selection.get("*")
    kept = {name: selection.get(name, every) for name in value}
    return {name: select(inner, value[name]) for name, inner in kept.items() if inner is not None}


def camel_case(name: str) -> str:
    """A field's name as JSON spells it."""
    return re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), name)


def _invalid(text: str) -> ApiError:
    return ApiError(3, f"Request contains an invalid argument. Invalid field selection {text}")

"""How settings look in a form: their JSON schema, as people fill it in."""

from __future__ import annotations

from typing import Any


def plain_optionals(schema: dict[str, Any]) -> None:
    """Make of each field that may be left empty a plain one, in place.

    A form would ask first whether it is to be a number or null. What is empty is left out, and so is the default.
    Choices between models stay choices, and so does a choice of words: Prefect's server takes null for a field of a
    type, but not as one of the words.
    """
    for field in schema.get("properties", {}).values():
        others = [one for one in field.get("anyOf", []) if one != {"type": "null"}]
        plain = len(others) == 1 and "type" in others[0] and "enum" not in others[0]
        if plain and field.get("default", 0) is None:
            del field["anyOf"], field["default"]
            field.update(others[0])

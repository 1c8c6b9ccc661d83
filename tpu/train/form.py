"""How settings look in a form: their JSON schema, as people fill it in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# Said of a field that has no value in the form until somebody gives it one.
OF_THE_POOL = "If empty: as the work pool says."


def form(shown: Sequence[str], of_the_pool: Sequence[str] = ()) -> Callable[[dict[str, Any]], None]:
    """How a model's JSON schema looks as a form: the fields that people fill in, in this order, and no others.

    What is not shown is taken all the same: a form has `changes` for it, and the model refuses what it does not know.
    Those `of_the_pool` have no default, or a form would send it as if it had been written, and nobody could tell it
    from an answer.
    """

    def shape(schema: dict[str, Any]) -> None:
        plain_optionals(schema)
        fields = schema["properties"]
        if set(shown) < set(fields):
            schema.pop("additionalProperties", None)
        schema["properties"] = {
            # The order of keys is lost in PostgreSQL.
            name: fields[name] | {"position": number}
            for number, name in enumerate(shown)
        }
        for name in of_the_pool:
            field = schema["properties"][name]
            field.pop("default", None)
            field["description"] += f" {OF_THE_POOL}"

    return shape


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

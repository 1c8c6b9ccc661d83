"""Every point of a space of listed values, counted without making them and made one by one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tpu.sweeps.parameters import Parameter, Value

Space = Mapping[str, Parameter]


def not_listed(space: Space) -> list[str]:
    """Parameters of which a grid could not try every value."""
    return [name for name, parameter in space.items() if parameter.choices is None]


def count(space: Space) -> int:
    """How many points there are; only parameters that others depend on are gone through."""
    parents = {name for parameter in space.values() for name in parameter.when or ()}
    return _count(list(space.items()), parents, {})


def _count(rest: Sequence[tuple[str, Parameter]], parents: set[str], chosen: dict[str, Value]) -> int:
    number = 1
    for index, (name, parameter) in enumerate(rest):
        if not parameter.applies(chosen):
            continue
        choices = parameter.choices
        assert choices is not None
        if name not in parents:
            number *= len(choices)
            continue
        later = rest[index + 1 :]
        return number * sum(_count(later, parents, {**chosen, name: value}) for value in choices)
    return number


def points(space: Space) -> Iterator[dict[str, Value]]:
    """Each point once; the last parameter changes fastest."""
    return _points(list(space.items()), {})


def _points(rest: Sequence[tuple[str, Parameter]], chosen: dict[str, Value]) -> Iterator[dict[str, Value]]:
    if not rest:
        yield chosen
        return
    (name, parameter), later = rest[0], rest[1:]
    if not parameter.applies(chosen):
        yield from _points(later, chosen)
        return
    choices = parameter.choices
    assert choices is not None
    for value in choices:
        yield from _points(later, {**chosen, name: value})

"""State as named arrays and back: any nesting of dicts, lists and tuples, and any JAX pytree once JAX is
loaded.

A leaf's name is its path joined by "/", the same with and without JAX, so that a machine without it reads
what a TPU wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpu.checkpoint import torch_leaves

Leaves = dict[str, Any]


class UnsavableState(TypeError):
    """A leaf cannot be kept in a checkpoint; the message names it and what can."""


class StateMismatch(ValueError):
    """The state of the program and the checkpoint do not fit; the message lists the names that differ."""


def leaves_of(state: Any) -> Leaves:
    """All arrays and numbers of `state` by name. Functions and None are part of the program, not of the
    state; PyTorch modules, optimizers and schedulers stand for what their `state_dict()` holds.

    Raises:
        UnsavableState: a leaf is something else, such as text, or two leaves have one name.
    """
    found: Leaves = {}

    def take(name: str, leaf: Any) -> Any:
        if torch_leaves.is_stateful(leaf):
            for inner, value in torch_leaves.saved_leaves(name, leaf):
                take(inner, value)
            return leaf
        if leaf is None or (callable(leaf) and not hasattr(leaf, "dtype")):
            return leaf
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)):
            raise UnsavableState(
                f"{name!r} is a {type(leaf).__name__}: a checkpoint keeps arrays and numbers; "
                "leave it out of the state, or make it a number"
            )
        if name in found:
            raise UnsavableState(f"two leaves of the state are called {name!r}: rename one")
        found[name] = leaf
        return leaf

    map_leaves(state, take)
    return found


def make_room(state: Any, stored: set[str]) -> None:
    """Let optimizers of PyTorch that have not made a step have the moments that a checkpoint (`stored`) has."""

    def ask(name: str, leaf: Any) -> Any:
        if torch_leaves.is_stateful(leaf):
            torch_leaves.make_room(name, leaf, stored)
        return leaf

    map_leaves(state, ask)


def placed_leaves(state: Any, change: Callable[[str, Any], Any]) -> Any:
    """`state` with each leaf of `leaves_of` replaced by `change(name, leaf)`; what is no such leaf is passed to it too.

    PyTorch modules, optimizers and schedulers stay the same objects and load their values.
    """

    def place(name: str, leaf: Any) -> Any:
        if torch_leaves.is_stateful(leaf):
            torch_leaves.load(name, leaf, change)
            return leaf
        return change(name, leaf)

    return map_leaves(state, place)


def map_leaves(state: Any, change: Callable[[str, Any], Any]) -> Any:
    """`state` with each leaf replaced by `change(name, leaf)`."""
    jax = sys.modules.get("jax")
    if jax is None:
        return _map_plain((), state, change)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: change("/".join(_key_name(key) for key in path), leaf), state
    )


def _key_name(key: Any) -> str:
    """The plain word of one JAX path entry: key of a dict, index of a list, name of an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _map_plain(path: tuple[str, ...], node: Any, change: Callable[[str, Any], Any]) -> Any:
    if isinstance(node, Mapping):
        mapped = {k: _map_plain((*path, str(k)), node[k], change) for k in sorted(node)}
        return {k: mapped[k] for k in node}
    fields = getattr(node, "_fields", None) if isinstance(node, tuple) else None
    if fields is not None:
        return type(node)(*(_map_plain((*path, f), getattr(node, f), change) for f in fields))
    if isinstance(node, list | tuple):
        return type(node)(_map_plain((*path, str(i)), child, change) for i, child in enumerate(node))
    if node is None:
        return None
    return change("/".join(path), node)


def as_array(leaf: Any) -> np.ndarray:
    """A NumPy copy of a number, a NumPy leaf or a tensor of PyTorch."""
    if torch_leaves.is_tensor(leaf):
        return torch_leaves.host_array(leaf)
    return np.array(leaf, copy=True)

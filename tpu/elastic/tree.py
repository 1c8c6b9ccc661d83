"""The fixed balanced binary tree over work units, in whose order their gradients are summed.

A node is a range [first, end) of units. Its sum is the sum of its two halves, the left one with the odd unit. So the
sum of each node has one possible value, whoever computed its units and whoever added them up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def root(units: int) -> Node:
    """The node of all units. Raises ValueError if there are none."""
    if units < 1:
        raise ValueError(f"a step has at least one work unit, found {units}")
    return (0, units)


def halves(node: Node) -> tuple[Node, Node]:
    """The two children of a node of at least two units."""
    first, end = node
    middle = first + (end - first + 1) // 2
    return (first, middle), (middle, end)


def is_leaf(node: Node) -> bool:
    """Whether a node is a single unit."""
    return node[1] - node[0] == 1


def complete_nodes(mine: Collection[int], units: int) -> list[Node]:
    """The largest nodes all of whose units are in `mine`, from left to right: what a member adds up by itself."""
    found: list[Node] = []

    def look(node: Node) -> None:
        here = sum(first in mine for first in range(*node))
        if here == node[1] - node[0]:
            found.append(node)
        elif here:
            for half in halves(node):
                look(half)

    look(root(units))
    return found


def uncovered(nodes: Collection[Node], units: int) -> list[Node]:
    """The largest nodes that cannot be summed from `nodes`: empty if the whole tree can be finished."""

    def missing(node: Node) -> list[Node]:
        if node in nodes:
            return []
        if is_leaf(node):
            return [node]
        left, right = map(missing, halves(node))
        return (
            [node]
            if left and right and sum(b - a for a, b in left + right) == node[1] - node[0]
            else left + right
        )

    return missing(root(units))


def is_covered(nodes: Collection[Node], units: int) -> bool:
    """Whether the tree can be finished from the sums of `nodes`."""

    def covered(node: Node) -> bool:
        return node in nodes or (not is_leaf(node) and all(map(covered, halves(node))))

    return covered(root(units))


def finish(parts: Mapping[Node, T], units: int, add: Callable[[T, T], T]) -> T:
    """The sum at the root, from a covering set of nodes. Raises KeyError if it does not cover."""

    def total(node: Node) -> T:
        if node in parts:
            return parts[node]
        if is_leaf(node):
            raise KeyError(node)
        left, right = halves(node)
        return add(total(left), total(right))

    return total(root(units))


def sum_node(node: Node, leaf: Callable[[int], T], add: Callable[[T, T], T]) -> T:
    """The sum at a node from the gradients of its units, which are computed from left to right, one after another."""
    if is_leaf(node):
        return leaf(node[0])
    left, right = halves(node)
    below = sum_node(left, leaf, add)
    return add(below, sum_node(right, leaf, add))

"""The tree: any cover by nodes gives the sum that one member alone comes to."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu.elastic import tree


@given(st.integers(1, 33), st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_split_over_members_gives_the_same_bits(units: int, data: st.DataObject) -> None:
    draw = np.random.Generator(np.random.Philox(key=[units, 0]))
    gradients = (draw.standard_normal((units, 7)) * np.exp(3 * draw.standard_normal((units, 7)))).astype(
        np.float32
    )
    alone = tree.sum_node(tree.root(units), lambda unit: gradients[unit], np.add)
    who = data.draw(st.lists(st.integers(0, 3), min_size=units, max_size=units))
    parts = {}
    for member in range(4):
        mine = {unit for unit in range(units) if who[unit] == member}
        nodes = tree.complete_nodes(mine, units)
        assert sorted(unit for node in nodes for unit in range(*node)) == sorted(mine)
        parts |= {node: tree.sum_node(node, lambda unit: gradients[unit], np.add) for node in nodes}
    assert tree.is_covered(parts, units)
    assert tree.finish(parts, units, np.add).tobytes() == alone.tobytes()
    lost = data.draw(st.sampled_from(sorted(parts)))
    del parts[lost]
    assert not tree.is_covered(parts, units)
    missing = [unit for node in tree.uncovered(parts, units) for unit in range(*node)]
    assert missing == list(range(*lost))


def test_equal_shares_that_divide_the_tree_are_one_node_each() -> None:
    for members in (1, 2, 4, 8):
        each = 16 // members
        for member in range(members):
            mine = range(member * each, (member + 1) * each)
            assert tree.complete_nodes(mine, 16) == [(mine.start, mine.stop)]

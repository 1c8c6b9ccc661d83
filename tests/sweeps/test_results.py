"""Results of a sweep as files, and outcomes as they are kept."""

from __future__ import annotations

import io
import json

from arro3.io import read_parquet

from tests.sweeps.boards import BEGAN, board_of
from tpu.sweeps.curve import MOST_POINTS, Curve
from tpu.sweeps.outcome import Outcome
from tpu.sweeps.parquet import to_parquet


def read(data: bytes) -> tuple[dict[str, str], list[dict[str, object]]]:
    table = read_parquet(io.BytesIO(data)).read_all()
    types = {field.name: str(field.type) for field in table.schema}
    columns = {name: table[name].to_pylist() for name in types}
    return types, [{name: columns[name][i] for name in types} for i in range(table.num_rows)]


def test_parquet_has_every_row_and_column_with_its_type():
    rows = board_of(60).rows(BEGAN + 3600)
    types, found = read(to_parquet(rows))
    assert found == rows
    kinds = {name: types[name].partition("<")[2].strip(">\n") for name in ("trial", "loss", "state")}
    assert kinds == {"trial": "Int64", "loss": "Float64", "state": "Utf8"}


def test_columns_of_several_types_are_texts_and_what_a_row_lacks_is_null():
    rows = [
        {"a": 1, "b": 1, "c": True, "d": [1, 2], "e": 2**80},
        {"a": 0.5, "b": "x"},
        {"c": False, "b": None},
    ]
    _, found = read(to_parquet(rows))
    assert found == [
        {"a": 1.0, "b": "1", "c": True, "d": "[1, 2]", "e": str(2**80)},
        {"a": 0.5, "b": "x", "c": None, "d": None, "e": None},
        {"a": None, "b": None, "c": False, "d": None, "e": None},
    ]


def test_an_outcome_comes_back_as_it_was_also_one_of_an_earlier_version():
    for outcome in board_of(60).ended.values():
        assert Outcome.from_json(outcome.to_json()) == outcome
    old = json.loads(Outcome("finished", 0.5, reports=((10, 0.6),)).to_json())
    for name in ("ended", "curve", "uses"):
        del old[name]
    assert Outcome.from_json(json.dumps(old).encode()) == Outcome("finished", 0.5, reports=((10, 0.6),))


def test_a_curve_keeps_few_points_and_the_newest_value_of_a_step():
    curve = Curve()
    for step in range(10_000):
        curve.add(step, float(step))
    assert 2 <= len(curve.points) <= MOST_POINTS
    step = curve.points[5][0]
    curve.add(step, -1.0)
    assert (step, -1.0) in curve.points

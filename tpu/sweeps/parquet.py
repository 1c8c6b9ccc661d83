"""The results of a sweep as a Parquet file: a column a field, each of one type."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any


def to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Every column that a row has, in the order in which they come; null where a row has none.

    Whole numbers, numbers, truth values and texts keep their type; a column in which they are mixed, or with lists, is
    one of texts, in JSON where they are none.
    """
    from arro3.core import Array, Table
    from arro3.io import write_parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        kind, values = _typed(values)
        columns[name] = Array(values, type=kind)
    file = io.BytesIO()
    write_parquet(Table.from_pydict(columns), file, compression="snappy")
    return file.getvalue()


def _typed(values: Sequence[Any]) -> tuple[Any, list[Any]]:
    from arro3.core import DataType

    kinds = {type(one) for one in values if one is not None}
    if kinds == {bool}:
        return DataType.bool(), list(values)
    if kinds == {int} and all(one is None or -(2**63) <= one < 2**63 for one in values):
        return DataType.int64(), list(values)
    if kinds in ({float}, {int, float}):
        return DataType.float64(), [None if one is None else float(one) for one in values]
    words = [one if one is None or isinstance(one, str) else json.dumps(one) for one in values]
    return DataType.utf8(), words

"""Read the history of a run that Weights & Biases keeps in a folder of its own, `wandb/*run-*/run-*.wandb`.

The file is a log of LevelDB (blocks of 32 KiB, in them pieces of records with a header of 7 bytes), its records are
messages `Record` of wandb_internal.proto. Only what the history needs is understood; the numbers of the fields have
been the same from wandb 0.12 to 0.31. Standard library only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MAGIC = b":W&B"
FILE_HEADER, BLOCK, PIECE = 7, 32 << 10, struct.Struct("<IHB")
# Of a piece: the whole record, its first, a middle, its last part.
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
# Fields of Record (its history, its exit), HistoryRecord and HistoryItem.
HISTORY, EXIT, ITEM, STEP, STEP_NUMBER = 2, 18, 1, 2, 1
KEY, NESTED_KEY, INTEGER, NUMBER, VALUE_JSON = 1, 2, 5, 6, 16

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WandbHistory:
    """Records of all runs that begin below `folder` (the one that holds `wandb`) after this was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[Path, RecordLog] = {}
        self._before = set(self._files())

    def _files(self) -> Iterator[Path]:
        yield from sorted(self._folder.glob("wandb/*run-*/run-*.wandb"))

    def new(self) -> Iterator[Mapping[str, Any]]:
        """Rows of the history that were written since, with `_step`."""
        for path in self._files():
            if path in self._before or path.parent.is_symlink():  # wandb/latest-run
                continue
            log = self._logs.setdefault(path, RecordLog(path))
            for record in log.new():
                yield from history_of(record)


class RecordLog:
    """The records of one file, as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = FILE_HEADER
        self._begun = b""

    def new(self) -> Iterator[bytes]:
        """Whole records that were written since it was asked last; none of a file of another kind."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return
        if not data.startswith(MAGIC):
            return
        while True:
            if BLOCK - self._offset % BLOCK < PIECE.size:  # the rest of a block that no header fits into
                self._offset += BLOCK - self._offset % BLOCK
            if self._offset + PIECE.size > len(data):
                return
            _, length, kind = PIECE.unpack_from(data, self._offset)
            end = self._offset + PIECE.size + length
            if end > len(data) or kind not in (WHOLE, FIRST, MIDDLE, LAST):
                return  # it is being written
            piece = data[self._offset + PIECE.size : end]
            self._offset = end
            if kind in (WHOLE, FIRST):
                self._begun = b""
            self._begun += piece
            if kind in (WHOLE, LAST):
                yield self._begun


def history_of(record: bytes) -> Iterator[Mapping[str, Any]]:
    """The row of the history that a record is; nothing of a record of another kind, or one that is not understood."""
    try:
        for number, value in fields(record):
            if number == HISTORY and isinstance(value, bytes):
                yield _row(value)
    except (ValueError, IndexError, struct.error):
        return


def is_exit(record: bytes) -> bool:
    """Whether it says how the program ended, which is the last record of a file."""
    try:
        return any(number == EXIT for number, _ in fields(record))
    except (ValueError, IndexError):
        return False


def _row(history: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for number, value in fields(history):
        if number == ITEM and isinstance(value, bytes):
            name, content = _item(value)
            row[name] = content
        elif number == STEP and isinstance(value, bytes):
            row.setdefault("_step", next((v for n, v in fields(value) if n == STEP_NUMBER), 0))
    return row


def _item(item: bytes) -> tuple[str, Any]:
    names, content = [], None
    for number, value in fields(item):
        if number in (KEY, NESTED_KEY) and isinstance(value, bytes):
            names.append(value.decode())
        elif number == VALUE_JSON and isinstance(value, bytes):
            content = json.loads(value)
        elif number == INTEGER and isinstance(value, int):
            content = value - (1 << 64) if value >> 63 else value
        elif number == NUMBER and isinstance(value, bytes):
            (content,) = struct.unpack("<d", value)
    return ".".join(names), content


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message of Protocol Buffers.

    Raises:
        ValueError, IndexError: it is none.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == BYTES:
            length, at = _varint(message, at)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if at + length > len(message):
            raise IndexError("a field that is cut off")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at

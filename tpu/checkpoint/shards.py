"""Pieces of arrays: what each process holds of the state, as bytes of safetensors files, and whole again."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu.checkpoint import torch_leaves
from tpu.checkpoint.tree import Leaves, StateMismatch, as_array

# Several files of a moderate size go up side by side, and one damaged file is read again quickly.
FILE_BYTES = 64 << 20

_TO_NUMPY = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
_NUMPY_NAMES = frozenset(_TO_NUMPY.values())


@dataclass(frozen=True)
class Shard:
    """A leaf of which this process holds one piece: `data` begins at `start` within an array of `shape`.

    For programs that shard by hand; JAX arrays know their pieces themselves.
    """

    data: np.ndarray
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype


@dataclass(frozen=True)
class Piece:
    """A part of the array `name` that lies in `file` (inside a safetensors file, under `key`)."""

    name: str
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str = ""


@dataclass(frozen=True)
class ArraySpec:
    """An array as a whole. `sharding` is how it lay on the devices, for people to read."""

    dtype: str
    shape: tuple[int, ...]
    sharding: str = ""


@dataclass(frozen=True)
class Snapshot:
    """What one process has to write, copied to host memory: nothing in it changes any more."""

    arrays: Mapping[str, ArraySpec]
    pieces: Sequence[tuple[Piece, np.ndarray]]

    def nbytes(self) -> int:
        return sum(data.nbytes for _, data in self.pieces)

    def first_nan(self) -> str | None:
        """Name of an array with a NaN in it, or None."""
        for piece, data in self.pieces:
            # V: bfloat16 and the eight-bit floats, which NumPy itself cannot ask.
            if data.dtype.kind not in "fcV":
                continue
            if np.isnan(data.astype(np.float32) if data.dtype.kind == "V" else data).any():
                return piece.name
        return None


def snapshot(leaves: Leaves, process_id: int) -> Snapshot:
    """Copy to host memory what this process must write.

    Of a JAX array: the shards of this process that are the first copy (replica 0), so that over all processes
    each element is written once. Numbers and NumPy arrays are taken to be equal everywhere: process 0 writes
    them.
    """
    for leaf in leaves.values():  # first all transfers from the devices are begun, then they are waited for
        if _is_jax(leaf) and not _is_key(leaf) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    arrays: dict[str, ArraySpec] = {}
    pieces: list[tuple[Piece, np.ndarray]] = []
    for name, leaf in leaves.items():
        if _is_jax(leaf):
            data = _key_data(leaf) if _is_key(leaf) else leaf
            arrays[name] = ArraySpec(data.dtype.name, tuple(data.shape), str(data.sharding))
            found = [
                (tuple(s.start or 0 for s in shard.index), np.array(shard.data, copy=True))
                for shard in data.addressable_shards
                if shard.replica_id == 0
            ]
        elif isinstance(leaf, Shard):
            arrays[name] = ArraySpec(leaf.data.dtype.name, tuple(leaf.shape), "by hand")
            found = [(tuple(leaf.start), as_array(leaf.data))]
        else:
            data = as_array(leaf)
            arrays[name] = ArraySpec(data.dtype.name, data.shape)
            found = [((0,) * data.ndim, data)] if process_id == 0 else []
        for start, data in found:
            key = name if data.shape == arrays[name].shape else f"{name}@{','.join(map(str, start))}"
            pieces.append((Piece(name, key, start, data.shape), data))
        _check_dtype(name, arrays[name].dtype)
    return Snapshot(arrays, pieces)


def files_of(
    taken: Snapshot, process_id: int, file_bytes: int = FILE_BYTES
) -> Iterable[tuple[str, bytes, list[Piece]]]:
    """The safetensors files of a snapshot, one after the other: (name, content, the pieces in it)."""
    group: list[tuple[Piece, np.ndarray]] = []
    number, size = 0, 0
    for piece, data in taken.pieces:
        if group and size + data.nbytes > file_bytes:
            yield _file(group, process_id, number)
            group, number, size = [], number + 1, 0
        group.append((piece, data))
        size += data.nbytes
    if group:
        yield _file(group, process_id, number)


def _file(
    group: Sequence[tuple[Piece, np.ndarray]], process_id: int, number: int
) -> tuple[str, bytes, list[Piece]]:
    name = f"shards-{process_id}-{number}.safetensors"
    content = encode({piece.key: data for piece, data in group})
    return name, content, [Piece(p.name, p.key, p.start, p.shape, name) for p, _ in group]


def encode(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file with these arrays. Sorted by name, so that equal arrays give equal bytes."""
    from safetensors import TensorSpec, serialize

    # Contiguous little-endian copies, kept alive here while the specs point into them.
    held = {
        n: _little_endian(np.ascontiguousarray(arrays[n]).reshape(arrays[n].shape)) for n in sorted(arrays)
    }
    specs = {
        n: TensorSpec(dtype=a.dtype.name, shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
        for n, a in held.items()
    }
    return bytes(serialize(specs, metadata=None))


def decode(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, read-only.

    Raises:
        ValueError: it is no safetensors file, or has a dtype that NumPy lacks.
    """
    from safetensors import SafetensorError, deserialize

    try:
        views = deserialize(data)
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file: {error}") from error
    return {
        n: np.frombuffer(v["data"], dtype=named_dtype(_TO_NUMPY[v["dtype"]])).reshape(v["shape"])
        for n, v in views
    }


def named_dtype(name: str) -> np.dtype:
    """The NumPy dtype of that name; those of machine learning come from ml_dtypes."""
    if name not in np.sctypeDict:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def assemble(
    specs: Mapping[str, ArraySpec], pieces: Iterable[tuple[Piece, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Whole arrays from all pieces of all processes, as arrays of their own memory."""
    whole = {name: np.empty(spec.shape, named_dtype(spec.dtype)) for name, spec in specs.items()}
    for piece, data in pieces:
        index = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
        whole[piece.name][index] = data
    return whole


def missing_elements(specs: Mapping[str, ArraySpec], pieces: Iterable[Piece]) -> str | None:
    """Why these pieces are not the whole of these arrays, or None if they are."""
    counted = dict.fromkeys(specs, 0)
    for piece in pieces:
        spec = specs.get(piece.name)
        if spec is None:
            return f"there is a piece of {piece.name!r}, which is no array of the state"
        if any(
            s < 0 or s + n > full for s, n, full in zip(piece.start, piece.shape, spec.shape, strict=True)
        ):
            return f"a piece of {piece.name!r} at {piece.start} of {piece.shape} lies outside of {spec.shape}"
        counted[piece.name] += math.prod(piece.shape)
    for name, spec in specs.items():
        if counted[name] != math.prod(spec.shape):
            return (
                f"the pieces of {name!r} have {counted[name]} elements, the array has {math.prod(spec.shape)}"
            )
    return None


def placed(name: str, leaf: Any, value: np.ndarray) -> Any:
    """`value` in the form of `leaf`: with its sharding, as its piece, or as its Python number.

    Raises:
        StateMismatch: shape or dtype differ.
    """
    if _is_jax(leaf):
        return _placed_jax(name, leaf, value)
    if isinstance(leaf, Shard):
        _check_like(name, tuple(leaf.shape), leaf.data.dtype, value)
        index = tuple(slice(s, s + n) for s, n in zip(leaf.start, leaf.data.shape, strict=True))
        return Shard(value[index].copy(), leaf.start, leaf.shape)
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        return type(leaf)(value.item())
    if torch_leaves.is_tensor(leaf):
        _check_like(name, tuple(leaf.shape), named_dtype(torch_leaves.dtype_name(leaf)), value)
        return torch_leaves.tensor_like(leaf, value)
    _check_like(name, np.shape(leaf), np.asarray(leaf).dtype, value)
    return value[()] if isinstance(leaf, np.generic) else value


def _placed_jax(name: str, leaf: Any, value: np.ndarray) -> Any:
    import jax

    like = _key_data(leaf) if _is_key(leaf) else leaf
    _check_like(name, tuple(like.shape), like.dtype, value)
    # Copies: on a CPU JAX would share NumPy's memory, and a donated buffer must be JAX's own.
    made = jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: np.array(value[index], copy=True)
    )
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else made


def _check_like(name: str, shape: tuple[int, ...], dtype: Any, value: np.ndarray) -> None:
    if tuple(shape) != value.shape or np.dtype(dtype) != value.dtype:
        raise StateMismatch(
            f"{name!r} is {np.dtype(dtype).name}{list(shape)} in the program but "
            f"{value.dtype.name}{list(value.shape)} in the checkpoint: was the model's configuration changed?"
        )


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in _NUMPY_NAMES:
        raise StateMismatch(
            f"{name!r} has dtype {dtype}, which safetensors cannot hold; cast it before saving"
        )


def _little_endian(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


def _is_jax(leaf: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


def _is_key(leaf: Any) -> bool:
    jax = sys.modules["jax"]
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    return sys.modules["jax"].random.key_data(leaf)

"""Columns of bytes as base64 texts (RFC 4648, with padding), and back."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.errors import SchemaMismatchError

__all__ = ["from_base64", "to_base64"]

_LETTERS: Final = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8
)
_PAD: Final = ord("=")
_NONE: Final = 255
_VALUES: Final = np.full(256, _NONE, np.uint8)
_VALUES[_LETTERS] = np.arange(64)


def from_base64(texts: pa.Array) -> pa.BinaryArray:
    """Return the bytes of texts, nulls for nulls; raises `SchemaMismatchError` for other texts."""
    data, starts = _parts(texts)
    lengths = np.diff(starts)
    letters = np.frombuffer(data, np.uint8)
    is_pad = letters == _PAD
    # Padding is at most two letters at the end of a text.
    last = starts[1:][lengths > 0]
    pads = np.zeros(len(letters) + 1, np.int64)
    pads[1:] = np.cumsum(is_pad)
    counts = pads[starts[1:]] - pads[starts[:-1]]
    at_ends = is_pad[last - 1].astype(np.int64)
    at_ends += is_pad[last - 1] & is_pad[last - 2]
    values = _VALUES[letters]
    values[is_pad] = 0
    if (lengths % 4).any() or (counts[lengths > 0] != at_ends).any() or (values == _NONE).any():
        raise SchemaMismatchError("a text is no base64")
    groups = values.reshape(-1, 4).astype(np.uint32)
    whole = groups[:, 0] << 18 | groups[:, 1] << 12 | groups[:, 2] << 6 | groups[:, 3]
    data_bytes = np.stack([whole >> 16, whole >> 8, whole], axis=1).astype(np.uint8).reshape(-1)
    sizes = lengths // 4 * 3 - counts
    is_data = np.ones(len(data_bytes), np.bool_)
    for pad in (1, 2):
        ends = (starts[1:] // 4 * 3)[counts >= pad]
        is_data[ends - pad] = False
    return _array(data_bytes[is_data], sizes, texts, pa.binary())


def to_base64(values: pa.Array) -> pa.StringArray:
    """Return bytes as texts, nulls for nulls."""
    data, starts = _parts(values)
    lengths = np.diff(starts)
    groups = (lengths + 2) // 3
    ends = np.cumsum(groups)
    padded = np.zeros(int(groups.sum()) * 3, np.uint8)
    begins = (ends - groups) * 3
    shifts = np.repeat(begins - starts[:-1], lengths)
    padded[np.arange(len(data)) + shifts] = np.frombuffer(data, np.uint8)
    parts = padded.reshape(-1, 3).astype(np.uint32)
    whole = parts[:, 0] << 16 | parts[:, 1] << 8 | parts[:, 2]
    six = np.stack([whole >> 18, whole >> 12, whole >> 6, whole], axis=1) & 63
    letters = _LETTERS[six].reshape(-1)
    missing = groups * 3 - lengths
    for pad in (1, 2):
        letters[(ends * 4)[missing >= pad] - pad] = _PAD
    return _array(letters, groups * 4, values, pa.string())


def _parts(array: pa.Array) -> tuple[memoryview, npt.NDArray[np.int64]]:
    """Return the bytes of all values, and the start of each value; a null has no bytes."""
    if array.null_count:
        array = array.fill_null(b"" if pa.types.is_binary(array.type) else "")
    _, ends, data = array.buffers()
    if not len(array) or data is None:
        return memoryview(b""), np.zeros(len(array) + 1, np.int64)
    places = np.frombuffer(ends, np.int32)[array.offset : array.offset + len(array) + 1]
    first = int(places[0])
    return memoryview(data)[first : int(places[-1])], places.astype(np.int64) - first


def _array(
    data: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64], like: pa.Array, t: pa.DataType
) -> pa.Array:
    places = np.zeros(len(sizes) + 1, np.int64)
    places[1:] = np.cumsum(sizes)
    if places[-1] > np.iinfo(np.int32).max:
        raise SchemaMismatchError("the values are too large together")
    validity = None
    if like.null_count:
        validity = pa.array(like.is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
    buffers = [
        validity,
        pa.py_buffer(places.astype(np.int32)),
        pa.py_buffer(np.ascontiguousarray(data)),
    ]
    return pa.Array.from_buffers(t, len(like), buffers)

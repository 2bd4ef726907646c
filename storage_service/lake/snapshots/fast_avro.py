"""Reading manifests several times faster than the Iceberg library's own objects allow.

It uses the library's Avro decoder and schema, but decodes only what planning looks at and makes
one plain tuple an entry: half the time, which for 10,000 files is a noticeable pause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pyiceberg.avro.decoder import BinaryDecoder, new_decoder
from pyiceberg.avro.file import AvroFile
from pyiceberg.avro.reader import (
    IntegerReader,
    MapReader,
    OptionReader,
    Reader,
    StructReader,
)
from pyiceberg.io import FileIO
from pyiceberg.manifest import ManifestFile
from pyiceberg.types import StructType

from streamhouse.storage_service.errors import CorruptDataError

__all__ = ["ADDED_STATUS", "DELETED_STATUS", "ManifestRow", "read_manifest"]

ADDED_STATUS: Final = 1
DELETED_STATUS: Final = 2
_SYNC_BYTES: Final = 16

# Field ids of the manifest entry and the data file in it (Iceberg's spec, manifests).
_STATUS: Final = 0
_SNAPSHOT_ID: Final = 1
_SEQUENCE: Final = 3
_DATA_FILE: Final = 2
_WANTED: Final = (100, 101, 102, 103, 104, 110, 125, 128, 132)

_Decode = Callable[[BinaryDecoder], Any]


class ManifestRow(NamedTuple):
    """What planning needs of one entry of a data manifest."""

    status: int
    snapshot_id: int | None
    sequence: int | None
    path: str
    format: str
    partition: tuple[Any, ...]
    row_count: int
    file_bytes: int
    null_counts: Mapping[int, int]
    lower_bounds: Mapping[int, bytes]
    upper_bounds: Mapping[int, bytes]
    row_group_starts: Sequence[int] | None


def read_manifest(io: FileIO, manifest: ManifestFile) -> Iterator[ManifestRow]:
    """Yield the entries of a data manifest, deleted ones included."""
    path = manifest.manifest_path
    with AvroFile[Any](io.new_input(path)) as file:
        decode = _entry_decoder(file.reader, file.schema.as_struct())
        codec = file.header.compression_codec()
        sync = file.header.sync
        decoder = file.decoder
        size = manifest.manifest_length
        while decoder.tell() < size:
            count = decoder.read_int()
            data = decoder.read_bytes()
            block = new_decoder(data if codec is None else codec.decompress(data))
            for _ in range(count):
                yield decode(block)
            if decoder.read(_SYNC_BYTES) != sync:
                raise CorruptDataError(f"manifest '{path}': a block ends without its sync marker")


def _entry_decoder(reader: Reader, schema: StructType) -> Callable[[BinaryDecoder], ManifestRow]:
    """Return a function that decodes one entry, for this file's own order of fields."""
    assert isinstance(reader, StructReader)
    steps: list[tuple[int, _Decode]] = []
    for field, (_, field_reader) in zip(schema.fields, reader.field_readers, strict=True):
        if field.field_id == _DATA_FILE:
            assert isinstance(field_reader, StructReader)
            assert isinstance(field.field_type, StructType)
            for inner, (_, inner_reader) in zip(
                field.field_type.fields, field_reader.field_readers, strict=True
            ):
                is_wanted = inner.field_id in _WANTED
                steps.append((inner.field_id, _decoder_of(inner_reader, is_wanted=is_wanted)))
        else:
            is_wanted = field.field_id in (_STATUS, _SNAPSHOT_ID, _SEQUENCE)
            key = field.field_id if is_wanted else -1
            # Ids of entry and data file do not overlap; 2 is only the data file itself.
            steps.append((key, _decoder_of(field_reader, is_wanted=is_wanted)))

    def decode(decoder: BinaryDecoder) -> ManifestRow:
        values = {key: step(decoder) for key, step in steps}
        return ManifestRow(
            values[_STATUS],
            values.get(_SNAPSHOT_ID),
            values.get(_SEQUENCE),
            values[100],
            values[101],
            tuple(values[102]._data),
            values[103],
            values[104],
            _or_empty(values.get(110)),
            _or_empty(values.get(125)),
            _or_empty(values.get(128)),
            values.get(132),
        )

    return decode


def _decoder_of(reader: Reader, *, is_wanted: bool) -> _Decode:
    """Return the reader's own function, or one that passes over the value as fast as it can."""
    if isinstance(reader, OptionReader):
        inner = _decoder_of(reader.option, is_wanted=is_wanted)
        return lambda decoder: inner(decoder) if decoder.read_int() else None
    if is_wanted or not isinstance(reader, MapReader):
        return reader.read
    if isinstance(reader.key, IntegerReader) and isinstance(reader.value, IntegerReader):
        return _pass_integers
    return reader.read


def _pass_integers(decoder: BinaryDecoder) -> None:
    """Pass over a map of integers: reading them at once beats skipping them one by one."""
    while (count := decoder.read_int()) != 0:
        if count < 0:
            count = -count
            decoder.skip_int()
        decoder.read_ints(count * 2)


def _or_empty(bounds: Mapping[int, Any] | None) -> Mapping[int, Any]:
    # `or` would ask for its length, for which the library's lazy maps are unpacked.
    return {} if bounds is None else bounds

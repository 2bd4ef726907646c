"""What recovery makes of a frame whose checksum is right but that does not belong there."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.segments.segment_format import FRAME, encode_frame
from tests.support.crash_filesystem import CrashFilesystem
from tests.support.log_world import DIRECTORY, open_log, store

_PATH = DIRECTORY / f"{0:020d}.log"


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"flags": 1}, {"zero": 1}, {"row_count": 0}, {"durable_offset": 99}],
    ids=lambda change: next(iter(change)),
)
def test_a_whole_frame_of_another_release_is_never_cut_off(
    disk: CrashFilesystem, change: dict[str, int]
) -> None:
    _left_with(disk, _frame(**change))

    with pytest.raises(CorruptDataError, match="a whole frame that this release cannot read"):
        open_log(disk)


@pytest.mark.parametrize(
    "change", [{"timestamp_us": -1}, {"base_offset": 11}], ids=lambda change: next(iter(change))
)
def test_a_whole_frame_that_does_not_continue_the_log_ends_it(
    disk: CrashFilesystem, change: dict[str, int]
) -> None:
    log = _left_with(disk, _frame(**change))

    assert open_log(disk).high_watermark == 10
    assert disk.size_bytes(_PATH) == log.size_bytes


def _left_with(disk: CrashFilesystem, frame: bytes) -> LogTablet:
    """A closed log of ten rows, with `frame` after them."""
    log = open_log(disk)
    store(log, b"x", rows=10)
    log.close()
    _append_raw(disk, log, frame)
    return log


def _append_raw(disk: CrashFilesystem, log: LogTablet, frame: bytes) -> None:
    disk.open(_PATH).write([frame], position=log.size_bytes)


def _frame(**change: int) -> bytes:
    """A frame for offset 10 with its checksum right, whatever was changed in it."""
    names = [
        *("magic", "crc", "payload_bytes", "version", "flags", "zero", "base_offset"),
        *("row_count", "schema_id", "timestamp_us", "writer_id", "sequence", "durable_offset"),
    ]
    header, payload = encode_frame(
        b"payload!",
        base_offset=10,
        row_count=1,
        schema_id=1,
        timestamp_us=1 << 40,
        writer_id=0,
        sequence=0,
        durable_offset=10,
    )
    fields = dict(zip(names, FRAME.unpack(header), strict=True)) | change
    checked = FRAME.pack(*fields.values())[8:] + bytes(payload)
    return struct.pack("<II", fields["magic"], crc32c(checked)) + checked

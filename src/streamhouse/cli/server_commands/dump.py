"""`streamhouse dump`: the contents of a segment file of a log."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from streamhouse.cli.output import json_option, print_json_line
from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.changelog import CHANGE_TYPE_NAMES
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.calendar import python_value
from streamhouse.storage_service.directory.state_file import StateFile, StateIdentity
from streamhouse.storage_service.directory.table_files import read_table
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.segments.segment_scan import SegmentFrame, open_segment

__all__ = ["command"]


@click.command("dump")
@click.argument("segment", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.option("--rows", is_flag=True, help="Also every row, as a line of JSON.")
@click.option("--offset", type=int, default=0, help="Only batches with rows from here on.")
@json_option
def command(*, segment: Path, rows: bool, offset: int, is_json: bool) -> None:
    """Show the batches of SEGMENT, a .log file, one a line.

    Rows need the table's table.json in its place, two directories above. Reads only; the file may
    be of a running service.
    """
    opened = open_segment(segment)
    header = opened.header
    if is_json:
        print_json_line(
            {
                **opened.identity._asdict(),
                "base_offset": header.base_offset,
                "created_us": header.created_timestamp_us,
                "segment_bytes": len(opened.view),
            }
        )
    else:
        click.echo(
            f"{opened.identity}, base offset {header.base_offset},"
            f" created {_time(header.created_timestamp_us)}, {len(opened.view):,} bytes"
        )
    table = _table(segment, opened.identity.table_id) if rows else None
    position = 64
    for frame in opened.frames():
        position = frame.position + 64 + len(frame.payload)
        if frame.end_offset <= offset:
            continue
        click.echo(json.dumps(_document(frame)) if is_json else _line(frame))
        if table is not None:
            for number, row in _rows(frame, table, offset):
                if is_json:
                    row = {"offset": number, "row": row}
                text = json.dumps(row, default=_plain)
                click.echo(text if is_json else f"  {number} {text}")
    trailing_bytes = len(opened.view) - ((position + 7) & ~7)
    if trailing_bytes > 0 and is_json:
        print_json_line({"trailing_bytes": trailing_bytes})
    elif trailing_bytes > 0:
        click.echo(f"{trailing_bytes:,} bytes at the end are no batch")


def _table(segment: Path, table_id: int) -> TableInfo:
    path = segment.absolute().parent.parent / "table.json"
    # The file may come from any service and release.
    identity = StateIdentity(kind="table", service_id="", table_id=table_id)
    file = StateFile(path=path, identity=identity, filesystem=LocalFilesystem(), is_former=True)
    info, _ = read_table(file)
    if info.table_id != table_id:
        raise CorruptDataError(f"{path} is of table {info.table_id}, the segment of {table_id}")
    return info


def _document(frame: SegmentFrame) -> dict[str, Any]:
    return {
        "base_offset": frame.base_offset,
        "end_offset": frame.end_offset,
        "position": frame.position,
        "payload_bytes": len(frame.payload),
        "timestamp_us": frame.timestamp_us,
        "schema_id": frame.schema_id,
        "writer_id": frame.writer_id,
        "sequence": frame.sequence,
        "is_checksum_right": frame.is_checksum_right,
    }


def _line(frame: SegmentFrame) -> str:
    parts = [
        f"offsets {frame.base_offset} to {frame.end_offset}",
        f"at byte {frame.position}",
        f"{len(frame.payload)} bytes",
        _time(frame.timestamp_us),
        f"schema {frame.schema_id}",
    ]
    if frame.writer_id:
        parts.append(f"writer {frame.writer_id:x} sequence {frame.sequence}")
    parts.append("checksum right" if frame.is_checksum_right else "CHECKSUM WRONG")
    return ", ".join(parts)


def _rows(
    frame: SegmentFrame, table: TableInfo, offset: int
) -> Iterable[tuple[int, dict[str, Any]]]:
    if not frame.is_checksum_right:
        return
    try:
        batch = read_stored(
            frame.payload, table, stored_as=frame.schema_id, read_as=frame.schema_id
        )
    except CorruptDataError as error:
        raise CorruptDataError(
            f"the batch at offset {frame.base_offset}: {error.message}"
        ) from error
    names = batch.schema.names
    for number in range(max(offset, frame.base_offset), frame.base_offset + batch.num_rows):
        position = number - frame.base_offset
        row = {
            name: python_value(column[position])
            for name, column in zip(names, batch.columns, strict=True)
        }
        if CHANGE_TYPE_COLUMN in row:
            row[CHANGE_TYPE_COLUMN] = CHANGE_TYPE_NAMES[row[CHANGE_TYPE_COLUMN]]
        yield number, row


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _time(timestamp_us: int) -> str:
    when = datetime.datetime.fromtimestamp(timestamp_us / 1e6, datetime.UTC)
    return when.isoformat(timespec="milliseconds")

"""Writing to a primary key table between the changes of its schema and its transactions."""

from __future__ import annotations

from collections.abc import Sequence

from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import Appended
from streamhouse.storage_service.engine.runtime import clock_us
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.model.changelog import OPERATION_DELETE
from streamhouse.storage_service.model.schema_change import in_current_version
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["write_keys"]


async def write_keys(
    table: KeyTable,
    writes: Sequence[KeyWrite],
    *,
    columns: Sequence[str] | None,
    writer_id: int,
) -> Appended:
    """Store all of `writes` or nothing; durable and visible on return."""
    if not writes:
        return Appended(ranges={}, timestamp_us=clock_us())
    await table.gate.enter()
    try:
        # The schema cannot change from here on.
        if columns is None:
            writes = _rows_of_now(table.info, writes)
        return await table.key_writer.write(writes, columns=columns, writer_id=writer_id)
    finally:
        # A write whose caller has gone goes on: commits wait for it by `settle`.
        table.gate.leave()


def _rows_of_now(info: TableInfo, writes: Sequence[KeyWrite]) -> Sequence[KeyWrite]:
    """Return writes of whole rows with those of earlier schemas as rows of the current one.

    A request that was read before a change of the schema meets its table after it.
    """
    if len(info.schema_versions) == 1:
        return writes
    return [
        write
        if write.operations is not None and (write.operations == OPERATION_DELETE).all()
        else write._replace(rows=in_current_version(info, write.rows))
        for write in writes
    ]

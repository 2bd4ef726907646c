"""A read of one cut of a table from each of its layouts: both must find the same rows."""

from __future__ import annotations

import pyarrow as pa

from streamhouse.connector.options.options import BATCH, as_options, read_options
from streamhouse.connector.plan.scan_schema import output_columns
from streamhouse.connector.plan.union_read import plan_batch_read
from streamhouse.connector.scan.split_reader import read_split
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.model.table_state import TableState

__all__ = ["read_layouts"]


def read_layouts(client: StorageClient, state: TableState, **options: object) -> list[pa.Table]:
    """Read the rows with metadata from the layout the planner takes, and from the batch layout.

    `options` are those of `StreamhouseClient.read`. There is one table while the table has no
    batch layout that can be read.
    """
    path = str(state.table.path)
    given = {"endpoint": client.endpoint, "table": path, **options, "includeMetadata": True}
    read = read_options(as_options(given), use=BATCH)
    output = output_columns(
        state.table.schema, columns=read.columns, include_metadata=True, table=path
    )
    found = []
    for seen in (state, state.in_batch_layout()):
        if seen is not None:
            plan = plan_batch_read(client, seen, read, output)
            batches = [
                batch
                for split in plan.splits
                for batch in read_split(split, plan.context, client=client)
            ]
            found.append(pa.Table.from_batches(batches, schema=plan.context.output_schema))
    return found

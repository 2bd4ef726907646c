"""The format `streamhouse`: which reader or writer Spark gets for a table and its options.

`schema()` asks the service once and keeps the answer: Spark pickles this object forward to the
reader, so a DataFrame is planned on the very cut its schema was taken from. There is no
`pushFilters`: in PySpark 4.3 it returns wrong rows when a relation is used twice; predicates are
an option.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from streamhouse.connector.options.connection import LAKE, client_for, connection_options
from streamhouse.connector.options.options import (
    ALL_USES,
    BATCH,
    STREAM,
    WRITE,
    ReadOptions,
    read_options,
    shape_options,
)
from streamhouse.connector.options.write_options import write_options
from streamhouse.connector.plan.row_form import (
    check_columns,
    shape_columns,
    stream_form,
    table_columns,
)
from streamhouse.connector.plan.scan_schema import check_types
from streamhouse.connector.scan.scan import RowsPiece, ScanColumn, Split
from streamhouse.connector.scan.spark_reader import spark_errors
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import StreamhouseError, UnsupportedError
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.storage_service.model.table_state import TableState

__all__ = ["StreamhouseDataSource"]


class StreamhouseDataSource(DataSource):
    """Spark's entry to Streamhouse: `spark.read.format("streamhouse").load("db.table")`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._state: TableState | None = None

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "streamhouse"

    @spark_errors
    def schema(self) -> StructType:
        """Return the columns of the result, and pin the cut of the table that will be read."""
        shape = shape_options(self._options(BATCH, STREAM))
        if shape.connection.name.is_metadata:
            return from_arrow_schema(_metadata_schema(shape.connection.name.part, shape.columns))
        output = shape_columns(self._pinned().table, shape)
        return from_arrow_schema(pa.schema([column.to_arrow() for column in output]))

    @spark_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        """Plan a batch read of the columns of `schema`."""
        from streamhouse.connector.plan.union_read import plan_batch_read
        from streamhouse.connector.scan.spark_reader import StreamhouseBatchReader

        options = read_options(self._options(BATCH), use=BATCH)
        arrow_schema = to_arrow_schema(schema, timezone="UTC")
        if options.connection.name.is_metadata:
            return _metadata_reader(self._client(), self._pinned(), options, arrow_schema)
        output = self._output(options, arrow_schema)
        plan = plan_batch_read(self._client(), self._pinned(), options, output)
        return StreamhouseBatchReader(plan.context, plan.splits, arrow_schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a reader that follows the table, or one that says why that is not possible."""
        from streamhouse.connector.stream.stream_reader import RefusedStreamReader

        try:
            return self._stream_reader(schema)
        except StreamhouseError as error:
            # Spark reports whatever is raised here as an UnboundLocalError of its own.
            return RefusedStreamReader(error)

    def _stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        from streamhouse.connector.plan.tier_plan import read_context
        from streamhouse.connector.stream.stream_reader import StreamhouseStreamReader

        options = read_options(self._options(STREAM), use=STREAM)
        name = options.connection.name
        if name.is_iceberg:
            return self._append_stream(options, schema)
        if name.is_metadata or name.part == LAKE:
            raise UnsupportedError(
                f"'{name}' cannot be read as a stream; use spark.read, or stream '{name.path}'"
            )
        arrow_schema = to_arrow_schema(schema, timezone="UTC")
        output = self._output(options, arrow_schema)
        # A wrong `where` should fail the start, not the first batch with rows.
        context = read_context(self._pinned(), options, output)
        check_columns(context, stream_form(self._pinned().table, options, output), name)
        return StreamhouseStreamReader(options, self._pinned(), output, arrow_schema)

    def _append_stream(self, options: ReadOptions, schema: StructType) -> DataSourceStreamReader:
        from streamhouse.connector.plan.iceberg_read import source_context
        from streamhouse.connector.stream.append_stream import AppendStreamReader

        arrow_schema = to_arrow_schema(schema, timezone="UTC")
        output = self._output(options, arrow_schema)
        context = source_context(self._client(), self._pinned(), options, output)
        return AppendStreamReader(options, self._pinned().table.schema, context, arrow_schema)

    @spark_errors
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Check the write as a whole, create the table if need be, and return the writer."""
        from streamhouse.connector.write.writers import StreamhouseWriter

        return StreamhouseWriter.planned(
            write_options(self._options(WRITE)), schema, overwrite=overwrite
        )

    @spark_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Do the same for one micro-batch."""
        from streamhouse.connector.write.writers import StreamhouseStreamWriter

        return StreamhouseStreamWriter.planned(
            write_options(self._options(WRITE)), schema, overwrite=overwrite
        )

    def _options(self, *uses: str) -> Mapping[str, str]:
        """Return the options for a use; an attached table adds its own."""
        return self.options

    def _client(self) -> StorageClient:
        connection = connection_options(self._options(*ALL_USES))
        return client_for(connection.endpoint, connection.token)

    def _pinned(self) -> TableState:
        if self._state is None:
            name = connection_options(self._options(*ALL_USES)).name
            if name.is_iceberg:
                self._state = self._pinned_source()
            else:
                self._state = self._client().table_state(str(name.path))
        return self._state

    def _pinned_source(self) -> TableState:
        from streamhouse.connector.plan.iceberg_read import source_state

        shape = shape_options(self._options(BATCH, STREAM))
        return source_state(self._client(), shape.connection.name, columns=shape.columns)

    def _output(self, options: ReadOptions, wanted: pa.Schema) -> tuple[ScanColumn, ...]:
        """Return the table's columns for the schema that Spark, or `.schema(...)`, asks for."""
        table = str(options.connection.name.path)
        output = table_columns(
            self._pinned().table,
            columns=wanted.names,
            include_metadata=False,
            has_change_type=CHANGE_TYPE_COLUMN in wanted.names,
        )
        check_types(output, wanted, table=table)
        return output


def _metadata_schema(part: str, columns: tuple[str, ...] | None) -> pa.Schema:
    from streamhouse.connector.plan.metadata_tables import metadata_schema

    return metadata_schema(part, columns)


def _metadata_reader(
    client: StorageClient, state: TableState, options: ReadOptions, schema: pa.Schema
) -> DataSourceReader:
    from streamhouse.connector.plan.metadata_tables import metadata_rows
    from streamhouse.connector.plan.scan_schema import scan_context
    from streamhouse.connector.scan.spark_reader import StreamhouseBatchReader

    name = options.connection.name
    rows = metadata_rows(client, state, name.part).select(schema.names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    piece = RowsPiece(stream=sink.getvalue().to_pybytes(), row_count=rows.num_rows)
    context = scan_context(state, output=(), where=None, endpoint="", token=None)
    return StreamhouseBatchReader(context, [Split((piece,))], schema)

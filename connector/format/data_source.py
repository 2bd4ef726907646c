"""The format `streamhouse`: chooses Spark's reader or writer for a table and its options.

`schema()` asks the service for the table's columns at `load()`, and Spark pickles this object
forward to the reader. Spark calls `reader()` at each planning of a scan; `reader()` asks again and
takes the cut of the table for the scan. There is no `pushFilters`: in PySpark 4.3 the method
returns wrong rows when a relation is used twice. Predicates are an option.
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
from pyspark.sql.types import StructType

from streamhouse.client import StorageClient
from streamhouse.connector._partition_reader import accept_offered_values, spark_errors
from streamhouse.connector._spark_versions import from_arrow_schema, to_arrow_schema
from streamhouse.connector.format._decimal_numbers import as_numbers, stored_schema
from streamhouse.connector.format._stream_steps import as_spark_calls
from streamhouse.connector.write._write_options import write_options
from streamhouse.core.errors import (
    StreamhouseError,
    TableNotFoundError,
    UnsupportedError,
)
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table_state import TableState
from streamhouse.reading.options.connection import LAKE, client_for, connection_options
from streamhouse.reading.options.options import (
    ALL_USES,
    BATCH,
    PLANNED_COLUMN,
    ROW_COUNT,
    STREAM,
    WRITE,
    ReadOptions,
    read_options,
    shape_options,
)
from streamhouse.reading.plan.row_form import (
    row_request,
    shape_columns,
    stream_request,
    table_columns,
)
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.plan.scan_schema import check_types
from streamhouse.reading.scan.scan import RowsPiece, ScanColumn, Split

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
        """Return the columns of the result."""
        shape = shape_options(self._options(BATCH, STREAM))
        if shape.is_row_count:
            columns = pa.schema([pa.field(ROW_COUNT, pa.int64(), nullable=False)])
        elif shape.connection.name.is_metadata:
            columns = _metadata_schema(shape.connection.name.part, shape.columns)
        else:
            output = shape_columns(self._loaded().table, shape)
            columns = pa.schema([column.to_arrow() for column in output])
        if shape.is_planned_afresh:
            columns = columns.append(pa.field(PLANNED_COLUMN, pa.bool_()))
        spark_schema = from_arrow_schema(columns)
        return as_numbers(spark_schema) if shape.has_numbers else spark_schema

    @spark_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        """Plan a batch read of the columns of `schema`, on the current table."""
        from streamhouse.connector._partition_reader import StreamhouseBatchReader  # noqa: PLC0415 - a worker of Spark loads what it runs
        from streamhouse.reading.plan.batch_read import plan_batch_read  # noqa: PLC0415 - a worker of Spark loads what it runs

        accept_offered_values()
        options = read_options(self._options(BATCH), use=BATCH)
        arrow_schema = to_arrow_schema(schema)
        state = self._current()
        if options.is_row_count:
            return _row_count_reader(self._client(), state, options, arrow_schema)
        if options.connection.name.is_metadata:
            return _metadata_reader(self._client(), state, options, arrow_schema)
        is_loaded = self._state is not None
        output = _output(state, options, stored_schema(schema), is_loaded=is_loaded)
        plan = plan_batch_read(self._client(), state, options, output)
        return StreamhouseBatchReader(plan.context, plan.splits, arrow_schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a reader following the table, or a reader raising the reason against it."""
        from streamhouse.connector.stream._stream_reader import RefusedStreamReader  # noqa: PLC0415 - a worker of Spark loads what it runs

        try:
            return self._stream_reader(schema)
        except StreamhouseError as error:
            # Spark hides an exception raised here behind an UnboundLocalError.
            return as_spark_calls(RefusedStreamReader(error), self.options)

    def _stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        from streamhouse.connector.stream._stream_reader import StreamhouseStreamReader  # noqa: PLC0415 - a worker of Spark loads what it runs

        options = read_options(self._options(STREAM), use=STREAM)
        name = options.connection.name
        if name.is_iceberg:
            return self._append_stream(options, schema)
        if name.is_metadata or name.part == LAKE:
            raise UnsupportedError(
                f"'{name}' cannot be read as a stream; use spark.read, or stream '{name.path}'"
            )
        arrow_schema = to_arrow_schema(schema)
        output = _output(self._loaded(), options, arrow_schema)
        # A wrong `where` should fail the start, not the first batch with rows.
        stream_request(self._loaded().table, options, output)
        reader = StreamhouseStreamReader(options, self._loaded(), output, arrow_schema)
        return as_spark_calls(reader, self.options)

    def _append_stream(self, options: ReadOptions, schema: StructType) -> DataSourceStreamReader:
        from streamhouse.connector.stream._append_stream import AppendStreamReader  # noqa: PLC0415 - a worker of Spark loads what it runs

        arrow_schema = to_arrow_schema(schema)
        output = _output(self._loaded(), options, arrow_schema)
        table = self._loaded().table
        rows = row_request(table, options, output)
        reader = AppendStreamReader(options, table, rows, arrow_schema)
        return as_spark_calls(reader, self.options)

    @spark_errors
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Check the write as a whole, create the table if needed, and return the writer."""
        from streamhouse.connector.write._writers import StreamhouseWriter  # noqa: PLC0415 - a worker of Spark loads what it runs

        return StreamhouseWriter.planned(
            write_options(self._options(WRITE)), schema, overwrite=overwrite
        )

    @spark_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Do the work of `writer` for one micro-batch."""
        from streamhouse.connector.write._writers import StreamhouseStreamWriter  # noqa: PLC0415 - a worker of Spark loads what it runs

        return StreamhouseStreamWriter.planned(
            write_options(self._options(WRITE)), schema, overwrite=overwrite
        )

    def _options(self, *uses: str) -> Mapping[str, str]:
        """Return the options for a use; an attached table adds options."""
        return self.options

    def _client(self) -> StorageClient:
        connection = connection_options(self._options(*ALL_USES))
        return client_for(connection.endpoint, connection.token)

    def _loaded(self) -> TableState:
        """Return the table's state at `load()`."""
        if self._state is None:
            self._state = self._fetch_state()
        return self._state

    def _current(self) -> TableState:
        """Return the table's current state; raise if a new table has the name since `load()`."""
        loaded, current = self._state, self._fetch_state()
        if loaded is not None and loaded.table.table_id != current.table.table_id:
            raise TableNotFoundError(
                f"table '{current.table.path}' was dropped and made again after this DataFrame was"
                " loaded; load it again"
            )
        return current

    def _fetch_state(self) -> TableState:
        name = connection_options(self._options(*ALL_USES)).name
        if name.is_iceberg:
            return self._fetch_source_state()
        return self._client().table_state(str(name.path))

    def _fetch_source_state(self) -> TableState:
        from streamhouse.reading.plan.iceberg_read import source_state  # noqa: PLC0415 - a worker of Spark loads what it runs

        shape = shape_options(self._options(BATCH, STREAM))
        return source_state(self._client(), shape.connection.name, columns=shape.columns)


def _output(
    state: TableState, options: ReadOptions, schema: pa.Schema, *, is_loaded: bool = False
) -> tuple[ScanColumn, ...]:
    """Return the table's columns for the schema that Spark, or `.schema(...)`, requests."""
    schema = _of_table(schema)
    output = table_columns(
        state.table,
        columns=schema.names,
        include_metadata=False,
        has_change_type=CHANGE_TYPE_COLUMN in schema.names,
        is_spark_form=options.change_options is not None,
    )
    table = str(options.connection.name.path)
    check_types(output, schema, table=table, is_loaded=is_loaded)
    return output


def _of_table(schema: pa.Schema) -> pa.Schema:
    """Return the table's columns in the schema."""
    return pa.schema([field for field in schema if field.name != PLANNED_COLUMN])


def _row_count_reader(
    client: StorageClient, state: TableState, options: ReadOptions, schema: pa.Schema
) -> DataSourceReader:
    from streamhouse.connector._partition_reader import RowCountReader  # noqa: PLC0415 - a worker of Spark loads what it runs
    from streamhouse.reading.plan.row_count import plan_row_count  # noqa: PLC0415 - a worker of Spark loads what it runs

    plan = plan_row_count(client, state, options)
    return RowCountReader(plan.context, plan.splits, schema, row_count=plan.row_count)


def _metadata_schema(part: str, columns: tuple[str, ...] | None) -> pa.Schema:
    from streamhouse.reading.plan.metadata_tables import metadata_schema  # noqa: PLC0415 - a worker of Spark loads what it runs

    return metadata_schema(part, columns)


def _metadata_reader(
    client: StorageClient, state: TableState, options: ReadOptions, schema: pa.Schema
) -> DataSourceReader:
    from streamhouse.connector._partition_reader import StreamhouseBatchReader  # noqa: PLC0415 - a worker of Spark loads what it runs
    from streamhouse.reading.plan.metadata_tables import metadata_rows  # noqa: PLC0415 - a worker of Spark loads what it runs
    from streamhouse.reading.plan.scan_schema import scan_context  # noqa: PLC0415 - a worker of Spark loads what it runs

    name = options.connection.name
    rows = metadata_rows(client, state, name.part).select(_of_table(schema).names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    piece = RowsPiece(stream=sink.getvalue().to_pybytes(), row_count=rows.num_rows)
    context = scan_context(state.table, RowRequest())
    return StreamhouseBatchReader(context, [Split((piece,))], schema)

"""`streamhouse load`: the rows of files into a table, all or none."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click

from streamhouse.cli.loading.column_types import schema_of_files
from streamhouse.cli.loading.row_files import (
    FORMATS,
    TAB,
    FileFormat,
    FileRows,
    RowFile,
    format_of,
)
from streamhouse.cli.output import json_option, print_json
from streamhouse.cli.progress_bar import ProgressBar, quiet_option
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import table_argument
from streamhouse.cli.table_options import TableOptions, columns_text, table_options
from streamhouse.client import StorageClient, Transaction
from streamhouse.core.errors import NotFoundError, SchemaMismatchError, TableExistsError
from streamhouse.core.model.table import TableInfo

__all__ = ["command"]

# The words of a refusal that name the table, and the row within the request.
_OWN_WORDS: Final = re.compile(r"^table '[^']*'[:,] (row \d+ ?)?")


def _delimiter(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    """Return the character; in a shell a tab is hard to type."""
    if text in ("tab", "\\t", TAB):
        return TAB
    if text is not None and (len(text) != 1 or text == '"' or not " " <= text <= "~"):
        raise click.BadParameter(f"{text!r} is not one ASCII character, other than a quote")
    return text


@click.command("load")
@table_argument("path")
@click.argument(
    "paths",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(FORMATS),
    help="Default: as the file's name says; .gz, .zst, .bz2 and .lz4 are decompressed.",
)
@click.option(
    "--delimiter",
    metavar="CHARACTER",
    callback=_delimiter,
    help="The character between the fields of CSV, or the word tab; default: a comma.",
)
@click.option("--create", is_flag=True, help="Make the table, with the types of the files.")
@table_options
@endpoint_option
@token_file_option
@quiet_option
@json_option
def command(
    *,
    path: str,
    paths: tuple[Path, ...],
    file_format: FileFormat | None,
    delimiter: str | None,
    create: bool,
    options: TableOptions,
    endpoint: str | None,
    token_file: Path | None,
    is_quiet: bool,
    is_json: bool,
) -> None:
    """Load the rows of CSV, NDJSON or Parquet files into TABLE, in one transaction.

    \b
    streamhouse load shop.orders orders.csv
    streamhouse load shop.stock stock.parquet --create --primary-key item

    A row that does not fit is named, with its file, line and column, and nothing is written. Rows
    of a table with a primary key are upserted. With --create and other options of a new table the
    files are read twice: once for the types.
    """
    flags = options.flags(click.get_current_context().command)
    if flags and not create:
        raise click.UsageError(f"{flags[0]} is of a new table: give --create with it")
    files = [RowFile(file, file_format or format_of(file), delimiter) for file in paths]
    if len({file.file_format for file in files}) > 1:
        raise click.UsageError("the files have several formats: load each format by a command")
    if delimiter and files[0].file_format != "csv":
        raise click.UsageError("--delimiter is of CSV, and the files have another format")
    began_s = time.monotonic()
    with (
        open_client(endpoint, token=read_token(token_file)) as client,
        ProgressBar("loading", is_quiet=is_quiet) as progress,
    ):
        progress.expect(sum(file.size for file in files) * (2 if create else 1))
        with _table(client, path, files, options if create else None, progress) as table:
            row_count = _load(client, table, files, progress)
    seconds = time.monotonic() - began_s
    if is_json:
        document = {"table": str(table.path), "is_created": create, "row_count": row_count}
        print_json({**document, "files": [str(file) for file in paths]})
        return
    if create:
        click.echo(f"created {table.path}: {columns_text(table)}")
    what = f"{len(files)} files" if len(files) > 1 else str(paths[0])
    rate = row_count / max(seconds, 1e-3)
    rows = f"{row_count:,} row{'' if row_count == 1 else 's'}"
    click.echo(f"{rows} of {what} into {table.path}, {seconds:.1f} s, {rate:,.0f} rows/s")


@contextlib.contextmanager
def _table(
    client: StorageClient,
    path: str,
    files: Sequence[RowFile],
    options: TableOptions | None,
    progress: ProgressBar,
) -> Iterator[TableInfo]:
    """Yield the table; with options it is a new table, dropped again if the block fails."""
    if options is None:
        yield client.describe_table(path)
        return
    with contextlib.suppress(NotFoundError):
        existing = client.describe_table(path)
        raise TableExistsError(
            f"table '{existing.path}' exists: leave out --create, and its columns take the rows"
        )
    table = client.create_table(path, schema_of_files(files, progress.done), **options.arguments())
    try:
        yield table
    except BaseException:
        client.drop_table(str(table.path), if_exists=True)
        raise


def _load(
    client: StorageClient, table: TableInfo, files: Sequence[RowFile], progress: ProgressBar
) -> int:
    operation = "upsert" if table.is_primary_key_table else "append"
    row_count, parts = 0, []
    with client.begin_transaction(str(table.path), operation=operation) as transaction:
        for file in files:
            for part in file.rows(table, progress.done):
                parts.append(_staged(transaction, part, what=file.what(table)))
                row_count += part.rows.num_rows
        transaction.commit(parts)
    return row_count


def _staged(transaction: Transaction, part: FileRows, *, what: str) -> str:
    """Stage rows; a refusal names the place of the first row that is refused, as a constraint does.

    The service counts rows within a bucket, so the row is looked for by halves.
    """
    try:
        return transaction.stage(part.rows)
    except SchemaMismatchError as error:
        refusal = error
    first, end = 0, part.rows.num_rows
    while end - first > 1:
        middle = (first + end) // 2
        try:
            transaction.stage(part.rows.slice(first, middle - first))
            first = middle
        except SchemaMismatchError as error:
            refusal, end = error, middle
    reason = _OWN_WORDS.sub("", refusal.message)
    raise type(refusal)(f"{what}: {part.place(first)} {reason}") from refusal

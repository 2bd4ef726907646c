"""The options of commands that make a table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from streamhouse.cli.settings import flag_of
from streamhouse.core.model.lake.facts import parse_properties
from streamhouse.core.model.schema import type_name
from streamhouse.core.model.table import TableInfo

__all__ = ["TableOptions", "columns_text", "table_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """The values of the options, as texts."""

    primary_key: str
    bucket_num: int | None
    bucket_key: str
    partitioned_by: str
    properties: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `client.create_table`, without those that have no value."""
        from streamhouse.reading.options.name_lists import parse_expressions, parse_names  # noqa: PLC0415 - `--help` does not wait for pyarrow

        arguments: dict[str, Any] = {}
        if self.primary_key:
            arguments["primary_key"] = parse_names(self.primary_key, name="--primary-key")
        if self.bucket_num:
            arguments["bucket_count"] = self.bucket_num
        if self.bucket_key:
            arguments["bucket_key"] = parse_names(self.bucket_key, name="--bucket-key")
        if self.partitioned_by:
            arguments["partitioned_by"] = parse_expressions(
                self.partitioned_by, name="--partitioned-by"
            )
        if self.properties:
            arguments["properties"] = parse_properties(self.properties, name="--property")
        return arguments

    def flags(self, command: click.Command) -> list[str]:
        """Return the flags of the command's options that have a value."""
        names = {f.name for f in dataclasses.fields(self) if getattr(self, f.name)}
        return [
            flag_of(option)
            for option in command.params
            if isinstance(option, click.Option) and option.name in names
        ]


def columns_text(table: TableInfo) -> str:
    """Return a table's columns and key on a line, as the DDL has them."""
    columns = ", ".join(
        f"{column.name} {type_name(column.type)}{'' if column.nullable else ' not null'}"
        for column in table.schema.columns
    )
    key = ", ".join(table.descriptor.primary_key)
    return f"{columns}; primary key {key}" if key else columns


def table_options(command: _Command) -> Callable[..., Any]:
    """Give a command the options, as its argument `options`."""

    @functools.wraps(command)
    def with_options(
        *args: Any,
        primary_key: str,
        bucket_num: int | None,
        bucket_key: str,
        partitioned_by: str,
        properties: tuple[str, ...],
        **more: Any,
    ) -> Any:
        options = TableOptions(
            primary_key=primary_key,
            bucket_num=bucket_num,
            bucket_key=bucket_key,
            partitioned_by=partitioned_by,
            properties=properties,
        )
        return command(*args, options=options, **more)

    decorated: Callable[..., Any] = with_options
    for option in reversed(
        (
            click.option(
                "--primary-key",
                default="",
                metavar="COLUMNS",
                help="As in a,b: rows are upserted by the key.",
            ),
            click.option("--bucket-num", type=click.IntRange(min=1), help="Default: 1."),
            click.option(
                "--bucket-key", default="", metavar="COLUMNS", help="Equal rows share a bucket."
            ),
            click.option(
                "--partitioned-by",
                default="",
                metavar="FIELDS",
                help="Lake partitioning, as in 'region, day(at)'.",
            ),
            click.option(
                "--property", "properties", multiple=True, metavar="KEY=VALUE", help="Of the table."
            ),
        )
    ):
        decorated = option(decorated)
    return decorated

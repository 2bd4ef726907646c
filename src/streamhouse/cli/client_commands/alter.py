"""`streamhouse alter`: change the columns of a table, or its properties."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import click

from streamhouse.cli.output import json_option, print_json
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import table_argument
from streamhouse.cli.table_options import columns_text
from streamhouse.core.model.lake.facts import parse_properties
from streamhouse.core.model.table import TableInfo

__all__ = ["command"]

_NAME_PART: Final = re.compile(r"`([^`]+)`|([^`.\s]+)")
_NEW_COLUMN: Final = re.compile(
    r"(?P<path>(?:`[^`]+`|[^`.\s]+)(?:\.(?:`[^`]+`|[^`.\s]+))*)(?P<type>(?:\s.*)?)"
)
_OF_ADDED: Final = ("default", "after", "aggregate")


@click.command("alter")
@table_argument("path", metavar="PATH")
@click.option("--add", metavar='"NAME TYPE"', help="Add a nullable column; a.b a field in one.")
@click.option("--default", metavar="VALUE", help="With --add: its value in earlier rows.")
@click.option("--after", metavar="COLUMN", help="With --add: place it after this column.")
@click.option("--first", is_flag=True, help="With --add: place it first.")
@click.option("--aggregate", metavar="FUNCTION", help="With --add: how its values are merged.")
@click.option("--rename", nargs=2, metavar="OLD NEW", help="Rename a column.")
@click.option(
    "--widen", nargs=2, metavar="COLUMN TYPE", help="Give a column, or a.b in one, a larger type."
)
@click.option("--drop-not-null", metavar="COLUMN", help="Let a column be null.")
@click.option("--comment", nargs=2, metavar="COLUMN TEXT", help="Describe a column.")
@click.option("--drop", metavar="COLUMN", help="Hide a column for good; asks first.")
@click.option("--yes", is_flag=True, help="With --drop: do not ask.")
@click.option("--set", "updates", multiple=True, metavar="KEY=VALUE", help="Set a property.")
@click.option("--unset", "removals", multiple=True, metavar="KEY", help="Remove a property.")
@endpoint_option
@token_file_option
@json_option
def command(
    path: str,
    endpoint: str | None,
    token_file: Path | None,
    yes: bool,
    is_json: bool,
    updates: tuple[str, ...],
    removals: tuple[str, ...],
    **options: Any,
) -> None:
    """Change the schema or the properties of the table at PATH: all the changes, or none."""
    if updates or removals:
        table = _alter_properties(path, endpoint, token_file, updates, removals, options)
        properties = sorted(table.descriptor.properties.items())
        shown = ", ".join(f"{key} = {value}" for key, value in properties)
        _print(table, f"{table.path}, properties: {shown or 'none'}", is_json=is_json)
        return
    changes = _changes(options)
    if options["drop"] and not yes:
        click.confirm(
            f"Hide column '{options['drop']}' of {path} for good?", abort=True, err=is_json
        )
    with open_client(endpoint, token=read_token(token_file)) as client:
        table = client.alter_schema(path, changes)
    text = f"{table.path}, schema version {table.schema_id}: {columns_text(table)}"
    _print(table, text, is_json=is_json)


def _print(table: TableInfo, text: str, *, is_json: bool) -> None:
    if is_json:
        print_json(table.to_json())
    else:
        click.echo(text)


def _alter_properties(
    path: str,
    endpoint: str | None,
    token_file: Path | None,
    updates: tuple[str, ...],
    removals: tuple[str, ...],
    options: dict[str, Any],
) -> TableInfo:
    if any(options.values()):
        raise click.UsageError("change properties and columns one after the other")
    pairs = {k.strip(): v.strip() for k, v in parse_properties(updates, name="--set").items()}
    with open_client(endpoint, token=read_token(token_file)) as client:
        return client.alter_properties(path, updates=pairs, removals=removals)


def _column_to_add(text: str) -> tuple[list[str], str]:
    """Return the path and the type of `name type`; a dot leads into a column, unless in backticks.

    Raises `click.UsageError` for any other text.
    """
    match = _NEW_COLUMN.fullmatch(text.strip())
    if match is None:
        raise click.UsageError(f"--add '{text}' must be a name and a type, as in 'unit string'")
    return _path(match["path"]), match["type"].strip()


def _path(text: str) -> list[str]:
    return [part[0] or part[1] for part in _NAME_PART.findall(text)]


def _changes(options: dict[str, Any]) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = []
    for verb in ("rename", "widen", "comment"):
        if options[verb]:
            column, to = options[verb]
            changes.append({verb: _path(column) if verb == "widen" else column, "to": to})
    if options["drop_not_null"]:
        changes.append({"drop_not_null": options["drop_not_null"]})
    if options["add"]:
        names, data_type = _column_to_add(options["add"])
        added = {"add": names, "type": data_type, "first": options["first"]}
        more = {key: options[key] for key in _OF_ADDED if options[key] is not None}
        changes.append(added | more)
    elif options["first"] or any(options[key] is not None for key in _OF_ADDED):
        raise click.UsageError(
            "--default, --after, --first and --aggregate are of the column of --add"
        )
    if options["drop"]:
        changes.append({"drop": options["drop"], "confirm": options["drop"]})
    if not changes:
        raise click.UsageError("nothing to change: see streamhouse alter --help")
    return changes

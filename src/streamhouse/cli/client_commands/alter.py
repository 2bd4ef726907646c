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
from streamhouse.core.model.table import TableInfo

__all__ = ["command"]

_NAME_PART: Final = re.compile(r"`([^`]+)`|([^`.\s]+)")
_NEW_COLUMN: Final = re.compile(
    r"(?P<path>(?:`[^`]+`|[^`.\s]+)(?:\.(?:`[^`]+`|[^`.\s]+))*)(?P<type>(?:\s.*)?)"
)


@click.command("alter")
@click.argument("path")
@click.option("--add", metavar='"NAME TYPE"', help="Add a nullable column; a.b a field in one.")
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
    **given: Any,
) -> None:
    """Change the schema of the table at PATH, or its properties: all that is given, or nothing."""
    if updates or removals:
        table = _alter_properties(path, endpoint, token_file, updates, removals, given)
        properties = sorted(table.descriptor.properties.items())
        shown = ", ".join(f"{key} = {value}" for key, value in properties)
        _print(table, f"{table.path}, properties: {shown or 'none'}", is_json=is_json)
        return
    changes = _changes(given)
    if given["drop"] and not yes:
        click.confirm(f"Hide column '{given['drop']}' of {path} for good?", abort=True, err=is_json)
    with open_client(endpoint, token=read_token(token_file)) as client:
        table = client.alter_schema(path, changes)
    columns = ", ".join(f"{column.name} {column.type}" for column in table.schema.columns)
    _print(table, f"{table.path}, schema version {table.schema_id}: {columns}", is_json=is_json)


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
    given: dict[str, Any],
) -> TableInfo:
    if any(given.values()):
        raise click.UsageError("change properties and columns one after the other")
    pairs = {}
    for text in updates:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--set '{text}' must be KEY=VALUE")
        pairs[key.strip()] = value.strip()
    with open_client(endpoint, token=read_token(token_file)) as client:
        return client.alter_properties(path, updates=pairs, removals=removals)


def _added(text: str) -> tuple[list[str], str]:
    """Return the path and the type of `name type`; a dot leads into a column, unless in backticks.

    Raises `click.UsageError` for what is neither.
    """
    found = _NEW_COLUMN.fullmatch(text.strip())
    if found is None:
        raise click.UsageError(f"--add '{text}' must be a name and a type, as in 'unit string'")
    return _path(found["path"]), found["type"].strip()


def _path(text: str) -> list[str]:
    return [part[0] or part[1] for part in _NAME_PART.findall(text)]


def _changes(given: dict[str, Any]) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = []
    for verb in ("rename", "widen", "comment"):
        if given[verb]:
            column, to = given[verb]
            changes.append({verb: _path(column) if verb == "widen" else column, "to": to})
    if given["drop_not_null"]:
        changes.append({"drop_not_null": given["drop_not_null"]})
    if given["add"]:
        names, data_type = _added(given["add"])
        added = {"add": names, "type": data_type, "first": given["first"]}
        placed = {key: given[key] for key in ("after", "aggregate") if given[key]}
        changes.append(added | placed)
    elif given["after"] or given["first"] or given["aggregate"]:
        raise click.UsageError("--after, --first and --aggregate are of the column of --add")
    if given["drop"]:
        changes.append({"drop": given["drop"], "confirm": given["drop"]})
    if not changes:
        raise click.UsageError("nothing to change: see streamhouse alter --help")
    return changes

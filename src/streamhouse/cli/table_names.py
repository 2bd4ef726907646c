"""The names of tables as arguments: a shell completes the names from the running service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from streamhouse.cli.service_options import open_client, read_token
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import DEFAULT_DATABASE

__all__ = ["DATABASE", "TABLE", "columns_option", "table_argument"]

# A shell waits for the completion, so a service that is away costs little.
_COMPLETION_S: Final = 1.0

_Command = TypeVar("_Command", bound=Callable[..., Any])

if TYPE_CHECKING:
    _TextType = click.ParamType[str]
else:
    # Not generic in older versions of click.
    _TextType = click.ParamType


class _TableName(_TextType):
    """The path of a table; of a new table only the database is completed."""

    name = "table"

    def __init__(self, *, is_new: bool = False) -> None:
        self._is_new = is_new

    def shell_complete(
        self, ctx: click.Context, _: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names with the prefix; none if the service does not answer soon."""
        names = _listed(ctx, is_database=self._is_new)
        if self._is_new:
            names = [f"{name}." for name in names]
        else:
            prefix = f"{DEFAULT_DATABASE}."
            names += [n.removeprefix(prefix) for n in names if n.startswith(prefix)]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class _DatabaseName(_TextType):
    name = "database"

    def shell_complete(
        self, ctx: click.Context, _: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the databases with the prefix."""
        names = _listed(ctx, is_database=True)
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


TABLE: Final = _TableName()
DATABASE: Final = _DatabaseName()
_NEW_TABLE: Final = _TableName(is_new=True)


def table_argument(
    name: str, *, metavar: str = "TABLE", is_new: bool = False, **more: Any
) -> Callable[[_Command], _Command]:
    """Return the argument with a table's path, which a shell completes."""
    return click.argument(name, metavar=metavar, type=_NEW_TABLE if is_new else TABLE, **more)


def _listed(ctx: click.Context, *, is_database: bool) -> list[str]:
    token_file: Path | None = ctx.params.get("token_file")
    try:
        token = read_token(token_file)
        with open_client(
            ctx.params.get("endpoint"), token=token, first_contact_s=_COMPLETION_S
        ) as client:
            return client.list_databases() if is_database else client.list_tables()
    except (StreamhouseError, OSError):
        return []


def _column_names(_: click.Context, __: click.Parameter, text: str | None) -> list[str] | None:
    if text is None:
        return None
    from streamhouse.reading.options.name_lists import parse_names  # noqa: PLC0415 - `--help` does not wait for pyarrow

    return [*parse_names(text, name="--columns")]


columns_option = click.option(
    "--columns", metavar="COLUMNS", callback=_column_names, help="Only these columns, as in a,b."
)

"""The way from a statement that changes rows to the room that executes the statement.

`MERGE`, `UPDATE`, `DELETE` and `TRUNCATE TABLE` do what `streamhouse.Table` does, in a room above
this one. The room is imported at the first such statement.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.connector.names._attached_names import AttachedName
from streamhouse.core.errors import InvalidRequestError, UnsupportedError
from streamhouse.reading.options.options import FORMAT, WRITE, applicable

__all__ = ["Arguments", "change_options", "change_rows"]

_EXECUTION: Final = "streamhouse.connector.changes._row_statements"
_TABLE_OPTIONS: Final = ("endpoint", "token", "tls.ca", "transaction.timeout")
_CALL_OPTIONS: Final = (*_TABLE_OPTIONS, "app.id", "app.version")
_SHOWN_ROWS: Final = (
    "asofsnapshot",
    "asoftimestamp",
    "columns",
    "endingoffsets",
    "endingtimestamp",
    "includemetadata",
    "startingoffsets",
    "startingtimestamp",
    "where",
)
"""Options by which a name shows other rows or columns than the table has."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of `spark.sql` beside the text: parameters, and values of `{...}`."""

    args: Mapping[str, Any] | Sequence[Any] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Sequence[Any], options: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a call of `spark.sql`."""
        values = {key: value for key, value in options.items() if key not in _TEXTS}
        args = arguments[1] if len(arguments) > 1 else values.pop("args", None)
        return cls(args, values)


_TEXTS: Final = ("sqlQuery", "query")


def change_options(name: AttachedName) -> dict[str, str]:
    """Return the options of a change through an attached name.

    Raise `UnsupportedError` for a name that does not show the table as it is.
    """
    for key, text in name.options.items():
        if key.lower() in _SHOWN_ROWS:
            raise UnsupportedError(
                f"the name '{name.sql_name}' has the option {key} = '{text}', and so shows other"
                f" rows than table '{name.connection.name}' has: change the table by a name without"
                " the option, as in"
                f" streamhouse.attach(spark, '{name.connection.name}', 'name')"
            )
    return {
        key: text
        for key, text in applicable(name.options, uses=(WRITE,)).items()
        if key.lower() in _TABLE_OPTIONS
    }


def change_rows(
    spark: Any, text: str, arguments: Arguments, *, table: str, options: Mapping[str, str]
) -> Any:
    """Execute a statement that changes rows of a table, once; return its DataFrame of counts.

    `options` are the connection's, and those of `Table`'s calls.
    """
    for key in options:
        if key.lower() not in _CALL_OPTIONS:
            raise InvalidRequestError(
                f"option '{key}' has no meaning for a change of rows of '{table}' (only"
                f" {', '.join(_CALL_OPTIONS)}); give options of a read in the source, as in FROM"
                f" name WITH ({key} = ...), or USING {{source}} of a DataFrame of format {FORMAT}"
            )
    execution = importlib.import_module(_EXECUTION)
    return execution.change_rows(spark, text, arguments, table=table, options=options)

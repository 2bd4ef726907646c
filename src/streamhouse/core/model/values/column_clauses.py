"""Clauses of a column or a table in SQL that a table does not have, refused by name.

A clause that is ignored would lose what its author means.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamhouse.core.errors import UnsupportedError

__all__ = ["refused_clause"]

_CLAUSES = {
    "DEFAULT": "a default is fixed when a column is added to a table, by ALTER TABLE ... ADD COLUMN"
    " ... DEFAULT, add_column(..., default=...) or `streamhouse alter TABLE --add ... --default"
    " ...`, for the rows from before; in new rows write the value, in SQL with coalesce(column,"
    " value)",
    "IDENTITY": "a table gives rows no numbers: write a key of the source, uuid() or a hash of the"
    " row; each row has an address for life, (__bucket, __offset)",
    "GENERATED": "a table computes no columns: compute the column in the write, or in a view; for"
    " the lake's partitioning use a transform, as partitioned.by = day(at)",
    "PRIMARY": "name the key's columns in the option primary.key, as OPTIONS (primary.key 'id'),"
    " or in create_table(..., primary_key=...)",
    "UNIQUE": "only the primary key is unique: name the columns in the option primary.key",
    "FOREIGN": "rows are not checked against other tables; join them",
    "REFERENCES": "rows are not checked against other tables; join them",
    "CHECK": "write the constraint behind the columns, as CONSTRAINT name CHECK (condition), or as"
    " the property table.check.name",
    "CONSTRAINT": "write the constraint behind the columns, as CONSTRAINT name CHECK (condition),"
    " or as the property table.check.name",
    "MASK": "values are not masked; grant views instead",
}


def refused_clause(words: Sequence[str], *, where: str) -> UnsupportedError | None:
    """Return the error for the first clause among `words`, in upper case; None without a clause.

    `words` come behind the type of a column, or begin a constraint of a table.
    """
    for word in words:
        if word in _CLAUSES:
            is_identity = word == "GENERATED" and "IDENTITY" in words
            shown = "GENERATED AS IDENTITY" if is_identity else word
            advice = _CLAUSES["IDENTITY" if is_identity else word]
            return UnsupportedError(f"{where}: {shown} is not supported: {advice}")
    return None

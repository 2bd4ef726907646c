"""Constraints in SQL: `CONSTRAINT name CHECK (condition)` as a table's properties.

The conditions are in the language of `where`, which the service parses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamhouse.connector.names._table_statement import Token, unquoted
from streamhouse.core.errors import InvalidRequestError, UnsupportedError
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.checks import check_property, existing_property
from streamhouse.core.model.values.column_clauses import refused_clause

__all__ = [
    "AddedConstraint",
    "DroppedConstraint",
    "constraint_of",
    "dropped_constraint",
    "is_constraint",
    "listed",
    "refuse_clauses",
]

_FORM = "CONSTRAINT name CHECK (condition) [NOT ENFORCED FOR EXISTING]"
_FIRST_WORDS = ("CONSTRAINT", "CHECK", "PRIMARY", "UNIQUE", "FOREIGN")


@dataclass(frozen=True, slots=True)
class AddedConstraint:
    """A constraint to add; `is_for_new_rows` leaves the rows of the table alone."""

    name: str
    predicate: str
    is_for_new_rows: bool

    def properties(self) -> dict[str, str]:
        """Return the constraint as properties of a table."""
        properties = {check_property(self.name): self.predicate}
        if self.is_for_new_rows:
            properties[existing_property(self.name)] = "not enforced"
        return properties

    def check_new(self, info: TableInfo) -> None:
        """Raise `InvalidRequestError` if the table has a constraint of the name."""
        if self.name.lower() in {check.name.lower() for check in info.descriptor.checks}:
            raise InvalidRequestError(
                f"table '{info.path}' has a constraint '{self.name}' already; ALTER TABLE ... DROP"
                f" CONSTRAINT {self.name} first"
            )


@dataclass(frozen=True, slots=True)
class DroppedConstraint:
    """A constraint to drop."""

    name: str
    if_exists: bool

    def removals(self, info: TableInfo) -> tuple[str, ...]:
        """Return the properties to remove; none for an absent constraint with `IF EXISTS`."""
        names = [check.name for check in info.descriptor.checks]
        for name in names:
            if name.lower() == self.name.lower():
                return (check_property(name),)
        if self.if_exists:
            return ()
        has = f"it has {', '.join(sorted(names))}" if names else "it has none"
        raise InvalidRequestError(f"table '{info.path}' has no constraint '{self.name}'; {has}")


def listed(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Yield the parts of a list `(a, b)` or `a, b`; types and conditions may have commas."""
    if tokens and tokens[0].text == "(" and tokens[-1].text == ")":
        tokens = tokens[1:-1]
    part: list[Token] = []
    depth = angles = 0
    for token in tokens:
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        # In parentheses `<` compares.
        angles += {"<": 1, ">": -1}.get(token.text, 0) if not depth else 0
        if token.text == "," and not depth and not angles:
            yield part
            part = []
        else:
            part.append(token)
    if part:
        yield part


def is_constraint(part: Sequence[Token]) -> bool:
    """Whether a part of a list of columns is a constraint, not a column with such a name."""
    words = [token.word for token in part[:3]]
    if not words or words[0] not in _FIRST_WORDS:
        return False
    return (words[0] == "CONSTRAINT" and len(words) == 3) or words[1:2] in (["("], ["KEY"])


def constraint_of(part: Sequence[Token], *, text: str, where: str) -> AddedConstraint:
    """Return the constraint that `CONSTRAINT name CHECK (condition)` says."""
    words = [token.word for token in part]
    begin = 2 if words[:1] == ["CONSTRAINT"] else 0
    kind = words[begin : begin + 1]
    if kind != ["CHECK"] or not begin:
        refusal = refused_clause([*kind, "CONSTRAINT"], where=where)
        assert refusal is not None, "CONSTRAINT is a clause"
        raise refusal
    end = _closing(part, begin + 1)
    rest = " ".join(words[end + 1 :])
    if end < begin + 2 or rest not in ("", "ENFORCED", "NOT ENFORCED FOR EXISTING"):
        raise UnsupportedError(
            f"{where}: write {_FORM}; a constraint is enforced, for every new row"
        )
    return AddedConstraint(
        name=unquoted(part[1]),
        predicate=text[part[begin + 1].end : part[end].start].strip(),
        is_for_new_rows=rest.startswith("NOT"),
    )


def dropped_constraint(tokens: Sequence[Token], *, where: str) -> DroppedConstraint:
    """Return what `[IF EXISTS] name` says, behind `DROP CONSTRAINT`."""
    if_exists = [token.word for token in tokens[:2]] == ["IF", "EXISTS"]
    names = tokens[2:] if if_exists else tokens
    if len(names) != 1:
        raise UnsupportedError(f"{where}: write DROP CONSTRAINT [IF EXISTS] name")
    return DroppedConstraint(unquoted(names[0]), if_exists)


def refuse_clauses(column: Sequence[Token], *, where: str) -> None:
    """Raise `UnsupportedError` for a clause behind a column's type which a table does not have."""
    words: list[str] = []
    depth = 0
    for token in column[1:]:
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(token.text, 0)
        if not depth and token.text[0] != "`":
            words.append(token.word)
    name = unquoted(column[0]) if column else ""
    refusal = refused_clause(words, where=f"{where}, column '{name}'")
    if refusal is not None:
        raise refusal


def _closing(part: Sequence[Token], at: int) -> int:
    """Return the position of the parenthesis that closes the parenthesis at a position, or -1."""
    depth = 0
    for position in range(at, len(part)):
        depth += {"(": 1, ")": -1}.get(part[position].text, 0)
        if not depth:
            return position
    return -1

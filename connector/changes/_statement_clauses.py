"""The clauses of `MERGE`, `UPDATE`, `DELETE` and `TRUNCATE TABLE` as text, for calls of `Table`.

Only the words between expressions are read. Conditions, values and the source stay the text of the
statement, for Spark's own parser: an expression in parentheses, so that no text around it is lost.
A clause that `Table` does not have is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from streamhouse.connector.changes._expressions import key_equalities
from streamhouse.connector.names._table_statement import (
    TableStatement,
    Token,
    name_at,
    tokens_of,
)
from streamhouse.core.errors import InvalidRequestError, UnsupportedError
from streamhouse.reading.options.quoted_names import quoted

__all__ = [
    "MergeText",
    "RowText",
    "WhenText",
    "check_truncation",
    "merge_of",
    "rows_of",
    "subqueries_of",
]

MATCHED: Final = "matched"
NOT_MATCHED: Final = "not_matched"
NOT_MATCHED_BY_SOURCE: Final = "not_matched_by_source"
_QUERY_WORDS: Final = ("FROM", "SELECT", "TABLE", "VALUES", "WITH")
_ELSEWHERE: Final = {
    ("UPDATE", "FROM"): "MERGE INTO ... WHEN MATCHED THEN UPDATE takes values of another table",
    ("DELETE", "USING"): "MERGE INTO ... WHEN MATCHED THEN DELETE, or WHERE ... IN (SELECT ...),"
    " deletes the rows of another table",
    ("MERGE", "CHANGES"): "USING takes CHANGES of an attached name, or of 'database.table' in"
    " streamhouse.sql, with bounds that are numbers or texts",
    ("MERGE", "SCHEMA"): "a merge adds no columns: ALTER TABLE ... ADD COLUMNS first",
    ("TRUNCATE TABLE", "PARTITION"): "DELETE FROM ... WHERE deletes some rows",
    ("INSERT", "DEFAULT"): "name the columns and values: INSERT (column) VALUES (value)",
}
"""What to use in place of a clause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowText:
    """An `UPDATE`, with `values` by column, or a `DELETE`, without; `where` None is all rows."""

    alias: str
    where: str | None
    values: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhenText:
    """One `WHEN` of a merge: `action` is `update`, `delete` or `insert`; `values` None is `*`."""

    side: str
    action: str
    condition: str | None
    values: dict[str, str] | None = None

    @property
    def is_all(self) -> bool:
        """Whether the clause sets all columns to the source's."""
        return self.values is None and self.action != "delete"

    @property
    def method(self) -> str:
        """The method of `Merge` that does the same."""
        return f"when_{self.side}_{self.action}{'_all' if self.is_all else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeText:
    """A `MERGE`; `source` is the query of the source's rows.

    `equal_columns` are the target's columns that every match equates with a source's column.
    """

    target_alias: str
    source: str
    source_alias: str
    on: str
    clauses: tuple[WhenText, ...]
    equal_columns: dict[str, str]


def rows_of(statement: TableStatement) -> RowText:
    """Return the clauses of an `UPDATE` or `DELETE`; raise an error for a clause without effect."""
    text = _Text(statement)
    tokens = text.tokens
    words = text.words(tokens)
    where_at = words.index("WHERE") if "WHERE" in words else len(tokens)
    before, where = tokens[:where_at], tokens[where_at + 1 :]
    if where_at < len(tokens) and not where:
        raise text.malformed("WHERE needs a condition")
    # FROM is also a part of IS DISTINCT FROM.
    froms = [w for w, last in zip(words, ["", *words], strict=False) if last != "DISTINCT"]
    text.refuse("USING" if statement.verb == "DELETE" else "FROM", froms[:where_at])
    condition = text.expression(where) if where else None
    if statement.verb == "DELETE":
        return RowText(alias=text.alias_of(before), where=condition)
    set_at = words.index("SET") if "SET" in words[:where_at] else -1
    if set_at < 0:
        raise text.malformed("UPDATE name SET column = value [WHERE condition]")
    alias = text.alias_of(before[:set_at])
    values = text.assignments(before[set_at + 1 :], alias)
    return RowText(alias=alias, where=condition, values=values)


def check_truncation(statement: TableStatement) -> None:
    """Raise an error for any clause of a `TRUNCATE TABLE`."""
    text = _Text(statement)
    text.refuse("PARTITION", text.words(text.tokens))
    if text.tokens:
        raise text.malformed("TRUNCATE TABLE name")


def merge_of(statement: TableStatement) -> MergeText:
    """Return the clauses of a `MERGE`; raise an error for a clause without an equivalent."""
    text = _Text(statement)
    head = statement.text[: statement.tokens[0].start] if statement.tokens else ""
    if re.search(r"\bSCHEMA\s+EVOLUTION\b", head, re.IGNORECASE):
        text.refuse("SCHEMA", ["SCHEMA"])
    tokens = text.tokens
    words = text.words(tokens)
    starts = [
        at
        for at, word in enumerate(words)
        if word == "WHEN" and words[at + 1 : at + 2] in (["MATCHED"], ["NOT"])
    ]
    if "USING" not in words or "ON" not in words or not starts:
        raise text.malformed("MERGE INTO name USING source ON condition WHEN ... THEN ...")
    using = words.index("USING")
    on_at = words.index("ON", using) if "ON" in words[using:] else len(tokens)
    if not using < on_at < starts[0] - 1:
        raise text.malformed("MERGE INTO name USING source ON condition WHEN ... THEN ...")
    target_alias = text.alias_of(tokens[:using])
    source = tokens[using + 1 : on_at]
    on = tokens[on_at + 1 : starts[0]]
    source_alias = text.source_alias(source)
    aliases = {"target_alias": target_alias, "source_alias": source_alias}
    plain_on = text.of(on)
    is_plain = key_equalities(plain_on, **aliases) is not None
    ends = [*starts[1:], len(tokens)]
    clauses = tuple(
        text.clause(tokens[start:end], target_alias)
        for start, end in zip(starts, ends, strict=True)
    )
    for clause in clauses:
        others = [other for other in clauses if other.side == clause.side]
        if clause.condition is None and clause is not others[-1]:
            side = clause.side.upper().replace("_", " ")
            raise text.malformed(f"of several WHEN {side} only the last may be without AND")
    equal_columns: dict[str, str] = {}
    for part in text.conjuncts(on):
        equal_columns |= key_equalities(part, **aliases) or {}
    return MergeText(
        source=f"{statement.ctes} SELECT * FROM {text.of(source, has_ctes=True)}",
        on=plain_on if is_plain else text.expression(on),
        clauses=clauses,
        equal_columns=equal_columns,
        **aliases,
    )


class _Text:
    """The tokens behind a statement's target, and the text of parts of them."""

    def __init__(self, statement: TableStatement) -> None:
        self.statement = statement
        self.tokens = list(statement.tokens)
        while self.tokens and self.tokens[-1].text == ";":
            self.tokens.pop()
        self._shown = f"{statement.verb} {'.'.join(statement.name)}"
        self._tables = [statement.name]

    def malformed(self, expected: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._shown}: {expected}")

    def refuse(self, word: str, words: Sequence[str]) -> None:
        """Raise an error if a clause of this name is among the words."""
        if word in words:
            raise UnsupportedError(
                f"{self._shown} has the clause {word}, which a Streamhouse table does not have:"
                f" {_ELSEWHERE[self.statement.verb, word]}"
            )

    def words(self, tokens: Sequence[Token]) -> list[str]:
        """Return the words outside of parentheses and CASE; empty for all other tokens."""
        words, depth, cases = [], 0, 0
        for at, token in enumerate(tokens):
            sign = "" if token.is_string else token.text
            is_part = at > 0 and tokens[at - 1].text == "."
            depth -= sign in (")", "]", "}") and len(sign) == 1
            if depth < 0:
                raise self.malformed("a parenthesis closes nothing")
            is_outside = not depth and not cases
            cases += token.word == "CASE" and not is_part
            cases -= token.word == "END" and not is_part and cases > 0
            is_word = is_outside and not is_part and token.word != "CASE"
            words.append(token.word if is_word else "")
            depth += sign in ("(", "[", "{") and len(sign) == 1
        if depth or cases:
            raise self.malformed(f"a {'parenthesis' if depth else 'CASE'} has no end")
        return words

    def split(self, tokens: Sequence[Token], separator: str) -> Iterator[Sequence[Token]]:
        """Yield the parts between separators outside of parentheses and CASE."""
        start = 0
        for at, word in enumerate(self.words(tokens)):
            if word == separator:
                yield tokens[start:at]
                start = at + 1
        yield tokens[start:]

    def conjuncts(self, tokens: Sequence[Token]) -> list[str]:
        """Return the conditions between ANDs; nothing if the ANDs may have another meaning."""
        if {"OR", "BETWEEN"} & set(self.words(tokens)):
            return []
        return [self.of(part) for part in self.split(tokens, "AND")]

    def of(self, tokens: Sequence[Token], *, has_ctes: bool = False) -> str:
        """Return the text of tokens, where each table has a name of one part.

        Without `has_ctes` each subquery gets the CTEs of the statement.
        """
        edits = list(self._names(tokens))
        if self.statement.ctes and not has_ctes:
            edits += self._subqueries(tokens)
        pieces, end = [], tokens[0].start
        text = self.statement.text
        for start, stop, replacement in sorted(edits):
            pieces += [text[end:start], replacement]
            end = stop
        return "".join([*pieces, text[end : tokens[-1].end]])

    def expression(self, tokens: Sequence[Token]) -> str:
        """Return an expression, which ends where the tokens end."""
        if not tokens:
            raise self.malformed("an expression is missing")
        self.words(tokens)
        name, end = name_at(tokens, 0)
        if [token.word for token in tokens] == ["DEFAULT"]:
            raise UnsupportedError(
                f"{self._shown} has the value DEFAULT: write the value, or NULL for a column"
                " without a default"
            )
        text = self.of(tokens)
        return text if name and end == len(tokens) else f"({text}\n)"

    def _names(self, tokens: Sequence[Token]) -> Iterator[tuple[int, int, str]]:
        """Yield the qualifiers of tables in columns such as `database.table.column`."""
        for at, token in enumerate(tokens):
            if token.is_string or (at > 0 and tokens[at - 1].text == "."):
                continue
            parts = [part.lower() for part in name_at(tokens[at:], 0)[0]]
            for name in self._tables:
                length = len(name)
                if len(parts) > length > 1 and parts[:length] == [n.lower() for n in name]:
                    yield token.start, tokens[at + 2 * (length - 1)].start, ""
                    break

    def _subqueries(self, tokens: Sequence[Token]) -> Iterator[tuple[int, int, str]]:
        """Yield the CTEs before, and a parenthesis behind, each outermost subquery."""
        for start, end in _subqueries(tokens):
            yield start, start, f"{self.statement.ctes} ("
            yield end, end, ")"

    def alias_of(self, tokens: Sequence[Token]) -> str:
        """Return the alias behind the target, or the last part of the target's name."""
        if not tokens:
            return self.statement.name[-1]
        rest = tokens[1:] if tokens[0].word == "AS" else tokens
        name, end = name_at(rest, 0)
        if len(name) != 1 or end != len(rest):
            raise self.malformed(f"'{self.of(tokens)}' behind the table is no alias")
        return name[0]

    def source_alias(self, tokens: Sequence[Token]) -> str:
        """Return the alias of the source, or the last part of its name."""
        name, end = name_at(tokens, 0)
        default = name[-1] if name else "source"
        self._tables.append(name)
        end = self._closed(tokens, end)
        rest = list(tokens[end:])
        self.refuse("CHANGES", self.words(rest)[:1] if len(rest) > 1 else ())
        if end and rest:
            rest = rest[1:] if rest[0].word == "AS" else rest
            alias, behind = name_at(rest, 0)
            if len(alias) == 1 and self._closed(rest, behind) == len(rest):
                return alias[0]
        elif end:
            return default
        raise self.malformed("USING takes a table or view, or (SELECT ...), with an alias")

    def _closed(self, tokens: Sequence[Token], at: int) -> int:
        """Return the position behind the parentheses that open at a position, if any."""
        end = _closed(tokens, at)
        if end is None:
            raise self.malformed("a parenthesis has no end")
        return end

    def clause(self, tokens: Sequence[Token], target_alias: str) -> WhenText:
        """Return one `WHEN ... THEN ...`."""
        words = self.words(tokens)
        side, at = MATCHED, 2
        if words[1:3] == ["NOT", "MATCHED"]:
            side, at = NOT_MATCHED, 3
            if words[3:5] in (["BY", "TARGET"], ["BY", "SOURCE"]):
                side, at = NOT_MATCHED if words[4] == "TARGET" else NOT_MATCHED_BY_SOURCE, 5
        then = words.index("THEN") if "THEN" in words else 0
        condition = None
        if at < then and words[at] == "AND":
            condition = self.expression(tokens[at + 1 : then])
            at = then
        action, action_words = tokens[then + 1 :], words[then + 1 :]
        if at == then:
            if action_words == ["DELETE"] and side != NOT_MATCHED:
                return WhenText(side=side, action="delete", condition=condition)
            if action_words[:2] == ["UPDATE", "SET"] and side != NOT_MATCHED:
                values = None
                if action_words[2:] != ["*"]:
                    values = self.assignments(action[2:], target_alias)
                elif side == NOT_MATCHED_BY_SOURCE:
                    raise self.malformed("UPDATE SET * needs a source: name the columns")
                return WhenText(side=side, action="update", condition=condition, values=values)
            if action_words[:1] == ["INSERT"] and side == NOT_MATCHED:
                values = self._inserted(action[1:], action_words[1:], target_alias)
                return WhenText(side=side, action="insert", condition=condition, values=values)
        raise self.malformed(
            f"'{self.of(tokens)}' is no clause; the clauses are WHEN MATCHED [AND condition] THEN"
            " UPDATE SET ... | UPDATE SET * | DELETE, WHEN NOT MATCHED [BY TARGET] [AND condition]"
            " THEN INSERT (columns) VALUES (values) | INSERT *, WHEN NOT MATCHED BY SOURCE [AND"
            " condition] THEN UPDATE SET ... | DELETE"
        )

    def _inserted(
        self, tokens: Sequence[Token], words: Sequence[str], alias: str
    ) -> dict[str, str] | None:
        if list(words) == ["*"]:
            return None
        end = self._closed(tokens, 0)
        if not end or list(words[end : end + 1]) != ["VALUES"] or tokens[-1].text != ")":
            raise self.malformed("an insert is INSERT *, or INSERT (columns) VALUES (values)")
        columns = [self._column(part, alias) for part in self.split(tokens[1 : end - 1], ",")]
        values = list(self.split(tokens[end + 2 : -1], ","))
        if len(columns) != len(values):
            raise self.malformed(
                f"INSERT names {len(columns)} columns ({', '.join(columns)}) and {len(values)}"
                " values"
            )
        return self._by_column(
            (c, self.expression(v)) for c, v in zip(columns, values, strict=True)
        )

    def assignments(self, tokens: Sequence[Token], alias: str) -> dict[str, str]:
        """Return column -> value of `column = value, ...`."""
        return self._by_column(self._assigned(part, alias) for part in self.split(tokens, ","))

    def _assigned(self, tokens: Sequence[Token], alias: str) -> tuple[str, str]:
        _, end = name_at(tokens, 0)
        if not end or end >= len(tokens) or tokens[end].text != "=":
            raise self.malformed("SET takes column = value, separated by commas")
        start = end + (2 if tokens[end + 1 : end + 2] and tokens[end + 1].text == "=" else 1)
        return self._column(tokens[:end], alias), self.expression(tokens[start:])

    def _column(self, tokens: Sequence[Token], alias: str) -> str:
        name, end = name_at(tokens, 0)
        if not name or end != len(tokens):
            raise self.malformed("the name of a column is missing")
        qualifiers = {(), (alias.lower(),), tuple(part.lower() for part in self.statement.name)}
        if tuple(part.lower() for part in name[:-1]) not in qualifiers:
            column = name[1] if name[0].lower() == alias.lower() else name[0]
            raise UnsupportedError(
                f"{self._shown} sets '{'.'.join(name)}', a field inside a column: set the whole"
                f" column, as in {quoted(column)} = named_struct(...)"
            )
        return name[-1]

    def _by_column(self, pairs: Iterator[tuple[str, str]]) -> dict[str, str]:
        values: dict[str, str] = {}
        for column, value in pairs:
            if column.lower() in {name.lower() for name in values}:
                raise self.malformed(f"column '{column}' is named twice")
            values[column] = value
        return values


def subqueries_of(expression: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each outermost subquery, without its parentheses."""
    if "(" in expression:
        yield from _subqueries(tokens_of(expression))


def _subqueries(tokens: Sequence[Token]) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(tokens):
        end = _closed(tokens, at) or at
        if end > at + 2 and tokens[at + 1].word in _QUERY_WORDS:
            yield tokens[at + 1].start, tokens[end - 1].start
            at = end
        else:
            at += 1


def _closed(tokens: Sequence[Token], at: int) -> int | None:
    """Return the position behind the parentheses that open at a position, None without an end."""
    if at >= len(tokens) or tokens[at].text != "(":
        return at
    depth = 0
    for end, token in enumerate(tokens[at:], at + 1):
        depth += 0 if token.is_string else {"(": 1, ")": -1}.get(token.text, 0)
        if not depth:
            return end
    return None

"""Columns as Spark writes them in DDL: `id BIGINT NOT NULL, tags ARRAY<STRING> COMMENT 'x'`.

The grammar is the grammar of `StructType.fromDDL`, for the types of tables. A colon may stand
between a name and its type, names may be in backticks, keywords are in any case.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import pyarrow as pa

from streamhouse.core.errors import InvalidSchemaError, UnsupportedError
from streamhouse.core.model.schema import type_from_json
from streamhouse.core.model.values.column_clauses import refused_clause

__all__ = ["schema_of_ddl"]

_TOKEN: Final = re.compile(
    r"\s*(?:`(?P<quoted>(?:[^`]|``)+)`"
    r"|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<word>\w+)"
    r"|(?P<mark>[<>(),:]))"
)
_ESCAPED: Final = re.compile(r"\\(.)")
_DEPTH_MAX: Final = 50
_CONSTRAINTS: Final = ("CHECK", "PRIMARY", "UNIQUE", "FOREIGN")
_ALIASES: Final = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "dec": "decimal",
    "numeric": "decimal",
    "timestamp_ltz": "timestamp",
}


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


def schema_of_ddl(text: str) -> pa.Schema:
    """Return the columns of a DDL text; raises `InvalidSchemaError` naming the wrong place."""
    reader = _Reader(text)
    fields = [reader.column()]
    while reader.take(","):
        fields.append(reader.column())
    if not reader.is_at_end:
        raise reader.wrong("a comma or the end")
    return pa.schema(fields)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._next = 0
        self._depth = 0

    @property
    def is_at_end(self) -> bool:
        return self._peek().kind == "end"

    def column(self) -> pa.Field:
        """Read `name type [NOT NULL] [COMMENT 'text']`."""
        token = self._peek()
        if token.kind not in ("word", "quoted"):
            raise self.wrong("the name of a column")
        self._next += 1
        following = self._tokens[self._next : self._next + 2]
        if token.text.upper() == "CONSTRAINT" and following[-1].text.upper() in _CONSTRAINTS:
            raise UnsupportedError(
                f"schema '{self._text[:80]}': a constraint is no column: set the property"
                f" table.check.{following[0].text[:80]} to the condition, and name a primary key in"
                " primary_key"
            )
        self.take(":")
        data_type = self._type(token.text)
        is_nullable = True
        if self._take_word("not"):
            if not self._take_word("null"):
                raise self.wrong("NULL")
            is_nullable = False
        metadata = None
        if self._take_word("comment"):
            comment = self._peek()
            if comment.kind != "text":
                raise self.wrong("the text of the comment in quotation marks")
            self._next += 1
            metadata = {"comment": _ESCAPED.sub(r"\1", comment.text[1:-1])}
        self._refuse_clause(token.text)
        return pa.field(token.text, data_type, nullable=is_nullable, metadata=metadata)

    def _refuse_clause(self, column: str) -> None:
        words = [token.text.upper() for token in self._tokens[self._next :] if token.kind == "word"]
        if self._peek().kind == "word":
            behind = words if words[0] == "GENERATED" else words[:1]
            refusal = refused_clause(behind, where=f"column '{column}'")
            if refusal is not None:
                raise refusal

    def take(self, mark: str) -> bool:
        """Go past a mark if it is next; return whether it was."""
        token = self._peek()
        is_next = token.kind == "mark" and token.text == mark
        self._next += is_next
        return is_next

    def wrong(self, expected: str) -> InvalidSchemaError:
        token = self._peek()
        if token.kind == "stray":
            return InvalidSchemaError(
                f"schema '{self._text[:80]}': character {token.place + 1}, '{token.text}', is not"
                ' of a column or a type; write it as in "id BIGINT NOT NULL, name STRING"'
            )
        actual = f"'{token.text[:40]}'" if token.kind != "end" else "the end"
        return InvalidSchemaError(
            f"schema '{self._text[:80]}': {expected} must be at character {token.place + 1}, where"
            f' {actual} is; write it as in "id BIGINT NOT NULL, name STRING"'
        )

    def _type(self, where: str) -> pa.DataType:
        token = self._peek()
        if token.kind != "word":
            raise self.wrong(f"the type of '{where[:80]}'")
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise InvalidSchemaError(f"column '{where[:80]}': the type is nested too deep")
        self._next += 1
        name = token.text.lower()
        name = _ALIASES.get(name, name)
        if name == "array":
            self._expect("<")
            data_type = pa.list_(pa.field("element", self._type(where)))
            self._expect(">")
        elif name == "map":
            self._expect("<")
            key = self._type(where)
            self._expect(",")
            data_type = pa.map_(key, self._type(where))
            self._expect(">")
        elif name == "struct":
            data_type = pa.struct(self._fields())
        else:
            data_type = self._simple(name, where)
        self._depth -= 1
        return data_type

    def _fields(self) -> list[pa.Field]:
        self._expect("<")
        fields = [self.column()]
        while self.take(","):
            fields.append(self.column())
        self._expect(">")
        return fields

    def _simple(self, name: str, where: str) -> pa.DataType:
        numbers = []
        if self.take("("):
            numbers.append(self._number())
            while self.take(","):
                numbers.append(self._number())
            self._expect(")")
        if name == "decimal":
            precision, scale = ([*numbers, "0"] if numbers else ["10", "0"])[:2]
            return type_from_json(f"decimal({precision},{scale})", where=where)
        if name in ("varchar", "char") and len(numbers) == 1:
            # The length is for Spark to enforce; the table's type is string.
            return pa.string()
        if numbers:
            name = f"{name}({','.join(numbers)})"
        return type_from_json(name, where=where)

    def _number(self) -> str:
        token = self._peek()
        if not token.text.isdecimal():
            raise self.wrong("a number")
        self._next += 1
        return token.text

    def _take_word(self, word: str) -> bool:
        token = self._peek()
        is_next = token.kind == "word" and token.text.lower() == word
        self._next += is_next
        return is_next

    def _expect(self, mark: str) -> None:
        if not self.take(mark):
            raise self.wrong(f"'{mark}'")

    def _peek(self) -> _Token:
        return self._tokens[self._next]


def _tokens(text: str) -> list[_Token]:
    tokens = []
    place = 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            start = place + len(text[place:]) - len(text[place:].lstrip())
            # Refused in its turn: a clause before says more.
            tokens.append(_Token("stray", text[start], start))
            place = start + 1
            continue
        kind = str(match.lastgroup)
        part = match[kind]
        if kind == "quoted":
            part = part.replace("``", "`")
        tokens.append(_Token(kind, part, match.start(kind)))
        place = match.end()
    return [*tokens, _Token("end", "", len(text))]

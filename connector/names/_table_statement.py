"""The subject of a SQL statement: its verb, its table, and its format.

Only statements that define, change or empty a table are recognized. Any other text is left to
Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

__all__ = [
    "ROW_VERBS",
    "TableStatement",
    "Token",
    "name_at",
    "name_parts",
    "statement_of",
    "statements_within",
    "tokens_of",
    "unquoted",
]

_TOKEN: Final = re.compile(
    r"""(?P<comment>--(?:\\\n|[^\r\n])*|/\*(?:/\*.*?\*/|.)*?\*/)
      | (?P<string>[rR]'[^']*'|[rR]"[^"]*"|'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")
      | (?P<quoted>`(?:[^`]|``)*`)
      | (?P<number>\d+\.\d*(?!\w))
      | (?P<word>\w+)
      | (?P<sign>[^\s\w])""",
    re.VERBOSE | re.DOTALL,
)
_NAME_FOLLOWS: Final = {
    ("ALTER", "TABLE"): 2,
    ("TRUNCATE", "TABLE"): 2,
    ("REFRESH", "TABLE"): 2,
    ("DELETE", "FROM"): 2,
    ("MERGE", "INTO"): 2,
    ("REPLACE", "TABLE"): 2,
    ("COMMENT", "ON", "TABLE"): 3,
    ("COMMENT", "ON", "COLUMN"): 3,
    ("UPDATE",): 1,
}
_WITH_OBJECT: Final = ("ALTER", "TRUNCATE", "REFRESH", "COMMENT")
_FIRST_WORDS: Final = {"CREATE", *(verb[0] for verb in _NAME_FOLLOWS)}
_MERGE_EVOLVING: Final = ("MERGE", "WITH", "SCHEMA", "EVOLUTION", "INTO")
ROW_VERBS: Final = frozenset({"DELETE", "MERGE", "TRUNCATE TABLE", "UPDATE"})
"""The statements that change rows."""
_ROW_WORDS: Final = ("DELETE", "MERGE", "TRUNCATE", "UPDATE")
_EXPLAIN_MODES: Final = frozenset({"CODEGEN", "COST", "EXTENDED", "FORMATTED", "LOGICAL"})


@dataclass(frozen=True, slots=True)
class Token:
    """A word, a quoted name, a string or a sign, with its start and end in the text."""

    text: str
    start: int
    end: int
    is_string: bool = False

    @property
    def word(self) -> str:
        """The text in upper case, for comparison with keywords; empty for a string."""
        return "" if self.is_string else self.text.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatement:
    """A statement about a table.

    `verb` is `CREATE TABLE`, `CREATE VIEW`, `REPLACE TABLE` (also if it may exist), `ALTER TABLE`,
    `TRUNCATE TABLE`, `REFRESH TABLE`, `COMMENT ON TABLE`, `COMMENT ON COLUMN`, `DELETE`, `UPDATE`
    or `MERGE`. `name` has the parts of the name as written, for a comment with the column's.
    `provider` is the format after USING, `like` the table after LIKE. `tokens` are the tokens
    behind the name. `ctes` is the text of WITH in front of a statement that changes rows.
    `explain` is the mode of EXPLAIN in front of such a statement, in upper case: empty without a
    mode, None without EXPLAIN.
    """

    verb: str
    name: tuple[str, ...]
    text: str
    tokens: tuple[Token, ...]
    provider: str | None = None
    like: tuple[str, ...] | None = None
    ctes: str = ""
    explain: str | None = None


def statement_of(text: str) -> TableStatement | None:
    """Return the parts of a statement; None for statements that are left to Spark."""
    # Most statements, and all long ones, are queries, which need no tokens.
    first = text.lstrip()[:1].upper()
    if first not in set("ACDEMRTUW-/"):
        return None
    if first in "EW" and not any(word in text.upper() for word in _ROW_WORDS):
        return None
    tokens = tokens_of(text)
    if tokens and tokens[0].word in ("EXPLAIN", "WITH"):
        return _row_statement(text, tokens)
    return _plain_statement(text, tokens)


def _row_statement(text: str, tokens: list[Token]) -> TableStatement | None:
    """Return a statement that changes rows, behind EXPLAIN or WITH; None for any other."""
    explain = None
    if tokens[0].word == "EXPLAIN":
        explain = tokens[1].word if len(tokens) > 1 and tokens[1].word in _EXPLAIN_MODES else ""
        tokens = tokens[2 if explain else 1 :]
    ctes = ""
    if tokens and tokens[0].word == "WITH":
        depth = 0
        for at, token in enumerate(tokens):
            depth += 0 if token.is_string else {"(": 1, ")": -1}.get(token.text, 0)
            if not depth and token.word in ROW_VERBS and tokens[at - 1].text == ")":
                ctes = text[tokens[0].start : tokens[at - 1].end]
                tokens = tokens[at:]
                break
    statement = _plain_statement(text, tokens) if tokens else None
    if statement is None or statement.verb not in ROW_VERBS:
        return None
    return replace(statement, ctes=ctes, explain=explain)


def _plain_statement(text: str, tokens: list[Token]) -> TableStatement | None:
    words = tuple(token.word for token in tokens[:12])
    if words[:1] in (("CREATE",), ("REPLACE",)):
        return _definition(text, tokens, words)
    if words[:5] == _MERGE_EVOLVING:
        return _about(text, tokens, verb="MERGE", at=5)
    for verb, length in _NAME_FOLLOWS.items():
        if words[: len(verb)] == verb:
            first = verb[0]
            has_object = first in _WITH_OBJECT
            return _about(text, tokens, verb=" ".join(verb) if has_object else first, at=length)
    return None


def statements_within(text: str) -> list[TableStatement]:
    """Return the statements in a script, `BEGIN ... END`, or in the texts of EXECUTE IMMEDIATE.

    The result may have more statements than the script executes: the UPDATE of a MERGE counts as
    one without a table. A computed text is not searched.
    """
    if text.lstrip()[:1].upper() not in set("BE-/"):
        return []
    tokens = tokens_of(text)
    words = [token.word for token in tokens]
    is_immediate = words[:2] == ["EXECUTE", "IMMEDIATE"]
    if words[:1] != ["BEGIN"] and not is_immediate:
        return []
    return list(_within(text, tokens, with_texts=is_immediate or "IMMEDIATE" in words))


def _within(text: str, tokens: Sequence[Token], *, with_texts: bool) -> Iterator[TableStatement]:
    for token in tokens:
        if token.is_string:
            if with_texts:
                inner = unquoted(token)
                yield from _within(inner, tokens_of(inner), with_texts=False)
        elif token.word in _FIRST_WORDS:
            statement = statement_of(text[token.start :])
            if statement is not None:
                yield statement


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a statement, without its comments."""
    return [
        Token(match.group(), match.start(), match.end(), is_string=match.lastgroup == "string")
        for match in _TOKEN.finditer(text)
        if match.lastgroup != "comment"
    ]


def name_parts(text: str) -> tuple[str, ...]:
    """Return the parts of a dotted name; nothing for any other text."""
    tokens = tokens_of(text)
    parts, end = name_at(tokens, 0)
    return parts if end == len(tokens) else ()


def unquoted(token: Token) -> str:
    """Return a name or a string without its quotes."""
    text = token.text
    if text[:1] == "`":
        return text[1:-1].replace("``", "`")
    if token.is_string and text[0] in "rR":
        return text[2:-1]
    if token.is_string:
        quote = text[0]
        return re.sub(r"\\(.)", r"\1", text[1:-1].replace(quote * 2, quote))
    return text


def _about(text: str, tokens: list[Token], *, verb: str, at: int) -> TableStatement | None:
    name, end = name_at(tokens, at)
    if not name:
        return None
    return TableStatement(verb=verb, name=name, text=text, tokens=tuple(tokens[end:]))


def _definition(text: str, tokens: list[Token], words: tuple[str, ...]) -> TableStatement | None:
    """Return the parts of a `CREATE ... TABLE`, `CREATE ... VIEW` or `REPLACE TABLE`."""
    at = 1
    while at < len(words) and words[at] in ("OR", "REPLACE", "GLOBAL", "TEMP", "TEMPORARY"):
        at += 1
    if words[at : at + 1] not in (("TABLE",), ("VIEW",)):
        return None
    is_replacing = words[0] == "REPLACE" or (words[1] == "OR" and words[at] == "TABLE")
    verb = "REPLACE TABLE" if is_replacing else f"CREATE {words[at]}"
    at += 1
    if words[at : at + 3] == ("IF", "NOT", "EXISTS"):
        at += 3
    name, end = name_at(tokens, at)
    if not name:
        return None
    following = tuple(tokens[end:])
    provider, like = _clauses(following)
    return TableStatement(
        verb=verb, name=name, text=text, tokens=following, provider=provider, like=like
    )


def _clauses(following: tuple[Token, ...]) -> tuple[str | None, tuple[str, ...] | None]:
    """Return the names after USING and LIKE, before any query and outside of parentheses."""
    depth = 0
    provider: str | None = None
    like: tuple[str, ...] | None = None
    for position, token in enumerate(following):
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        if depth:
            continue
        if token.word in ("AS", "SELECT", "WITH"):
            break
        if token.word == "USING" and position + 1 < len(following):
            provider = unquoted(following[position + 1])
        if token.word == "LIKE":
            like, _ = name_at(list(following), position + 1)
    return provider, like


def name_at(tokens: Sequence[Token], at: int) -> tuple[tuple[str, ...], int]:
    """Return the dotted name at a position, and the position behind it."""
    parts: list[str] = []
    while at < len(tokens) and (tokens[at].text[0] == "`" or tokens[at].text[0].isidentifier()):
        parts.append(unquoted(tokens[at]))
        at += 1
        if at >= len(tokens) or tokens[at].text != ".":
            break
        at += 1
    return tuple(parts), at

"""Spark SQL text to a predicate: the room's entry for text. Uses sqlglot, with _operand.py.

sqlglot reads the grammar; this module decides the meaning of each piece. A piece is either
translated exactly or refused by name: every argument of every sqlglot node must be known here.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from sqlglot import Token, TokenType, exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, SqlglotError

from streamhouse.core.errors import InvalidPredicateError
from streamhouse.core.model.schema import Schema, type_name
from streamhouse.core.model.values.zone import UTC, Zone
from streamhouse.reading.where._literal import Literal, Subject, compare, fold, in_list
from streamhouse.reading.where._operand import Operand, Operands, check_arguments, piece
from streamhouse.reading.where._text import refuse, unescape
from streamhouse.reading.where.predicate import (
    FLIPPED_OPERATOR,
    And,
    Compare,
    CompareColumns,
    Constant,
    IsNull,
    Like,
    Node,
    Not,
    Operator,
    Or,
    Predicate,
    PredicateColumn,
    comparison_type,
)

__all__ = ["parse_predicate"]

TEXT_CHARACTERS_MAX: Final = 256 * 1024
NESTING_MAX: Final = 50
IN_VALUES_MAX: Final = 10_000
CONDITIONS_MAX: Final = 5_000

_OPERATORS: Final[dict[type[exp.Expr], Operator]] = {
    exp.EQ: "=",
    exp.NEQ: "!=",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
_STRINGS: Final = (TokenType.STRING, TokenType.RAW_STRING)
_OPENING: Final = frozenset({TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.CASE})
_CLOSING: Final = frozenset({TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.END})
_PREFIX: Final = frozenset({TokenType.NOT, TokenType.DASH, TokenType.PLUS, TokenType.TILDE})


def parse_predicate(text: str, schema: Schema, *, table: str, zone: Zone = UTC) -> Predicate:
    """Parse `text` (Spark SQL) against the columns of `table`.

    Column names are matched without case; times without a zone are in `zone`. Raises
    `UnknownColumnError`, or `InvalidPredicateError` naming the piece that cannot be pushed down.
    """
    if len(text) > TEXT_CHARACTERS_MAX:
        raise InvalidPredicateError(
            f"where: the expression has {len(text)} characters, at most {TEXT_CHARACTERS_MAX} are"
            " allowed; join with a table of the values instead"
        )
    if not text.strip():
        raise InvalidPredicateError("where: the expression is empty; leave the option out instead")
    dialect = Dialect.get_or_raise("spark")
    try:
        text.encode()
        tokens = _spark_strings(dialect.tokenize(text), text)
        _check_nesting(tokens)
        (root,) = dialect.parser().parse_into(exp.Condition, tokens, text)
        if root is None:
            raise InvalidPredicateError(
                "where: the expression is empty; leave the option out instead"
            )
        return Predicate(_Translator(Operands(schema, table=table, zone=zone), zone).node(root))
    except ParseError as error:
        raise InvalidPredicateError(f"where: {_syntax_message(error)}") from None
    except SqlglotError:
        raise InvalidPredicateError("where: not a SQL expression; is a quote left open?") from None
    except UnicodeEncodeError as error:
        raise InvalidPredicateError("where: the text is not valid Unicode") from error
    except RecursionError as error:
        raise InvalidPredicateError("where: the expression is nested too deeply") from error


def _syntax_message(error: ParseError) -> str:
    for detail in error.errors:
        near = str(detail.get("highlight") or "")
        if near:
            return f"not a SQL expression near '{near[:40]}' at character {detail.get('col')}"
    return "not a SQL expression"


def _spark_strings(tokens: list[Token], text: str) -> list[Token]:
    """Give string literals the values Spark gives them; neighbours become one, as in Spark.

    `'it''s'` is one literal with a quote; `'a' 'b'`, also mixed with r'..', is a concatenation.
    """
    merged: list[Token] = []
    previous: Token | None = None
    for token in tokens:
        if token.token_type not in _STRINGS:
            merged.append(token)
            previous = None
            continue
        is_raw = token.token_type == TokenType.RAW_STRING
        source = text[token.start : token.end + 1]
        value = source[2:-1] if is_raw else unescape(source[1:-1])
        if previous is None:
            string = Token(TokenType.STRING, value, token.line, token.col, token.start, token.end)
            merged.append(string)
        else:
            is_doubled = (
                not is_raw
                and previous.token_type == TokenType.STRING
                and previous.end + 1 == token.start
                and text[previous.end] == text[token.start]
            )
            merged[-1].text += (text[token.start] if is_doubled else "") + value
        previous = token
    return merged


def _check_nesting(tokens: list[Token]) -> None:
    """Refuse depth before sqlglot recurses into it."""
    depth = prefixes = 0
    for token in tokens:
        prefixes = prefixes + 1 if token.token_type in _PREFIX else 0
        # A column may be called `end`, so closing alone must not make room for more depth.
        depth = max(0, depth + (token.token_type in _OPENING) - (token.token_type in _CLOSING))
        if depth + prefixes > NESTING_MAX:
            raise InvalidPredicateError(
                f"where: the expression is nested deeper than {NESTING_MAX} levels"
            )


class _Translator:
    """Translates sqlglot nodes that have a truth value."""

    def __init__(self, operands: Operands, zone: Zone) -> None:
        self._operands = operands
        self._zone = zone
        self._conditions = 0

    def node(self, node: exp.Expr) -> Node:
        """Return the tree of `node`."""
        node = node.unnest()
        if isinstance(node, exp.And):
            return And(tuple(self.node(child) for child in _chain(node, exp.And)))
        if isinstance(node, exp.Or):
            return Or(tuple(self.node(child) for child in _chain(node, exp.Or)))
        if isinstance(node, exp.Not):
            return Not(self.node(node.this))
        self._conditions += 1
        if self._conditions > CONDITIONS_MAX:
            raise InvalidPredicateError(
                f"where: more than {CONDITIONS_MAX} conditions; use IN, or join with a table"
            )
        return self._condition(node)

    def _condition(self, node: exp.Expr) -> Node:
        operator = _OPERATORS.get(type(node))
        if operator is not None:
            check_arguments(node, "this", "expression")
            return self._compare(node, operator)
        if isinstance(node, exp.NullSafeEQ | exp.NullSafeNEQ):
            check_arguments(node, "this", "expression")
            equal = self._null_safe_equal(node)
            return equal if isinstance(node, exp.NullSafeEQ) else Not(equal)
        if isinstance(node, exp.Is):
            return self._is(node)
        if isinstance(node, exp.Between):
            check_arguments(node, "this", "low", "high")
            subject = self._subject(node.this)
            low, high = self._literal(node.args["low"]), self._literal(node.args["high"])
            return And((self._against(subject, ">=", low), self._against(subject, "<=", high)))
        if isinstance(node, exp.In):
            return self._in(node)
        if isinstance(node, exp.Like | exp.Escape):
            return self._like(node)
        if isinstance(node, exp.StartsWith | exp.EndsWith | exp.Contains):
            return self._text_function(node)
        if isinstance(node, exp.IsNan):
            check_arguments(node, "this")
            return self._is_nan(node)
        if isinstance(node, exp.Anonymous) and len(node.expressions) == 1:
            name = str(node.this).lower()
            if name in ("isnull", "isnotnull"):
                is_null = IsNull(self._column(node.expressions[0]))
                return is_null if name == "isnull" else Not(is_null)
        return self._boolean(node)

    def _boolean(self, node: exp.Expr) -> Node:
        if isinstance(node, exp.Boolean):
            return Constant(bool(node.this))
        if isinstance(node, exp.Null):
            return Constant(None)
        if isinstance(node, exp.Column | exp.Dot):
            column = self._operands.column(node)
            if pa.types.is_boolean(column.type):
                return Compare(column, "=", True)
            raise InvalidPredicateError(
                f"where: column '{column}' of type {type_name(column.type)} is not a condition;"
                " compare it with something"
            )
        raise refuse(f"{piece(node)} as a condition is not supported")

    def _compare(self, node: exp.Expr, operator: Operator) -> Node:
        subject = self._operands.operand(node.this)
        right = self._operands.operand(node.expression)
        return self._compare_operands(subject, operator, right, node)

    def _compare_operands(
        self, left: Operand, operator: Operator, right: Operand, node: exp.Expr
    ) -> Node:
        if isinstance(left, Literal):
            if isinstance(right, Literal):
                self._operands.check_no_column_is_meant(left, right)
                return fold(left, operator, right)
            return self._against(right, FLIPPED_OPERATOR[operator], left)
        if isinstance(right, Literal):
            return self._against(left, operator, right)
        if not isinstance(left, PredicateColumn) or not isinstance(right, PredicateColumn):
            raise refuse(f"{piece(node)} is not supported")
        if comparison_type(left.type, right.type) is None:
            raise refuse(
                f"columns '{left}' of type {type_name(left.type)} and '{right}' of type"
                f" {type_name(right.type)} cannot be compared exactly"
            )
        return CompareColumns(left, operator, right, self._zone)

    def _against(self, subject: Subject, operator: Operator, literal: Literal) -> Node:
        return compare(subject, operator, literal, zone=self._zone)

    def _null_safe_equal(self, node: exp.Expr) -> Node:
        subject = self._operands.operand(node.this)
        right = self._operands.operand(node.expression)
        equal = self._compare_operands(subject, "=", right, node)
        subjects = [side for side in (subject, right) if not isinstance(side, Literal)]
        has_null = any(isinstance(s, Literal) and s.value is None for s in (subject, right))
        if not subjects:
            both_null = isinstance(subject, Literal) and subject.value is None and has_null
            if has_null and isinstance(right, Literal):
                return Constant(both_null and right.value is None)
            return equal
        nulls = tuple(IsNull(s if isinstance(s, PredicateColumn) else s.column) for s in subjects)
        if has_null:
            return nulls[0]
        both_valid = And((*(Not(null) for null in nulls), equal))
        return both_valid if len(nulls) == 1 else Or((And(nulls), both_valid))

    def _is(self, node: exp.Is) -> Node:
        check_arguments(node, "this", "expression")
        if isinstance(node.expression, exp.Null):
            return IsNull(self._column(node.this))
        if isinstance(node.expression, exp.Boolean):
            column = self._column(node.this)
            if pa.types.is_boolean(column.type):
                # IS TRUE and IS FALSE are never NULL.
                value = bool(node.expression.this)
                return And((Not(IsNull(column)), Compare(column, "=", value)))
        raise refuse(f"{piece(node)} is not supported")

    def _in(self, node: exp.In) -> Node:
        check_arguments(node, "this", "expressions")
        if not node.expressions:
            raise refuse(f"{piece(node)} is not supported")
        if len(node.expressions) > IN_VALUES_MAX:
            raise InvalidPredicateError(
                f"where: an IN list of {len(node.expressions)} values, at most {IN_VALUES_MAX} are"
                " allowed; join with a table of the values instead"
            )
        literals = [self._literal(e) for e in node.expressions]
        return in_list(self._subject(node.this), literals, zone=self._zone)

    def _is_nan(self, node: exp.IsNan) -> Node:
        column = self._column(node.this)
        if not pa.types.is_floating(column.type):
            raise refuse(
                f"{piece(node)} of a column of type {type_name(column.type)} is not supported"
            )
        return And((Not(IsNull(column)), Compare(column, "=", float("nan"))))

    def _like(self, node: exp.Like | exp.Escape) -> Node:
        escape = "\\"
        like = node
        if isinstance(node, exp.Escape):
            check_arguments(node, "this", "expression")
            like = node.this
            escape_literal = self._literal(node.expression)
            if not isinstance(escape_literal.value, str) or len(escape_literal.value) != 1:
                raise InvalidPredicateError("where: the ESCAPE of LIKE must be one character")
            escape = escape_literal.value
        if not isinstance(like, exp.Like) or isinstance(like.expression, exp.Any | exp.All):
            raise refuse(f"{piece(node)} is not supported")
        check_arguments(like, "this", "expression", "negate")
        pattern = self._literal(like.expression)
        if pattern.value is None:
            return Constant(None)
        if not isinstance(pattern.value, str):
            raise refuse(f"{piece(node)} is not supported")
        parts = _like_parts(pattern.value, escape=escape)
        matched = self._text_match(self._column(like.this), parts)
        return Not(matched) if like.args.get("negate") else matched

    def _text_function(self, node: exp.Func) -> Node:
        check_arguments(node, "this", "expression")
        text = self._literal(node.expression)
        if text.value is None:
            return Constant(None)
        if not isinstance(text.value, str):
            raise refuse(f"{piece(node)} is not supported")
        prefix: list[str | int | None] = [] if isinstance(node, exp.StartsWith) else [None]
        suffix: list[str | int | None] = [] if isinstance(node, exp.EndsWith) else [None]
        middle: list[str | int | None] = [text.value] if text.value else []
        # Without a text between them, two `%` are one.
        parts = [*prefix, *middle, *suffix] if middle else [None]
        return self._text_match(self._column(node.this), tuple(parts))

    def _text_match(self, column: PredicateColumn, parts: tuple[str | int | None, ...]) -> Node:
        if not pa.types.is_string(column.type):
            raise refuse(
                f"matching text in column '{column}' of type {type_name(column.type)} is not"
                " supported"
            )
        if not parts:
            return Compare(column, "=", "")
        if len(parts) == 1 and isinstance(parts[0], str):
            return Compare(column, "=", parts[0])
        return Like(column, parts)

    def _column(self, node: exp.Expr) -> PredicateColumn:
        operand = self._operands.operand(node)
        if isinstance(operand, PredicateColumn):
            return operand
        raise refuse(f"{piece(node)} where a column is expected is not supported")

    def _subject(self, node: exp.Expr) -> Subject:
        operand = self._operands.operand(node)
        if isinstance(operand, Literal):
            raise refuse(f"{piece(node)} where a column is expected is not supported")
        return operand

    def _literal(self, node: exp.Expr) -> Literal:
        operand = self._operands.operand(node)
        if isinstance(operand, Literal):
            return operand
        raise refuse(f"{piece(node)} where a literal is expected is not supported")


def _chain(node: exp.Expr, kind: type[exp.Expr]) -> list[exp.Expr]:
    """Return the operands of a chain of ANDs or ORs, without recursion: chains may be long."""
    links: list[exp.Expr] = []
    waiting = [node]
    while waiting:
        current = waiting.pop().unnest()
        if isinstance(current, kind):
            waiting += [current.expression, current.this]
        else:
            links.append(current)
    return links


def _like_parts(pattern: str, *, escape: str) -> tuple[str | int | None, ...]:
    parts: list[str | int | None] = []
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            character = next(characters, "")
            if character not in ("%", "_", escape):
                raise InvalidPredicateError(
                    f"where: in the LIKE pattern '{pattern}' the escape character '{escape}'"
                    f" must come before '%', '_' or '{escape}'"
                )
        elif character == "%":
            if not parts or parts[-1] is not None:
                parts.append(None)
            continue
        elif character == "_":
            if parts and isinstance(parts[-1], int):
                parts[-1] += 1
            else:
                parts.append(1)
            continue
        if parts and isinstance(parts[-1], str):
            parts[-1] += character
        else:
            parts.append(character)
    return tuple(parts)

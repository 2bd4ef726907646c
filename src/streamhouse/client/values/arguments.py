"""Arguments of calls, checked and converted, or refused by a clear sentence.

A value with only one possible meaning is taken: a single name for a list, numbers of numpy.

`checked_calls` checks the types of the public calls of a class by the annotations of the calls, so
that a new call is checked, too. The functions check and convert the values.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, Final, TypeVar

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.numbers import whole_number

__all__ = [
    "checked_calls",
    "choice",
    "names",
    "property_texts",
    "seconds",
    "whole",
]

_C = TypeVar("_C", bound=type)
_Test = Callable[[Any], bool]
_CONDITION: Final = "a condition in SQL, as \"item = 'tea' AND price > 3\""
_PROPERTIES: Final = "property -> value, as {'table.log.ttl': '7d'}"
_NAMES: Final = "a list of names, as ['id']"
_FORMS: Final = {
    "columns": _NAMES,
    "properties": _PROPERTIES,
    "updates": _PROPERTIES,
    "consumer": "the name of a consumer, as 'billing'",
    "path": "a text, as 'shop.orders'",
    "statement": "a SELECT, as 'SELECT count(*) FROM shop.orders'",
    "where": _CONDITION,
}
"""Argument -> what it is, if the type of the argument says too little."""


def checked_calls(cls: _C) -> _C:
    """Check the arguments of the public calls of `cls` by their annotations, before each call.

    An argument is not checked if a type of its annotation is not in `_TYPES`: rows, schemas and
    starts have many forms, which the calls themselves check.
    """
    for name, call in list(vars(cls).items()):
        is_public = not name.startswith("_") or name == "__init__"
        if is_public and inspect.isfunction(call):
            setattr(cls, name, _checked(call))
    return cls


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(call).parameters.values())[1:]
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    checks = {p.name: check for p in named if (check := _check_of(p)) is not None}
    if not checks:
        return call
    order = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]

    @functools.wraps(call)
    def checked(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        for name, value in zip(order, args, strict=False):
            if name in checks:
                checks[name](value)
        for name, value in kwargs.items():
            if name in checks:
                checks[name](value)
        return call(self, *args, **kwargs)

    return checked


def _check_of(parameter: inspect.Parameter) -> Callable[[Any], None] | None:
    """Return a function that refuses values of other types; None if the call itself has to."""
    types = _types_of(ast.parse(str(parameter.annotation), mode="eval").body)
    if any(name not in _TYPES for name in types):
        return None
    tests = tuple(_TYPES[name][0] for name in types)
    forms = [_TYPES[name][1] for name in types if name != "None"]
    form = _FORMS.get(parameter.name, " or ".join(forms))

    def check(value: Any) -> None:
        if not any(test(value) for test in tests):
            raise InvalidRequestError(f"{parameter.name} is {form}, not {value!r:.80}")

    return check


def _types_of(annotation: ast.expr) -> list[str]:
    """Return the types of an annotation, without the types inside containers of any values."""
    if isinstance(annotation, ast.BinOp):
        return _types_of(annotation.left) + _types_of(annotation.right)
    text = ast.unparse(annotation)
    is_inside_known = text not in _TYPES and isinstance(annotation, ast.Subscript)
    return [text.partition("[")[0] if is_inside_known else text]


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _is_names(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(name, str) for name in value)
    # An iterator is read only once: `names` checks its names.
    return isinstance(value, str) or _is_list(value)


def _is_whole(value: Any) -> bool:
    return whole_number(value) is not None


def _is_offsets(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_whole(number) for pair in value.items() for number in pair
    )


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


def _is_a(name: str) -> _Test:
    """Return a test for a class of this name: Spark's classes are not loaded here."""
    return lambda value: any(parent.__name__ == name for parent in type(value).__mro__)


# Type in an annotation -> the test of a value, and what the type is in words.
_TYPES: Final[Mapping[str, tuple[_Test, str]]] = {
    "None": (lambda value: value is None, ""),
    "str": (lambda value: isinstance(value, str), "a text"),
    "int": (_is_whole, "a whole number"),
    "float": (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    "bool": (lambda value: type(value).__name__ in ("bool", "bool_"), "True or False"),
    "Callable": (callable, "a function"),
    "Sequence[Any]": (_is_list, "a list"),
    "Sequence[str]": (_is_names, _NAMES),
    "Sequence[Mapping[str, Any]]": (_is_list_of_mappings, "a list of dicts"),
    "Mapping": (lambda value: isinstance(value, Mapping), "a dict"),
    "Mapping[int, int]": (_is_offsets, "bucket -> offset, as {0: 12}"),
    "datetime": (_is_a("datetime"), "a datetime"),
    "AppendWriter": (_is_a("AppendWriter"), "an AppendWriter"),
    "ApplicationClient": (_is_a("ApplicationClient"), "a StreamhouseClient"),
    "Column": (_is_a("Column"), "a Spark column"),
    "DataFrame": (_is_a("DataFrame"), "a frame of Spark"),
    "StagedRejects": (_is_a("StagedRejects"), "a StagedRejects"),
    "SparkSession": (_is_a("SparkSession"), "a SparkSession"),
}


def names(value: Any, *, argument: str) -> tuple[str, ...]:
    """Return names; a text is one name, not its letters."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        names_in = tuple(value)
        if all(isinstance(name, str) for name in names_in):
            return names_in
        value = next(name for name in names_in if not isinstance(name, str))
    raise InvalidRequestError(f"{argument} is {_NAMES}, not {value!r:.80}")


def whole(value: Any, *, argument: str, least: int = 0) -> int:
    """Return a whole number from `least` on."""
    number = whole_number(value, least=least)
    if number is None:
        raise InvalidRequestError(
            f"{argument} is a whole number from {least} on, not {value!r:.80}"
        )
    return number


def seconds(value: Any, *, argument: str) -> float:
    """Return a number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidRequestError(f"{argument} is a number of seconds above 0, not {value!r:.80}")
    return float(value)


def property_texts(value: Any, *, argument: str) -> dict[str, str]:
    """Return properties as texts; numbers and booleans are converted."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{argument} is {_PROPERTIES}, not {value!r:.80}")
    texts = {}
    for name, text in value.items():
        if isinstance(text, bool):
            text = str(text).lower()
        elif isinstance(text, int):
            text = str(text)
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidRequestError(f"{argument}: {name!r:.80} is {text!r:.80}, which is no text")
        texts[name] = text
    return texts


def choice(value: Any, words_allowed: Iterable[str], *, argument: str) -> str:
    """Return a word if it is allowed."""
    words = list(words_allowed)
    if not isinstance(value, str) or value not in words:
        raise InvalidRequestError(f"{argument} is one of {', '.join(words)}, not {value!r:.80}")
    return value

"""`Table` and `Merge` refuse a value of a wrong type before Spark or the service sees it."""

from __future__ import annotations

import inspect
from typing import Any, Final

import pytest

from streamhouse.connector.changes._merge_clauses import Merge
from streamhouse.connector.changes.spark_table import Table
from streamhouse.core.errors import InvalidRequestError

CALLS: Final = [
    (kind, name, parameter)
    for kind in (Table, Merge)
    for name, call in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_") or (kind is Table and name == "__init__")
    for parameter in list(inspect.signature(call).parameters.values())[1:]
    # `on` has many forms, and options are checked by name.
    if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "on"
]


@pytest.mark.parametrize(
    ("kind", "name", "parameter"), CALLS, ids=lambda part: getattr(part, "name", part)
)
@pytest.mark.parametrize("value", [None, 5, [1], object()], ids=["None", "5", "[1]", "object"])
def test_a_wrong_type_is_refused_with_the_name_of_the_argument(
    kind: type, name: str, parameter: inspect.Parameter, value: object
) -> None:
    may_be_none = value is None and "None" in str(parameter.annotation)
    may_be_number = value == 5 and "int" in str(parameter.annotation)
    if may_be_none or may_be_number:
        return
    subject: Any = kind.__new__(kind)

    with pytest.raises(InvalidRequestError, match=f"^{parameter.name} is "):
        getattr(subject, name)(**{parameter.name: value})

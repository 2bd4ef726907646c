"""Values, keys, numbers of writes and the placeholder: each has one rule, and doors that go by it.

- Values are assigned as INSERT INTO assigns them, keys without loss: `write/assignment.py`. What a
  change of `streamhouse.Table` computes comes there by `changes/assigned_values.py`.
- A transaction that Spark numbers says its source and run: else two writes of one number are one.
- Debezium's placeholder is found by `UnavailableValue`, and is never stored.

A door that does one of these on its own is named here, with the reason, or goes by the rule.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import Final

import pytest

from tests.architecture.source_files import SourceFile, library_files

_CONNECTOR: Final = "streamhouse.connector"
_CLIENT: Final = "streamhouse.client"
_RECORDS: Final = "streamhouse.core.model.records"
_DEBEZIUM: Final = "streamhouse.core.text.debezium_rows"

# Name -> the modules that may use it, and why.
USERS: Final[dict[str, dict[str, str]]] = {
    "assigned": {
        f"{_CONNECTOR}.write._assignment": "is the rule",
        f"{_CONNECTOR}.write._write_target": "applies it to all rows of a write",
        f"{_CONNECTOR}.write._sieve": "applies it where rows that do not fit are rejected",
        f"{_CONNECTOR}.changes._assigned_values": "applies it to values of several types",
    },
    "assigned_key": {
        f"{_CONNECTOR}.write._write_target": "applies it to all rows of a write",
        f"{_CONNECTOR}.write._sieve": "applies it where rows that do not fit are rejected",
    },
    "Assignment": {
        f"{_CONNECTOR}.changes._merge_clauses": "asks it for values and keys of each clause",
        f"{_CONNECTOR}.changes._needed_rows": "asks it for the keys of the rows that are needed",
        f"{_CONNECTOR}.changes.spark_table": "makes it, and asks it for values of update",
    },
    "settled": {f"{_CONNECTOR}.changes._commit": "settles what all changes stage"},
    "try_cast": {
        f"{_CONNECTOR}.changes._assigned_values": "converts keys, and sees that nothing is lost",
        f"{_CONNECTOR}.cdc._envelope": "reads the numbers of a source's position",
    },
    # Marks in the options of a write say in which query and run of a stream it is.
    "stream_marks": {
        f"{_CONNECTOR}.changes.spark_table": "adds them to all changes",
        f"{_CONNECTOR}.format._spark_readers": "adds them to what Spark writes to the format",
    },
    "write_options": {
        f"{_CONNECTOR}.changes.spark_table": "adds the marks, or only looks at the options",
        f"{_CONNECTOR}.format.data_source": "gets them with the marks",
        f"{_CONNECTOR}.format.registration": "writes to the format",
        f"{_CONNECTOR}.names._answers": "creates a table, and writes to the format",
    },
    "_unavailable_text": {f"{_CONNECTOR}.cdc._envelope": "asks it of each parsed row"},
    "columns_of": {
        "streamhouse.cdc_source._change_rows": "asks it of each row of `streamhouse cdc`",
        _DEBEZIUM: "asks it of each JSON envelope, of Spark and of the Kafka door",
    },
}

# Who begins a transaction with a version that Spark has not numbered, and why no other has it.
OWN_NUMBERS: Final = {
    "streamhouse.cdc_source._target_table": "positions of the source's log, which only grow",
    "streamhouse.reading.imports.table_import": "positions in the table that is imported",
    f"{_CLIENT}.writing._rejects": "one transaction for each transaction of the rows",
    f"{_CLIENT}.writing.replay": "counted by the service's answer",
}

# Readers of Debezium's envelope -> what they ask for the placeholder.
ENVELOPES: Final = {
    f"{_CONNECTOR}.cdc._envelope": "_unavailable_text",
    "streamhouse.cdc_source._debezium_engine": "placeholder",
    _DEBEZIUM: "columns_of",
}


@cache
def _names(file: SourceFile) -> frozenset[str]:
    return frozenset(
        str(getattr(node, "attr", getattr(node, "id", "")))
        for node in file.nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )


def _texts(file: SourceFile) -> set[str]:
    return {
        node.value
        for node in file.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _calls(function: str, owner: str = "") -> Iterator[tuple[SourceFile, set[str | None]]]:
    """Yield each call of a function or method, with the names of its arguments."""
    for file in library_files():
        for node in file.nodes:
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            of = getattr(getattr(node.func, "value", None), "id", "")
            if name == function and owner in ("", of):
                yield file, {keyword.arg for keyword in node.keywords}


@pytest.mark.parametrize("name", USERS)
def test_values_are_made_by_those_who_are_named(name: str) -> None:
    users = {file.module for file in library_files() if name in _names(file)}

    assert users == USERS[name].keys(), f"go by the rule, or say here why {name} is right"


def test_rows_are_shaped_with_the_keys_that_take_no_loss() -> None:
    (shaped,) = (
        keywords
        for file, keywords in _calls("RowShape")
        if file.module == f"{_CONNECTOR}.write._write_target"
    )
    others = {
        file.module
        for file in library_files()
        if f"{_CONNECTOR}.write._write_target.RowShape" in file.imports
    }

    assert "keys" in shaped
    assert others == {f"{_CONNECTOR}.write._sieve"}, "it is given one, and makes none"


def test_who_commits_rows_from_spark_has_them_assigned() -> None:
    """Rows leave a Spark task by a job, and every job has a target that `resolve_target` made."""
    makers = {file.module for file, _ in _calls("WriteTarget")}
    resolvers = {file.module for file, _ in _calls("resolve_target")}

    assert makers == {f"{_CONNECTOR}.write._write_target"}
    assert resolvers == {f"{_CONNECTOR}.write._writers", f"{_CONNECTOR}.changes._commit"}


def test_a_transaction_with_a_version_says_who_numbers_it() -> None:
    begins = [
        *_calls("begin_transaction"),
        *_calls("begun", "TransactionJob"),
    ]
    silent = {
        file.module
        for file, keywords in begins
        if "version" in keywords and not {"source", "run"} <= keywords
    }

    assert len(begins) >= 8
    assert silent == OWN_NUMBERS.keys(), "give source and run, or say here who numbers it"


def test_who_reads_an_envelope_asks_for_the_placeholder() -> None:
    readers = {
        file.module: _names(file)
        for file in library_files()
        if {"op", "after"} <= _texts(file) or {"e.op", "e.after"} & _texts(file)
    }

    assert readers.keys() == ENVELOPES.keys(), "say here what finds the placeholder"
    assert not [m for m, asked in ENVELOPES.items() if asked not in readers[m]]


def test_the_placeholder_is_spelled_at_one_place() -> None:
    spelling = {
        file.module for file in library_files() if "__debezium_unavailable_value" in _texts(file)
    }

    assert spelling == {f"{_RECORDS}.unavailable_value"}

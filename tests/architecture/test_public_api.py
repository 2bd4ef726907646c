"""The names users import are there, and nothing else is promised."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from types import ModuleType

import pytest

import streamhouse
from streamhouse.core import errors
from tests.architecture.source_files import library_files


def _errors() -> set[str]:
    """Return the names of all errors that a call may raise."""
    found: set[str] = set()
    left = [errors.StreamhouseError]
    while left:
        kind = left.pop()
        found.add(kind.__name__)
        left += [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return found


def test_the_public_names() -> None:
    assert set(streamhouse.__all__) == {
        *_errors(),
        "AppendWriter",
        "CommitResult",
        "LogBatch",
        "MissingExtraError",
        "AsyncStreamhouseClient",
        "Producer",
        "Replayed",
        "StreamhouseClient",
        "Subscription",
        "Table",
        "TableBatch",
        "TableInfo",
        "TableScan",
        "Transaction",
        "TransactionStatus",
        "__version__",
        "attach",
        "lookup_join",
        "lag",
        "cdc",
        "changes",
        "read",
        "register",
        "register_lookup",
        "sql",
    }
    for name in streamhouse.__all__:
        # A function and its module may have one name.
        assert isinstance(getattr(streamhouse, name), ModuleType) is (name == "cdc"), name
    assert set(dir(streamhouse)) >= set(streamhouse.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        streamhouse.conect  # noqa: B018 - looking it up is the act


def test_the_version_is_the_distributions() -> None:
    assert streamhouse.__version__ == importlib.metadata.version("pyspark-streamhouse")


def test_spark_can_discover_the_format() -> None:
    module = importlib.import_module("pyspark_streamhouse")

    assert module.DefaultSource.name() == "streamhouse"


def test_a_broken_connector_does_not_break_discovery_of_other_formats() -> None:
    """Spark asks `hasattr`; anything but False from it would lose every other format too."""
    program = (
        "import sys; sys.modules['streamhouse.connector.format.data_source'] = None\n"
        "import pyspark_streamhouse\n"
        "print(hasattr(pyspark_streamhouse, 'DefaultSource'))"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout.strip() == "False", done.stderr
    assert "Spark cannot use the format 'streamhouse'" in done.stderr


def test_what_a_module_promises_exists() -> None:
    modules = [file.module for file in library_files() if file.path.name != "__main__.py"]

    missing = [
        f"{name}.__all__ names '{promised}'"
        for name in modules
        for module in [importlib.import_module(name)]
        for promised in getattr(module, "__all__", ())
        if not hasattr(module, promised)
    ]
    assert not missing

"""What the reference of `make site`, and `help()`, say of the public classes."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import Final

import griffe
import pytest
import yaml

import streamhouse
from docs.build_site import CALLS, CONSTRUCTED, RESULTS, public_names

ROOT: Final = Path(__file__).resolve().parents[2]
HOMES: Final = {name: home for name, home in public_names().items() if not name.endswith("Error")}
CLASSES: Final = [name for name in HOMES if inspect.isclass(getattr(streamhouse, name))]
# The client's calls without a wait, and the iterator of `read_range`, for which `run` is.
NOT_AWAITED: Final = {"close", "endpoint", "endpoint_of", "read_range"}


@pytest.fixture(scope="module")
def package() -> griffe.Module:
    """The package as mkdocstrings reads it."""
    extensions = griffe.load_extensions(str(ROOT / "docs" / CALLS))
    loader = griffe.GriffeLoader(
        search_paths=[ROOT / "src"], extensions=extensions, allow_inspection=False
    )
    read = loader.load("streamhouse")
    assert isinstance(read, griffe.Module)
    return read


def _shown(package: griffe.Module, home: str) -> griffe.Object | griffe.Alias:
    return package[home.removeprefix("streamhouse.")]


def _methods(cls: type) -> set[str]:
    """The public methods and properties of a class that this package has written."""
    kinds = (types.FunctionType, property, classmethod, staticmethod)
    return {
        name
        for base in cls.__mro__
        if base.__module__.partition(".")[0] == "streamhouse"
        for name, value in vars(base).items()
        if isinstance(value, kinds) and not name.startswith("_")
    }


@pytest.mark.parametrize("name", CLASSES)
def test_the_reference_has_each_public_method(name: str, package: griffe.Module) -> None:
    members = _shown(package, HOMES[name]).all_members
    documented = {each for each, member in members.items() if member.has_docstring}

    assert _methods(getattr(streamhouse, name)) - documented == set()


def test_the_reference_shows_what_is_inherited_and_what_has_no_text() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")

    options = yaml.safe_load(re.sub(r"!!python/\S+ \{.*\}", "x", text))["plugins"][1]
    shown = options["mkdocstrings"]["handlers"]["python"]["options"]
    wanted = ("inherited_members", "merge_init_into_class", "show_if_no_docstring", "summary")
    assert all(shown[option] is True for option in wanted)
    assert shown["filters"] == ["!^_"]
    assert shown["extensions"] == [CALLS]


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_reference_and_help_explain_each_parameter_of_a_constructor(
    name: str, package: griffe.Module
) -> None:
    cls = getattr(streamhouse, name)
    shown = _shown(package, HOMES[name])
    texts = [shown.docstring, shown.all_members["__init__"].docstring]
    explained = {
        parameter.name
        for text in texts
        if text is not None
        for section in text.parse("google")
        if section.kind is griffe.DocstringSectionKind.parameters
        for parameter in section.value
    }
    parameters = set(inspect.signature(cls).parameters)

    assert {parameter.name for parameter in shown.parameters} - {"self"} == parameters
    assert explained == parameters
    # What `help` prints.
    printed = f"{inspect.getdoc(cls)}\n{inspect.getdoc(cls.__init__)}"
    assert all(re.search(rf"^ +{each}: \S", printed, re.MULTILINE) for each in parameters)


def test_each_class_of_a_result_is_on_a_page(package: griffe.Module) -> None:
    on_pages = {f"streamhouse.{result}" for results in RESULTS.values() for result in results}
    results: dict[str, str] = {}
    for name, home in HOMES.items():
        shown = _shown(package, home)
        members = {} if shown.is_module else shown.all_members
        calls = [shown] if shown.is_function else list(members.values())
        for call in calls:
            if not call.is_function or (call.name.startswith("_") and call is not shown):
                continue
            result = call.returns
            if isinstance(result, griffe.Expr):
                results |= dict.fromkeys(_classes(result, package), f"{name}.{call.name}")

    assert {path: call for path, call in results.items() if path not in on_pages} == {}
    assert on_pages <= results.keys() | {home for home in on_pages if ".Schema" in home}


def _classes(expression: griffe.Expr, package: griffe.Module) -> list[str]:
    """The classes of this package in an annotation that have no public name."""
    paths = {
        part.canonical_path
        for part in expression.iterate(flat=True)
        if isinstance(part, griffe.ExprName) and part.canonical_path.startswith("streamhouse.")
    }
    members = [
        package[path.removeprefix("streamhouse.")]
        for path in paths
        if not path.rpartition(".")[2].startswith("_")
    ]
    targets = [each.final_target if isinstance(each, griffe.Alias) else each for each in members]
    return [each.path for each in targets if each.is_class and each.path not in HOMES.values()]


def test_the_async_client_has_each_call_of_the_client() -> None:
    calls = _methods(streamhouse.StreamhouseClient) - NOT_AWAITED

    assert calls - _methods(streamhouse.AsyncStreamhouseClient) == set()
    assert all(
        inspect.iscoroutinefunction(getattr(streamhouse.AsyncStreamhouseClient, name))
        for name in calls
    )

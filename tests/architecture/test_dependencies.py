"""Every package that an installation gets is pinned to one version: no release gets in unseen.

What a pinned version is known to suffer from needs a network to ask: `make audit`.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from streamhouse.core.extras import EXTRAS
from tests.architecture.source_files import ROOT
from tests.support.dependencies import (
    asked_by_client,
    asked_by_extra,
    extra_names,
    installed_closure,
    light_packages,
)

# Extras with an environment of their own.
EXTRAS_ELSEWHERE: Final = ("cdc", "manifests", "peers", "site")


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            found = re.fullmatch(r"([\w.-]+)==([\w.+!]+)(?: *;.*)?", line)
            assert found is not None, f"constraints.txt: '{line}' is not NAME==VERSION"
            pins[canonicalize_name(found[1])] = found[2]
    return pins


def _declared() -> list[Requirement]:
    """What setup.cfg asks for, with the extras that `make setup` installs."""
    extras = [name for name in extra_names() if name not in EXTRAS_ELSEWHERE]
    asked = [requirement for name in extras for requirement in asked_by_extra(name)]
    return [*asked_by_client(), *asked]


def _declared_elsewhere() -> dict[str, Requirement]:
    """What the other extras ask for; packages that need nothing themselves."""
    declared = {requirement.name for requirement in _declared()}
    asked = [r for name in EXTRAS_ELSEWHERE for r in asked_by_extra(name) if r.name not in declared]
    return {canonicalize_name(requirement.name): requirement for requirement in asked}


def test_every_installed_dependency_is_pinned_as_it_is_installed() -> None:
    installed, pins = installed_closure(_declared()), _pins()

    assert {name: pins.get(name) for name in installed} == installed


def test_what_is_installed_elsewhere_is_pinned_within_its_range() -> None:
    pins = _pins()

    outside = {
        name: pins.get(name)
        for name, requirement in _declared_elsewhere().items()
        if name not in pins or pins[name] not in requirement.specifier
    }
    assert not outside


def test_nothing_else_is_pinned() -> None:
    assert set(_pins()) <= {*installed_closure(_declared()), *_declared_elsewhere()}


def test_every_dependency_of_a_user_has_a_lower_and_an_upper_bound() -> None:
    """A bound that is too low is seen by `make test-lowest`."""
    users = [name for name in extra_names() if name not in ("dev", "manifests", "site")]
    asked = [*asked_by_client(), *(r for name in users for r in asked_by_extra(name))]

    unbounded = {
        str(requirement)
        for requirement in asked
        if not any(bound.operator == "==" for bound in requirement.specifier)
        and {bound.operator for bound in requirement.specifier} != {">=", "<"}
    }
    assert not unbounded


def test_an_extra_installs_what_its_parts_import() -> None:
    """The table of `streamhouse.core.extras` and setup.cfg say the same."""
    modules = {
        "jpype1": "jpype",
        "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
        "opentelemetry-sdk": "opentelemetry.sdk",
        "pyiceberg-core": "pyiceberg_core",
    }
    brought = {"lake": {"sqlalchemy"}}
    # Importing them is left to who uses them, where they exist; pyarrow is the client's already.
    quiet = {"pandas", "pyarrow", "uvloop"}

    for name, extra in EXTRAS.items():
        asked = {canonicalize_name(requirement.name) for requirement in asked_by_extra(name)}
        named = {modules.get(package, package.replace("-", "_")) for package in asked} - quiet
        assert named | brought.get(name, set()) >= set(extra.modules), name
        assert set(extra.packages()) >= named, name


def test_the_client_is_light() -> None:
    """Below 300 MB as installed, with what its packages need."""
    closure = light_packages()
    files = [
        file.locate()
        for name in closure
        for file in importlib.metadata.files(name) or ()
        if not str(file).startswith("..")
    ]
    size = sum(Path(str(file)).stat().st_size for file in files if Path(str(file)).exists())

    assert {"pyspark", "pyiceberg", "rocksdict", "fastapi", "pandas"}.isdisjoint(closure)
    assert size < 280_000_000, f"the client's packages have {size / 1e6:.0f} MB"

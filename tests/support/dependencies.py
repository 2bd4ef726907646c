"""What setup.cfg asks for, and what that pulls in as it is installed here."""

from __future__ import annotations

import configparser
import importlib.metadata
from collections.abc import Sequence
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source_files import ROOT

__all__ = [
    "asked_by_client",
    "asked_by_extra",
    "extra_names",
    "installed_closure",
    "light_packages",
]

_OURS: Final = "pyspark-streamhouse"


def light_packages() -> tuple[str, ...]:
    """Return the packages that an installation without extras brings along."""
    return tuple(installed_closure(asked_by_client()))


def asked_by_client() -> list[Requirement]:
    """Return what an installation without extras asks for."""
    return _requirements(_setup()["options"]["install_requires"])


def extra_names() -> tuple[str, ...]:
    """Return the extras of setup.cfg."""
    return tuple(_setup()["options.extras_require"])


def _requirements(text: str) -> list[Requirement]:
    lines = [line.strip() for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup


def asked_by_extra(name: str) -> list[Requirement]:
    """Return what an extra asks for, with the extras of ours that it names."""
    asked = []
    for requirement in _requirements(_setup()["options.extras_require"][name]):
        if canonicalize_name(requirement.name) == _OURS:
            asked += [inner for extra in requirement.extras for inner in asked_by_extra(extra)]
        else:
            asked.append(requirement)
    return asked


def installed_closure(asked: Sequence[Requirement]) -> dict[str, str]:
    """Return name -> version of all that `asked` pulls in, as installed here."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(asked)
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add((name, extras))
        distribution = importlib.metadata.distribution(name)
        found[name] = distribution.version
        for line in distribution.requires or ():
            needed = Requirement(line)
            wants = [{"extra": extra} for extra in (*extras, "")]
            if needed.marker is None or any(needed.marker.evaluate(want) for want in wants):
                needed.marker = None
                waiting.append(needed)
    return found

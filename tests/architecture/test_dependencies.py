"""Every package that an installation gets is pinned to one version: no release gets in unseen.

What a pinned version is known to suffer from needs a network to ask: `make audit`.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import re
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source_files import ROOT

# Extras with an environment of their own.
EXTRAS_ELSEWHERE: Final = ("cdc", "peers")


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            found = re.fullmatch(r"([\w.-]+)==([\w.+!]+)(?: *;.*)?", line)
            assert found is not None, f"constraints.txt: '{line}' is not NAME==VERSION"
            pins[canonicalize_name(found[1])] = found[2]
    return pins


def _requirements(text: str) -> list[Requirement]:
    lines = [line.strip() for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup


def _declared() -> list[Requirement]:
    """What setup.cfg asks for, with the extras that `make setup` installs."""
    setup = _setup()
    extras = setup["options.extras_require"].items()
    texts = [text for name, text in extras if name not in EXTRAS_ELSEWHERE]
    return _requirements("\n".join([setup["options"]["install_requires"], *texts]))


def _declared_elsewhere() -> dict[str, Requirement]:
    """What the other extras ask for; packages that need nothing themselves."""
    extras = _setup()["options.extras_require"]
    needed = [r for name in EXTRAS_ELSEWHERE for r in _requirements(extras[name])]
    return {canonicalize_name(requirement.name): requirement for requirement in needed}


def _installed_closure() -> dict[str, str]:
    """Name -> version of all that `_declared` pulls in, as installed here."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = _declared()
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


def test_every_installed_dependency_is_pinned_as_it_is_installed() -> None:
    installed, pins = _installed_closure(), _pins()

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
    assert set(_pins()) <= {*_installed_closure(), *_declared_elsewhere()}

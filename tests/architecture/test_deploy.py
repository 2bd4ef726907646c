"""What deploy/ starts exists: every option and variable of every file in it; and linters like it.

The linters are those of the extra `manifests`, and systemd's own: a test of one that is not
installed is skipped. No container engine is needed, and none is asked.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click
import pytest
import yaml
from click.testing import CliRunner

from streamhouse.cli import cli
from streamhouse.cli.settings import options_of, variables_of
from streamhouse.client import ENDPOINT_VARIABLE, TOKEN_VARIABLE
from tests.architecture.source_files import ROOT

DEPLOY: Final = ROOT / "deploy"
FILES: Final = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
MANIFESTS: Final = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS: Final = sorted((DEPLOY / "systemd").glob("*.service"))
DOCKERFILE: Final = DEPLOY / "docker" / "Dockerfile"
COMPOSE: Final = DEPLOY / "docker" / "compose.yaml"
KUBERNETES: Final = "1.34"
# Out of 10, the most: systemd-analyze calls 1.4 "OK".
EXPOSURE_MAX: Final = 20

# A unit's `streamhouse serve ...`, lines continued; a manifest's `command: [streamhouse, serve]`.
_SHELL: Final = re.compile(r"streamhouse (\w+) ((?:[^\n\\]|\\\n)*)")
_MANIFEST: Final = re.compile(
    r"command: \[streamhouse, (\w+)\]\n +args:\n((?: +(?:- |#)[^\n]*\n)+)"
)
_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def _command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    return command


def _commands(text: str) -> list[tuple[str, list[str]]]:
    without_comments = re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)
    found = [*_SHELL.findall(without_comments), *_MANIFEST.findall(without_comments)]
    return [(name, _OPTION.findall(rest)) for name, rest in found]


@pytest.mark.parametrize("path", [*MANIFESTS, *UNITS], ids=lambda path: path.name)
def test_its_commands_and_options_exist(path: Path) -> None:
    commands = _commands(path.read_text())

    assert commands
    for name, options in commands:
        known = {option for parameter in _command(name).params for option in parameter.opts}
        assert options
        assert set(options) <= known, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_its_variables_are_of_options(path: Path) -> None:
    known = {ENDPOINT_VARIABLE, TOKEN_VARIABLE}
    for name in ("serve", "tier"):
        known |= {v for option in options_of(_command(name)).values() for v in variables_of(option)}

    assert set(re.findall(r"STREAMHOUSE_[A-Z_]+", path.read_text())) <= known


def test_the_configuration_of_the_units_is_one() -> None:
    path = DEPLOY / "systemd" / "streamhouse.toml"

    done = CliRunner().invoke(cli, ["config", "--config", str(path)])

    assert done.exception is None, done.exception
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"serve", "tier"}


def test_the_image_has_what_there_is() -> None:
    """The extra, the files of the context, the command, and a user without rights."""
    text = DOCKERFILE.read_text()
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    [extra] = re.findall(r'"\.\[(\w+)\]"', text)
    ignored = Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignored if line.startswith("!")]

    assert extra in setup["options.extras_require"]
    assert all(any(ROOT.glob(name)) for name in kept)
    # What the source tree's links lead to is in the context.
    assert {"connector", "storage_service", "tiering", "src", "constraints.txt"} <= set(kept)
    # The service serves these. Docker drops the slash at the end of a pattern.
    assert "docs/*.md" in kept
    assert not any(line.endswith("/") for line in ignored)
    assert "\nUSER 10001:10001\n" in text
    assert '\nENTRYPOINT ["streamhouse"]\nCMD ["serve"]\n' in text
    assert "/ready" in text


def test_hadolint_likes_the_dockerfile() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint did not read the Dockerfile: `make manifests` has it")

    done = subprocess.run([program, DOCKERFILE], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_compose_knows_every_key() -> None:
    compose_spec = pytest.importorskip(
        "compose_spec",
        reason="nobody compared compose.yaml with the specification: `make manifests` does",
    )
    read: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())

    compose_spec.ComposeSpecification.model_validate(read)

    streamhouse = ("one", "two", "worker")
    assert all(read["services"][name]["read_only"] for name in streamhouse)
    assert all(read["services"][name]["cap_drop"] == ["ALL"] for name in streamhouse)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_knows_every_key(path: Path) -> None:
    validator = pytest.importorskip(
        "kubernetes_validate",
        reason="nobody compared the manifests with Kubernetes' schemas: `make manifests` does",
    )

    for document in yaml.safe_load_all(path.read_text()):
        validator.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_no_container_may_more_than_it_needs(path: Path) -> None:
    specs = [
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] in ("StatefulSet", "Deployment")
    ]

    assert specs
    for spec in specs:
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            assert container["securityContext"] == {
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd did not verify the units: it has systemd-analyze",
)
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_knows_every_key_of_a_unit(path: Path, tmp_path: Path) -> None:
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace("/opt/streamhouse/bin/streamhouse", "/bin/true"))

    for command in (
        ["verify", "--man=no"],
        ["security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE_MAX}"],
    ):
        done = subprocess.run(
            ["systemd-analyze", *command, unit],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""

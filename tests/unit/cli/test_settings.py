"""Options from command line, environment and file: which counts, what is refused, what is shown."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from streamhouse.cli import cli
from streamhouse.cli.service_options import open_client
from streamhouse.cli.settings import options_of, variables_of
from streamhouse.core.errors import InvalidRequestError
from streamhouse.storage_service.config import ServiceConfig

COMMANDS = [name for name in cli.list_commands(click.Context(cli)) if name != "config"]


def _config(*arguments: str, env: Mapping[str, str] | None = None) -> Any:
    done = CliRunner().invoke(cli, ["config", "--json", *arguments], env=env, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return {each["option"]: (each["value"], each["source"]) for each in json.loads(done.stdout)}


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "streamhouse.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_has_its_variable(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None

    for flag, option in options_of(command).items():
        wanted = f"STREAMHOUSE_{name}_{flag[2:]}".upper().replace("-", "_")
        assert variables_of(option)[0] == wanted
        assert variables_of(option).count(wanted) == 1


WHO = ("command line", "environment", "file")


@pytest.mark.parametrize(
    "said_by", [who for count in range(4) for who in itertools.combinations(WHO, count)]
)
def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, said_by: tuple[str, ...]
) -> None:
    path = _file(tmp_path, "[serve]\nport = 3\n")
    values = {"command line": "1", "environment": "2", "file": "3"}
    sources = {
        "command line": "command line",
        "environment": "variable STREAMHOUSE_SERVE_PORT",
        "file": f"file {path}",
    }

    found = _config(
        *(["--config", str(path)] if "file" in said_by else []),
        "serve",
        *(["--port", "1"] if "command line" in said_by else []),
        env={"STREAMHOUSE_SERVE_PORT": "2"} if "environment" in said_by else {},
    )

    first = next(iter(said_by), None)
    expected = (["8765"], "default") if first is None else ([values[first]], sources[first])
    assert found["--port"] == expected


def test_a_file_has_flags_lists_and_pairs(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        """
        [serve]
        strict = true
        allowed-host = ["a.example", "b.example"]
        catalog-property = { type = "rest", s3.region = "eu-1", s3.force-virtual-addressing = true }
        body-bytes-max = "8mb"

        [tier]
        endpoint = "http://lake:8765"
        """,
    )

    found = _config("serve", env={"STREAMHOUSE_CONFIG": str(path)})

    source = f"file {path}"
    assert found["--strict"] == (["true"], source)
    assert found["--allowed-host"] == (["a.example", "b.example"], source)
    assert found["--catalog-property"] == (
        ["type=rest", "s3.region=eu-1", "s3.force-virtual-addressing=true"],
        source,
    )
    assert found["--body-bytes-max"] == (["8mb"], source)
    assert found["--data-dir"] == ([], "default")
    assert "--endpoint" not in found


def test_limits_that_nobody_set_are_shown_as_they_are_in_force() -> None:
    found = _config("serve")

    limits = {option.flag: option for option in ServiceConfig.options()}
    assert found["--body-bytes-max"] == (["64MiB"], "default")
    assert {flag: found[flag][1] for flag in limits} == dict.fromkeys(limits, "default")
    for flag, option in limits.items():
        (text,) = found[flag][0]
        assert option.parse(text) == option.default


def test_lists_of_the_environment_are_parted_by_spaces() -> None:
    found = _config("serve", env={"STREAMHOUSE_SERVE_ALLOWED_HOST": "a.example b.example"})

    assert found["--allowed-host"][0] == ["a.example", "b.example"]


def test_without_a_command_it_shows_what_environment_and_file_say(tmp_path: Path) -> None:
    path = _file(tmp_path, "[tier]\nonce = true\n[serve]\nport = 1\n")

    done = CliRunner().invoke(cli, ["config", "--config", str(path)])

    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:3] for line in lines] == [["serve", "--port", "1"], ["tier", "--once", "true"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serve]\nprot = 1", r"\[serve\]: there is no option 'prot'; did you mean 'port'\?"),
        ("[serv]\nport = 1", r"there is no command 'serv'; did you mean 'serve'\?"),
        ("port = 1", r"there is no command 'port'; put it below \[serve\]"),
        ("serve = 1", r"\[serve\] must be a table of options"),
        ("[serve]\nport = 'q'", r"\[serve\], port: 'q' is not a valid integer"),
        ("[serve]\nport = true", r"\[serve\], port must be a text or a number"),
        ("[serve]\nstrict = 'yes'", r"\[serve\], strict must be true or false"),
        ("[serve]\ntiering = 'on'", r"\[serve\], tiering: 'on' is not one of"),
        ("[serve]\nport = =", r"is no TOML: .*line 2"),
        ("[serve]\nport = [1]", r"\[serve\], port must be a text or a number"),
        (
            "[serve]\ncatalog-property = ['s3.secret-access-key=hush-hush']",
            r"'s3.secret-access-key' is a secret; name where it is",
        ),
        (
            "[serve.catalog-property]\nuri = 'postgresql://me:hush-hush@db/lake'",
            r"'uri' is a secret; name where it is",
        ),
    ],
)
def test_what_a_file_cannot_say_is_refused_with_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    path = _file(tmp_path, text)

    with pytest.raises(InvalidRequestError, match=message) as refused:
        _config("--config", str(path), "serve")

    assert str(path) in refused.value.message
    assert "hush-hush" not in refused.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"nothing\.toml cannot be read: No such file"):
        _config("--config", str(tmp_path / "nothing.toml"), "serve")


def test_a_variable_that_is_no_option_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"did you mean 'STREAMHOUSE_SERVE_DATA_DIR'\?"):
        _config("serve", env={"STREAMHOUSE_SERVE_DATADIR": "/data"})


def test_secrets_are_never_shown() -> None:
    found = _config(
        "serve",
        env={
            "STREAMHOUSE_SERVE_CATALOG_PROPERTY": "s3.secret-access-key=hush"
            " uri=postgresql://me:hush@db/lake s3.session-token=@env:TOKEN"
        },
    )

    assert found["--catalog-property"][0] == [
        "s3.secret-access-key=***",
        "uri=postgresql://me@db/lake",
        "s3.session-token=@env:TOKEN",
    ]


@pytest.mark.parametrize("said_by", WHO)
@pytest.mark.parametrize(
    ("command", "option", "good", "bad"),
    [
        ("serve", "disk-max", ("512MiB", "512mb", "536870912"), "512megs"),
        ("serve", "body-bytes-max", ("512MiB", "512mb", "536870912"), "10s"),
        ("serve", "drain-timeout-ms", ("5m", "300s", "300000"), "5MiB"),
        ("import", "interval", ("5m", "300s", "300", "0.5"), "often"),
    ],
)
def test_units_are_the_same_on_the_command_line_in_the_environment_and_in_the_file(
    tmp_path: Path, said_by: str, command: str, option: str, good: tuple[str, ...], bad: str
) -> None:
    """A wrong one is told with its place."""
    variable = f"STREAMHOUSE_{command}_{option}".upper().replace("-", "_")

    def said(text: str) -> Any:
        path = _file(tmp_path, f'[{command}]\n{option} = "{text}"\n')
        first = ["--config", str(path)] if said_by == "file" else []
        last = [f"--{option}", text] if said_by == "command line" else []
        env = {variable: text} if said_by == "environment" else {}
        return _config(*first, command, *last, env=env)[f"--{option}"][0]

    assert [said(text) for text in good] == [[text] for text in good]
    # As of an option that there is not: exit code 2. What is wrong in a file is 1.
    with pytest.raises(InvalidRequestError if said_by == "file" else click.UsageError) as refused:
        said(bad)
    place = {"command line": f"--{option}", "environment": variable, "file": f"[{command}]"}
    assert place[said_by] in refused.value.message
    assert f"'{bad}' must be" in refused.value.message


def test_a_command_asks_the_owner_whatever_the_endpoint_says() -> None:
    with open_client("http://a:1,http://b:1#read_from=any") as client:
        assert client.endpoint == "http://a:1,http://b:1"
        assert not client.transport.any_process.is_used

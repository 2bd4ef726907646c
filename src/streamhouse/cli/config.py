"""`streamhouse config`: the options a command would run with, and the source of each.

Secrets are never shown.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from streamhouse.cli.settings import (
    CONFIG_VARIABLE,
    KEY_VALUE,
    SECRET_REFERENCES,
    leaves_of,
    options_of,
    variables_of,
)
from streamhouse.core.errors import suggestion
from streamhouse.core.extras import MissingExtraError
from streamhouse.core.secret_sources import has_secret, without_secrets

__all__ = ["command"]

_MASK: Final = "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """One option of a command: the value as on the command line, and the source."""

    command: str
    option: str
    value: list[str]
    source: str


@click.command("config", context_settings={"allow_interspersed_args": False})
@click.argument("name", metavar="[COMMAND [OPTIONS OF COMMAND]]", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.option(
    "--config",
    "config_file",
    envvar=CONFIG_VARIABLE,
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The TOML file with options; default: the variable {CONFIG_VARIABLE}.",
)
@click.option("--json", "is_json", is_flag=True, help="For programs.")
@click.pass_context
def command(
    context: click.Context,
    *,
    name: str | None,
    arguments: tuple[str, ...],
    config_file: Path | None,
    is_json: bool,
) -> None:
    """Print the options that are in force for COMMAND, and the source of each.

    The first source counts, in this order: command line, environment, file, default. Without
    COMMAND every option that the environment or the file sets is printed, of all commands. Values
    that COMMAND would refuse are refused.
    """
    group = context.find_root().command
    assert isinstance(group, click.Group)
    names = group.list_commands(context)
    if name is not None and name not in names:
        raise click.UsageError(f"there is no command '{name}'{suggestion(name, names)}")
    file_arguments = () if config_file is None else ("--config", str(config_file))
    settings: list[_Setting] = []
    for command_name in names if name is None else [name]:
        if command_name == "config":
            continue
        try:
            loaded = group.get_command(context, command_name)
        except MissingExtraError:
            # The command's extra is not installed: named alone, it says what to install.
            if name is not None:
                raise
            continue
        assert loaded is not None
        command_settings = _in_force(
            command_name, loaded, [*file_arguments, *arguments], file=config_file
        )
        settings += [
            setting
            for setting in command_settings
            if name is not None or setting.source != "default"
        ]
    if is_json:
        click.echo(json.dumps([asdict(setting) for setting in settings], indent=2))
    elif settings:
        _print(settings)
    else:
        click.echo(
            "neither the environment nor a file sets an option: every option has its default"
        )


def _in_force(
    name: str, command: click.Command, arguments: list[str], *, file: Path | None
) -> Iterator[_Setting]:
    """Return every option with the value that the command would read; raises the errors of the
    command.
    """
    parameters = {
        parameter.name: copy.copy(parameter)
        for leaf in leaves_of(command)
        for parameter in leaf.params
    }
    for parameter in parameters.values():
        # A missing option is shown as missing, not refused.
        parameter.required = False
    probe = click.Command(name, params=list(parameters.values()))
    context = probe.make_context(name, arguments)
    for flag, option in sorted(options_of(probe).items()):
        assert option.name is not None
        source = context.get_parameter_source(option.name)
        value = context.params.get(option.name)
        yield _Setting(
            command=name,
            option=flag,
            value=_texts(option, value),
            source=_source_text(source, option, file),
        )


def _source_text(source: ParameterSource | None, option: click.Option, file: Path | None) -> str:
    if source is ParameterSource.COMMANDLINE:
        return "command line"
    if source is ParameterSource.ENVIRONMENT:
        variable = next(name for name in variables_of(option) if os.environ.get(name))
        return f"variable {variable}"
    if source is ParameterSource.DEFAULT_MAP:
        return f"file {file}"
    return "default"


def _texts(option: click.Option, value: object) -> list[str]:
    values = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
    return [_masked(option, text) for text in map(_text, values)]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _masked(option: click.Option, text: str) -> str:
    """Return a value with its secrets masked."""
    if option.metavar != KEY_VALUE:
        return without_secrets({"value": text}).get("value", _MASK)
    key, _, value = text.partition("=")
    if value.startswith(SECRET_REFERENCES) or not has_secret(key, value):
        return text
    return f"{key}={without_secrets({key: value}).get(key, _MASK)}"


def _print(settings: list[_Setting]) -> None:
    rows = [
        (setting.command, setting.option, text, setting.source)
        for setting in settings
        for text in setting.value or ["(none)"]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[3]]).rstrip())

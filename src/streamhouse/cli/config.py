"""`streamhouse config`: what a command would do with, and what says so. Secrets are never shown."""

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
    """One option of one command: its value as one would write it, and where that comes from."""

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
    """Print the options that are in force for COMMAND, and where each comes from.

    What is first in this order counts: command line, environment, file, default. Without COMMAND
    all that environment and file say, of every command. What COMMAND would refuse is refused.
    """
    group = context.find_root().command
    assert isinstance(group, click.Group)
    names = group.list_commands(context)
    if name is not None and name not in names:
        raise click.UsageError(f"there is no command '{name}'{suggestion(name, names)}")
    given = () if config_file is None else ("--config", str(config_file))
    found: list[_Setting] = []
    for each in names if name is None else [name]:
        if each == "config":
            continue
        try:
            known = group.get_command(context, each)
        except MissingExtraError:
            # Of a client's installation; asked for by name it says what to install.
            if name is not None:
                raise
            continue
        assert known is not None
        settings = _in_force(each, known, [*given, *arguments], file=config_file)
        found += [one for one in settings if name is not None or one.source != "default"]
    if is_json:
        click.echo(json.dumps([asdict(setting) for setting in found], indent=2))
    elif found:
        _print(found)
    else:
        click.echo("neither the environment nor a file says anything: every option has its default")


def _in_force(
    name: str, known: click.Command, arguments: list[str], *, file: Path | None
) -> Iterator[_Setting]:
    """Return every option as the command would read it; raises what the command would raise."""
    parameters = {
        parameter.name: copy.copy(parameter)
        for leaf in leaves_of(known)
        for parameter in leaf.params
    }
    for parameter in parameters.values():
        # What is missing is shown as such, not refused.
        parameter.required = False
    shown = click.Command(name, params=list(parameters.values()))
    context = shown.make_context(name, arguments)
    for flag, option in sorted(options_of(shown).items()):
        assert option.name is not None
        source = context.get_parameter_source(option.name)
        value = context.params.get(option.name)
        yield _Setting(
            command=name,
            option=flag,
            value=_texts(option, value),
            source=_said(source, option, file),
        )


def _said(source: ParameterSource | None, option: click.Option, file: Path | None) -> str:
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
    return [_shown(option, text) for text in map(_text, values)]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(option: click.Option, text: str) -> str:
    """Return a value without what nobody may read over a shoulder."""
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

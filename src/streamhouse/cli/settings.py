"""Options from the environment and from a file, for every command alike.

An option has the value that the first of these gives: the command line, the environment, the file
of `--config`, its default. A list is never put together from two of them. The variable of
`--data-dir` of `streamhouse serve` is `STREAMHOUSE_SERVE_DATA_DIR`: with the command's name in it,
because Kubernetes gives the pods beside a Service `streamhouse` a variable `STREAMHOUSE_PORT`. The
file is TOML with a table for each command:

    [serve]
    data-dir = "/var/lib/streamhouse"
    allowed-host = ["lake.example"]
    catalog-property = { type = "rest", uri = "http://catalog:8181" }

What is no option is refused, in both. The file holds no secret, only the names of files that do.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from streamhouse.core.errors import InvalidRequestError, suggestion

__all__ = [
    "CONFIG_VARIABLE",
    "KEY_VALUE",
    "SECRET_REFERENCES",
    "flag_of",
    "leaves_of",
    "options_of",
    "variables_of",
    "with_settings",
]

CONFIG_VARIABLE: Final = "STREAMHOUSE_CONFIG"
"""Names the file where `--config` does not."""
KEY_VALUE: Final = "KEY=VALUE"
"""What options that take pairs have as their metavar."""
SECRET_REFERENCES: Final = ("@file:", "@env:")
"""How the value of a pair begins that is elsewhere."""
_CONFIG: Final = "config_file"
# By this the command gives a process that it starts anew the password of a database.
_NO_OPTIONS: Final = frozenset({"STREAMHOUSE_CDC_PASSWORD_FD"})


def with_settings(name: str, command: click.Command, *, commands: Sequence[str]) -> click.Command:
    """Let the options of a command come from the environment and a file; returns the command.

    `commands` are the names of all commands, of which the file may have tables.
    """
    for leaf in leaves_of(command):
        # A command is loaded once, and asked for more often.
        if any(parameter.name == _CONFIG for parameter in leaf.params):
            continue
        for option in options_of(leaf).values():
            option.envvar = [_variable(name, option), *variables_of(option)]
        leaf.params.append(
            click.Option(
                ["--config", _CONFIG],
                type=click.Path(dir_okay=False, path_type=Path),
                envvar=CONFIG_VARIABLE,
                is_eager=True,
                expose_value=False,
                callback=functools.partial(_take_file, name=name, all_of=command, names=commands),
                help="TOML file with options; the environment and the command line come before it.",
            )
        )
    return command


def leaves_of(command: click.Command) -> Iterator[click.Command]:
    """Return the command, or what a group consists of."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from leaves_of(inner)
    else:
        yield command


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Return flag -> option, of those that environment and file can have."""
    return {
        flag_of(parameter): parameter
        for leaf in leaves_of(command)
        for parameter in leaf.params
        if isinstance(parameter, click.Option) and parameter.name not in (_CONFIG, "help")
    }


def flag_of(option: click.Option) -> str:
    """Return how an option is written in full, as in `--data-dir`."""
    return max(option.opts, key=len)


def variables_of(option: click.Option) -> tuple[str, ...]:
    """Return the variables that are asked for an option, in this order."""
    given = option.envvar or ()
    return (given,) if isinstance(given, str) else tuple(given)


def _variable(command: str, option: click.Option) -> str:
    text = f"STREAMHOUSE_{command}_{flag_of(option).removeprefix('--')}"
    return text.upper().replace("-", "_")


def _take_file(
    context: click.Context,
    _: click.Parameter,
    path: Path | None,
    *,
    name: str,
    all_of: click.Command,
    names: Sequence[str],
) -> None:
    """Read the file before any other option, so that these find their values in it."""
    options = options_of(all_of)
    _refuse_unknown_variables(name, options, os.environ)
    if path is None:
        return
    found = _read(path, name=name, options=options, names=names)
    here = options_of(context.command)
    values = {
        option.name: _checked(context, option, value, where=f"{path}, [{name}], {flag[2:]}")
        for flag, value in found.items()
        if (option := here.get(flag)) is not None and option.name is not None
    }
    context.default_map = {**(context.default_map or {}), **values}


def _refuse_unknown_variables(
    name: str, options: Mapping[str, click.Option], environment: Mapping[str, str]
) -> None:
    prefix = f"STREAMHOUSE_{name}_".upper().replace("-", "_")
    known = [_variable(name, option) for option in options.values()]
    for variable in sorted(environment):
        if variable.startswith(prefix) and variable not in (*known, *_NO_OPTIONS):
            raise InvalidRequestError(
                f"the variable {variable} is no option of 'streamhouse {name}'"
                f"{suggestion(variable, known)}"
            )


def _read(
    path: Path, *, name: str, options: Mapping[str, click.Option], names: Sequence[str]
) -> dict[str, Any]:
    """Return flag -> value as the file has it, for one command."""
    where = f"configuration file {path}"
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{where} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidRequestError(f"{where} is no TOML: {error}") from error
    for table, content in document.items():
        if table not in names:
            inside = f"; put it below [{name}]" if f"--{table}" in options else ""
            raise InvalidRequestError(
                f"{where}: there is no command '{table}'{inside or suggestion(table, [*names])}"
            )
        if not isinstance(content, dict):
            raise InvalidRequestError(f"{where}: [{table}] must be a table of options")
    found: dict[str, Any] = {}
    for key, value in document.get(name, {}).items():
        if f"--{key}" not in options:
            known = [flag.removeprefix("--") for flag in options]
            raise InvalidRequestError(
                f"{where}, [{name}]: there is no option '{key}'{suggestion(key, known)}"
            )
        found[f"--{key}"] = value
    return found


def _checked(context: click.Context, option: click.Option, value: object, *, where: str) -> object:
    """Return a value of the file as click takes it; raises what names the place in the file."""
    taken: object
    if option.is_flag:
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{where} must be true or false")
        taken = value
    elif option.multiple:
        taken = [*_texts(option, value, where=where)]
    else:
        taken = _text(value, where=where)
    try:
        option.type_cast_value(context, taken)
    except click.UsageError as error:
        raise InvalidRequestError(f"{where}: {error.message}") from error
    return taken


def _texts(option: click.Option, value: object, *, where: str) -> Iterator[str]:
    if isinstance(value, dict) and option.metavar == KEY_VALUE:
        texts = [f"{key}={text}" for key, text in _pairs(value, where=where)]
    elif isinstance(value, list):
        texts = [_text(part, where=where) for part in value]
    else:
        texts = [_text(value, where=where)]
    for text in texts:
        if option.metavar == KEY_VALUE:
            _refuse_secret(text, where=where)
        yield text


def _pairs(
    values: Mapping[str, object], *, where: str, above: str = ""
) -> Iterator[tuple[str, str]]:
    """Return the pairs of a table; `s3.region = "x"` is a table in a table to TOML."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _pairs(value, where=where, above=f"{above}{key}.")
        elif isinstance(value, bool):
            yield above + key, "true" if value else "false"
        else:
            yield above + key, _text(value, where=f"{where}, {above}{key}")


def _text(value: object, *, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InvalidRequestError(f"{where} must be a text or a number")
    return str(value)


def _refuse_secret(text: str, *, where: str) -> None:
    # Not at the top: commands that take no pairs need not wait for it.
    from streamhouse.core.secret_sources import has_secret

    key, _, value = text.partition("=")
    if has_secret(key, value) and not value.startswith(SECRET_REFERENCES):
        raise InvalidRequestError(
            f"{where}: '{key}' is a secret; name where it is, as in {key} = \"@file:PATH\" or"
            f' "@env:NAME"'
        )

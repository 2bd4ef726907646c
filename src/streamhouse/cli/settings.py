"""Options from the environment and from a file, for every command alike.

An option's value comes from the first source with the option: the command line, the environment,
the file of `--config`, the default. Two sources of a list are never combined. The variable of
`--data-dir` of `streamhouse serve` is `STREAMHOUSE_SERVE_DATA_DIR`. The command's name is in the
variable because Kubernetes sets `STREAMHOUSE_PORT` in the pods beside a Service `streamhouse`. The
file is TOML with a table for each command:

    [serve]
    data-dir = "/var/lib/streamhouse"
    allowed-host = ["lake.example"]
    catalog-property = { type = "rest", uri = "http://catalog:8181" }

An unknown option is refused, in the environment and in the file. The file holds no secret, only the
paths of files that do.
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
"""The variable with the path of the file, for commands without `--config`."""
KEY_VALUE: Final = "KEY=VALUE"
"""The metavar of options that take pairs."""
SECRET_REFERENCES: Final = ("@file:", "@env:")
"""The prefixes of a pair's value that refers to a file or a variable."""
_CONFIG: Final = "config_file"
# The command passes a database's password to the process that replaces it by this variable.
_NO_OPTIONS: Final = frozenset({"STREAMHOUSE_CDC_PASSWORD_FD"})


def with_settings(name: str, command: click.Command, *, commands: Sequence[str]) -> click.Command:
    """Let the options of a command come from the environment and a file; returns the command.

    `commands` are the names of all commands: the tables that the file may have.
    """
    for leaf in leaves_of(command):
        # A command is loaded once, and may come here several times.
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
                callback=functools.partial(_apply_file, name=name, root=command, names=commands),
                help="TOML file with options; the environment and the command line come before it.",
            )
        )
    return command


def leaves_of(command: click.Command) -> Iterator[click.Command]:
    """Return the command, or the commands of a group."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from leaves_of(inner)
    else:
        yield command


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Return flag -> option, of the options that the environment and the file can set."""
    return {
        flag_of(parameter): parameter
        for leaf in leaves_of(command)
        for parameter in leaf.params
        if isinstance(parameter, click.Option) and parameter.name not in (_CONFIG, "help")
    }


def flag_of(option: click.Option) -> str:
    """Return an option's full flag, as in `--data-dir`."""
    return max(option.opts, key=len)


def variables_of(option: click.Option) -> tuple[str, ...]:
    """Return the environment variables of an option, in the order in which they count."""
    variables = option.envvar or ()
    return (variables,) if isinstance(variables, str) else tuple(variables)


def _variable(command: str, option: click.Option) -> str:
    text = f"STREAMHOUSE_{command}_{flag_of(option).removeprefix('--')}"
    return text.upper().replace("-", "_")


def _apply_file(
    context: click.Context,
    _: click.Parameter,
    path: Path | None,
    *,
    name: str,
    root: click.Command,
    names: Sequence[str],
) -> None:
    """Read the file before the other options: the options get their values from it."""
    options = options_of(root)
    _refuse_unknown_variables(name, options, os.environ)
    if path is None:
        return
    entries = _read(path, name=name, options=options, names=names)
    leaf_options = options_of(context.command)
    values = {
        option.name: _checked(context, option, value, where=f"{path}, [{name}], {flag[2:]}")
        for flag, value in entries.items()
        if (option := leaf_options.get(flag)) is not None and option.name is not None
    }
    context.default_map = {**(context.default_map or {}), **values}


def _refuse_unknown_variables(
    name: str, options: Mapping[str, click.Option], environment: Mapping[str, str]
) -> None:
    prefix = f"STREAMHOUSE_{name}_".upper().replace("-", "_")
    variables = [_variable(name, option) for option in options.values()]
    for variable in sorted(environment):
        if variable.startswith(prefix) and variable not in (*variables, *_NO_OPTIONS):
            raise InvalidRequestError(
                f"the variable {variable} is no option of 'streamhouse {name}'"
                f"{suggestion(variable, variables)}"
            )


def _read(
    path: Path, *, name: str, options: Mapping[str, click.Option], names: Sequence[str]
) -> dict[str, Any]:
    """Return flag -> value for a command, from the file."""
    where = f"configuration file {path}"
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{where} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidRequestError(f"{where} is no TOML: {error}") from error
    for table, content in document.items():
        if table not in names:
            advice = f"; put it below [{name}]" if f"--{table}" in options else ""
            raise InvalidRequestError(
                f"{where}: there is no command '{table}'{advice or suggestion(table, [*names])}"
            )
        if not isinstance(content, dict):
            raise InvalidRequestError(f"{where}: [{table}] must be a table of options")
    entries: dict[str, Any] = {}
    for key, value in document.get(name, {}).items():
        if f"--{key}" not in options:
            option_names = [flag.removeprefix("--") for flag in options]
            raise InvalidRequestError(
                f"{where}, [{name}]: there is no option '{key}'{suggestion(key, option_names)}"
            )
        entries[f"--{key}"] = value
    return entries


def _checked(context: click.Context, option: click.Option, value: object, *, where: str) -> object:
    """Return a value of the file as click takes it; an error names the place in the file."""
    parameter_value: object
    if option.is_flag:
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{where} must be true or false")
        parameter_value = value
    elif option.multiple:
        parameter_value = [*_texts(option, value, where=where)]
    else:
        parameter_value = _text(value, where=where)
    try:
        option.type_cast_value(context, parameter_value)
    except click.UsageError as error:
        raise InvalidRequestError(f"{where}: {error.message}") from error
    return parameter_value


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
    from streamhouse.core.secret_sources import has_secret  # noqa: PLC0415 - most commands have no pairs

    key, _, value = text.partition("=")
    if has_secret(key, value) and not value.startswith(SECRET_REFERENCES):
        raise InvalidRequestError(
            f"{where}: '{key}' is a secret; name where it is, as in {key} = \"@file:PATH\" or"
            f' "@env:NAME"'
        )

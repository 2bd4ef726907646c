"""The `streamhouse` command: one group, with lazily imported commands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final

import click
from click.shell_completion import CompletionItem

from streamhouse.cli.command_group import CommandGroup, discard_output, is_output_lost
from streamhouse.cli.settings import with_settings
from streamhouse.cli.tuned_malloc import restart_with_tuned_malloc
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.extras import MissingExtraError, extra_of, is_installed, require

__all__ = ["main", "run"]

_COMMANDS: Final = {
    "adopt": (
        "streamhouse.cli.client_commands.adopt",
        "Go on with the lake's rows where the log has different rows.",
    ),
    "backup": (
        "streamhouse.cli.server_commands.backup",
        "Back a data directory up, running or not.",
    ),
    "cdc": ("streamhouse.cli.client_commands.cdc", "Follow the tables of a database."),
    "check": ("streamhouse.cli.server_commands.check", "Verify a data directory, reading only."),
    "completion": ("streamhouse.cli.completion", "Print a shell's completion script."),
    "config": ("streamhouse.cli.config", "Show the options in force, and the source of each."),
    "consumers": ("streamhouse.cli.client_commands.consumers", "Show how far readers are behind."),
    "demo": ("streamhouse.cli.server_commands.demo", "Run a service with a lively example."),
    "dump": ("streamhouse.cli.server_commands.dump", "Show the contents of a log segment."),
    "import": ("streamhouse.cli.client_commands.import_table", "Make a table of an Iceberg table."),
    "maintain": ("streamhouse.cli.client_commands.maintain", "Tidy a lake table now."),
    "rejected": (
        "streamhouse.cli.client_commands.rejected",
        "Show or replay a table's rejected rows.",
    ),
    "restore": ("streamhouse.cli.server_commands.restore", "Make a data directory from a backup."),
    "alter": ("streamhouse.cli.client_commands.alter", "Change a table's columns."),
    "shards": ("streamhouse.cli.client_commands.shards", "Show the processes of a service."),
    "serve": ("streamhouse.cli.server_commands.serve", "Run the storage service."),
    "create": ("streamhouse.cli.row_commands.create", "Make a table."),
    "drop": ("streamhouse.cli.row_commands.drop", "Drop tables."),
    "follow": ("streamhouse.cli.row_commands.follow", "Print rows as they arrive."),
    "head": ("streamhouse.cli.row_commands.head", "Show some rows of a table."),
    "load": ("streamhouse.cli.row_commands.load", "Load files into a table."),
    "query": ("streamhouse.cli.row_commands.query", "Run a SELECT over tables."),
    "tables": ("streamhouse.cli.client_commands.tables", "List tables, or describe one."),
    "top": ("streamhouse.cli.client_commands.top", "Watch tables, rates and lake lag."),
    "tier": ("streamhouse.cli.client_commands.tier", "Move the log into Iceberg."),
}
"""Command name -> its module and its line of the help."""


class _LazyGroup(CommandGroup):
    """Imports a command's module when the command runs: `--help` must not wait for pyspark."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = _COMMANDS[cmd_name][0]
        if not is_installed(extra_of(module)):
            return _command_needing(extra_of(module), cmd_name)
        command = importlib.import_module(module).command
        assert isinstance(command, click.Command)
        if cmd_name == "config":
            return command
        return with_settings(cmd_name, command, commands=list(_COMMANDS))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command to run."""
        if args[0] == "serve" and not ctx.resilient_parsing:
            restart_with_tuned_malloc()
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands with this prefix, without an import."""
        matching = [
            CompletionItem(name, help=text)
            for name, (_, text) in sorted(_COMMANDS.items())
            if name.startswith(incomplete)
        ]
        return [*matching, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, text + _extra_note(module))
                    for name, (module, text) in sorted(_COMMANDS.items())
                ]
            )


def _command_needing(extra: str, name: str) -> click.Command:
    """Return the stand-in for a command whose extra is not installed.

    Running the stand-in, also with `--help`, names the missing extra. Listing and completion work.
    """
    return click.Command(
        name,
        callback=lambda: require(extra, f"'streamhouse {name}'"),
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def _extra_note(module: str) -> str:
    """Return the note in the help for a command whose extra is not installed."""
    extra = extra_of(module)
    return "" if is_installed(extra) else f" [needs the extra '{extra}']"


@click.group(cls=_LazyGroup)
@click.version_option(package_name="pyspark-streamhouse")
def cli() -> None:
    """Streamhouse: one table that is fresh to the millisecond and holds years of history."""


def main() -> None:
    """Run the command line of this process."""
    run(cli)


def run(group: click.Group, arguments: Sequence[str] | None = None) -> None:
    """Run a command; a Streamhouse error is one line on stderr and exit code 1.

    Raises `SystemExit` with every exit code but 0. The arguments are by default the process's.
    """
    try:
        exit_code = group.main(arguments, standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (StreamhouseError, MissingExtraError) as error:
        click.echo(f"streamhouse: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        if not is_output_lost():
            raise
        discard_output()
        reason = error.strerror or error
        click.echo(f"streamhouse: the output cannot be written: {reason}", err=True)
        sys.exit(1)
    if isinstance(exit_code, int):
        sys.exit(exit_code)

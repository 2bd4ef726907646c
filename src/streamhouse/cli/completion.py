"""`streamhouse completion`: the script by which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["command"]

_PROGRAM = "streamhouse"
_VARIABLE = "_STREAMHOUSE_COMPLETE"
"""With this variable set, click answers the shell instead of running a command."""
_FOUND_BY_ZSH = f"$funcstack[1] == _{_PROGRAM}"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script by which SHELL completes the commands and options of streamhouse.

    \b
    bash: streamhouse completion bash > ~/.local/share/bash-completion/completions/streamhouse
    zsh:  streamhouse completion zsh > DIRECTORY/_streamhouse, a DIRECTORY of $fpath
    fish: streamhouse completion fish > ~/.config/fish/completions/streamhouse.fish
    """
    script = get_completion_class(shell)
    assert script is not None, "click knows these shells"
    source = script(context.find_root().command, {}, _PROGRAM, _VARIABLE).source()
    # click's script for fish ends a description at its first comma.
    source = source.replace('string split "," ', 'string split --max 1 "," ')
    # click's script for zsh, found by zsh itself, completes nothing at the second tab.
    click.echo(source.replace("$zsh_eval_context[-1] == loadautofunc", _FOUND_BY_ZSH))

"""What a shell is told when the tab key is pressed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from streamhouse.cli import cli


def _completed(*words: str, incomplete: str = "") -> list[str]:
    complete = ShellComplete(cli, {}, "streamhouse", "_STREAMHOUSE_COMPLETE")
    return [item.value for item in complete.get_completions([*words], incomplete)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str) -> None:
    done = CliRunner().invoke(cli, ["completion", shell])

    assert done.exit_code == 0, done.output
    assert f"_STREAMHOUSE_COMPLETE={shell}_complete" in done.stdout
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=done.stdout, text=True, check=True)


def _with_program(folder: Path) -> dict[str, str]:
    """Return an environment whose command `streamhouse` is this package's."""
    program = folder / "streamhouse"
    program.write_text(f"#!{sys.executable}\nfrom streamhouse.cli import main\nmain()\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}


def test_fish_completes_commands_with_whole_descriptions(tmp_path: Path) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("fish is not installed")
    script = CliRunner().invoke(cli, ["completion", "fish"]).stdout
    environment = _with_program(tmp_path)

    done = subprocess.run(
        [fish, "-c", f"{script}\ncomplete -C 'streamhouse tab'"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )

    assert done.stdout == "tables\tList tables, or describe one.\n"


_ZSH = """
autoload -U compinit
compinit -u -D
compadd() { print -l -- $completions }
_describe() { print -l -- $completions_with_descriptions }
complete() { words=("$@"); CURRENT=$#words; $_comps[streamhouse] }
{load}
complete streamhouse tab
complete streamhouse he
complete streamhouse load t --format ""
"""


@pytest.mark.parametrize("load", ["", "source $fpath[1]/_streamhouse"])
def test_zsh_completes_at_every_tab(load: str, tmp_path: Path) -> None:
    """zsh finds the script in a directory of $fpath, or ~/.zshrc reads it."""
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed")
    script = CliRunner().invoke(cli, ["completion", "zsh"]).stdout
    (tmp_path / "_streamhouse").write_text(script)
    environment = _with_program(tmp_path)

    done = subprocess.run(
        [zsh, "-f"],
        input=f"fpath=({tmp_path} $fpath)\n{_ZSH.replace('{load}', load)}",
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )

    descriptions = ["tables:List tables, or describe one.", "head:Show some rows of a table."]
    assert done.stdout.splitlines() == [*descriptions, "csv", "ndjson", "parquet"], done.stderr


def test_the_script_of_fish_keeps_the_commas_of_a_description() -> None:
    script = CliRunner().invoke(cli, ["completion", "fish"]).stdout

    assert 'string split --max 1 "," $completion' in script


def test_another_shell_is_refused() -> None:
    done = CliRunner().invoke(cli, ["completion", "tcsh"])

    assert done.exit_code == 2
    assert "tcsh" in done.stderr


def test_commands_are_completed() -> None:
    assert _completed() == cli.list_commands(click.Context(cli))
    assert _completed(incomplete="ta") == ["tables"]


def test_options_are_completed_and_no_server_is_started_for_it() -> None:
    assert "--data-dir" in _completed("serve", incomplete="--")
    assert "--sizes" in _completed("tables", incomplete="--si")
    assert _completed("shards", incomplete="m") == ["move"]


def test_the_names_of_commands_cost_no_import_of_a_command() -> None:
    program = (
        "import sys\n"
        "from click.shell_completion import ShellComplete\n"
        "from streamhouse.cli import cli\n"
        "ShellComplete(cli, {}, 'streamhouse', '_X').get_completions([], '')\n"
        "heavy = ('streamhouse.cli.client_commands.tables', 'pyiceberg')\n"
        "print([name for name in sys.modules if name in heavy])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

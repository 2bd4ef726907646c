"""Programs that tests fork are like executed ones: output, exit codes, signals, environment."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked_python import FORKED_FOR_PID, LENGTH
from tests.support.python_process import ForkedProcess, python_for_spark, run_python, start_python

pytestmark = pytest.mark.slow


def _outcome(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    "program",
    [
        "import sys; print(sys.argv, __name__); print('complaint', file=sys.stderr); sys.exit(3)",
        "1 / 0",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'at the end'); raise SystemExit('a reason')",
        "import os; print(os.environ['GIVEN'], os.getcwd()); print(input())",
        "import threading; threading.Timer(0.01, print, ['a thread is waited for']).start()",
    ],
)
def test_a_forked_program_ends_as_an_executed_one(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["-c", program, "one", "2"]
    executed = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GIVEN": "value"},
    )

    forked = run_python(arguments, env={"GIVEN": "value"})

    assert _outcome(forked) == _outcome(executed)


def test_an_exit_code_stays_readable_for_another_thread_that_waits() -> None:
    """Its descriptor's number, given to another file, would let that thread wait for ever."""
    exit_code, exit_code_to = os.pipe()
    os.write(exit_code_to, b"7\n")
    os.close(exit_code_to)
    process = ForkedProcess(0, exit_code, None)

    assert process.wait() == 7

    assert select.select([exit_code], [], [], 0)[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "import sys; print(sys.argv, input()); print('!', file=sys.stderr); sys.exit(3)"),
        ("-c", "import of_the_caller, os; print(of_the_caller.X, os.getcwd())"),
        ("-m", "platform"),
        ("--version",),
    ],
)
def test_what_spark_starts_as_python_does_what_python_does(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_the_caller.py").write_text("X = 5")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    executed, forked = (
        subprocess.run(
            [python, *arguments],
            input="given\n",
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        for python in (sys.executable, python_for_spark())
    )

    assert python_for_spark() != sys.executable
    assert _outcome(forked) == _outcome(executed)


def test_what_spark_starts_as_python_hands_on_that_it_is_to_end() -> None:
    program = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with subprocess.Popen([python_for_spark(), "-c", program], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        forked = int(started.stdout.readline())
        assert forked != started.pid
        started.terminate()
        assert started.wait(60) == 128 + signal.SIGTERM


def test_what_spark_starts_as_python_knows_who_started_it() -> None:
    program = f"import os; print(os.environ['{FORKED_FOR_PID}'])"

    told = subprocess.run([python_for_spark(), "-c", program], stdout=subprocess.PIPE, check=True)

    assert int(told.stdout) == os.getpid()


def test_what_spark_starts_as_python_runs_after_the_server_has_ended() -> None:
    launcher = python_for_spark()
    parent = "import os; print(os.getppid(), os.environ['FORKED_FOR_PID'])"
    server = int(_output_of(launcher, parent).split()[0])

    os.kill(server, signal.SIGKILL)

    assert _output_of(launcher, parent).split() == [str(os.getpid())] * 2
    assert python_for_spark() == launcher
    assert int(_output_of(launcher, parent).split()[0]) not in {server, os.getpid()}


def test_a_request_that_breaks_off_does_not_end_the_server() -> None:
    launcher = python_for_spark()
    parent = "import os; print(os.getppid())"
    server = _output_of(launcher, parent)
    address = str(Path(launcher).with_name("socket"))

    for sent in (b"", b"\0\0", LENGTH.pack(100) + b"{", LENGTH.pack(3) + b"???"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            connection.sendall(sent)

    assert _output_of(launcher, parent) == server


def _output_of(launcher: str, program: str) -> str:
    return subprocess.run(
        [launcher, "-c", program], stdout=subprocess.PIPE, check=True, text=True
    ).stdout


def test_a_module_is_run_as_the_main_one() -> None:
    done = run_python(["-m", "tests.support.clocked_service", "nowhere", "--no-such-option"])

    assert done.returncode == 2
    assert "No such option" in done.stderr


def test_signals_reach_it_and_it_knows_nothing_of_the_server() -> None:
    program = (
        "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(7));"
        " print(len(os.listdir('/dev/fd')), flush=True); signal.pause()"
    )
    with Path(os.devnull).open("rb") as nothing:
        processes = [start_python(["-c", program], stderr=nothing.fileno()) for _ in range(3)]
    for process in processes:
        assert isinstance(process, ForkedProcess)
        assert process.stdout is not None
        with process.stdout as out:
            # Three, and the folder itself: no pipe of another program, and not the server's socket.
            assert out.readline() == b"4\n"
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 7
        process.kill()
        assert process.poll() == 7


def test_waiting_for_one_that_goes_on_ends() -> None:
    with Path(os.devnull).open("rb") as nothing:
        process = start_python(["-c", "import signal; signal.pause()"], stderr=nothing.fileno())
    assert process.stdout is not None
    with process.stdout, pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL

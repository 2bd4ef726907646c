"""Asks `fork_server` to fork `python ARGUMENT...`, and ends as that does. Run as a program:

    python -SE forked_python.py PYTHON SOCKET ARGUMENT...

It starts in a hundredth of a second, since it imports nothing but the standard library. What is
neither `-m` nor `-c` is executed by PYTHON, and so is everything once the server has ended. The
forked program has another parent than this one: who started this one is in its environment, as
FORKED_FOR_PID.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["FORKED_FOR_PID", "LENGTH", "ask_to_fork"]

LENGTH = struct.Struct("!I")
FORKED_FOR_PID = "FORKED_FOR_PID"


def ask_to_fork(
    address: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptors: tuple[int, int, int],
) -> tuple[int, int]:
    """Fork a program with this stdin, stdout and stderr.

    Return its process id, and where its exit code will be read.
    """
    request = json.dumps(
        {
            "arguments": [*arguments],
            "environment": {**environment},
            "directory": str(Path.cwd()),
        }
    ).encode()
    exit_code, exit_code_to = os.pipe()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(address))
            head = LENGTH.pack(len(request))
            socket.send_fds(connection, [head], [*descriptors, exit_code_to])
            connection.sendall(request)
            answer = connection.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(answer) < LENGTH.size:
            raise ConnectionResetError("the server that forks programs has ended")
    except BaseException:
        os.close(exit_code)
        raise
    finally:
        os.close(exit_code_to)
    return LENGTH.unpack(answer)[0], exit_code


def main(python: str, address: str, *arguments: str) -> None:
    if arguments[:1] not in (("-m",), ("-c",)):
        os.execv(python, [python, *arguments])
    os.environ[FORKED_FOR_PID] = str(os.getppid())
    # What comes before the program is known is handed on when it is.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        pid, exit_code = ask_to_fork(Path(address), arguments, os.environ, (0, 1, 2))
    except (ConnectionError, FileNotFoundError):
        # Spark keeps this launcher's path for the whole session, and the server may end before.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execv(python, [python, *arguments])
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # Its input ends when the forked program's own descriptors do.
    for descriptor in (0, 1):
        os.close(descriptor)
    code = int(os.read(exit_code, 16))
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(*sys.argv[1:])

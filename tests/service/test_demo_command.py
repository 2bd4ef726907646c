"""`streamhouse demo` and the lines of `streamhouse serve`, as users start and stop them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from streamhouse.api.client import StreamhouseClient

pytestmark = pytest.mark.slow

_COMMAND: Final = (sys.executable, "-c", "from streamhouse.cli import main; main()")
_TIMEOUT_S: Final = 120


def _lines_until(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if re.search(pattern, line):
            return text
    raise AssertionError(text)


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_demo_lives_until_an_interrupt(tmp_path: Path, is_kept: bool) -> None:
    options = ["--data-dir", str(tmp_path / "data")] if is_kept else []
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("STREAMHOUSE_ENDPOINT", None)
    # The port of the default endpoint is taken, here or by anybody else.
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8765))
            taken.listen()
        except OSError:
            pass
        with subprocess.Popen(
            [*_COMMAND, "demo", "--rate", "400", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as demo:
            text = _lines_until(demo, "format")
            page = re.search(r"page: (http://127\.0\.0\.1:\d+)/", text)
            assert page is not None, text
            assert not page[1].endswith(":8765")
            follow = re.search(r"^  \S*streamhouse (follow .*)$", text, re.MULTILINE)
            assert follow is not None, text
            arrived = subprocess.run(
                [*_COMMAND, *follow[1].split(), "-n", "1"],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=True,
            )
            assert arrived.stdout.splitlines()[0].startswith("order_id\tcustomer_id\titem")
            python = re.search(r'^  \S*python -c "(.*Client.*)"$', text, re.MULTILINE)
            assert python is not None, text
            done = subprocess.run(
                [sys.executable, "-c", python[1]],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=True,
            )
            assert "'customer_id': 7" in done.stdout
            with StreamhouseClient(page[1]) as client:
                assert client.count("shop.orders") > 20_000
                client.wait_tiered("shop.customers", timeout_s=_TIMEOUT_S)
                data = re.search(r"data: (\S+)", text)
                assert data is not None
            demo.send_signal(signal.SIGINT)
            output, errors = demo.communicate(timeout=_TIMEOUT_S)

    assert (demo.returncode, errors) == (0, "")
    ending = "has the data" if is_kept else "is removed"
    assert output.strip().splitlines()[-1] == f"the demo has ended; {data[1]} {ending}"
    assert Path(data[1]).exists() is is_kept
    if is_kept:
        _starts_again(tmp_path / "data")


def _starts_again(data_dir: Path) -> None:
    """The next order has the next number."""
    with subprocess.Popen(
        [*_COMMAND, "demo", "--port", "0", "--data-dir", str(data_dir)],
        stdout=subprocess.PIPE,
        text=True,
    ) as demo:
        page = re.search(r"page: (\S+)/", _lines_until(demo, "format"))
        assert page is not None
        with StreamhouseClient(page[1]) as client:
            ids = client.read("shop.orders", columns=["order_id"])["order_id"].to_pylist()
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=_TIMEOUT_S)

    assert sorted(ids) == [*range(1, len(ids) + 1)]
    assert demo.returncode == 0


def test_a_port_that_was_asked_for_and_is_taken_is_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*_COMMAND, "demo", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"streamhouse: cannot listen on 127.0.0.1 port {port}: ")
    assert [*tmp_path.iterdir()] == []


def test_a_closed_terminal_ends_the_demo_and_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*_COMMAND, "demo", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        # A test under nohup would hand the ignored signal on.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as demo:
        _lines_until(demo, "format")
        assert [*tmp_path.iterdir()]
        demo.send_signal(signal.SIGHUP)
        demo.communicate(timeout=_TIMEOUT_S)

    assert demo.returncode == 0
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("tiering", ["off", "embedded"])
def test_serve_says_page_data_and_tiering(tmp_path: Path, tiering: str) -> None:
    with subprocess.Popen(
        [*_COMMAND, "serve", "--data-dir", "data", "--port", "0", "--tiering", tiering],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    ) as serve:
        text = _lines_until(serve, "tiering")
        serve.send_signal(signal.SIGINT)
        serve.communicate(timeout=_TIMEOUT_S)

    endpoint = text.splitlines()[0].removeprefix("streamhouse listening on ")
    assert text.splitlines()[1:3] == [f"  page: {endpoint}/", f"  data: {tmp_path / 'data'}"]
    if tiering == "off":
        assert "tiering: off" in text
        assert "--tiering embedded" in text
    else:
        assert "tiering: embedded" in text

"""Build the image of deploy/docker, then start the image and compose.yaml in containers. A program:

    make image      (python -m integration.image_trial)

Podman builds and starts the containers; its store is .cache/image. Without a registry, Debian's
packages stand in for the base image, and the store of the tests for the image of the store.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import pyarrow as pa
import yaml

from streamhouse.api.client import StreamhouseClient
from tests.support.free_ports import free_port
from tests.support.waiting import wait_until

ROOT: Final = Path(__file__).parents[1]
DOCKER: Final = ROOT / "deploy" / "docker"
HOME: Final = ROOT / ".cache" / "image"
COMPOSE: Final = (DOCKER / "compose.yaml").read_text()
STORE: Final = f"docker.io/{yaml.safe_load(COMPOSE)['services']['store']['image']}"
[(PYTHON, SUITE), _] = re.findall(
    r"FROM python:([\d.]+)-slim-(\w+)", (DOCKER / "Dockerfile").read_text()
)
BASE: Final = f"docker.io/library/python:{PYTHON}-slim-{SUITE}"
IMAGE: Final = "streamhouse:latest"
PROGRAMS: Final = ("podman", "runc", "debootstrap", "dnsmasq", "iptables")
PACKAGES: Final = (
    "podman runc debootstrap dnsmasq-base iptables golang-github-containernetworking-plugin-dnsname"
)
# A machine's own way to PyPI: for the time of the build only.
MOUNTED: Final = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
# What compose.yaml asks for. /tmp is the only folder outside the volume that can be written.
CONFINED: Final = (
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp"),
    *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
)
# Neither systemd nor the right to raise a limit is needed, and nothing of the machine's own engine.
CONFIGURATION: Final = f"""\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
[network]
network_config_dir = "{HOME}/networks"
"""
STORAGE: Final = f"""\
[storage]
driver = "overlay"
graphroot = "{HOME}/store"
runroot = "{HOME}/run"
"""
ROWS: Final = pa.table({"id": pa.array(range(1_000), pa.int64())})
_PATIENCE_S: Final = 900.0
TOKEN: Final = "the-token-of-the-trial"


def run(*command: str | Path, is_checked: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command of the engine's; its output is shown only if it fails."""
    names = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
    env = os.environ | {variable: str(HOME / name) for variable, name in names.items()}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
    )
    if is_checked and done.returncode:
        raise AssertionError(f"{command}: {done.stdout[-5000:]}{done.stderr[-5000:]}")
    return done


def podman(*arguments: str | Path) -> str:
    """What podman prints."""
    return run("podman", *arguments).stdout.strip()


def is_healthy() -> bool:
    """Whether the image's own health check, run in the container, succeeds."""
    return not run("podman", "healthcheck", "run", "alone", is_checked=False).returncode


def say(text: str, since_s: float) -> None:
    """Print a line of the report."""
    sys.stdout.write(f"{text}: {time.monotonic() - since_s:.1f} s\n")
    sys.stdout.flush()


def make_bases(folder: Path) -> None:
    """Have the two images that no file here builds, from the registry or made by hand."""
    began_s = time.monotonic()
    if run("podman", "image", "exists", BASE, is_checked=False).returncode:
        if run("podman", "pull", BASE, is_checked=False).returncode == 0:
            return say(f"base image {BASE} from its registry", began_s)
        packages = "ca-certificates,netbase,tzdata,python3,python3-venv"
        tree, archive = folder / "base", folder / "base.tar"
        run("debootstrap", "--variant=minbase", f"--include={packages}", SUITE, tree)
        # A relative link: the name is of the tree, not of this machine.
        (tree / "usr/local/bin/python").symlink_to(f"../../bin/python{PYTHON}")
        run(
            "tar",
            "-C",
            tree,
            "--exclude=./var/cache/apt",
            "--exclude=./var/lib/apt/lists",
            "-cf",
            archive,
            ".",
        )
        podman("import", "--change=ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin", archive, BASE)
        say(f"base image {BASE}: no registry, so made of Debian's packages", began_s)
    if run("podman", "image", "exists", STORE, is_checked=False).returncode:
        shutil.copy(Path(sys.executable).with_name("weed"), folder)
        (folder / "Dockerfile").write_text(f'FROM {BASE}\nCOPY weed /weed\nENTRYPOINT ["/weed"]\n')
        podman("build", "--pull=never", "-t", STORE, folder)


def build() -> None:
    """Build the Dockerfile as it is."""
    began_s = time.monotonic()
    mounts = [f"--volume={path}:{path}:ro" for path in MOUNTED if Path(path).exists()]
    # Only Docker's own format has health checks.
    flags = ("--format=docker", "--pull=never", "--network=host", *mounts)
    podman("build", *flags, "-f", DOCKER / "Dockerfile", "-t", IMAGE, ROOT)
    size = int(podman("image", "inspect", IMAGE, "--format={{.Size}}"))
    say(f"image built, {size / 1e6:.0f} MB", began_s)


def serve_alone(token: Path) -> None:
    """`docker run`: rows outlive their container; nothing else is written, no right is held."""
    refused = run("podman", "run", "--rm", IMAGE, is_checked=False)
    assert refused.returncode, "served beyond loopback without a token"
    assert "/run/secrets/streamhouse_token" in refused.stderr, refused.stderr
    assert "/data/streamhouse" in podman("run", "--rm", IMAGE, "config", "serve")
    mounts = ("--volume=rows:/data", f"--volume={token}:/run/secrets/streamhouse_token:ro")
    for turn in (1, 2):
        began_s, port = time.monotonic(), free_port()
        published = f"--publish=127.0.0.1:{port}:8765"
        podman("run", "-d", "--name=alone", *CONFINED, *mounts, published, IMAGE)
        wait_until(is_healthy, "a healthy container")
        say(f"container {turn} on the volume is healthy", began_s)
        with StreamhouseClient(f"http://127.0.0.1:{port}", token=TOKEN) as client:
            if turn == 1:
                client.create_table("t", ROWS.schema)
            client.append("t", ROWS)
            assert client.read("t").num_rows == turn * ROWS.num_rows
        status = podman("exec", "alone", "cat", "/proc/1/status")
        for line in ("Uid:\t10001", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"):
            assert line in status, status
        writes = "touch /tmp/x && ! touch /opt/x && ! touch /run/x"
        podman("exec", "alone", "sh", "-c", writes)
        began_s = time.monotonic()
        podman("stop", "--time=60", "alone")
        assert podman("inspect", "alone", "--format={{.State.ExitCode}}") == "0"
        say("SIGTERM, exit code 0", began_s)
        podman("rm", "alone")
    podman("volume", "rm", "rows")


def compose(folder: Path) -> None:
    """`docker compose up`: rows in the journal, a standby that takes over, tiered rows."""
    ports = [free_port(), free_port()]
    text = COMPOSE
    for port, published in zip(ports, ("127.0.0.1:8765:", "127.0.0.1:8766:"), strict=True):
        assert published in text
        text = text.replace(published, f"127.0.0.1:{port}:")
    (folder / "compose.yaml").write_text(text)
    program = (HOME / "compose/bin/podman-compose", "-f", folder / "compose.yaml")
    began_s = time.monotonic()
    try:
        run(*program, "up", "-d", "--no-build")
        endpoints = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        with StreamhouseClient(endpoints, token=TOKEN, timeout_s=120) as client:
            client.create_table("t", ROWS.schema)
            client.append("t", ROWS)
            say("compose: store, catalog, two services and a worker started; rows taken", began_s)
            began_s = time.monotonic()
            podman("stop", "--time=60", "streamhouse_one_1")
            assert podman("inspect", "streamhouse_one_1", "--format={{.State.ExitCode}}") == "0"
            client.append("t", ROWS)
            say("compose: the owner stopped; its standby took rows", began_s)
            began_s = time.monotonic()
            wait_until(
                lambda: all(
                    position.tiered_offset == 2 * ROWS.num_rows
                    for position in client.table_state("t").positions.values()
                ),
                "rows that the worker tiered",
            )
            say("compose: the worker tiered the rows", began_s)
    finally:
        run(*program, "down", "--volumes")


def main() -> int:
    """Build and try; an AssertionError says what went wrong."""
    if os.geteuid() or not all(map(shutil.which, PROGRAMS)):
        sys.stdout.write(f"Skipped: `make image` needs root, and `apt-get install {PACKAGES}`.\n")
        return 0
    HOME.mkdir(parents=True, exist_ok=True)
    (HOME / "containers.conf").write_text(CONFIGURATION)
    (HOME / "storage.conf").write_text(STORAGE)
    # What an interrupted run left.
    podman("rm", "--all", "--force")
    podman("volume", "prune", "--force")
    with tempfile.TemporaryDirectory(dir=HOME) as name:
        folder = Path(name)
        make_bases(folder)
        build()
        token = folder / "token"
        token.write_text(TOKEN)
        os.chown(token, 10001, 10001)
        token.chmod(0o600)
        serve_alone(token)
        compose(folder)
    podman("image", "prune", "--force")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Certificates for tests, made by the openssl program: a CA, and a server signed by it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Certificates", "make_certificates"]


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: the CA's certificate, and the server's certificate and key."""

    ca: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, *, host: str, key_password: str = "") -> Certificates:
    """Make a CA and a certificate for `host` (`IP:...` or `DNS:...`); skips without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    protect = ("-passout", f"pass:{key_password}") if key_password else ("-nodes",)
    openssl("req", "-x509", *new_key, "-nodes", "-keyout", "ca.key", "-out", "ca.pem",
            "-days", "2", "-subj", "/CN=Test CA",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
    openssl("req", *new_key, *protect, "-keyout", "server.key", "-out", "server.csr",
            "-subj", "/CN=streamhouse")  # fmt: skip
    (folder / "extensions").write_text(f"subjectAltName={host}\nbasicConstraints=CA:FALSE\n")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", "server.pem", "-days", "2",
            "-extfile", "extensions")  # fmt: skip
    return Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")

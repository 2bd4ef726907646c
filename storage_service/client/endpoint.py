"""Where a service is and what vouches for it: one text that travels to executors as it is.

    https://lake.example:8765                     trusted as the machine trusts web sites
    https://lake.example:8765#ca=/etc/lake.pem    trusted if a CA of that file signed it
    https://127.0.0.1:8765#sha256=9f86d0...       trusted if its certificate is exactly that one

`ca` and `sha256` are never sent; the CA file must exist wherever the endpoint is used. Without
either, the variable STREAMHOUSE_CA_FILE names a CA file.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, quote, urlsplit

from streamhouse.storage_service.errors import (
    InvalidRequestError,
    StreamhouseError,
    UnknownOutcomeError,
)

__all__ = ["CA_VARIABLE", "Endpoint", "parse_endpoint", "tls_failure", "with_ca_file"]

CA_VARIABLE: Final = "STREAMHOUSE_CA_FILE"
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A service's URL, and what must vouch for its certificate: nothing means the machine's CAs."""

    url: str
    ca_file: str | None = None
    fingerprint: str | None = None

    def tls_context(self) -> ssl.SSLContext:
        """Return what connections by https are made with.

        Raises `InvalidRequestError` for a file of CAs that is none. With a `fingerprint`, whoever
        connects must compare it.
        """
        ca_file = None
        if self.fingerprint is None:
            ca_file = self.ca_file or os.environ.get(CA_VARIABLE) or None
        if ca_file is not None and not Path(ca_file).is_file():
            raise InvalidRequestError(
                f"CA file {ca_file} does not exist on this machine; it is named by the endpoint,"
                f" the option tls.ca or {CA_VARIABLE}"
            )
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            raise InvalidRequestError(f"CA file {ca_file} cannot be used: {error}") from error
        context.set_alpn_protocols(["http/1.1"])
        context.hostname_checks_common_name = False
        if self.fingerprint is not None:
            # The certificate is known to the byte: neither names nor signatures add anything.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def parse_endpoint(text: str) -> Endpoint:
    """Read an endpoint; raises `InvalidRequestError` for what is no URL of a service."""
    url, _, fragment = text.partition("#")
    url = url.rstrip("/")
    known: dict[str, list[str]] = {}
    try:
        parts = urlsplit(url)
        known = parse_qs(fragment, strict_parsing=bool(fragment))
        # Reading the port checks it.
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_url &= not parts.query
    except ValueError:
        is_url = False
    if not is_url or parts.username is not None or not set(known) <= {"ca", "sha256"}:
        shown = text if "@" not in text else "with a user or password"
        raise InvalidRequestError(
            f"endpoint '{shown}' is not a URL like http://127.0.0.1:8765 or"
            " https://host:8765#ca=FILE"
        )
    return Endpoint(
        url=url,
        ca_file=known["ca"][0] if "ca" in known else None,
        fingerprint=known["sha256"][0] if "sha256" in known else None,
    )


def with_ca_file(endpoint: str, ca_file: str) -> str:
    """Return `endpoint` with `ca_file` to vouch for it, instead of what it may name itself."""
    url = endpoint.partition("#")[0]
    if not url.startswith("https:"):
        raise InvalidRequestError(f"a CA file needs an endpoint https://..., not '{url}'")
    return f"{url}#ca={quote(ca_file, safe='/')}"


def tls_failure(error: ssl.SSLError, *, endpoint: str, request: str) -> StreamhouseError:
    """Return what a TLS error means to the caller."""
    text = str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return InvalidRequestError(
            f"the certificate of {endpoint} is not trusted: {text}; name the CA that signed it with"
            f" {CA_VARIABLE} or the option tls.ca"
        )
    if any(mark in text for mark in _NO_TLS):
        return InvalidRequestError(f"{endpoint} does not speak TLS; try http:// instead")
    return UnknownOutcomeError(
        f"the Streamhouse service at {endpoint} did not answer {request}: {text}"
    )

"""Where a service is and what vouches for it: one text that travels to executors as it is.

    https://lake.example:8765                     trusted as the machine trusts web sites
    https://lake.example:8765#ca=/etc/lake.pem    trusted if a CA of that file signed it
    https://127.0.0.1:8765#sha256=9f86d0...       trusted if its certificate is exactly that one
    http://a:8765,http://b:8765                   one service: whoever of the two is its owner
    http://a:8765,http://b:8765#failover_s=120    the same; a call looks so long for the owner

What follows a `#` is never sent; the CA file must exist wherever the endpoint is used. Without
`ca` and `sha256`, the variable STREAMHOUSE_CA_FILE names a CA file.
"""

from __future__ import annotations

import os
import re
import ssl
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, quote, urlsplit

from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
    UnknownOutcomeError,
)

__all__ = [
    "CA_VARIABLE",
    "FAILOVER_S_DEFAULT",
    "Endpoint",
    "Endpoints",
    "parse_endpoint",
    "parse_endpoints",
    "tls_failure",
    "with_ca_file",
]

CA_VARIABLE: Final = "STREAMHOUSE_CA_FILE"
FAILOVER_S_DEFAULT: Final = 60.0
_FAILOVER_S_MAX: Final = 86_400.0
_TOLD_URL: Final = re.compile(r"https?://[A-Za-z0-9._:\[\]-]{1,255}(/[A-Za-z0-9._~/-]{0,255})?")
_FRAGMENT_KEYS: Final = {"ca", "sha256", "failover_s"}
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A service's URL, and what must vouch for its certificate: nothing means the machine's CAs."""

    url: str
    ca_file: str | None = None
    fingerprint: str | None = None

    @property
    def is_tls(self) -> bool:
        """Whether it is reached by TLS."""
        return self.url.startswith("https:")

    @property
    def place(self) -> tuple[str, int, str]:
        """Host, port and path, alike for two texts that mean the same."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if self.is_tls else 80), parts.path

    @property
    def text(self) -> str:
        """What `parse_endpoint` reads as this endpoint."""
        given = {"ca": self.ca_file, "sha256": self.fingerprint}
        fragment = "&".join(f"{k}={quote(v, safe='/')}" for k, v in given.items() if v is not None)
        return f"{self.url}#{fragment}" if fragment else self.url

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
        # Python 3.11 before 3.11.4 leaves it to the machine's OpenSSL.
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.hostname_checks_common_name = False
        if self.fingerprint is not None:
            # The certificate is known to the byte: neither names nor signatures add anything.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The processes that may be the owner of one service, in the order in which they are asked.

    `failover_s` is how long a call looks for the owner after it has first failed.
    """

    listed: tuple[Endpoint, ...]
    failover_s: float = FAILOVER_S_DEFAULT

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs, without what vouches for their certificates."""
        return tuple(endpoint.url for endpoint in self.listed)

    def at(self, url: str) -> Endpoint:
        """Return the endpoint at `url`; one that is not listed is trusted as the first one is."""
        for endpoint in self.listed:
            if endpoint.url == url:
                return endpoint
        return replace(self.listed[0], url=url)

    def told(self, url: str | None) -> str | None:
        """Return the URL that a service told, as it is listed here; None for what not to follow.

        The token goes wherever it leads, so it never leads from https to http.
        """
        if url is None or not _TOLD_URL.fullmatch(url):
            return None
        try:
            told = parse_endpoint(url)
        except InvalidRequestError:
            return None
        if not told.is_tls and self.listed[0].is_tls:
            return None
        for endpoint in self.listed:
            if endpoint.place == told.place:
                return endpoint.url
        return told.url


def parse_endpoints(text: str) -> Endpoints:
    """Read one endpoint, or several of one service with commas between them.

    Raises `InvalidRequestError` naming what is no URL of a service, or is there twice.
    """
    parts = [part.strip() for part in text.split(",")]
    listed = tuple(parse_endpoint(part) for part in parts)
    shown = ", ".join(endpoint.url for endpoint in listed)
    if len({endpoint.is_tls for endpoint in listed}) > 1:
        raise InvalidRequestError(f"the endpoints {shown} must be all http or all https")
    [(place, count)] = Counter(endpoint.place for endpoint in listed).most_common(1)
    if count > 1:
        raise InvalidRequestError(
            f"the endpoints {shown} have {place[0]}:{place[1]}{place[2]} twice; name each once"
        )
    given = {found for part in parts if (found := _failover_of(part)) is not None}
    if len(given) > 1:
        raise InvalidRequestError(f"the endpoints {shown} have more than one failover_s; name one")
    return Endpoints(listed=listed, failover_s=next(iter(given), FAILOVER_S_DEFAULT))


def parse_endpoint(text: str) -> Endpoint:
    """Read one endpoint; raises `InvalidRequestError` for what is no URL of a service."""
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
    if not is_url or parts.username is not None or not set(known) <= _FRAGMENT_KEYS:
        shown = text if "@" not in text else "with a user or password"
        raise InvalidRequestError(
            f"endpoint '{shown}' is not a URL like http://127.0.0.1:8765 or"
            " https://host:8765#ca=FILE; several have commas between them"
        )
    return Endpoint(
        url=url,
        ca_file=known["ca"][0] if "ca" in known else None,
        fingerprint=known["sha256"][0] if "sha256" in known else None,
    )


def _failover_of(text: str) -> float | None:
    """Return the `failover_s` of one endpoint, if it has one."""
    given = parse_qs(text.partition("#")[2]).get("failover_s")
    if given is None:
        return None
    try:
        seconds = float(given[0])
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _FAILOVER_S_MAX:
        raise InvalidRequestError(
            f"failover_s of an endpoint is a number of seconds up to {_FAILOVER_S_MAX:g}, not"
            f" '{given[0]}'"
        )
    return seconds


def with_ca_file(endpoint: str, ca_file: str) -> str:
    """Return `endpoint` with `ca_file` to vouch for it, instead of what it may name itself.

    Of several, it vouches for each.
    """
    parts = []
    for part in endpoint.split(","):
        url = part.strip().partition("#")[0]
        if not url.startswith("https:"):
            raise InvalidRequestError(f"a CA file needs an endpoint https://..., not '{url}'")
        failover_s = _failover_of(part)
        kept = "" if failover_s is None else f"&failover_s={failover_s:g}"
        parts.append(f"{url}#ca={quote(ca_file, safe='/')}{kept}")
    return ",".join(parts)


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

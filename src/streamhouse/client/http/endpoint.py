"""A service's address and trust settings: one text, passed to executors unchanged.

    https://lake.example:8765                     trusted as the machine trusts web sites
    https://lake.example:8765#ca=/etc/lake.pem    trusted if a CA of that file signed it
    https://127.0.0.1:8765#sha256=9f86d0...       trusted if the certificate has this fingerprint
    http://a:8765,http://b:8765                   a service with two processes
    http://a:8765,http://b:8765#failover_s=120    the same; a call searches 120 s for the owner
    http://a:8765,http://b:8765#read_from=any     the same; any of them answers reads

The part after a `#` is never sent; the CA file must exist wherever the endpoint is used. Without
`ca` and `sha256`, the variable STREAMHOUSE_CA_FILE names a CA file.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
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
    "speaks_tls",
    "tls_failure",
    "with_ca_file",
    "with_read_from",
]

CA_VARIABLE: Final = "STREAMHOUSE_CA_FILE"
FAILOVER_S_DEFAULT: Final = 60.0
_FAILOVER_S_MAX: Final = 86_400.0
_ANSWER_URL: Final = re.compile(r"https?://[A-Za-z0-9._:\[\]-]{1,255}(/[A-Za-z0-9._~/-]{0,255})?")
_FRAGMENT_KEYS: Final = {"ca", "sha256", "failover_s", "read_from"}
_READ_FROM: Final = ("owner", "any")
_GREETING_S: Final = 2.0
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A service's URL, and the trust settings for its certificate; by default the machine's CAs."""

    url: str
    ca_file: str | None = None
    fingerprint: str | None = None

    @property
    def is_tls(self) -> bool:
        """Whether the endpoint uses TLS."""
        return self.url.startswith("https:")

    @property
    def place(self) -> tuple[str, int, str]:
        """Host, port and path, equal for two texts with the same meaning."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if self.is_tls else 80), parts.path

    @property
    def text(self) -> str:
        """The text that `parse_endpoint` reads as this endpoint."""
        trust = {"ca": self.ca_file, "sha256": self.fingerprint}
        fragment = "&".join(f"{k}={quote(v, safe='/')}" for k, v in trust.items() if v is not None)
        return f"{self.url}#{fragment}" if fragment else self.url

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context for connections to the endpoint.

        Raises `InvalidRequestError` for an invalid file of CAs. With a `fingerprint`, the caller
        must compare the certificate's.
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
            # The fingerprint pins the whole certificate: names and signatures add nothing.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The possible owners of a service, in the order of requests.

    `failover_s` is how long a call searches for the owner after its first failure. `read_from` says
    who answers lookups and scans: the `owner`, or `any` listed process.
    """

    listed: tuple[Endpoint, ...]
    failover_s: float = FAILOVER_S_DEFAULT
    read_from: str = "owner"

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs, without trust settings."""
        return tuple(endpoint.url for endpoint in self.listed)

    def at(self, url: str) -> Endpoint:
        """Return the endpoint at `url`; an unlisted URL has the trust settings of the first
        endpoint.
        """
        for endpoint in self.listed:
            if endpoint.url == url:
                return endpoint
        return replace(self.listed[0], url=url)

    def resolve(self, url: str | None) -> str | None:
        """Return the listed form of a URL from an answer; None for a URL not to follow.

        The client sends its token to the URL, so the URL never leads from https to http.
        """
        if url is None or not _ANSWER_URL.fullmatch(url):
            return None
        try:
            named = parse_endpoint(url)
        except InvalidRequestError:
            return None
        if not named.is_tls and self.listed[0].is_tls:
            return None
        for endpoint in self.listed:
            if endpoint.place == named.place:
                return endpoint.url
        return named.url


def parse_endpoints(text: str) -> Endpoints:
    """Read an endpoint, or the endpoints of a service with commas between.

    Raises `InvalidRequestError` naming an invalid or a repeated URL.
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
    of_all: dict[str, Any] = {}
    for name, read in _OF_ALL.items():
        values = {read(value) for part in parts if (value := _setting(part, name)) is not None}
        if len(values) > 1:
            raise InvalidRequestError(f"the endpoints {shown} have more than one {name}; name one")
        if values:
            of_all[name] = values.pop()
    return Endpoints(listed=listed, **of_all)


def parse_endpoint(text: str) -> Endpoint:
    """Read one endpoint; raises `InvalidRequestError` for an invalid URL."""
    url, _, fragment = text.partition("#")
    url = url.rstrip("/")
    options: dict[str, list[str]] = {}
    try:
        parts = urlsplit(url)
        options = parse_qs(fragment, strict_parsing=bool(fragment))
        # Reading the port checks it.
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_url &= not parts.query
    except ValueError:
        is_url = False
    if not is_url or parts.username is not None or not set(options) <= _FRAGMENT_KEYS:
        shown = text if "@" not in text else "with a user or password"
        raise InvalidRequestError(
            f"endpoint '{shown}' is not a URL like http://127.0.0.1:8765 or"
            " https://host:8765#ca=FILE; several have commas between them"
        )
    return Endpoint(
        url=url,
        ca_file=options["ca"][0] if "ca" in options else None,
        fingerprint=options["sha256"][0] if "sha256" in options else None,
    )


def _setting(text: str, name: str) -> str | None:
    """Return a setting of one endpoint, or None."""
    values = parse_qs(text.partition("#")[2]).get(name)
    return None if values is None else values[0]


def _failover_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _FAILOVER_S_MAX:
        raise InvalidRequestError(
            f"failover_s of an endpoint is a number of seconds up to {_FAILOVER_S_MAX:g}, not"
            f" '{text}'"
        )
    return seconds


def _read_from(text: str) -> str:
    if text not in _READ_FROM:
        raise InvalidRequestError(f"read_from is one of {', '.join(_READ_FROM)}, not {text!r:.80}")
    return text


# Settings of the whole service, which any of several endpoints may have: name -> its reader.
_OF_ALL: Final[Mapping[str, Callable[[str], Any]]] = {
    "failover_s": _failover_s,
    "read_from": _read_from,
}


def with_read_from(endpoint: str, read_from: str) -> str:
    """Return `endpoint` with `read_from` in place of its own; raises for an unknown word."""
    *others, last = endpoint.split(",")
    parts = [_with_settings(part, in_place_of=("read_from",)) for part in others]
    settings = [f"read_from={read_from}"] if _read_from(read_from) == "any" else []
    return ",".join([*parts, _with_settings(last, *settings, in_place_of=("read_from",))])


def with_ca_file(endpoint: str, ca_file: str) -> str:
    """Return `endpoint` with `ca_file` in place of its trust settings.

    The file applies to each of several endpoints.
    """
    parts = []
    for part in endpoint.split(","):
        url = part.strip().partition("#")[0]
        if not url.startswith("https:"):
            raise InvalidRequestError(f"a CA file needs an endpoint https://..., not '{url}'")
        setting = f"ca={quote(ca_file, safe='/')}"
        parts.append(_with_settings(part, setting, in_place_of=("ca", "sha256")))
    return ",".join(parts)


def _with_settings(text: str, *settings: str, in_place_of: Collection[str]) -> str:
    """Return one endpoint with `settings` in place of those with some names."""
    url, _, fragment = text.strip().partition("#")
    kept = [s for s in fragment.split("&") if s and s.partition("=")[0] not in in_place_of]
    return "#".join([url, "&".join([*kept, *settings])]) if kept or settings else url


def speaks_tls(url: str) -> bool:
    """Whether the port of an `http://` URL answers a greeting of TLS. Nothing else is sent."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((parts.hostname, parts.port or 80), _GREETING_S) as opened,
            context.wrap_socket(opened),
        ):
            return True
    except OSError:
        return False


def tls_failure(error: ssl.SSLError, *, endpoint: str, request: str) -> StreamhouseError:
    """Return the caller's error for a TLS error."""
    text = str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        if "mismatch" in text:
            return InvalidRequestError(
                f"the certificate of {endpoint} is for another name: {text}; use a name of the"
                " certificate in the endpoint"
            )
        return InvalidRequestError(
            f"the certificate of {endpoint} is not trusted: {text}; name the CA that signed it with"
            f" {CA_VARIABLE} or the option tls.ca"
        )
    if any(mark in text for mark in _NO_TLS):
        return InvalidRequestError(f"{endpoint} does not speak TLS; try http:// instead")
    return UnknownOutcomeError(
        f"the Streamhouse service at {endpoint} did not answer {request}: {text}"
    )

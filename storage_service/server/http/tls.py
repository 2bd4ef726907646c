"""The service's certificate: checked before anything is opened, and known by its fingerprint."""

from __future__ import annotations

import hashlib
import logging
import ssl
from pathlib import Path

from streamhouse.storage_service.config import ServiceConfig, is_loopback
from streamhouse.storage_service.errors import InvalidRequestError
from streamhouse.storage_service.model.secret_sources import read_private

__all__ = ["certificate_fingerprint", "tls_context"]

_logger = logging.getLogger(__name__)


def tls_context(config: ServiceConfig) -> ssl.SSLContext | None:
    """Return what TLS is spoken with; None without a certificate.

    Then a warning if tokens will cross the network readable by everybody on the way. Raises
    `InvalidRequestError` if certificate and key cannot be used together.
    """
    if config.tls_certificate_file is None:
        if not is_loopback(config.host):
            _logger.warning("event=tokens_in_the_clear host=%s advice='--tls-cert'", config.host)
        return None
    if config.tls_key_file is not None:
        read_private(config.tls_key_file, kind="TLS key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An empty password instead of None: a service must not ask on a terminal.
        context.load_cert_chain(
            config.tls_certificate_file, config.tls_key_file, config.tls_key_password or ""
        )
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"--tls-cert {config.tls_certificate_file} and --tls-key {config.tls_key_file} cannot"
            f" be used: {error}"
        ) from error
    return context


def certificate_fingerprint(path: Path) -> str:
    """Return the SHA-256 of the first certificate of a PEM file, which is the service's own."""
    end = "-----END CERTIFICATE-----"
    text = path.read_text(encoding="ascii", errors="replace")
    first = text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()

"""The certificates of the service in this process, for a worker beside it.

Such a worker knows its service by the certificate itself, which need not name the address that both
are at. `https://127.0.0.1:8765#sha256=own` means any that the service has shown since it started:
a certificate may be replaced while it runs.
"""

from __future__ import annotations

from typing import Final

__all__ = ["OWN_CERTIFICATE", "is_own_certificate", "remember_own_certificate"]

OWN_CERTIFICATE: Final = "own"
"""In the place of a fingerprint."""

_fingerprints: Final[set[str]] = set()


def remember_own_certificate(fingerprint: str) -> None:
    """Note that the service of this process shows this certificate, or is about to."""
    _fingerprints.add(fingerprint)


def is_own_certificate(fingerprint: str) -> bool:
    """Whether the service of this process has shown the certificate."""
    return fingerprint in _fingerprints

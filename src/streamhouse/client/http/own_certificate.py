"""The certificates of the service in this process, for a worker beside it.

The worker trusts the certificate itself, which need not name the address of this process.
`https://127.0.0.1:8765#sha256=own` means any certificate shown by the service since its start: a
certificate may be replaced at run time.
"""

from __future__ import annotations

from typing import Final

__all__ = ["OWN_CERTIFICATE", "is_own_certificate", "remember_own_certificate"]

OWN_CERTIFICATE: Final = "own"
"""Stands for a fingerprint."""

_fingerprints: Final[set[str]] = set()


def remember_own_certificate(fingerprint: str) -> None:
    """Note a certificate that the service of this process shows, or is about to show."""
    _fingerprints.add(fingerprint)


def is_own_certificate(fingerprint: str) -> bool:
    """Return whether the service of this process has shown the certificate."""
    return fingerprint in _fingerprints

"""Where a database is, and that its password is shown nowhere."""

from __future__ import annotations

import pytest

from streamhouse.cdc_source.source_address import SourceAddress
from streamhouse.core.errors import InvalidRequestError


def test_a_full_url() -> None:
    found = SourceAddress.parse(
        "postgres://me:s%40cret@db.example:6543/shop?sslmode=require", environment={}
    )

    assert (found.host, found.port, found.user) == ("db.example", 6543, "me")
    assert found.password == "s@cret"
    assert found.jdbc_url() == "jdbc:postgresql://db.example:6543/shop"
    assert found.jdbc_properties()["sslmode"] == "require"
    assert "cret" not in f"{found} {found!r}"


def test_what_is_left_out_comes_from_the_environment() -> None:
    given = {"PGUSER": "me", "PGPASSWORD": "secret", "PGPORT": "6543", "PGHOST": "db"}

    found = SourceAddress.parse("postgresql:///shop", environment=given)

    assert (found.host, found.port, found.user, found.password) == ("db", 6543, "me", "secret")
    assert SourceAddress.parse("postgres://you@x/y", password="other").password == "other"


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:secret@host/db",
        "postgres://me:secret@host",
        "postgres://me:secret@host:port/db",
        "postgres://me:secret@host/db?color=red",
        "postgres://me:secret@host/db?sslmode=maybe",
        "postgres://me:sec/ret:secret@host/db",
        "postgres://me:sec@ret:secret@host",
    ],
)
def test_a_refusal_does_not_repeat_the_password(url: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SourceAddress.parse(url, environment={})

    assert "sec" not in str(caught.value)
    assert "ret" not in str(caught.value)

"""What clients of the REST catalog never see of the properties of the catalog behind it."""

from __future__ import annotations

import pytest

from streamhouse.storage_service.rest_catalog._catalog_properties import HiddenValues


@pytest.mark.parametrize(
    ("key", "value", "secret"),
    [
        ("token", "t0ken-of-b", "t0ken-of-b"),
        ("token", "t0ken-of-b\n", "t0ken-of-b"),
        ("credential", "client:s3cret", "s3cret"),
        ("header.Authorization", "Bearer t0ken-of-b", "t0ken-of-b"),
        ("s3.secret-access-key", "abcd/efgh", "abcd/efgh"),
        ("uri", "postgresql+psycopg2://me:p%40ss@db/lake", "p%40ss"),
        ("uri", "postgresql+psycopg2://me:p%40ss@db/lake", "p@ss"),
    ],
)
def test_a_secret_is_shown_as_stars(key: str, value: str, secret: str) -> None:
    hidden = HiddenValues({key: value, "warehouse": "s3://lake"})

    assert hidden.without(f"cannot ask s3://lake: '{secret}' is wrong") == (
        "cannot ask s3://lake: '***' is wrong"
    )


def test_what_is_no_secret_stays() -> None:
    properties = {
        "token-refresh-enabled": "true",
        "s3.access-key-id": "AKIA1234",
        "uri": "https://catalog.example/api",
        "credential": "client:s3cret",
        "snapshot-token": "true",
        "token": "",
    }
    message = "true: client AKIA1234 of https://catalog.example/api was not found"

    assert HiddenValues(properties).without(message) == message

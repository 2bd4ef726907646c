"""The grants file: what it says, what is wrong with it, and how it is read again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from streamhouse.core.errors import InvalidRequestError
from streamhouse.storage_service.server.access._grants import Grants, load_grants, token_hash
from streamhouse.storage_service.server.caller import Caller, Grant, Level

HASH = token_hash(b"t0ken")


def _entry(name: str, token: str, *grants: str) -> str:
    listed = ", ".join(f'"{grant}"' for grant in grants)
    digest = token_hash(token.encode())
    return f'[[token]]\nname = "{name}"\nsha256 = "{digest}"\ngrants = [{listed}]\n'


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("grant", "level", "scope", "expected"),
    [
        ("read:sales.orders", Level.READ, "sales.orders", True),
        ("read:sales.orders", Level.WRITE, "sales.orders", False),
        ("read:sales.orders", Level.READ, "sales.orders2", False),
        ("read:sales.orders", Level.READ, "sales.*", False),
        ("admin:sales.orders", Level.READ, "sales.orders", True),
        ("write:sales.*", Level.WRITE, "sales.orders", True),
        ("write:sales.*", Level.READ, "sales.*", True),
        ("write:sales.*", Level.WRITE, "sales2.orders", False),
        ("write:sales.*", Level.WRITE, "sales.inner.orders", False),
        ("admin:sales.*", Level.READ, "service", False),
        ("admin:service.*", Level.READ, "service", False),
        ("read:service", Level.READ, "service", True),
        ("admin:service", Level.READ, "service.orders", False),
        ("admin:*", Level.ADMIN, "service", True),
        ("read:lake", Level.READ, "lake", True),
        ("read:lake", Level.READ, "lake.orders", False),
        ("read:lake.orders", Level.READ, "lake", False),
        ("read:lake.*", Level.READ, "lake", False),
        ("admin:service", Level.READ, "lake", False),
        ("read:*", Level.READ, "lake", True),
        ("admin:*", Level.ADMIN, "*", True),
        ("read:*", Level.READ, "a.b", True),
        ("read:*", Level.WRITE, "a.b", False),
        ("admin:a.b", Level.ADMIN, "*", False),
    ],
)
def test_what_a_grant_allows(grant: str, level: Level, scope: str, expected: bool) -> None:
    assert Caller("c", (Grant.parse(grant),)).may(level, scope) is expected


@pytest.mark.parametrize(
    "text", ["read", "read:", "own:a.b", "read:a", "read:a.b.c", "read:*.b", "read:a.b ", 7]
)
def test_what_is_no_grant_is_refused(text: object) -> None:
    with pytest.raises(InvalidRequestError, match="is not LEVEL:SCOPE"):
        Grant.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[token", "grants file"),
        ("tokens = 1", "unknown key 'tokens'"),
        ('[[token]]\nname = "a"', "token 1 must have name, sha256 and grants"),
        (f'[[token]]\nname="a"\nsha256="{HASH}"\ngrants="read:*"', "grants must be a list"),
        (f'[[token]]\nname="a b"\nsha256="{HASH}"\ngrants=[]', "name must be 1 to 100"),
        (f'[[token]]\nname="owner"\nsha256="{HASH}"\ngrants=[]', "the name 'owner' is taken"),
        (_entry("a", "x") + _entry("a", "y"), "the name 'a' is taken"),
        (_entry("a", "x") + _entry("b", "x"), "another entry has the same sha256"),
        (_entry("a", "x", "read:everything"), "is not LEVEL:SCOPE"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = _file(tmp_path / "grants.toml", text)

    with pytest.raises(InvalidRequestError, match=message) as error:
        load_grants(path)

    assert str(path) in error.value.message


def test_a_token_put_where_its_hash_belongs_is_not_repeated(tmp_path: Path) -> None:
    path = _file(tmp_path / "g", '[[token]]\nname="a"\nsha256="my-secret-token"\ngrants=[]')

    with pytest.raises(InvalidRequestError, match="sha256 must be 64") as error:
        load_grants(path)

    assert "secret" not in error.value.message


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o640, 0o604])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = _file(tmp_path / "g", _entry("a", "x"))
    path.chmod(mode)

    with pytest.raises(InvalidRequestError, match="written by others than its owner"):
        load_grants(path)


def test_a_changed_file_counts_from_the_next_look_on(tmp_path: Path) -> None:
    path = _file(tmp_path / "g", _entry("a", "x", "read:*"))
    grants = Grants(path)
    assert grants.caller(b"x") == Caller("a", (Grant(Level.READ, "*"),))

    new = _file(tmp_path / "new", _entry("b", "y", "read:*"))
    new.replace(path)
    grants.refresh()

    assert grants.caller(b"x") is None
    caller = grants.caller(b"y")
    assert caller is not None
    assert caller.name == "b"


@pytest.mark.parametrize("damage", ["broken", "writable", "gone"])
def test_a_broken_change_keeps_what_was_and_says_so(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = _file(tmp_path / "g", _entry("a", "x", "read:*"))
    grants = Grants(path)

    if damage == "broken":
        path.write_text("[[token]]\nsha256 = 'oops'")
    elif damage == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
    with caplog.at_level(logging.ERROR):
        grants.refresh()
        grants.refresh()

    assert grants.caller(b"x") is not None
    assert grants.reload_failures == 1
    assert caplog.text.count("event=grants_not_reloaded") == 1
    _file(path, "")
    grants.refresh()
    assert grants.caller(b"x") is None


def test_a_process_beside_another_begins_with_the_grants_in_use(tmp_path: Path) -> None:
    """The file may have been broken since the other process read it."""
    file = _file(tmp_path / "grants", _entry("a", "x", "read:*"))
    first = Grants(file)
    _file(file, "broken")

    second = Grants(file, last=first.last)
    second.refresh()

    assert second.caller(b"x") is not None
    assert second.reload_failures == 1
    third = Grants(file, last=second.last)
    third.refresh()
    assert third.reload_failures == 0
    _file(file, _entry("b", "y", "read:*"))
    for grants in (first, second, third):
        grants.refresh()
        assert grants.caller(b"x") is None
        assert grants.caller(b"y") is not None

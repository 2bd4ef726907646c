"""The namespace routes of the REST catalog."""

from __future__ import annotations

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchNamespaceError

from streamhouse.storage_service.errors import InvalidRequestError
from streamhouse.storage_service.lake.catalogs.guarded_catalog import check_namespace
from streamhouse.storage_service.rest_catalog.rest_request import (
    RestAnswer,
    RestRequest,
    page_of,
    texts_of,
)

__all__ = [
    "create_namespace",
    "drop_namespace",
    "list_namespaces",
    "load_namespace",
    "namespace_of",
    "update_namespace",
]

_SEPARATOR = "\x1f"


def namespace_of(segment: str) -> tuple[str, ...]:
    """Return the namespace that a part of the path names."""
    parts = tuple(segment.split(_SEPARATOR))
    if not all(parts):
        raise InvalidRequestError(f"namespace {parts} has an empty part")
    return parts


def list_namespaces(catalog: Catalog, request: RestRequest) -> RestAnswer:
    """Answer the namespaces directly below `parent`, or at the top."""
    parent = request.query.get("parent", "")
    above = namespace_of(parent) if parent else ()
    found = catalog.list_namespaces(above)
    if above and not found and not catalog.namespace_exists(above):
        raise NoSuchNamespaceError(f"namespace '{'.'.join(above)}' does not exist")
    seen = [(_SEPARATOR.join(name), list(name)) for name in found if request.sees(name[0])]
    page, token = page_of(seen, request.query)
    return RestAnswer.of({"namespaces": page, "next-page-token": token})


def create_namespace(catalog: Catalog, request: RestRequest) -> RestAnswer:
    """Create a namespace with its properties."""
    body = request.json()
    parts = body.get("namespace")
    if not isinstance(parts, list) or not parts or not all(isinstance(p, str) for p in parts):
        raise InvalidRequestError("namespace must be a list of names")
    properties = texts_of(body.get("properties") or {}, name="properties")
    catalog.create_namespace(namespace_of(_SEPARATOR.join(parts)), properties)
    return RestAnswer.of({"namespace": parts, "properties": properties})


def load_namespace(catalog: Catalog, namespace: tuple[str, ...]) -> RestAnswer:
    """Answer a namespace's properties."""
    properties = catalog.load_namespace_properties(namespace)
    return RestAnswer.of({"namespace": list(namespace), "properties": dict(properties)})


def drop_namespace(catalog: Catalog, namespace: tuple[str, ...]) -> RestAnswer:
    """Drop an empty namespace."""
    catalog.drop_namespace(namespace)
    return RestAnswer(204)


def update_namespace(
    catalog: Catalog, namespace: tuple[str, ...], request: RestRequest
) -> RestAnswer:
    """Set and remove properties of a namespace."""
    body = request.json()
    removals = body.get("removals") or []
    if not isinstance(removals, list) or not all(isinstance(key, str) for key in removals):
        raise InvalidRequestError("removals must be a list of property names")
    updates = texts_of(body.get("updates") or {}, name="updates")
    check_namespace(catalog, updates)
    done = catalog.update_namespace_properties(namespace, set(removals), updates)
    return RestAnswer.of(
        {"removed": done.removed, "updated": done.updated, "missing": done.missing}
    )

"""What `make site` gives to MkDocs, which is not needed here."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Final

import pytest
import yaml

from docs.build_site import (
    add_version,
    foreign_assets,
    navigation,
    notebook_page,
    public_names,
    search_rank,
    stage,
    staged_path,
    with_links_inside,
)

ROOT: Final = Path(__file__).resolve().parents[2]


class _Loader(yaml.SafeLoader):
    """Reads what MkDocs makes Python objects of as what is in it."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)

_FENCE: Final = re.compile(r"^ *(`{3,}).*?^ *\1", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\(([^)\s#]+)")


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("site")
    stage(work)
    return work


def test_each_link_of_a_page_leads_to_a_page(staged: Path) -> None:
    pages = sorted((staged / "docs").rglob("*.md"))
    assert len(pages) > 40

    broken = [
        f"{page.relative_to(staged)}: {link}"
        for page in pages
        for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
        if ":" not in link and not (page.parent / link).is_file()
    ]
    assert not broken


def test_each_entry_of_the_navigation_is_a_page(staged: Path) -> None:
    config = json.loads((staged / "mkdocs.yml").read_text(encoding="utf-8"))
    sections = {title: pages for entry in config["nav"] for title, pages in entry.items()}

    readers = ["Spark engineers", "Application developers", "Operators", "Contributors"]
    titles = list(sections)
    assert [titles[0], titles[-1]] == ["Start", "Python reference"]
    assert [title for title in titles if title in readers] == readers
    listed = [page for pages in list(sections.values())[1:] for page in pages]
    files = [file for page in listed for file in page.values()]
    assert len(set(files)) == len(files)
    assert all((staged / "docs" / file).is_file() for file in files)


def test_each_public_name_has_a_reference_page(staged: Path) -> None:
    streamhouse = importlib.import_module("streamhouse")

    assert set(public_names()) == set(streamhouse.__all__) - {"__version__"}
    for name, home in public_names().items():
        page = "Errors" if name.endswith("Error") else name
        text = (staged / f"docs/reference/{page}.md").read_text(encoding="utf-8")
        assert f"::: {home}\n" in text
        module = home if name == "cdc" else home.rpartition(".")[0]
        path = staged / "package" / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_each_document_is_in_the_navigation(staged: Path) -> None:
    """A document that `docs/README.md` does not list is found by search only; so are decisions."""
    config = json.loads((staged / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = re.findall(r"[\w/.-]+\.md", json.dumps(config["nav"]))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    decisions = {page for page in pages if page.startswith("decisions/")}

    assert pages - decisions <= set(listed)
    assert not decisions & set(listed)
    texts = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert {page for page in decisions if f"]({page})" not in texts} == set()


def test_documents_for_users_count_most_in_a_search(staged: Path) -> None:
    ranks = {
        page: search_rank(page)
        for page in ("python.md", "reference/read.md", "decisions/0001-x.md", "repository/a.py.md")
    }

    assert sorted(ranks.values(), reverse=True) == list(ranks.values())
    assert [ranks["python.md"], ranks["repository/a.py.md"]] == [1, 0]
    front = (staged / "docs/python.md").read_text(encoding="utf-8").split("---\n")[1]
    assert yaml.safe_load(front) == {"search": {"boost": 1.0}}


def test_the_words_of_a_question_are_in_a_heading() -> None:
    """A heading counts most in a search."""
    headings = [
        heading.lower()
        for page in (ROOT / "docs").glob("*.md")
        for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]

    for words in (
        "retention",
        "column types",
        "how many buckets",
        "exactly once",
        "without tiering",
    ):
        assert words in headings, f"no document has a heading '{words}'"


def test_the_configuration_is_whole() -> None:
    """As MkDocs would read it: strict, without fonts, plugins or scripts of another server."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)

    assert config["strict"] is True
    assert config["theme"]["font"] is False
    assert {part for plugin in config["plugins"] for part in plugin} == {"search", "mkdocstrings"}
    assert "extra_javascript" not in config
    assert {"navigation.footer", "search.highlight"} <= set(config["theme"]["features"])
    assert {each.get("scheme") for each in config["theme"]["palette"]} == {None, "default", "slate"}
    assert {*config["validation"]["links"].values()} == {"warn"}


def test_links_lead_out_of_docs_into_pages_of_the_site() -> None:
    text = "[a](../README.md#x) [b](../tests) ![c](images/architecture.svg)\n```\n[d](../e)\n```\n"

    inside, linked = with_links_inside(text, "docs/spark.md")

    assert inside == (
        "[a](repository/README.md#x) b ![c](images/architecture.svg)\n```\n[d](../e)\n```\n"
    )
    assert linked == {"README.md", "docs/images/architecture.svg"}
    assert staged_path("examples/a.py") == "repository/examples/a.py.md"


def test_a_notebook_is_a_page_with_its_results() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# N\n", "text"]},
        {"cell_type": "code", "source": ["1 + 1"], "outputs": [{"data": {"text/plain": ["2"]}}]},
        {
            "cell_type": "code",
            "source": ["plot()"],
            "outputs": [{"data": {"text/plain": ["F"], "image/png": "aGk=\n"}}],
        },
    ]

    assert notebook_page(json.dumps({"cells": cells})) == (
        "# N\ntext\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n```python\nplot()\n```\n\n"
        "![A plot](data:image/png;base64,aGk=)\n"
    )


def test_a_document_is_under_the_first_reader_that_names_it() -> None:
    start = "# S\n## For readers\n- [A](a.md): x\n## For writers\n- [A](a.md)\n- [`B`](../B.md)\n"
    start += "## Decisions\n- [1. D](decisions/1.md)\n"

    assert navigation(start, ["Name"]) == [
        {"Start": "README.md"},
        {"Readers": [{"A": "a.md"}]},
        {"Writers": [{"B": "repository/B.md"}]},
        {"Python reference": [{"Name": "reference/Name.md"}]},
    ]


def test_what_a_browser_would_fetch_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://example.org/">read</a><link rel="canonical" href="https://example.org/a">'
        '<script src="//example.org/s.js"></script><link rel="icon" href=https://example.org/i.png>'
    )
    (tmp_path / "a.css").write_text("@font-face{src:url(https://example.org/f)} b{c:url(d.svg)}")

    assert foreign_assets(tmp_path) == [
        "a.css: https://example.org/f",
        "a.html: //example.org/s.js",
        "a.html: https://example.org/i.png",
    ]


def test_versions_are_the_folders_newest_first(tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()

    add_version(tmp_path)

    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [each["version"] for each in listed] == ["0.10.0", "0.9.0"]
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()

"""The documentation: its reference is what the program declares, and its links lead somewhere."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.conftest import PROJECT

PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").glob("*.md"))]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_reference_is_printed_by_its_program():
    docs = PROJECT / "docs"
    assert (docs / "reference.md").read_text() == runpy.run_path(str(docs / "generate.py"))["page"]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target.read_text()), (path, anchor)


def test_the_readme_is_short_and_names_every_page():
    readme = (PROJECT / "README.md").read_text()
    assert len(readme.split()) <= 800
    reached = {"index", *re.findall(r"\(docs/(\w+)\.md\)", readme)}
    for page in PAGES[2:]:
        reached |= set(re.findall(r"\]\((\w+)\.md", page.read_text()))
    assert {page.stem for page in PAGES[2:]} <= reached

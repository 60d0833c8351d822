"""The reference of the documentation is what the program declares."""

from __future__ import annotations

import runpy

from tests.conftest import PROJECT


def test_the_reference_is_printed_by_its_program():
    docs = PROJECT / "docs"
    assert (docs / "reference.md").read_text() == runpy.run_path(str(docs / "generate.py"))["page"]()

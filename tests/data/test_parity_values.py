"""Published values of parity: the file's schema, and the table in the docs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from binade.data.compare.parity import MEASURES, Policies, quantities
from binade.data.compare.parity_values import FigureOrigin, ValueKind, describe, parsed, published_values

ENTRY = """
[[value]]
quantity = "k3"
value = 0.003
kind = "limit"
case = "NVFP4 weights"
source = "a tool"
"""


def test_every_quantity_has_a_measure():
    names = [row.measure.name for row in quantities(Policies.of([-1.0], [-1.5], [1], [0]))]
    assert list(MEASURES) == names


def test_the_entries_are_read():
    (entry,) = parsed(ENTRY)
    assert (entry.value, entry.kind, entry.read, entry.below) == (0.003, ValueKind.LIMIT, FigureOrigin.READ, False)
    assert entry.text == "0.003 nats"
    assert {each.quantity for each in published_values()} <= set(MEASURES)
    assert [each.quantity for each in published_values() if each.below] == ["truncated_sample_size"]


def test_the_docs_have_the_table():
    assert describe() in (Path(__file__).parents[2] / "docs" / "cost.md").read_text()


WRONG: dict[str, Callable[[str], str]] = {
    "quantity": lambda text: text.replace('"k3"', '"k4"'),
    "value": lambda text: text.replace("0.003", "-1.0"),
    "kind": lambda text: text.replace('"limit"', '"law"'),
    "case": lambda text: text.replace('case = "NVFP4 weights"\n', ""),
    "source": lambda text: text.replace('"a tool"', '""'),
    "vlaue": lambda text: text.replace("value = 0.003", "vlaue = 0.003"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_entry_is_refused(field: str):
    with pytest.raises(ValueError, match=f"\\b{field}\\b"):
        parsed(WRONG[field](ENTRY))


def test_a_file_without_entries_is_refused():
    with pytest.raises(ValueError, match=r"\[\[value\]\]"):
        parsed("")

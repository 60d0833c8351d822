"""Every text of every view: verdicts, notes, captions, cells of tables, and what charts draw."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
import vl_convert

from binade.app.draw.figure import Drawn, Figure, Item, Offers, Table, Text
from binade.app.draw.show import displayed, with_texts
from binade.app.questions.registry import QUESTIONS
from binade.app.view.view import View
from binade.data.index.catalog import Catalog

pytestmark = pytest.mark.slow
WRONG = {
    "a hyphen as minus": re.compile(r"(?<![\w.)\]-])-\.?\d"),
    "an exponent of a programming language": re.compile(r"\de[+-]\d"),
    "the module of attention": re.compile(r"\bcore (query|key|value|output|grad|scores|probs|attention_)"),
    "an underscore in a tensor's name": re.compile(
        r"\bL\d+ \S+ (grad_\w+|attention_\w+)|\b(fc1|fc2|qkv|proj|QK|PV) grad_"
    ),
    "a cut name": re.compile(r"\w…\w"),
}


def wrong(text: str) -> list[str]:
    return [kind for kind, pattern in WRONG.items() if pattern.search(text)]


def cells(table: Table) -> Iterator[str]:
    columns = table.columns or {}
    shown, config, formats = displayed(table.frame, columns)
    written, _ = with_texts(shown.head(50), config, formats)
    yield from (str(given["label"]) for given in config.values())
    for name in shown:
        if pd.api.types.is_object_dtype(shown[name]) and name != "tensor_id":
            yield from (text for text in shown[name] if isinstance(text, str))
    if not isinstance(written, pd.DataFrame):
        html = written.to_html()
        yield from re.findall(r"<td[^>]*>([^<]*)</td>", html)


def texts(item: Item) -> Iterator[str]:
    if isinstance(item, Figure):
        yield from (item.title, item.note, item.hint, item.caption)
        svg = ElementTree.fromstring(vl_convert.vegalite_to_svg(item.sized_spec(600)))
        yield from (node.text or "" for node in svg.iter("{http://www.w3.org/2000/svg}text"))
    elif isinstance(item, Table):
        yield from (item.title, item.note)
        yield from cells(item)
    elif isinstance(item, Text):
        yield from (item.text, *item.details)
    elif isinstance(item, Offers):
        yield from (item.text, *item.choices)


def of_answer(answer: Drawn) -> Iterator[str]:
    yield from (str(answer.verdict), *answer.problems)
    for item in answer.items:
        yield from texts(item)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: f"{question.page}-{question.view}")
def test_numbers_and_names_are_written_one_way(collected: Path, odd_root: Path, question: Any):
    found = []
    for root in (collected, odd_root):
        with Catalog.open(root) as catalog:
            for text in of_answer(View(question.page, {"view": [question.view]}).draw(catalog)):
                found += [(kind, text) for kind in wrong(text)]
    assert not found


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("SQNR -3.1 dB", ["a hyphen as minus"]),
        ("SQNR −3.1 dB, 2026-01-02, r00-000001, layers 4-15", []),
        ("3.0e+04", ["an exponent of a programming language"]),
        ("3.0·10⁴", []),
        ("L1 core query", ["the module of attention"]),
        ("L2 fc1 grad_output", ["an underscore in a tensor's name"]),
        ("L1 QKᵀ query · forward", []),
        ("L1 fc1 gra…ut", ["a cut name"]),
    ],
)
def test_what_is_wrong_is_found(text: str, kinds: list[str]):
    assert wrong(text) == kinds

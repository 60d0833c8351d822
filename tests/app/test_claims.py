"""What answers say: only what an estimate supports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from binade.app.figure import Drawn
from binade.app.pages import tensor, worst
from binade.app.params import read
from binade.app.questions import registry
from binade.app.questions.question import Question
from binade.app.questions.shared.selection import Selection
from binade.data.catalog import Catalog
from binade.data.events import Event, EventKind, append_event
from binade.data.evidence import Sentence
from binade.data.filter import Filter
from tests.data.builder import make_run

# Questions whose sentences are made from estimates; the others are to follow.
CLAIMING = (
    "why",
    "normality",
    "blocks",
    "attention",
    "codes",
    "provenance",
    "what_if",
    "difference",
    "surfaces",
    "channels",
)
QUESTIONS = {question.name: question for question in registry.QUESTIONS}
FOLDER = Path(registry.__file__).parent
NUMBER = re.compile(r"[+−-]?\d[\d,]*(?:\.\d+(?:e−?\d+)?%?|%)")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """Two runs of six iterations of two layers, with attention, and a NaN in the second."""
    root, random = tmp_path_factory.mktemp("claims"), torch.Generator().manual_seed(0)
    for label in ("a", "b"):
        tensors = []
        for iteration in range(6):
            for layer in (1, 2):
                place = {"layer_index": layer, "iteration": iteration, "format": "mxfp4", "quant_type": "mxfp4"}
                x = torch.randn(32, 64, generator=random) * torch.randn(64, generator=random).exp2() * (iteration + 1)
                probs = (torch.randn(2, 4, 32, 32, generator=random) * 3).softmax(-1).tril()
                tensors += [
                    (x, place),
                    (probs, place | {"tensor_name": "attention_probs", "layer_type": "attention", "module": "core"}),
                ]
        run = make_run(root, tensors, label=label)
    append_event(
        run.directory, Event(EventKind.NON_FINITE, 3, "fc1, forward: 0.5% are NaN", "t", rank=0, place="fc1", order=1)
    )
    with Catalog.open(root) as catalog:
        yield catalog


def drawn(question: Question, catalog: Catalog, where: Filter, **query: str) -> Drawn:
    """As its page draws it, with the default parameters but those of the query."""
    asked = {name: [value] for name, value in query.items()}
    if question.page in ("worst", "tensor"):
        page = {"worst": worst, "tensor": tensor}[question.page]
        return page.draw(Selection(catalog, where), read(page.params(catalog), asked | {"view": [question.view]})[0])
    return question.draw(Selection(catalog, where), read(question.params(catalog), asked)[0])


def claims(answer: Drawn) -> list[str]:
    """Numbers with decimals or in percent that no estimate of the sentence has."""
    if not answer.verdict:
        return []
    assert isinstance(answer.verdict, Sentence), answer.verdict
    known = {number.lstrip("+") for each in answer.verdict.evidence for number in NUMBER.findall(f"{each} {each.text}")}
    known |= {
        number
        for each in answer.verdict.evidence
        for number in map(each.measure.text, (each.value, each.low, each.high))
    }
    text = answer.verdict
    for name in ("0.5% are NaN",):  # of the event: a text that was recorded
        text = text.replace(name, "")
    return [number for number in NUMBER.findall(text) if number.lstrip("+") not in known]


@pytest.mark.parametrize("name", CLAIMING)
def test_every_number_of_a_verdict_is_an_estimate(opened: Catalog, collected: Path, name: str):
    answers = [drawn(QUESTIONS[name], opened, Filter())]
    with Catalog.open(collected) as catalog:
        answers += [drawn(QUESTIONS[name], catalog, where) for where in (Filter(), Filter(quant_type=("mxfp4",)))]
    assert any(answer.verdict for answer in answers), [answer.problems for answer in answers]
    for answer in answers:
        assert not claims(answer), answer.verdict


@pytest.mark.parametrize("name", [*CLAIMING, "drift"])
def test_sentences_are_made_from_templates(name: str):
    """A number that was formatted before it reaches `say` would have no evidence."""
    calls = [
        node
        for file in sorted((FOLDER / name).glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "say"
    ]
    assert calls
    for call in calls:
        assert isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str), ast.unparse(call)
        for part in (*call.args[1:], *(keyword.value for keyword in call.keywords)):
            specs = [each for each in ast.walk(part) if isinstance(each, ast.FormattedValue) and each.format_spec]
            assert not specs, ast.unparse(call)

"""What answers say: only what an estimate supports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from scipy import stats

from binade.app.draw.figure import Drawn
from binade.app.measures.registry import MAP_MEASURES
from binade.app.measures.weights import with_chance
from binade.app.questions import registry
from binade.data.compare.evidence import Sentence
from binade.data.index.catalog import Catalog
from binade.data.run.events import Event, EventKind, append_event
from binade.data.words.filter import Filter
from binade.quant import quantizer
from binade.quant.specs import Spec
from binade.quant.traces import sample_later
from tests.app.planted import drawn
from tests.app.test_cost import of_recipes, saved
from tests.data.builder import make_run

# Colors that only some runs have.
SELDOM = ("effect", "parity_change", "tensor_scale", "oscillating", "twin_bias", "twin_noise")
RECORDED = tuple(metric for metric in MAP_MEASURES if metric not in SELDOM)

# Questions without a verdict, and why.
SILENT = {
    "explore": "it shows the values of any selection; what it says of each is below its Q–Q plot",
}
# What `runs` says of recipes that leave bf16's band, `recipes` says too, and these runs have one seed.
CLAIMING = [question.name for question in registry.QUESTIONS if question.name not in (*SILENT, "runs")]
# What makes sentences in data.compare.evidence.
SPEAKING = {"say", "Sentence", "together", "each_of", "extreme", "effects", "largest"}
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


def claims(answer: Drawn) -> list[str]:
    """Numbers with decimals or in percent that no estimate of the sentence has."""
    if not answer.verdict:
        return []
    assert isinstance(answer.verdict, Sentence), answer.verdict
    known = {
        number.lstrip("+")
        for each in answer.verdict.evidence
        for text in (f"{each} {each.text}", *map(each.measure.text, (each.value, each.low, each.high)))
        for number in (*NUMBER.findall(text), text)
    }
    text = answer.verdict
    # Of the event, a text that was recorded; and a tolerance that was asked for.
    for name in ("0.5% are NaN", "more than 0.03125"):
        text = text.replace(name, "")
    return [number for number in NUMBER.findall(text) if number.lstrip("+") not in known]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CLAIMING)
def test_every_number_of_a_verdict_is_an_estimate(
    opened: Catalog, collected: Path, measured_root: Path, name: str, tmp_path: Path
):
    answers = [drawn(QUESTIONS[name], opened, Filter())]
    if name == "cost":  # of runs of its own
        saved(tmp_path, of_recipes())
        for root in (measured_root, tmp_path):
            with Catalog.open(root) as measured:
                answers.append(drawn(QUESTIONS[name], measured))
    with Catalog.open(collected) as catalog:
        answers += [drawn(QUESTIONS[name], catalog, where) for where in (Filter(), Filter(quant_type=("mxfp4",)))]
    assert any(answer.verdict for answer in answers), [answer.problems for answer in answers]
    for answer in answers:
        assert not claims(answer), answer.verdict


def test_gradients_to_noise_are_compared_with_another_format(collected: Path):
    """Of gradients of weights, whose cells have no expert, and of outputs, whose cells have a column of them."""
    with Catalog.open(collected) as catalog:
        for versus in ("mxfp8", "hifp8", catalog.runs()["run_id"].iloc[-1]):
            query = {"metric": "gradient_to_noise", "format": "mxfp4", "versus": versus}
            answer = drawn(QUESTIONS["map"], catalog, Filter(quant_type=("mxfp4",)), **query)
            assert bool(answer.verdict) != bool(answer.problems)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("across", ["layer_index", "iteration"])
@pytest.mark.parametrize("metric", RECORDED)
def test_so_is_every_number_of_a_map(opened: Catalog, collected: Path, metric: str, across: str):
    """In each format, and as a difference to a format and to a run."""
    with Catalog.open(collected) as catalog:
        answers = []
        for made, where in ((opened, None), (catalog, Filter(quant_type=("mxfp4",)))):
            for versus in ("", "mxfp8", "hifp8", made.runs()["run_id"].iloc[-1]):
                query = {"metric": metric, "format": "mxfp4", "across": across} | ({"versus": versus} if versus else {})
                answers.append(drawn(QUESTIONS["map"], made, where, **query))
    said = [answer for answer in answers if answer.verdict]
    assert said, answers[0].problems
    for answer in answers:
        problems = [each for each in answer.problems if not each.startswith("Not scored in mxfp8 when recorded")]
        assert bool(answer.verdict) != bool(problems) and not claims(answer), answer.verdict


def calls_in(function: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The calls of functions that make sentences, with their names."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in SPEAKING:
                yield name, node


@pytest.mark.parametrize("name", QUESTIONS)
def test_sentences_are_made_from_templates(name: str):
    """A number that was formatted before it reaches `say` would have no evidence."""
    trees = [ast.parse(file.read_text("utf-8")) for file in sorted((FOLDER / name).glob("*.py"))]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert any(True for function in functions for _ in calls_in(function)) != (name in SILENT)
    for function in functions:
        assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                assigned.setdefault(ast.unparse(target), []).append(node.value)
        for called, call in calls_in(function):
            if called == "say":
                texts = assigned.get(ast.unparse(call.args[0]), [call.args[0]])
                assert all(isinstance(getattr(text, "value", None), str) for text in texts), ast.unparse(call)
            for part in (*call.args, *(keyword.value for keyword in call.keywords)):
                specs = [each for each in ast.walk(part) if isinstance(each, ast.FormattedValue) and each.format_spec]
                assert not specs, ast.unparse(call)


def test_a_verdict_has_estimates():
    with pytest.raises(TypeError, match="SQNR 30 dB"):
        Drawn(verdict="SQNR 30 dB")  # type: ignore[arg-type]


@pytest.mark.thorough
def test_the_interval_of_weights_of_a_normal_distribution_seldom_leaves_out_0():
    """In no more than 5% of four formats in 60 draws."""
    random, left_out = torch.Generator().manual_seed(1), []
    for _ in range(60):
        rows = []
        for fmt in ("mxfp4", "nvfp4", "mxfp8", "hifp8"):
            x = (torch.randn(128, 256, generator=random) * torch.rand((), generator=random)).bfloat16()
            spec = Spec.of(fmt)
            q, scales = quantizer.apply(x, spec, want_scales=True)
            sample = sample_later(x, q, spec, scales, -1)
            assert sample
            statistics = {"std": float(x.double().std(correction=0)), "absmax": float(x.abs().max())}
            rows.append(
                {"place": fmt, "format": fmt, "dtype": "bfloat16", "numel": x.numel(), "columns": 256, **statistics}
                | {"at_bin_edge": sample().at_bin_edge}
            )
        found = with_chance(pd.DataFrame(rows))
        left_out += (found["edge_excess"].abs() > stats.norm.ppf(0.975) * found["edge_error"]).tolist()
    assert stats.binomtest(sum(left_out), len(left_out), 0.05, alternative="greater").pvalue > 0.01, left_out

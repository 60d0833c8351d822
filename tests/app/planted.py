"""Effects that are planted into made tensors and losses, which the app's sentences must name, and changes that no
sentence about anything else may depend on. Used by test_claims_planted.py and tests/bench/bench_claims.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from binade.app.pages import tensor as tensor_page
from binade.app.pages import worst
from binade.app.params import read
from binade.app.questions.attention.question import ATTENTION
from binade.app.questions.blocks.question import BLOCKS
from binade.app.questions.depth.question import DEPTH
from binade.app.questions.directions.question import DIRECTIONS
from binade.app.questions.normality.question import NORMALITY
from binade.app.questions.question import Question
from binade.app.questions.ranking.question import RANKING
from binade.app.questions.recipes.question import RECIPES
from binade.app.questions.shared.selection import Selection
from binade.app.questions.training.question import TRAINING
from binade.collector.recipes.ladder import ladder
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from tests.data.builder import make_run

SCORED = ("hifp8", "mxfp4")  # by the builder
Make = Callable[[Path], Any]
Placed = tuple[Tensor, dict[str, Any]]


def answer(opened: Catalog, question: Question, where: Filter, **query: str) -> str:
    """The sentence of a question with these parameters."""
    asked = {name: [value] for name, value in query.items()}
    selection = Selection(opened, where)
    if question.page in ("worst", "tensor"):
        page = {"worst": worst, "tensor": tensor_page}[question.page]
        drawn = page.draw(selection, read(page.params(opened), asked | {"view": [question.view]})[0])
    else:
        drawn = question.draw(selection, read(question.params(opened), asked)[0])
    return str(drawn.verdict)


def board(
    opened: Catalog, question: Question, metric: str = "sqnr_db", fmt: str = "mxfp4", where: Filter | None = None
) -> str:
    return answer(opened, question, where or Filter(), metric=metric, format=fmt)


# Tensors and runs


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def noisy(seed: int, amount: float) -> Tensor:
    """Normal values of which one in 32 is `amount` times as large: mxfp4 loses more of the others."""
    x = normal(seed, 32, 64)
    x[:, ::32] *= amount
    return x


def operand(x: Tensor, layer: int = 1, iteration: int = 0, **words: Any) -> Placed:
    return x, {"layer_index": layer, "iteration": iteration, "format": "mxfp4", "quant_type": "mxfp4"} | words


def layers_alike(root: Path, seed: int, layers: int = 12) -> Path:
    """A run of weights and inputs of one distribution in all layers."""
    names = ("input", "weight")
    made = [
        operand(normal(1000 * seed + 10 * layer + number, 64, 64), layer, tensor_name=name)
        for layer in range(1, layers + 1)
        for number, name in enumerate(names)
    ]
    make_run(root, made)
    return root


def make_losses(root: Path, gaps: Mapping[str, Iterable[float]], tensors: Mapping[str, list[Placed]]) -> None:
    """Runs with these gaps to bf16 by recipe, one per seed, and a bf16 run for each seed; tensors: of each recipe."""
    listed = {recipe: list(values) for recipe, values in gaps.items()}
    for recipe, values in {"bf16": [0.0] * max(map(len, listed.values())), **listed}.items():
        for seed, gap in enumerate(values):
            made = tensors.get(recipe)
            run = make_run(root, *([made] if made else []), recipe=recipe, seed=seed)
            for iteration in range(2):
                run.append_loss({"iteration": iteration, "loss": 5.0 + seed / 8 - iteration + gap, "time": 0.0})


def over_seeds(mean: float, deviation: float, seeds: int = 5) -> list[float]:
    """Normal values with exactly this mean and deviation."""
    values = np.random.default_rng(0).normal(size=seeds)
    return [float(each) for each in mean + deviation * (values - values.mean()) / values.std(ddof=1)]


PART = {
    "linear": {},
    "QK": {"layer_type": "attention", "module": "core", "component": "FA", "tensor_name": "query"},
    "PV": {"layer_type": "attention", "module": "core", "component": "FA", "tensor_name": "value"},
}


def parts(root: Path, means: Mapping[str, float]) -> None:
    """Runs in which one part alone is rounded to mxfp4, with these mean gaps."""
    tensors = {f"{part}_only": [operand(normal(1, 32, 64), recipe=f"{part}_only", **PART[part])] for part in means}
    make_losses(root, {f"{part}_only": over_seeds(mean, 0.004) for part, mean in means.items()}, tensors)


def steps(root: Path) -> None:
    """The steps of te_nvfp4's ablation up to the full recipe, where wgrad costs 0.04 nats."""
    means = {"forward": 0.01, "+ dgrad": 0.0105, "+ wgrad": 0.05}
    recipe = {rung.title: rung.recipe for rung in ladder("te_nvfp4").rungs}
    tensors = {recipe[title]: [operand(normal(1, 32, 64), format="nvfp4", recipe=recipe[title])] for title in means}
    rng = np.random.default_rng(3)
    gaps = {recipe[title]: mean + 0.002 * rng.normal(size=4) for title, mean in means.items()}
    make_losses(root, gaps, tensors)


def clipped_gradients(root: Path) -> None:
    """Weight gradients of a bf16 run, of a run that rounds them, and of one that clips them at half their deviation."""
    words = {"tensor_name": "grad_weight", "operation": "backward", "phase": "post", "module": "fc1"}
    exact = {layer: normal(layer, 64, 64) for layer in range(1, 13)}
    change: dict[str, Callable[[Tensor], Tensor]] = {
        "bf16": lambda x: x,
        "rounded": lambda x: x.bfloat16().float(),
        "clipped": lambda x: x.clamp(-0.5, 0.5),
    }
    for recipe, changed in change.items():
        made: list[Placed] = [(changed(x), words | {"layer_index": layer}) for layer, x in exact.items()]
        if recipe != "bf16":
            made.append(operand(normal(1, 32, 64)))
        run = make_run(root, [(x, each | {"recipe": recipe}) for x, each in made], recipe=recipe, seed=1)
        run.append_loss({"iteration": 0, "loss": 5.0, "time": 0.0})


def flushed_head(root: Path) -> None:
    """Attention probabilities of four heads; the third spreads its mass over values that mxfp4 flushes."""
    x = (normal(5, 1, 4, 32, 64) * 0.1).softmax(-1)
    x[0, 2, :, 1:] = 1 / 4096
    x[0, 2, :, 0] = 1 - 63 / 4096
    place = {"tensor_name": "attention_probs", "layer_type": "attention", "module": "core", "component": "FA"}
    make_run(root, [operand(x, **place)])


def out_of_range(root: Path) -> None:
    make_run(root, [operand(normal(layer, 32, 64, scale=2.0**24 if layer == 3 else 1.0), layer) for layer in (1, 2, 3)])


def small_gradients(root: Path) -> None:
    made = [operand(normal(layer, 32, 64), layer) for layer in range(1, 7)]
    for layer in range(1, 7):
        for module, scale in (("fc1", 1.0), ("fc2", 2.0**-24)):
            gradient = {"module": module, "tensor_name": "grad_output", "operation": "backward"}
            made.append(operand(normal(9 + layer, 32, 64, scale=scale), layer, **gradient))
    make_run(root, made)


def falls_in_training(root: Path) -> None:
    """The second layer's outliers grow with iterations; the others only draw other values."""
    amounts = {layer: (lambda at: 2.0 ** (at / 2 + 1)) if layer == 2 else (lambda at: 8.0) for layer in (1, 2, 3)}
    make_run(
        root,
        [
            operand(noisy(100 * layer + at, amounts[layer](at)), layer, at)
            for at in range(8)
            for layer in (1, 2, 3)
        ],
    )  # fmt: skip


def falls_with_depth(root: Path) -> None:
    make_run(root, [operand(noisy(layer, 1.0 + layer), layer) for layer in range(1, 13)])


def heavy_tails(root: Path) -> None:
    x = np.random.default_rng(0).standard_t(3, size=(64, 256))
    make_run(root, [operand(torch.from_numpy(x).float())])


def failing_block(root: Path) -> None:
    x = normal(4, 32, 64)
    x[7, :32], x[7, 3] = 0.249, 4.0
    make_run(root, [operand(x)])


@dataclass(frozen=True)
class Effect:
    """A planted effect: the question, the parameters, and what its sentence must contain."""

    question: str
    what: str
    make: Make
    asked: Question
    names: str
    query: Mapping[str, str]

    def problem(self, folder: Path) -> str:
        self.make(folder)
        with Catalog.open(folder) as opened:
            text = answer(opened, self.asked, Filter(), **self.query)
        return "" if self.names in text else f"expected {self.names!r} in: {text}"


IN_MXFP4 = {"metric": "sqnr_db", "format": "mxfp4"}
EFFECTS = (
    Effect("Worst › Ranking", "an operand outside hifp8's range", out_of_range, RANKING,
        "Lowest SQNR in hifp8: L3 fc1 input, ", {"metric": "sqnr_db", "format": "hifp8"}),
    Effect("Worst › Directions", "gradients below hifp8's range", small_gradients, DIRECTIONS,
        "Highest Flushed to zero in hifp8 in the backward pass: fc2 grad_output, ",
        {"metric": "flush_to_zero", "format": "hifp8"}),
    Effect("Worst › Training", "a layer whose SQNR falls with iterations", falls_in_training, TRAINING,
        "SQNR in mxfp4 falls over iterations in 1 of 3 tensors; steepest: L2 fc1 input, ", IN_MXFP4),
    Effect("Worst › Depth", "an SQNR that falls with depth", falls_with_depth, DEPTH,
        "SQNR in mxfp4 falls with depth in 1 of 1 tensors; steepest: fc1 input, ", IN_MXFP4),
    Effect("Recipes › Loss", "a gap of 0.05 nats, sd 0.02, 5 seeds",
        lambda root: make_losses(root, {"costly": over_seeds(0.05, 0.02), "cheap": over_seeds(0.001, 0.02)},
            {name: [operand(normal(1, 32, 64), recipe=name)] for name in ("costly", "cheap")}),
        RECIPES, "Higher loss than bf16: costly +0.0500 nats (95% interval ", {"view": "cost"}),
    Effect("Recipes › Loss", "PV costs 0.03 nats more than QK and linear",
        lambda root: parts(root, {"linear": 0.01, "QK": 0.011, "PV": 0.04}), RECIPES,
        "Rounded alone to mxfp4, the largest gap is that of PV, ", {"view": "cost"}),
    Effect("Recipes › Ablation", "wgrad costs 0.04 nats", steps, RECIPES,
        "; + wgrad is higher than + dgrad, +0.0421 nats (", {"view": "ladder"}),
    Effect("Recipes › Gradients", "weight gradients clipped at half their sd", clipped_gradients, RECIPES,
        "Lowest cosine with bf16’s gradient of weight, iteration 0: clipped, ", {"view": "gradients"}),
    Effect("Tensor › Attention", "a head whose probabilities flush in mxfp4", flushed_head, ATTENTION,
        "Highest probability mass flushed to zero in mxfp4: head 3, ", {"format": "mxfp4"}),
    Effect("Tensor › Normality", "Student's t with 3 degrees of freedom", heavy_tails, NORMALITY,
        "the tails are heavier than those of a normal distribution", {}),
    Effect("Tensor › Blocks", "a block whose largest value flushes the others", failing_block, BLOCKS,
        "1 of 64 blocks of 32 values have an SQNR below 10 dB in mxfp4", {"format": "mxfp4"}),
)  # fmt: skip


# Invariance


def layers(scale: int = 0, order: Iterable[int] = range(1, 7)) -> list[Placed]:
    """Two tensors of six layers at six iterations; the outliers grow with the layer, and in the third with iterations.
    scale: the fourth layer's values are times 2^scale; order: the names of the layers."""
    made = []
    for iteration in range(6):
        for layer, name in enumerate(order, 1):
            amount = 2.0 ** (layer / 2 + (iteration / 2 if layer == 3 else 0))
            for number, words in enumerate(({}, {"tensor_name": "grad_output", "operation": "backward"})):
                x = noisy(100 * iteration + 10 * layer + number, amount) * (2.0**scale if layer == 4 else 1)
                made.append(operand(x, name, iteration, **words))
    return made


BOARDS = (RANKING, DEPTH, TRAINING, DIRECTIONS)


def _boards(root: Path, run_id: str, questions: Iterable[Question] = BOARDS) -> list[str]:
    with Catalog.open(root) as opened:
        return [board(opened, question, where=Filter(run_id=(run_id,))) for question in questions]


def _different(before: Iterable[str], after: Iterable[str]) -> str:
    for first, second in zip(before, after, strict=True):
        if not first or first != second:
            return f"{first!r} became {second!r}"
    return ""


def another_run(folder: Path) -> str:
    run = make_run(folder, layers())
    before = _boards(folder, run.run_id)
    make_run(folder, layers(scale=9), label="other", seed=8)
    return _different(before, _boards(folder, run.run_id))


def another_recipe(folder: Path) -> str:
    """The sentences about a recipe's runs do not depend on runs of another recipe that the filter leaves out."""
    make_losses(folder, {"costly": over_seeds(0.05, 0.02)}, {"costly": [operand(normal(1, 32, 64), recipe="costly")]})

    def sentence() -> list[str]:
        with Catalog.open(folder) as opened:
            return [answer(opened, RECIPES, Filter(recipe=("costly",)), view="cost")]

    before = sentence()
    make_losses(folder, {"other": over_seeds(0.5, 0.01)}, {"other": [operand(normal(1, 32, 64), recipe="other")]})
    return _different(before, sentence())


def other_names(folder: Path) -> str:
    """Not Depth: it is about the layers' numbers."""
    order = (4, 6, 1, 5, 2, 3)
    questions = [question for question in BOARDS if question is not DEPTH]
    plain, renamed = make_run(folder / "plain", layers()), make_run(folder / "renamed", layers(order=order))
    before = _boards(folder / "plain", plain.run_id, questions)
    as_named = [re.sub(r"\bL(\d)\b", lambda found: f"L{order[int(found[1]) - 1]}", text) for text in before]
    return _different(as_named, _boards(folder / "renamed", renamed.run_id, questions))


def another_scale(folder: Path) -> str:
    found = []
    for name, scale in (("plain", 0), ("up", 11), ("down", -13)):
        run = make_run(folder / name, layers(scale))
        found.append(_boards(folder / name, run.run_id))
    return _different(found[0], found[1]) or _different(found[0], found[2])


@dataclass(frozen=True)
class Invariance:
    """A change after which sentences must be the same. changed: what differs, "" if nothing does."""

    question: str
    what: str
    changed: Callable[[Path], str]

    def problem(self, folder: Path) -> str:
        return self.changed(folder)


INVARIANCES = (
    Invariance("Worst", "another run in the same root", another_run),
    Invariance("Recipes › Loss", "runs of another recipe", another_recipe),
    Invariance("Worst", "other numbers of the layers", other_names),
    Invariance("Worst", "a layer times 2^11 or 2^-13, in mxfp4", another_scale),
)

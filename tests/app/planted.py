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

from binade.app.draw.figure import Drawn
from binade.app.pages.registry import PART
from binade.app.questions.attention.question import ATTENTION
from binade.app.questions.blocks.question import BLOCKS
from binade.app.questions.map.question import MAP
from binade.app.questions.normality.question import NORMALITY
from binade.app.questions.question import Question
from binade.app.questions.recipes.question import RECIPES
from binade.app.view.view import View
from binade.collector.recipes.ladder import ladder
from binade.data.index.catalog import Catalog
from binade.data.run.rounding_alone import RoundingAlone
from binade.data.words.filter import Filter
from tests.data.builder import make_run

SCORED = ("hifp8", "mxfp4")  # by the builder
Make = Callable[[Path], Any]
Placed = tuple[Tensor, dict[str, Any]]


def drawn(question: Question, opened: Catalog, where: Filter | None = None, **query: str) -> Drawn:
    """The answer to a question with these parameters, as its page shows it."""
    texts = {name: [text] for name, text in query.items()}
    view = View(question.page, {PART: [question.view]} | texts)
    return (view.filtered(where) if where else view).draw(opened)


def worst_cells(map_drawn: Drawn) -> list[str]:
    """The cells of a map with their values, worst first."""
    table = map_drawn.tables["places"]
    return [f"{place} {label}" for place, label in zip(table["place"], table["label"], strict=True)]


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
            alone = RoundingAlone(0, 5.0 + seed / 8, gap, 0.01, 4).fact() if gap else {}
            run = make_run(root, *([made] if made else []), recipe=recipe, seed=seed, **alone)
            for iteration in range(2):
                run.append_loss({"iteration": iteration, "loss": 5.0 + seed / 8 - iteration + gap, "time": 0.0})


def over_seeds(mean: float, deviation: float, seeds: int = 5) -> list[float]:
    """Normal values with exactly this mean and deviation."""
    values = np.random.default_rng(0).normal(size=seeds)
    return [float(each) for each in mean + deviation * (values - values.mean()) / values.std(ddof=1)]


PLACES = {
    "linear": {},
    "QK": {"layer_type": "attention", "module": "core", "component": "FA", "tensor_name": "query"},
    "PV": {"layer_type": "attention", "module": "core", "component": "FA", "tensor_name": "value"},
}


def parts(root: Path, means: Mapping[str, float]) -> None:
    """Runs in which one part alone is rounded to mxfp4, with these mean gaps."""
    tensors = {f"{part}_only": [operand(normal(1, 32, 64), recipe=f"{part}_only", **PLACES[part])] for part in means}
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
    """Two kinds of operands in six layers: fc2's input is outside hifp8's range."""
    of_fc2 = {"module": "fc2"}
    make_run(root, [operand(normal(layer, 32, 64), layer) for layer in range(1, 7)]
        + [operand(normal(9 + layer, 32, 64, scale=2.0**24), layer, **of_fc2) for layer in range(1, 7)])  # fmt: skip


def one_layer_out_of_range(root: Path) -> None:
    make_run(root, [operand(normal(layer, 32, 64, scale=2.0**24 if layer == 3 else 1.0), layer) for layer in (1, 2, 3)])


def small_gradients(root: Path) -> None:
    made = [operand(normal(layer, 32, 64), layer) for layer in range(1, 7)]
    for layer in range(1, 7):
        for module, scale in (("fc1", 1.0), ("fc2", 2.0**-24)):
            gradient = {"module": module, "tensor_name": "grad_output", "operation": "backward"}
            made.append(operand(normal(9 + layer, 32, 64, scale=scale), layer, **gradient))
    make_run(root, made)


def grows_in_training(root: Path) -> None:
    """The outliers of fc2's input grow with iterations; those of fc1's only draw other values."""
    amounts = {"fc1": lambda at: 2.0, "fc2": lambda at: 2.0 ** (at / 2 + 1)}
    made = [
        operand(noisy(100 * number + 10 * layer + at, amount(at)), layer, at, module=module)
        for at in range(8)
        for layer in (1, 2, 3)
        for number, (module, amount) in enumerate(amounts.items())
    ]
    make_run(root, made)


def grows_with_depth(root: Path) -> None:
    make_run(root, [operand(noisy(layer, 2.0 ** (layer / 2)), layer) for layer in range(1, 13)])


def fine_in_hifp8(root: Path) -> None:
    """The weights have outliers, which mxfp4 rounds with the other values of their block; those below hifp8's range
    are flushed in both formats."""
    names = {"input": (8.0, 2.0**-20), "weight": (64.0, 1.0), "bias": (8.0, 1.0)}
    made = [
        operand(noisy(10 * layer + number, amount) * scale, layer, tensor_name=name)
        for layer in range(1, 7)
        for number, (name, (amount, scale)) in enumerate(names.items())
    ]
    make_run(root, made)


def worse_than_a_run(root: Path) -> dict[str, str]:
    """Two runs of one seed, in the second of which the weights have outliers."""
    runs = {}
    for recipe, amount in (("calm", 2.0), ("spiky", 40.0)):
        made = [
            operand(noisy(10 * layer + number, amount if name == "weight" else 8.0), layer, tensor_name=name)
            for layer in range(1, 7)
            for number, name in enumerate(("input", "weight"))
        ]
        runs[recipe] = make_run(root, [(x, words | {"recipe": recipe}) for x, words in made], recipe=recipe).run_id
    return {"versus": runs["calm"], "run_id": runs["spiky"]}


def heavy_tails(root: Path) -> None:
    x = np.random.default_rng(0).standard_t(3, size=(64, 256))
    make_run(root, [operand(torch.from_numpy(x).float())])


def failing_block(root: Path) -> None:
    x = normal(4, 32, 64)
    x[7, :32], x[7, 3] = 0.249, 4.0
    make_run(root, [operand(x)])


@dataclass(frozen=True)
class Effect:
    """A planted effect: the question, the parameters, and what its sentence must contain; of a map, the worst cell.
    make may return further parameters."""

    question: str
    what: str
    make: Make
    asked: Question
    names: str
    query: Mapping[str, str]
    worst: str = ""

    def problem(self, folder: Path) -> str:
        more = self.make(folder) or {}
        with Catalog.open(folder) as opened:
            answer = drawn(self.asked, opened, **self.query | more)
        if self.names not in answer.verdict:
            return f"expected {self.names!r} in: {answer.verdict}"
        worst = next(iter(worst_cells(answer)), "") if self.worst else ""
        return "" if worst.startswith(self.worst) else f"expected {self.worst!r} first: {worst}"


IN_MXFP4 = {"metric": "sqnr_db", "format": "mxfp4"}
FLUSHED = IN_MXFP4 | {"metric": "flush_to_zero"}
EFFECTS = (
    Effect("Map", "operands outside hifp8's range", out_of_range, MAP, "beyond that: fc2 input of layers 1 to 6",
        {"metric": "sqnr_db", "format": "hifp8"}),
    Effect("Map", "operands of large magnitude", out_of_range, MAP, "Highest median absmax: fc2 input, ",
        {"metric": "absmax"}),
    Effect("Map", "a layer outside hifp8's range", one_layer_out_of_range, MAP,
        "1 loses 2 dB or more beyond that: L3 fc1 input ",
        {"metric": "sqnr_db", "format": "hifp8"}, "L3 fc1 input, "),
    Effect("Map", "gradients below hifp8's range", small_gradients, MAP,
        "Highest median Flushed to zero in hifp8: fc2 grad output, ", {"metric": "flush_to_zero", "format": "hifp8"}),
    Effect("Map", "an operand that flushes more with each iteration", grows_in_training, MAP,
        "Highest median Flushed to zero in mxfp4: fc2 input, ", FLUSHED | {"across": "iteration"},
        "iteration 7 fc2 input, "),
    Effect("Map", "an operand that flushes more with each layer", grows_with_depth, MAP,
        "Flushed to zero in mxfp4: fc1 input ", FLUSHED, "L12 fc1 input, "),
    Effect("Map", "an operand that mxfp4 flushes and hifp8 does not", fine_in_hifp8, MAP,
        "Highest median Flushed to zero in mxfp4, difference to hifp8: fc1 weight, +", FLUSHED | {"versus": "hifp8"}),
    Effect("Map", "an operand that another run does not lose", worse_than_a_run, MAP,
        "Lowest median SQNR in mxfp4, difference to calm: fc1 weight, −", IN_MXFP4),
    Effect("Recipes › Loss", "a gap of 0.05 nats, sd 0.02, 5 seeds",
        lambda root: make_losses(root, {"costly": over_seeds(0.05, 0.02), "cheap": over_seeds(0.001, 0.02)},
            {name: [operand(normal(1, 32, 64), recipe=name)] for name in ("costly", "cheap")}),
        RECIPES, "Higher loss than bf16: costly +0.0500 nats (95% interval ", {"of": "cost"}),
    Effect("Recipes › Loss", "PV costs 0.03 nats more than QK and linear",
        lambda root: parts(root, {"linear": 0.01, "QK": 0.011, "PV": 0.04}), RECIPES,
        "Rounded alone to mxfp4, the largest gap is that of PV, ", {"of": "cost"}),
    Effect("Recipes › Ablation", "wgrad costs 0.04 nats", steps, RECIPES,
        "; + wgrad is higher than + dgrad, +0.0421 nats (", {"of": "ladder"}),
    Effect("Recipes › Gradients", "weight gradients clipped at half their sd", clipped_gradients, RECIPES,
        "Lowest cosine with bf16’s gradient of weight, iteration 0: clipped, ", {"of": "gradients"}),
    Effect("Tensor › Attention", "a head whose probabilities flush in mxfp4", flushed_head, ATTENTION,
        "Highest probability mass flushed to zero in mxfp4: head 3, ", {"format": "mxfp4"}),
    Effect("Tensor › A distribution", "Student's t with 3 degrees of freedom", heavy_tails, NORMALITY,
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


# What the map of mxfp4 shows: nothing of it depends on the scale of a tensor.
MAPS: tuple[dict[str, str], ...] = (
    IN_MXFP4,
    IN_MXFP4 | {"across": "iteration"},
    FLUSHED,
    {"metric": "crest_factor"},
    {"metric": "kurtosis", "across": "iteration"},
)


def _maps(root: Path, run_id: str, maps: Iterable[dict[str, str]] = MAPS) -> list[str]:
    """The sentences of maps of a run, and their cells."""
    with Catalog.open(root) as opened:
        answers = [drawn(MAP, opened, Filter(run_id=(run_id,)), **query) for query in maps]
        return [text for each in answers for text in (str(each.verdict), *worst_cells(each))]


def _different(before: Iterable[str], after: Iterable[str]) -> str:
    for first, second in zip(before, after, strict=True):
        if not first or first != second:
            return f"{first!r} became {second!r}"
    return ""


def another_run(folder: Path) -> str:
    run = make_run(folder, layers())
    maps = [*MAPS, IN_MXFP4 | {"versus": "hifp8"}, {"metric": "absmax"}]
    before = _maps(folder, run.run_id, maps)
    make_run(folder, layers(scale=9), label="other", seed=8)
    return _different(before, _maps(folder, run.run_id, maps))


def another_recipe(folder: Path) -> str:
    """The sentences about a recipe's runs do not depend on runs of another recipe that the filter leaves out."""
    make_losses(folder, {"costly": over_seeds(0.05, 0.02)}, {"costly": [operand(normal(1, 32, 64), recipe="costly")]})

    def sentence() -> list[str]:
        with Catalog.open(folder) as opened:
            return [str(drawn(RECIPES, opened, Filter(recipe=("costly",)), of="cost").verdict)]

    before = sentence()
    make_losses(folder, {"other": over_seeds(0.5, 0.01)}, {"other": [operand(normal(1, 32, 64), recipe="other")]})
    return _different(before, sentence())


def other_names(folder: Path) -> str:
    order = (4, 6, 1, 5, 2, 3)
    plain, renamed = make_run(folder / "plain", layers()), make_run(folder / "renamed", layers(order=order))
    before = _maps(folder / "plain", plain.run_id)
    as_named = [re.sub(r"\bL(\d)\b", lambda found: f"L{order[int(found[1]) - 1]}", text) for text in before]
    return _different(as_named, _maps(folder / "renamed", renamed.run_id))


def another_scale(folder: Path) -> str:
    found = []
    for name, scale in (("plain", 0), ("up", 11), ("down", -13)):
        run = make_run(folder / name, layers(scale))
        found.append(_maps(folder / name, run.run_id))
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
    Invariance("Map", "another run in the same root", another_run),
    Invariance("Recipes › Loss", "runs of another recipe", another_recipe),
    Invariance("Map", "other numbers of the layers", other_names),
    Invariance("Map", "a layer times 2^11 or 2^-13, in mxfp4", another_scale),
)

"""Does the predicted change in the loss come true? Predictions of one recorded pass against measured losses.

    python -m tests.bench.bench_loss MODEL [--operand weight] [--formats mxfp4,mxfp8] [--tokens 512] [--batches N]
                                     [--others N] [--every K] [--apart] [--signs] [--backward]
                                     [--advise 4.5,5.5] [--seed N] [--steps N] [--sequences 1] [--save FILE.npz]

MODEL is a Hugging Face directory or a GGUF file of a Llama-like model, computed in float32, on text of python-docs; or
the name of a model, whose tiny size is trained first, from a seed for N steps of 8 sequences. --apart: query, key,
value, gate and up are separate layers.

Predicted: from one forward and backward pass of each batch, recorded unquantized, for the input or the weight of every
linear layer, or of one layer in K (odd K takes all kinds of layers). Measured: the loss of the same batch with that one
operand rounded, minus the loss without rounding. --signs measures the error's opposite, too: half the difference of the
two is the change to odd orders, half the sum that to even ones. --others measures on N batches that follow instead, and
compares means over batches; the reliability of the measurement is the correlation of its two halves, and with the
Spearman-Brown formula that of all of it. Ctrl-C ends the measurement and prints the results so far. All numbers but
sums are Spearman's rank correlations over the layers.

--advise makes recipes for the forward GEMMs of all linear layers from the same recorded pass, under these budgets of
bits, and measures their losses on the other batches next to those of single formats. For the largest budget there are
also the choices that the same program makes by each operand's noise instead of its predicted loss, and at random.

--backward rounds one backward operand of one layer at a time instead, and compares its noise with that of the gradient.
With --others, it predicts what that does to the loss after a step of the optimizer, Δ = −lr·⟨g, P(ĝ − g)⟩, with Adam's
P = 1/(√v + ε), where v is the mean of g² over the batches and ĝ is of the first of them; and measures it on the other
batches: the loss after the step with ĝ for that operand, less that after the step with g. The outer g is that of the
first batch, whose rounding errors depend on it, or the mean of the rest. ρ are over the layers.

Next to Binade's predictions, which come from sampled labels, are two with other gradients: `labels` is N·½Σg²e² with
the gradients of the true labels, summed over tokens for a weight; `signs` is ½Σg²e² with a random sign for each token's
loss.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

from binade.app.questions.loss.compute import costs
from binade.app.questions.shared.boards import PLACE
from binade.collector.advice import costs as advice
from binade.collector.advice.advice import AdviceRequest, advise, placed
from binade.collector.capture.instrument import instrument
from binade.collector.capture.recorder import Recorder
from binade.collector.capture.sensitivity import backward
from binade.collector.datasets.loading import open_dataset
from binade.collector.datasets.samples import SampleStream
from binade.collector.models.model import GPTModel
from binade.collector.models.parallel import ParallelLinear
from binade.collector.models.registry import MODELS
from binade.collector.models.site import Site
from binade.collector.models.specs import LinearSpec
from binade.collector.pretrained.checkpoint import open_checkpoint
from binade.collector.pretrained.directory import read_shape
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.quant import fake_quantize
from tests.bench.bench_quantize import versions

Batch = tuple[Tensor, Tensor]
ADVISED = ("mxfp4", "nvfp4", "mxfp6_e2m3")
SCORED = (*ADVISED, "mxfp8")
TERMS = ("first", "second", "labels", "signs", "noise")
SUMS = {
    "first order": (1, 0, 0, 0, 0),
    "second order": (0, 1, 0, 0, 0),
    "both": (1, 1, 0, 0, 0),
    "true labels": (0, 0, 1, 0, 0),
    "random signs": (0, 0, 0, 1, 0),
    "−SQNR": (0, 0, 0, 0, 1),
}
RATE = 1e-4  # of the step that --backward predicts
WEIGHTS = np.array(list(SUMS.values())).T


def loss_of(model: GPTModel, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def rho(a: np.ndarray, b: np.ndarray) -> float:
    return float(spearmanr(a, b).statistic)


class Apart(nn.Module):
    """A linear layer as the layers that it is made of."""

    def __init__(self, whole: ParallelLinear, spec: LinearSpec) -> None:
        super().__init__()
        sizes = [rows // spec.groups for rows in spec.tensors.values()]
        rows = [each.flatten() for each in torch.arange(spec.outputs).view(spec.groups, -1).split(sizes, 1)]
        self.parts = nn.ModuleList()
        for name, own in zip(spec.tensors, rows, strict=True):
            site = Site(spec.site.layer_index, name.rpartition(".")[2].removesuffix("_proj"))
            self.parts.append(ParallelLinear(site, spec.inputs, len(own)))
            self.parts[-1].weight.data = whole.weight.data[own]
        self.order = torch.cat(rows).argsort()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)[..., self.order]


def take_apart(model: GPTModel) -> None:
    for number, layer in enumerate(model.layers):
        for spec in model.shape.linears(number + 1):
            if len(spec.tensors) > 1:
                parent, _, name = spec.path.rpartition(".")
                setattr(layer.get_submodule(parent), name, Apart(layer.get_submodule(spec.path), spec))


def result_error(layer: ParallelLinear, operand: str, fmt: str, x: Tensor) -> Tensor:
    """δ: of the GEMM's result, from the operand's rounding."""
    weight = layer.weight.detach()
    if operand == "weight":
        return F.linear(x, fake_quantize(weight, fmt) - weight)
    return F.linear(fake_quantize(x, fmt) - x, weight)


@contextmanager
def rounded(layer: ParallelLinear, operand: str, fmt: str, sign: int = 1) -> Iterator[None]:
    hook = layer.register_forward_hook(lambda own, x, y: y + sign * result_error(own, operand, fmt, x[0]))
    yield
    hook.remove()


class Others:
    """Within its context, passes fill in the columns of TERMS that come from other gradients: while `column` is that of
    `labels` or `signs`, and the gradient is to be multiplied by `factor`."""

    def __init__(self, layers: list[ParallelLinear], operand: str, found: dict[str, np.ndarray]) -> None:
        self.layers, self.operand, self.found = layers, operand, found
        self.column, self.factor = "", 1.0

    def __enter__(self) -> Others:
        self.hooks = [layer.register_forward_hook(partial(self.keep, at)) for at, layer in enumerate(self.layers)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def keep(self, at: int, layer: ParallelLinear, args: tuple[Tensor], y: Tensor) -> None:
        x, weight = args[0].detach(), layer.weight.detach()

        def add(grad: Tensor) -> None:
            if not self.column:
                return
            grad = grad.detach() * self.factor
            if self.operand == "input":
                squares = (grad @ weight).square()
            else:
                left, right = (each.flatten(0, -2).square() for each in (grad, x))
                squares = left.T @ right
            operand = x if self.operand == "input" else weight
            for fmt, terms in self.found.items():
                error = fake_quantize(operand, fmt) - operand
                terms[at, TERMS.index(self.column)] = float((squares * error.square()).sum()) / 2

        y.register_hook(add)


def signed_gradient(logits: Tensor, labels: Tensor, seed: int) -> Tensor:
    """The gradient of n^½ times the mean of the n tokens' losses, each with a random sign."""
    gradient = logits.detach().softmax(-1)
    gradient.scatter_add_(-1, labels[..., None], -torch.ones_like(gradient[..., :1]))
    signs = torch.randint(2, labels.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return gradient * signs[..., None] / labels.numel() ** 0.5


def record(
    model: GPTModel,
    root: str,
    layers: list[ParallelLinear],
    operand: str,
    formats: list[str],
    batches: list[Batch],
    scores: list[str],
) -> dict[str, np.ndarray]:
    """Record a pass of each batch. Returns its terms, [batches, layers, TERMS] of each format."""
    found = {fmt: np.zeros((len(batches), len(layers), len(TERMS))) for fmt in formats}
    places = [(layer.site.layer_index, layer.site.module) for layer in layers]
    tensors = ("input", "weight") if scores else ("input", operand)
    options = {"tensors": tensors, "scores": [*formats, *scores], "measures": ("loss",), "max_bytes": 0}
    with Recorder(root, **options) as recorder, instrument(model, "bf16", recorder):
        for number, batch in enumerate(batches):
            own = {fmt: each[number] for fmt, each in found.items()}
            with recorder.at(number, 0), Others(layers, operand, own) as others:
                model.zero_grad(set_to_none=True)
                logits, labels = model(batch[0]), batch[1]
                others.column = "signs"
                with torch.no_grad():
                    gradient = signed_gradient(logits, labels, number)
                backward(logits, gradient)
                others.column = ""
                recorder.sensitivity(logits)  # last, since it replaces what the recorder took from the pass before
                others.column, others.factor = "labels", labels.numel() ** 0.5
                F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            print(f"recorded {number + 1}/{len(batches)}", end="\r", flush=True)
    with Catalog.open(root) as catalog:
        for fmt, terms in found.items():
            for number in range(len(batches)):
                where = Filter(iteration=[number], tensor_name=[operand])
                table = costs(catalog, where, fmt).table.set_index(list(PLACE[:2])).loc[places]
                terms[number, :, :2] = table[["first", "second"]]
                terms[number, :, 4] = -table["sqnr_db"]
    return found


Placed = tuple[str, Recipe, float, float, float]  # name, recipe, bits, predicted change, its standard error


def recipes_of(root: str, budgets: list[float]) -> list[Placed]:
    """Single formats, then the choices."""
    with Catalog.open(root) as catalog:
        found = advice.costs(catalog, parts=("linear",))
    table = found.table
    print(f"\nTwo halves of the recorded sequences agree on the ranking with {found.reliability.halves}.")
    site = table.groupby(["layer_index", "module"]).ngroup()
    chance = np.exp(2 * np.random.default_rng(0).standard_normal(site.max() + 1))[site]
    rules = {
        "advised": table["cost"],
        "by noise": table["noise"] * table["values"],
        "at random": table.groupby("spec")["noise"].transform("mean") * table["values"] * chance,
    }
    made = [parse_recipe("bf16", forward=fmt) for fmt in found.specs]
    named = list(zip(found.specs, made, strict=True))
    for bits in budgets:
        for name, cost in rules.items() if bits == max(budgets) else [("advised", table["cost"])]:
            chosen = advise(replace(found, table=table.assign(cost=cost)), AdviceRequest(bits=bits, specs=ADVISED))
            named.append((f"{name}, {bits:g}", chosen.recipe(name.replace(" ", "_"))))
    return [(name, recipe, *placed(recipe, found)) for name, recipe in named]


def recipe_gaps(model: GPTModel, recipes: list[Recipe], batch: Batch) -> list[float]:
    """The loss under each recipe, less that without rounding."""
    found = []
    for recipe in [None, *recipes]:
        with instrument(model, recipe or "bf16"):
            found.append(loss_of(model, *batch).item())
    return [loss - found[0] for loss in found[1:]]


def print_gaps(recipes: list[Placed], gaps: np.ndarray) -> None:
    """gaps: [batches, recipes]."""
    titles = (
        "recipe",
        "bits",
        "predicted",
        "measured",
        "predicted / measured",
        "less the best single format of as many bits",
    )
    print(f"\n| {' | '.join(titles)} |\n|---|---|---|---|---|---|")
    single = [index for index, (name, *_) in enumerate(recipes) if "," not in name]

    def text(values: np.ndarray) -> str:
        return f"{values.mean():+.4f} ± {values.std(ddof=1) / len(values) ** 0.5:.4f}"

    for index, (name, _, bits, predicted, error) in enumerate(recipes):
        best = min((k for k in single if recipes[k][2] <= bits + 0.01), key=lambda k: gaps[:, k].mean())
        less = "" if best == index else f"{text(gaps[:, index] - gaps[:, best])} ({recipes[best][0]})"
        ratio = f"{predicted / gaps[:, index].mean():.2f}"
        print(f"| {name} | {bits:.2f} | {predicted:+.4f} ± {error:.4f} | {text(gaps[:, index])} | {ratio} | {less} |")


def measure(
    model: GPTModel,
    layers: list[ParallelLinear],
    operand: str,
    formats: list[str],
    batch: Batch,
    signs: tuple[int, ...],
) -> np.ndarray:
    """The changes in the loss, [formats, layers, signs]. Each pass begins at the block of the rounded layer."""
    tokens, labels = batch
    inputs: list[tuple[Tensor, ...]] = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: inputs.append(given)) for layer in model.layers]
    plain = loss_of(model, tokens, labels).item()
    for hook in hooks:
        hook.remove()

    def loss_from(block: int) -> float:
        x, cos, sin = inputs[block]
        for layer in model.layers[block:]:
            x, _ = layer(x, cos, sin)
        logits = F.linear(model.final_layernorm(x), model.output_layer.weight).transpose(0, 1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()

    found = np.zeros((len(formats), len(layers), len(signs)))
    for row, fmt in enumerate(formats):
        for index, layer in enumerate(layers):
            for column, sign in enumerate(signs):
                with rounded(layer, operand, fmt, sign):
                    found[row, index, column] = loss_from(layer.site.layer_index - 1) - plain
    return found


def gradients(model: GPTModel, batch: Batch) -> dict[nn.Parameter, Tensor]:
    model.zero_grad()
    loss_of(model, *batch).backward()
    found = {p: p.grad for p in model.parameters() if p.grad is not None}
    model.zero_grad()
    return found


@dataclass(frozen=True)
class Step:
    """One step of Adam from the gradients g, and what a change in g does to the loss after it."""

    model: GPTModel
    others: list[Batch]
    exact: dict[nn.Parameter, Tensor]  # g of the first batch
    rest: dict[nn.Parameter, Tensor]  # the mean g of the other batches
    scale: dict[nn.Parameter, Tensor]  # lr·P

    @classmethod
    def of(cls, model: GPTModel, batches: list[Batch], others: list[Batch]) -> Step:
        exact, *more = (gradients(model, batch) for batch in batches)
        rest = {p: sum(g[p] for g in more) / len(more) for p in exact}
        squares = {p: sum(g[p].square() for g in (exact, *more)) / len(batches) for p in exact}
        return cls(model, others, exact, rest, {p: RATE / (v.sqrt() + 1e-8) for p, v in squares.items()})

    def predicted(self, change: dict[nn.Parameter, Tensor]) -> list[float]:
        return [
            -sum(float((g[p] * self.scale[p] * delta).sum()) for p, delta in change.items())
            for g in (self.exact, self.rest)
        ]

    @torch.no_grad()
    def losses(self, change: dict[nn.Parameter, Tensor]) -> np.ndarray:
        """On the other batches, after the step from g + change."""
        kept = {p: p.data for p in self.exact}  # not changed in place: the graph of the recorded pass needs it
        for p, g in self.exact.items():
            p.data = p.data - self.scale[p] * (g + change[p] if p in change else g)
        found = []
        for tokens, labels in self.others:
            logits = self.model(tokens).flatten(0, 1).double()
            found.append(F.cross_entropy(logits, labels.flatten()).item())
        for p, value in kept.items():
            p.data = value
        return np.array(found)


def backward_operands(
    model: GPTModel, layers: list[ParallelLinear], formats: list[str], batch: Batch, step: Step | None
) -> dict[tuple[str, str, str], np.ndarray]:
    """By GEMM, operand and format, a row for each layer: the operand's noise ‖e‖²/‖x‖²; the noise of the GEMM's result
    if errors are independent; the noise that it makes in the gradient of weights; and the cosine of that gradient with
    the exact one. Of wgrad these are the layer's own weights, of dgrad those of all blocks before it. With a step, also
    the predicted change in the loss after it and the measured one on each of the other batches."""
    seen: dict[ParallelLinear, tuple[Tensor, Tensor]] = {}

    def keep(layer: ParallelLinear, args: tuple[Tensor], y: Tensor) -> None:
        y.retain_grad()
        seen[layer] = args[0], y

    plain = step.losses({}) if step else np.zeros(0)
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    loss_of(model, *batch).backward(retain_graph=True)
    for hook in hooks:
        hook.remove()
    found: dict[tuple[str, str, str], list[tuple[float, ...]]] = {}
    for at, (layer, (x, y)) in enumerate(seen.items()):
        a, grad, weight = x.detach().flatten(0, -2), y.grad.flatten(0, -2), layer.weight.detach()
        before = [p for p in model.layers[: layer.site.layer_index - 1].parameters() if p.grad is not None]
        operands = {  # both with the contracted axis first; rounded, other
            ("wgrad", "grad_output"): (grad, a),
            ("wgrad", "input"): (a, grad),
            ("dgrad", "grad_output"): (grad.T, weight),
            ("dgrad", "weight"): (weight, grad.T),
        }
        for (gemm, name), (operand, other) in operands.items():
            if gemm == "dgrad" and not before:
                continue
            for fmt in formats:
                error = fake_quantize(operand, fmt, dim=0) - operand
                own, signal = error.norm() ** 2 / operand.norm() ** 2, (operand.T @ other).norm() ** 2
                independent = (error.square().sum(1) @ other.square().sum(1)) / signal
                moved = error.T @ other
                if gemm == "dgrad":
                    moved = (moved if name == "grad_output" else moved.T).reshape(x.shape)
                    deltas = torch.autograd.grad(x, before, moved, retain_graph=True)
                    change = dict(zip(before, deltas, strict=True))
                else:
                    change = {layer.weight: moved if name == "grad_output" else moved.T}
                noise, signal, both = (
                    sum(float((left(p) * right(p)).sum()) for p in change)
                    for left, right in (
                        (change.get, change.get),
                        (attrgetter("grad"), attrgetter("grad")),
                        (change.get, attrgetter("grad")),
                    )
                )
                cosine = (signal + both) / (signal * (signal + 2 * both + noise)) ** 0.5
                values = [float(own), float(independent), noise / signal, cosine]
                if step:
                    values += [*step.predicted(change), *(step.losses(change) - plain)]
                found.setdefault((gemm, name, fmt), []).append(tuple(values))
        print(f"layers {at + 1}/{len(layers)}", end="\r", flush=True)
    return {key: np.array(rows) for key, rows in found.items()}


def print_steps(operands: dict[tuple[str, str, str], np.ndarray]) -> None:
    """How well predictions, and the operands' noise, rank the layers by the change in the loss after a step."""
    titles = "ρ, g of its batch", "ρ, g of the rest", "ρ of its noise", "of the halves", "sums predicted", "measured"
    print(f"\n| GEMM | operand | format | {' | '.join(titles)} |\n" + "|---" * (3 + len(titles)) + "|")
    for key, rows in operands.items():
        predicted, measured = rows[:, 4:6], rows[:, 6:]
        truth = measured.mean(1)
        ranks = [evidence.correlation(values, truth, "layers") for values in (*predicted.T, rows[:, 0])]
        each = [
            *(f"{rank.value:.2f} ({rank.low:.2f} to {rank.high:.2f})" for rank in ranks),
            f"{rho(measured[:, ::2].mean(1), measured[:, 1::2].mean(1)):.2f}",
            ", ".join(f"{total:+.2e}" for total in predicted.sum(0)),
            f"{truth.sum():+.2e} ± {measured.sum(0).std(ddof=1) / measured.shape[1] ** 0.5:.0e}",
        ]
        print(f"| {' | '.join((*key, *each))} |")


def row(name: str, values: Sequence[float | str] | np.ndarray, sums: tuple[float, ...] = ()) -> None:
    cells = [
        *(value if isinstance(value, str) else f"{value:.2f}" for value in values),
        *(f"{value:+.4f}" for value in sums),
    ]
    print(f"| {name} | " + " | ".join(cells) + " |")


def head(text: str, *titles: str) -> None:
    print(f"\n{text}:\n\n| format | " + " | ".join(titles) + " |\n|---|" + "---|" * len(titles))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--operand", choices=("input", "weight"), default="input")
    parser.add_argument("--formats", default="mxfp4")
    parser.add_argument("--dataset", default="python-docs")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--others", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--signs", action="store_true")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--advise", type=lambda text: [float(bits) for bits in text.split(",")], default=[])
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    formats, path = given.formats.split(","), Path(given.model)
    shape = MODELS[given.model]["tiny"] if given.model in MODELS else read_shape(path)
    model = GPTModel(shape, compute_dtype=torch.float32)
    if given.model in MODELS:
        model.initialize(given.seed)
    else:
        open_checkpoint(path, shape).load_into(model)
    tokenizer = "byte" if given.model in MODELS else given.model
    stream = SampleStream(open_dataset(given.dataset, tokenizer, shape.vocab).documents, given.tokens, 0, 0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(given.steps):
        optimizer.zero_grad()
        loss_of(model, *stream.batch(8)).backward()
        optimizer.step()
    batches, others = (
        [stream.batch(given.sequences) for _ in range(number)] for number in (given.batches, given.others)
    )
    if given.apart:
        take_apart(model)
    model.embedding.weight.requires_grad_(False)  # not predicted, and a fifth of the backward pass
    layers = [module for module in model.modules() if isinstance(module, ParallelLinear)][:: given.every]
    print(f"{versions('cpu')}; {path.name}, {given.steps} steps, float32, {given.operand}s of ", end="")
    print(
        f"{len(layers)} linear layers, {given.batches} + {given.others} batches of {given.sequences} x {given.tokens}"
    )

    if given.backward:
        titles = "ρ of its noise", "ρ if independent", "its noise", "if independent", "gradient's", "cosine", "lowest"
        print(f"\n| GEMM | operand | format | {' | '.join(titles)} |\n" + "|---" * (3 + len(titles)) + "|")
        step = Step.of(model, batches, others) if others else None
        operands = backward_operands(model, layers, formats, batches[0], step)
        for key, rows in operands.items():
            ranks = [f"{rho(rows[:, k], rows[:, 2]):.2f}" for k in (0, 1)]
            sizes = [f"{value:.4f}" for value in (*np.median(rows[:, :4], 0), rows[:, 3].min())]
            print(f"| {' | '.join((*key, *ranks, *sizes))} |")
        if step:
            print_steps(operands)
        return
    with tempfile.TemporaryDirectory() as root:
        scores = list(SCORED) if given.advise else []
        predicted = record(model, root, layers, given.operand, formats, batches, scores)
        recipes = recipes_of(root, given.advise) if given.advise else []
    kept = {"names": [layer.site.name for layer in layers], "predicted": [*predicted.values()]}
    kept |= {"recipes": [name for name, *_ in recipes], "bits": [bits for _, _, bits, *_ in recipes]}
    changes, gaps = [], []
    try:
        with torch.no_grad():
            for number, batch in enumerate(others or batches):
                if recipes:
                    gaps.append(recipe_gaps(model, [recipe for _, recipe, *_ in recipes], batch))
                changes.append(measure(model, layers, given.operand, formats, batch, (1, -1) if given.signs else (1,)))
                print(f"measured {number + 1}  ", end="\r", flush=True)
                if given.save:
                    np.savez(given.save, **kept, gaps=gaps, measured=changes)
    except KeyboardInterrupt:
        print(f"stopped after {len(changes)} batches")
        if not changes:
            return
    measured = dict(zip(formats, np.moveaxis(np.array(changes), 1, 0), strict=True))
    if recipes:
        print_gaps(recipes, np.array(gaps))

    if others:
        titles = "95% interval of second order", "halves of the measurement", "all of it", "halves of the prediction"
        head("On other tokens", *SUMS, *titles, *(f"sum: {name}" for name in ("measured", *TERMS[:4])))
        for fmt in formats:
            truth, sums = measured[fmt][..., 0], predicted[fmt] @ WEIGHTS
            halves = rho(truth[::2].mean(0), truth[1::2].mean(0))
            both = sums[..., list(SUMS).index("both")]
            interval = evidence.correlation(predicted[fmt][..., 1].mean(0), truth.mean(0), "operands")
            values = [
                *(rho(each, truth.mean(0)) for each in sums.mean(0).T),
                f"{interval.low:.2f} to {interval.high:.2f}",
            ]
            values += [halves, 2 * halves / (1 + halves), rho(both[::2].mean(0), both[1::2].mean(0))]
            row(fmt, values, (truth.mean(0).sum(), *predicted[fmt][..., :4].mean(0).sum(0)))
        return
    head("On the same tokens", *SUMS, "sum predicted", "measured")
    for fmt in formats:
        changes = measured[fmt][..., 0]
        each = [[rho(p, m) for p in (terms @ WEIGHTS).T] for terms, m in zip(predicted[fmt], changes, strict=True)]
        row(fmt, np.mean(each, 0), (predicted[fmt][..., :2].sum((1, 2)).mean(), changes.sum(1).mean()))
    if given.signs:
        head(
            "Odd and even orders",
            "first order: odd",
            *(f"{name}: even" for name in TERMS[1:4]),
            "sum of even",
            *TERMS[1:4],
        )
        for fmt in formats:
            plus, minus = np.moveaxis(measured[fmt], 2, 0)
            odd, even = (plus - minus) / 2, (plus + minus) / 2
            pairs = [(odd, 0), *((even, column) for column in (1, 2, 3))]
            values = [np.mean([rho(a, b) for a, b in zip(m, predicted[fmt][..., k], strict=True)]) for m, k in pairs]
            row(fmt, values, (even.sum(1).mean(), *predicted[fmt][..., 1:4].sum(1).mean(0)))


if __name__ == "__main__":
    main()

"""`coverage` lists what `instrument` would quantize, record and leave out, with a batch exactly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from binade.collector.capture.adapters.declared import Equations
from binade.collector.capture.adapters.first_pass import FirstPass
from binade.collector.capture.adapters.layer import Findings, InstrumentError, Layer, numbers_left_out
from binade.collector.capture.adapters.torch_modules import unseen_products
from binade.collector.capture.evaluations import kept
from binade.collector.capture.instrument import quantizes_attention, recipe_of, unquantized
from binade.collector.capture.survey import Survey, around_forward, survey
from binade.collector.models.attention import CoreBegin
from binade.collector.models.parallel import Begin, Call
from binade.collector.models.site import Site
from binade.collector.recipes.recipe import BF16, Part, Recipe
from binade.collector.recipes.selection import SiteSelection
from binade.data.compare.coverage import CoveredOperand, FormatDifference, Formats, differing, gemm_operands
from binade.data.run.tensor_kinds import TENSOR_KINDS, Product
from binade.data.words.text import markdown_table
from binade.quant.gemm import Observed, Rounding
from binade.quant.specs import GemmFormats

UNUSED = "multiplied nothing in this pass"
NOT_PRODUCTS = {(nn.Embedding, nn.EmbeddingBag): "embedding", (nn.modules.conv._ConvNd,): "convolution"}


@dataclass(frozen=True)
class Covered:
    """Modules of one class whose paths differ in numbers alone, and what `instrument` does to them.

    paths       as in `exclude`: "layers.*.mlp.up_proj"
    recorded    what they are called in the index, * for the layer's number; "" if they are left as they are
    format      what the recipe quantizes them to
    reason      why they are left, or left in bf16
    """

    paths: str
    kind: str
    count: int
    recorded: str
    format: str
    reason: str


class Coverage(tuple[Covered, ...]):
    """Every module of a model that has weights or attends, in the model's order, as Covered; printed, a table.

    formats   of the operands of all GEMMs that `instrument` would intercept
    """

    formats: Formats

    def difference(self, other: Coverage) -> tuple[FormatDifference, ...]:
        """The operands that the other recipe, or the other model, rounds to another format or does not have."""
        return differing(self.formats, other.formats)

    def __str__(self) -> str:
        rows = [(row.paths, row.kind, str(row.count), row.recorded, row.format, row.reason) for row in self]
        return markdown_table(("modules", "class", "count", "recorded as", "format", "left"), rows)

    _repr_markdown_ = __str__


def coverage(
    model: nn.Module,
    recipe: Recipe | str | None = None,
    *,
    skip: SiteSelection | str | None = None,
    exclude: Sequence[str] = (),
    cores: Sequence[str] = (),
    products: Mapping[str, Equations] = {},
    head: bool = False,
    batch: object = None,
) -> Coverage:
    """Return the modules that `instrument`, with these arguments, would quantize, record and leave out.

        print(binade.coverage(model, "nvidia_nvfp4"))

    Modules that `instrument` would refuse are listed as left out, with the reason. A module that is "not intercepted"
    is refused in the first forward pass if its weight enters a GEMM. If the recipe quantizes attention, attention that
    belongs to no known module is refused, too.

    With a batch, one forward pass shows which modules these are, and the list is exact for such batches. It has the
    model's keyword arguments as a mapping, its arguments as a tuple or list, or its only argument, or is a function
    that runs the pass, such as `lambda: trainer.training_step(batch)`. Buffers and random numbers are restored.
    """
    _, recipe = recipe_of(recipe)
    attention = quantizes_attention(recipe)
    model_survey = survey(model, exclude, head, cores, products, attention)
    in_bf16 = unquantized(recipe, skip, [layer.site for layer in model_survey.layers])
    layers: dict[nn.Module, list[Layer]] = {}
    for layer in model_survey.layers:
        layers.setdefault(layer.module, []).append(layer)

    def formats_of(layer: Layer, product: Product) -> GemmFormats:
        watched = layer.kernels or layer.site in in_bf16
        return GemmFormats() if watched else recipe.part_of(product, layer.site).formats

    shown, begun = Findings(), {layer.site for layer in model_survey.layers}
    if batch is not None:
        shown, begun = _try_pass(model, model_survey, attention, formats_of, batch)
    rows: Counter[tuple[str, ...]] = Counter()
    formats: dict[CoveredOperand, str] = {}
    paths = {module: name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        kind = numbers_left_out(name), type(module).__name__
        for layer in layers.get(module, ()):
            reason, site = in_bf16.get(layer.site, ""), layer.site
            unused = "" if site in begun or site.expert is not None else UNUSED
            modules_of_layer = (module, *(other for other, _ in layer.others))
            reasons_shown = (shown.refused[paths[owner]] for owner in modules_of_layer if paths[owner] in shown.refused)
            if refused := re.sub(r"\b\d+\b", "*", next(reasons_shown, unused)):
                rows[*kind, "", "", refused] += 1
                continue
            if not (reason or layer.kernels):
                reason = shown.unrounded.get(name, "" if batch is not None else unseen_products(module))
            recorded, fmt, reason, rounded = _covered(layer, recipe, reason)
            formats |= rounded
            rows[*kind, recorded, fmt, reason] += 1
        if module not in layers and (reason := _left(name, module, model_survey, shown)):
            rows[*kind, "", "", reason] += 1
    found_rows = Coverage(
        Covered(paths, kind, count, recorded, fmt, reason)
        for (paths, kind, recorded, fmt, reason), count in rows.items()
    )
    found_rows.formats = formats
    return found_rows


def _left(name: str, module: nn.Module, model_survey: Survey, shown: Findings) -> str:
    """Why a module that is no layer is left out; "" for one without weights that nothing names."""
    in_pass = re.sub(r"\b\d+\b", "*", shown.refused.get(name, ""))
    named = (model_survey.left.get(module), model_survey.refused.get(name), model_survey.unseen.get(module), in_pass)
    if reason := next(filter(None, named), ""):
        return reason
    weights = [p.dim() for p in vars(module)["_parameters"].values() if p is not None]
    if not weights:
        return ""
    known = (label for kinds, label in NOT_PRODUCTS.items() if isinstance(module, kinds))
    return next(known, "not a product" if max(weights) < 2 else "not intercepted")


def _covered(layer: Layer, recipe: Recipe, reason: str) -> tuple[str, str, str, dict[CoveredOperand, str]]:
    """(what a layer is called in the index, its format, why it is left or in bf16, the formats of its operands).
    reason: why it is in bf16, if it is."""
    site = layer.site
    used = [recipe.part_of(product, site) for product in layer.products]
    if layer.kernels and not reason and any(part != Part() for part in used):
        return "", "", layer.kernels, {}
    recorded = re.sub(r"^layer[1-9]\d*", "layer*", re.sub(r"expert\d+", "expert*", site.name))
    fmt = BF16 if reason else ", ".join(dict.fromkeys(part.quant_type for part in used))
    parts = dict(zip(layer.products, [Part()] * len(used) if reason else used, strict=True))
    formats = {
        CoveredOperand(site.layer_index, site.module, site.expert, kind.name, gemm): parts[product].rounded_to(field)
        for product in layer.products
        for kind in TENSOR_KINDS
        if kind.product is product
        for gemm, field in gemm_operands(kind).items()
    }
    return recorded, fmt, reason, formats


def _try_pass(
    model: nn.Module,
    model_survey: Survey,
    attention: bool,
    formats: Callable[[Layer, Product], GemmFormats],
    batch: object,
) -> tuple[Findings, set[Site]]:
    """What a forward pass shows, and the layers that multiplied in it. batch: keyword arguments of the model as a
    mapping, its arguments as a tuple or list, its only argument, or a function that runs the pass. Buffers and torch's
    random numbers are restored."""
    begun: set[Site] = set()

    def begin(layer: Layer, product: Product) -> Begin:
        call = Call(Rounding(formats(layer, product), histories={}), _ignore)

        def begins() -> Call:
            begun.add(layer.site)
            return call

        return begins

    first = FirstPass(model, model_survey.layers, model_survey.left, attention, lambda text: None)
    with ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng())
        undo.enter_context(torch.enable_grad())
        undo.enter_context(kept([model]))
        for layer in model_survey.layers:
            begins = [begin(layer, product) for product in layer.products]
            undo.callback(layer.attach(CoreBegin(*begins) if len(begins) > 1 else begins[0]))
        undo.enter_context(around_forward(model, model_survey.layers, None, first if model_survey.watched else None))
        try:
            _run(model, batch)
        except InstrumentError:
            if not first.findings.refused:
                raise
    return first.findings, begun


def _ignore(_: Observed) -> None:
    pass


def _run(model: Any, batch: Any) -> None:
    if callable(batch):
        batch()
    elif isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)

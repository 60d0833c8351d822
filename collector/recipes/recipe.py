"""Recipes: which operand of which GEMM gets which format. Plain data, no torch.

`collector.recipes.parse` makes one from its name, `collector.recipes.files` from a TOML file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from binade.collector.errors import ConfigError, raising
from binade.collector.models.site import Site
from binade.data.run.tensor_kinds import OF_ROUNDED, Product
from binade.quant.formats import BF16 as BF16
from binade.quant.specs import OPERAND_FIELDS, GemmFormats, KVCache, Smooth, Spec, SpecError

MODULES = "modules"
NAMED_FORMATS = ("mxfp8", "mxfp4", "hifp8")
TEN_RECIPES = (BF16, *(f"{part}_{name}" for part in ("FA", "linear", "FA_linear") for name in NAMED_FORMATS))


class RecipeError(ConfigError):
    """The recipe is unknown or contradicts itself. The message says what to write."""


class Operand(NamedTuple):
    """An operand of a part's GEMM, quantized along the axis that the GEMM contracts."""

    field: str  # of GemmFormats
    gemm: str
    name: str
    axis: str


def _operands(a: str, b: str, grad: str, gemms: Sequence[str], axes: Sequence[str]) -> tuple[Operand, ...]:
    """The operands of the product of a and b, and of its two backward products: of grad and b, and of grad and a. gemms
    are the names of the three products, axes what they contract."""
    pairs = (
        (("forward_a", a), ("forward_b", b)),
        (("dgrad_grad", grad), ("dgrad_b", b)),
        (("wgrad_grad", grad), ("wgrad_a", a)),
    )
    products = zip(gemms, axes, pairs, strict=True)
    return tuple(Operand(field, gemm, name, axis) for gemm, axis, pair in products for field, name in pair)


LINEAR_OPERANDS = _operands(
    "input", "weight", "grad_output", ("forward", "dgrad", "wgrad"), ("input size", "output size", "tokens")
)
QK_OPERANDS = _operands("query", "key", "grad_scores", ("forward", "dquery", "dkey"), ("head size", "keys", "queries"))
PV_OPERANDS = _operands(
    "attention_probs", "value", "grad_output", ("forward", "dprobs", "dvalue"), ("keys", "head size", "queries")
)
EINSUM_OPERANDS = _operands(
    "left", "right", "grad_product", ("forward", "dgrad", "wgrad"), ("shared axes", "right's axes", "left's axes")
)
PARTS = {
    "linear": LINEAR_OPERANDS,
    "qk": QK_OPERANDS,
    "pv": PV_OPERANDS,
    "router": LINEAR_OPERANDS,
    "product": EINSUM_OPERANDS,
}

# Every operand by its name: linear.dgrad.grad_output -> (linear, dgrad_grad)
OPERANDS = {f"{part}.{o.gemm}.{o.name}": (part, o.field) for part, operands in PARTS.items() for o in operands}

GRADIENTS = ("dgrad_grad", "wgrad_grad")
REUSED_OPERANDS = ("dgrad_b", "wgrad_a")  # the backward operands that enter the forward product too


@dataclass(frozen=True)
class Part:
    """The quantization of one kind of product.

    quant_type  what was requested: the text of a spec, or the name of a recipe
    formats     the specs that its six operands are rounded to
    overrides   (field of GemmFormats, requested spec) of the operands that differ, set alone or with their GEMM
    """

    quant_type: str = BF16
    formats: GemmFormats = field(default_factory=GemmFormats)
    overrides: tuple[tuple[str, str], ...] = ()

    @classmethod
    def requested(cls, quant_type: str, formats: GemmFormats) -> Part:
        """The part whose quantized operands all have this quant type; the others are in bf16."""
        plain = tuple((field, BF16) for field in sorted(OPERAND_FIELDS) if formats[field] is None)
        return cls(BF16, formats) if len(plain) == len(OPERAND_FIELDS) else cls(quant_type, formats, plain)

    def changed(self, name: str, changes: Mapping[str, Any], requested: Mapping[str, str] | None = None) -> Part:
        """The part with other values of these fields of GemmFormats. Operands with another spec are rounded from the
        original, unless `of_rounded` is among the changes.

        name: of the part in a recipe, such as "linear" or "modules.fc2". requested: what was requested for single
        operands. Raises SpecError, which names the part, if its operands do not go together.
        """
        rounded = tuple(field for field in self.formats.of_rounded if field not in changes)
        values = {"of_rounded": rounded, **changes}
        with raising(SpecError, name, SpecError):
            formats = replace(self.formats, **values)
        overrides = {**dict(self.overrides), **(requested or {})}
        different = sorted((field, text) for field, text in overrides.items() if text != self.quant_type)
        return Part(self.quant_type, formats, tuple(different))

    def quant_type_of(self, field: str) -> str:
        """The requested format of an operand: "mxfp8" even if that rounds a gradient to mxfp8_e5m2. It is recorded as
        the tensor's quant_type. The result of a GEMM has the quant type of its first operand."""
        cache = self.formats.cache
        if cache and cache.operand == field and self.formats[field] is None:
            return str(cache.spec)
        return dict(self.overrides).get(field, self.quant_type)

    @property
    def text(self) -> str:
        """What was requested, with the spec of gradients if that is another one: "mxfp8 (gradients mxfp8_e5m2)"."""
        gradients = sorted({str(spec) for field in GRADIENTS if (spec := self.formats[field])})
        if self.rounded_to("forward_a") != self.quant_type or gradients in ([], [self.quant_type]):
            return self.quant_type
        return f"{self.quant_type} (gradients {', '.join(gradients)})"

    @property
    def in_training(self) -> Part:
        """The part in passes that train, which write no KV cache unless they are to use its values, too."""
        cache = self.formats.cache
        return replace(self, formats=replace(self.formats, cache=None)) if cache and not cache.trains else self

    def without(self, gemm: str = "") -> Part:
        """The part with one of its GEMMs in bf16, or all."""
        if not gemm:
            return Part()
        left = tuple(name for name in OPERAND_FIELDS if name.startswith(gemm))
        rounded = tuple(name for name in self.formats.of_rounded if name not in left)
        changes: dict[str, Any] = dict.fromkeys(left)
        overrides = tuple(override for override in self.overrides if override[0] not in left)
        formats = replace(self.formats, **changes, of_rounded=rounded)
        return replace(self, formats=formats, overrides=(*overrides, *((name, BF16) for name in left)))

    def rounded_to(self, field: str) -> str:
        """The spec that an operand is rounded to, as text."""
        spec = self.formats[field]
        return BF16 if spec is None else str(spec)


@dataclass(frozen=True)
class About:
    """Where a published recipe comes from.

    read        how it is known: its "code" was read, or an "excerpt" of its paper; "recalled": neither
    leaves_out  what Binade does not do
    uncertain   what could not be verified
    """

    title: str = ""
    source: tuple[str, ...] = ()
    read: str = ""
    leaves_out: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()


@dataclass(frozen=True)
class Deoscillation:
    """After `period` optimizer steps, weights whose rounded values moved at least `ratio` times as far as they did
    themselves are set to their rounded values; from step `start` on, counted from 1. See probes.deoscillation."""

    period: int = 200
    ratio: float = 4.0
    start: int = 1

    def __str__(self) -> str:
        return f"every {self.period} steps from step {self.start}, ratio {self.ratio:g}"


class Scheme(StrEnum):
    """Roundings of whole matrices, which no spec describes."""

    MUONQ = "muonq"  # see quant.low_rank


class _Specs:
    """The specs of a table of a recipe file; None for what is not rounded."""

    @property
    def specs(self) -> dict[str, Spec | Scheme]:
        return {name: spec for name, spec in vars(self).items() if isinstance(spec, (Spec, Scheme))}

    def __str__(self) -> str:
        return ", ".join(f"{name} {spec}" for name, spec in self.specs.items())


@dataclass(frozen=True)
class StateRounding(_Specs):
    """What the optimizer's tensors of these kinds are rounded to after each step. See probes.optimizer_state.

    weight_errors   what rounding takes from the weights: "lost", or added to Adam's first moment as ECO does
    """

    exp_avg: Spec | None = None
    exp_avg_sq: Spec | None = None
    momentum_buffer: Spec | Scheme | None = field(default=None, metadata={"schemes": tuple(Scheme)})
    master_weight: Spec | None = None
    weight_errors: str = field(default="lost", metadata={"choices": ("lost", "momentum")})

    def __str__(self) -> str:
        corrected = ", errors of weights added to exp_avg" if self.weight_errors == "momentum" else ""
        return f"{super().__str__()}{corrected}"


@dataclass(frozen=True)
class Communication(_Specs):
    """What is rounded before ranks exchange it. See training.ranks.

    reduce_scatter  each rank's gradient, before the data-parallel ranks add theirs in float32
    all_to_all      the tokens that experts receive
    """

    reduce_scatter: Spec | None = None
    all_to_all: Spec | None = None


@dataclass(frozen=True)
class KvCache(_Specs):
    """What a KV cache holds keys and values in. See quant.kv_cache.

    key, value  after the norms and the rotation of the key
    latent      of multi-head latent attention, after its norm; the rotated part of the key is not rounded
    scale_of    whether a tensor scale is that of a layer, or of each head
    passes      whether passes that train use these values, too; gradients go through the rounding
    """

    key: Spec | None = None
    value: Spec | None = None
    latent: Spec | None = None
    scale_of: str = field(default="layer", metadata={"choices": ("layer", "head")})
    passes: str = field(default="evaluation", metadata={"choices": ("evaluation", "all")})

    def of(self, product: Product, site: Site) -> KVCache | None:
        """How the operand of a product is cached; None if it is not rounded."""
        is_latent = product is Product.LINEAR and site.module in LATENT
        spec = self.latent if is_latent else {Product.QK: self.key, Product.PV: self.value}.get(product)
        by_head = self.scale_of == "head" and not is_latent
        operand = "forward_a" if is_latent else "forward_b"
        return KVCache(operand, spec, by_head, self.passes == "all") if spec else None


LATENT = ("kv_up", "kv_b_proj")  # the layers whose input is the latent: our and Megatron's name, transformers' name
GLOB = re.compile(r".*[*?\[]|decoder\.")  # a key of Recipe.modules that is a glob of paths in GPTModel, not a name
TABLES: dict[str, type[Deoscillation | StateRounding | Communication | KvCache]] = {
    "deoscillation": Deoscillation,
    "state": StateRounding,
    "communication": Communication,
    "kv_cache": KvCache,
}
"""The tables of a recipe file about what is done besides GEMMs, by their names, which are also fields of Recipe."""
WHOLE_RUN = ("keep", "schedule", *TABLES)  # fields of Recipe that a stage of a schedule does not have


@dataclass(frozen=True)
class Recipe:
    """`linear` covers every linear layer but those of `router`, which covers the linear layer that chooses the experts
    and gates with one output. `qk` and `pv` cover the products of the attention core, `product` those that
    `instrument(products=...)` declares.

    modules   parts of single modules in place of `linear`, in all layers, such as ("fc2", Part(...)), or in one, such
              as ("layer3.fc2", Part(...)); the narrowest holds. Where none does, the first glob that matches one of
              `Site.megatron_paths`, such as ("*.linear_fc2", Part(...))
    keep      layers that stay in bf16, as in --skip-layers; "" for none
    schedule  the recipes of later iterations, each with the iteration from which it holds: "9000", or "90%" of all
    deoscillation, state, communication, kv_cache   see their classes; None for nothing
    """

    name: str
    linear: Part = field(default_factory=Part)
    qk: Part = field(default_factory=Part)
    pv: Part = field(default_factory=Part)
    router: Part = field(default_factory=Part)
    product: Part = field(default_factory=Part)
    modules: tuple[tuple[str, Part], ...] = ()
    keep: str = ""
    schedule: tuple[tuple[str, Recipe], ...] = ()
    deoscillation: Deoscillation | None = None
    state: StateRounding | None = None
    communication: Communication | None = None
    kv_cache: KvCache | None = None
    about: About = field(default_factory=About)

    def with_parts(self, parts: Mapping[str, Part]) -> Recipe:
        """The recipe with these parts in place of those of the same names, or in addition: "linear", "modules.fc2"."""
        made = {**self.by_name(), **parts}
        named: dict[str, Any] = {name: made.pop(name) for name in PARTS}
        modules = tuple((name.removeprefix(f"{MODULES}."), part) for name, part in made.items())
        return replace(self, **named, modules=modules)

    def checked(self) -> Recipe:
        """The recipe itself. Raises SpecError if it subtracts a mean over tokens in a product of attention or a
        declared one: parts are checked together, because an option may replace the format of one of them."""
        for stage in (self, *(stage for _, stage in self.schedule)):
            for name in ("qk", "pv", "product"):
                formats = stage.by_name()[name].formats
                if any(spec.centered for field in OPERAND_FIELDS if (spec := formats[field])):
                    raise SpecError(
                        f"{name}: center=tokens applies to linear layers only: write linear_nvfp4(center=tokens), and "
                        "give qk, pv and product formats of their own, as with --qk-quant"
                    )
        return self

    def in_each_stage(self, change: Callable[[Recipe], Recipe]) -> Recipe:
        """The recipe with a change in the first stage and in those of the schedule."""
        return replace(change(self), schedule=tuple((start, change(stage)) for start, stage in self.schedule))

    def linear_of(self, site: Site) -> Part:
        """The part of a linear layer."""
        modules = dict(self.modules)
        other = self.router if site.is_of_router else self.linear
        return next(
            (modules[name] for name in (*site.names, *modules) if name in modules and _covers(name, site)), other
        )

    def part_of(self, product: Product, site: Site) -> Part:
        """The part of a product of a layer."""
        part: Part = self.linear_of(site) if product is Product.LINEAR else getattr(self, product)
        cache = self.kv_cache.of(product, site) if self.kv_cache else None
        return replace(part, formats=replace(part.formats, cache=cache)) if cache else part

    @property
    def keeps_all(self) -> str:
        """The error message for a model whose layers are all in `keep`."""
        return (
            f"recipe {self.name} keeps {self.keep} in bf16, which is every layer of this model: use a model with more "
            "layers, or quantize all of them, as in nvidia_nvfp4(without=keep)"
        )

    def check_modules(self, sites: Iterable[Site]) -> tuple[str, ...]:
        """One sentence for each glob that matches no linear layer among these sites: as in Megatron, a file may have
        patterns for other models. Raises RecipeError for the name of a module that is not there."""
        sites = [*sites]
        linear = [site for site in sites if site.module != "core"]
        if self.kv_cache and self.kv_cache.latent and not any(site.module in LATENT for site in linear):
            raise RecipeError(
                f"recipe {self.name} has a format for the latent of a KV cache, but no layer of the model is "
                f"{' or '.join(LATENT)}: write key and value in [kv_cache]"
            )
        unmatched: dict[str, None] = {}
        for stage in (self, *(stage for _, stage in self.schedule)):
            for module, _ in stage.modules:
                if any(_covers(module, site) for site in linear):
                    continue
                if GLOB.match(module):
                    unmatched[f"{module} of recipe {self.name} matches no linear layer of this model"] = None
                else:
                    listed = ", ".join(dict.fromkeys(site.module for site in linear))
                    last = max((site.layer_index for site in linear), default=0)
                    raise RecipeError(
                        f"recipe {self.name} has formats for {module}, which the model lacks: it has {listed} in "
                        f"layers 1 to {last}"
                    )
        return tuple(unmatched)

    def stages(self, iterations: int | None) -> list[tuple[int, Recipe]]:
        """The recipe of the first iteration and those of the schedule, each with the iteration from which it holds.

        iterations is how many are trained. Raises RecipeError if the schedule depends on it and it is None.
        """
        stages = [(0, self)]
        for start, recipe in self.schedule:
            if not start.endswith("%"):
                stages.append((int(start), recipe))
            elif iterations is None:
                raise RecipeError(
                    f"recipe {self.name} changes at {start} of the iterations, but the number of iterations is "
                    "unknown: pass iterations=N"
                )
            else:
                stages.append((math.ceil(iterations * float(start[:-1]) / 100), recipe))
        return sorted(stages, key=lambda stage: stage[0])

    def lines(self) -> list[str]:
        """One line per operand: "linear.dgrad.grad_output    output size  mxfp8_e5m2"; that of the softmax if it is not
        full; those that the schedule changes; and one per tensor of state and communication."""
        lines, before = self._lines(), self
        for start, recipe in self.schedule:
            former, before = before._lines(), recipe
            changed = [line for line in recipe._lines() if line not in former]
            lines += [f"from {'' if start.endswith('%') else 'iteration '}{start}: {line}" for line in changed]
        tables = {name: table for name, table in self.tables().items() if name != "deoscillation"}
        specs = {f"{name}.{key}": spec for name, table in tables.items() for key, spec in table.items()}
        return lines + [f"{name:<28}  {'last axis':<12} {spec}" for name, spec in specs.items()]

    def tables(self) -> dict[str, dict[str, Any]]:
        """Those of TABLES that the recipe has, as in its file: {"state": {"exp_avg": "mxfp8"}, ...}"""
        cells = {name: vars(table) for name in TABLES if (table := getattr(self, name))}
        return {
            name: {
                key: str(x) if isinstance(x, Spec) else x
                for key, x in table.items()
                if x is not None and not (isinstance(x, str) and x == getattr(TABLES[name], key))
            }
            for name, table in cells.items()
        }

    def _lines(self) -> list[str]:
        parts = self.parts() | {f"{MODULES}.{name}": part for name, part in self.modules}
        rows = [
            (f"{name}.{operand.gemm}.{operand.name}", operand, part)
            for name, part in parts.items()
            for operand in PARTS.get(name, LINEAR_OPERANDS)
        ]
        width = max(len(name) for name, _, _ in rows)
        softmax = self.pv.formats.softmax
        flash = [f"{'pv.softmax':<{width}}  {'keys':<12} {softmax}"] if softmax.tile else []
        if (smooth := self.qk.formats.smooth) is not Smooth.NONE:
            flash.append(f"{'qk.smooth':<{width}}  {'tokens':<12} {smooth}")
        return [
            f"{name:<{width}}  {operand.axis:<12} "
            f"{OF_ROUNDED * (operand.field in part.formats.of_rounded)}"
            f"{part.rounded_to(operand.field)}"
            for name, operand, part in rows
        ] + flash

    def gemms(self) -> dict[str, str]:
        """The two operands of each quantized GEMM: {"linear.dgrad": "nvfp4(rounding=stochastic) × nvfp4", ...}"""
        gemms: dict[str, list[str]] = {}
        for name, part in self.by_name().items():
            for operand in PARTS.get(name, LINEAR_OPERANDS):
                rounded = "rounded " * (operand.field in part.formats.of_rounded)
                gemms.setdefault(f"{name}.{operand.gemm}", []).append(rounded + part.rounded_to(operand.field))
        return {gemm: " × ".join(specs) for gemm, specs in gemms.items() if set(specs) != {BF16}}

    def parts(self) -> dict[str, Part]:
        """The parts by name, without those that few models have if they are not quantized."""
        parts: dict[str, Part] = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in parts.items() if name not in ("router", "product") or part != Part()}

    def by_name(self) -> dict[str, Part]:
        """All parts by their names in a file: those of PARTS, then those such as "modules.fc2"."""
        modules = {f"{MODULES}.{name}": part for name, part in self.modules}
        return {name: getattr(self, name) for name in PARTS} | modules

    def every_part(self) -> list[Part]:
        """All parts, those of modules and of the schedule included."""
        return [*self.by_name().values()] + [part for _, recipe in self.schedule for part in recipe.every_part()]

    @property
    def quantizes(self) -> bool:
        """Whether an operand of a GEMM is quantized in any iteration."""
        return any(part.formats.quantized for part in self.every_part())

    @property
    def quantized(self) -> bool:
        """Whether anything is rounded in any iteration."""
        return (self.state or self.communication or self.kv_cache) is not None or self.quantizes

    def describe(self) -> str:
        """linear mxfp4, qk bf16, pv bf16; for a part with overrides: linear (forward mxfp8 x mxfp4, ...). Gradients
        of another format are named: linear mxfp8 (gradients mxfp8_e5m2)."""
        described = []
        for name, part in (self.parts() | dict(self.modules)).items():
            gemms: dict[str, dict[str, None]] = {}
            for operand in PARTS.get(name, LINEAR_OPERANDS):
                gemms.setdefault(operand.gemm, {})[part.rounded_to(operand.field)] = None
            mixed = ", ".join(f"{gemm} {' x '.join(formats)}" for gemm, formats in gemms.items())
            described.append(f"{name} ({mixed})" if part.overrides else f"{name} {part.text}")
        if self.pv.formats.softmax.tile:
            described.append(f"softmax {self.pv.formats.softmax}")
        if self.qk.formats.smooth is not Smooth.NONE:
            described.append(f"smooth {self.qk.formats.smooth}")
        if self.deoscillation:
            described.append(f"de-oscillation {self.deoscillation}")
        described += [f"state ({self.state})"] * bool(self.state)
        described += [f"communication ({self.communication})"] * bool(self.communication)
        described += [f"KV cache ({self.kv_cache})"] * bool(self.kv_cache)
        return ", ".join(described)


def _covers(module: str, site: Site) -> bool:
    """Whether a key of `Recipe.modules` names a linear layer."""
    return module in site.names or any(fnmatchcase(path, module) for path in site.megatron_paths)

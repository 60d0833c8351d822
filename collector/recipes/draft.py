"""A recipe under construction: operands are set, ingredients are left out. No torch."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from binade.collector.errors import raising
from binade.collector.recipes.recipe import (
    BF16,
    LINEAR_OPERANDS,
    MODULES,
    PARTS,
    TABLES,
    About,
    Communication,
    Deoscillation,
    KvCache,
    Part,
    Recipe,
    StateRounding,
)
from binade.quant.elements import RoundingMode
from binade.quant.specs import FULL, OPERAND_FIELDS, Block, GemmFormats, Smooth, Softmax, Spec, SpecError

Formats = dict[str, Spec | None]  # by the fields of GemmFormats

# The format of gradients, which need range more than precision, by the name that the user wrote: mxfp8_e4m3 means E4M3
# for gradients too, mxfp8 does not.
GRADIENT_FORMAT = {"mxfp8": "mxfp8_e5m2"}

INGREDIENTS = {
    "dgrad": "the GEMM for the gradient of the input runs in bf16",
    "wgrad": "the GEMM for the gradient of the weight runs in bf16",
    "scale": "the format's default scale rule",
    "rounding": "to nearest instead of stochastic",
    "center": "the mean over tokens is not subtracted",
    "rotation": "no Hadamard rotation",
    "tiles": "vectors along the contracted axis instead of tiles",
    "rounded": "backward operands are rounded from the original, not from the rounded forward operand",
    "smooth": "the means of keys and queries are not subtracted",
    "keep": "no layer stays in bf16",
    "schedule": "the recipe does not change during the run",
    "deoscillation": "weights that oscillate are left alone",
    "state": "the optimizer's state stays as the optimizer holds it",
    "communication": "ranks exchange values that are not rounded",
    "kv_cache": "a KV cache holds keys and values as they are",
}
"""What `without=` turns off, and what happens instead."""


BACKWARDS = ("dequantized", "high_precision")
OF_ROUNDED = ("dgrad_b", "wgrad_a")  # the backward operands that enter the forward product too


@dataclass
class RecipeDraft:
    """A recipe under construction, or a stage of its schedule: by part, and by "modules.<module>".

    quant_types  what is requested for each part
    formats      the spec of each operand
    overrides    what is requested for single operands
    of_rounded   the operands that are rounded from the rounded forward operand
    """

    quant_types: dict[str, str] = field(default_factory=lambda: dict.fromkeys(PARTS, BF16))
    formats: dict[str, Formats] = field(default_factory=lambda: {part: dict.fromkeys(OPERAND_FIELDS) for part in PARTS})
    overrides: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    of_rounded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    softmax: Softmax = FULL
    smooth: Smooth = Smooth.NONE
    keep: str = ""
    schedule: list[tuple[str, RecipeDraft]] = field(default_factory=list)
    deoscillation: Deoscillation | None = None
    state: StateRounding | None = None
    communication: Communication | None = None
    kv_cache: KvCache | None = None
    about: About = field(default_factory=About)

    def copy(self) -> RecipeDraft:
        """A copy without what holds for the whole run: WHOLE_RUN and the source. The formats of the KV cache belong to
        those of products."""
        tables: dict[str, Any] = dict.fromkeys(TABLES) | {"kv_cache": self.kv_cache}
        return replace(deepcopy(self), keep="", schedule=[], about=About(), **tables)

    def stages(self) -> list[RecipeDraft]:
        """This draft, and those of the schedule."""
        return [self, *(stage for _, stage in self.schedule)]

    @property
    def linears(self) -> list[str]:
        """The names of the parts that are linear layers."""
        return ["linear", *(part for part in self.formats if part.startswith(f"{MODULES}."))]

    def set(self, part: str, formats: Formats) -> None:
        """Set operands, which are then rounded from the original."""
        self.formats[part] |= formats
        self.of_rounded[part] = tuple(field for field in self.of_rounded.get(part, ()) if field not in formats)

    def request(self, part: str, text: str) -> None:
        """Note what was requested for the operands of a part, once they are set: `text`, or bf16 for those in bf16."""
        plain = [field for field, spec in self.formats[part].items() if spec is None]
        self.overrides[part] = dict.fromkeys(plain, BF16)
        self.quant_types[part] = BF16 if len(plain) == len(self.formats[part]) else text

    def set_part(self, part: str, text: str) -> None:
        for name in self.linears if part == "linear" else [part]:
            self.quant_types[name] = str(Spec.of(text))
            self.set(name, formats_of(text, backward=part not in ("qk", "pv")))
            self.overrides.pop(name, None)

    def set_gemm(self, gemm: str, text: str) -> None:
        """Set operands of every linear layer."""
        whole = formats_of(text)
        changed = [operand.field for operand in LINEAR_OPERANDS if operand.gemm == gemm]
        for name in self.linears:
            self.set(name, {field: whole[field] for field in changed})
            self.overrides[name] |= dict.fromkeys(changed, str(Spec.of(text)))

    def set_operand(self, part: str, field: str, text: str) -> None:
        for name in self.linears if part == "linear" else [part]:
            self.set(name, {field: requested_specs(text)[0]})
            self.overrides[name][field] = str(Spec.of(text))

    def leave_out(self, ingredient: str) -> bool:
        """Turn an ingredient off. Returns whether the recipe had it."""
        before = deepcopy(self)
        if ingredient == "keep":
            self.keep = ""
        elif ingredient == "schedule":
            self.schedule = []
        elif ingredient in TABLES:
            setattr(self, ingredient, None)
        elif ingredient == "smooth":
            self.smooth = Smooth.NONE
        elif ingredient == "rounded":
            self.of_rounded = dict.fromkeys(self.of_rounded, ())
        else:
            for part, formats in self.formats.items():
                for name, spec in formats.items():
                    formats[name] = spec and _without(ingredient, name, spec)
                    if spec and not formats[name]:
                        self.set(part, {name: None})  # not from the rounded value either
                        self.overrides[part][name] = BF16
            for name in ("state", "communication"):
                if table := getattr(self, name):
                    specs = {key: spec for key, spec in table.specs.items() if isinstance(spec, Spec)}
                    changes = {key: _without(ingredient, key, spec) for key, spec in specs.items()}
                    setattr(self, name, replace(table, **changes))
        return before != self

    def set_backward(self, source: str) -> None:
        """Run dgrad and wgrad of every linear layer in bf16: on what the forward GEMM read, rounded ("dequantized"), or
        on the originals ("high_precision"). Transformer Engine's `backward_override`."""
        for name in self.linears:
            self.set(name, {field: None for field in OPERAND_FIELDS if not field.startswith("forward")})
            if source == BACKWARDS[0]:
                forward = dict(zip(OF_ROUNDED, ("forward_b", "forward_a"), strict=True))
                self.of_rounded[name] = tuple(operand for operand in OF_ROUNDED if self.formats[name][forward[operand]])
            self.request(name, self.quant_types[name])

    def recipe(self, name: str) -> Recipe:
        parts = {part: self._part(part) for part in self.formats}
        named: dict[str, Any] = {name: getattr(self, name) for name in TABLES}
        named |= {part: parts[part] for part in PARTS}
        return Recipe(
            name,
            **named,
            modules=tuple((part.partition(".")[2], made) for part, made in parts.items() if part not in PARTS),
            keep=self.keep,
            schedule=tuple((start, stage.recipe(name)) for start, stage in self.schedule),
            about=self.about,
        )

    def _part(self, part: str) -> Part:
        quant_type = self.quant_types[part]
        different = tuple(sorted((field, text) for field, text in self.overrides[part].items() if text != quant_type))
        of_linear = part not in ("qk", "pv", "product")
        with raising(SpecError, part, SpecError):
            if not of_linear and any(spec and spec.centered for spec in self.formats[part].values()):
                raise SpecError(
                    "center=tokens applies to linear layers only: write linear_nvfp4(center=tokens), and give qk, pv "
                    "and product formats of their own, as with --qk-quant"
                )
            softmax = self.softmax if part == "pv" else FULL
            smooth = self.smooth if part == "qk" else Smooth.NONE
            operands: dict[str, Any] = dict(self.formats[part])
            rounded = self.of_rounded.get(part, ())
            formats = GemmFormats(**operands, of_rounded=rounded, softmax=softmax, smooth=smooth)
        return Part(quant_type, formats, different)


def _without(ingredient: str, field: str, spec: Spec) -> Spec | None:
    """The spec of an operand without an ingredient; None for bf16."""
    if field.startswith(ingredient):  # dgrad, wgrad
        return None
    options, plain = spec.options(), Spec.of(spec.format)
    dropped: set[str] = set()
    if ingredient == "scale":
        dropped = {"scale", "error", "bound", "history", "algorithm", "margin", *(["block"] * (plain.block is None))}
        options |= {"block": spec.block}  # the scheme may have another one by default
    elif ingredient == "rounding" and spec.scaling.stochastic:
        dropped = {"scale"}
    elif ingredient == "rounding" and spec.rounding == RoundingMode.STOCHASTIC:
        dropped = {"rounding"}
    elif ingredient == "center":
        dropped = {"center"}
    elif ingredient == "rotation":
        dropped = {"hadamard", "signs"}
    elif ingredient == "tiles" and spec.block and (spec.block.rows or 1) > 1:
        options["block"] = Block(1, spec.block.columns)
    return Spec.of(spec.format, **{name: value for name, value in options.items() if name not in dropped})


def requested_specs(text: str) -> tuple[Spec | None, Spec | None]:
    """The specs of a part's operands and of its gradients for a requested format; None for bf16."""
    spec = Spec.of(text)
    if str(spec) == BF16:
        return None, None
    written = text.partition("(")[0].strip()
    return spec, Spec.of(GRADIENT_FORMAT.get(written, spec), **spec.options())


def formats_of(requested: str, *, backward: bool = True) -> Formats:
    """The formats that a part's operands are rounded to; the mean over tokens is not subtracted from weights."""
    spec, gradient = requested_specs(requested)
    formats: Formats = dict.fromkeys(OPERAND_FIELDS)
    for name in OPERAND_FIELDS if backward else ("forward_a", "forward_b"):
        formats[name] = gradient if name.endswith("grad") else spec
    for name in formats:
        formats[name] = for_operand(name, formats[name])
    return formats


def for_operand(field: str, spec: Spec | None, whole: bool = True) -> Spec | None:
    """The spec of an operand, for that of its whole GEMM: a weight has no tokens. whole=False: for its own."""
    return Spec.of(spec, center="none") if whole and spec and field in ("forward_b", "dgrad_b") else spec

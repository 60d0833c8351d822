"""The advice: the choice of formats of least measured cost, a reading of the results of an experiment.

The cost of a group in a format is its measured effect (data/run/effects.py), and both operands of its products take
that format. A choice costs the sum of its groups, which lacks what groups do to each other: `Advice.whole` is what the
advised recipe costs when it is evaluated whole, once the experiment has done so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from binade.collector.advice.choice import BF16_BITS, choose, least_share
from binade.collector.errors import AdviceError
from binade.collector.models.site import Site
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import BF16, MODULES, About, Part, Recipe
from binade.data.compare import evidence
from binade.data.compare.evidence import Estimate, Measure
from binade.data.run.directory import read_run
from binade.data.run.effects import CHANGE, Measured, measured_effects, recipe_sha256
from binade.data.run.experiment import ALL_PRODUCTS, NONE, OPERAND_VALUES, EffectGroup, read_results
from binade.data.run.notes import rounded_twice
from binade.data.words.text import counted, number_text
from binade.quant.specs import Spec, known_specs

GROUPS = {"site": ("layer_index", "module"), "layer": ("layer_index",), "module": ("module",), "model": ()}
"""The groups that share a choice, with the columns that distinguish them."""
BITS = Measure("bits", "Bits per value", "bits", format=".2f")
POINTS = 12  # of the frontier
AS_MANY = 0.01  # tolerance in bits per value, since the advice may not use all of its budget
ADVISED = "Advised"  # begins the title of the recipes made here
LISTED = 4  # names in a sentence
COLUMNS = ["kind", "name", "bits", "change", "cost"]


@dataclass(frozen=True)
class AdviceRequest:
    """A request for advice. Raises AdviceError if its options cannot be combined.

    bits       the budget: average bits per value of the forward operands
    cost       instead of it, the most measured cost: the sum over groups of the divergence, else of the loss change
    memory     instead of both, the bytes that the forward operands of a batch may take
    by         the granularity of the choice: a key of GROUPS
    formats    those to choose from besides bf16; all that were measured if empty
    parts      of recipe.PARTS, whose products are chosen for; all that were measured if empty
    most_bf16  how many layers may have a product in bf16; None for any number
    """

    bits: float | None = 5.5
    cost: float | None = None
    memory: int | None = None
    by: str = "site"
    formats: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    most_bf16: int | None = None

    def __post_init__(self) -> None:
        if sum(limit is not None for limit in (self.bits, self.cost, self.memory)) != 1:
            raise AdviceError("give one budget: of bits, of memory, or of cost")
        if self.most_bf16 is not None and "layer_index" not in GROUPS[self.by]:
            raise AdviceError(
                f"--by {self.by} makes one choice for all layers, so --max-bf16-layers does not apply: give one of them"
            )

    @property
    def limit(self) -> str:
        """The budget in words."""
        if self.cost is not None:
            return f"a measured cost of {self.cost:g}"
        return f"{self.bits:g} bits" if self.bits is not None else f"{self.memory:,} bytes"


class Operands(NamedTuple):
    """The forward operands of a product: how many values they have in a batch."""

    part: str
    layer_index: int
    module: str
    a: int
    b: int

    def group(self, by: str) -> EffectGroup:
        """The group that shares a choice. A recipe has one choice for the attention, and one for the declared products,
        of all layers. by: a key of GROUPS."""
        if self.part not in ("linear", "router"):
            return EffectGroup(self.part)
        layer = self.layer_index if "layer_index" in GROUPS[by] else None
        return EffectGroup(self.part, layer, self.module if "module" in GROUPS[by] else None)


@dataclass(frozen=True, eq=False)
class Advice:
    """
    run_id      of the experiment
    operands    of the products that are chosen for
    effects     what the experiment has measured
    options     a row for each group and format: group, layer, format, bits (of all its values), share (of all bits in
                bf16), change (of the loss), cost (what the choice minimizes), by_sequence (the changes)
    chosen      the row of each group that the choice takes
    sequences   how many every change is from: the same of all groups
    unmeasured  the groups that stay in bf16, because they were not measured
    caveat      what the weights do to effects; "" for nothing
    """

    request: AdviceRequest
    run_id: str
    operands: tuple[Operands, ...]
    effects: tuple[Measured, ...]
    options: pd.DataFrame
    chosen: pd.DataFrame
    sequences: int
    unmeasured: tuple[EffectGroup, ...] = ()
    caveat: str = ""

    @property
    def values(self) -> int:
        return _values(self.operands)

    @cached_property
    def frontier(self) -> pd.DataFrame:
        """The choices under other budgets (kind advised), and each format that all groups can take (uniform): kind,
        name, bits (per value), change (the sum over groups) and cost."""
        rows = []
        for share in np.unique(np.geomspace(least_share(self.options), 1, POINTS)):
            try:
                other = choose(self.options, share=float(share) + 1e-10, most_bf16=self.request.most_bf16)
            except AdviceError:  # only so many layers may be in bf16
                continue
            rows.append(self._row("advised", f"{BF16_BITS * share:.4g} bits", other))
        counts = self.options["format"].value_counts()
        for name in sorted(counts.index[counts == self.options["group"].nunique()], key=bits_of):
            most = self.request.most_bf16
            if name != BF16 or most is None or len({operands.layer_index for operands in self.operands}) <= most:
                rows.append(self._row("uniform", name, self._in(name)))
        return pd.DataFrame(rows, columns=COLUMNS)

    def _row(self, kind: str, name: str, rows: pd.DataFrame) -> list[Any]:
        return [kind, name, rows["bits"].sum() / self.values, rows["change"].sum(), rows["cost"].sum()]

    def _in(self, name: str) -> pd.DataFrame:
        return self.options[self.options["format"] == name]

    def _sum(self, rows: pd.DataFrame) -> Estimate:
        """The sum of the changes of groups, with its interval over sequences."""
        return evidence.mean(CHANGE, np.sum(rows["by_sequence"].tolist(), axis=0), "sequences")

    @property
    def bits(self) -> float:
        """The bits per value of the choice."""
        return float(self.chosen["bits"].sum() / self.values)

    @property
    def estimate(self) -> Estimate:
        """The sum of the effects of the choice, with its interval over sequences."""
        return self._sum(self.chosen)

    @property
    def uniform(self) -> str:
        """The format of least cost for all groups alone, within the limits and with no more bits; "" if there is
        none."""
        found = self.frontier[(self.frontier["kind"] == "uniform") & (self.frontier["bits"] <= self.bits + AS_MANY)]
        if self.request.cost is not None:
            found = found[found["cost"] <= self.request.cost]
        return "" if found.empty else str(found.sort_values("cost")["name"].iloc[0])

    @property
    def gain(self) -> Estimate | None:
        """The sum of the choice minus that of `uniform`, paired by sequence; None if there is none."""
        if not self.uniform:
            return None
        mix, single = (
            dict(enumerate(np.sum(rows["by_sequence"].tolist(), axis=0)))
            for rows in (self.chosen, self._in(self.uniform))
        )
        return evidence.paired(CHANGE, mix, single, "sequences")

    @property
    def alone(self) -> bool:
        """Whether `uniform` is advised, since the mix was not measured to lose less."""
        if self.gain is None or self.sequences < 2:
            return False
        return self.gain.value >= 0 or not evidence.holm([self.gain])[0]

    @property
    def advised(self) -> pd.DataFrame:
        """The row of each group that is advised: those of `uniform` if that is advised alone, else `chosen`."""
        return self._in(self.uniform) if self.alone else self.chosen

    @property
    def deciding(self) -> pd.DataFrame:
        """The groups that are kept wider than the narrowest format for a smaller loss: group, format, and saved, by how
        much."""
        narrowest = self.options.assign(width=self.options["format"].map(bits_of)).sort_values("width", kind="stable")
        change = narrowest.drop_duplicates("group").set_index("group")["change"]
        rows = self.advised.assign(saved=self.advised["group"].map(change) - self.advised["change"])
        return rows[rows["saved"] > 0].sort_values("saved", ascending=False, ignore_index=True)

    @property
    def whole(self) -> Estimate | None:
        """The change of the loss by the advised recipe, evaluated whole, with its interval over sequences; None before
        it was evaluated."""
        wanted = rounding_of(self.recipe(ADVISED))
        found = [e for e in self.effects if e.key.recipe_sha256 == wanted and e.group == ALL_PRODUCTS]
        return found[0].change if found else None

    @property
    def sentence(self) -> evidence.Sentence:
        """The advice in a sentence, and what it costs whole. From one sequence nothing is advised, and a mix only if it
        was measured to lose less than a single format."""
        few = ""
        if self.sequences < 2:
            few = "One sequence cannot tell formats apart: measure several (--sequences)."
        return evidence.together(few, self._said("Least measured cost, not advised" if few else ADVISED), self._whole)

    def _said(self, word: str) -> evidence.Sentence:
        parts: dict[str, Estimate | str] = {"used": evidence.exact(BITS, self.bits), "change": self.estimate}
        text = "{used} per forward value, whose measured loss changes add up to {change}"
        if self.gain is None:
            return evidence.say(f"{word}: {text}; no single format within the limits takes as few bits.", **parts)
        single = self._in(self.uniform)
        parts |= {"others": evidence.exact(BITS, single["bits"].sum() / self.values), "than": self._sum(single)}
        parts |= {"other": self.uniform}
        if not self.alone:
            return evidence.say(f"{word}: {text}; with {{other}} alone, {{others}}, to {{than}}.", **parts)
        alone = f"{word}: {{other}} alone, {{others}}, whose measured loss changes add up to {{than}}"
        text = f"{alone}; the least cost in a mix is {{used}}, {{change}}, which is not less (difference {{gain}})."
        return evidence.say(text, **parts, gain=self.gain)

    @property
    def _whole(self) -> evidence.Sentence:
        if self.whole is None:
            return evidence.Sentence()
        return evidence.say("Evaluated whole, the advised recipe changes the loss by {whole}.", whole=self.whole)

    @property
    def doubts(self) -> list[str]:
        """How it was measured, and a sentence for each reason not to rely on it."""
        rounded = self.options[self.options["format"] != BF16]
        least = "divergences" if rounded["by_divergence"].all() else "changes of the loss"
        on = counted(self.sequences, "sequence")
        doubts = [
            f"Measured in {self.run_id}: {counted(rounded['group'].nunique(), 'group')} of forward operands in "
            f"{', '.join(narrowest_first(rounded['format']))}, one at a time, on {on}; "
            f"the choice minimizes the sum of their {least}.",
            "Only the rounding of forward operands is measured. In the recipe, the backward operands of a product have "
            "its format, too.",
        ]
        if self.whole is None and self.rounds:
            doubts.append(
                "The sum of effects lacks what groups do to each other, and the recipe was not evaluated whole."
            )
        if self.caveat:
            doubts.append(self.caveat)
        if self.unmeasured:
            names = evidence.listed([str(group) for group in self.unmeasured], LISTED + 1)
            doubts.append(f"Kept in bf16, because they were not measured: {names}.")
        return doubts

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded."""
        return bool((self.advised["format"] != BF16).any())

    def recipe(self, name: str) -> Recipe:
        """What is advised as a recipe; the most common format becomes [linear]."""
        advised = self.advised
        what = f"forward operands in {self.uniform} alone, " if self.alone else ""
        about = About(
            f"{ADVISED} under {self.request.limit}: {what}effects of {number_text(advised['change'].sum(), '+.3g')} at "
            f"{advised['bits'].sum() / self.values:.2f} bits per forward value",
            (f"run {self.run_id}",),
        )
        by_group = dict(zip(advised["group"], advised["format"], strict=True))
        chosen = [(each, by_group.get(str(each.group(self.request.by)), BF16)) for each in self.operands]
        parts = {each.part: _part(each.part, spec) for each, spec in chosen if each.part not in ("linear", "router")}
        linear = {Site(o.layer_index, o.module): (o.part, spec) for o, spec in chosen if o.part in ("linear", "router")}
        ((usual, _),) = Counter(spec for _, spec in linear.values()).most_common(1) or [(BF16, 0)]
        parts["linear"] = _part("linear", usual)
        for module in dict.fromkeys(site.module for site in linear):
            choices = {site.name: choice for site, choice in linear.items() if site.module == module}
            if len(set(choices.values())) == 1:
                choices = {module: next(iter(choices.values()))}
            for key, (part, spec) in choices.items():
                if (part, spec) != ("linear", usual):
                    parts[f"{MODULES}.{key}"] = _part(part, spec)
        return Recipe(name, about=about).with_parts(parts)


def bits_of(name: str) -> float:
    """Bits per value of a format."""
    return BF16_BITS if name == BF16 else Spec.of(name).bits_per_value


def narrowest_first(names: Iterable[str]) -> list[str]:
    """Each format once, without bf16."""
    return sorted({str(name) for name in names} - {BF16}, key=lambda name: (bits_of(name), name))


def rounding_of(recipe: Recipe) -> str:
    """The `effects.recipe_sha256` of a recipe."""
    return recipe_sha256(to_toml(recipe))


def _part(part: str, spec: str) -> Part:
    """A part whose products have a format."""
    return Part() if spec == BF16 else parse_recipe(spec).by_name()[part]


def _values(operands: Iterable[Operands]) -> int:
    return sum(each.a + each.b for each in operands)


def read_advice(directory: Path, request: AdviceRequest) -> Advice:
    """The advice from the experiment of a run. Raises AdviceError if it does not suffice, RunError and OSError."""
    run = read_run(directory)
    rows: Any = run.config.get(OPERAND_VALUES)
    effects = measured_effects(read_results(directory))
    if not rows or not effects:
        raise AdviceError(
            f"{run.run_id} has no effects with the sizes of operands: measure them with binade advise or binade measure"
        )
    caveat = rounded_twice([run.config], everywhere=True)
    return advise(run.run_id, [Operands(*row) for row in rows], effects, request, caveat)


def advise(
    run_id: str, operands: Sequence[Operands], effects: Sequence[Measured], request: AdviceRequest, caveat: str = ""
) -> Advice:
    """The advice from effects. Raises AdviceError if the request cannot be met."""
    known = _known(effects)
    if missing := [name for name in request.formats if name not in {fmt for _, fmt in known}]:
        raise AdviceError(
            f"not measured: {', '.join(missing)}; choose from {', '.join(narrowest_first(fmt for _, fmt in known))}"
        )
    if request.formats:
        known = {(group, fmt): effect for (group, fmt), effect in known.items() if fmt in request.formats}
    measured = {group for group, _ in known}
    parts = request.parts or {each.part for each in operands if each.group(request.by) in measured}
    chosen_for = tuple(each for each in operands if each.part in parts)
    groups = list(dict.fromkeys(each.group(request.by) for each in chosen_for))
    if not measured & set(groups):
        raise AdviceError(
            f"no group of {', '.join(parts) or 'products'} by {request.by} was measured in {run_id}: measure with "
            f"--by {'part' if request.by == 'model' else f'part,{request.by}'}"
        )
    used = {key: effect for key, effect in known.items() if key[0] in groups}
    sequences = min(len(effect.changes) for effect in used.values())
    options = _options(chosen_for, groups, used, sequences, request.by)
    share = None if request.bits is None else request.bits / BF16_BITS
    if request.memory is not None:
        share = 8 * request.memory / (BF16_BITS * _values(chosen_for))
    chosen = choose(options, share=share, cost=request.cost, most_bf16=request.most_bf16)
    unmeasured = tuple(group for group in groups if group not in measured)
    return Advice(request, run_id, chosen_for, tuple(effects), options, chosen, sequences, unmeasured, caveat)


def _known(effects: Iterable[Measured]) -> dict[tuple[EffectGroup, str], Measured]:
    """The effects of formats on whole groups, without rounding elsewhere. Recipes are no formats to choose from."""
    listed = [effect for effect in effects if effect.key.is_whole and effect.key.base == NONE]
    specs = {*known_specs(effect.format for effect in listed)}
    found: dict[tuple[EffectGroup, str], Measured] = {}
    for effect in listed:
        if effect.format in specs:
            found.setdefault((effect.group, str(Spec.of(effect.format))), effect)
    return found


def _options(
    operands: Sequence[Operands],
    groups: Sequence[EffectGroup],
    effects: dict[tuple[EffectGroup, str], Measured],
    sequences: int,
    by: str,
) -> pd.DataFrame:
    """`Advice.options`, of the first sequences that all effects have, and by_divergence: whether cost is one."""
    rows = []
    for group in groups:
        own = [each for each in operands if each.group(by) == group]
        place = [str(group), own[0].layer_index]
        rows.append([*place, BF16, _values(own) * BF16_BITS, 0.0, 0.0, [0.0] * sequences, True])
        for (of, fmt), effect in effects.items():
            if of == group:
                changes, divergences = effect.changes[:sequences], effect.divergences[:sequences]
                change = math.fsum(changes) / sequences
                cost = max(math.fsum(divergences) / sequences if divergences else change, 0.0)
                bits = _values(own) * bits_of(fmt)
                rows.append([*place, fmt, bits, change, cost, list(changes), bool(divergences)])
    columns = ["group", "layer", "format", "bits", "change", "cost", "by_sequence", "by_divergence"]
    options = pd.DataFrame(rows, columns=columns)
    return options.assign(share=options["bits"] / (_values(operands) * BF16_BITS))

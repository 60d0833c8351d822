"""The advice: a choice of specs as a recipe, compared with uniform recipes, and the runs that test it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from binade.collector.advice.choice import choose, grouped, least_share, pairs
from binade.collector.advice.costs import (
    BF16_BITS,
    FORWARD,
    GROUPS,
    OPERAND,
    AdviceError,
    Costs,
    Operands,
    by_sequence,
    error_of,
    narrowest_first,
)
from binade.collector.errors import ConfigError
from binade.collector.jobs import Job, add_runs, start_runner, trained_with
from binade.collector.models.site import Site
from binade.collector.recipes.recipe import BF16, MODULES, About, Part, Recipe
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import Plan, plan
from binade.collector.training.slurm_options import SlurmOptions
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.effects import CHANGE
from binade.data.evidence import Estimate, Measure
from binade.data.text import number_text
from binade.quant.specs import OPERAND_FIELDS, GemmFormats, Spec

BITS = Measure("bits", "Bits per value", "bits", format=".2f")
POINTS = 12  # of the frontier
AS_MANY = 0.01  # tolerance in bits per value, since the advice may not use all of its budget
ADVISED = "Advised"  # begins the title of the recipes made here
LISTED = 4  # names in a sentence
COLUMNS = ["kind", "name", "bits", "change", "error", "cost"]


@dataclass(frozen=True)
class AdviceRequest:
    """A request for advice. Raises AdviceError if its options cannot be combined.

    bits       the budget: average bits per operand value, of forward and of backward operands each
    cost       instead of it, the most measured cost: the sum over groups of the divergence, else of the loss change
    by         the granularity of the choice: a key of GROUPS
    specs      those to choose from besides bf16; if empty, all that were measured, and for backward operands scored
    tiles      round weights in tiles only
    most_bf16  how many layers may have a GEMM in bf16; None for any number
    """

    bits: float | None = 5.5
    cost: float | None = None
    by: str = "site"
    specs: tuple[str, ...] = ()
    tiles: bool = False
    most_bf16: int | None = None

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.cost is None):
            raise AdviceError("give one budget: of bits, or of cost")
        if self.most_bf16 is not None and "layer_index" not in GROUPS[self.by]:
            raise AdviceError(
                f"--by {self.by} makes one choice for all layers, so --max-bf16-layers does not apply: give one of them"
            )


@dataclass(frozen=True)
class Advice:
    """
    table     the rows of `Costs.table` with group and saved
    chosen    a row for each operand: OPERAND, spec, values, bits, change, error, by_sequence, noise, group, and saved:
              by how much the loss, or for a backward operand its noise, would be worse in the narrowest spec
    frontier  kind (advised or uniform), name, bits per forward value, change (of the loss, the sum over groups),
              error (its standard error over sequences) and cost (what the choice minimizes): the choices under other
              budgets, and each spec that the request allows for all operands
    """

    request: AdviceRequest
    costs: Costs
    table: pd.DataFrame
    chosen: pd.DataFrame
    frontier: pd.DataFrame

    @property
    def bits(self) -> float:
        """The bits per forward value."""
        return _totals(self.forward)[0]

    @property
    def change(self) -> float:
        """The change in the loss: the sum of the effects of the groups."""
        return _totals(self.forward)[1]

    @property
    def error(self) -> float:
        """The standard error of the change over sequences; NaN for one sequence."""
        return _totals(self.forward)[2]

    @property
    def estimate(self) -> Estimate:
        """The change with its interval over sequences."""
        return evidence.with_error(CHANGE, self.change, self.error, self.costs.sequences, "sequences")

    @property
    def forward(self) -> pd.DataFrame:
        return self.chosen[self.chosen["gemm"] == FORWARD]

    @property
    def backward(self) -> pd.DataFrame:
        return self.chosen[self.chosen["gemm"] != FORWARD]

    @property
    def uniform(self) -> pd.Series | None:
        """The recipe of least cost with one spec for all operands, within the request and with no more bits; None if
        there is none."""
        recipes = self.frontier[(self.frontier["kind"] == "uniform") & (self.frontier["bits"] <= self.bits + AS_MANY)]
        if self.request.cost is not None:
            recipes = recipes[recipes["cost"] <= self.request.cost]
        return None if recipes.empty else recipes.sort_values("cost").iloc[0]

    @property
    def uniform_recipe(self) -> str:
        """The text of the recipe that rounds the same parts to `uniform`; "" if there is none."""
        if self.uniform is None or self.uniform["name"] == BF16:
            return ""
        parts = set(self.chosen["part"])
        return f"{'FA_linear_' if 'qk' in parts else 'linear_'}{self.uniform['name']}"

    @property
    def deciding(self) -> pd.DataFrame:
        """The groups of forward operands that are kept wider than the narrowest spec for a smaller loss, by how much
        they save; column place names them."""
        rows = self.advised[self.advised["gemm"] == FORWARD]
        rows = rows.assign(place=rows["group"])
        saved = rows.groupby("place")["saved"].sum()
        rows = rows.drop_duplicates("place").assign(saved=lambda operands: operands["place"].map(saved))
        return rows[rows["saved"] > 0].sort_values("saved", ascending=False, ignore_index=True)

    @property
    def gain(self) -> Estimate | None:
        """The change minus that of `uniform`, paired by sequence; None if there is none."""
        if self.uniform is None:
            return None
        mix, single = (
            dict(enumerate(by_sequence(part["by_sequence"], self.costs.sequences)))
            for part in (self.forward, self._single)
        )
        return evidence.paired(CHANGE, mix, single, "sequences")

    @property
    def alone(self) -> bool:
        """Whether `uniform` is advised, since `chosen` was not measured to lose less."""
        if self.gain is None or self.costs.sequences < 2:
            return False
        return self.gain.value >= 0 or not evidence.holm([self.gain])[0]

    @property
    def advised(self) -> pd.DataFrame:
        """The rows of what is advised: `chosen`, with all forward operands in `uniform` if that is advised alone."""
        return pd.concat([self._single, self.backward], ignore_index=True) if self.alone else self.chosen

    @property
    def _single(self) -> pd.DataFrame:
        """The rows of forward operands in `uniform`."""
        name = "" if self.uniform is None else self.uniform["name"]
        return self.table[(self.table["gemm"] == FORWARD) & (self.table["spec"] == name)]

    @property
    def sentence(self) -> evidence.Sentence:
        """The choice in a sentence. From one sequence nothing is advised, and a mix only if it was measured to lose
        less than a single spec."""
        other = self.uniform
        doubt = evidence.Sentence()
        if self.costs.sequences < 2:
            doubt = evidence.say("One sequence cannot tell formats apart: measure several (--sequences).")
        used = evidence.exact(BITS, self.bits)
        parts: dict[str, Estimate | str] = {"used": used, "change": self.estimate}
        word = "Least measured cost, not advised" if doubt else "Advised"
        text = "{used} per forward value, whose measured loss changes add up to {change}"
        if other is None or self.gain is None:
            return evidence.together(
                doubt, evidence.say(f"{word}: {text}; no single format within the limits takes as few bits.", **parts)
            )
        change = evidence.with_error(CHANGE, other["change"], other["error"], self.costs.sequences, "sequences")
        parts |= {"other": str(other["name"]), "others": evidence.exact(BITS, other["bits"]), "than": change}
        if not self.alone:
            said = evidence.say(f"{word}: {text}; with {{other}} alone, {{others}}, to {{than}}.", **parts)
            return evidence.together(doubt, said)
        alone = "Advised: {other} alone, {others}, whose measured loss changes add up to {than}"
        text = f"{alone}; the least cost in a mix is {{used}}, {{change}}, which is not less (difference {{gain}})."
        return evidence.say(text, **parts, gain=self.gain)

    @property
    def doubts(self) -> list[str]:
        """How it was measured, and a sentence for each reason not to rely on it."""
        costs, backward = self.costs, self.backward
        doubts = [costs.method, *costs.together]
        doubts.append(
            "Changes were measured group by group, so their sum lacks what groups do to each other: measure the recipe "
            "as a whole before you rely on it (binade measure --formats FILE --by model)."
        )
        if costs.operands.caveat:
            doubts.append(costs.operands.caveat)
        if costs.unmeasured:
            names = [str(group) for group in costs.unmeasured[:LISTED]]
            more = len(costs.unmeasured) - LISTED
            listed = ", ".join(names) + (f" and {more} more" if more > 0 else "")
            doubts.append(f"Kept in bf16, because they were not measured: {listed}.")
        if costs.operands.left:
            left = ", ".join(costs.operands.left)
            doubts.append(f"Kept in bf16, because an operand was not recorded or not scored: {left}.")
        if not backward.empty:
            doubts.append(
                "The effect of backward operands on the loss is not measured: their formats are chosen for the least "
                "noise in gradients."
            )
            bits = float(backward["bits"].sum() / backward["values"].sum())
            if self.request.bits is not None and bits > self.request.bits + AS_MANY:
                doubts.append(
                    f"Backward operands take {bits:.4g} bits: no narrower format that they were scored in is allowed "
                    "by the choice."
                )
        return doubts

    def recipe(self, name: str) -> Recipe:
        """What is advised as a recipe; the most common specs become [linear]."""
        given, rows = self.request, self.advised
        limit = f"{given.bits:g} bits" if given.cost is None else f"a measured cost of {given.cost:g}"
        what = f"forward operands in {self.uniform['name']} alone, " if self.uniform is not None and self.alone else ""
        bits, change, _ = _totals(rows[rows["gemm"] == FORWARD])
        about = About(
            f"{ADVISED} under {limit}: {what}effects of {number_text(change, '+.3g')} at {bits:.2f} bits per forward "
            "value",
            tuple(f"run {run}" for run in self.costs.runs),
        )
        parts: dict[str, Part] = {}
        linear: dict[Site, tuple[str, ...]] = {}
        for (part, layer, module), own in rows.astype({"layer_index": int}).groupby(OPERAND[:3]):
            specs = dict(zip(own["field"], own["spec"], strict=True))
            chosen = tuple(str(specs.get(field, BF16)) for field in OPERAND_FIELDS)
            if part in ("linear", "router"):
                linear[Site(int(str(layer)), str(module))] = chosen
            else:
                parts[str(part)] = _part(chosen, name)
        ((usual, _),) = Counter(linear.values()).most_common(1) or [((BF16,) * len(OPERAND_FIELDS), 0)]
        parts["linear"] = _part(usual, name)
        for module in dict.fromkeys(site.module for site in linear):
            choices = {site.name: chosen for site, chosen in linear.items() if site.module == module}
            if len(set(choices.values())) == 1:
                choices = {module: next(iter(choices.values()))}
            for key, chosen in choices.items():
                if chosen != usual:
                    parts[f"{MODULES}.{key}"] = _part(chosen, name)
        return Recipe(name, about=about).with_parts(parts)


def _part(given: Sequence[str], name: str) -> Part:
    """The part whose operands have these specs, in the order of OPERAND_FIELDS."""
    pairs = zip(OPERAND_FIELDS, given, strict=True)
    specs: dict[str, Any] = {field: None if spec == BF16 else Spec.of(spec) for field, spec in pairs}
    return Part.requested(name, GemmFormats(**specs))


def advise(costs: Costs, request: AdviceRequest) -> Advice:
    """Raises AdviceError if the request cannot be met."""
    specs, scored = _specs(costs, request)
    table = _with_saved(grouped(costs.table, request.by), specs, scored)
    forward, backward = table[table["gemm"] == FORWARD], table[table["gemm"] != FORWARD]
    # A mean over values, as Adam moves every weight alike.
    noise = backward.assign(cost=backward["noise"] * backward["values"])
    options = pairs(forward, specs, request.tiles, alike=True)
    others = pairs(noise, scored, request.tiles)

    most_backward = request.most_bf16 if scored else None  # else they can only stay in bf16

    def chosen(share: float | None, *, cost: float | None = None, gradients: bool = True) -> pd.DataFrame:
        """The rows of the choice within a share of bf16's bits, forward and backward each."""
        best = choose(options, share=share, cost=cost, most_bf16=request.most_bf16)
        parts = [_rows(forward, best)]
        if gradients and not backward.empty:
            within = max(best["share"].sum() if share is None else share, least_share(others))
            parts.append(_rows(backward, choose(others, share=within, most_bf16=most_backward)))
        return pd.concat(parts, ignore_index=True)

    limit = None if request.bits is None else request.bits / BF16_BITS
    best = chosen(limit, cost=request.cost)
    rows = []
    for share in np.unique(np.geomspace(least_share(options), 1, POINTS)):
        try:
            other = chosen(float(share) + 1e-10, gradients=False)
        except AdviceError:  # only so many layers may be in bf16
            continue
        rows.append(["advised", f"{BF16_BITS * share:.4g} bits", *_totals(other), other["cost"].sum()])
    for spec in _uniform(options, request.most_bf16):
        operands = forward[forward["spec"] == spec]
        rows.append(["uniform", spec, *_totals(operands), operands["cost"].sum()])
    return Advice(request, costs, table, best, pd.DataFrame(rows, columns=COLUMNS))


def _uniform(options: pd.DataFrame, most_bf16: int | None) -> list[str]:
    """The specs that all groups can have, of the pairs of one spec that they can take."""
    counts = options.groupby("a")["group"].nunique()
    specs = [str(spec) for spec in counts.index[counts == options["group"].nunique()]]
    if most_bf16 is not None and options["layer"].nunique() > most_bf16:
        specs.remove(BF16)
    return specs


def _specs(costs: Costs, request: AdviceRequest) -> tuple[list[str], list[str]]:
    """The specs that forward and that backward operands may have besides bf16."""
    measured, scored = costs.specs, costs.operands.specs
    wanted = [str(Spec.of(spec)) for spec in request.specs]
    if missing := [spec for spec in wanted if spec not in measured]:
        raise AdviceError(f"not measured: {', '.join(missing)}; choose from {', '.join(measured)}, or add --measure")
    return wanted or measured, [spec for spec in scored if not wanted or spec in wanted]


def _rows(table: pd.DataFrame, best: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table that belong to a choice."""
    long = pd.concat(
        [best[["group"]].assign(spec=best["a"], first=True), best[["group"]].assign(spec=best["b"], first=False)]
    )
    return table.merge(long, on=["group", "first", "spec"]).drop(columns="first")


def _with_saved(table: pd.DataFrame, specs: Sequence[str], scored: Sequence[str]) -> pd.DataFrame:
    """The rows with saved: the change or noise in the operand's narrowest spec minus its own. specs and scored: those
    that forward and backward operands may have besides bf16."""
    is_forward = table["gemm"] == FORWARD
    harm = table["change"].where(is_forward, table["noise"])
    allowed = table["spec"].isin([*specs, BF16]).where(is_forward, table["spec"].isin([*scored, BF16]))
    order = {spec: number for number, spec in enumerate([*narrowest_first(table["spec"]), BF16])}
    ordered = table.assign(order=table["spec"].map(order), narrowest=harm)[allowed].sort_values("order")
    narrowest = table[OPERAND].merge(ordered.drop_duplicates(OPERAND)[[*OPERAND, "narrowest"]], on=OPERAND, how="left")
    return table.assign(saved=narrowest["narrowest"].to_numpy() - harm)


def _totals(rows: pd.DataFrame) -> tuple[float, float, float]:
    """(bits per value, change in the loss, its standard error over sequences) of a row for each operand."""
    bits = float(rows["bits"].sum() / rows["values"].sum())
    return bits, float(rows["change"].sum()), error_of(rows["by_sequence"])


def plan_of(catalog: Catalog, operands: Operands, instead: str) -> Plan:
    """The plan of the run that the operands are from. Raises AdviceError if its settings are not known, as for a user's
    own training; instead: what to do."""
    runs = catalog.runs().set_index("run_id")
    run = operands.runs[-1]
    try:
        return trained_with(run, json.loads(str(runs["config"][run])))
    except ConfigError as error:
        raise AdviceError(f"{error}; {instead}") from None


def verification(catalog: Catalog, advice: Advice, recipe: str, seeds: int, iterations: int) -> list[RunConfig]:
    """The runs that test it, with the settings of the run that the costs are from: bf16, the best uniform recipe of at
    most as many bits, and the advised one, whose file is `recipe`, for as many seeds on the same data.

    Raises AdviceError if those settings are not known, as for a user's own training.
    """
    base = plan_of(catalog, advice.costs.operands, "train bf16, the single format and the recipe yourself").config
    plain = replace(base, train_iters=iterations, save_tensors=False, collect_micro_batches=0)
    recipes = dict.fromkeys([BF16, *filter(None, [advice.uniform_recipe]), recipe])
    return [replace(plain, recipe=text, seed=base.seed + number) for number in range(seeds) for text in recipes]


def queue_verification(root: Path, runs: Sequence[RunConfig], name: str, target: str | None = None) -> list[Job]:
    """Queue the runs of `verification`, of the recipe of this name, whose file exists now; target is one of
    binade.toml. Raises ConfigError, JobError, SubmissionError, OSError."""
    titles = [f"advice {name} · {Path(config.recipe).stem} · seed {config.seed}" for config in runs]
    queued = add_runs(
        root, [plan(config) for config in runs], SlurmOptions(target=target), titles, tags=[f"advice {name}"]
    )
    start_runner(root)
    return queued

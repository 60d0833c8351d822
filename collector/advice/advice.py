"""The advice: a choice of specs as a recipe, compared with uniform and published recipes, and the runs that test it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from binade.collector.advice.choice import GROUPS, choose, grouped, least_share, pairs
from binade.collector.advice.costs import (
    BF16_BITS,
    FORWARD,
    OPERAND,
    AdviceError,
    Costs,
    bits_of,
    by_sequence,
)
from binade.collector.advice.roofline import MEANING, Operand, Place, Roofline, products
from binade.collector.errors import ConfigError
from binade.collector.jobs import Job, add_runs, start_runner, trained_with
from binade.collector.models.site import Site
from binade.collector.recipes.files import PUBLISHED
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import BF16, MODULES, About, Part, Recipe
from binade.collector.recipes.selection import SelectionError, SiteSelection
from binade.collector.training.config import RunConfig
from binade.collector.training.devices import Device
from binade.collector.training.plan import Plan, plan
from binade.collector.training.slurm_options import SlurmOptions
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.evidence import Estimate, Measure
from binade.data.names import short_names
from binade.data.reliability import PREDICTION
from binade.data.text import number_text
from binade.quant.specs import OPERAND_FIELDS, GemmFormats, Spec

CHANGE = Measure("loss_change", "Predicted loss change", "nats", format="+.3g")
BITS = Measure("bits", "Bits per value", "bits", format=".2f")
TIME = Measure("share", "Time", "%", format=".1f")
POINTS = 12  # of the frontier
AS_MANY = 0.01  # tolerance in bits per value, since the advice may not use all of its budget
ADVISED = "Advised"  # begins the title of the recipes made here
COLUMNS = ["kind", "name", "bits", "change", "error"]
TIMED = [*COLUMNS, "ms", "share"]


@dataclass(frozen=True)
class AdviceRequest:
    """A request for advice.

    bits       the budget: average bits per operand value, of forward and of backward operands each
    change     instead of it, how much the loss may rise
    share      instead of it, with a roofline: the time of a step as a share of that in bf16. If none of these is given,
               halfway between the smallest possible share and 1
    by         the granularity of the choice: a key of GROUPS
    specs      those to choose from besides bf16; all that were scored if empty
    tiles      round weights in tiles only
    most_bf16  how many layers may have a GEMM in bf16; None for any number
    """

    bits: float | None = 5.5
    change: float | None = None
    share: float | None = None
    by: str = "site"
    specs: tuple[str, ...] = ()
    tiles: bool = False
    most_bf16: int | None = None


@dataclass(frozen=True)
class Advice:
    """
    chosen    a row for each operand: OPERAND, spec, values, bits, change, error, by_sequence, noise, group, and saved:
              by how much the loss, or for a backward operand its noise, would be worse in the narrowest spec
    frontier  kind (advised, uniform or published), name, bits per forward value, change (of the loss) and error (its
              standard error over sequences), with a roofline also ms (of a step) and share (of the time in bf16): the
              choices under other budgets, one spec for all, and the published recipes whose specs were all scored
    unplaced  the published recipes whose forward specs were not all scored
    roofline  of the device that times are predicted for; None for none
    """

    request: AdviceRequest
    costs: Costs
    chosen: pd.DataFrame
    frontier: pd.DataFrame
    unplaced: tuple[str, ...]
    roofline: Roofline | None = None

    @property
    def timed(self) -> bool:
        """Whether the budget is one of time."""
        return self.roofline is not None and self.request.bits is None

    @property
    def device(self) -> str:
        """What times are predicted for; "" for none."""
        return self.roofline.device.title if self.roofline else ""

    @cached_property
    def seconds(self) -> float:
        """The predicted time of a step; NaN without a roofline."""
        return self.roofline.step(_chosen(self.chosen)) if self.roofline else math.nan

    @property
    def share(self) -> float:
        """The same as a share of the time in bf16."""
        return self.seconds / self.roofline.bf16 if self.roofline else math.nan

    @property
    def bits(self) -> float:
        """The bits per forward value."""
        return _totals(self.costs, self.forward)[0]

    @property
    def change(self) -> float:
        """The predicted change in the loss."""
        return _totals(self.costs, self.forward)[1]

    @property
    def error(self) -> float:
        """The standard error of the predicted change over sequences; NaN for one sequence."""
        return _totals(self.costs, self.forward)[2]

    @property
    def estimate(self) -> Estimate:
        """The predicted change with its interval over sequences."""
        return evidence.with_error(CHANGE, self.change, self.error, self.costs.sequences, "sequences")

    @property
    def forward(self) -> pd.DataFrame:
        return self.chosen[self.chosen["gemm"] == FORWARD]

    @property
    def backward(self) -> pd.DataFrame:
        return self.chosen[self.chosen["gemm"] != FORWARD]

    @property
    def uniform(self) -> pd.Series | None:
        """The best recipe with one spec for all operands and no more bits, or time; None if there is none."""
        limits = ("share", self.share + AS_MANY / BF16_BITS) if self.timed else ("bits", self.bits + AS_MANY)
        recipes = self.frontier[(self.frontier["kind"] == "uniform") & (self.frontier[limits[0]] <= limits[1])]
        return None if recipes.empty else recipes.sort_values("change").iloc[0]

    @property
    def uniform_recipe(self) -> str:
        """The text of the recipe that rounds the same parts to `uniform`; "" if there is none."""
        if self.uniform is None or self.uniform["name"] == BF16:
            return ""
        parts = set(self.chosen["part"])
        return f"{'FA_linear_' if 'qk' in parts else 'linear_'}{self.uniform['name']}"

    @property
    def deciding(self) -> pd.DataFrame:
        """The forward operands that are kept wider than the narrowest spec for a smaller loss, by how much they save;
        column place names them. The operands of a group that was measured are one row."""
        rows = self.forward
        rows = rows.assign(place=short_names(rows).where(~rows["group"].isin(self.costs.measured), rows["group"]))
        saved = rows.groupby("place")["saved"].sum()
        rows = rows.drop_duplicates("place").assign(saved=lambda operands: operands["place"].map(saved))
        return rows[rows["saved"] > 0].sort_values("saved", ascending=False, ignore_index=True)

    @property
    def kind(self) -> str:
        """What the change in the loss is."""
        if not self.costs.measured:
            return "predicted"
        return "partly predicted" if self.costs.predicted else "measured"

    @property
    def gain(self) -> Estimate | None:
        """The change minus that of `uniform`, paired by sequence; None if there is none."""
        if self.uniform is None:
            return None
        rows = self.costs.table
        other = rows[(rows["gemm"] == FORWARD) & (rows["spec"] == self.uniform["name"])]
        advised, theirs = (
            dict(enumerate(by_sequence(part["by_sequence"], self.costs.sequences))) for part in (self.forward, other)
        )
        return evidence.paired(CHANGE, advised, theirs, "sequences")

    @property
    def sentence(self) -> evidence.Sentence:
        """The choice in a sentence. Without reliable costs nothing is advised, and a mix only if it is predicted to
        lose less than a single spec."""
        measure, other = TIME if self.timed else BITS, self.uniform
        used = evidence.exact(measure, self.share if self.timed else self.bits)
        parts: dict[str, Estimate | str] = {"used": used, "change": self.estimate}
        unit = f"of bf16's time on {self.device}" if self.timed else "per forward value"
        doubt = self.costs.reliability.doubt
        word = f"Least {self.kind} cost, not advised" if doubt else "Advised"
        text = f"{{used}} {unit} for a {self.kind} loss change of {{change}}"
        if other is None or self.gain is None:
            little = "little time" if self.timed else "few bits"
            return evidence.together(
                doubt, evidence.say(f"{word}: {text}; no single format takes as {little}.", **parts)
            )
        change = evidence.with_error(CHANGE, other["change"], other["error"], self.costs.sequences, "sequences")
        parts |= {"other": str(other["name"]), "others": evidence.exact(measure, other[measure.key]), "than": change}
        if doubt or (self.gain.value < 0 and evidence.holm([self.gain])[0]):
            said = evidence.say(f"{word}: {text}; with {{other}} alone, {{others}}, it is {{than}}.", **parts)
            return evidence.together(doubt, said)
        alone = f"Advised: {{other}} alone, {{others}}, for a {self.kind} loss change of {{than}}"
        text = f"{alone}; the least cost in a mix is {text}, which is not less (difference {{gain}})."
        return evidence.say(text, **parts, gain=self.gain)

    @property
    def doubts(self) -> list[str]:
        """A sentence for each reason not to rely on it."""
        doubts = list(self.costs.agreement)
        if self.kind != "measured":
            doubts.insert(0, str(PREDICTION))
        doubts += [str(doubt) for doubt in (self.costs.reliability.doubt, self.costs.reliability.doubt_of_sum) if doubt]
        if self.costs.caveat:
            doubts.append(self.costs.caveat)
        raw = float(self.forward["change"].sum())
        if self.costs.bounds and not self.costs.measured and not math.isclose(raw, self.change, rel_tol=1e-6):
            low, high = map(CHANGE.quantity, (self.costs.bounds.low, self.costs.bounds.high))
            doubts.append(
                f"The second order predicts {CHANGE.quantity(raw)}. A sequence counts from {low} (a loss of 0) to "
                f"{high} (a model that knows nothing): measure a change as large as this."
            )
        if self.costs.measured:
            doubts.append(
                "Changes were measured group by group, so their sum lacks what groups do to each other: measure the "
                "recipe as a whole before you rely on it."
            )
        if self.costs.scaled and (self.costs.predicted or not self.costs.measured):
            levels = " or ".join(self.costs.scaled)
            doubts.append(
                f"Predictions are scaled to what was measured for {levels}: they only divide it among operands."
            )
        if self.costs.predicted:
            shown, more = self.costs.predicted[:4], len(self.costs.predicted) - 4
            doubts.append(
                f"Only predicted, since these groups were not measured: {', '.join(shown)}"
                f"{f' and {more} more' * (more > 0)}."
            )
        if self.costs.left:
            doubts.append(
                f"Kept in bf16, because an operand was not recorded or not scored: {', '.join(self.costs.left)}."
            )
        if not self.backward.empty:
            doubts.append(
                "The effect of backward operands on the loss is not predicted: their formats are chosen for the least "
                "noise in gradients."
            )
        if self.roofline:
            doubts += _doubts_of_times(self.roofline.device, self.costs.specs)
        return doubts

    def recipe(self, name: str) -> Recipe:
        """The choice as a recipe; the most common specs become [linear]."""
        given = self.request
        limit = f"{TIME.quantity(given.share)} of bf16's time on {self.device}"
        if given.bits is not None or given.change is not None:
            limit = f"{given.bits:g} bits" if given.bits is not None else f"a loss change of {given.change:g}"
        change = number_text(self.change, "+.3g")
        about = About(
            f"{ADVISED} under {limit}: predicted {change} at {self.bits:.2f} bits per forward value",
            tuple(f"run {run}" for run in self.costs.runs),
        )
        parts: dict[str, Part] = {}
        linear: dict[Site, tuple[str, ...]] = {}
        for (part, layer, module), rows in self.chosen.astype({"layer_index": int}).groupby(OPERAND[:3]):
            specs = dict(zip(rows["field"], rows["spec"], strict=True))
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


def _doubts_of_times(device: Device, specs: Sequence[str]) -> list[str]:
    doubts = [MEANING]
    if emulated := [spec for spec in specs if device.published_rate(spec) is None]:
        doubts.append(f"Emulated on {device.title}, at the rate of bf16: {', '.join(emulated)}.")
    if device.read == "recalled":
        doubts.append(f"The rates of {device.title} were not checked against a source.")
    return doubts


def roofline_of(catalog: Catalog, costs: Costs, device: Device, batch: tuple[int, int] | None = None) -> Roofline:
    """The products of a micro-batch of the model that the costs are from. batch: its sequences and their length, by
    default those of the run. Raises AdviceError if the run's settings are not known."""
    planned = plan_of(catalog, costs, "predict times from runs of binade run")
    run_batch = planned.config.micro_batch_size, planned.config.sequence_length
    return Roofline(device, products(planned.shape, *(batch or run_batch)))


def advise(costs: Costs, request: AdviceRequest, roofline: Roofline | None = None) -> Advice:
    """With a roofline, the frontier has times, and without `request.bits` the budget is one of time. Raises AdviceError
    if the request cannot be met."""
    specs = _specs(costs, request, roofline)
    table = grouped(costs.table, request.by)
    forward, backward = table[table["gemm"] == FORWARD], table[table["gemm"] != FORWARD]
    # A mean over values, as Adam moves every weight alike.
    noise = backward.assign(cost=backward["noise"] * backward["values"])
    timed = roofline if request.bits is None else None
    options, others = (pairs(part, specs, request.tiles, timed, costs.measured) for part in (forward, noise))
    least = max(map(least_share, (options, others)))
    covered = sum(part.loc[part["a"] == BF16, "used"].sum() for part in (options, others))
    rest = covered / timed.bf16 if timed else 1.0  # of the step in bf16, what there is a choice for
    limit = None if request.bits is None else request.bits / BF16_BITS
    if request.share is not None:
        limit = 1 - (1 - request.share) / rest
    elif timed and request.change is None:
        limit = (1 + least) / 2
        request = replace(request, share=1 - (1 - limit) * rest)

    def quantity(share: float) -> str:
        return f"{TIME.quantity(1 - (1 - share) * rest)} of bf16's time" if timed else f"{BF16_BITS * share:.4g} bits"

    def chosen(share: float | None, *, change: float | None = None, gradients: bool = True) -> pd.DataFrame:
        """The rows of the choice within a share of bf16's bits or time, forward and backward each."""
        best = choose(options, share=share, cost=change, most_bf16=request.most_bf16, quantity=quantity)
        parts = [_rows(forward, best)]
        if gradients and not backward.empty:
            within = max(best["share"].sum(), least_share(others)) if share is None else share
            best = choose(others, share=within, most_bf16=request.most_bf16, quantity=quantity)
            parts.append(_rows(backward, best))
        return pd.concat(parts, ignore_index=True)

    def row(kind: str, name: str, totals: tuple[float, float, float], rounded: Mapping[Operand, str]) -> list[Any]:
        seconds = roofline.step(rounded) if roofline else math.nan
        return [kind, name, *totals, 1e3 * seconds, seconds / roofline.bf16 if roofline else math.nan]

    best = chosen(limit, change=request.change).merge(_narrowest(table, specs), on=OPERAND, how="left")
    measured = best["change"].where(best["gemm"] == FORWARD, best["noise"])
    best = best.assign(saved=best.pop("narrowest") - measured)
    rows = []
    for share in np.unique(np.geomspace(least if roofline else least_share(options), 1, POINTS)):
        try:
            other = chosen(float(share) + 1e-10, gradients=roofline is not None)
        except AdviceError:  # only so many layers may be in bf16
            continue
        rows.append(row("advised", quantity(share), _totals(costs, other[other["gemm"] == FORWARD]), _chosen(other)))
    for spec, operands in forward.groupby("spec"):
        if len(operands) < len(costs.forward[1]):  # not measured in all groups
            continue
        rounded = {(*place, field): str(spec) for place in _places(costs) for field in OPERAND_FIELDS}
        rows.append(row("uniform", str(spec), _totals(costs, operands), rounded))
    unplaced = []
    for name in PUBLISHED:
        recipe = parse_recipe(name)
        if (totals := placed(recipe, costs)) is None:
            unplaced.append(name)
        else:
            rows.append(row("published", name, totals, _rounded(recipe, costs) or {}))
    frontier = pd.DataFrame(rows, columns=TIMED)[TIMED if roofline else COLUMNS]
    return Advice(request, costs, best, frontier, tuple(unplaced), roofline)


def _chosen(rows: pd.DataFrame) -> dict[Operand, str]:
    """The specs of the rows of a choice."""
    keys = rows[["part", "layer_index", "module", "field"]].itertuples(index=False, name=None)
    return dict(zip(keys, rows["spec"], strict=True))


def _specs(costs: Costs, request: AdviceRequest, roofline: Roofline | None) -> list[str]:
    limits = sum(limit is not None for limit in (request.bits, request.change, request.share))
    if limits > 1 or (limits == 0 and roofline is None):
        raise AdviceError("give one budget: of bits, of loss, or of time on a device")
    if request.most_bf16 is not None and "layer_index" not in GROUPS[request.by]:
        raise AdviceError(
            f"--by {request.by} makes one choice for all layers, so --max-bf16-layers does not apply: give one of them"
        )
    wanted = [str(Spec.of(spec)) for spec in request.specs] or costs.specs
    if missing := [spec for spec in wanted if spec not in costs.specs]:
        raise AdviceError(f"not scored on every operand: {', '.join(missing)}; choose from {', '.join(costs.specs)}")
    return wanted


def _rows(table: pd.DataFrame, best: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table that belong to a choice."""
    long = pd.concat(
        [best[["group"]].assign(spec=best["a"], first=True), best[["group"]].assign(spec=best["b"], first=False)]
    )
    return table.merge(long, on=["group", "first", "spec"]).drop(columns="first")


def _narrowest(table: pd.DataFrame, specs: Sequence[str]) -> pd.DataFrame:
    """OPERAND and narrowest: the change or noise in the narrowest spec."""
    narrowest = table[table["spec"] == min(specs, key=lambda spec: (bits_of(spec), spec))]
    return narrowest[OPERAND].assign(
        narrowest=narrowest["change"].where(narrowest["gemm"] == FORWARD, narrowest["noise"])
    )


def _totals(costs: Costs, rows: pd.DataFrame) -> tuple[float, float, float]:
    """(bits per value, change in the loss, its standard error over sequences) of a row for each operand."""
    bits = float(rows["bits"].sum() / rows["values"].sum())
    return bits, *costs.total(rows)


def _places(costs: Costs) -> list[Place]:
    """Where the forward operands of `costs` are, each place once."""
    operands = costs.forward[1][["part", "layer_index", "module"]].drop_duplicates()
    return [(str(part), int(layer), str(module)) for part, layer, module in operands.to_numpy()]


def _rounded(recipe: Recipe, costs: Costs, skip: str = "") -> dict[Operand, str] | None:
    """The specs that a recipe gives the operands at the places of `costs`, of all three GEMMs; None if it rounds other
    parts too, if it has a schedule, or if it keeps layers that were not recorded. skip: layers that stay in bf16."""
    places = _places(costs)
    parts = {*(part for part, _, _ in places), "product"}  # no model has products but those that are declared
    if recipe.schedule or any(part.formats.quantized for name, part in recipe.parts().items() if name not in parts):
        return None
    sites = [Site(layer, module) for _, layer, module in places]
    kept: set[Site] = set()
    for layers in filter(None, (recipe.keep, skip)):
        try:
            kept |= SiteSelection.parse(layers).of(sites)
        except SelectionError:
            return None
    specs = {}
    for site, place in zip(sites, places, strict=True):
        part = recipe.linear_of(site) if place[0] in ("linear", "router") else getattr(recipe, place[0])
        for field in OPERAND_FIELDS:
            specs[(*place, field)] = BF16 if site in kept else part.rounded_to(field)
    return specs


def placed(recipe: Recipe, costs: Costs, skip: str = "") -> tuple[float, float, float] | None:
    """(bits per forward value, predicted loss change, its standard error over sequences) of a recipe on the operands of
    `costs`; None if one of its forward specs was not scored, if it rounds other parts too, or if it has a schedule.
    skip: layers that stay in bf16.
    """
    known, operands = costs.forward
    specs = _rounded(recipe, costs, skip)
    if specs is None:
        return None
    keys = operands[OPERAND].itertuples(index=False, name=None)
    taken = [(*key, specs[key[0], key[1], key[2], key[4]]) for key in keys]
    if not set(taken) <= set(known.index):
        return None
    rows = known.loc[taken]
    bits = float(rows["bits"].sum() / operands["values"].sum())
    return bits, *costs.total(rows)


def plan_of(catalog: Catalog, costs: Costs, instead: str) -> Plan:
    """The plan of the run that the costs are from. Raises AdviceError if its settings are not known, as for a user's
    own training; instead: what to do."""
    runs = catalog.runs().set_index("run_id")
    run = costs.runs[-1]
    try:
        return trained_with(run, json.loads(str(runs["config"][run])))
    except ConfigError as error:
        raise AdviceError(f"{error}; {instead}") from None


def verification(catalog: Catalog, advice: Advice, recipe: str, seeds: int, iterations: int) -> list[RunConfig]:
    """The runs that test it, with the settings of the run that the costs are from: bf16, the best uniform recipe of at
    most as many bits, and the advised one, whose file is `recipe`, for as many seeds on the same data.

    Raises AdviceError if those settings are not known, as for a user's own training.
    """
    base = plan_of(catalog, advice.costs, "train bf16, the single format and the recipe yourself").config
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

"""The costs and savings of each recipe: loss compared with bf16, error by kind of operand, size of the operands, time.

`compare(root)` computes it from the index and the loss files; collector/cli/tables.py shows it. No torch here.

Runs are compared within a section: its runs have the same `Settings` and differ only in the recipe and in the start:
the seed, or the hashes of the weights and the data (`data.same_data`). Runs of one start saw the same data from the
same weights. What was recorded may differ; that is noted, not hidden.

A row holds the finished runs of a recipe; its other runs have one row per state. Runs of one start repeat one
experiment, so their figures are not averaged: the longest counts, the newest of those, and `loss_spread` says how far
they disagree. Of several starts, the row shows the one that most rows have, and its `gaps` are those of all starts,
each relative to the bf16 run of the same start. Losses, errors, sizes and times include only finished iterations.

tables.LEGEND defines the figures. Warm-up iterations have no gap: they run in bf16 whatever the recipe. Successive gaps
depend on each other, so their deviation is not turned into a standard error.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from binade.collector.recipes.ladder import Ladder, ladders
from binade.collector.recipes.parse import linear_formats_of, without_none
from binade.collector.recipes.recipe import BF16, TEN_RECIPES
from binade.collector.training.config import layers_of
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.difference import OVERRIDES
from binade.data.filter import Filter
from binade.data.gap_bands import Band, PlainRun, own_bands
from binade.data.gradients import COMPARED, GRADIENTS, gradient_errors, gradient_summary
from binade.data.notes import rounded_twice
from binade.data.runs import DONE, STATES, RunInfo, list_runs, sound_losses
from binade.data.same_data import (
    closest,
    corpus_of,
    data_key_of,
    equal_warm_up,
    losses_on_same_data,
    pairs_on_same_data,
    states_all,
    window_of,
)
from binade.quant.formats import UnknownFormatError
from binade.quant.specs import Spec, SpecError

BF16_BITS = 16
MAX_GRADIENT_VALUES = 1 << 28  # that are read for a section
OVERRIDE_NAMES = {"qk_quant": "QK", "pv_quant": "PV", "operand_quant": "operands", "skip_layers": "bf16 in layers"}
# What rounding is shown for: component and operation.
SIDES = {
    "linear forward": ("linear", "forward"),
    "linear gradients": ("linear", "backward"),
    "FA forward": ("FA", "forward"),
    "FA gradients": ("FA", "backward"),
}
MEASURES = {"sqnr_db": "sqnr_db", "flush_to_zero": "flush_to_zero_share", "saturated": "saturated_share"}


def rounding_figure(side: str, measure: str) -> str:
    """The name of the figure for a measure of one of SIDES: linear_forward_sqnr_db."""
    return f"{side.replace(' ', '_').lower()}_{measure}"


# The figures of a row in the order of the CSV. "common" is what a run and bf16's have both finished; shares are 0 to 1.
FIGURES = (
    *("loss_nats", "loss_spread_nats"),
    *("common_iterations", "common_iteration"),
    *("loss_at_common_iteration_nats", "bf16_loss_at_common_iteration_nats", "gap_at_common_iteration_nats"),
    *("gap_mean_nats", "gap_deviation_nats", "perplexity_ratio"),
    *("gap_before_training_nats", "gap_added_by_training_nats"),
    *("gap_seeds", "gap_mean_over_seeds_nats", "gap_deviation_over_seeds_nats"),
    *("gradient_iteration", "gradient_pairs", "gradient_cosine", "gradient_relative_squared_error"),
    *("operands", "operand_values", "operand_bits_per_value", "operand_bytes", "operand_bytes_in_bf16"),
    *("recorded_iteration_median_seconds", "recorded_iterations_timed"),
    *("unrecorded_iteration_median_seconds", "unrecorded_iterations_timed"),
    *(rounding_figure(side, measure) for side in SIDES for measure in (*MEASURES.values(), "operands")),
)

Value = str | int | float | bool | None
Figures = dict[str, float]


@dataclass(frozen=True)
class Settings:
    """The settings that runs must share to be compared, from run.json; None for what it lacks.

    layers is the number the model has, shortened or not; device is "cpu" or the GPU's name.
    """

    model: Value
    size: Value
    layers: Value
    dataset: Value
    corpus_sha256: Value
    learning_rate: Value
    warmup_iterations: Value
    micro_batches: Value
    micro_batch_size: Value
    sequence_length: Value
    device: Value
    tp: Value
    dp: Value
    sequence_parallel: Value
    tokenizer: Value
    vocab_size: Value


@dataclass(frozen=True)
class Row:
    """A recipe in a state. The figures are of the run `run_id`, one of `runs`: those of FIGURES, without any that
    there is nothing to compute from. iterations are those finished under the recipe. seed is that of the run shown,
    seeds those of all; gaps is the mean gap of each start that has a bf16 run, bands what chance explains of them.
    formats are those of its linear layers."""

    recipe: str
    state: str
    reason: str | None
    runs: int
    seed: Value
    seeds: tuple[Value, ...]
    gaps: Mapping[str, float]
    bands: tuple[Band, ...]
    formats: frozenset[str]
    run_id: str
    backend: str
    iterations: int
    figures: Mapping[str, float]

    @property
    def gap(self) -> evidence.Estimate:
        """The mean gap over the starts."""
        return evidence.mean(evidence.GAP, self.gaps.values())

    @property
    def label(self) -> str:
        return self.recipe if self.state == DONE else f"{self.recipe} ({self.state})"


@dataclass(frozen=True)
class Section:
    """Runs that can be compared. reference is the bf16 row that gaps are relative to, None if there is none. ladders
    are those of the recipes that are done; unreferenced are the seeds without a bf16 run.
    caveat: what the runs' weights do to the gaps, "" for nothing."""

    settings: Settings
    rows: tuple[Row, ...]
    reference: Row | None
    ladders: tuple[Ladder, ...]
    unreferenced: tuple[Value, ...]
    caveat: str

    @property
    def seeds(self) -> tuple[Value, ...]:
        """The seeds of all rows, each once."""
        return tuple(dict.fromkeys(seed for row in self.rows for seed in row.seeds))


@dataclass(frozen=True)
class Comparison:
    """Sections in the order of their first runs, and the skipped runs with the reason."""

    root: Path
    sections: tuple[Section, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True)
class _Run:
    """A run with its finished iterations under the recipe. `last` is the last of them, -1 if none finished. start is
    the same for runs on the same data from the same weights; of a run whose data is unknown, it is its own."""

    info: RunInfo
    recipe: str
    seed: Value
    start: str
    losses: dict[int, dict[str, Any]]
    warm_up: list[dict[str, Any]]
    last: int

    @property
    def iterations(self) -> int:
        return self.last + 1

    @property
    def plain(self) -> PlainRun:
        return PlainRun(str(self.seed), self.start, [*self.losses.values()])

    @property
    def age(self) -> tuple[str, str]:
        """Sorts from old to new."""
        return str(self.info.config.get("started")), self.info.run_id

    @property
    def rank(self) -> tuple[int, tuple[str, str]]:
        """The sort key: the longest run counts, and of several the newest."""
        return self.iterations, self.age


def compare(root: Path) -> Comparison:
    """Compare the recipes under a root, which need not exist. Raises RunError if it is a file, and OSError."""
    if root.is_dir() and not any(root.glob("*/run.json")):  # an index is made only where there is something to index
        return Comparison(root, (), tuple(list_runs(root)[1]))
    with Catalog.open(root) as catalog:
        refused = list(catalog.refused)
        indexed = set(catalog.runs()["run_id"])
        groups: dict[Settings, list[_Run]] = {}
        for info in list_runs(root)[0]:
            if info.run_id in indexed:
                groups.setdefault(_settings(info.config), []).append(_read(info, refused))
        sections = tuple(
            _section(catalog, settings, group, _plain_runs(settings, groups), refused)
            for settings, group in groups.items()
        )
    return Comparison(root, sections, tuple(refused))


def _settings(config: Mapping[str, Any]) -> Settings:
    known = {f.name: _plain(config.get(f.name)) for f in fields(Settings)}
    known["device"] = str(known["device"] or "").partition(",")[0] or None  # "cpu, 2 threads"
    known |= {"layers": layers_of(config), "corpus_sha256": _plain(corpus_of(config)) or known["corpus_sha256"]}
    known |= {"tp": known["tp"] or 1, "dp": known["dp"] or 1, "sequence_parallel": bool(known["sequence_parallel"])}
    return Settings(**known)


def _plain(value: Any) -> Value:
    return value if value is None or isinstance(value, (str, int, float)) else json.dumps(value)


def _recipe(config: Mapping[str, Any]) -> str:
    """The recipe with what overrides it: "linear_mxfp8, PV mxfp4"."""
    changed = {name: config[name] for name in OVERRIDES if config.get(name)}
    rounds = any(not str(each).endswith(f"={BF16}") for each in changed.get("operand_quant") or ())
    if config.get("recipe") == BF16 and {*changed} <= {"skip_layers", "operand_quant"} and not rounds:
        return BF16  # nothing is quantized in the other layers and operands either
    words = (
        f"{OVERRIDE_NAMES.get(name, name.removesuffix('_quant'))} "
        + (" ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in changed.items()
    )
    return ", ".join([str(config.get("recipe") or "unnamed"), *words])


def _read(run: RunInfo, refused: list[str]) -> _Run:
    losses, warm_up = {}, []
    try:
        records = sound_losses(run.directory)
        losses = {record["iteration"]: record for record in records if record["iteration"] >= 0}
        warm_up = [record for record in records if record["iteration"] < 0]
    except OSError as error:
        refused.append(f"{run.run_id}: loss.jsonl cannot be read: {error}")
    reached = run.status.iteration
    if losses and max(losses) < reached:
        refused.append(f"{run.run_id}: loss.jsonl ends at iteration {max(losses)} of {reached}")
    start = data_key_of(run.config, run.directory) or run.run_id
    return _Run(
        run, _recipe(run.config), _plain(run.config.get("seed")), start, losses, warm_up, max([reached, *losses])
    )


def _plain_runs(settings: Settings, groups: Mapping[Settings, list[_Run]]) -> list[_Run]:
    """The bf16 runs with these settings, on any device and any number of tensor-parallel ranks, oldest first."""
    layout: dict[str, Any] = dict.fromkeys(("device", "tp", "sequence_parallel"))
    wanted = replace(settings, **layout)
    alike = [run for other, runs in groups.items() if replace(other, **layout) == wanted for run in runs]
    plain = [run for run in alike if run.recipe == BF16 and states_all(run.info.config)]
    return sorted(plain, key=lambda run: run.age)


def _section(catalog: Catalog, settings: Settings, runs: list[_Run], plain: list[_Run], refused: list[str]) -> Section:
    groups: dict[tuple[str, str], dict[str, list[_Run]]] = {}
    for run in sorted(runs, key=lambda run: run.age):
        groups.setdefault((run.recipe, run.info.status.state), {}).setdefault(run.start, []).append(run)
    longest = {
        key: {start: max(each, key=lambda run: run.rank) for start, each in group.items()}
        for key, group in groups.items()
    }
    seeds = {run.start: run.seed for run in runs}
    references = {start: found for start in seeds if (found := _reference(start, longest))}
    usual = Counter(start for group in groups.values() for start in group)
    made = ladders(recipe for recipe, state in groups if state == DONE)
    places = {rung.recipe: place for place, rung in enumerate(rung for each in made for rung in each.rungs)}
    rows: list[Row] = []
    bf16 = None
    pairs = _pairs(groups, longest, references)
    gradients = _gradients(catalog, pairs, refused)
    for key in sorted(groups, key=lambda key: _order(key, places)):
        shown = max(longest[key].values(), key=lambda run: (usual[run.start], run.rank))
        figures = _losses(shown, groups[key][shown.start])
        compared = {run.start: _gap(run, reference) for run, reference in pairs[key]}
        figures |= compared.get(shown.start, {}) | gradients.get(key, {})
        gaps = {start: each["gap_mean_nats"] for start, each in compared.items() if each}
        if gaps:
            over = evidence.mean(evidence.GAP, gaps.values())
            figures |= {"gap_seeds": over.n, "gap_mean_over_seeds_nats": over.value}
            figures |= {"gap_deviation_over_seeds_nats": statistics.stdev(gaps.values())} if over.n > 1 else {}
        common = {
            iteration
            for run, reference in pairs[key]
            for iteration, *_ in losses_on_same_data(run.losses.values(), reference.losses.values())
        }
        if finished := _finished(catalog, shown):
            figures |= _operands(catalog, finished, shown.info.run_id, refused)
        for kind in ("recorded", "unrecorded"):
            figures |= _times(shown, kind)
        row = Row(
            recipe=shown.recipe,
            state=shown.info.status.state,
            reason=shown.info.status.reason,
            runs=sum(map(len, groups[key].values())),
            seed=shown.seed,
            seeds=tuple(seeds[start] for start in groups[key]),
            gaps=gaps,
            bands=own_bands([run.plain for run in plain], common) if gaps else (),
            formats=linear_formats_of(shown.info.config),
            run_id=shown.info.run_id,
            backend=", ".join(str(shown.info.config.get(name) or "unknown") for name in ("backend", "device")),
            iterations=shown.iterations,
            figures=figures,
        )
        rows.append(row)
        if bf16 is None and any(references.get(start) is run for start, run in longest[key].items()):
            bf16 = row
    unreferenced = tuple(dict.fromkeys(seeds[start] for start in usual if start not in references))
    caveat = rounded_twice(run.info.config for run in runs if run.recipe != BF16)
    return Section(settings, tuple(rows), bf16, tuple(made), unreferenced, caveat)


def _reference(start: str, longest: Mapping[tuple[str, str], Mapping[str, _Run]]) -> _Run | None:
    """The bf16 run of a start, a done one if there is one."""
    own = [group[start] for (recipe, _), group in longest.items() if recipe == BF16 and start in group]
    return max(
        (run for run in own if run.losses), key=lambda run: (run.info.status.state == DONE, run.rank), default=None
    )


def _pairs(
    groups: Mapping[tuple[str, str], Mapping[str, list[_Run]]],
    longest: Mapping[tuple[str, str], Mapping[str, _Run]],
    references: Mapping[str, _Run],
) -> dict[tuple[str, str], list[tuple[_Run, _Run]]]:
    """Each run with the bf16 run of its start whose losses can be compared with its own at most iterations: the
    reference, or another one in its state."""
    pairs: dict[tuple[str, str], list[tuple[_Run, _Run]]] = {key: [] for key in longest}
    for key, runs in longest.items():
        for start, run in runs.items():
            if (reference := references.get(start, run)) is not run:
                alike = groups[BF16, reference.info.status.state][start]
                others = [reference, *(each for each in alike if each is not reference and each is not run)]
                found = closest(run.losses.values(), [(each, each.losses.values()) for each in others])
                pairs[key].append((run, found or reference))
    return pairs


def _order(key: tuple[str, str], places: Mapping[str, int]) -> tuple[int, str, int, str, int]:
    """The sort key: the ten recipes in order, others by name, and rungs as in their ladder; finished ones first."""
    recipe, state = key
    base = without_none(recipe)
    place = TEN_RECIPES.index(base) if base in TEN_RECIPES else len(TEN_RECIPES)
    return place, base, places.get(recipe, len(places)), recipe, -1 if state == DONE else STATES.index(state)


def _finished(catalog: Catalog, run: _Run) -> Filter | None:
    """The tensors of the run's finished iterations; None if it recorded none.

    A run that is done has no other iterations, whether or not it counted them.
    """
    whole = Filter(run_id=(run.info.run_id,))
    if run.info.status.state == DONE:
        return whole
    iterations = [i for i in catalog.facets(whole).get("iteration", []) if i <= run.last]
    return replace(whole, iteration=tuple(iterations)) if iterations else None


def _losses(run: _Run, group: list[_Run]) -> Figures:
    """The last loss, and the largest minus the smallest loss of the group at the last iteration that all finished."""
    found = {"loss_nats": float(run.losses[run.last]["loss"])} if run.last in run.losses else {}
    windows = [{(i, window_of(step)) for i, step in each.losses.items()} for each in group]
    common = {iteration for iteration, _ in set.intersection(*windows)}
    if len(group) > 1 and common:
        losses = [each.losses[max(common)]["loss"] for each in group]
        found["loss_spread_nats"] = max(losses) - min(losses)
    return found


def _gap(run: _Run, bf16: _Run) -> Figures:
    common = losses_on_same_data(run.losses.values(), bf16.losses.values())
    if not common:
        return {}
    last, loss, reference = common[-1]
    gaps = [own - other for _, own, other in common]
    mean = statistics.fmean(gaps)
    equal = common[0][0] == 0 and equal_warm_up(run.warm_up, bf16.warm_up)
    at_start = {"gap_before_training_nats": gaps[0]} if equal else {}
    if at_start and len(gaps) > 1:
        at_start["gap_added_by_training_nats"] = statistics.fmean(gaps[1:]) - gaps[0]
    return {
        "common_iterations": len(common),
        "common_iteration": last,
        "loss_at_common_iteration_nats": loss,
        "bf16_loss_at_common_iteration_nats": reference,
        "gap_at_common_iteration_nats": gaps[-1],
        "gap_mean_nats": mean,
        **at_start,
        "perplexity_ratio": math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf,
        **({"gap_deviation_nats": statistics.stdev(gaps)} if len(gaps) > 1 else {}),
    }


def _gradients(
    catalog: Catalog, pairs: Mapping[tuple[str, str], Iterable[tuple[_Run, _Run]]], refused: list[str]
) -> dict[tuple[str, str], Figures]:
    """How far the gradients of each recipe's runs are from their bf16 runs'."""
    where = Filter(tensor_name=GRADIENTS[:1])
    tables = [
        tensors[tensors["iteration"] <= min(run.last, bf16.last)].assign(row=index)
        for index, runs in enumerate(pairs.values())
        for run, bf16 in runs
        for tensors in [pairs_on_same_data(catalog, run.info.run_id, bf16.info.run_id, where)]
    ]
    if not (tensors := pd.concat(tables) if tables else pd.DataFrame()).size:
        return {}
    first = int(tensors["iteration"].min())
    tensors = tensors[tensors["iteration"] == first]
    if (values := int(tensors["numel"].sum())) > MAX_GRADIENT_VALUES:
        refused.append(
            f"gradients: {values:,} values are too many to compare here; the Recipes page of the app compares them"
        )
        return {}
    figures: dict[tuple[str, str], Figures] = {}
    for index, key in enumerate(pairs):
        errors, unread = gradient_errors(catalog, tensors[tensors["row"] == index])
        if unread:
            refused.append(f"{key[0]}: {unread} of its gradients cannot be read")
        for row in gradient_summary(errors, ["row"]).to_dict("records"):
            figures[key] = {"gradient_iteration": first, "gradient_pairs": row["tensors"]}
            figures[key] |= {f"gradient_{name}": row[name] for name in COMPARED}
    return figures


def _times(run: _Run, kind: str) -> Figures:
    """The median seconds of the optimizer steps with or without capture, and how many there were."""
    steps = (step for step in run.losses.values() if step.get("recorded") is (kind == "recorded"))
    times = [float(step["seconds"]) for step in steps if step.get("seconds") is not None]
    if not times:
        return {}
    return {f"{kind}_iteration_median_seconds": statistics.median(times), f"{kind}_iterations_timed": len(times)}


def _operands(catalog: Catalog, finished: Filter, run_id: str, refused: list[str]) -> Figures:
    """What rounding did to the quantized operands of each side, and the size of all operands."""
    operands = catalog.operands(finished).dropna(subset="numel")  # logged statistics may lack it
    found: Figures = {}
    iterations = finished.iteration or catalog.facets(finished).get("iteration", [])
    last = replace(finished, iteration=(max(iterations),)) if iterations else finished
    rounded = catalog.operands(last).dropna(subset="format")
    quantized = rounded.groupby(["component", "operation"])["tensors"].sum()
    medians = catalog.moments(last, by=("component", "operation")).set_index(["component", "operation"])
    measures = medians.astype(dict.fromkeys(MEASURES, float))[list(MEASURES)].to_dict("index")
    for side, place in SIDES.items():
        if place in quantized and place in measures:
            found |= {rounding_figure(side, name): float(measures[place][key]) for key, name in MEASURES.items()}
            found[rounding_figure(side, "operands")] = int(quantized[place])
    try:
        bits = sum(_bits(row) for row in operands.itertuples())
    except (UnknownFormatError, SpecError) as error:
        refused.append(f"{run_id}: {error}")
        return found
    if not operands.empty:
        values = int(operands["numel"].sum())
        found |= {
            "operands": int(operands["tensors"].sum()),
            "operand_values": values,
            "operand_bits_per_value": bits / values if values else math.nan,
            "operand_bytes": bits / 8,
            "operand_bytes_in_bf16": values * BF16_BITS / 8,
        }
    return found


def _bits(row: Any) -> float:
    bits = Spec.of(row.format).bits_per_value * row.numel if isinstance(row.format, str) else row.nbytes * 8
    return float(bits)

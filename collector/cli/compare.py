"""What each recipe costs and saves: loss against bf16, error by kind of operand, size of the operands, time.

`compare(root)` computes it from the index and the loss files; collector/tables.py shows it. No torch here.

Runs are compared within a section: all that was trained there was the same (`Settings`) but for the recipe, so at each
iteration they saw the same data from the same start. What was recorded may differ; that is noted, not hidden.

A row is a recipe, done; runs of it that are not done have a row of their own by state. Runs in a row repeat one
experiment, seed included, so their figures are not averaged: the longest is shown, the newest of those, and
`loss_spread` says how far they disagree. Only finished iterations count, in losses, errors, sizes and times.

    gap        loss − bf16's loss at the same iteration, over every iteration from 0 that both finished: the last, and
               the mean. Warm-up iterations are left out: they run in bf16 whatever the recipe, their gap is 0 by
               construction. Whether tensors were recorded does not matter here. Both losses are of the same batch, so
               what they share cancels. The deviation of the gaps tells a gap from noise; successive gaps depend on each
               other, so it is not turned into a standard error.
    rounding   SQNR of the summed powers over the recorded quantized operands, as `Catalog.moments`. Gradients apart
               from forward operands and attention apart from linear layers, or the larger would hide the smaller.
    storage    the recorded operands, each in its exact format with block scales (`Format.bits_per_value`), those not
               quantized in their own dtype.
    seconds    the median of an iteration's optimizer step, with capture and without.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from binade.collector.recipes.recipe import BF16, TEN_RECIPES
from binade.collector.training.config import MODELS
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.runs import DONE, STATES, RunInfo, list_runs, read_losses
from binade.quant.formats import FORMATS, UnknownFormatError

BF16_BITS = 16
SIDES = (("linear", "forward"), ("linear", "backward"), ("FA", "forward"), ("FA", "backward"))  # component, operation
MEASURES = ("sqnr_db", "flush_to_zero", "saturated")

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Settings:
    """What runs must share to be compared, as run.json has it; None where it says nothing.

    layers is the number the model has, shortened or not; device is "cpu" or the GPU's name.
    """

    model: Value
    size: Value
    layers: Value
    load_hf: Value
    dataset: Value
    corpus_sha256: Value
    seed: Value
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
class Gap:
    """A run against bf16. Losses are in nats per token, at `iteration`, the last that both finished. `mean` and
    `deviation` (the sample's, None of a single value) are of loss − bf16_loss over the `iterations` both finished."""

    iteration: int
    loss: float
    bf16_loss: float
    mean: float
    deviation: float | None
    iterations: int

    @property
    def last(self) -> float:
        return self.loss - self.bf16_loss

    @property
    def perplexity_ratio(self) -> float:
        """exp(mean): the geometric mean of the ratios of perplexity to bf16."""
        try:
            return math.exp(self.mean)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Rounding:
    """What rounding did to the quantized operands of a component in an operation, taken together. Shares are 0 to 1."""

    component: str
    operation: str
    tensors: int
    sqnr_db: float
    flush_to_zero: float
    saturated: float


@dataclass(frozen=True)
class Storage:
    """The recorded operands: how many tensors and values, and their bits in the formats they were rounded to."""

    tensors: int
    values: int
    bits: float

    @property
    def bits_per_value(self) -> float:
        return self.bits / self.values if self.values else math.nan

    @property
    def nbytes(self) -> float:
        return self.bits / 8

    @property
    def bf16_bytes(self) -> float:
        return self.values * BF16_BITS / 8

    @property
    def ratio(self) -> float:
        """Of the bytes that the same values take in bf16."""
        return self.bits_per_value / BF16_BITS


@dataclass(frozen=True)
class Seconds:
    """Median time of the optimizer steps of one kind, and how many there were."""

    median: float
    iterations: int


@dataclass(frozen=True)
class Row:
    """A recipe in a state. The figures are of the run `run_id`, one of `runs`; None where there is nothing to tell.

    iterations are those finished under the recipe; loss is the last one's, in nats per token. loss_spread is the
    largest minus the smallest loss of the row's runs at the last iteration that all finished. gap is None for the bf16
    run that the others are compared to.
    """

    recipe: str
    state: str
    reason: str | None
    runs: int
    run_id: str
    backend: str
    iterations: int
    loss: float | None
    loss_spread: float | None
    gap: Gap | None
    roundings: tuple[Rounding, ...]
    storage: Storage | None
    recorded: Seconds | None
    unrecorded: Seconds | None

    @property
    def label(self) -> str:
        return self.recipe if self.state == DONE else f"{self.recipe} ({self.state})"

    def rounding(self, component: str, operation: str) -> Rounding | None:
        return next((r for r in self.roundings if (r.component, r.operation) == (component, operation)), None)


@dataclass(frozen=True)
class Section:
    """Runs that can be compared. reference is the bf16 row that gaps are taken to, None if there is none."""

    settings: Settings
    rows: tuple[Row, ...]
    reference: Row | None


@dataclass(frozen=True)
class Comparison:
    """Sections in order of their first run, and what was passed over with the reason."""

    root: Path
    sections: tuple[Section, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True)
class _Loss:
    loss: float
    seconds: float | None
    recorded: bool | None


@dataclass(frozen=True)
class _Run:
    """A run with its finished iterations under the recipe. `last` is the last of them, -1 if none finished."""

    info: RunInfo
    recipe: str
    losses: dict[int, _Loss]
    last: int

    @property
    def iterations(self) -> int:
        return self.last + 1

    @property
    def age(self) -> tuple[str, str]:
        """Sorts from old to new."""
        return str(self.info.config.get("started")), self.info.run_id

    @property
    def rank(self) -> tuple[int, tuple[str, str]]:
        """The longest is the most telling, the newest of these."""
        return self.iterations, self.age


def compare(root: Path) -> Comparison:
    """Compare the recipes under a root; one that does not exist has none. Raises RunError if it is a file, OSError if
    it cannot be read."""
    if root.is_dir() and not any(root.glob("*/run.json")):  # an index is made only where there is something to index
        return Comparison(root, (), tuple(list_runs(root)[1]))
    with Catalog.open(root) as catalog:
        refused = list(catalog.refused)
        indexed = set(catalog.runs()["run_id"])
        groups: dict[Settings, list[_Run]] = {}
        for info in list_runs(root)[0]:
            if info.run_id in indexed:
                groups.setdefault(_settings(info.config), []).append(_read(info, refused))
        sections = tuple(_section(catalog, settings, group, refused) for settings, group in groups.items())
    return Comparison(root, sections, tuple(refused))


def _settings(config: Mapping[str, Any]) -> Settings:
    known = {f.name: _plain(config.get(f.name)) for f in fields(Settings)}
    shape = MODELS.get(str(known["model"]), {}).get(str(known["size"]))
    known["layers"] = known["layers"] or (shape.layers if shape else None)
    known["device"] = str(known["device"] or "").partition(",")[0] or None  # "cpu, 2 threads"
    known |= {"tp": known["tp"] or 1, "dp": known["dp"] or 1, "sequence_parallel": bool(known["sequence_parallel"])}
    data = config.get("data")
    if isinstance(data, dict):
        known["corpus_sha256"] = _plain(data.get("corpus_sha256") or data.get("idx_sha256"))
    return Settings(**known)


def _plain(value: Any) -> Value:
    return value if value is None or isinstance(value, (str, int, float)) else json.dumps(value)


def _recipe(config: Mapping[str, Any]) -> str:
    """The recipe with what overrides it: "linear_mxfp8, PV mxfp4"."""
    overrides = (
        *((part, f"{part}_quant") for part in ("linear", "qk", "pv", "router", "forward", "dgrad", "wgrad")),
        ("operands", "operand_quant"),
        ("bf16 in layers", "skip_layers"),
    )
    names = {"qk": "QK", "pv": "PV"}
    changed = [f"{names.get(part, part)} {_listed(config[key])}" for part, key in overrides if config.get(key)]
    return ", ".join([str(config.get("recipe") or "unnamed"), *changed])


def _listed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _read(run: RunInfo, refused: list[str]) -> _Run:
    losses = {}
    try:
        for record in read_losses(run.directory):
            loss = _loss(record)
            if loss is None:
                refused.append(f"{run.run_id}: loss.jsonl is damaged: {json.dumps(record)[:60]} is no loss")
                break
            if record["iteration"] >= 0:
                losses[record["iteration"]] = loss
    except (OSError, RecursionError) as error:
        refused.append(f"{run.run_id}: loss.jsonl cannot be read: {error}")
    reached = run.status.iteration if isinstance(run.status.iteration, int) else -1
    if losses and max(losses) < reached:
        refused.append(f"{run.run_id}: loss.jsonl ends at iteration {max(losses)} of {reached}")
    return _Run(run, _recipe(run.config), losses, max([reached, *losses]))


def _loss(record: Any) -> _Loss | None:
    if not isinstance(record, dict) or type(record.get("iteration")) is not int or not _finite(record.get("loss")):
        return None
    seconds, recorded = record.get("seconds"), record.get("recorded")
    return _Loss(
        float(record["loss"]),
        float(seconds) if _finite(seconds) else None,
        recorded if isinstance(recorded, bool) else None,
    )


def _finite(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def _section(catalog: Catalog, settings: Settings, runs: list[_Run], refused: list[str]) -> Section:
    groups: dict[tuple[str, str], list[_Run]] = {}
    for run in runs:
        groups.setdefault((run.recipe, run.info.status.state), []).append(run)
    shown = {key: max(group, key=lambda run: run.rank) for key, group in groups.items()}
    candidates = [run for (recipe, _), run in shown.items() if recipe == BF16 and run.losses]
    bf16 = max(candidates, key=lambda run: (run.info.status.state == DONE, run.rank), default=None)
    rows = []
    for key in sorted(groups, key=_order):
        run = shown[key]
        finished = _finished(catalog, run)
        rows.append(
            Row(
                recipe=run.recipe,
                state=run.info.status.state,
                reason=run.info.status.reason,
                runs=len(groups[key]),
                run_id=run.info.run_id,
                backend=", ".join(str(run.info.config.get(name) or "unknown") for name in ("backend", "device")),
                iterations=run.iterations,
                loss=run.losses[run.last].loss if run.last in run.losses else None,
                loss_spread=_spread(groups[key]),
                gap=_gap(run, bf16) if bf16 and run is not bf16 else None,
                roundings=_roundings(catalog, finished) if finished else (),
                storage=_storage(catalog, finished, run.info.run_id, refused) if finished else None,
                recorded=_seconds(run, True),
                unrecorded=_seconds(run, False),
            )
        )
    reference = next((row for row in rows if bf16 and row.run_id == bf16.info.run_id), None)
    return Section(settings, tuple(rows), reference)


def _order(key: tuple[str, str]) -> tuple[int, str, int]:
    """As the ten recipes are listed, then others by name; what is done first."""
    recipe, state = key
    place = TEN_RECIPES.index(recipe) if recipe in TEN_RECIPES else len(TEN_RECIPES)
    return place, recipe, -1 if state == DONE else STATES.index(state)


def _finished(catalog: Catalog, run: _Run) -> Filter | None:
    """The tensors of the run's finished iterations; None if it recorded none.

    A run that is done has no other iterations, whether or not it counted them.
    """
    whole = Filter(run_id=(run.info.run_id,))
    if run.info.status.state == DONE:
        return whole
    iterations = [i for i in catalog.facets(whole).get("iteration", []) if i <= run.last]
    return replace(whole, iteration=tuple(iterations)) if iterations else None


def _gap(run: _Run, bf16: _Run) -> Gap | None:
    common = sorted(run.losses.keys() & bf16.losses.keys())
    if not common:
        return None
    last = common[-1]
    gaps = [run.losses[i].loss - bf16.losses[i].loss for i in common]
    deviation = statistics.stdev(gaps) if len(gaps) > 1 else None
    return Gap(last, run.losses[last].loss, bf16.losses[last].loss, statistics.fmean(gaps), deviation, len(gaps))


def _spread(runs: list[_Run]) -> float | None:
    common = set.intersection(*(set(run.losses) for run in runs))
    if len(runs) == 1 or not common:
        return None
    losses = [run.losses[max(common)].loss for run in runs]
    return max(losses) - min(losses)


def _seconds(run: _Run, recorded: bool) -> Seconds | None:
    times = [loss.seconds for loss in run.losses.values() if loss.recorded is recorded and loss.seconds is not None]
    return Seconds(statistics.median(times), len(times)) if times else None


def _roundings(catalog: Catalog, finished: Filter) -> tuple[Rounding, ...]:
    operands = catalog.operands(finished)
    quantized = operands[operands["format"].notna()].groupby(["component", "operation"])["tensors"].sum()
    pooled = catalog.moments(finished, by=("component", "operation")).set_index(["component", "operation"])
    measures = pooled.astype(dict.fromkeys(MEASURES, float))[list(MEASURES)].to_dict("index")
    return tuple(
        Rounding(
            *side,
            int(quantized[side]),
            *(float(measures[side][name]) for name in MEASURES),
        )
        for side in SIDES
        if side in quantized
    )


def _storage(catalog: Catalog, finished: Filter, run_id: str, refused: list[str]) -> Storage | None:
    operands = catalog.operands(finished)
    if operands.empty:
        return None
    try:
        bits = sum(_bits(row) for row in operands.itertuples())
    except UnknownFormatError as error:
        refused.append(f"{run_id}: {error}")
        return None
    return Storage(int(operands["tensors"].sum()), int(operands["numel"].sum()), bits)


def _bits(row: Any) -> float:
    bits = FORMATS[row.format].bits_per_value * row.numel if isinstance(row.format, str) else row.nbytes * 8
    return float(bits)

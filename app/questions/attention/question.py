"""What happens inside attention? Probability maps, entropy, the scores' range, and how much of P flushes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Controls, Drawn, Figure, Item, Table, Text, grid, source
from binade.app.questions.attention import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.rounded import Recorded
from binade.app.questions.shared.selection import Of, SelectedTensor
from binade.app.view.params import One, Whole
from binade.collector.recipes.parse import recipe_of
from binade.data.compare.evidence import Measure, Sentence, exact, extreme, say, together
from binade.data.index.catalog import CatalogError
from binade.data.run.store import TensorFileError
from binade.data.run.tensor_kinds import label_of
from binade.data.words.fields import Field
from binade.data.words.filter import Filter

NAMES = compute.NAMES
OF_PRODUCT = ("value", "output", "grad_output")
NOTHING = "No attention map with values was recorded for this layer, run and iteration: choose another tensor."
LOST = "Lost: the share of all probability that the flushed values held. Flushed: nonzero values that become 0."
MAP = Control(
    name="map", label="Map of", param=One(NAMES), titles={name: label_of(name) for name in NAMES}, widget="list",
    row="map", width=1.7, inline=True,
)  # fmt: skip
HEAD = Control(name="head", label="Head", param=Whole(1, 10**6, 1), row="map", inline=True)
SEQUENCE = Control(name="sequence", label="Sequence", param=Whole(1, 10**6, 1), row="map", inline=True)


@dataclass(frozen=True)
class Maps:
    """The attention maps of one layer, by name, with their rows in the index; and its tensors of OF_PRODUCT."""

    heads: dict[str, compute.Heads]
    rows: dict[str, pd.Series]
    product: dict[str, Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(next(iter(self.heads.values())).x.shape)

    @property
    def words(self) -> str:
        name = next(iter(self.heads))
        place, note = self.rows[name], self.heads[name].note
        known = ("layer", place["layer_index"]), ("iteration", place["iteration"]), ("run", place["recipe"])
        words = ", ".join(f"{word} {value}" for word, value in known if not pd.isna(value)) or "unknown location"
        return f"{words} · {note}" if note else words

    def source(self, name: str) -> str:
        row = self.rows[name]
        shape = " × ".join(str(n) for n in row["shape"])
        note = self.heads[name].note or "exact"
        return source(None, f"{row['tensor_name']}, {row['tensor_id']}, {shape} ({note})")


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    maps = maps_of(selected)
    if maps is None:
        return Drawn(problems=(NOTHING,))
    by_head = heads(selected, maps)
    counts = ((HEAD, maps.shape[1]), (SEQUENCE, maps.shape[0]))
    problems = tuple(
        f"There is no {control.name} {values[control.name]:,}: the last is {count:,}."
        for control, count in counts
        if values[control.name] > count
    )
    places = [replace(control, param=Whole(1, count, 1)) for control, count in counts if control is HEAD or count > 1]
    items = (*by_head.items, Controls((replace(MAP, options=list(maps.heads)), *places), group="maps"))
    if not problems:
        name = values["map"] if values["map"] in maps.heads else next(iter(maps.heads))
        items = (*items, head_map(maps, name, values["head"], values["sequence"]))
    return Drawn(items, by_head.verdict, problems)


def maps_of(selected: SelectedTensor) -> Maps | None:
    """The maps of the tensor's layer, run, iteration, micro-batch and rank; None where none has values."""
    heads, rows, product = {}, {}, {}
    for name in NAMES:
        with suppress(CatalogError, TensorFileError):
            row = _sibling(selected, name)
            if row is not None and (read := compute.heads(selected.opened.load(row["tensor_id"]))):
                heads[name], rows[name] = read, row
    if not heads:
        return None
    *_, queries, keys = next(iter(rows.values()))["shape"]
    for name in OF_PRODUCT:
        with suppress(CatalogError, TensorFileError):
            row = _sibling(selected, name, layer_type=("attention",))
            if row is not None and len(row["shape"]) == 4 and row["shape"][2] == (keys if name == "value" else queries):
                product[name] = selected.opened.load(row["tensor_id"])
    return Maps(heads, rows, product)


def _sibling(selected: SelectedTensor, name: str, **words: Any) -> pd.Series | None:
    """The tensor of the same layer, run, iteration, micro-batch and rank with these words."""
    row = selected.row
    if row["tensor_name"] == name and not words:
        return row
    same: dict[str, Any] = {
        field: (row[field].item() if hasattr(row[field], "item") else row[field],)
        for field in ("run_id", "layer_index", "iteration", "micro_batch", "rank")
        if not pd.isna(row[field])
    }
    rows = selected.opened.tensors(Filter(tensor_name=(name,), **same, **words))
    # One import may contain logs in several formats.
    alike = rows["quant_type"].eq(row["quant_type"]).astype(int) + rows["stage"].eq(row["stage"])
    return None if rows.empty else rows.iloc[int(alike.argmax())]


def heads(selected: SelectedTensor, maps: Maps) -> Drawn:
    """Entropy, flush and the error of PV by head, where probabilities were recorded; the scores' range, where scores
    were."""
    items: list[Item] = []
    verdict = Sentence()
    scores, recorded = (maps.heads.get(name) for name in ("attention_scores", "attention_probs"))
    if recorded is not None:
        is_flash = _is_flash(selected, recorded)
        softmax = compute.softmax(recorded, scores) if scores and scores.x.shape == recorded.x.shape else None
        probs = softmax if is_flash else recorded
        row, first = maps.rows["attention_probs"], maps.source("attention_probs")
        axis, how = -1 if pd.isna(row["contracted_axis"]) else int(row["contracted_axis"]), Recorded.of(row)
        if problem := how.problem(selected.spec):
            return Drawn(problems=(problem,))
        rounded = how.look(recorded.x.contiguous(), selected.spec, axis).result
        if probs is None:
            text = "These are P̃ of softmax=flash. Entropy and lost mass need the scores, whose values were not kept."
            items.append(Text(text))
        else:
            entropy = compute.entropy(probs)
            flushed = compute.flushed(recorded, rounded, probs)
            verdict = _verdict(flushed, entropy, str(selected.spec))
            caption = f"{first}\nEntropy: −Σp·log₂ p over the keys, mean over queries."
            note = "Dashed: uniform attention over all visible keys. Thin lines: the range over queries."
            chart, hint = charts.entropy(entropy, maps.words), "Click a head to see its map."
            items.append(Figure("entropy", chart, entropy, caption, note, 330, "head", hint, group="probs"))
            bars = charts.flushed_by_head(flushed, selected.spec, maps.words)
            items.append(Figure("flushed", bars, flushed, f"{first}\n{LOST}", LOST, 330, group="probs"))
        items += _product(maps, recorded, softmax, rounded if is_flash else None, str(selected.spec))
    if scores is not None:
        table = compute.ranges(scores)
        caption = f"{maps.source('attention_scores')}\nScores: the input of softmax."
        chart = charts.score_ranges(table, maps.words)
        items.append(Figure("scores", chart, table, caption, height=330, group="maps"))
    return Drawn(tuple(items), verdict)


def _is_flash(selected: SelectedTensor, recorded: compute.Heads) -> bool:
    """Whether the recorded probabilities are P̃: the run's recipe has softmax=flash, and does not skip this layer."""
    runs = selected.opened.runs()
    recipe = recipe_of(json.loads(runs.loc[runs["run_id"] == selected.row["run_id"], "config"].iloc[0]))
    return recipe is not None and recipe.pv.formats.softmax.tile is not None and compute.may_be_flash(recorded)


def _product(
    maps: Maps, recorded: compute.Heads, softmax: compute.Heads | None, rounded: Tensor | None, spec: str
) -> Iterator[Item]:
    """What rounding does to PV, by head, and why a figure is missing. rounded: P̃ in the spec, with softmax=flash."""
    table = pd.DataFrame({"head": range(1, maps.shape[1] + 1)})
    columns, reasons = {"head": Column("Head")}, []

    def add(name: str, title: str, values: np.ndarray, definition: str, unit: str = "") -> None:
        table[name], columns[name] = values, Column(field=Field(name, title, unit, definition))

    if rounded is not None:
        several = "Share of the rows in which more than one P̃ is 1"
        ones, in_spec = (compute.several_ones(x) for x in (recorded.x, rounded))
        add("ones", "Several P̃ = 1", ones, f"{several}, as recorded", "%")
        add("ones_rounded", f"Several P̃ = 1 in {spec}", in_spec, f"{several}, rounded to {spec}", "%")
    else:
        reasons.append("Rows with several P̃ = 1: PV takes the normalized softmax, not P̃.")
    missing = [label_of(name) for name in OF_PRODUCT if name not in maps.product]
    if softmax is None or {"value", "output"} - {*maps.product}:
        needed = ["scores"] * (softmax is None) + missing
        reasons.append(f"Error of PV and row difference: no values by head of {', '.join(needed)}.")
    else:
        error = compute.output_error(softmax, maps.product["value"], maps.product["output"])
        signed = "Mean of output − PV, with P the softmax of the recorded scores, in float64"
        add("error", "Mean error of PV", error.mean((0, 2, 3)).numpy(), signed)
        if missing:
            reasons.append(f"Row difference: no values by head of {missing[0]}.")
        else:
            difference = compute.row_difference(error, maps.product["grad_output"], recorded.every)
            of_rows = "Mean of rowsum(P∘dP) − rowsum(dO∘O) with dP = dO·Vᵀ, in float64; 0 without rounding"
            add("row_difference", "Row difference", difference, of_rows)
    definitions = " ".join(
        f"{column.field.axis}: {column.field.definition}." for column in columns.values() if column.field
    )
    if len(columns) > 1:
        yield Table("product", table, columns, "Rounding of PV", definitions)
    if reasons:
        yield Text("Not computed. " + " ".join(reasons))


MASS = Measure("mass", "Probability mass lost", "%")
ENTROPY = Measure("entropy", "Entropy", "bits", format=".2f")


def _verdict(flushed: pd.DataFrame, entropy: pd.DataFrame, spec: str) -> Sentence:
    """Heads by the probability mass that they lose: tiny values are many, and hold little of it."""
    masses = zip(flushed["head"], flushed["mass"].astype(float), strict=True)
    lost = [(f"head {head}", exact(MASS, mass)) for head, mass in masses if not math.isnan(mass)]
    most = say("In {spec}, no head loses probability mass to zero.", spec=spec) if lost else Sentence()
    if any(estimate.value > 0 for _, estimate in lost):
        most = extreme(lost, f"probability mass flushed to zero in {spec}", lowest=False)
    means = zip(entropy["head"], entropy["entropy"].astype(float), strict=True)
    bits = [(f"head {head}", exact(ENTROPY, mean)) for head, mean in means]
    return together(most, extreme(bits, "entropy, mean over queries", lowest=True))


def head_map(maps: Maps, name: str, head: int, sequence: int) -> Figure:
    """One head's map of one sequence, both from 1."""
    heads = maps.heads[name]
    values = compute.head_map(heads, sequence - 1, head - 1)
    title = f"{label_of(name).capitalize()} of head {head}"
    size = (int(maps.rows[name]["shape"][2]), maps.shape[3])
    subtitle = f"sequence {sequence} · queries down, keys across"
    chart = charts.head_map(values, size, title, subtitle, name == "attention_probs")
    caption = f"{maps.source(name)}\nHead {head}, sequence {sequence}; gray: zero or masked."
    return Figure("head_map", chart, grid(values), caption, height=360, group="maps")


ATTENTION = Question(
    text="What happens inside attention?",
    title="Attention",
    icon=":material/visibility:",
    help="Probabilities, entropy and scores, head by head",
    page="tensor",
    of=Of.TENSOR,
    view="attention",
    room="why",
    draw=draw,
    applies=lambda selected: bool(selected.row["layer_type"] == "attention"),
    controls=(MAP, HEAD, SEQUENCE),
)

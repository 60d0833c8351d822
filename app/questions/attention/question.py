"""What happens inside attention? Probability maps, entropy, the scores' range, and how much of P flushes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from binade.app.control import Control
from binade.app.figure import Controls, Drawn, Figure, grid, source
from binade.app.params import One, Whole
from binade.app.questions.attention import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.selection import Of, SelectedTensor
from binade.app.report.section import ReportSelection, Section, slug
from binade.data.catalog import CatalogError
from binade.data.evidence import SHARE, Measure, Sentence, exact, extreme, leaders, say, together
from binade.data.filter import Filter
from binade.data.store import TensorFileError
from binade.data.tensor_kinds import label_of
from binade.quant.specs import known_specs

NAMES = compute.NAMES
MAX_PLACES = 8  # layers of runs that a report draws
NOTHING = "No attention map with values was recorded for this layer, run and iteration: choose another tensor."
MAP = Control(
    name="map", label="Map of", param=One(NAMES), titles={name: label_of(name) for name in NAMES}, widget="list",
    row="map", width=1.7, inline=True,
)  # fmt: skip
HEAD = Control(name="head", label="Head", param=Whole(1, 10**6, 1), row="map", inline=True)
SEQUENCE = Control(name="sequence", label="Sequence", param=Whole(1, 10**6, 1), row="map", inline=True)


@dataclass(frozen=True)
class Maps:
    """The attention maps of one layer, by name, with their rows in the index."""

    heads: dict[str, compute.Heads]
    rows: dict[str, pd.Series]

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
    found, rows = {}, {}
    for name in NAMES:
        with suppress(CatalogError, TensorFileError):
            row = _sibling(selected, name)
            if row is not None and (read := compute.heads(selected.opened.load(row["tensor_id"]))):
                found[name], rows[name] = read, row
    return Maps(found, rows) if found else None


def _sibling(selected: SelectedTensor, name: str) -> pd.Series | None:
    """The attention map of the same layer, run, iteration, micro-batch and rank."""
    row = selected.row
    if row["tensor_name"] == name:
        return row
    same: dict[str, Any] = {
        field: (row[field].item() if hasattr(row[field], "item") else row[field],)
        for field in ("run_id", "layer_index", "iteration", "micro_batch", "rank")
        if not pd.isna(row[field])
    }
    rows = selected.opened.tensors(Filter(tensor_name=(name,), **same))
    # One import may contain logs in several formats.
    alike = rows["quant_type"].eq(row["quant_type"]).astype(int) + rows["stage"].eq(row["stage"])
    return None if rows.empty else rows.iloc[int(alike.argmax())]


def heads(selected: SelectedTensor, maps: Maps) -> Drawn:
    """Entropy and flush by head, where probabilities were recorded; the scores' range, where scores were."""
    figures, verdict = [], Sentence()
    if (probs := maps.heads.get("attention_probs")) is not None:
        row = maps.rows["attention_probs"]
        entropy = compute.entropy(probs)
        axis = -1 if pd.isna(row["contracted_axis"]) else int(row["contracted_axis"])
        flushed = compute.flushed(probs, selected.spec, axis)
        verdict = _verdict(flushed, entropy, str(selected.spec))
        first = maps.source("attention_probs")
        caption = f"{first}\nEntropy: −Σp·log₂ p over the keys, mean over queries."
        note = "Dashed: uniform attention over all visible keys. Thin lines: the range over queries."
        chart = charts.entropy(entropy, maps.words)
        figures.append(
            Figure("entropy", chart, entropy, caption, note, 330, "head", "Click a head to see its map.", group="probs")
        )
        held = "Lost: the share of all probability that the flushed values held. Flushed: nonzero values that become 0."
        bars = charts.flushed_by_head(flushed, selected.spec, maps.words)
        figures.append(Figure("flushed", bars, flushed, f"{first}\n{held}", held, 330, group="probs"))
    if (scores := maps.heads.get("attention_scores")) is not None:
        table = compute.ranges(scores)
        caption = f"{maps.source('attention_scores')}\nScores: the input of softmax."
        chart = charts.score_ranges(table, maps.words)
        figures.append(Figure("scores", chart, table, caption, height=330, group="maps"))
    return Drawn(tuple(figures), verdict)


MASS = Measure("mass", "Probability mass lost", "%", factor=100.0)
ENTROPY = Measure("entropy", "Entropy", "bits", decimals=2)


def _verdict(flushed: pd.DataFrame, entropy: pd.DataFrame, spec: str) -> Sentence:
    """Heads by the probability mass that they lose: tiny values are many, and hold little of it."""
    masses = zip(flushed["head"], flushed["mass"].astype(float), strict=True)
    lost = [(f"head {head}", exact(MASS, mass)) for head, mass in masses if not math.isnan(mass)]
    most = say("In {spec}, no head loses probability mass to zero.", spec=spec) if lost else Sentence()
    if any(estimate.value > 0 for _, estimate in lost):
        most = extreme(lost, f"probability mass flushed to zero in {spec}", lowest=False)
        first = leaders(lost, lowest=False)
        if len(first) == 1:
            share = flushed.set_index("head")["flush_to_zero"][int(first[0][0].split()[-1])]
            held = say("It is {share} of its nonzero probabilities.", share=exact(SHARE, share))
            most = together(most, held)
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


def report(selection: ReportSelection) -> Iterator[Section]:
    where = selection.where
    names = [name for name in NAMES if not where.tensor_name or name in where.tensor_name]
    if not names:
        return
    rows = selection.opened.tensors(replace(where, tensor_name=tuple(names)))
    rows = rows[rows["path"].notna()]
    rows = rows.sort_values(["iteration", "micro_batch", "rank", "run_id", "layer_index"], kind="stable")
    rows = rows.drop_duplicates(["run_id", "layer_index"])
    if len(rows) > MAX_PLACES:
        problem = f"{MAX_PLACES} of {len(rows)} layers, over all runs, are drawn: narrow the filter to see others."
        yield Section("attention_maps", problems=[problem])
    for number, row in enumerate(rows.head(MAX_PLACES).to_dict("records"), 1):
        fmt = next((spec for spec in known_specs([str(row["quant_type"])]) if spec != "bf16"), "hifp8")
        selected, problems = selection.tensor(row["tensor_id"], fmt)
        suffix = f"_{number:02d}_{slug(str(row['recipe']))}_L{int(row['layer_index'])}"
        figures = _of_layer(selected) if selected else []
        figures = [replace(figure, name=f"{figure.name}{suffix}") for figure in figures]
        yield Section("attention_maps", figures=figures, problems=problems)


def _of_layer(selected: SelectedTensor) -> list[Figure]:
    """The statistics by head, and the maps of the most focused head."""
    maps = maps_of(selected)
    if maps is None:
        return []
    figures = list(heads(selected, maps).figures)
    head = 1
    for entropy in (figure.table for figure in figures if figure.name == "entropy"):
        head = int(entropy["head"].iloc[entropy["entropy"].fillna(1e9).argmin()])
    for name in maps.heads:
        figures.append(replace(head_map(maps, name, head, 1), name=f"{name.removeprefix('attention_')}_map"))
    return figures


ATTENTION = Question(
    text="What happens inside attention?",
    title="Attention",
    icon=":material/visibility:",
    help="Probabilities, entropy and scores, head by head",
    page="tensor",
    of=Of.TENSOR,
    view="attention",
    draw=draw,
    controls=(MAP, HEAD, SEQUENCE),
    report=report,
)

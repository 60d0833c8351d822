"""Would another format fix it? The values, rounded to any formats with any options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import Tensor

from binade.app import style
from binade.app.figure import Drawn, Figure, source
from binade.app.params import Many, One, Param
from binade.app.questions.question import Question, not_in_report
from binade.app.questions.shared import distribution_charts, format_charts
from binade.app.questions.shared.distributions import Distribution, log2_histogram
from binade.app.questions.shared.selection import SelectedTensor
from binade.app.questions.what_if import compute
from binade.data.catalog import Catalog, CatalogError
from binade.data.store import TensorFileError
from binade.quant.formats import FORMATS
from binade.quant.metrics import METRICS

DEFAULT = ("mxfp8", "mxfp4", "nvfp4", "hifp8")
OWN = "default"
CHOICES = {
    "scale_rule": (OWN, "floor", "ceil", "even", "rceil", "amax", "pow2", "none"),
    "rounding": (OWN, "nearest", "half_away", "stochastic"),
    "block_size": (OWN, "8", "16", "32", "64", "128"),
    "overflow": (OWN, "saturate", "inf"),
    "hadamard": ("off", "16", "32", "64", "128"),
}
TITLES = {
    "scale_rule": "Scale rule",
    "rounding": "Rounding",
    "block_size": "Block size",
    "overflow": "Overflow",
    "hadamard": "Hadamard",
}
OVER = ("tensor", "selection")
MOST_TENSORS = 12
EACH = 1 << 16  # values tried of each tensor of a selection
Tried = tuple[pd.DataFrame, list[Distribution]]


@dataclass(frozen=True)
class Plan:
    """What is to be tried on which tensors, and what is to be said of it."""

    trials: list[compute.Trial]
    ids: list[str]
    over: str
    said: tuple[str, ...] = ()

    @property
    def limit(self) -> int:
        """Values tried of each tensor, at most."""
        return compute.LIMIT if len(self.ids) == 1 else EACH


def params(opened: Catalog) -> dict[str, Param]:
    options: dict[str, Param] = {name: One(allowed) for name, allowed in CHOICES.items()}
    return {"formats": Many(tuple(FORMATS), DEFAULT), "over": One(OVER), **options}


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    made = plan(selected, values)
    if not made.trials or not made.ids:
        return Drawn(problems=made.said)
    return results(selected, made, try_all(selected.opened, made))


def plan(selected: SelectedTensor, values: dict[str, Any]) -> Plan:
    formats, over, said = values["formats"], values["over"], []
    if not formats:
        return Plan([], [], over, ("Choose a format.",))
    axis = selected.x.shape[selected.dim] if selected.x.dim() else 1
    hadamard = 0 if values["hadamard"] == "off" else int(values["hadamard"])
    if hadamard and axis % hadamard and over == "tensor":
        said.append(f"A rotation of {hadamard} does not divide the contracted axis of {axis}: not applied.")
        hadamard = 0
    options = {name: values[name] for name in CHOICES if name != "hadamard" and values[name] != OWN}
    if "block_size" in options:
        options["block_size"] = int(options["block_size"])
    trials = [compute.trial(name, hadamard=hadamard, **options) for name in formats]
    for name, title in TITLES.items():
        if without := [one.format for one in trials if name in one.ignored]:
            said.append(f"{title} as chosen does not apply to {', '.join(without)}: at its default there.")
    trials = compute.with_defaults(trials)
    if over == "tensor":
        return Plan(trials, [selected.row["tensor_id"]], over, tuple(said))
    ids, note = _operands(selected, hadamard)
    if not ids:
        note = "The filter selects no operand with values on disk."
    return Plan(trials, ids, over, (*said, note) if note else tuple(said))


def _operands(selected: SelectedTensor, hadamard: int) -> tuple[list[str], str]:
    """(the operands of the filter with values on disk, spread evenly over it where there are many, what to say)."""
    rows = selected.opened.tensors(selected.where)
    rows = rows[rows["contracted_axis"].notna() & rows["path"].notna() & (rows["numel"] > 0)]
    if hadamard:
        rows = rows[
            [
                shape[int(axis)] % hadamard == 0
                for shape, axis in zip(rows["shape"], rows["contracted_axis"], strict=True)
            ]
        ]
    note = ""
    if len(rows) > MOST_TENSORS:
        note = f"{MOST_TENSORS} of the filter’s {len(rows):,} operands, spread evenly, are tried."
        rows = rows.iloc[[index * len(rows) // MOST_TENSORS for index in range(MOST_TENSORS)]]
    return rows["tensor_id"].tolist(), note


def try_all(opened: Catalog, made: Plan, done: Callable[[int], None] = lambda count: None) -> Tried:
    """(a row a trial, the distributions before and after); done is told how many are through."""
    rows = opened.rows_of(made.ids)
    axes = dict(zip(rows["tensor_id"], rows["contracted_axis"], strict=True))

    def tensors() -> Iterator[tuple[Tensor, int]]:
        for tensor_id in made.ids:
            axis = axes[tensor_id]
            try:
                yield opened.load(tensor_id), -1 if pd.isna(axis) else int(axis)
            except (CatalogError, TensorFileError):
                continue

    return compute.try_formats(tensors(), made.trials, together=len(made.ids) > 1, limit=made.limit, done=done)


def results(selected: SelectedTensor, made: Plan, tried: Tried) -> Drawn:
    """tables: `trials`."""
    table, shown = tried
    best = table.iloc[int(table["sqnr_db"].fillna(-1e9).argmax())]
    sqnr, flushed = (style.MEASURES[name].quantity(best[name]) for name in ("sqnr_db", "flush_to_zero"))
    verdict = (
        f"Best of these by SQNR: {best['label']}, {sqnr}, at {best['bits_per_value']:g} bits a value "
        f"({flushed} flushed)."
    )
    sampled = selected.x.numel() > made.limit if len(made.ids) == 1 else True
    how = f"a sample of whole lines, at most {made.limit:,} values a tensor" if sampled else "exact"
    what = (
        selected.source(how) if made.over == "tensor" else source(selected.where, f"{len(made.ids)} operands ({how})")
    )
    definitions = " ".join(
        f"{METRICS[name].label}: {METRICS[name].definition}." for name, *_ in format_charts.ERROR_PANELS
    )
    caption = f"{what}\n{definitions} With a rotation, flush, saturation and codes are of the rotated values."
    height = format_charts.format_height(table)
    figures = [
        Figure(f"trials_{index}", panel, table, caption, height=height, group="trials")
        for index, panel in enumerate(format_charts.trial_panels(table))
    ]
    histogram = log2_histogram([d for d in shown if d.total])
    if not histogram.empty:
        of = f" · {len(made.ids)} operands together" if len(made.ids) > 1 else ""
        chart = distribution_charts.log2_histogram(histogram, f"as captured, and after each round trip{of}", "values")
        height = 360 + style.legend_height([d.group for d in shown])
        words = f"{what}\nShares of all values per binade; zeros have no magnitude."
        figures.append(Figure("trial_histogram", chart, histogram, words, height=height))
    said = (*made.said, f"Of {how}.") if sampled else made.said
    return Drawn(tuple(figures), verdict, said, {"trials": table})


WHAT_IF = Question(
    text="Would another format fix it?",
    title="What if",
    icon=":material/experiment:",
    help="Round it to any formats with any options",
    page="tensor",
    view="whatif",
    draw=draw,
    params=params,
    layout="binade.app.questions.what_if.view",
    report=not_in_report,
)

"""Where and when does a statistic change? Layer by iteration, of one run or of two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from binade.app.control import Control
from binade.app.figure import Drawn, Figure, source
from binade.app.params import One
from binade.app.questions.question import Question
from binade.app.questions.shared.event_marks import events_of
from binade.app.questions.shared.runs import every_run, labels_of, run_titles
from binade.app.questions.shared.selection import Selection
from binade.app.questions.surfaces import charts, compute
from binade.app.style import MEASURES
from binade.data.catalog import SHOWN_ERRORS, STATISTICS
from binade.data.evidence import EQUAL, Measure, Sentence, exact, extreme, say, together

RATIO = Measure("ratio", "Ratio", "times")
NONE, IN_FORCE = "none", "in_force"
METRICS = (*SHOWN_ERRORS, *STATISTICS)
NOTHING = "The filter selects no tensor that belongs to a layer: widen it."
NOT_ROUNDED = "No run in the filter rounded {}. Choose a format that it was scored in, or another statistic."
METRIC = Control(
    name="statistic", label="Statistic", param=One(METRICS), widget="list", row="what",
    titles={name: MEASURES[name].label for name in METRICS},
)  # fmt: skip
KIND = Control(
    name="kind", label="Tensor", param=lambda opened: One(tuple(compute.kinds(opened))), widget="list", row="what"
)
SPEC = Control(
    name="spec", label="Format", param=lambda opened: One((IN_FORCE, *opened.scored_formats())), widget="list",
    row="what", titles={IN_FORCE: "the active format"},
)  # fmt: skip
RUN = Control(
    name="run", label="Run", param=lambda opened: One(tuple(compute.followed(opened)), "run"), widget="list", row="runs"
)
AGAINST = Control(
    name="against", label="Compare with", param=lambda opened: One((NONE, *compute.followed(opened)), "run"),
    widget="list",
    row="runs", titles={NONE: "no other run"},
)  # fmt: skip


def _controls(selection: Selection, values: dict[str, Any]) -> Iterator[Control]:
    opened, where = selection.opened, selection.where
    kinds = compute.kinds(opened, where)
    if not kinds:
        return
    yield METRIC
    yield replace(KIND, options=tuple(kinds))
    formats = (IN_FORCE, *opened.scored_formats(where))
    yield replace(SPEC, options=formats, disabled=values["statistic"] not in SHOWN_ERRORS)
    runs = _runs(selection, _chosen(kinds, values["kind"]), values)
    titles = run_titles(every_run(opened))
    if runs:
        yield replace(RUN, options=runs, titles=titles)
    if len(runs) > 1:
        others = [run for run in runs if run != values["run"]]
        yield replace(AGAINST, options=(NONE, *others), titles=titles | dict(AGAINST.titles))


def _chosen(options: Any, wanted: Any) -> Any:
    """The requested option (or its value, for a dict), else the first."""
    name = wanted if wanted in options else next(iter(options))
    return options[name] if isinstance(options, dict) else name


def _runs(selection: Selection, kind: tuple[str, str], values: dict[str, Any]) -> list[str]:
    in_force = values["statistic"] in SHOWN_ERRORS and values["spec"] == IN_FORCE
    where = compute.of_kind(selection.where, kind, selection.where.run_id)
    return compute.followed(selection.opened, where, in_force)


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened, measure = selection.opened, MEASURES[values["statistic"]]
    kinds = compute.kinds(opened, selection.where)
    if not kinds:
        return Drawn(problems=(NOTHING,))
    module, name = kind = _chosen(kinds, values["kind"])
    runs = _runs(selection, kind, values)
    if not runs:
        return Drawn(problems=(NOT_ROUNDED.format(f"{module} {name}"),))
    run = _chosen(runs, values["run"])
    against = values["against"] if values["against"] in set(runs) - {run} else None
    shown = [run, *([against] if against else [])]
    where = compute.of_kind(selection.where, kind, shown)
    fmt = values["spec"] if measure.key in SHOWN_ERRORS and values["spec"] != IN_FORCE else ""
    table = compute.surface(opened, where, measure.key, fmt)
    labels = labels_of(opened)
    change = compute.difference(table, run, against, measure) if against and len(table) else table
    if change.empty:
        scored = f" in {fmt}" if fmt else ""
        what = f"{measure.label}{scored} of {module} {name}"
        text = f"{what} was recorded in fewer than two iterations."
        if against:
            text = f"{what} was recorded in fewer than two iterations that {labels[run]} and {labels[against]} share."
        return Drawn(problems=(f"{text} Record several iterations, or watch a run.",))
    title = f"{measure.label}{f' in {fmt}' if fmt else ''} of {module} {name}"
    events = events_of({labels[each]: opened.root / each for each in shown})
    events = events[events["iteration"].between(change["iteration"].min(), change["last"].max())]
    width = int(change["last"].iloc[0] - change["iteration"].iloc[0]) + 1
    several = bool((change["first_measured"] != change["last_measured"]).any())
    worst = "lowest" if measure.low_is_bad else "largest"
    each = f" · the {worst} of each {width} iterations" * several
    if against:
        names = labels[run], labels[against]
        subtitle = f"{labels[run]} compared with {labels[against]}{each}"
        chart = charts.difference(change, measure, names, events, f"{title}: difference", subtitle)
        note = f"Red: {labels[run]} is worse than {labels[against]}."
        answer = _compared(change, measure, f"{title}, {labels[run]},", labels[against])
    else:
        chart = charts.surface(change, measure, events, title, f"{labels[run]}{each}")
        note = f"{measure.label}: {measure.definition}. Brighter cells are worse."
        answer = _worst(change, measure, f"{title}, {labels[run]}")
    if len(events):
        note += " Dashed lines: triggers, NaN or Inf, precision changes."
    layers = change["layer_index"].nunique()
    caption = source(where, f"{len(change):,} cells of {layers} layers; the {worst} of all tensors in a cell")
    figure = Figure(
        "surface", chart, change.drop(columns="last"), f"{caption}\n{measure.label}: {measure.definition}.", note=note,
        hint="Click a cell to open its tensor.", height=charts.height(layers), choose="tensor_id",
    )  # fmt: skip
    return Drawn((figure,), answer)


def _when(cell: Mapping[Any, Any]) -> str:
    first, last = int(cell["first_measured"]), int(cell["last_measured"])
    when = f"iteration {first}" if first == last else f"iterations {first} to {last}"
    return f"layer {int(cell['layer_index'])}, {when}"


def _worst(table: pd.DataFrame, measure: Measure, what: str) -> Sentence:
    known = table.dropna(subset=["value"])
    cells = [(_when(cell), exact(measure, cell["value"])) for cell in known.to_dict("records")]
    return extreme(cells, what, lowest=measure.low_is_bad)


def _compared(table: pd.DataFrame, measure: Measure, what: str, against: str) -> Sentence:
    """Cells by the change of their values, which are exact: those that differ by less than the resolution are equal."""
    known = table.dropna(subset=["change"])
    if known.empty:
        return Sentence()
    sign, least = -1 if measure.low_is_bad else 1, math.log2(1 + EQUAL) if measure.log else measure.resolution
    worse = sign * known["change"]
    parts: dict[str, str | int] = {"what": what, "against": against, "total": len(known)}
    count, fewer = int((worse > least).sum()), int((worse < -least).sum())
    if not count and not fewer:
        return say("{what} is not distinguishable from {against} in any of {total} cells.", **parts)
    text = say(
        "{what} is worse than in {against} in {count} of {total} cells, and better in {fewer}.",
        count=count, fewer=fewer, **parts,
    )  # fmt: skip
    if not count:
        return text
    by = RATIO if measure.log else replace(measure, signed=True, decimals=None, factor=1.0)
    changes = 2.0 ** known["change"] if measure.log else known["change"]
    cells = known.assign(change=changes)[worse > least].to_dict("records")
    named = [(_when(cell), exact(by, cell["change"])) for cell in cells]
    if len(named) == 1:
        ((name, change),) = named
        return together(text, say("There, in {name}, by {change}.", name=name, change=change))
    return together(text, extreme(named, "ratio" if measure.log else "change", lowest=measure.low_is_bad))


SURFACES = Question(
    text="Where does it go wrong?",
    title="Surfaces",
    icon=":material/landscape:",
    help="Any statistic of one kind of tensor by layer and iteration, for one run or the difference between two runs",
    page="surfaces",
    controls=(METRIC, KIND, SPEC, RUN, AGAINST),
    narrow=_controls,
    draw=draw,
    of_runs=True,
)

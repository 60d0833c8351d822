"""Explore: the tensors of a selection, worst first; how their values are distributed; and what each format does to
them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd

from binade.app.draw import style
from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Drawn, Figure, Item, Table, Text, source
from binade.app.draw.formatting import evenly
from binade.app.questions.explore import charts, compute
from binade.app.questions.explore.compute import RAW, SCALE, SIGMA, Groups
from binade.app.questions.explore.curves import Curve
from binade.app.questions.explore.rounded import drawn_in_formats, first_rounded
from binade.app.questions.question import Question
from binade.app.questions.shared import distributions as shared
from binade.app.questions.shared.distribution_charts import (
    LAW_NAMES,
    LAW_TITLES,
    LINEAR,
    LOG2,
    histogram,
    looks_of,
    qq,
)
from binade.app.questions.shared.distributions import Distribution, log2_histogram
from binade.app.questions.shared.families import about_gradients, about_scales
from binade.app.questions.shared.laws import LAWS
from binade.app.questions.shared.operands import MOST_LISTED, ranked_tensors
from binade.app.questions.shared.quantile_plots import LIMIT, Quantiles, against_law, against_other, points_of
from binade.app.questions.shared.runs import every_run, given_names, labels_of, run_looks
from binade.app.questions.shared.scope import Scope, scoped
from binade.app.questions.shared.selection import Board, Of
from binade.app.view.params import TITLES, Known, One, Range, Whole, in_format, known_run, known_tensor
from binade.data.compare.evidence import SHARE, listed
from binade.data.index.catalog import Catalog
from binade.data.words.filter import FIELDS, INTEGER_FIELDS, Filter
from binade.data.words.names import distinct_names, short_names
from binade.data.words.text import counted, one_line
from binade.quant.specs import Spec

MAX_SELECTED = style.MAX_GROUPS
DRAWN = 3  # tensors that are drawn if none is chosen
TENSOR, NONE = "tensor", "none"
BY_FIELD = ("operation", "layer_index", "phase", "module", "tensor_name", "quant_type", "recipe", "run_id", "iteration")
TITLED = TITLES | {TENSOR: "Tensor", "tensor_name": "Name of the tensor", NONE: "none"}
REPORTED_BY = ("quant_type", "recipe", "layer_type", "operation", "module", "tensor_name", "layer_index")
MOST = {"rows": 12, "columns": 8, "color": style.MAX_GROUPS}  # values of each field that panels show
CHART = 300  # pixels of the two charts, with title and axes, without the legend
VALUES = {SIGMA: "÷ σ", RAW: "raw", SCALE: "÷ block scale"}
AXES = {"log2": "magnitude", "linear": "value"}
VALUES_OF, AXIS_OF = One(tuple(VALUES)), One(tuple(AXES))
BY = Control(name="by", label="Compare by", param=One((TENSOR, *BY_FIELD)), titles=TITLED, widget="list")
OF_VALUES = Control(
    name="values", label="Values", param=VALUES_OF, titles=VALUES,
    help="÷ σ: each tensor is divided by its own standard deviation. ÷ block scale: by the scales of its blocks",
)  # fmt: skip
AXIS = Control(name="axis", label="Axis", param=AXIS_OF, titles=AXES)
AS_RECORDED, IN_FORMATS = "no", "formats"
ROUNDED = Control(
    name="rounded", label="Rounded", param=One((AS_RECORDED, IN_FORMATS)), widget="list",
    titles={AS_RECORDED: "no", IN_FORMATS: "formats"},
    help="Formats: the ticked tensors, or the first one, beside what each scored format rounds them to",
)  # fmt: skip
PANELS = tuple(
    Control(name=name, label=name.capitalize(), param=One((NONE, *BY_FIELD)), titles=TITLED, widget="list")
    for name in ("rows", "columns")
)
MOST_RUNS = 20  # other runs that a Q–Q plot is offered against


def _law(opened: Catalog) -> Known:
    """A law, or the id of a run."""
    run = known_run(opened)
    return Known(lambda name: name in LAWS or run.known(name), "run")


LAW = Control(name="law", label="Q–Q against", param=_law, titles=LAW_TITLES, widget="list")
STATISTICS = {
    "tensors": Column("Tensors", "d"),
    "numel": Column("Values", "d"),
    "mean": Column("Mean", ".3g", help="Of all values of the group together, undivided"),
    "std": Column("Std", ".3g", help="Of all values of the group together, undivided"),
    "min": Column("Min", ".3g"),
    "max": Column("Max", ".3g"),
    "absmin": Column("Smallest |x| > 0", ".3g"),
    "zeros": Column("Zeros", "d"),
    "nans": Column("NaN", "d"),
    "infs": Column("Inf", "d"),
    "body": Column("Off the line", ".2g", help="Q–Q: the most that the 5th to 95th percentile lie off the line"),
    "reach": Column("Largest", ".3g", help="Q–Q: the largest value, in the units of the plot"),
    "expected": Column("Of the law", help="Between which two magnitudes the largest of as many values of the law lies"),
    "tails": Column("Tails"),
}


def within(opened: Catalog, where: Filter, values: Mapping[str, Any]) -> Filter:
    """The fields that the charts group by are kept apart."""
    return scoped(opened, where, {values[name] for name in ("by", "rows", "columns")} & set(FIELDS), scored=True)


def _controls(board: Board, values: Mapping[str, Any]) -> list[Control]:
    runs = every_run(board.opened)
    others = [run for run in runs["run_id"][::-1] if run not in board.where.run_id][:MOST_RUNS]
    labels = dict(zip(runs["run_id"], runs["label"], strict=True))
    options = tuple(dict.fromkeys((*LAWS, *others, *filter(None, [values["law"]]))))
    law = replace(LAW, options=options, titles={**LAW.titles} | {run: f"run {labels[run]}" for run in others})
    by = BY
    if values["tensor"]:
        by = replace(BY, disabled=True, help="Each ticked tensor is drawn. Clear the ticks to compare groups")
    rounded = ROUNDED
    if not values["tensor"] and values["by"] != TENSOR:
        rounded = replace(ROUNDED, disabled=True, help="Tensors are rounded: tick some, or compare by tensor")
    return [by, OF_VALUES, AXIS, law, rounded, *PANELS]


@dataclass(frozen=True)
class Drawing:
    """The groups that the two upper charts draw.

    curves   one per group
    by       what the groups are; looks: of groups that have a color already
    chosen   the tensors, if the groups are tensors
    law      what a Q–Q plot compares with, in words
    below    log₂ of the magnitude where the axis begins
    notes    what was left out or sampled; damaged: (the tensor, why its file cannot be read)
    problems why there is less to draw
    """

    curves: tuple[Curve, ...]
    by: str
    looks: style.Looks | None
    chosen: pd.DataFrame
    law: str
    below: float
    exact: str
    notes: tuple[str, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [curve.group for curve in self.curves]

    @property
    def by_name(self) -> str:
        return TITLED[self.by].lower()


def drawing(board: Board, values: Mapping[str, Any], ranked: pd.DataFrame) -> Drawing:
    """What is drawn of the ticked tensors; without ticks, of the groups that the values are compared by, or of the
    tensors that lose most."""
    opened, law = board.opened, values["law"] or LAWS[0]
    chosen = opened.rows_of(list(values["tensor"])[:MAX_SELECTED])
    if chosen.empty and values["by"] == TENSOR:
        if values["rounded"] == IN_FORMATS:
            chosen = first_rounded(opened, ranked)
        else:
            chosen = opened.rows_of(ranked["tensor_id"].head(DRAWN).tolist())
    by = TENSOR if len(chosen) else values["by"]
    looks = run_looks(every_run(opened)) if by == "run_id" else None
    tensor_of: Mapping[str, str] = {}  # of a rounded group, the name of its tensor
    if len(chosen) and values["rounded"] == IN_FORMATS:
        groups, left, looks, tensor_of = drawn_in_formats(board, values, chosen)
    else:
        groups, left = _groups(board, values, chosen, ranked)
    found = groups.distributions
    if law in LAWS:
        against = LAW_NAMES[law]
        plots = [against_law(d, law) for d in found]
    else:
        against = f"run {labels_of(opened)[law]}"
        others = _others(board, values, by, chosen, law)
        plots = [against_other(d, others.get(tensor_of.get(d.group, d.group)), against) for d in found]
    exact = "exact" if groups.exact == len(found) else "partly from sketches" if groups.exact else "from sketches"
    curves = tuple(Curve(d, plot) for d, plot in zip(found, plots, strict=True))
    problems = [f"No Q–Q plot of {each.group}: {each.problem}." for each in plots if each.problem]
    below = 0.0
    if not found:
        problems = list(groups.notes) or ["Nothing to draw: there are no finite values."]
        groups = replace(groups, notes=())
    elif not any(d.inner.max(initial=0) > 0 for d in found):
        problems.append("No magnitudes to draw: all finite values are zero.")
    else:
        below, _ = compute.lower_end(found)
    return Drawing(
        curves, by, looks, chosen, against, below, exact, (*groups.notes, *left), groups.damaged, tuple(problems)
    )


def draw(board: Board, values: Mapping[str, Any]) -> Drawn:
    fmt, tensors = board.format, list(values["tensor"])
    if any(values[name] != NONE for name in ("rows", "columns")):
        return _panels(board, values)
    ranked = ranked_in(board, values)
    if ranked.empty:
        return Drawn(problems=(f"No operand has an error in this range, {in_format(fmt)}: clear the range.",))
    drawn = drawing(board, values, ranked)
    items: list[Item] = [table(board, ranked, values), *figures_of(board, values, drawn)]
    items += _formats(board, _ids(values, ranked), tensors)
    items += texts(board, drawn)
    items.append(statistics(board, drawn))
    gone = [f"Tensor {name[:80]!r} is missing." for name in tensors if name not in set(drawn.chosen["tensor_id"])]
    return Drawn(tuple(items), problems=(*gone, *drawn.problems), scope=used(board, ranked))


def used(board: Board, ranked: pd.DataFrame) -> Scope:
    return Scope(board.where, ((len(ranked), "tensor"),))


def texts(board: Board, drawn: Drawing) -> list[Text]:
    """What is said below the charts."""
    ids = drawn.chosen["tensor_id"].tolist() if len(drawn.chosen) else None
    found = [Text(text) for text in (left_out(board.opened, board.where, ids), *drawn.notes) if text]
    if drawn.damaged:
        reasons = tuple(f"{label}: {one_line(reason)}" for label, reason in drawn.damaged)
        found.append(
            Text(f"{_files(len(drawn.damaged))} cannot be read: drawn from the sketch instead.", "error", reasons)
        )
    return found


def statistics(board: Board, drawn: Drawing) -> Table:
    """Statistics of the values, and what the Q–Q plot says in numbers."""
    frame = compute.moments(board.opened, board.where, drawn.chosen, drawn.by)
    plots = {curve.group: curve.quantiles for curve in drawn.curves}
    rows = [plots.get(group) for group in frame["group"].map(str)]
    frame = frame.assign(
        body=[plot.body if plot else math.nan for plot in rows],
        reach=[plot.reach if plot else math.nan for plot in rows],
        expected=[_between(plot) for plot in rows],
        tails=[plot.tails if plot else "" for plot in rows],
    )
    columns = {"group": Column("Tensor" if drawn.by == TENSOR else TITLED[drawn.by]), **STATISTICS}
    return Table("Statistics", frame, columns, "Statistics over the finite values", foldable=True)


def _between(plot: Quantiles | None) -> str:
    return "" if plot is None or plot.expected is None else f"{plot.expected[0]:.3g} to {plot.expected[1]:.3g}"


def _files(count: int) -> str:
    return "A tensor file" if count == 1 else f"{count} tensor files"


def ranked_in(board: Board, values: Mapping[str, Any]) -> pd.DataFrame:
    """The tensors that are listed, worst first, with their rank from 1. A filter may leave fewer than come before the
    first of them: then the list begins anew."""
    for after in dict.fromkeys((values["after"], 0)):
        rows = ranked_tensors(board.opened, board.where, board.format, values["delta"], after=after)
        if len(rows):
            break
    return rows.assign(rank_of=range(after + 1, after + len(rows) + 1))


def table(board: Board, ranked: pd.DataFrame, values: Mapping[str, Any]) -> Table:
    """The tensors, worst first."""
    names = distinct_names(ranked, given_names(board.opened))
    frame = ranked.assign(name=ranked["tensor_id"].map(names), gemm=ranked["gemm"].fillna(ranked["operation"]))
    first, total = next(iter(ranked["rank_of"]), 1), board.opened.totals(board.where).tensors
    note = ""
    if first > 1 or (len(ranked) == MOST_LISTED and total > len(ranked)):
        of = f" of {total:,} tensors" * (values["delta"] is None)
        note = f"{first:,} to {first + len(ranked) - 1:,}{of}"
    return Table("tensors", frame, note=note, choose="tensor_id")


def _groups(
    board: Board, values: Mapping[str, Any], chosen: pd.DataFrame, ranked: pd.DataFrame
) -> tuple[Groups, list[str]]:
    """(the distributions that are drawn, what is left out of them)."""
    opened, where, kind, by = board.opened, board.where, values["values"], values["by"]
    if len(chosen):
        return compute.of_tensors(opened, chosen, kind, board.format), []
    distributions, notes = compute.by_fields(opened, where, (by,), kind, board.format, _ids(values, ranked))
    names = compute.named(opened, [key for key, _ in distributions], (by,), by)
    groups = [replace(d, group=name) for name, (_, d) in zip(names, distributions, strict=True)]
    left = []
    if len(groups) > MAX_SELECTED and by in INTEGER_FIELDS:  # they have an order, and often as many values each
        left.append(f"{len(groups)} groups: {MAX_SELECTED}, spread evenly, are drawn.")
        groups = [*evenly(groups, MAX_SELECTED)]
    elif len(groups) > MAX_SELECTED:
        left.append(f"{len(groups)} groups: the {MAX_SELECTED} with the most values are drawn.")
        least = sorted(d.total for d in groups)[-MAX_SELECTED]
        groups = [d for d in groups if d.total >= least][:MAX_SELECTED]
    return Groups(groups, notes=notes), left


def _ids(values: Mapping[str, Any], ranked: pd.DataFrame) -> list[str] | None:
    """The tensors in the range of errors that was dragged over; None for all."""
    return ranked["tensor_id"].tolist() if values["delta"] else None


def caption(board: Board, values: Mapping[str, Any], drawn: Drawing) -> str:
    """Of the two upper charts."""
    what = counted(len(drawn.curves), "group")
    if drawn.by == TENSOR:  # of which several lines may be drawn
        what = counted(len(drawn.chosen), drawn.by_name)
    return f"{source(board.where, f'{what}, {board.scope} ({drawn.exact})')}\nValues: {charts.OF[values['values']]}."


def figures_of(board: Board, values: Mapping[str, Any], drawn: Drawing) -> list[Figure]:
    """Histogram and Q–Q plot, side by side."""
    if not drawn.curves:
        return []
    linear, kind, names = values["axis"] == "linear", values["values"], drawn.names
    of_both, look = caption(board, values, drawn), looks_of(names, drawn.by_name, drawn.looks)
    height = CHART + style.legend_height(names, "top")
    figures: list[Figure] = []
    bins = value_bins(drawn) if linear else log2_histogram([curve.distribution for curve in drawn.curves])
    if len(bins):
        axis = charts.OF[kind] if linear else charts.magnitude(kind)
        chart = histogram(bins, LINEAR if linear else LOG2, axis, not linear, None if linear else drawn.below, **look)
        figures.append(Figure("histogram", chart, bins, of_both, height=height, group="lie"))
    plots = [curve.quantiles for curve in drawn.curves]
    if len(points := points_of(plots)):
        beyond = [(each.group, each.above, each.below) for each in plots]
        look = looks_of(names, drawn.by_name, drawn.looks, line=False)
        chart = qq(points, f"Q–Q against {drawn.law}", f"{drawn.law}; zeros left out", beyond, **look)
        figures.append(Figure("qq", chart, points, of_both, height=height, group="lie"))
    return figures


def value_bins(drawn: Drawing) -> pd.DataFrame:
    """Bins of the values of all groups, equally wide, each group with a last row at which its line ends."""
    bins = shared.linear_histogram([curve.distribution for curve in drawn.curves])
    ends = bins.groupby("group", sort=False).last().reset_index()
    ends = ends.assign(low=ends["high"], share=0.0, count=0.0)
    return pd.concat([bins, ends], ignore_index=True)


def _others(
    board: Board, values: Mapping[str, Any], by: str, chosen: pd.DataFrame, run: str
) -> dict[str, Distribution]:
    """The distributions of the same tensors or groups in another run, by the name of the group."""
    opened, kind = board.opened, values["values"]
    where = replace(board.where, run_id=(run,))
    if by != TENSOR:
        distributions, _ = compute.by_fields(opened, where, (by,), kind, board.format)
        names = compute.named(opened, [key for key, _ in distributions], (by,), by)
        return {name: d for name, (_, d) in zip(names, distributions, strict=True)}
    labels = distinct_names(chosen, given_names(opened))
    others: dict[str, Distribution] = {}
    for tensor_id, label in labels.items():
        twins = opened.twins(tensor_id)
        same = twins.loc[twins["run_id"] == run, "tensor_id"].tolist()
        counterparts = compute.of_tensors(opened, opened.rows_of(same[:1]), kind, board.format).distributions
        others |= {label: counterparts[0]} if counterparts else {}
    return others


def _formats(board: Board, ids: list[str] | None, ticked: Sequence[str] = ()) -> list[Item]:
    by_format = errors(board, ids, ticked)
    if by_format.medians.empty:
        return [Text(NOT_SCORED)]
    dots, larger, medians = charts.dots_of(by_format, names_of(board.opened, by_format), ticked)
    figure = Figure(
        "formats", charts.formats(dots, larger, medians, formats_title(by_format)), by_format.dots,
        formats_caption(board, by_format), note=" ".join(formats_notes(by_format)),
        height=charts.formats_height(by_format), choose="tensor", brush="delta",
    )  # fmt: skip
    return [figure]


NOT_SCORED = "No format comparison: only the operands of a GEMM are scored, and none is selected."


def errors(board: Board, ids: list[str] | None, ticked: Sequence[str] = ()) -> compute.ByFormat:
    return compute.compared(board.opened, board.where if ids is None else Filter(), ids, ticked)


def names_of(opened: Catalog, by_format: compute.ByFormat) -> dict[str, str]:
    """The names of the tensors that have dots."""
    rows = by_format.dots.drop_duplicates("tensor_id")
    return dict(zip(rows["tensor_id"], short_names(rows), strict=True))


def formats_title(by_format: compute.ByFormat) -> str:
    return f"The same {counted(by_format.operands, 'operand')} in each format"


def formats_caption(board: Board, by_format: compute.ByFormat) -> str:
    caption = source(board.where, f"{counted(by_format.operands, 'operand')}, {board.scope}")
    what = "SQNR of an operand along the axis that its GEMM contracts, minus that of N(0,1) in the same format."
    return f"{caption}\n{what} {about_scales(map(Spec.of, by_format.medians['format']))}".rstrip()


def formats_notes(by_format: compute.ByFormat) -> list[str]:
    notes = []
    if by_format.every > 1:
        notes.append(f"One operand in {by_format.every} is drawn; medians are of all.")
    if by_format.partly:
        notes.append(f"Left out, since only some of the operands were scored in them: {', '.join(by_format.partly)}.")
    if by_format.dots["tensor_name"].fillna("").str.startswith("grad_").any():
        notes.append(about_gradients(map(Spec.of, by_format.medians["format"])))
    return [note for note in notes if note]


def _panels(board: Board, values: Mapping[str, Any]) -> Drawn:
    """Histograms and Q–Q plots by rows and columns."""
    opened, where = board.opened, board.where
    by = {place: values[place] for place in ("rows", "columns") if values[place] != NONE}
    by |= {"color": values["by"]} if values["by"] != TENSOR else {}
    fields = tuple(dict.fromkeys(by.values()))
    ranked = ranked_in(board, values)
    distributions, notes = compute.by_fields(
        opened, where, fields, values["values"], board.format, _ids(values, ranked)
    )
    problems = list(notes)
    for place, name in by.items():
        every = sorted({key[fields.index(name)] for key, _ in distributions if not pd.isna(key[fields.index(name)])})
        if len(every) > MOST[place]:
            problems.append(f"{TITLED[name]}: {MOST[place]} of {len(every)} are drawn.")
            drawn = set(evenly(every, MOST[place]))
            distributions = [(key, d) for key, d in distributions if key[fields.index(name)] in drawn]
    if not distributions:
        return Drawn((table(board, ranked, values),), problems=(*problems, "There are no finite values."))
    keys = [key for key, _ in distributions]
    names = pd.DataFrame({place: compute.named(opened, keys, fields, by.get(place, "")) for place in MOST})
    names["panel"] = [str(index) for index in range(len(distributions))]
    parts = [replace(d, group=str(index)) for index, (_, d) in enumerate(distributions)]
    looks = run_looks(every_run(opened)) if by.get("color") == "run_id" else None
    caption = f"{source(where, f'{len(distributions)} distributions, {board.scope}')}\nAll panels share their axes."
    law = values["law"] if values["law"] in LAWS else LAWS[0]
    against = LAW_NAMES[law]
    bins = log2_histogram(parts)
    if len(bins):
        bins = bins[bins["low"] >= compute.lower_end(parts)[0]]
    points = points_of([against_law(part, law) for part in parts])
    figures = []
    for kind, frame, title in (("histogram", bins, LOG2), ("qq", points, f"Q–Q against {against}")):
        if frame.empty:
            continue
        if kind == "qq":
            frame = frame[frame["sample"].abs() <= LIMIT]
        frame = frame.rename(columns={"group": "panel"}).merge(names, on="panel").drop(columns="panel")
        frame = frame.rename(columns={"color": "group"})
        titles = (f"{against}, expected", "quantile, standardized")
        chart = charts.panels(frame, by, kind, values["values"], title, titles, looks)
        groups = style.groups_of(frame)
        height = 130 + style.legend_height(groups, "top") + names["rows"].nunique() * (charts.HIGH + 22)
        figures.append(Figure(f"{kind}_panels", chart, frame, caption, height=height))
    return Drawn((table(board, ranked, values), *figures), problems=tuple(problems))


def left_out(opened: Catalog, where: Filter, ids: list[str] | None) -> str:
    """What the histogram does not show of the values."""
    row = opened.moments(where if ids is None else Filter(), None, ids).iloc[0]
    odd = [f"{int(row[name]):,} {title}" for name, title in (("nans", "NaN"), ("infs", "infinite")) if row[name]]
    if row["zeros"]:
        share = row["zeros"] / row["numel"]
        odd.insert(0, f"{SHARE.quantity(share)} zeros" if share >= 1e-4 else f"{int(row['zeros']):,} zeros")
    return f"Not drawn: {listed(odd)}." if odd else ""


EXPLORE = Question(
    text="How are the values distributed?",
    title="Explore",
    icon=":material/query_stats:",
    help="Tensors, worst first; distributions and Q–Q plots of any selection; the same operands in each format",
    page="explore",
    view="explore",
    draw=draw,
    of=Of.BOARD,
    controls=(BY, OF_VALUES, AXIS, LAW, ROUNDED, *PANELS),
    takes={
        "tensor": partial(known_tensor, several=True),
        "delta": lambda opened: Range(),
        "after": lambda opened: Whole(0, 10**9, 0),
    },
    at_once=("tensor", "values", "axis"),
    narrow=_controls,
    within=within,
    as_used=lambda values: True,
    layout="binade.app.questions.explore.page",
)

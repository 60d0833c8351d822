"""Explore: the distribution of the selection's values, and the errors of formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.control import Control
from binade.app.figure import Chart, Column, Drawn, Figure, Item, Table, Text, source
from binade.app.formatting import big, evenly
from binade.app.params import TITLES, One, known_tensor
from binade.app.questions.question import Question
from binade.app.questions.shared import distribution_charts, distributions, format_charts
from binade.app.questions.shared.distributions import FINE_BIN, Distribution
from binade.app.questions.shared.labels import group_name, unique_labels
from binade.app.questions.shared.laws import LAWS, distance_to, fit, qq
from binade.app.questions.shared.runs import every_run, given_names, labels_of, run_looks
from binade.app.questions.shared.scope import scope_of, scoped
from binade.app.questions.shared.selection import Selection
from binade.app.report.section import ReportSelection, Section, slug
from binade.app.report.section import Table as ReportTable
from binade.data.catalog import Catalog, CatalogError
from binade.data.filter import INTEGER_FIELDS, Filter
from binade.data.store import TensorFileError
from binade.data.text import counted, one_line
from binade.quant.metrics import METRICS
from binade.quant.normal import VS_NORMAL, normal_sqnr

MAX_SELECTED = style.MAX_GROUPS
CHART = 360  # pixels, without the legend
GROUPINGS = ("quant_type", "recipe", "run_id", "layer_index", "module", "operation", "tensor_name", "iteration")
REPORTED_BY = ("quant_type", "recipe", "layer_type", "operation", "module", "tensor_name", "layer_index")
MAX_TYPES = 6  # quant types of which a report draws each tensor
AXES = {"log2": "log₂ magnitude", "linear": "linear"}
BY = Control(name="by", label="Compare by", param=One(GROUPINGS), titles=TITLES)
AXIS = Control(name="axis", label="Axis", param=One(tuple(AXES)), titles=AXES, row="charts")
LAW = Control(
    name="law", label="Q–Q against", param=One(LAWS), titles=distribution_charts.LAW_TITLES, row="charts"
)  # fmt: skip
COLUMNS = {
    "tensors": Column("Tensors", "localized", 70),
    "numel": Column("Values", "localized", 105),
    "sqnr_db": Column(
        width=105, help=f"{METRICS['sqnr_db'].definition}; the median over the operands that were quantized"
    ),
    "flush_to_zero": Column(width=105, help="The median over the operands that were quantized"),
    "saturated": Column(width=110, help="The median over the operands that were quantized"),
    "mean": Column("Mean", "%.3g", 100, help="Of all values of the group together"),
    "std": Column("Std", "%.3g", 100, help="Of all values of the group together"),
    "min": Column("Min", "%.3g", 100),
    "max": Column("Max", "%.3g", 100),
    "absmin": Column("Smallest |x| > 0", "%.2e", 125),
    "zeros": Column("Zeros", "localized", 95),
    "nans": Column("NaN", "localized", 55),
    "infs": Column("Inf", "localized", 55),
    "lost": Column("Lost", "localized", 60, help="Operands without an error, because they contain NaN or Inf"),
}


@dataclass(frozen=True)
class Groups:
    """found: the distributions; by: what they are grouped by; field: that field of the filter, if any; text: the
    source; not_kept: tensors without values; damaged: unreadable files, with the reason. Both are drawn from their
    sketches."""

    found: list[Distribution]
    by: str
    text: str
    of: int  # groups, of which `found` has those with the most values
    not_kept: tuple[str, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()
    field: str = ""

    @property
    def remarks(self) -> list[Text]:
        """What is not drawn, or is drawn from sketches."""
        found = []
        if self.of > MAX_SELECTED:
            most = f"the {MAX_SELECTED} with the most values"
            which = f"{MAX_SELECTED}, spread evenly," if self.field in INTEGER_FIELDS else most
            found.append(Text(f"{self.of} groups: {which} are drawn, since a chart has {MAX_SELECTED} colors."))
        if self.not_kept:
            names = "; ".join(self.not_kept)
            found.append(Text(f"The values of {names} were not kept: drawn from the sketch instead.", "problem"))
        if count := len(self.damaged):
            title = "A tensor file cannot be read" if count == 1 else f"{count} tensor files cannot be read"
            details = tuple(f"{label}: {one_line(reason)}" for label, reason in self.damaged)
            found.append(Text(f"{title}: drawn from the sketch instead.", "error", details))
        return found

    @property
    def subtitle(self) -> str:
        total = sum(d.total for d in self.found)
        return f"{big(total)} value{'s' * (total != 1)} · {self.text}"


def _controls(selection: Selection, values: dict[str, Any]) -> list[Control]:
    if not values["tensor"]:
        return [BY, AXIS, LAW]
    help = "Each selected tensor is shown separately. Clear the selection to compare groups"
    return [replace(BY, disabled=True, help=help), AXIS, LAW]


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened, tensors, by = selection.opened, list(values["tensor"]), values["by"]
    where = scoped(opened, selection.where, (by,))
    chosen = opened.rows_of(tensors[:MAX_SELECTED])
    ids = chosen["tensor_id"].tolist() or None
    groups = groups_of(opened, where, chosen, by)
    gone = [f"Tensor {name[:80]!r} is missing." for name in tensors if name not in set(chosen["tensor_id"])]
    lie = values_lie(opened, where, ids, groups, values["axis"], values["law"])
    columns = {"group": Column("Tensor" if ids else TITLES[by]), **COLUMNS}
    title = "**Statistics** · over the finite values"
    statistics = Table("Statistics, over the finite values", moments(opened, where, chosen, by), columns, title)
    items = (*groups.remarks, *lie.items, statistics, *_compared_formats(opened, where, ids))
    return Drawn(items, problems=(*gone, *lie.problems))


def _compared_formats(opened: Catalog, where: Filter, ids: list[str] | None) -> list[Item]:
    figures, operands = formats(opened, where, ids)
    if not figures:
        return [Text("No format comparison: only the operands of a GEMM are scored, and none is selected.")]
    heading = (
        f"**Error of each format** · {counted(operands, 'operand')}, "
        "each rounded along the axis that its GEMM contracts; bars are medians, lines the 10th to 90th percentile"
    )
    hint = (
        "SQNR alone does not show how a format fails. Read it together with the shares flushed to zero and saturated."
    )
    return [Text(heading, "heading"), *figures, Text(hint, "hint")]


def groups_of(opened: Catalog, where: Filter, chosen: pd.DataFrame, by: str) -> Groups:
    """The groups of the filter's tensors; of chosen ones, each by itself."""
    if not chosen.empty:
        return _exact(opened, chosen)
    found = distributions.distributions(opened, where, by)
    total, groups = opened.totals(where).tensors, len(found)
    if groups > MAX_SELECTED and by in INTEGER_FIELDS:  # they have an order, and often as many values each
        found = [*evenly(found, MAX_SELECTED)]
    elif groups > MAX_SELECTED:
        least = sorted(d.total for d in found)[-MAX_SELECTED]
        found = [d for d in found if d.total >= least][:MAX_SELECTED]
    text = f"{counted(total, 'tensor')} · {scope_of(opened, where)} · from sketches"
    return Groups([d for d in found if d.total], TITLES[by].lower(), text, groups, field=by)


def _exact(opened: Catalog, chosen: pd.DataFrame) -> Groups:
    """The chosen tensors' own values; their sketches where values were not kept or cannot be read."""
    labels = unique_labels(chosen, given_names(opened))
    found, not_kept, damaged = [], [], []
    for tensor_id, label in labels.items():
        row = chosen[chosen["tensor_id"] == tensor_id].iloc[0]
        try:
            found.append(distributions.distribution_of(label, opened.load(tensor_id), (row["mean"], row["std"])))
            continue
        except CatalogError:
            not_kept.append(label)
        except TensorFileError as error:
            damaged.append((label, str(error)))
        sketched = distributions.distributions(opened, Filter(), None, [tensor_id])
        found += [replace(d, group=label) for d in sketched]
    own = sum(d.exact for d in found)
    fine = sum(not d.exact and d.bin_width == FINE_BIN for d in found)
    parts = [f"{own} tensor{'s' * (own != 1)}, exact"] if own else []
    if fine:
        parts.append(f"{fine} too large to sort, exact to 1/128 of each value")
    if own + fine < len(found):
        parts.append(f"{len(found) - own - fine} from the sketch")
    kept = [d for d in found if d.total]
    return Groups(kept, "tensor", " · ".join(parts), len(found), tuple(not_kept), tuple(damaged))


def values_lie(opened: Catalog, where: Filter, ids: list[str] | None, shown: Groups, axis: str, law: str) -> Drawn:
    """Histogram, Q-Q plot and boxes. Each gets all groups, so that colors agree."""
    found = shown.found
    if not found:
        return Drawn(problems=("Nothing to draw: there are no finite values.",))
    note = left_out(opened, where, ids, axis) + _resolution(found, axis)
    caption = source(where, f"{shown.subtitle} ({_how(found)})")
    groups = [d.group for d in found]
    looks = run_looks(every_run(opened)) if shown.field == "run_id" else None
    height = CHART + style.legend_height(groups)
    figures: list[Figure] = []
    problems: list[str] = []
    chart: Chart
    table = distributions.linear_histogram(found) if axis == "linear" else distributions.log2_histogram(found)
    if table.empty:
        problems.append(f"No magnitudes to draw: all values are zero. {note}")
    else:
        words = f"{caption}\nShares are of all values of a group. {note}"
        chart = distribution_charts.histogram(table, shown.subtitle, shown.by, groups, axis == "linear", looks)
        figures.append(Figure("histogram", chart, table, words, note=note, height=height, group="lie", by=shown.field))
    points = qq(found, law)
    if points.empty:
        problems.append("No Q–Q plot: all values are equal.")
    else:
        words = f"{caption}\nQuantiles against a fitted {distribution_charts.LAW_TITLES[law]}."
        chart = distribution_charts.qq(points, shown.subtitle, shown.by, groups, law, looks)
        note = _law_note(found, law)
        figures.append(Figure("qq", chart, points, words, note=note, height=height, group="lie", by=shown.field))
    log2 = axis != "linear"
    spread = distributions.boxes([distributions.magnitudes(d) for d in found] if log2 else found)
    if not spread.empty:
        marks = "box: quartiles · line: 0.1% to 99.9% · dots: extremes"
        chart = distribution_charts.boxes(spread, f"{marks} · {shown.subtitle}", shown.by, groups, log2, looks)
        figures.append(
            Figure("boxes", chart, spread, f"{caption}\n{marks}.", height=distribution_charts.boxes_height(spread))
        )
    return Drawn(tuple(figures), problems=tuple(problems))


def _how(found: list[Distribution]) -> str:
    """A description of whether the values are exact."""
    exact = sum(d.exact for d in found)
    fine = any(not d.exact and d.bin_width == FINE_BIN for d in found)
    bins = "bins of 1/128 binade" if fine else "the binade sketch, bins of 1/8 binade"
    return "exact" if exact == len(found) else bins if not exact else f"partly exact, partly {bins}"


def _law_note(found: list[Distribution], law: str) -> str:
    """How to read a Q-Q plot, and the fitted law if there is one group."""
    reading = (
        "If the points lie on the dashed line, the values follow the fitted distribution. Points above it on the "
        "right: a heavier tail."
    )
    if len(found) != 1 or not (fitted := fit(found[0], law)):
        return reading
    return f"{reading} Fitted: {fitted.text}; Kolmogorov–Smirnov distance {distance_to(found[0], fitted):.3f}."


def left_out(opened: Catalog, where: Filter, ids: list[str] | None, axis: str) -> str:
    """What the charts do not show of the values."""
    row = opened.moments(where if ids is None else Filter(), None, ids).iloc[0]
    odd = [f"{int(row[name]):,} {title}" for name, title in (("nans", "NaN"), ("infs", "infinite")) if row[name]]
    also = f" Left out: {' and '.join(odd)}." if odd else ""
    if axis == "linear":
        return f"The histogram's axis leaves out 0.01% of the values, at its ends.{also}"
    if not row["zeros"]:
        return f"No value is zero.{also}"
    share = row["zeros"] / row["numel"]
    text = f"{share:.2%}" if share >= 1e-4 else f"{int(row['zeros']):,}"
    return f"Zeros have no magnitude and are not drawn: {text} of the values.{also}"


def _resolution(found: list[Distribution], axis: str) -> str:
    if axis != "linear" or all(d.exact for d in found):
        return ""
    return " Sketches count values in bins of 1/8 binade; within a bin, values are drawn as if spread evenly."


def moments(opened: Catalog, where: Filter, chosen: pd.DataFrame, by: str) -> pd.DataFrame:
    """`Catalog.moments` of the groups, or of each chosen tensor; `group` is its name."""
    if chosen.empty:
        table = opened.moments(where, by)
        names = labels_of(opened) if by == "run_id" else None
        return table.assign(group=table["group"].map(partial(group_name, names=names)))
    ids = chosen["tensor_id"].tolist()
    table = opened.moments(Filter(), "tensor_id", ids).set_index("group").loc[ids].reset_index()
    return table.assign(group=table["group"].map(unique_labels(chosen, given_names(opened))))


def formats(opened: Catalog, where: Filter, ids: list[str] | None) -> tuple[list[Figure], int]:
    """(the errors of each format on the operands among them, the number of operands)."""
    compared = opened.compared(where if ids is None else Filter(), ids)
    if compared.empty:
        return [], 0
    operands, table = int(compared["operands"][0]), compared.drop(columns="operands")
    table[VS_NORMAL] = table["sqnr_db"] - table["format"].map(normal_sqnr)
    what = f"medians over {counted(operands, 'operand')}, each counted once, from the index"
    words = source(where, what) + "".join(
        f"\n{METRICS[name].label}: {METRICS[name].definition}." for name, *_ in format_charts.ERROR_PANELS
    )
    height = format_charts.format_height(table)
    panels = [
        Figure(f"formats_{index}", panel, table, words, height=height, group="formats")
        for index, panel in enumerate(format_charts.format_panels(table))
    ]
    return panels, operands


def report(selection: ReportSelection) -> Iterator[Section]:
    opened, where = selection.opened, selection.where
    lie: list[Figure] = []
    boxes: list[Figure] = []
    problems: list[str] = []
    for by in selection.dividing((*REPORTED_BY, "iteration")):
        drawn = _by_group(opened, where, by)
        problems += [f"By {TITLES[by].lower()}: {problem}" for problem in drawn.problems]
        for figure in drawn.figures:
            (boxes if figure.name == "boxes" else lie).append(replace(figure, name=f"{figure.name}_{by}"))
    others = {"quant_type_linear": _by_group(opened, where, "quant_type", "linear")}
    types = selection.values_of("quant_type")
    for name in types[:MAX_TYPES] if len(types) > 1 else ():
        others[f"of_{slug(name)}"] = _by_group(opened, replace(where, quant_type=(name,)), "tensor_name")
    histograms = {suffix: drawn.get("histogram") for suffix, drawn in others.items()}
    lie += [replace(figure, name=f"histogram_{suffix}") for suffix, figure in histograms.items() if figure]
    yield Section("distributions", figures=lie, problems=problems)
    frames = {by: moments(opened, where, opened.rows_of([]), by) for by in selection.dividing(REPORTED_BY)}
    tables = [ReportTable(f"statistics_{by}", f"By {TITLES[by].lower()}", frame) for by, frame in frames.items()]
    yield Section("statistics", figures=boxes, tables=tables)
    panels, operands = formats(opened, where, None)
    if not panels:
        problem = "No format comparison: only the operands of a GEMM are scored, and none is selected."
        yield Section("comparisons", problems=[problem])
        return
    metrics = [metric for metric, *_ in format_charts.ERROR_PANELS]
    named = [replace(panel, name=f"formats_{metric}") for panel, metric in zip(panels, metrics, strict=True)]
    table = ReportTable("formats", "What each format does", panels[0].table, f"{operands:,} operands.")
    yield Section("comparisons", figures=named, tables=[table])


def _by_group(opened: Catalog, where: Filter, by: str, axis: str = "log2") -> Drawn:
    return values_lie(opened, where, None, groups_of(opened, where, opened.rows_of([]), by), axis, "normal")


DISTRIBUTION = Question(
    text="How are the values distributed?",
    title="Explore",
    icon=":material/query_stats:",
    help="Histograms, Q–Q plots, boxes and statistics of any selection",
    page="compare",
    view="explore",
    draw=draw,
    controls=(BY, AXIS, LAW),
    takes={"tensor": partial(known_tensor, several=True)},
    narrow=_controls,
    layout="binade.app.questions.distribution.page",
    report=report,
)

"""What does a format break? Every operand of every GEMM, by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from binade.app.draw import style
from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Drawn, Figure, Table, Text, source
from binade.app.draw.formatting import evenly
from binade.app.measures.effect import PARITY, parity_of
from binade.app.measures.map_measure import ITERATION, LAYER, CellQuery, MapMeasure
from binade.app.measures.registry import MAP_MEASURES
from binade.app.measures.values import ERRORS, computed
from binade.app.questions.map import charts, compute
from binade.app.questions.map.compute import MapRow
from binade.app.questions.map.standing_out import Headline, broken, cause_of, headline
from binade.app.questions.question import Question
from binade.app.questions.shared.operands import OTHER, operand
from binade.app.questions.shared.rounded import NOT_RECORDED
from binade.app.questions.shared.runs import every_run
from binade.app.questions.shared.scope import OF_RUNS, Scope, scope_of, scoped
from binade.app.questions.shared.selection import Selection
from binade.app.questions.shared.unscaled import with_scale
from binade.app.view.budget import BudgetError
from binade.app.view.params import AnyText, One, in_format
from binade.data.compare import evidence
from binade.data.compare.evidence import Measure, Sentence
from binade.data.index.catalog import USED, Catalog
from binade.data.index.run_table import OF_MODEL
from binade.data.words.filter import Filter
from binade.data.words.names import name_of
from binade.quant.normal import VS_NORMAL, normal_sqnr
from binade.quant.specs import Spec

MOST_COLUMNS = 240
ACROSS = Control(
    name="across", label="Columns", param=One((LAYER, ITERATION)), titles={LAYER: "layers", ITERATION: "iterations"},
    row="map",
)  # fmt: skip
EXPERTS = Control(
    name="experts", label="Experts of", param=lambda opened: One(("none", *_routed(opened))), widget="list", row="map",
    titles={"none": "experts together"},
)  # fmt: skip


def _routed(opened: Catalog, where: Filter | None = None) -> list[str]:
    """The modules that have experts."""
    experts = opened.distinct(("module", "expert"), where).dropna()
    return sorted(set(experts["module"].astype(str)))


@dataclass(frozen=True)
class Map:
    """
    color       what it shows; measure: the same as its values are written
    query       of the cells: the run and the iterations that are shown, the format, and what the columns are
    table       `compute.cells` with row, shade and label, of the difference where the scope has another format or run
    rows        in order
    against     what it is compared with, in words; "" for none
    left_out    which iterations are shown, if these are too many for columns; what was computed, not recorded
    """

    color: MapMeasure
    measure: Measure
    query: CellQuery
    table: pd.DataFrame
    rows: list[MapRow]
    against: str = ""
    left_out: str = ""

    @property
    def where(self) -> Filter:
        return self.query.where

    @property
    def fmt(self) -> str:
        return self.query.format

    @property
    def across(self) -> str:
        return self.query.across

    @property
    def cells(self) -> pd.Series:
        """The names of the cells, as in the address."""
        return self.table["row"] + "/" + self.table[self.across].astype(str)

    def operand_of(self, cell: str) -> dict[str, Any]:
        """The worst tensor of a cell and its GEMM, as parameters of a page on one tensor."""
        named = self.table.loc[self.cells == cell, ["tensor_id", "gemm"]]
        return operand(None, None) if named.empty else operand(*named.iloc[0])

    def chosen(self, name: str) -> pd.Series | None:
        """The cell of this name."""
        named = self.table[self.cells == name]
        return named.iloc[0] if len(named) else None

    @property
    def title(self) -> str:
        fmt = f" {in_format(self.fmt)}" if self.fmt else ""
        return f"{self.measure.label}{fmt}" + (f", difference to {self.against}" if self.against else "")

    def formats(self, opened: Catalog) -> list[str]:
        """The formats that its cells are in."""
        return opened.formats_used(self.where) if self.fmt == USED else [self.fmt] if self.fmt else []

    @property
    def of(self) -> str:
        """What its cells are of."""
        return self.color.of

    @cached_property
    def kinds(self) -> pd.DataFrame:
        """`compute.kinds`, worst first."""
        kinds = compute.kinds(self.table)
        return kinds.sort_values("value", ascending=self.measure.low_is_bad, ignore_index=True)

    @cached_property
    def worst_first(self) -> pd.DataFrame:
        """The cells, worst first, with place (their name) and rank from 1."""
        word = "L" if self.across == LAYER else "iteration "
        names = {row.key: charts.label(row) for row in self.rows}
        bad = self.table["value"].astype(float) * (-1 if self.measure.low_is_bad else 1)
        table = self.table.assign(bad=bad).sort_values(
            ["shade", "bad"], ascending=False, na_position="last", kind="stable", ignore_index=True
        ).drop(columns="bad")  # fmt: skip
        place = word + table[self.across].astype(str) + " " + table["row"].map(names) + ", " + table["gemm"]
        return table.assign(place=place, rank=range(1, len(table) + 1))


def within(opened: Catalog, where: Filter, values: Mapping[str, Any]) -> Filter:
    every = values["across"] == ITERATION or MAP_MEASURES[values["metric"]].history
    apart = (ITERATION,) if every else ()
    return scoped(opened, where, apart, scored=True)


def map_of(opened: Catalog, where: Filter, values: dict[str, Any]) -> Map | str:
    """The map of these parameters, or the reason why there is none. where: of `within`."""
    color, across = MAP_MEASURES[values["metric"]], values["across"]
    measure, fmt = color.measure, values["format"] if color.of_format else ""
    if color.of_format and not fmt:
        return color.nothing(opened, where, "")
    if across not in color.across:
        by = "iteration" if across == ITERATION else "layer"
        return f"The {measure.inline} {color.not_across}, not shown by {by}."
    left_out, columns = "", tuple[int, ...]()
    if across == ITERATION:
        recorded = sorted(opened.distinct((ITERATION,), where)[ITERATION].dropna().astype(int))
        if len(recorded) > MOST_COLUMNS:
            columns = tuple(evenly(recorded, MOST_COLUMNS))
            where = where if color.history else replace(where, iteration=columns)
            left_out = f"{MOST_COLUMNS} of {len(recorded):,} recorded iterations are shown, spread evenly."
    query = CellQuery(opened, where, fmt, across, values["experts"] if values["experts"] != "none" else "")
    cells = _cells(color, query)
    if isinstance(cells, str):
        return cells
    table, said = cells
    table = table[table[ITERATION].isin(columns)].reset_index(drop=True) if columns else table
    if table.empty:
        return color.nothing(opened, where, fmt)
    if table["value"].isna().all():
        if table["broken"].any():
            return str(broken(table, compute.rows_of(table), across, color.of))
        return f"{measure.label} is not known for any of these tensors: choose another metric, such as absmax."
    against = values["versus"] or ""
    if against:
        other = _other(query, color, against)
        if isinstance(other, str):
            return other
        other_query, against = other
        reference = _cells(color, other_query)
        if isinstance(reference, str):
            return reference
        table = compute.difference(table, reference[0], across, measure)
        said = " ".join(dict.fromkeys(filter(None, (said, reference[1]))))
        if table.empty and fmt == USED == other_query.format:
            scored = ", ".join(opened.formats_used(where))
            return f"The run {against} rounds none of these operands. Choose a format to compare both in: {scored}."
        if table.empty:
            return f"{measure.label} is not known for {against} in any of these cells."
    table = compute.with_rows(table)
    table = table.assign(shade=charts.shade(table["value"], color, bool(against)))
    signed = replace(measure.with_sign(), log=False) if against else measure
    label = table["value"].map(signed.quantity)
    table = table.assign(label=label.mask(table["value"].isna() & (table["broken"] > 0), "NaN or Inf"))
    return Map(color, signed, query, table, compute.rows_of(table), against, f"{left_out} {said}".strip())


def _cells(color: MapMeasure, query: CellQuery) -> tuple[pd.DataFrame, str] | str:
    """(the cells as recorded, or else computed from the values; what was computed), or why there are none."""
    metric, fmt = color.measure.key, query.format
    table = compute.cells(metric, query)
    if color is PARITY and not table.empty:
        _, run_parity = parity_of(query.opened, query.where)
        assert run_parity
        return table, f"Rollout {run_parity[1].rollout}, training {run_parity[1].training}: {run_parity[0]}."
    if not table.empty or metric not in ERRORS or fmt == USED:
        return table, ""
    if problem := NOT_RECORDED.problem(Spec.of(fmt)):
        return table, problem
    try:
        table, tensors = computed(metric, query)
    except BudgetError as error:
        return f"Nothing was scored in {fmt} when it was recorded. {error} Or record with --scores {fmt}."
    return table, f"Not scored in {fmt} when recorded: computed from {tensors:,} tensors on disk."


def _rounds(opened: Catalog, where: Filter, values: Mapping[str, Any]) -> bool:
    """Whether a map is computed from the values on disk."""
    if values["metric"] not in ERRORS:
        return False
    formats = {values["format"], values["versus"]} - {None, *opened.runs()["run_id"]}
    return not formats <= {*opened.scored_formats(where)}


def _other(query: CellQuery, color: MapMeasure, against: str) -> tuple[CellQuery, str] | str:
    """(the query and the name of what the map is compared with), or why that is not possible. What the filter says of
    the run itself, such as its recipe, does not apply to another run."""
    runs = every_run(query.opened).set_index("run_id")["label"]
    if against in runs.index:
        where = replace(query.where.without(*OF_MODEL, *OF_RUNS), run_id=(against,))
        return replace(query, where=where), str(runs[against])
    if not color.of_format:
        return f"{color.measure.label} does not depend on a format: compare with another run."
    other = str(Spec.of(against))
    return replace(query, format=other), other


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened = selection.opened
    map_ = map_of(opened, selection.where, values)
    if isinstance(map_, str):
        return Drawn(problems=(map_,))
    measure, scope = map_.measure, scope_of(opened, map_.where)
    title = style.title(map_.title, f"{scope} · {len(map_.table):,} cells")
    several = map_.color.several and f"; of several tensors in a cell, {map_.color.several}"
    definition = f"{measure.label}: {measure.definition}{several}."
    if measure.key in ERRORS:
        definition += " A tensor that two GEMMs take is an operand of each, and has a cell in each."
    figure = Figure(
        "map",
        charts.atlas(map_.table, map_.rows, map_.across, map_.color, measure, bool(map_.against), title),
        map_.table.drop(columns=["shade"]),
        f"{source(map_.where, f'{len(map_.table):,} cells')}\n{definition}",
        note=definition,
        height=charts.height(map_.rows),
    )
    answer = verdict(opened, map_)
    tables = places(map_), Table("kinds", map_.kinds, columns_of(map_))
    left_out = (map_.left_out,) * bool(map_.left_out)
    extra = extra_of(map_, map_.chosen(values["cell"] or ""))
    items = (figure, *([extra] if extra else []), *tables)
    return Drawn(items, answer, left_out, used_by(map_))


def extra_of(map_: Map, cell: pd.Series | None) -> Figure | Table | Text | None:
    """What the measure draws below the map. cell: the one that is selected."""
    return map_.color.extra(map_.query, cell) if map_.color.extra and not map_.against else None


def used_by(map_: Map) -> Scope:
    """Each cell is an operand of a GEMM: a tensor that two GEMMs take has two."""
    alone = bool((map_.table["tensors"] == 1).all()) and not map_.color.interval
    return Scope(map_.where, ((len(map_.table), map_.of if alone else "cell"),))


def places(map_: Map) -> Table:
    """Every cell, worst first; a row opens its worst tensor."""
    table = map_.worst_first
    columns = {
        "rank": Column("Rank"),
        "place": Column(map_.of.capitalize()),
        "label": Column(map_.measure.label, align="right"),
        "tensors": Column("Tensors" if map_.color.several else "Sequences", "d"),
    }
    frame = table[["rank", "place", "label", "value", "low", "high", "tensors", "tensor_id"]]
    return Table("places", frame, columns, height=min(38 + 35 * len(table), 420), choose="tensor_id")


def columns_of(map_: Map) -> dict[str, Column]:
    def text(name: str) -> Callable[[pd.Series], str]:
        return lambda row: map_.measure.quantity(row[name])

    titles = (("value", f"{map_.measure.label}, median"), ("low", "10%"), ("high", "90%"))
    columns = {name: Column(title, text=text(name), align="right") for name, title in titles}
    return {"kind": Column(map_.of.capitalize())} | columns | {"tensors": Column("Cells", "d")}


def headline_of(opened: Catalog, map_: Map) -> Headline | None:
    """What a map of SQNR says of the cells that do not behave as normal values do; None for other maps."""
    if map_.measure.key not in ("sqnr_db", VS_NORMAL) or not map_.fmt or map_.against:
        return None
    table = against_normal(opened, map_)

    def cause(cell: pd.Series) -> Sentence:
        score = score_of(scores_of(opened, cell.to_frame().T), cell, map_.fmt)
        return Sentence() if score is None else cause_of(score)

    return headline(table, map_.rows, map_.across, map_.fmt, map_.formats(opened), cause)


def scores_of(opened: Catalog, cells: pd.DataFrame) -> pd.DataFrame:
    """The scores of the tensors of some cells."""
    scores = opened.scores_of(cells["tensor_id"].tolist())
    return scores.assign(gemm=scores["gemm"].fillna(OTHER))


def score_of(scores: pd.DataFrame, cell: pd.Series, fmt: str) -> pd.Series | None:
    """The score of a cell in a format, or USED."""
    in_gemm = scores[(scores["tensor_id"] == cell["tensor_id"]) & (scores["gemm"] == cell["gemm"])]
    shown = in_gemm[in_gemm["used"]] if fmt == USED else in_gemm[in_gemm["format"] == fmt]
    return shown.iloc[0] if len(shown) else None


def against_normal(opened: Catalog, map_: Map) -> pd.DataFrame:
    """The cells of a map of SQNR, with their SQNR minus that of normal values."""
    if map_.measure.key == VS_NORMAL:
        return map_.table
    if map_.fmt == USED:
        return compute.with_rows(compute.cells(VS_NORMAL, map_.query))
    return map_.table.assign(value=map_.table["value"].astype(float) - normal_sqnr(map_.fmt))


def verdict(opened: Catalog, map_: Map) -> Sentence:
    """What the format breaks: of a map of SQNR the cells that stand out, of any other the kinds of operands with the
    lowest and highest medians over layers; then the operands that have NaN or Inf in place of an error. All of them
    were measured: nothing is inferred."""
    return evidence.together(_verdict(opened, map_), broken(map_.table, map_.rows, map_.across, map_.of))


def _verdict(opened: Catalog, map_: Map) -> Sentence:
    measure, of = map_.measure, "layers" if map_.across == LAYER else "iterations"
    said = headline_of(opened, map_)
    if said is None:
        items = [(str(row["kind"]), evidence.spread(measure, row, of)) for row in map_.kinds.to_dict("records")]
        named = evidence.extreme(items, f"median {map_.title}", lowest=measure.low_is_bad)
        return evidence.together(named, _trends(map_))
    sentence = said.sentence
    scaled = None if map_.fmt == USED else with_scale(map_.fmt)
    if scaled and str(scaled) in opened.scored_formats(map_.where) and len(map_.kinds):
        worst = map_.kinds.iloc[0]
        query = replace(map_.query, format=str(scaled), expanded="")
        same = compute.kinds(compute.cells(measure.key, query))
        same = same[same["kind"] == worst["kind"]]
        if len(same):
            text = "With a tensor scale, {spec}, {kind} has {value}{than}."
            than = " against normal values" * (measure.key == VS_NORMAL)
            value = evidence.spread(measure, same.to_dict("records")[0], of)
            added = evidence.say(text, spec=str(scaled), kind=str(worst["kind"]), value=value, than=than)
            sentence = evidence.together(sentence, added)
    return evidence.together(sentence, _trends(map_))


def _trends(map_: Map) -> Sentence:
    """Which kinds of operands have a trend over the iterations that are shown, if these are enough to say so."""
    known = map_.table.dropna(subset=["value"])
    if map_.across == LAYER or known[ITERATION].nunique() < evidence.FEWEST:
        return Sentence()
    items = []
    for (product, tensor), part in known.groupby(["product", "tensor"], sort=False):
        medians = part.groupby(ITERATION)["value"].median()
        slope = evidence.trend(map_.measure, medians.index, medians, "iterations")
        items.append((name_of(None, str(product), str(tensor)), slope))
    return evidence.trends(items, f"The {map_.title}", "over iterations", "kinds of tensors")


def _controls(selection: Selection, values: dict[str, Any]) -> Iterator[Control]:
    yield ACROSS
    if routed := _routed(selection.opened, scoped(selection.opened, selection.where)):
        titles = {**EXPERTS.titles, **{module: f"each expert of {module}" for module in routed}}
        yield replace(EXPERTS, options=("none", *routed), titles=titles)


MAP = Question(
    text="What does a format break?",
    title="Map",
    icon=":material/grid_on:",
    help="Every operand of every GEMM by layer, in any metric, format and iteration",
    page="map",
    view="map",
    draw=draw,
    controls=(ACROSS, EXPERTS),
    narrow=_controls,
    as_used=lambda values: MAP_MEASURES[values["metric"]].as_used,
    within=within,
    scoped=("metric", "format", "versus"),
    takes={"cell": lambda opened: AnyText()},  # what is drawn below the map may be of one
    selects={"cell": lambda opened: AnyText()},
    rounds=_rounds,
    of_runs=True,
    layout="binade.app.questions.map.page",
)

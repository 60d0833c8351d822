"""What does a format break? Every operand of every GEMM, by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.budget import BudgetError
from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Table, source
from binade.app.formatting import evenly
from binade.app.params import AnyText, One, in_format
from binade.app.questions.map import charts, compute
from binade.app.questions.map.compute import EFFECT, ITERATION, LAYER, PARITY, RESULT, MapRow
from binade.app.questions.map.standing_out import Headline, broken, cause_of, headline
from binade.app.questions.question import Question
from binade.app.questions.shared import board_charts
from binade.app.questions.shared.operands import OTHER, operand
from binade.app.questions.shared.rounded import NOT_RECORDED
from binade.app.questions.shared.runs import every_run
from binade.app.questions.shared.scope import OF_RUNS, Used, scope_of, scoped
from binade.app.questions.shared.selection import Selection
from binade.app.questions.shared.unscaled import with_scale
from binade.app.style import MEASURES
from binade.data import evidence
from binade.data.catalog import USED, Catalog
from binade.data.evidence import Measure, Sentence
from binade.data.filter import Filter
from binade.data.run_table import OF_MODEL
from binade.data.text import counted
from binade.quant.normal import VS_NORMAL, normal_sqnr
from binade.quant.specs import Spec

MOST_COLUMNS = 240
OF_FORMAT = (*compute.ERRORS, EFFECT, compute.SPREAD)
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
    where       the run and the iterations that are shown
    measure     the metric; fmt: the format, "" if the metric does not depend on one
    across      what the columns are: layer_index or iteration
    table       `compute.cells` with row, shade and label, of the difference where the scope has another format or run
    rows        in order
    against     what it is compared with, in words; "" for none
    experts     the module whose experts have rows of their own, or ""
    left_out    which iterations are shown, if these are too many for columns; what was computed, not recorded
    """

    where: Filter
    measure: Measure
    fmt: str
    across: str
    table: pd.DataFrame
    rows: list[MapRow]
    against: str = ""
    experts: str = ""
    left_out: str = ""

    @property
    def cells(self) -> pd.Series:
        """The names of the cells, as in the address."""
        return self.table["row"] + "/" + self.table[self.across].astype(str)

    def operand_of(self, cell: str) -> dict[str, Any]:
        """The worst tensor of a cell and its GEMM, as parameters of a page on one tensor."""
        named = self.table.loc[self.cells == cell, ["tensor_id", "gemm"]]
        return operand(None, None) if named.empty else operand(*named.iloc[0])

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
        return compute.of(self.measure.key)

    @property
    def diverging(self) -> bool:
        """Whether colors go from better to worse than 0."""
        return bool(self.against) or self.measure.key in style.AGAINST_ZERO

    @cached_property
    def kinds(self) -> pd.DataFrame:
        """`compute.kinds`, worst first."""
        kinds = compute.kinds(self.table)
        return kinds.sort_values("value", ascending=self.measure.low_is_bad, ignore_index=True)

    @cached_property
    def worst_first(self) -> pd.DataFrame:
        """The cells, worst first, with place (their name), rank from 1, and operation (their GEMM)."""
        word = "L" if self.across == LAYER else "iteration "
        names = {row.key: charts.label(row) for row in self.rows}
        bad = self.table["value"].astype(float) * (-1 if self.measure.low_is_bad else 1)
        table = self.table.assign(bad=bad).sort_values(
            ["shade", "bad"], ascending=False, na_position="last", kind="stable", ignore_index=True
        ).drop(columns="bad")  # fmt: skip
        place = word + table[self.across].astype(str) + " " + table["row"].map(names) + ", " + table["gemm"]
        operation = table["gemm"].where(table["gemm"].isin(("forward", OTHER)), "backward")
        return table.assign(place=place, operation=operation, rank=range(1, len(table) + 1))


def within(opened: Catalog, where: Filter, values: Mapping[str, Any]) -> Filter:
    apart = (ITERATION,) if values["across"] == ITERATION else ()
    return scoped(opened, where, apart, scored=True)


def map_of(opened: Catalog, where: Filter, values: dict[str, Any]) -> Map | str:
    """The map of these parameters, or the reason why there is none. where: of `within`."""
    metric, across = values["metric"], values["across"]
    measure, fmt = MEASURES[metric], values["format"] if values["metric"] in OF_FORMAT else ""
    if metric in OF_FORMAT and not fmt:
        return "No operand is scored in any format. Choose a statistic of the values, such as absmax, as metric."
    if metric in (EFFECT, PARITY) and across == ITERATION:
        return f"The {measure.inline} is that of one set of weights, not shown by iteration."
    left_out = ""
    if across == ITERATION:
        recorded = sorted(opened.distinct((ITERATION,), where)[ITERATION].dropna().astype(int))
        if len(recorded) > MOST_COLUMNS:
            where = replace(where, iteration=tuple(evenly(recorded, MOST_COLUMNS)))
            left_out = f"{MOST_COLUMNS} of {len(recorded):,} recorded iterations are shown, spread evenly."
    experts = values["experts"] if values["experts"] != "none" else ""
    cells = _cells(opened, where, fmt, metric, across, experts)
    if isinstance(cells, str):
        return cells
    table, said = cells
    if table.empty:
        return _nothing(opened, where, metric, fmt)
    if table["value"].isna().all():
        if table["broken"].any():
            return str(broken(table, compute.rows_of(table), across, compute.of(metric)))
        return f"{measure.label} is not known for any of these tensors: choose another metric, such as absmax."
    against = values["versus"] or ""
    if against:
        other = _other(opened, where, fmt, metric, against)
        if isinstance(other, str):
            return other
        other_where, other_fmt, against = other
        reference = _cells(opened, other_where, other_fmt, metric, across, experts)
        if isinstance(reference, str):
            return reference
        table = compute.difference(table, reference[0], across, measure)
        said = " ".join(dict.fromkeys(filter(None, (said, reference[1]))))
        if table.empty and fmt == USED == other_fmt:
            scored = ", ".join(opened.formats_used(where))
            return f"The run {against} rounds none of these operands. Choose a format to compare both in: {scored}."
        if table.empty:
            return f"{measure.label} is not known for {against} in any of these cells."
    table = compute.with_rows(table)
    table = table.assign(shade=charts.shade(table["value"], measure, bool(against) or metric in style.AGAINST_ZERO))
    signed = replace(measure.with_sign(), log=False) if against else measure
    label = table["value"].map(signed.quantity)
    table = table.assign(label=label.mask(table["value"].isna() & (table["broken"] > 0), "NaN or Inf"))
    return Map(
        where, signed, fmt, across, table, compute.rows_of(table), against, experts, f"{left_out} {said}".strip()
    )


def _cells(
    opened: Catalog, where: Filter, fmt: str, metric: str, across: str, experts: str
) -> tuple[pd.DataFrame, str] | str:
    """(the cells as recorded, or else computed from the values; what was computed), or why there are none."""
    table = compute.cells(opened, where, fmt, metric, across, experts)
    if metric == PARITY and not table.empty:
        _, run_parity = compute.parity_of(opened, where)
        assert run_parity
        return table, f"Rollout {run_parity[1].rollout}, training {run_parity[1].training}: {run_parity[0]}."
    if not table.empty or metric not in compute.ERRORS or fmt == USED:
        return table, ""
    if problem := NOT_RECORDED.problem(Spec.of(fmt)):
        return table, problem
    try:
        table, tensors = compute.computed(opened, where, fmt, metric, across, experts)
    except BudgetError as error:
        return f"Nothing was scored in {fmt} when it was recorded. {error} Or record with --scores {fmt}."
    return table, f"Not scored in {fmt} when recorded: computed from {tensors:,} tensors on disk."


def _rounds(opened: Catalog, where: Filter, values: Mapping[str, Any]) -> bool:
    """Whether a map is computed from the values on disk."""
    if values["metric"] not in compute.ERRORS:
        return False
    formats = {values["format"], values["versus"]} - {None, *opened.runs()["run_id"]}
    return not formats <= {*opened.scored_formats(where)}


def _other(opened: Catalog, where: Filter, fmt: str, metric: str, against: str) -> tuple[Filter, str, str] | str:
    """(the filter, the format and the name of what the map is compared with), or why that is not possible. What the
    filter says of the run itself, such as its recipe, does not apply to another run."""
    runs = every_run(opened).set_index("run_id")["label"]
    if against in runs.index:
        return replace(where.without(*OF_MODEL, *OF_RUNS), run_id=(against,)), fmt, str(runs[against])
    if metric not in OF_FORMAT:
        return f"{MEASURES[metric].label} does not depend on a format: compare with another run."
    other = str(Spec.of(against))
    return where, other, other


def _nothing(opened: Catalog, where: Filter, metric: str, fmt: str) -> str:
    """Why a map is empty, and what to do."""
    if metric == compute.TENSOR_SCALE:
        return "No operand was rounded with one scale for the whole tensor: choose a run of a recipe that does so."
    if metric == RESULT:
        return (
            "No result of a quantized GEMM was measured: choose a quantized run recorded with “result” under Also "
            "measured (--measures result)."
        )
    if metric in OF_FORMAT and metric != compute.SPREAD and fmt == USED:
        return _nothing_used(opened, where)
    if metric == compute.SPREAD:
        return (
            f"No block scales were measured {in_format(fmt)}: choose a format with block scales, and a run recorded "
            "with “blocks” under Also measured (--measures blocks)."
        )
    if metric == EFFECT:
        return (
            f"No effect was measured in {fmt} for a model with these weights: binade measure --by site --formats {fmt}."
        )
    if metric == PARITY:
        return (
            "No parity of single products was measured for a model with these weights: binade parity --rollout mxfp4 "
            "--by site."
        )
    formats = ", ".join(opened.scored_formats(where))
    if metric in compute.ERRORS and formats:
        return f"The operands are scored in {formats}, not in {fmt}, and have no values on disk to round to it."
    operands = int(opened.operands(where)["tensors"].sum())
    if metric in compute.ERRORS and operands:
        return (
            f'The {operands:,} selected operands were recorded with scores=() or --scores "": none is scored. Choose a '
            "statistic of the values, such as absmax, as metric."
        )
    return f"The filter selects no operand of a GEMM: {where.sentence()}."


def _nothing_used(opened: Catalog, where: Filter) -> str:
    """Why no operand has an error as used, by the rows of the tensors: of one with NaN or Inf there is none."""
    condition, parameters = opened.condition(where)
    known = opened.ask(
        "SELECT count(*) AS rounded, count(*) FILTER (isnan(sqnr_db) AND nans + infs > 0) AS broken FROM tensor"
        f" WHERE format IS NOT NULL AND {condition}",
        parameters,
    )
    rounded, broken = (int(known[name].iloc[0]) for name in ("rounded", "broken"))
    if broken:
        return (
            f"{broken:,} of {counted(rounded, 'rounded operand')} hold NaN or Inf and have no error: choose an earlier "
            "iteration, or a statistic of the values, such as absmax, as metric."
        )
    if rounded:
        return f"{counted(rounded, 'operand')} were rounded, without a recorded error: choose a format instead."
    return "None of these operands was rounded when it was recorded: choose a format instead of “as used”."


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened = selection.opened
    map_ = map_of(opened, selection.where, values)
    if isinstance(map_, str):
        return Drawn(problems=(map_,))
    measure, scope = map_.measure, scope_of(opened, map_.where)
    title = style.title(map_.title, f"{scope} · {len(map_.table):,} cells")
    several = "" if measure.key in (EFFECT, PARITY) else "; of several tensors in a cell, their median"
    definition = f"{measure.label}: {measure.definition}{several}."
    if measure.key in compute.ERRORS:
        definition += " A tensor that two GEMMs take is an operand of each, and has a cell in each."
    figure = Figure(
        "map",
        charts.atlas(map_.table, map_.rows, map_.across, measure, map_.diverging, title, map_.of),
        map_.table.drop(columns=["shade"]),
        f"{source(map_.where, f'{len(map_.table):,} cells')}\n{definition}",
        note=definition,
        height=charts.height(map_.rows),
    )
    answer = verdict(opened, map_)
    tables = places(map_), Table("kinds", map_.kinds, columns_of(map_))
    left_out = (map_.left_out,) * bool(map_.left_out)
    return Drawn((figure, ranked(map_, scope), *tables), answer, left_out, used_by(map_))


def used_by(map_: Map) -> Used:
    """Each cell is an operand of a GEMM: a tensor that two GEMMs take has two."""
    alone = bool((map_.table["tensors"] == 1).all()) and map_.measure.key not in compute.OVER_SEQUENCES
    return Used(map_.where, ((len(map_.table), map_.of if alone else "cell"),))


def ranked(map_: Map, scope: str) -> Figure:
    """The worst cells as bars."""
    table = map_.worst_first
    few = f"{min(len(table), board_charts.BARS)} of {len(table):,} cells · {scope}"
    chart = board_charts.ranking(table, map_.measure, f"{map_.title}, worst first", few)
    return Figure(
        "ranking", chart, table.drop(columns=["shade"]), source(map_.where, f"{len(table):,} cells"),
        hint="Click a bar to open its worst tensor.", height=board_charts.ranking_height(table), choose="tensor_id",
    )  # fmt: skip


def places(map_: Map) -> Table:
    """Every cell, worst first; a row opens its worst tensor."""
    table = map_.worst_first
    columns = {
        "rank": Column("Rank"),
        "place": Column(map_.of.capitalize()),
        "label": Column(map_.measure.label, align="right"),
        "tensors": Column("Tensors", "d"),
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
        return compute.with_rows(compute.cells(opened, map_.where, USED, VS_NORMAL, map_.across, map_.experts))
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
        return evidence.extreme(items, f"median {map_.title}", lowest=measure.low_is_bad)
    sentence = said.sentence
    scaled = None if map_.fmt == USED else with_scale(map_.fmt)
    if scaled and str(scaled) in opened.scored_formats(map_.where) and len(map_.kinds):
        worst = map_.kinds.iloc[0]
        same = compute.kinds(compute.cells(opened, map_.where, str(scaled), measure.key, map_.across))
        same = same[same["kind"] == worst["kind"]]
        if len(same):
            text = "With a tensor scale, {spec}, {kind} has {value}{than}."
            than = " against normal values" * (measure.key == VS_NORMAL)
            value = evidence.spread(measure, same.to_dict("records")[0], of)
            added = evidence.say(text, spec=str(scaled), kind=str(worst["kind"]), value=value, than=than)
            sentence = evidence.together(sentence, added)
    return sentence


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
    as_used=lambda values: values["metric"] != EFFECT,
    within=within,
    scoped=("metric", "format", "versus"),
    selects={"cell": lambda opened: AnyText()},
    rounds=_rounds,
    of_runs=True,
    layout="binade.app.questions.map.page",
)

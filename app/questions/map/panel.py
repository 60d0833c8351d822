"""The panel beside the map: one operand of one layer, its values over the format's grid, and the same operand in the
other formats that it was scored in."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from binade.app.draw.style import MEASURES, power_of_two
from binade.app.measures.map_measure import LAYER
from binade.app.questions.map import charts
from binade.app.questions.map.compute import MapRow
from binade.app.questions.map.question import Map
from binade.app.questions.shared.distributions import (
    HALVES,
    bars,
    distributions,
    half_binades,
    magnitudes,
    whole_binades,
)
from binade.app.questions.shared.families import differences
from binade.app.questions.shared.operands import along, scores_in
from binade.app.questions.shared.rounded import Recorded, subject
from binade.app.questions.shared.selection import recorded_of
from binade.app.questions.why import compute as grid
from binade.app.questions.why.charts import REACH
from binade.app.view.budget import BudgetError
from binade.data.compare.evidence import SHARE
from binade.data.index.catalog import USED, Catalog, CatalogError
from binade.data.run.store import TensorFileError
from binade.data.words.filter import Filter
from binade.data.words.text import number_text
from binade.quant.specs import Spec

SAMPLE = 1 << 16  # values that the histogram shows


def panel(opened: Catalog, map_: Map, cell: pd.Series, fmt: str) -> dict[str, Any]:
    """What the panel shows of a cell, as JSON."""
    row = opened.rows_of([cell["tensor_id"]]).iloc[0]
    scored = scores_in(opened, str(cell["tensor_id"]), str(cell["gemm"]))
    used = scored[scored["used"]]
    if fmt == USED:
        fmt = "" if used.empty else str(used["format"].iloc[0])
    scores, used = (part[part["format"] == fmt] for part in (scored, used))
    word = "L" if map_.across == LAYER else "iteration "
    expert = "" if pd.isna(row["expert"]) else str(row["expert"])
    name = charts.label(MapRow(str(cell["gemm"]), str(cell["product"]), str(cell["tensor"]), expert))
    tensors = int(cell["tensors"])
    several = tensors > 1 and map_.color.several
    notes = [f"The tensor with the worst value of {tensors:,} in this cell."] if several else []
    recorded = recorded_of(opened, row, str(cell["gemm"]), None if used.empty else used.iloc[0])
    drawn, why = _values(opened, row, str(cell["gemm"]), Spec.of(fmt), recorded) if fmt else (None, "")
    return {
        "title": f"{word}{int(cell[map_.across])} {name}",
        "gemm": charts.TITLES.get(str(cell["gemm"]), ""),
        "note": " ".join(filter(None, (*notes, why))),
        "facts": _facts(map_, cell, row, scores),
        "values": drawn,
        "values_note": f"Values over the grid of {fmt}" if drawn else "",
        "formats": [_format(score, fmt) for score in scored.to_dict("records")],
        "formats_note": differences(map(Spec.of, scored["format"]), str(row["tensor_name"]).startswith("grad_")),
    }  # fmt: skip


def _format(score: dict[Any, Any], fmt: str) -> dict[str, Any]:
    sqnr, name = float(score["sqnr_db"]), str(score["format"])
    return {
        "name": name,
        "value": sqnr if math.isfinite(sqnr) else None,
        "text": MEASURES["sqnr_db"].quantity(sqnr),
        "own": name == fmt,
        "bits": f"{number_text(Spec.of(name).bits_per_value)} bits",
    }


def _facts(map_: Map, cell: pd.Series, row: pd.Series, scores: pd.DataFrame) -> list[list[str]]:
    name = f"{map_.measure.label}, difference" if map_.against else map_.measure.label
    name = f"{name}, median" if cell["tensors"] > 1 and map_.color.several == "their median" else name
    facts = {name: str(cell["label"])}
    for name in ("sqnr_db", "flushed_error_share", "saturated_error_share") if len(scores) else ():
        facts.setdefault(MEASURES[name].label, MEASURES[name].quantity(float(scores[name].iloc[0])))
    facts.setdefault("absmax", number_text(float(row["absmax"])))
    return [list(fact) for fact in facts.items()][:4]


def _values(
    opened: Catalog, row: pd.Series, gemm: str, spec: Spec, recorded: Recorded
) -> tuple[dict[str, Any] | None, str]:
    """(the magnitudes over their scale as shares by bin, and the edges of the format's grid, as log₂; why there are
    none). Without values, of a format that has no scale, from the sketch; of any other the scales are not known."""
    if problem := recorded.problem(spec):
        return None, problem
    try:
        matrix, dim = along(opened.load(row["tensor_id"]), row, gemm)
    except (CatalogError, TensorFileError):
        if spec.block:
            return None, f"No histogram: without values on disk, the scales in {spec} are not known."
        return _from_sketch(opened, row, spec)
    try:
        sample = subject(matrix, spec, dim, SAMPLE, recorded)
    except BudgetError as error:
        return None, str(error)
    table = grid.codebook_histogram(sample)
    what = "a sample of the values" if sample.every > 1 else "all values"
    drawn, why = _histogram(spec, table, what)
    return drawn, " ".join(filter(None, (recorded.before(spec), why)))


def _from_sketch(opened: Catalog, row: pd.Series, spec: Spec) -> tuple[dict[str, Any] | None, str]:
    whole = next(iter(distributions(opened, Filter(), None, [str(row["tensor_id"])])), None)
    if whole is None:
        return None, "No histogram: this tensor has neither values nor a sketch."
    nonzero = magnitudes(whole)
    table = bars(*half_binades(nonzero.low, nonzero.high, nonzero.count), total=whole.total)
    return _histogram(spec, table, "all values, from the sketch")


def _histogram(spec: Spec, table: pd.DataFrame, what: str) -> tuple[dict[str, Any] | None, str]:
    """table: `distributions.bars`. Each bar: low and high (log₂), and the share of all values per binade."""
    if table.empty:
        return None, "No histogram: there are no finite nonzero values."
    low_edge, high_edge = grid.zone_edges(spec.format.element, spec.rounding)
    low, high = min(float(table["low"].min()), low_edge - 2), max(float(table["high"].max()), high_edge + 1)
    low = max(low, low_edge - REACH)  # so that there is room for the grid
    if high - low > HALVES:
        table = whole_binades(table)
    left = table["low"] < low
    beyond = float((table["share"] * (table["high"] - table["low"]))[left].sum())
    shown = table.loc[~left, ["low", "high", "share"]].round(6)
    return {
        "low": low,
        "high": high,
        "bars": shown.to_numpy().tolist(),
        "flushed_below": low_edge,
        "saturated_above": high_edge,
        "ticks": [[tick, power_of_two(tick)] for tick in charts.ticks(low, high) if tick == round(tick)],
        "sample": what,
        "left": f"; {SHARE.quantity(beyond)} lie left of the axis" if beyond else "",
    }, ""

"""The page of metrics over the selection: ranked, by depth, in training, forward against backward."""

from __future__ import annotations

from typing import Any

from binade.app.figure import Drawn
from binade.app.formatting import first_formats
from binade.app.params import One, Param
from binade.app.questions.depth.question import depth
from binade.app.questions.directions.question import directions
from binade.app.questions.ranking.question import board
from binade.app.questions.shared import boards
from binade.app.questions.training.question import training
from binade.app.style import MEASURES
from binade.data.catalog import Catalog
from binade.data.filter import Filter

VIEWS = {
    "board": "Ranking",
    "depth": "By depth",
    "training": "In training",
    "directions": "Forward and backward",
}


def params(opened: Catalog) -> dict[str, Param]:
    return {"view": One(tuple(VIEWS)), "metric": One(boards.METRICS), "format": One(first_formats(opened))}


def drawn(opened: Catalog, where: Filter, values: dict[str, Any], tensors: list[str]) -> Drawn:
    measure, fmt = MEASURES[values["metric"]], values["format"] or ""
    if boards.is_error(measure.key) and not fmt:
        return Drawn(problems=("No operand of a GEMM is scored here: choose a statistic of the values.",))
    view = {"board": board, "depth": depth, "training": training, "directions": directions}[values["view"]]
    return view(opened, where, fmt, measure)

"""The page of metrics over the selection. Its views are the questions whose page is "worst"."""

from __future__ import annotations

from typing import Any

from binade.app.figure import Drawn
from binade.app.formatting import first_formats
from binade.app.params import One, Param
from binade.app.questions.registry import params_of, views_of
from binade.app.questions.shared import boards
from binade.app.questions.shared.selection import Board, Selection
from binade.app.style import MEASURES
from binade.data.catalog import Catalog

VIEWS = views_of("worst")


def params(opened: Catalog) -> dict[str, Param]:
    return {
        "view": One(tuple(VIEWS)),
        "metric": One(boards.METRICS),
        "format": One(first_formats(opened)),
        **params_of(VIEWS, opened),
    }


def board(selection: Selection, values: dict[str, Any]) -> Board | Drawn:
    """The board to rank, or the answer itself if there is nothing to rank."""
    measure, fmt = MEASURES[values["metric"]], values["format"] or ""
    ranked = Board(selection.opened, selection.where, format=fmt, measure=measure)
    needs_format = boards.of_format(measure.key) and "metric" not in VIEWS[values["view"]].ignores
    return ranked.nothing if needs_format and not fmt else ranked


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    found = board(selection, values)
    return found if isinstance(found, Drawn) else VIEWS[values["view"]].draw(found, values)

"""Addresses and pins of earlier versions. A part of the Map that is now one of its colors opens the Map with it, and a
pin of one of its charts shows the chart that has the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARTS: dict[str, dict[str, str]] = {
    "gemms": {"metric": "result_sqnr_db"},
}
"""The parameters of the Map, by the former part of it."""
CHARTS: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "gemms": {
        "results": ("map", {}),
        "results_against_operands": ("results_against_operands", {"metric": "result_gain_db"}),
    },
}
"""By the former part and its chart: the chart, and the parameters that differ from PARTS."""


def current(page: str, params: Mapping[str, list[str]], chart: str = "") -> tuple[dict[str, list[str]], str] | None:
    """(the parameters, the chart) of today; None if nothing has changed."""
    part = next(iter(params.get("view", ())), "")
    if page != "map" or part not in PARTS:
        return None
    chart, more = CHARTS[part].get(chart, (chart, {}))
    kept = {name: list(texts) for name, texts in params.items() if name != "view"}
    return kept | {name: [text] for name, text in (PARTS[part] | more).items()}, chart


def set_current(view: Any, chart: str = "") -> str:
    """Give a frozen view, while it is made, the parameters of today. Returns its chart of today."""
    found = current(view.page, view.params, chart)
    if found is None:
        return chart
    object.__setattr__(view, "params", found[0])
    return found[1]

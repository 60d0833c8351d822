"""Addresses and pins of earlier versions. A part of the Map that is now one of its colors opens the Map with it, and a
pin of one of its charts shows the chart that has the same numbers. Advise and Parity are in Runs › Cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARTS: dict[str, dict[str, str]] = {
    "gemms": {"metric": "result_sqnr_db"},
    "blocks": {"metric": "block_sqnr_db", "across": "iteration"},
    "channels": {"metric": "outlier_persistence"},
    "noise": {"metric": "gradient_to_noise"},
}
"""The parameters of the Map, by the former part of it."""
CHARTS: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "gemms": {
        "results": ("map", {}),
        "results_against_operands": ("results_against_operands", {"metric": "result_gain_db"}),
    },
    "blocks": {"block_lines": ("map", {})},
    "channels": {
        "channel_persistence": ("map", {}),
        "channel_persistence_lines": ("map", {"across": "iteration"}),
    },
    "noise": {
        "oscillating": ("map", {"metric": "oscillating", "across": "iteration"}),
        "edge_excess": ("map", {"metric": "edge_excess", "across": "iteration"}),
        "grad_weight_to_noise": ("map", {"across": "iteration"}),
        "grad_output_to_noise": ("map", {"across": "iteration"}),
    },
}
"""By the former part and its chart: the chart, and the parameters that differ from PARTS."""
COST = {("map", "advise"), ("runs", "parity")}
"""The pages and parts that became Runs › Cost."""
OF_ADVICE = ("budget", "by", "parts")  # parameters of the former Advise, which the page now asks for itself
OPTIONS = {"scale_exponent": "block_scale_exponent", "crest_db": "block_crest_db"}
"""The color, by the former choice of a statistic of blocks."""


def current(
    page: str, params: Mapping[str, list[str]], chart: str = ""
) -> tuple[str, dict[str, list[str]], str] | None:
    """(the page, the parameters, the chart) of today; None if nothing has changed."""
    part = next(iter(params.get("view", ())), "")
    if (page, part) in COST:
        renamed = {("measured" if name == "parity" else name): list(texts) for name, texts in params.items()}
        kept = {name: texts for name, texts in renamed.items() if page != "map" or name not in OF_ADVICE}
        return "runs", kept | {"view": ["cost"]}, {"parity_steps": "cost_steps"}.get(chart, chart and "cost")
    if page != "map" or part not in PARTS:
        return None
    chart, more = CHARTS[part].get(chart, (chart, {}))
    kept = {name: list(texts) for name, texts in params.items() if name not in ("view", "of_blocks")}
    if (quantity := next(iter(params.get("of_blocks", ())), "")) in OPTIONS:
        more = more | {"metric": OPTIONS[quantity]}
    return page, kept | {name: [text] for name, text in (PARTS[part] | more).items()}, chart


def set_current(view: Any, chart: str = "") -> str:
    """Give a frozen view, while it is made, the page and the parameters of today. Returns its chart of today."""
    found = current(view.page, view.params, chart)
    if found is None:
        return chart
    object.__setattr__(view, "page", found[0])
    object.__setattr__(view, "params", found[1])
    return found[2]

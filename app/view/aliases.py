"""Addresses and pins of earlier versions. A part of a page that is now a color of the Map opens the Map with it, and a
pin of one of its charts shows the chart that has the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARTS: dict[tuple[str, str], dict[str, str]] = {
    ("map", "gemms"): {"metric": "result_sqnr_db"},
    ("map", "blocks"): {"metric": "block_sqnr_db", "across": "iteration"},
    ("map", "channels"): {"metric": "outlier_persistence"},
    ("map", "noise"): {"metric": "gradient_to_noise"},
    ("tensor", "drift"): {"metric": "twin_bias"},
}
"""The parameters of the Map, by the page and the name of the former part."""
CHARTS: dict[tuple[str, str], dict[str, tuple[str, dict[str, str]]]] = {
    ("map", "gemms"): {
        "results": ("map", {}),
        "results_against_operands": ("results_against_operands", {"metric": "result_gain_db"}),
    },
    ("map", "blocks"): {"block_lines": ("map", {})},
    ("map", "channels"): {
        "channel_persistence": ("map", {}),
        "channel_persistence_lines": ("map", {"across": "iteration"}),
    },
    ("map", "noise"): {
        "oscillating": ("map", {"metric": "oscillating", "across": "iteration"}),
        "edge_excess": ("map", {"metric": "edge_excess", "across": "iteration"}),
        "grad_weight_to_noise": ("map", {"across": "iteration"}),
        "grad_output_to_noise": ("map", {"across": "iteration"}),
    },
    ("tensor", "drift"): {"twin": ("map", {})},
}
"""By the former part and its chart: the chart, and the parameters that differ from PARTS."""
OPTIONS = {"scale_exponent": "block_scale_exponent", "crest_db": "block_crest_db"}
"""The color, by the former choice of a statistic of blocks."""
Params = dict[str, list[str]]


def current(page: str, params: Mapping[str, list[str]], chart: str = "") -> tuple[str, Params, str] | None:
    """(the page, the parameters, the chart) of today; None if nothing has changed."""
    if cost := _cost(page, params, chart):
        return cost
    part = page, next(iter(params.get("view", ())), "")
    if part not in PARTS:
        return None
    kept = {name: list(texts) for name, texts in params.items() if name not in ("view", "of_blocks")}
    if part == ("tensor", "drift"):
        if chart == "three_way":  # of the tensor in the bf16 run: what it is compared with by default
            return page, kept | {"view": ["pair"]}, "magnitudes"
        kept = _of_run(kept)
    chart, more = CHARTS[part].get(chart, (chart, {}))
    if (quantity := next(iter(params.get("of_blocks", ())), "")) in OPTIONS:
        more = more | {"metric": OPTIONS[quantity]}
    return "map", kept | {name: [text] for name, text in (PARTS[part] | more).items()}, chart


def _of_run(params: Params) -> Params:
    """The parameters of a page on a tensor, for the run that it compared with, else for that of the tensor."""
    kept = {name: texts for name, texts in params.items() if name not in ("tensor", "gemm", "against")}
    runs = params.get("against") or [tensor_id.partition("/")[0] for tensor_id in params.get("tensor", ())]
    return kept | ({"run_id": runs} if runs else {})


def _cost(page: str, params: Mapping[str, list[str]], chart: str) -> tuple[str, Params, str] | None:
    """What became Runs › Cost: the former Advise, whose own parameters the page now asks for itself, and Parity."""
    part = next(iter(params.get("view", ())), "")
    if (page, part) not in {("map", "advise"), ("runs", "advise"), ("runs", "parity")}:
        return None
    left_out = {"view", "budget", "by", "parts"} if part == "advise" else {"view"}
    kept = {name: list(texts) for name, texts in params.items() if name not in {*left_out, "parity"}}
    measured = {"measured": list(params["parity"])} if "parity" in params else {}
    return "runs", kept | measured | {"view": ["cost"]}, "cost_steps" if chart == "parity_steps" else chart and "cost"


def set_current(view: Any, chart: str = "") -> str:
    """Give a frozen view, while it is made, the page and the parameters of today. Returns its chart of today."""
    found = current(view.page, view.params, chart)
    if found is None:
        return chart
    page, params, chart = found
    object.__setattr__(view, "page", page)
    object.__setattr__(view, "params", params)
    return chart

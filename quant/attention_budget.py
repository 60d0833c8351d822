"""Which product of attention makes the error of its gradients: each of them rounded alone, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from binade.quant.attention import flash, smoothed
from binade.quant.gemm import Rounding, matmul
from binade.quant.specs import OPERAND_FIELDS, GemmFormats

# The names of the GEMMs of QKᵀ and PV in a recipe.
GEMMS = {
    "qk": {"forward": "forward", "dgrad": "dquery", "wgrad": "dkey"},
    "pv": {"forward": "forward", "dgrad": "dprobs", "wgrad": "dvalue"},
}
RESULTS = ("output", "dS", "dquery", "dkey", "dvalue")


def error_budget(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    qk: GemmFormats,
    pv: GemmFormats,
    *,
    scale: float | None = None,
    causal: bool = True,
    backend: str = "auto",
) -> dict[str, dict[str, float]]:
    """The relative error ‖x_q − x‖ / ‖x‖ of RESULTS against float64, for each rounded GEMM alone ("qk.forward", ...,
    "pv.dvalue"), for "all", and for "none", in float32 without rounding. dS is the gradient of the scaled scores.

    query, key, value and grad_output are [..., heads, tokens, size]. scale is 1 / √size unless given. A backward
    operand that is taken from the rounded forward operand counts with the forward GEMM.
    """
    inputs = [x.detach().float() for x in (query, key, value, grad_output)]
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    exact = _results([x.double() for x in inputs], None, qk, factor, causal, backend)

    def errors(formats: tuple[GemmFormats, GemmFormats]) -> dict[str, float]:
        results = _results(inputs, formats, qk, factor, causal, backend)
        return {name: _relative(x, results[name]) for name, x in exact.items()}

    budget = {"none": errors((_alone(qk), _alone(pv)))}
    for part, formats in (("qk", qk), ("pv", pv)):
        for gemm, name in GEMMS[part].items():
            alone = _alone(formats, gemm)
            if any(alone[field] for field in OPERAND_FIELDS):
                pair = (alone, _alone(pv)) if part == "qk" else (_alone(qk), alone)
                budget[f"{part}.{name}"] = errors(pair)
    return budget | {"all": errors((qk, pv))}


def _alone(formats: GemmFormats, gemm: str = "") -> GemmFormats:
    """The formats with this GEMM alone rounded; without a name, none."""
    again = formats.of_rounded if gemm == "forward" else ()
    operands = {name for name in OPERAND_FIELDS if gemm and name.startswith(gemm)} - set(formats.of_rounded)
    changes: dict[str, Any] = dict.fromkeys(name for name in OPERAND_FIELDS if name not in operands.union(again))
    return replace(formats, **changes, of_rounded=again)


def _relative(exact: Tensor, x: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def _results(
    inputs: list[Tensor],
    formats: tuple[GemmFormats, GemmFormats] | None,
    smoothing: GemmFormats,
    scale: float,
    causal: bool,
    backend: str,
) -> dict[str, Tensor]:
    """RESULTS of attention; without formats by torch alone. smoothing: the formats by which Q and K are smoothed, also
    where a GEMM of the backward pass is rounded alone."""
    with torch.enable_grad():
        query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
        grad_output = inputs[3]
        if formats is None:
            scores = (query @ key.transpose(-1, -2)) * scale
        else:
            q, k, complete = smoothed(query, key, smoothing)
            scores = complete(matmul(q, k, Rounding(formats[0], backend), transpose_b=True), 1.0) * scale
        scores.retain_grad()
        masked = scores
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            masked = scores.masked_fill(future, -torch.inf)
        if formats is None:
            output = masked.softmax(-1) @ value
        elif formats[1].softmax.tile:
            output = flash(masked, value, Rounding(formats[1], backend))
        else:
            output = matmul(masked.softmax(-1), value, Rounding(formats[1], backend))
        torch.autograd.backward(output, grad_output)
    results = (output.detach(), *(x.grad for x in (scores, query, key, value)))
    return dict(_named(results))


def _named(results: tuple[Tensor | None, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, x in zip(RESULTS, results, strict=True):
        assert x is not None, "every input has a gradient"
        yield name, x

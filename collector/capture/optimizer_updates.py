"""What torch's Adam, AdamW and Muon add to a weight, computed once more from their state after a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MOMENTUM = "momentum_buffer"  # the name of Muon's momentum in its state


def adam_update(weight: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """What torch's Adam or AdamW adds to a weight, of the weight's shape, float32. state: after the step; group: the
    parameter group of the weight."""
    # In float64: in float32, 1 - 0.999 has a relative error of 1e-5.
    first, second = (1 - beta ** state["step"].double() for beta in group["betas"])
    decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0
    step = state["exp_avg"].float() / first / ((state["exp_avg_sq"].float() / second).sqrt() + group["eps"])
    update: Tensor = -group["lr"] * (step + decay * weight.float())
    return update


def eco_correction(error: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """What ECO adds to Adam's first moment for the error of a weight, float32, so that later steps make up for it.
    error: the weight before it was rounded minus the weight after; state: after the step, before its own rounding.

    arXiv 2601.22101, algorithm 3: (1 − β₁ᵗ) / lr · (1 − 1/β₁) · (√(v / (1 − β₂ᵗ)) + ε) · error."""
    beta, _ = group["betas"]
    first, second = (1 - each ** state["step"].double() for each in group["betas"])
    size = (state["exp_avg_sq"].float() / second).sqrt() + group["eps"]
    correction: Tensor = (first / group["lr"] * (1 - 1 / beta)) * size * error
    return correction.float()


# Called in each iteration of Newton–Schulz, from 1, with the operands of its matrix products by the names that kinds of
# Other.NEWTON_SCHULZ observe: "x" of XXᵀ, "gram" of AA, "left" and "right" of BX.
Products = Callable[[int, Mapping[str, Tensor]], None]


def orthogonalized(
    momentum: Tensor, gradient: Tensor, group: Mapping[str, Any], see: Products | None = None
) -> tuple[Tensor, Tensor]:
    """(what torch.optim.Muon orthogonalizes, and the result, bfloat16), both of the weight's shape [m, n]. momentum:
    after the step; group: the parameter group of the weight."""
    direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    x = direction.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    x = x / x.norm().clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for number in range(1, group["ns_steps"] + 1):
        gram = x @ x.t()
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        if see:
            see(number, {"x": x, "gram": gram, "left": polynomial, "right": x})
        x = torch.addmm(x, polynomial, x, beta=a)
    return direction, x.t() if tall else x


def muon_update(weight: Tensor, orthogonal: Tensor, group: Mapping[str, Any]) -> Tensor:
    """What torch.optim.Muon adds to a weight [m, n], float32. orthogonal: of `orthogonalized`."""
    m, n = weight.shape
    factors = {"match_rms_adamw": 0.2 * math.sqrt(max(m, n)), "original": math.sqrt(max(1, m / n))}
    update: Tensor = -group["lr"] * (
        group["weight_decay"] * weight.float() + factors[group["adjust_lr_fn"] or "original"] * orthogonal.float()
    )
    return update

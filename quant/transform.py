"""What is done to a tensor before it is rounded: the mean over its tokens is subtracted (`center`), then runs of values
are rotated (`hadamard`). The values that are rounded are called coded.

A product of rotated operands needs no correction (see `quant.rotation`). With means μ and ν over l tokens and the
residuals R = X − 1μᵀ and S = G − 1νᵀ, the GEMMs of a linear layer add what the means contribute:

    forward  X Wᵀ = R Wᵀ + 1 (W μ)ᵀ        dgrad  G W = S W + 1 (Wᵀ ν)ᵀ        wgrad  Gᵀ X = Sᵀ R + l ν μᵀ

The mixed terms of wgrad vanish because residuals sum to 0. The method is Averis (arXiv 2603.10444, of which only the
abstract was read); the algebra, and that W is the rounded weight, are our own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from binade.quant.rotation import rotate, rotate_back
from binade.quant.specs import Spec


def token_mean(x: Tensor) -> Tensor | None:
    """The mean over all axes but the last: [..., features] -> [features] float32, summed in float64. None for a tensor
    with fewer than two axes, which has no tokens, and for an empty one."""
    if x.dim() < 2 or not x.numel():
        return None
    rows = x.detach().flatten(0, -2)
    return (rows.sum(0, dtype=torch.float64) / len(rows)).float()


def mean_energy(x: Tensor) -> float:
    """l·‖μ‖² / ‖X‖² with μ the mean over the l tokens of x [..., features]: the share of Σx² that centering takes away.
    NaN for a tensor without tokens, of zeros, or with NaN or Inf."""
    mean = token_mean(x)
    if mean is None:
        return float("nan")
    rows = x.detach().flatten(0, -2)
    share = len(rows) * mean.double().square().sum() / rows.double().square().sum()
    return float(share) if share.isfinite() else float("nan")


def residual(x: Tensor) -> Tensor:
    """x without the mean over its tokens, float32; x itself if it has none."""
    mean = token_mean(x)
    return x.detach() if mean is None else x.detach().float() - mean


def transform(x: Tensor, spec: Spec, dim: int, seed: int) -> Tensor:
    """The coded values of x in its dtype, which are the ones that a GEMM rounds to a format; those of a rotation are
    padded along `dim`. x itself if nothing is done to it. seed: of this call, for random signs."""
    coded = residual(x) if spec.centered else x.detach()
    return (rotate(coded, spec, dim, seed) if spec.hadamard else coded).to(x.dtype)


def transform_back(y: Tensor, like: Tensor, spec: Spec, dim: int, seed: int, mean: Tensor | None = None) -> Tensor:
    """The inverse of `transform`: y, rounded from the coded values of `like`, in the shape of `like`, float32. mean: of
    `like`, if that has no values."""
    if spec.hadamard:
        y = rotate_back(y, like, spec, dim, seed)
    if spec.centered:
        mean = token_mean(like) if mean is None else mean
        y = y if mean is None else y.float() + mean
    return y


def coded_mean(x: Tensor, spec: Spec | None, dim: int, seed: int) -> Tensor | None:
    """What `transform` subtracts from each token of x [tokens, features], rotated as the residual is if `dim` is the
    axis of features: [1, features] float32. None if it subtracts nothing."""
    if spec is None or not spec.centered or (mean := token_mean(x)) is None:
        return None
    return rotate(mean[None], spec, -1, seed) if spec.hadamard and dim == -1 else mean[None]


def untransformed(spec: Spec) -> Spec:
    """The same spec for values that are coded already."""
    return Spec.of(spec, center="none", hadamard=0, signs="none") if spec.transforms else spec

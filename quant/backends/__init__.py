"""Fast implementations of `reference` with the same bits: Triton kernels and compiled C++."""

from __future__ import annotations

import warnings
from enum import StrEnum
from functools import cache

from torch import Tensor

from binade.quant import reference
from binade.quant.backends import cpu
from binade.quant.reference import outer_absmax
from binade.quant.scaling import has_kernel
from binade.quant.specs import Spec


class Backend(StrEnum):
    """The implementation. All give the same bits."""

    AUTO = "auto"
    """Triton for CUDA tensors, torch for others."""
    TRITON = "triton"
    """Triton kernels; on CPU tensors through Triton's interpreter."""
    TORCH = "torch"
    """Compiled C++ for CPU tensors if building it is worthwhile, else plain torch."""


def resolve_backend(backend: str, x: Tensor) -> Backend:
    """TRITON or TORCH for this tensor. Raises ValueError for an unknown name."""
    try:
        chosen = Backend(backend)
    except ValueError:
        raise ValueError(f"unknown backend {backend!r}: expected one of {', '.join(Backend)}") from None
    if chosen != Backend.AUTO:
        return chosen
    return Backend.TRITON if x.is_cuda else Backend.TORCH


def quantize_dequantize(
    x: Tensor, spec: Spec, dim: int, absmax: Tensor | None, backend: Backend, want_scales: bool, seed: int
) -> tuple[Tensor, Tensor | None]:
    """x (any shape and strides, not empty) -> (y of x's shape and dtype, scales).

    scales is None unless wanted and blocks have scales: then [outer, blocks along dim, inner] float32. absmax as in
    `reference.outer_absmax`, computed if None. A scheme without a kernel is computed by `reference` on every backend;
    where Triton was chosen, with a warning, once per spec.
    """
    y: Tensor
    scales: Tensor | None
    if backend == Backend.TRITON and has_kernel(spec):
        from binade.quant.backends import triton_kernels  # imported at its first use, as only this needs triton

        y, scales = triton_kernels.quantize_dequantize(x.contiguous(), spec, dim, absmax, want_scales, seed)
    elif x.device.type == "cpu":
        y, scales = cpu.quantize_dequantize(x, spec, dim, absmax, want_scales, seed)
    else:
        if backend == Backend.TRITON:
            _warn_without_kernel(spec)
        absmax = outer_absmax(x, spec, dim) if absmax is None else absmax
        y, scales = reference.quantize_dequantize(x, spec, dim, absmax, seed)
    run = spec.run(x.shape[dim] if x.dim() else 1)
    if scales is None or not want_scales or run is None:
        return y, None
    at = dim % x.dim() if x.dim() else 0
    return y, scales.reshape(x.shape[:at].numel(), -1, x.shape[at + 1 :].numel())


@cache
def _warn_without_kernel(spec: Spec) -> None:
    warnings.warn(
        f"{spec} has no Triton kernel, so torch rounds to it: in hundreds of kernel launches per tensor, with tens of "
        "bytes of temporary memory per value; prefer another scale for large tensors",
        stacklevel=2,
    )

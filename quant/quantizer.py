"""The public functions on formats: fake_quantize, quantize, Quantized. Checks every option, then picks a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from binade.quant import backends
from binade.quant.backends import resolve_backend
from binade.quant.codes import decode_table, encode, pack, unpack
from binade.quant.formats import Format
from binade.quant.memory import is_dtensor, on_local_part, ordinary, without_modes
from binade.quant.reference import from_blocks, noise_blocks, per_group, quantize_blocks, to_blocks
from binade.quant.reference import outer_absmax as outer_absmax
from binade.quant.scaling import scale_nbytes
from binade.quant.scheme import read_back
from binade.quant.specs import Spec
from binade.quant.transform import token_mean, transform, transform_back, untransformed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(x: Tensor, dim: int, seed: int = 0) -> Tensor:
    """The values of x as an ordinary tensor, once x, the axis and the seed are known to fit."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a torch.Tensor, not {type(x).__name__}")
    if x.dtype not in DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"dtype {str(x.dtype).removeprefix('torch.')} cannot be quantized: expected one of {allowed}")
    for name, value in (("dim", dim), ("seed", seed)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise ValueError(f"dim {dim} is out of range for a tensor of {x.dim()} axes: expected {-rank} to {rank - 1}")
    return ordinary(x)


def apply(
    x: Tensor,
    spec: Spec,
    dim: int = -1,
    backend: str = "auto",
    want_scales: bool = False,
    seed: int = 0,
    absmax: Tensor | None = None,
    sign_seed: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(y, scales): quantize-dequantize. scales is None unless wanted and blocks have scales: then float32, shaped
    [outer, blocks along dim, inner] over x's axes before and after `dim`.

    A spec that transforms values returns them transformed back, and the scales of the coded ones. absmax: the scale of
    delayed scaling. sign_seed: of random signs; default: seed.
    """
    x = check_tensor(x, dim, seed)
    chosen = resolve_backend(backend, x)
    with without_modes():
        if not x.numel():
            has_blocks = spec.has_blocks
            return torch.empty_like(x), torch.empty(0, device=x.device) if want_scales and has_blocks else None
        if spec.transforms:
            signs = seed if sign_seed is None else sign_seed
            coded, plain = transform(x, spec, dim, signs), untransformed(spec)
            rounded, scales = apply(coded, plain, dim, backend, want_scales, seed, absmax)
            return transform_back(rounded, x, spec, dim, signs).to(x.dtype), scales
        return backends.quantize_dequantize(x, spec, dim, absmax, chosen, want_scales, seed)


class _StraightThrough(torch.autograd.Function):
    """fake_quantize whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec, dim: int, backend: str, seed: int) -> Tensor:
        return apply(x, spec, dim, backend, seed=seed)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad, None, None, None, None


def fake_quantize(
    x: Tensor, fmt: str | Format | Spec, dim: int = -1, *, seed: int = 0, backend: str = "auto", **options: object
) -> Tensor:
    """Round x to a format and back. Keeps shape, dtype and device. Gradients pass through unchanged
    (straight-through estimator).

    Args:
        x: float32, bfloat16 or float16; any shape and strides, empty and 0-dim included. Of a DTensor, each rank's part
            is rounded on its own; another subclass without memory of its own gives the values that it stands for.
        fmt: A name in FORMATS or the text of a spec, "nvfp4(block=16x16)"; a Spec or a Format.
        dim: The axis that blocks lie along, which is the one that the GEMM contracts. Its last block may be short.
        seed: Seeds stochastic rounding and random signs.
        backend: "triton", "torch", or "auto": Triton for CUDA tensors, torch for CPU tensors. All give the same bits.
        **options: Options of the spec, such as scale="rceil" or block="16x16", see `specs.OPTIONS`.

    NaN stays NaN. A finite value never becomes NaN. It becomes Infinity only beyond the largest value of a format with
    overflow=inf, or where it rounds to a value that x's dtype does not have. In a format with scales, one NaN or Inf
    makes everything that shares its scale NaN; but with scale=amax or pow2, Inf makes that scale 1. There, and without
    scales, Inf saturates or stays Inf, depending on `overflow`. -0 is kept where the format has it. The result is
    rounded to x's dtype.

    Raises:
        TypeError: x is not a float32, bfloat16 or float16 tensor, or has no values to read (sparse, nested, fake).
        ValueError: The format is unknown, an option does not apply or dim is out of range.
    """
    spec = Spec.of(fmt, **options)
    if is_dtensor(x):
        return on_local_part(x, lambda part: fake_quantize(part, spec, dim, seed=seed, backend=backend))
    if isinstance(x, Tensor) and x.requires_grad:
        check_tensor(x, dim, seed)  # before torch refuses it in other words
        return cast(Tensor, _StraightThrough.apply(x, spec, dim, backend, seed))  # type: ignore[no-untyped-call]  # torch
    return apply(x, spec, dim, backend, seed=seed)[0]


@dataclass(frozen=True)
class Quantized:
    """A tensor in a format's own bits.

    codes       uint8 (uint16 for 16-bit formats): the values in the order of `reference.to_blocks`, padded to whole
                blocks; two to a byte (low nibble first) for 4-bit formats, four to three bytes (lowest bits first) for
                6-bit ones
    scales      uint8 [blocks, bytes]: the block scales, see `Scaling.to_bytes`; None if the tensor shares its scale
    absmax      float32, what the outer scale, or the scale of the whole tensor, follows from: a scalar, or [blocks, 1]
    seed        of the signs of a rotation
    mean        float32 [features], what `center` subtracted; None without it. `nbytes` leaves it out
    """

    spec: Spec
    dim: int
    shape: torch.Size
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor | None
    absmax: Tensor
    seed: int
    mean: Tensor | None = None

    @property
    def nbytes(self) -> float:
        """Bytes of the packed codes and of all scales, padding of short blocks included."""
        return self.codes.numel() * self.codes.element_size() + scale_nbytes(self.spec, self.shape, self.dim)

    def unpacked_codes(self) -> Tensor:
        """int64 codes, one per value, as [groups, block]."""
        like = to_blocks(torch.empty(self._coded_shape(), device="meta"), self.dim, self.spec.block)
        return unpack(self.codes, self.spec.format.element.bits)[: like.numel()].reshape(like.shape)

    def _coded_shape(self) -> tuple[int, ...]:
        size, shape = self.spec.hadamard, list(self.shape) or [1]
        if size:
            shape[self.dim] += -shape[self.dim] % size
        return tuple(shape) if self.shape or size else ()

    def dequantize(self) -> Tensor:
        """The values, in the original shape and dtype: bit for bit what fake_quantize returns."""
        if not self.shape.numel():
            return torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        scaling = self.spec.scaling
        values = decode_table(self.spec.format.element).to(self.codes.device)[self.unpacked_codes()]
        scales = (
            scaling.block_scale(values, self.spec, self.absmax)
            if self.scales is None
            else scaling.from_bytes(self.scales)
        )
        values = read_back(values, scaling.factors(scales, self.spec, self.absmax))
        like = torch.empty(self._coded_shape(), dtype=self.dtype, device="meta")
        y = from_blocks(values.to(self.dtype), like, self.dim, self.spec.block)
        like = torch.empty(self.shape, device="meta")
        return transform_back(y, like, self.spec, self.dim, self.seed, self.mean).to(self.dtype)


def quantize(x: Tensor, fmt: str | Format | Spec, dim: int = -1, *, seed: int = 0, **options: object) -> Quantized:
    """Quantize x to the codes and scales of a format. Arguments and errors are those of `fake_quantize`."""
    spec = Spec.of(fmt, **options)
    x = check_tensor(x, dim, seed)
    dim = dim % x.dim() if x.dim() else 0
    coded = transform(x, spec, dim, seed) if x.numel() else x
    absmax = outer_absmax(coded, spec, dim)
    absmax = per_group(absmax, coded, dim, spec.block) if absmax.dim() and coded.numel() else absmax
    u = noise_blocks(coded, spec, dim, spec.block, seed)
    values, scales, _ = quantize_blocks(to_blocks(coded, dim, spec.block).float(), spec, absmax, u)
    if spec.block:  # a block whose scale is NaN has no codes of its own
        values = torch.where(values.isnan(), 0.0, values)
    element = spec.format.element
    codes = pack(encode(values.reshape(-1), element), element.bits)
    shared = not spec.has_blocks
    stored = None if shared else spec.scaling.to_bytes(scales)
    mean = token_mean(x) if spec.centered else None
    return Quantized(spec, dim, x.shape, x.dtype, codes, stored, absmax, seed, mean)

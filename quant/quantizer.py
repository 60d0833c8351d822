"""The public functions on formats: fake_quantize, quantize, Quantized. Checks every option, then picks a backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor

from binade.quant import backends
from binade.quant.backends import resolve_backend
from binade.quant.codes import decode_table, encode, pack, unpack
from binade.quant.elements import Overflow, Rounding
from binade.quant.formats import FORMATS, Format, ScaleRule
from binade.quant.reference import Plan, from_blocks, noise_blocks, quantize_blocks, to_blocks
from binade.quant.scaling import SCALINGS

UNSCALED = SCALINGS[ScaleRule.NONE]
ROUNDINGS, OVERFLOWS = tuple(Rounding), tuple(Overflow)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Options(TypedDict, total=False):
    """The keywords of `plan`, which every function that rounds takes."""

    scale_rule: str | None
    rounding: str | None
    overflow: str | None
    block_size: int | None
    seed: int


def plan(
    fmt: str | Format,
    *,
    scale_rule: str | None = None,
    rounding: str | None = None,
    overflow: str | None = None,
    block_size: int | None = None,
    seed: int = 0,
) -> Plan:
    """A format with every option decided; None takes the format's own default.

    scale_rule  one of the format's `scale_rules`, see `ScaleRule`. MX formats: floor (default), ceil, even, rceil;
                tensor-scaled formats: amax (default), none; hifp8: none (default), pow2
    rounding    nearest (ties to even), half_away, stochastic (by `seed`), see `Rounding`
    overflow    saturate, or inf where the element has infinities, see `Overflow`
    block_size  values that share a scale, for formats with a block scale

    Raises UnknownFormatError or ValueError naming what was wrong and what is allowed, TypeError for a non-integer
    size or seed.
    """
    if not isinstance(fmt, (str, Format)):
        raise TypeError(f"a format is a name in FORMATS or a Format, not {fmt!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an integer, not {type(seed).__name__}")
    fmt = FORMATS[fmt] if isinstance(fmt, str) else fmt
    scale_rule = scale_rule or fmt.scale_rules[0]
    _check("scale_rule", scale_rule, fmt.scale_rules, fmt)
    rounding = rounding or fmt.rounding
    _check("rounding", rounding, ROUNDINGS, fmt)
    overflow = overflow or fmt.overflow
    _check("overflow", overflow, OVERFLOWS if fmt.element.has_infinity else OVERFLOWS[:1], fmt)
    if block_size is not None:
        if not isinstance(block_size, int) or isinstance(block_size, bool):
            raise TypeError(f"block_size must be an integer, not {type(block_size).__name__}")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: it must be at least 1")
        if fmt.block_size is None:
            raise ValueError(f"block_size does not apply to {fmt.name}: it has no block scale")
    chosen = Rounding(rounding), Overflow(overflow)
    return Plan(fmt, block_size or fmt.block_size, SCALINGS[scale_rule], *chosen, seed)


def _check(option: str, value: str, allowed: tuple[str, ...], fmt: Format) -> None:
    if value not in allowed:
        raise ValueError(f"{option} {str(value)!r} is not possible for {fmt.name}: {', '.join(allowed)}")


def check_tensor(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"a torch.Tensor is needed, not {type(x).__name__}")
    if x.dtype not in DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"dtype {str(x.dtype).removeprefix('torch.')} cannot be quantized: {allowed}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim must be an integer, not {type(dim).__name__}")
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise ValueError(f"dim {dim} is out of range for a tensor of {x.dim()} axes: {-rank} to {rank - 1}")


def tensor_absmax(x: Tensor) -> Tensor:
    """The largest magnitude as a float32 scalar tensor; NaN if any element is NaN, 0 for an empty tensor."""
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float().abs()  # never -0, which would pass its sign on


def apply(
    x: Tensor, plan: Plan, dim: int = -1, backend: str = "auto", want_scales: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(y, scales): quantize-dequantize by a plan. scales is None unless wanted and the format has a block scale:
    then float32, shaped [outer, blocks along dim, inner] over x's axes before and after `dim`.
    """
    check_tensor(x, dim)
    chosen = resolve_backend(backend, x)
    x = x.detach()
    scaling, has_blocks = plan.scaling, plan.block_size is not None
    if not x.numel():
        return torch.empty_like(x), torch.empty(0, device=x.device) if want_scales and has_blocks else None
    absmax = tensor_absmax(x) if scaling.tensor_scale_bytes else torch.zeros((), device=x.device)
    if scaling.kernel is None and not has_blocks:  # scaled here, so that a kernel can still do the rounding
        element = plan.format.element
        scale = torch.ones((), device=x.device)
        tensor_scale = scaling.tensor_scale(element, absmax)
        scaled = scaling.to_element(x.float(), scale, element, tensor_scale)
        values, _ = backends.quantize_dequantize(scaled, replace(plan, scaling=UNSCALED), dim, absmax, chosen, False)
        return scaling.from_element(values, scale, element, tensor_scale).to(x.dtype), None
    return backends.quantize_dequantize(x, plan, dim, absmax, chosen, want_scales)


class _StraightThrough(torch.autograd.Function):
    """fake_quantize whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, dim: int, backend: str) -> Tensor:
        return apply(x, plan, dim, backend)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


def fake_quantize(
    x: Tensor,
    fmt: str | Format,
    dim: int = -1,
    *,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Tensor:
    """x rounded to a format and back: same shape, dtype and device, the gradient passed straight through.

    x         float32, bfloat16 or float16; any shape and strides, empty and 0-dim included
    fmt       a name in FORMATS, or a Format
    dim       the axis that blocks lie along: the one the tensor is contracted over. Its last block may be short
    backend   auto (Triton for CUDA tensors, torch for CPU), triton, torch: the same bits from each
    options   scale_rule, rounding, overflow, block_size, seed: see `plan`

    NaN stays NaN. In a block format one NaN or Inf makes its whole block NaN, in a tensor-scaled one the whole
    tensor. Elsewhere Inf saturates (or stays, by `overflow`). -0 is kept where the format has it. The result is
    rounded to x's dtype, where a value beyond that dtype becomes Inf (float16 under a large block scale).

    Raises TypeError (not a floating tensor), ValueError (unknown format, impossible option, dim out of range).
    """
    decided = plan(fmt, **options)
    if isinstance(x, Tensor) and x.requires_grad:
        return cast(Tensor, _StraightThrough.apply(x, decided, dim, backend))  # type: ignore[no-untyped-call]  # torch
    return apply(x, decided, dim, backend)[0]


@dataclass(frozen=True)
class Quantized:
    """A tensor in a format's own bits.

    codes       uint8 (uint16 for 16-bit formats): the values with `dim` moved last, padded to whole blocks, in
                row-major order; two to a byte (low nibble first) for 4-bit formats, four to three bytes (lowest bits
                first) for 6-bit ones
    scales      uint8: E8M0 codes (2^(code - 127), 255 = NaN) for MX; E4M3 codes for NVFP4; None without a block scale
    absmax      float32 scalar: the tensor's largest magnitude, which its tensor scale follows from; None without one
    """

    plan: Plan
    dim: int
    shape: torch.Size
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor | None
    absmax: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes held: packed codes, block scales and the tensor scale (4), padding of short blocks included."""
        scales = 0 if self.scales is None else self.scales.numel()
        return self.codes.numel() * self.codes.element_size() + scales + self.plan.scaling.tensor_scale_bytes

    def unpacked_codes(self) -> Tensor:
        """int64 codes, one per value, as [groups, block]."""
        codes = unpack(self.codes, self.plan.format.element.bits)
        block = self.plan.block_size or max(self.shape[self.dim] if self.shape else 1, 1)
        groups = (self.scales.numel() if self.scales is not None else None) or -(-self.shape.numel() // block)
        return codes[: groups * block].reshape(groups, block)

    def dequantize(self) -> Tensor:
        """The values, in the original shape and dtype: bit for bit what fake_quantize returns."""
        if not self.shape.numel():
            return torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        scaling, element = self.plan.scaling, self.plan.format.element
        values = decode_table(element).to(self.codes.device)[self.unpacked_codes()]
        absmax = torch.zeros(()) if self.absmax is None else self.absmax
        tensor_scale = scaling.tensor_scale(element, absmax)
        values = scaling.from_element(values, scaling.decode(self.scales), element, tensor_scale)
        like = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return from_blocks(values.to(self.dtype), like, self.dim)


def quantize(x: Tensor, fmt: str | Format, dim: int = -1, **options: Unpack[Options]) -> Quantized:
    """x in the format's codes and scales. Arguments and errors as fake_quantize."""
    decided = plan(fmt, **options)
    check_tensor(x, dim)
    x = x.detach()
    dim = dim % x.dim() if x.dim() else 0
    element = decided.format.element
    absmax = tensor_absmax(x)
    u = noise_blocks(x, decided, dim, decided.block_size)
    values, scales, _ = quantize_blocks(to_blocks(x, dim, decided.block_size).float(), decided, absmax, u)
    if decided.block_size is not None:  # a block whose scale is NaN has no codes of its own
        values = torch.where(values.isnan(), 0.0, values)
    codes = pack(encode(values.reshape(-1), element), element.bits)
    kept = absmax if decided.scaling.tensor_scale_bytes else None
    return Quantized(decided, dim, x.shape, x.dtype, codes, decided.scaling.encode(scales), kept)

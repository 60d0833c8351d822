"""How far a quantized tensor is from the original: the error metrics, by the names and definitions users see."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from quant.formats import Format
from quant.quantize import apply, plan
from quant.reference import tensor_scale, to_blocks

CHUNK = 1 << 20


@dataclass(frozen=True)
class Metric:
    """A metric's definition as users read it. digits: decimals worth showing; percent: shown times 100."""

    label: str
    definition: str
    unit: str = ""
    percent: bool = False


METRICS = {
    "sqnr_db": Metric("SQNR", "10·log₁₀(Σx² / Σ(q−x)²)", "dB"),
    "mse": Metric("MSE", "mean (q−x)²"),
    "relative_error": Metric("Relative error", "‖q−x‖₂ / ‖x‖₂"),
    "cosine": Metric("Cosine", "⟨x,q⟩ / (‖x‖·‖q‖)"),
    "projection": Metric("Projection", "⟨q,x⟩ / ‖x‖²; 1 is unbiased in scale"),
    "max_abs_error": Metric("Max. abs. error", "max |q−x|"),
    "flush_to_zero": Metric("Flushed to zero", "of the nonzero elements, those that become 0", "%", percent=True),
    "underflow_of_all": Metric(
        "Underflow, of all", "nonzero elements that become 0, of all elements", "%", percent=True
    ),
    "saturated": Metric(
        "Saturated", "elements with |x/scale| above the format's largest finite value, of all", "%", percent=True
    ),
}


@dataclass(frozen=True)
class Errors:
    """Error of q against x, over the finite elements of x. Sums in float64.

    sqnr_db is +inf where q = x throughout and NaN where x is all zero (so are relative_error, cosine, projection);
    flush_to_zero is NaN where x has no nonzero element. saturated is NaN if the format is not known.
    """

    sqnr_db: float
    mse: float
    relative_error: float
    cosine: float
    projection: float
    max_abs_error: float
    flush_to_zero: float
    underflow_of_all: float
    saturated: float


def errors(x: Tensor, q: Tensor, saturated: float = math.nan) -> Errors:
    """The error of q against x, both of one shape, floating. Raises ValueError for different shapes."""
    if x.shape != q.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}, its quantized version {tuple(q.shape)}: they must be equal")
    xx = qq = xq = ee = 0.0
    largest = 0.0
    nonzero = flushed = finite = 0
    for a, b in zip(x.detach().reshape(-1).split(CHUNK), q.detach().reshape(-1).split(CHUNK), strict=True):
        a, b = a.double(), b.double()
        ok = a.isfinite()
        if not bool(ok.all()):
            a, b = a[ok], b[ok]
        if not a.numel():
            continue
        e = b - a
        xx += float(a @ a)
        qq += float(b @ b)
        xq += float(a @ b)
        ee += float(e @ e)
        peak = float(e.abs().max())
        largest = peak if peak != peak else max(largest, peak)
        finite += a.numel()
        nonzero += int(torch.count_nonzero(a))
        flushed += int(((a != 0) & (b == 0)).sum())
    return Errors(
        sqnr_db=math.nan if not xx else math.inf if ee == 0 else 10 * math.log10(xx / ee),
        mse=ee / finite if finite else math.nan,
        relative_error=math.sqrt(ee / xx) if xx else math.nan,
        cosine=xq / math.sqrt(xx * qq) if xx and qq else math.nan,
        projection=xq / xx if xx else math.nan,
        max_abs_error=largest if finite else math.nan,
        flush_to_zero=flushed / nonzero if nonzero else math.nan,
        underflow_of_all=flushed / x.numel() if x.numel() else math.nan,
        saturated=saturated,
    )


def compare(x: Tensor, y: Tensor) -> dict[str, float]:
    """Error metrics of y against x, by name (see METRICS). `saturated` needs the format: see `score`."""
    return asdict(errors(x, y))


def saturated_fraction(x: Tensor, fmt: Format, scales: Tensor | None, absmax: float, dim: int) -> float:
    """#(|x/scale| > largest finite) / n: clipped elements only, not those that round to the largest code.

    scales as `quantize.apply` returns them; absmax is used by formats with a tensor scale.
    """
    if not x.numel():
        return math.nan
    magnitude = x.detach().abs()
    if fmt.scaling == "none":
        count = (magnitude > fmt.max).sum()
    elif fmt.scaling == "tensor":
        count = (magnitude.float() * tensor_scale(torch.tensor(absmax), fmt) > fmt.max).sum()
    else:
        limit = scales.transpose(1, 2).reshape(-1, 1).double() * fmt.max  # [groups, 1], in to_blocks' order
        if fmt.scaling == "block_and_tensor":
            limit = limit * (absmax / 2688.0)
        count = (to_blocks(magnitude, dim, fmt.block_size) > limit).sum()
    return float(count) / x.numel()


def score(x: Tensor, fmt: str | Format, dim: int = -1, backend: str = "auto") -> Errors:
    """The error that a format would make on x, blocks along `dim`."""
    decided = plan(fmt)
    q, scales = apply(x, decided, dim, backend, want_scales=True)
    return score_of(x, q, decided.format, scales, dim)


def score_of(x: Tensor, q: Tensor, fmt: Format, scales: Tensor | None, dim: int) -> Errors:
    """As `score`, for a q that has been computed already."""
    absmax = float(x.detach().abs().max()) if fmt.scaling in ("tensor", "block_and_tensor") and x.numel() else 0.0
    return errors(x, q, saturated_fraction(x, fmt, scales, absmax, dim))

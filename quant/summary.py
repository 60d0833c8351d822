"""One pass over a tensor: its moments, counts and binade sketch.

For bfloat16 and float16 on a CPU the pass is a histogram of the 65,536 codes, from which all else follows exactly. For
float32 the sketch (see `sketch`) and the sums are taken chunk by chunk. CUDA tensors are read by `kernels_summary`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quant.quantizer import resolve_backend
from quant.sketch import BINS, INFINITY_BIN, SIGN_BIN, Sketch, bin_edges

__all__ = ["BINS", "INFINITY_BIN", "SIGN_BIN", "Sketch", "Summary", "bin_edges", "summarize"]

CHUNK = 1 << 18


@dataclass(frozen=True)
class Summary:
    """What is known of a tensor without keeping it.

    Moments are over the finite elements, summed in float64; std is the population's. absmin is the smallest nonzero
    magnitude. kurtosis is E(x-mean)^4 / std^4 (3 for a normal), not the excess. Where there is nothing to compute from
    (no finite element, no spread) the value is NaN. `bins` and `counts` are the sketch's nonempty bins, finite
    elements only.
    """

    numel: int
    min: float
    max: float
    mean: float
    std: float
    rms: float
    absmax: float
    absmin: float
    skewness: float
    kurtosis: float
    zeros: int
    nans: int
    infs: int
    bins: np.ndarray
    counts: np.ndarray

    @property
    def sketch(self) -> Sketch:
        """The binade sketch, for quantiles, Q-Q points and distances: see `quant.sketch`."""
        return Sketch(self.bins, self.counts)

    @property
    def crest_factor(self) -> float:
        """absmax / rms."""
        return self.absmax / self.rms if self.rms else math.nan

    @property
    def dynamic_range(self) -> float:
        """log2(absmax / absmin), in binades."""
        return math.log2(self.absmax / self.absmin) if self.absmax > 0 else math.nan


def summarize(x: Tensor, backend: str = "auto") -> Summary:
    """Moments, counts and the binade sketch of a float32, bfloat16 or float16 tensor of any shape and device.

    backend as in fake_quantize: auto is Triton for CUDA tensors. Counts are the same from each.
    Raises TypeError for another dtype, ValueError for an unknown backend.
    """
    return summarize_later(x, backend)()


def summarize_later(x: Tensor, backend: str = "auto") -> Callable[[], Summary]:
    """As `summarize`, but the result is fetched when called: until then nothing waits for a GPU."""
    if not isinstance(x, Tensor):
        raise TypeError(f"a torch.Tensor is needed, not {type(x).__name__}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"dtype {str(x.dtype).removeprefix('torch.')} cannot be summarized: float32, bfloat16, float16")
    chosen = resolve_backend(backend, x)
    x = x.detach().reshape(-1)
    if chosen == "triton" and x.numel():
        from quant import kernels_summary  # triton is imported when first asked for

        numel, fetch = x.numel(), kernels_summary.one_pass(x)
        return lambda: _from_sums(numel, **vars(fetch()))
    found = _from_values(x) if x.dtype == torch.float32 else _from_codes(x)
    return lambda: found


def _histogram(codes: Tensor, size: int) -> np.ndarray:
    """Counts of int32 codes in [0, size), int64."""
    return torch.bincount(codes, minlength=size).cpu().numpy()


def value_counts(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The values of a bfloat16 or float16 tensor that occur (float32, in the order of their codes; NaN, Inf and -0
    among them), and how often each does (int64). Counts its 65,536 codes, a chunk at a time."""
    counts = np.zeros(1 << 16, np.int64)
    for chunk in x.reshape(-1).split(CHUNK):
        counts += _histogram(chunk.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF, 1 << 16)
    used = counts.nonzero()[0]
    return torch.from_numpy(used).to(torch.int16).view(x.dtype).float().numpy(), counts[used]


def upper_counts(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The upper 16 bits of a float32 tensor's values that occur (int64, 0 to 65,535), and how often each does (int64).

    What `upper_edges` says of them bounds every value within 1/128 of itself (2^-133 for subnormals). One pass, a chunk
    at a time, on as many threads as torch uses.
    """
    flat = x.detach().reshape(-1).contiguous()
    upper = flat.view(torch.int16)[1 if sys.byteorder == "little" else 0 :: 2]

    def count(part: Tensor) -> Tensor:
        found = torch.zeros(1 << 16, dtype=torch.int64)
        for chunk in part.split(CHUNK):
            found += torch.bincount(chunk.to(torch.int32) & 0xFFFF, minlength=1 << 16)
        return found

    threads = max(1, min(torch.get_num_threads(), upper.numel() // CHUNK))
    with ThreadPoolExecutor(threads) as pool:
        counts = sum(pool.map(count, upper.tensor_split(threads))).numpy()
    used = counts.nonzero()[0]
    return used, counts[used]


def upper_edges(upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The interval of the float32 values with these upper 16 bits, as float64 (low, high); NaN or infinite for those of
    Inf and NaN. As in `sketch.bin_edges`, the inner end belongs to it."""
    magnitude = (np.asarray(upper, np.int64) & 0x7FFF).astype(np.uint32)
    with np.errstate(invalid="ignore"):
        inner = (magnitude << 16).view(np.float32).astype(np.float64)
        outer = ((magnitude + 1) << 16).view(np.float32).astype(np.float64)
    outer = np.where(magnitude == 0x7F7F, 2.0**128, outer)
    negative = np.asarray(upper) >= 0x8000
    return np.where(negative, -outer, inner), np.where(negative, -inner, outer)


def _from_codes(x: Tensor) -> Summary:
    values, counts = value_counts(x)
    bins = (values.view(np.uint32) >> 20).astype(np.int64)
    return _from_counts(values.astype(np.float64), counts, sketch=(bins, counts))


def _from_counts(values: np.ndarray, counts: np.ndarray, sketch: tuple[np.ndarray, np.ndarray]) -> Summary:
    """Everything, from distinct values (float64) and how often each occurs."""
    finite = np.isfinite(values)
    sketch = (sketch[0][finite], sketch[1][finite])
    nans = int(counts[np.isnan(values)].sum())
    infs = int(counts[np.isinf(values)].sum())
    total = int(counts.sum())
    values, counts = values[finite], counts[finite]
    n = int(counts.sum())
    zeros = int(counts[values == 0].sum())
    nonzero = np.abs(values[values != 0])
    if n:
        mean = float(counts @ values / n)
        powers = _central(counts, values - mean, n)
        rms = math.sqrt(counts @ values**2 / n)
    else:
        mean, powers, rms = math.nan, (math.nan,) * 3, math.nan
    return _summary(
        numel=total,
        low=float(values.min()) if n else math.nan,
        high=float(values.max()) if n else math.nan,
        absmin=float(nonzero.min()) if nonzero.size else math.nan,
        mean=mean,
        rms=rms,
        central=powers,
        zeros=zeros,
        nans=nans,
        infs=infs,
        sketch=sketch,
    )


def _central(counts: np.ndarray, d: np.ndarray, n: int) -> tuple[float, float, float]:
    square = d * d
    return counts @ square / n, counts @ (square * d) / n, counts @ (square * square) / n


def _summary(*, numel, low, high, absmin, mean, rms, central, zeros, nans, infs, sketch) -> Summary:
    second, third, fourth = central
    bins, inverse = np.unique(sketch[0], return_inverse=True)
    merged = np.zeros(len(bins), np.int64)
    np.add.at(merged, inverse, sketch[1])
    spread = second > 0
    return Summary(
        numel=numel,
        min=low,
        max=high,
        mean=mean,
        std=math.sqrt(second) if second == second else math.nan,
        rms=rms,
        absmax=max(abs(low), abs(high)) if low == low else math.nan,
        absmin=absmin,
        skewness=float(third / second**1.5) if spread else math.nan,
        kurtosis=float(fourth / second**2) if spread else math.nan,
        zeros=zeros,
        nans=nans,
        infs=infs,
        bins=bins.astype(np.int16),
        counts=merged,
    )


def _from_values(x: Tensor) -> Summary:
    counts = np.zeros(BINS, np.int64)
    sums = np.zeros(4)
    nans = infs = zeros = 0
    low, high, absmin = math.inf, -math.inf, math.inf
    shift = None  # moments are taken about a first guess of the mean, so that they do not cancel
    for chunk in x.split(CHUNK):
        chunk = chunk.contiguous().float()
        bins = (chunk.view(torch.int32) >> 20) & (BINS - 1)
        part = _histogram(bins, BINS)
        if part[INFINITY_BIN:SIGN_BIN].any() or part[SIGN_BIN + INFINITY_BIN :].any():
            nans += int(chunk.isnan().sum())
            infs += int(chunk.isinf().sum())
            chunk = chunk[chunk.isfinite()]
            part[INFINITY_BIN:SIGN_BIN] = 0
            part[SIGN_BIN + INFINITY_BIN :] = 0
        counts += part
        if not chunk.numel():
            continue
        smallest, largest = (float(v) for v in torch.aminmax(chunk))
        low, high = min(low, smallest), max(high, largest)
        magnitude = chunk.abs()
        if part[0] or part[SIGN_BIN]:  # zeros and tiny subnormals share the first bin
            zeros += int((chunk == 0).sum())
            magnitude = torch.where(magnitude == 0, torch.inf, magnitude)
        absmin = min(absmin, float(magnitude.amin()))
        wide = chunk.double()
        if shift is None:
            shift = float(wide.mean())
        wide = wide - shift
        square = wide * wide
        sums += [float(wide.sum()), float(square.sum()), float(square @ wide), float(square @ square)]
    return _from_sums(x.numel(), counts, sums, shift or 0.0, low, high, absmin, zeros, nans, infs)


def _from_sums(
    numel: int,
    counts: np.ndarray,
    sums: np.ndarray,
    shift: float,
    low: float,
    high: float,
    absmin: float,
    zeros: int,
    nans: int,
    infs: int,
) -> Summary:
    """From dense counts of the finite values and their sums of (x - shift)^k, k = 1 to 4."""
    n = int(counts.sum())
    used = counts.nonzero()[0]
    if n:
        s1, s2, s3, s4 = (float(v) for v in sums / n)
        mean = shift + s1
        central = (s2 - s1**2, s3 - 3 * s1 * s2 + 2 * s1**3, s4 - 4 * s1 * s3 + 6 * s1**2 * s2 - 3 * s1**4)
        central = (max(central[0], 0.0), *central[1:])
        rms = math.sqrt(max(s2 + 2 * shift * s1 + shift**2, 0.0))
        if low == high:  # no spread, whatever the sums' rounding says
            mean, rms, central = low, abs(low), (0.0, 0.0, 0.0)
    else:
        mean, central, rms = math.nan, (math.nan,) * 3, math.nan
    return _summary(
        numel=numel,
        low=low if n else math.nan,
        high=high if n else math.nan,
        absmin=absmin if absmin < math.inf else math.nan,
        mean=mean,
        rms=rms,
        central=central,
        zeros=zeros,
        nans=nans,
        infs=infs,
        sketch=(used, counts[used]),
    )

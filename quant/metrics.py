"""The error of a quantized tensor against the original."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from binade.quant import sketch
from binade.quant.backends import Backend, cpu, resolve_backend
from binade.quant.backends.counts import Counted
from binade.quant.backends.score_numbers import ScoreNumber
from binade.quant.block_histograms import Histogram, block_histograms_later, histograms
from binade.quant.blocks import GROUP, look
from binade.quant.code_usage import usage
from binade.quant.definitions import METRICS as METRICS
from binade.quant.elements import RoundingMode
from binade.quant.formats import Format
from binade.quant.later import Later, LaterPart
from binade.quant.measurements import Errors as Errors
from binade.quant.memory import ordinary
from binade.quant.quantizer import DTYPES, apply, check_tensor, outer_absmax
from binade.quant.reference import from_blocks, per_group, to_blocks
from binade.quant.scaling import has_kernel
from binade.quant.specs import Block, Spec
from binade.quant.statistics import CHUNK, DEVICE_CHUNK, outlier_ratio
from binade.quant.summary import summarize
from binade.quant.transform import mean_energy, transform, transform_back, untransformed

DISTANCES = {"ks": sketch.ks, "wasserstein": sketch.wasserstein, "js": sketch.js}


def sqnr_db(signal: float, noise: float) -> float:
    """10·log10(signal / noise) in dB, of two sums of squares: Σx² and Σ(q-x)².

    +inf for zero noise, -inf for infinite noise (a finite x became infinite), NaN for zero signal or NaN noise.
    """
    if not signal > 0 or math.isnan(noise):
        return math.nan
    if noise in (0.0, math.inf):
        return -math.inf if noise else math.inf
    return 10 * math.log10(signal / noise)


def errors(x: Tensor, q: Tensor) -> Errors:
    """The error of q against x: floating tensors of one shape. Raises ValueError for different shapes."""
    errors = _measured(_error_sums(x, q).numpy(force=True), x.numel())
    return replace(errors, saturated=math.nan, saturated_error_share=math.nan)


def _error_sums(x: Tensor, q: Tensor, over: Tensor | None = None) -> Tensor:
    """The numbers of ScoreNumber, float64 on x's device. over: which elements saturate, bool of x's shape; none by
    default. It does not wait for a GPU. Raises ValueError for different shapes."""
    x, q = ordinary(x), ordinary(q)
    if x.shape != q.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}, its quantized version {tuple(q.shape)}: they must be equal")
    if over is None:
        if (numbers := cpu.measure(x, q)) is not None:
            return torch.from_numpy(numbers)
        if _has_triton(x) and _has_triton(q):
            return _triton_score(x, q)[0]
        over = torch.zeros((), dtype=torch.bool, device=x.device).expand(x.shape)
    chunk = CHUNK if x.device.type == "cpu" else DEVICE_CHUNK
    total = torch.zeros(len(ScoreNumber), dtype=torch.float64, device=x.device)
    for a, b, clipped in zip(*(torch.split(t.reshape(-1), chunk) for t in (x, q, over)), strict=True):
        if not a.numel():
            continue
        a, b = a.double(), b.double()
        ok = a.isfinite()
        if x.device.type != "cpu" or not bool(ok.all()):
            a, b = torch.where(ok, a, 0.0), torch.where(ok, b, 0.0)
        e = b - a
        nonzero, clipped = a != 0, clipped & ok
        flushed, cut = nonzero & (b == 0), torch.where(clipped & (b != 0), e, 0.0)
        total[4] = torch.maximum(total[4], e.abs().amax())
        total[:4] += torch.stack((a @ a, b @ b, a @ b, e @ e))
        total[5:9] += torch.stack((ok.sum(), nonzero.sum(), flushed.sum(), clipped.sum()))
        lost = torch.where(flushed, a, 0.0)
        total[9:] += torch.stack((lost @ lost, cut @ cut))
    return total


def _has_triton(x: Tensor, backend: str = "auto") -> bool:
    """Whether the Triton kernel measures a tensor: any spec with y, those that it knows without."""
    return bool(x.numel()) and x.dtype in DTYPES and resolve_backend(backend, x) == Backend.TRITON


def _triton_score(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    from binade.quant.backends import triton_kernels  # imported at its first use, as only this needs triton

    return triton_kernels.score(*arguments, **options)


def _measured(numbers: np.ndarray, numel: int) -> Errors:
    """Errors from the numbers of ScoreNumber, of a tensor of so many elements."""
    xx, qq, xq, ee, largest, finite, nonzero, flushed, saturated, lost, cut = numbers[: len(ScoreNumber)].tolist()
    return Errors(
        sqnr_db=sqnr_db(xx, ee),
        mse=ee / finite if finite else math.nan,
        relative_error=math.sqrt(ee / xx) if xx else math.nan,
        cosine=xq / math.sqrt(xx * qq) if xx and qq else math.nan,
        projection=xq / xx if xx else math.nan,
        max_abs_error=(math.nan if ee != ee else largest) if finite else math.nan,
        flush_to_zero=flushed / nonzero if nonzero else math.nan,
        underflow_of_all=flushed / numel if numel else math.nan,
        saturated=saturated / numel if numel else math.nan,
        flushed_error_share=share_of(lost, ee),
        saturated_error_share=share_of(cut, ee),
    )


def share_of(part: float, noise: float) -> float:
    """The share of a part in a sum of squares; NaN if that is 0 or NaN. An infinite part is all of it."""
    if not noise > 0:
        return math.nan
    return 1.0 if part == math.inf else part / noise


def sqnr_later(x: Tensor, q: Tensor) -> Later[float]:
    """`sqnr_db` of q against x, tensors of one shape."""
    return Later(lambda sums: sqnr_db(float(sums[0]), float(sums[3])), LaterPart(_error_sums(x, q)))


def compare(
    x: Tensor, y: Tensor, fmt: str | Format | Spec | None = None, dim: int = -1, **options: object
) -> dict[str, float]:
    """Return all scalar metrics by name (see METRICS): errors of y relative to x; kurtosis, crest_factor,
    dynamic_range, outlier_ratio and mean_energy of x; and the distances ks, wasserstein and js between the
    distributions of x and y, computed from their sketches with the error bounds that `sketch` states.

    saturated, codes_used, code_entropy_bits and scale_exponent_min/max are NaN unless you pass the format that y was
    rounded to (and its `options`, see `specs.OPTIONS`). Metrics that are not scalars or need a matrix decomposition
    (SVD) have their own functions: `usage`, and in `statistics` `channel_absmax`, `block_crest_factor`, `stable_rank`.

    Raises:
        ValueError: x and y have different shapes.
    """
    x, y = ordinary(x), ordinary(y)
    metrics = asdict(errors(x, y))
    used = dict.fromkeys(("codes_used", "code_entropy_bits", "scale_exponent_min", "scale_exponent_max"), math.nan)
    if fmt is not None:
        spec = Spec.of(fmt, **options)
        scored = score(x, spec, dim)
        shares = ("saturated", *(("flush_to_zero", "underflow_of_all") if spec.centered else ()))
        metrics |= {name: getattr(scored, name) for name in shares}
        codes = usage(x, spec, dim)
        used = {name: getattr(codes, name) for name in used}
    x_summary, y_summary = summarize(x), summarize(y)
    return (
        metrics
        | used
        | {
            "relative_squared_error": metrics["relative_error"] ** 2,
            "outlier_ratio": outlier_ratio(x),
            "mean_energy": mean_energy(x),
        }
        | {name: getattr(x_summary, name) for name in ("kurtosis", "crest_factor", "dynamic_range")}
        | {name: distance(x_summary.sketch, y_summary.sketch) for name, distance in DISTANCES.items()}
    )


def _saturated(x: Tensor, spec: Spec, scales: Tensor | None, dim: int, absmax: Tensor | None = None) -> Tensor | None:
    """Which elements saturate, |x/scale| > largest finite: bool of x's shape, None if none can. Those that round to the
    largest code do not.

    Exact, without float32's rounding of a quotient: a tensor that is scaled by its finite absmax has none. A block
    whose scale underflows to 0 is flushed. NaN and Inf do not count. scales: as `quantizer.apply` returns them.
    """
    if not spec.scaling.saturates and not spec.history:
        return None
    absmax = outer_absmax(x, spec, dim) if absmax is None else absmax
    if spec.scaling.per_element:
        return from_blocks(look(x, spec, dim).clipped, x, dim, spec.block)
    magnitude = x.detach().abs().nan_to_num(0.0, 0.0)
    run = spec.run(x.shape[dim] if x.dim() else 1)
    if run is None:
        left, right = spec.scaling.saturation(None, spec, absmax)
        return magnitude.float() > right / left  # a bfloat16 tensor would round the limit to bfloat16
    assert scales is not None, "the scales of a block format are missing"
    line = Block(1, run)
    absmax = per_group(absmax, x, dim, line) if absmax.dim() else absmax
    scales = scales.transpose(1, 2).reshape(-1, 1)  # [groups, 1], in to_blocks' order
    left, right = spec.scaling.saturation(scales, spec, absmax)
    over = to_blocks(magnitude, dim, line).double() * left > scales.double() * right
    return from_blocks(over & (scales > 0), x, dim, line)


def score(
    x: Tensor, fmt: str | Format | Spec, dim: int = -1, *, backend: str = "auto", seed: int = 0,
    sign_seed: int | None = None, absmax: Tensor | None = None, **options: object,
) -> Errors:  # fmt: skip
    """The error of x rounded to a format, blocks along `dim`. Options as in `fake_quantize`; sign_seed and absmax as in
    `blocks.look`."""
    return score_later(x, Spec.of(fmt, **options), dim, backend, seed=seed, sign_seed=sign_seed, absmax=absmax)()


def score_later(
    x: Tensor,
    spec: Spec,
    dim: int = -1,
    backend: str = "auto",
    codes: Counted | None = None,
    seed: int = 0,
    sign_seed: int | None = None,
    absmax: Tensor | None = None,
) -> Later[Errors]:
    """As `score`, without waiting for a GPU. With codes, which is `counted(x)`, a format without block scales rounds
    each distinct value once. For a spec that transforms values, everything refers to the coded values, which are the
    ones rounded, but for the errors of a centered spec, which refer to x; SQNR is the same before and after a rotation.
    absmax: of the outer block, if it is known."""
    if spec.transforms and x.numel():
        x = check_tensor(x, dim, seed)
        sign_seed = seed if sign_seed is None else sign_seed
        coded, plain = transform(x, spec, dim, sign_seed), untransformed(spec)
        errors = score_later(coded, plain, dim, backend, seed=seed, absmax=absmax)
        if spec.centered:
            rounded = apply(coded, plain, dim, backend, seed=seed, absmax=absmax)[0]
            errors = of_original(errors, x, transform_back(rounded, x, spec, dim, sign_seed))
        return errors
    countable = not spec.has_blocks and spec.rounding != RoundingMode.STOCHASTIC
    if codes and countable and len(codes.values) < x.numel():
        return Later(lambda: _score_counted(codes, spec))
    x = check_tensor(x, dim, seed)
    if _has_triton(x, backend) and has_kernel(spec):
        return _errors(_triton_score(x, None, spec, dim, None, absmax, seed)[0], x.numel())
    if x.device.type == "cpu" and resolve_backend(backend, x) == Backend.TORCH and x.numel():
        numbers = cpu.score(x, spec, dim, seed)
        if numbers is not None:
            return Later.known(_measured(numbers, x.numel()))
    q, scales = apply(x, spec, dim, backend, want_scales=True, seed=seed, absmax=absmax)
    return errors_later(x, q, spec, scales, dim, absmax)


def streamed_score(x: Tensor, fmt: str | Format | Spec, dim: int = -1, **options: object) -> Errors | None:
    """As `score` for a tensor on the CPU, without memory for a second tensor; None if no kernel supports it."""
    spec = Spec.of(fmt, **options)
    x = check_tensor(x, dim)
    numbers = None if spec.transforms or not x.numel() else cpu.score(x, spec, dim)
    return None if numbers is None else _measured(numbers, x.numel())


def _score_counted(codes: Counted, spec: Spec) -> Errors:
    """As `score`, for a tensor with these values and a format that rounds each by itself."""
    values = torch.from_numpy(codes.values).to(codes.dtype)
    finite = np.isfinite(codes.values)
    x, counts = codes.values[finite].astype(np.float64), codes.counts[finite]
    q = apply(values, spec)[0].double().numpy()[finite]
    numel = int(codes.counts.sum())
    left, right = spec.scaling.saturation(None, spec, outer_absmax(values, spec, -1))
    over = np.abs(x) * left > float(right)
    if not len(x):
        return _measured(np.zeros(len(ScoreNumber)), numel)
    with np.errstate(invalid="ignore", over="ignore"):
        e = q - x
        squares = counts * e * e
        sums = [counts @ (x * x), counts @ (q * q), counts @ (x * q), squares.sum(), np.abs(e).max()]
    nonzero = x != 0
    flushed = nonzero & (q == 0)
    held = [counts.sum(), counts[nonzero].sum(), counts[flushed].sum(), counts[over].sum()]
    return _measured(np.array([*sums, *held, squares[flushed].sum(), squares[over & (q != 0)].sum()]), numel)


def errors_later(
    x: Tensor, q: Tensor, spec: Spec, scales: Tensor | None, dim: int, absmax: Tensor | None = None
) -> Later[Errors]:
    """As `score_later`, for a q that is already computed, with scales as `quantizer.apply` returns them. absmax: as
    given to `quantizer.apply`."""
    x, q = ordinary(x), ordinary(q)
    if not x.numel():
        return Later.known(errors(x, q))
    if (numbers := cpu.measure(x, q, spec, dim, scales)) is not None:
        return Later.known(_measured(numbers, x.numel()))
    if _has_triton(x):
        return _errors(_triton_score(x, q, spec, dim, scales, absmax)[0], x.numel())
    return _errors(_error_sums(x, q, _saturated(x, spec, scales, dim, absmax)), x.numel())


def errors_from_later(
    x: Tensor,
    source: Tensor,
    q: Tensor,
    spec: Spec,
    scales: Tensor | None,
    dim: int,
    absmax: Tensor | None = None,
    rows: Tensor | None = None,
) -> Later[Errors]:
    """As `errors_later`, for a q that was rounded from `source`: x as it had been rounded before. A value that either
    rounding makes 0 is flushed; one that exceeds the scale of the second saturates. rows: as in
    `score_of_rows_later`."""
    absmax = outer_absmax(source, spec, dim) if absmax is None else absmax
    if spec.scaling.per_element:
        over: Tensor | None = from_blocks(look(x, spec, dim, source=source).clipped, x, dim, spec.block)
    else:
        over = _saturated(x, spec, scales, dim, absmax)
    over = torch.zeros_like(x, dtype=torch.bool) if over is None else over
    parts = [x.detach(), q.detach(), over]
    if rows is not None:
        parts = [part.flatten(0, -2).index_select(0, rows) for part in parts]
    return _errors(_error_sums(*parts), parts[0].numel())


def of_original(coded: Later[Errors], x: Tensor, q: Tensor) -> Later[Errors]:
    """The error of q, float32, against x, with the flushed and saturated shares of the coded values: those of a
    centered spec. No GEMM rounds q to x's dtype: it multiplies the mean separately."""
    numel = x.numel()
    shares = "flush_to_zero", "underflow_of_all", "saturated", "flushed_error_share", "saturated_error_share"

    def merged(sums: np.ndarray, of_coded: Errors) -> Errors:
        return replace(_measured(sums, numel), **{name: getattr(of_coded, name) for name in shares})

    return Later(merged, LaterPart(_error_sums(x.float(), q)), coded)


def _errors(numbers: Tensor, numel: int) -> Later[Errors]:
    """Of the numbers of ScoreNumber on a device."""
    return Later(lambda host_numbers: _measured(host_numbers, numel), LaterPart(numbers))


def score_blocks_later(
    x: Tensor, spec: Spec, dim: int, q: Tensor | None = None, scales: Tensor | None = None, absmax: Tensor | None = None
) -> tuple[Later[Errors], Later[dict[str, Histogram]]]:
    """As `errors_later` and `block_histograms_later`, for a nonempty x, in one pass if there is a kernel for both.
    Without q, x is rounded here."""
    x = ordinary(x)
    sums = cpu.score(x, spec, dim, blocks=True) if q is None else cpu.measure(x, q, spec, dim, scales, blocks=True)
    if sums is not None:
        return Later.known(_measured(sums, x.numel())), Later.known(histograms(sums[len(ScoreNumber) :]))
    triton = _has_triton(x)
    if q is None and not (triton and has_kernel(spec)):
        q, scales = apply(x, spec, dim, want_scales=True, absmax=absmax)
    if triton:
        numbers, counts = _triton_score(x, q, spec, dim, scales, absmax, blocks=True)
        assert counts is not None
        return _errors(numbers, x.numel()), Later(histograms, LaterPart(counts))
    assert q is not None and scales is not None, "the scales of a block format are missing"
    return errors_later(x, q, spec, scales, dim, absmax), block_histograms_later(x, q, spec, scales, dim)


def score_of_rows_later(
    x: Tensor, spec: Spec, dim: int, rows: Tensor, q: Tensor | None = None, absmax: Tensor | None = None
) -> Later[Errors]:
    """As `score_later` and, with q, `errors_later`, but over these rows of x [..., columns] alone, by their indices in
    [rows, columns]. All of x is rounded: the other rows may determine scales. A rotation must not mix rows."""
    if spec.centered:
        coded, plain = transform(x, spec, dim, 0), untransformed(spec)
        back = transform_back(apply(coded, plain, dim)[0] if q is None else q, x, spec, dim, 0)
        values, rounded = (t.flatten(0, -2).index_select(0, rows) for t in (x.detach(), back))
        return of_original(score_of_rows_later(coded, plain, dim, rows, q, absmax), values, rounded)
    if spec.hadamard:
        x, spec = transform(x, spec, dim, 0), untransformed(spec)
    looked = look(x, spec, dim, absmax=absmax)
    block = GROUP if not spec.has_blocks else spec.block
    clipped = from_blocks(looked.clipped, x, dim, block)
    selection = (
        t.detach().flatten(0, -2).index_select(0, rows) for t in (x, looked.result if q is None else q, clipped)
    )
    values, rounded, over = selection
    return _errors(_error_sums(values, rounded, over), values.numel())


def scores_later(
    x: Tensor, specs: Sequence[Spec], dim: int = -1, blocks: bool = False, codes: Counted | None = None
) -> list[tuple[Later[Errors], Later[dict[str, Histogram]] | None]]:
    """`score_later` for each spec; with `blocks`, of those that have blocks also `block_histograms_later`. Formats for
    which Triton has a kernel share a pass over x. codes: `counted(x)`, if it is known."""
    x = ordinary(x)
    scores: dict[Spec, tuple[Later[Errors], Later[dict[str, Histogram]] | None]] = {}
    together = [spec for spec in specs if _has_triton(x) and has_kernel(spec) and not spec.transforms]
    if together:
        from binade.quant.backends import triton_kernels  # as in _triton_score

        x = check_tensor(x, dim)
        results = triton_kernels.score_formats(x, together, dim, blocks=blocks)
        for spec, (numbers, counts) in zip(together, results, strict=True):
            histogram = None if counts is None else Later(histograms, LaterPart(counts))
            scores[spec] = _errors(numbers, x.numel()), histogram
    for spec in specs:
        if spec not in scores and blocks and x.numel() and spec.has_blocks:
            coded = transform(x, spec, dim, 0)
            plain = untransformed(spec)
            errors, blocks_of = score_blocks_later(coded, plain, dim)
            if spec.centered:
                errors = of_original(errors, x, transform_back(apply(coded, plain, dim)[0], x, spec, dim, 0))
            scores[spec] = errors, blocks_of
        elif spec not in scores:
            scores[spec] = score_later(x, spec, dim, codes=codes), None
    return [scores[spec] for spec in specs]

"""`conform`: whether a quantizer computes a spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from binade.quant.conformance.inputs import Case, cases
from binade.quant.conformance.report import CaseRow, Conformance
from binade.quant.conformance.stochastic import Draws, can_be_tested, statistical_rows, tests_note
from binade.quant.elements import RoundingMode
from binade.quant.formats import Format
from binade.quant.identification.pair import INTEGERS, Pair
from binade.quant.quantizer import fake_quantize
from binade.quant.specs import Spec, SpecError

Quantizer = Callable[..., Tensor]
CONTRACT = "a tensor of the same shape, dtype and device"
"""The case that comes first. If a quantizer fails it, the others say nothing more."""


def conform(
    function: Quantizer,
    spec: str | Format | Spec,
    dim: int = -1,
    *,
    seed: int = 0,
    device: str = "cpu",
    skip: Sequence[str] = (),
    **options: object,
) -> Conformance:
    """Compare a quantizer with a spec on inputs on which quantizers go wrong.

    Args:
        function: Takes x and returns x quantized and dequantized, of the same shape, dtype and device. x is float32,
            bfloat16 or float16, of any strides. If a parameter is named `seed`, it gets one. Of stochastic rounding,
            each call draws anew.
        spec: What it should compute, such as "mxfp8(scale=rceil)" or "nvfp4(rounding=stochastic)".
        dim: The axis of a matrix that blocks lie along: -1, or 0.
        seed: Of the inputs, and the first seed of the function.
        device: Where the inputs are.
        skip: Names of cases that are left out: those on which the function differs on purpose, such as "NaN".
        **options: Of the spec.

    A deterministic spec is compared bit for bit with `fake_quantize`. With stochastic rounding, each value must be one
    of its two neighbors, and the draws are tested as in `quant.conformance.stochastic`.

    Raises SpecError for an unknown spec, a name in `skip` that is no case, and a spec whose result depends on random
    signs or earlier tensors, or whose stochastic rounding is of scales.
    """
    spec = Spec.of(spec, **options)
    stochastic = spec.rounding == RoundingMode.STOCHASTIC
    if spec.history or spec.signs == "random" or spec.scaling.stochastic or (stochastic and not can_be_tested(spec)):
        raise SpecError(f"{spec} cannot be tested: its result depends on more than x and the rounding of its elements")
    call = _Quantizer(function, seed)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).to(device)
    checks: dict[str, Callable[[], CaseRow]] = {CONTRACT: lambda: _contract(call, x)}
    for case in cases(spec, dim, seed):
        checks[case.name] = lambda case=case: _compared(call, case, spec, device)  # type: ignore[misc]
    checks["x is not changed"] = lambda: _unchanged(call, x)
    if stochastic:
        checks |= statistical_rows(Draws(call, spec, device, seed))
    else:
        checks["equal calls give equal results"] = lambda: _repeated(call, x)
    if unknown := [name for name in skip if name not in checks]:
        raise SpecError(f"{unknown[0]!r} is no case: expected some of {', '.join(checks)}")
    rows: list[CaseRow] = []
    for name, check in checks.items():
        if name not in skip:
            rows.append(_guarded(name, check))
            if name == CONTRACT and not rows[-1].passed:
                note = f"The other {len(checks) - 1} cases were not run: none can pass."
                return Conformance(call.name, str(spec), tuple(rows), note)
    return Conformance(call.name, str(spec), tuple(rows), tests_note() if stochastic else "")


class _Quantizer:
    """The quantizer: gets a seed if it takes one."""

    def __init__(self, function: Quantizer, seed: int) -> None:
        self.function, self.seed = function, seed
        self.name = getattr(function, "__name__", type(function).__name__)
        try:
            self.seeded = "seed" in inspect.signature(function).parameters
        except (TypeError, ValueError):  # builtins have no signature
            self.seeded = False

    def __call__(self, x: Tensor, seed: int | None = None) -> Tensor:
        y = self.function(x, **({"seed": self.seed if seed is None else seed} if self.seeded else {}))
        if not isinstance(y, Tensor):
            raise TypeError(f"returned {type(y).__name__}: expected one tensor, x quantized and dequantized")
        for what in ("shape", "dtype", "device"):
            if getattr(y, what) != getattr(x, what):
                raise TypeError(f"returned the {what} {getattr(y, what)} for {getattr(x, what)}")
        return y


def _guarded(name: str, check: Callable[[], CaseRow]) -> CaseRow:
    """The row; if the quantizer raises an exception, a failure with its first line."""
    try:
        return check()
    except (Exception, SystemExit) as error:
        message = (str(error) or type(error).__name__).partition("\n")[0]
        return CaseRow(name, False, 0, None, f"{type(error).__name__}: {message}")


def _contract(call: _Quantizer, x: Tensor) -> CaseRow:
    return CaseRow(CONTRACT, True, call(x.clone()).numel())


def _compared(call: _Quantizer, case: Case, spec: Spec, device: str) -> CaseRow:
    x = case.x.to(device)
    given = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)  # it may write into it
    y = call(given)
    if not x.numel():
        return CaseRow(case.name, True, 0)
    possible = list(_possible(x, spec, case.dim))
    wrong = torch.ones_like(y, dtype=torch.bool)
    for want in possible:
        wrong &= _bits(y) != _bits(want)
        wrong &= ~(y.isnan() & want.isnan())
    count = int(wrong.sum())
    if not count:
        return CaseRow(case.name, True, y.numel())
    at = tuple(int(i) for i in wrong.nonzero()[0])
    wanted = " or ".join(dict.fromkeys(repr(float(want[at])) for want in possible))
    detail = f"at {list(at)}: x {float(x[at])!r} gave {float(y[at])!r}, expected {wanted}"
    return CaseRow(case.name, False, y.numel(), count, detail)


def _bits(y: Tensor) -> Tensor:
    return y.contiguous().view(INTEGERS[y.dtype])


def _possible(x: Tensor, spec: Spec, dim: int) -> Iterator[Tensor]:
    """The results that the spec allows: one, or with stochastic rounding two for each value."""
    if spec.rounding != RoundingMode.STOCHASTIC:
        yield fake_quantize(x, spec, dim)
        return
    at = dim % x.dim()
    pair = Pair.of(x, x, at)
    for bound in pair.steps(spec, pair).bounds:
        y = bound.to(x.dtype)
        lines = [size for axis, size in enumerate(x.shape) if axis != at]
        yield y.reshape(*lines, x.shape[at]).movedim(-1, at)


def _unchanged(call: _Quantizer, x: Tensor) -> CaseRow:
    before = x.clone()
    call(x)
    changed = int((_bits(before) != _bits(x)).sum())
    return CaseRow(
        "x is not changed", not changed, x.numel(), changed, f"{changed:,} values of x were written" if changed else ""
    )


def _repeated(call: _Quantizer, x: Tensor) -> CaseRow:
    first = call(x.clone()).clone()  # it may return the same memory each time
    different = int((_bits(first) != _bits(call(x.clone()))).sum())
    return CaseRow("equal calls give equal results", not different, x.numel(), different)

"""The error of a format on an operand of a GEMM: measured while that is in memory, fetched when its step ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from binade.data.segment import Score
from binade.data.tensor_kinds import Gemm
from binade.quant.backends.counts import Counted
from binade.quant.block_histograms import Histogram
from binade.quant.gemm import Observed
from binade.quant.later import Later
from binade.quant.metrics import Errors, errors_later, loss_terms_later, score_blocks_later, score_later
from binade.quant.quantizer import unrotated
from binade.quant.reference import absmax_over
from binade.quant.rotation import rotate
from binade.quant.specs import TENSOR, Spec


@dataclass
class Tried:
    """One format on one operand of one GEMM; used: whether the GEMM rounded the operand to it."""

    format: str
    gemm: Gemm | None
    used: bool
    errors: Later[Errors]
    blocks: Later[dict[str, Histogram]] | None = None
    first: Later[list[float]] | None = None
    second: Later[list[float]] | None = None

    def predict(
        self,
        operand: Observed,
        gradients: Callable[[], Iterable[Tensor]],
        split: Callable[[Tensor], Sequence[Tensor]] | None,
        scale: Callable[[], float] | None,
    ) -> None:
        """Predict the change in the loss from the gradients of the operand, or of its parts (`split`), one for each
        sequence. scale: the factor by which the loss was multiplied; None for gradients of sampled labels."""
        x = operand.tensor
        again = operand.rounded if self.used else None
        q = again() if again else Spec.of(self.format)
        terms = loss_terms_later(x, q, gradients, operand.dim, split)
        if scale is None:
            self.second = terms.map(lambda found: [second * len(found) for _, second in found])
        else:
            factor = scale
            self.first = terms.map(lambda found: [first * len(found) / factor() for first, _ in found])

    @property
    def results(self) -> list[Later[Any]]:
        return [each for each in (self.errors, self.blocks, self.first, self.second) if each]

    def score(self) -> Score:
        first, second = (each() if each else None for each in (self.first, self.second))
        blocks = self.blocks() if self.blocks else {}
        return Score(self.format, self.errors(), self.gemm, self.used, first, second, blocks)


def try_formats(
    seen: Observed,
    formats: Sequence[str],
    gemm: Gemm | None,
    blocks: bool = False,
    codes: Counted | None = None,
    before: Sequence[Tried] = (),
) -> list[Tried]:
    """The format that the operand was rounded to, with the error that this made, and each of the formats. blocks:
    whether to measure them too. codes: `counted` of its tensor, if known. before: what was tried on the same tensor in
    another GEMM; a format without blocks does the same along each axis. On a GPU nothing waits for it."""
    found = []
    used = None if seen.spec is None else str(seen.spec)
    if seen.spec and used and seen.coded is not None and seen.quantized is not None:
        rounded = seen.coded, seen.quantized, seen.scales, seen.absmax
        found.append(_measured(seen, seen.spec, gemm, blocks, *rounded))
    x = seen.tensor
    whole = cache(lambda: absmax_over(x.detach(), -1, TENSOR))  # that of the tensor, for all formats that need it
    for spec in (Spec.of(name) for name in formats if name != used):
        shared = TENSOR in (spec.block, spec.scaling.outer) and not (spec.history or spec.hadamard)
        absmax = whole() if shared and x.device.type != "cpu" else None
        same = next((each for each in before if each.format == str(spec) and not each.used), None)
        if same and spec.block in (None, TENSOR) and not spec.hadamard:
            found.append(replace(same, gemm=gemm, blocks=None, first=None, second=None))
        elif blocks and x.numel() and spec.block not in (None, TENSOR):
            coded = rotate(x, spec, seen.dim, 0).to(x.dtype) if spec.hadamard else x
            found.append(_measured(seen, spec, gemm, blocks, coded, None, None, absmax))
        else:
            found.append(Tried(str(spec), gemm, False, score_later(x, spec, seen.dim, codes=codes, absmax=absmax)))
    return found


def _measured(
    seen: Observed,
    spec: Spec,
    gemm: Gemm | None,
    blocks: bool,
    x: Tensor,
    q: Tensor | None,
    scales: Tensor | None,
    absmax: Tensor | None,
) -> Tried:
    """Measure the error of x (the operand or its rotation) rounded to q or, without q, by the spec."""
    used, plain = spec is seen.spec, unrotated(spec)
    if q is not None and not (blocks and scales is not None and x.numel()):
        return Tried(str(spec), gemm, used, errors_later(x, q, plain, scales, seen.dim, absmax))
    return Tried(str(spec), gemm, used, *score_blocks_later(x, plain, seen.dim, q, scales, absmax))

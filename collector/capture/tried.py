"""What a format does to an operand of a GEMM: measured while the operand is at hand, fetched when it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from binade.data.segment import Score
from binade.data.tensor_kinds import Gemm
from binade.quant.backends.counts import Counted
from binade.quant.gemm import Observed
from binade.quant.metrics import Errors, errors_later, loss_change_later, score_later
from binade.quant.quantizer import fake_quantize, unrotated
from binade.quant.specs import Spec


@dataclass
class Tried:
    """One format on one operand of one GEMM; used: the one that the GEMM rounded it to."""

    format: str
    gemm: Gemm | None
    used: bool
    errors: Callable[[], Errors]
    loss: Callable[[], tuple[float, float]] | None = None

    def predict(self, operand: Observed, gradient: Tensor, loss_scale: float) -> None:
        """Predict the change of the loss from the operand's gradient, which holds the loss times loss_scale."""
        x = operand.tensor
        again = operand.rounded if self.used else None
        q = again() if again else fake_quantize(x, self.format, operand.dim)
        change = loss_change_later(x, q, gradient.reshape(x.shape))

        def scaled() -> tuple[float, float]:
            first, fisher = change()
            return first / loss_scale, fisher / loss_scale**2

        self.loss = scaled

    def score(self) -> Score:
        first, fisher = self.loss() if self.loss else (None, None)
        return Score(self.format, self.errors(), self.gemm, self.used, first, fisher)


def try_formats(seen: Observed, formats: Sequence[str], gemm: Gemm | None, codes: Counted | None = None) -> list[Tried]:
    """The format that the operand was rounded to, with the error that this made, and each of the formats. codes:
    `counted` of its tensor, if known. On a GPU nothing waits for it."""
    found = []
    used = None if seen.spec is None else str(seen.spec)
    if seen.spec and used and seen.coded is not None and seen.quantized is not None:
        error = errors_later(seen.coded, seen.quantized, unrotated(seen.spec), seen.scales, seen.dim, seen.absmax)
        found.append(Tried(used, gemm, True, error))
    for name in formats:
        if name != used:
            found.append(Tried(name, gemm, False, score_later(seen.tensor, Spec.of(name), seen.dim, codes=codes)))
    return found

"""HiFloat8 is meant to be used with a scale: where it is shown without one, these functions say what a scale would
do."""

from __future__ import annotations

from binade.app.style import MEASURES
from binade.quant.formats import ScaleRule
from binade.quant.specs import Spec


def with_scale(spec: Spec | str) -> Spec | None:
    """The spec with a tensor scale that maps absmax to 8, if it is a HiFloat8 spec without a scale."""
    spec = Spec.of(spec)
    without = spec.scale == ScaleRule.NONE and ScaleRule.AMAX8 in spec.format.scale_rules
    return Spec.of(spec, scale=ScaleRule.AMAX8) if without else None


def would_be(spec: Spec, sqnr_db: float | None, flushed: float | None = None) -> str:
    """A sentence to follow a verdict. flushed: the share of the nonzero values."""
    share = "" if flushed is None else f" and {flushed:.2%} flushed"
    return f" With a tensor scale, {spec}: {MEASURES['sqnr_db'].quantity(sqnr_db)}{share}."

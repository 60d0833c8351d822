"""HiFloat8 is meant to be used with a scale: where it is shown without one, pages say what a scale would do."""

from __future__ import annotations

from binade.quant.specs import Spec


def with_scale(spec: Spec | str) -> Spec | None:
    """The spec with a tensor scale that maps absmax to 8, if it is a HiFloat8 spec without a scale."""
    spec = Spec.of(spec)
    without = spec.scale == "none" and "amax8" in spec.format.scale_rules
    return Spec.of(spec, scale="amax8") if without else None

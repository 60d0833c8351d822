"""A device that trains, as data: its published peak rates and its memory. No torch."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from binade.data.json_files import STRICT
from binade.quant.formats import FORMATS
from binade.quant.specs import Spec

Positive = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]  # so that no time overflows


@cache
def _format_of(spec: str) -> str:
    return Spec.of(spec).format.name


def _check_rates(rates: dict[str, float]) -> dict[str, float]:
    # int8 is published, but no format here is an integer without block scales.
    families = {name.partition("_")[0] for name in FORMATS}
    if unknown := rates.keys() - {*FORMATS, *families, "int8"}:
        raise ValueError(f"{min(unknown)} is no format, nor the first part of one's name")
    if "bf16" not in rates:
        raise ValueError("bf16 is missing")
    return rates


@dataclass(frozen=True, config=STRICT)
class Device:
    """
    title      its name in sentences
    rates      dense peak TFLOP/s by format, or by the first part of its name: mxfp6 is mxfp6_e2m3 and mxfp6_e3m2
    bandwidth  of its memory, TB/s
    memory     GB
    source     where these numbers are published; read: how much of that was read
    """

    title: str
    rates: Annotated[dict[str, Positive], AfterValidator(_check_rates)]
    bandwidth: Positive
    memory: Positive
    source: str = ""
    read: Literal["read", "excerpt", "recalled"] = "read"

    def published_rate(self, spec: str) -> float | None:
        """The peak rate of a GEMM whose operands have this spec, FLOP/s; None if the device has none."""
        name = _format_of(spec)
        rate = self.rates.get(name, self.rates.get(name.partition("_")[0]))
        return None if rate is None else rate * 1e12

    def rate(self, spec: str) -> float:
        """The same, but that of bf16 where there is none: such a format is emulated."""
        return self.published_rate(spec) or self.rates["bf16"] * 1e12

"""Number formats and the arithmetic done in them.

    from binade import quant
    y = quant.fake_quantize(x, "mxfp8", dim=-1)
    quant.compare(x, y)["sqnr_db"]

`formats`, `elements` and `scaling` define the formats. `reference` defines how a tensor is rounded to one. `backends`
gives the same bits faster. Names are imported when they are first used, so that `quant.formats` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from binade.quant.accumulation import ACCUMULATORS, Accumulator
    from binade.quant.blocks import Blocks, look
    from binade.quant.code_usage import Usage, usage
    from binade.quant.conformance.check import conform
    from binade.quant.formats import FORMATS, Format, UnknownFormatError
    from binade.quant.identification.search import identify
    from binade.quant.measurements import Errors, Summary
    from binade.quant.metrics import METRICS, compare, score, sqnr_db
    from binade.quant.quantizer import Quantized, fake_quantize, quantize
    from binade.quant.rotation import hadamard_rotate
    from binade.quant.sketch import Sketch
    from binade.quant.summary import summarize

_MODULES = {
    "accumulation": ("ACCUMULATORS", "Accumulator"),
    "blocks": ("Blocks", "look"),
    "conformance.check": ("conform",),
    "formats": ("FORMATS", "Format", "UnknownFormatError"),
    "identification.search": ("identify",),
    "measurements": ("Errors", "Summary"),
    "metrics": ("METRICS", "compare", "score", "sqnr_db"),
    "quantizer": ("Quantized", "fake_quantize", "quantize"),
    "rotation": ("hadamard_rotate",),
    "sketch": ("Sketch",),
    "summary": ("summarize",),
    "code_usage": ("Usage", "usage"),
}

__all__ = [
    "ACCUMULATORS",
    "FORMATS",
    "METRICS",
    "Accumulator",
    "Blocks",
    "Errors",
    "Format",
    "Quantized",
    "Sketch",
    "Summary",
    "UnknownFormatError",
    "Usage",
    "compare",
    "conform",
    "fake_quantize",
    "hadamard_rotate",
    "identify",
    "look",
    "quantize",
    "score",
    "sqnr_db",
    "summarize",
    "usage",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"binade.quant.{module}"), name)
    raise AttributeError(f"module 'binade.quant' has no attribute {name!r}")

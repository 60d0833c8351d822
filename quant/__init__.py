"""Number formats and the arithmetic done in them.

    from binade import quant
    y = quant.fake_quantize(x, "mxfp8", dim=-1)
    quant.compare(x, y)["sqnr_db"]

`formats` says what a format is, `reference` defines how a tensor is rounded to it, `kernels` (Triton) and `cpu`
(C++) are its fast twins. Names are imported when first used, so that `quant.formats` alone needs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Blocks": "blocks",
    "look": "blocks",
    "FORMATS": "formats",
    "Format": "formats",
    "UnknownFormatError": "formats",
    "METRICS": "metrics",
    "Errors": "metrics",
    "Usage": "metrics",
    "compare": "metrics",
    "score": "metrics",
    "sqnr_db": "metrics",
    "usage": "metrics",
    "hadamard_rotate": "rotation",
    "Quantized": "quantizer",
    "fake_quantize": "quantizer",
    "quantize": "quantizer",
    "Sketch": "sketch",
    "Summary": "summary",
    "summarize": "summary",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"binade.quant.{_HOME[name]}"), name)
    raise AttributeError(f"module 'quant' has no attribute {name!r}")

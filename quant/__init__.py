"""Number formats and the arithmetic done in them.

    import quant
    y = quant.fake_quantize(x, "mxfp8", dim=-1)
    quant.compare(x, y)["sqnr_db"]

`formats` says what a format is, `reference` defines how a tensor is rounded to it, `kernels` (Triton) and `cpu`
(C++) are its fast twins.
"""

from quant.formats import FORMATS, Format, UnknownFormat
from quant.metrics import METRICS, Errors, Usage, compare, score, usage
from quant.quantize import Quantized, fake_quantize, quantize
from quant.sketch import Sketch
from quant.summary import Summary, summarize

__all__ = [
    "FORMATS",
    "METRICS",
    "Errors",
    "Format",
    "Quantized",
    "Sketch",
    "Summary",
    "UnknownFormat",
    "Usage",
    "compare",
    "fake_quantize",
    "quantize",
    "score",
    "summarize",
    "usage",
]

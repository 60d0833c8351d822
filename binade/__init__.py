"""Binade shows what a low-precision number format does to the tensors of LLM training.

    import binade
    y = binade.fake_quantize(x, "mxfp8", dim=-1)
    binade.compare(x, y)["sqnr_db"]

    with binade.Recorder("runs") as recorder, binade.instrument(model, "mxfp8", recorder):
        ...

Names are imported when they are first used, so that `import binade` needs neither torch nor DuckDB.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from binade import moved

if TYPE_CHECKING:
    from binade.collector import Merge, Recorder, Watch, coverage, instrument, instrument_provider, measure
    from binade.collector import TrainerCallback as TrainerCallback  # not in __all__: it needs transformers
    from binade.collector.audit.run import audit
    from binade.data.exchange.export import Sink
    from binade.data.index.catalog import Catalog
    from binade.data.words.filter import Filter
    from binade.quant import FORMATS, compare, conform, fake_quantize, identify, quantize

__version__ = "0.1.0"
moved.install()

_HOME = {
    "FORMATS": "quant",
    "compare": "quant",
    "conform": "quant",
    "fake_quantize": "quant",
    "identify": "quant",
    "quantize": "quant",
    "Merge": "collector",
    "Recorder": "collector",
    "TrainerCallback": "collector",
    "Watch": "collector",
    "audit": "collector.audit.run",
    "coverage": "collector",
    "instrument": "collector",
    "instrument_provider": "collector",
    "measure": "collector",
    "Catalog": "data.index.catalog",
    "Filter": "data.words.filter",
    "Sink": "data.exchange.export",
}

__all__ = [
    "FORMATS",
    "Catalog",
    "Filter",
    "Merge",
    "Recorder",
    "Sink",
    "Watch",
    "audit",
    "compare",
    "conform",
    "coverage",
    "fake_quantize",
    "identify",
    "instrument",
    "instrument_provider",
    "measure",
    "quantize",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"binade.{_HOME[name]}"), name)
    raise AttributeError(f"module 'binade' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

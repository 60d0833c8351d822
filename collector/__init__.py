"""Runs quantized training, captures its tensors and writes them as runs.

    from collector import Recorder, instrument, instrument_provider

Names are imported when first used: `collector.config` alone needs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "InstrumentError": "seams.layer",
    "Recorder": "capture",
    "instrument": "capture",
    "instrument_provider": "provider",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"collector.{_HOME[name]}"), name)
    raise AttributeError(f"module 'collector' has no attribute {name!r}")

"""Runs quantized training, captures its tensors and writes them as runs.

    from binade.collector import Recorder, instrument, instrument_provider

Names are imported when first used: `binade.collector.training.config` alone needs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "InstrumentError": "capture.adapters.layer",
    "Merge": "capture.options",
    "Recorder": "capture.recorder",
    "TrainerCallback": "capture.trainer",
    "coverage": "capture.coverage",
    "Watch": "capture.options",
    "instrument": "capture.instrument",
    "instrument_provider": "capture.provider",
    "measure": "experiment.measure",
}

__all__ = [name for name in _HOME if name != "TrainerCallback"]  # which needs transformers


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"binade.collector.{_HOME[name]}"), name)
    raise AttributeError(f"module 'binade.collector' has no attribute {name!r}")

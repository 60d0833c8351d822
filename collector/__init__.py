"""Runs quantized training, captures its tensors and writes them as runs.

    from collector import Recorder, instrument

Names are imported when first used: `collector.config` alone needs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {"Recorder": "capture", "instrument": "capture"}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"collector.{_HOME[name]}"), name)
    raise AttributeError(f"module 'collector' has no attribute {name!r}")

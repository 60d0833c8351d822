"""What runs a kernel: an autograd function, or a transform of torch.func, that a module of the model calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from torch import nn
from torch._functorch import eager_transforms, vmap

from binade.collector.capture.adapters.products import APPLY

CALL = nn.Module._call_impl.__code__
CHECKPOINTS = "torch.utils.checkpoint"
TRANSFORMS = (eager_transforms.__file__, vmap.__file__)


def in_function() -> bool:
    """Whether the innermost module that runs calls an autograd function, but a checkpoint, that computes this."""
    return _in_module(lambda frame: frame.f_code is APPLY and frame.f_locals["cls"].__module__ != CHECKPOINTS)


def in_transform() -> bool:
    """Whether the innermost module that runs calls a transform of torch.func that computes this. In a kernel torch's
    own stack of them is empty."""
    return _in_module(lambda frame: frame.f_code.co_filename in TRANSFORMS)


def _in_module(wanted: Callable[[FrameType], bool]) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not CALL:
        if wanted(frame):
            return True
        frame = frame.f_back
    return False

"""Ctrl-C at a chosen step: it can come between any two instructions of Python."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted(task: Callable[[], Any], at: int) -> bool:
    """Run task in this thread until KeyboardInterrupt ends it before its instruction number `at`, in whatever module
    that is. Whether it came so far; it has run to its end otherwise."""
    seen = -1

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        nonlocal seen
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return trace

    gc.disable()  # hypothesis registers a callback, and an interrupt inside that ends the test
    sys.settrace(trace)
    try:
        task()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        gc.enable()
    return False

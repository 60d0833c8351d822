"""torch, imported when one of its names is first used: `specs` names the schemes that compute with it, and the command
line reads specs without torch, which takes seconds to import."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("torch"), name)
            setattr(self, name, value)  # later uses cost nothing
            return value

    torch = _Torch()

__all__ = ["torch"]

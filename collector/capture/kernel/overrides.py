"""torch's kernels of matrix products, replaced through torch.library while a model is instrumented.

The replacements are those of a process and of a device type. Each asks the models that are instrumented whose product
this is; if it is none's, torch's own kernel computes it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from binade.collector.capture.adapters.layer import Detach, InstrumentError
from binade.collector.capture.adapters.products import computing

GEMMS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
WHOLE = ("linear", "matmul")  # which flatten an operand before they multiply
SDPA = "scaled_dot_product_attention"
Compute = Callable[[], Tensor]


class Watcher(Protocol):
    """What sees the products of a model."""

    def product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Compute) -> Tensor | None:
        """The result of this kernel with these arguments, as the recipe wants it; None if it is no product of the
        model. compute: torch's own kernel."""

    def attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The same of F.scaled_dot_product_attention, above autograd."""


class _Whole(threading.local):
    """The operands of the innermost function of WHOLE that runs, which may be that of a product."""

    operands: tuple[Tensor, ...] = ()


whole = _Whole()
_watchers: tuple[Watcher, ...] = ()
_library: Any = None  # the torch.library.Library that holds the replacements
_lock = threading.Lock()


def watch(watcher: Watcher) -> Detach:
    """Show the products to the watcher, too, until the function that is returned is called.

    Raises InstrumentError with a version of torch whose kernels cannot be called once they are replaced.
    """
    global _watchers, _library
    if not hasattr(torch.library, "get_kernel"):
        raise InstrumentError(f"products='kernel' needs torch 2.10 or later, and this is {torch.__version__}")
    with _lock:
        if not _watchers:
            _library = _replace()
        _watchers = (*_watchers, watcher)

    def undo() -> None:
        global _watchers, _library
        with _lock:
            _watchers = tuple(other for other in _watchers if other is not watcher)
            if not _watchers and _library is not None:
                _library._destroy()
                _library = None

    return undo


def _replace() -> Any:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch
    options: Any = {"with_keyset": True, "allow_override": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel.*")
        for device in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
            for name in GEMMS:
                library.impl(name, _gemm(name, device), device, **options)
        for name in WHOLE:
            library.impl(name, _whole(name), "CompositeImplicitAutograd", **options)
        library.impl(SDPA, _attention(), "CompositeImplicitAutograd", **options)
    return library


def _gemm(name: str, device: str) -> Callable[..., Tensor]:
    kernel: Any = torch.library.get_kernel(f"aten::{name}", device)

    def gemm(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
        if computing.depth:
            own: Tensor = kernel.call_boxed(keys, *args, **kwargs)
            return own

        def compute() -> Tensor:
            result: Tensor = kernel.call_boxed(keys, *args, **kwargs)
            return result

        for watcher in _watchers:
            result = watcher.product(name, args, kwargs, compute)
            if result is not None:
                return result
        return compute()

    return gemm


def _whole(name: str) -> Callable[..., Tensor]:
    kernel: Any = torch.library.get_kernel(f"aten::{name}", "CPU")  # the same for all devices

    def function(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
        before = whole.operands
        whole.operands = args[:1] if name == "linear" else args[:2]
        try:
            result: Tensor = kernel.call_boxed(keys, *args, **kwargs)
        finally:
            whole.operands = before
        return result

    return function


def _attention() -> Callable[..., Tensor]:
    kernel: Any = torch.library.get_kernel(f"aten::{SDPA}", "CPU")  # the same for all devices

    def attention(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
        for watcher in () if computing.depth else _watchers:
            result = watcher.attention(args, kwargs)
            if result is not None:
                return result
        with computing:  # its own products are no product with a weight
            own: Tensor = kernel.call_boxed(keys, *args, **kwargs)
        return own

    return attention

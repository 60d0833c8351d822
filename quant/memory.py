"""Tensors as C++, Triton and NumPy read them: strided, with a value in memory for each element.

Kernels read memory by its address. A wrapper subclass (a DTensor, an 8-bit optimizer state, a FakeTensor, a jagged
nested tensor) has none: its address is 0, and reading it would end the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

_ORDINARY = (Tensor, torch.nn.Parameter)
_SHAPES_ALONE = ("FakeTensor", "FunctionalTensor")


class without_modes:  # noqa: N801  # read like a function, as torch.no_grad
    """A context in which the caller's dispatch and function modes see nothing: a selective checkpoint that counts
    operations, a FLOP counter, a default device."""

    def __enter__(self) -> None:
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._dispatch = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else None
        if self._dispatch:
            self._dispatch.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._dispatch:
            self._dispatch.__exit__(*error)
        self._functions.__exit__(*error)


def is_ordinary(x: Tensor) -> bool:
    """Whether x is strided and has memory of its own, as it is. True of a meta tensor, which no kernel reads."""
    if x.layout is not torch.strided or x.is_nested or x.is_neg() or not torch._C._has_storage(x):
        return False
    return x.device.type == "meta" or not x.numel() or _has_memory(x)


def _has_memory(x: Tensor) -> bool:
    return type(x).__name__ not in _SHAPES_ALONE and x.data_ptr() != 0  # of which torch warns to read the address


def is_dtensor(x: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def ordinary(x: Tensor) -> Tensor:
    """The values of x as an ordinary tensor without a gradient, in the same memory if it is one.

    Of a DTensor, this rank's part; of another subclass without memory of its own, what its `dequantize` gives, or else
    its conversion to float32.

    Raises TypeError for a tensor that gives its values in neither way, or has none.
    """
    if type(x) in _ORDINARY and is_ordinary(x):
        return x.detach()
    if is_dtensor(x):
        return ordinary(_local(x))
    if type(x) in _ORDINARY and (x.is_neg() or x._is_zerotensor()):  # what torch computes once it is read
        return torch.zeros_like(x) if x._is_zerotensor() else x.detach().resolve_neg()
    if reason := _without_values(x):
        raise TypeError(reason)
    if is_ordinary(x):  # a subclass with memory of its own
        return x.detach().as_subclass(Tensor)
    with torch.no_grad(), without_modes():
        return _converted(x)


def _local(x: Any) -> Tensor:
    if any(place.is_partial() for place in x.placements):
        raise TypeError(f"a DTensor placed as {x.placements} has no values before it is reduced: redistribute it first")
    local: Tensor = x.to_local()
    return local


def _without_values(x: Tensor) -> str:
    """Why x has no values that can be read; "" if it may have some."""
    kind = type(x).__name__
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "a tensor in a transform of torch.func (vmap, grad, jvp) has no values to read: call this outside of it"
    if x.is_nested:
        return f"a nested tensor ({kind}, layout {str(x.layout).removeprefix('torch.')}) is not read: pass x.values()"
    if x.layout is not torch.strided:
        layout = str(x.layout).removeprefix("torch.").lstrip("_")
        return f"a tensor of layout {layout} is not read: pass x.to_dense()"
    if torch._is_functional_tensor(x) or kind in _SHAPES_ALONE:
        return f"a {kind if kind != 'Tensor' else 'functional tensor'} has no values, only a shape: pass a real tensor"
    if type(x) in _ORDINARY:
        return "a tensor whose storage was freed has no values: read it while FSDP has gathered it"
    return ""


def _converted(x: Any) -> Tensor:
    """The values of a subclass, by its own rules."""
    kind, failure = type(x), ""
    try:
        if kind.dequantize is not Tensor.dequantize:
            values = x.dequantize()
        else:
            values = torch.ops.aten._to_copy.default(x, dtype=torch.float32)
    except (NotImplementedError, TypeError, RuntimeError, AttributeError) as error:
        values, failure = None, (str(error).splitlines() or [""])[0][:100]
    if not _gives(values, x):
        values = _held(x)
    if values is None:
        raise TypeError(
            f"{kind.__name__} keeps its values in a form of its own, and gives them neither by dequantize() nor by "
            f"to(torch.float32): pass an ordinary tensor{f' ({failure})' if failure else ''}"
        )
    found: Tensor = values.detach()
    return found.to(x.dtype) if x.dtype.is_floating_point and x.dtype.itemsize > 1 else found


def _gives(values: Any, x: Any) -> bool:
    return type(values) in _ORDINARY and is_ordinary(values) and values.shape == x.shape


def _held(x: Any) -> Tensor | None:
    """The one tensor of x's own shape and dtype that it holds, as a weight does that only multiplies in its own way."""
    wrapper: Any = x if is_traceable_wrapper_subclass(x) else None
    held = [getattr(x, name) for name in wrapper.__tensor_flatten__()[0]] if wrapper is not None else []
    alike = [value for value in held if _gives(value, x) and value.dtype == x.dtype]
    return alike[0] if len(alike) == 1 else None


def address(x: Tensor) -> int:
    """Where the values of x begin, for a kernel of the CPU. Raises TypeError if x is not in the CPU's memory."""
    if x.device.type != "cpu" or not is_ordinary(x):
        kind = f"{type(x).__name__} on {x.device.type}"
        raise TypeError(f"a kernel of the CPU cannot read a {kind} of layout {x.layout}: pass an ordinary tensor there")
    return x.data_ptr()


def on_local_part(x: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A DTensor of the same placement, made by a function of this rank's part of the DTensor x."""
    places: dict[str, Any] = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    result: Tensor = type(x).from_local(function(_local(x)), x.device_mesh, x.placements, **places)
    return result

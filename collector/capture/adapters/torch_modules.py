"""Plain torch modules: nn.Linear, and modules whose own code calls F.scaled_dot_product_attention.

A layer's number is one more than the first number in its path ("layers.3.mlp.up" is of layer 4, a module without one of
layer 0), its module a word of collector's where the name is a usual one, else the last part of the path.

Not intercepted, and refused: nn.MultiheadAttention (and so nn.Transformer's layers), recurrent networks, nn.Bilinear,
weights that are not plain floating-point tensors, and what torch.compile or torch.jit has compiled. An attention that
is written out in matrix products is not found; where the recipe quantizes attention, `watch` refuses it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from binade.collector.capture.adapters.attention import SdpaMode, attach_core
from binade.collector.capture.adapters.layer import (
    Detach,
    Found,
    InstrumentError,
    Layer,
    LayerQuantization,
    set_on,
    whole,
)
from binade.collector.capture.adapters.products import is_answering, linear
from binade.collector.models.attention import CoreQuantization
from binade.collector.models.parallel import Quantization
from binade.collector.models.site import Site

# Usual names of linear layers, and what collector calls them.
WORDS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "qkv_proj": "qkv",
    "query_key_value": "qkv",
    "c_attn": "qkv",
    "o_proj": "proj",
    "out_proj": "proj",
    "gate_proj": "gate",
    "up_proj": "up",
    "gate_up_proj": "fc1",
    "c_fc": "fc1",
    "down_proj": "fc2",
}
HIDDEN = (
    (nn.MultiheadAttention, "it computes its products itself: use F.scaled_dot_product_attention and nn.Linear"),
    (nn.RNNBase, "a recurrent network's products are out of sight"),
    (nn.RNNCellBase, "a recurrent network's products are out of sight"),
    (nn.Bilinear, "its product is no linear layer's"),
    (nn.DataParallel, "it copies the model: use torch.nn.parallel.DistributedDataParallel"),
    (torch.jit.ScriptModule, "it is compiled: instrument the Python module"),
)


def find(model: nn.Module) -> Found:
    layers: list[Layer] = []
    refused: list[tuple[str, str]] = []
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):  # of a module that was refused
            continue
        if reason := _refusal(module):
            refused.append((name, reason))
            inside = f"{name}." if name else "."
        elif isinstance(module, nn.Linear):
            layers.append(linear_layer(name, module))
        elif calls(module, "scaled_dot_product_attention"):
            layers.append(core_layer(name, module, SdpaMode))
    return Found(tuple(layers), refused=tuple(refused))


def _is_a(module: str, name: str, value: object) -> bool:
    """isinstance, for classes of modules that take a second to import. Before that, nothing is of such a class."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def _refusal(module: nn.Module) -> str | None:
    for kind, reason in HIDDEN:
        if isinstance(module, kind):
            return reason
    if _is_a("torch._dynamo", "OptimizedModule", module) or module._compiled_call_impl is not None:
        return "it is compiled: instrument the model without torch.compile"
    if isinstance(module, nn.Linear):
        weight = vars(module)["_parameters"].get("weight")
        if _is_a("torch.distributed.tensor", "DTensor", weight):
            return "its weight is a DTensor, divided among ranks: its product is not of plain tensors"
        if weight is not None and not weight.is_floating_point():
            return f"its weight is {weight.dtype}, quantized already"
    return None


def calls(module: nn.Module, word: str) -> bool:
    """Whether the module's own methods use that name."""
    for kind in type(module).__mro__:
        if kind is nn.Module or kind.__name__ == "PreTrainedModel":  # of which every model of transformers is one
            break
        for method in vars(kind).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code and _uses(code, word):
                return True
    return False


def _uses(code: CodeType, word: str) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return word in code.co_names or any(_uses(each, word) for each in inner)


def site(name: str, module: str | None = None) -> tuple[Site, str]:
    """The site of a module by its path, and the other word for it: the path without the layer's number."""
    parts = name.split(".") if name else []
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    number = 0 if at is None else int(parts[at]) + 1
    below = parts if at is None else parts[at + 1 :]
    expert = re.search(r"(?:^|\.)experts\.(\d+)\.", ".".join(below))
    last = below[-1] if below else "linear"
    path = ".".join(part for i, part in enumerate(parts) if i != at) or last
    if module == "core":
        path = f"{path}.core"
    return Site(number, module or WORDS.get(last, last), int(expert[1]) if expert else None), path


def linear_layer(name: str, module: nn.Linear, where: Site | None = None) -> Layer:
    def attach(quantization: LayerQuantization) -> Detach:
        assert isinstance(quantization, Quantization)
        plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
        return set_on(
            module, "forward", _plain(module, quantization) if plain else _customized(name, module, quantization)
        )

    found, path = site(name)
    return Layer(name, module, where or found, whole, attach, path)


def _plain(module: nn.Linear, quantization: Quantization) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        bias = module.bias
        return linear(lambda a, b: F.linear(a, b, bias), input, module.weight, quantization, bias)

    return forward


def _customized(name: str, module: nn.Linear, quantization: Quantization) -> Callable[..., Any]:
    """For a forward of the module's own: F.linear is answered while it runs, and must be called once."""
    before = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with LinearMode(quantization) as running:
            result = before(*args, **kwargs)
        if running.seen != 1:
            raise InstrumentError(
                f"{name} ({type(module).__name__}) called F.linear {running.seen} times where once was expected, so "
                f"that its product was not intercepted: leave it out with exclude=[{name!r}]"
            )
        return result

    return forward


class LinearMode(TorchFunctionMode):
    """Answers F.linear."""

    def __init__(self, quantization: Quantization) -> None:
        self.quantization, self.seen = quantization, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or is_answering():
            return func(*args, **kwargs)
        self.seen += 1
        return self._answer(*args, **kwargs)

    def _answer(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(lambda a, b: F.linear(a, b, bias), input, weight, self.quantization, bias)


def core_layer(name: str, module: nn.Module, mode: type) -> Layer:
    def attach(quantization: LayerQuantization) -> Detach:
        assert isinstance(quantization, CoreQuantization)
        return attach_core(name, module, mode, quantization)

    found, path = site(name, "core")
    return Layer(name, module, found, whole, attach, path)

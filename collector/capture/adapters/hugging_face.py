"""Hugging Face transformers: modules that attend through its attention interface, Conv1D, and the LM head.

Of the interface's implementations `sdpa` and `flex_attention` are intercepted at torch's function, `eager` at its two
matrix products. Others (flash_attention_2, ...) run kernels that cannot be intercepted: where the recipe quantizes
attention, they are refused.
torch_modules handles nn.Linear. The LM head stays as it is unless head=True.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.attention import SdpaMode, WrittenMode
from binade.collector.capture.adapters.layer import Layer, Refused, replaces, whole
from binade.collector.capture.adapters.products import linear
from binade.collector.capture.adapters.torch_modules import calls, core_layer, linear_layer
from binade.collector.models.parallel import Begin
from binade.collector.models.site import HEAD, site

INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def find(model: nn.Module) -> Iterator[Layer | Refused]:
    if "transformers" not in sys.modules:
        return
    conv = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())
    heads = _heads(model)
    for name, module in model.named_modules():
        if module in heads:
            yield replace(linear_layer(name, module), site=HEAD, is_head=True)
        elif isinstance(module, conv):
            yield _conv(name, module)
        elif calls(module, INTERFACE):
            implementation = _implementation(module)
            if implementation in ("eager", "sdpa", "flex_attention"):
                yield replace(core_layer(name, module, InterfaceMode), by_sdpa=implementation == "sdpa")
            else:
                yield Refused(name, f"its attention is {implementation}: load it with attn_implementation='sdpa'", True)


def _heads(model: nn.Module) -> set[Any]:
    getters = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    output_heads = (getter() for getter in getters if callable(getter))
    heads = chain.from_iterable(head if isinstance(head, nn.ModuleList) else (head,) for head in output_heads)
    return {getattr(head, "base_layer", head) for head in heads}  # PEFT wraps it


class InterfaceMode(WrittenMode):
    """Follows the module's configuration at run time: eager, or a call of torch's functions."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = WrittenMode if _implementation(self.module) == "eager" else SdpaMode
        return kind.call(self, func, args, kwargs)


def _implementation(module: Any) -> str:
    return str(module.config._attn_implementation)


def _conv(name: str, module: Any) -> Layer:
    """Conv1D: a linear layer with its weight [in, out]; shown, as others are, as [out, in]."""

    def method(begin: Begin) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            def as_conv(a: Tensor, b: Tensor) -> Tensor:
                flat = torch.addmm(module.bias, a.view(-1, a.size(-1)), b.t())
                return flat.view(*a.shape[:-1], int(module.nf))

            return linear(as_conv, x, module.weight.t(), begin(), module.bias)

        return forward

    where, path = site(name)
    return Layer(name, module, where, whole, replaces(module, "forward", method), path)

"""Hugging Face transformers: modules that attend through its attention interface, Conv1D, and the LM head.

Of the interface's implementations `sdpa` is intercepted at F.scaled_dot_product_attention, `eager` at its two matrix
products. Others (flash_attention_2, flex_attention, ...) run kernels that cannot be intercepted, and are refused.
torch_modules handles nn.Linear. The LM head stays as it is unless head=True.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters.attention import SdpaMode, context, product, show_scores
from binade.collector.capture.adapters.layer import HEAD, Layer, Refused, replaces, whole
from binade.collector.capture.adapters.products import linear
from binade.collector.capture.adapters.torch_modules import calls, core_layer, linear_layer, site
from binade.collector.models.parallel import Quantization

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SCALINGS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div, Tensor.__truediv__)


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
            if implementation in ("eager", "sdpa"):
                yield core_layer(name, module, InterfaceMode)
            else:
                yield Refused(name, f"its attention is {implementation}: load it with attn_implementation='sdpa'")


def _heads(model: nn.Module) -> set[Any]:
    getters = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    found = (getter() for getter in getters if callable(getter))
    return {getattr(head, "base_layer", head) for head in found}  # PEFT wraps it


class InterfaceMode(SdpaMode):
    """sdpa, or eager: a first product of two tensors of three axes or more is QKᵀ, a second the context. The scores are
    recorded once they are scaled, if that is what is done to them next."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.attended = 0
        self.unscaled: Tensor | None = None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in self.replaced or _implementation(self.module) != "eager":
            return super().call(func, args, kwargs)
        if func in MATMULS and min(x.dim() for x in args) > 2:
            self.attended += 1
            if self.attended == 1:
                return self._scores(func, *args)
            self._see(self.unscaled)
            probs, value = args
            return context(func, probs, self.before_dropout(probs), value, self.quantization.pv, self.pv)
        if self.unscaled is None or not args or args[0] is not self.unscaled:
            return super().call(func, args, kwargs)
        if func not in SCALINGS:
            self._see(self.unscaled)
            return super().call(func, args, kwargs)
        scaled = func(*args, **kwargs)
        self._see(scaled)
        return scaled

    def check(self) -> None:
        calls = self.calls[F.scaled_dot_product_attention]
        if (self.attended, calls) not in ((2, 0), (0, 1)):
            raise self.missing(
                f"called F.scaled_dot_product_attention {calls} times and made {self.attended} products of its own "
                "where one call or two products were expected, so that they were not intercepted"
            )

    def _scores(self, func: Callable[..., Any], query: Tensor, key_t: Tensor) -> Tensor:
        key = key_t.transpose(-1, -2)
        scores = product(
            lambda a, b: func(a, b.transpose(-1, -2)), query, key, self.quantization.qk, self.qk, transpose_b=True
        )
        self.unscaled = scores
        return scores

    def _see(self, scores: Tensor | None) -> None:
        if scores is not None:
            show_scores(self.qk, scores)
        self.unscaled = None


def _implementation(module: Any) -> str:
    return str(module.config._attn_implementation)


def _conv(name: str, module: Any) -> Layer:
    """Conv1D: a linear layer with its weight [in, out]; shown, as others are, as [out, in]."""

    def method(quantization: Quantization) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            def as_conv(a: Tensor, b: Tensor) -> Tensor:
                flat = torch.addmm(module.bias, a.view(-1, a.size(-1)), b.t())
                return flat.view(*a.shape[:-1], int(module.nf))

            return linear(as_conv, x, module.weight.t(), quantization, module.bias)

        return forward

    found, path = site(name)
    return Layer(name, module, found, whole, replaces(module, "forward", method), path)

"""Hugging Face transformers: modules that attend through its attention interface, Conv1D, and the LM head.

Of the interface's implementations `sdpa` and `eager` are intercepted: the one by F.scaled_dot_product_attention, the
other by its two matrix products. Others (flash_attention_2, flex_attention, ...) are kernels of their own and refused.
nn.Linear is torch_modules' matter. The LM head stays as it is unless asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters.attention import CoreMode, SdpaMode, product, see_scores
from binade.collector.capture.adapters.layer import Detach, Found, Layer, Told, set_on, whole
from binade.collector.capture.adapters.products import linear
from binade.collector.capture.adapters.torch_modules import calls, core_layer, site
from binade.collector.models.parallel import Quantization

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SCALINGS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div, Tensor.__truediv__)


def find(model: nn.Module) -> Found:
    if "transformers" not in sys.modules:
        return Found()
    conv = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())
    layers: list[Layer] = []
    refused: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        if isinstance(module, conv):
            layers.append(_conv(name, module))
        elif calls(module, INTERFACE):
            implementation = module.config._attn_implementation
            if implementation in ("eager", "sdpa"):
                layers.append(core_layer(name, module, InterfaceMode))
            else:
                refused.append((name, f"its attention is {implementation}: load it with attn_implementation='sdpa'"))
    return Found(tuple(layers), tuple(_heads(model)), tuple(refused))


def _heads(model: nn.Module) -> list[nn.Module]:
    owners = (m for m in model.modules() if callable(getattr(m, "get_output_embeddings", None)))
    return [head for owner in owners if (head := owner.get_output_embeddings()) is not None]


class InterfaceMode(CoreMode):
    """sdpa, or eager: a first product of two tensors of three axes or more is QKᵀ, a second the context. The scores are
    recorded once they are scaled, if that is what is done to them next."""

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self.attended = 0
        self.unscaled: Tensor | None = None
        self.sdpa = SdpaMode(*told)

    def answer(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.sdpa.answer(func, args, kwargs)
        if self.module.config._attn_implementation != "eager":
            return func(*args, **kwargs)
        if func in MATMULS and min(x.dim() for x in args) > 2:
            self.attended += 1
            if self.attended == 1:
                return self._scores(func, *args)
            self._see(self.unscaled)
            return product(func, *args, self.told.pv, self.pv, transpose_b=False)
        if self.unscaled is None or not args or args[0] is not self.unscaled:
            return func(*args, **kwargs)
        if func not in SCALINGS:
            self._see(self.unscaled)
            return func(*args, **kwargs)
        scaled = func(*args, **kwargs)
        self._see(scaled)
        return scaled

    def check(self) -> None:
        if (self.attended, self.sdpa.seen) not in ((2, 0), (0, 1)):
            raise self.missing(
                f"called F.scaled_dot_product_attention {self.sdpa.seen} times and made {self.attended} products of "
                "its own where one call or two products were expected, so that they were not intercepted"
            )

    def _scores(self, func: Callable, query: Tensor, key_t: Tensor) -> Tensor:
        key = key_t.transpose(-1, -2)
        scores = product(lambda a, b: func(a, b.transpose(-1, -2)), query, key, self.told.qk, self.qk, transpose_b=True)
        self.unscaled = scores
        return scores

    def _see(self, scores: Tensor | None) -> None:
        if scores is not None:
            see_scores(self.qk, scores)
        self.unscaled = None


def _conv(name: str, module: nn.Module) -> Layer:
    """Conv1D: a linear layer with its weight [in, out]; shown, as others are, as [out, in]."""

    def attach(told: Told) -> Detach:
        assert isinstance(told, Quantization)

        def forward(x: Tensor) -> Tensor:
            def as_conv(a: Tensor, b: Tensor) -> Tensor:
                return torch.addmm(module.bias, a.view(-1, a.size(-1)), b.t()).view(*a.shape[:-1], module.nf)

            return linear(as_conv, x, module.weight.t(), told, module.bias)

        return set_on(module, "forward", forward)

    found, path = site(name)
    return Layer(name, module, found, whole, attach, path)

"""Plain torch modules: nn.Linear, and modules whose own code calls F.scaled_dot_product_attention.

A layer's number is one more than the first number in its path ("layers.3.mlp.up" is of layer 4, a module without one of
layer 0), its module a word of collector's where the path ends as is usual, else the last part of the path. What
DistributedDataParallel, FSDP, torch.compile and PEFT put around a name is no part of it; LoRA's parts are "q.lora_A".

The LM head stays as it is unless head=True: a linear layer whose weight is an embedding's, or that has a usual name.

Not intercepted, and refused: nn.MultiheadAttention (and so nn.Transformer's layers), recurrent networks, nn.Bilinear,
weights that are not plain floating-point tensors, and what torch.jit has compiled. An attention that is written out in
matrix products is not found; where the recipe quantizes attention, `watch` refuses it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters.attention import CoreMode, ModuleMode, SdpaMode, core_forward, run_under
from binade.collector.capture.adapters.dtensor import core_shard_of, linear_on_parts, shard_of
from binade.collector.capture.adapters.layer import HEAD, Layer, Refused, is_a, replaces
from binade.collector.capture.adapters.products import linear
from binade.collector.models.parallel import Quantization
from binade.collector.models.site import Site

# Usual ends of the paths of linear layers, and what collector calls them; a longer end goes first.
WORDS = {
    "c_q": "q",
    "q_lin": "q",
    "query": "q",
    "c_k": "k",
    "k_lin": "k",
    "key": "k",
    "c_v": "v",
    "v_lin": "v",
    "value": "v",
    "out_lin": "proj",
    "attn.c_proj": "proj",
    "attention.dense": "proj",
    "self_attention.dense": "proj",
    "self_attn.dense": "proj",
    "attention.output.dense": "proj",
    "intermediate.dense": "fc1",
    "dense_h_to_4h": "fc1",
    "lin1": "fc1",
    "mlp.c_proj": "fc2",
    "output.dense": "fc2",
    "dense_4h_to_h": "fc2",
    "lin2": "fc2",
    "w1": "gate",
    "w3": "up",
    "w2": "fc2",
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
HEADS = ("lm_head", "embed_out", "unembed", "output_head")
WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "base_layer")
HIDDEN = (
    (nn.MultiheadAttention, "it computes its products itself: use F.scaled_dot_product_attention and nn.Linear"),
    (nn.RNNBase, "a recurrent network's products are out of sight"),
    (nn.RNNCellBase, "a recurrent network's products are out of sight"),
    (nn.Bilinear, "its product is no linear layer's"),
    (nn.DataParallel, "it copies the model: use torch.nn.parallel.DistributedDataParallel"),
    (torch.jit.ScriptModule, "it is compiled: instrument the Python module"),
)


def find(model: nn.Module) -> Iterator[Layer | Refused]:
    inside = ""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        if inside and name.startswith(inside):  # of a module that was refused
            continue
        if reason := _refusal(module):
            yield Refused(name, reason)
            inside = f"{name}." if name else "."
        elif isinstance(module, nn.Linear):
            found = linear_layer(name, module)
            is_head = module.weight in tables or _parts(name)[-1:] in [[head] for head in HEADS]
            yield replace(found, site=HEAD, is_head=True) if is_head else found
        elif calls(module, "scaled_dot_product_attention"):
            yield core_layer(name, module, SdpaMode)


def is_compiled(module: nn.Module) -> bool:
    return is_a("torch._dynamo", "OptimizedModule", module) or module._compiled_call_impl is not None


def _refusal(module: nn.Module) -> str | None:
    for kind, reason in HIDDEN:
        if isinstance(module, kind):
            return reason
    if isinstance(module, nn.Linear):
        weight = vars(module)["_parameters"].get("weight")
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


def _parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part and part not in WRAPPERS]


def site(name: str, module: str | None = None) -> tuple[Site, str]:
    """The site of a module by its path, and the other word for it: the path without the layer's number."""
    parts = _parts(name)
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    number = 0 if at is None else int(parts[at]) + 1
    below = parts if at is None else parts[at + 1 :]
    expert = re.search(r"(?:^|\.)experts\.(\d+)\.", ".".join(below))
    last = below[-1] if below else "linear"
    path = ".".join(part for i, part in enumerate(parts) if i != at) or last
    if module == "core":
        path = f"{path}.core"
    lora = next((i for i, part in enumerate(below) if part.startswith("lora_")), len(below))
    ends = (".".join(below[start:lora]) for start in range(lora))
    word = next((WORDS[end] for end in ends if end in WORDS), below[lora - 1] if lora else last)
    word = ".".join((word, *(part for part in below[lora:] if part != "default")))
    return Site(number, module or word, int(expert[1]) if expert else None), path


def linear_layer(name: str, module: nn.Linear) -> Layer:
    def forward(quantization: Quantization) -> Callable[..., Tensor]:
        def on_parts(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return linear(lambda a, b: F.linear(a, b, bias), input, weight, quantization, bias)

        product = partial(linear_on_parts, name, on_parts)

        if type(module).forward is nn.Linear.forward and "forward" not in vars(module):
            return lambda input: product(input, module.weight, module.bias)
        return run_under(module.forward, lambda: LinearMode(name, module, product))

    where, path = site(name)
    return Layer(name, module, where, shard_of(module), replaces(module, "forward", forward), path)


class LinearMode(ModuleMode):
    """One pass through a linear layer with a forward of its own, which must call F.linear once."""

    replaced: ClassVar = {F.linear: "product"}

    def __init__(self, name: str, module: nn.Module, product: Callable[..., Tensor]) -> None:
        super().__init__(name, module)
        self.product = product

    def check(self) -> None:
        if self.calls[F.linear] != 1:
            raise self.missing(
                f"called F.linear {self.calls[F.linear]} times where once was expected, so that its product was not "
                "intercepted"
            )


def core_layer(name: str, module: nn.Module, mode: type[CoreMode]) -> Layer:
    where, path = site(name, "core")
    attach = replaces(module, "forward", core_forward(name, module, mode))
    return Layer(name, module, where, core_shard_of(module), attach, path)

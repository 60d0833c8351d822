"""megatron.core: its parallel linear layers, routers and DotProductAttention, after the model is built.

Column- and RowParallelLinear call `self._forward_impl` for the product between their communications. An instrumented
instance gets its own `_forward_impl`, which computes the product here: with the same operands and, unquantized, by
the same operations in the same order. What Megatron's own does to the gradient of a column's input is done outside
the product: the sum over the ranks, and with sequence parallelism the gather and reduce-scatter (the gathered input
is then kept for the backward pass). For that reason every rank of a tensor-parallel group instruments its model; each
rank may record or not.

DotProductAttention computes with torch.baddbmm and torch.bmm, which are replaced while its forward runs.

Not intercepted, and refused: grouped GEMMs of experts, and gradient accumulation fused into the weight's GEMM
(Megatron's --no-gradient-accumulation-fusion turns it off).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.attention import WrittenMode, core_forward
from binade.collector.capture.adapters.layer import Detach, InstrumentError, Layer, Refused, replaces, set_on, together
from binade.collector.capture.adapters.products import computing, linear
from binade.collector.models.parallel import (
    Begin,
    Call,
    ColumnParallelLinear,
    RowParallelLinear,
    heads_shard,
    linear_shard,
    reshaped,
)
from binade.collector.models.site import HEAD, Site
from binade.collector.ranks import RankGroup
from binade.data.run.columns import Shard

# Of a router under sequence parallelism, which multiplies a rank's tokens by a whole weight.
TOKENS = {"a": "rows", "y": "rows", "grad": "rows", "grad_a": "rows", "grad_b": "partial"}
ENGINE = ("transformer_engine", "megatron.core.extensions")


def find(model: nn.Module) -> Iterator[Layer | Refused]:
    column = _class("tensor_parallel.layers", "ColumnParallelLinear")
    row = _class("tensor_parallel.layers", "RowParallelLinear")
    router = _class("transformer.moe.router", "Router")
    core = _class("transformer.dot_product_attention", "DotProductAttention")
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if reason := _refusal(module, isinstance(module, (column, row))):
            yield Refused(name, reason)
        elif isinstance(module, (column, row)):
            yield _linear(modules, name, ColumnParallelLinear if isinstance(module, column) else RowParallelLinear)
        elif isinstance(module, router):
            yield _router(modules, name)
        elif isinstance(module, core):
            yield _core(modules, name)


def _class(module: str, name: str) -> Any:
    """A class of megatron.core; () if its module has not been imported, so that no layer is an instance."""
    return getattr(sys.modules.get(f"megatron.core.{module}"), name, ())


def _refusal(module: Any, is_linear: bool) -> str | None:
    kind = type(module)
    if kind.__name__ == "GroupedMLP" and kind.__module__.startswith("megatron.core"):
        return "its grouped GEMM cannot be intercepted: build the experts without moe_grouped_gemm"
    if is_linear and module.gradient_accumulation_fusion:
        return "its weight's gradient is fused into the accumulation: use --no-gradient-accumulation-fusion"
    if is_linear and not callable(getattr(module, "_forward_impl", None)):
        return "it has no _forward_impl: this version of megatron.core is not known"
    return None


def _ancestors(modules: dict[str, nn.Module], name: str) -> Iterator[nn.Module]:
    """The modules that contain the one of that name, the innermost first. A name may have dots of its own."""
    while name:
        name = name.rpartition(".")[0]
        if name in modules:
            yield modules[name]


def layer_number(modules: dict[str, nn.Module], name: str) -> int | None:
    """The layer's number from 1, counted over the pipeline's stages; None outside a layer."""
    for module in (modules[name], *_ancestors(modules, name)):
        number = getattr(module, "layer_number", None)
        if isinstance(number, int):
            return number
    return None


def site(modules: dict[str, nn.Module], name: str, module: str | None = None) -> Site:
    word = module or name.rpartition(".")[2].removeprefix("linear_").removesuffix("_proj")
    expert = None
    if "shared_experts." in name:
        word = f"shared_{word}"
    elif at := re.search(r"(?:^|\.)local_experts\.(\d+)\.", name):
        expert = int(at[1])
        owners = (getattr(m, "local_expert_indices", None) for m in _ancestors(modules, name))
        expert = next((indices[expert] for indices in owners if indices), expert)
    return Site(layer_number(modules, name) or 0, word, expert)


def path(name: str) -> str:
    """The name without the numbers of layers."""
    return re.sub(r"(^|\.)layers\.\d+\.", r"\1", name)


def _linear(modules: dict[str, nn.Module], name: str, like: type[ColumnParallelLinear | RowParallelLinear]) -> Layer:
    """A parallel linear layer, divided among the ranks like one of ours. Outside of the layers it is the LM head."""
    module: Any = modules[name]
    is_head = layer_number(modules, name) is None
    where = HEAD if is_head else site(modules, name)
    # Each rank holds a part of gate and a part of up in a gated fc1, even where the weight has no partition_stride.
    gated = where.module.endswith("fc1") and module.config.gated_linear_unit
    stride = 2 if gated else max(1, getattr(module.weight, "partition_stride", 1))

    def shard(tensor: str) -> Shard:
        return linear_shard(like.shards, tensor, RankGroup(module.tp_group), stride)

    def attach(begin: Begin) -> Detach:
        original, forward = module._forward_impl, module.forward
        passed = 0

        def intercepted(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
            nonlocal passed
            passed += 1
            return _product(original, input, weight, bias, begin(), options)

        def checked(*args: Any, **kwargs: Any) -> Any:
            before = passed
            result = forward(*args, **kwargs)
            if passed == before:
                raise InstrumentError(f"{name} ({type(module).__name__}) did not call _forward_impl: not intercepted")
            return result

        return together(set_on(module, "_forward_impl", intercepted), set_on(module, "forward", checked))

    return Layer(name, module, where, shard, attach, path(name), is_head, exchanges=True)


def _product(
    original: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,
    options: dict[str, Any],
) -> Tensor:
    """What _forward_impl computes. With communication in it the product is taken apart in the same way on every call,
    recorded or not, so that the ranks agree on what they exchange even if only some of them record."""
    from megatron.core import tensor_parallel

    reduced, sequence = options["allreduce_dgrad"], options["sequence_parallel"]
    group = options.get("tp_group")
    if sequence:
        x = tensor_parallel.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    elif reduced:
        x = tensor_parallel.copy_to_tensor_model_parallel_region(x, group=group)
    options = {**options, "allreduce_dgrad": False, "sequence_parallel": False}
    return linear(lambda a, b: original(input=a, weight=b, bias=bias, **options), x, weight, call, bias)


def _router(modules: dict[str, nn.Module], name: str) -> Layer:
    module: Any = modules[name]

    def method(begin: Begin) -> Callable[[Tensor], Any]:
        gating = module.gating

        def gated(x: Tensor) -> Any:
            call = begin()
            if call.is_plain:
                with computing:
                    return gating(x)
            dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(module.config.moe_router_dtype, x.dtype)
            bias, weight = getattr(module, "bias", None), module.weight.to(dtype)
            megatrons = sys.modules["megatron.core.transformer.moe.router"].router_gating_linear
            return linear(lambda a, b: megatrons(a, b, bias, dtype), x.to(dtype), weight, call, bias)

        return gated

    def shard(tensor: str) -> Shard:
        divided = TOKENS if module.config.sequence_parallel else {}
        return linear_shard(divided, tensor, _tensor_parallel(module), 1)

    where = site(modules, name, "router")
    return Layer(name, module, where, shard, replaces(module, "gating", method), path(name))


def _tensor_parallel(module: Any) -> RankGroup:
    state = sys.modules["megatron.core.parallel_state"]
    return RankGroup(getattr(module, "tp_group", None) or state.get_tensor_model_parallel_group())  # 0.15 keeps none


def _core(modules: dict[str, nn.Module], name: str) -> Layer:
    module = modules[name]
    group = _tensor_parallel(module)
    attach = replaces(module, "forward", core_forward(name, module, MegatronCore))
    where = site(modules, name, "core")
    return Layer(name, module, where, lambda _: heads_shard(group), attach, f"{path(name)}.core")


class MegatronCore(WrittenMode):
    """DotProductAttention: one torch.baddbmm for the scaled scores, one torch.bmm for the context. Their operands are
    [b · heads, s, d], shown as [b, heads, s, d]."""

    def __init__(self, name: str, module: nn.Module, qk: Call, pv: Call) -> None:
        core: Any = module
        heads = int(core.num_attention_heads_per_partition)

        def by_head(seen: Tensor) -> tuple[int, ...]:
            return (seen.shape[0] // heads, heads, *seen.shape[1:])

        super().__init__(name, module, *(replace(call, tap=reshaped(call.tap, by_head)) for call in (qk, pv)))

"""megatron.core: its parallel linear layers, routers and DotProductAttention, after the model is built.

Column- and RowParallelLinear call `self._forward_impl` for the product between their communications. An instance that
is given one of its own computes it here: with the same operands and, unquantized, by the same operations in the same
order. What Megatron's own does to the gradient of a column's input is done outside the product: the sum over the ranks,
and with sequence parallelism the gather and reduce-scatter (the gathered input is then kept for the backward pass).
For that reason every rank of a tensor-parallel group instruments its model; recording is each rank's own matter.

DotProductAttention computes with torch.baddbmm and torch.bmm, which are answered while its forward runs.

Not intercepted, and refused: Transformer Engine's modules, grouped GEMMs of experts, and gradient accumulation fused
into the weight's GEMM (Megatron's --no-gradient-accumulation-fusion turns it off).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from binade.collector.capture.adapters.attention import CoreMode, attach_core, product, show_scores
from binade.collector.capture.adapters.layer import Detach, Found, InstrumentError, Layer, LayerQuantization, set_on
from binade.collector.capture.adapters.products import UNQUANTIZED, linear, shown
from binade.collector.models.attention import CoreQuantization
from binade.collector.models.parallel import Quantization
from binade.collector.models.site import Site
from binade.data.segment import Shard

# Rows and columns of a weight, as collector.parallel has them.
COLUMN = {"b": "rows", "grad_b": "rows", "y": "columns", "grad": "columns", "grad_a": "partial"}
ROW = {"a": "columns", "b": "columns", "grad_a": "columns", "grad_b": "columns", "y": "partial"}
ENGINE = ("transformer_engine", "megatron.core.extensions")


def find(model: nn.Module) -> Found:
    layers = _loaded("megatron.core.tensor_parallel.layers")
    modules = dict(model.named_modules())
    refused = [(name, reason) for name, m in modules.items() if (reason := _refusal(m))]
    if layers is None:
        return Found(refused=tuple(refused))
    router = getattr(_loaded("megatron.core.transformer.moe.router"), "Router", ())
    core = getattr(_loaded("megatron.core.transformer.dot_product_attention"), "DotProductAttention", ())
    found: list[Layer] = []
    excluded: list[nn.Module] = []
    for name, module in modules.items():
        if isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear)):
            reason = _unfit(module)
            if reason:
                refused.append((name, reason))
            elif _layer_number(modules, name) is None:
                excluded.append(module)  # the LM head
            else:
                found.append(_linear(modules, name, isinstance(module, layers.ColumnParallelLinear)))
        elif isinstance(module, router):
            found.append(_router(modules, name))
        elif isinstance(module, core):
            found.append(_core(modules, name))
    return Found(tuple(found), tuple(excluded), tuple(refused))


def head(model: nn.Module, name: str) -> Layer:
    """The LM head of that name, as a layer to quantize."""
    return _linear(dict(model.named_modules()), name, column=True)


def _loaded(name: str) -> ModuleType | None:
    """A module of Megatron's, if the model's own imports have loaded it."""
    return sys.modules.get(name)


def _refusal(module: nn.Module) -> str | None:
    kind = type(module)
    engine = any(base.__module__.startswith(ENGINE) for base in kind.__mro__)
    if engine and re.search("Linear|Attention|MLP|Transformer", kind.__name__):
        return "Transformer Engine computes it out of sight: build the model with the local layer spec"
    if kind.__name__ == "GroupedMLP" and kind.__module__.startswith("megatron.core"):
        return "its grouped GEMM is out of sight: build the experts without moe_grouped_gemm"
    return None


def _unfit(module: Any) -> str | None:
    if module.gradient_accumulation_fusion:
        return "its weight's gradient is fused into the accumulation: use --no-gradient-accumulation-fusion"
    if not callable(getattr(module, "_forward_impl", None)):
        return "it has no _forward_impl: this version of megatron.core is not known"
    return None


def _ancestors(modules: dict[str, nn.Module], name: str) -> Iterator[nn.Module]:
    """What the module of that name stands in, from the inside."""
    while name:
        name = name.rpartition(".")[0]
        yield modules[name]


def _layer_number(modules: dict[str, nn.Module], name: str) -> int | None:
    """From 1, counted over the pipeline's stages; None outside a layer."""
    for module in (modules[name], *_ancestors(modules, name)):
        number = getattr(module, "layer_number", None)
        if isinstance(number, int):
            return number
    return None


def _site(modules: dict[str, nn.Module], name: str, module: str | None = None) -> Site:
    word = module or name.rpartition(".")[2].removeprefix("linear_").removesuffix("_proj")
    expert = None
    if "shared_experts." in name:
        word = f"shared_{word}"
    elif at := re.search(r"(?:^|\.)local_experts\.(\d+)\.", name):
        expert = int(at[1])
        owners = (getattr(m, "local_expert_indices", None) for m in _ancestors(modules, name))
        expert = next((indices[expert] for indices in owners if indices), expert)
    return Site(_layer_number(modules, name) or 0, word, expert)


def _path(name: str) -> str:
    """The name without the numbers of layers."""
    return re.sub(r"(^|\.)layers\.\d+\.", r"\1", name)


def _shard(module: Any, word: str, kinds: dict[str, str]) -> Callable[[str], Shard]:
    group = module.tp_group
    count = 1 if group is None else dist.get_world_size(group)
    # Each rank's part of a gated fc1 is its gate and its up: initialized or not, the weight need not say so.
    gated = word.endswith("fc1") and module.config.gated_linear_unit
    stride = 2 if gated else max(1, getattr(module.weight, "partition_stride", 1))

    def shard(name: str) -> Shard:
        kind = kinds.get(name, "whole")
        axis = {"rows": 0, "columns": -1}.get(kind)
        if count == 1:
            return Shard()
        index = dist.get_rank(group)
        return Shard(index, count, kind) if axis is None else Shard(index, count, "slice", axis, stride)

    return shard


def _linear(modules: dict[str, nn.Module], name: str, column: bool) -> Layer:
    module: Any = modules[name]

    def attach(quantization: LayerQuantization) -> Detach:
        assert isinstance(quantization, Quantization)
        original, forward = module._forward_impl, module.forward
        passed = 0

        def answered(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
            nonlocal passed
            passed += 1
            return _product(original, input, weight, bias, quantization, options)

        def checked(*args: Any, **kwargs: Any) -> Any:
            before = passed
            result = forward(*args, **kwargs)
            if passed == before:
                raise InstrumentError(f"{name} ({type(module).__name__}) did not call _forward_impl: not intercepted")
            return result

        undo = set_on(module, "_forward_impl", answered), set_on(module, "forward", checked)

        def detach() -> None:
            for each in reversed(undo):
                each()

        return detach

    site = _site(modules, name) if _layer_number(modules, name) is not None else Site(0, "head")
    return Layer(name, module, site, _shard(module, site.module, COLUMN if column else ROW), attach, _path(name))


def _product(
    original: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: Quantization,
    options: dict[str, Any],
) -> Tensor:
    """What _forward_impl computes. With communication in it the product is taken apart in the same way on every call,
    recorded or not, so that ranks of which only some record agree on what they exchange."""
    from megatron.core import tensor_parallel

    reduced, sequence = options["allreduce_dgrad"], options["sequence_parallel"]
    group = options.get("tp_group")
    if not (reduced or sequence):
        return linear(lambda a, b: original(input=a, weight=b, bias=bias, **options), x, weight, how, bias)
    if sequence:
        x = tensor_parallel.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    else:
        x = tensor_parallel.copy_to_tensor_model_parallel_region(x, group=group)
    options = {**options, "allreduce_dgrad": False, "sequence_parallel": False}
    return linear(lambda a, b: original(input=a, weight=b, bias=bias, **options), x, weight, how, bias)


def _router(modules: dict[str, nn.Module], name: str) -> Layer:
    module: Any = modules[name]

    def attach(quantization: LayerQuantization) -> Detach:
        assert isinstance(quantization, Quantization)
        gating = module.gating

        def answered(x: Tensor) -> Any:
            tap = quantization.tap()
            if quantization.formats == UNQUANTIZED and tap is None:
                return gating(x)
            dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(module.config.moe_router_dtype, x.dtype)
            bias, weight = getattr(module, "bias", None), module.weight.to(dtype)
            megatrons = sys.modules["megatron.core.transformer.moe.router"].router_gating_linear
            how = Quantization(quantization.formats, quantization.backend, lambda: tap)
            return linear(lambda a, b: megatrons(a, b, bias, dtype), x.to(dtype), weight, how, bias)

        return set_on(module, "gating", answered)

    return Layer(name, module, _site(modules, name, "router"), lambda _: Shard(), attach, _path(name))


def _core(modules: dict[str, nn.Module], name: str) -> Layer:
    module: Any = modules[name]
    state = sys.modules["megatron.core.parallel_state"]
    group = getattr(module, "tp_group", None) or state.get_tensor_model_parallel_group()  # 0.15 keeps none

    def attach(quantization: LayerQuantization) -> Detach:
        assert isinstance(quantization, CoreQuantization)
        return attach_core(name, module, MegatronCore, quantization)

    def shard(_: str) -> Shard:
        count = dist.get_world_size(group)
        return Shard(dist.get_rank(group), count, "slice", 1) if count > 1 else Shard()

    return Layer(name, module, _site(modules, name, "core"), shard, attach, f"{_path(name)}.core")


class MegatronCore(CoreMode):
    """DotProductAttention: one torch.baddbmm for the scaled scores, one torch.bmm for the context. Their operands are
    [b · heads, s, d], shown as [b, heads, s, d]."""

    scores = contexts = 0

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.baddbmm:
            self.scores += 1
            return self._scores(*args, **kwargs)
        if func is torch.bmm:
            self.contexts += 1
            return self._context(*args, **kwargs)
        return func(*args, **kwargs)

    def check(self) -> None:
        if (self.scores, self.contexts) != (1, 1):
            raise self.missing(
                f"called torch.baddbmm {self.scores} times and torch.bmm {self.contexts} times where one of each was "
                "expected, so that its products were not intercepted"
            )

    def _by_head(self, seen: Tensor) -> tuple[int, ...]:
        heads = int(cast(Any, self.module).num_attention_heads_per_partition)
        return (seen.shape[0] // heads, heads, *seen.shape[1:])

    def _scores(self, buffer: Tensor, query: Tensor, key_t: Tensor, *, beta: float, alpha: float) -> Tensor:
        def as_megatron(a: Tensor, b: Tensor) -> Tensor:
            return torch.baddbmm(buffer, a, b.transpose(1, 2), beta=beta, alpha=alpha)

        tap = shown(self.qk, self._by_head)
        key = key_t.transpose(1, 2)
        scores = product(as_megatron, query, key, self.quantization.qk, tap, transpose_b=True, scale=alpha)
        show_scores(tap, scores)
        return scores

    def _context(self, probs: Tensor, value: Tensor) -> Tensor:
        return product(torch.bmm, probs, value, self.quantization.pv, shown(self.pv, self._by_head), transpose_b=False)

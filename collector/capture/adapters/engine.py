"""Transformer Engine: Linear, LayerNormLinear, GroupedLinear, DotProductAttention, and what Megatron derives from them.

They are watched: TE quantizes by its own recipe and multiplies in its own kernels. A GEMM's operands are recorded
before quantization, its result and gradients as TE computes them. A LayerNormLinear does not keep its GEMM's input, so
the input is normalized again here; its gradient is not recorded. A GroupedLinear is one layer: its weights one after
the other, for its tokens in the order of the experts. TE never stores the scores and probabilities of attention: they
are recomputed if the mask is causal or there is none. Weight gradients that are fused into their accumulation are not
recorded.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters import megatron
from binade.collector.capture.adapters.attend import observed_core
from binade.collector.capture.adapters.boundary import with_weight_gradients
from binade.collector.capture.adapters.layer import InstrumentError, Layer, Refused, replaces
from binade.collector.capture.adapters.products import listen_to_result, listened, showing_operands
from binade.collector.models.attention import CoreBegin
from binade.collector.models.parallel import Begin, ColumnParallelLinear, RowParallelLinear, heads_shard, linear_shard
from binade.collector.models.site import Site, site
from binade.collector.ranks import RankGroup
from binade.data.run.columns import Shard
from binade.quant.gemm import Observed, Tap
from binade.quant.memory import ordinary

KERNELS = (
    "can only be recorded, because Transformer Engine has its own kernels: use the recipe bf16, and TE's own recipes"
)
AXES = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}  # of attention's layouts, as [b, h, s, d]
COMPUTED_AGAIN: dict[str, tuple[object, ...]] = {  # by the name of what the module or its caller sets
    "qkv_format": tuple(AXES),
    "attn_mask_type": ("causal", "no_mask"),
    "window_size": ((-1, 0), (-1, -1)),
    "core_attention_bias_type": ("no_bias",),
    "softmax_type": ("vanilla",),
    "return_max_logit": (False,),
    **dict.fromkeys(("inference_params", "attention_bias", "packed_seq_params"), ()),
}
# TE communicates within the module, so a summed result is whole. With sequence parallelism its tokens are divided.
LIKE = {"column": ColumnParallelLinear, "row": RowParallelLinear}
TOKENS = {"column": ("a", "grad_a"), "row": ("y", "grad")}


def find(model: nn.Module) -> Iterator[Layer | Refused]:
    te: Any = sys.modules.get("transformer_engine.pytorch")
    modules = dict(model.named_modules())
    core = None
    for name, module in modules.items():
        if core is not None and name.startswith(core):  # the implementations between which it chooses
            continue
        if te and isinstance(module, (te.Linear, te.LayerNormLinear, te.GroupedLinear)):
            yield _linear(modules, name, isinstance(module, te.LayerNormLinear), isinstance(module, te.GroupedLinear))
        elif te and isinstance(module, te.DotProductAttention):
            core = f"{name}." if name else "."
            yield _core(modules, name)
        elif any(base.__module__.startswith(megatron.ENGINE) for base in type(module).__mro__) and _weights(module):
            yield Refused(name, "Transformer Engine computes it internally: use its Linear, or the local spec")


def _weights(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters(recurse=False) if p.dim() > 1]


def place(modules: dict[str, nn.Module], name: str, word: str | None = None) -> tuple[Site, str]:
    if megatron.layer_number(modules, name) is None:
        where, path = site(name, word)
    else:
        where, path = megatron.site(modules, name, word), megatron.path(name)
    return replace(where, module=where.module.removeprefix("layernorm_")), path


def _linear(modules: dict[str, nn.Module], name: str, normalizes: bool, grouped: bool) -> Layer:
    module: Any = modules[name]
    where, path = place(modules, name)
    gated = where.module.endswith("fc1") and getattr(getattr(module, "config", None), "gated_linear_unit", False)

    def method(begin: Begin) -> Callable[..., Any]:
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            tap = begin().tap
            if tap is None:
                return forward(*args, **kwargs)
            bound = inspect.signature(forward).bind(*args, **kwargs)
            first = next(iter(bound.arguments))
            x, weights = bound.arguments[first], _weights(module)
            a = _normalized(module, x) if normalizes else x.detach()
            b = torch.cat([ordinary(weight) for weight in weights])
            tap(Observed("a", a))
            tap(Observed("b", b))
            if not normalizes:
                bound.arguments[first] = listened(x, tap, "grad_a")
            needed = a.detach().requires_grad_(x.requires_grad), b.detach().requires_grad_(weights[0].requires_grad)
            show = tap if grouped else showing_operands(tap, *needed, -1)
            if not getattr(module, "fuse_wgrad_accumulation", False) and torch.is_grad_enabled():
                show = with_weight_gradients(weights, tap, show)
            result = forward(*bound.args, **bound.kwargs)
            y = result[0] if isinstance(result, tuple) else result
            tap(Observed("y", y.detach()))
            listen_to_result(y, show)
            return result

        return watched

    def shard(tensor: str) -> Shard:
        mode = getattr(module, "parallel_mode", None)
        if mode not in LIKE or module.tp_size == 1:
            return Shard()
        shards = {name: kind for name, kind in LIKE[mode].shards.items() if kind != "partial"}
        tokens = dict.fromkeys(TOKENS[mode], "rows") if module.sequence_parallel else {}
        return linear_shard(shards | tokens, tensor, RankGroup(module.tp_group), 2 if gated and mode == "column" else 1)

    return Layer(name, module, where, shard, replaces(module, "forward", method), path, kernels=KERNELS)


def _normalized(module: Any, x: Tensor) -> Tensor:
    gamma = module.layer_norm_weight.detach()
    gamma = gamma + 1 if module.zero_centered_gamma else gamma
    x, shape = x.detach(), gamma.shape
    if module.normalization == "RMSNorm":
        return F.rms_norm(x, shape, gamma.to(x.dtype), module.eps)
    return F.layer_norm(x, shape, gamma.to(x.dtype), module.layer_norm_bias.detach().to(x.dtype), module.eps)


def _core(modules: dict[str, nn.Module], name: str) -> Layer:
    module: Any = modules[name]
    where, path = place(modules, name, "core")

    def method(begin: CoreBegin) -> Callable[..., Any]:
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            qk, pv = begin.qk().tap, begin.pv().tap
            if qk is None or pv is None:
                return forward(*args, **kwargs)
            bound = inspect.signature(forward).bind(*args, **kwargs)
            return _attend(name, module, forward, bound, qk, pv)

        return watched

    def shard(_: str) -> Shard:
        return heads_shard(RankGroup(module.tp_group if module.tp_size > 1 else None))

    return Layer(name, module, where, shard, replaces(module, "forward", method), f"{path}.core", kernels=KERNELS)


def _attend(name: str, module: Any, forward: Callable[..., Any], bound: Any, qk: Tap, pv: Tap) -> Tensor:
    def option(word: str) -> Any:
        value = bound.arguments.get(word)
        value = getattr(module, word, None) if value is None else value
        return getattr(value, "name", value)  # Megatron's enum of masks

    options = {word: option(word) for word in COMPUTED_AGAIN}
    other = [
        f"{word}={value!r}" if COMPUTED_AGAIN[word] else word
        for word, value in options.items()
        if value is not None and value not in COMPUTED_AGAIN[word]
    ]
    context = getattr(module, "cp_group", None)
    if isinstance(context, list) or RankGroup(context).size > 1:
        other.append("context parallelism")
    if other:
        raise InstrumentError(
            f"{name or 'the model'} attends with {', '.join(other)}, which cannot be recomputed: expected sbhd or "
            f"bshd, causal or no_mask, and a plain softmax over whole sequences. Leave it out with exclude=[{name!r}]"
        )
    layout, mask = options["qkv_format"], options["attn_mask_type"]
    axes = AXES[layout]
    back = [axes.index(i) for i in range(4)]
    names = list(bound.arguments)[:3]
    query, key, value = (bound.arguments[argument].permute(axes) for argument in names)  # [b, h, s, d]
    scale = module.unfused_attention.softmax_scale or 1.0 / math.sqrt(query.shape[-1])
    dropout = module.training and module.attention_dropout > 0

    def original(*operands: Tensor) -> Tensor:
        bound.arguments.update((argument, x.permute(back)) for argument, x in zip(names, operands, strict=True))
        output: Tensor = forward(*bound.args, **bound.kwargs)  # [s, b, h · d]
        return output

    def by_head(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1, value.shape[-1]).permute(axes)

    return observed_core(original, qk, pv, query, key, value, scale, None, mask == "causal", True, dropout, by_head)

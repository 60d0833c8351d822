"""Attention: the core, grouped-query attention (Llama) and multi-head latent attention (DeepSeek)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from binade.collector.models.parallel import (
    STACKED,
    Begin,
    Call,
    build_linear,
    copy_to_ranks,
    gather_whole_sequence,
    heads_shard,
    reshaped,
    scatter_sequence,
)
from binade.collector.models.positions import Rotation, apply_rotary, pairs_to_halves
from binade.collector.models.site import Site
from binade.collector.models.specs import CoreSpec, LinearSpec, Spec
from binade.collector.ranks import SINGLE, RankGroup
from binade.data.run.columns import Shard
from binade.quant.attention import flash, smoothed
from binade.quant.gemm import Observed, Tap, matmul


@dataclass(frozen=True)
class CoreBegin:
    """Begins calls of the attention core's two products: qk contracts the head size, pv the keys."""

    qk: Begin = Call
    pv: Begin = Call


# What a tap sees of the two products that is a map of attention.
SCORE_NAMES = ("scores", "y", "product", "grad", "wgrad_grad")
PROB_NAMES = ("a", "grad_a", "wgrad_a")


def hiding(tap: Tap | None, names: Sequence[str], hidden: Callable[[str], Tensor | None]) -> Tap | None:
    """A tap that also gets which pairs the softmax does not see, with the tensors of these names, unless it has them.
    hidden: called with the name."""
    if tap is None:
        return None
    return lambda seen: tap(
        replace(seen, hidden=hidden(seen.name)) if seen.name in names and seen.hidden is None else seen
    )


class CoreAttention(nn.Module):
    """softmax(QKᵀ · scale) V with a causal mask. Keys and values are kept once per group, not copied to each head.

    head_dim is d, that of queries and keys; scale is 1 / √d unless given.
    The taps of `begin.qk` see query, key and, by the name "scores", the scaled scores before the mask.
    """

    def __init__(self, site: Site, head_dim: int, scale: float | None = None, group: RankGroup = SINGLE) -> None:
        super().__init__()
        self.site = site
        self.group = group
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self.begin = CoreBegin()

    def shard(self, name: str) -> Shard:
        return heads_shard(self.group)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [b, heads, s, d], key [b, groups, s, d], value [b, groups, s, v] -> [b, heads, s, v]"""
        batch, heads, length, dim = query.shape
        groups = key.shape[1]
        per_group = heads // groups
        (key, qk), (value, pv) = self.begin.qk().cached(key), self.begin.pv().cached(value)
        qk, pv = (call.of_heads(per_group) for call in (qk, pv))
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        qk = replace(qk, tap=hiding(qk.tap, SCORE_NAMES, lambda _: future))
        pv = replace(pv, tap=hiding(pv.tap, PROB_NAMES, lambda _: future))
        query, key, complete = smoothed(query, key, qk.rounding.formats)
        stacked = query.reshape(batch, groups, per_group * length, dim)

        def by_head(seen: Tensor) -> tuple[int, ...]:
            return batch, heads, length, seen.shape[-1]

        shown = reshaped(qk.tap, by_head, STACKED)
        scores = matmul(stacked, key, qk.rounding, transpose_b=True, tap=shown)
        scores = complete(scores.view(batch, heads, length, length), 1.0) * self.scale
        if qk.tap:
            qk.tap(Observed("scores", scores.detach()))
        masked = scores.float().masked_fill(future, -torch.inf)
        masked = masked.view(batch, groups, per_group * length, length)
        shown = reshaped(pv.tap, by_head, STACKED)
        if pv.rounding.formats.softmax.tile:
            output = flash(masked, value, pv.rounding, shown)
        else:
            output = matmul(masked.softmax(-1).to(query.dtype), value, pv.rounding, tap=shown)
        return output.view(batch, heads, length, -1)


def _by_module(specs: Sequence[Spec]) -> tuple[dict[str, LinearSpec], CoreSpec]:
    """The linear layers of an attention by their modules, and its core."""
    (core,) = (spec for spec in specs if isinstance(spec, CoreSpec))
    return {spec.site.module: spec for spec in specs if isinstance(spec, LinearSpec)}, core


class SelfAttention(nn.Module):
    """Grouped-query attention. specs are the linear layers qkv and proj, and the core."""

    def __init__(self, specs: Sequence[Spec], group: RankGroup) -> None:
        super().__init__()
        linear, core = _by_module(specs)
        self.heads, self.kv_heads = core.heads // group.size, core.kv_heads // group.size
        self.head_dim = core.head_dim
        self.linear_qkv = build_linear(linear["qkv"], group)
        self.core_attention = CoreAttention(core.site, core.head_dim, group=group)
        self.linear_proj = build_linear(linear["proj"], group)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [s, b, hidden] -> the same"""
        mixed = self.linear_qkv(x)
        length, batch, _ = mixed.shape
        # Megatron's layout: for each group its query heads, then its key, then its value.
        per_group = self.heads // self.kv_heads
        mixed = mixed.view(length, batch, self.kv_heads, per_group + 2, self.head_dim)
        query = mixed[:, :, :, :per_group].reshape(length, batch, self.heads, self.head_dim)
        key, value = mixed[:, :, :, per_group], mixed[:, :, :, per_group + 1]
        if rotation:
            query, key = apply_rotary(query, *rotation), apply_rotary(key, *rotation)
        context = self.core_attention(*(t.permute(1, 2, 0, 3).contiguous() for t in (query, key, value)))
        y: Tensor = self.linear_proj(context.permute(2, 0, 1, 3).reshape(length, batch, -1))
        return y


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values are expanded from one small latent per token, and all heads share
    the rotated part of the key. Queries may be expanded from a latent too.

    The down projections are whole on every rank and see whole sequences, the up projections are split by heads.
    specs are the linear layers q or q_down and q_up, kv_down, kv_up, proj, and the core; build_norm builds the norm of
    a latent from its width.
    """

    def __init__(
        self, specs: Sequence[Spec], scale: float, build_norm: Callable[[int], nn.Module], group: RankGroup
    ) -> None:
        super().__init__()
        self.group = group
        group = replace(group, sequence_parallel=False)
        linear, core = _by_module(specs)
        down, up = linear["kv_down"], linear["kv_up"]
        self.heads = core.heads // group.size
        self.latent, self.qk_rope, self.v_head = up.inputs, down.outputs - up.inputs, core.value_dim
        self.qk_nope = core.head_dim - self.qk_rope
        if "q" in linear:
            self.linear_q = build_linear(linear["q"], group)
        else:
            self.linear_q_down = build_linear(linear["q_down"], group)
            self.q_layernorm = build_norm(linear["q_down"].outputs)
            self.linear_q_up = build_linear(linear["q_up"], group)
        self.linear_kv_down = build_linear(down, group)
        self.kv_layernorm = build_norm(self.latent)
        self.linear_kv_up = build_linear(up, group)
        self.core_attention = CoreAttention(core.site, core.head_dim, scale, group)
        self.linear_proj = build_linear(linear["proj"], group)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x [s, b, hidden], rotation of width qk_rope -> [s, b, hidden]"""
        x = gather_whole_sequence(x, self.group)
        length, batch, _ = x.shape
        by_head = (length, batch, self.heads, -1)
        if hasattr(self, "linear_q"):
            query = self.linear_q(x)
        else:
            query = self.linear_q_up(self.q_layernorm(self.linear_q_down(x)))
        q_nope, q_rope = query.view(by_head).split((self.qk_nope, self.qk_rope), -1)
        latent, k_rope = self.linear_kv_down(x).split((self.latent, self.qk_rope), -1)
        expanded = self.linear_kv_up(self.kv_layernorm(latent)).view(by_head)
        k_nope, value = expanded.split((self.qk_nope, self.v_head), -1)
        k_rope = copy_to_ranks(k_rope, self.group).unsqueeze(2)  # one for all heads
        q_rope, k_rope = (apply_rotary(pairs_to_halves(part), *rotation) for part in (q_rope, k_rope))
        query = torch.cat((q_nope, q_rope), -1)
        key = torch.cat((k_nope, k_rope.expand(by_head)), -1)
        context = self.core_attention(*(t.permute(1, 2, 0, 3).contiguous() for t in (query, key, value)))
        y: Tensor = self.linear_proj(context.permute(2, 0, 1, 3).reshape(length, batch, -1))
        return scatter_sequence(y, self.group)

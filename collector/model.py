"""A Llama in Megatron's words: RMSNorm, rotary positions, grouped-query attention, SwiGLU, parallel linear layers.

Activations are [sequence, batch, hidden] in bfloat16, weights float32 masters. Each layer's GEMMs are those of its
ParallelLinear modules and of CoreAttention, and run as their `quantization` says; embedding and LM head are plain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collector.config import ModelShape
from collector.parallel import ColumnParallelLinear, Group, Quantization, RowParallelLinear, Site, group_size
from quant.gemm import Observed, Tap, matmul

COMPUTE_DTYPE = torch.bfloat16


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis, in float32, returned in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rotary_angles(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [length, 1, 1, head_dim], halves repeated as Megatron's non-interleaved RoPE does."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse)
    angles = torch.cat((angles, angles), -1)[:, None, None, :]
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [sequence, batch, heads, head_dim] rotated by position."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


@dataclass
class CoreQuantization:
    """The attention core's two products: qk contracts the head size, pv the keys."""

    qk: Quantization = field(default_factory=Quantization)
    pv: Quantization = field(default_factory=Quantization)


class CoreAttention(nn.Module):
    """softmax(QKᵀ / √d) V with a causal mask. Keys and values stay one per group: nothing is copied to each head.

    The taps of `quantization.qk` see query, key and, by the name "scores", the scaled scores before the mask.
    """

    def __init__(self, site: Site, head_dim: int) -> None:
        super().__init__()
        self.site = site
        self.scale = 1.0 / math.sqrt(head_dim)
        self.quantization = CoreQuantization()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [b, heads, s, d], key and value [b, groups, s, d] -> [b, heads, s, d]"""
        batch, heads, length, dim = query.shape
        groups = key.shape[1]
        qk, pv = self.quantization.qk, self.quantization.pv
        stacked = query.reshape(batch, groups, heads // groups * length, dim)
        tap = qk.tap()
        by_head = (batch, heads, length)
        scores = matmul(stacked, key, qk.formats, transpose_b=True, backend=qk.backend, tap=_unstacked(tap, by_head))
        scores = scores * self.scale
        scores = scores.view(batch, heads, length, length)
        if tap:
            tap(Observed("scores", scores.detach()))
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        probs = scores.float().masked_fill(future, -torch.inf).softmax(-1).to(query.dtype)
        probs = probs.view(batch, groups, heads // groups * length, length)
        output = matmul(probs, value, pv.formats, backend=pv.backend, tap=_unstacked(pv.tap(), by_head))
        return output.view(batch, heads, length, dim)


def _unstacked(tap: Tap | None, by_head: tuple[int, int, int]) -> Tap | None:
    """A tap that shows what is stacked by group, [b, groups, heads/groups · s, d], as [b, heads, s, d]."""
    if tap is None:
        return None

    def see(seen: Observed) -> None:
        stacked = seen.name in ("a", "y", "grad", "grad_a")
        tap(replace(seen, shape=(*by_head, seen.tensor.shape[-1])) if stacked else seen)

    return see


class SelfAttention(nn.Module):
    def __init__(self, layer_index: int, shape: ModelShape, group: Group) -> None:
        super().__init__()
        ranks = group_size(group)
        self.heads, self.kv_heads, self.head_dim = shape.heads // ranks, shape.kv_heads // ranks, shape.head_dim
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.linear_qkv = ColumnParallelLinear(Site(layer_index, "qkv"), shape.hidden, width, group)
        self.core_attention = CoreAttention(Site(layer_index, "core"), shape.head_dim)
        self.linear_proj = RowParallelLinear(
            Site(layer_index, "proj"), shape.heads * shape.head_dim, shape.hidden, group
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        length, batch, _ = x.shape
        # Megatron's layout: for each group its query heads, then its key, then its value.
        per_group = self.heads // self.kv_heads
        mixed = self.linear_qkv(x).view(length, batch, self.kv_heads, per_group + 2, self.head_dim)
        query = mixed[:, :, :, :per_group].reshape(length, batch, self.heads, self.head_dim)
        query = apply_rotary(query, cos, sin)
        key = apply_rotary(mixed[:, :, :, per_group], cos, sin)
        value = mixed[:, :, :, per_group + 1]
        context = self.core_attention(*(t.permute(1, 2, 0, 3).contiguous() for t in (query, key, value)))
        return self.linear_proj(context.permute(2, 0, 1, 3).reshape(length, batch, -1))


class MLP(nn.Module):
    """fc2(silu(gate) · up), gate and up being the halves of fc1."""

    def __init__(self, layer_index: int, shape: ModelShape, group: Group) -> None:
        super().__init__()
        self.linear_fc1 = ColumnParallelLinear(Site(layer_index, "fc1"), shape.hidden, 2 * shape.ffn, group)
        self.linear_fc2 = RowParallelLinear(Site(layer_index, "fc2"), shape.ffn, shape.hidden, group)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up)


class TransformerLayer(nn.Module):
    def __init__(self, layer_index: int, shape: ModelShape, group: Group) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attention = SelfAttention(layer_index, shape, group)
        self.pre_mlp_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(layer_index, shape, group)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class GPTModel(nn.Module):
    """tokens [batch, sequence] -> logits, float32 [batch, sequence, vocab]."""

    def __init__(self, shape: ModelShape, group: Group = None) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(TransformerLayer(i + 1, shape, group) for i in range(shape.layers))
        self.final_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.output_layer = self.embedding if shape.tied_embedding else nn.Embedding(shape.vocab, shape.hidden)

    def initialize(self, seed: int, std: float = 0.02) -> None:
        """Normal weights as Megatron draws them: std, over sqrt(2 · layers) for what writes into the residual."""
        generator = torch.Generator(device=self.embedding.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            spread = std / math.sqrt(2 * self.shape.layers) if residual else std
            with torch.no_grad():
                parameter.normal_(0.0, spread, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens.t()).to(COMPUTE_DTYPE)  # [s, b, hidden]
        cos, sin = rotary_angles(len(x), self.shape.head_dim, self.shape.rope_theta, x.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.final_layernorm(x)
        return F.linear(x, self.output_layer.weight.to(x.dtype)).float().transpose(0, 1)

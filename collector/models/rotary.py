"""Rotary positions: the angles, stretched for long texts as a model's `rope_scaling` says, and the rotation itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from binade.collector.models.shapes import Llama3Scaling, RotaryScaling, YarnScaling


def rotary_angles(
    length: int, head_dim: int, theta: float, device: torch.device, scaling: RotaryScaling = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [length, 1, 1, head_dim], halves repeated as Megatron's non-interleaved RoPE does."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    if isinstance(scaling, Llama3Scaling):
        inverse = _llama3(inverse, scaling)
    elif isinstance(scaling, YarnScaling):
        inverse = _yarn(inverse, head_dim, theta, scaling)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse)
    angles = torch.cat((angles, angles), -1)[:, None, None, :]
    amplitude = scaling.rotary_scale if isinstance(scaling, YarnScaling) else 1.0
    return angles.cos() * amplitude, angles.sin() * amplitude


def _llama3(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    """apply_scaling of meta-llama/llama-models: kept is 1 where the frequency stays, 0 where it is divided."""
    turns = scaling.original * inverse / (2 * math.pi)
    kept = ((turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)).clamp(0, 1)
    return inverse * kept + inverse / scaling.factor * (1 - kept)


def _yarn(inverse: Tensor, dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """DeepseekV2YarnRotaryEmbedding of DeepSeek-V2-Lite's modeling_deepseek.py: a ramp over the frequencies' indices,
    from the last one that turns beta_fast times in the original context to the first that turns beta_slow times."""

    def index_of(turns: float) -> float:
        return dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), dim - 1)
    index = torch.arange(dim // 2, device=inverse.device, dtype=torch.float32)
    stretched = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse * (1 - stretched) + inverse / scaling.factor * stretched


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [sequence, batch, heads, head_dim] rotated by position; element i turns with element i + head_dim / 2."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def pairs_to_halves(x: Tensor) -> Tensor:
    """The last axis with its even elements first: neighbours, which DeepSeek rotates together, come to lie half an axis
    apart, where `apply_rotary` looks for them."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)

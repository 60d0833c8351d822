"""Position encodings: rotary ones, with their angles and the rotation itself, and learned ones.

Each is a module that turns embeddings [s, b, hidden] into the input of the first layer, and into the rotation of every
layer's queries and keys: cos and sin, float32 [s, 1, 1, rotary_dim], or None.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from binade.collector.models.rope_scaling import RopeScaling

Rotation = tuple[Tensor, Tensor] | None


class RotaryPositions(nn.Module):
    """Leaves the embeddings as they are. rotary_dim is the width that is rotated; the halves of cos and sin repeat, as
    those of Megatron's non-interleaved RoPE do."""

    def __init__(self, rotary_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.rotary_dim, self.theta, self.scaling = rotary_dim, theta, scaling

    def forward(self, x: Tensor) -> tuple[Tensor, Rotation]:
        index = torch.arange(0, self.rotary_dim, 2, device=x.device, dtype=torch.float32)
        inverse = 1.0 / self.theta ** (index / self.rotary_dim)
        if self.scaling:
            inverse = self.scaling.stretch(inverse, self.theta)
        angles = torch.outer(torch.arange(len(x), device=x.device, dtype=torch.float32), inverse)
        angles = torch.cat((angles, angles), -1)[:, None, None, :]
        amplitude = self.scaling.rotary_scale if self.scaling else 1.0
        return x, (angles.cos() * amplitude, angles.sin() * amplitude)


class LearnedPositions(nn.Module):
    """Adds a vector of weights for each position, and rotates nothing."""

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Rotation]:
        return x + self.weight[: len(x), None], None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [sequence, batch, heads, head_dim] rotated by position; element i turns with element i + head_dim / 2."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def pairs_to_halves(x: Tensor) -> Tensor:
    """The last axis with its even elements first. DeepSeek rotates neighbors together; this moves them half an axis
    apart, where `apply_rotary` expects them."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)

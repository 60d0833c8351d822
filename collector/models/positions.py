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
    """Leaves the embeddings as they are. The arguments are those of `rotary_angles`."""

    def __init__(self, rotary_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.rotary_dim, self.theta, self.scaling = rotary_dim, theta, scaling

    def forward(self, x: Tensor) -> tuple[Tensor, Rotation]:
        return x, rotary_angles(len(x), self.rotary_dim, self.theta, x.device, self.scaling)


class LearnedPositions(nn.Module):
    """Adds a vector of weights for each position, and rotates nothing."""

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Rotation]:
        return x + self.weight[: len(x), None], None


def rotary_angles(
    length: int, head_dim: int, theta: float, device: torch.device, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [length, 1, 1, head_dim], halves repeated as Megatron's non-interleaved RoPE does."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    if scaling:
        inverse = scaling.stretch(inverse, theta)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse)
    angles = torch.cat((angles, angles), -1)[:, None, None, :]
    amplitude = scaling.rotary_scale if scaling else 1.0
    return angles.cos() * amplitude, angles.sin() * amplitude


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [sequence, batch, heads, head_dim] rotated by position; element i turns with element i + head_dim / 2."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def pairs_to_halves(x: Tensor) -> Tensor:
    """The last axis with its even elements first. DeepSeek rotates neighbors together; this moves them half an axis
    apart, where `apply_rotary` expects them."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)

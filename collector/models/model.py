"""The model of any family, in Megatron's terms. The family's Shape builds attention and feed-forward.

Activations are [sequence, batch, hidden] in the model's compute dtype (bfloat16 by default), weights float32 masters.
The GEMMs of a layer are those of its ParallelLinear modules and of CoreAttention, and run as their `begin` says.
Embedding and LM head are plain, and whole on every tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from binade.collector.models.norm import RecordingPoint
from binade.collector.models.parallel import UNROUNDED, ParallelLinear, gather_whole_sequence, scatter_sequence
from binade.collector.models.positions import Rotation
from binade.collector.models.shape import Shape
from binade.collector.models.site import HEAD
from binade.collector.ranks import SINGLE, RankGroup
from binade.data.run.tensor_kinds import Other
from binade.quant.gemm import linear


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), both as the shape builds them for this layer, from 1."""

    def __init__(self, layer: int, shape: Shape, group: RankGroup) -> None:
        super().__init__()
        split = group.sequence_parallel
        self.input_layernorm = shape.build_norm(shape.hidden, sequence_parallel=split)
        self.self_attention = shape.build_attention(layer, group)
        self.pre_mlp_layernorm = shape.build_norm(shape.hidden, sequence_parallel=split)
        self.mlp = shape.build_feed_forward(layer, group)

    def forward(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor | None]:
        """x [s, b, hidden] -> the same, and the balance loss if the layer has one"""
        x = x + self.self_attention(self.input_layernorm(x), rotation)
        y = self.mlp(self.pre_mlp_layernorm(x))
        y, balance = y if isinstance(y, tuple) else (y, None)
        return x + y, balance


class GPTModel(nn.Module):
    """tokens [batch, sequence] -> logits, float32 [batch, sequence, vocab]."""

    def __init__(self, shape: Shape, group: RankGroup = SINGLE, compute_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape = shape
        self.group = group
        self.compute_dtype = compute_dtype
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.position_embedding = shape.build_positions()
        self.layers = nn.ModuleList(TransformerLayer(i + 1, shape, group) for i in range(shape.layers))
        self.final_layernorm = shape.build_norm(shape.hidden, sequence_parallel=group.sequence_parallel)
        self.output_layer = self.embedding if shape.tied_embedding else nn.Embedding(shape.vocab, shape.hidden)
        self.logits = RecordingPoint(HEAD, Other.HEAD)

    @torch.no_grad()
    def set_weights(self, whole: Callable[[str, torch.Size], Tensor]) -> None:
        """Overwrite every weight with this rank's part of what `whole` returns for a parameter's name and whole shape;
        called in the order of named_parameters."""
        linears = [module for module in self.modules() if isinstance(module, ParallelLinear)]
        layers = {parameter: layer for layer in linears for parameter in layer.parameters()}
        for name, parameter in self.named_parameters():
            layer = layers.get(parameter)
            if layer is None:
                parameter.copy_(whole(name, parameter.shape))
            else:
                parameter.copy_(layer.part(whole(name, torch.Size(layer.whole_shape[: parameter.dim()]))))

    def initialize(self, seed: int, std: float = 0.02) -> None:
        """Normal weights as Megatron draws them: std, divided by sqrt(2 · layers) for layers that write to the residual
        stream; norms 1 and biases 0. The whole weights are the same for any number of ranks."""
        device = self.embedding.weight.device
        generator = torch.Generator(device=device).manual_seed(seed)

        def draw(name: str, shape: torch.Size) -> Tensor:
            if len(shape) < 2:
                return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, device=device)
            residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            spread = std / math.sqrt(2 * self.shape.layers) if residual else std
            return torch.empty(shape, device=device).normal_(0.0, spread, generator=generator)

        self.set_weights(draw)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits_and_balance(tokens)[0]

    def logits_and_balance(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits, and the sum of the layers' load-balancing losses, weighted, to be added to the training loss: a
        float32 scalar, or None where nothing is routed."""
        x, rotation = self.position_embedding(self.embedding(tokens.t()))
        x = scatter_sequence(x.to(self.compute_dtype), self.group)  # [s, b, hidden]
        balance: list[Tensor] = []
        for layer in self.layers:
            x, loss = layer(x, rotation)
            if loss is not None:
                balance.append(loss)
        x = gather_whole_sequence(self.final_layernorm(x), self.group)
        logits = linear(x, self.output_layer.weight.to(x.dtype), UNROUNDED).float().transpose(0, 1)
        return self.logits(logits), torch.stack(balance).sum() if balance else None

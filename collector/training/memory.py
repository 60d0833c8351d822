"""What memory a run takes, told before it starts. No torch.

Weights, gradients and optimizer are exact. Activations are what autograd keeps of one micro-batch, counted from the
shapes; on Llama 3.2 1B and DeepSeek-V2-Lite within a tenth of what was measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from binade.collector.models.shapes import DeepseekShape, ModelShape, Shape
from binade.collector.training.config import ConfigError, RunConfig

# Of a weight: float32 value, gradient and Adam's two moments; and its bfloat16 copy, from forward to backward.
PER_WEIGHT = 16
PER_COPY = 2
# Of a logit: bfloat16 and float32 values, their log-softmax, and the gradients of two of them.
PER_LOGIT = 14


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank's process."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.activations


def needed(config: RunConfig) -> Memory:
    """What one rank of a run takes at its peak, without what recording adds for a moment."""
    shape = config.shape()
    outside = shape.vocab * shape.hidden * (1 if shape.tied_embedding else 2)  # whole on every rank
    weights = outside + (shape.parameters - outside) // config.tp
    tokens = config.micro_batch_size * config.sequence_length
    own_norms = config.tp if config.sequence_parallel else 1
    kept = _norms(shape) / own_norms + _products(shape, config.sequence_length) / config.tp
    activations = tokens * (shape.layers * kept + PER_LOGIT * shape.vocab)
    return Memory((PER_WEIGHT + PER_COPY) * weights, int(activations))


def _norms(shape: Shape) -> float:
    """Bytes a token that a layer's two norms keep: three float32 tensors each."""
    return 2 * 3 * 4 * shape.hidden


def _products(shape: Shape, length: int) -> float:
    """Bytes a token that a layer's GEMMs keep: bfloat16 inputs and outputs, and the probabilities twice, the first time
    in float32."""
    core = 6 * shape.heads * length
    if isinstance(shape, ModelShape):
        return core + 6 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 8 * shape.ffn
    return core + _latent(shape) + _mixture(shape)


def _latent(shape: DeepseekShape) -> float:
    return 6 * shape.heads * (2 * shape.head_dim + shape.v_head) + 14 * shape.kv_lora_rank


def _mixture(shape: DeepseekShape) -> float:
    """On average over the layers."""
    dense = min(shape.dense_layers, shape.layers) / shape.layers
    experts = shape.experts_per_token + shape.shared_experts
    routed = 8 * shape.expert_ffn * experts + 6 * shape.hidden * shape.experts_per_token
    return dense * 8 * shape.ffn + (1 - dense) * routed


def check_memory(config: RunConfig, available: int, ranks: int = 1) -> None:
    """Raise ConfigError if `ranks` ranks together exceed the bytes there are."""
    memory = needed(config)
    if ranks * memory.total > available:
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"{config.model} {config.size} with {config.shape().layers} layers needs "
            f"{memory.weights / 2**30:.1f} GiB for weights, gradients and optimizer and "
            f"{memory.activations / 2**30:.1f} GiB for activations{each}, {available / 2**30:.1f} GiB are free on "
            f"{config.device}: use --size tiny, fewer --layers, or a shorter --sequence-length"
        )


def available_host_memory() -> int:
    """Bytes that a new process can take without swapping; the cgroup's limit counts where there is one."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, StopIteration, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used)

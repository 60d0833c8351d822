"""Computes the memory that a run needs before it starts. No torch.

Weights, gradients and optimizer are exact. Activations are what autograd keeps of one micro-batch, computed from the
layers; for Llama 3.2 1B and DeepSeek-V2-Lite they are within a tenth of the measured bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from binade.collector.errors import ConfigError
from binade.collector.training.plan import Plan

# Bytes per weight: float32 value, gradient and Adam's two moments; and its bfloat16 copy, from forward to backward.
PER_WEIGHT = 16
PER_COPY = 2
# What a twin step adds, before the step has a gradient of its own: the float32 gradients without the recipe and of two
# passes with it, and their mean.
PER_TWIN = 12
# Bytes per logit: bfloat16 and float32 values, their log-softmax, and the gradients of two of them.
PER_LOGIT = 14
# Bytes per attention probability: it is kept twice, in float32 and in bfloat16.
PER_PROBABILITY = 6


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank's process."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.activations


def needed(plan: Plan) -> Memory:
    """The peak of one rank of a run, without the short-lived buffers of recording."""
    config, shape = plan.config, plan.shape
    outside = sum(shape.tables.values()) * shape.hidden  # whole on every rank
    weights = outside + (shape.parameters - outside) // config.tp
    tokens = config.micro_batch_size * config.sequence_length
    norms = shape.norm_bytes * 2 * shape.hidden * shape.layers
    cores = PER_PROBABILITY * shape.heads * config.sequence_length * shape.layers
    linears = sum(shape.activation_bytes(layer) for layer in range(1, shape.layers + 1))
    layers = norms / (config.tp if config.sequence_parallel else 1) + (cores + linears) / config.tp
    activations = tokens * (layers + PER_LOGIT * shape.vocab)
    per_weight = PER_WEIGHT + PER_COPY + PER_TWIN * bool(config.twin)
    return Memory(per_weight * weights, int(activations))


def check_memory(plan: Plan, available: int, ranks: int = 1) -> None:
    """Raise ConfigError if `ranks` ranks together exceed the available bytes."""
    config, memory = plan.config, needed(plan)
    if ranks * memory.total > available:
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"{config.model_title} with {plan.shape.layers} layers needs "
            f"{memory.weights / 2**30:.1f} GiB for weights, gradients and optimizer and "
            f"{memory.activations / 2**30:.1f} GiB for activations{each}, but only {available / 2**30:.1f} GiB are "
            f"free on {config.device}: use {'--size tiny, ' * (not config.has_path)}fewer --layers, or a shorter "
            "--sequence-length"
        )


def available_host_memory() -> int:
    """Bytes that a new process can take without swapping, within the limit of its cgroup."""
    free: int = psutil.virtual_memory().available
    folder = Path("/sys/fs/cgroup")
    try:  # psutil does not know the limits of cgroups, which a container has
        limit, used = ((folder / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))

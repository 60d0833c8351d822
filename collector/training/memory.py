"""Computes the memory that a run needs before it starts. No torch.

Weights, gradients and optimizer are exact. Activations are what autograd keeps of one micro-batch, computed from the
layers; for Llama 3.2 1B and DeepSeek-V2-Lite they are within a tenth of the measured bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from binade.collector.errors import ConfigError
from binade.collector.settings import DeviceName
from binade.collector.training.plan import Plan
from binade.data.run.tensor_kinds import Measure

# Bytes per weight: float32 value, gradient and Adam's two moments; and its bfloat16 copy, from forward to backward.
PER_WEIGHT = 16
PER_COPY = 2
# What a twin step adds, before the step has a gradient of its own: the float32 gradients without the recipe and of two
# passes with it, and their mean.
PER_TWIN = 12
# Four float32 numbers for each weight that a recipe with de-oscillation follows.
PER_FOLLOWED = 16
# A weight before a recorded step, whose state a recipe rounds.
PER_BEFORE = 4
# Bytes per logit: bfloat16 and float32 values, their log-softmax, and the gradients of two of them.
PER_LOGIT = 14
# Bytes per attention probability: it is kept twice, in float32 and in bfloat16.
PER_PROBABILITY = 6
# Bytes per value of a bfloat16 copy: an operand as it was rounded, the result of a GEMM of operands that were not.
PER_ROUNDED = 2
# Bytes per value of an operand or result of a GEMM on a CPU, which multiplies in float32. The LM head frees its own
# before the gradients of the layers take more.
PER_WIDENED = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank's process. buffers: of rounding and recording one layer."""

    weights: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.buffers


def needed(plan: Plan) -> Memory:
    """The peak of one rank of a run, without the values that wait to be written."""
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
    per_weight += PER_FOLLOWED * bool(plan.recipe.deoscillation) + PER_BEFORE * bool(plan.recipe.state)
    return Memory(per_weight * weights, int(activations), _buffers(plan))


def _buffers(plan: Plan) -> int:
    """At most what rounding and recording a layer take for a short time: of the layer that takes the most."""
    config, recipe = plan.config, plan.recipe
    sizes = config.micro_batch_size, config.sequence_length, config.tp
    layers = [layer.elements(*sizes).values() for layer in plan.shape.specs()]
    layer = max(map(sum, layers)) // config.tp
    gemm = PER_ROUNDED * layer * recipe.quantizes + PER_WIDENED * layer * (config.device == DeviceName.CPU)
    largest = max((max(layer.elements(*sizes).values()) for layer in plan.recorded), default=0) // config.tp
    exact = PER_ROUNDED * largest if Measure.RESULT in config.measures and recipe.quantizes else 0
    return gemm + exact


def check_memory(plan: Plan, available: int, ranks: int = 1) -> None:
    """Raise ConfigError if `ranks` ranks together exceed the available bytes."""
    config, memory = plan.config, needed(plan)
    if ranks * memory.total > available:
        where = f" on each of {ranks} ranks" if ranks > 1 else ""
        use = f"{'--size tiny, ' * (not config.has_path)}fewer --layers, or a shorter --sequence-length"
        raise ConfigError(
            f"{config.model_title} with {plan.shape.layers} layers needs "
            f"{memory.weights / 2**30:.1f} GiB for weights, gradients and optimizer and "
            f"{(memory.activations + memory.buffers) / 2**30:.1f} GiB for activations and recording{where}, but only "
            f"{available / 2**30:.1f} GiB are free on {config.device}: use {use}"
        )


def available_host_memory() -> int:
    """Bytes that a new process can take without swapping, within the limit of its cgroup."""
    free: int = psutil.virtual_memory().available
    folder = Path("/sys/fs/cgroup")
    try:  # psutil does not know the limits of cgroups, which a container has
        limit, used = ((folder / f"memory.{name}").read_text(encoding="utf-8").strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))

"""Estimates the cost of a run: seconds, bytes of memory, bytes on disk. No torch.

Disk   from the sizes of the recorded tensors: two bytes per value, four outside of products, within the byte budget,
       plus the index's rows. Assumes that tokens are spread evenly over routed experts.
Memory as the collector checks it before it starts (collector.training.memory).
Time   from the iterations of earlier runs of the same model, size, device and backend under the same root: those of the
       same recipe if there are any, else those that quantize about as many operands. Warm-up, recorded and unrecorded
       iterations have their own rates. All grow with the tokens, recording also with the values and the scored formats.
       Without such a run, a rule of thumb gives the order of magnitude.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from binade.collector.errors import ConfigError
from binade.collector.models.shape import Shape
from binade.collector.models.specs import OtherSpec, Spec
from binade.collector.settings import DeviceName, Stats
from binade.collector.training.config import RunConfig, trained_config
from binade.collector.training.memory import available_host_memory, check_memory, needed
from binade.collector.training.plan import Plan, model_of, recorded_of
from binade.data.run.directory import DONE, list_runs
from binade.data.run.losses import read_losses
from binade.data.run.tensor_kinds import TENSOR_KINDS, Other

# The rule of thumb: FLOP per second of a training step, seconds per quantized element by device and backend, seconds
# per recorded value and scored format. Orders of magnitude, not measurements; the first run replaces them.
FLOPS = {"cpu": 5e10, "cuda": 5e13}
QUANTIZE = {("cpu", "triton"): 1e-7, ("cpu", "torch"): 2e-8, ("cuda", "triton"): 5e-11, ("cuda", "torch"): 1e-9}
RECORD = {"cpu": 1e-8, "cuda": 1e-10}
STARTUP = 8.0  # seconds to import torch, read the data and build a tiny model
# Bytes of a tensor file without its values, and of a tensor's row in the segments, with and without a sketch.
FILE, ROW, BASIC_ROW = 2048, 1700, 850
RECENT = 5  # earlier runs that are used


@dataclass(frozen=True)
class Volume:
    """What a run records on all ranks: tensors, their values, bytes of tensor files, and all bytes on disk."""

    tensors: int
    values: int
    files: int
    disk: int
    within_budget: bool


@dataclass(frozen=True)
class JobCost:
    """The cost of one run or several: seconds, bytes of memory (of the largest), bytes on disk.

    basis explains where the time comes from. refusals say what does not fit.
    """

    seconds: float
    memory: int
    memory_free: int | None
    disk: int
    disk_free: int
    tensors: int
    basis: str
    within_budget: bool
    refusals: tuple[str, ...]


def estimate(plans: Sequence[Plan], root: Path, target: str = "", at_once: int = 1) -> JobCost:
    """The estimate for these runs under this root, with this many at the same time. On a target, only earlier runs
    there are used, and the memory of its nodes is unknown."""
    volumes = [volume_of(plan) for plan in plans]
    history = earlier_runs(root, plans[0].config, target)
    times = [duration(plan, volume, history) for plan, volume in zip(plans, volumes, strict=True)]
    free, disk_free = None if target else memory_free(plans[0].config.device), free_space(root)
    disk = sum(volume.disk for volume in volumes)
    refusals = []
    try:
        for plan in plans:
            if free is not None:
                check_memory(plan, free, _sharing(plan.config))
    except ConfigError as error:
        refusals.append(f"{error}.")
    if disk > disk_free:
        refusals.append(
            f"The runs would write {_gib(disk)}, but only {_gib(disk_free)} are free in {root}: lower the byte budget, "
            "record fewer tensors, or do not keep values."
        )
    unknown = [basis for _, basis, measured in times if not measured]
    return JobCost(
        seconds=max(sum(seconds for seconds, _, _ in times) / at_once, *(seconds for seconds, _, _ in times)),
        memory=max(needed(plan).total * _sharing(plan.config) for plan in plans),
        memory_free=free,
        disk=disk,
        disk_free=disk_free,
        tensors=sum(volume.tensors for volume in volumes),
        basis=unknown[0] if unknown else times[0][1],
        within_budget=all(volume.within_budget for volume in volumes),
        refusals=tuple(refusals),
    )


def _sharing(config: RunConfig) -> int:
    """The ranks that share one memory: all of them on a CPU, one on each GPU."""
    return config.world_size if config.device == DeviceName.CPU else 1


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def free_space(root: Path) -> int:
    """Free bytes on the disk of the root, which need not exist yet."""
    existing = next(path for path in (root, *root.parents) if path.is_dir())
    return shutil.disk_usage(existing).free


def memory_free(device: str) -> int | None:
    """Free bytes on the device; None if nvidia-smi does not report them."""
    if device == DeviceName.CPU:
        return available_host_memory()
    try:
        command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        output = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True
        ).stdout
        return int(output.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


# What is recorded


def volume_of(plan: Plan) -> Volume:
    """What a run records; see `_volume`."""
    return _volume(plan.config, plan.recorded)


def _volume(config: RunConfig, recorded_parts: Sequence[Spec | OtherSpec]) -> Volume:
    """The tensors that a run records, computed from the layers of its model. For triggers, the ring is counted once;
    the size of captures is unknown."""
    recorded, replicas = config.recorded_iterations, len(config.recording_ranks) / config.tp
    # Of a watched step, the first micro-batch is measured.
    watched = (
        sum(iteration not in recorded for iteration in range(0, config.iterations, config.every)) if config.every else 0
    )
    full = watched if config.stats == Stats.FULL else 0
    ring = min(config.ring, config.iterations) if config.trigger else 0
    kept = len(config.ranks_with_values)  # these have their own rows; the others share one for each tensor
    rows_of_each = kept + 1 if config.merges_ranks else kept
    total = basic = values = nbytes = files = 0.0
    for spec in recorded_parts:
        elements = elements_of(config, spec, config.tensors)
        a_step = spec.layer_type == Other.PARAMETER  # recorded once for all micro-batches
        times = len(recorded) * (1 if a_step else config.recorded_micro_batches) + full
        basic += 0 if a_step else len(elements) * (watched - full + ring) * replicas * config.tp
        total, values = total + len(elements) * times * rows_of_each, values + sum(elements) * times * replicas
        files += len(elements) * times * kept
        nbytes += (4 if isinstance(spec, OtherSpec) else 2) * sum(elements) * times * kept / config.tp
    tensors, values, rows = round(total), round(values), round(basic)
    wanted = (round(nbytes) + FILE * round(files)) if config.raw else 0
    kept_bytes = min(wanted, config.max_bytes)
    return Volume(
        tensors + rows, values, kept_bytes, kept_bytes + ROW * tensors + BASIC_ROW * rows, wanted <= config.max_bytes
    )


def elements_of(config: RunConfig, spec: Spec | OtherSpec, names: Sequence[str] = ()) -> list[int]:
    """The elements of the tensors with these names (or all) at one site, of a micro-batch on a replica's ranks."""
    divided = {"sequence_parallel": config.sequence_parallel} if isinstance(spec, OtherSpec) else {}
    sizes = spec.elements(config.micro_batch_size, config.sequence_length, config.tp, **divided)
    kinds = [kind for kind in TENSOR_KINDS if kind.place == spec.layer_type]
    return [sizes[kind.size] for kind in kinds if not names or kind.name in names]


# How long it takes


@dataclass(frozen=True)
class EarlierRun:
    """Seconds of a warm-up, an unrecorded and a recorded iteration of an earlier run, None where it had none. lines are
    those of its recipe."""

    config: RunConfig
    shape: Shape
    recipe: str
    lines: Sequence[str]
    warm_up: float | None
    plain: float | None
    recorded: float | None


def step_times(losses: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the warm-up, unrecorded and recorded iterations, from records of loss.jsonl."""
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for record in losses:
        if record.get("seconds") is not None:
            times[0 if record["iteration"] < 0 else 2 if record.get("recorded") else 1].append(record["seconds"])
    return times


def earlier_runs(root: Path, config: RunConfig, target: str = "") -> list[EarlierRun]:
    """The finished runs under a root of the same model, size, device, ranks and target that recorded the time of their
    iterations, newest first, without damaged ones."""
    earlier = []
    for run in reversed(list_runs(root)[0]):
        if run.status.state != DONE or str(run.config.get("target") or "") != target:
            continue
        with suppress(OSError, ValueError, TypeError, KeyError):
            other = trained_config(run.config)
            if path := (run.config.get("weights") or {}).get("path"):
                other = replace(other, model=path)
            if _place(other) != _place(config):
                continue
            shape, _ = model_of(other)
            recipe, lines = str(run.config.get("recipe")), run.config.get("operands") or []
            if any(kinds := step_times(read_losses(run.directory))):
                # The first iteration of a kind also compiles and fills caches: it counts only if there is no other.
                seconds = (median(k[1:] or k) if k else None for k in kinds)
                earlier.append(EarlierRun(other, shape, recipe, lines, *seconds))
    return earlier


def _place(config: RunConfig) -> tuple[object, ...]:
    """What two runs must have in common for the times of one to apply to the other."""
    model = Path(config.model).resolve() if config.has_path else config.model
    return model, config.size, config.device, config.tp, config.dp


def duration(plan: Plan, volume: Volume, history: Sequence[EarlierRun]) -> tuple[float, str, bool]:
    """(seconds of a run from start to end, what they are based on, whether they were measured)."""
    lines = plan.recipe.lines()
    quantized = _quantized(lines)
    similar = [run for run in history if not quantized or run.config.quantized_by == plan.config.quantized_by]
    if not similar:
        basis = "No similar run yet, so this is only an order-of-magnitude estimate."
        return STARTUP + _by_rule(plan, volume), basis, False
    if same := [run for run in similar if run.lines == lines]:
        used = same[:RECENT]
        basis = f"Estimated from {len(used)} earlier run{'s' * (len(used) != 1)} of this model and recipe."
    else:
        nearest = min(abs(_quantized(run.lines) - quantized) for run in similar)
        used = [run for run in similar if abs(_quantized(run.lines) - quantized) == nearest][:RECENT]
        other = used[0].recipe
        basis = f"No run of this recipe yet: estimated from {other}, which quantizes a similar number of operands."
    return STARTUP + median(_scaled(plan, volume, run) for run in used), basis, True


def _quantized(lines: Sequence[str]) -> int:
    """The number of quantized operands, from a recipe's lines."""
    return sum(not line.rstrip().endswith("bf16") for line in lines)


def _scaled(plan: Plan, volume: Volume, run: EarlierRun) -> float:
    """The seconds of a run's iterations, scaled from those of an earlier run."""
    config, other = plan.config, run.config
    grown = _tokens(config) / _tokens(other) * plan.shape.layers / run.shape.layers
    plain = run.plain
    if plain is None and not _quantized(run.lines):
        plain = run.warm_up  # in bf16, iterations under the recipe are the same
    extra = 0.0
    if plain is None:
        plain = (run.recorded or 0.0) / _passes(other)  # the share of recording is unknown
    elif run.recorded is not None:
        beyond = max(run.recorded - plain * _passes(other), 0.0)
        parts = recorded_of(other, run.shape) if other.save_tensors else ()
        extra = beyond * _recording(config, volume) / max(1.0, _recording(other, _volume(other, parts)))
    warm_up = min(plain * grown, _by_weights(plan)) if run.warm_up is None else run.warm_up * grown
    return _total(config, warm_up, plain * grown, extra)


def _total(config: RunConfig, warm_up: float, plain: float, extra: float) -> float:
    """The seconds of all iterations, from those of a warm-up and an unrecorded one, and what recording adds to one."""
    recorded = len(config.recorded_iterations) * (extra + plain * (_passes(config) - 1))
    return config.warmup_iterations * warm_up + config.iterations * plain + recorded


def _passes(config: RunConfig) -> float:
    """The passes of a recorded iteration with its twin step, relative to those without. Upper limit: a recipe that
    draws nothing has one pass."""
    return 1 + (1 + config.twin) / config.micro_batches if config.twin else 1.0


def _recording(config: RunConfig, volume: Volume) -> float:
    """The values to record in an iteration, counted once for their statistics and once for each scored format."""
    return volume.values / max(1, len(config.recorded_iterations)) * (1 + len(config.scores))


def _tokens(config: RunConfig) -> int:
    """Tokens of an iteration on one replica."""
    return config.micro_batches * config.micro_batch_size * config.sequence_length


def _by_weights(plan: Plan) -> float:
    """Seconds of an iteration in bf16 by the rule of thumb: 6 FLOP per weight and token."""
    config = plan.config
    return 6 * plan.shape.parameters * _tokens(config) / FLOPS[config.device] / config.tp


def _by_rule(plan: Plan, volume: Volume) -> float:
    """The seconds of a run's iterations by rules of thumb."""
    config = plan.config
    passing = sum(sum(elements_of(config, spec)) for spec in plan.shape.specs()) * config.micro_batches
    rate = QUANTIZE[config.device, config.quantized_by]
    lines = plan.recipe.lines()
    quantize = _quantized(lines) / len(lines) * passing * rate / config.tp
    record = _recording(config, volume) * RECORD[config.device] / config.world_size
    weights = _by_weights(plan)
    return _total(config, weights, weights + quantize, record)

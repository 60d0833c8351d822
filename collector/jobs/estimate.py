"""What a run will take before it is started: seconds, bytes of memory, bytes on disk. No torch here.

Disk   from the shapes of what is recorded: two bytes a value, within the byte budget, and the index's rows. Tokens of
       routed experts are taken to be spread evenly.
Memory what the collector itself demands before it starts (collector.memory).
Time   from the iterations of former runs of the same model, size, device and backend under the same root: those of the
       same recipe if there are any, else those that quantize about as many operands. Warm-up, recorded and unrecorded
       iterations have rates of their own; they grow with the tokens, recording with the values and the formats scored.
       Without such a run the rule below, which is good for the order of magnitude.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from binade.collector.models.shape import CoreSpec, Spec
from binade.collector.training.config import ConfigError, RunConfig, check
from binade.collector.training.memory import available_host_memory, check_memory, needed
from binade.data.runs import DONE, list_runs, sound_losses
from binade.data.tensor_kinds import TENSOR_KINDS

# Without a run to go by. FLOP a second of a training step, seconds for each element that is quantized, by backend, and
# for each value and format of what is recorded: orders of magnitude, not measurements. A first run replaces them.
FLOPS = {"cpu": 5e10, "cuda": 5e13}
QUANTIZE = {("cpu", "triton"): 1e-7, ("cpu", "torch"): 2e-8, ("cuda", "triton"): 5e-11, ("cuda", "torch"): 1e-9}
RECORD = {"cpu": 1e-8, "cuda": 1e-10}
STARTUP = 8.0  # seconds to import torch, read the data and build a tiny model
FILE, ROW = 2048, 1700  # bytes that a tensor file has beside its values, and a tensor in the index's segments
RECENT = 5  # former runs that are looked at


@dataclass(frozen=True)
class Plan:
    """What a run records on all ranks: tensors, their values, bytes in tensor files and in all."""

    tensors: int
    values: int
    files: int
    disk: int
    within_budget: bool


@dataclass(frozen=True)
class Estimate:
    """Of one run or of several in a row: seconds, bytes of memory (of the largest), bytes on disk. basis says in words
    what the time was made from, refusals why it cannot fit; measured: not by the rule."""

    seconds: float
    memory: int
    memory_free: int | None
    disk: int
    disk_free: int
    tensors: int
    basis: str
    measured: bool
    within_budget: bool
    refusals: tuple[str, ...]


def estimate(runs: Sequence[RunConfig], root: Path) -> Estimate:
    """Of these runs one after another, under this root. The configurations must have passed `check`."""
    plans = [planned(config) for config in runs]
    history = former(root)
    times = [duration(config, plan, history) for config, plan in zip(runs, plans, strict=True)]
    free, disk_free = memory_free(runs[0].device), free_space(root)
    disk = sum(plan.disk for plan in plans)
    refusals = []
    try:
        for config in runs:
            if free is not None:
                check_memory(config, free, _sharing(config))
    except ConfigError as error:
        refusals.append(f"{error}.")
    if disk > disk_free:
        refusals.append(
            f"It would write {_gib(disk)}, {_gib(disk_free)} are free in {root}: lower the byte budget, record less, "
            "or keep no values."
        )
    unknown = [basis for _, basis, measured in times if not measured]
    return Estimate(
        seconds=sum(seconds for seconds, _, _ in times),
        memory=max(needed(config).total * _sharing(config) for config in runs),
        memory_free=free,
        disk=disk,
        disk_free=disk_free,
        tensors=sum(plan.tensors for plan in plans),
        basis=unknown[0] if unknown else times[0][1],
        measured=not unknown,
        within_budget=all(plan.within_budget for plan in plans),
        refusals=tuple(refusals),
    )


def _sharing(config: RunConfig) -> int:
    """The ranks that take from one memory: on a CPU all of them, of GPUs each rank has one."""
    return config.world_size if config.device == "cpu" else 1


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def free_space(root: Path) -> int:
    """Bytes free where the root is, or will be."""
    there = next(path for path in (root, *root.parents) if path.is_dir())
    return shutil.disk_usage(there).free


def memory_free(device: str) -> int | None:
    """Bytes free on the device; None for a GPU that does not tell."""
    if device == "cpu":
        return available_host_memory()
    try:
        asked = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
        return int(said.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


# What is recorded


def planned(config: RunConfig) -> Plan:
    """What a run records, from the shapes of its model."""
    shape = config.shape()
    chosen = config.capture().of(shape.sites()) if config.save_tensors else ()
    elements = [n for spec in shape.specs() if spec.site in chosen for n in elements_of(config, spec, config.tensors)]
    tensors, values = len(elements), sum(elements)
    times = len(config.recorded_iterations) * config.recorded_micro_batches
    recording = len(config.recording_ranks) / config.tp  # in replicas
    tensors, values = round(tensors * times * recording * config.tp), round(values * times * recording)
    wanted = (2 * values + FILE * tensors) if config.raw else 0
    files = min(wanted, config.max_bytes)
    return Plan(tensors, values, files, files + ROW * tensors, wanted <= config.max_bytes)


def elements_of(config: RunConfig, spec: Spec, names: Sequence[str] = ()) -> list[int]:
    """The elements of the tensors with these names (all, if there are none) at one site, of one micro-batch on the
    ranks of one replica."""
    sizes = spec.elements(config.micro_batch_size, config.sequence_length, config.tp)
    layer_type = "attention" if isinstance(spec, CoreSpec) else "linear"
    kinds = [kind for kind in TENSOR_KINDS if kind.layer_type == layer_type]
    return [sizes[kind.size] for kind in kinds if not names or kind.name in names]


# How long it takes


@dataclass(frozen=True)
class Former:
    """What a former run took: seconds of a warm-up, an unrecorded and a recorded iteration, None where it had none."""

    config: Mapping[str, Any]
    warm_up: float | None
    plain: float | None
    recorded: float | None


def former(root: Path) -> list[Former]:
    """The finished runs under a root that tell what their iterations took, newest first; a damaged one is left out."""
    found = []
    for run in reversed(list_runs(root)[0]):
        if run.status.state != DONE:
            continue
        try:
            losses = [r for r in sound_losses(run.directory) if r.get("seconds") is not None and "recorded" in r]
            check(_config_of(run.config))
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if not losses:
            continue
        # The first iteration of a kind also compiles and fills caches: it counts only where it is alone.
        kinds = (
            [r["seconds"] for r in losses if r["iteration"] < 0],
            [r["seconds"] for r in losses if r["iteration"] >= 0 and not r["recorded"]],
            [r["seconds"] for r in losses if r["iteration"] >= 0 and r["recorded"]],
        )
        found.append(Former(run.config, *(median(k[1:] or k) if k else None for k in kinds)))
    return found


def duration(config: RunConfig, plan: Plan, history: Sequence[Former]) -> tuple[float, str, bool]:
    """(seconds of a run from its start to its end, in words what they were made from, whether they were measured)."""
    like = [run for run in history if _alike(config, run.config)]
    if not like:
        return STARTUP + _by_rule(config, plan), "No run like it yet: a rule of thumb, good for the magnitude.", False
    lines = config.parsed_recipe().lines()
    same = [run for run in like if run.config.get("operands") == lines]
    if same:
        used = same[:RECENT]
        basis = f"Measured: {len(used)} former run{'s' * (len(used) != 1)} of this model and recipe."
    else:
        quantized = _quantized(lines)
        distance = {id(run): abs(_quantized(run.config.get("operands") or []) - quantized) for run in like}
        used = [run for run in like if distance[id(run)] == min(distance.values())][:RECENT]
        basis = f"No run of this recipe yet: measured on {used[0].config.get('recipe')}, which quantizes about as much."
    return STARTUP + median(_scaled(config, plan, run) for run in used), basis, True


def _alike(config: RunConfig, other: Mapping[str, Any]) -> bool:
    kind = "torch" if other.get("backend") == "torch" else "triton"
    device = "cpu" if str(other.get("device")).startswith("cpu") else "cuda"
    return (
        (other.get("model"), other.get("size"), device) == (config.model, config.size, config.device)
        and (kind == config.backend or not _quantized(config.parsed_recipe().lines()))
        and other.get("tp", 1) == config.tp
        and other.get("dp", 1) == config.dp
    )


def _quantized(lines: Sequence[str]) -> int:
    """How many operands are rounded to a format of their own, of a recipe's lines."""
    return sum(not line.rstrip().endswith("bf16") for line in lines)


def _scaled(config: RunConfig, plan: Plan, run: Former) -> float:
    """The seconds of a run's iterations by what those of a former one took."""
    other = _config_of(run.config)
    grown = _tokens(config) / _tokens(other) * config.shape().layers / other.shape().layers
    plain = run.plain
    if plain is None and not _quantized(run.config.get("operands") or []):
        plain = run.warm_up  # its iterations under the recipe are no other
    extra = 0.0
    if plain is None:
        plain = run.recorded or 0.0  # what recording takes of it cannot be told
    elif run.recorded is not None:
        extra = max(run.recorded - plain, 0.0) * _recording(config, plan) / max(1.0, _recording(other, planned(other)))
    warm_up = min(plain * grown, _by_weights(config)) if run.warm_up is None else run.warm_up * grown
    recorded = len(config.recorded_iterations)
    return config.warmup_iterations * warm_up + config.iterations * plain * grown + recorded * extra


def _recording(config: RunConfig, plan: Plan) -> float:
    """How much there is to record in an iteration: values, once for their own statistics and once a format scored."""
    return plan.values / max(1, len(config.recorded_iterations)) * (1 + len(config.scores))


def _config_of(found: Mapping[str, Any]) -> RunConfig:
    """What of a run.json says how large its iterations were."""
    names = (
        *("model", "size", "layers", "vocab_size", "micro_batches", "micro_batch_size", "sequence_length", "raw"),
        *("control_iter", "capture_every", "collect_micro_batches", "train_iters", "save_tensors", "capture_layers"),
        *("tp", "dp", "max_bytes"),
    )
    lists = {name: tuple(found.get(name) or ()) for name in ("tensors", "modules", "ranks", "scores")}
    return RunConfig(**{name: found[name] for name in names if name in found}, **lists)


def _tokens(config: RunConfig) -> int:
    """Of an iteration, on one replica."""
    return config.micro_batches * config.micro_batch_size * config.sequence_length


def _by_weights(config: RunConfig) -> float:
    """Seconds of an iteration in bf16 by the rule: 6 FLOP a weight and token."""
    return 6 * config.shape().parameters * _tokens(config) / FLOPS[config.device] / config.tp


def _by_rule(config: RunConfig, plan: Plan) -> float:
    lines = config.parsed_recipe().lines()
    passing = sum(sum(elements_of(config, spec)) for spec in config.shape().specs()) * config.micro_batches
    rate = QUANTIZE[config.device, config.backend]
    quantize = _quantized(lines) / len(lines) * passing * rate / config.tp
    record = plan.values * (1 + len(config.scores)) * RECORD[config.device] / config.world_size
    iterations = config.warmup_iterations + config.iterations
    return iterations * _by_weights(config) + config.iterations * quantize + record

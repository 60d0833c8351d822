"""What a collection is asked to do: models, sizes, datasets, and one frozen RunConfig. No torch here."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from collector.recipe import Recipe, parse_recipe
from collector.shapes import MODELS, ModelShape, Shape
from quant.formats import FORMATS

__all__ = [
    "BACKENDS",
    "DATASETS",
    "DEFAULT_SCORES",
    "DEVICES",
    "MODELS",
    "SIZES",
    "TENSOR_NAMES",
    "ConfigError",
    "ModelShape",
    "RunConfig",
    "available_host_memory",
    "check",
    "check_memory",
    "fast",
]

DATASETS = ("wikipedia", "dolma", "python-docs")
SIZES = ("tiny", "full")
BACKENDS = ("triton", "torch")
DEVICES = ("cpu", "cuda")
DEFAULT_SCORES = ("hifp8", "mxfp8", "mxfp4", "nvfp4")
TENSOR_NAMES = (
    "input",
    "weight",
    "output",
    "grad_output",
    "grad_input",
    "grad_weight",
    "query",
    "key",
    "value",
    "attention_scores",
    "attention_probs",
    "grad_query",
    "grad_key",
    "grad_value",
)


class ConfigError(ValueError):
    """A choice that cannot be run. The message says what was wrong, what was expected and what to do."""


@dataclass(frozen=True)
class RunConfig:
    """One run. Iterations count optimizer steps; of each, the first `collect_micro_batches` micro-batches are recorded.

    sequence_length is in tokens, micro_batch_size in sequences, max_bytes bounds the tensor files of the run, load_hf
    is the directory of a Hugging Face checkpoint to start from.
    """

    model: str = "llama32-1b"
    size: str = "tiny"
    dataset: str = "wikipedia"
    recipe: str = "bf16"
    linear_quant: str | None = None
    qk_quant: str | None = None
    pv_quant: str | None = None
    router_quant: str | None = None
    control_iter: int = 1
    warmup_iterations: int = 0
    micro_batches: int = 1
    collect_micro_batches: int = 1
    capture_every: int = 1
    micro_batch_size: int = 2
    sequence_length: int = 256
    layers: int | None = None
    load_hf: str | None = None
    tensors: tuple[str, ...] = ()
    scores: tuple[str, ...] = DEFAULT_SCORES
    raw: bool = True
    max_bytes: int = 4 << 30
    learning_rate: float = 1e-3
    seed: int = 1234
    device: str = "cpu"
    backend: str = "triton"
    tp: int = 1

    def parsed_recipe(self) -> Recipe:
        return parse_recipe(
            self.recipe, linear=self.linear_quant, qk=self.qk_quant, pv=self.pv_quant, router=self.router_quant
        )

    def shape(self) -> Shape:
        shape = MODELS[self.model][self.size]
        return replace(shape, layers=self.layers) if self.layers else shape

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def records(self, iteration: int) -> bool:
        return self.collect_micro_batches > 0 and iteration % self.capture_every == 0


def fast(config: RunConfig) -> RunConfig:
    """--training-config fast: a quarter of the tokens."""
    return replace(config, micro_batch_size=1, sequence_length=128)


def check(config: RunConfig) -> None:
    """Raise ConfigError, RecipeError or UnknownFormat for the first choice that cannot be run."""
    _one_of("model", config.model, MODELS)
    _one_of("size", config.size, SIZES)
    if config.dataset not in DATASETS and not config.dataset.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(
            f"dataset {config.dataset!r} is unknown: {', '.join(DATASETS)}, or a path to a .jsonl or .jsonl.gz file"
        )
    if config.dataset not in DATASETS and not Path(config.dataset).is_file():
        raise ConfigError(f"dataset {config.dataset} does not exist: give the path of an existing file")
    config.parsed_recipe()
    for name, least in (
        ("control_iter", 1),
        ("warmup_iterations", 0),
        ("micro_batches", 1),
        ("collect_micro_batches", 0),
        ("capture_every", 1),
        ("micro_batch_size", 1),
        ("sequence_length", 1),
        ("max_bytes", 0),
    ):
        value = getattr(config, name)
        if value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be {least} or more")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"--seed is {config.seed}: it must be 0 or more and less than 2^63")
    if not 0 <= config.learning_rate < math.inf:
        raise ConfigError(f"--learning-rate is {config.learning_rate}: it must be 0 or more, and finite")
    published = MODELS[config.model][config.size]
    if config.layers is not None and not 1 <= config.layers <= published.layers:
        raise ConfigError(f"--layers is {config.layers}: {config.model} {config.size} has 1 to {published.layers}")
    if config.load_hf is not None and not (Path(config.load_hf) / "config.json").is_file():
        raise ConfigError(
            f"checkpoint {config.load_hf} has no config.json: give the directory of a Hugging Face model to --load-hf"
        )
    if config.sequence_length > published.max_sequence:
        raise ConfigError(f"--sequence-length is {config.sequence_length}: at most {published.max_sequence}")
    if config.collect_micro_batches > config.micro_batches:
        raise ConfigError(
            f"--collect-micro-batches is {config.collect_micro_batches}, but an iteration has "
            f"{config.micro_batches}: raise --micro-batches"
        )
    if config.tp != 1:
        raise ConfigError(f"--tp is {config.tp}: this version trains on one rank, --tp 1")
    for name in config.tensors:
        _one_of("tensor", name, TENSOR_NAMES)
    for name in config.scores:
        _one_of("score format", name, [*FORMATS, *FORMATS.aliases])
    _one_of("backend", config.backend, BACKENDS)
    _one_of("device", config.device, DEVICES)


def check_memory(config: RunConfig, available: int) -> None:
    """Raise ConfigError if the model, its gradients and Adam's two moments (16 bytes a weight) exceed the bytes there
    are."""
    needed = 16 * config.shape().parameters
    if needed > available:
        raise ConfigError(
            f"{config.model} {config.size} with {config.shape().layers} layers needs {needed / 2**30:.1f} GiB for "
            f"weights, gradients and optimizer, {available / 2**30:.1f} GiB are free on {config.device}: "
            "use --size tiny or fewer --layers"
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


def _one_of(what: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise ConfigError(f"{what} {value!r} is unknown: {', '.join(allowed)}")

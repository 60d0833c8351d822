"""The configuration of a run: one frozen RunConfig. It travels as JSON, to jobs and ranks, in checkpoints and run.json;
its command line is only shown to people. No torch here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from binade.collector.capture.watching import WatchOptions
from binade.collector.datasets.inputs import BYTE, DATASETS
from binade.collector.errors import ConfigError, raising
from binade.collector.models.registry import MODELS
from binade.collector.pretrained.directory import gguf_of, name_of
from binade.collector.settings import (
    DEFAULT_SCORES,
    FEW_RANKS,
    BackendName,
    DeviceName,
    MergeRanks,
    OptionGroup,
    Size,
    declared,
    option,
)
from binade.data.run.tensor_kinds import DEFAULT_MEASURES, Measure, tensor_names

LAYERS = (
    "LAYERS is first, last 2, last 15%, 3, 2-4, or a regular expression that is searched for in names such as "
    "layer1.qkv, layer1.core and layer2.expert3.fc1; a leading ! selects all other layers. Separate several choices "
    "with commas; commas inside braces do not separate."
)
MODEL = OptionGroup("Model and data")
FORMAT = OptionGroup(
    "What is quantized",
    "FORMAT replaces the format of the recipe; it may have options, as in 'nvfp4(block=16x16)': see `binade list`. "
    "The more specific option wins: recipe < part (linear, qk, pv, router) < GEMM (forward, dgrad, wgrad) < operand. "
    f"bf16 turns quantization off. --dry-run prints the operands' names. {LAYERS}",
)
LENGTH = OptionGroup("Training")
RECORD = OptionGroup("What is recorded", "LAYERS is as above.")
WHERE = OptionGroup("Device, ranks and output")
OVERRIDES = ("linear", "qk", "pv", "router", "forward", "dgrad", "wgrad")  # --linear-quant and so on
MOST_RANKS = 65_536
FORM_LAYERS = "Layers: first, last 2, 3, 2-4, or a regular expression that is searched for in names such as layer1.qkv"


@dataclass(frozen=True)
class RunConfig(WatchOptions):
    """One run. Each field declares its option; see collector.settings."""

    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid"}  # of its JSON

    # fmt: off
    model: str = option("llama32-1b", group=MODEL, metavar="NAME|PATH", choices=MODELS, or_path=True, label="Model",
        help="Model name, or path to a model with weights: a Hugging Face directory (safetensors) or a GGUF file",
        form_help="Or the path to a Hugging Face directory with safetensors, or to a GGUF file")
    size: Size = option(Size.TINY, group=MODEL, metavar="NAME", label="Size", default_help="tiny; full for a path",
        help="tiny: the same architecture, narrow enough for a CPU; full: the published dimensions")
    dataset: str = option("wikipedia", group=MODEL, metavar="NAME|PATH", label="Dataset",
        help=f"{', '.join(DATASETS)}, or the path to a .jsonl, .jsonl.gz or .parquet file, or to Megatron’s .bin/.idx")
    tokenizer: str | None = option(None, group=MODEL, metavar="NAME|PATH",
        default_help=f"that of the model if --model is a path, else {BYTE}; .bin/.idx needs none",
        help=f"{BYTE}, or the path to a tokenizer.json, a directory that contains one, or a GGUF file")
    vocab_size: int | None = option(None, group=MODEL, metavar="N", minimum=1, default_help="the model's own",
        help="Vocabulary size of the model")
    layers: int | None = option(None, group=MODEL, metavar="N", minimum=1, label="Layers",
        default_help="2 of size tiny, else all",
        help="Number of layers: the first N of the model, also of size tiny")

    recipe: str = option("bf16", group=FORMAT, metavar="RECIPE", flag="--quantization",
        help="Recipe: a name from `binade list`, or the path to a .toml or .yaml file")
    linear_quant: str | None = option(None, group=FORMAT, metavar="FORMAT", help="Format of the linear layers")
    qk_quant: str | None = option(None, group=FORMAT, metavar="FORMAT", help="Format of the operands of QK^T")
    pv_quant: str | None = option(None, group=FORMAT, metavar="FORMAT", help="Format of the operands of PV")
    softmax: str | None = option(None, group=FORMAT, metavar="full|flash(tile=N)", default_help="that of the recipe",
        help="What PV multiplies: the softmax of whole rows, or, as in flash kernels, exp(S - m) of tiles of N keys")
    router_quant: str | None = option(None, group=FORMAT, metavar="FORMAT",
        help="Format of the experts' router; by default, it is not quantized")
    forward_quant: str | None = option(None, group=FORMAT, metavar="FORMAT",
        help="Format of the linear layers' forward GEMM")
    dgrad_quant: str | None = option(None, group=FORMAT, metavar="FORMAT",
        help="Format of the linear layers' GEMM for the gradient of the input")
    wgrad_quant: str | None = option(None, group=FORMAT, metavar="FORMAT",
        help="Format of the linear layers' GEMM for the gradient of the weight")
    operand_quant: tuple[str, ...] = option((), group=FORMAT, metavar="PART.GEMM.OPERAND=FORMAT,...",
        help="Formats of single operands, such as linear.dgrad.grad_output=mxfp6_e3m2,qk.forward.key=bf16. Here, "
        "mxfp8 means E4M3 for gradients as well; in the other options, it rounds gradients to mxfp8_e5m2")
    skip_layers: str = option("", group=FORMAT, metavar="LAYERS", help="Keep these layers in bf16",
        label="Layers kept in bf16", form_help=FORM_LAYERS, placeholder="none")

    train_iters: int | None = option(None, group=LENGTH, metavar="N", minimum=1, label="Iterations trained",
        help="Iterations trained with the recipe", default_help="until the last recorded iteration",
        placeholder="as needed",
        form_help="With the recipe; if empty, until the last recorded iteration")
    control_iter: int = option(1, group=RECORD, metavar="N", minimum=0, label="Recorded iterations",
        help="Number of recorded iterations; 0: every iteration that is trained")
    warmup_iterations: int = option(0, group=LENGTH, metavar="N", minimum=0, label="Warm-up iterations",
        help="Iterations in bf16 before the recipe is applied")
    checkpoint_every: int = option(0, group=LENGTH, metavar="N", minimum=0,
        help="Write a checkpoint every N iterations, warm-up included, from which --resume continues; the last two are "
        "kept", default_help="none")
    evaluate_every: int = option(0, group=LENGTH, metavar="N", minimum=0, default_help="none",
        help="Evaluate the loss of each held-out sequence, of documents on which the run does not train, every N "
        "iterations with the recipe, before the first and after the last")
    evaluate_sequences: int = option(32, group=LENGTH, metavar="N", minimum=2, maximum=1_000_000,
        help="Held-out sequences that are evaluated")
    micro_batches: int = option(1, group=LENGTH, metavar="N", minimum=1, label="Micro-batches",
        help="Micro-batches per iteration", default_help="as many as are recorded")
    collect_micro_batches: int = option(1, group=RECORD, metavar="N", minimum=0, label="Recorded micro-batches",
        help="Record the first N micro-batches of an iteration; 0: all")
    capture_every: int = option(1, group=RECORD, metavar="N", minimum=1, label="Record one iteration in",
        help="Record one iteration in N, starting with the first")
    micro_batch_size: int = option(2, group=LENGTH, metavar="N", minimum=1, label="Micro-batch size",
        help="Sequences per micro-batch", default_help="2; fast: 1")
    sequence_length: int = option(256, group=LENGTH, metavar="N", minimum=1, label="Sequence length",
        help="Tokens per sequence", default_help="256; fast: 128")
    save_tensors: bool = option(True, group=RECORD, help="Train without recording tensors; losses are still logged")
    tensors: tuple[str, ...] = option((), group=RECORD, metavar="A,B,...", choices=tensor_names, label="Tensors",
        default_help="all tensors of attention and linear layers", placeholder="all of attention and linear layers",
        help="Record only these tensors. norm_input and the tensors after it in this list are recorded only if named",
        form_help="norm_input and the tensors listed after it are recorded only if selected")
    modules: tuple[str, ...] = option((), group=RECORD, metavar="A,B,...", default_help="all", label="Modules",
        help="Record only these modules, such as qkv, core, fc1; see `binade list`", form_help="", placeholder="all")
    capture_layers: str = option("", group=RECORD, metavar="LAYERS", help="Record only these layers",
        default_help="all", label="Recorded layers", form_help=FORM_LAYERS, placeholder="all")
    ranks: tuple[int, ...] = option((), group=RECORD, metavar="0,1,...", default_help="all",
        help="Record only on these ranks")
    merge_ranks: MergeRanks = option(MergeRanks.AUTO, group=RECORD, metavar="WHEN", label="Merge ranks",
        help="Write one row per tensor, merged over the recorded ranks and without values: on, off, or auto (on with "
        f"more than {FEW_RANKS} ranks). Replicas with outliers or NaN keep their own rows",
        form_help=f"One row per tensor, without values; auto: on with more than {FEW_RANKS} ranks")
    unmerged_ranks: tuple[int, ...] = option((), group=RECORD, metavar="0,1,...", default_help="none",
        help="With merged ranks, the replicas that contain these ranks keep their own rows and values")
    scores: tuple[str, ...] = option(DEFAULT_SCORES, group=RECORD, metavar="A,B,...", label="Scored formats",
        help="Formats to score every recorded operand in. This takes time, but little space", placeholder="no format")
    measures: tuple[Measure, ...] = option(DEFAULT_MEASURES, group=RECORD, metavar="A,B,...",
        help="Also measure the error of each GEMM's result, single blocks, "
            "how channels and weights change over iterations, and whether the optimizer sees the sum of micro-batches",
        label="Also measured", form_help="", placeholder="nothing")
    twin: int = option(0, group=RECORD, metavar="M", minimum=0, maximum=1024, label="Twin passes", default_help="none",
        help="In each recorded iteration, also run the first micro-batch once without the recipe and M times with it "
        "(once if the recipe draws no random numbers), and record the changes of the loss and of each gradient",
        form_help="In each recorded iteration: one pass without the recipe and this many with it; 0: none")
    rounding_alone: bool = option(True, group=RECORD,
        help="Leave out what rounding alone does to the loss: one more forward pass, without the recipe, of the first "
        "micro-batch that is trained with it")
    raw: bool = option(True, group=RECORD, label="Keep values",
        form_help="Otherwise statistics, sketches and scores only",
        help="Record statistics, sketches and scores, without the values")
    max_bytes: int = option(4 << 30, group=RECORD, metavar="SIZE", minimum=0, maximum=(1 << 63) - 1, unit="bytes",
        help="Size limit for the tensor files of a run, such as 500M or 4G; shared by all ranks", default_help="4G",
        label="Byte budget (MiB)", form_help="Size limit for the tensor files of a run")
    learning_rate: float = option(1e-3, group=LENGTH, metavar="X", minimum=0, maximum=sys.float_info.max,
        help="Learning rate of AdamW", label="Learning rate", form_help="")
    seed: int = option(1234, group=LENGTH, metavar="N", minimum=0, maximum=(1 << 63) - 1,
        help="Seed of the weights, the data and stochastic rounding", label="Seed")
    device: DeviceName = option(DeviceName.CPU, group=WHERE, metavar="NAME", help="Device",
        label="Device", form_help="")
    backend: BackendName = option(BackendName.AUTO, group=WHERE, metavar="NAME", label="Quantized by",
        help="What quantizes the operands. All give the same bits; auto is the fastest: triton on a GPU, torch with "
        "compiled C++ on a CPU, where Triton's kernels are interpreted")
    tp: int = option(1, group=WHERE, metavar="N", minimum=1, maximum=MOST_RANKS, help="Tensor-parallel ranks",
        label="Tensor-parallel ranks", form_help="")
    dp: int = option(1, group=WHERE, metavar="N", minimum=1, maximum=MOST_RANKS, label="Replicas",
        help="Data-parallel ranks, each with its own micro-batches")
    sequence_parallel: bool = option(False, group=WHERE, form_help="",
        label="Split sequences across tensor-parallel ranks",
        help="Sequence parallelism as in Megatron: outside the GEMMs, split sequences across the tensor-parallel ranks")
    # fmt: on

    @property
    def has_path(self) -> bool:
        """Whether the model is given by its path, and has weights and a tokenizer of its own."""
        return self.model not in MODELS

    @property
    def quantized_by(self) -> BackendName:
        """The backend that quantizes the operands, TRITON or TORCH."""
        if self.backend != BackendName.AUTO:
            return self.backend
        return BackendName.TRITON if self.device == DeviceName.CUDA else BackendName.TORCH

    @property
    def model_name(self) -> str:
        """The name of the model for users. Raises ConfigError for a path without a model, as all that follow."""
        return name_of(Path(self.model)) if self.has_path else self.model

    @property
    def model_title(self) -> str:
        """The model and, if there are several sizes, its size."""
        return self.model_name if self.has_path else f"{self.model} {self.size}"

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer of a dataset of text."""
        default = str(gguf_of(Path(self.model)) or self.model) if self.has_path else BYTE
        return self.tokenizer or default

    @property
    def world_size(self) -> int:
        """How many ranks train."""
        return self.tp * self.dp

    @property
    def recording_ranks(self) -> tuple[int, ...]:
        return self.ranks or tuple(range(self.world_size))

    @property
    def merges_ranks(self) -> bool:
        return MergeRanks(self.merge_ranks).applies(len(self.recording_ranks))

    @property
    def ranks_with_values(self) -> tuple[int, ...]:
        """The recording ranks that keep rows and values of their own."""
        if not self.merges_ranks:
            return self.recording_ranks
        replicas = {rank // self.tp for rank in self.unmerged_ranks}
        return tuple(rank for rank in self.recording_ranks if rank // self.tp in replicas)

    def arguments(self) -> list[str]:
        """The command line: `run` with the options that differ from their defaults."""
        line = ["run", "--quantization", self.recipe]
        defaults = {"micro_batches": max(1, self.collect_micro_batches), "recipe": self.recipe}
        if not (self.raw and self.save_tensors):
            defaults["max_bytes"] = self.max_bytes
        for name, setting in declared(RunConfig).items():
            value = getattr(self, name)
            if value != defaults.get(name, setting.default):
                line += [setting.flag] if setting.kind is bool else [setting.flag, setting.text(value)]
        return line

    def to_dict(self) -> dict[str, Any]:
        """The configuration for run.json: plain values, train_iters as a number."""
        return asdict(self) | {"train_iters": self.iterations}

    @property
    def iterations(self) -> int:
        """Optimizer steps under the recipe."""
        return self.needed_iterations if self.train_iters is None else self.train_iters

    @property
    def needed_iterations(self) -> int:
        """Iterations until control_iter of them are recorded."""
        return (self.control_iter - 1) * self.capture_every + 1 if self.control_iter else 1

    @property
    def recorded_micro_batches(self) -> int:
        return self.collect_micro_batches or self.micro_batches

    @property
    def recorded_iterations(self) -> range:
        """The recorded iterations, of those under the recipe, from 0."""
        everyone = range(0, self.iterations if self.save_tensors else 0, self.capture_every)
        return everyone[: self.control_iter or None]

    def records(self, iteration: int) -> bool:
        return iteration in self.recorded_iterations


def defaults(command: str, training_config: str | None = None) -> RunConfig:
    """The configuration of a command without options."""
    config = replace(RunConfig(), warmup_iterations=2) if command == "quick" else RunConfig()
    is_fast = training_config == "fast" or (training_config is None and command == "quick")
    return replace(config, micro_batch_size=1, sequence_length=128) if is_fast else config  # a quarter of the tokens


def trained_config(description: Mapping[str, Any]) -> RunConfig:
    """The configuration that `binade run` trained a run with. description: its run.json. Raises ConfigError for a run
    that was not trained so."""
    from binade.data.run.json_files import parse_json  # pydantic, for which --help does not wait

    record = description.get("run_config")
    if not isinstance(record, Mapping):
        raise ConfigError("it was not trained by binade run")
    with raising(ConfigError, "its configuration is not valid", ValueError):
        return parse_json(RunConfig, json.dumps(record).encode())

"""One run: build the model, warm it up in bf16, train under the recipe and record."""

from __future__ import annotations

import math
import os
import platform
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import unwrap
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.capture.evaluation import sequence_losses
from binade.collector.capture.instrument import instrument
from binade.collector.capture.options import Merge, Watch
from binade.collector.capture.recorder import Recorder
from binade.collector.capture.watching import WatchOptions
from binade.collector.datasets.loading import Dataset, open_dataset
from binade.collector.datasets.samples import SampleStream, open_samples
from binade.collector.errors import ConfigError
from binade.collector.models.model import GPTModel
from binade.collector.pretrained.causal_lm import CausalLM
from binade.collector.pretrained.checkpoint import Checkpoint, open_checkpoint
from binade.collector.pretrained.directory import describe_weights
from binade.collector.ranks import Ranks
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.recipe import Communication
from binade.collector.settings import BackendName, DeviceName, MergeRanks
from binade.collector.training.config import RunConfig
from binade.collector.training.held_out import Batch, hold_out, logits_of
from binade.collector.training.memory import available_host_memory, check_memory
from binade.collector.training.plan import Plan
from binade.collector.training.ranks import (
    clip_gradients,
    finish_gradients,
    join,
    mean_over_replicas,
    rounding_tokens,
    started_as_rank,
)
from binade.collector.training.resume import (
    Branched,
    Resumed,
    check_unchanged,
    open_branched,
    open_resumed,
    write_checkpoint,
)
from binade.data.run.store import append_to
from binade.quant.specs import Spec

Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # iterations done, of how many


@dataclass(frozen=True)
class Result:
    """The outcome of a run. Losses are in nats per token; None if no iteration finished."""

    run_id: str
    directory: Path
    loss_first: float | None
    loss_last: float | None
    tensors: int
    bytes: int
    seconds: float


class DivergedError(RuntimeError):
    """The loss is no longer finite."""


def prepare(plan: Plan) -> None:
    """Raise errors that can be detected on this machine before a run exists. Raises ConfigError.

    On a CPU the ranks share the memory: their launcher checks it, not each of them.
    """
    config = plan.config
    if config.quantized_by == BackendName.TRITON and not find_spec("triton"):
        raise ConfigError("backend 'triton' needs the package triton: install it, or use --backend torch")
    if config.device == DeviceName.CUDA:
        if not torch.cuda.is_available():
            raise ConfigError("device 'cuda' was requested, but torch sees no GPU here: use --device cpu")
        check_memory(plan, torch.cuda.mem_get_info()[0])
    else:
        if not started_as_rank():
            check_memory(plan, available_host_memory(), config.world_size)
        if config.quantized_by == BackendName.TRITON:
            # On a machine with a GPU the kernels would be compiled for it; decided before they are imported.
            os.environ["TRITON_INTERPRET"] = "1"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def backend_name(config: RunConfig) -> str:
    """The backend that quantizes the GEMM operands, as recorded with the run."""
    if config.quantized_by == BackendName.TORCH:
        return "torch"
    kernels = import_module("binade.quant.backends.triton_kernels")
    return f"triton {version('triton')} ({'interpreted' if kernels.INTERPRETED else 'compiled'})"


def train(
    plan: Plan,
    root: Path,
    *,
    say: Say,
    progress: Progress = lambda done, total: None,
    resume: str | None = None,
) -> Result:
    """Train a run on this rank: a new one, which may branch off from another, or the one named `resume` that is
    continued. Rank 0's `say` gets the lines of the run's log. Raises ConfigError and its like before anything is
    written; later OSError, DivergedError or KeyboardInterrupt, with the run marked accordingly."""
    prepare(plan)
    config, resumed = plan.config, open_resumed(root, resume) if resume else None
    if plan.branch:
        resumed = open_branched(root, plan, plan.branch, to_toml(plan.recipe))
    with join(config, root) as ranks:
        try:
            return _run(plan, root, ranks, say, progress, resumed)
        except InstrumentError as error:  # a model of transformers, in its first forward pass
            raise ConfigError(
                f"{config.model_title} cannot be trained by binade run, only instrumented in your own script: {error}"
            ) from error


def open_stream(plan: Plan, dataset: Dataset, rank: int = 0, ranks: int = 1) -> SampleStream:
    """The samples of a replica of a run. Raises ConfigError if the run would read a token that the model does not
    have."""
    config = plan.config
    batches = ranks * config.micro_batches * (config.warmup_iterations + config.iterations)
    read = batches * config.micro_batch_size * config.sequence_length + 1
    documents, length = dataset.documents, config.sequence_length
    return open_samples(documents, length, config.seed, read, plan.shape.vocab, rank, ranks)


def describe_run(plan: Plan, checkpoint: Checkpoint | None, dataset: Dataset, device: torch.device) -> dict[str, Any]:
    """What run.json says of a run."""
    config, recipe = plan.config, plan.recipe
    weights = checkpoint.identity() if checkpoint else None
    return config.to_dict() | {
        "model": f"{config.model_name}@{weights['sha256'][:8]}" if weights else config.model,
        "weights": weights,
        "backend": backend_name(config),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "data": dataset.identity,
        "recipe": recipe.name,
        "operands": recipe.lines(),
        "recipe_toml": to_toml(recipe),
        "parameters": plan.shape.parameters,
        "run_config": asdict(config),
        "command": shlex.join(["binade", *plan.arguments]),
        "target": os.environ.get("BINADE_TARGET") or None,
        "versions": {name: _version(name) for name in ("torch", "triton", "numpy")}
        | {"python": platform.python_version()},
    }


def _recorder(plan: Plan, root: Path, ranks: Ranks, description: dict[str, Any]) -> Recorder:
    config = plan.config
    watches = ranks.rank in config.recording_ranks
    merges = watches and config.save_tensors and config.merges_ranks
    return Recorder(
        root,
        label=f"{config.model_name}_{plan.recipe.name}",
        config=description,
        tensors=config.tensors,
        scores=config.scores,
        measures=config.measures,
        max_bytes=config.max_bytes // max(len(config.ranks_with_values), 1) if config.raw else 0,
        watch=Watch(**{field.name: getattr(config, field.name) for field in fields(WatchOptions) if watches}),
        merge=Merge(MergeRanks.ON if merges else MergeRanks.OFF, config.unmerged_ranks, ranks),
        enabled=True,
    )


def _run(plan: Plan, root: Path, ranks: Ranks, say: Say, progress: Progress, resumed: Resumed | None) -> Result:
    config = plan.config
    checkpoint = open_checkpoint(config.model, plan.shape) if config.has_path else None
    dataset = open_dataset(config.dataset, config.tokenizer_name, plan.shape.vocab)
    apart = hold_out(plan, dataset)
    stream = open_stream(plan, apart.rest(dataset), ranks.replica, ranks.replicas)
    device = (
        torch.device("cuda", torch.cuda.current_device()) if config.device == DeviceName.CUDA else torch.device("cpu")
    )
    held_out = apart.batches(config, config.evaluate_sequences, device) if config.evaluate_every else []
    description = describe_run(plan, checkpoint, dataset, device)
    if resumed:
        check_unchanged(resumed, description)
    if isinstance(resumed, Branched):
        description |= resumed.facts
    start = time.monotonic()
    recorder = _recorder(plan, root, ranks, description)
    recorder.of_training(resumed.continued(ranks.rank) if resumed else None)
    with recorder:
        writer = recorder.writer
        with append_to(writer.directory / "log.txt") as log:
            prefix = f"rank {ranks.rank}: " if ranks.rank else ""

            def write_log(line: str) -> None:
                log.write(f"{time.strftime('%H:%M:%S')} {prefix}{line}\n".encode())

            def report(line: str) -> None:
                if ranks.rank == 0:
                    write_log(line)
                    say(line)

            try:
                report(f"data: {dataset}")
                with ranks.explaining():
                    _train(plan, stream, held_out, device, recorder, report, progress, checkpoint, resumed)
            except BaseException as error:
                with suppress(OSError):  # a full disk must not hide what happened
                    write_log(f"ended early: {type(error).__name__}: {error}")
                raise
    status, seconds = writer.status, time.monotonic() - start
    losses = status.loss_first, status.loss_last
    return Result(writer.run_id, writer.directory, *losses, status.tensors, status.bytes, seconds)


def _start(
    plan: Plan, device: torch.device, ranks: Ranks, checkpoint: Checkpoint | None, resumed: Resumed | None
) -> tuple[GPTModel | CausalLM, torch.optim.Optimizer]:
    """The model and its optimizer, with the weights of a checkpoint or those that the seed draws, or as they were."""
    torch.manual_seed(plan.config.seed)
    with device:
        if checkpoint:
            model = checkpoint.build(ranks.tensor)
        else:
            model = GPTModel(plan.shape, ranks.tensor)
            model.initialize(plan.config.seed)
    optimizer = _optimizer(model, plan.config)
    if resumed:
        resumed.restore(model, optimizer, ranks.rank)
    return model, optimizer


def _train(
    plan: Plan,
    stream: SampleStream,
    held_out: Sequence[Batch],
    device: torch.device,
    recorder: Recorder,
    report: Say,
    progress: Progress,
    checkpoint: Checkpoint | None,
    resumed: Resumed | None,
) -> None:
    config, shape, recipe, ranks = plan.config, plan.shape, plan.recipe, recorder.ranks
    model, optimizer = _start(plan, device, ranks, checkpoint, resumed)
    report(
        f"run {recorder.writer.run_id}: {config.model_title}, {shape.layers} layers, "
        f"{shape.parameters / 1e6:.1f} M weights, on {config.device}"
    )
    if checkpoint:
        report(f"weights {describe_weights(checkpoint.path)}")
    start, warm_up = 0, config.warmup_iterations
    if resumed:
        start = resumed.done
        for _ in range(start * config.micro_batches):
            stream.batch(config.micro_batch_size)
        report(plan.branch.describe(config) if plan.branch else f"resumed after {start} iterations")
        is_left = max(config.recorded_iterations, default=-1) >= start - warm_up
        if plan.branch and config.save_tensors and not config.follows and not is_left:
            report("warning: the branch records no tensors, since no recorded iteration is left: add --control-iter 0")
    report(f"recipe {recipe.name}: {recipe.describe()}")
    if kept := plan.kept_layers:
        report(f"kept in bf16: {kept}")
    communication = recipe.communication or Communication()
    if communication.reduce_scatter and ranks.replicas == 1:
        report("warning: reduce_scatter rounds nothing, because there is only one data-parallel rank: use --dp 2")

    of_start = resumed is None or isinstance(resumed, Branched)
    begins = max(0, start - warm_up) if of_start else 0
    measures_rounding = config.rounding_alone and not config.find_nan

    def iterate(iterations: range, what: str, recording: Recorder | None = None) -> None:
        for iteration in iterations:
            if recording and held_out and iteration % config.evaluate_every == 0:
                _evaluate(recorder, held_out, config, iteration, report)
            begun = time.perf_counter()
            reduced = communication.reduce_scatter if recording else None
            alone = measures_rounding and iteration == begins
            loss = _step(model, optimizer, stream, config, device, ranks, recording, iteration, reduced, alone)
            seconds = time.perf_counter() - begun
            timed: dict[str, Any] = {"seconds": seconds, "recorded": config.records(iteration)}
            if isinstance(resumed, Branched) and iteration == start - warm_up:
                timed["first"] = resumed.first
            _finish_iteration(recorder, iteration, loss, timed | {"data_sha256": stream.digest()}, report, what)
            done = warm_up + iteration + 1
            write_checkpoint(config, recorder, done, model, optimizer)
            progress(done, warm_up + config.iterations)

    recorder.policy.recording = False
    iterate(range(start - warm_up, 0), "warm-up in bf16")
    launches = _launches(config)
    tokens = communication.all_to_all
    rounding = rounding_tokens(model, tokens, recorder, config.seed) if tokens else nullcontext()
    with (
        rounding,
        instrument(
            model,
            replace(recipe, communication=None),
            recorder,
            backend=config.quantized_by,
            skip=plan.skip,
            capture=plan.capture,
            seed=config.seed,
            iterations=config.iterations,
            scales_of=resumed.scales(ranks.rank) if resumed else None,
        ),
    ):
        if recorder.compiled:
            report(recorder.compiled)
        iterate(range(max(0, start - warm_up), config.iterations), recipe.name, recorder)
        if held_out:
            _evaluate(recorder, held_out, config, config.iterations, report)
    if config.quantized_by == BackendName.TRITON:
        report(f"quantized by {recorder.config['backend']} kernels: {_launches(config) - launches} launches")
    elif recipe.name != "bf16":
        report("quantized by torch")
    recorder.settle()
    status = recorder.writer.status
    kept = f"{status.tensors - status.tensors_without_raw} with values, {status.bytes / 1e6:.1f} MB"
    report(f"recorded {status.tensors} tensors ({kept})")


def _evaluate(recorder: Recorder, held_out: Sequence[Batch], config: RunConfig, done: int, report: Say) -> None:
    """Evaluate the held-out sequences after so many iterations with the recipe."""
    sequences = config.dp * config.micro_batches * config.micro_batch_size * (config.warmup_iterations + done)
    losses = recorder.evaluate(logits_of, held_out, iteration=done, tokens=sequences * config.sequence_length)
    mean = math.fsum(losses) / len(losses)
    report(f"held-out loss after {done} iterations: {mean:.4f} over {len(losses)} sequences")


class _AdamW(torch.optim.AdamW):
    """AdamW without torch's wrappers for torch.compile: they import the compiler, which takes a third of a run's
    start-up time."""

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def _optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    return _AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def _launches(config: RunConfig) -> int:
    return (
        import_module("binade.quant.backends.triton_kernels").launches
        if config.quantized_by == BackendName.TRITON
        else 0
    )


def _step(
    model: GPTModel | CausalLM,
    optimizer: torch.optim.Optimizer,
    stream: SampleStream,
    config: RunConfig,
    device: torch.device,
    ranks: Ranks,
    recorder: Recorder | None = None,
    iteration: int = 0,
    reduced: Spec | None = None,
    alone: bool = False,
) -> float:
    """One optimizer step over the micro-batches: the mean loss in nats per token, over all replicas. reduced: what each
    replica's gradients are rounded to before they are added. alone: whether to measure what rounding alone does to the
    loss, on the first micro-batch."""
    ranks.check_launcher()
    records = config.records(iteration) and ranks.rank in config.recording_ranks
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for index in range(config.micro_batches):
        tokens, labels = (t.to(device) for t in stream.batch(config.micro_batch_size))
        record = records and index < config.recorded_micro_batches
        with recorder.at(iteration, index, record) if recorder else nullcontext():
            if recorder and records and config.twin and not index:
                recorder.twin(partial(_objective, model, tokens, labels), config.twin)
            exact = recorder.without_recipe(logits_of, (tokens, labels)) if recorder and alone and not index else ()
            rounded: list[float] = []
            loss = _backward(model, tokens, labels, config.micro_batches, rounded if exact else None)
            if recorder and exact:
                recorder.keep_rounding_alone(iteration, rounded, exact)
        total += loss / config.micro_batches
    finish_gradients(model, ranks, reduced, config.seed, iteration)
    clip_gradients(model, ranks, 1.0)
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return mean_over_replicas(total, ranks)


def _backward(
    model: GPTModel | CausalLM,
    tokens: Tensor,
    labels: Tensor,
    micro_batches: int,
    by_sequence: list[float] | None = None,
) -> float:
    """The cross entropy in nats per token; the gradient is that of its sum with the experts' balance loss. by_sequence:
    a list to which the loss of each sequence is added."""
    logits, balance = model.logits_and_balance(tokens)
    if by_sequence is not None:
        by_sequence += sequence_losses((logits.detach(), labels))
    loss, total = _losses(logits, balance, labels)
    torch.autograd.backward(total / micro_batches)
    return loss.item()


def _objective(model: GPTModel | CausalLM, tokens: Tensor, labels: Tensor) -> Tensor:
    """What is minimized, for one micro-batch."""
    return _losses(*model.logits_and_balance(tokens), labels)[1]


def _losses(logits: Tensor, balance: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The cross entropy in nats per token, and its sum with the experts' balance loss."""
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss, loss if balance is None else loss + balance


def _finish_iteration(
    recorder: Recorder, iteration: int, loss: float, details: dict[str, Any], report: Say, what: str
) -> None:
    """Record the loss. The last warm-up iteration is -1. details: what loss.jsonl says of it besides."""
    writer = recorder.writer
    if iteration >= 0:
        recorder.log(loss)
    line: dict[str, Any] = {"iteration": iteration, "loss": loss, "time": time.time(), **details}
    if not math.isfinite(loss):
        writer.append_loss(line | {"loss": None, "not_finite": True})
        raise DivergedError(f"the loss is {loss} at iteration {iteration}: training diverged")
    writer.append_loss(line)
    first = writer.status.loss_first
    if iteration < 0:
        writer.update()  # the heartbeat
    else:
        writer.update(iteration=iteration, loss_first=loss if first is None else first, loss_last=loss)
    report(f"iteration {iteration} ({what}): loss {loss:.4f}")

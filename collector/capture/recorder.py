"""Capture: `instrument` makes a model's GEMMs run as a recipe says, a Recorder writes what passes through them.

    with Recorder(root, label="mine", config={"recipe": "mxfp8"}) as recorder, instrument(model, "mxfp8", recorder):
        train_step()

A tensor is recorded as it enters or leaves a GEMM, before quantization, with the error that quantization made. Its
statistics, sketch and scores are computed at once, on its device; its values are copied, while the byte budget lasts.
All is written behind the step, the rows of a micro-batch as a segment after the files that they name: only there are
results fetched from a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from binade.collector.capture.adapters import around_forward, find
from binade.collector.capture.adapters.layer import InstrumentError as InstrumentError
from binade.collector.capture.adapters.layer import Layer, Moment
from binade.collector.capture.adapters.passes import Clock, Listener
from binade.collector.capture.adapters.watch import Watch
from binade.collector.capture.writing import Pending, Writing
from binade.collector.models.attention import CoreQuantization
from binade.collector.models.parallel import PeerLostError, Quantization
from binade.collector.models.site import Site
from binade.collector.recipes.recipe import BF16, Part, Recipe, parse_recipe
from binade.collector.recipes.selection import Selection
from binade.collector.training.config import TENSOR_NAMES, ConfigError
from binade.collector.training.ranks import Ranks, current_ranks
from binade.data.runs import CANCELLED, DONE, FAILED, RunWriter, resolve_root
from binade.data.segment import Identity, Shard, TensorRow
from binade.quant.backends.counts import Counted, counted
from binade.quant.formats import FORMATS
from binade.quant.gemm import Observed, Tap
from binade.quant.metrics import Errors, errors_later, score_later
from binade.quant.quantizer import DTYPES, plan
from binade.quant.summary import Summary, summarize_later

OPERANDS = ("a", "b", "grad")
WORDS = ("model", "size", "dataset", "recipe")  # of a configuration: each row has them
SILENCE = 1.0  # seconds that a run without news waits before it says how far it is: writing a status is not free


@dataclass(frozen=True)
class Place:
    """What an observed tensor is called: its name, the side of the operation it stands on, and the operand (a field of
    GemmFormats) whose format its quant_type is: itself, or the first of the GEMM that it results from."""

    tensor_name: str
    operation: str
    phase: str
    operand: str


LINEAR_PLACES = {
    "a": Place("input", "forward", "pre", "forward_a"),
    "b": Place("weight", "forward", "pre", "forward_b"),
    "y": Place("output", "forward", "post", "forward_a"),
    "grad": Place("grad_output", "backward", "pre", "dgrad_grad"),
    "grad_a": Place("grad_input", "backward", "post", "dgrad_grad"),
    "grad_b": Place("grad_weight", "backward", "post", "wgrad_grad"),
}
QK_PLACES = {
    "a": Place("query", "forward", "pre", "forward_a"),
    "b": Place("key", "forward", "pre", "forward_b"),
    "scores": Place("attention_scores", "forward", "post", "forward_a"),
    "grad_a": Place("grad_query", "backward", "post", "dgrad_grad"),
    "grad_b": Place("grad_key", "backward", "post", "wgrad_grad"),
}
PV_PLACES = {
    "a": Place("attention_probs", "forward", "post", "forward_a"),
    "b": Place("value", "forward", "pre", "forward_b"),
    "y": Place("output", "forward", "post", "forward_a"),
    "grad": Place("grad_output", "backward", "pre", "dgrad_grad"),
    "grad_b": Place("grad_value", "backward", "post", "wgrad_grad"),
}


RECIPE_VARIABLE = "CUSTOM_QUANT_TYPE"
ENABLED_VARIABLE = "TENSOR_SAVE_ENABLED"
SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def saving_enabled() -> bool:
    """What TENSOR_SAVE_ENABLED says; on without it. Raises ValueError for a word that is neither yes nor no."""
    word = os.environ.get(ENABLED_VARIABLE) or "1"
    if word.lower() not in SWITCH:
        raise ValueError(f"{ENABLED_VARIABLE}={word!r} is neither on nor off: {', '.join(SWITCH)}")
    return SWITCH[word.lower()]


class RecorderError(RuntimeError):
    """A Recorder is used while it has no run, or entered while it has one."""


class Recorder:
    """Writes a run: its directory, tensor files and segments. A context manager; leaving it ends the run.

    root       where runs are kept; None as `data.runs.resolve_root`
    label      goes into the run's id
    config     kept as run.json; its model, size, dataset and recipe become the tensors' words
    tensors    names to record, empty for all
    scores     formats to try on every operand
    raw        keep values (else statistics, sketch and scores only), while this rank's files stay within max_bytes
    ranks      of a run on several: each has a Recorder of its own, and rank 0 makes the directory; None for those of
               torch.distributed and megatron.core, if they are initialized
    iterations, micro_batches   of a loop of one's own, how many iterations are recorded from its first on, and of each
               how many micro-batches; None for all
    enabled    whether there is a run at all; None as TENSOR_SAVE_ENABLED says. Without one everything else works

    A loop of one's own calls `step` after each iteration, or puts `at` around each micro-batch. Without `at`, each
    forward pass of the instrumented model is a micro-batch. Under Megatron's training loop neither is needed.

    The run ends as done, as cancelled on KeyboardInterrupt, else as failed with the exception's first line; what was
    captured until then is kept. Left, it may be entered again, for another run.

    Raises ConfigError for an argument that cannot be recorded with, and RunError if the root cannot be written; what
    the disk refuses later, as the OSError that it was, in the next call or at the end. RecorderError if it records
    before it is entered or after it was left, or is entered twice.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        label: str = "run",
        config: dict[str, Any] | None = None,
        tensors: tuple[str, ...] = (),
        scores: tuple[str, ...] = (),
        raw: bool = True,
        max_bytes: int = 4 << 30,
        ranks: Ranks | None = None,
        iterations: int | None = None,
        micro_batches: int | None = None,
        enabled: bool | None = None,
    ) -> None:
        self.root = resolve_root(root)
        self.label = label
        self.config = dict(config or {})
        for word in WORDS:
            if not isinstance(self.config.get(word), str | None):
                raise ConfigError(f"config has {word} {self.config[word]!r}: a word was expected, as {word}='mine'")
        self.tensors = frozenset(_listed("tensors", tensors))
        for name in self.tensors.difference(TENSOR_NAMES):
            raise ConfigError(f"tensor {name!r} is unknown: {', '.join(TENSOR_NAMES)}")
        self.scores = tuple(dict.fromkeys(FORMATS[name].name for name in _listed("scores", scores)))
        self.raw = raw
        self.max_bytes = max_bytes
        self.ranks = ranks or current_ranks()
        self.rank = self.ranks.rank
        self.iterations, self.micro_batches = iterations, micro_batches
        self.enabled = saving_enabled() if enabled is None else enabled
        self.entered = False
        self.writer: RunWriter | None = None
        self._begin()

    def _begin(self) -> None:
        """Count from 0, as before the first run."""
        self.recording = True
        self.paused = False  # in a pass that is no training
        self.told = False  # by `at`, once it was used
        self.stepped = False
        self.iteration = 0
        self.micro_batch = 0
        self._first: int | None = None
        self._done: int | None = None  # the last iteration of a loop of one's own that ended
        self._told_at = 0.0
        self._again: set[tuple[Site, int, int]] = set()
        self.arrived: set[Moment] = set()  # forward passes of this iteration whose backward pass has begun
        self._pending: list[Pending] = []
        self._count = 0

    def __enter__(self) -> Recorder:
        if not self.enabled:
            return self
        if self.entered:
            raise RecorderError("this Recorder is recording a run already: leave it first, or make another")
        if self.writer:  # of the run before
            self._begin()
        ranks = self.ranks
        if ranks.rank == 0:
            made = None
            try:
                made = RunWriter.create(self.root, self.label, self.config, ranks=ranks.size, owner=ranks.owner)
                self.writer = made
            finally:
                ranks.share(made and made.run_id)
        else:
            run_id = ranks.share(None)
            if run_id is None:
                raise PeerLostError("rank 0 could not start the run")
            self.writer = RunWriter.join(self.root / run_id, ranks.rank, ranks.size)
        self._writing = Writing(self.writer, self.max_bytes)
        self.entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not self.enabled:
            return
        failure: Exception | None = None
        try:
            self._publish()
        except Exception as refused:  # an earlier write's; what else there is to write is written
            failure = refused
        later = self._writing.close()
        self.entered = False
        failure = failure or later
        if error is None and failure is None:
            try:
                self.ranks.wait()  # for what the others have still to write
            except PeerLostError as lost:
                failure = lost
        if error is None and failure is None:
            state = DONE
        else:
            state = CANCELLED if isinstance(error, KeyboardInterrupt) else FAILED
        try:
            self.writer.finish(state, describe(error or failure) if state == FAILED else None)
        except OSError as refused:  # not even a status fits: the run will be seen to have ended without a word
            failure = failure or refused
        if error is None and failure is not None:
            raise failure

    @contextmanager
    def at(self, iteration: int, micro_batch: int, record: bool = True) -> Iterator[None]:
        """Within it, tensors belong to this micro-batch, and are recorded or not. Publishes at the end."""
        self.iteration, self.micro_batch, self.recording = iteration, micro_batch, record
        self.told, self.paused = True, False
        try:
            yield
        finally:
            self.recording = False
        self._publish()

    def settle(self) -> None:
        """Wait until all that was published is on the disk. Raises OSError if it refused."""
        if self.entered:
            self._writing.settle()

    def step(self) -> None:
        """Publish what was captured and count one iteration on, for training loops of one's own."""
        self.stepped = True
        self.go_to(self.iteration + 1)

    def go_to(self, iteration: int) -> None:
        """Publish what was captured; what comes belongs to this iteration."""
        if iteration == self.iteration:
            return
        self._done = self.iteration
        if self._pending or time.monotonic() - self._told_at > SILENCE:
            self._publish()
        self.iteration, self.micro_batch = iteration, 0

    def idle(self) -> bool:
        """Whether nothing of this iteration is recorded, whatever the micro-batch."""
        if self.paused or not self.enabled:
            return True
        if self.told or self._first is None or self.iterations is None:
            return False
        return self.iteration - self._first >= self.iterations

    def moment(self) -> Moment:
        """Now."""
        recording = self.recording and self.enabled and not self.paused
        if recording and not self.told:
            self._first = self.iteration if self._first is None else self._first
            recording = (self.iterations is None or self.iteration - self._first < self.iterations) and (
                self.micro_batches is None or self.micro_batch < self.micro_batches
            )
        return Moment(self.iteration, self.micro_batch, recording)

    def recomputed(self, site: Site, moment: Moment) -> None:
        """A layer's forward pass of that moment was run again: its rows say so when they are published."""
        self._again.add((site, moment.iteration, moment.micro_batch))

    def tap(self, layer: Layer, part: Part, places: dict[str, Place], moment: Moment | None = None) -> Tap | None:
        """The observer of one call of one product, at that moment or now, or None while nothing is recorded."""
        moment = moment or self.moment()
        if not moment.recording:
            return None
        site = layer.site

        def observe(seen: Observed) -> None:
            place = places.get(seen.name)
            if site.expert is not None and not seen.tensor.numel():  # no token was routed to it
                return
            if place and (not self.tensors or place.tensor_name in self.tensors):
                if seen.tensor.dtype not in DTYPES:
                    dtype = str(seen.tensor.dtype).removeprefix("torch.")
                    raise InstrumentError(
                        f"{layer.name} ({site.name}) computes in {dtype}, which is not recorded: convert the model and "
                        "what it is given to float32, bfloat16 or float16, or leave this layer out of `capture`"
                    )
                core = places is not LINEAR_PLACES
                identity = Identity(
                    **{word: self.config.get(word) for word in WORDS},
                    quant_type=part.asked(place.operand),
                    layer_type="attention" if core else "linear",
                    layer_index=site.layer_index,
                    module=site.module,
                    component="FA" if core else "linear",
                    operation=place.operation,
                    phase=place.phase,
                    tensor_name=place.tensor_name,
                    iteration=moment.iteration,
                    micro_batch=moment.micro_batch,
                    rank=self.rank,
                    expert=site.expert,
                )
                self._record(seen, identity, replace(layer.shard(seen.name), replica=self.ranks.replica))

        return observe

    def _record(self, seen: Observed, identity: Identity, shard: Shard) -> None:
        """Measure and copy a tensor; on a GPU nothing waits for it until the rows are published."""
        if not self.entered:
            raise RecorderError("the Recorder has no run to write to: call the model within `with Recorder(...)`")
        shown = seen.tensor.reshape(seen.shape or seen.tensor.shape)
        codes = counted(seen.tensor) if seen.tensor.device.type == "cpu" else None
        summary = cache(summarize_later(seen.tensor, codes=codes))  # the file tells it too
        error = None
        if seen.format:
            error = errors_later(seen.tensor, seen.quantized, plan(seen.format), seen.scales, seen.dim)
        operand = seen.name in OPERANDS
        scores = self._scores(seen, error, codes) if operand else {}
        captured = datetime.now(UTC)
        path = self._save(shown, identity, summary, seen.format, captured)
        self._count += 1
        about = {
            "tensor_id": f"r{self.rank:02d}-{self._count:06d}",
            "run_id": self.writer.run_id,
            "identity": identity,
            "captured": captured.replace(tzinfo=None),
            "shape": tuple(shown.shape),
            "dtype": str(shown.dtype).removeprefix("torch."),
            "nbytes": shown.numel() * shown.element_size(),
            "path": path and str(path),
            "contracted_axis": seen.dim - seen.tensor.dim() if seen.dim >= 0 else seen.dim if operand else None,
            "format": seen.format,
            "shard": shard,
        }

        def row() -> TensorRow:
            found = {name: score() for name, score in scores.items()}
            return TensorRow(**about, summary=summary(), error=error and error(), scores=found)

        self._pending.append(Pending(path, row))

    def _scores(
        self, seen: Observed, error: Callable[[], Errors] | None, codes: Counted | None
    ) -> dict[str, Callable[[], Errors]]:
        return {
            name: error
            if error and name == seen.format
            else score_later(seen.tensor, plan(name), seen.dim, codes=codes)
            for name in self.scores
        }

    def _save(
        self, x: Tensor, identity: Identity, summary: Callable[[], Summary], fmt: str | None, captured: datetime
    ) -> Path | None:
        """Have the values written if they are wanted and fit the budget; the file's path relative to the run."""
        if not self.raw:
            return None
        i = identity
        stamp = captured.astimezone()
        name = (
            f"{stamp:%Y%m%d_%H%M%S}_{self._count + 1:04d}_iter{i.iteration:03d}_{i.layer_type}_L{i.layer_index}"
            f"_{i.operation}_{i.phase}_{i.component}_{i.quant_type}_rank{i.rank:02d}_sample{i.micro_batch:03d}"
            f"_group{i.expert or 0:03d}_{i.tensor_name}.pt"
        )
        metadata = {
            "layer_type": i.layer_type,
            "layer_idx": i.layer_index,
            "module": i.module,
            "operation": i.operation,
            "phase": i.phase,
            "component": i.component,
            "quant_type": i.quant_type,
            "format": fmt,
            "tensor_name": i.tensor_name,
            "iteration": i.iteration,
            "sample_idx": i.micro_batch,
            "rank": i.rank,
            "expert": i.expert,
            "save_time": f"{stamp:%Y-%m-%d %H:%M:%S}",
            "run_id": self.writer.run_id,
        }
        info = {"shape": list(x.shape), "dtype": str(x.dtype), "device": str(x.device)}

        def about() -> tuple[dict[str, Any], dict[str, Any]]:
            found = summary()
            return metadata, info | {key: getattr(found, key) for key in ("min", "max", "mean", "std")}

        relative = Path("tensors", i.quant_type, name)
        return relative if self._writing.offer(relative, x, about) else None

    def _publish(self) -> None:
        """Have the pending rows written as a segment, and the status say how far the run is. Raises what an earlier
        write did."""
        if not self.entered:
            return
        pending, self._pending = self._pending, []
        again = frozenset(self._again)
        self._again = {site for site in again if site[1] >= self.iteration}
        self._told_at = time.monotonic()
        done = {} if self._done is None else {"iteration": self._done}
        self._writing.publish([Pending(each.path, partial(_told, each.row, again)) for each in pending], **done)


def _listed(name: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):  # whose letters would be taken for the names
        raise ConfigError(f"{name}={given!r} is one word: a tuple was expected, as {name}=({given!r},)")
    return tuple(given)


def _told(make: Callable[[], TensorRow], again: frozenset[tuple[Site, int, int]]) -> TensorRow:
    """A row, and whether its layer's forward pass was run again."""
    row = make()
    i = row.identity
    return replace(row, recomputed=(Site(i.layer_index, i.module, i.expert), i.iteration, i.micro_batch) in again)


def describe(error: BaseException) -> str:
    """An exception as one line for people."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror.lower()}{where}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return (str(error) or type(error).__name__).splitlines()[0]


@contextmanager
def instrument(
    model: nn.Module | Sequence[nn.Module],
    recipe: Recipe | str | None = None,
    recorder: Recorder | None = None,
    *,
    backend: str = "auto",
    skip: Selection | str | None = None,
    capture: Selection | str | None = None,
    leave: Sequence[str] = (),
    head: bool = False,
) -> Iterator[None]:
    """Within it, the model's GEMMs run as the recipe says and pass their tensors to the recorder.

    model      of collector.model, megatron.core, transformers or plain torch modules; Megatron's list of model chunks
    recipe     None as CUSTOM_QUANT_TYPE says, a recipe or a format; without it "bf16": nothing is quantized
    skip       layers that stay unquantized whatever the recipe says, as a Selection or its text: "first,last"
    capture    layers that are recorded, likewise; None for all
    leave      paths of modules that are neither quantized nor recorded, * for any part of a path
    head       treat the LM head as one more linear layer, `layer0.head`; else it is left as it is

    Instances of the model's modules get a `forward` (or what stands for it) of their own, and at the end lose it again;
    nothing else of the model is changed. On several tensor-parallel ranks each instruments its model.

    Raises InstrumentError, naming the module, for one that cannot be intercepted: at once where that can be seen, else
    in the first forward pass, which is watched for products that nothing answers; if there is nothing to instrument;
    and in a forward pass, for a layer that is to be recorded and computes in float64. RecipeError for an unknown
    recipe, SelectionError for layers that the model does not have.
    """
    if not isinstance(recipe, Recipe):
        recipe = parse_recipe(recipe or os.environ.get(RECIPE_VARIABLE) or BF16)
    models = [model] if isinstance(model, nn.Module) else list(model)
    found = [find(each, leave, head) for each in models]
    layers = [layer for each in found for layer in each.layers]
    sites = [layer.site for layer in layers]
    skipped = _chosen(skip, sites) if skip else frozenset()
    recorded = _chosen(capture, sites) if capture else frozenset(sites)

    def quantization(layer: Layer, part: Part, places: dict[str, Place]) -> Quantization:
        part = Part() if layer.site in skipped else part
        listening = recorder and layer.site in recorded
        tap = Listener(recorder, layer, part, places) if listening else lambda: None
        return Quantization(part.formats, backend, tap)

    if recorder:
        recorder.config.setdefault("recipe", recipe.name)
    attention = recipe.qk != Part() or recipe.pv != Part()
    watched = recorder is not None or attention or recipe.linear != Part()
    with ExitStack() as undo:
        for layer in layers:
            if layer.is_core:
                told = CoreQuantization(
                    quantization(layer, recipe.qk, QK_PLACES), quantization(layer, recipe.pv, PV_PLACES)
                )
            else:
                part = recipe.router if layer.site.module == "router" else recipe.linear
                told = quantization(layer, part, LINEAR_PLACES)
            undo.callback(layer.attach(told))
        for each, seen in zip(models, found, strict=True):
            clock = Clock(recorder, each) if recorder else None
            watch = Watch(each, seen.layers, seen.left, attention) if watched and seen.watched else None
            undo.enter_context(around_forward(each, clock, watch))
        yield


def _chosen(selection: Selection | str, sites: Sequence[Site]) -> frozenset[Site]:
    return (Selection.parse(selection) if isinstance(selection, str) else selection).of(sites)

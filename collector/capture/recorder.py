"""A Recorder writes a run: the tensors of an instrumented model, and those passed to `record`.

A tensor of a GEMM is recorded before quantization, with the error that quantization made. Its statistics, sketch and
scores are computed at once, on its device; its values are copied while the byte budget lasts. A thread writes files and
rows (see writing), those of a micro-batch as one segment: only there are results fetched from a GPU.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.collector.capture.adapters.layer import InstrumentError, Layer, Moment
from binade.collector.capture.adapters.passes import counted_by_megatron, running_backward, seed_of
from binade.collector.capture.curves import Curves
from binade.collector.capture.monitor import Alert, Monitor
from binade.collector.capture.reduction import Reduction
from binade.collector.capture.sensitivity import ONE, Sequences, backward, measure_scale, sampled_gradient
from binade.collector.capture.tried import Tried, try_formats
from binade.collector.capture.watching import WatchOptions
from binade.collector.capture.writing import Pending, Writing, signals_later
from binade.collector.errors import ConfigError
from binade.collector.models.site import Site
from binade.collector.ranks import PeerLostError, Ranks, current_ranks
from binade.collector.recipes.recipe import BF16, Part
from binade.collector.settings import DEFAULT_SCORES, MergeRanks, Stats
from binade.data.events import EventKind
from binade.data.export import Sink
from binade.data.merge import merge_segments
from binade.data.runs import CANCELLED, DONE, FAILED, RunWriter, read_run, resolve_root
from binade.data.segment import Identity, Shard, TensorRow, Trace
from binade.data.tensor_kinds import (
    LATER,
    MAPS,
    TENSOR_KINDS,
    Gemm,
    Measure,
    Operation,
    Other,
    Phase,
    Product,
    TensorKind,
    named_places,
    tensor_names,
)
from binade.data.text import describe, plain_name
from binade.data.twin import Twin, append_twin
from binade.quant.backends.counts import counted
from binade.quant.gemm import Observed, Tap, sampling
from binade.quant.metrics import sqnr_later
from binade.quant.quantizer import DTYPES
from binade.quant.specs import Spec
from binade.quant.summary import Summary, summarize_later
from binade.quant.traces import hot_channels_later, sample_later

if TYPE_CHECKING:  # it imports the command line
    from binade.collector.capture.twin import Twins
    from binade.collector.training.resume import Resumed

WORDS = ("model", "size", "dataset", "recipe")  # keys of a configuration that each row has
STATUS_SECONDS = 1.0  # between two writes of the status of a run that records nothing

ENABLED_VARIABLE = "TENSOR_SAVE_ENABLED"
SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def saving_enabled() -> bool:
    """The value of TENSOR_SAVE_ENABLED; True if it is not set. Raises ValueError for a word not in SWITCH."""
    word = os.environ.get(ENABLED_VARIABLE) or "1"
    if word.lower() not in SWITCH:
        raise ValueError(f"{ENABLED_VARIABLE}={word!r} is neither on nor off: expected one of {', '.join(SWITCH)}")
    return SWITCH[word.lower()]


FORWARD = frozenset(("a", "b", "y", "scores"))  # what a product shows in its forward pass
Pass = tuple[Site, Moment]  # a layer's forward pass


@dataclass(frozen=True)
class Captured:
    """A row to be published: the pass and the file of its tensor; whether it becomes part of a row of all ranks; and
    the function that makes the row, given whether that pass was recomputed."""

    during: Pass
    path: Path | None
    merged: bool
    row: Callable[[bool], TensorRow]


class RecorderError(RuntimeError):
    """A Recorder is used outside its context, or entered twice."""


class Recorder:
    """Writes a run: its directory, tensor files and segments. A context manager; exiting it ends the run.

    Args:
        root: The directory of the runs. The default is $TENSOR_SAVE_DIR, else data/runs.
        label: Part of the run's id.
        config: Kept as run.json. Its model, size, dataset and recipe describe each tensor. `instrument` adds the model,
            the recipe and the number of parameters, unless they are given.
        tensors: Names of data.tensor_kinds to record. The default is all tensors of attention and linear layers.
        scores: Formats or specs in which every operand is scored; () for none. The default is that of `binade run`.
        measures: What else to measure of each GEMM, see data.tensor_kinds.Measure. The default is all.
        loss_scale: The factor by which the mean cross entropy of a micro-batch is multiplied before its backward pass,
            such as 1 / accumulated micro-batches, or a function that returns it and is called once per iteration. By
            default it is measured where `sensitivity` is called, and 1 elsewhere.
        raw: Whether to keep values, not only statistics, sketches and scores.
        max_bytes: The size limit for this rank's tensor files; `binade run --max-bytes` is the limit for all ranks
            together. Beyond it, values are not kept.
        ranks: The ranks of the run; each has a Recorder, and rank 0 makes the directory. The default is those of
            torch.distributed and megatron.core, if they are initialized.
        iterations: The number of iterations to record, from the first on, unless `at` says otherwise; None for all.
        micro_batches: The number of micro-batches to record in each; None for all.
        evaluation: Whether to also record forward passes in eval mode or without gradients. They have their own
            micro-batch numbers and the operation "evaluation" instead of "forward".
        sink: Where else to send the rows once they are on the disk: TensorBoard, Weights & Biases or a file, see
            `Sink`. If it fails, Binade warns once and continues to record.
        watch: Which steps to watch, such as "every 100 steps". This and the next options follow a long run, see
            docs/watching.md. With watch or ring, iterations is 0 by default.
        stats: What to record of a watched step: "basic" or "full".
        trigger: Conditions under which the next steps are recorded in full, such as "sqnr_db < 12 for 3".
        capture_steps: The number of steps to record in full after a trigger fires.
        ring: How many of the steps before a trigger fires are recorded, too.
        ring_bytes: The memory limit for these steps.
        find_nan: Whether to find the operation that produces the first NaN or Inf, in every step.
        cooldown: For how many steps a trigger that has fired does not fire again.
        capture_bytes: The disk space limit for captures.
        merge_ranks: Whether to write one row for the shards and replicas of a tensor on all ranks: "on", "off", or
            "auto" for more than 8 ranks. Such a row has no values; values are kept for unmerged ranks and for steps
            that a trigger captures. The ranks exchange their rows at the end of each iteration, or of each `at`.
        unmerged_ranks: Ranks whose replicas keep rows and values of their own.
        alert: Functions to call with each data.events.Event, on the writer's thread, see capture.alerts.
        enabled: If False, nothing is written, and the recipe still applies. The default is $TENSOR_SAVE_ENABLED.

    Each forward pass of the instrumented model is a micro-batch, and the step of an optimizer that holds the model's
    parameters ends an iteration; Megatron's own count is used if there is one. If your optimizer is not a torch
    optimizer, call `step` after each iteration. `with recorder.at(...)` around a micro-batch sets both numbers instead.

    The run's final state is "done", "cancelled" after KeyboardInterrupt, or "failed" after any other exception, with
    the first line of its message. Data captured until then is kept. A Recorder can be entered again after it has
    exited, for another run.

    Raises:
        ConfigError: An argument is invalid.
        RunError: The root cannot be written.
        RecorderError: The Recorder records outside its context, or is entered twice.
        OSError: A later write failed. The next call or the end of the context raises it.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        label: str = "run",
        config: dict[str, Any] | None = None,
        tensors: Sequence[str] = (),
        scores: Sequence[str] = DEFAULT_SCORES,
        measures: Sequence[str] = tuple(Measure),
        loss_scale: float | Callable[[], float] | None = None,
        raw: bool = True,
        max_bytes: int = 4 << 30,
        ranks: Ranks | None = None,
        iterations: int | None = None,
        micro_batches: int | None = None,
        evaluation: bool = False,
        sink: Sink | None = None,
        enabled: bool | None = None,
        watch: str | None = None,
        stats: str = Stats.BASIC,
        trigger: Sequence[str] = (),
        capture_steps: int = WatchOptions.capture_steps,
        ring: int = WatchOptions.ring,
        ring_bytes: int = WatchOptions.ring_bytes,
        find_nan: bool = False,
        cooldown: int = WatchOptions.cooldown,
        capture_bytes: int = WatchOptions.capture_bytes,
        merge_ranks: str = MergeRanks.AUTO,
        unmerged_ranks: Sequence[int] = (),
        alert: Alert | Sequence[Alert] = (),
    ) -> None:
        self.root = resolve_root(root)
        self.label = label
        self.config = dict(config or {})
        for word in WORDS:
            if not isinstance(self.config.get(word), str | None):
                raise ConfigError(f"config has {word} {self.config[word]!r}: expected a string, such as {word}='mine'")
        self.tensors = frozenset(_names("tensors", tensors))
        for name in self.tensors.difference(tensor_names()):
            raise ConfigError(f"unknown tensor {name!r}: expected one of {', '.join(tensor_names())}")
        self.places = named_places(self.tensors)
        shown = (kind for kind in TENSOR_KINDS if not self.tensors or kind.name in self.tensors)
        self.kinds = {(kind.product, kind.observed): kind for kind in shown}  # recorded, by what a product shows
        self.scores = _formats(scores)
        self.measures = frozenset(_names("measures", measures))
        for name in self.measures.difference(Measure):
            raise ConfigError(f"unknown measure {name!r}: expected one of {', '.join(Measure)}")
        self.loss_scale = loss_scale
        self.raw = raw
        self.max_bytes = max_bytes
        self.ranks = ranks or current_ranks()
        self.rank = self.ranks.rank
        self.replica = self.ranks.replica
        self.part = self.ranks.tensor.rank, self.ranks.tensor.size  # which of a replica's, of how many
        kind, triggers = cast(Stats, stats), _names("trigger", trigger)  # which `check` refuses if they are none
        self.watching = WatchOptions(
            watch, kind, triggers, capture_steps, ring, ring_bytes, find_nan, cooldown, capture_bytes
        ).check()
        if merge_ranks not in tuple(MergeRanks):
            raise ConfigError(f"merge_ranks is {merge_ranks!r}: expected one of {', '.join(MergeRanks)}")
        if not {*unmerged_ranks} <= {*range(self.ranks.size)}:
            raise ConfigError(f"unmerged_ranks is {unmerged_ranks}: the ranks are 0 to {self.ranks.size - 1}")
        self.merges, self.unmerged_ranks = MergeRanks(merge_ranks).applies(self.ranks.size), frozenset(unmerged_ranks)
        self.alerts: tuple[Alert, ...] = tuple(alert) if isinstance(alert, Sequence) else (alert,)
        # With watching, no iterations are recorded in full unless `iterations` is given.
        self.iterations = 0 if iterations is None and self.watching.follows else iterations
        self.micro_batches, self.evaluation = micro_batches, evaluation
        self.sink = sink
        self.enabled = saving_enabled() if enabled is None else enabled
        self.entered = False
        self.followers: list[Callable[[], None]] = []  # called when `over` may have changed
        self.enders: list[Callable[[int], None]] = []  # called when an iteration or micro-batch ends
        self.savers: list[Callable[[Path], None]] = []  # write what a later run may continue from to a directory
        self.resumed: Resumed | None = None  # the run to continue, in the place of a new one
        self.writes_curves = True  # False if the training loop writes loss.jsonl itself
        self._given = {name: value for name, value in self.config.items() if value is not None}
        self._curves: Curves | None = None
        self.twins: Twins | None = None  # of the instrumented models
        self.suspended = False  # within a twin step, which neither counts nor records
        self._writer: RunWriter | None = None
        self._reset()

    def _reset(self) -> None:
        """Reset all counts, as before the first run."""
        self.recording = True
        self.evaluating = False  # within a forward pass that does not train
        self.evaluations_left_out = 0
        self.positioned = False  # by `at`, once it was used
        self.stepped = False  # by `step`, once it was called
        self.updated = False  # the model, since the last forward pass
        self.iteration = 0
        self.micro_batch = 0
        self._first: int | None = None
        self._recorded: int | None = None  # the latest iteration of which a micro-batch was
        self._asked = True  # whether `at` was called with record=True
        self._captured_for = 0  # how many captures the triggers have requested that were begun
        self._capture = range(0)  # the iterations that are recorded in full since a trigger fired
        self._done: int | None = None  # the last iteration that ended, without `at`
        self._published_at = 0.0
        self._recomputed: set[Pass] = set()
        self.arrived: set[Moment] = set()  # forward passes of this iteration whose backward pass has begun
        self._captured: list[Captured] = []
        self._measured: dict[tuple[Site, Product, Moment], dict[str, list[Tried]]] = {}
        self.sequences: dict[Moment, Sequences] = {}  # of the micro-batches that `sensitivity` was called for
        self._scales: dict[Moment, Callable[[], float]] = {}
        self._asked_scale: tuple[int, float] | None = None  # the iteration that loss_scale was called in, its result
        self._shown: set[str] = set()  # what was recorded besides products
        self._count = 0

    @property
    def writer(self) -> RunWriter:
        """The run's directory. Raises RecorderError before the Recorder was entered."""
        if self._writer is None:
            raise RecorderError("the Recorder has no run: enter it first, with Recorder(...) as recorder")
        return self._writer

    def __enter__(self) -> Recorder:
        if not self.enabled:
            return self
        if self.entered:
            raise RecorderError(
                "this Recorder is already recording a run: exit its `with` block first, or create another"
            )
        if self._writer:  # of the previous run
            self._reset()
        ranks = self.ranks
        if ranks.rank == 0:
            created: RunWriter | None = None
            try:
                if self.resumed:
                    created = self.resumed.reopen(ranks.size, ranks.owner)
                else:
                    created = RunWriter.create(self.root, self.label, self.config, ranks=ranks.size, owner=ranks.owner)
            finally:
                ranks.share(created.run_id if created else None)
            self._writer = created
        else:
            run_id = ranks.share(None)
            if run_id is None:
                raise PeerLostError("rank 0 could not start the run")
            self._writer = RunWriter.join(self.root / run_id, ranks.rank, ranks.size)
        counts: dict[str, int] = {}
        if self.resumed:
            before = self.resumed.positions[ranks.rank]
            self._count, counts = before.recorded, before.counts
            self._writer.continue_after(before.segments)
            self._writer.update(**counts)
        self._monitor = Monitor(self.watching, self.writer, self.alerts)
        watches = bool(self.watching.every) and self.watching.stats == Stats.BASIC
        self._reduction = Reduction.of(ranks, watches, self.merges, self.rank in self.unmerged_ranks)
        self._writing = Writing(self.writer, self.max_bytes, self.sink, self._monitor, self._reduction, counts)
        self._curves = Curves(self.writer, self._writing.run) if self.rank == 0 and self.writes_curves else None
        self.entered = True
        self._tell_followers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        failure: Exception | None = None
        later: Exception | None = None
        try:
            with signals_later():  # SIGTERM, if another rank was killed, finds this one ending already
                try:
                    if error is None and (self._merges or not self.positioned):
                        self._publish_reduced()
                    self._publish()
                except Exception as refused:  # of an earlier write; the rest is still written
                    failure = refused
                if self._curves:
                    self._curves.close()
                later = self._writing.close()
        except KeyboardInterrupt as cancelled:
            error = error or cancelled
        if self._reduction:
            self._reduction.close()
        self.entered = False
        failure = failure or later
        if error is None and failure is None:
            try:
                self.ranks.wait()  # until the others have written their rows
            except PeerLostError as lost:
                failure = lost
            except KeyboardInterrupt as cancelled:
                error = cancelled
        cause = error or failure
        state = DONE if cause is None else CANCELLED if isinstance(error, KeyboardInterrupt) else FAILED
        try:
            if state == DONE or not self.ranks.launcher_decides:
                self.writer.finish(state, describe(cause) if cause and state == FAILED else None)
        except OSError as refused:  # the disk has no room for a status: the run will be shown as crashed
            failure, cause = failure or refused, cause or refused
        if state == DONE and failure is None and self.rank == 0:
            try:
                merge_segments(read_run(self.writer.directory))
            except Exception as refused:  # the run is complete without it
                warnings.warn(f"segments were not merged: {describe(refused)}", stacklevel=2)
        if kind is None and cause:
            raise cause
        if error is None:
            self.check_steps()
            if self.evaluations_left_out and not self._count:
                warnings.warn(
                    f"nothing was recorded: all {self.evaluations_left_out} forward passes ran in eval mode or without "
                    "gradients; call model.train(), or record them with Recorder(evaluation=True)",
                    stacklevel=2,
                )
            missing = [name for place in Other for name in tensor_names(place) if name in self.tensors - self._shown]
            if missing and self._count:
                warnings.warn(
                    f"nothing was recorded as {', '.join(missing)}: the model has none that can be recorded; "
                    "DTensors, FSDP's parameters and copies that an optimizer updates are not recorded",
                    stacklevel=2,
                )

    @contextmanager
    def at(self, iteration: int, micro_batch: int, record: bool = True) -> Iterator[None]:
        """Within this context, tensors belong to this iteration and micro-batch, and are recorded if `record` is true.

        The captured tensors are published when the context exits. With activation checkpoints, run the backward pass
        before the next micro-batch begins.
        """
        self.iteration, self.micro_batch, self.positioned = iteration, micro_batch, True
        self._begin_capture()
        self._asked, self.recording = record, record or self._measures
        self._recorded = iteration if self._whole and self.enabled else self._recorded
        self._tell_followers()
        try:
            yield
        finally:
            self.recording = False
        self._end_pass()
        self._publish_reduced()
        self._publish()

    def _end_pass(self) -> None:
        for end in self.enders:
            end(self.iteration)

    def settle(self) -> None:
        """Wait until everything published is on the disk. Raises OSError if a write failed."""
        if self.entered:
            self._writing.settle()

    def position(self) -> dict[str, int]:
        """The position of this rank's part of the run, once everything published is on the disk. Raises OSError."""
        self.settle()
        return {"segments": self.writer.segments, "recorded": self._count, **self._writing.counts}

    def save_state(self, directory: Path | None = None) -> None:
        """Call the functions in `savers` with a directory, by default that of the run. Raises OSError."""
        if self.entered:
            for save in self.savers:
                save(directory or self.writer.directory)

    def step(self) -> None:
        """Publish what was captured and go to the next iteration. Iterations are counted by this method alone from then
        on, not by the steps of optimizers."""
        self.stepped = True
        self.go_to(self.iteration + 1)

    def check_steps(self) -> None:
        """Warn if several forward and backward passes have run without anything that separates iterations."""
        known = self.stepped or self.positioned or self.updated or self.iteration or counted_by_megatron()
        if len(self.arrived) > 1 and not known:
            warnings.warn(
                f"{len(self.arrived)} forward and backward passes are recorded as micro-batches of iteration 0, "
                "because no optimizer step with the model's parameters was detected: call recorder.step() after each "
                "iteration",
                stacklevel=2,
            )

    def go_to(self, iteration: int) -> None:
        """Go to this iteration. Publishes what was captured if it belongs to another one."""
        if iteration == self.iteration:
            return
        self._end_pass()
        self._publish_reduced()
        self._done = self.iteration
        if self._captured or time.monotonic() - self._published_at > STATUS_SECONDS:
            self._publish()
        self.iteration, self.micro_batch = iteration, 0
        self._begin_capture()
        self._tell_followers()

    def _tell_followers(self) -> None:
        for follow in self.followers:
            follow()

    def describe(self, **facts: Any) -> None:
        """Add facts to run.json and to the rows that follow, except those that the Recorder's config gives."""
        self.config |= facts | self._given
        if self.entered:
            self.writer.describe({name: value for name, value in facts.items() if name not in self._given})

    def log(
        self,
        loss: float | Tensor | None = None,
        *,
        tokens: int | None = None,
        grad_norm: float | Tensor | None = None,
    ) -> None:
        """Log values of this iteration, that of the last forward pass in training mode. They become a line of
        loss.jsonl when the next iteration begins. Does not wait for a GPU. Every rank may call it; rank 0's values
        count.

            recorder.log(loss=loss, tokens=tokens.numel(), grad_norm=norm)

        loss       in nats per token, the mean over the iteration's micro-batches; triggers see it
        tokens     of the iteration
        grad_norm  before clipping

        Values of a later call in the same iteration replace earlier ones. Raises ConfigError for a tensor with more
        than one value.
        """
        values = {
            name: x for name, x in (("loss", loss), ("tokens", tokens), ("grad_norm", grad_norm)) if x is not None
        }
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise ConfigError(f"{name} has the shape {tuple(value.shape)}: expected a single number")
                values[name] = cast(Any, value).full_tensor() if is_dtensor(value) else value.detach()
        if not self.entered:
            return
        if self._curves:
            self._curves.log(self.iteration, values)
        if "loss" in values and self.watching.trigger:
            iteration, value = self.iteration, values["loss"]
            self._writing.run(lambda: self._monitor.see_loss(iteration, float(value)))

    def twin(self, loss: Callable[[], Tensor], times: int = 1) -> Twin:
        """Run one micro-batch on the current weights without the recipe, and `times` times with it: see capture.twin.

            twin = recorder.twin(lambda: model(**batch).loss, times=4)

        loss runs the model's forward pass and returns the loss. A recipe that draws no random numbers is run once.
        Training does not change: weights, gradients, buffers, random numbers and recorded tensors stay the same. The
        result is also added to the run's twin.jsonl, unless the run has several ranks: gradients are those of this
        rank. Not with reentrant checkpoints. Raises RecorderError without an instrumented model or with find_nan.
        """
        if self.twins is None:
            raise RecorderError("nothing is instrumented: call twin within `with instrument(model, recipe, recorder)`")
        if self.watching.find_nan:
            raise RecorderError("a twin step cannot be run with find_nan, which would trace its passes")
        if times < 1:
            raise ConfigError(f"times is {times}: expected at least 1")
        self.twins.clock.advance()
        self.suspended = True
        try:
            twin = self.twins(loss, times)
        finally:
            self.suspended = False
        if self.entered and self.ranks.size == 1:
            self._writing.run(partial(append_twin, self.writer.directory, twin))
        return twin

    def begin_training(self, model: nn.Module, given: object) -> None:
        """A forward pass of the model that trains begins, with these arguments."""
        if self.entered and self._curves:
            self._curves.begin(self.iteration, model, given)

    @property
    def triggers(self) -> tuple[str, ...]:
        """The trigger conditions, as text."""
        return tuple(trigger.text for trigger in self.watching.triggers)

    @property
    def fired(self) -> tuple[str, ...]:
        """The triggers known to have fired in this run."""
        return self._monitor.fired if self.entered else ()

    def sensitivity(self, logits: Tensor, valid: Tensor | None = None, *, batch_axis: int = 0) -> None:
        """Run the backward pass that predictions of the loss need: see docs/loss.md. Call it in each micro-batch
        between the forward pass and the backward pass:

            logits = model(tokens)
            recorder.sensitivity(logits)
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

        The loss of this pass is the cross entropy of labels drawn from the model's own softmax. It changes neither
        gradients nor torch's random state, and returns at once where nothing is predicted. From the backward pass that
        follows, it also measures loss_scale if the Recorder was not given one.

        logits      [b, s, v], as they enter the loss; [s, b, v] with batch_axis=1
        valid       which tokens are in the loss, bool [b, s] or [s, b]; all if None
        """
        if not self.entered or self.paused or Measure.LOSS not in self.measures or not logits.requires_grad:
            return
        moment = self.moment()
        if not moment.recording or moment.basic or moment.evaluation or moment in self.sequences:
            return
        if is_dtensor(logits):
            self.without_second_order("the logits are a DTensor")
            return
        place = self.config.get("seed", 0), moment.iteration, moment.micro_batch, self.replica
        gradient = sampled_gradient(logits, seed_of("labels", *place), valid)
        self.sequences[moment] = Sequences.of(logits, batch_axis)
        if self.loss_scale is None:
            measured = measure_scale(logits, valid)
            self._scales[moment] = lambda: measured() or 1.0
        self.second_order(logits, gradient)

    def second_order(self, logits: Tensor, gradient: Tensor) -> None:
        """Take second-order terms from a backward pass with this gradient of the logits."""
        before = set(self.arrived)
        try:
            backward(logits, gradient)
        except RuntimeError as error:
            if "heckpoint" not in str(error):
                raise
            self.without_second_order("activations are recomputed with use_reentrant=True")
        self.arrived.intersection_update(before)

    def without_second_order(self, reason: str) -> None:
        """Warn if changes in the loss were to be predicted."""
        if Measure.LOSS in self.measures:
            warnings.warn(f"changes in the loss are predicted to first order only: {reason}", stacklevel=3)

    def loss_scale_of(self, moment: Moment) -> Callable[[], float]:
        """The factor of that micro-batch's loss, as a function that is called after its backward pass."""
        given = self.loss_scale
        if given is None:
            return self._scales.get(moment, lambda: 1.0)
        if callable(given):
            if self._asked_scale is None or self._asked_scale[0] != moment.iteration:
                self._asked_scale = moment.iteration, float(given())
            given = self._asked_scale[1]
        scale = given
        return lambda: scale

    def changed(self, text: str, trigger: str | None) -> None:
        """Write an event: what is quantized has changed with this iteration."""
        if self.entered:
            self.later(partial(self._monitor.announce, EventKind.SCHEDULE, self.iteration, text, trigger))

    def later(self, task: Callable[[], None]) -> None:
        """Run a task on the writer's thread, in order with the writes."""
        self._writing.run(task)

    def found_non_finite(self, iteration: int, text: str, place: str, **where: Any) -> None:
        """Write an event: a step's first NaN or Inf appeared here. Called on the writer's thread."""
        self._monitor.found_non_finite(iteration, text, place, **where)

    def keep(self, name: str, x: Tensor, site: Site, operation: str, iteration: int | None = None) -> None:
        """Record a tensor of the current pass, or of an earlier iteration's first one, even if others are not."""
        moment = Moment(self.iteration, self.micro_batch, True) if iteration is None else Moment(iteration, 0, True)
        identity = partial(self._identity, site, moment, tensor_name=name, operation=operation, phase=Phase.PRE.value)
        self._record(Observed(name, x.detach()), site, identity, moment, (), None, None, Shard(), merged=False)

    def _begin_capture(self) -> None:
        """Record steps in full if a trigger has fired: from this step on, or the next if this one has begun."""
        if not self.entered or self._captured_for == self._monitor.requested:
            return
        self._captured_for = self._monitor.requested
        first = self.iteration + (self.micro_batch > 0)
        self._capture = range(first, first + self.watching.capture_steps)
        self._writing.run(partial(self._monitor.captures, self._capture))

    @property
    def _measures(self) -> bool:
        """Whether this micro-batch is measured for a trigger or because its step is watched."""
        if self.iteration in self._capture:
            return True
        return self.micro_batch == 0 and not self.evaluating and self.watching.follows_step(self.iteration)

    @property
    def _whole(self) -> bool:
        """Whether this iteration is recorded in full, not only its basic statistics."""
        watched = self.watching.stats == Stats.FULL and self.watching.watches(self.iteration) and self.micro_batch == 0
        return self._asked or watched or self.iteration in self._capture

    @property
    def paused(self) -> bool:
        """Whether this is an evaluation that is not to be recorded."""
        return self.evaluating and not (self.evaluation or self.positioned)

    @property
    def over(self) -> bool:
        """Whether nothing more is recorded, unless `at` or another run changes that."""
        if self.positioned or not self.enabled:
            return not (self.recording and self.enabled)
        return self._first is not None and self._is_over() and not self._measures

    def idle(self) -> bool:
        """Whether nothing of this iteration is recorded, in any micro-batch."""
        if self.paused or self.suspended or not self.enabled:
            return True
        return not self.positioned and self.over

    def _is_over(self) -> bool:
        """Whether all requested iterations have been recorded."""
        return self.iterations is not None and self.iteration - (self._first or 0) >= self.iterations

    def moment(self) -> Moment:
        """The current iteration and micro-batch, and whether they are recorded."""
        recording = self.recording and self.enabled and not self.paused
        if recording and not self.positioned:
            self._first = self.iteration if self._first is None else self._first
            few = self.micro_batches is not None and self.micro_batch >= self.micro_batches
            self._asked = not (self._is_over() or few)
            recording = self._asked or self._measures
        whole = self._whole
        if recording and whole:
            self._recorded = self.iteration
            if self.entered and self._curves:
                self._curves.record(self.iteration)
        return Moment(self.iteration, self.micro_batch, recording, self.evaluating, recording and not whole)

    def moment_of_step(self) -> Moment:
        """The current iteration, and whether an optimizer step would be recorded now."""
        return Moment(self.iteration, self.micro_batch, self.enabled and self._recorded == self.iteration)

    def recomputed(self, site: Site, moment: Moment) -> None:
        """Mark a layer's forward pass at that moment as recomputed; its rows will say so when they are published."""
        self._recomputed.add((site, moment))

    def record(
        self,
        name: str,
        tensor: Tensor,
        *,
        layer: int,
        module: str,
        operation: str,
        phase: str,
        expert: int | None = None,
        dim: int | None = None,
        scores: Sequence[str] | None = None,
    ) -> None:
        """Record any tensor of your model or training loop, for the current iteration and micro-batch.

            recorder.record("norm_output", x, layer=3, module="norm", operation="forward", phase="post")

        name       one of data.tensor_kinds or a new one, of letters, digits and _ . -
        tensor     float32, bfloat16 or float16, with at least one axis; its values are copied
        layer      from 1; 0 for a tensor that belongs to no layer
        module     the part of the layer: "norm", "fc1", "core"
        operation  "forward", "backward" or "optimizer", which has no micro-batch
        phase      "pre" for an input of the operation, "post" for an output
        expert     the index of a routed expert, from 0
        dim        the axis that the tensor's GEMM contracts, if it enters one; its scores are computed along this axis,
                   else along the last
        scores     formats in which the tensor is scored; default: those of the Recorder

        The row has the statistics and sketch of the tensor in its own units, quant_type bf16 and the layer type of a
        known kind. Nothing is recorded outside the recorded iterations and micro-batches, or for a forward tensor
        whose pass is being recomputed: the first pass recorded it. `tensors` of the Recorder does not apply.

        Raises ConfigError for an argument that cannot be recorded, RecorderError outside the Recorder's context.
        """
        axis = _check_record(name, tensor, layer, module, operation, phase, expert, dim)
        formats = self.scores if scores is None else _formats(scores)
        moment = self.moment()
        if not moment.recording or (operation == Operation.FORWARD and running_backward()):
            return
        known: set[tuple[str | None, str | None]] = {
            (kind.layer_type, kind.component) for kind in TENSOR_KINDS if kind.name == name
        }
        if len(known) > 1:
            known = {words for words in known if (words[0] == "attention") == (module == "core")}
        layer_type, component = next(iter(known), (None, None))
        words = {"layer_type": layer_type, "component": component, "tensor_name": name}
        site = Site(layer, module, expert)
        identity = partial(self._identity, site, moment, operation=operation, phase=phase, **words)
        seen = Observed(name, tensor.detach(), dim=axis)
        self._record(seen, site, identity, moment, formats, None, None if dim is None else axis, Shard())

    def show(self, kind: TensorKind, layer: Layer, x: Tensor, moment: Moment) -> None:
        """Record a tensor of a kind that belongs to no product, if `tensors` names it."""
        if not moment.recording or kind.name not in self.tensors or is_dtensor(x):
            return
        x = x.detach() if x.is_floating_point() else x.detach().float()
        if x.dtype not in DTYPES:
            raise InstrumentError(
                f"{layer.name} has {kind.name} in {_dtype(x.dtype)}, which is not recorded: leave it out"
            )
        self._shown.add(kind.name)
        words = {"tensor_name": kind.name, "operation": kind.operation.value, "phase": kind.phase.value}
        identity = partial(self._identity, layer.site, moment, **words)
        seen = Observed(kind.observed, x)
        scores = () if kind.contracted_axis is None else self.scores
        self._record(seen, layer.site, identity, moment, scores, None, None, layer.shard(kind.observed))

    def publish_step(self) -> None:
        """Queue what was captured of the optimizer's step, unless `at` publishes it."""
        if self.positioned:
            merged = self._take_merged()
            self._publish()
            self._captured = merged  # published by the next `at`, which all ranks call

    def tap(self, layer: Layer, part: Part, product: Product, moment: Moment, again: bool = False) -> Tap | None:
        """The observer of one call of one product at that moment; None if that is not recorded. again: the forward
        product is a recomputation, for which only the gradients are recorded."""
        if not moment.recording or ("attention" if layer.is_core else "linear") not in self.places:
            return None
        key = layer.site, product, moment
        rows = self._measured.get(key, {}) if again else {}
        self._measured[key] = rows
        return _Observer(self, layer, part, product, moment, rows, again)

    def _identity(self, site: Site, moment: Moment, **words: str | None) -> Identity:
        """words: tensor_name, operation and phase; of a tensor of a product also layer_type, component, quant_type."""
        words = {"layer_type": None, "component": None, "quant_type": BF16} | words
        if moment.evaluation and words["operation"] == Operation.FORWARD:
            words["operation"] = Operation.EVALUATION.value
        return Identity(
            **{word: self.config.get(word) for word in WORDS},
            **words,
            layer_index=site.layer_index,
            module=site.module,
            iteration=moment.iteration,
            micro_batch=None if words["operation"] == Operation.OPTIMIZER else moment.micro_batch,
            rank=self.rank,
            expert=site.expert,
        )

    def _record(
        self,
        seen: Observed,
        site: Site,
        identity: Callable[[], Identity],
        moment: Moment,
        scores: Sequence[str],
        gemm: Gemm | None,
        contracted_axis: int | None,
        shard: Shard,
        result_sqnr: Callable[[], float] | None = None,
        merged: bool = True,
    ) -> list[Tried]:
        """Measure and copy a tensor; on a GPU, asynchronously until the rows are published. Returns its scores: those
        of later GEMMs may be added to them until then. In a watched step, whatever needs no values is left to the
        writer's thread: here, between the GEMMs of a step, Python takes several times as long.

        merged: whether ranks may merge it.
        """
        if not self.entered:
            raise RecorderError("the Recorder has no run to write to: call the model within `with Recorder(...)`")
        x, whole = seen.tensor, not moment.basic
        shape, dtype, nbytes = tuple(seen.shape or x.shape), x.dtype, x.numel() * x.element_size()
        if whole:
            identity = cache(identity)  # the file has it too
        traced = whole and Measure.TRACE in self.measures and identity().tensor_name not in MAPS
        trace = _trace_later(seen, x.reshape(shape), identity().tensor_name) if traced else None
        codes = counted(x) if whole and x.device.type == "cpu" else None
        summary = summarize_later(x, codes=codes, sketch=whole)
        summary = cache(summary) if whole else summary  # the file has it too
        tried = try_formats(seen, scores if whole else (), gemm, whole and Measure.BLOCKS in self.measures, codes)
        used = next((each for each in tried if each.used), None)
        fmt = used.format if used else None
        captured = datetime.now(UTC)
        if shard.kind == "whole":  # the ranks of a replica have it in common
            shard = replace(shard, index=self.part[0], count=self.part[1])
        merged = merged and self._is_merged(moment)
        keeps = whole and self.raw and not merged
        path = self._save(x.reshape(shape), identity(), summary, fmt, captured) if keeps else None
        self._count += 1
        number = self._count

        def row(recomputed: bool) -> TensorRow:
            found = [each.score() for each in tried]
            return TensorRow(
                tensor_id=f"r{self.rank:02d}-{number:06d}",
                run_id=self.writer.run_id,
                identity=identity(),
                captured=captured.replace(tzinfo=None),
                shape=shape,
                dtype=_dtype(dtype),
                nbytes=nbytes,
                path=str(path) if path else None,
                contracted_axis=contracted_axis,
                summary=summary(),
                format=fmt,
                error=next((score.error for score in found if score.used and score.gemm == gemm), None),
                scores=found,
                gemm=gemm,
                result_sqnr_db=result_sqnr() if result_sqnr else None,
                shard=shard if shard.replica == self.replica else replace(shard, replica=self.replica),
                recomputed=recomputed,
                trace=trace() if trace else None,
            )

        self._captured.append(Captured((site, moment), path, merged, row))
        return tried

    def _save(
        self, x: Tensor, identity: Identity, summary: Callable[[], Summary], fmt: str | None, captured: datetime
    ) -> Path | None:
        """Queue the values if they fit the budget; the file's path relative to the run."""
        i = identity
        stamp, quant_type = captured.astimezone(), plain_name(str(i.quant_type))
        name = (
            f"{stamp:%Y%m%d_%H%M%S}_{self._count + 1:04d}_iter{i.iteration:03d}_{i.layer_type or 'other'}"
            f"_L{i.layer_index}_{i.operation}_{i.phase}_{i.component or 'other'}_{quant_type}_rank{i.rank:02d}"
            f"_sample{i.micro_batch or 0:03d}_group{i.expert or 0:03d}_{i.tensor_name}.pt"
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

        def description() -> tuple[dict[str, Any], dict[str, Any]]:
            return metadata, info | {key: getattr(summary(), key) for key in ("min", "max", "mean", "std")}

        relative = Path("tensors", quant_type, name)
        return relative if self._writing.offer(relative, x, description) else None

    @property
    def _merges(self) -> bool:
        """Whether the ranks merge what they record in full."""
        return self.entered and self._reduction is not None and self._reduction.merges

    def _is_merged(self, moment: Moment) -> bool:
        """Whether what is measured now becomes part of rows of all ranks. What a trigger captures does not."""
        if self._reduction is None:
            return False
        if moment.basic:
            return self.watching.watches(moment.iteration)
        own = self._reduction.keeps_own or moment.iteration in self._capture
        return self._merges and self._reduction.works and not own

    def _publish_reduced(self) -> None:
        """At the end of a step, or of a micro-batch if `at` is used, queue what was measured in it to be reduced over
        ranks. All ranks call this at the same time, even if they have measured nothing."""
        if not self.entered or self._reduction is None:
            return
        watched = self.watching.watches(self.iteration) and not (self.positioned and self.micro_batch)
        if not watched and not (self._merges and (self.positioned or not self._is_over())):
            return
        self._writing.publish_reduced(self.iteration, [self._pending(each) for each in self._take_merged()])

    def _take_merged(self) -> list[Captured]:
        """Remove what becomes part of rows of all ranks from what is captured."""
        merged = [each for each in self._captured if each.merged]
        self._captured = [each for each in self._captured if not each.merged]
        return merged

    def _pending(self, each: Captured) -> Pending:
        _, moment = each.during
        for_ring = moment.basic and not self.watching.watches(moment.iteration)
        return Pending(each.path, partial(each.row, each.during in self._recomputed), for_ring)

    def _publish(self) -> None:
        """Queue the captured rows as a segment, and the run's progress. Raises the error of an earlier write."""
        if not self.entered:
            return
        rows, self._captured = [self._pending(each) for each in self._captured], []
        self._measured.clear()
        self.sequences.clear()
        self._scales.clear()
        self._recomputed = {(site, moment) for site, moment in self._recomputed if moment.iteration >= self.iteration}
        self._published_at = time.monotonic()
        done = {} if self._done is None else {"iteration": self._done}
        self._writing.publish(rows, **done)


@dataclass(eq=False)
class _Observer:
    """The tap of one call of one product.

    rows       the scores of each operand that was recorded, by the name that it has in the product
    operands   forward operands that wait for their gradient: as shown, and the version of the values. They are kept
               alive by the backward pass, which needs them
    factors    of a linear layer: its input, then the gradient of its output; a weight's gradients follow from them
    """

    recorder: Recorder
    layer: Layer
    part: Part
    product: Product
    moment: Moment
    rows: dict[str, list[Tried]]
    again: bool
    operands: dict[str, tuple[Observed, int]] = field(default_factory=dict)
    factors: list[Observed] = field(default_factory=list)
    result_sqnr: Callable[[], float] | None = None

    def __call__(self, seen: Observed) -> None:
        recorder, name = self.recorder, seen.name
        if self.layer.site.expert is not None and not seen.tensor.numel():  # no token was routed to it
            return
        if self.moment.basic and name in LATER:
            return
        if sampling():
            if Measure.LOSS in recorder.measures and not self.moment.basic:
                self._wait_for_gradient(seen)
            return
        kind = recorder.kinds.get((self.product, LATER.get(name, name)))
        if not self.moment.basic and seen.exact and Measure.RESULT in recorder.measures:
            self.result_sqnr = sqnr_later(seen.exact(), seen.tensor)
        if name in LATER:
            if kind and kind.observed in self.rows:
                gemm = Gemm(name.partition("_")[0])
                rows = self.rows[kind.observed]
                # Where the GEMM rounds what the forward pass had rounded, it is not the same tensor.
                same = [] if name in self.part.formats.of_rounded else rows
                rows += try_formats(seen, recorder.scores, gemm, before=same)
        elif kind and not (self.again and name in FORWARD):
            self.rows[name] = self._record(seen, kind)
        if Measure.LOSS in recorder.measures and not self.moment.basic:
            self._wait_for_gradient(seen)

    def _record(self, seen: Observed, kind: TensorKind) -> list[Tried]:
        recorder, site = self.recorder, self.layer.site
        if seen.tensor.dtype not in DTYPES:
            raise InstrumentError(
                f"{self.layer.name} ({site.name}) computes in {_dtype(seen.tensor.dtype)}, which is not recorded: "
                "convert the model and its inputs to float32, bfloat16 or float16, or leave this layer out of `capture`"
            )
        part, moment = self.part, self.moment

        def identity() -> Identity:
            return recorder._identity(
                site,
                moment,
                quant_type=part.quant_type_of(kind.operand),
                layer_type=kind.layer_type,
                component=kind.component,
                operation=kind.operation.value,
                phase=kind.phase.value,
                tensor_name=kind.name,
            )

        is_operand = kind.contracted_axis is not None
        scores, axis = (recorder.scores, seen.dim) if is_operand else ((), None)
        sqnr = None
        if not is_operand:
            sqnr, self.result_sqnr = self.result_sqnr, None
        shard = self.layer.shard(seen.name)
        if shard.count > 1 and recorder.ranks.tensor.size == 1:  # a DTensor's mesh knows ranks that Ranks does not
            recorder.replica, recorder.part = shard.replica, (shard.index, shard.count)
        return recorder._record(seen, site, identity, moment, scores, kind.gemm, axis, shard, sqnr)

    def _wait_for_gradient(self, seen: Observed) -> None:
        """Keep a forward operand; with its gradients, predict what its errors do to the loss."""
        if seen.name in ("a", "b"):
            self.operands[seen.name] = seen, version_of(seen.tensor)
            self.factors = [seen] if seen.name == "a" else self.factors
        elif seen.name == "grad" and self.product == Product.LINEAR:
            self.factors = [*self.factors[:1], seen]
        elif seen.name in ("grad_a", "grad_b") and (kept := self.operands.get(seen.name[-1])):
            if not sampling():
                del self.operands[seen.name[-1]]
            operand, version = kept
            if version_of(operand.tensor) != version:  # overwritten since then: its error is no longer known
                return
            scale = None if sampling() else self.recorder.loss_scale_of(self.moment)
            gradients, split = self._by_sequence(operand, seen)
            for tried in self.rows.get(operand.name, []):
                if tried.gemm == Gemm.FORWARD:
                    tried.predict(operand, gradients, split, scale)

    def _by_sequence(
        self, operand: Observed, gradient: Observed
    ) -> tuple[Callable[[], Iterable[Tensor]], Callable[[Tensor], Sequence[Tensor]] | None]:
        """(the gradients of an operand, one for each sequence if those are known; how the operand is split likewise)"""
        sequences = self.recorder.sequences.get(self.moment, ONE)
        whole, shape = gradient.tensor.reshape(operand.tensor.shape), operand.shape or operand.tensor.shape
        if sequences.count > 1 and gradient.name == "grad_b" and len(self.factors) == 2:
            x, dy = (sequences.split(each.tensor.reshape(each.shape or each.tensor.shape)) for each in self.factors)
            if x and dy and (dy[0].shape[-1], x[0].shape[-1]) == shape:
                return lambda: map(_weight_gradient, x, dy), None
        elif sequences.count > 1 and (parts := sequences.split(whole.reshape(shape))):
            return lambda: parts, lambda y: sequences.split(y.reshape(shape)) or [y]
        return lambda: [whole], None


def _weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """[out, in], float32, from the input [..., in] and the gradient of the output [..., out]."""
    left, right = (each.reshape(-1, each.shape[-1]).float() for each in (gradient, x))
    return left.t() @ right


def _trace_later(seen: Observed, shown: Tensor, name: str | None) -> Callable[[], Trace]:
    """The values for following the tensor over iterations."""
    hot, sample = hot_channels_later(shown), None
    if name == "weight" and seen.spec and seen.coded is not None and seen.quantized is not None:
        sample = sample_later(seen.coded, seen.quantized, seen.spec, seen.scales, seen.dim, seen.absmax)
    return lambda: Trace(*hot(), sample() if sample else None)


def version_of(x: Tensor) -> int:
    """Counts how often x's values were overwritten."""
    return 0 if x.is_inference() else x._version


def _names(option: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):  # its letters would be taken as names
        raise ConfigError(f"{option}={given!r} is a single string: expected a tuple, such as {option}=({given!r},)")
    return tuple(given)


def _formats(scores: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(Spec.of(name)) for name in _names("scores", scores)))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_record(
    name: str, tensor: Tensor, layer: int, module: str, operation: str, phase: str, expert: int | None, dim: int | None
) -> int:
    """The axis to compute scores along, from the end. Raises ConfigError."""
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name)):
        raise ConfigError(f"name={name!r} is not a tensor name: expected at most 64 letters, digits, _ . and -")
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor")
    if tensor.dtype not in DTYPES:
        raise ConfigError(f"{name} is {_dtype(tensor.dtype)}, which is not recorded: convert it to float32 or bfloat16")
    if not tensor.dim():
        raise ConfigError(f"{name} is a scalar: expected a tensor with at least one axis, such as x.reshape(1)")
    for option, value in (("layer", layer), ("expert", expert)):
        if not (isinstance(value, int) and 0 <= value < 2**31) and (option, value) != ("expert", None):
            raise ConfigError(f"{option}={value!r} of {name} is not an index: expected a non-negative integer")
    if not (isinstance(module, str) and module):
        raise ConfigError(f"module={module!r} of {name} is not a module: expected a word, such as module='norm'")
    for option, word, known in (("operation", operation, tuple(Operation)), ("phase", phase, tuple(Phase))):
        if word not in known:
            raise ConfigError(f"{option}={word!r} of {name}: expected one of {', '.join(known)}")
    axis = -1 if dim is None else dim
    if not -tensor.dim() <= axis < tensor.dim():
        raise ConfigError(f"dim={dim} of {name} is not an axis of its shape {tuple(tensor.shape)}")
    return axis if axis < 0 else axis - tensor.dim()

"""A Recorder writes a run: the tensors of an instrumented model, and those passed to `record`.

A tensor of a GEMM is recorded before quantization, with the error that quantization made. Its statistics, sketch and
scores are computed at once, on its device (measure); its values are copied while the byte budget lasts. A thread writes
files and rows (writing), those of a micro-batch as one segment: only there are results fetched from a GPU.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.collector.capture.adapters.layer import InstrumentError, Layer, numbers_left_out
from binade.collector.capture.clock import PASSES_BEFORE_WARNING, Clock, Moment, PassCounter, running_backward
from binade.collector.capture.evaluation import Evaluate
from binade.collector.capture.evaluations import Evaluations
from binade.collector.capture.instrumented import Instrumented
from binade.collector.capture.measure import WORDS, Measurer, RecorderError, check_record, dtype_name, warm_up
from binade.collector.capture.observer import Observing
from binade.collector.capture.options import Merge, Watch, check_type, saving_enabled, whole, words
from binade.collector.capture.policy import Policy
from binade.collector.capture.rows import Drafts
from binade.collector.capture.session import Continued, RecordingSession
from binade.collector.capture.valid import Valid
from binade.collector.errors import ConfigError
from binade.collector.models.site import Site
from binade.collector.probes.probe import Finding, Probes
from binade.collector.probes.registry import of_a_run
from binade.collector.ranks import current_ranks
from binade.collector.settings import DEFAULT_SCORES
from binade.data.run.columns import Shard
from binade.data.run.directory import JOB_FILE, resolve_root
from binade.data.run.evaluations import Twin, add_held_out, add_twin, own_recipe
from binade.data.run.experiment import ExperimentWriter
from binade.data.run.rounding_alone import rounding_alone
from binade.data.run.run_writer import RunWriter
from binade.data.run.store import remove_directory
from binade.data.run.tensor_kinds import (
    DEFAULT_MEASURES,
    TENSOR_KINDS,
    Measure,
    Operation,
    Other,
    Phase,
    TensorKind,
    named_places,
    tensor_names,
)
from binade.quant.formats import Format, UnknownFormatError
from binade.quant.gemm import Observed
from binade.quant.memory import ordinary, without_modes
from binade.quant.options import SpecError
from binade.quant.quantizer import DTYPES
from binade.quant.specs import GemmFormats, Spec

LOG = logging.getLogger("binade")
NOTABLE = 0.5  # seconds
REFUSED = (ConfigError, InstrumentError, SpecError, UnknownFormatError)
WATCH = Watch()
MERGE = Merge()


class Recorder:
    """Writes a run: its directory, tensor files and segments. A context manager; exiting it ends the run.

    Args:
        root: The directory of the runs. The default is $TENSOR_SAVE_DIR, else data/runs.
        label: Part of the run's id.
        config: Kept as run.json. Its model, size, dataset and recipe describe each tensor. `instrument` adds the model,
            the recipe and the number of parameters, unless they are given.
        tensors: Names of data.run.tensor_kinds to record. The default is all tensors of attention and linear layers.
        scores: Formats or specs in which every operand is scored; () for none. The default is that of `binade run`.
        measures: What else to measure of each GEMM, see data.run.tensor_kinds.Measure. The default is DEFAULT_MEASURES
            on a CPU, and blocks where there is an accelerator: the others take GEMMs and many kernels of their own.
        max_bytes: The size limit for this rank's tensor files; `binade run --max-bytes` is the limit for all ranks
            together. Beyond it, values are not kept, only statistics, sketches and scores; with 0, none are.
        iterations: The number of iterations to record, from the first on, unless `at` says otherwise; None for all, 0
            for none (--control-iter 0 of the command means all, as in the Megatron fork). If `watch` watches steps, the
            default is 0.
        micro_batches: The number of micro-batches to record in each; None for all.
        evaluation: Whether to also record forward passes in eval mode or without gradients. They have their own
            micro-batch numbers and the operation "evaluation" instead of "forward".
        watch: What to measure and when to record more in a long run, and where to send rows and events, see `Watch`.
        merge: How the rows of several ranks are merged, see `Merge`.
        enabled: If False, nothing is written, and the recipe still applies. The default is $TENSOR_SAVE_ENABLED.

    Each forward pass of the instrumented model is a micro-batch, and the step of an optimizer that holds the model's
    parameters ends an iteration; Megatron's own count is used if there is one. If your optimizer is not a torch
    optimizer, call `step` after each iteration. `with recorder.at(...)` around a micro-batch sets both numbers instead.

    The run's final state is "done", "cancelled" after KeyboardInterrupt, or "failed" after any other exception, with
    the first line of its message. Data captured until then is kept; a call that is refused before the first forward
    pass, such as `instrument` with an unknown recipe, leaves no run. A Recorder can be entered again after it has
    exited, for another run.

    Raises:
        ConfigError: An argument is invalid.
        RunError: The root cannot be written.
        RecorderError: The Recorder records outside its context, or is entered twice.
        OSError: A later write failed. The next call or the end of the context raises it.
    """

    compiled = ""  # what `compile` has logged
    entered = False
    _trained = False  # whether a pass that trains has begun in this run
    _has_rounding_alone = False  # whether this run's run.json has it
    instrumented: Instrumented | None = None  # the model that was instrumented first
    _writes_curves = True
    _results: ExperimentWriter | None = None  # of this run, once something is evaluated

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        label: str = "run",
        config: dict[str, Any] | None = None,
        tensors: Sequence[str] = (),
        scores: Sequence[str] = DEFAULT_SCORES,
        measures: Sequence[str] | None = None,
        max_bytes: int = 4 << 30,
        iterations: int | None = None,
        micro_batches: int | None = None,
        evaluation: bool = False,
        watch: Watch = WATCH,
        merge: Merge = MERGE,
        enabled: bool | None = None,
    ) -> None:
        _check_arguments(root, label, config, watch, merge, evaluation, enabled)
        iterations = None if iterations is None else whole("iterations", iterations)
        micro_batches = None if micro_batches is None else whole("micro_batches", micro_batches)
        max_bytes = whole("max_bytes", max_bytes)
        self.root = resolve_root(root)
        self.label = label
        self.config = dict(config or {})
        for word in WORDS:
            if not isinstance(self.config.get(word), str | None):
                raise ConfigError(f"config has {word} {self.config[word]!r}: expected a string, such as {word}='mine'")
        self.tensors = frozenset(words("tensors", tensors))
        for name in self.tensors.difference(tensor_names()):
            raise ConfigError(f"unknown tensor {name!r}: expected one of {', '.join(tensor_names())}")
        shown = (kind for kind in TENSOR_KINDS if not self.tensors or kind.name in self.tensors)
        if measures is None:
            measures = (Measure.BLOCKS,) if torch.accelerator.is_available() else DEFAULT_MEASURES
        self.measures = frozenset(words("measures", measures))
        for name in self.measures.difference(Measure):
            raise ConfigError(f"unknown measure {name!r}: expected one of {', '.join(Measure)}")
        self.ranks = merge.ranks or current_ranks()
        if not {*merge.unmerged} <= {*range(self.ranks.size)}:
            raise ConfigError(f"unmerged={merge.unmerged} of Merge: the ranks are 0 to {self.ranks.size - 1}")
        self.watch, self.merge, self.max_bytes = watch, merge, max_bytes
        self.enabled = saving_enabled() if enabled is None else enabled
        self.clock = Clock()
        self.probes = Probes(self.clock)
        iterations = 0 if iterations is None and watch.follows else iterations
        self.policy = Policy(self.clock, watch, iterations, micro_batches, evaluation, self.enabled)
        self.observing = Observing(
            kinds={(kind.product, kind.observed): kind for kind in shown},
            places=named_places(self.tensors),
            scores=_specs(scores),
            measurer=Measurer(self.ranks, self.measures, max_bytes > 0, self.config, Drafts()),
            probes=self.probes,
        )
        self._probes_of_run = ExitStack()
        self._given = {name: value for name, value in self.config.items() if value is not None}
        self._continued: Continued | None = None
        self._session: RecordingSession | None = None  # the current run, or the last one
        self._shown: set[str] = set()  # what was recorded besides products
        self._left_out: set[str] = set()  # what could not be, and why

    def compile(self, formats: Iterable[GemmFormats], device: torch.device) -> None:
        """Compile what recording linear layers of these formats takes, see `measure.warm_up`, and log how long it
        took."""
        blocks = Measure.BLOCKS in self.observing.measurer.measures
        records = self.enabled and (self.policy.iterations != 0 or self.watch.follows)
        seconds = warm_up(self.observing.scores, blocks, formats, device) if records else 0.0
        if seconds > NOTABLE:
            self.compiled = f"compiled the kernels that round and measure tensors in {seconds:.1f} s"
            LOG.info(self.compiled)

    def of_training(self, continued: Continued | None) -> None:
        """The run belongs to a training loop that writes loss.jsonl itself, and may continue an earlier run."""
        self._continued, self._writes_curves = continued, False

    @property
    def session(self) -> RecordingSession:
        """The current run. Raises RecorderError before the Recorder was entered."""
        if self._session is None:
            raise RecorderError("the Recorder has no run: enter it first, with Recorder(...) as recorder")
        return self._session

    @property
    def iteration(self) -> int:
        return self.clock.iteration

    @property
    def micro_batch(self) -> int:
        return self.clock.micro_batch

    @property
    def writer(self) -> RunWriter:
        """The run's directory. Raises RecorderError before the Recorder was entered."""
        return self.session.writer

    def __enter__(self) -> Recorder:
        if not self.enabled:
            return self
        if self.entered:
            raise RecorderError(
                "this Recorder is already recording a run: exit its `with` block first, or create another"
            )
        measurer = self.observing.measurer
        if self._session:  # of the previous run
            self.clock.reset()
            self.policy.reset()
            measurer.reset()
            self._shown.clear()
            self._left_out.clear()
        self._session = RecordingSession(
            self.root,
            self.label,
            self.config,
            ranks=self.ranks,
            max_bytes=self.max_bytes,
            watch=self.watch,
            merge=self.merge,
            policy=self.policy,
            drafts=measurer.drafts,
            probes=self.probes,
            continued=self._continued,
            curves=self._writes_curves,
        )
        self._trained = self._has_rounding_alone = False
        self._results = None
        measurer.run = self._session
        measurer.start(self._continued.recorded if self._continued else 0)
        self.entered = True
        for probe in of_a_run(self):
            self._probes_of_run.enter_context(self.probes.during(probe))
        self.clock.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        measurer = self.observing.measurer
        try:
            cause = self.session.close(error, partial(self._probes_of_run.__exit__, kind, error, traceback))
        finally:
            self._probes_of_run.close()  # if an interrupt came first
            self.entered, measurer.run = False, None
        empty = not measurer.count and not self._trained and not self._continued and self.ranks.size == 1
        if isinstance(error, REFUSED) and empty and not (self.writer.directory / JOB_FILE).exists():
            with suppress(OSError):
                remove_directory(self.writer.directory)
        if kind is None and cause:
            raise cause
        if error is not None:
            return
        self.check_steps()
        if self.policy.left_out and not measurer.count and not self._trained:
            warnings.warn(
                f"nothing was recorded: all {self.policy.left_out} forward passes ran in eval mode or without "
                "gradients; call model.train(), or record them with Recorder(evaluation=True)",
                stacklevel=2,
            )
        missing = [name for place in Other for name in tensor_names(place) if name in self.tensors - self._shown]
        if missing and measurer.count:
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
        clock = self.clock
        if iteration != clock.iteration:
            self.probes.end_iteration()
        clock.iteration, clock.micro_batch, clock.positioned = iteration, micro_batch, True
        if self.entered:
            self.session.begin_capture()
        self.policy.position(record)
        clock.begin()
        try:
            yield
        finally:
            self.policy.recording = False
        if self.entered:
            self.session.publish_reduced()
            self.session.publish()

    def go_to(self, iteration: int) -> None:
        """Go to this iteration. Publishes what was captured if it belongs to another one."""
        clock = self.clock
        if iteration == clock.iteration:
            return
        self.probes.end_iteration()
        if self.entered:
            self.session.end_iteration()
        clock.iteration, clock.micro_batch = iteration, 0
        if self.entered:
            self.session.begin_capture()
        clock.begin()

    def step(self) -> None:
        """Publish what was captured and go to the next iteration. Iterations are counted by this method alone from then
        on, not by the steps of optimizers."""
        self.clock.stepped = True
        self.go_to(self.clock.iteration + 1)

    def settle(self) -> None:
        """Wait until everything published is on the disk. Raises OSError if a write failed."""
        if self.entered:
            self.session.writing.settle()

    def position(self) -> dict[str, int]:
        """The position of this rank's part of the run, once everything published is on the disk. Raises OSError."""
        self.settle()
        counts = self.session.writing.counts
        return {"segments": self.writer.segments, "recorded": self.observing.measurer.count, **counts}

    def save_state(self, directory: Path | None = None) -> None:
        """Write what a later run may continue from to a directory, by default that of the run. Raises OSError."""
        if self.entered:
            self.probes.save(directory or self.writer.directory)

    def begin_pass(self, model: nn.Module, given: object) -> None:
        """A forward pass of the model begins, with these arguments."""
        with without_modes():
            self._begin_pass(model, given)

    def _begin_pass(self, model: nn.Module, given: object) -> None:
        self.policy.left_out += self.policy.paused
        self._trained |= not self.clock.evaluating
        self.probes.begin_pass(self.policy.moment)
        if self.policy.may_record:
            self.policy.begin()  # the iteration counts, even if none of its products is recorded
        if not self.clock.evaluating and self.entered and self.session.curves:
            self.session.curves.begin(self.clock.iteration, model, given)
        if len(self.clock.arrived) == PASSES_BEFORE_WARNING:
            self.check_steps()

    def check_steps(self) -> None:
        """Warn if several forward and backward passes have run without anything that separates iterations."""
        if self.clock.lacks_steps:
            warnings.warn(
                f"{len(self.clock.arrived)} forward and backward passes are recorded as micro-batches of iteration 0, "
                "because no optimizer step with the model's parameters was detected: call recorder.step() after each "
                "iteration",
                stacklevel=2,
            )

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
        window: int = 1,
    ) -> None:
        """Log values of this iteration, that of the last forward pass in training mode. They become a line of
        loss.jsonl when the next iteration begins. Does not wait for a GPU. Every rank may call it; rank 0's values
        count.

            recorder.log(loss=loss, tokens=tokens.numel(), grad_norm=norm)

        loss       in nats per token, the mean over the iteration's micro-batches; triggers see it
        tokens     of the iteration
        grad_norm  before clipping
        window     of how many iterations the loss is the mean, this one the last. Losses are compared with those of as
                   many iterations

        Values of a later call in the same iteration replace earlier ones. Raises ConfigError for a tensor with more
        than one value, or a window below 1.
        """
        if window < 1:
            raise ConfigError(f"window is {window}: expected how many iterations the loss is the mean of, from 1")
        of_loss = None if loss is None else window
        given = (("loss", loss), ("window", of_loss), ("tokens", tokens), ("grad_norm", grad_norm))
        values = {name: x for name, x in given if x is not None}
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise ConfigError(f"{name} has the shape {tuple(value.shape)}: expected a single number")
                values[name] = cast(Any, value).full_tensor() if is_dtensor(value) else value.detach()
        if not self.entered:
            return
        session, iteration = self.session, self.clock.iteration
        if session.curves:
            session.curves.log(iteration, values)
        if "loss" in values:
            value = values["loss"]
            self.probes.log(value)
            session.writing.run(lambda: session.monitor.see_loss(iteration, float(value)))

    def twin(self, loss: Callable[[], Tensor], times: int = 1) -> Twin:
        """Run one micro-batch on the current weights without the recipe, and `times` times with it: see
        data.run.evaluations.

            twin = recorder.twin(lambda: model(**batch).loss, times=4)

        loss runs the model's forward pass and returns the loss. A recipe that draws no random numbers is run once.
        Training does not change: weights, gradients, buffers, random numbers and recorded tensors stay the same. The
        result is also added to the run's experiment, unless the run has several ranks: gradients are those of this
        rank. Not with reentrant checkpoints. Raises RecorderError without an instrumented model or with find_nan.
        """
        evaluations = Evaluations(*self._on_these_weights("twin"))
        if times < 1:
            raise ConfigError(f"times is {times}: expected at least 1")
        twin = evaluations.twin(loss, times)
        if self.entered and self.ranks.size == 1:
            self._keep(add_twin, twin)
        return twin

    def evaluate(
        self, loss: Evaluate, batches: Iterable[Any], *, iteration: int | None = None, tokens: int | None = None
    ) -> tuple[float, ...]:
        """Evaluate held-out batches on the current weights, with the recipe. Returns the loss of each sequence.

            def loss(model, batch):
                return model(batch["input_ids"]).logits[:, :-1], batch["input_ids"][:, 1:]

            recorder.evaluate(loss, batches)

        loss       as in `binade.measure`: called with the model and a batch, it returns the loss of each sequence, or
                   logits and labels
        batches    the same each time: runs are compared sequence by sequence
        iteration  how many iterations were trained before; by default, those that the recorder has counted
        tokens     how many tokens were trained before

        Call it before the forward pass of an iteration. Training does not change, and nothing is recorded but results
        in the run's experiment. The first call with a recipe that rounds also evaluates the batches without it, unless
        `binade run` has trained the run: the difference is what rounding alone does to the loss (`rounding_alone` of
        run.json). With several ranks, all call it with the same batches, and rank 0 writes. Raises RecorderError
        without an instrumented model or with find_nan, ConfigError for a loss of another form.
        """
        evaluations = Evaluations(*self._on_these_weights("evaluate"))
        at = self.clock.iteration if iteration is None else iteration
        compares = self._writes_curves and not self._has_rounding_alone and evaluations.rounds(at)
        evaluation, exact = evaluations.held_out(loss, batches, iteration, tokens, compares)
        if self.entered and self.ranks.rank == 0:
            self._keep(add_held_out, evaluation, exact)
        if compares:
            self.keep_rounding_alone(evaluation.iteration, evaluation.losses, exact)
        return evaluation.losses

    def without_recipe(self, loss: Evaluate, batch: Any) -> tuple[float, ...]:
        """The loss of each sequence of a batch on the current weights, without the recipe; empty if that rounds no
        operand in this iteration. Training does not change, and nothing is recorded. loss and errors: as in `evaluate`.
        """
        evaluations = Evaluations(*self._on_these_weights("without_recipe"))
        return evaluations.without_recipe(loss, batch) if evaluations.rounds(self.clock.iteration) else ()

    def keep_rounding_alone(self, iteration: int, rounded: Sequence[float], exact: Sequence[float]) -> None:
        """Keep what rounding alone does to the loss, in run.json. rounded, exact: the losses of the same sequences on
        the same weights, in nats per token. Not kept if one is not finite."""
        measured = rounding_alone(iteration, rounded, exact)
        if self.entered and measured:
            self._has_rounding_alone = True
            self.later(partial(self.writer.describe, measured.fact()))

    def _keep(self, add: Callable[..., None], *evaluated: Any) -> None:
        """Add something to the results of the run's own recipe. add: a function of data.run.evaluations."""

        def write() -> None:
            self._results = self._results or ExperimentWriter(self.writer.directory)
            add(self._results, own_recipe(self.config), *evaluated)

        self.later(write)

    def _on_these_weights(self, method: str) -> tuple[Instrumented, PassCounter]:
        """The model that passes which do not train are run with, for a method of this name. Raises RecorderError."""
        if self.instrumented is None or self.instrumented.passes is None:
            raise RecorderError(
                f"nothing is instrumented: call {method} within `with instrument(model, recipe, recorder)`"
            )
        if self.watch.find_nan:
            raise RecorderError(f"{method} cannot be called with find_nan, which would trace its passes")
        return self.instrumented, self.instrumented.passes

    @contextmanager
    def valid(self, mask: Tensor, *, batch_axis: int = 0) -> Iterator[None]:
        """Within this context, in which a micro-batch's forward pass runs, only the tokens of the mask are valid. The
        others, which are padding, are left out of statistics, sketches and errors:

            with recorder.valid(attention_mask.bool()):
                logits = model(tokens, attention_mask)

        mask        bool [b, s]; [s, b] with batch_axis=1, as the model's hidden states
        batch_axis  of the mask

        It applies to the inputs, outputs and gradients of linear layers and attention that have a row for each token,
        not to those of routed experts, norms and `record`. Operands are rounded with their padding, which takes part in
        scales. Raises ConfigError for another kind of mask.
        """
        if mask.dtype != torch.bool or mask.dim() != 2:
            raise ConfigError(f"mask is {dtype_name(mask.dtype)} {tuple(mask.shape)}: expected bool with two axes")
        drafts = self.observing.measurer.drafts
        if self.entered:
            host = mask.cpu()
            drafts.masked = Valid(host.t() if batch_axis else host, batch_axis)
        try:
            yield
        finally:
            drafts.masked = None

    def later(self, task: Callable[[], None]) -> None:
        """Run a task on the writer's thread, in order with the writes."""
        self.session.writing.run(task)

    def report(self, findings: Callable[[], Iterable[Finding]]) -> None:
        """Call a function on the writer's thread, in order with the writes, and make events of what it returns. Does
        nothing without a run."""
        if self.entered:
            monitor = self.session.monitor
            self.later(lambda: monitor.report(findings()))

    def keep(self, name: str, x: Tensor, site: Site, operation: str) -> None:
        """Record a tensor of the current pass, even if others are not. Does nothing without a run."""
        if not self.entered:
            return
        check_record(name, x, site.layer_index, site.module, operation, Phase.PRE, site.expert, None)
        moment = Moment(self.clock.iteration, self.clock.micro_batch, True)
        measurer = self.observing.measurer
        identity = partial(
            measurer.identity, site, moment, tensor_name=name, operation=str(operation), phase=Phase.PRE.value
        )
        with without_modes():
            measurer.measure(Observed(name, x.detach()), site, identity, moment, (), None, None, Shard(), merged=False)

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

        name       one of data.run.tensor_kinds or a new one, of letters, digits and _ . -
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
        axis = check_record(name, tensor, layer, module, operation, phase, expert, dim)
        specs = self.observing.scores if scores is None else _specs(scores)
        moment = self.policy.begin()
        if not moment.recording or (operation == Operation.FORWARD and running_backward()):
            return
        known: set[tuple[str | None, str | None]] = {
            (kind.layer_type, kind.component) for kind in TENSOR_KINDS if kind.name == name
        }
        if len(known) > 1:
            known = {place for place in known if (place[0] == "attention") == (module == "core")}
        layer_type, component = next(iter(known), (None, None))
        kind = {"layer_type": layer_type, "component": component, "tensor_name": name}
        site = Site(layer, module, expert)
        measurer = self.observing.measurer
        identity = partial(measurer.identity, site, moment, operation=str(operation), phase=str(phase), **kind)
        try:
            seen = Observed(name, ordinary(tensor), dim=axis)
        except TypeError as error:
            raise ConfigError(f"{name} cannot be recorded: {error}") from None
        with without_modes():
            measurer.measure(seen, site, identity, moment, specs, None, None if dim is None else axis, Shard())

    def show(self, kind: TensorKind, layer: Layer, x: Tensor, moment: Moment) -> None:
        """Record a tensor of a kind that belongs to no product of the model, if `tensors` names it."""
        if not moment.recording or kind.name not in self.tensors or is_dtensor(x):
            return
        try:
            x = ordinary(x)
        except TypeError as error:
            self._leave_out(f"{kind.name} of {layer.name} is not recorded: {error}")
            return
        x = x if x.is_floating_point() else x.float()
        if x.dtype not in DTYPES:
            raise InstrumentError(
                f"{layer.name} has {kind.name} in {dtype_name(x.dtype)}, which is not recorded: leave it out"
            )
        self._shown.add(kind.name)
        measurer = self.observing.measurer
        where = {"tensor_name": kind.name, "operation": kind.operation.value, "phase": kind.phase.value}
        identity = partial(measurer.identity, layer.site, moment, **where)
        scores, axis = ((), None) if kind.contracted_axis is None else (self.observing.scores, kind.contracted_axis)
        seen, contracted = Observed(kind.observed, x, dim=axis or -1), axis if kind.gemm else None
        shard = layer.shard(kind.observed)
        with without_modes():
            measurer.measure(seen, layer.site, identity, moment, scores, kind.gemm, contracted, shard)

    def _leave_out(self, reason: str) -> None:
        """Warn, once for each kind and class, that a tensor is not recorded."""
        name = numbers_left_out(reason)
        if name not in self._left_out:
            self._left_out.add(name)
            warnings.warn(reason, stacklevel=3)
            findings = [Finding(self.iteration, reason, "")]
            self.report(lambda: findings)

    def publish_step(self) -> None:
        """Queue what was captured of the optimizer's step, unless the end of the iteration does it."""
        if self.entered:
            self.session.publish_step()


def _check_arguments(*given: object) -> None:
    """Raise ConfigError for the first of these arguments of a Recorder that is of another type."""
    for (name, kind, expected), value in zip(
        (
            ("root", str | Path | None, "the path of a directory"),
            ("label", str, "a string"),
            ("config", Mapping | None, "a dict"),
            ("watch", Watch, "a Watch, such as binade.Watch('every 100 steps')"),
            ("merge", Merge, "a Merge, such as binade.Merge('off')"),
            ("evaluation", bool, "True or False"),
            ("enabled", bool | None, "True or False"),
        ),
        given,
        strict=True,
    ):
        check_type(name, value, kind, expected)


def _specs(scores: Sequence[str]) -> tuple[Spec, ...]:
    return tuple(dict.fromkeys(Spec.of(name) for name in words("scores", scores, str | Spec | Format)))

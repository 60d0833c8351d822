"""Which forward pass a call belongs to: its micro-batch, and whether it repeats an earlier pass.

The random numbers of a pass depend only on its place, so that a repeated pass draws the same ones.

Activation recomputation runs a layer's forward pass twice, the second time during the backward pass. Both are computed
in the same way. The operands and results of the forward pass are recorded in the first, regardless of the kind of
checkpoint; the second adds only the gradients, and marks the layer as recomputed. So each tensor is recorded once.

Whether a pass is an evaluation is decided where the model's own forward begins: within a layer, the first pass of a
checkpoint has no gradients either.

    torch.utils.checkpoint, use_reentrant=True     the first pass is under no_grad, gradients belong to the second
    megatron's checkpoint, CheckpointWithoutOutput likewise
    torch.utils.checkpoint, use_reentrant=False    gradients belong to the first, the second only restores its operands

The gradients show which pass a second one repeats: `Clock.end` notes when those of a pass's results arrive, and of
the passes whose gradients have arrived, the latest is repeated first.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from binade.collector.capture.adapters.layer import Layer, Moment
from binade.collector.capture.adapters.products import tensors_in
from binade.collector.models.parallel import Pass, Quantization
from binade.collector.recipes.recipe import Part
from binade.data.tensor_kinds import Product
from binade.quant.gemm import Tap, sampling

if TYPE_CHECKING:
    from binade.collector.capture.recorder import Recorder

# Forward passes of a layer that may still be recomputed: as many micro-batches as a pipeline has in flight at most.
IN_FLIGHT = 1024
PASSES_BEFORE_WARNING = 64  # forward and backward passes without an update of the model


def running_backward() -> bool:
    """Whether this code runs within a backward pass, in which any forward pass is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def seed_of(*place: object) -> int:
    """A seed for the random numbers of a place, below 2^29: a product derives six seeds of 32 bits from it."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=4).digest()) >> 3


@dataclass(eq=False)
class Listener:
    """Follows the passes of one product of one layer: provides their taps and rounding state.

    stages         the parts that the recipe gives the product, each with the iteration from which it holds
    recorded       whether the product is recorded while the recorder records
    seed           of the run
    quantization   of the product: its formats are those of the pass that runs
    changes        whether `stages` may change in the run
    """

    recorder: Recorder
    layer: Layer
    stages: Sequence[tuple[int, Part]]
    product: Product
    recorded: bool
    seed: int
    quantization: Quantization
    changes: bool = False

    def __post_init__(self) -> None:
        self.varies = self.changes or len(self.stages) > 1 or self.stages[0][1].formats.varies
        self.passed: deque[Moment] = deque(maxlen=IN_FLIGHT)
        self.moment, self.again = Moment(0, 0, False), False

    def running(self) -> Pass:
        """The pass that the latest call began."""
        if not self.varies:
            return Pass()
        moment, site = self.moment, self.layer.site
        place = self.recorder.rank, moment.iteration, moment.micro_batch, site.name, self.product.value
        return Pass(seed_of(self.seed, *place), self.again)

    def __call__(self) -> Tap | None:
        """The observer of the pass that begins now, None while nothing is recorded."""
        observed = self.recorded and not self.recorder.idle()
        if not (observed or self.varies):
            return None
        self.again = running_backward()
        if not self.again:
            self.moment = self.recorder.moment()
            part = self._part()
            if self.layer.module.training and not self.moment.evaluation:
                while self.passed and self.passed[0].iteration != self.moment.iteration:
                    self.passed.popleft()
                self.passed.append(self.moment)
            return self.recorder.tap(self.layer, part, self.product, self.moment) if observed else None
        # Without gradients this is the first pass of a checkpoint within another: gradients come with the next.
        last = torch.is_grad_enabled()
        self.moment = self._repeated(last)
        part = self._part()
        tap = self.recorder.tap(self.layer, part, self.product, self.moment, again=True) if observed and last else None
        if tap:
            self.recorder.recomputed(self.layer.site, self.moment)
        return tap

    def _part(self) -> Part:
        """The recipe part for the pass that begins."""
        part = [part for start, part in self.stages if start <= self.moment.iteration or not start][-1]
        self.quantization.formats = part.formats
        return part

    def _repeated(self, last: bool) -> Moment:
        """The moment of the pass that is repeated: the latest of those whose gradients have arrived, because one
        backward pass goes through several forward passes from the last to the first. Where that is unknown (results in
        no tuple, list or mapping), the earliest. last: it is not repeated once more."""
        if not self.passed:
            return self.recorder.moment()
        arrived = self.recorder.arrived
        at = next((i for i in reversed(range(len(self.passed))) if self.passed[i] in arrived), 0)
        moment = self.passed[at]
        if last and not sampling():
            del self.passed[at]
        return moment


class Clock:
    """Counts the forward passes of a model as micro-batches, unless `Recorder.at` sets them. Evaluations are counted on
    their own.

    The iteration is Megatron's where that is known: the training loop's own argument, else one iteration per
    get_num_microbatches() passes. Elsewhere it is the recorder's once `Recorder.step` was called. Before that, an
    iteration is over when a pass begins after a step of an optimizer that holds one of the model's parameters; with
    several optimizers, all steps between two passes count as one. Clearing gradients ends nothing: the loop may have
    discarded a micro-batch.

    always: passes are counted even if nothing is recorded.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, always: bool) -> None:
        self.recorder, self.model, self.always = recorder, model, always
        self.iteration: int | None = None
        self.passes = Counter[bool]()  # of this iteration: trainings, and evaluations (True)

    @contextmanager
    def following_updates(self) -> Iterator[None]:
        """A context in which updates of the model are noticed."""

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not held.isdisjoint(map(id, self.model.parameters())):  # the current ones: fully_shard replaces them
                self.recorder.updated = True

        handle = register_optimizer_step_post_hook(stepped)
        try:
            yield
        finally:
            handle.remove()

    def begin(self, given: object) -> None:
        """A forward pass begins, with these arguments."""
        recorder = self.recorder
        if running_backward() or recorder.suspended:
            return
        # A checkpoint (reentrant) around the model runs it without gradients at first, on inputs that require some.
        without = not torch.is_grad_enabled() and not any(x.requires_grad for x in tensors_in(given))
        evaluation = recorder.evaluating = without or not self.model.training
        recorder.evaluations_left_out += recorder.paused
        if recorder.positioned:
            if not evaluation:
                recorder.begin_training(self.model, given)
            return
        self.advance(evaluation)
        recorder.micro_batch = self.passes[evaluation]
        self.passes[evaluation] += 1
        if not evaluation:
            recorder.begin_training(self.model, given)
        if len(recorder.arrived) == PASSES_BEFORE_WARNING:
            recorder.check_steps()

    def advance(self, evaluation: bool = False) -> None:
        """Go to the iteration of the pass that is next, unless `Recorder.at` sets it."""
        recorder = self.recorder
        if recorder.positioned:
            return
        megatrons, a_step = megatron_iteration(), megatron_micro_batches()
        if megatrons is not None:
            recorder.go_to(megatrons)
        elif not recorder.stepped and self.iteration == recorder.iteration:
            is_over = recorder.updated if a_step is None else self.passes[False] >= a_step and not evaluation
            recorder.go_to(recorder.iteration + is_over)
        if self.iteration != recorder.iteration:
            self.iteration, recorder.updated = recorder.iteration, False
            self.passes.clear()

    def end(self, result: Any) -> None:
        """A forward pass has ended. Note when its result's gradients arrive: then its layers may be recomputed."""
        if self.recorder.suspended:
            return
        moment, arrived, idle = self.recorder.moment(), self.recorder.arrived, self.recorder.idle()
        self.recorder.evaluating = False
        if idle and not self.always:
            return
        if len(arrived) > 2 * IN_FLIGHT or any(each.iteration != moment.iteration for each in arrived):
            arrived.clear()

        def note(*_: Any) -> None:
            arrived.add(moment)

        for node in {x.grad_fn for x in tensors_in(result) if x.grad_fn is not None}:
            node.register_prehook(note)


def counted_by_megatron() -> bool:
    """Whether Megatron says which iteration it is."""
    return megatron_iteration() is not None or megatron_micro_batches() is not None


def megatron_iteration() -> int | None:
    """The iteration of Megatron-LM's training loop, from 0; None without one."""
    variables = sys.modules.get("megatron.training.global_vars")
    arguments = getattr(variables, "_GLOBAL_ARGS", None)
    return getattr(arguments, "curr_iteration", None)


def megatron_micro_batches() -> int | None:
    """Micro-batches per iteration, where megatron.core knows them."""
    calculator: Any = sys.modules.get("megatron.core.num_microbatches_calculator")
    if getattr(calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None) is None:
        return None
    return int(calculator.get_num_microbatches())

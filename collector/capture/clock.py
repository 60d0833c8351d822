"""Which iteration, micro-batch and pass of a training loop this is.

Each forward pass of the model is a micro-batch, unless `Recorder.at` sets the position. If the training loop calls
parts of the model itself, a pass goes on until a part is called again, a backward pass has begun or an optimizer has
stepped. Evaluations are counted on their own. Whether a pass is one is decided where the model's own forward begins,
or that of a part: within a layer, the first pass of a checkpoint has no gradients either.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from binade.collector.capture.adapters.products import running, tensors_in, transformed
from binade.collector.models.parallel import Call
from binade.quant.gemm import Rounding
from binade.quant.specs import GemmFormats

# Forward passes of a layer that may still be recomputed: as many micro-batches as a pipeline has in flight at most.
IN_FLIGHT = 1024
PIPELINE, INFERENCES = "torch.distributed.pipelining.stage", ("_forward_metadata_inference", "_shape_inference")
PASSES_BEFORE_WARNING = 64  # forward and backward passes without an update of the model


@dataclass(frozen=True)
class Moment:
    """The iteration and micro-batch of a forward pass, whether it is recorded, whether it is an evaluation, and whether
    only the basic statistics are recorded."""

    iteration: int
    micro_batch: int
    recording: bool
    evaluation: bool = False
    basic: bool = False


class Clock:
    """The position of a training loop.

    evaluating   within a forward pass that does not train
    positioned   the position is set by `Recorder.at`, once that was used
    stepped      iterations are counted by `Recorder.step`, once that was called
    updated      the model was updated since the last forward pass
    arrived      the forward passes of this iteration whose backward pass has begun, the one that began last at the end
    twin         within a twin step, which neither counts nor records: begins the calls of a Hook in its place
    followers    functions to call when an iteration or micro-batch begins
    """

    def __init__(self) -> None:
        self.twin: Callable[[Any], Call] | None = None
        self.followers: list[Callable[[], None]] = []
        self.reset()

    def reset(self) -> None:
        """Reset all counts, as before the first run."""
        self.iteration = self.micro_batch = 0
        self.evaluating = self.positioned = self.stepped = self.updated = False
        self.arrived: dict[Moment, None] = {}

    def begin(self) -> None:
        """An iteration or micro-batch has begun, or the run has."""
        for follow in self.followers:
            follow()

    @property
    def lacks_steps(self) -> bool:
        """Whether several forward and backward passes have run without anything that separates iterations."""
        known = self.stepped or self.positioned or self.updated or self.iteration or counted_by_megatron()
        return len(self.arrived) > 1 and not known


class PassCounter:
    """Counts the forward passes of a model as micro-batches of the clock, unless `Recorder.at` sets them.

    The iteration is Megatron's where that is known: the training loop's own argument, else one iteration per
    get_num_microbatches() passes. Elsewhere it is the clock's once `Recorder.step` was called. Before that, an
    iteration is over when a pass begins after a step of an optimizer that holds one of the model's parameters; with
    several optimizers, all steps between two passes count as one. Clearing gradients ends nothing: the loop may have
    discarded a micro-batch.

    go_to    begins another iteration of the clock
    begins   called with the model and its arguments when a pass begins, once it is counted
    moment   returns the clock's current Moment; None while nothing needs it
    """

    def __init__(
        self,
        clock: Clock,
        model: nn.Module,
        go_to: Callable[[int], None],
        begins: Callable[[nn.Module, object], None],
        moment: Callable[[], Moment | None],
    ) -> None:
        self.clock, self.model, self.go_to, self.begins, self.moment = clock, model, go_to, begins, moment
        self.iteration: int | None = None
        self.passes = Counter[bool]()  # of this iteration: trainings, and evaluations (True)
        self.evaluation = False  # whether the last pass was one
        self.of_shapes = False  # within a pass by which torch's pipelines learn shapes
        self.called: set[nn.Module] = set()  # the parts that were called in this pass, if it is one of parts

    @contextmanager
    def following_updates(self) -> Iterator[None]:
        """A context in which updates of the model are noticed."""

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            held = set(map(id, parameters_of(optimizer)))
            if not held.isdisjoint(map(id, self.model.parameters())):  # the current ones: fully_shard replaces them
                self.clock.updated = True

        handle = register_optimizer_step_post_hook(stepped)
        try:
            yield
        finally:
            handle.remove()

    def begin(self, module: nn.Module, given: object) -> None:
        """The forward of the model, or of a part that the training loop calls, begins with these arguments."""
        clock = self.clock
        if self.of_shapes:  # that raised
            self.of_shapes, clock.twin = False, None
        if clock.twin or transformed():
            return
        if infers_shapes():
            self.of_shapes, clock.twin = True, _as_it_is
            return
        # A checkpoint (reentrant) around the model runs it without gradients at first, on inputs that require some.
        without = not torch.is_grad_enabled() and not any(x.requires_grad for x in tensors_in(given))
        before, evaluation = self.evaluation, without or not self.model.training
        self.evaluation = clock.evaluating = evaluation
        is_part = module is not self.model
        if is_part and self.called and before == evaluation and self._goes_on(module):
            self.called.add(module)
            return
        self.called = {module} if is_part else set()
        if not clock.positioned:
            self.advance(evaluation)
            clock.micro_batch = self.passes[evaluation]
            self.passes[evaluation] += 1
        self.begins(self.model, given)

    def _goes_on(self, part: nn.Module) -> bool:
        """Whether the pass of other parts goes on with this one."""
        clock = self.clock
        begun = any((at.iteration, at.micro_batch) == (clock.iteration, clock.micro_batch) for at in clock.arrived)
        return part not in self.called and not (begun or clock.updated)

    def advance(self, evaluation: bool = False) -> None:
        """Go to the iteration of the pass that is next, unless `Recorder.at` sets it."""
        clock = self.clock
        if clock.positioned:
            return
        megatrons, a_step = megatron_iteration(), megatron_micro_batches()
        if megatrons is not None:
            self.go_to(megatrons)
        elif not clock.stepped and self.iteration == clock.iteration:
            is_over = clock.updated if a_step is None else self.passes[False] >= a_step and not evaluation
            self.go_to(clock.iteration + is_over)
        if self.iteration != clock.iteration:
            self.iteration, clock.updated = clock.iteration, False
            self.passes.clear()

    def end(self, result: Any) -> None:
        """A forward has ended. Note when its result's gradients arrive: then its layers may be recomputed."""
        if self.of_shapes:
            self.of_shapes, self.clock.twin = False, None
            return
        if self.clock.twin or transformed():
            return
        moment, arrived = self.moment(), self.clock.arrived
        self.clock.evaluating = False
        if moment is None:
            return
        if len(arrived) > 2 * IN_FLIGHT or any(past_moment.iteration != moment.iteration for past_moment in arrived):
            arrived.clear()

        def note(*_: Any) -> None:
            arrived.pop(moment, None)
            arrived[moment] = None

        for node in {x.grad_fn for x in tensors_in(result) if x.grad_fn is not None}:
            node.register_prehook(note)


def parameters_of(optimizer: Optimizer) -> Iterator[Any]:
    """What an optimizer updates, of all its groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def infers_shapes() -> bool:
    """Whether torch.distributed.pipelining runs a stage on memory that nothing was written to, to learn its shapes."""
    return PIPELINE in sys.modules and running(lambda code: code.co_name in INFERENCES)


def _as_it_is(_: Any) -> Call:
    """A call that is neither rounded nor recorded."""
    return Call(Rounding(GemmFormats()))


def gradient_of(weight: nn.Parameter) -> Tensor | None:
    """The gradient that an optimizer sees of a parameter: Megatron's main_grad, where there is one."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    return weight.grad if main is None else main


def backward_pass() -> int:
    """The number of the backward pass within which this code runs; -1 outside of one."""
    return torch._C._current_graph_task_id()


def running_backward() -> bool:
    """Whether this code runs within a backward pass, in which any forward pass is a recomputation."""
    return backward_pass() != -1


def checkpoint_frame() -> object | None:
    """What torch.utils.checkpoint (use_reentrant=False) knows of the innermost checkpoint that runs: the same object in
    the first pass and when that is computed again. None outside of one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack: Any = inspect.unwrap(hooks[0]) if hooks else None
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint" or pack.__closure__ is None:
        return None
    held = dict(zip(pack.__code__.co_freevars, (cell.cell_contents for cell in pack.__closure__), strict=True))
    target = held.get("target_frame_ref")
    return held.get("frame") if target is None else target()


def repeated_frame() -> object | None:
    """The same of the innermost checkpoint that is computed again, within which new checkpoints may begin."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None:
        if caller.f_code.co_name == "unpack_hook" and caller.f_globals.get("__name__") == "torch.utils.checkpoint":
            return caller.f_locals.get("frame")
        caller = caller.f_back
    return None


def seed_of(*place: object) -> int:
    """A seed for the random numbers of a place, below 2^29: a product derives six seeds of 32 bits from it."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=4).digest()) >> 3


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

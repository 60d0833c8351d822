"""All layers of a model, as the adapters find them. `find` refuses modules that it cannot intercept, and names them:
nothing is left out silently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import nn

from binade.collector.capture.adapters import declared, engine, hugging_face, megatron, own, torch_modules
from binade.collector.capture.adapters.attention import WrittenMode
from binade.collector.capture.adapters.declared import Equations
from binade.collector.capture.adapters.first_pass import FirstPass
from binade.collector.capture.adapters.layer import (
    Attach,
    Detach,
    InstrumentError,
    Layer,
    Refused,
    distinct,
    eagerly,
    is_instrumented,
    refusal,
    set_on,
    together,
)
from binade.collector.capture.adapters.torch_modules import is_compiled
from binade.collector.capture.adapters.towers import placed
from binade.collector.capture.clock import PassCounter, running_backward

EXCLUDED = "excluded"


@dataclass(frozen=True)
class Survey:
    """The modules of a model, as the adapters classify them.

    layers    those that are intercepted
    left      the modules that stay as they are on purpose, with the reason
    refused   the names of those that cannot be intercepted, with the reason
    unseen    the modules whose attention cannot be intercepted and is not quantized, with the reason
    heads     the LM heads among those that are left
    watched   whether the first forward pass is watched for products that no adapter intercepts
    seen      counts the products that were seen in kernels; None if these are not watched
    """

    layers: tuple[Layer, ...]
    left: dict[nn.Module, str]
    refused: dict[str, str]
    unseen: dict[nn.Module, str]
    heads: tuple[Layer, ...]
    watched: bool
    seen: Callable[[], int] | None = None


def survey(
    model: nn.Module,
    exclude: Sequence[str] = (),
    head: bool = False,
    cores: Sequence[str] = (),
    products: Mapping[str, Equations] = {},
    attention: bool = True,
) -> Survey:
    """The layers of a model, each with a site of its own where its path gives it one.

    exclude     paths of modules, * for any letters, that are neither quantized nor recorded
    head        whether the LM head is a layer too
    cores       paths of modules whose forward is an attention core in two products of its own
    products    einsum equations of products, by paths of the modules that make them
    attention   whether the recipe quantizes attention: then what cannot be intercepted of it is refused

    Raises InstrumentError for a pattern that no module has, for an equation that is not one of a product, and for a
    model that is instrumented already, or in which two modules have the same path.
    """
    ours = list(own.find(model))
    if ours and head:
        raise InstrumentError("the LM head of collector's own models stays in bf16: leave head=True out")
    modules = modules_of(model)
    for option, patterns in (("exclude", exclude), ("cores", cores), ("products", products)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in modules):
                raise InstrumentError(
                    f"{option}={pattern!r} matches no module of {type(model).__name__}: give a module path, in which * "
                    "matches any part"
                )
    left = {
        module: EXCLUDED for name, module in modules.items() if any(fnmatchcase(name, pattern) for pattern in exclude)
    }
    named = [name for name in modules if any(fnmatchcase(name, pattern) for pattern in cores)]
    written = (torch_modules.core_layer(name, modules[name], WrittenMode) for name in named)
    equations = declared.find(modules, products)
    layers: dict[tuple[nn.Module, str], Layer] = {}
    refused: dict[str, str] = {}
    unseen: dict[nn.Module, str] = {}
    heads: dict[nn.Module, Layer] = {}
    adapters = (megatron, engine, hugging_face, torch_modules)
    for candidate in chain(ours, written, equations, *(adapter.find(model) for adapter in adapters)):
        if isinstance(candidate, Refused):
            module = modules[candidate.name]
            if candidate.is_core and (not attention or candidate.name in named):
                unseen[module] = candidate.reason
            elif module not in left:
                refused[candidate.name] = candidate.reason
        elif candidate.is_head and not head:
            if left.setdefault(candidate.module, "LM head, unless head=True") != EXCLUDED:
                heads.setdefault(candidate.module, candidate)
        elif is_instrumented(candidate.module):
            raise InstrumentError(
                f"{candidate.name or 'the model'} is already instrumented: exit that `with` block first"
            )
        elif any(left.get(module) == EXCLUDED and names_weight(module, candidate) for module, _ in candidate.others):
            left.setdefault(candidate.module, "an excluded module multiplies by its weight")
        elif candidate.module not in left:
            attached = [candidate.attach, *(attach for module, attach in candidate.others if module not in left)]
            layers.setdefault(
                (candidate.module, candidate.part), replace(candidate, attach=partial(_attach_all, attached))
            )
    return Survey(
        distinct(placed(modules, list(layers.values()))), left, refused, unseen, tuple(heads.values()), watched=not ours
    )


def names_weight(module: nn.Module, layer: Layer) -> bool:
    """Whether a module that contains the layer names it in an operand of a product, as in `self.dt_proj.weight @ x`."""
    return torch_modules.multiplies_by(module, layer.name.rpartition(".")[2])


def _attach_all(attached: Sequence[Attach], begin: Any) -> Detach:
    return together(*(attach(begin) for attach in attached))


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by path. Raises InstrumentError if two have the same one: names may contain dots."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if modules.setdefault(name, module) is not module:
            raise InstrumentError(
                f"two modules of {type(model).__name__} have the path {name!r}, since a name may contain dots: rename "
                "one of them"
            )
    return modules


def find(model: nn.Module, see: Callable[[Survey], Survey] = lambda found: found, **options: Any) -> Survey:
    """`survey`, as `see` changes it. Raises InstrumentError as it does, for modules that cannot be intercepted, all of
    them in one line, and if there is nothing to instrument."""
    model_survey = see(survey(model, **options))
    if model_survey.refused:
        reasons = {name: f"cannot be intercepted: {reason}" for name, reason in model_survey.refused.items()}
        raise InstrumentError(refusal(dict(model.named_modules()), reasons))
    if not model_survey.layers:
        raise InstrumentError(
            f"{type(model).__name__} has no layer to instrument: no linear layer or attention of collector, "
            "megatron.core, transformers or torch.nn"
        )
    return model_survey


@contextmanager
def around_forward(
    model: nn.Module, layers: Sequence[Layer], passes: PassCounter | None, first: FirstPass | None
) -> Iterator[None]:
    """A context in which the model's forward passes and updates are counted, and its first pass is watched. If the
    training loop calls parts of the model that contain these layers, a pass consists of those."""
    forward: Callable[..., Any] = model.forward
    parts = Parts(model, layers, passes, first)

    @wraps(forward)
    def passing(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # by model.compile(), once nothing is recorded: such passes are not counted
            return forward(*args, **kwargs)
        parts.begin(model, args, kwargs)
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            parts.end(model, args, None)
            raise
        parts.end(model, args, result)
        return result

    with ExitStack() as undo:
        undo.callback(set_on(model, "forward", passing))
        undo.callback(parts.close)
        if passes:
            undo.enter_context(passes.following_updates())
        yield


class Parts:
    """Notices the calls of a model, and of parts of it that do not come from the model's own forward. After a forward
    pass of the whole model in training, the training loop calls that: the parts are left alone.

    outermost  the module whose forward runs
    running    what is entered while it runs
    seen       the modules whose first pass was watched
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], passes: PassCounter | None, first: FirstPass | None
    ) -> None:
        self.model, self.passes, self.first = model, passes, first
        self.outermost: nn.Module | None = None
        self.running = ExitStack()
        self.seen: set[nn.Module] = set()
        modules = dict(model.named_modules())
        # The first call of a pass gets its data: the tokens enter an embedding.
        names = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
        pieces = (name.split(".") for name in chain(names, (layer.name for layer in layers)) if passes or first)
        paths = {".".join(path[:length]) for path in pieces for length in range(1, len(path) + 1)}
        self.handles = [
            handle
            for name, module in modules.items()
            if name in paths and module is not model and not isinstance(module, torch.jit.ScriptModule)
            for handle in (
                module.register_forward_pre_hook(ModuleHook(self.begin), with_kwargs=True),
                module.register_forward_hook(ModuleHook(self.end), always_call=True),
            )
        ]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.outermost is not None or running_backward():
            return
        if self.passes:
            self.passes.begin(module, (args, kwargs))
        self.outermost = module
        self.running.callback(setattr, self, "outermost", None)
        if self.first and module not in self.seen:
            self.running.enter_context(self.first)

    def end(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if self.outermost is not module:
            return
        failed = sys.exc_info() if result is None else (None, None, None)
        self.running.__exit__(*failed)
        if failed[0]:
            return
        self.seen.add(module)
        if self.passes:
            self.passes.end(result)
        if module is self.model and module.training and torch.is_grad_enabled():
            self.close()


class ModuleHook:
    """A hook of a module, which a copy of the module does not have. sees_products: whether it belongs to what sees the
    module's products."""

    def __init__(self, function: Callable[..., Any], *, sees_products: bool = False) -> None:
        self.function, self.sees_products = function, sees_products

    def __call__(self, *args: Any) -> Any:
        return None if torch.compiler.is_compiling() else self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_nothing,)


def _nothing(*_: Any) -> None:
    """What a hook of a copy does."""


@contextmanager
def without_compiling(model: nn.Module, wanted: Callable[[], bool]) -> Iterator[None]:
    """A context in which, while `wanted` says so, a model runs as its original Python code, whose products can be
    intercepted, and so does what it calls, whether or not it is compiled. Other compiled functions stay compiled.

    Compiled modules are replaced on their own, too: when activations are recomputed, no forward of the model runs.
    """
    with ExitStack() as undo:
        for module in model.modules():
            if module is model or is_compiled(module):
                undo.callback(set_on(module, "forward", _while(wanted, module.forward)))
            if module._compiled_call_impl is not None:
                undo.callback(set_on(module, "_compiled_call_impl", _while(wanted, module._compiled_call_impl)))
        yield


def _while(wanted: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    eager = eagerly(function)

    @wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return eager(*args, **kwargs) if wanted() else function(*args, **kwargs)

    return chosen

"""Adapters: they find the matrix products of a model and replace them by ours, without changes to its source.

    layer.py          what an adapter returns for each layer: its site, its shards, how to attach and detach
    products.py       one product: as the model computes it with a tap, or quantized
    attention.py      functions of torch replaced while an attention core runs
    own.py            collector's ParallelLinear and CoreAttention
    megatron.py       megatron.core's ColumnParallelLinear, RowParallelLinear, routers and DotProductAttention
    hugging_face.py   transformers: the attention interface, Conv1D, the LM head
    torch_modules.py  nn.Linear, and modules that call F.scaled_dot_product_attention
    passes.py         which forward pass a call belongs to: micro-batch, recomputation
    watch.py          the first forward pass, watched for products that no adapter intercepts

`find` calls them all. It refuses modules that it cannot intercept by name: nothing is left out silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from itertools import chain
from typing import Any

from torch import nn

from binade.collector.capture.adapters import hugging_face, megatron, own, torch_modules
from binade.collector.capture.adapters.layer import InstrumentError, Layer, Refused, distinct, is_instrumented, set_on
from binade.collector.capture.adapters.passes import Clock, running_backward
from binade.collector.capture.adapters.watch import Watch


@dataclass(frozen=True)
class Found:
    """The layers of a model, the modules that stay as they are on purpose, and whether the first forward pass is
    watched for products that no adapter intercepts."""

    layers: tuple[Layer, ...]
    excluded: frozenset[nn.Module]
    watched: bool


def find(model: nn.Module, exclude: Sequence[str] = (), head: bool = False) -> Found:
    """The layers of a model, each with a site of its own where its path gives it one.

    exclude paths of modules, * for any letters, that are neither quantized nor recorded
    head     whether the LM head is a layer too

    Raises InstrumentError for a pattern that no module has, for modules that cannot be intercepted, each with its
    reason, and if there is nothing to instrument.
    """
    ours = list(own.find(model))
    if ours and head:
        raise InstrumentError("the LM head of collector's own models stays in bf16: leave head=True out")
    modules = dict(model.named_modules())
    excluded = {module for name, module in modules.items() if any(fnmatchcase(name, each) for each in exclude)}
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise InstrumentError(
                f"exclude={pattern!r} matches no module of {type(model).__name__}: give a path, * for any part"
            )
    layers: dict[nn.Module, Layer] = {}
    refused: dict[str, str] = {}
    for each in chain(ours, *(adapter.find(model) for adapter in (megatron, hugging_face, torch_modules))):
        if isinstance(each, Refused):
            if modules[each.name] not in excluded:
                refused[each.name] = each.reason
        elif each.is_head and not head:
            excluded.add(each.module)
        elif is_instrumented(each.module):
            raise InstrumentError(f"{each.name or 'the model'} is instrumented already: leave that block first")
        elif each.module not in excluded:
            layers.setdefault(each.module, each)
    if refused:
        raise InstrumentError("; ".join(_refusals(modules, refused)))
    if not layers:
        raise InstrumentError(
            f"{type(model).__name__} has no layer to instrument: no linear layer or attention of collector, "
            "megatron.core, transformers or torch.nn"
        )
    return Found(distinct(list(layers.values())), frozenset(excluded), watched=not ours)


def _refusals(modules: dict[str, nn.Module], refused: dict[str, str]) -> Iterator[str]:
    """A sentence for each kind of module and reason, with the patterns of `exclude` that leave these modules out."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, reason in refused.items():
        kinds.setdefault((type(modules[name]).__name__, reason), []).append(name)
    for (kind, reason), names in kinds.items():
        patterns = list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names))
        shown = names[0] or "the model"
        more = f" and {len(names) - 1} more" * (len(names) > 1)
        yield f"{shown}{more} ({kind}) cannot be intercepted: {reason}, or leave out on purpose with exclude={patterns}"


@contextmanager
def around_forward(model: nn.Module, clock: Clock | None, watch: Watch | None) -> Iterator[None]:
    """Within it, the model's forward passes and updates are counted, and its first pass is watched."""
    forward: Callable[..., Any] = model.forward

    @wraps(forward)
    def passing(*args: Any, **kwargs: Any) -> Any:
        nonlocal watch
        if clock:
            clock.begin((args, kwargs))
        if running_backward():
            return forward(*args, **kwargs)
        with watch or nullcontext():
            result = forward(*args, **kwargs)
        watch = None
        if clock:
            clock.end(result)
        return result

    with ExitStack() as undo:
        undo.callback(set_on(model, "forward", passing))
        if clock:
            undo.enter_context(clock.following_updates())
        yield

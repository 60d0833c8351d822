"""Instrumenting a model that somebody else's program builds: Megatron-LM's pretrain() is given a function for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn

from binade.collector.capture.instrument import instrument
from binade.collector.capture.recorder import Recorder
from binade.collector.recipes.recipe import Recipe

Provider = Callable[..., nn.Module]


@contextmanager
def instrument_provider(
    provider: Provider,
    recipe: Recipe | str | None = None,
    *,
    root: str | Path | None = None,
    iterations: int | None = 1,
    micro_batches: int | None = 1,
    config: dict[str, Any] | None = None,
    scores: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[Provider]:
    """The provider, but what it builds is instrumented, and recorded as a run that begins with the first model built
    and ends with this context. Called several times (a virtual pipeline's chunks), all of it is one run.

    recipe, options              as `instrument` takes them; the environment's CUSTOM_QUANT_TYPE if none is given
    root, config, scores         as Recorder takes them
    iterations, micro_batches    how many are recorded, from the first on; None for all

    Raises what `instrument` and Recorder raise, from the provider's call. Every rank calls it.
    """
    given = {"model": "megatron"} | (config or {})
    recorder: Recorder | None = None
    over: SystemExit | None = None
    with ExitStack() as running:

        @wraps(provider)
        def build(*args: Any, **kwargs: Any) -> nn.Module:
            nonlocal recorder
            model = provider(*args, **kwargs)
            if recorder is None:
                made = Recorder(
                    root,
                    label=str(given["model"]),
                    config=given,
                    iterations=iterations,
                    micro_batches=micro_batches,
                    scores=scores,
                )
                recorder = running.enter_context(made)
            running.enter_context(instrument(model, recipe, recorder, **options))
            return model

        try:
            yield build
        except SystemExit as end:  # how Megatron-LM ends at its exit interval
            if end.code:
                raise
            over = end
    if over is not None:
        raise over

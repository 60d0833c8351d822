"""Instruments a model that another program builds: Megatron-LM's pretrain() takes a function that builds the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

from torch import nn

from binade.collector.capture.instrument import instrument
from binade.collector.capture.recorder import Recorder
from binade.collector.recipes.recipe import Recipe
from binade.collector.settings import DEFAULT_SCORES

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
    scores: Sequence[str] = DEFAULT_SCORES,
    **options: Any,
) -> Iterator[Provider]:
    """Context manager that wraps a Megatron model provider.

    The models that the provider builds (several for the chunks of a virtual pipeline) are instrumented and recorded as
    one run. The run begins when the first model is built and ends when the context exits. Every rank must call it.

    Args:
        provider: Megatron's model provider.
        recipe: See `instrument`. The default is $CUSTOM_QUANT_TYPE.
        root: See `Recorder`.
        iterations: The number of iterations to record, from the first on; None for all.
        micro_batches: The number of micro-batches to record in each; None for all.
        config: See `Recorder`.
        scores: See `Recorder`.
        **options: Further options of `instrument`.

    The call of the provider raises the errors of `instrument` and `Recorder`.
    """
    given = {"model": "megatron"} | (config or {})
    start = partial(Recorder, root, config=given, scores=scores, iterations=iterations, micro_batches=micro_batches)
    recorder: Recorder | None = None
    success: SystemExit | None = None
    with ExitStack() as contexts:

        @wraps(provider)
        def build(*args: Any, **kwargs: Any) -> nn.Module:
            nonlocal recorder
            model = provider(*args, **kwargs)
            if recorder is None:
                recorder = contexts.enter_context(start(label=str(given["model"])))
            contexts.enter_context(instrument(model, recipe, recorder, **options))
            return model

        try:
            yield build
        except SystemExit as error:  # Megatron-LM exits this way at its exit interval: the run is complete
            if error.code:
                raise
            success = error
    if success is not None:
        raise success

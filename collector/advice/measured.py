"""Advice from an experiment that measures what it needs, then evaluates the advised recipe whole."""

from __future__ import annotations

from pathlib import Path

from binade.collector.advice.advice import Advice, AdviceRequest, bits_of, read_advice
from binade.collector.errors import AdviceError
from binade.collector.experiment.experiment import ExperimentRequest, begun_experiment
from binade.collector.experiment.runner import Progress, Say
from binade.collector.experiment.source import ExperimentSource
from binade.collector.experiment.treatments import treatments_of


def measured_advice(
    source: ExperimentSource,
    request: AdviceRequest,
    root: Path,
    *,
    say: Say = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Advice:
    """Measure each group of the request in its formats, of which it has some, choose, and evaluate what is advised as
    one more treatment, of all products. Raises as `read_advice` and `begun_experiment`."""
    least = min(map(bits_of, request.formats))
    if request.bits is not None and request.bits < least:
        raise AdviceError(f"a budget of {request.bits:g} bits cannot be met: the narrowest format takes {least:g} bits")
    by = ("part",) if request.by == "model" else ("part", request.by)
    experiment = ExperimentRequest(source, request.formats, by, request.parts)
    with begun_experiment(experiment, root, say=say, progress=progress) as begun:
        evaluator = begun.opened.evaluator
        begun.evaluate(experiment.treatments(evaluator))
        advice = read_advice(begun.directory, request)
        if not advice.rounds or advice.whole is not None:
            return advice
        name = f"advised under {request.limit} by {request.by}"
        begun.evaluate(treatments_of(evaluator.products, {name: advice.recipe(name)}, ("model",)))
        return read_advice(begun.directory, request)

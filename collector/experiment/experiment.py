"""An experiment on a model of `binade run`, as a run on disk: `binade measure`, `binade parity` and `binade advise`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from binade.collector.capture.instrument import quantizes_attention
from binade.collector.experiment.evaluator import Evaluator
from binade.collector.experiment.measure import check_requested, rounds_attention
from binade.collector.experiment.runner import Progress, Say, estimate, record
from binade.collector.experiment.source import ExperimentSource, OpenedSource, open_source
from binade.collector.experiment.treatments import Key, Treatment, base_of, recipes_of, replayed, treatments_of
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe
from binade.data.run.continued import continued_run
from binade.data.run.experiment import EXPERIMENT, SAME, BatchResult, read_results
from binade.data.run.run_writer import RunWriter


@dataclass(frozen=True)
class ExperimentRequest:
    """What to evaluate, and under which treatments.

    formats   formats, specs or recipes
    by        granularities, see `treatments.BY`
    parts     of recipes; all if empty
    training  the recipe that everything else is rounded by, where the only format is that of a rollout and both are
              compared token by token; None for no rounding
    operands  whether the operands of each group are changed one at a time as well
    blocks    whether the errors of the blocks' outputs are measured, of parts and the model
    """

    source: ExperimentSource
    formats: tuple[str, ...]
    by: tuple[str, ...] = ("part", "site")
    parts: tuple[str, ...] = ("linear",)
    training: str | None = None
    operands: bool = False
    blocks: bool = False

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Raises RecipeError and SpecError."""
        return recipes_of(self.formats)

    @property
    def attention(self) -> bool:
        """Whether products of attention are rounded."""
        if self.training is None:
            return rounds_attention(self.by, self.parts)
        return any(quantizes_attention(recipe) for recipe in (*self.recipes.values(), parse_recipe(self.training)))

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json says of it besides the source."""
        if self.training is None:
            return {}
        ((rollout, recipe),) = self.recipes.items()
        measures: dict[str, Any] = {
            "rollout": recipe.lines(),
            "training": parse_recipe(self.training).lines(),
            "by": list(self.by),
        }
        measures |= {"operands": self.operands, "sequences": self.source.sequences}
        compares = f"{rollout} against {self.training}"
        return {"rollout": rollout, "training": self.training, "compares": compares, "measures": measures}

    def treatments(self, evaluator: Evaluator) -> list[Treatment]:
        """The treatments, in their order. Raises ConfigError as `treatments_of`, and RecipeError for modules that the
        model lacks."""
        products, recipes = evaluator.products, self.recipes
        if self.training is None:
            return treatments_of(products, recipes, self.by, parts=self.parts, keeps_blocks=self.blocks)
        ((text, recipe),) = recipes.items()
        training = self.training, parse_recipe(self.training)
        return parity_treatments(products, (text, recipe), training, self.by, self.operands)


def parity_treatments(
    products: Sequence[Key],
    rollout: tuple[str, Recipe],
    training: tuple[str, Recipe],
    by: Sequence[str],
    operands: bool = False,
) -> list[Treatment]:
    """The treatments that compare two policies token by token: all products as in the rollout, then one group at a
    time; on a model with routers, training with the experts of the rollout as well. rollout, training: the text
    of a recipe, and the recipe. Raises as `ExperimentRequest.treatments`."""
    for _, recipe in (rollout, training):
        recipe.check_modules(site for site, _ in products)
    routes = any(site.is_router for site, _ in products)
    base = base_of(*training, products, keeps_tokens=True, keeps_routes=routes)
    treatments = treatments_of(
        products, dict([rollout]), ("model", *by), base=base, operands=operands, keeps_tokens=True
    )
    if routes:
        treatments.append(replayed(base, base_of(*rollout, products, keeps_tokens=True, keeps_routes=True)))
    return treatments


@dataclass(frozen=True, eq=False)
class Finished:
    """A run, its results of the requested treatments, and its source in words."""

    directory: Path
    results: Sequence[BatchResult]
    described: tuple[str, str]

    @property
    def run_id(self) -> str:
        return self.directory.name


@dataclass(frozen=True, eq=False)
class Begun:
    """An experiment whose run is open."""

    writer: RunWriter
    opened: OpenedSource
    say: Say
    progress: Progress

    @property
    def directory(self) -> Path:
        return self.writer.directory

    def evaluate(self, treatments: Sequence[Treatment]) -> Finished:
        """Evaluate what the run does not have yet. Raises OSError, RunError."""
        evaluator, batches = self.opened.evaluator, self.opened.batches
        sizes = [len(tokens) for tokens, _ in batches]
        results = record(self.writer, evaluator, batches, treatments, sizes=sizes, say=self.say, progress=self.progress)
        return Finished(self.directory, results, self.opened.described)


@contextmanager
def begun_experiment(
    request: ExperimentRequest,
    root: Path,
    *,
    say: Say = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Iterator[Begun]:
    """A context with the run of an experiment in this root, or what is left of it.

    Raises ConfigError and its like before anything is written; later OSError or KeyboardInterrupt, with the run marked
    accordingly: the same call continues it."""
    _check(request)
    label = f"{'measure' if request.training is None else 'parity'}_{request.source.plan.config.model_name}"
    with open_source(request.source, request.attention) as opened:
        for text in opened.described:
            say(text)
        request.treatments(opened.evaluator)  # raises before anything is written
        facts = opened.facts | request.facts | {"kind": EXPERIMENT}
        facts["measures"] = opened.facts["measures"] | request.facts.get("measures", {})
        with continued_run(root, label, facts, SAME, "results are being measured") as (writer, _):
            known = sum(result.key.base is not None for result in read_results(writer.directory))
            say(f"run {writer.run_id}" + (f", continued after {known} measurements" if known else ""))
            yield Begun(writer, opened, say, progress)


def run_experiment(
    request: ExperimentRequest,
    root: Path,
    *,
    say: Say = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Finished:
    """Evaluate the treatments of a request. Raises as `begun_experiment`."""
    with begun_experiment(request, root, say=say, progress=progress) as begun:
        return begun.evaluate(request.treatments(begun.opened.evaluator))


def estimate_experiment(request: ExperimentRequest, *, say: Say) -> tuple[int, float]:
    """(how many passes it takes, about how many seconds), from a pass without rounding and one with."""
    _check(request)
    with open_source(request.source, request.attention) as opened:
        for text in opened.described:
            say(text)
        return estimate(opened.evaluator, opened.batches, request.treatments(opened.evaluator))


def _check(request: ExperimentRequest) -> None:
    """Raise ConfigError and its like for what cannot be measured, before a model is read."""
    check_requested(request.by, request.parts)
    recipes_of((*request.formats, *([request.training] if request.training else [])))

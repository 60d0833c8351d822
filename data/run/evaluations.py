"""What a run evaluates while it trains: held-out sequences, and one micro-batch with and without the recipe.

Both are readings of the results of its experiment (data/run/experiment.py): the treatment is the run's own recipe, on
the weights of an iteration.

A twin step compares gradients. With g the gradient without the recipe and ĝ the gradients of M passes with it, for each
parameter, and for those of each layer and all of them as one vector:

    bias            ‖mean(ĝ) − g‖ / ‖g‖
    bias_corrected  the root of bias² − variance / M, which is the square of the bias without the noise of M passes
    bias_error      its standard error, from products of the errors of independent pairs of passes
    variance        Σ‖ĝ − mean(ĝ)‖² / (M − 1) / ‖g‖², an unbiased estimate
    variance_error  its standard error
    cosine          of g and ĝ, the mean over the passes

A recipe that draws no random numbers has one pass, variance 0 and no errors: its bias is exact for the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from binade.data.run.directory import RunError
from binade.data.run.effects import rounded_by
from binade.data.run.experiment import (
    EXPERIMENT,
    NONE,
    TWIN_STEP,
    BatchResult,
    ExperimentWriter,
    TreatmentKey,
    experiment_files,
    read_results,
    read_rows,
)
from binade.data.run.json_files import STRICT, Whole
from binade.data.words.text import describe

STEP = "step"  # the name of all parameters together
# JSON has neither NaN nor infinity: both are written as null.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True, config=STRICT)
class HeldOut:
    """An evaluation with the recipe.

    iteration    how many iterations were trained with the recipe before it
    losses       of each sequence, in nats per token
    data_sha256  of the sequences
    tokens       that were trained before it, warm-up included; None if unknown
    """

    iteration: Whole
    losses: Annotated[tuple[Number, ...], Field(min_length=1)]
    data_sha256: str
    tokens: Whole | None = None


@dataclass(frozen=True, config=STRICT)
class GradientTwin:
    """What rounding does to the gradient of a parameter; None for what is unknown. layer_index, module and expert are
    as in the index; a layer has no module, and the whole step has none of them. norm: ‖g‖."""

    name: str
    layer_index: Whole | None
    module: str | None
    expert: Whole | None
    norm: Number
    bias: float | None = None
    bias_corrected: float | None = None
    bias_error: float | None = None
    variance: Annotated[float, Field(ge=0)] | None = None
    variance_error: float | None = None
    cosine: float | None = None


@dataclass(frozen=True, config=STRICT)
class Twin:
    """A twin step.

    loss        of the micro-batch, without the recipe; what training minimizes, with the experts' balance loss
    changes     the losses of the passes with the recipe, minus that one
    draws       whether the recipe draws random numbers; if not, there is one pass
    gradients   of the whole step, then one per layer, then one per parameter
    """

    iteration: Whole
    loss: Number
    changes: Annotated[tuple[Number, ...], Field(min_length=1)]
    draws: bool
    gradients: Annotated[tuple[GradientTwin, ...], Field(min_length=1)]

    @property
    def step(self) -> GradientTwin:
        return self.gradients[0]

    @property
    def layers(self) -> tuple[GradientTwin, ...]:
        return tuple(row for row in self.gradients[1:] if row.layer_index and row.module is None)

    @property
    def parameters(self) -> tuple[GradientTwin, ...]:
        return tuple(row for row in self.gradients[1:] if not row.layer_index or row.module is not None)


_FIELDS = tuple(field.name for field in fields(GradientTwin))


def own_recipe(config: Mapping[str, Any]) -> TreatmentKey:
    """The treatment of a run's own recipe. config: its run.json."""
    return TreatmentKey(str(config.get("recipe") or ""), rounded_by(config), base=NONE)


def add_held_out(
    writer: ExperimentWriter, recipe: TreatmentKey, evaluation: HeldOut, exact: Sequence[float] = ()
) -> None:
    """Add an evaluation to the results of a run. exact: the losses without the recipe, if they were measured. Raises
    OSError."""
    moment: dict[str, Any] = {"iteration": evaluation.iteration, "data": evaluation.data_sha256}
    for key, losses in ((NONE, tuple(exact)), (recipe, evaluation.losses)):
        if losses:
            writer.add(BatchResult(key, 0, losses, (None,) * len(losses), **moment, trained=evaluation.tokens))


def add_twin(writer: ExperimentWriter, recipe: TreatmentKey, twin: Twin) -> None:
    """Add a twin step to the results of a run. Raises OSError."""
    moment: dict[str, Any] = {"iteration": twin.iteration, "data": TWIN_STEP}
    passes = (None,) * len(twin.changes)
    writer.add(BatchResult(NONE, 0, (twin.loss,) * len(passes), passes, **moment))
    losses = tuple(twin.loss + change for change in twin.changes)
    rows = [asdict(row) | {"iteration": twin.iteration, "draws": twin.draws} for row in twin.gradients]
    writer.add(BatchResult(recipe, 0, losses, passes, **moment), rows)


def read_held_out(directory: Path) -> dict[int, HeldOut]:
    """The evaluations of held-out sequences of a run, by iteration, the last one of each. Raises RunError for a damaged
    file, and OSError."""
    evaluations: dict[int, HeldOut] = {}
    for result in read_results(directory):
        if result.iteration is not None and result.data != TWIN_STEP and result.key.base:
            with _checked():
                evaluation = HeldOut(result.iteration, result.losses, result.data, result.trained)
            evaluations[result.iteration] = evaluation
    return dict(sorted(evaluations.items()))


def read_twins(directory: Path) -> list[Twin]:
    """The twin steps of a run, by iteration, the last one of each. Raises RunError for a damaged file, and OSError."""
    twins: dict[int, Twin] = {}
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in read_rows(directory, "gradients"):
        if row["name"] == STEP:
            rows[row["iteration"]] = []
        rows.setdefault(row["iteration"], []).append(row)
    exact: dict[int, float] = {}
    for result in read_results(directory):
        at = result.iteration
        if at is None or result.data != TWIN_STEP:
            continue
        if not result.key.base:
            exact[at] = result.losses[0]
            continue
        with _checked():
            changes = tuple(loss - exact[at] for loss in result.losses)
            gradients = tuple(GradientTwin(**{name: row[name] for name in _FIELDS}) for row in rows[at])
            twins[at] = Twin(at, exact[at], changes, rows[at][0]["draws"], gradients)
    return [twins[iteration] for iteration in sorted(twins)]


@contextmanager
def _checked() -> Iterator[None]:
    """A context in which rows that are no evaluation, as of a file that another program wrote, raise RunError."""
    try:
        yield
    except (ValueError, KeyError) as error:
        raise RunError(f"its {EXPERIMENT} is damaged: {describe(error)}") from None


def has_twins(directory: Path) -> bool:
    """Whether a run has files of twin steps."""
    return any(name.startswith(f"{EXPERIMENT}/gradients") for name in experiment_files(directory))

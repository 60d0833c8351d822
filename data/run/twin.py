"""Twin steps: what a recipe does to one micro-batch on the same weights. One line per step in a run's twin.jsonl.

With g the gradient without the recipe and ĝ the gradients of M passes with it, for each parameter, and for those of
each layer and all of them as one vector:

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
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from binade.data.run.directory import Whole, append_line, check_lines, lines_of
from binade.data.run.json_files import STRICT, adapter_of, parse_json, unsealed

STEP = "step"  # the name of all parameters together
FILE = "twin.jsonl"
# JSON has neither NaN nor infinity: both are written as null.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


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


def append_twin(directory: Path, twin: Twin) -> None:
    """Add a twin step to a run, as its only writer. Raises OSError."""
    append_line(directory / FILE, adapter_of(Twin).dump_json(twin))


def read_twins(directory: Path) -> list[Twin]:
    """The twin steps of a run, by iteration, the last one of each. The file is read up to the first line that is
    damaged or cut short; `check_twins` raises an error for it. Raises OSError."""
    twins: dict[int, Twin] = {}
    for line in lines_of(directory / FILE):
        try:
            twin = parse_json(Twin, unsealed(line))
        except ValueError:
            break
        twins[twin.iteration] = twin
    return [twins[iteration] for iteration in sorted(twins)]


def check_twins(directory: Path) -> None:
    """Raise RunError for a line that is not a twin step or has a wrong checksum, except for a last line that a crash
    cut short; OSError."""
    check_lines(directory / FILE, "twin step", lambda line: bool(parse_json(Twin, line)))

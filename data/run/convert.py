"""Converts what runs of earlier versions measured into experiments, for `binade verify --convert`.

Such a run has the kind "measure" and its results in effects.jsonl: a line for each format, group and batch. The kind
"parity" with its parity.json, which lacks the log-probabilities that a parity is computed from, is not converted.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from binade.data.run.access import check_writable
from binade.data.run.directory import RUNNING, RunError, Whole, describe_run, read_run, run_directories
from binade.data.run.evaluations import Number
from binade.data.run.experiment import EXPERIMENT, NONE, BatchResult, EffectGroup, ExperimentWriter, TreatmentKey
from binade.data.run.json_files import STRICT
from binade.data.run.records import RecordKind, read_lines
from binade.data.words.text import describe

FILE = "effects.jsonl"
Losses = Annotated[tuple[Number, ...], Field(min_length=1)]


@dataclass(frozen=True, config=STRICT)
class FormerEffect:
    """A line of effects.jsonl: the losses of one batch's sequences without rounding and with a group rounded."""

    batch: Whole
    format: str
    part: str
    layer_index: Whole | None
    module: str | None
    exact: Losses
    losses: Losses
    divergences: tuple[Number, ...] = ()
    seconds: float = 0.0
    recipe_sha256: str = ""

    @property
    def result(self) -> BatchResult:
        group = EffectGroup(self.part, self.layer_index, self.module)
        key = TreatmentKey(self.format, self.recipe_sha256, group, base=NONE)
        tokens = (None,) * len(self.losses)
        return BatchResult(key, self.batch, self.losses, tokens, self.divergences, (), self.seconds)


def convert_effects(root: Path, run_ids: tuple[str, ...] = ()) -> Iterator[tuple[str, str | None]]:
    """Convert these runs of a root, or all, and yield the name of each with why it was not converted, None if it was.
    Such a run is as before. Raises ReadOnlyError."""
    check_writable("converting runs")
    for directory in run_directories(root):
        if (run_ids and directory.name not in run_ids) or not (directory / FILE).exists():
            continue
        try:
            _convert(directory)
        except (RunError, OSError) as error:
            yield directory.name, describe(error)
        else:
            yield directory.name, None


def _convert(directory: Path) -> None:
    """Raises RunError for a file that is damaged, and OSError."""
    run = read_run(directory)
    if run.status.state == RUNNING:
        raise RunError("it is still running: convert it when it has ended")
    effects = _read(directory)
    bases = _bases(effects)
    shutil.rmtree(directory / EXPERIMENT, ignore_errors=True)
    writer = ExperimentWriter(directory, former=True)
    for (batch, size), exact in bases.items():
        writer.add(BatchResult(NONE, batch, exact, (None,) * size))
    for result in {(*effect.result.place, len(effect.losses)): effect.result for effect in effects}.values():
        writer.add(result)
    described: dict[str, Any] = {"kind": EXPERIMENT}
    measures = dict(run.config).get("measures")
    if isinstance(measures, dict) and not str(run.config.get("device", "cpu")).startswith("cpu"):
        described["measures"] = measures | {"device": "cuda"}
    describe_run(directory, described)
    (directory / FILE).unlink()  # last: a conversion that was interrupted begins again


def _bases(effects: list[FormerEffect]) -> dict[tuple[int, int], Losses]:
    """The losses without rounding by batch and number of sequences. Raises RunError if lines of one batch differ in
    them, as when they were measured on several devices: an experiment has one base."""
    bases: dict[tuple[int, int], Losses] = {}
    for effect in effects:
        if bases.setdefault((effect.batch, len(effect.exact)), effect.exact) != effect.exact:
            raise RunError(
                f"lines of batch {effect.batch} of its {FILE} have different losses without rounding, as from several "
                "devices. Run binade measure again"
            )
    return bases


def _read(directory: Path) -> list[FormerEffect]:
    """The lines of the file. A last line that a crash cut short is left out."""
    lines = read_lines(RecordKind("effect", FILE, FormerEffect, "effects"), directory, FILE)
    if lines.problem:
        raise RunError(lines.problem)
    return lines.values

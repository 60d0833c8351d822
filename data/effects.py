"""Measured effects: what rounding one group of products does to the loss, on the same weights and sequences.

One line per group and batch in a run's effects.jsonl. The run of a measurement has the kind MEASURE in its run.json,
and records no tensors. `merged` joins the batches; the index has the same rows in its table `effect`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from binade.data import evidence
from binade.data.evidence import Estimate, Measure
from binade.data.json_files import STRICT, adapter_of, parse_json, unsealed
from binade.data.runs import Whole, append_line, check_lines, lines_of
from binade.data.twin import Number

FILE = "effects.jsonl"
MEASURE = "measure"
CHANGE = Measure(
    "effect", "Measured loss change", "nats", "loss with the group rounded minus loss without, per token", format="+.3g"
)
DIVERGENCE = Measure(
    "divergence", "Divergence", "nats", "KL(p ‖ q) of the next token, p without rounding and q with, per token"
)


class EffectGroup(NamedTuple):
    """Products that are rounded together.

    part         linear, router, qk, pv or product; "" for all
    layer_index  None for all layers
    module       None for all modules
    """

    part: str = ""
    layer_index: int | None = None
    module: str | None = None

    def __str__(self) -> str:
        words = [f"layer{self.layer_index}" if self.layer_index is not None else "", self.module or "", self.part]
        return " ".join(filter(None, words)) or "all"


OfBatch = tuple[int, str, str, EffectGroup]


@dataclass(frozen=True, config=STRICT)
class Effect:
    """The losses of one batch's sequences, in nats per token.

    format       what the group was rounded to: the text of a spec or a recipe
    exact        the losses without rounding
    losses       the losses with the group rounded
    divergences  KL(p ‖ q) of the next token, the mean over a sequence's tokens; empty if logits were not known
    seconds      what the pass took
    recipe_sha256  of what `format` rounds, see `recipe_sha256`: a file of a recipe may change; "" if it is unknown
    """

    batch: Whole
    format: str
    part: str
    layer_index: Whole | None
    module: str | None
    exact: Annotated[tuple[Number, ...], Field(min_length=1)]
    losses: Annotated[tuple[Number, ...], Field(min_length=1)]
    divergences: tuple[Number, ...] = ()
    seconds: float = 0.0
    recipe_sha256: str = ""

    @property
    def group(self) -> EffectGroup:
        return EffectGroup(self.part, self.layer_index, self.module)

    @property
    def of_batch(self) -> OfBatch:
        """The batch, the format and the group that it is the measurement of."""
        return self.batch, self.format, self.recipe_sha256, self.group

    @property
    def changes(self) -> tuple[float, ...]:
        return tuple(loss - exact for loss, exact in zip(self.losses, self.exact, strict=True))


class Measured(NamedTuple):
    """The effect of a group over all sequences that were measured: in the order of the batches."""

    format: str
    group: EffectGroup
    exact: tuple[float, ...]
    changes: tuple[float, ...]
    divergences: tuple[float, ...]
    seconds: float
    recipe_sha256: str = ""

    @property
    def change(self) -> Estimate:
        """The mean change of the loss, with Student's interval over sequences."""
        return evidence.mean(CHANGE, self.changes, "sequences")

    @property
    def divergence(self) -> Estimate:
        """The mean divergence; NaN if it was not measured."""
        return evidence.mean(DIVERGENCE, self.divergences, "sequences")


def recipe_sha256(toml: str) -> str:
    """A hash of what the file of a recipe rounds: of its tables, without title, sources and layout. Raises ValueError
    and RecursionError for text that is not TOML."""
    tables = {name: value for name, value in tomllib.loads(toml).items() if _holds_tables(value)}
    return hashlib.sha256(json.dumps(tables, sort_keys=True, default=str).encode()).hexdigest()


def rounded_by(config: Mapping[str, Any]) -> str:
    """`recipe_sha256` of what a run rounds; "" if run.json does not say it, or if the run leaves layers out that its
    recipe does not."""
    if config.get("skip_layers") or not config.get("recipe_toml"):
        return ""
    with suppress(ValueError, RecursionError):
        return recipe_sha256(str(config["recipe_toml"]))
    return ""


def _holds_tables(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(entry, dict) for entry in value))


def merged(effects: Iterable[Effect]) -> list[Measured]:
    """The effects of each format and group, in the order in which they were first measured. A batch that occurs twice
    counts once. A file that has changed in between is another format."""
    batches: dict[tuple[str, str, EffectGroup], dict[int, Effect]] = {}
    for effect in effects:
        batches.setdefault((effect.format, effect.recipe_sha256, effect.group), {})[effect.batch] = effect
    rows = []
    for (fmt, sha256, group), by_batch in batches.items():
        measurements = [by_batch[number] for number in sorted(by_batch)]
        divergences = [value for effect in measurements for value in effect.divergences]
        complete = all(len(effect.divergences) == len(effect.losses) for effect in measurements)
        rows.append(
            Measured(
                fmt,
                group,
                tuple(value for effect in measurements for value in effect.exact),
                tuple(value for effect in measurements for value in effect.changes),
                tuple(divergences) if complete else (),
                math.fsum(effect.seconds for effect in measurements),
                sha256,
            )
        )
    return rows


def effect_rows(run_id: str, directory: Path) -> list[list[Any]]:
    """The rows of a run in the table `effect` of the index. Raises OSError."""
    return [
        [
            run_id,
            effect.format,
            effect.recipe_sha256 or None,
            effect.group.part or None,
            effect.group.layer_index,
            effect.group.module,
            len(effect.changes),
            math.fsum(effect.exact) / len(effect.exact),
            effect.change.value,
            None if math.isnan(effect.change.error) else effect.change.error,
            None if math.isnan(effect.divergence.value) else effect.divergence.value,
            list(effect.changes),
            list(effect.divergences) or None,
            effect.seconds,
        ]
        for effect in merged(read_effects(directory))
    ]


def append_effect(directory: Path, effect: Effect) -> None:
    """Add a measurement to a run, as its only writer. Raises OSError."""
    append_line(directory / FILE, adapter_of(Effect).dump_json(effect))


def read_effects(directory: Path) -> list[Effect]:
    """The measurements of a run. The file is read up to the first line that is damaged or cut short; `check_effects`
    raises an error for it. Raises OSError."""
    effects = []
    for line in lines_of(directory / FILE):
        try:
            effects.append(parse_json(Effect, unsealed(line)))
        except ValueError:
            break
    return effects


def continue_effects(directory: Path) -> list[Effect]:
    """The measurements of a run to which its only writer is about to add. A last line that a crash cut short is cut
    off. Raises as `check_effects`."""
    check_effects(directory)
    path, lines = directory / FILE, lines_of(directory / FILE)
    if lines and not lines[-1].endswith(b"\n"):
        os.truncate(path, sum(map(len, lines[:-1])))
    return read_effects(directory)


def check_effects(directory: Path) -> None:
    """Raise RunError for a line that is not a measurement or has a wrong checksum, except for a last line that a crash
    cut short; OSError."""
    check_lines(directory / FILE, "measurement", lambda line: bool(parse_json(Effect, line)))

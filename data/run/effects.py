"""Effects: how much the loss changes when one group of products is rounded, on the same weights and sequences.

A reading of the results of an experiment (data/run/experiment.py): treatment minus base, paired by sequence. The index
has the same rows in its table `effect`.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from binade.data.compare import evidence
from binade.data.compare.evidence import Estimate, Measure, Sentence
from binade.data.run.experiment import TWIN_STEP, BatchResult, EffectGroup, TreatmentKey, read_results

CHANGE = Measure(
    "effect", "Measured loss change", "nats", "loss with the group rounded minus loss without, per token", format="+.3g"
)
DIVERGENCE = Measure(
    "divergence", "Divergence", "nats", "KL(p ‖ q) of the next token, p without rounding and q with, per token"
)


class Measured(NamedTuple):
    """What a treatment changes over all sequences that were measured: in the order of the batches.

    changes      the losses minus those of the base, in nats per token; of two policies, see `parity_results`
    divergences  KL(base ‖ treatment) of the next token; () if logits were not known
    exact        the losses of the base
    seconds      what the passes took
    iteration    of the training whose weights these are; None for an experiment of its own
    data         what was evaluated while training, see BatchResult
    of_change, of_divergence  what these are
    """

    key: TreatmentKey
    changes: tuple[float, ...]
    divergences: tuple[float, ...]
    exact: tuple[float, ...] = ()
    seconds: float = 0.0
    iteration: int | None = None
    data: str = ""
    of_change: Measure = CHANGE
    of_divergence: Measure = DIVERGENCE

    @property
    def format(self) -> str:
        return self.key.text

    @property
    def group(self) -> EffectGroup:
        return self.key.group

    @property
    def name(self) -> str:
        """ "layer2 fc1 linear, weight"."""
        return f"{self.group}, {self.key.operand}" if self.key.operand else str(self.group)

    @property
    def change(self) -> Estimate:
        """The mean change, with Student's interval over sequences."""
        return evidence.mean(self.of_change, self.changes, "sequences")

    @property
    def divergence(self) -> Estimate:
        """The mean divergence; NaN if it was not measured."""
        return evidence.mean(self.of_divergence, self.divergences, "sequences")


def largest_of(groups: Sequence[Measured], what: str) -> Sentence:
    """Which group has the largest change, if sequences can tell; empty for one group or one sequence. what: "The
    largest effect"."""
    if len(groups) < 2 or min(len(each.changes) for each in groups) < 2:
        return Sentence()
    named = {each.name: dict(enumerate(each.changes)) for each in groups}
    return evidence.largest(named, groups[0].of_change, what, "sequences")


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


def measured_effects(results: Iterable[BatchResult]) -> list[Measured]:
    """The effect of each treatment, on each of the weights, in the order in which they were first measured. A
    result is compared with that of its base for the same sequences; without one it is left out. Of a batch that was
    measured in several sizes, the one with most sequences counts, since it has those of the others."""
    passes: dict[Any, dict[tuple[int, int], BatchResult]] = {}  # by batch and number of sequences
    for result in results:
        of = result.key, result.iteration, result.data
        passes.setdefault(of, {})[result.batch, len(result.losses)] = result
    rows = []
    for (key, *moment), own in passes.items():
        bases = passes.get((key.base, *moment), {})
        largest = {place[0]: place for place in sorted(own) if place in bases}
        pairs = [(own[place], bases[place]) for place in largest.values()]
        if not pairs:
            continue
        divergences = [value for result, _ in pairs for value in result.kl]
        complete = all(len(result.kl) == len(result.losses) for result, _ in pairs)
        rows.append(
            Measured(
                key,
                tuple(
                    loss - exact
                    for result, base in pairs
                    for loss, exact in zip(result.losses, base.losses, strict=True)
                ),
                tuple(divergences) if complete else (),
                tuple(loss for _, base in pairs for loss in base.losses),
                math.fsum(result.seconds for result, _ in pairs),
                *moment,
            )
        )
    return rows


def effect_rows(run_id: str, directory: Path) -> list[list[Any]]:
    """The rows of a run in the table `effect` of the index. Raises RunError and OSError."""
    return [
        [
            run_id,
            effect.format,
            effect.key.recipe_sha256 or None,
            effect.key.base.text or None if effect.key.base else None,
            effect.group.part or None,
            effect.group.layer_index,
            effect.group.module,
            None if effect.key.is_whole else effect.key.operand,
            effect.key.replays,
            len(effect.changes),
            math.fsum(effect.exact) / len(effect.exact),
            effect.change.value,
            None if math.isnan(effect.change.error) else effect.change.error,
            None if math.isnan(effect.divergence.value) else effect.divergence.value,
            list(effect.changes),
            list(effect.divergences) or None,
            effect.seconds,
            effect.iteration,
        ]
        for effect in measured_effects(read_results(directory))
        if effect.data != TWIN_STEP  # of passes, not of sequences
    ]

"""Own and inherited errors of blocks, a reading of the results of an experiment: where the error of a model's hidden
states begins, and which blocks only pass it on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from binade.data.compare import evidence
from binade.data.compare.evidence import Estimate, Measure, Sentence
from binade.data.run.experiment import BatchResult, BlockError, Place, TreatmentKey

ERROR = Measure(
    "block_error", "Error", "%", "‖ŷ − y‖ / ‖y‖ of a block’s output, with the inputs that it receives", format=".3g"
)
OWN = Measure(
    "own_error", "Own error", "%", "‖ŷ − y‖ / ‖y‖ of a block’s output, with its inputs without rounding", format=".3g"
)


class BlockErrors(NamedTuple):
    """The errors of a block's output under a treatment, of each sequence."""

    key: TreatmentKey
    layer_index: int
    errors: tuple[float, ...]
    own_errors: tuple[float, ...]

    @property
    def error(self) -> Estimate:
        """With the inputs that it receives; Student's interval over sequences."""
        return evidence.mean(ERROR, self.errors, "sequences")

    @property
    def own(self) -> Estimate:
        """With its inputs in the pass of the base."""
        return evidence.mean(OWN, self.own_errors, "sequences")


def block_errors(
    results: Iterable[BatchResult], blocks: Mapping[Place, Sequence[Sequence[BlockError]]]
) -> list[BlockErrors]:
    """The errors of each treatment's blocks, in the order of the model."""
    passes: dict[TreatmentKey, set[Place]] = {}
    for result in results:
        if result.place in blocks:
            passes.setdefault(result.key, set()).add(result.place)
    rows = []
    for key, places in passes.items():
        found: dict[int, list[BlockError]] = {}
        for error in (error for place in sorted(places) for sequence in blocks[place] for error in sequence):
            found.setdefault(error.layer_index, []).append(error)
        for layer, own in found.items():
            errors, own_errors = (tuple(values) for values in zip(*(each[1:] for each in own), strict=True))
            rows.append(BlockErrors(key, layer, errors, own_errors))
    return rows


def block_sentence(rows: Iterable[BlockErrors]) -> Sentence:
    """How large the error of the last block's output is, which errors blocks have of their own, and the largest of
    these, if sequences can tell. rows: of one treatment, in the order of the model."""
    each = list(rows)
    text = (
        "In {format}, the output of the last block has an error of {error}; with the inputs that they have without "
        "rounding, blocks have errors of {least.text} to {most.text}."
    )
    own = sorted((row.own for row in each), key=lambda estimate: estimate.value)
    said = [evidence.say(text, format=each[-1].key.text, error=each[-1].error, least=own[0], most=own[-1])]
    if len(each) > 1 and own[0].n > 1:
        items = {f"layer{row.layer_index}": dict(enumerate(row.own_errors)) for row in each}
        said.append(evidence.largest(items, OWN, f"The largest own error in {each[-1].key.text}", "sequences"))
    return evidence.together(*said)

"""Own and inherited errors of blocks, a reading of the results of an experiment: where the error of a model's hidden
states begins, and which blocks only pass it on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from binade.data.compare import evidence
from binade.data.compare.evidence import Estimate, Measure, Sentence
from binade.data.run.experiment import ALL_PRODUCTS, BatchResult, BlockError, Place

ERROR = Measure(
    "block_error", "Error", "%", "‖ŷ − y‖ / ‖y‖ of a block’s output, with the inputs that it receives", format=".3g"
)
OWN = Measure(
    "own_error", "Own error", "%", "‖ŷ − y‖ / ‖y‖ of a block’s output, with its inputs without rounding", format=".3g"
)


class BlockErrors(NamedTuple):
    """The errors of a block's output, of each sequence."""

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
) -> dict[str, list[BlockErrors]]:
    """The errors of the blocks, in the order of the model, by what is rounded: "linear in mxfp4". blocks: of the run,
    which may have more sequences of a batch than these results; those count that the largest result has."""
    sizes: dict[str, dict[Place, int]] = {}  # how many sequences
    for result in results:
        if result.place in blocks:
            group, text = result.key.group, result.key.text
            own = sizes.setdefault(text if group == ALL_PRODUCTS else f"{group} in {text}", {})
            own[result.place] = max(len(result.losses), own.get(result.place, 0))
    found: dict[str, list[BlockErrors]] = {}
    for name, own in sizes.items():
        sequences = [sequence for place in sorted(own) for sequence in blocks[place][: own[place]]]
        for errors in zip(*sequences, strict=True):  # of one block
            layers, received, alone = zip(*errors, strict=True)
            found.setdefault(name, []).append(BlockErrors(layers[0], received, alone))
    return found


def block_sentence(name: str, rows: Sequence[BlockErrors]) -> Sentence:
    """How large the error of the last block's output is, which errors blocks have of their own, and the largest of
    these, if sequences can tell. name: what is rounded; rows: in the order of the model."""
    text = (
        "With {name}, the output of the last block has an error of {error}; with the inputs that they have without "
        "rounding, blocks have errors of {least.text} to {most.text}."
    )
    own = sorted((row.own for row in rows), key=lambda estimate: estimate.value)
    said = [evidence.say(text, name=name, error=rows[-1].error, least=own[0], most=own[-1])]
    if len(rows) > 1 and own[0].n > 1:
        items = {f"layer{row.layer_index}": dict(enumerate(row.own_errors)) for row in rows}
        said.append(evidence.largest(items, OWN, f"The largest own error with {name}", "sequences"))
    return evidence.together(*said)

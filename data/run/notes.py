"""Notes on a tensor's card: where an imported tensor comes from, and what was corrected."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from binade.data.compare.evidence import Sentence, say
from binade.data.run.columns import Identity

STAGES = {"before": "before it was quantized", "after": "after it was quantized"}
RECOMPUTED = (
    "Recomputed: its layer's forward pass ran a second time during the backward pass (activation recomputation). It is "
    "recorded once: its inputs and results come from the first pass, its gradients from the backward pass."
)
PADDING = (
    "statistics, sketch and errors are of the other tokens. Its shape and values include padding, and so did rounding."
)
MASKED = "statistics, sketch and errors are of the others. Its shape, values and block histograms include them."
# Versions that are no tool
OF_ANY_TOOL = {"checkpoint": "Its file is a checkpoint.", "module path": "Its name is a path in the model."}
NAMED = {"layer_index": "layer", "quant_type": "quant type", "micro_batch": "micro-batch", "tensor_name": "name"}
# The fields of an Identity that no log contains, or that only some tensors have.
NOT_ASKED = ("model", "size", "dataset", "recipe", "expert")


def on_a_grid(config: str) -> str | None:
    """A sentence on the weights of a run whose model was dequantized from another format. config: run.json, as text."""
    if not (kinds := (json.loads(config).get("weights") or {}).get("quantized")):
        return None
    return (
        f"The weights were dequantized from {' and '.join(map(str, kinds))} and lie on a quantization grid: the "
        "rounding errors of weights are meaningless here. Those of activations and gradients are not affected."
    )


def rounded_twice(configs: Iterable[Mapping[str, Any]], everywhere: bool = False) -> Sentence:
    """A sentence on comparisons of these runs, empty where none rounds weights that were dequantized from another
    format: a loss gap, or a measured effect, then contains the rounding of these weights. configs: run.json of
    each. everywhere: whether weights count that the run does not round."""
    kinds: dict[str, None] = {}
    for config in configs:
        operands = [line.split() for line in config.get("operands") or ()]
        if everywhere or not operands or any(".weight" in words[0] and words[-1] != "bf16" for words in operands):
            kinds |= dict.fromkeys(map(str, (config.get("weights") or {}).get("quantized") or ()))
    if not kinds:
        return Sentence()
    return say(
        "The weights were dequantized from {kinds} before: rounding them again is part of these figures, and says "
        "nothing of weights that were trained in higher precision.",
        kinds=" and ".join(kinds),
    )


def notes(row: Mapping[str, Any], config: str = "{}") -> list[str]:
    """Sentences on a row of the table `tensor` (a dict or a pandas Series); config: its run.json, as text. For a tensor
    that Binade recorded, they say only that padding or masked pairs were left out, that its layer was recomputed or
    that its weight lies on a grid.

    The notes are plain text and include file names and words of the log only if these are plain words. They are
    harmless as text, but must still be escaped as HTML or Markdown.
    """
    has_values, version = pd.notna(row["path"]), row["source_version"]
    if not str(row["path"]).startswith("/") and (has_values or not pd.notna(version)):
        grid = on_a_grid(config) if row["tensor_name"] == "weight" else None
        recomputed = RECOMPUTED if pd.notna(row["recomputed"]) and row["recomputed"] else None
        left_out = row["tokens_left_out"]
        padding = f"Without the {left_out:,.0f} tokens of padding: {PADDING}" if pd.notna(left_out) else None
        pairs = row["pairs_left_out"]
        masked = (
            f"Without the {pairs:,.0f} pairs that the softmax does not see: {MASKED}"
            if pd.notna(pairs) and pairs
            else None
        )
        return [sentence for sentence in (padding, masked, recomputed, grid) if sentence]
    known = "Its file name does not describe it."
    if pd.notna(version):  # V0 to V7, or a tool
        numbered = re.fullmatch(r"V\d[a-z]?", version)
        known = f"Its file name follows version {version}." if numbered else f"Its file was written by {version}."
        if version in OF_ANY_TOOL:
            known = OF_ANY_TOOL[version]
    what = "nothing was copied" if has_values else "it has statistics and no values"
    sentences = [f"Imported from another tool's log; {what}. {known}"]
    if pd.notna(row["corrections"]):
        sentences += row["corrections"].split("\n")
    original = row["original_quant_type"]
    if pd.notna(original) and not (pd.notna(row["quant_type"]) and original == row["quant_type"]):
        sentences.append(f"Its log spells the quant type {original}.")
    if pd.notna(row["stage"]):
        sentences.append(f"It was taken {STAGES[row['stage']]}.")
    if has_values and not pd.notna(row["contracted_axis"]):
        sentences.append("The axis that a GEMM contracts is not known, so formats are scored along the last axis.")
    blank = [word for word in Identity.__annotations__ if word not in NOT_ASKED and not pd.notna(row[word])]
    if blank:
        names = ", ".join(NAMED.get(word, word.replace("_", " ")) for word in blank)
        sentences.append(f"Not recorded: {names}.")
    return sentences

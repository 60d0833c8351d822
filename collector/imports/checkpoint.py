"""Checkpoints: state dicts of torch, as PyTorch, Hugging Face, Megatron and Lightning write them, in .safetensors, .pt,
.pth, .bin, .ckpt or .npz. The name of a parameter is its module's path and a word:

    model.layers.0.self_attn.q_proj.weight
    model.decoder.layers.0.mlp.linear_fc1.layer_norm_weight     below {"model": ...}
    model.decoder.layers.0.mlp.experts.linear_fc1.weight3       of expert 3 of a rank
    model.layers.0.mlp.experts.gate_up_proj                     of all experts

A dict of tensors whose names are not of this kind is not a checkpoint, and the state of an optimizer is no parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath

from binade.collector.imports.log import LINEAR, Importer, TensorLog, make, place
from binade.collector.models.site import WORDS, path_parts

NAME = "checkpoint"
STEPS = ("iteration", "global_step", "iter_num")  # of Megatron, Lightning and nanoGPT
PARAMETER = re.compile(r"(?:.*_)?(?:weight|bias|gamma|beta)(?:_.+)?|lora_[AB]|e_score_correction_bias", re.ASCII)
OPTIMIZER = frozenset({"optimizer", "optimizer_states", "optim", "exp_avg", "exp_avg_sq", "momentum_buffer"})
GROUPED = re.compile(r"(weight|bias)(\d+)", re.ASCII)  # of an expert
# Layers of GPT-2 and its kin, whose weight is [in, out] in transformers (Conv1D) and [out, in] elsewhere, as are the
# weights of all experts together.
EITHER_WAY = ("c_attn", "c_proj", "c_fc")
TRANSPOSED = (
    "Its layer may keep the weight as [in, out] or as [out, in], so the axis that a GEMM contracts is not known."
)


def read(path: PurePath, metadata: object, key: str | None) -> TensorLog | None:
    parts = path_parts(key) if key else []
    if len(parts) < 2 or not OPTIMIZER.isdisjoint(parts):
        return None
    module, name = parts[:-1], parts[-1]
    grouped, bare = GROUPED.fullmatch(name), name in WORDS and any(part.isdecimal() for part in module)
    if bare:
        module, name = parts, "weight"
    elif not (grouped or PARAMETER.fullmatch(name)):
        return None
    words = place(".".join(module))
    if not words:
        return None
    if grouped:
        name = grouped[1]
        words["expert"] = grouped[2]
    told = metadata if isinstance(metadata, Mapping) else {}
    log = make(
        NAME,
        **words,
        layer_type="linear" if words["module"] in LINEAR else None,
        operation="forward",
        phase="pre",
        tensor_name=name,
        iteration=next((told[step] for step in STEPS if step in told), None),
    )
    if log.contracted_axis is not None and (bare or module[-1] in EITHER_WAY):
        log = replace(log, contracted_axis=None, corrections=(TRANSPOSED,))
    return log


IMPORTER = Importer(NAME, read)

"""Transformer Engine's debug feature DumpTensors: tensor_dumps/rank_{r}/iter_{i:06d}/{layer}_{tensor}.pt, each a dict
of `high_precision`, the tensor, and `quantized`, a pickled QuantizedTensor, which data.foreign does not unpickle.

From transformer_engine/debug/features/dump_tensors.py of 2.20.0.dev0 (d0067d0); the feature has existed since 2.15. The
layer's name has "_" for every "." of nvdlfw_inspect, which counts layers by Megatron's layer_number, from 1.
"""

from __future__ import annotations

import re
from pathlib import PurePath

from binade.collector.imports.log import BEFORE, Importer, Log, make, module_word
from binade.collector.models.site import WORDS

NAME = "TransformerEngine"
# operation, phase and name of each tensor; the first three are operands, dumped before they are quantized
TENSORS = {
    "activation": ("forward", "pre", "input"),
    "weight": ("forward", "pre", "weight"),
    "gradient": ("backward", "pre", "grad_output"),
    "output": ("forward", "post", "output"),
    "dgrad": ("backward", "post", "grad_input"),
    "wgrad": ("backward", "post", "grad_weight"),
}
OPERANDS = ("activation", "weight", "gradient")
ENDS = {end.replace(".", "_"): word for end, word in WORDS.items()} | {n: n for n in ("qkv", "proj", "fc1", "fc2")}
_RANK, _ITERATION = re.compile(r"rank_(\d+)", re.ASCII), re.compile(r"iter_(\d{6,})", re.ASCII)
_FILE = re.compile(rf"_?(?P<layer>.+)_(?P<tensor>{'|'.join(TENSORS)})", re.ASCII)
_LAYER = re.compile(r"(?:.*_)?layers_(?P<number>\d+)_(?P<below>.+)", re.ASCII)
_GEMM = re.compile(r"(?P<grouped>.+)_gemm_(?P<number>\d+)", re.ASCII)


def read(path: PurePath, metadata: object, key: str | None) -> Log | None:
    rank, iteration = _RANK.fullmatch(path.parent.parent.name), _ITERATION.fullmatch(path.parent.name)
    file = _FILE.fullmatch(path.stem)
    if key != "high_precision" or not (rank and iteration and file):
        return None
    notes, name, expert = [], file["layer"], None
    if grouped := _GEMM.fullmatch(name):
        name, expert = grouped["grouped"], grouped["number"]
        notes.append("Experts are numbered within their rank.")
    layer = _LAYER.fullmatch(name)
    if layer and int(layer["number"][:20]) == 0:
        notes.append("The log has layer 0, which means that the model has no layer_number: the layer is left blank.")
    operation, phase, tensor_name = TENSORS[file["tensor"]]
    return make(
        NAME,
        tuple(notes),
        stage=BEFORE if file["tensor"] in OPERANDS else None,
        layer_type="linear",
        layer_index=layer["number"] if layer else None,
        module=_module(layer["below"] if layer else name),
        operation=operation,
        phase=phase,
        tensor_name=tensor_name,
        iteration=iteration[1],
        rank=rank[1],
        expert=expert,
    )


def _module(name: str) -> str:
    """Binade's name for a module, by the longest known ending of its name; else the name itself."""
    words = name.split("_")
    for end in ("_".join(words[start:]) for start in range(len(words))):
        if end in ENDS or end.startswith("linear_"):
            return module_word(name, ENDS.get(end, end))
    return name


IMPORTER = Importer(NAME, read)

"""Transformer Engine's debug features.

DumpTensors writes tensor_dumps/rank_{r}/iter_{i:06d}/{layer}_{tensor}.pt, each a dict of `high_precision`, the tensor,
and `quantized`, a pickled QuantizedTensor, which data.foreign does not unpickle. The layer's name has "_" for every "."
of nvdlfw_inspect, which counts layers by Megatron's layer_number, from 1, or by a model's list of them, from 0.

LogTensorStats, LogFp8TensorStats and LogNvfp4TensorStats write a line for each statistic, with four decimals, into
nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-{r}.log:

    2026-11-26 12:00:00,000 - INFO - {layer}_{tensor}_{statistic}  iteration={i:06d}  value={v:.4f}

The statistics are of all micro-batches, except those of weights. Left out are std, which is not the population's, and
norms, since the number of values is not logged.

From transformer_engine/debug/features of 2.20.0.dev0 (d0067d0) and nvdlfw_inspect 0.2.2; DumpTensors has existed since
2.15.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePath

from binade.collector.imports.log import BEFORE, Importer, Statistics, TensorLog, integer, logged, make, module_word
from binade.collector.models.site import WORDS
from binade.data.run.store import regular

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
COLUMNS = {"min": "min", "max": "max", "mean": "mean", "cur_amax": "absmax"}
DECIMALS = "Its log has statistics only, over all micro-batches and with four decimals."
LONGEST_LINE = 4096
_LOG = re.compile(r"nvdlfw_inspect.*_globalrank-(\d+)\.log", re.ASCII)
_LINE = re.compile(
    rf"(?P<layer>.+)_(?P<tensor>{'|'.join(TENSORS)})_(?P<statistic>\S+)\s+iteration=(?P<iteration>\d+)"
    r"\s+value=(?P<value>-?(?:\d+\.\d{4}|nan|inf))",
    re.ASCII,
)
_ERROR = re.compile(
    r"(?:(?P<recipe>fp8_delayed_scaling|fp8_current_scaling|fp8_block_scaling|mxfp8|nvfp4)_)?(?P<error>underflows%|mse)"
)
_RANK, _ITERATION = re.compile(r"rank_(\d+)", re.ASCII), re.compile(r"iter_(\d{6,})", re.ASCII)
_FILE = re.compile(rf"_?(?P<layer>.+)_(?P<tensor>{'|'.join(TENSORS)})", re.ASCII)
_LAYER = re.compile(r"(?:.*_)?layers_(?P<number>\d+)_(?P<below>.+)", re.ASCII)
_GEMM = re.compile(r"(?P<grouped>.+)_gemm_(?P<number>\d+)", re.ASCII)


def read(path: PurePath, metadata: object, key: str | None) -> TensorLog | None:
    rank, iteration = _RANK.fullmatch(path.parent.parent.name), _ITERATION.fullmatch(path.parent.name)
    file = _FILE.fullmatch(path.stem)
    if key != "high_precision" or not (rank and iteration and file):
        return None
    return _log(file["layer"], file["tensor"], iteration[1], rank[1], from_0=_dumped_from_0(path.parent))


def _dumped_from_0(folder: PurePath) -> bool:
    """Whether one of the dumps in a folder, which are of one iteration, is of layer 0."""
    try:
        return _has_layer_0(folder, os.stat(folder).st_mtime_ns)
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=64)
def _has_layer_0(folder: PurePath, time_ns: int) -> bool:
    """time_ns: of the folder, so that it is listed again once it has changed. Raises OSError, ValueError."""
    files = (_FILE.fullmatch(PurePath(name).stem) for name in os.listdir(folder))
    return _from_0(file["layer"] for file in files if file)


def _from_0(names: Iterable[str]) -> bool:
    """Whether layers are counted from 0, as in a model without layer_number. names: of layers, with "_" for "."."""
    layers = (_LAYER.fullmatch(name) for name in names)
    return any(int(layer["number"][:20]) == 0 for layer in layers if layer)


def _log(name: str, tensor: str, iteration: str, rank: str, from_0: bool) -> TensorLog:
    """name: the layer's, with "_" for "."; from_0: see `_from_0`."""
    notes, expert = [], None
    if grouped := _GEMM.fullmatch(name):
        name, expert = grouped["grouped"], grouped["number"]
        notes.append("Experts are numbered within their rank.")
    layer = _LAYER.fullmatch(name)
    number = integer(layer["number"], 0) if layer else None
    if number is not None and from_0:
        notes.append("Its log has a layer 0, so it counts layers from 0: this is one more.")
        number += 1
    operation, phase, tensor_name = TENSORS[tensor]
    return make(
        NAME,
        tuple(notes),
        stage=BEFORE if tensor in OPERANDS else None,
        layer_type="linear",
        layer_index=number,
        module=_module(layer["below"] if layer else name),
        operation=operation,
        phase=phase,
        tensor_name=tensor_name,
        iteration=iteration,
        rank=rank,
        expert=expert,
    )


def _module(name: str) -> str:
    """Binade's name for a module, by the longest known ending of its name; else the name itself."""
    words = name.split("_")
    for end in ("_".join(words[start:]) for start in range(len(words))):
        if end in ENDS or end.startswith("linear_"):
            return module_word(name, ENDS.get(end, end))
    return name


def beside(path: Path) -> str | None:
    return "" if path.parent.name == "nvdlfw_inspect_logs" and path.suffix == ".log" else None


def logs(path: Path) -> bool:
    return path.parent.name == "nvdlfw_inspect_statistics_logs" and _LOG.fullmatch(path.name) is not None


def statistics(path: Path) -> Statistics:
    tensors: dict[tuple[str, ...], dict[str, float]] = {}
    left_out: Counter[tuple[str, str]] = Counter()
    with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
        while text := file.readline(LONGEST_LINE):
            if not text.endswith("\n") and len(text) < LONGEST_LINE:
                left_out["", "the last line has no line break, so it may be cut"] += 1
                break
            line = _LINE.fullmatch(text.rpartition("INFO - ")[2].strip())
            if line is None:
                raise ValueError(f"it has a line that is not a statistic of {NAME}: {text[:80].strip()!r}")
            values = tensors.setdefault((line["layer"], line["tensor"], line["iteration"]), {})
            if line["statistic"] in values:
                left_out[line["statistic"], "a later line has the same iteration, as after a restart"] += 1
            values[line["statistic"]] = float(line["value"])
    rows = []
    from_0 = _from_0({layer.replace(".", "_") for layer, _, _ in tensors})
    for (layer, tensor, iteration), values in tensors.items():
        columns: dict[str, float | None] = {}
        errors = {name: _ERROR.fullmatch(name) for name in values}
        recipes = {error["recipe"] for error in errors.values() if error}
        for name, value in values.items():
            error = errors[name]
            if error and len(recipes) > 1:
                left_out[name, "the index has the error of one recipe, the log of several"] += 1
            elif error and error["error"] == "underflows%":
                columns["underflow_of_all"] = value / 100
            elif not error and name not in COLUMNS:
                left_out[name, "no column of the index means exactly this"] += 1
            elif value == 0:
                left_out[name, "with four decimals, 0.0000 may be a small value"] += 1
            else:
                columns["mse" if error else COLUMNS[name]] = value
        if columns:
            log = _log(layer.replace(".", "_"), tensor, iteration, path.stem.rpartition("-")[2], from_0)
            recipe = next(iter(recipes)) if len(recipes) == 1 else None
            log = replace(log, original_quant_type=recipe, corrections=(*log.corrections, DECIMALS))
            rows.append(logged(log, columns, contracted_axis=log.contracted_axis))
    return Statistics(rows, left_out)


IMPORTER = Importer(NAME, read, beside, logs, statistics)

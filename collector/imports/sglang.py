"""SGLang's dumps, of two tools: the dumper's {k}={v}___{k}={v}.pt with step, rank, dump_index, name and more, each with
value and meta, and --debug-tensor-dump-output-folder's TP{t}_PP{p}_Rank{r}_pid{n}/Pass{i:05d}.pt, outputs by module.

As srt/debug_utils/dumper.py and tensor_dump_forward_hook.py of sglang 0.5.23 write them. Layers count from 0.
dump_index counts the dumps of a rank; a Pass lists the modules in the order in which their forward passes ended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from binade.collector.imports.log import LINEAR, Importer, TensorLog, integer, is_word, make, place

NAME = "SGLang"
STEPS = ("step", "forward_pass_id", "curr_step")  # as the versions have named it
_FOLDER = re.compile(r"TP\d+_PP\d+_Rank(\d+)_pid\d+", re.ASCII)
_PASS = re.compile(r"Pass(\d{5,})", re.ASCII)
_SIDE = re.compile(r"(?:(?P<path>.+?)\.)?(?P<side>inputs|output)(?:\.(?P<which>[^.]+))?", re.ASCII)


def read(path: PurePath, metadata: object, key: str | None) -> TensorLog | None:
    folder, number = _FOLDER.fullmatch(path.parent.name), _PASS.fullmatch(path.stem)
    if folder and number and key is not None:
        words = _in_module(key) | {"operation": "forward", "phase": "post", "tensor_name": "output"}
        return make(NAME, iteration=number[1], rank=folder[1], order=0, **words)
    tags: dict[str, Any] = dict(part.partition("=")[::2] for part in path.stem.split("___"))
    if key not in (None, "value") or not {"rank", "dump_index", "name"} <= tags.keys():
        return None
    meta = metadata.get("meta") if isinstance(metadata, Mapping) else None
    if isinstance(meta, Mapping):
        tags |= {name: value for name, value in meta.items() if isinstance(name, str)}
    words = _named(tags["name"]) if is_word(tags["name"]) else {}
    if (layer := integer(tags.get("layer_id"), 0)) is not None:
        words["layer_index"] = layer + 1
    step = next((tags[name] for name in STEPS if name in tags), None)
    return make(NAME, iteration=step, rank=tags["rank"], order=tags["dump_index"], **words)


def _named(name: str) -> dict[str, Any]:
    """The fields in a name: that of a parameter, of an input or output of a module, or one that a user has chosen."""
    gradient, value = name.startswith("grad__"), name.removeprefix("grad__")
    operation = "backward" if gradient else "forward"
    prefix = "grad_" if gradient else ""
    if value.startswith("param__"):
        module, _, parameter = value.removeprefix("param__").rpartition(".")
        phase = "post" if gradient else "pre"
        return _in_module(module) | {"operation": operation, "phase": phase, "tensor_name": f"{prefix}{parameter}"}
    match = _SIDE.fullmatch(value.removeprefix("non_intrusive__"))
    if not value.startswith("non_intrusive__") or not match:
        return {"operation": "backward" if gradient else None, "tensor_name": f"{prefix}{value}"}
    reads = match["side"] == "inputs"
    which = "" if match["which"] in (None, "0") else f".{match['which']}"
    return _in_module(match["path"] or "") | {
        "operation": operation,
        "phase": "pre" if reads != gradient else "post",  # a gradient passes the other way
        "tensor_name": f"{prefix}{'input' if reads else 'output'}{which}",
    }


def _in_module(path: str) -> dict[str, Any]:
    words = place(path)
    return words | ({"layer_type": "linear"} if words.get("module") in LINEAR else {})


IMPORTER = Importer(NAME, read)

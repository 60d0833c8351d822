"""msprobe (mindstudio-probe), Ascend's dump tool: step{i}/rank{r}/dump_tensor_data/{name}.pt, bare tensors (.npy of
MindSpore), in a folder with dump.json, which lists them with statistics, stack.json and construct.json.

    Module.{path}.{class}.{forward|backward}.{call}.{input|output|kwargs|parameters}.{index}
    Module.{path}.{class}.parameters_grad.{count}.{parameter}
    {Functional|Torch|Tensor|NPU|...}.{function}.{call}.{forward|backward}.{input|output|kwargs}.{index}

As mindstudio-probe 26.2.0 writes them. With "task": "statistics" there are no values, only maximum, minimum, mean and
norm of each tensor: sketches, scores and counts of flushed values cannot be computed from these, so they are not
indexed.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Any

from binade.collector.imports.log import Importer, Log, make, place

NAME = "msprobe"
DATA = "dump_tensor_data"
STATISTICS = 'msprobe dumped only statistics, but Binade needs values: set "task": "tensor" in its config.json'
# the first arguments of functions, by position
LINEAR = ("input", "weight", "bias")
CORE = ("query", "key", "value")
FUNCTIONS = {
    "linear": ("linear", LINEAR),
    "scaled_dot_product_attention": ("attention", CORE),
    "npu_fusion_attention": ("attention", CORE),
}
_STEP, _RANK = re.compile(r"step(\d+)", re.ASCII), re.compile(r"rank(\d+)", re.ASCII)
_MODULE = re.compile(
    r"""(?:Module|Cell)\.(?P<path>.+)\.(?P<kind>\w+)\.
        (?:(?P<operation>forward|backward)\.\d+\.(?P<side>input|output|kwargs|parameters)(?:\.(?P<which>.+))?
        |parameters_grad(?:\.\d+)?\.(?P<gradient>\w+))""",
    re.VERBOSE | re.ASCII,
)
_FUNCTION = re.compile(
    r"""(?P<call>[A-Za-z]+\.(?P<function>.+)\.\d+)\.(?P<operation>forward|backward)\.
        (?P<side>input|output|kwargs)(?:\.(?P<which>.+))?""",
    re.VERBOSE | re.ASCII,
)


def read(path: PurePath, metadata: object, key: str | None) -> Log | None:
    if path.parent.name != DATA or key is not None:
        return None
    if found := _MODULE.fullmatch(path.stem):
        words = _module(found)
    elif found := _FUNCTION.fullmatch(path.stem):
        words = _function(found)
    else:
        return None
    step, rank = _STEP.fullmatch(path.parents[2].name), _RANK.fullmatch(path.parents[1].name)
    return make(NAME, iteration=step and step[1], rank=rank and rank[1], **words)


def _module(found: re.Match[str]) -> dict[str, Any]:
    linear = found["kind"].endswith(("Linear", "Dense"))
    names = {"input.0": "input", "output.0": "output"} if linear else {}
    if "LayerNorm" in found["kind"]:  # which comes between the input of a fused module and its GEMM
        names.pop("input.0", None)
    words = place(found["path"]) | {"layer_type": "linear" if linear else None}
    if found["gradient"]:
        return words | {"operation": "backward", "phase": "post", "tensor_name": f"grad_{found['gradient']}"}
    return words | _tensor(found, names)


def _function(found: re.Match[str]) -> dict[str, Any]:
    """Calls of functions have no module name: the call itself is used instead."""
    layer_type, arguments = FUNCTIONS.get(found["function"], (None, ()))
    names = {f"input.{i}": name for i, name in enumerate(arguments)}
    words = _tensor(found, names | {"output.0": "output"} if layer_type else {})
    if found["operation"] == "backward" and found["side"] == "output":
        words["tensor_name"] = f"output.{found['which'] or 0}"  # autograd's order, which is not that of the arguments
    return words | {"layer_type": layer_type, "module": found["call"]}


def _tensor(found: re.Match[str], names: dict[str, str]) -> dict[str, Any]:
    """Operation, phase and name. The backward pass's input is the gradient of the output."""
    side, which = found["side"], found["which"]
    phase = "post" if side == "output" else "pre"
    if found["operation"] == "backward":
        side = {"input": "output", "output": "input"}.get(side, side)
    name = f"{side}.{which}" if which else side
    name = which if side == "parameters" and which else names.get(name, name)
    gradient = "grad_" if found["operation"] == "backward" else ""
    return {"operation": found["operation"], "phase": phase, "tensor_name": f"{gradient}{name}"}


def beside(path: Path) -> str | None:
    lists = path if path.name == "dump.json" else path.with_name("dump.json")
    if path.name not in ("dump.json", "stack.json", "construct.json") or not lists.is_file() or lists.is_symlink():
        return None
    try:
        with open(lists, "rb") as file:
            if b'"dump_data_dir"' not in file.read(4096):
                return None
    except OSError:
        return None
    return STATISTICS if path == lists and not path.with_name(DATA).is_dir() else ""


IMPORTER = Importer(NAME, read, beside)

"""msprobe (mindstudio-probe), Ascend's dump tool: step{i}/rank{r}/dump_tensor_data/{name}.pt, bare tensors (.npy of
MindSpore), in a folder with dump.json, which lists them with statistics, stack.json and construct.json.

    Module.{path}.{class}.{forward|backward}.{call}.{input|output|kwargs|parameters}.{index}
    Module.{path}.{class}.parameters_grad.{count}.{parameter}
    {Functional|Torch|Tensor|NPU|...}.{function}.{call}.{forward|backward}.{input|output|kwargs}.{index}

As mindstudio-probe 26.2.0 writes them. With "task": "statistics" there are no values, only maximum, minimum, mean and
norm of each tensor in dump.json; mean and norm are rounded to the tensor's dtype.

dump.json lists calls in the order in which they were recorded, except the gradients of parameters: their entries are
made during the forward pass. Here they follow the backward pass of their module.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, TypeGuard

from binade.collector.imports.log import LARGEST, Importer, Statistics, TensorLog, in_folders, logged, make, place
from binade.data.run.store import read_file, regular

NAME = "msprobe"
DATA = "dump_tensor_data"
PARAMETERS = ".parameters_grad"
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
SIDES = {"input_args": "input", "input_kwargs": "kwargs"}  # as dump.json names the sides; the others are the same
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
STATISTICS = {"Min": "min", "Max": "max", "Mean": "mean"}
# the first arguments of functions, by position
LISTS = ("dump.json", "stack.json", "construct.json", "debug.json")
LINEAR = ("input", "weight", "bias")
CORE = ("query", "key", "value")
FUNCTIONS = {
    "linear": ("linear", LINEAR),
    "scaled_dot_product_attention": ("attention", CORE),
    "npu_fusion_attention": ("attention", CORE),
}
_MODULE = re.compile(
    r"""(?:Module|Cell)\.(?P<path>.+)\.(?P<kind>\w+)\.
        (?:(?P<operation>forward|backward)\.(?P<call>\d+)\.(?P<side>input|output|kwargs|parameters)(?:\.(?P<which>.+))?
        |parameters_grad(?:\.\d+)?\.(?P<gradient>\w+))""",
    re.VERBOSE | re.ASCII,
)
_FUNCTION = re.compile(
    r"""(?P<call>[A-Za-z]+\.(?P<function>.+)\.\d+)\.(?P<operation>forward|backward)\.
        (?P<side>input|output|kwargs)(?:\.(?P<which>.+))?""",
    re.VERBOSE | re.ASCII,
)


def read(path: PurePath, metadata: object, key: str | None) -> TensorLog | None:
    if path.parent.name != DATA or key is not None:
        return None
    return _named(path.parent, path.stem, _calls_of(path.parents[1] / "dump.json"))


@dataclass(frozen=True)
class Calls:
    """What a dump.json says of calls: the place of each tensor in the order of execution, and whether the calls of a
    module are those of micro-batches. They are if all modules were called equally often."""

    order: Mapping[str, int] = field(default_factory=dict)
    are_micro_batches: bool = False


def _named(folder: PurePath, name: str, calls: Calls) -> TensorLog | None:
    """What the name of a tensor says, in a folder DATA, whether there is such a file or only an entry in dump.json."""
    if match := _MODULE.fullmatch(name):
        words = _module(match, calls.are_micro_batches)
    elif match := _FUNCTION.fullmatch(name):
        words = _function(match)
    else:
        return None
    return make(NAME, order=calls.order.get(name), **in_folders(folder / name), **words)


def _calls_of(lists: PurePath) -> Calls:
    """What a dump.json says; nothing for one that cannot be read."""
    try:
        status = os.stat(lists)
        return _read_calls(Path(lists), status.st_size, status.st_mtime_ns)
    except (OSError, *DAMAGED):
        return Calls()


@lru_cache(maxsize=4)
def _read_calls(lists: Path, size: int, time_ns: int) -> Calls:
    """size, time_ns: the file's, so that changed content is read again. Raises as `_tensors`."""
    return _calls(_tensors(lists))


def _calls(tensors: list[tuple[str, dict[str, Any]]]) -> Calls:
    order: dict[str, int] = {}
    for number, (name, tensor) in enumerate(tensors):
        file = tensor.get("data_name")
        order.setdefault(file.removesuffix(PurePath(file).suffix) if isinstance(file, str) else name, number)
    matches = (_MODULE.fullmatch(name) for name, _ in tensors)
    calls = {(match["path"], match["operation"], match["call"]) for match in matches if match and match["call"]}
    return Calls(order, len({*Counter(call[:2] for call in calls).values()}) == 1)


def _module(match: re.Match[str], calls_are_micro_batches: bool) -> dict[str, Any]:
    linear = match["kind"].endswith(("Linear", "Dense"))
    names = {"input.0": "input", "output.0": "output"} if linear else {}
    if "LayerNorm" in match["kind"]:  # which comes between the input of a fused module and its GEMM
        names.pop("input.0", None)
    words = place(match["path"]) | {"layer_type": "linear" if linear else None}
    if match["gradient"]:
        return words | {"operation": "backward", "phase": "post", "tensor_name": f"grad_{match['gradient']}"}
    if calls_are_micro_batches:
        words["micro_batch"] = match["call"]
    elif int(match["call"][:9]) and words.get("module"):  # as of a function
        words["module"] = f"{words['module']}.{match['call']}"
    return words | _tensor(match, names)


def _function(match: re.Match[str]) -> dict[str, Any]:
    """Calls of functions have no module name: the call itself is used instead."""
    layer_type, arguments = FUNCTIONS.get(match["function"], (None, ()))
    names = {f"input.{i}": name for i, name in enumerate(arguments)}
    words = _tensor(match, names | {"output.0": "output"} if layer_type else {})
    if match["operation"] == "backward" and match["side"] == "output":
        words["tensor_name"] = f"output.{match['which'] or 0}"  # autograd's order, which is not that of the arguments
    return words | {"layer_type": layer_type, "module": match["call"]}


def _tensor(match: re.Match[str], names: dict[str, str]) -> dict[str, Any]:
    """Operation, phase and name. The backward pass's input is the gradient of the output."""
    side, which = match["side"], match["which"]
    phase = "post" if side == "output" else "pre"
    if match["operation"] == "backward":
        side = {"input": "output", "output": "input"}.get(side, side)
    name = f"{side}.{which}" if which else side
    name = which if side == "parameters" and which else names.get(name, name)
    gradient = "grad_" if match["operation"] == "backward" else ""
    return {"operation": match["operation"], "phase": phase, "tensor_name": f"{gradient}{name}"}


def beside(path: Path) -> str | None:
    lists = path if path.name == "dump.json" else path.with_name("dump.json")
    if path.name not in LISTS or not lists.is_file() or lists.is_symlink():
        return None
    try:
        with open(lists, "rb") as file:
            if b'"dump_data_dir"' not in file.read(4096):
                return None
    except OSError:
        return None
    return (
        "its values are missing: expected dump_tensor_data"
        if path == lists and not path.with_name(DATA).is_dir()
        else ""
    )


def logs(path: Path) -> bool:
    if path.name != "dump.json":
        return False
    with suppress(OSError), open(path, "rb", opener=regular) as file:
        return re.match(rb'\s*\{\s*"task":\s*"statistics"', file.read(4096)) is not None
    return False


def statistics(path: Path) -> Statistics:
    try:
        return _statistics(path, _tensors(path))
    except DAMAGED:
        raise ValueError("it is damaged, or not a dump.json of msprobe") from None


def _tensors(lists: Path) -> list[tuple[str, dict[str, Any]]]:
    """The tensors that a dump.json lists, in the order of execution, each with the name that its file would have.
    Raises DAMAGED, OSError."""
    calls = json.loads(read_file(lists))["data"]
    ended = {name.rpartition(".backward.")[0]: number for number, name in enumerate(calls) if ".backward." in name}

    def executed(numbered: tuple[int, str]) -> tuple[int, int]:
        number, name = numbered
        module, is_gradient, _ = name.partition(PARAMETERS)
        return (ended.get(module, len(calls)), number + 1) if is_gradient else (number, 0)

    ordered = [name for _, name in sorted(enumerate(calls), key=executed)]
    return [tensor for name in ordered for tensor in _leaves(name, calls[name])]


def _statistics(path: Path, tensors: list[tuple[str, dict[str, Any]]]) -> Statistics:
    rows, left_out = [], Counter[tuple[str, str]]()
    calls = _calls(tensors)
    for name, tensor in tensors:
        dtype, shape = str(tensor.get("dtype")).rpartition(".")[2].lower(), tensor.get("shape")
        values = {name: _number(tensor.get(name)) for name in ("Min", "Max", "Mean", "Norm")}
        norm = values["Norm"]
        log = _named(path.with_name(DATA), name, calls)
        if dtype not in BYTES:
            left_out["", f"not a floating tensor: {dtype[:40]}"] += 1
        elif not _is_shape(shape):
            left_out["", "no size of 1 or more in each dimension"] += 1
        elif not log or all(value is None for value in values.values()):
            left_out["", "tensors without statistics"] += 1
        else:
            numel = math.prod(shape)
            columns = {column: values[name] for name, column in STATISTICS.items()}
            columns["rms"] = None if norm is None else norm / math.sqrt(numel)
            if dtype in ("bfloat16", "float16"):
                log = replace(log, corrections=(*log.corrections, f"Its mean and norm were rounded to {dtype}."))
            known = {"numel": numel, "nbytes": numel * BYTES[dtype], "shape": shape, "dtype": dtype}
            rows.append(logged(log, columns, **known, contracted_axis=_axis(log, shape)))
    return Statistics(rows, left_out)


def _leaves(name: str, node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors of a call, each with the name that its file would have."""
    if isinstance(node, dict) and "dtype" in node and "shape" in node:
        yield name, node
    elif isinstance(node, dict):
        for key, below in node.items():
            yield from _leaves(f"{name}.{SIDES.get(key, key)}", below)
    elif isinstance(node, list):
        for index, below in enumerate(node):
            yield from _leaves(name if PARAMETERS in name else f"{name}.{index}", below)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_shape(value: object) -> TypeGuard[list[int]]:
    sizes = value if isinstance(value, list) else []
    return (
        len(sizes) <= 8
        and all(type(size) is int and 0 < size <= LARGEST for size in sizes)
        and math.prod(sizes) < 1 << 53
    )


def _axis(log: TensorLog, shape: list[int]) -> int | None:
    return log.contracted_axis if log.contracted_axis and -log.contracted_axis <= len(shape) else None


IMPORTER = Importer(NAME, read, beside, logs, statistics)

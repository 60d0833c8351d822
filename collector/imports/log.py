"""What an importer reads from a tensor file of another tool, with checks of the values. No torch.

An importer is one file here and one line in registry.py. Its `read` gets the path of a file that data.foreign has read,
its metadata, and the tensor's key in it, and returns a Log, or None if the file is not one of its tool. Paths and
metadata are untrusted: `read` never raises, and `make` leaves out what is not a plain word or number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any, TypeGuard

from binade.collector.models.site import WORDS, path_parts, site
from binade.data.run.tensor_kinds import TENSOR_KINDS

BEFORE, AFTER = "before", "after"
NOT_FINITE = "A statistic in its log is NaN or infinite, so it has NaN or Inf; how many is not known."

LARGEST = (1 << 31) - 1
LARGEST_STEP = (1 << 53) - 1  # steps may count tokens; JavaScript has no larger whole numbers
LONGEST, LONGEST_PATH = 128, 1024  # characters of a word, and of a module's path
ROUNDING = 2.0**-7  # one unit in the last place of bfloat16, relative
SMALLEST_HALF = 2.0**-24  # of float16, in whose multiples small values are rounded
ROUTER = "router"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
SEPARATORS = str.maketrans(dict.fromkeys("/:[]'", ".") | dict.fromkeys(" ,=@()", "_"))
FOLDERS = {
    "iteration": re.compile(r"(?:(?:global_?)?(?:step|iter|iteration)[_=-]?|checkpoint-)(\d+)", re.ASCII),
    "rank": re.compile(r"(?:mp_|global_?)?rank[_=-]?(\d+)", re.ASCII),
}
# The modules that are linear layers by their usual names
LINEAR = frozenset(f"{of}{word}" for of in ("", "shared_") for word in WORDS.values()) | {ROUTER}

# The axis that a GEMM contracts, where the name alone decides it. Of the value it depends on the layout, of
# input_B on whether it was transposed.
CONTRACTED: dict[tuple[str | None, ...], int] = {
    (kind.layer_type, kind.operation, kind.name): -1
    for kind in TENSOR_KINDS
    if kind.layer_type and kind.contracted_axis == -1
} | {("linear", "backward", "weight"): -2}  # [out, in]: the forward GEMM contracts in, dgrad contracts out


@dataclass(frozen=True)
class TensorLog:
    """What a log says about its tensor, in Binade's terms. None for what it does not say.

    version           the tool, or V0 to V7 as the Megatron fork has named its files; None for any other file
    layer_index       from 1; iteration, micro_batch, rank, expert from 0
    quant_type        one of FORMATS; original_quant_type as the log spells it
    path              of the module in the model, as the tool names it, without wrappers such as DistributedDataParallel
    stage             whether the tensor was taken before or after it was quantized (BEFORE, AFTER)
    captured          the time in the log; its time zone is unknown
    contracted_axis   of an operand, from the end
    order             the place in the order of execution, within an iteration and a rank. Tensors of one file, which
                      may have the same, are in the order of the file
    corrections       a sentence for each value that differs from the log, with the reason
    refused           why the tensor is not imported, or None
    is_scored         whether formats are tried on it
    is_unnamed        whether only its module is known
    """

    version: str | None = None
    quant_type: str | None = None
    original_quant_type: str | None = None
    stage: str | None = None
    layer_type: str | None = None
    layer_index: int | None = None
    module: str | None = None
    component: str | None = None
    operation: str | None = None
    phase: str | None = None
    tensor_name: str | None = None
    path: str | None = None
    iteration: int | None = None
    micro_batch: int | None = None
    rank: int | None = None
    expert: int | None = None
    captured: datetime | None = None
    contracted_axis: int | None = None
    order: int | None = None
    corrections: tuple[str, ...] = ()
    refused: str | None = None
    is_scored: bool = True
    is_unnamed: bool = False


@dataclass(frozen=True)
class Logged:
    """What a tool logged of a tensor in place of its values. columns: those of the table `tensor` that mean exactly the
    same; a statistic without such a column is left out. impossible: why no tensor has these statistics, or None."""

    log: TensorLog
    columns: Mapping[str, Any]
    impossible: str | None = None


@dataclass(frozen=True)
class Statistics:
    """The content of a file with statistics. left_out: what is not in the index, with the reason, and of how many
    tensors."""

    tensors: list[Logged]
    left_out: Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class Importer:
    """A tool whose files can be imported.

    read    what a file of the tool says about a tensor (path, metadata, key); None for another tool's file
    beside  of a file that holds no tensor: "" if the tool writes it next to the tensors and it is skipped, why it is
            refused if tensors should have been there, None if it is not the tool's
    logs    whether a file has statistics without values
    statistics  those of such a file. Raises ValueError, whose message says why it cannot be read, and OSError
    """

    name: str
    read: Callable[[PurePath, object, str | None], TensorLog | None]
    beside: Callable[[Path], str | None] = lambda path: None
    logs: Callable[[Path], bool] = lambda path: False
    statistics: Callable[[Path], Statistics] = lambda path: Statistics([], {})


def make(version: str, corrections: tuple[str, ...] = (), **words: Any) -> TensorLog:
    """A Log from the words found; words that are not plain are left out. Its layer_type decides component and, with the
    operation, the axis that is contracted."""
    longest = {"path": LONGEST_PATH}
    known: dict[str, Any] = {n: value for n, value in words.items() if is_word(value, longest.get(n, LONGEST))}
    for name, least in {"layer_index": 1, "micro_batch": 0, "rank": 0, "expert": 0}.items():
        known[name] = integer(words.get(name), least)
    for name in ("iteration", "order"):
        known[name] = integer(words.get(name), 0, LARGEST_STEP)
    known["component"] = {"linear": "linear", "attention": "FA"}.get(known.get("layer_type", ""))
    axis = CONTRACTED.get(tuple(known.get(name) for name in ("layer_type", "operation", "tensor_name")))
    return TensorLog(version, contracted_axis=axis, corrections=corrections, **known)


def in_folders(path: PurePath) -> dict[str, Any]:
    """The iteration and the rank in the names of the folders of a file: step3/rank1, iter_0000100/mp_rank_00. The
    nearest folder counts."""
    numbers: dict[str, Any] = {}
    for folder in path.parents:
        for name, pattern in FOLDERS.items():
            if name not in numbers and (number := pattern.fullmatch(folder.name)):
                numbers[name] = integer(number[1], 0, LARGEST_STEP if name == "iteration" else LARGEST)
    return numbers


def place(path: str) -> dict[str, Any]:
    """The layer, module and expert of a module's path in torch ("decoder.layers.0.self_attention.linear_qkv"), which
    counts layers from 0. Megatron's names become ours."""
    whole = parts = path_parts(path) if is_word(path, LONGEST_PATH) else []
    if not parts:
        return {}
    if parts[0].isdecimal() and any(part.isdecimal() for part in parts[1:]):  # of a model in a list of models
        parts = parts[1:]
    where, _ = site(".".join(parts))
    module = None if parts[-1].isdecimal() else module_word(path, where.module)
    return {"layer_index": where.layer_index, "module": module, "expert": where.expert, "path": ".".join(whole)}


def without_layer(path: str) -> str:
    """The name of a module whose usual name another module has, too: its path without the number of the layer."""
    parts = path.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    at = numbers[1 if numbers[0] == 0 and len(numbers) > 1 else 0] if numbers else len(parts)
    return ".".join(parts[:at] + parts[at + 1 :]) or path


def module_word(path: str, last: str) -> str:
    """Binade's name for a module that Megatron, or `site`, calls `last`. A module `gate` is the router: the gate of a
    feed-forward layer is `gate_proj`, `w1` or a part of a fused layer."""
    if path.rpartition(".")[2] == "gate":
        return ROUTER
    if last.startswith("linear_"):
        last = last.removeprefix("linear_").removesuffix("_proj")
    return f"shared_{last}" if "shared_experts" in path else last


def logged(log: TensorLog, statistics: Mapping[str, float | None], **columns: Any) -> Logged:
    """The statistics by column, None for one that was not logged. Largest magnitude and counts of NaN and Inf follow
    from the minimum and the maximum, which torch computes as NaN or Inf if one is in the tensor."""
    known = {name: value for name, value in statistics.items() if value is not None}
    finite = {name: value for name, value in known.items() if math.isfinite(value)}
    if len(finite) < len(known):
        log = replace(log, corrections=(*log.corrections, NOT_FINITE))
    if {"min", "max"} <= finite.keys():
        finite.setdefault("absmax", max(abs(finite["min"]), abs(finite["max"])))
    counts = {"nans": 0, "infs": 0} if "absmax" in finite else {}
    return Logged(log, finite | counts | columns, _impossible(known | columns))


def _impossible(values: Mapping[str, Any]) -> str | None:
    """Why no tensor has these statistics; None if one may. A minimum or maximum may be infinite. Tools round a mean or
    an rms, by at most ROUNDING of the largest magnitude, and an infinite one may have overflowed."""
    low, high = (values.get(name, math.nan) for name in ("min", "max"))
    mean, rms = (values[name] if math.isfinite(values.get(name, math.nan)) else math.nan for name in ("mean", "rms"))
    # NaN for what is not known, with which no comparison holds
    largest = values.get("absmax", math.nan if math.isnan(low + high) else max(abs(low), abs(high)))
    slack = ROUNDING * largest if math.isfinite(largest) else 0.0
    if values.get("dtype") == "float16":
        slack += SMALLEST_HALF
    negative = (name for name in ("absmax", "absmin", "rms", "std", "mse") if values.get(name, 0) < 0)
    shares = ((name, values[name]) for name in ("underflow_of_all", "flush_to_zero", "saturated") if name in values)
    checks = (
        *((True, f"its {name} is negative") for name in negative),
        *((share < 0 or share > 1, f"its {name} is {100 * share:g} %") for name, share in shares),
        (low > high, f"its minimum {low:g} is larger than its maximum {high:g}"),
        (mean < low - slack or mean > high + slack, f"its mean {mean:g} is not between its minimum and maximum"),
        (-low > largest + slack, f"its largest magnitude {largest:g} is smaller than that of its minimum {low:g}"),
        (high > largest + slack, f"its largest magnitude {largest:g} is smaller than its maximum {high:g}"),
        (rms > largest + slack, f"its rms {rms:g} is larger than its largest magnitude {largest:g}"),
        (rms < abs(mean) - slack, f"its rms {rms:g} is smaller than its mean {mean:g}"),
    )
    return next((reason for failed, reason in checks if failed), None)


def is_word(value: object, longest: int = LONGEST) -> TypeGuard[str]:
    """Whether it is plain ASCII of a reasonable length: no path, markup, quote or line break."""
    return isinstance(value, str) and len(value) <= longest and _WORD.fullmatch(value) is not None


def plain_word(text: str) -> str | None:
    """A word for a name with separators that a word does not have, or for a long one: "blocks/0/q" is "blocks.0.q"."""
    word = text.translate(SEPARATORS).strip("._ ")
    word = word if len(word) <= LONGEST else f"{word[: LONGEST // 2 - 1]}..{word[1 - LONGEST // 2 :]}"
    return word if is_word(word) else None


def integer(value: object, least: int, most: int = LARGEST) -> int | None:
    """A whole number from `least` to `most`, also as text (safetensors keeps texts only), else None."""
    if isinstance(value, str) and len(value) <= 20 and re.fullmatch(r"\d+", value, re.ASCII):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        return None
    return value

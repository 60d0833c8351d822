"""Reads the tensor logs of a widely used fork of Megatron-LM, from their file names and metadata. No torch.

The fork writes one file per tensor and has changed its naming scheme seven times:

    V0   {time}_{count}_{layer type}_L{layer}_{operation}_{quant type}_{tensor}
    V1   ..._{operation}_{phase}_{component}_{quant type}_{tensor}
    V2   {time}_{count}_iter{i}_..._{quant type}_rank{r}_sample{s}_group{g}_{tensor}
    V3   as V2 without sample      V4   as V2 without group      V6   as V2 without both, and without count
    V5a  as V2 without count, phase and component                V5c  as V5a, the layer before the layer type
    V7   iter_{i}/{fwd|bwd}_{in|out}_{id}, a bare tensor

Any other file name gives at most the tensor's name. Metadata takes precedence over the name. What neither contains
stays None: which linear layer it was (qkv, proj, fc1, fc2) is never recorded, nor what `group` counts.

Nothing here raises: names and metadata are untrusted, so a value that is not a plain word or number of the expected
kind is left out. Each change becomes a sentence in `corrections`, which never repeats text that was left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import PurePath
from typing import Any

from binade.collector.imports.log import (
    AFTER,
    BEFORE,
    CONTRACTED,
    LARGEST,
    LARGEST_STEP,
    LONGEST,
    Importer,
    TensorLog,
    integer,
    is_word,
    plain_word,
)
from binade.quant.formats import FORMATS

# How that tool spells our formats. "mxfp" alone names no element format.
SPELLINGS = {
    "hifp": "hifp8",
    "hif8": "hifp8",
    "bfloat16": "bf16",
    "float16": "fp16",
    "mxfp_fp8_e4m3": "mxfp8",
    "mxfp_fp8_e5m2": "mxfp8_e5m2",
    "mxfp_fp6_e3m2": "mxfp6_e3m2",
    "mxfp_fp6_e2m3": "mxfp6_e2m3",
    "mxfp_fp4_e2m1": "mxfp4",
    "mxfp_int8": "mxint8",
}
AMBIGUOUS = ("mxfp",)
QUANTIZED = "_quantized"
KNOWN_QUANT_TYPES = sorted([*FORMATS, *FORMATS.aliases, *SPELLINGS, *AMBIGUOUS], key=len, reverse=True)

MISSING = ("", "none", "null", "unknown", "n/a")
_STAMP = "%Y%m%d_%H%M%S"
_SAVE_TIME = "%Y-%m-%d %H:%M:%S"

_NAME = re.compile(
    r"""(?P<stamp>\d{8}_\d{6})
        (?:_(?P<counter>\d{4,}))?
        (?:_iter(?P<iteration>\d+))?
        _(?:(?P<layer_type>attention|linear)(?:_L?(?P<layer>\d+))?|L(?P<first_layer>\d+)_(?P<second_type>attention|linear))
        _(?P<operation>forward|backward)
        (?:_(?P<phase>pre|post)_(?P<component>FA|linear|attention))?
        _(?P<tail>.+)""",
    re.VERBOSE | re.ASCII,
)
_TAIL = re.compile(r"(?P<quant_type>.+?)(?P<places>(?:_(?:rank|sample|group)\d+)+)_(?P<tensor_name>.+)", re.ASCII)
_PLACE = re.compile(r"_(rank|sample|group)(\d+)", re.ASCII)
_ITERATION = re.compile(r"iter_(?P<iteration>\d+)", re.ASCII)
_BARE = re.compile(r"(?P<direction>fwd|bwd)_(?P<side>in|out)_.+", re.ASCII)


def read(path: PurePath, metadata: object, key: str | None) -> TensorLog | None:
    """Read a log's path, metadata and key (of a file with several tensors); None for a file with another name.

    Only the last two parts of the path are used; metadata other than a dict is left out.
    """
    log = in_metadata(path, metadata, key)
    return log if log.version else None


def describes(metadata: object) -> bool:
    """Whether metadata has a field of the fork's that checkpoints do not have."""
    return isinstance(metadata, Mapping) and not _FIELDS.keys().isdisjoint({*metadata} - {"iteration", "rank"})


def in_metadata(path: PurePath, metadata: object, key: str | None) -> TensorLog:
    """As `read`, of any file: its name and its folder say at most the tensor's name and its format."""
    notes: list[str] = []
    version, words = _from_name(path)
    named = {name: value for name, value in words.items() if value is not None}
    described = _from_metadata(metadata, notes)
    if key is not None and key != "tensor" and (word := plain_word(key)):
        described["tensor_name"] = word
    _compare(named, described, notes)
    known = named | described
    directory = path.parent.name
    if "quant_type" not in known and directory.removesuffix(QUANTIZED) in KNOWN_QUANT_TYPES:
        known["quant_type"] = directory
    if version is None and "tensor_name" not in known and (word := plain_word(path.stem)):
        known["tensor_name"] = word
    original = known.pop("quant_type", None)
    quant_type, stage = _quant_type(original, notes)
    known = {"micro_batch": known.pop("sample", None)} | known
    return _corrected(TensorLog(version, quant_type, original, stage, **known), notes)


def _from_name(path: PurePath) -> tuple[str | None, dict[str, Any]]:
    """The version and the fields in a file's name; None for a name without any."""
    stem = path.stem
    if (match := _BARE.fullmatch(stem)) and (iteration := _ITERATION.fullmatch(path.parent.name)):
        forward, entering = match["direction"] == "fwd", match["side"] == "in"
        return "V7", {
            "operation": "forward" if forward else "backward",
            "phase": "pre" if entering else "post",
            "tensor_name": "input" if entering else "output",
            "iteration": integer(iteration["iteration"], 0, LARGEST_STEP),
        }
    match = _NAME.fullmatch(stem)
    tail = _tail(match["tail"]) if match else None
    if not match or not tail:
        return None, {}
    places = tail.pop("places")
    return _version(match, places), tail | {
        "layer_type": match["layer_type"] or match["second_type"],
        "layer_index": integer(match["layer"] or match["first_layer"], 1),
        "operation": match["operation"],
        "phase": match["phase"],
        "component": match["component"],
        "iteration": integer(match["iteration"], 0, LARGEST_STEP),
        "rank": integer(places.get("rank"), 0),
        "sample": integer(places.get("sample"), 0),
        "captured": _time(match["stamp"], _STAMP),
    }


def _version(match: re.Match[str], places: Mapping[str, str]) -> str:
    if match["first_layer"] is not None:
        return "V5c"
    if match["iteration"] is None:
        return "V0" if match["phase"] is None else "V1"
    if match["phase"] is None:
        return "V5a"
    return {(True, True): "V2", (False, True): "V3", (True, False): "V4"}.get(
        ("sample" in places, "group" in places), "V6"
    )


def _tail(text: str) -> dict[str, Any] | None:
    """The words after the component. Both the quant type and the tensor's name may contain underscores."""
    if match := _TAIL.fullmatch(text):
        words = {"quant_type": match["quant_type"], "tensor_name": match["tensor_name"]}
        words["places"] = dict(_PLACE.findall(match["places"]))
    else:
        known = next((name for name in KNOWN_QUANT_TYPES if text.lower().startswith(f"{name}_")), None)
        if known is None:
            known = text.partition("_")[0]
        elif text[len(known) :].startswith(f"{QUANTIZED}_"):
            known += QUANTIZED
        words = {"quant_type": text[: len(known)], "tensor_name": text[len(known) + 1 :], "places": {}}
    return words if is_word(words["quant_type"]) and is_word(words["tensor_name"]) else None


def _choice(*allowed: str) -> tuple[Callable[[Any], str | None], str]:
    spelling = {word.lower(): word for word in allowed}
    return lambda value: spelling.get(value.lower()) if is_word(value) else None, f"none of {', '.join(allowed)}"


def _number(least: int, most: int = LARGEST) -> tuple[Callable[[Any], int | None], str]:
    return lambda value: integer(value, least, most), f"not an integer of at least {least}"


_PLAIN: tuple[Callable[[Any], str | None], str] = (lambda value: value if is_word(value) else None, "not a plain word")

# What is read of the metadata: by which word of Binade, how (None for what cannot be used), and what such a value is.
# Of the two words for a micro-batch the later one is used.
_FIELDS: dict[str, tuple[str, tuple[Callable[[Any], Any], str]]] = {
    "layer_type": ("layer_type", _choice("attention", "linear")),
    "operation": ("operation", _choice("forward", "backward")),
    "phase": ("phase", _choice("pre", "post")),
    "component": ("component", _choice("FA", "linear", "attention")),
    "quant_type": ("quant_type", _PLAIN),
    "tensor_name": ("tensor_name", _PLAIN),
    "module": ("module", _PLAIN),
    "layer_idx": ("layer_index", _number(1)),
    "iteration": ("iteration", _number(0, LARGEST_STEP)),
    "rank": ("rank", _number(0)),
    "sample_idx": ("sample", _number(0)),
    "microbatch": ("micro_batch", _number(0)),
    "expert": ("expert", _number(0)),
    "save_time": ("captured", (lambda value: _time(value, _SAVE_TIME), "not a time such as 2025-09-08 09:21:56")),
}


def _from_metadata(metadata: object, notes: list[str]) -> dict[str, Any]:
    """The usable fields of a log's metadata, and a note for each unusable one."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        notes.append("The log's metadata is not a dict and was left out.")
        return {}
    words: dict[str, Any] = {}
    for name, (word, (read, unusable)) in _FIELDS.items():
        value = metadata.get(name)
        if _absent(value):
            continue
        label = read(value)
        if label is None:
            notes.append(f"The log's {name} is {unusable} and was left out.")
        else:
            words[word] = label
    return words


def _compare(named: Mapping[str, Any], described: Mapping[str, Any], notes: list[str]) -> None:
    """Add a note where name and metadata differ, except in the time: writing a file takes a while."""
    for name, value in named.items():
        other = described.get(name, value)
        same = other == value or (name == "quant_type" and _quant_type(other, []) == _quant_type(value, []))
        if name != "captured" and not same:
            notes.append(
                f"The file's name says {name} {value}, but the metadata inside says {other}: the metadata is used."
            )


def _quant_type(text: str | None, notes: list[str]) -> tuple[str | None, str | None]:
    """The format, and whether the tensor was taken before or after quantization, which the tool marks by a suffix."""
    if text is None:
        return None, None
    base = text.lower().removesuffix(QUANTIZED)
    after = base != text.lower()
    base = SPELLINGS.get(base, base)
    if base in FORMATS:
        name = FORMATS[base].name
        return name, AFTER if after else None if name == "bf16" else BEFORE
    why = "names no element format" if base in AMBIGUOUS else "is not a format of Binade"
    notes.append(f"The log's quant type {text} {why}: the quant type is left blank.")
    return None, AFTER if after else BEFORE if base in AMBIGUOUS else None


def _corrected(log: TensorLog, notes: list[str]) -> TensorLog:
    """Correct what that tool is known to mislabel, in Binade's terms, with the axis that a GEMM contracts."""
    changes, note = _mislabelled(log)
    log = replace(log, **changes, corrections=(*notes, *([note] if note else [])))
    axis = log.contracted_axis or CONTRACTED.get((log.layer_type, log.operation, log.tensor_name))
    if log.tensor_name == "weight" and "tensor_name" in changes:
        axis = None  # whether it was transposed is not recorded
    component = "FA" if log.component == "attention" else log.component
    return replace(log, contracted_axis=axis, component=component)


def _mislabelled(log: TensorLog) -> tuple[dict[str, Any], str | None]:
    """The corrected values of wrong fields of a log, and a sentence that explains why."""
    name = (log.tensor_name or "").lower()
    linear, attention = log.layer_type == "linear", log.layer_type == "attention"
    forward, backward = log.operation == "forward", log.operation == "backward"
    if log.version == "V3" and attention and log.component == "attention" and log.phase == "pre":
        if name == "attention_probs":
            return {"tensor_name": "query"}, (
                "Logged as attention_probs before attention. In logs of version V3 this is actually the query: only "
                "post_FA contains the probabilities."
            )
        if name == "value":
            return {"tensor_name": "key", "contracted_axis": -2}, (
                "Logged as value before attention. In logs of version V3 this is actually the key, with its last two "
                "axes swapped: only post_FA contains the value."
            )
    if backward and log.phase == "pre" and name == "input":
        return {"tensor_name": "grad_output"}, (
            "Logged as input of the backward pass: this is the gradient of the operation's output, grad_output."
        )
    if backward and log.phase == "post" and name == "output":
        return {"tensor_name": "grad_input"}, (
            "Logged as output of the backward pass: this is the gradient of the operation's input, grad_input."
        )
    if linear and forward and name in ("output", "mm_output"):
        said = [f"as {log.tensor_name}"] * (name != "output") + ["with phase pre"] * (log.phase == "pre")
        note = f"Logged {' and '.join(said)}: this is the output of the linear layer, which comes after its operation."
        phase = "post" if log.phase == "pre" else log.phase
        return {"tensor_name": "output", "phase": phase}, note if said else None
    if linear and name == "input_a" and (forward or backward):
        meant = "input" if forward else "grad_output"
        note = f"Logged as {log.tensor_name}: the first operand of the layer's product, {meant}."
        return {"tensor_name": meant}, note
    if linear and name == "input_b" and forward:
        return {"tensor_name": "weight"}, (
            f"Logged as {log.tensor_name}: the second operand of the layer's product, the weight. Whether it was "
            "transposed is not recorded."
        )
    if name == "attention_weights":
        return {"tensor_name": "attention_probs"}, "Logged as attention_weights: the probabilities after softmax."
    if name == "matmul_input_buffer":
        return {}, (
            "matmul_input_buffer is the memory that a product is written to: its values are meaningless unless that "
            "tool set them."
        )
    return {}, None


def _absent(value: object) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= LONGEST and value.strip().lower() in MISSING)


def _time(value: object, layout: str) -> datetime | None:
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        return datetime.strptime(value, layout)
    except ValueError:
        return None


IMPORTER = Importer("Megatron fork", read)

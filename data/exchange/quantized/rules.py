"""The rules of a quantization_config that name modules: which are left out, which are quantized, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import re2

from binade.quant.options import TENSOR, Block

REGEX = "re:"  # begins a regular expression in configurations of compressed-tensors
QUIET = re2.Options()
QUIET.log_errors = False  # they are raised
LONGEST = 200  # letters of a pattern that a sentence has
LEFT_OUT, CHANGED = "-:", "+:"  # begin those in GPTQModel's `dynamic` that leave modules out, or change their settings


@dataclass(frozen=True)
class Rule:
    """A rule that names modules.

    key       the setting that has it
    pattern   as the setting spells it
    excludes  whether the modules are left out
    matches   whether a module, by its path, is one of them
    damaged   why the pattern cannot be read, or ""
    """

    key: str
    pattern: str
    excludes: bool
    matches: Callable[[str], bool]
    damaged: str = ""

    def __str__(self) -> str:
        pattern = self.pattern if len(self.pattern) <= LONGEST else f"{self.pattern[:LONGEST]} …"
        return f"{self.key} {pattern!r}"


def rules_of(settings: Mapping[str, Any]) -> list[Rule]:
    """The rules of a quantization_config, those that leave modules out first. Targets that are classes, such as Linear,
    name no module."""
    method = settings.get("quant_method")
    excluded = [_rule(key, text, True, of) for key, of in _EXCLUDING.get(str(method), {}).items()
                for text in _texts(settings.get(key))]  # fmt: skip
    dynamic = settings.get("dynamic")
    if method == "gptq" and isinstance(dynamic, dict):
        excluded += [_rule("dynamic", text.removeprefix(LEFT_OUT), True, _regex)
                     for text in _texts([*dynamic]) if text.startswith(LEFT_OUT)]  # fmt: skip
    return excluded + [_rule(key, text, False, _compressed) for key, text in _targets(settings)]


def settings_of(settings: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The settings of a module: those of all, changed by what its group in `config_groups` says of weights, by the
    first pattern of `dynamic` that matches it, or by its entry in `quantized_layers`."""
    dynamic, layers = settings.get("dynamic"), settings.get("quantized_layers")
    if settings.get("quant_method") == "gptq" and isinstance(dynamic, dict):
        change = next((change for text, change in dynamic.items() if _changes(text, module)), None)
    elif isinstance(layers, dict) and module in layers:
        change = layers[module]
    else:
        change = _group(settings, module).get("weights")
    return {**settings, **change} if isinstance(change, dict) else settings


def disagreement(settings: Mapping[str, Any], stored: str, block: Block | None) -> str:
    """What the settings of a weight say of its format that is not so, or "". stored: as in WeightLayout.words."""
    kind, bits, group = (settings.get(name) for name in ("type", "num_bits", "group_size"))
    element = {"FP8": "FLOAT8", "MXFP8": "FLOAT8", "NVFP4": "FLOAT4", "MXFP4": "FLOAT4"}.get(stored, stored)
    algorithm = {*str(settings.get("quant_algo")).split("_")} & {"FP8", "MXFP8", "NVFP4", "MXFP4"}
    if isinstance(kind, str) and bits and element.partition(",")[0] != f"{kind}{bits}".upper():
        return f"it is stored as {stored}, and its config_groups say {kind} of {bits} bits"
    if kind and type(group) is int and group > 0 and block and block.rows == 1 and block.columns not in (None, group):
        return f"it has a scale for {block.words}, and its config_groups say {group}"
    if (tile := settings.get("weight_block_size")) and block == TENSOR:
        return f"it has one scale, and weight_block_size is {tile!r}"
    if settings.get("quant_method") == "modelopt" and algorithm and stored not in algorithm:
        return f"it is stored as {stored}, and its quant_algo is {settings['quant_algo']}"
    return ""


def _changes(pattern: str, module: str) -> bool:
    rule = _rule("dynamic", pattern.removeprefix(CHANGED), False, _regex)
    return not pattern.startswith(LEFT_OUT) and rule.matches(module)


def _group(settings: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The group of a module. compressed-tensors takes a target that is its path before one that is a regular
    expression, and both before one that is its class, which a checkpoint does not name: it is taken for Linear."""
    groups = _groups(settings)
    best: Mapping[str, Any] = {}
    nearest = 4
    for group in groups.values():
        for text in _texts(group.get("targets")):
            place = _distance(text, module)
            if place < nearest:
                best, nearest = group, place
    return best or (next(iter(groups.values())) if len(groups) == 1 else {})


def _distance(target: str, module: str) -> int:
    """How closely a target names a module: 0 by its path, 3 perhaps by its class, 4 not at all."""
    if target == module:
        return 0
    if target.startswith(REGEX):
        return 1 if _rule("targets", target, False, _compressed).matches(module) else 4
    return 2 if target == "Linear" else 4 if "." in target else 3


def _groups(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    groups = settings.get("config_groups")
    return {
        name: group for name, group in (groups if isinstance(groups, dict) else {}).items() if isinstance(group, dict)
    }


def _targets(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, group in _groups(settings).items():
        for text in _texts(group.get("targets")):
            if text.startswith(REGEX) or "." in text:
                yield f"config_groups.{name}.targets", text
    layers = settings.get("quantized_layers")
    for text in layers if isinstance(layers, dict) else ():
        yield "quantized_layers", text


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _rule(key: str, pattern: str, excludes: bool, of: Callable[[str], Callable[[str], bool]]) -> Rule:
    try:
        return Rule(key, pattern, excludes, of(pattern))
    except re2.error as error:
        return Rule(key, pattern, excludes, lambda module: False, _message(error)[:LONGEST])


def _message(error: re2.error) -> str:
    """RE2 gives bytes."""
    message = error.args[0] if error.args else ""
    return message.decode(errors="replace") if isinstance(message, bytes) else str(message)


def _regex(pattern: str) -> Callable[[str], bool]:
    compiled = re2.compile(pattern, QUIET)
    return lambda module: compiled.match(module) is not None


def _compressed(pattern: str) -> Callable[[str], bool]:
    """compressed-tensors: the path of a module, or a regular expression for its beginning."""
    return _regex(pattern.removeprefix(REGEX)) if pattern.startswith(REGEX) else lambda module: module == pattern


def _transformers(pattern: str) -> Callable[[str], bool]:
    """transformers' should_convert_module: the end of a path, or a regular expression for the first modules of it."""
    try:
        compiled = re2.compile(pattern, QUIET)
    except re2.error:
        compiled = re2.compile(re.escape(pattern), QUIET)

    def matches(module: str) -> bool:
        ends = [match.start() for match in re.finditer(r"\.", module)]
        return module.endswith(pattern) or any(compiled.fullmatch(module[:end]) for end in (*ends, len(module)))

    return matches


def _wildcard(pattern: str) -> Callable[[str], bool]:
    """ModelOpt: a path with * and ?; that of a module also covers those below it."""
    compiled = re2.compile("".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern), QUIET)
    below = f"{pattern}."
    return lambda module: compiled.fullmatch(module) is not None or module.startswith(below)


Reading = Callable[[str], Callable[[str], bool]]
_OF_TRANSFORMERS: dict[str, Reading] = {"modules_to_not_convert": _transformers}
_EXCLUDING: dict[str, dict[str, Reading]] = {
    "fp8": _OF_TRANSFORMERS,
    "mxfp4": _OF_TRANSFORMERS,
    "awq": _OF_TRANSFORMERS,
    "torchao": _OF_TRANSFORMERS,
    "bitsandbytes": {"llm_int8_skip_modules": _transformers},
    "compressed-tensors": {"ignore": _compressed},
    "modelopt": {"ignore": _wildcard, "exclude_modules": _wildcard},
}

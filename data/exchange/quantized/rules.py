"""The rules of a quantization_config that name modules: which are left out, and which are quantized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import re2

REGEX = "re:"  # begins a regular expression in configurations of compressed-tensors
QUIET = re2.Options()
QUIET.log_errors = False  # they are raised
LONGEST = 200  # letters of a pattern that a sentence has
LEFT_OUT = "-:"  # begins one in GPTQModel's `dynamic` that leaves modules out


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


def _targets(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    groups = settings.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        for text in _texts(group.get("targets") if isinstance(group, dict) else None):
            if text.startswith(REGEX) or "." in text:
                yield f"config_groups.{name}.targets", text


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _rule(key: str, pattern: str, excludes: bool, of: Callable[[str], Callable[[str], bool]]) -> Rule:
    try:
        return Rule(key, pattern, excludes, of(pattern))
    except re2.error as error:
        return Rule(key, pattern, excludes, lambda module: False, str(error)[:LONGEST])


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

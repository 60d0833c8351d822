"""Megatron Core's precision file (--te-precision-config-file) as a recipe. No torch.

    configs:
      mxfp8:
        transformer_engine_config_type: TEQuantizationParams
        training_recipe: {fp8_quantization_recipe: mxfp8}
      bf16:
        transformer_engine_config_type: TEQuantizationParams
        training_recipe: {}
    matchers:
      fc2: {config: bf16, type: glob, pattern: "*.linear_fc2", enabled: true}
      others: {config: mxfp8, type: glob, pattern: "*", enabled: true}

The first enabled matcher whose pattern matches the path of a linear layer decides. Layers that none matches get the
format of Megatron's own options (--fp8-recipe), which are not in the file: a base recipe stands for them, as in
te_mxfp8+mine.yaml. Transformer Engine's recipes have the formats of the published recipes in PUBLISHED_AS. From
megatron/core/quantization/quant_config.py and TEQuantizationRecipe in megatron/core/extensions/transformer_engine.py
(Megatron-LM d98e8a6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from binade.collector.errors import raising
from binade.collector.models.site import SEPARATE, megatron_paths
from binade.collector.recipes.files import PUBLISHED, as_table, as_text, check_keys, excerpt, read_recipe
from binade.collector.recipes.foreign_config import recognized
from binade.collector.recipes.recipe import (
    BF16,
    GLOB,
    LINEAR_OPERANDS,
    MODULES,
    PARTS,
    WHOLE_RUN,
    Part,
    Recipe,
    RecipeError,
)
from binade.data.run.tensor_kinds import OF_ROUNDED
from binade.quant.specs import OPERAND_FIELDS, GemmFormats, Spec

ALL = "*"
MOST_VALUES = 100_000  # of a file, with those of its aliases
TYPE, TE_TYPE = "transformer_engine_config_type", "TEQuantizationParams"
TRAINING, EVALUATION = "training_recipe", "evaluation_recipe"
FP8, FP4, FP8_FORMAT = "fp8_quantization_recipe", "fp4_quantization_recipe", "fp8_format"
OTHER = (
    "is no precision file of Megatron Core, which has configs and matchers, and no configuration of a tool that Binade "
    "knows: choose a recipe from `binade list recipes`, or write a .toml file"
)
IN_BF16 = "override_nonquantized_autocast"
ELEMENTS = {"e4m3": "e4m3", "hybrid": "e5m2"}  # of gradients, by fp8_format
PUBLISHED_AS = {"tensorwise": "te_current", "blockwise": "te_block", "mxfp8": "te_mxfp8", "nvfp4": "te_nvfp4"}
# The keys and their values: None if the key may be left out; any value if there are none.
Keys = Mapping[str, tuple[object, ...]]
FLAG = (None, False, True)
UNUSED: Keys = dict.fromkeys(("tp_only_amax_red", "fp8_param", "fp4_param"), FLAG)
RECIPE: Keys = {
    FP8: (None, "tensorwise", "blockwise", "mxfp8"),
    FP4: (None, "nvfp4"),
    FP8_FORMAT: (None, *ELEMENTS),
    "override_quantized_autocast": (None, True),
    IN_BF16: FLAG,
    **UNUSED,
}
CONFIG: Keys = {TYPE: (TE_TYPE,), TRAINING: (), EVALUATION: ()}
MATCHER: Keys = {"config": (), "type": ("glob",), "pattern": (), "enabled": FLAG}
NAME = re.compile(r"(?:layer(\d+)\.)?(\w+)")  # a key of Recipe.modules that is not a GLOB


@dataclass(frozen=True)
class Config:
    """precision   a key of `precisions`
    in_bf16     whether it also holds where Megatron's own options quantize nothing
    unused      the keys that Binade does not use
    """

    precision: str
    in_bf16: bool
    unused: tuple[str, ...]


@cache
def precisions() -> dict[str, tuple[dict[str, str], GemmFormats]]:
    """The training_recipe and the specs of what a linear layer can have, by a name."""
    choices: dict[str, tuple[dict[str, str], GemmFormats]] = {BF16: ({}, GemmFormats())}
    for name, published in PUBLISHED_AS.items():
        formats = read_recipe(PUBLISHED[published], published).linear.formats
        if name == "nvfp4":
            choices[name] = {FP4: name}, formats
            continue
        family = "mxfp8" if name == "mxfp8" else "fp8"
        for fp8_format, element in ELEMENTS.items():
            gradients: dict[str, Any] = {
                field: Spec.of(f"{family}_{element}", **spec.options())
                for field in OPERAND_FIELDS
                if field.endswith("grad") and (spec := formats[field])
            }
            training = {FP8: name, FP8_FORMAT: fp8_format}
            choices[_name(training)] = training, replace(formats, **gradients)
    return choices


def _name(training: Mapping[str, Any]) -> str:
    """The key of a training_recipe in `precisions`."""
    if fp8 := training.get(FP8):
        return f"{fp8}_hybrid" if training.get(FP8_FORMAT) == "hybrid" else str(fp8)
    return training.get(FP4) or BF16


def _load(content: str) -> tuple[object, bool]:
    """(the content of YAML text, True); (None, False) if it would have more than MOST_VALUES values, as aliases that
    refer to aliases have. Raises YAMLError, ValueError, RecursionError."""
    import yaml

    sizes: dict[yaml.Node, int] = {}

    def size_of(node: yaml.Node) -> int:
        """The values of a node, with those of its aliases."""
        if node not in sizes:
            sizes[node] = MOST_VALUES + 1  # for an alias to what contains it
            parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
            sizes[node] = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(map(size_of, parts)))
        return sizes[node]

    loader = yaml.SafeLoader(content)
    try:
        node = loader.get_single_node()
        if node and size_of(node) > MOST_VALUES:
            return None, False
        return loader.construct_document(node) if node else None, True
    finally:
        loader.dispose()


def read(content: str, name: str, base: Recipe | None = None) -> Recipe:
    """The recipe in a file, whose modules are the patterns. name is also the quant type of what it quantizes.
    base: the recipe of the layers that no pattern matches.

    Raises RecipeError.
    """
    import yaml  # for which --help does not wait

    with raising(RecipeError, "is not YAML", yaml.YAMLError, ValueError, RecursionError):
        loaded, is_small = _load(content)
    if not is_small:
        raise RecipeError(f"has more than {MOST_VALUES:,} values: write it without aliases to aliases")
    if isinstance(loaded, dict) and loaded and not {"configs", "matchers"} & loaded.keys():
        raise RecipeError(recognized(loaded) or OTHER)
    sections = _checked(loaded, {"configs": (), "matchers": ()}, "the file")
    configs = {name: _config(config, f"configs.{name}") for name, config in _entries(sections, "configs")}
    matched: dict[str, str] = {}  # the config by pattern
    for key, entry in _entries(sections, "matchers"):
        if not configs:
            raise RecipeError(f"matchers.{key} names a config, but configs is empty")
        matcher = _checked(entry, {**MATCHER, "config": tuple(configs)}, f"matchers.{key}")
        pattern = as_text(matcher["pattern"], f"matchers.{key}.pattern")
        if not GLOB.match(pattern):
            raise RecipeError(f"matchers.{key}.pattern is {pattern!r}: expected a glob of paths, such as *.linear_fc2")
        if matcher["enabled"] and ALL not in matched:
            matched.setdefault(pattern, matcher["config"])
    quantizing = [configs[name] for name in matched.values() if configs[name].precision != BF16]
    if base is None and ALL not in matched and not (quantizing and all(config.in_bf16 for config in quantizing)):
        raise RecipeError(
            f'no matcher has the pattern "{ALL}": layers that none matches get the format of Megatron\'s own options, '
            "which is not in the file: write the recipe that stands for them in front of the file's path, as in "
            "te_mxfp8+FILE.yaml, or add the pattern as the last matcher"
        )
    by_pattern = {pattern: configs[config] for pattern, config in matched.items()}
    recipe = base or Recipe(name)
    recipe = recipe.in_each_stage(lambda stage: _matched(replace(stage, name=name), by_pattern, base is not None))
    unused = [f"{key} of {config}" for config in dict.fromkeys(matched.values()) for key in configs[config].unused]
    if recipe.keep and any(config.in_bf16 for config in quantizing):
        unused.append(f"{IN_BF16} in {recipe.keep}, which the recipe keeps in bf16")
    return replace(recipe, about=replace(recipe.about, leaves_out=(*recipe.about.leaves_out, *unused)))


def read_json(content: str, name: str) -> Recipe:
    """The recipe in a precision file that is JSON, which is YAML but for its tabs. Raises RecipeError."""
    return read(content.replace("\t", " "), name)


def _matched(stage: Recipe, matched: Mapping[str, Config], has_base: bool) -> Recipe:
    """The recipe with the formats of the matched layers. Patterns of the recipe itself come after those of the file.

    Raises RecipeError.
    """
    earlier = {} if ALL in matched else dict(stage.modules)
    if names := [module for module in earlier if not GLOB.match(module)]:
        raise RecipeError(
            f"the recipe in front of the file has formats for {MODULES}.{names[0]}, which would come before "
            "the file's patterns: choose a recipe that treats all linear layers alike, or write both into one .toml "
            "file"
        )
    in_bf16 = has_base and not stage.linear.formats.quantized
    parts = {}
    for pattern, config in matched.items():
        precision = BF16 if in_bf16 and not config.in_bf16 else config.precision
        formats = replace(precisions()[precision][1], of_rounded=())
        parts[pattern] = Part.requested(stage.name, formats)
    linear = parts.pop(ALL, stage.linear)
    modules = parts | {module: part for module, part in earlier.items() if module not in parts}
    return replace(stage, linear=linear, modules=tuple(modules.items()))


def _entries(sections: Mapping[str, Any], name: str) -> list[tuple[Any, Any]]:
    return list(as_table(sections[name] or {}, name).items())


def _config(value: object, where: str) -> Config:
    config = _checked(value, CONFIG, where)
    training = _checked(config[TRAINING], RECIPE, f"{where}.{TRAINING}")
    if training[FP8] and training[FP4]:
        raise RecipeError(f"{where}.{TRAINING} has {FP8} and {FP4}: give one")
    unused = [key for key in UNUSED if training[key]]
    if config[EVALUATION] is not None:
        evaluation = _checked(config[EVALUATION], RECIPE, f"{where}.{EVALUATION}")
        unused += [EVALUATION] * (_name(evaluation) != _name(training))
    return Config(_name(training), bool(training[IN_BF16]), tuple(unused))


def _checked(value: object, keys: Keys, where: str) -> dict[str, Any]:
    """The value of each key, None for one that is left out."""
    given = as_table(value, where)
    check_keys(given, keys, where)
    for key, allowed in keys.items():
        if allowed and given.get(key) not in allowed:
            expected = " or ".join(str(choice).lower() for choice in allowed if choice is not None)
            raise RecipeError(f"{where}.{key} is {excerpt(given.get(key))}: expected {expected}")
    return {key: given.get(key) for key in keys}


def write(recipe: Recipe, *, forward_only: bool = False) -> str:
    """The file of a recipe that gives each linear layer one of `precisions`, for a run with or without Megatron's own
    options. forward_only: the forward operands decide, and the backward operands follow.

    Raises RecipeError, which names the first operand that a file cannot give its spec.
    """
    import yaml

    for what in WHOLE_RUN:
        if getattr(recipe, what):
            raise RecipeError(f"a precision file has no {what}: write a .toml file")
    if recipe.pv.formats.softmax.tile:
        raise RecipeError(f"pv.softmax is {recipe.pv.formats.softmax}: a precision file is about linear layers only")
    for name, part in recipe.parts().items():
        quantized = [operand for operand in PARTS[name] if part.formats[operand.field]]
        if name != "linear" and quantized:
            raise RecipeError(
                f"{name}.{quantized[0].gemm}.{quantized[0].name} is {part.rounded_to(quantized[0].field)}: "
                "a precision file is about linear layers only"
            )
    configs: dict[str, Any] = {}
    matchers: dict[str, Any] = {}
    for key, part in [*sorted(recipe.modules, key=lambda module: _width(module[0])), (ALL, recipe.linear)]:
        name = _precision(key, part, forward_only)
        configs[name] = {TYPE: TE_TYPE, TRAINING: precisions()[name][0] | {IN_BF16: True}}
        for pattern in _patterns(key):
            matchers.setdefault(pattern, {"config": name, "type": "glob", "pattern": pattern, "enabled": True})
    title = f"# {recipe.about.title}\n" if recipe.about.title else ""
    return title + str(yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False))


def _width(key: str) -> int:
    """Sorts the keys of Recipe.modules: single layers, modules in all layers, globs."""
    return 2 if GLOB.match(key) else 0 if key.startswith("layer") else 1


def _patterns(key: str) -> list[str]:
    """The globs for the linear layers that a key of Recipe.modules names."""
    if GLOB.match(key):
        return [key]
    patterns: list[str] = []
    if (name := NAME.fullmatch(key)) and name[2] not in SEPARATE:
        layer, module = str(int(name[1]) - 1) if name[1] else "*", name[2]
        experts = (None, "*") if module in ("fc1", "fc2") else (None,)
        patterns = [path for expert in experts for path in megatron_paths(layer, module, expert)]
    if not patterns:
        raise RecipeError(f"{MODULES}.{key}: a precision file has no pattern for it")
    return patterns


def _precision(key: str, part: Part, forward_only: bool) -> str:
    """The key in `precisions` of a part of a recipe."""
    choices = precisions()
    for operand in LINEAR_OPERANDS[: 2 if forward_only else None]:
        field = operand.field
        fitting = {name: choice for name, choice in choices.items() if choice[1][field] == part.formats[field]}
        if not fitting or field in part.formats.of_rounded:
            where = "linear" if key == ALL else f"{MODULES}.{key}"
            rounded = OF_ROUNDED * (field in part.formats.of_rounded)
            expected = dict.fromkeys(str(formats[field] or BF16) for _, formats in choices.values())
            raise RecipeError(
                f"{where}.{operand.gemm}.{operand.name} is {rounded}{part.rounded_to(field)}: "
                f"in a precision file it can be {', '.join(expected)}"
            )
        choices = fitting
    return next(iter(choices))

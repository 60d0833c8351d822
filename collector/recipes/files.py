"""Recipes as TOML, one file for each. No torch.

    title = "NVIDIA NVFP4 pre-training"
    source = ["arXiv 2509.25149 (excerpt)"]
    read = "code, excerpt"              # or recalled
    leaves_out = ["..."]
    uncertain = ["..."]

    [linear]                            # and [qk], [pv], [router], [product]
    forward = "nvfp4"                   # both operands of a GEMM, or one by one:
    dgrad.grad_output = "nvfp4(rounding=stochastic)"
    dgrad.weight = { spec = "nvfp4", of = "rounded" }

    [pv]
    softmax = "flash(tile=128)"         # see quant.options.Softmax; in all iterations

    [qk]
    smooth = "key"                      # see quant.options.Smooth; in all iterations

    [modules.fc2]                       # what differs from [linear] in one module
    forward.input = "mxfp8"

    [modules."layer3.fc2"]              # in that of one layer; "*.linear_fc2" is a glob of paths in Megatron's GPTModel
    forward = "bf16"

    [keep]
    layers = "first, last 2"            # as in --skip-layers

    [deoscillation]                     # of weights: after each period, see `recipe.Deoscillation`
    period = 200
    ratio = 3.0
    start = 1500

    [state]                             # of the optimizer, after each step; here bf16 is rounded to
    exp_avg = "fp8_e4m3(block=1x128)"
    exp_avg_sq = "bf16"
    momentum_buffer = "muonq"           # Muon's; or a spec
    master_weight = "bf16"              # the parameters that the optimizer updates
    weight_errors = "momentum"          # what that takes from them is added to Adam's first moment, as ECO does

    [communication]                     # see `recipe.Communication`
    reduce_scatter = "fp8_e4m3(block=1x128)"
    all_to_all = "fp8_e4m3(block=1x128)"

    [kv_cache]                          # in passes that do not train, see `recipe.KvCache`
    key = "fp8_e4m3"
    value = "nvfp4"

    [[schedule]]                        # what changes from an iteration on, or from a share of them: 9000, "90%"
    from = "90%"
    linear.forward = "bf16"

An operand that is not named stays in bf16. Every spec is literal: `mxfp8` means E4M3 for a gradient too. The names are
those of `collector.recipes.recipe.OPERANDS`.
"""

from __future__ import annotations

import json
import re
import reprlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from binade.collector.errors import raising
from binade.collector.recipes.foreign_config import recognized
from binade.collector.recipes.recipe import (
    BF16,
    LINEAR_OPERANDS,
    MODULES,
    PARTS,
    REUSED_OPERANDS,
    TABLES,
    About,
    KvCache,
    Part,
    Recipe,
    RecipeError,
    Scheme,
)
from binade.collector.recipes.selection import SelectionError, SiteSelection
from binade.data.run.store import read_text
from binade.quant.formats import UnknownFormatError
from binade.quant.specs import GemmFormats, KVCache, Smooth, Softmax, Spec, SpecError

PUBLISHED = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}
"""The files of the published recipes, by name."""

EXAMPLE = "\n".join(line[4:] for line in (__doc__ or "").splitlines() if line[:4].isspace() or not line).strip()
ABOUT = {field.name: field.type for field in fields(About)}
SECTIONS = (*PARTS, MODULES, "keep", *TABLES, "schedule")
LONGEST_EXCERPT = 80
Reader = Callable[[str, str], Recipe]
# A recipe in front of the path of a precision file: a name, with the options of a spec, or the path of a .toml file.
ON_BASE = re.compile(r"(?P<base>[^/+()]+(?:\([^()]*\))?|[^+]+\.toml)\+(?P<file>.+\.(?:ya?ml|cfg))")
START = re.compile(r"[1-9]\d{0,8}|(100|\d{1,2})(\.\d+)?%")


def label(recipe: str) -> str:
    """The name of a recipe in a list: a file without its folder."""
    if match := ON_BASE.fullmatch(recipe):
        return f"{label(match['base'])}+{label(match['file'])}"
    return Path(recipe).name


def read_recipe(path: Path, name: str, reader: Reader | None = None) -> Recipe:
    """The recipe in a file. name is also the quant type of the operands that it quantizes. reader: `from_toml`, or that
    of another kind of file.

    Raises RecipeError, which names the file, if it cannot be read or is wrong.
    """
    try:
        return (reader or from_toml)(read_text(path), name)
    except OSError as error:
        raise RecipeError(f"recipe {path}: {error.strerror}") from None
    except (UnicodeDecodeError, RecipeError, SpecError) as error:
        raise RecipeError(f"recipe {path}: {error}") from None


def from_toml(text: str, name: str) -> Recipe:
    """The recipe in TOML text, under this name. Raises RecipeError, or SpecError for operands that do not go
    together."""
    with raising(RecipeError, "is not TOML", ValueError, RecursionError):
        tables = tomllib.loads(text)
    if tables.keys() - {*ABOUT, *SECTIONS} and (message := recognized(tables)):
        raise RecipeError(message)
    check_keys(tables, (*ABOUT, *SECTIONS), "the recipe")
    pv = dict(as_table(tables.get("pv", {}), "[pv]"))
    with raising(RecipeError, "pv.softmax", SpecError):
        softmax = Softmax.parse(as_text(pv.pop("softmax", "full"), "pv.softmax"))
    qk = dict(as_table(tables.get("qk", {}), "[qk]"))
    with raising(RecipeError, "qk.smooth", SpecError):
        smooth = Smooth.parse(as_text(qk.pop("smooth", "none"), "qk.smooth"))
    qk_part, pv_part = Part(formats=GemmFormats(smooth=smooth)), Part(formats=GemmFormats(softmax=softmax))
    recipe = Recipe(name, qk=qk_part, pv=pv_part, about=_about(tables))
    recipe = _filled(recipe, {**tables, "pv": pv, "qk": qk})
    whole: dict[str, Any] = {key: _table(key, as_table(tables[key], f"[{key}]")) for key in TABLES if key in tables}
    recipe = replace(recipe, keep=_kept_layers(tables), **whole)
    return replace(recipe, schedule=_schedule(tables, recipe)).checked()


def _kept_layers(tables: Mapping[str, Any]) -> str:
    keep = as_table(tables.get("keep", {}), "[keep]")
    check_keys(keep, ("layers",), "[keep]")
    layers = as_text(keep.get("layers", ""), "keep.layers")
    with raising(RecipeError, "keep.layers", SelectionError):
        SiteSelection.parse(layers)
    return layers


def _schedule(tables: Mapping[str, Any], recipe: Recipe) -> tuple[tuple[str, Recipe], ...]:
    """The stages of a recipe, each with the iteration from which it holds."""
    listed = tables.get("schedule", [])
    if not isinstance(listed, list):
        raise RecipeError("schedule is a list of tables: write [[schedule]]")
    stages: list[tuple[str, Recipe]] = []
    # What holds for the whole run is not repeated. The formats of the KV cache belong to those of products.
    of_products: dict[str, Any] = dict.fromkeys(TABLES) | {"kv_cache": recipe.kv_cache}
    latest = replace(recipe, keep="", about=About(), **of_products)
    for table in listed:
        where = "[[schedule]]"
        check_keys(as_table(table, where), ("from", *PARTS, MODULES), where)
        start = str(table.get("from", ""))
        if not START.fullmatch(start):
            raise RecipeError(
                f'[[schedule]] from = {start or "nothing"}: expected an iteration from 1, or a share such as "90%"'
            )
        number = float(start.rstrip("%"))
        earlier = [previous for previous, _ in stages if previous.endswith("%") == start.endswith("%")]
        if earlier and number <= float(earlier[-1].rstrip("%")):
            raise RecipeError(
                f"[[schedule]] from = {start} follows {earlier[-1]}: list the changes in increasing order"
            )
        latest = _filled(latest, table)
        stages.append((start, latest))
    return tuple(stages)


def _table(name: str, given: Mapping[str, Any]) -> object:
    """One of TABLES, whose values are numbers or specs; None for one that has no value."""
    known = {field.name: field for field in fields(TABLES[name])}
    check_keys(given, known, f"[{name}]")
    values = {key: _value(f"{name}.{key}", value, known[key]) for key, value in given.items()}
    table = TABLES[name](**values)
    if isinstance(table, KvCache):
        for key, spec in table.specs.items():
            with raising(RecipeError, f"{name}.{key}", SpecError):
                KVCache("forward_b", Spec.of(spec), table.scale_of == "head")
    return table if any(isinstance(value, (Spec, Scheme, int, float)) for value in vars(table).values()) else None


def _value(where: str, value: object, of: Field[Any]) -> Any:
    default = of.default
    if choices := of.metadata.get("choices"):
        if value not in choices:
            raise RecipeError(f"{where} = {excerpt(value)}: expected {' or '.join(choices)}")
        return value
    if value in of.metadata.get("schemes", ()):
        return Scheme(str(value))
    if default is None:
        spec = _spec(value, where)
        if option := next((name for name in ("history", "center") if name in spec.options()), ""):
            raise RecipeError(f"{where} = {spec}: only operands of GEMMs have {option}, leave it out")
        if spec.hadamard and where.endswith("exp_avg_sq"):
            raise RecipeError(f"{where} = {spec}: rotated back, a second moment may be negative, leave hadamard out")
        return spec
    whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < 1e9:
        raise RecipeError(f"{where} = {value!r}: expected a {'whole ' * whole}number above 0")
    return value


def _spec(value: object, where: str) -> Spec:
    with raising(RecipeError, where, UnknownFormatError, SpecError):
        return Spec.of(as_text(value, where))


def _about(given: Mapping[str, Any]) -> About:
    values: dict[str, Any] = {}
    for name, kind in ABOUT.items():
        value = given.get(name, [] if "tuple" in str(kind) else "")
        if "tuple" in str(kind):
            if not isinstance(value, list):
                raise RecipeError(f"{name} must be a list of strings")
            values[name] = tuple(as_text(text, name) for text in value)
        else:
            values[name] = as_text(value, name)
    return About(**values)


def _filled(recipe: Recipe, tables: Mapping[str, Any]) -> Recipe:
    """The recipe with the operands that these tables name, which all get its name as quant type."""
    named = [(part, tables[part]) for part in PARTS if part in tables]
    named += [(f"{MODULES}.{name}", table) for name, table in as_table(tables.get(MODULES, {}), "[modules]").items()]
    for name, table in named:
        part = recipe.by_name().get(name, recipe.linear)
        operands = [*_operands(name, as_table(table, f"[{name}]"))]
        changes: dict[str, Any] = {field: spec for field, spec, _ in operands}
        rounded = [field for field in part.formats.of_rounded if field not in changes]
        rounded += [field for field, _, is_rounded in operands if is_rounded]
        formats = part.changed(name, {**changes, "of_rounded": tuple(sorted(rounded))}).formats
        recipe = recipe.with_parts({name: Part.requested(recipe.name, formats)})
    return recipe


def _operands(part: str, table: Mapping[str, Any]) -> Iterable[tuple[str, Spec | None, bool]]:
    """(field of GemmFormats, spec, whether it is rounded from the rounded forward operand) of each named operand."""
    gemms: dict[str, dict[str, str]] = {}
    for operand in PARTS.get(part, LINEAR_OPERANDS):
        gemms.setdefault(operand.gemm, {})[operand.name] = operand.field
    check_keys(table, gemms, f"[{part}]")
    for gemm, given in table.items():
        names = gemms[gemm]
        cells: dict[str, Any] = (
            dict.fromkeys(names, given) if isinstance(given, str) else as_table(given, f"{part}.{gemm}")
        )
        check_keys(cells, names, f"{part}.{gemm}")
        for name, cell in cells.items():
            where = f"{part}.{gemm}.{name}"
            rounded = isinstance(cell, dict) and "of" in cell
            if isinstance(cell, dict):
                check_keys(cell, ("spec", "of"), where)
                if cell.get("of", "rounded") != "rounded":
                    raise RecipeError(f'{where}: unknown of = {cell["of"]!r}: expected of = "rounded", or no of')
                if names[name] not in REUSED_OPERANDS:
                    raise RecipeError(
                        f'{where}: of = "rounded" is for backward operands that enter the forward product too'
                    )
                cell = cell.get("spec")
            named = _spec(cell, where)
            spec = for_operand(names[name], None if str(named) == BF16 else named, whole=isinstance(given, str))
            yield names[name], spec, rounded


def for_operand(field: str, spec: Spec | None, whole: bool = True) -> Spec | None:
    """The spec of an operand, for that of its whole GEMM: a weight has no tokens. whole=False: for its own."""
    return Spec.of(spec, center="none") if whole and spec and field in ("forward_b", "dgrad_b") else spec


def check_keys(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = tuple(known)
    if unknown := [name for name in given if name not in known]:
        expected = "one of " * (len(known) > 1) + ", ".join(known)
        raise RecipeError(f"unknown key {unknown[0]!r} in {where}: expected {expected}")


def as_table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecipeError(f"{where} must be a table, not {excerpt(value)}")
    return value


def as_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise RecipeError(f"{where} must be a string, not {excerpt(value)}")
    return value


def excerpt(value: object) -> str:
    """A value of a file for a message. A few aliases of YAML can stand for millions of values."""
    return reprlib.repr(value)[:LONGEST_EXCERPT]


def to_toml(recipe: Recipe) -> str:
    """The file of a recipe; reading it gives the same operands, softmax, kept layers, schedule and TABLES."""
    lines = []
    for name in ABOUT:
        if value := getattr(recipe.about, name):
            lines.append(f"{name} = {_quoted(value)}")
    for part, made in recipe.by_name().items():
        if made.formats.quantized or part not in PARTS:
            lines += ["", f"[{_key(part)}]", *(f"{key} = {cell}" for key, cell in _cells(part, made).items())]
            if made.formats.softmax.tile:
                lines.append(f"softmax = {_quoted(str(made.formats.softmax))}")
            if made.formats.smooth is not Smooth.NONE:
                lines.append(f"smooth = {_quoted(str(made.formats.smooth))}")
    if recipe.keep:
        lines += ["", "[keep]", f"layers = {_quoted(recipe.keep)}"]
    for name, table in recipe.tables().items():
        lines += ["", f"[{name}]", *(f"{key} = {_quoted(value)}" for key, value in table.items())]
    before = recipe
    for start, stage in recipe.schedule:
        lines += ["", "[[schedule]]", f"from = {start if start.isdecimal() else _quoted(start)}"]
        lines += [f"{key} = {cell}" for key, cell in changed_cells(stage, before).items()]
        before = stage
    return "\n".join(lines).lstrip() + "\n"


def changed_cells(stage: Recipe, before: Recipe) -> dict[str, str]:
    """The operands that a stage of a schedule changes, in the notation of a file: {"linear.forward.input": '"bf16"',
    ...}"""
    former = before.by_name()
    cells: dict[str, str] = {}
    for part, made in stage.by_name().items():
        old = _cells(part, former.get(part, before.linear))
        cells |= {f"{_key(part)}.{key}": cell for key, cell in _cells(part, made).items() if cell != old[key]}
    return cells


def _key(part: str) -> str:
    """The header of a part's table, such as modules.fc2."""
    table, dot, module = part.partition(".")
    return f"{table}{dot}{module if re.fullmatch(r'[A-Za-z0-9_-]*', module) else _quoted(module)}"


def _cells(part: str, made: Part) -> dict[str, str]:
    """{"forward.input": '"nvfp4"', ...}"""
    cells = {}
    for operand in PARTS.get(part, LINEAR_OPERANDS):
        spec = _quoted(made.rounded_to(operand.field))
        if operand.field in made.formats.of_rounded:
            spec = f'{{ spec = {spec}, of = "rounded" }}'
        cells[f"{operand.gemm}.{operand.name}"] = spec
    return cells


def _quoted(value: str | float | tuple[str, ...]) -> str:
    """A TOML string, which has JSON's escapes, number or list."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

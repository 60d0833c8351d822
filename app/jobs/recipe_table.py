"""Recipes on the Collect page, without Streamlit: their sources, the table of operands, and the user's own files.

A recipe that is saved here is <root>/.recipes/<name>.toml, in the format of `collector.recipes.files`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from binade.collector.recipes.draft import OF_ROUNDED
from binade.collector.recipes.files import changed_cells, draft_from, to_toml
from binade.collector.recipes.ladder import without
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import LINEAR_OPERANDS, MODULES, PARTS, WHOLE_RUN, Recipe, RecipeError
from binade.data.access import check_writable
from binade.data.store import write_atomic, write_new
from binade.quant.formats import UnknownFormatError
from binade.quant.specs import OPERAND_FIELDS, SpecError
from binade.terminal import names

FOLDER = ".recipes"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
CHANGE = re.compile(r"[\w.\"*?!\[\]-]+\s*=")  # in the name of a recipe, = occurs only in parentheses
REFUSED = (RecipeError, UnknownFormatError, SpecError)
EDITED = ", edited"
BIASED = "biased, because values are clipped"


def folder(root: Path) -> Path:
    return root / FOLDER


def saved(root: Path) -> list[str]:
    """The paths of the recipes that were saved under a root. A missing root has none."""
    return sorted(str(path) for path in folder(root).glob("*.toml") if NAME.fullmatch(path.stem))


def warnings_of(recipe: Recipe) -> list[str]:
    """Warnings about a recipe's results, a few words each."""
    words = []
    if recipe.about.read == "recalled":
        words.append("from memory, not checked against the source")
    if recipe.about.uncertain:
        words.append("partly uncertain")
    if biased_specs(recipe):
        words.append(f"stochastic rounding is {BIASED}")
    return words


def details(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """The sources of a recipe, what it leaves out and what is uncertain: nonempty lists by title."""
    about = recipe.about
    lists = {
        f"Source ({about.read})" if about.read else "Source": about.source,
        "Not reproduced": about.leaves_out,
        "Uncertain": about.uncertain,
        f"Stochastic rounding is {BIASED}": biased_specs(recipe),
    }
    return {title: items for title, items in lists.items() if items}


def biased_specs(recipe: Recipe) -> tuple[str, ...]:
    """The specs of a recipe whose stochastic rounding is biased, each once."""
    specs = (part.formats[field] for part in recipe.every_part() for field in OPERAND_FIELDS)
    return tuple(dict.fromkeys(str(spec) for spec in specs if spec and spec.biased))


def table_of(recipe: Recipe) -> pd.DataFrame:
    """A row for each operand: operand (linear.dgrad.weight), spec, and rounded: whether it is rounded from the rounded
    forward operand, missing where that is not possible."""
    rows = [
        {
            "operand": f"{name}.{operand.gemm}.{operand.name}",
            "spec": part.rounded_to(operand.field),
            "rounded": operand.field in part.formats.of_rounded if operand.field in OF_ROUNDED else None,
        }
        for name, part in sorted(recipe.by_name().items(), key=lambda item: _place(item[0]))
        for operand in PARTS.get(name, LINEAR_OPERANDS)
    ]
    return pd.DataFrame(rows).astype({"rounded": "boolean"})


def _place(part: str) -> int:
    """Sorts the parts of a table: modules follow the linear layers, from which they differ."""
    return 0 if part == "linear" else 1 if part.startswith(MODULES) else 2


def _parts(table: pd.DataFrame) -> pd.Series:
    return table["operand"].str.rsplit(".", n=2).str[0]


def modules_of(table: pd.DataFrame) -> list[str]:
    """The modules that have rows of their own."""
    return list(dict.fromkeys(part.removeprefix(f"{MODULES}.") for part in _parts(table) if part not in PARTS))


def with_modules(table: pd.DataFrame, modules: Sequence[str]) -> pd.DataFrame:
    """The table with rows for these modules and no others. New ones start as those of the linear layers."""
    parts = _parts(table)
    frames = [table[parts.isin(list(PARTS))]]
    for part in (f"{MODULES}.{name}" for name in modules):
        rows = table[parts == part]
        linear = table[parts == "linear"]
        frames.append(rows if len(rows) else linear.assign(operand=linear["operand"].str.replace("linear", part, n=1)))
    made = pd.concat(frames)
    return made.sort_values("operand", key=lambda _: _parts(made).map(_place), kind="stable", ignore_index=True)


def schedule_of(recipe: Recipe) -> pd.DataFrame:
    """A row for each stage of the schedule: from, and changes: what `recipe_of` reads."""
    rows, before = [], recipe
    for start, stage in recipe.schedule:
        cells = changed_cells(stage, before).items()
        rows.append({"from": start, "changes": "; ".join(f"{key} = " + cell.strip('"') for key, cell in cells)})
        before = stage
    return pd.DataFrame(rows, columns=["from", "changes"], dtype=object)


def recipe_of(table: pd.DataFrame, schedule: pd.DataFrame, keep: str, start: Recipe, name: str) -> Recipe:
    """The recipe of an edited table and schedule, with the layers of `keep` in bf16. Its `about` is that of `start`,
    the recipe that they were made from. Raises RecipeError, UnknownFormatError or SpecError for the first cell that is
    wrong."""
    about = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(start.about).items()}
    tables = _tables(table)
    tables["pv"]["softmax"] = str(start.pv.formats.softmax)
    tables["qk"]["smooth"] = str(start.qk.formats.smooth)
    given: dict[str, Any] = about | tables | start.tables() | {"keep": {"layers": keep.strip()}, "schedule": []}
    made = draft_from(given, name).recipe(name)
    for number, row in enumerate(schedule.fillna("").to_dict("records"), 1):
        first, changes = str(row["from"]).strip(), str(row["changes"]).strip()
        if first or changes:
            before = made.schedule[-1][1] if made.schedule else made
            try:
                given["schedule"].append(_stage(changes, before) | {"from": first})
                made = draft_from(given, name).recipe(name)
            except REFUSED as error:
                raise RecipeError(f"row {number} of the schedule: {error}") from None
    if not _same(made, start):
        title = (start.about.title or start.name).removesuffix(EDITED) + EDITED
        made = replace(made, about=replace(start.about, title=title))
    return made


def _tables(table: pd.DataFrame) -> dict[str, Any]:
    """The tables of a recipe file, from the rows of operands."""
    tables: dict[str, Any] = {}
    for row in table.to_dict("records"):
        part, gemm, operand = row["operand"].rsplit(".", 2)
        part, _, module = part.partition(".")
        cells = tables.setdefault(part, {}).setdefault(module, {}) if module else tables.setdefault(part, {})
        spec = "" if pd.isna(row["spec"]) else row["spec"].strip()
        rounded = not pd.isna(row["rounded"]) and row["rounded"]
        cells.setdefault(gemm, {})[operand] = {"spec": spec, "of": "rounded"} if rounded else spec
    return tables


def _stage(changes: str, before: Recipe) -> dict[str, Any]:
    """The tables of a stage of a schedule, given as the name of a recipe or as changes such as "linear.forward = bf16;
    linear.dgrad.weight = mxfp8". Raises RecipeError."""
    if not changes:
        raise RecipeError(
            "the row changes nothing: enter a recipe, such as bf16, or operands, such as linear.forward = bf16"
        )
    if CHANGE.match(changes):
        pairs = (change.partition("=") for change in changes.split(";") if change.strip())
        cells = [(key, cell.strip().strip('"')) for key, _, cell in pairs]
        lines = (f"{key} = {cell if cell.startswith('{') else json.dumps(cell)}" for key, cell in cells)
        try:
            return tomllib.loads("\n".join(lines))
        except tomllib.TOMLDecodeError:
            raise RecipeError(f"{changes!r}: enter changes such as linear.forward = bf16; qk.forward = bf16") from None
    recipe = parse_recipe(changes)
    if fields := [name for name in WHOLE_RUN if getattr(recipe, name)]:
        raise RecipeError(f"{changes} has its own {' and '.join(fields)}: write {without(changes, *fields)}")
    modules = dict.fromkeys((name for name, _ in before.modules), recipe.linear) | dict(recipe.modules)
    return _tables(table_of(replace(recipe, modules=tuple(modules.items()))))


def _same(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes are the same apart from their names."""
    return to_toml(replace(one, about=other.about)) == to_toml(other)


def path_of(root: Path, name: str) -> Path:
    """The file of a saved recipe. Raises RecipeError for a name or a root that cannot be used."""
    if not NAME.fullmatch(name):
        raise RecipeError(f"{name!r} is not a valid name for a recipe: use up to 64 letters, digits, - and _")
    path = folder(root) / f"{name}.toml"
    if names(str(path)) != (str(path),):
        raise RecipeError(f"{root} has a comma in its name, and commas separate recipes: use a root without one")
    if is_recipe(name):
        raise RecipeError(f"{name} is already the name of a built-in recipe: choose another name")
    return path


def is_recipe(name: str) -> bool:
    """Whether a name is that of a built-in recipe or of a format."""
    try:
        parse_recipe(name)
    except REFUSED:
        return False
    return True


def save(path: Path, recipe: Recipe, *, replace: bool = False) -> None:
    """Write a recipe to a file of `path_of`, atomically.

    Raises RecipeError if the file exists and `replace` is not set, ReadOnlyError, OSError.
    """
    check_writable("saving a recipe")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        (write_atomic if replace else write_new)(path, to_toml(recipe).encode())
    except FileExistsError:
        raise RecipeError(f"{path} exists: choose another name, or replace it") from None


def delete(path: Path) -> None:
    """Delete a file of `path_of`. Raises ReadOnlyError, or OSError if it does not exist."""
    check_writable("deleting a recipe")
    path.unlink()

"""Recipes on the Collect page without Streamlit: what is known of one, the table of its operands, the user's own files.

A recipe that is saved here is <root>/.recipes/<name>.toml, in the format of `collector.recipes.files`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pandas as pd

from binade.collector.recipes.files import OF_ROUNDED, draft_from, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import LINEAR_OPERANDS, MODULES, PARTS, Recipe, RecipeError
from binade.data.access import check_writable
from binade.data.store import staged_file
from binade.quant.formats import UnknownFormatError
from binade.quant.specs import OPERAND_FIELDS, Spec, SpecError
from binade.terminal import names

FOLDER = ".recipes"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
EDITED = ", edited"
BIASED = "biased: it clips"


def folder(root: Path) -> Path:
    return root / FOLDER


def saved(root: Path) -> list[str]:
    """The paths of the recipes that were saved under a root. A missing root has none."""
    return sorted(str(path) for path in folder(root).glob("*.toml") if NAME.fullmatch(path.stem))


def warnings_of(recipe: Recipe) -> list[str]:
    """What to know of a recipe before its results are believed, in a few words each."""
    words = []
    if recipe.about.read == "recalled":
        words.append("recalled, not read")
    if recipe.about.uncertain:
        words.append("not all is certain")
    if biased_specs(recipe):
        words.append(f"stochastic rounding is {BIASED}")
    return words


def details(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """Where a recipe comes from, what it leaves out and what is not certain: lists by title, none empty."""
    about = recipe.about
    lists = {
        f"Source ({about.read})" if about.read else "Source": about.source,
        "Leaves out": about.leaves_out,
        "Not certain": about.uncertain,
        f"Stochastic rounding is {BIASED}": biased_specs(recipe),
    }
    return {title: items for title, items in lists.items() if items}


def biased_specs(recipe: Recipe) -> tuple[str, ...]:
    """The specs of a recipe whose stochastic rounding is biased, each once."""
    specs = (part.formats[field] for part in recipe.every_part() for field in OPERAND_FIELDS)
    return biased(spec for spec in specs if spec)


def biased(specs: Iterable[Spec]) -> tuple[str, ...]:
    """Those of the specs whose stochastic rounding is biased, each once."""
    return tuple(dict.fromkeys(str(spec) for spec in specs if spec.biased))


def table_of(recipe: Recipe) -> pd.DataFrame:
    """A row for each operand: part, gemm, operand, axis (which the GEMM contracts), spec, and rounded: whether it is
    rounded from the rounded forward operand, missing where that is not possible."""
    rows = [
        {
            "part": name,
            "gemm": operand.gemm,
            "operand": operand.name,
            "axis": operand.axis,
            "spec": part.rounded_to(operand.field),
            "rounded": operand.field in part.formats.of_rounded if operand.field in OF_ROUNDED else None,
        }
        for name, part in recipe.by_name().items()
        for operand in PARTS.get(name, LINEAR_OPERANDS)
    ]
    return pd.DataFrame(rows).astype({"rounded": "boolean"})


def recipe_of(table: pd.DataFrame, keep: str, start: Recipe, name: str) -> Recipe:
    """The recipe of an edited table, with the layers of `keep` in bf16. The schedule and what is known of it are from
    `start`, from which the table was made. Raises RecipeError or SpecError for the first cell that is wrong."""
    given = tomllib.loads(to_toml(start))
    for part in (*PARTS, MODULES):
        given.pop(part, None)
    for row in table.to_dict("records"):
        part, _, module = row["part"].partition(".")
        tables = given.setdefault(part, {}).setdefault(module, {}) if module else given.setdefault(part, {})
        spec = "" if pd.isna(row["spec"]) else row["spec"].strip()
        rounded = not pd.isna(row["rounded"]) and row["rounded"]
        tables.setdefault(row["gemm"], {})[row["operand"]] = {"spec": spec, "of": "rounded"} if rounded else spec
    given["keep"] = {"layers": keep.strip()}
    made = draft_from(given, name).recipe(name)
    if not _same(made, start):
        title = (start.about.title or start.name).removesuffix(EDITED) + EDITED
        made = replace(made, about=replace(start.about, title=title))
    return made


def _same(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes do the same; their names do not count."""
    return to_toml(replace(one, about=other.about)) == to_toml(other)


def path_of(root: Path, name: str) -> Path:
    """The file of a saved recipe. Raises RecipeError for a name or a root that cannot be used."""
    if not NAME.fullmatch(name):
        raise RecipeError(f"{name!r} is not a name for a recipe: use up to 64 letters, digits, - and _")
    path = folder(root) / f"{name}.toml"
    if names(str(path)) != (str(path),):
        raise RecipeError(f"{root} has a comma in its name, which separates recipes: use a root without one")
    try:
        parse_recipe(name)
    except (RecipeError, UnknownFormatError, SpecError):
        return path
    raise RecipeError(f"{name} is a recipe of Binade, whose results would bear the same name: choose another name")


def save(path: Path, recipe: Recipe, *, replace: bool = False) -> None:
    """Write a recipe to a file of `path_of`, which appears whole or not at all.

    Raises RecipeError if there is one and `replace` is not set, ReadOnlyError, OSError.
    """
    check_writable("saving a recipe")
    if path.exists() and not replace:
        raise RecipeError(f"{path} exists: choose another name, or replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_file(path) as file:
        file.write(to_toml(recipe).encode())

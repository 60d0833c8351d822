"""The recipes that users write in the app, without Streamlit: their text, its check, and their files.

A recipe that is saved here is <root>/.recipes/<name>.toml, in the format of `collector.recipes.files`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from binade.collector.recipes.files import from_toml, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe, RecipeError
from binade.data.run.access import check_writable
from binade.data.run.store import read_text, write_atomic, write_new
from binade.data.words.text import describe
from binade.quant.formats import UnknownFormatError
from binade.quant.specs import OPERAND_FIELDS, SpecError
from binade.terminal import names

FOLDER = ".recipes"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
AT_LINE = re.compile(r" \(at line (?P<line>\d+), column \d+\)")  # in the messages of tomllib
MOST_CHARACTERS = 20_000
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


def biased_specs(recipe: Recipe) -> tuple[str, ...]:
    """The specs of a recipe whose stochastic rounding is biased, each once."""
    specs = (part.formats[field] for part in recipe.every_part() for field in OPERAND_FIELDS)
    return tuple(dict.fromkeys(str(spec) for spec in specs if spec and spec.biased))


def text_of(start: str) -> str:
    """The TOML text that an edited recipe starts from: of a user's own file as it is, of another recipe with a title
    that says that it was edited. Raises RecipeError, UnknownFormatError or SpecError if `start` is no recipe."""
    recipe = parse_recipe(start)
    if start.endswith(".toml"):
        return read_text(Path(start))
    title = (recipe.about.title or recipe.name).removesuffix(EDITED) + EDITED
    return to_toml(replace(recipe, about=replace(recipe.about, title=title)))


def checked(text: str, name: str) -> Recipe:
    """The recipe in TOML text. Raises RecipeError with the number of the wrong line and what is wrong, in one line."""
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(f"has {len(text):,} characters: expected at most {MOST_CHARACTERS:,}")
    message = _message(text)
    if not message:
        return from_toml(text, name)
    if at := AT_LINE.search(message):
        raise RecipeError(f"line {at['line']}: {message.replace(at[0], '')}")
    lines = text.splitlines()
    # The first lines that are wrong in the same way end with the line that makes them wrong.
    wrong = (number for number in range(1, len(lines) + 1) if _message("\n".join(lines[:number])) == message)
    raise RecipeError(f"line {next(wrong, len(lines))}: {message}")


def _message(text: str) -> str:
    """What is wrong with a recipe, "" for nothing."""
    try:
        from_toml(text, "unnamed")
    except REFUSED as error:
        return describe(error)
    return ""


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


def save(path: Path, text: str, *, replace: bool = False) -> None:
    """Write the TOML text of a recipe to a file of `path_of`, atomically.

    Raises RecipeError if the file exists and `replace` is not set, ReadOnlyError, OSError.
    """
    check_writable("saving a recipe")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        (write_atomic if replace else write_new)(path, text.encode())
    except FileExistsError:
        raise RecipeError(f"{path} exists: choose another name, or replace it") from None


def delete(path: Path) -> None:
    """Delete a file of `path_of`. Raises ReadOnlyError, or OSError if it does not exist."""
    check_writable("deleting a recipe")
    path.unlink()

"""The ladder of a recipe: an ablation's recipes in order. `collector.recipes.ladder` makes them. No pandas here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """title: its name in a table; recipe: its text; against: the recipe that it is compared with: the step before, or,
    with one ingredient off, the full recipe; "" for bf16."""

    title: str
    recipe: str
    against: str = ""


@dataclass(frozen=True)
class Ladder:
    """name is the text of the full recipe. The first rung is bf16."""

    name: str
    rungs: tuple[Rung, ...]

"""The tensors that Explore draws, rounded to each format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from binade.app.draw import style
from binade.app.questions.explore.compute import SCALE, SIGMA, Groups, has_masked_pairs, of_tensors, over
from binade.app.questions.shared.distributions import distribution_of
from binade.app.questions.shared.rounded import LIMIT, Recorded, applied, subject
from binade.app.questions.shared.runs import given_names
from binade.app.questions.shared.selection import Board
from binade.app.view.budget import BudgetError
from binade.data.index.catalog import USED, Catalog, CatalogError
from binade.data.run.store import TensorFileError
from binade.data.words.names import distinct_names
from binade.quant.specs import Spec, known_specs

MOST_SEARCHED = 50  # tensors, for the first that can be rounded


def first_rounded(catalog: Catalog, ranked: pd.DataFrame) -> pd.DataFrame:
    """The row of the first listed tensor that can be rounded; of the first one if none can."""
    rows = catalog.rows_of(ranked["tensor_id"].head(MOST_SEARCHED).tolist())
    masked = [has_masked_pairs(row) for row in rows.to_dict("records")]
    return rows.head(1) if all(masked) else rows.iloc[[masked.index(False)]]


def drawn_in_formats(
    board: Board, values: Mapping[str, Any], chosen: pd.DataFrame
) -> tuple[Groups, list[str], dict[str, tuple[str, int]], dict[str, str]]:
    """(the chosen tensors in each format, what is left out, how each is drawn, the tensor of each rounded group): a
    format in its own color, a tensor in its own dash."""
    if values["values"] == SCALE:
        return Groups([], notes=("Rounded values are drawn raw or ÷ σ.",)), [], {}, {}
    every = known_specs(board.opened.scored_formats(board.where))
    formats = every[: max(1, style.MAX_GROUPS // len(chosen) - 1)]
    ids = tuple(chosen["tensor_id"])
    groups, of = board.opened.kept(
        ("in formats", ids, tuple(formats), values["values"]),
        lambda: in_formats(board.opened, chosen, formats, values["values"]),
    )
    recorded = [d.group for d in groups.distributions if d.group not in of]
    looks = {name: (style.GREY, number) for number, name in enumerate(recorded)}
    dashes = dict(zip(formats, style.styles(formats)[1], strict=True))
    for name, (fmt, number) in of.items():
        looks[name] = style.color_of_spec(fmt), number + dashes[fmt]
    looks = {name: (color, dash % len(style.DASHES)) for name, (color, dash) in looks.items()}
    left = [f"{len(formats)} of {len(every)} formats are drawn: tick fewer tensors for more."]
    labels = distinct_names(chosen, given_names(board.opened))
    tensor_of = {name: labels[ids[number]] for name, (_, number) in of.items()}
    return groups, left if len(formats) < len(every) else [], looks, tensor_of


def in_formats(
    catalog: Catalog, chosen: pd.DataFrame, formats: Sequence[str], values: str
) -> tuple[Groups, dict[str, tuple[str, int]]]:
    """(the chosen tensors as recorded and rounded to each format, as their own GEMMs round them and divided by the
    standard deviations that they had before; of each rounded group, its format and the number of its tensor)."""
    of_values = of_tensors(catalog, chosen, values, USED)
    groups, notes, of = list(of_values.distributions), list(of_values.notes), dict[str, tuple[str, int]]()
    labels = distinct_names(chosen, given_names(catalog))
    exact = of_values.exact
    for number, row in enumerate(chosen.to_dict("records")):
        label = labels[row["tensor_id"]]
        if has_masked_pairs(row):
            notes.append(f"{label} is not rounded: its file also has pairs that the softmax does not see.")
            continue
        try:
            x = catalog.load(row["tensor_id"])
        except (CatalogError, TensorFileError):
            notes.append(f"{label} is not rounded: its values cannot be read.")
            continue
        recorded, axis = Recorded.of(row), row["contracted_axis"]
        for name in formats:
            spec = applied(Spec.of(name), row)
            if reason := recorded.problem(spec):
                notes.append(reason)
                continue
            try:
                rounded = subject(x, spec, -1 if pd.isna(axis) else int(axis), LIMIT, recorded)
            except BudgetError as error:
                notes.append(f"{label} is not rounded to {name}: {error}")
                continue
            if rounded.note:
                notes.append(f"{label}, rounded: {rounded.note}.")
            d = distribution_of(name if len(chosen) == 1 else f"{label}, {name}", rounded.blocks.result)
            exact += d.exact and rounded.every == 1
            of[d.group] = name, number
            groups.append(over(d, float(row["std"])) if values == SIGMA and row["std"] > 0 else d)
    drawn = [d for d in groups if d.total]
    return Groups(drawn, exact, tuple(dict.fromkeys(notes)), of_values.damaged), of

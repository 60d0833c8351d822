"""Do outlier channels persist? The hot channels of each tensor, and whether they stay hot over iterations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from binade.app.control import Control
from binade.app.figure import Column, Controls, Drawn, Figure, Item, Table, source
from binade.app.params import known_tensor
from binade.app.questions.channels import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared import board_charts, layer_chart
from binade.app.questions.shared.event_marks import with_events
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.app.style import MEASURES
from binade.data.evidence import Estimate, Sentence, exact, extreme, say, spread_of, together
from binade.data.tensor_kinds import label_of

NOTHING = (
    "The filter selects no tensor whose hot channels were recorded: choose a run recorded with “trace” under Also "
    "measured (--measures trace), and tensors that have channels (attention maps have none)."
)
ONE = "Hot channels were recorded in one iteration, {}: record at least two to see whether they persist."
HOT = Control(
    name="hot_in",
    label="Hot channels of",
    param=known_tensor,
    widget="list",
    inline=True,
)


def _share(name: str) -> dict[str, Any]:
    return {"text": lambda row: f"{row[name]:.0%}", "align": "right"}


COLUMNS = {
    "place": Column("Tensor"),
    "hot_ratio": Column(),
    "value": Column(field=MEASURES["outlier_persistence"]),
    "kept": Column(
        "Kept", help="share of an iteration’s hot channels that are hot in the next recorded one too", **_share("kept")
    ),
    "always": Column(
        "Always hot", help="share of an iteration’s hot channels that are hot in every recorded one", **_share("always")
    ),
    "chance": Column("By chance", ".3f", help="the Jaccard index of two random sets: k / (2n − k) of n channels"),
    "channels": Column("Channels", "d"),
    "iterations": Column("Iterations", "d"),
}


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    overlap = compute.persistence(selection.opened, selection.where)
    if overlap.hot.empty:
        return Drawn(problems=(NOTHING,))
    if overlap.places.empty:
        return Drawn(problems=(ONE.format(", ".join(str(int(i)) for i in overlap.hot["iteration"].unique()[:3])),))
    measure, places = MEASURES["outlier_persistence"], overlap.places
    ratio = MEASURES["hot_ratio"]
    caption = (
        f"{source(selection.where, f'{len(overlap.pairs):,} pairs of recorded iterations of {len(places):,} places')}\n"
        f"{measure.label}: {measure.definition}.\n{ratio.label}: {ratio.definition}."
    )
    title = "Persistence of hot channels"
    iterations = overlap.hot["iteration"].nunique()
    heat = Figure(
        "channel_persistence",
        layer_chart.by_layer(places, measure, f"{title} by layer and tensor", f"mean over {iterations:,} iterations"),
        places,
        caption,
        note=f"{measure.label}: {measure.definition}. Bright: the same channels stay hot.",
        hint="Click a cell to open its hottest tensor.",
        height=layer_chart.height(places),
        choose="tensor_id",
    )
    table = compute.by_iteration(overlap)
    lines = Figure(
        "channel_persistence_lines",
        board_charts.by_iteration(
            table, measure, f"{title} by iteration", "compared with the previous recorded iteration"
        ),
        table,
        caption,
        height=400,
        choose="tensor_id",
        group="iterations",
    )
    names = dict(zip(places["tensor_id"], places["place"], strict=True))
    chosen = values.get("hot_in") if values.get("hot_in") in names else next(iter(names))
    history = compute.channel_history(overlap, names[chosen])
    k = round(overlap.hot.loc[overlap.hot["place"] == names[chosen], "hot_channels"].map(len).median())
    count = history["channel"].nunique()
    shown = f"the {count} that are hot most often; {k} are hot at a time"
    map_ = Figure(
        "hot_channels",
        charts.history(history, f"Hot channels of {names[chosen]}", shown),
        history,
        caption,
        height=max(400, 130 + 18 * count),  # a line for each label
        group="iterations",
    )
    control = Controls((replace(HOT, options=list(names), titles=names),))
    items: tuple[Item, ...] = (heat, control, map_, lines)
    scope = Scope(selection.where, ((len(places), "place"),))
    items = (*items, Table("channel_places", places, COLUMNS, choose="tensor_id"))
    answer = Drawn(items, _verdict(overlap), scope=scope)
    return with_events(answer, selection.opened, selection.where)


def _verdict(overlap: compute.Persistence) -> Sentence:
    """Each place counts once: its mean over iterations, runs and micro-batches."""
    measure, ratio, places = MEASURES["outlier_persistence"], MEASURES["hot_ratio"], overlap.places

    def over(table: pd.DataFrame, name: str = "value") -> Estimate:
        return spread_of(measure, table[name].astype(float), "places")

    text = say(
        "The hot channels of two successive recorded iterations have a Jaccard index of {value}; by chance, {chance}.",
        value=over(places), chance=over(places, "chance"),
    )  # fmt: skip
    by_name = [(label_of(str(name)), over(part)) for name, part in places.groupby("tensor_name")]
    if len(by_name) > 1:
        text = together(text, extreme(by_name, "Jaccard index by tensor", lowest=True))
    hot = places[places["hot_ratio"] >= compute.OUTLIER]
    if hot.empty:
        none = say(
            "No tensor has outlier channels: no channel’s absmax reaches {limit} times the median channel’s.",
            limit=compute.OUTLIER,
        )
        return together(text, none)
    count = say(
        "In {count} of {total} places the hottest channel reaches {limit} times the median channel’s absmax.",
        count=len(hot), total=len(places), limit=compute.OUTLIER,
    )  # fmt: skip
    ratios = [(str(row["place"]), exact(ratio, row["hot_ratio"])) for row in places.to_dict("records")]
    return together(text, count, extreme(ratios, "ratio to the median channel’s absmax", lowest=False))


CHANNELS = Question(
    text="Do outlier channels persist?",
    title="Hot channels",
    icon=":material/view_column:",
    help="Hot channels over iterations, and how many of them stay hot, by layer",
    page="map",
    room="map",
    view="channels",
    controls=(HOT,),
    draw=draw,
    of_runs=True,
)

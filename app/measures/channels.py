"""Hot channels: how far the hottest stands out, and whether the same ones are hot in each recorded iteration."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart, Figure, source
from binade.app.measures.cells import by_cell
from binade.app.measures.map_measure import CellQuery, MapMeasure, if_any
from binade.data.index.catalog import SAME_IN_ITERATIONS, Catalog
from binade.data.words.fields import MEASURES
from binade.data.words.filter import Filter
from binade.data.words.names import short_names

PERSISTENCE, RATIO = MEASURES["outlier_persistence"], MEASURES["hot_ratio"]
MOST = 60  # iterations that are drawn
MOST_CHANNELS = 20


def persistence(query: CellQuery) -> pd.DataFrame:
    """`Catalog.hot_channels` with place, and compared with the same tensor in the recorded iteration before: jaccard
    (the share of the channels hot in either that are hot in both), kept (of those hot before) and chance, the Jaccard
    index of two random sets of this size, k / (2n - k) of n channels. always, in a tensor's first iteration: of the hot
    channels of an iteration, the share that is hot in every one. NaN where there is nothing to compare."""
    hot = query.opened.hot_channels(query.where)
    hot = hot[hot["layer_index"].notna()].reset_index(drop=True)
    sets = [frozenset(channels.tolist()) for channels in hot["hot_channels"]]
    channels = hot["channels"].to_numpy(float)
    jaccard, kept, chance, always = (np.full(len(hot), np.nan) for _ in range(4))
    for at in hot.groupby(list(SAME_IN_ITERATIONS), dropna=False, sort=False).indices.values():
        if len(at) > 1:
            of_all = frozenset.intersection(*(sets[i] for i in at))
            always[at[0]] = len(of_all) * len(at) / sum(len(sets[i]) for i in at)
        for i, j in pairwise(at):
            a, b, n = sets[i], sets[j], channels[j]
            jaccard[j], kept[j] = len(a & b) / len(a | b), len(a & b) / len(a)
            chance[j] = len(b) / (2 * n - len(b))
    return hot.assign(place=short_names(hot), jaccard=jaccard, kept=kept, chance=chance, always=always)


def _persistent(query: CellQuery) -> pd.DataFrame:
    table = persistence(query).dropna(subset=["jaccard"])
    return by_cell(query, table[["tensor_id"]].assign(value=table["jaccard"]), mean=True)


def _ratios(query: CellQuery) -> pd.DataFrame:
    hot = query.opened.hot_channels(query.where)
    return by_cell(query, hot[["tensor_id"]].assign(value=hot["hot_ratio"]))


def history(query: CellQuery, cell: pd.Series | None) -> Figure | None:
    """The channels of the selected tensor, or of the one with the hottest channel, that are hot most often: channel,
    iteration, share (of the runs, ranks and micro-batches of that iteration, those in which it is hot) and of_all (the
    same over all iterations)."""
    hot = persistence(query)
    if hot.empty:
        return None
    if cell is None:
        place = str(hot.groupby("place")["hot_ratio"].median().idxmax())
    else:
        place = str(hot.loc[hot["tensor_id"] == cell["tensor_id"], "place"].iloc[0])
    hot = hot[hot["place"] == place]
    rows = hot[["iteration", "hot_channels"]].explode("hot_channels").astype({"hot_channels": int})
    rows = rows.rename(columns={"hot_channels": "channel"})
    table = rows.groupby(["channel", "iteration"]).size().rename("count").reset_index()
    table["share"] = table["count"] / table["iteration"].map(hot.groupby("iteration").size())
    of_all = rows.groupby("channel").size() / len(hot)
    kept = of_all.sort_values(ascending=False, kind="stable").head(MOST_CHANNELS)
    table = table[table["channel"].isin(kept.index)].drop(columns="count").reset_index(drop=True)
    table = table.assign(of_all=table["channel"].map(of_all))
    means = hot[["jaccard", "chance", "kept", "always"]].mean()
    at_a_time = round(hot["hot_channels"].map(len).median())
    subtitle = [f"the {len(kept)} that are hot most often; {at_a_time} are hot at a time"]
    if hot["jaccard"].notna().any():
        said = f"Jaccard index {means['jaccard']:.2f}, by chance {means['chance']:.3f}"
        subtitle.append(f"{said}; {means['kept']:.0%} stay hot, {means['always']:.0%} always")
    caption = (
        f"{source(query.where, f'{len(hot):,} tensors of {place}')}\n"
        f"{PERSISTENCE.label}: {PERSISTENCE.definition}.\n{RATIO.label}: {RATIO.definition}."
    )
    height = max(400, 130 + 18 * len(kept))  # a line for each label
    return Figure("hot_channels", _chart(table, f"Hot channels of {place}", subtitle), table, caption, height=height)


def _chart(table: pd.DataFrame, title: str, subtitle: list[str]) -> Chart:
    """One line per channel, those that are hot most often at the top."""
    iterations = sorted(table["iteration"].unique())
    shown = table[table["iteration"].isin(iterations[:: -(-len(iterations) // MOST)])]
    order = table.sort_values(["of_all", "channel"], ascending=[False, True])["channel"].unique().tolist()
    legend = {"title": "share of tensors", "format": ".0%", "gradientLength": 150}
    ramp = plot.ramp("share", legend, domain=[0, 1]) if (shown["share"] < 1).any() else style.FINE
    tips = plot.tips(
        channel="channel", iteration="iteration", share=("share of tensors", ".0%"),
        of_all=("share over all iterations", ".0%"),
    )  # fmt: skip
    y = plot.y("channel:O", "channel", {"labelOverlap": False}).sort(order)
    x = plot.ordinal("iteration")
    cells = plot.cells(shown, "channel", "iteration", x=x, y=y, color=ramp, stroke="#8884", tips=tips)
    return plot.layers(title, subtitle, cells)


def _nothing(opened: Catalog, where: Filter, fmt: str) -> str:
    hot = opened.hot_channels(where)
    if hot.empty:
        return (
            "The filter selects no tensor whose hot channels were recorded: choose a run recorded with “trace” under "
            "Also measured (--measures trace), and tensors that have channels (attention maps have none)."
        )
    if where.iteration:
        return "The filter selects one iteration: clear it to see whether hot channels persist."
    one = ", ".join(str(int(iteration)) for iteration in hot["iteration"].unique()[:3])
    return f"Hot channels were recorded in one iteration, {one}: record at least two to see whether they persist."


_RECORDED = if_any("trace WHERE len(hot_channels) > 0")
OUTLIER_PERSISTENCE = MapMeasure(
    measure=PERSISTENCE, cells=_persistent, nothing=_nothing, of="tensor", history=True, several="their mean",
    ends=(0.0, 1.0), recorded=_RECORDED, extra=history,
)  # fmt: skip
HOT_RATIO = MapMeasure(
    measure=RATIO, cells=_ratios, nothing=_nothing, of="tensor", history=True, recorded=_RECORDED, extra=history
)

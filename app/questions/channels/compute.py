"""Whether the hot channels of a tensor are the same ones in each recorded iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from binade.app.questions.shared.boards import PLACE
from binade.data.catalog import SAME_IN_ITERATIONS, Catalog
from binade.data.filter import Filter
from binade.data.names import short_names

OUTLIER = 3  # a channel is called an outlier if its absmax is at least this many times the median channel's


@dataclass(frozen=True)
class Persistence:
    """
    hot     `Catalog.hot_channels`, with place
    pairs   each tensor in two successive recorded iterations of its run: PLACE, iteration (the second), jaccard (the
            share of the channels hot in either that are hot in both), kept (of those in the first) and chance, the
            Jaccard index of two random sets of this size, k / (2n - k) of n channels
    places  by PLACE, the hottest first: place, row (its name without the layer), value (the mean of jaccard), kept and
            chance (means), always (of the hot channels of an iteration, the share that is hot in every one), hot_ratio
            (the median), channels, iterations and tensors (how many), and tensor_id, of the largest hot_ratio
    """

    hot: pd.DataFrame
    pairs: pd.DataFrame
    places: pd.DataFrame


def persistence(catalog: Catalog, where: Filter) -> Persistence:
    hot = catalog.hot_channels(where)
    hot = hot[hot["layer_index"].notna()].reset_index(drop=True)
    hot = hot.assign(place=short_names(hot), row=short_names(hot.drop(columns="layer_index")))
    sets = [frozenset(channels.tolist()) for channels in hot["hot_channels"]]
    sequences = hot.groupby(list(SAME_IN_ITERATIONS), dropna=False, sort=False).indices.values()
    channels = hot["channels"].to_numpy(float)
    rows, always = [], np.full(len(hot), np.nan)
    for at in sequences:
        if len(at) > 1:
            of_all = frozenset.intersection(*(sets[i] for i in at))
            always[at[0]] = len(of_all) * len(at) / sum(len(sets[i]) for i in at)
        for i, j in pairwise(at):
            a, b, n = sets[i], sets[j], channels[j]
            rows.append((j, len(a & b) / len(a | b), len(a & b) / len(a), len(b) / (2 * n - len(b))))
    overlaps = pd.DataFrame(rows, columns=["at", "jaccard", "kept", "chance"]).set_index("at")
    pairs = hot[[*PLACE, "place", "row", "iteration"]].join(overlaps, how="inner").reset_index(drop=True)
    groups = hot.assign(always=always).groupby(list(PLACE), dropna=False)
    places = groups.agg(
        place=("place", "first"),
        row=("row", "first"),
        always=("always", "mean"),
        hot_ratio=("hot_ratio", "median"),
        channels=("channels", "max"),
        iterations=("iteration", "nunique"),
        tensors=("tensor_id", "size"),
    )
    means = pairs.groupby(list(PLACE), dropna=False)[["jaccard", "kept", "chance"]].mean()
    places = places.join(means.rename(columns={"jaccard": "value"}), how="inner").reset_index()
    places = places.merge(_hottest(hot, PLACE), on=list(PLACE), how="inner")
    return Persistence(hot, pairs, places.sort_values("hot_ratio", ascending=False, ignore_index=True))


def by_iteration(overlap: Persistence) -> pd.DataFrame:
    """iteration, layer_index, value (the mean Jaccard index with the iteration before), tensors, and the tensor_id of
    the hottest tensor of the layer in that iteration."""
    by = ["iteration", "layer_index"]
    table = overlap.pairs.groupby(by).agg(value=("jaccard", "mean"), tensors=("jaccard", "size")).reset_index()
    return table.merge(_hottest(overlap.hot, by), on=by, how="left")


def _hottest(hot: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The tensor with the largest hot_ratio of each group that has one: columns by and tensor_id."""
    known = hot.dropna(subset="hot_ratio")
    return known.loc[known.groupby(list(by), dropna=False)["hot_ratio"].idxmax(), [*by, "tensor_id"]]


def channel_history(overlap: Persistence, place: str, most: int = 20) -> pd.DataFrame:
    """The channels of one place that are hot most often, at most `most`: channel, iteration, share (of the runs, ranks
    and micro-batches of that iteration, those in which it is hot) and of_all (the same over all iterations)."""
    hot = overlap.hot[overlap.hot["place"] == place]
    rows = hot[["iteration", "tensor_id", "hot_channels"]].explode("hot_channels").astype({"hot_channels": int})
    rows = rows.rename(columns={"hot_channels": "channel"})
    table = rows.groupby(["channel", "iteration"]).size().rename("count").reset_index()
    table["share"] = table["count"] / table["iteration"].map(hot.groupby("iteration").size())
    of_all = rows.groupby("channel").size() / len(hot)
    kept = of_all.sort_values(ascending=False, kind="stable").head(most)
    table = table[table["channel"].isin(kept.index)]
    return table.assign(of_all=table["channel"].map(of_all)).drop(columns="count").reset_index(drop=True)

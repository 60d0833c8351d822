"""Are gradients above the noise? Also weights that flip between rounded values."""

from __future__ import annotations

from typing import Any

import pandas as pd

from binade.app.figure import Column, Drawn, Figure, Item, Table, Text, source
from binade.app.questions.noise import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared import board_charts
from binade.app.questions.shared.event_marks import with_events
from binade.app.questions.shared.runs import references_of
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Board, Of
from binade.app.style import MEASURES
from binade.data import evidence
from binade.data.evidence import SHARE, Sentence
from binade.data.tensor_kinds import label_of

NO_WEIGHTS = (
    "The filter selects no weight that was sampled before and after rounding: choose a quantized run recorded with "
    "“trace” under Also measured (--measures trace)."
)
FEW = (
    "To tell whether weights oscillate, at least {} recorded iterations of a run are needed, and the filter selects "
    "{}: record more with --control-iter."
)
NO_GRADIENTS = (
    "The filter selects no gradient whose rounding noise is known: record a quantized run with a backward pass, with "
    "“result” under Also measured (--measures result) or with scores."
)
LISTED = 12  # weights up to which those at bins' edges are named
WEIGHT_COLUMNS = {
    "place": Column("Weight"),
    "oscillating": Column(),
    "returned": Column(
        "Returned",
        help="weights whose rounded value changed and later changed back",
        text=lambda row: "" if pd.isna(row["returned"]) else SHARE.quantity(row["returned"]),
        align="right",
    ),
    "edge_excess": Column(),
    "at_bin_edge": Column(),
    "by_chance": Column("By chance", field=MEASURES["at_bin_edge"], help="of normally distributed values"),
    "iterations": Column("Iterations", "d"),
    "sampled": Column("Sampled", "d", help="values of each tensor that are tracked"),
}
GRADIENT_COLUMNS = {
    "place": Column("Gradient"),
    "value": Column(field=MEASURES["gradient_to_noise"]),
    "sqnr_db": Column(),
    "iteration": Column("Iteration", "d"),
    "tensors": Column("Tensors", "d"),
}


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    weights = compute.weights(board.opened, board.where)
    gradients = compute.gradients(board.opened, board.where, board.format)
    items: list[Item] = []
    verdicts: list[Sentence] = []
    problems: list[str] = []
    counts: list[tuple[int, str]] = []
    if weights.empty:
        problems.append(NO_WEIGHTS)
    else:
        iterations = int(weights["before"].max()) + 1
        if iterations < compute.LEAST:
            problems.append(FEW.format(compute.LEAST, iterations))
        places = compute.places(weights)
        items += _of_weights(board, weights, places)
        counts.append((len(places), "weight"))
        against = compute.edge_against_bf16(board.opened, board.where, places) if len(places) <= LISTED else None
        verdicts.append(_of_weights_verdict(places, iterations, against))
    if gradients.empty:
        problems.append(NO_GRADIENTS)
    else:
        items += _of_gradients(board, gradients)
        counts.append((len(in_last(gradients)), "gradient"))
        verdicts.append(_of_gradients_verdict(gradients, board.format))
    scope = Scope(board.where, tuple(counts))
    answer = Drawn(tuple(items), evidence.together(*verdicts), tuple(problems), scope)
    return with_events(answer, board.opened, board.where)


def _of_weights(board: Board, weights: pd.DataFrame, places: pd.DataFrame) -> list[Item]:
    items: list[Item] = []
    formats = ", ".join(sorted(set(weights["format"])))
    what = f"{len(weights):,} samples of weights rounded to {formats}"
    window = f"over the last {compute.WINDOW} recorded iterations, or all so far if there are fewer"
    for name, title, subtitle in (
        ("oscillating", "Oscillating weights", window),
        ("edge_excess", "Weights at a bin’s edge", "beyond chance; all weights of a layer together"),
    ):
        table, measure = compute.by_moment(weights, name), MEASURES[name]
        if table.empty:
            continue
        definition = f"{measure.label}: {measure.definition}."
        chart = board_charts.by_iteration(table, measure, title, subtitle)
        caption = f"{source(board.where, what)}\n{definition}"
        items.append(
            Figure(name, chart, table, caption, note=definition, height=340, choose="tensor_id", group="weights")
        )
    height = min(38 + 35 * len(places), 420)
    return [*items, Table("oscillating_weights", places, WEIGHT_COLUMNS, "Weights", height=height, choose="tensor_id")]


def in_last(gradients: pd.DataFrame) -> pd.DataFrame:
    last: pd.DataFrame = gradients[gradients["iteration"] == gradients["iteration"].max()]
    return last


def _of_gradients(board: Board, gradients: pd.DataFrame) -> list[Item]:
    measure = MEASURES["gradient_to_noise"]
    definition = f"{measure.label}: {measure.definition}."
    caption = f"{source(board.where, f'{len(gradients):,} gradients by place and iteration')}\n{definition}"
    items: list[Item] = []
    for name, of in (("grad_weight", "as the run computed it"), ("grad_output", f"rounded to {board.format}")):
        table = gradients[gradients["tensor_name"] == name]
        if table.empty:
            continue
        table = compute.lowest(table)
        title = f"{label_of(name).capitalize()} compared with its noise"
        chart = charts.to_noise(table, measure, compute.NOISE_LINE, title, f"{of}; the lowest of each layer")
        items.append(
            Figure(f"{name}_to_noise", chart, table, caption, height=340, choose="tensor_id", group="gradients")
        )
    table = in_last(gradients).sort_values("value", ignore_index=True)
    title = f"Gradients in iteration {int(gradients['iteration'].max())}"
    height = min(38 + 35 * len(table), 420)
    items.append(Text(definition))
    return [*items, Table("gradients_to_noise", table, GRADIENT_COLUMNS, title, height=height, choose="tensor_id")]


def _of_weights_verdict(places: pd.DataFrame, iterations: int, against: list[evidence.Named] | None) -> Sentence:
    """against: `compute.edge_against_bf16`."""
    edge = _at_edge(compute.edge_excess(places), against)
    if not (shares := compute.oscillating(places)):
        return edge
    measure = MEASURES["oscillating"]
    text = evidence.say(
        "Of a weight’s sampled values, {share} oscillate; the rounded value of {returned} changed and later changed "
        "back, over {iterations} recorded iterations.",
        share=evidence.spread_of(measure, places["oscillating"]),
        returned=evidence.spread_of(measure, places["returned"]),
        iterations=min(iterations, compute.WINDOW),
    )
    first = evidence.leaders(shares, lowest=False)
    apart = evidence.extreme(shares, "share of oscillating values", lowest=False, first=first)
    return evidence.together(text, apart if len(first) < len(shares) else "", _constant(places), edge)


def _constant(places: pd.DataFrame) -> str:
    """Which weights are the same in all recorded iterations."""
    names = places.loc[places["constant"] == 1, "place"].tolist()
    if not names:
        return ""
    more = f" and {len(names) - evidence.NAMED} more" * (len(names) > evidence.NAMED)
    return evidence.say(
        "{names} did not change in {iterations} recorded iterations.",
        names=", ".join(names[: evidence.NAMED]) + more,
        iterations=int(places.loc[places["constant"] == 1, "iterations"].min()),
    )


def _at_edge(excess: list[evidence.Named], against: list[evidence.Named] | None) -> Sentence:
    """Which weights have more values at a bin's edge than those of the bf16 run, since rounding in training is what
    matters, or where these are not known, than by chance; of more than LISTED, how many. They are judged together."""
    words = "more at a bin’s edge", "fewer at a bin’s edge"
    if against is not None:
        return evidence.effects(against, "the bf16 run’s weights", words)
    unknown = "No bf16 run was compared, so it is not known whether rounding in training is the cause."
    return evidence.together(_by_chance(excess, words), unknown if excess else "")


def _by_chance(excess: list[evidence.Named], words: tuple[str, str]) -> Sentence:
    if len(excess) <= LISTED:
        return evidence.effects(excess, "normally distributed weights", words)
    estimates = [estimate for _, estimate in excess]
    apart = [estimate for estimate, is_apart in zip(estimates, evidence.holm(estimates), strict=True) if is_apart]
    if not apart:
        return evidence.say(
            "At the edges of bins, none of {of} weights differs from normally distributed ones.", of=len(excess)
        )
    return evidence.say(
        "At the edges of bins, {more} of {of} weights have more values than normally distributed ones, and {fewer} "
        "have fewer ({low.text} to {high.text}).",
        more=sum(estimate.value > 0 for estimate in apart),
        fewer=sum(estimate.value < 0 for estimate in apart),
        of=len(excess),
        low=min(apart, key=lambda estimate: estimate.value),
        high=max(apart, key=lambda estimate: estimate.value),
    )


def _of_gradients_verdict(gradients: pd.DataFrame, fmt: str) -> Sentence:
    last = in_last(gradients)
    what = f"gradient to noise of a micro-batch in iteration {int(last['iteration'].iloc[0])}"
    return evidence.extreme(compute.to_noise(last, fmt), what, lowest=True)


NOISE = Question(
    text="Are gradients above the noise?",
    title="Noise",
    icon=":material/ssid_chart:",
    help="Weights that flip between rounded values or lie at a bin’s edge, and gradients compared with their rounding "
    "noise",
    page="map",
    room="map",
    of=Of.BOARD,
    view="noise",
    within=lambda opened, where, values: compute.one_run(opened, where),
    draw=draw,
    of_runs=True,
    beyond=references_of,
)

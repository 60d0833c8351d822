"""Are the values Gaussian? Q-Q against fitted distributions, and boxes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd

from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Drawn, Figure, Table
from binade.app.draw.style import MEASURES
from binade.app.questions.question import Question
from binade.app.questions.shared import distribution_charts, distributions, laws
from binade.app.questions.shared.distribution_charts import LAW_NAMES, LAW_TITLES, looks_of
from binade.app.questions.shared.distributions import Distribution
from binade.app.questions.shared.quantile_plots import against_law, points_of
from binade.app.questions.shared.selection import Of, SelectedTensor
from binade.app.view.params import One
from binade.data.compare.evidence import SHARE, Measure, Sentence, exact, leaders, listed, say, together
from binade.data.words.text import counted

COLUMNS = {
    "law": Column("Distribution", text=lambda row: LAW_TITLES[row["law"]]),
    "ks": Column("KS", ".4f"),
    "parameters": Column("Fitted"),
}
LAW_SCALES = {"normal": "σ", "laplace": "scale b", "student_t": "scale", "uniform": "half width"}
LAW = Control(name="law", label="Distribution", param=One(laws.LAWS), titles=LAW_TITLES)


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    distribution = distributions.distribution_of("this tensor", selected.x, (selected.row["mean"], selected.row["std"]))
    if not distribution.total:
        return Drawn(problems=("Nothing to draw: there are no finite values.",))
    precision = "exact" if distribution.exact else "exact to 1/128 of each value: the tensor is too large to sort"
    first = _against_law(selected, distribution, values["law"], precision)
    table = distributions.boxes([distribution])
    marks = "box: quartiles · line: 0.1% to 99.9% · dots: extremes"
    chart = distribution_charts.boxes(table, f"{marks} · {precision}", "which")
    height = distribution_charts.boxes_height(table)
    boxes = Figure("boxes", chart, table, f"{selected.source(precision)}\n{marks}.", height=height)
    return replace(first, items=(*first.items, boxes))


def _against_law(selected: SelectedTensor, whole: Distribution, law: str, precision: str) -> Drawn:
    nonzero = laws.nonzero(whole)
    table = laws.laws_table(nonzero)
    plot = against_law(whole, law)
    points = points_of([plot])
    if points.empty:
        return Drawn(problems=("No Q–Q plot: all values are equal.",))
    zeros = whole.total - nonzero.total
    left_out = _zeros(selected, zeros, whole.total)
    verdict = together(_fits(table, nonzero.total), _tails(selected.row, nonzero, table), left_out)
    fitted = laws.fit(nonzero, law)
    note = f"Fitted {LAW_TITLES[law]}: {fitted.text if fitted else 'none'}."
    note += " Dashed: the fitted law."
    note += f" The {zeros:,} zeros are left out." if zeros else ""
    if law == "student_t":
        note += f" ν is chosen so that the plot is straightest over {laws.FIT_POINTS} quantiles, 0.25% to 99.75%."
    caption = f"{selected.source(precision)}\nQuantiles against a {LAW_TITLES[law]}. {note}"
    chart = distribution_charts.qq(
        points, f"Q–Q against {LAW_NAMES[law]}", f"{LAW_NAMES[law]} ({LAW_SCALES[law]})",
        [(plot.group, plot.above, plot.below)],
        f"{precision} · {counted(nonzero.total, 'value')} · {selected.label}", fitted=True,
        **looks_of([plot.group], "tensor"),
    )  # fmt: skip
    figure = Figure("qq", chart, points, caption, note=note, height=420, group="law")
    title = "**Fit of each distribution**"
    note = "KS: the largest difference between the two cumulative distributions; 0: identical, 1: no overlap."
    return Drawn((figure, Table("laws", table, COLUMNS, title, note, group="law")), verdict)


KS = Measure("ks", "Kolmogorov–Smirnov distance", format=".3f", resolution=0.005)
LARGEST_KS = 0.05  # of a law that fits: no share of the values below a limit is off by more
CRITICAL_KS = 1.358  # over √n: Kolmogorov's asymptotic 5% limit; smaller if, as here, parameters are fitted
TAILS = 0.1  # a kurtosis nearer to 3 is called that of a normal distribution


def _fits(table: pd.DataFrame, n: int) -> Sentence:
    """Which of the laws of `laws.laws_table` fits the body, if any does: the distance does not see tails. Of n values,
    chance alone reaches CRITICAL_KS/√n."""
    limit = exact(KS, max(LARGEST_KS, CRITICAL_KS / math.sqrt(n)))
    distances = zip(table["law"].astype(str), table["ks"].astype(float), strict=True)
    first = leaders([(LAW_TITLES[law], exact(KS, ks)) for law, ks in distances], lowest=True)
    names, closest = listed([name for name, _ in first]), first[0][1]
    if closest.value > limit.value:
        return say(
            "Body: none of four distributions fits. The closest, {names}, has a Kolmogorov–Smirnov distance of "
            "{closest}, and more than {limit} is no fit.",
            names=names, closest=closest, limit=limit,
        )  # fmt: skip
    return say(
        "Body: {names} fits best of four distributions, Kolmogorov–Smirnov distance {closest} (at most {limit} is a "
        "fit).",
        names=names, closest=closest, limit=limit,
    )  # fmt: skip


def _tails(row: pd.Series, nonzero: Distribution, table: pd.DataFrame) -> Sentence:
    """The kurtosis of the nonzero values, which their tails decide, beside those of a normal distribution and of the
    law that is closest to the body."""
    kurtosis = laws.kurtosis_without(row, nonzero.total)
    if not math.isfinite(kurtosis) or table.empty:
        return Sentence()
    error = math.sqrt(24 / nonzero.total)
    measure, law = MEASURES["kurtosis"], str(table["law"].iloc[0])
    body = laws.fit(nonzero, law)
    said = [f"{_than(kurtosis, 3, error)} those of a normal distribution, which has 3"]
    if law != "normal" and body:
        theirs = "no finite one" if math.isinf(body.kurtosis) else measure.text(body.kurtosis)
        heavy = _than(kurtosis, body.kurtosis, error)
        said.append(f"{heavy} those of the {LAW_TITLES[law]} fitted to the body, which has {theirs}")
    text = "Tails: kurtosis {kurtosis}{of}; the tails are {said}."
    of = " without the zeros" if nonzero.total < int(row["numel"]) - int(row["nans"]) - int(row["infs"]) else ""
    return say(text, kurtosis=exact(measure, kurtosis), of=of, said=", and ".join(said))


def _than(kurtosis: float, other: float, error: float) -> str:
    near = abs(kurtosis - other) <= max(TAILS, 1.96 * error)
    return "as heavy as" if near else "heavier than" if kurtosis > other else "lighter than"


def _zeros(selected: SelectedTensor, zeros: int, total: int) -> Sentence:
    share = exact(SHARE, zeros / total)
    text = "{share} of {values} are 0 and left out."
    return say(text, share=share, values=selected.all_values) if zeros else Sentence()


NORMALITY = Question(
    text="Are the values Gaussian?",
    title="A distribution",
    icon=":material/show_chart:",
    help="Q–Q plots against fitted distributions",
    page="tensor",
    of=Of.TENSOR,
    view="law",
    choice="Compared with",
    draw=draw,
    controls=(LAW,),
)

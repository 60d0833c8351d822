"""How does a tensor differ from another? Statistics, distributions, the difference by element and, of a bf16 and a
quantized run, whether it is rounding or drift."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd

from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Drawn, Figure, Item, Table, grid
from binade.app.draw.style import MEASURES
from binade.app.questions.pair import compute
from binade.app.questions.pair.compute import Between
from binade.app.questions.pair.three_way import ThreeWay, table_of, three_way_of
from binade.app.questions.question import Question
from binade.app.questions.shared import distribution_charts, distributions
from binade.app.questions.shared.distribution_charts import looks_of
from binade.app.questions.shared.distributions import Distribution
from binade.app.questions.shared.quantile_plots import against_other, points_of
from binade.app.questions.shared.runs import FIELDS_OF_RUNS, given_names
from binade.app.questions.shared.selection import Of, SelectedTensor, listed
from binade.app.questions.why.charts import rows_by_columns
from binade.app.questions.why.compute import rows_by_channels, taken
from binade.app.questions.why.question import causes_of, facts, total_sqnr
from binade.app.view.params import known_tensor
from binade.data.compare.evidence import Measure, Sentence, exact, say, together
from binade.data.index.catalog import CatalogError
from binade.data.run.store import TensorFileError
from binade.data.words.names import distinct_names
from binade.data.words.text import number_text
from binade.quant import sketch

NONE = (
    "No other run, iteration or layer has this tensor with its values on disk. Choose a tensor to compare this one "
    "with."
)
OTHER = Control(name="other", label="Other tensor", param=known_tensor, widget="list", placeholder="choose a tensor")
RELATIVE = Measure("relative", "Relative difference", "%", "‖a − b‖ / ‖a‖")
CHANGE = "The other’s value over this tensor’s; of values with a unit, their difference"
LARGEST = Measure("largest", "Largest difference", definition="the largest |a − b|")
VALUE = Measure("value", "Value")
COSINE = Measure("cosine", "Cosine", format=".6f")


def _controls(selected: SelectedTensor, values: dict[str, Any]) -> list[Control]:
    tensor_id, other = selected.row["tensor_id"], values["other"]
    labels = listed(selected.opened, selected.where.without(*FIELDS_OF_RUNS), other or tensor_id)
    titles: dict[Any, str] = {name: label for name, label in labels.items() if name == other or name != tensor_id}
    if other is None:
        titles = {None: "none", **titles}
    return [replace(OTHER, options=list(titles), titles=titles)]


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    tensor_id, name = selected.row["tensor_id"], values["other"]
    if name in (None, tensor_id):
        return Drawn(problems=("This is the same tensor: choose another one." if name else NONE,))
    rows = selected.opened.rows_of([tensor_id, name])
    labels = distinct_names(rows, given_names(selected.opened), long=True)
    try:
        other = replace(selected, row=rows.iloc[1], x=selected.opened.load(name))
    except (CatalogError, TensorFileError) as error:
        return Drawn(problems=(f"The other tensor, {labels[name]}, cannot be compared: {error}.",))
    pair = {labels[tensor_id]: selected, labels[name]: other}
    between = None
    if selected.x.shape == other.x.shape and selected.x.numel():
        between = compute.between(selected.x, other.x)
    verdict = _verdict(between, pair) if between else say(
        "The shapes are {a} and {b}: only statistics and distributions are compared.",
        a=selected.shape, b=other.shape,
    )  # fmt: skip
    source = f"{selected.source()}\n{other.source()}"
    heat = [_heat(between, selected, source)] if between and between.largest else []
    lie = [
        distributions.distribution_of(label, tensor.x, (tensor.row["mean"], tensor.row["std"]))
        for label, tensor in pair.items()
    ]
    if all(distribution.total for distribution in lie):
        verdict = together(verdict, _distances(lie[0], lie[1]))
    drift = three_way_of(selected, other) if between else None
    drawn, tables = lie, [_statistics(pair)]
    if isinstance(drift, ThreeWay):
        verdict = together(verdict, drift.verdict)
        drawn = [*lie, distributions.distribution_of(f"bf16 run, rounded to {drift.format}", drift.rounded)]
        tables.append(table_of(drift))
    items: tuple[Item, ...] = (*_magnitudes(drawn, source), *tables, *_quantiles(lie, source), *heat)
    nothing = "No distribution is drawn: neither tensor has a finite value."
    problems = () if any(distribution.total for distribution in lie) else (nothing,)
    return Drawn(items, verdict, (*problems, drift) if isinstance(drift, str) else problems)


def _verdict(between: Between, pair: dict[str, SelectedTensor]) -> Sentence:
    selected, other = pair.values()
    if not between.differing:
        dtypes = sorted({selected.row["dtype"], other.row["dtype"]})
        return together(
            say("The two tensors are identical."),
            say("Their dtypes are {a} and {b}.", a=dtypes[0], b=dtypes[1]) if len(dtypes) > 1 else "",
        )
    if not between.error:
        relative = say("in each of these pairs, a value is NaN or Inf")
    elif not between.norm:
        relative = say("this tensor is zero")
    else:
        share = exact(RELATIVE, between.error / between.norm)
        relative = say("the difference has {share} of the norm of this tensor", share=share)
    first = say(
        "{differing} of {total} values differ from those of {other}; {relative}.",
        differing=between.differing, total=between.total, other=list(pair)[1], relative=relative,
    )  # fmt: skip
    a, b = (float(tensor.x[between.at]) for tensor in (selected, other))
    largest = say(
        "Largest difference: {largest} at [{at}], where the values are {a} and {b}.",
        largest=exact(LARGEST, between.largest), at=", ".join(map(str, between.at)),
        a=exact(VALUE, a), b=exact(VALUE, b),
    )  # fmt: skip
    return together(
        Sentence(first, (*relative.evidence, *first.evidence)),
        largest if between.largest else "",
        say("Cosine: {cosine}.", cosine=exact(COSINE, between.cosine)),
        say("{count} pairs with NaN or Inf are left out of norm, largest difference and cosine.",
            count=between.not_finite) if between.not_finite else "",
    )  # fmt: skip


def _distances(a: Distribution, b: Distribution) -> Sentence:
    """How far the distributions are apart, on bins of 1/8 binade as for any two samples."""
    sketches = [_sketch(d) for d in (a, b)]
    return say(
        "Between the distributions: KS {ks}, Wasserstein {wasserstein}, Jensen–Shannon {js}.",
        ks=exact(MEASURES["ks"], sketch.ks(*sketches)), js=exact(MEASURES["js"], sketch.js(*sketches)),
        wasserstein=exact(MEASURES["wasserstein"], sketch.wasserstein(*sketches)),
    )  # fmt: skip


def _sketch(d: Distribution) -> sketch.Sketch:
    inner = pd.Series(d.low).where(abs(d.low) <= abs(d.high), d.high).to_numpy("float32")
    return sketch.merge([sketch.Sketch(inner.view("uint32") >> 20, d.count)])


def _heat(between: Between, selected: SelectedTensor, source: str) -> Figure:
    """|a − b| by row and column."""
    rows, columns = rows_by_channels(selected.x).shape
    cells = taken((rows, columns))
    chart = rows_by_columns(between.cells, (rows, columns), cells, selected.axes, "a − b")
    caption = f"{source}\nlog2 of the largest |a − b| of each cell ({cells}); gray: no difference, NaN or Inf."
    return Figure("apart", chart, grid(between.cells), caption, note="Gray: no difference.", height=330, group="places")


def _magnitudes(lie: list[Distribution], source: str) -> list[Figure]:
    """The distributions on shared axes."""
    table = distributions.log2_histogram(lie)
    if table.empty:
        return []
    chart = distribution_charts.magnitudes(table, "tensor", "zeros have no magnitude")
    caption = f"{source}\nShares of all values per binade; zeros have no magnitude."
    return [Figure("magnitudes", chart, table, caption, height=400, group="values", width=1.4)]


def _quantiles(lie: list[Distribution], source: str) -> list[Figure]:
    """The quantiles of this tensor against those of the other, both over the standard deviation of this one."""
    plot = against_other(lie[0], lie[1], "the other tensor")
    points = points_of([plot])
    if points.empty:
        return []
    beyond = [(plot.group, plot.above, plot.below)]
    chart = distribution_charts.qq(
        points, "Q–Q against the other tensor", "the other tensor; ÷ σ of this one", beyond,
        "dashed: equal distributions; zeros left out", fitted=True, **looks_of([plot.group], "tensor"),
    )  # fmt: skip
    caption = f"{source}\nQuantiles of the nonzero values against those of the other tensor, over σ of this one."
    return [Figure("qq", chart, points, caption, height=330, group="places")]


def _statistics(pair: dict[str, SelectedTensor]) -> Table:
    a, b = map(_of, pair.values())
    rows = [(MEASURES[name].axis, name, value, b[name]) for name, value in a.items() if name in b]
    table = pd.DataFrame(rows, columns=["statistic", "name", "a", "b"])
    columns = {
        "statistic": Column("Statistic"),
        "a": Column("This tensor", text=lambda row: MEASURES[row["name"]].text(row["a"]), align="right"),
        "b": Column("The other", text=lambda row: MEASURES[row["name"]].text(row["b"]), align="right"),
        "change": Column("Change", help=CHANGE, text=_change, align="right"),
    }
    spec = next(iter(pair.values())).spec
    title = f"**Statistics** · SQNR and error of flushed values in {spec}"
    return Table("Statistics", table, columns, title, height=38 + 35 * len(table), group="values")


def _of(selected: SelectedTensor) -> dict[str, float]:
    sqnr, _ = total_sqnr(selected, selected.rounded())
    return {
        "rms": float(selected.row["rms"]),
        **facts(selected).values,
        "non_finite": (selected.row["nans"] + selected.row["infs"]) / max(selected.x.numel(), 1),
        "sqnr_db": sqnr,
        "flushed_error_share": causes_of(selected).shares[0],
    }


def _change(row: pd.Series) -> str:
    """The second value minus the first; of quantities without a unit, their ratio."""
    measure = MEASURES[row["name"]]
    if not measure.unit:
        ratio = row["b"] / row["a"] if row["a"] else math.nan
        return "–" if math.isnan(ratio) else f"× {number_text(ratio)}"
    return replace(measure.with_sign(), low_is_bad=False).text(row["b"] - row["a"])


PAIR = Question(
    text="How does it differ from another tensor?",
    title="Another tensor",
    icon=":material/compare_arrows:",
    help="Statistics and distributions of two tensors, their difference by value and, of a bf16 and a quantized run, "
    "whether it is rounding or drift",
    page="tensor",
    of=Of.TENSOR,
    view="pair",
    room="law",
    draw=draw,
    controls=(OTHER,),
    narrow=_controls,
    defaults={"other": compute.default_other},
    of_values=True,
)

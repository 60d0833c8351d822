"""Explore: the ranking, distributions over σ and block scales, Q–Q plots and formats, by numpy and scipy over the
tensor files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from vl_convert import vegalite_to_svg

from binade.app.draw.figure import Drawn
from binade.app.questions.explore import compute
from binade.app.questions.explore.curves import Curve
from binade.app.questions.explore.question import BY_FIELD
from binade.app.questions.explore.rounded import in_formats
from binade.app.questions.shared.distribution_charts import qq
from binade.app.questions.shared.distributions import distribution_of, distributions, edge
from binade.app.questions.shared.operands import ranked_tensors
from binade.app.questions.shared.quantile_plots import against_law, points_of
from binade.app.view.params import Interval
from binade.app.view.view import View
from binade.data.index.catalog import USED, Catalog
from binade.data.words.filter import Filter
from binade.quant.normal import normal_sqnr
from tests.app import roots


def drawn(catalog: Catalog, where: Filter | None = None, **values: str | list[str]) -> Drawn:
    texts = {name: [text] if isinstance(text, str) else text for name, text in values.items()}
    view = View("explore", texts)
    return (view.filtered(where) if where else view).draw(catalog)


def newest(catalog: Catalog, **fields: list) -> Filter:
    run = catalog.runs()["run_id"].iloc[0]
    last = int(catalog.distinct(("iteration",), Filter(run_id=[run]))["iteration"].max())
    return Filter(run_id=[run], iteration=[last], **fields)


def loaded(catalog: Catalog, ids: list[str]) -> list[np.ndarray]:
    return [catalog.load(name).double().numpy().ravel() for name in ids]


def test_tensors_are_ranked_by_their_worst_operand(catalog: Catalog):
    where = newest(catalog)
    found = ranked_tensors(catalog, where, "mxfp4")
    rows = catalog.tensors(where)
    scores = catalog.table("score").to_pandas()
    scores = scores[(scores["format"] == "mxfp4") & scores["tensor_id"].isin(rows["tensor_id"])]
    worst = scores.groupby("tensor_id")["sqnr_db"].min() - normal_sqnr("mxfp4")
    scored = found[found["operands"] > 0]
    assert len(found) == len(rows) and set(scored["tensor_id"]) == set(worst.index)
    np.testing.assert_allclose(scored["delta"], worst.sort_values(), rtol=1e-6)
    assert scored["operands"].sum() == len(scores) and found["operands"].iloc[-1] == 0
    middle = float(scored["delta"].median())
    within = ranked_tensors(catalog, where, "mxfp4", Interval(-100.0, middle))
    assert set(within["tensor_id"]) == set(worst.index[worst < middle])
    rest = ranked_tensors(catalog, where, "mxfp4", most=5, after=3)
    assert rest["tensor_id"].tolist() == found["tensor_id"].iloc[3:8].tolist()


def test_each_operand_is_compared_with_normal_values_in_its_own_format(catalog: Catalog):
    where = Filter(quant_type=["mxfp8"])
    found = ranked_tensors(catalog, where, USED).dropna(subset=["format"])
    assert {"mxfp8", "mxfp8_e5m2"} == set(found["format"])
    for fmt, rows in found.groupby("format"):
        np.testing.assert_allclose(rows["sqnr_db"] - rows["delta"], normal_sqnr(str(fmt)), atol=1e-5)


def test_a_tensor_with_nan_comes_first_and_zeros_last(tmp_path: Path):
    odd = roots.odd_tensors()
    ids = roots.record(tmp_path, [odd["single"], odd["zeros"], odd["some NaN"], torch.randn(64, 64)])
    with Catalog.open(tmp_path) as catalog:
        found = ranked_tensors(catalog, Filter(), "mxfp4")
    assert found["tensor_id"].iloc[0] == ids[2] and found["delta"].iloc[0] == -math.inf
    assert found["tensor_id"].iloc[-1] == ids[1]


@pytest.mark.thorough
def test_the_worst_are_drawn_until_some_are_ticked(catalog: Catalog):
    answer = drawn(catalog, newest(catalog), format="mxfp4")
    names = answer.tables["tensors"]["name"].head(3).tolist()
    assert list(dict.fromkeys(answer.get("histogram").table["group"])) == names
    ticked = answer.tables["tensors"]["tensor_id"].iloc[[5]].tolist()
    answer = drawn(catalog, newest(catalog), format="mxfp4", tensor=ticked)
    assert set(answer.get("qq").table["group"]) == set(answer.tables["tensors"]["name"].iloc[[5]])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("values", ["raw", "sigma"])
def test_magnitudes_of_groups_are_those_of_the_files(catalog: Catalog, values: str):
    """Sketches put a value into an eighth of a binade: shares of whole binades are compared away from their edges."""
    where = newest(catalog, module=["fc1"])
    table = drawn(catalog, where, by="operation", values=values, format="mxfp4").get("histogram").table
    rows = catalog.tensors(where)
    for operation, own in rows.groupby("operation"):
        parts = loaded(catalog, own["tensor_id"].tolist())
        x = np.abs(np.concatenate([part / (part.std() if values == "sigma" else 1) for part in parts]))
        mine = table[table["group"] == operation]
        upto = np.cumsum(mine["share"] * (mine["high"] - mine["low"]))
        for place in (0.25, 0.5, 0.75):  # at whole binades, where bins of a sketch end
            at = int(np.searchsorted(upto, place * upto.iloc[-1]))
            at += int(mine["high"].iloc[at] % 1 != 0)
            share = float((x[x > 0] < 2.0 ** mine["high"].iloc[at] * (1 - 1e-6)).sum()) / len(x)
            assert share == pytest.approx(upto.iloc[at], abs=0.02 if values == "sigma" else 1e-4), (operation, place)


def test_values_over_block_scales_are_the_codes_before_rounding(catalog: Catalog):
    """MXFP4's scale of a block is 2^(floor(log2 amax) - 2), so the largest value of each block lies in [4, 8)."""
    row = catalog.tensors(newest(catalog, tensor_name=["weight"], module=["fc1"], layer_index=[1])).iloc[0]
    answer = drawn(catalog, tensor=[row["tensor_id"]], values="scale", format="mxfp4")
    table = answer.get("histogram").table
    x = catalog.load(row["tensor_id"]).float().numpy().reshape(-1, 32)
    scale = 2.0 ** (np.floor(np.log2(np.abs(x).max(1, keepdims=True))) - 2)
    expected = np.log2(np.abs(x / scale)[x != 0])
    assert table["high"].max() <= 3 and table["count"].sum() == len(expected)
    for place in (-2.0, 0.0, 2.0):
        assert table.loc[table["high"] <= place, "count"].sum() == (expected < place).sum()


@pytest.mark.parametrize("law", ["normal", "laplace", "uniform"])
def test_a_law_lies_on_its_line(law: str):
    x = torch.tensor(getattr(stats, {"normal": "norm"}.get(law, law)).rvs(size=200_000, random_state=3) * 7 + 2)
    plot = against_law(distribution_of("own", x.float()), law)
    body = (plot.share > 0.05) & (plot.share < 0.95)
    np.testing.assert_allclose(plot.sample[body], plot.theoretical[body], atol=0.06)
    assert plot.body < 0.06 and (plot.tails == "as long" or law == "uniform")


@pytest.mark.parametrize("many_zeros", [False, True])
def test_values_are_standardized_by_mean_and_sigma_of_the_nonzero_ones(many_zeros: bool):
    """Also where the quartiles say nothing: of a tensor 90% of whose values are tiny."""
    x = stats.t(3).rvs(size=100_000, random_state=1)
    if many_zeros:
        x[:90_000] *= 1e-12
        x[:30_000] = 0
    x = torch.tensor(x).float()
    plot = against_law(distribution_of("own", x), "normal")
    own = x.double().numpy()[x.numpy() != 0]
    standard = (own - own.mean()) / own.std()
    np.testing.assert_allclose(
        plot.sample, np.quantile(standard, plot.share, method="inverted_cdf"), atol=0.02, rtol=0.02
    )
    np.testing.assert_allclose(plot.theoretical, stats.norm.ppf(plot.share), atol=1e-9)
    assert (plot.above, plot.below) == ((standard > 12).sum(), (standard < -12).sum())
    assert plot.tails == "heavier" and plot.reach == pytest.approx(np.abs(standard).max(), rel=0.01)


def test_the_largest_of_as_many_values_of_the_law():
    """The interval is simulated by numpy."""
    largest = np.abs(np.random.default_rng(0).standard_normal((400, 10_000))).max(1)
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    low, high = against_law(distribution_of("own", x), "normal").expected
    assert np.mean((largest < low) | (largest > high)) < 0.04
    assert low < np.median(largest) < high


@pytest.mark.parametrize("count", [1, 6])
def test_counts_beyond_the_axis_are_drawn(count: int):
    groups = [f"g{index}" for index in range(count)]
    x = stats.t(2).rvs(size=(count, 20_000), random_state=2)
    plots = [
        against_law(distribution_of(group, torch.tensor(row)), "normal") for group, row in zip(groups, x, strict=True)
    ]
    chart = qq(points_of(plots), "Q–Q", "normal", [(each.group, each.above, each.below) for each in plots])
    texts = re.findall(r"<text[^>]*>([^<]* beyond [^<]*)</text>", vegalite_to_svg(chart.to_dict()))
    above = [each.above for each in plots if each.above]
    words = f"{above[0]:,}" if count == 1 else f"{min(above):,} to {max(above):,} of each of {len(above)}"
    assert texts[0] == f"▲ {words} beyond 12" and texts[1].endswith(" beyond −12") and len(texts) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bins_are_those_of_numpy_and_none_is_empty_for_want_of_a_bin_of_the_sketch(dtype: torch.dtype):
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    d = distribution_of("own", x)
    first, shares = Curve(d, against_law(d, "normal")).bins
    number = first + np.arange(len(shares) + 1)
    edges = np.ldexp(1 + number % 2 / 2, number // 2)  # of a binade, 1 and 1.5
    np.testing.assert_allclose(edge(number), np.log2(edges), atol=1e-12)
    wanted, _ = np.histogram(x.double().abs().numpy(), edges)
    np.testing.assert_allclose(shares * np.diff(np.log2(edges)) * len(x), wanted, rtol=1e-9)
    assert (shares[np.argmax(shares) - 8 : np.argmax(shares)] > 0).all()


def test_the_browser_gets_what_the_answer_draws(catalog: Catalog):
    """The curves of sketches, which a tick draws first, lie within a bin of those of the values."""
    ids = catalog.tensors(newest(catalog, tensor_name=["weight"]))["tensor_id"].tolist()[:3]
    answer = drawn(catalog, tensor=ids)
    own = dict(iter(answer.get("qq").table.groupby("group", sort=False)))
    for d, table in zip(
        distributions(catalog, Filter(), "tensor_id", sorted(ids)), (own[name] for name in own), strict=True
    ):
        sketched = Curve(d, against_law(d, "normal")).quantiles_as_json
        near = table[table["sample"].abs() < 12]
        np.testing.assert_allclose(
            np.interp(near["theoretical"], sketched["x"], sketched["y"]), near["sample"], atol=0.25
        )


def test_a_tensor_in_each_format_lies_on_the_grid_of_each(catalog: Catalog):
    """OCP Microscaling: over a power of two, values of E2M1 have one bit of mantissa, those of E4M3 three."""
    (tensor,) = catalog.tensors(newest(catalog, tensor_name=["weight"]))["tensor_id"].tolist()[:1]
    chosen = catalog.rows_of([tensor])
    groups, formats = in_formats(catalog, chosen, ["mxfp4", "mxfp8"], "raw")
    recorded, *rounded = groups.distributions
    (values,) = loaded(catalog, [tensor])
    np.testing.assert_array_equal(recorded.low, np.unique(values))
    assert formats == {"mxfp4": ("mxfp4", 0), "mxfp8": ("mxfp8", 0)}
    for d, bits in zip(rounded, (1, 3), strict=True):
        mantissas = np.frexp(np.abs(d.low[d.low != 0]))[0] * 2 ** (bits + 1)
        assert d.total == values.size and (mantissas == mantissas.round()).all()
    shown = drawn(catalog, tensor=[tensor], rounded="formats").get("histogram").table["group"]
    assert {"mxfp4", "mxfp8"} < {*shown}


def test_a_caption_counts_tensors_and_says_what_cannot_be_rounded(catalog: Catalog):
    tensor = catalog.tensors(Filter(module=["fc1"], tensor_name=["input"])).iloc[0]["tensor_id"]
    answer = drawn(catalog, tensor=[tensor], rounded="formats")
    assert len(answer.get("histogram").table["group"].unique()) > 2
    assert "1 tensor," in answer.get("histogram").caption and "(exact)" in answer.get("histogram").caption
    (other,) = catalog.tensors(Filter(recipe=["mxfp8"])).head(1)["run_id"]
    against = drawn(catalog, tensor=[tensor], rounded="formats", law=other)
    assert not any("No Q–Q plot" in problem for problem in against.problems)
    scaled = drawn(catalog, tensor=[tensor], rounded="formats", values="scale")
    assert scaled.problems == ("Rounded values are drawn raw or ÷ σ.",)


def test_a_map_of_attention_is_not_rounded(catalog: Catalog):
    """Its file also has the pairs that the softmax does not see."""
    rows = catalog.tensors(Filter(tensor_name=["attention_probs"]))
    masked = catalog.rows_of(rows["tensor_id"].tolist()).dropna(subset=["pairs_left_out"])
    groups, of = in_formats(catalog, masked.head(1), ["mxfp4"], "raw")
    assert not of and len(groups.distributions) == 1
    assert any("pairs that the softmax does not see" in note for note in groups.notes)


def test_the_same_tensor_in_another_run(catalog: Catalog):
    runs = catalog.runs().set_index("recipe")["run_id"]
    where = {"tensor_name": ["weight"], "module": ["fc2"], "layer_index": [2]}
    own = catalog.tensors(Filter(run_id=[runs["mxfp4"]], **where)).iloc[-1]
    (other,) = catalog.tensors(Filter(run_id=[runs["bf16"]], iteration=[own["iteration"]], **where))["tensor_id"]
    table = drawn(catalog, tensor=[own["tensor_id"]], law=runs["bf16"], values="raw").get("qq").table
    mine, theirs = loaded(catalog, [own["tensor_id"], other])
    sigma = mine[mine != 0].std()
    np.testing.assert_allclose(
        table["sample"],
        np.quantile(mine[mine != 0], table["share"], method="inverted_cdf") / sigma,
        atol=0.02,
        rtol=0.02,
    )
    wanted = np.quantile(theirs[theirs != 0], table["share"], method="inverted_cdf") / sigma
    np.testing.assert_allclose(table["theoretical"], wanted, atol=0.02, rtol=0.02)


def test_each_format_on_the_same_operands(catalog: Catalog):
    where = newest(catalog, operation=["forward"])
    found = compute.compared(catalog, where, None)
    scores = catalog.table("score").to_pandas()
    scores = scores[scores["tensor_id"].isin(catalog.tensors(where)["tensor_id"])]
    for row in found.medians.to_dict("records"):
        own = scores.loc[scores["format"] == row["format"], "sqnr_db"]
        assert row["operands"] == len(own) == found.operands
        assert row["sqnr_db"] == pytest.approx(own.median())
        dots = found.dots.loc[found.dots["format"] == row["format"], "delta"]
        np.testing.assert_allclose(sorted(dots), sorted(own - normal_sqnr(row["format"])), rtol=1e-6)


def test_many_operands_are_sampled_and_it_is_said(catalog: Catalog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compute, "MOST_DOTS", 50)
    found = compute.compared(catalog, newest(catalog), None)
    assert found.every > 1 and len(found.dots) <= 50
    assert found.dots.groupby("format").size().nunique() == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("values", ["raw", "sigma", "scale"])
@pytest.mark.parametrize("rows", [*BY_FIELD, "none"])
def test_any_field_in_rows_and_columns(catalog: Catalog, rows: str, values: str):
    columns = "operation" if rows != "operation" else "module"
    answer = drawn(catalog, newest(catalog), rows=rows, columns=columns, values=values, format="mxfp4")
    assert {figure.name for figure in answer.figures} == {"histogram_panels", "qq_panels"}
    for figure in answer.figures:
        vegalite_to_svg(json.dumps(figure.spec))
        assert figure.table["columns"].nunique() > 1 and len(figure.table)


def test_what_panels_leave_out_is_said(catalog: Catalog):
    answer = drawn(catalog, rows="tensor_name", columns="none")
    names = answer.tables["tensors"]["tensor_name"].nunique()
    assert names > 12 and f"Name of the tensor: 12 of {names} are drawn." in answer.problems


def test_the_answer_returns_its_scope(catalog: Catalog):
    view = View("explore", {"by": ["run_id"], "format": ["mxfp4"]})
    answer = view.draw(catalog)
    assert answer.scope.runs == 4 and answer.scope.where.run_id and len(answer.scope.where.iteration) == 1
    assert set(answer.tables["tensors"]["run_id"]) == set(answer.scope.where.run_id)
    assert answer.scope.tensors == len(answer.tables["tensors"]) == answer.tables["Statistics"]["tensors"].sum()
    assert View("explore").read(catalog).within == View("explore").draw(catalog).scope.where

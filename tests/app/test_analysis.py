"""What the charts are drawn from, against numpy, scipy and the tensors themselves."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from binade import quant
from binade.app.questions.shared import distributions, laws
from binade.app.questions.shared.distributions import Distribution, _shares, distribution_of
from binade.app.questions.shared.labels import thinned
from binade.app.questions.shared.quantile_plots import against_law, points_of
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import run_labels
from binade.data.words.filter import Filter
from binade.quant.metrics import score
from tests.app.roots import odd_tensors, record

BIN = 1 / 8  # a sketch bin is an eighth of a binade: its ends differ by at most this share of the lower one
SMALLEST = 2.0**-126 * distributions.SKETCH_BIN  # below lies the bin of zero of a sketch
NAMES = ("input", "weight", "attention_probs", "attention_scores", "grad_output", "grad_weight")


def visible(name: str, x: torch.Tensor) -> torch.Tensor:
    return x[..., torch.ones(x.shape[-2:], dtype=torch.bool).tril()] if name.startswith("attention_") else x


@pytest.fixture(scope="module")
def tensors(catalog: Catalog) -> dict[str, tuple[str, torch.Tensor]]:
    """A real tensor of each of NAMES: its id and its values; of a map of attention, those before the causal mask, which
    its sketch has."""
    rows = catalog.tensors(Filter(quant_type=["mxfp8"], layer_index=[2], iteration=[1]))
    ids = {name: rows.loc[rows["tensor_name"] == name, "tensor_id"].iloc[0] for name in NAMES}
    return {name: (tensor_id, visible(name, catalog.load(tensor_id))) for name, tensor_id in ids.items()}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory):
    """(catalog, tensor by name, id by name) of tensors that break assumptions."""
    root = tmp_path_factory.mktemp("odd")
    values = odd_tensors()
    ids = dict(zip(values, record(root, list(values.values())), strict=True))
    with Catalog.open(root) as opened:
        yield opened, values, ids


def flat(x: torch.Tensor) -> np.ndarray:
    """The finite values as float64."""
    values = x.double().flatten().numpy()
    return values[np.isfinite(values)]


def sketched(catalog: Catalog, tensor_id: str) -> Distribution:
    (found,) = distributions.distributions(catalog, Filter(), None, [tensor_id])
    return found


floats = hnp.arrays(
    np.float32,
    st.integers(0, 300),
    elements=st.one_of(
        st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, 2.0**-149, -(2.0**-127), 3e38, math.nan, math.inf])
    ),
)
shares = st.lists(st.floats(0, 1), min_size=1, max_size=20).map(np.array)


class TestDistributionOf:
    @pytest.mark.parametrize("name", NAMES)
    def test_counts_every_value_of_a_real_tensor(self, tensors, name):
        x = tensors[name][1]
        d = distribution_of(name, x)
        values, counts = np.unique(flat(x), return_counts=True)
        assert np.array_equal(d.low, values) and np.array_equal(d.high, values) and np.array_equal(d.count, counts)
        assert d.exact and d.total == x.numel()
        assert d.mean == pytest.approx(flat(x).mean(), rel=1e-9, abs=1e-15)
        assert d.std == pytest.approx(flat(x).std(), rel=1e-9)

    @given(floats)
    def test_float32(self, values):
        d = distribution_of("x", torch.from_numpy(values))
        finite = values[np.isfinite(values)].astype(np.float64)
        assert np.array_equal(np.repeat(d.low, d.count), np.sort(finite))
        if not finite.size:
            assert math.isnan(d.mean) and math.isnan(d.std)

    @given(floats)
    def test_bfloat16_as_float32(self, values):
        x = torch.from_numpy(values).bfloat16()
        a, b = distribution_of("x", x), distribution_of("x", x.float())
        assert np.array_equal(np.repeat(a.low, a.count), np.repeat(b.low, b.count))

    @pytest.mark.parametrize("scale", [1.0, 2.0**-140, 1e38])
    def test_too_large_to_sort_is_counted_in_bins_of_a_128th(self, monkeypatch, scale):
        x = torch.randn(50_000, generator=torch.Generator().manual_seed(2)).clamp(-3, 3) * scale
        x[:4] = torch.tensor([0.0, -0.0, math.nan, math.inf])
        exact = distribution_of("x", x)
        monkeypatch.setattr("binade.app.questions.shared.distributions.MAX_EXACT_FLOAT32", 1000)
        d = distribution_of("x", x)
        assert not d.exact and d.total == exact.total == 49_998
        assert d.mean == pytest.approx(exact.mean, rel=1e-6) and d.std == pytest.approx(exact.std, rel=1e-6)
        p = np.linspace(0, 1, 301)
        wanted, got = distributions.quantiles(exact, p), distributions.quantiles(d, p)
        assert (np.abs(got - wanted) <= np.maximum(np.abs(wanted) / 128, 2.0**-133)).all()
        values = np.repeat(exact.low, exact.count)
        inside = [np.count_nonzero((low <= values) & (values <= high)) for low, high in zip(d.low, d.high, strict=True)]
        assert (np.array(inside) >= d.count).all()

    @pytest.mark.parametrize("value", [0.1, -3e38, 1e-40, 0.0])
    @pytest.mark.parametrize("count", [1, 3, 1000])
    def test_a_constant_has_no_spread(self, value, count):
        d = distribution_of("x", torch.full((count,), value))
        assert d.std == 0.0 and d.mean == d.low[0]
        assert against_law(d, "normal").problem == "all values are equal"


class TestQuantiles:
    @given(floats, shares)
    def test_exact_ones_are_numpys_inverted_cdf(self, values, p):
        d = distribution_of("x", torch.from_numpy(values))
        finite = values[np.isfinite(values)].astype(np.float64)
        if finite.size:
            assert np.array_equal(distributions.quantiles(d, p), np.quantile(finite, p, method="inverted_cdf"))
        else:
            assert np.isnan(distributions.quantiles(d, p)).all()

    @pytest.mark.parametrize("name", NAMES)
    def test_from_the_sketch_are_within_a_bin(self, catalog, tensors, name):
        tensor_id, x = tensors[name]
        p = np.linspace(0, 1, 201)
        exact = np.quantile(flat(x), p, method="inverted_cdf")
        found = distributions.quantiles(sketched(catalog, tensor_id), p)
        assert (np.abs(found - exact) <= BIN * np.maximum(np.abs(exact), np.abs(found)) + SMALLEST).all()
        assert found[0] == exact[0] and found[-1] == exact[-1]  # the extremes are known

    def test_of_huge_values_are_finite(self, odd):
        catalog, values, ids = odd
        found = distributions.quantiles(sketched(catalog, ids["huge"]), np.linspace(0, 1, 11))
        assert np.isfinite(found).all()
        assert found[-1] == flat(values["huge"]).max()


class TestLinearHistogram:
    @pytest.mark.parametrize("name", NAMES)
    def test_is_numpys(self, tensors, name):
        values = flat(tensors[name][1])
        table = distributions.linear_histogram([distribution_of(name, tensors[name][1])], bins=64)
        edges = [*table["low"], table["high"].iloc[-1]]
        counts, _ = np.histogram(values, edges)
        np.testing.assert_allclose(table["share"], counts / values.size, rtol=1e-12)
        assert values.size * (1 - table["share"].sum()) <= values.size * 1e-4 + 1
        assert np.isin(edges[0], values) and np.isin(edges[-1], values)

    def test_groups_share_their_bins(self, tensors):
        found = [distribution_of(name, x) for name, (_, x) in tensors.items()]
        table = distributions.linear_histogram(found)
        assert list(table["group"].unique()) == list(NAMES)
        assert table.groupby("group")["low"].apply(tuple).nunique() == 1
        assert (table.groupby("group")["share"].sum() >= 1 - 1e-4 - 1e-12).all()

    @pytest.mark.parametrize("name", NAMES)
    def test_from_the_sketch_is_off_by_what_straddles_edges(self, catalog, tensors, name):
        """A bin's values are spread evenly: a share is wrong by no more than the sketch bins at its two edges."""
        tensor_id, _ = tensors[name]
        d, exact = sketched(catalog, tensor_id), distribution_of(name, tensors[name][1])
        edges = np.linspace(d.low[0], d.high[-1], 41)
        difference = np.abs(_shares(d, edges) - _shares(exact, edges))
        straddling = np.array([d.count[(d.low <= edge) & (edge <= d.high)].sum() for edge in edges]) / d.total
        assert (difference <= straddling[:-1] + straddling[1:] + 1e-12).all()
        assert _shares(d, edges).sum() == pytest.approx(1)

    @given(st.lists(floats, min_size=1, max_size=3))
    def test_never_fails(self, arrays):
        found = [distribution_of(str(i), torch.from_numpy(a)) for i, a in enumerate(arrays)]
        table = distributions.linear_histogram(found)
        assert (table["share"] >= 0).all() and np.isfinite(table[["low", "high", "share"]].to_numpy(float)).all()
        assert (table["high"] > table["low"]).all()
        assert set(table["group"]) == {d.group for d in found if d.total}


class TestLog2Histogram:
    @pytest.mark.parametrize("source", ["exact", "sketch"])
    @pytest.mark.parametrize("name", NAMES)
    def test_whole_binades_are_numpys(self, catalog, tensors, name, source):
        tensor_id, x = tensors[name]
        d = distribution_of(name, x) if source == "exact" else sketched(catalog, tensor_id)
        table = distributions.log2_histogram([d])
        values = flat(x)
        _, exponents = np.frexp(values[values != 0])
        wanted = pd.Series(exponents - 1).value_counts() / values.size
        area = table["share"] * (table["high"] - table["low"])
        found = area[area > 0].groupby(np.floor(table["low"] + 1e-9).astype(int)).sum()
        pd.testing.assert_series_equal(
            found.sort_index(), wanted.sort_index(), check_names=False, check_index_type=False
        )
        assert area.sum() == pytest.approx(np.count_nonzero(values) / values.size)

    @given(st.lists(floats, min_size=1, max_size=3))
    def test_integrates_to_the_nonzero_share(self, arrays):
        table = distributions.log2_histogram(
            [distribution_of(str(i), torch.from_numpy(a)) for i, a in enumerate(arrays)]
        )
        area = (table["share"] * (table["high"] - table["low"])).groupby(table["group"]).sum()
        for index, values in enumerate(arrays):
            finite = values[np.isfinite(values)]
            if np.count_nonzero(finite):
                assert area[str(index)] == pytest.approx(np.count_nonzero(finite) / finite.size)
            else:
                assert str(index) not in area

    def test_halves(self):
        values = torch.tensor([1.0, 1.49, 1.5, -0.7, -0.51, 0.0])
        table = distributions.log2_histogram([distribution_of("x", values)]).set_index("low")
        assert table["share"].iloc[-1] == 0 and 2 ** table.index[-1] == pytest.approx(2)  # where the line ends
        table = table[table["share"] > 0]
        assert (2**table.index).tolist() == pytest.approx([0.5, 1, 1.5])
        assert (table["share"] * (table["high"] - table.index)).tolist() == pytest.approx([2 / 6, 2 / 6, 1 / 6])

    def test_keeps_the_order_of_the_groups(self, tensors):
        found = [distribution_of(name, tensors[name][1]) for name in reversed(NAMES)]
        assert list(distributions.log2_histogram(found)["group"].unique()) == list(reversed(NAMES))

    def test_marks_stay_few(self):
        wide = torch.exp2(torch.arange(-140.0, 127.0))
        found = [distribution_of(str(i), wide) for i in range(10)]
        table = distributions.log2_histogram(found)
        assert len(table) <= 4000
        assert (table["high"] - table["low"])[table["share"] > 0].round(9).eq(1).all()


class TestQuantileQuantile:
    @pytest.mark.parametrize("name", NAMES)
    def test_from_the_sketch_is_within_a_bin(self, catalog, tensors, name):
        tensor_id, x = tensors[name]
        d, exact = sketched(catalog, tensor_id), distribution_of(name, x)
        a, b = (points_of([against_law(one, "normal")]) for one in (d, exact))
        values = laws.nonzero(exact)
        value = np.abs(b["sample"] * values.std + values.mean)
        bound = (BIN / (1 - BIN) * value + SMALLEST) / exact.std + 1e-6
        assert (np.abs(a["sample"] - b["sample"]) <= bound).all()


class TestBoxes:
    @pytest.mark.parametrize("name", NAMES)
    def test_are_numpys_quantiles(self, tensors, name):
        x = tensors[name][1]
        row = distributions.boxes([distribution_of(name, x)]).iloc[0]
        wanted = np.quantile(flat(x), [0, 0.001, 0.25, 0.5, 0.75, 0.999, 1], method="inverted_cdf")
        assert row[["min", "p0_1", "q1", "median", "q3", "p99_9", "max"]].tolist() == wanted.tolist()

    @pytest.mark.parametrize("name", NAMES)
    def test_of_magnitudes(self, catalog, tensors, name):
        tensor_id, x = tensors[name]
        values = np.log2(np.abs(flat(x)[flat(x) != 0]))
        wanted = np.quantile(values, [0, 0.001, 0.25, 0.5, 0.75, 0.999, 1], method="inverted_cdf")
        exact = distributions.boxes([distributions.magnitudes(distribution_of(name, x))]).iloc[0, 1:].to_numpy(float)
        np.testing.assert_allclose(exact, wanted, rtol=1e-12)
        sketch = (
            distributions.boxes([distributions.magnitudes(sketched(catalog, tensor_id))]).iloc[0, 1:].to_numpy(float)
        )
        assert (np.abs(sketch - wanted) <= math.log2(1 + BIN) + 1e-9).all()

    def test_of_nothing(self):
        assert distributions.boxes([distribution_of("x", torch.tensor([math.nan]))]).empty
        assert distributions.boxes([distributions.magnitudes(distribution_of("x", torch.zeros(4)))]).empty


class TestDistributions:
    def test_groups_are_the_tensors_taken_together(self, catalog):
        where = Filter(layer_index=[1], tensor_name=["input"], iteration=[0])
        rows = catalog.tensors(where)
        found = {d.group: d for d in distributions.distributions(catalog, where, "quant_type")}
        assert set(found) == {"bf16", "hifp8", "mxfp8", "mxfp4"}
        for name, part in rows.groupby("quant_type"):
            values = np.concatenate([flat(catalog.load(tensor_id)) for tensor_id in part["tensor_id"]])
            d = found[name]
            assert d.total == values.size
            assert d.mean == pytest.approx(values.mean(), rel=1e-6)
            assert d.std == pytest.approx(values.std(), rel=1e-6)
            counts = np.histogram(values, [*d.low[d.low > 0], values.max()])[0]
            assert counts.tolist() == d.count[d.low > 0].tolist()

    def test_layers_in_the_order_of_their_numbers(self, odd):
        found = distributions.distributions(odd[0], Filter(), "layer_index")
        assert [d.group for d in found] == sorted((d.group for d in found), key=int)

    def test_a_word_that_does_not_apply_is_a_group_of_its_own(self, odd):
        (d,) = distributions.distributions(odd[0], Filter(layer_index=[4]), "expert")
        assert d.group == "none" and d.total == 2048

    @pytest.mark.parametrize("name", odd_tensors())
    def test_odd_tensors(self, odd, name):
        catalog, values, ids = odd
        finite = flat(values[name])
        found = distributions.distributions(catalog, Filter(), None, [ids[name]])
        exact = distribution_of(name, catalog.load(ids[name]))
        assert exact.total == finite.size
        assert sum(d.total for d in found) == finite.size
        for d in [*found, exact]:
            if finite.size:
                assert (d.low[0], d.high[-1]) == (finite.min(), finite.max())
        for group in (found, [exact]):
            for table in (
                distributions.linear_histogram(group),
                distributions.log2_histogram(group),
                distributions.boxes(group),
                distributions.boxes([distributions.magnitudes(d) for d in group]),
            ):
                assert np.isfinite(table.drop(columns="group").to_numpy(float)).all()
            linear = distributions.linear_histogram(group)
            assert linear.empty == (finite.size == 0)
            if finite.size:
                assert linear["share"].sum() == pytest.approx(1, abs=1e-3)
        assert distributions.log2_histogram([exact]).empty == (np.count_nonzero(finite) == 0)


class TestFormatComparison:
    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        "where",
        [
            Filter(layer_index=(1,), tensor_name=("weight",), iteration=(0,)),
            Filter(layer_index=(2,), component=("FA",), operation=("forward",), quant_type=("mxfp4",)),
            Filter(module=("fc2",), tensor_name=("grad_output",), quant_type=("hifp8",)),
        ],
        ids=Filter.sentence,
    )
    def test_is_the_median_of_the_operands(self, catalog, where):
        """Each operand quantized along its own axis, and measured on its own."""
        rows = catalog.tensors(where).set_index("tensor_id")
        scores = catalog.scores(where)
        table = catalog.compared(where).set_index("format")
        assert len(table) >= 3 and set(table["operands"]) == {scores["tensor_id"].nunique()}
        for fmt, line in table.iterrows():
            own = {"sqnr_db": [], "flush_to_zero": [], "saturated": []}
            for tensor_id in scores.loc[scores["format"] == fmt, "tensor_id"]:
                tensor = catalog.load(tensor_id)
                axis = int(rows.at[tensor_id, "contracted_axis"])
                x, q = flat(tensor), flat(quant.fake_quantize(tensor, fmt, dim=axis))
                own["sqnr_db"].append(10 * math.log10((x @ x) / ((q - x) @ (q - x))))
                own["flush_to_zero"].append(((x != 0) & (q == 0)).sum() / (x != 0).sum())
                own["saturated"].append(score(tensor, fmt, axis).saturated)
            assert line["tensors"] == len(own["sqnr_db"])
            for name, values in own.items():
                expected = np.quantile(values, [0.1, 0.5, 0.9])
                found = [line[f"{name}_low"], line[name], line[f"{name}_high"]]
                assert found == pytest.approx(expected, rel=1e-9), name

    def test_of_values_at_the_edge(self, odd):
        shown = ["sqnr_db", "flush_to_zero", "saturated"]
        for name, part in odd[0].scores().groupby("tensor_id"):
            table = odd[0].compared(tensor_ids=[name]).set_index("format")
            for fmt, row in part.set_index("format").iterrows():
                measured = pd.notna(row["mse"])
                assert table.at[fmt, "tensors"] == measured
                wanted = row[shown].tolist() if measured else [math.nan] * 3
                assert table.loc[fmt, shown].tolist() == pytest.approx(wanted, rel=1e-9, nan_ok=True)

    def test_tensors_without_a_finite_value_change_nothing(self, tmp_path):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        ids = record(tmp_path, [x, torch.full((4, 64), math.nan)])
        with Catalog.open(tmp_path) as opened:
            both, one = opened.compared(), opened.compared(tensor_ids=ids[:1])
            assert set(both["operands"]) == {2} and set(both["tensors"]) == {1}
            measured = ["format", "tensors", "sqnr_db", "flush_to_zero", "saturated"]
            pd.testing.assert_frame_equal(both[measured], one[measured])
            assert opened.compared(tensor_ids=[]).empty

    def test_only_formats_that_all_operands_were_scored_in(self, tmp_path):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        record(tmp_path, [x])
        record(tmp_path, [x], scores=("mxfp8",))
        with Catalog.open(tmp_path) as opened:
            assert opened.compared()[["format", "operands", "tensors"]].values.tolist() == [["mxfp8", 2, 2]]


class TestLabels:
    def test_curves_are_thinned_to_their_last_iterations(self):
        table = pd.DataFrame({"label": ["a"] * 1000 + ["b"] * 998, "iteration": [*range(1000), *range(998)]})
        found, step = thinned(table, 500)
        assert step == 4 and len(found) <= 502
        assert found.groupby("label")["iteration"].max().to_dict() == {"a": 999, "b": 997}
        assert set(found.loc[found["label"] == "a", "iteration"]) == set(range(3, 1000, 4))
        assert thinned(table, 2000)[0] is table

    @pytest.mark.parametrize(
        ("name", "started", "run_id", "expected"),
        [
            ("mxfp8", "2026-01-01 08:00:00", "x_0000ab", "mxfp8"),
            ("bf16", "2026-01-01 09:00:00", "x_0000ab", "bf16 at 09:00:00 UTC"),
            ("bf16", "2026-01-02 08:00:00", "x_0000ab", "bf16 at 2026-01-02 08:00:00 UTC"),
            ("bf16", "2026-01-01 08:00:00", "x_0000ab", "bf16 at 08:00:00 UTC · 0000ab"),
            ("bf16", "2026-01-01 08:00:00", "y_00000f", "y_00000f"),
        ],
        ids=["alone", "time", "day", "directory", "all of it"],
    )
    def test_of_runs_say_only_what_tells_them_apart(self, name, started, run_id, expected):
        runs = pd.DataFrame(
            {"name": ["bf16", name], "started": ["2026-01-01 08:00:00", started], "run_id": ["x_00000f", run_id]}
        ).assign(config="{}")
        assert run_labels(runs.assign(started=pd.to_datetime(runs["started"])))[1] == expected

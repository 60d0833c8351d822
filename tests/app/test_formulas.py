"""What answers the questions, against scipy, numpy and the public quantizer."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special, stats

from binade import quant
from binade.app.draw.figure import Offers
from binade.app.measures import blocks as blocks_measure
from binade.app.measures.map_measure import CellQuery
from binade.app.measures.registry import MAP_MEASURES
from binade.app.questions.attention import compute as attention_compute
from binade.app.questions.blocks import compute as blocks_compute
from binade.app.questions.codes import compute as codes_compute
from binade.app.questions.pair.three_way import three_way
from binade.app.questions.recipes.question import cost
from binade.app.questions.shared import distributions, laws
from binade.app.questions.shared.distributions import distribution_of
from binade.app.questions.shared.quantile_plots import against_law, against_other, points_of
from binade.app.questions.shared.rounded import subject
from binade.app.questions.shared.runs import every_run
from binade.app.questions.shared.scope import scoped
from binade.app.questions.what_if import compute as what_if_compute
from binade.app.questions.why import compute as why_compute
from binade.app.view.view import View
from binade.collector import Recorder
from binade.collector.advice import scales
from binade.data.compare import loss_gaps
from binade.data.compare.gradients import gradient_errors, gradient_summary
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import PARTS, runs_with_references
from binade.data.run.losses import read_losses
from binade.data.run.rounding_alone import RoundingAlone
from binade.data.words.filter import Filter
from binade.quant.blocks import look
from binade.quant.formats import FORMATS
from binade.quant.metrics import errors
from tests.app.roots import odd_tensors
from tests.app.test_claims import claims
from tests.data.builder import make_run

SAMPLES = {
    "normal": stats.norm(2, 3),
    "laplace": stats.laplace(-1, 0.5),
    "student_t": stats.t(4, 1, 2),
    "uniform": stats.uniform(-2, 5),
}


@pytest.fixture(scope="module")
def probs(catalog: Catalog) -> torch.Tensor:
    return catalog.load(first(catalog, tensor_name=["attention_probs"], quant_type=["mxfp4"]))


@pytest.fixture(scope="module")
def gradient(catalog: Catalog) -> torch.Tensor:
    return catalog.load(first(catalog, tensor_name=["grad_output"], module=["fc1"], quant_type=["bf16"]))


def first(catalog: Catalog, **where) -> str:
    return catalog.tensors(Filter(**where)).iloc[0]["tensor_id"]


def sample(law: str, n: int = 4001) -> np.ndarray:
    return SAMPLES[law].rvs(n, random_state=np.random.default_rng(5)).astype(np.float32)


class TestLaws:
    @pytest.mark.parametrize("law", laws.LAWS)
    def test_points_are_scipys_probplot(self, law):
        """Between two of our points lie, on both axes, all that probplot has there: the same curve, thinned."""
        x = sample(law)
        d = distribution_of("x", torch.from_numpy(x))
        fitted = laws.fit(d, law)
        shape = (fitted.freedom,) if law == "student_t" else ()
        dist = {"normal": "norm", "student_t": "t", "uniform": stats.uniform(-1, 2)}.get(law, law)
        osm, osr = stats.probplot(x.astype(np.float64), sparams=shape, dist=dist, fit=False)
        points = points_of([against_law(d, law)])
        osr = (osr - fitted.location) / fitted.scale
        # probplot's positions are Filliben's; ours run to (rank - 1/2) / n: a rank apart at most.
        ours = np.interp(points["theoretical"], osm, osr)
        rank = np.clip(np.searchsorted(osm, points["theoretical"]), 2, len(osr) - 3)
        low, high = osr[rank - 2], osr[rank + 2]
        assert ((points["sample"] >= low - 1e-9) & (points["sample"] <= high + 1e-9)).all()
        inner = np.abs(points["theoretical"]) < np.quantile(np.abs(osm), 0.98)
        assert np.abs(points["sample"] - ours)[inner].max() < 0.05

    @pytest.mark.parametrize("law", laws.LAWS)
    def test_distance_is_scipys_kstest(self, law):
        x = sample(law)
        d = distribution_of("x", torch.from_numpy(x))
        for other in laws.LAWS:
            fitted = laws.fit(d, other)
            wanted = stats.kstest(x.astype(np.float64), fitted.cdf).statistic
            assert laws.distance_to(d, fitted) == pytest.approx(wanted, abs=1e-12)

    def test_distance_of_a_sketch_is_never_above(self, catalog):

        tensor_id = first(catalog, tensor_name=["query"])
        exact = distribution_of("x", catalog.load(tensor_id))
        (d,) = distributions.distributions(catalog, Filter(), None, [tensor_id])
        for law in laws.LAWS:
            fitted = laws.fit(exact, law)
            assert 0 < laws.distance_to(d, fitted) <= laws.distance_to(exact, fitted) + 1e-12

    @pytest.mark.parametrize("law", laws.LAWS)
    def test_the_law_that_made_it_comes_closest(self, law):
        d = distribution_of("x", torch.from_numpy(sample(law, 20_000)))
        table = laws.laws_table(d)
        ks = table.set_index("law")["ks"]
        assert ks[law] < 0.02 and (ks[law] <= ks.min() + 0.003)

    def test_fits_are_scipys_maximum_likelihood(self):
        d = {law: distribution_of("x", torch.from_numpy(sample(law))) for law in laws.LAWS}
        x = sample("normal").astype(np.float64)
        assert (laws.fit(d["normal"], "normal").location, laws.fit(d["normal"], "normal").scale) == pytest.approx(
            stats.norm.fit(x), rel=1e-6
        )
        x = sample("laplace").astype(np.float64)
        found = laws.fit(d["laplace"], "laplace")
        assert (found.location, found.scale) == pytest.approx(stats.laplace.fit(x), rel=1e-3)
        x = sample("uniform").astype(np.float64)
        found = laws.fit(d["uniform"], "uniform")
        assert (found.location - found.scale, 2 * found.scale) == pytest.approx(stats.uniform.fit(x), rel=1e-6)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("freedom", [2.0, 4.0, 10.0])
    def test_student_t_finds_the_degrees_of_freedom(self, freedom):
        x = stats.t(freedom, 3, 0.5).rvs(20_000, random_state=np.random.default_rng(1)).astype(np.float32)
        found = laws.fit(distribution_of("x", torch.from_numpy(x)), "student_t")
        mle = stats.t.fit(x.astype(np.float64))
        assert math.log2(found.freedom / mle[0]) == pytest.approx(0, abs=0.35)
        assert (found.location, found.scale) == pytest.approx(mle[1:], rel=0.05)

    def test_between_two_samples(self):
        a, b = sample("normal"), sample("laplace", 2501)
        own, other = (distribution_of("group", torch.from_numpy(x)) for x in (a, b))
        points = against_other(own, other, "other")
        assert points.share[[0, -1]] == pytest.approx([0.5 / 2501, 1 - 0.5 / 2501])
        for found, x in ((points.sample, a), (points.theoretical, b)):
            wanted = np.quantile(x.astype(float), points.share, method="inverted_cdf") / a.astype(float).std()
            np.testing.assert_allclose(found, wanted, rtol=1e-9)

    @pytest.mark.parametrize("name", ["all NaN", "zeros", "constant", "single", "empty", "huge", "subnormal"])
    def test_odd_tensors(self, name):
        d = distribution_of("x", odd_tensors()[name])
        table = laws.laws_table(d)
        assert table["ks"].between(0, 1).all() and len(table) == (4 if name in ("huge", "subnormal") else 0)

    def test_unknown_law(self):
        with pytest.raises(ValueError, match="normal, laplace"):
            laws.fit(distribution_of("x", torch.ones(3)), "cauchy")


class TestWhatIf:
    OPTIONS = (
        {},
        {"scale": "ceil"},
        {"scale": "4over6"},
        {"rounding": "stochastic"},
        {"block": "16"},
        {"block": "8x16"},
        {"overflow": "saturate"},
    )

    @pytest.mark.sampled(23)
    @pytest.mark.parametrize(
        "name", ["mxfp8", "mxfp4", "nvfp4", "hifp8", "fp8_e4m3", "mxint8", "bf16", "hif4", "nvint4"]
    )
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_is_fake_quantize_measured_by_numpy(self, gradient, name, options):
        one, gradient = what_if_compute.trial(name, **options), gradient.flatten(0, -2)[:32]
        table, shown = what_if_compute.try_formats([what_if_compute.TriedOperand(gradient, -1)], [one], together=False)
        x = gradient.double().numpy()
        y = quant.fake_quantize(gradient, one.spec).double().numpy()
        noise = ((y - x) ** 2).sum()
        row = table.iloc[0]
        assert row["sqnr_db"] == (
            math.inf if noise == 0 else pytest.approx(10 * np.log10((x**2).sum() / noise), rel=1e-9)
        )
        assert row["flush_to_zero"] == ((x != 0) & (y == 0)).sum() / (x != 0).sum()
        assert row["saturated"] == quant.score(gradient, one.spec).saturated
        used = quant.usage(gradient, one.spec)
        assert (row["codes_used"], row["code_entropy_bits"]) == (
            used.codes_used,
            pytest.approx(used.code_entropy_bits, rel=1e-12),
        )
        assert row["nbytes"] == quant.quantize(gradient, one.spec).nbytes
        assert np.array_equal(np.repeat(shown[1].low, shown[1].count), np.sort(y, axis=None))

    @pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "hifp8"])
    def test_rotation(self, gradient, name):
        table, _ = what_if_compute.try_formats(
            [what_if_compute.TriedOperand(gradient, -1)], [what_if_compute.trial(name, hadamard=32)], together=False
        )
        turned = quant.hadamard_rotate(gradient).to(gradient.dtype)  # as a GEMM rounds it
        x, y = turned.double().numpy(), quant.fake_quantize(turned, name).double().numpy()
        wanted = 10 * np.log10((x**2).sum() / ((y - x) ** 2).sum())
        assert table["sqnr_db"].iloc[0] == pytest.approx(wanted, abs=1e-3)
        assert table["flush_to_zero"].iloc[0] == quant.score(turned, name).flush_to_zero

    def test_a_selection_is_the_median_of_its_tensors(self, gradient, probs):
        several = [what_if_compute.TriedOperand(x, -1) for x in (gradient, gradient * 2**20, probs)]
        found = what_if_compute.try_formats(several, [what_if_compute.trial("mxfp4")])[0].iloc[0]
        own = sorted(quant.score(one.x, "mxfp4").sqnr_db for one in several)
        shown = [found[name] for name in ("sqnr_db_low", "sqnr_db", "sqnr_db_high")]
        assert shown == pytest.approx(own, rel=1e-9) and found["tensors"] == 3
        assert found["nbytes"] == sum(quant.quantize(one.x, "mxfp4").nbytes for one in several)

    @pytest.mark.parametrize("together", [True, False])
    def test_distributions_are_of_all_values_before_and_after(self, gradient, probs, together):
        tensors = [gradient, probs] if together else [gradient]
        trials = [what_if_compute.trial("mxfp4"), what_if_compute.trial("nvfp4")]
        _, shown = what_if_compute.try_formats(
            [what_if_compute.TriedOperand(x, -1) for x in tensors], trials, together=together
        )
        assert [d.group for d in shown] == ["as captured", "mxfp4", "nvfp4"]
        for d, change in zip(shown, (None, "mxfp4", "nvfp4"), strict=True):
            became = [x if change is None else quant.fake_quantize(x, change) for x in tensors]
            values = np.sort(torch.cat([x.flatten() for x in became]).double().numpy())
            bounds = np.repeat(d.low, d.count), np.repeat(d.high, d.count)
            inner, outer = np.minimum(*np.abs(bounds)), np.maximum(*np.abs(bounds))
            assert d.total == values.size and d.exact is not together
            assert (np.sort(np.abs(values)) >= np.sort(inner)).all() and (
                np.sort(np.abs(values)) <= np.sort(outer)
            ).all()

    def test_options_that_do_not_apply_are_named(self):
        one = what_if_compute.trial("hifp8", scale="ceil", block="16", overflow="inf", rounding="nearest")
        assert one.ignored == ("scale", "block")
        assert one.label == "hifp8(rounding=nearest, overflow=inf)"
        assert what_if_compute.trial("mxfp4", scale="floor").label == "mxfp4"
        assert what_if_compute.trial("nvfp4", error="mae", scale="4over6").label == "nvfp4(scale=4over6, error=mae)"
        assert what_if_compute.trial("mxfp4", error="mae", signs="fixed").ignored == ("error", "signs")
        labels = [
            t.label
            for t in what_if_compute.with_defaults(
                [what_if_compute.trial("mxfp4", hadamard=16), what_if_compute.trial("mxfp8")]
            )
        ]
        assert labels == ["mxfp4", "mxfp4(hadamard=16)", "mxfp8"]

    def test_a_large_tensor_is_sampled_by_whole_lines(self, gradient):
        limit = -(-gradient.numel() // 3)
        found = what_if_compute.try_formats(
            [what_if_compute.TriedOperand(gradient, -1)], [what_if_compute.trial("mxfp4")], limit=limit
        )[0].iloc[0]
        part = gradient.reshape(-1, gradient.shape[-1])[::3]
        assert found["sqnr_db"] == pytest.approx(quant.score(part, "mxfp4").sqnr_db, rel=1e-9)
        assert found["nbytes"] == pytest.approx(quant.quantize(gradient, "mxfp4").nbytes, rel=1e-6)

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("name", ["gradient", "constant", "subnormal", "huge", "single"])
    @pytest.mark.parametrize("fmt", ["hifp8", "fp8_e4m3", "fp8_e5m2"])
    def test_a_sweep_of_scales_is_fake_quantize_of_scaled_values(self, gradient, fmt, name):
        x = gradient if name == "gradient" else odd_tensors()[name]
        trials = [what_if_compute.trial(fmt), what_if_compute.trial(fmt, scale="pow2")]
        absmax, values = float(x.abs().max()), x.double().numpy()
        found = what_if_compute.sweep_scales(scales.Cells.of(x), absmax, fmt, trials)
        sqnr = {}
        for row in found.trials.itertuples():
            scaled = torch.from_numpy(np.ldexp(values, row.k).astype(np.float32))
            y = np.ldexp(quant.fake_quantize(scaled, fmt, scale="none").double().numpy(), -row.k)
            noise = ((y - values) ** 2).sum()
            sqnr[row.k] = 10 * np.log10((values**2).sum() / noise) if noise else what_if_compute.MOST_DB
            assert row.sqnr_db == pytest.approx(sqnr[row.k], rel=1e-9, abs=1e-9)
            assert row.flush_to_zero == ((values != 0) & (y == 0)).sum() / (values != 0).sum()
            assert row.saturated == (scaled.abs() > FORMATS[fmt].max).double().mean()
        assert list(sqnr) == list(range(min(sqnr), max(sqnr) + 1)) and 0 in sqnr
        assert sqnr[found.best] == pytest.approx(max(sqnr.values()))
        assert found.gain == pytest.approx(sqnr[found.best] - sqnr[0])
        inside = [sqnr[k] >= sqnr[found.best] - 0.5 for k in range(found.low - 1, found.high + 2) if k in sqnr]
        assert found.low <= found.best <= found.high and sum(inside) == found.high - found.low + 1
        default, pow2 = found.present.values()
        scale = min(FORMATS[fmt].max / absmax, float(np.finfo(np.float32).max))
        assert default == pytest.approx(0 if fmt == "hifp8" else math.log2(scale))
        own, other = x.float(), x.float() * 2.0**pow2
        want = quant.fake_quantize(other, fmt, scale="none").double().numpy()
        assert np.array_equal(quant.fake_quantize(own, fmt, scale="pow2").double().numpy(), np.ldexp(want, -int(pow2)))

    @pytest.mark.thorough
    def test_scales_are_swept_of_one_tensor_in_formats_that_can_have_one(self, catalog):
        tensor = first(catalog, tensor_name=["grad_output"], module=["fc1"], quant_type=["bf16"])
        asked = {"view": ["whatif"], "formats": ["nvfp4", "hifp8", "fp8_e5m2"], "tensor": [tensor]}
        view = View("tensor", asked)
        figures = {figure.name: figure for figure in view.draw(catalog).figures if "scale" in figure.name}
        assert [*figures] == [f"{name}_{fmt}" for fmt in ("hifp8", "fp8_e5m2") for name in ("scales", "scale_shares")]
        words = r"Best: k = (\S+), SQNR (\S+) dB, (\S+) dB more than with k = 0\. Within 0\.5 dB of it: "
        words += r"k from (\S+) to (\S+)\."
        for fmt in ("hifp8", "fp8_e5m2"):
            sqnr, shares = figures[f"scales_{fmt}"], figures[f"scale_shares_{fmt}"]
            of_k = sqnr.table.set_index("k")["sqnr_db"]
            best, most, gain, low, high = re.fullmatch(words, sqnr.note).groups()
            assert of_k[int(best)] == of_k.max() == pytest.approx(float(most), abs=0.051)
            assert of_k.max() - of_k[0] == pytest.approx(float(gain), abs=0.051)
            assert (of_k.loc[int(low) : int(high)] >= of_k.max() - 0.5).all()
            for figure in (sqnr, shares):
                axes = [layer["encoding"].get("x", {}) for layer in figure.spec["layer"]]
                (domain,) = {tuple(axis["scale"]["domain"]) for axis in axes if "domain" in axis.get("scale", {})}
                assert domain == (of_k.index[0], of_k.index[-1])
        several = view.changed(over="selection").draw(catalog)
        assert several.figures and not any("scale" in figure.name for figure in several.figures)

    def test_what_is_offered_gains_what_it_says(self, tmp_path):
        x, axis = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)), 1
        x[:, 5] *= 100  # decides the scale of a block of 32: with smaller blocks less is lost
        make_run(tmp_path, [(x, {"tensor_name": "input"})])
        with Catalog.open(tmp_path) as catalog:
            tensor = first(catalog, tensor_name=["input"])
            view = View("tensor", {"view": ["whatif"], "format": ["mxfp4"], "tensor": [tensor]})
            (offers,) = [item for item in view.draw(catalog).items if isinstance(item, Offers)]
            taken = [view.changed(**params).read(catalog).values for params in offers.choices.values()]

        def sqnr(**options):
            error = (quant.fake_quantize(x, "mxfp4", dim=axis, **options) - x).double().numpy()
            return 10 * np.log10((x.double().numpy() ** 2).sum() / (error**2).sum())

        assert offers.choices
        for (label, params), values in zip(offers.choices.items(), taken, strict=True):
            said = float(re.search(r": \+([\d.]+) dB", label)[1])
            options = {name.removesuffix("_size"): value for name, value in params.items()}
            parsed = {name: int(value) if value.isdecimal() else value for name, value in options.items()}
            assert sqnr(**parsed) - sqnr() == pytest.approx(said, abs=0.051)
            assert {name: values[name] for name in params} == params
        assert any("hadamard" in params for params in offers.choices.values())
        assert any(len(params) > 1 for params in offers.choices.values())

    @pytest.mark.thorough
    def test_the_mean_over_tokens_is_subtracted_where_there_are_tokens(self, catalog):
        spec = "mxfp4(center=tokens)"
        weight = first(catalog, tensor_name=["weight"], module=["fc1"], quant_type=["bf16"])
        asked = {"view": ["whatif"], "formats": ["mxfp4"], "center": ["tokens"], "tensor": [weight]}
        drawn = View("tensor", asked).draw(catalog)
        assert any("which has no tokens" in text for text in drawn.sentences)
        assert set(drawn.tables["trials"]["label"]) == {"mxfp4"}
        several = View("tensor", asked | {"over": ["selection"], "layer_index": ["1"], "module": ["fc1"]}).draw(catalog)
        assert any("inputs and output gradients of linear layers" in text for text in several.sentences)
        assert set(several.tables["trials"]["label"]) == {"mxfp4", spec}
        why = View("tensor", {"view": ["why"], "format": [spec], "tensor": [weight]}).draw(catalog)
        assert why.verdict.startswith("In mxfp4:")

    @pytest.mark.sampled(8)
    @pytest.mark.parametrize("name", odd_tensors())
    def test_odd_tensors(self, name):
        x = odd_tensors()[name]
        trials = [what_if_compute.trial(fmt) for fmt in FORMATS]
        table, _ = what_if_compute.try_formats([what_if_compute.TriedOperand(x, -1)], trials)
        assert len(table) == len(FORMATS)
        assert (table["flush_to_zero"].dropna().between(0, 1)).all()


class TestAnatomy:
    @pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4", "hifp8", "fp8_e5m2"])
    def test_the_codebooks_histogram_is_numpys(self, gradient, name):
        found = subject(gradient, name)
        table = why_compute.codebook_histogram(found)
        magnitudes = found.blocks.magnitudes.numpy().reshape(-1)
        magnitudes = magnitudes[magnitudes > 0]
        edges = np.exp2([*table["low"], table["high"].iloc[-1]])
        for low, high, share in table[["low", "high", "share"]].itertuples(index=False):
            inside = ((magnitudes >= np.exp2(low) * (1 - 1e-12)) & (magnitudes < np.exp2(high) * (1 - 1e-12))).sum()
            assert share * (high - low) == pytest.approx(inside / gradient.numel(), abs=2 / gradient.numel())
        assert edges[0] <= magnitudes.min() * (1 + 1e-12) and edges[-1] >= magnitudes.max()
        assert (table["share"] * (table["high"] - table["low"])).sum() == pytest.approx(
            len(magnitudes) / gradient.numel()
        )

    @pytest.mark.parametrize("name", FORMATS)
    def test_zones_are_the_metrics(self, gradient, name):
        share = why_compute.zones(subject(gradient, name)).set_index("zone")["share"]
        wanted = quant.score(gradient, name)
        assert share.sum() == pytest.approx(1, abs=1e-12)
        assert share["flushed"] == pytest.approx(wanted.underflow_of_all, abs=1e-12)
        assert share["saturated"] == pytest.approx(wanted.saturated, abs=1e-12)
        assert share["zero"] == float((gradient == 0).double().mean())

    def test_pooled_is_the_largest_of_each_cell(self, gradient):
        matrix = gradient.reshape(-1, gradient.shape[-1]).float().abs().numpy()
        cells = why_compute.pooled(gradient, 7, 5)
        height, width = -(-matrix.shape[0] // 7), -(-matrix.shape[1] // 5)
        for (i, j), value in np.ndenumerate(cells):
            assert value == matrix[i * height : (i + 1) * height, j * width : (j + 1) * width].max()

    def test_channels(self, gradient, monkeypatch):
        matrix = gradient.reshape(-1, gradient.shape[-1]).float().abs().numpy()
        assert np.array_equal(why_compute.channels(gradient)["absmax"], matrix.max(0)[: why_compute.MAX_CHANNELS]) or (
            gradient.shape[-1] > why_compute.MAX_CHANNELS
        )
        monkeypatch.setattr(why_compute, "MAX_CHANNELS", 100)
        table = why_compute.channels(gradient)
        assert len(table) <= 100 and table["last"].iloc[-1] == gradient.shape[-1] - 1
        for row in table.itertuples():
            assert row.absmax == matrix[:, row.channel : row.last + 1].max()

    @pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "hifp8"])
    def test_blocks(self, gradient, name):
        found = subject(gradient, name)
        table = blocks_compute.block_table(found)
        size = FORMATS[name].block_size or 32
        x = gradient.double().numpy().reshape(-1, size)
        y = quant.fake_quantize(gradient, name).double().numpy().reshape(-1, size)
        with np.errstate(all="ignore"):
            sqnr = 10 * np.log10((x**2).sum(1) / ((y - x) ** 2).sum(1))
        used = (x != 0).any(1)
        np.testing.assert_allclose(table["sqnr_db"][used], sqnr[used], rtol=1e-9)
        worst = blocks_compute.worst_blocks(table, "sqnr_db")
        assert worst["sqnr_db"].iloc[0] == np.nanmin(sqnr[used])
        block = int(worst["block"].iloc[0])
        values = blocks_compute.block_values(found, block)
        assert np.array_equal(values["value"], x[block]) and np.array_equal(values["dequantized"], y[block])
        element = FORMATS[name].element
        assert [element.values[code] for code in values["code"]] == values["code_value"].tolist()
        assert [int(bits, 2) for bits in values["bits"]] == values["code"].tolist()
        grid = blocks_compute.block_grid(sqnr, gradient.shape[-1] // size, side=9)
        assert max(grid.shape) <= 9 and np.nanmin(grid) == np.nanmin(sqnr)

    def test_a_blocks_values_times_its_scale_are_the_rounded_ones(self, gradient):
        found = subject(gradient, "mxfp4")
        table = blocks_compute.block_table(found)
        block = int(table["sqnr_db"].idxmin())
        values = blocks_compute.block_values(found, block)
        scale = 2.0 ** table["scale_exponent"].iloc[block]
        assert np.array_equal(values["code_value"] * scale, values["dequantized"])

    @pytest.mark.sampled(7)
    @pytest.mark.parametrize("name", FORMATS)
    def test_codes(self, gradient, name):
        table = codes_compute.codes(subject(gradient, name))
        used = quant.usage(gradient, name)
        found = table[table["count"] > 0].sort_values("code")
        assert np.array_equal(found["code"], used.codes) and np.array_equal(found["count"], used.code_counts)
        assert codes_compute.entropy_bits(table) == pytest.approx(used.code_entropy_bits, rel=1e-12)
        tiers = codes_compute.tiers(table)
        assert tiers["share"].sum() == pytest.approx(1) and tiers["used"].sum() == used.codes_used

    @pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "hifp8"])
    @pytest.mark.parametrize("name", odd_tensors())
    def test_odd_tensors(self, name, fmt):
        x = odd_tensors()[name]
        found = subject(x, fmt)
        share = why_compute.zones(found).set_index("zone")["share"]
        assert share.between(0, 1).all()
        if name == "all NaN":
            assert share["lost"] == 1
        (
            why_compute.codebook_histogram(found),
            codes_compute.codes(found),
            why_compute.pooled(x),
            why_compute.channels(x),
        )
        blocks_compute.worst_blocks(blocks_compute.block_table(found), "sqnr_db")


class TestAttention:
    def test_entropy_is_scipys(self, probs):
        table = attention_compute.entropy(attention_compute.heads(probs))
        for head, row in enumerate(table.itertuples()):
            p = probs[:, head].double().numpy()
            bits = stats.entropy(p / p.sum(-1, keepdims=True), axis=-1, base=2)
            assert row.entropy == pytest.approx(bits.mean(), abs=0.02)  # bf16's rows sum to 1 within a percent
            raw = -(p * np.log2(np.where(p > 0, p, 1))).sum(-1)
            assert (row.entropy, row.lowest, row.highest) == pytest.approx((raw.mean(), raw.min(), raw.max()), abs=1e-9)

    @pytest.mark.parametrize("fmt", ["mxfp4", "hifp8"])
    def test_flushed(self, probs, fmt):
        heads = attention_compute.heads(probs)
        table = attention_compute.flushed(heads, quant.fake_quantize(heads.x.contiguous(), fmt))
        y = quant.fake_quantize(probs, fmt)
        for head, row in enumerate(table.itertuples()):
            x, q = probs[:, head].double().numpy(), y[:, head].double().numpy()
            gone = (x != 0) & (q == 0)
            assert row.flush_to_zero == gone.sum() / (x != 0).sum()
            assert row.mass == pytest.approx(x[gone].sum() / x.sum(), rel=1e-9)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("softmax", ["flash", "full"])
    def test_the_product_is_scipys(self, tmp_path, softmax):
        """Two tiles of keys, grouped values; the second head has equal scores, the last row sees no key."""
        generator = torch.Generator().manual_seed(0)
        scores = torch.randn(2, 4, 12, 12, generator=generator) * 3
        scores[:, 1] = 0.25
        if softmax == "full":  # the largest of each row rounds to 1
            scores += 100 * torch.eye(12)
        hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
        hidden[-1] = True
        value, grad, noise = (torch.randn(2, n, 12, 8, generator=generator) for n in (2, 4, 4))
        s = np.where(hidden, -np.inf, scores.double().numpy())
        largest = np.maximum.accumulate(s.reshape(2, 4, 12, 2, 6).max(-1), -1).repeat(6, -1)
        with np.errstate(invalid="ignore"):  # -inf - -inf in the last row
            p, weights = (np.nan_to_num(x) for x in (special.softmax(s, -1), np.exp(s - largest)))
        v = value.double().numpy().repeat(2, 1)
        tensors = {
            "attention_scores": scores,
            "attention_probs": torch.from_numpy(weights if softmax == "flash" else p).float(),
            "value": value,
            "output": torch.from_numpy(p @ v).float() + noise / 64 + 1 / 128,
            "grad_output": grad,
        }
        place = {"layer_type": "attention", "module": "core", "component": "FA", "quant_type": "bf16"}

        def answer(*names: str):
            root = tmp_path / "_".join(names)
            recipe_toml = f'[pv]\nsoftmax = "{softmax}"\n'
            make_run(root, [(tensors[name], place | {"tensor_name": name}) for name in names], recipe_toml=recipe_toml)
            with Catalog.open(root) as opened:
                tensor = first(opened, tensor_name=["attention_probs"])
                return View("tensor", {"view": ["attention"], "tensor": [tensor], "format": ["mxfp4"]}).draw(opened)

        drawn = answer(*tensors)
        table = drawn.tables["product"]
        output = tensors["output"].double().numpy()
        error = output - p @ v
        assert table["error"].to_numpy() == pytest.approx(error.mean((0, 2, 3)), rel=1e-4)
        d = grad.double().numpy()
        rows = (p * (d @ v.swapaxes(-1, -2))).sum(-1) - (d * output).sum(-1)
        assert table["row_difference"].to_numpy() == pytest.approx(rows.mean((0, 2)), rel=1e-4)
        bits = stats.entropy(np.where(p.any(-1, keepdims=True), p, 1), axis=-1, base=2)
        bits[..., -1] = 0
        assert drawn.get("entropy").table["entropy"].to_numpy() == pytest.approx(bits.mean((0, 2)), abs=1e-5)
        if softmax == "flash":
            several = ((weights == 1).sum(-1) > 1).mean((0, 2))
            assert table["ones"].to_numpy() == pytest.approx(several) and several[1] > several[0] > 0
            rounded = (quant.fake_quantize(tensors["attention_probs"], "mxfp4").numpy() == 1).sum(-1) > 1
            assert table["ones_rounded"].to_numpy() == pytest.approx(rounded.mean((0, 2)))
            assert not drawn.sentences
            drawn = answer("attention_probs")
            assert [*drawn.tables["product"]] == ["head", "ones", "ones_rounded"] and not drawn.get("entropy")
            assert "no values by head of scores, value, output, gradient of output" in drawn.sentences[-1]
        else:
            assert [*table] == ["head", "error", "row_difference"] and "not P̃" in drawn.sentences[0]
            drawn = answer(*(name for name in tensors if name != "grad_output"))
            assert [*drawn.tables["product"]] == ["head", "error"] and "of gradient of output" in drawn.sentences[0]

    def test_ranges_leave_a_mask_out(self):
        scores = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        masked = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
        table = attention_compute.ranges(attention_compute.heads(masked))
        for head, row in enumerate(table.itertuples()):
            x = masked[:, head].numpy()
            x = x[np.isfinite(x)]
            assert (row.low, row.median, row.high) == pytest.approx((x.min(), np.median(x), x.max()), rel=1e-6)
        assert np.isnan(attention_compute.head_map(attention_compute.heads(masked), 0, 0)[0, 1])

    def test_large_maps_are_thinned(self, probs, monkeypatch):
        monkeypatch.setattr(attention_compute, "LIMIT", probs.numel() // 4)
        heads = attention_compute.heads(probs)
        assert heads.every == 4 and torch.equal(heads.x, probs[:, :, ::4])
        assert heads.note == "one query in 4"
        assert attention_compute.heads(probs[0]) is None


class TestBoards:
    def test_results_and_what_their_operands_predict(self, catalog):
        where = Filter(quant_type=["mxfp4"])
        query = CellQuery(catalog, where)
        by = ["layer_index", "product", "tensor", "gemm"]
        result, gain = (MAP_MEASURES[f"result_{name}_db"].cells(query).set_index(by) for name in ("sqnr", "gain"))
        assert set(result.index.get_level_values("gemm")) == {"forward", "dgrad", "wgrad"}
        drawn = MAP_MEASURES["result_gain_db"].extra(query, None).table
        products = drawn.set_index(["layer_index", "module", "part", "gemm"])
        exact, predicted = [], []
        for iteration in (0, 1):
            at = {"quant_type": ["mxfp4"], "layer_index": [1], "module": ["fc1"], "iteration": [iteration]}
            x, dy = (catalog.load(first(catalog, tensor_name=[name], **at)) for name in ("input", "grad_output"))
            dw = catalog.load(first(catalog, tensor_name=["grad_weight"], **at))
            x, dy = x.flatten(0, -2), dy.flatten(0, -2)
            exact.append(errors(dy.T @ x, dw).sqnr_db)
            noise = [errors(a, quant.fake_quantize(a, "mxfp4", 0)).sqnr_db for a in (x, dy)]
            predicted.append(-10 * np.log10(np.sum(10 ** (-np.array(noise) / 10))))
        row, cell = products.loc[(1, "fc1", "linear", "wgrad")], (1, "fc1", "grad_weight", "wgrad")
        assert row["results"] == result.loc[cell, "tensors"] == gain.loc[cell, "tensors"] == 2
        assert row["result_db"] == pytest.approx(np.median(exact), abs=1e-3)
        assert result.loc[cell, "value"] == pytest.approx(np.median(exact), abs=1e-3)
        assert row["operands_db"] == pytest.approx(np.median(predicted), abs=1e-3)
        for name, q in (("low", 0.1), ("value", 0.5), ("high", 0.9)):
            wanted = np.quantile(np.subtract(exact, predicted), q)
            assert gain.loc[cell, name] == pytest.approx(wanted, abs=1e-3), name
        backward, predicted = products.loc[(1, "core", "QK", "dgrad")], []
        for iteration in (0, 1):
            at = {"quant_type": ["mxfp4"], "layer_index": [1], "module": ["core"], "iteration": [iteration]}
            noise = 0.0
            for name, axis in (("grad_scores", -1), ("key", -2)):
                x = catalog.load(first(catalog, tensor_name=[name], **at))
                noise += 10 ** (-errors(x, quant.fake_quantize(x, "mxfp4", axis)).sqnr_db / 10)
            predicted.append(-10 * np.log10(noise))
        assert backward["operands_db"] == pytest.approx(np.median(predicted), abs=1e-3)
        assert backward["result_db"] > 0
        assert MAP_MEASURES["result_gain_db"].cells(CellQuery(catalog, Filter(quant_type=["bf16"]))).empty

    def test_the_distribution_of_blocks_is_that_of_the_blocks_in_the_files(self, catalog):
        where = Filter(quant_type=["mxfp4"], layer_index=[1], iteration=[1])
        operands = catalog.tensors(where).dropna(subset=["contracted_axis"])
        each = [look(catalog.load(r.tensor_id), "mxfp4", int(r.contracted_axis)).sqnr_db for r in operands.itertuples()]
        found = torch.cat(each).numpy()
        found = found[~np.isnan(found)]
        query = CellQuery(catalog, where, "mxfp4")
        shares = MAP_MEASURES["block_sqnr_db"].extra(query, None).table
        assert shares["count"].sum() == len(found) and shares["share"].sum() == pytest.approx(1)
        assert blocks_measure.bad(shares) == pytest.approx((found < 10).mean(), abs=1e-9)
        finite = np.where(np.isinf(found), 126, found)
        for q in (0.01, 0.5, 0.99):
            assert blocks_measure.quantile(shares, q) == pytest.approx(np.quantile(finite, q), abs=2), q
        assert MAP_MEASURES["block_sqnr_db"].cells(replace(query, format="hifp8")).empty

    @pytest.mark.parametrize(
        ("name", "attribute", "q"),
        [
            ("block_sqnr_db", "sqnr_db", 0.01),
            ("block_scale_exponent", "scale_exponents", 0.5),
            ("bad_blocks", "sqnr_db", 0),
        ],
    )
    def test_a_cell_of_blocks_is_that_of_the_blocks_in_its_file(self, catalog, name, attribute, q):
        where = Filter(quant_type=["mxfp4"], layer_index=[1], iteration=[1], module=["fc1"])
        cells = MAP_MEASURES[name].cells(CellQuery(catalog, where, "mxfp4"))
        assert len(cells) == 3 and cells["tensors"].eq(1).all()
        for cell in cells.itertuples():
            row = catalog.rows_of([cell.tensor_id]).iloc[0]
            found = getattr(look(catalog.load(cell.tensor_id), "mxfp4", int(row["contracted_axis"])), attribute).numpy()
            found = found[~np.isnan(found)].astype(float)
            if name == "bad_blocks":
                assert cell.value == pytest.approx((found < 10).mean(), abs=1e-9)
                continue
            for value, share in ((cell.low, 0.01), (cell.value, q), (cell.high, 0.99)):
                assert value == pytest.approx(np.quantile(np.where(np.isinf(found), 126, found), share), abs=2)

    def test_the_layer_whose_blocks_get_worse_is_listed_first(self, tmp_path):
        random = torch.Generator().manual_seed(0)
        with Recorder(tmp_path, scores=("mxfp4",), measures=("blocks",)) as recorder:
            for iteration in range(12):  # seven that fall can be chance
                for layer in (1, 2, 3):
                    x = torch.randn(64, 256, generator=random)
                    if layer == 2:
                        x[:, ::32] *= 1.3 ** (iteration + 1)  # an outlier in each block: the others are flushed to zero
                    if (iteration, layer) == (4, 3):
                        x[0, 0] = torch.nan
                    where = {"layer": layer, "module": "fc1", "operation": "forward", "phase": "pre", "dim": -1}
                    recorder.record("input", x, **where)
                recorder.step()
        with Catalog.open(tmp_path) as catalog:
            view = View("map", {"metric": ["block_sqnr_db"], "format": ["mxfp4"]})
            answer = view.draw(catalog)
            over_time = view.changed(across="iteration", layer_index=2).draw(catalog).tables["places"]
        assert not claims(answer) and answer.tables["places"].iloc[0]["place"] == "L2 fc1 input, other"
        assert over_time.sort_values("rank")["value"].is_monotonic_increasing
        assert over_time.sort_values("value").iloc[0]["place"].startswith("iteration ")


class TestScope:
    """Runs and iterations are not mixed: an answer is about one of each, unless it keeps them apart."""

    def test_the_newest_finished_run_and_its_last_iteration(self, catalog):
        newest = catalog.runs()["run_id"][0]
        assert scoped(catalog, Filter()) == Filter(run_id=[newest], iteration=[1])
        assert scoped(catalog, Filter(iteration=[0])) == Filter(run_id=[newest], iteration=[0])
        mxfp8 = catalog.runs().set_index("recipe")["run_id"]["mxfp8"]
        assert scoped(catalog, Filter(recipe=["mxfp8"]), ("iteration",)) == Filter(recipe=["mxfp8"], run_id=[mxfp8])
        assert len(scoped(catalog, Filter(), ("recipe",)).run_id) == 4
        assert scoped(catalog, Filter(module=["none"])) == Filter(module=["none"])

    @pytest.mark.thorough
    def test_another_run_changes_nothing_of_a_run(self, catalog):
        runs = catalog.runs().set_index("recipe")["run_id"]
        run, alone = runs["mxfp8"], catalog.restricted([runs["mxfp8"], runs["bf16"]])  # which Noise compares it with
        views = [View("map", {"metric": [name]}) for name in ("gradient_to_noise", "edge_excess")]
        views += [View("map", {"metric": [metric]}) for metric in ("sqnr_db", "absmax", "result_gain_db", "bad_blocks")]
        views += [View("map", {"across": ["iteration"]}), View("map", {"versus": ["nvfp4"]})]
        for view in views:
            view = view.changed(format="mxfp4").filtered(Filter(run_id=[run]))
            found = [view.draw(opened) for opened in (catalog, alone)]
            assert found[0].verdict == found[1].verdict and found[0].figures, view
            for mine, theirs in zip(*(each.figures for each in found), strict=True):
                pd.testing.assert_frame_equal(mine.table, theirs.table)


class TestRecipes:
    @pytest.fixture
    def table(self, catalog):
        return every_run(catalog)

    def test_each_run_finds_its_bf16_run(self, catalog, table):
        runs = catalog.runs().set_index("recipe")["run_id"]
        assert table["references"].tolist() == [(runs["bf16"],)] * 4
        assert table.set_index("recipe")["quantized"].to_dict() == {
            "bf16": False,
            "hifp8": True,
            "mxfp8": True,
            "mxfp4": True,
        }
        assert table.set_index("label").loc["mxfp8", list(PARTS)].tolist() == [
            "mxfp8",
            "mxfp8",
            "mxfp8",
            "bf16",
            "bf16",
        ]

    def test_another_seed_is_no_reference(self, catalog):
        runs = catalog.runs()
        changed = runs.assign(
            config=[
                c.replace('"seed": 1234', '"seed": 5') if r == "bf16" else c
                for c, r in zip(runs["config"], runs["recipe"], strict=True)
            ]
        )
        table = runs_with_references(changed, catalog.parts())
        assert not table.loc[table["quantized"], "references"].any()

    def test_gaps_are_the_losses_differences(self, catalog, table):
        losses = {run_id: read_losses(catalog.root / run_id) for run_id in table["run_id"]}
        gaps = loss_gaps.loss_gaps(table, losses)
        assert sorted(set(gaps["iteration"])) == [0, 1]
        base = {r["iteration"]: r["loss"] for r in losses[table["references"].iloc[0][0]]}
        for row in gaps.itertuples():
            own = {r["iteration"]: r["loss"] for r in losses[row.run_id]}
            assert row.gap == own[row.iteration] - base[row.iteration]
        costs = loss_gaps.costs(gaps, loss_gaps.with_outcomes(table, losses))
        assert costs["gap"].is_monotonic_decreasing and set(costs["label"]) == {"hifp8", "mxfp8", "mxfp4"}

    def test_a_run_without_a_baseline_is_named(self, catalog, table):
        kept = table["label"] != "mxfp4"
        references = [ids if each else () for ids, each in zip(table["references"], kept, strict=True)]
        alone = table.assign(references=references)
        found = cost(catalog, Filter(), alone)
        assert found.problems == ("Left out, because no bf16 run saw the same data: mxfp4.",)
        assert set(found.tables["recipes"]["label"]) == {"hifp8", "mxfp8"}

    def test_recipes_have_the_gaps_of_their_seeds(self):
        rows = [
            ("a", "PV_mxfp4", "s", "1", 0.1, "PV", "mxfp4"),
            ("b", "QK_mxfp4", "s", "1", 0.5, "QK", "mxfp4"),
            ("c", "PV_mxfp4", "s", "2", 0.3, "PV", "mxfp4"),
            ("d", "PV_mxfp4", "s", "2", 0.4, "PV", "mxfp4"),
        ]
        columns = ["run_id", "name", "settings", "start", "gap", "only", "spec"]
        costs = pd.DataFrame(rows, columns=columns).assign(
            label=lambda table: table["name"] + table["run_id"], group=lambda table: table["name"]
        )
        measured = [RoundingAlone(0, 2.0, gap / 2, None, 1) for gap in costs["gap"]]
        costs = costs.assign(measured=measured, added=math.nan, diverged=math.nan, outcome=None)
        qk, pv = loss_gaps.by_recipe(costs, costs["run_id"].tolist())
        assert (qk.label, pv.label) == ("QK_mxfp4", "PV_mxfp4") and pv.gaps == {"1": 0.1, "2": 0.4}
        assert {start: each.change for start, each in pv.alone.items()} == {"1": 0.05, "2": 0.2} and pv.added == {}
        expected = stats.ttest_1samp([0.1, 0.4], 0).confidence_interval(0.95)
        assert (pv.gap.low, pv.gap.high) == pytest.approx(tuple(expected)) and math.isinf(qk.gap.high)

    def test_gradients_are_numpys_cosine_and_bias(self, catalog, table):
        run = table[table["recipe"] == "mxfp4"].iloc[0]
        pairs = catalog.pairs(run["run_id"], run["references"][0], Filter(tensor_name=["grad_weight"], iteration=[0]))
        found, unread = gradient_errors(catalog, pairs)
        assert len(found) == len(pairs) and not unread
        for row in found.itertuples():
            a, b = (catalog.load(i).double().numpy().reshape(-1) for i in (row.reference_id, row.tensor_id))
            assert row.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-9)
            assert row.relative_squared_error == pytest.approx(((b - a) ** 2).sum() / (a**2).sum(), rel=1e-9)
        whole = gradient_summary(found, ["tensor_name"]).iloc[0]
        assert whole["tensors"] == len(found)
        for name in ("cosine", "relative_squared_error"):
            expected = np.quantile(found[name], [0.1, 0.5, 0.9])
            assert [whole[f"{name}_low"], whole[name], whole[f"{name}_high"]] == pytest.approx(expected, rel=1e-12)

    def test_three_way(self, catalog, table):
        runs = table.set_index("recipe")["run_id"]
        where = {"tensor_name": ["grad_weight"], "module": ["fc1"], "iteration": [0]}
        ids = {name: first(catalog, run_id=[runs[name]], **where) for name in ("bf16", "mxfp4")}
        a, b = catalog.load(ids["bf16"]), catalog.load(ids["mxfp4"])
        found = three_way(a, b, "mxfp4")
        rows = found.table.set_index("what")
        assert rows.loc["rounding", "sqnr_db"] == errors(a, quant.fake_quantize(a, "mxfp4")).sqnr_db
        assert rows.loc["drift", "relative_error"] == errors(a, b).relative_error
        assert rows.loc["both", "cosine"] == errors(a, quant.fake_quantize(b, "mxfp4")).cosine
        assert "drift" in found.verdict.lower() or "both" in found.verdict.lower()

    def test_verdicts(self):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert "Rounding alone" in three_way(x, x, "mxfp4").verdict
        assert "Mostly drift" in three_way(x, x + torch.randn_like(x), "mxfp8").verdict
        assert "has drifted" in three_way(x, x * 1.5, "bf16").verdict
        same = three_way(x, x + torch.randn_like(x), "mxfp8", equal_weights=True).verdict
        assert same.startswith("Propagated rounding") and "drift" not in same
        assert "Cannot compare" in three_way(torch.zeros(4, 4), torch.zeros(4, 4), "mxfp4").verdict

    def test_a_pv_run_is_named_by_what_it_rounds(self, catalog):
        runs, parts = catalog.runs(), catalog.parts()
        run_id = runs.set_index("recipe").loc["mxfp4", "run_id"]
        runs = runs.assign(recipe=runs["recipe"].replace("mxfp4", "bf16"))
        parts = parts[(parts["run_id"] != run_id) | (parts["part"] == "PV")]
        table = runs_with_references(runs, parts).set_index("run_id")
        assert table.loc[run_id, "label"] == "PV_mxfp4" and run_id not in table.loc[run_id, "references"]

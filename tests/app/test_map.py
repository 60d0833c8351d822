"""The map: its cells against numpy, torch and the quantizer over the tensor files, its order, and what it says is
missing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from streamlit.testing.v1 import AppTest
from torch import Tensor
from torch.nn import functional as F

import binade
from binade import quant
from binade.app.draw.figure import Drawn
from binade.app.measures.registry import MAP_MEASURES
from binade.app.questions.map import question as map_question
from binade.app.questions.map.panel import panel
from binade.app.questions.map.question import MAP, map_of
from binade.app.view.view import View
from binade.collector import Recorder, instrument
from binade.data.index.catalog import STATISTICS, Catalog
from binade.data.words.filter import Filter
from binade.data.words.text import number_text
from binade.quant.blocks import look
from binade.quant.formats import FORMATS
from binade.quant.normal import normal_sqnr
from tests.app.planted import normal, operand
from tests.collector.small_model import batch, build
from tests.data.builder import make_run

RECORDED = tuple(
    metric
    for metric in MAP_MEASURES
    if metric not in ("effect", "parity_change", "tensor_scale", "oscillating", "twin_bias", "twin_noise")
)  # which only some runs have

pytestmark = pytest.mark.slow

MXFP4 = Filter(quant_type=["mxfp4"])
# The axis that each GEMM contracts: Y = X·Wᵀ, dX = dY·W, dW = dYᵀ·X; S = Q·Kᵀ, dQ = dS·K, dK = dSᵀ·Q; O = P·V,
# dP = dO·Vᵀ, dV = Pᵀ·dO. -2 of a linear layer: the tokens of all sequences.
CONTRACTED = {
    "forward": {"input": -1, "weight": -1, "query": -1, "key": -1, "attention_probs": -1, "value": -2},
    "dgrad": {"grad_output": -1, "weight": -2, "grad_scores": -1, "key": -2, "value": -1},
    "wgrad": {"grad_output": -2, "input": -2, "grad_scores": -2, "query": -2, "attention_probs": -2},
}
CELL = ["gemm", "product", "tensor", "layer_index"]


def drawn(catalog: Catalog, where: Filter | None = None, **query: str) -> Drawn:
    return View("map", {name: [text] for name, text in query.items()}).filtered(where or Filter()).draw(catalog)


def cells(catalog: Catalog, where: Filter | None = None, **query: str) -> pd.DataFrame:
    """The cells of a map; of the collected runs, unless a format is named, in mxfp4."""
    answer = drawn(catalog, where, **{"format": "mxfp4"} | query)
    figure = answer.get("map")
    assert figure, answer.problems
    return figure.table


def along(x: Tensor, gemm: str, product: str, tensor: str) -> tuple[Tensor, int]:
    """The operand as its GEMM takes it, and the axis that the GEMM contracts."""
    axis = CONTRACTED[gemm][tensor]
    return (x.flatten(0, -2), axis) if product not in ("QK", "PV") else (x, axis)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8", "hifp8"])
@pytest.mark.parametrize("metric", ["sqnr_db", "flush_to_zero", "saturated"])
def test_a_cell_is_the_operand_scored_along_the_axis_of_its_gemm(catalog: Catalog, metric: str, fmt: str):
    table = cells(catalog, MXFP4, metric=metric, format=fmt)
    products = {"qkv", "QK", "PV", "proj", "fc1", "fc2"}
    assert set(table["product"]) == products and set(table["tensor"]) == {
        name for of in CONTRACTED.values() for name in of
    }
    assert len(table) == 2 * 3 * 2 * len(products) and table["tensors"].eq(1).all()  # layers, GEMMs, operands
    for cell in table[(table["layer_index"] == 1) & table["product"].isin(("fc1", "QK", "PV"))].itertuples():
        x, dim = along(catalog.load(cell.tensor_id), cell.gemm, cell.product, cell.tensor)
        expected = getattr(quant.score(x, fmt, dim), metric)
        assert [cell.value, cell.low, cell.high] == pytest.approx([expected] * 3, rel=1e-9), cell
        row = catalog.rows_of([cell.tensor_id]).iloc[0]
        assert (row["tensor_name"], row["layer_index"], row["iteration"]) == (cell.tensor, 1, 1)


def test_colors_against_normal_values_are_neutral_at_their_sqnr(catalog: Catalog):
    """18.78 dB is that of 2048² values of N(0,1) in MXFP4."""
    found = drawn(catalog, MXFP4, metric="sqnr_vs_normal", format="mxfp4")
    table = found.get("map").table
    plain = cells(catalog, MXFP4, metric="sqnr_db", format="mxfp4")
    both = table.merge(plain, on=CELL, suffixes=("", "_db"))
    assert len(both) == len(table) == len(plain)
    assert both["value"].to_numpy() == pytest.approx((both["value_db"] - 18.78).to_numpy(), abs=0.02)
    spec = found.get("map").chart.to_dict()
    scales = [part["encoding"]["color"]["scale"] for row in spec["vconcat"] for part in row.get("hconcat", [row])]
    assert {tuple(scale["domain"]) for scale in scales} == {(-1, 1)}
    worst = table.loc[table["value"].idxmin()]
    assert worst["label"].startswith("−" if worst["value"] < -0.05 else "+") and "dB" in worst["label"]


def of_torch(x: Tensor, metric: str) -> float:
    """A statistic of the values by its definition."""
    x = x.double().flatten()
    absmax, rms = x.abs().max().item(), x.square().mean().sqrt().item()
    return {
        "absmax": absmax,
        "std": x.std(correction=0).item(),
        "rms": rms,
        "kurtosis": float(stats.kurtosis(x.numpy(), fisher=False)),
        "crest_factor": absmax / rms,
        "dynamic_range": math.log2(absmax / x[x != 0].abs().min().item()),
        "zero_share": (x == 0).double().mean().item(),
        "non_finite": (~x.isfinite()).double().mean().item(),
    }[metric]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", STATISTICS)
def test_a_statistic_is_torchs_and_the_same_in_each_gemm(catalog: Catalog, metric: str):
    table = cells(catalog, MXFP4, metric=metric)
    keys = set(cells(catalog, MXFP4)[CELL].itertuples(index=False, name=None))
    assert set(table[CELL].itertuples(index=False, name=None)) == keys
    own = table[table["product"].isin(("fc1", "QK"))]
    for tensor_id, same in own.groupby("tensor_id"):
        assert set(same["value"]) == {same["value"].iloc[0]}
        expected = of_torch(catalog.load(tensor_id), metric)
        assert same["value"].iloc[0] == pytest.approx(expected, rel=1e-6, abs=1e-12), same
    grads = own.loc[own["tensor"] == "grad_output"].groupby(["layer_index", "product"])["gemm"].agg(set)
    assert grads.map(lambda gemms: gemms == {"dgrad", "wgrad"}).all()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """Two runs of five micro-batches of two operands in three layers at three iterations; the second is larger."""
    root, random = tmp_path_factory.mktemp("parts"), torch.Generator().manual_seed(0)
    for number, recipe in enumerate(("calm", "wild")):
        made = [
            (
                torch.randn(16, 64, generator=random) * torch.randn(64, generator=random).exp2() * 2.0**-number,
                {"layer_index": layer, "iteration": iteration, "micro_batch": batch, "module": "fc2", "recipe": recipe,
                 "tensor_name": name, "operation": operation, "format": "mxfp4", "quant_type": "mxfp4"},
            )
            for iteration in (0, 4, 8)
            for layer in (1, 2, 3)
            for batch in range(5)
            for name, operation in (("input", "forward"), ("grad_output", "backward"))
        ]  # fmt: skip
        make_run(root, made, recipe=recipe)
    with Catalog.open(root) as catalog:
        yield catalog


def by_hand(catalog: Catalog, where: Filter, metric: str, fmt: str, by: list[str]) -> pd.core.groupby.SeriesGroupBy:
    """A metric of each tensor, measured from its file."""
    rows = catalog.tensors(where)
    rows["value"] = [
        of_torch(x, metric) if metric in STATISTICS else getattr(quant.score(x, fmt), metric)
        for x in map(catalog.load, rows["tensor_id"])
    ]
    return rows.set_index("tensor_id").groupby(by)["value"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("across", ["layer_index", "iteration"])
@pytest.mark.parametrize(
    ("metric", "fmt"),
    [("sqnr_db", "mxfp4"), ("sqnr_db", "hifp8"), ("flush_to_zero", "mxfp4"), ("absmax", ""), ("kurtosis", "")],
)
def test_of_several_tensors_a_cell_has_numpys_quantiles(parts: Catalog, metric: str, fmt: str, across: str):
    run, at = parts.runs().set_index("recipe")["run_id"]["calm"], () if across == "iteration" else (8,)
    query = {"metric": metric, "across": across} | ({"format": fmt} if fmt else {})
    table = cells(parts, Filter(recipe=["calm"]), **query)
    expected = by_hand(parts, Filter(run_id=[run], iteration=at), metric, fmt, ["tensor_name", across])
    assert len(table) == len(expected) == 6 and set(table[across]) == ({1, 2, 3} if at else {0, 4, 8})
    for cell in table.itertuples():
        own = expected.get_group((cell.tensor, getattr(cell, across)))
        assert cell.tensors == len(own) == (5 if at else 15)
        assert [cell.low, cell.value, cell.high] == pytest.approx(np.quantile(own, [0.1, 0.5, 0.9]), rel=1e-6)
        assert cell.tensor_id == (own.idxmin() if metric == "sqnr_db" else own.idxmax())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("across", ["layer_index", "iteration"])
@pytest.mark.parametrize("metric", ["sqnr_db", "flush_to_zero", "absmax", "crest_factor"])
def test_versus_a_run_is_the_difference_of_the_cells(parts: Catalog, metric: str, across: str):
    """Of a metric with a logarithmic axis, log₂ of the ratio."""
    calm = parts.runs().set_index("recipe")["run_id"]["calm"]
    own, other = (cells(parts, Filter(recipe=[name]), metric=metric, across=across) for name in ("wild", "calm"))
    answer = drawn(parts, Filter(recipe=["wild"]), metric=metric, across=across, format="mxfp4", versus=calm)
    table = answer.get("map").table
    assert ", difference to calm" in answer.verdict and not answer.problems
    expected = np.log2(own["value"] / other["value"]) if metric == "absmax" else own["value"] - other["value"]
    assert table["value"].tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    assert (table["own"] == own["value"]).all() and (table["other"] == other["value"]).all()
    assert table["tensor_id"].tolist() == own["tensor_id"].tolist()
    assert table["label"].str.match(r"^[+−]|^0(\.0+)?( dB|%)?$").all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("versus", ["hifp8", "mxfp8"])
def test_versus_a_format_is_the_difference_of_the_cells(catalog: Catalog, versus: str):
    own, other = (
        cells(catalog, MXFP4, metric="sqnr_db", format=fmt).set_index("row")["value"] for fmt in ("mxfp4", versus)
    )
    table = cells(catalog, MXFP4, metric="sqnr_db", format="mxfp4", versus=versus)
    assert table["value"].tolist() == pytest.approx((own - other).tolist(), rel=1e-12)
    assert versus == "hifp8" or (table["value"] < 0).all()  # hifp8 has no scale
    assert (
        f"against normal values in mxfp4, difference to {versus}"
        in drawn(catalog, MXFP4, format="mxfp4", versus=versus).verdict
    )


def test_results_are_the_catalogs(catalog: Catalog):
    table = cells(catalog, MXFP4, metric="result_sqnr_db").set_index("tensor_id")["value"]
    rows = catalog.results(Filter(quant_type=["mxfp4"], iteration=[1])).set_index("tensor_id")["result_sqnr_db"]
    assert table.sort_index().to_dict() == pytest.approx(rows.sort_index().to_dict()) and len(table) == 2 * 3 * 6 - 2
    iterations = cells(catalog, MXFP4, metric="result_sqnr_db", across="iteration")
    rows = catalog.results(Filter(quant_type=["mxfp4"], iteration=[0]))
    own = rows[(rows["module"] == "fc1") & (rows["gemm"] == "wgrad")]["result_sqnr_db"]
    (cell,) = iterations.query("product == 'fc1' and gemm == 'wgrad' and iteration == 0").itertuples()
    assert cell.value == pytest.approx(np.median(own)) and cell.tensors == len(own) == 2


def test_the_spread_of_scales_is_that_of_the_blocks_in_the_files(catalog: Catalog):
    table = cells(catalog, MXFP4, metric="scale_spread")
    assert len(table) == 2 * (4 * 3 + 6)
    for cell in table[table["layer_index"] == 2].itertuples():
        axis = CONTRACTED[cell.gemm][cell.tensor]
        blocks = look(catalog.load(cell.tensor_id), "mxfp4", axis)
        exponents = torch.log2(blocks.scale[blocks.x.abs().amax(-1) > 0].flatten().double()).numpy()
        low, high = np.quantile(exponents, [0.01, 0.99], method="inverted_cdf")
        assert cell.value == pytest.approx(high - low, abs=1), cell


@pytest.mark.thorough
def test_measured_effects_are_those_of_the_same_weights(tmp_path: Path):
    model = build(2)
    tokens, labels = batch()
    with Recorder(tmp_path, scores=("mxfp4",)) as recorder, instrument(model, "bf16", recorder, backend="torch"):
        recorder.log(F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()))
        recorder.step()

    def evaluate(model: Any, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return model(given[0]), given[1]

    arguments: dict[str, Any] = {"by": ["site"], "parts": ["linear", "qk"], "root": tmp_path, "backend": "torch"}
    table = binade.measure(model, evaluate, [(tokens, labels)], ["mxfp4"], **arguments)
    with Catalog.open(tmp_path) as catalog:
        found = drawn(catalog, metric="effect", format="mxfp4")
        shown = found.get("map").table
        assert set(shown["gemm"]) == {"forward"} and len(shown) == len(table) == 2 * 5
        for row in table.to_dict("records"):
            product = row["module"] if row["part"] == "linear" else "QK"
            (cell,) = shown[(shown["layer_index"] == row["layer_index"]) & (shown["product"] == product)].itertuples()
            changes = row["change_by_sequence"]
            low, high = stats.t.interval(0.95, 1, np.mean(changes), stats.sem(changes))
            assert (cell.value, cell.low, cell.high) == pytest.approx((np.mean(changes), low, high))
            assert cell.tensor_id in set(catalog.tensors(Filter(layer_index=[row["layer_index"]]))["tensor_id"])
        assert found.verdict
        said = drawn(catalog, metric="effect", format="nvfp4").problems
        assert "binade measure" in said[0] or "scored" in said[0]
        across = drawn(catalog, metric="effect", format="mxfp4", across="iteration").problems
        assert across == ("The measured loss change is that of one set of weights, not shown by iteration.",)
        with torch.no_grad():
            model.layers[0].mlp.linear_fc1.weight += 1
        other = binade.measure(model, evaluate, [(tokens, labels)], ["mxfp4"], **arguments)
        catalog.sync()
        assert (
            drawn(catalog, metric="effect", format="mxfp4").get("map").table["value"].tolist()
            == shown["value"].tolist()
        )
        assert other["change"].tolist() != table["change"].tolist()


@pytest.mark.thorough
def test_experts_are_one_row_until_they_are_expanded(tmp_path: Path, visit: Callable[..., AppTest]):
    random = torch.Generator().manual_seed(0)
    values = {expert: torch.randn(32, 64, generator=random) * 2.0**expert for expert in (0, 2, 11)}
    place: dict[str, Any] = {"operation": "forward", "phase": "pre", "dim": -1}
    with Recorder(tmp_path, scores=("mxfp4",)) as recorder:
        for layer in (1, 2):
            for expert, x in values.items():
                recorder.record("input", x, layer=layer, module="fc1", expert=expert, **place)
            recorder.record("input", values[0], layer=layer, module="router", **place)
    with Catalog.open(tmp_path) as catalog:
        together = cells(catalog, metric="absmax")
        apart = cells(catalog, metric="absmax", experts="fc1")
        absmax = {expert: x.abs().max().item() for expert, x in values.items()}
        both = together[together["layer_index"] == 2].set_index("product")
        assert both["tensors"].to_dict() == {"fc1": 3, "router": 1} and both["expert"].isna().all()
        assert both.loc["fc1", "value"] == np.median([*absmax.values()])
        assert catalog.rows_of([both.loc["fc1", "tensor_id"]])["expert"].tolist() == [11]
        own = apart[(apart["layer_index"] == 1) & (apart["product"] == "fc1")]
        assert own.set_index("expert")["value"].to_dict() == absmax and own["tensors"].eq(1).all()
        assert set(apart["row"]) - set(together["row"]) == {f"other/fc1/input/{expert}" for expert in values}
        reading = View("map", {"experts": ["fc1"], "metric": ["absmax"]}).read(catalog)
        found = map_of(catalog, reading.within, reading.values)
        assert [row.expert for row in found.rows] == ["", "0", "2", "11"]
        assert "fc1 expert 11 input" in drawn(catalog, metric="absmax", experts="fc1").tables["places"]["place"][0]
        gone = drawn(catalog, metric="absmax", experts="router")
        assert "'router'" in gone.problems[0] and not gone.items
    at = visit(tmp_path, "map", metric="absmax")
    assert not at.exception
    expand = at.selectbox(key="experts")
    assert expand.options == ["experts together", "each expert of fc1"]
    expand.select("fc1").run()
    assert not at.exception and at.query_params["experts"] == "fc1"


def test_rows_are_in_the_order_of_the_network(catalog: Catalog):
    values = View("map").read(catalog).values
    found = map_of(catalog, MAP.within(catalog, MXFP4, values), values)
    products = ("qkv", "QK", "PV", "proj", "fc1", "fc2")
    operands = {
        "forward": (("input", "weight"), ("query", "key"), ("attention_probs", "value")),
        "dgrad": (("grad_output", "weight"), ("grad_scores", "key"), ("grad_output", "value")),
        "wgrad": (("grad_output", "input"), ("grad_scores", "query"), ("grad_output", "attention_probs")),
    }
    expected = [
        (gemm, product, tensor)
        for gemm, (of_linear, of_qk, of_pv) in operands.items()
        for product in products
        for tensor in {"QK": of_qk, "PV": of_pv}.get(product, of_linear)
    ]
    assert [(row.gemm, row.product, row.tensor) for row in found.rows] == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("across", ["layer_index", "iteration"])
@pytest.mark.parametrize("metric", RECORDED)
def test_the_worst_cell_is_first_and_opens_its_tensor(catalog: Catalog, metric: str, across: str):
    answer = drawn(catalog, MXFP4, metric=metric, across=across, format="mxfp4")
    table, places = answer.get("map").table, answer.tables["places"]
    assert places["rank"].tolist() == list(range(1, len(table) + 1)) and places["place"].is_unique
    values = -places["value"] if MAP_MEASURES[metric].measure.low_is_bad else places["value"]
    assert values.iloc[0] == values.max()
    shown = values[places["value"].clip(0, 40) == places["value"]] if metric in ("sqnr_db",) else values
    assert metric in ("flush_to_zero", "saturated") or shown.dropna().round(9).is_monotonic_decreasing
    assert set(places["tensor_id"]) <= set(catalog.tensors(MXFP4)["tensor_id"])
    assert answer.get("map").choose is None
    where = ["L1 ", "L2 "] if across == "layer_index" else ["iteration 0 ", "iteration 1 "]
    assert places["place"].str.startswith(tuple(where)).all()
    datasets = json.loads(json.dumps(answer.get("map").spec, allow_nan=False))["datasets"].values()
    assert sum(len(rows) for rows in datasets if rows and "shade" in rows[0]) == len(table)


def test_the_verdict_is_of_the_medians_of_each_kind(parts: Catalog):
    answer = drawn(parts, Filter(recipe=["calm"]), metric="absmax")
    kinds, table = answer.tables["kinds"].set_index("kind"), answer.get("map").table
    assert set(kinds.index) == {"fc2 input", "fc2 grad output"}
    for kind, own in table.groupby(table["product"] + " " + table["tensor"].str.replace("_", " ")):
        expected = np.quantile(own["value"], [0.1, 0.5, 0.9])
        assert kinds.loc[kind, ["low", "value", "high"]].tolist() == pytest.approx(expected, rel=1e-12)
    assert {(each.n, each.of) for each in answer.verdict.evidence if each.is_spread} == {(3, "layers")}


def test_an_operand_of_two_gemms_does_not_count_its_layers_twice(catalog: Catalog):
    """The SQNR of a weight in the forward GEMM and in dgrad are values of the same layer."""
    for metric in ("sqnr_db", "absmax"):
        answer = drawn(catalog, MXFP4, metric=metric, format="mxfp4")
        kinds = answer.tables["kinds"].set_index("kind")
        assert kinds.loc["fc1 weight", "tensors"] == 4 and kinds.loc["fc1 weight", "layers"] == 2
    assert {each.n for each in answer.verdict.evidence if each.is_spread} == {2}


def test_hifp8_without_a_scale_says_what_it_would_do_with_one(tmp_path: Path):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 2.0**-24
    with Recorder(tmp_path, scores=("hifp8", "hifp8(scale=amax8)")) as recorder:
        recorder.record("input", x, layer=1, module="fc1", operation="forward", phase="pre", dim=-1)
    with Catalog.open(tmp_path) as catalog:
        scale = "hifp8(scale=amax8)"
        scaled = quant.score(x, scale).sqnr_db
        verdict = drawn(catalog, format="hifp8").verdict
        text = number_text(scaled - normal_sqnr(scale), "+.1f")
        assert verdict.endswith(f"With a tensor scale, {scale}, fc1 input has {text} dB against normal values.")
        assert "With a tensor scale" not in drawn(catalog, format="hifp8(scale=amax8)").verdict
        assert "With a tensor scale" not in drawn(catalog, format="hifp8", metric="absmax").verdict


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", ["mxfp4", "hifp8"])
def test_the_panel_shows_the_values_of_a_cell_as_its_gemm_takes_them(catalog: Catalog, fmt: str):
    values = View("map", {"format": [fmt]}).read(catalog).values
    found = map_of(catalog, MAP.within(catalog, MXFP4, values), values)
    for _, cell in found.table[found.table["row"].str.contains("fc1/|PV/")].iterrows():
        shown = panel(catalog, found, cell, fmt)
        x, dim = along(catalog.load(cell["tensor_id"]), cell["gemm"], cell["product"], cell["tensor"])
        within = 1e-5 if shown["values"]["sample"] == "all values" else 0.02
        area = sum((high - low) * share for low, high, share in shown["values"]["bars"])
        assert area == pytest.approx((x != 0).double().mean().item(), abs=within)
        scores = {each["name"]: each["value"] for each in shown["formats"]}
        assert fmt in scores and [*scores.values()] == sorted(scores.values(), reverse=True)
        for name, value in scores.items():
            assert value == pytest.approx(quant.score(x, name, dim).sqnr_db, rel=1e-9)
        assert [each["name"] for each in shown["formats"] if each["own"]] == [fmt]
        assert shown["facts"][0] == ["SQNR against normal values", cell["label"]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", RECORDED)
def test_odd_tensors(odd_root: Path, metric: str):
    """Nothing finite, zeros, Inf: whatever has a value is drawn, as JSON without NaN."""
    with Catalog.open(odd_root) as catalog:
        for across in ("layer_index", "iteration"):
            for versus in ({}, {"versus": "mxfp8"}, {"versus": catalog.runs()["run_id"][0]}):
                answer = drawn(catalog, metric=metric, format="mxfp4", across=across, **versus)
                assert bool(answer.figures) != bool(answer.problems)
                for figure in answer.figures:
                    json.dumps(figure.spec, allow_nan=False)
        if metric == "absmax":
            assert set(cells(catalog, metric=metric)["layer_index"]) == set(range(1, len(catalog.tensors()) + 1))


@pytest.fixture(scope="module")
def unscored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    root = tmp_path_factory.mktemp("unscored")
    with Recorder(root, scores=()) as recorder:
        for name, dim in (("input", -1), ("output", None)):
            x = torch.ones(8, 32)
            recorder.record(name, x, layer=1, module="fc1", operation="forward", phase="pre", dim=dim)
    with Catalog.open(root) as catalog:
        yield catalog


class TestNotScored:
    """In a format that nothing was scored in, an error is computed from the values on disk."""

    @pytest.mark.thorough
    @pytest.mark.parametrize("fmt", ["mxint8", "mxfp4(block=16x16)", "nvfp4(hadamard=16)"])
    def test_each_operand_as_its_gemm_takes_it(self, catalog: Catalog, fmt: str):
        assert fmt not in catalog.scored_formats()
        for metric in ("sqnr_db", "flush_to_zero"):
            table = cells(catalog, MXFP4, format=fmt, metric=metric)
            recorded = cells(catalog, MXFP4, metric=metric)
            assert set(table[CELL].itertuples(index=False)) == set(recorded[CELL].itertuples(index=False))
            for cell in table.to_dict("records"):
                x, axis = along(catalog.load(cell["tensor_id"]), cell["gemm"], cell["product"], cell["tensor"])
                assert cell["value"] == getattr(quant.score(x, fmt, axis), metric), cell
        (said,) = drawn(catalog, MXFP4, format=fmt).problems
        assert said == f"Not scored in {fmt} when recorded: computed from {len({*table['tensor_id']})} tensors on disk."

    @pytest.mark.thorough
    def test_a_difference_to_it(self, catalog: Catalog):
        table = cells(catalog, MXFP4, versus="mxint8")
        own, other = (cells(catalog, MXFP4, format=fmt).set_index(CELL)["value"] for fmt in ("mxfp4", "mxint8"))
        assert np.allclose(table.set_index(CELL)["value"].sort_index(), (own - other).sort_index())

    def test_too_many_values(self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("binade.app.view.budget.SECONDS", 1e-6)
        found = drawn(catalog, MXFP4, format="mxint4")
        assert not found.items and "narrow the filter" in found.problems[0]

    def test_no_values(self, tmp_path: Path):
        with Recorder(tmp_path, scores=("hifp8",), max_bytes=0) as recorder:
            recorder.record("input", torch.ones(8, 32), layer=1, module="fc1", operation="forward", phase="pre", dim=-1)
        with Catalog.open(tmp_path) as found:
            said = drawn(found, format="mxint8").problems
            assert said == (
                "The operands are scored in hifp8, not in mxint8, and have no values on disk to round to it.",
            )


class TestWhatIsMissing:
    def test_nothing_is_scored(self, unscored: Catalog):
        said = drawn(unscored).problems[0]
        assert "No operand is scored in any format" in said and "absmax" in said
        assert drawn(unscored, metric="absmax").get("map").table["value"].tolist() == [1.0]

    def test_no_operand_is_selected(self, catalog: Catalog):
        where = Filter(tensor_name=["grad_weight"])
        for metric in ("sqnr_db", "absmax"):
            assert (
                drawn(catalog, where, metric=metric).problems[0].startswith("The filter selects no operand of a GEMM")
            )

    @pytest.mark.parametrize(("metric", "option"), [("result_sqnr_db", "result"), ("scale_spread", "blocks")])
    def test_a_measurement_that_was_not_made(self, parts: Catalog, metric: str, option: str):
        found = drawn(parts, metric=metric, format="mxfp4")
        assert not found.items and f"--measures {option}" in found.problems[0]

    @pytest.mark.parametrize(
        ("query", "said"),
        [
            ({"metric": "absmax", "versus": "mxfp8"}, "absmax does not depend on a format: compare with another run."),
        ],
    )
    def test_what_it_cannot_be_compared_with(self, catalog: Catalog, query: dict[str, str], said: str):
        found = drawn(catalog, format="mxfp4", **query)
        assert found.problems == (said,) and not found.items and not found.verdict

    @pytest.mark.parametrize("name", ["metric", "format", "across", "experts", "versus"])
    def test_an_unknown_parameter_is_named_and_nothing_is_drawn(self, catalog: Catalog, name: str):
        found = drawn(catalog, **{name: "loss; DROP TABLE run"})
        assert "'loss; DROP TABLE run'" in found.problems[0] and not found.items and not found.verdict
        assert name == "versus" or found.problems[-1] == f"Unknown {name} in the address; nothing was drawn."

    def test_another_run_has_none_of_the_cells(self, parts: Catalog):
        wild = parts.runs().set_index("recipe")["run_id"]["wild"]
        where = Filter(recipe=["calm"], iteration=[4])
        assert drawn(parts, where, format="mxfp4", versus=wild).figures
        found = drawn(parts, Filter(recipe=["calm"]), format="nvfp4", versus=wild)  # scored in neither
        assert found.figures and found.problems[0].count("Not scored in nvfp4") == 1

    def test_a_run_that_rounds_nothing_is_compared_in_a_format(self, collected: Path):
        with Catalog.open(collected) as catalog:
            runs = catalog.runs().set_index("recipe")["run_id"]
            where, versus = Filter(run_id=[runs["mxfp4"]]), runs["bf16"]
            (said,) = drawn(catalog, where, format="used", versus=versus).problems
            assert said.startswith("The run bf16 rounds none of these operands. Choose a format to compare both in: ")
            format = said.removesuffix(".").rpartition(": ")[2].partition(", ")[0]
            assert drawn(catalog, where, format=format, versus=versus).figures


@pytest.mark.thorough
def test_every_scored_format_can_be_shown(catalog: Catalog):
    for fmt in catalog.scored_formats(MXFP4):
        assert len(cells(catalog, MXFP4, format=fmt)) and (fmt in FORMATS or "(" in fmt)


def test_many_iterations_are_thinned_evenly_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(map_question, "MOST_COLUMNS", most := 40)
    with Recorder(tmp_path, scores=("mxfp4",)) as recorder:
        for _ in range(most + 9):
            recorder.record("input", torch.ones(2, 32), layer=1, module="fc1", operation="forward", phase="pre", dim=-1)
            recorder.step()
    with Catalog.open(tmp_path) as catalog:
        found = drawn(catalog, across="iteration")
        columns = found.get("map").table["iteration"].to_numpy()
    assert len(columns) == most and columns[0] == 0 and columns[-1] == most + 8
    assert set(np.diff(np.sort(columns))) == {1, 2}
    assert "40 of 49 recorded iterations" in found.problems[0]


def test_a_trend_over_iterations_is_named_and_its_slope_is_scipys(tmp_path: Path):
    """absmax that doubles over 12 iterations; without a trend none is named, and of two iterations nothing is said."""
    rng = np.random.default_rng(0)
    sizes = {"rising": np.linspace(1, 2, 12), "level": 1 + 0.1 * rng.standard_normal(12)}
    for name, factors in sizes.items():
        x = normal(3, 32, 64)
        made = [operand(x * factor, 1, at, tensor_name="weight") for at, factor in enumerate(factors)]
        make_run(tmp_path / name, made)
        with Catalog.open(tmp_path / name) as opened:
            said = drawn(opened, metric="absmax", across="iteration").verdict
            slope = stats.theilslopes(float(x.abs().max()) * factors, range(12))[0]
            assert ("absmax rises over iterations in 1 of 1" in said) == (name == "rising"), said
            assert (f"{slope:+.3g} per iteration" in said) == (name == "rising"), said
            few = drawn(opened, Filter(iteration=[0, 1]), metric="absmax", across="iteration").verdict
            assert "trend" not in few

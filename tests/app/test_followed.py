"""What is followed over iterations, hot channels, oscillating weights and gradients in their noise: a real collection,
against numpy over its tensor files."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from binade import quant
from binade.app.measures import channels
from binade.app.measures import weights as of_weights
from binade.app.measures.gradients import GRADIENT_TO_NOISE
from binade.app.measures.map_measure import ITERATION, CellQuery
from binade.app.measures.registry import recorded_measures
from binade.app.questions.map import charts
from binade.app.view.view import View
from binade.collector import Recorder, instrument
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from binade.quant.traces import positions
from tests.app.test_claims import claims
from tests.collector.conftest import SMALL
from tests.collector.forked import run_forked
from tests.collector.small_model import build, loss

pytestmark = pytest.mark.slow
STEPS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of STEPS iterations of two micro-batches in mxfp4, whose weights move."""
    place = tmp_path_factory.mktemp("followed")
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    config = {"model": "m", "size": "s", "dataset": "d", "recipe": "linear_mxfp4"}
    names = ("input", "weight", "grad_output", "grad_weight")
    with Recorder(place, config=config, scores=("mxfp4", "nvfp4"), tensors=names) as recorder:
        with instrument(model, "linear_mxfp4", recorder, backend="torch"):
            for _ in range(STEPS):
                for _ in range(2):
                    loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
    return place


@pytest.fixture(scope="module")
def opened(root: Path):
    with Catalog.open(root) as catalog:
        yield catalog


def series(catalog: Catalog, **where) -> list[torch.Tensor]:
    """The values of a tensor of layer 1, by iteration."""
    rows = catalog.tensors(Filter(layer_index=(1,), micro_batch=(0,), **where)).sort_values("iteration")
    assert rows["iteration"].tolist() == list(range(STEPS))
    return [catalog.load(tensor_id) for tensor_id in rows["tensor_id"]]


@pytest.mark.parametrize("name", ["input", "grad_weight"])
def test_persistence_is_numpys_over_the_files(opened: Catalog, name: str, monkeypatch: pytest.MonkeyPatch):
    where = {"module": ("fc2",), "tensor_name": (name,)}
    tops = []
    for x in series(opened, **where):
        absmax = np.abs(x.float().numpy()).reshape(-1, x.shape[-1]).max(0)
        tops.append(set(np.argsort(-absmax, kind="stable")[:8].tolist()))
    query = CellQuery(opened, Filter(layer_index=(1,), micro_batch=(0,), **where))
    index = [len(a & b) / len(a | b) for a, b in pairwise(tops)]
    by_iteration = channels.OUTLIER_PERSISTENCE.cells(replace(query, across=ITERATION))
    for _, part in by_iteration.groupby("gemm"):  # each has the same tensor
        assert part.sort_values("iteration")["value"].tolist() == index
    cells = channels.OUTLIER_PERSISTENCE.cells(query)
    assert cells["value"].tolist() == pytest.approx([np.mean(index)] * len(cells)) and len(cells)
    found = channels.persistence(query)
    assert found["chance"].dropna().eq(8 / (2 * x.shape[-1] - 8)).all()
    assert found["kept"].mean() == pytest.approx(np.mean([len(a & b) / 8 for a, b in pairwise(tops)]))
    assert found["always"].dropna().tolist() == [len(set.intersection(*tops)) / 8]
    ratios = channels.HOT_RATIO.cells(query)["value"].unique()
    assert ratios == pytest.approx(opened.hot_channels(query.where)["hot_ratio"].median())
    monkeypatch.setattr(channels, "MOST_CHANNELS", 99)
    history = channels.history(query, cells.iloc[0]).table
    assert set(zip(history["iteration"], history["channel"], strict=True)) == {
        (i, channel) for i, top in enumerate(tops) for channel in top
    }
    assert (history["share"] == 1).all()


def test_micro_batches_runs_and_ranks_are_not_mixed(opened: Catalog):
    query = CellQuery(opened, Filter())
    found = channels.persistence(query)
    pairs = found.dropna(subset=["jaccard"])
    assert len(pairs) == len(found) * (STEPS - 1) / STEPS and set(pairs["iteration"]) == set(range(1, STEPS))
    assert channels.OUTLIER_PERSISTENCE.cells(query)["tensors"].eq(2 * (STEPS - 1)).all()
    assert channels.HOT_RATIO.cells(query)["tensors"].eq(2 * STEPS).all()


def test_oscillation_is_numpys_over_the_files(opened: Catalog):
    where = {"module": ("fc1",), "tensor_name": ("weight",)}
    weights = series(opened, **where)
    at = positions(weights[0].numel(), 512)
    w = np.stack([x.double().numpy().reshape(-1)[at] for x in weights])
    q = np.stack([quant.fake_quantize(x, "mxfp4").double().numpy().reshape(-1)[at] for x in weights])
    moved, jumped = np.abs(np.diff(w, axis=0)).sum(0), np.abs(np.diff(q, axis=0)).sum(0)
    oscillating = np.where(moved > 0, jumped >= 16 * moved, False)
    returned = [
        any(path[i] == path[k] != path[j] for i in range(STEPS) for j in range(i, STEPS) for k in range(j, STEPS))
        for path in q.T.tolist()
    ]
    query = CellQuery(opened, Filter(layer_index=(1,), **where))
    table = of_weights.weights(query)
    assert len(table) == STEPS and table["oscillating"].isna().tolist() == [True] * 2 + [False] * (STEPS - 2)
    last = table.iloc[-1]
    assert last["oscillating"] == pytest.approx(oscillating.mean()) and 0 < oscillating.mean() < 1
    assert last["returned"] == pytest.approx(np.mean(returned)) and 0 < np.mean(returned) < 1
    (cell,) = of_weights.OSCILLATING.cells(query).itertuples()
    assert cell.value == last["oscillating"] and (cell.gemm, cell.tensors) == ("forward", 1)
    listed = of_weights.places(query, None).frame
    assert listed["returned"].tolist() == [last["returned"]] and listed["unchanged"].tolist() == ["no"]
    assert opened.sampled_weights(most=4000)["sampled"].map(len).between(16, 64).all()


def test_the_window_moves_on():
    generator = np.random.default_rng(0)
    values, rounded = generator.normal(size=(2, 120, 7)).cumsum(1)
    rounded[:, 3], values[:, 4] = 0, 1
    found = of_weights.ratios(values, rounded)
    for t in (1, 49, 50, 51, 119):
        start = max(0, t - 50)
        moved, jumped = (np.abs(np.diff(x[start : t + 1], axis=0)).sum(0) for x in (values, rounded))
        wanted = np.divide(jumped, moved, out=np.zeros(7), where=moved > 0)
        np.testing.assert_allclose(found[t], wanted, rtol=1e-9)
    assert (found[:, 3] == 0).all() and (found[:, 4] == 0).all()


def test_gradients_in_their_noise(opened: Catalog):
    where = Filter(layer_index=(2,), module=("fc1",), iteration=(STEPS - 1,), micro_batch=(0,))
    cells = GRADIENT_TO_NOISE.cells(CellQuery(opened, where, "nvfp4")).set_index(["tensor", "gemm"])["value"]
    found = {"grad_output": cells["grad_output", "dgrad"], "grad_weight": cells["grad_weight", "wgrad"]}
    rows = opened.tensors(where).set_index("tensor_name")["tensor_id"]
    g, x = (opened.load(rows[name]).flatten(0, -2) for name in ("grad_output", "input"))
    wide = g.double().numpy()
    error = quant.fake_quantize(g, "nvfp4").double().numpy() - wide
    assert found["grad_output"] == pytest.approx(np.linalg.norm(wide) / np.linalg.norm(error), rel=1e-9)
    gq, xq = (quant.fake_quantize(t, "mxfp4", dim=0) for t in (g, x))
    exact, rounded = (a.T.double().numpy() @ b.double().numpy() for a, b in ((g, x), (gq, xq)))
    assert found["grad_weight"] == pytest.approx(np.linalg.norm(exact) / np.linalg.norm(rounded - exact), rel=0.01)


def test_stochastic_rounding_has_the_noise_of_the_formula():
    """‖g‖ / √(Σ Var q) with Var q = (high - g)(g - low), low and high the neighbours of g on E2M1's grid."""
    g = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    wide = np.abs(g.double().numpy().reshape(-1, 32))
    scale = 2.0 ** (np.ceil(np.log2(wide.max(1, keepdims=True) / 6)))
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 8])
    above = np.searchsorted(grid, wide / scale, side="right")
    low, high = grid[above - 1] * scale, grid[above] * scale
    formula = np.linalg.norm(wide) / np.sqrt(((high - wide) * (wide - low)).sum())
    measured = 10 ** (quant.score(g, "mxfp4(scale=rceil, rounding=stochastic)").sqnr_db / 20)
    assert measured == pytest.approx(formula, rel=0.01)


def drawn(catalog: Catalog, view: str, **where):
    return View("map", {"view": [view]}).filtered(Filter(**where)).draw(catalog)


def of_measure(catalog: Catalog, metric: str, **where):
    return View("map", {"metric": [metric]}).filtered(Filter(**where)).draw(catalog)


def test_the_answers(opened: Catalog):
    found = of_measure(opened, "outlier_persistence")
    assert "median Persistence" in found.verdict and not found.problems and not claims(found)
    assert [figure.name for figure in found.figures] == ["map", "hot_channels"]
    for metric in ("oscillating", "edge_excess", "gradient_to_noise"):
        found = of_measure(opened, metric)
        assert not found.problems and not claims(found) and found.figures[0].name == "map"
        assert ("oscillating_weights" in found.tables) == (metric != "gradient_to_noise")


def test_gradients_are_colored_from_the_square_root_of_3():
    """It has no color, and 0.5 and 6 are as far from it on a logarithmic axis: their product is 3."""
    values = pd.Series([0.5, 3**0.5, 6.0, np.nan])
    shades = charts.shade(values, GRADIENT_TO_NOISE, False)
    assert shades[:3].tolist() == pytest.approx([1, 0, -1]) and np.isnan(shades[3])
    ends = charts.legend(GRADIENT_TO_NOISE, GRADIENT_TO_NOISE.measure, values, False)
    assert ends == {"low": "0.5", "high": "6", "bad_is_low": True, "difference": True}


def test_the_interval_of_weights_that_were_put_at_the_edge_of_a_bin_leaves_out_0(tmp_path: Path):
    model, random = build(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.02, generator=random)
        moved = dict(model.named_parameters())["layers.1.mlp.linear_fc1.weight"]
        blocks = moved.view(-1, 32)
        scale = 2 ** (blocks.abs().amax(1, keepdim=True).log2().floor() - 2)
        near = (blocks / scale - 0.75).abs() < 0.1  # between the codes 0.5 and 1
        blocks.copy_(torch.where(near, 0.751 * scale, blocks))
    config = {"model": "m", "size": "s", "dataset": "d", "recipe": "linear_mxfp4"}
    with Recorder(tmp_path, config=config, tensors=("weight",)) as recorder:
        with instrument(model, "linear_mxfp4", recorder, backend="torch"):
            loss(model).backward()
    with Catalog.open(tmp_path) as catalog:
        cells = of_weights.EDGE_EXCESS.cells(CellQuery(catalog, Filter()))
    apart = cells[(cells["low"] > 0) | (cells["high"] < 0)]
    (cell,) = apart.itertuples()
    assert (cell.layer_index, cell.product, cell.tensor) == (2, "fc1", "weight") and cell.value > 0


def test_replicas_of_a_weight_are_one_sample(tmp_path: Path):
    what = ("--quantization", "linear_mxfp4", "--measures", "trace", "--no-raw", "--tensors", "weight")
    iterations = ("--control-iter", "2", "--capture-every", "1")
    assert run_forked(tmp_path, *SMALL, "--train-iters", "2", *what, *iterations, "--dp", "2", ranks=2) == 0
    with Catalog.open(tmp_path) as catalog:
        assert set(catalog.tensors()["rank"]) == {0, 1}
        sampled = catalog.sampled_weights()
    assert len(sampled) == 8 and not sampled.duplicated(["module", "iteration"]).any()  # four weights


def test_what_is_missing_is_said(opened: Catalog):
    found = of_measure(opened, "outlier_persistence", iteration=(2,))
    assert not found.items and not found.verdict and "The filter selects one iteration" in found.problems[0]
    found = of_measure(opened, "oscillating", iteration=(2, 3))
    assert not found.items and not found.verdict and "takes 3 iterations of a run" in found.problems[0]
    for metric in ("oscillating", "gradient_to_noise"):
        found = of_measure(opened, metric, tensor_name=("input",))
        assert not found.items and not found.verdict and len(found.problems) == 1


def test_measured_only_if_asked_for(tmp_path: Path):
    with Recorder(tmp_path, measures=("blocks",)) as recorder:
        for _ in range(2):
            recorder.record(
                "input", torch.randn(4, 64), layer=1, module="x", operation="forward", phase="pre", scores=()
            )
            recorder.step()
    with Catalog.open(tmp_path) as catalog:
        assert catalog.hot_channels().empty
        for metric in ("oscillating", "gradient_to_noise"):
            assert len(of_measure(catalog, metric).problems) == 1 and not of_measure(catalog, metric).items
            assert metric not in recorded_measures(catalog)

"""Two tensors: which is the other by default, and their difference against NumPy."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from binade import plots
from binade.app.questions.pair import compute
from binade.app.view.params import texts_of
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.app.planted import normal
from tests.data.builder import make_run


def root_of(path: Path, *tensors: tuple[Tensor, dict]) -> Catalog:
    """A catalog of one run for each tensor."""
    for number, (x, words) in enumerate(tensors):
        make_run(path, [(x, words)], label=f"run{number}")
    return Catalog.open(path)


def ids(opened: Catalog, **where: int | str) -> list[str]:
    return opened.tensors(Filter(**{name: [value] for name, value in where.items()}))["tensor_id"].tolist()


def odd(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[:5] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, math.nan])
    return x


@pytest.mark.parametrize("shape", [(64, 96), (7, 1300, 12), (850, 401), (50,), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_difference_is_that_of_numpy(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype):
    a = normal(1, *shape, 1)[..., 0].to(dtype)
    b = torch.where(a > 0.5, a, (a * 1.07).to(dtype))
    if a.numel() > 5:
        a, b = odd(a), odd(b)
        b.view(-1)[:2] = torch.tensor([math.nan, 1.0])
    monkeypatch.setattr(compute, "CHUNK", 10_000)  # in several pieces
    found = compute.between(a, b)
    x, y = (each.double().numpy() for each in (a, b))
    known = np.isfinite(x) & np.isfinite(y)
    apart = np.where(known, np.abs(np.where(known, x, 0) - np.where(known, y, 0)), 0)
    assert found.total == x.size
    assert found.differing == x.size - np.isclose(x, y, rtol=0, atol=0, equal_nan=True).sum()
    assert found.not_finite == (~known).sum()
    assert found.norm == pytest.approx(np.linalg.norm(x[known]), rel=1e-12)
    assert found.error == pytest.approx(np.linalg.norm(x[known] - y[known]), rel=1e-12)
    cosine = x[known] @ y[known] / np.linalg.norm(x[known]) / np.linalg.norm(y[known])
    assert found.cosine == pytest.approx(cosine, rel=1e-12)
    assert found.largest == apart.max() == apart[found.at]
    assert found.cells.max() == np.float32(apart.max()) and not np.isnan(found.cells).any()
    tokens = apart.reshape(-1, shape[-1] if shape else 1)
    height, width = (-(-n // 400) for n in tokens.shape)
    for row, column in ((0, 0), (-1, -1)):
        top, left = (np.arange(n)[each] * step for n, each, step in
                     zip(found.cells.shape, (row, column), (height, width), strict=True))  # fmt: skip
        assert found.cells[row, column] == np.float32(tokens[top : top + height, left : left + width].max())


def test_what_is_said_of_two_tensors(tmp_path: Path):
    a = odd(normal(1, 64, 96))
    b = torch.where(normal(2, 64, 96) > 1, a * 1.5, a)
    b.view(-1)[3] = 40.0
    with root_of(tmp_path, (a, {"format": "mxfp4"}), (b, {"format": "mxfp4"})) as opened:
        older, newer = sorted(ids(opened))
        drawn = plots.pair(opened, tensor=older)
        reverse = plots.pair(opened, tensor=newer)
    x, y = (each.double().numpy()[np.isfinite(a.numpy())] for each in (a, b))
    differing = int((x != y).sum())
    relative = 100 * np.linalg.norm(x - y) / np.linalg.norm(x)
    said = re.match(r"([\d,]+) of 6,144 values differ from those of .*; the difference has ([\d.]+)% of", drawn.verdict)
    assert said and [int(said[1]), float(said[2])] == [differing, pytest.approx(relative, rel=0.005)]
    assert "Largest difference: 40 at [0, 3], where the values are 0 and 40." in drawn.verdict
    assert "4 pairs with NaN or Inf" in drawn.verdict and "where the values are 40 and 0." in reverse.verdict
    assert [figure.name for figure in drawn.figures] == ["magnitudes", "qq", "apart"]
    table = drawn.tables["Statistics"].set_index("name")
    for column, each in (("a", x), ("b", y)):
        rms = math.sqrt(np.mean(each**2))
        expected = {"rms": rms, "absmax": abs(each).max(), "crest_factor": abs(each).max() / rms}
        expected |= {"kurtosis": np.mean((each - each.mean()) ** 4) / each.var() ** 2, "non_finite": 4 / 6144}
        expected |= {"dynamic_range": math.log2(abs(each).max() / abs(each[each != 0]).min())}
        expected |= {"zero_share": (each == 0).sum() / 6144}
        assert table.loc[list(expected), column].to_dict() == pytest.approx(expected, rel=1e-6)
    assert not table.loc["flushed_error_share"].isna().any()


def test_identical_tensors_and_tensors_of_other_dtypes(tmp_path: Path):
    x = odd(normal(1, 32, 64).bfloat16())
    with root_of(tmp_path, (x, {}), (x.clone(), {}), (x.float(), {})) as opened:
        first, second, third = sorted(ids(opened))
        assert plots.pair(opened, tensor=first, other=second).verdict.startswith("The two tensors are identical.")
        verdict = plots.pair(opened, tensor=first, other=third).verdict
    assert verdict.startswith("The two tensors are identical. Their dtypes are bfloat16 and float32.")
    assert "KS 0," in verdict


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.full((32, 64), math.nan), "in each of these pairs, a value is NaN or Inf"),
        (normal(1, 64, 32), "The shapes are 32 × 64 and 64 × 32: only statistics and distributions are compared."),
        (torch.empty(0, 64), "The shapes are 32 × 64 and 0 × 64"),
        (torch.zeros(32, 64), "100% of the norm of this tensor"),
    ],
)
def test_tensors_that_have_little_in_common(tmp_path: Path, other: Tensor, said: str):
    with root_of(tmp_path, (normal(1, 32, 64), {}), (other, {})) as opened:
        first, second = sorted(ids(opened))
        drawn = plots.pair(opened, tensor=first, other=second)
        assert said in drawn.verdict and "Statistics" in drawn.tables
        assert plots.pair(opened, tensor=second, other=first).verdict
        assert bool(drawn.get("apart")) == (said.startswith("100%"))


def test_values_that_were_not_kept(tmp_path: Path):
    with root_of(tmp_path, (normal(1, 32, 64), {}), (normal(2, 32, 64), {"raw": False})) as opened:
        first, second = sorted(ids(opened))
        drawn = plots.pair(opened, tensor=first, other=second)
        assert not drawn.items and len(drawn.problems) == 1 and "were not kept" in drawn.problems[0]
        assert "No other run, iteration or layer has this tensor" in plots.pair(opened, tensor=first).problems[0]
        assert "same tensor" in plots.pair(opened, tensor=first, other=first).problems[0]
        unknown = View("tensor", {"view": ["pair"], "tensor": [first], "other": ["nope/x"]}).draw(opened)
        assert not unknown.items and "'nope/x', which does not exist" in unknown.problems[0]


@pytest.mark.thorough
def test_the_other_tensor_that_is_shown_by_default(tmp_path: Path):
    """Another run first, then another iteration, then the next layer; each differs from the tensor in nothing else."""
    places = [{"layer_index": layer, "iteration": at} for layer in (1, 2) for at in (0, 3, 4)]
    places += [{"layer_index": 3, "iteration": 0, "module": "fc2"}, {"layer_index": 2, "iteration": 9, "rank": 1}]
    run = make_run(tmp_path, [(normal(number, 4, 32), words) for number, words in enumerate(places)]).run_id
    view = View("tensor", {"view": ["pair"], "run_id": [run]})

    def other(opened: Catalog, **where: int) -> dict[str, int | str] | None:
        (own,) = opened.tensors(Filter(run_id=(run,), module=("fc1",), **{k: (v,) for k, v in where.items()}))[
            "tensor_id"
        ]
        reading = view.changed(tensor=own).read(opened)
        chosen = opened.rows_of([reading.values["other"]]) if reading.values["other"] else None
        return None if chosen is None else chosen.iloc[0][["run_id", "layer_index", "iteration"]].to_dict()

    with Catalog.open(tmp_path) as opened:
        assert other(opened, layer_index=1, iteration=4) == {"run_id": run, "layer_index": 1, "iteration": 3}
        assert other(opened, layer_index=1, iteration=0) == {"run_id": run, "layer_index": 1, "iteration": 3}
        assert other(opened, layer_index=2, iteration=9) is None
        second = make_run(
            tmp_path, [(normal(7, 4, 32), {"layer_index": 2, "iteration": 4, "quant_type": "bf16"})]
        ).run_id
        opened.sync()
        assert other(opened, layer_index=2, iteration=4) == {"run_id": second, "layer_index": 2, "iteration": 4}
        (own,) = ids(opened, run_id=run, layer_index=2, iteration=4)
        named = view.changed(tensor=own)
        assert set(named.runs(opened)) == {run, second}
        assert named.explicit(opened).tensors(opened) == [own, *ids(opened, run_id=second)]
    alone = tmp_path / "alone"
    words = [
        {"layer_index": layer, "module": module} for layer, module in ((1, "fc1"), (2, "fc1"), (2, "fc2"), (4, "fc1"))
    ]
    run = make_run(alone, [(normal(1, 4, 32), each) for each in words]).run_id
    view = View("tensor", {"view": ["pair"]})
    with Catalog.open(alone) as opened:
        assert other(opened, layer_index=1) == {"run_id": run, "layer_index": 2, "iteration": 0}
        assert other(opened, layer_index=2) is None


@pytest.mark.slow
def test_the_page_keeps_the_chosen_tensor_in_its_address(visit, collected: Path):
    at = visit(collected, "tensor", view="pair", quant_type="mxfp4")
    (box,) = [each for each in at.selectbox if each.label == "Other tensor"]
    assert at.session_state["tensor"] not in box.options and "other" not in at.query_params
    with Catalog.open(collected) as opened:
        row = opened.rows_of([at.session_state["tensor"]]).iloc[0]
        weight = opened.tensors(Filter(tensor_name=["weight"], layer_index=[1]))["tensor_id"][0]
        assert opened.rows_of([box.value])["run_id"][0] != row["run_id"]
        assert box.value in opened.twins(row["tensor_id"])["tensor_id"].tolist()
    box.set_value(weight).run()
    assert texts_of(at.query_params["other"]) == [weight] and not at.exception
    assert any("**" in each.value for each in at.markdown)

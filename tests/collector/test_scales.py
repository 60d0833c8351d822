"""The sweep of tensor scales: against the libraries' casts in NumPy, its recipe as trained, and what it refuses."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from binade.collector import Recorder, instrument
from binade.collector.advice import scales
from binade.collector.advice.scales import OPERAND, Sweep, best_blocks, best_margin, recipe, sweep
from binade.collector.errors import AdviceError, ConfigError
from binade.collector.models.site import Site
from binade.collector.recipes.files import read_recipe, to_toml
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from binade.quant.formats import FORMATS
from tests.collector.cli.test_cli import one_line
from tests.collector.small_model import build, step
from tests.quant.libraries import LIBRARY, library_round
from tests.quant.oracles import hifp8_amax8

WHERE = Filter(module=("fc2", "core"), tensor_name=("input", "weight", "grad_output", "grad_scores", "key"))
TOP = {"hifp8": 16.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}  # with margin 0, absmax is mapped to (TOP / 2, TOP]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations of a model that trains in bf16."""
    root, model = tmp_path_factory.mktemp("runs"), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Recorder(root, scores=()) as recorder, instrument(model, "bf16", recorder):
        for _ in range(3):
            optimizer.zero_grad()
            step(model)
            optimizer.step()
            recorder.step()
    return root


@pytest.fixture(scope="module")
def hifp8(root: Path) -> Sweep:
    with Catalog.open(root) as catalog:
        return sweep(catalog, WHERE)


def by_numpy(x: np.ndarray, fmt: str, k: int) -> dict[str, float]:
    scaled = np.ldexp(x, k).astype(np.float32)
    y = library_round(fmt, scaled)
    q, x = np.ldexp(y.astype(np.float64), -k), x.astype(np.float64)
    with np.errstate(divide="ignore"):
        sqnr = 10 * np.log10((x @ x) / ((q - x) @ (q - x)))
    exponents = np.floor(np.log2(np.abs(y[y != 0])))
    exponents = np.where(exponents < -15, 16, np.abs(exponents))
    tiers = {"3 mantissa bits": (0, 3), "2 mantissa bits": (4, 7), "1 mantissa bit": (8, 15), "denormal": (16, 16)}
    return {
        "sqnr_db": sqnr,
        "flush_to_zero": ((x != 0) & (q == 0)).sum() / (x != 0).sum(),
        "saturated": (np.abs(scaled) > LIBRARY[fmt].max).mean(),
    } | {name: ((exponents >= low) & (exponents <= high)).mean() for name, (low, high) in tiers.items()
         if fmt == "hifp8" and len(exponents)}  # fmt: skip


def exponent(x: np.ndarray, fmt: str) -> int:
    """The largest k for which absmax · 2^k is at most TOP, or for HiFloat8 less than it."""
    k = int(np.floor(np.log2(np.float64(TOP[fmt]) / np.abs(x).max())))
    return k - (fmt == "hifp8" and np.ldexp(np.abs(x).max(), k) >= TOP[fmt])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fmt", TOP)
def test_every_scale_has_the_errors_of_a_sweep_in_numpy(fmt, root, hifp8):
    with Catalog.open(root) as catalog:
        found = hifp8 if fmt == "hifp8" else sweep(catalog, Filter(module=("fc2",)), fmt)
        rows = scales._operands(catalog.tensors(WHERE if fmt == "hifp8" else Filter(module=("fc2",))))
        tensors = {row.Index: catalog.load(row.tensor_id).float().numpy().ravel() for row in rows.itertuples()}
    assert set(found.trials["tensor"]) == set(tensors) and found.of == len(tensors)
    for row in found.trials.itertuples(index=False):
        row = dict(zip(found.trials, row, strict=True))
        x = tensors[row["tensor"]]
        k = 0 if np.isnan(row["margin"]) else exponent(x, fmt) - int(row["margin"])
        assert row["k"] == k
        for name, value in by_numpy(x, fmt, k).items():
            assert row[name] == pytest.approx(value, rel=1e-6), name


def test_stability_compares_iterations_of_one_tensor(hifp8):
    scaled = hifp8.trials.dropna(subset="margin")
    expected = []
    for _, series in scaled.groupby("series"):
        iterations = [own.set_index("k")["sqnr_db"] for _, own in series.groupby("iteration")]
        best = [own[own == own.max()].index for own in iterations]
        for (before, after), sqnr in zip(pairwise(best), iterations[1:], strict=True):
            assert len(before) == len(after) == 1
            expected.append((abs(after[0] - before[0]), sqnr.max() - sqnr.get(before[0], np.nan)))
    assert len(expected) == 2 * scaled["series"].nunique() and any(moved for moved, _ in expected)
    assert hifp8.stability[["moved", "lost"]].to_numpy() == pytest.approx(np.array(expected))


def made(sqnr: dict[int, list[float]], place: tuple[str, str, str] = ("linear", "fc1", "grad_output")) -> pd.DataFrame:
    """Trials of tensors, by margin."""
    rows = [(*place, f"{place}{i}", margin, value) for margin, of in sqnr.items() for i, value in enumerate(of)]
    return pd.DataFrame(rows, columns=[*OPERAND, "tensor", "margin", "sqnr_db"])


def test_a_margin_is_best_only_if_the_tensors_agree():
    noise = np.random.default_rng(0).normal(0, 3, 12)
    flat = list(30 + noise)
    clear = best_margin(made({-2: list(33 + noise), 0: flat, 2: list(20 + noise)}))
    assert (clear.margin, clear.alike) == (-2, (-2,))
    unclear = best_margin(made({-2: list(30.5 + noise[::-1]), 0: flat, 2: list(20 + noise)}))
    assert (unclear.margin, unclear.alike) == (0, (-2, 0))
    assert best_margin(made({-1: [40.0], 0: [30.0]})).alike == (-1, 0)  # one tensor decides nothing
    small = best_margin(made({-1: list(30.05 + noise), 0: flat}))  # certain, but less than the resolution
    assert (small.margin, small.alike) == (0, (-1, 0))


def test_blocks_take_the_first_of_the_best_schemes():
    rows = [("1x32", "a", 30.0), ("1x32", "b", 31.0), ("1x32", "c", 31.05), ("row", "a", 29.0), ("row", "c", 30.0)]
    table = best_blocks(pd.DataFrame(rows, columns=["block", "spec", "sqnr_db"]))
    assert list(table.itertuples(index=False, name=None)) == [rows[1], rows[4]]


def test_blocks_have_the_errors_of_numpy(root, hifp8):
    with Catalog.open(root) as catalog:
        rows = scales._operands(catalog.tensors(WHERE))
        for row in rows[(rows["module"] == "fc2") & (rows["tensor_name"] == "grad_output")].itertuples():
            x = catalog.load(row.tensor_id).float().numpy().reshape(-1, 32)
            own = hifp8.blocks[hifp8.blocks["tensor"] == row.Index].set_index(["block", "spec"])["sqnr_db"]
            for block, q in (("tensor", hifp8_amax8(x)), ("1x32", np.stack([hifp8_amax8(part) for part in x]))):
                spec = "hifp8(scale=amax8)" if block == "tensor" else "hifp8(block=1x32, scale=amax8)"
                power, noise = ((each.astype(np.float64) ** 2).sum() for each in (x, q - x))
                assert own[block, spec] == pytest.approx(10 * np.log10(power / noise), rel=1e-5)
            assert set(own.index.get_level_values("block")) == set(scales.BLOCKS)


def test_one_tensor_of_an_operand_is_read_in_its_last_iterations(root, monkeypatch):
    monkeypatch.setattr(scales, "MOST_TENSORS", 3)
    with Catalog.open(root) as catalog:
        few = sweep(catalog, WHERE)
    chosen = few.trials.groupby(OPERAND)[["tensor", "series"]].nunique()
    assert (chosen["tensor"] == 3).all() and (chosen["series"] == 1).all()  # one tensor in three iterations


def heavy_tailed(dtype: torch.dtype) -> torch.Tensor:
    """Student-t values with two degrees of freedom, and one token with massive activations in two channels."""
    x = np.random.default_rng(3).standard_t(2, (128, 256)) * 2.0**-12
    x[7, [11, 200]] = -1450, 590
    x[100] = 0
    x[101, :4] = 2.0**-16, 3 * 2.0**-17, 2.0**-18, 0.9 * 2.0**-18  # ties, and the smallest codes at some of the scales
    return torch.from_numpy(x).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", scales.SCALED)
def test_a_sweep_is_that_of_all_values_where_a_sample_misses_the_largest(fmt, dtype):
    x = heavy_tailed(dtype)
    values = x.float().numpy().ravel()
    table = scales.by_scale(scales.Cells.of(x), float(x.abs().max()), fmt)
    assert set(table["margin"]) >= set(scales.MARGINS) and 0 in table.index
    direct = {k: by_numpy(values, fmt, k) for k in table.index}
    for k, errors in direct.items():
        for name, value in errors.items():
            assert table.loc[k, name] == pytest.approx(value, rel=1e-9, abs=1e-12), (k, name)
    best = scales.best_scale(table)
    assert direct[best]["sqnr_db"] == pytest.approx(max(errors["sqnr_db"] for errors in direct.values()))
    part = x[::16].float().numpy().ravel()  # the lines of a sample
    sampled = {k: by_numpy(part, fmt, k)["sqnr_db"] for k in table.index}
    wrong = max(sampled, key=sampled.__getitem__)
    assert direct[wrong]["sqnr_db"] < direct[best]["sqnr_db"] - 3


def test_values_share_a_cell_only_where_every_format_rounds_them_alike():
    assert all(FORMATS[fmt].element.mantissa_bits <= 6 for fmt in scales.SCALED)


def test_the_recipe_has_the_margins_and_trains(tmp_path):
    names = {"input": 0, "weight": 1, "grad_output": -3}
    trials = [
        made({margin: [30.0, 31.0, 32.0] if margin == best else [20.0, 21.5, 21.0] for margin in (-3, 0, 1, 2)},
             ("linear", module, name))
        for module in ("qkv", "proj", "fc1", "fc2")
        for name, usual in names.items()
        for best in [2 if (module, name) == ("fc2", "grad_output") else usual]
    ]  # fmt: skip
    found = Sweep("hifp8", pd.concat(trials), pd.DataFrame(), pd.DataFrame(), 36, 0)
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(recipe(found, "mine", 4)))
    read = read_recipe(path, "mine")
    specs = {name: f"hifp8(scale=pow2, history=4, margin={margin})" for name, margin in names.items()}
    specs["input"] = "hifp8(scale=pow2, history=4)"
    for site, gradient in ((Site(1, "fc1"), specs["grad_output"]), (Site(1, "fc2"), specs["grad_output"][:-3] + "2)")):
        part = read.linear_of(site)
        assert [part.rounded_to(field) for field in ("forward_a", "wgrad_a", "forward_b", "dgrad_b")] == [
            specs["input"], specs["input"], specs["weight"], specs["weight"],
        ]  # fmt: skip
        assert part.rounded_to("dgrad_grad") == part.rounded_to("wgrad_grad") == gradient
    assert read.qk.rounded_to("forward_a") == "bf16"
    model = build()
    with Recorder(tmp_path / "runs", scores=()) as recorder, instrument(model, str(path), recorder):
        for _ in range(2):
            step(model)
            recorder.step()
    with Catalog.open(tmp_path / "runs") as catalog:
        rows = catalog.tensors(Filter(tensor_name=("grad_output",), module=("fc1", "fc2"), iteration=(1,)))
    assert dict(zip(rows["module"], rows["format"], strict=True)) == {
        "fc1": specs["grad_output"], "fc2": specs["grad_output"][:-3] + "2)",
    }  # fmt: skip
    assert (rows["sqnr_db"] > 25).all()


def test_the_command_writes_a_recipe(root, tmp_path, command, capsys):
    path = tmp_path / "mine.toml"
    assert command("scales", str(root), "--module", "fc2", "--history", "3", "--output", str(path)) == 0
    out, _ = capsys.readouterr()
    assert "linear fc2 grad_output" in out and f"binade run --recipe {path}" in out
    assert command("scales", str(root), "--output", str(path)) == 2 and "exists" in capsys.readouterr().err
    specs = read_recipe(path, "mine").linear.formats
    assert all(specs[field].history == 3 for field in ("forward_a", "forward_b", "dgrad_grad"))


WRONG = {
    "blocks of its own": (("--format", "mxfp4"), 2, "expected a format .* alone: fp8_e4m3, fp8_e5m2, .*hifp8"),
    "no file of a recipe": (("--output", "mine.yaml"), 2, "does not end in .toml"),
    "no history": (("--history", "0"), 2, "--history"),
    "nothing selected": (("--module", "router"), 1, "no operand has values on disk"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_one_line(name, root, command, capsys):
    words, status, message = WRONG[name]
    assert command("scales", str(root), *words) == status
    _, err = capsys.readouterr()
    assert one_line(err)
    assert re.search(message, err), err


def test_zeros_and_values_that_are_not_finite_are_left_out(tmp_path):
    with Recorder(tmp_path, scores=()) as recorder:
        model = build(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "fc1" in name:
                    parameter.zero_()
        with instrument(model, "bf16", recorder):
            step(model)
    with Catalog.open(tmp_path) as catalog:
        found = sweep(catalog, Filter(layer_type=("linear",)))
        assert found.unfit and not ((found.trials["module"] == "fc1") & (found.trials["tensor_name"] == "weight")).any()
        with pytest.raises(AdviceError, match="all operands that were read are 0"):
            sweep(catalog, Filter(module=("fc1",), tensor_name=("weight",)))
        with pytest.raises(ConfigError, match="nvfp4"):
            sweep(catalog, fmt="nvfp4")

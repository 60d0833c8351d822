"""What a recorded step holds: which tensors, their values, statistics, errors, scores and files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from binade import quant
from binade.collector import Recorder, instrument
from binade.collector.models.model import GPTModel
from binade.collector.models.parallel import ParallelLinear
from binade.data.index.catalog import Catalog
from binade.data.run.tensor_kinds import MAPS
from binade.data.words.filter import Filter
from binade.quant.metrics import errors
from tests.collector.small_model import SCORES, SHAPE, Hooks, build, check_errors, step

pytestmark = pytest.mark.slow
LINEARS = ("qkv", "proj", "fc1", "fc2")
LINEAR_NAMES = {
    ("input", "forward", "pre"),
    ("weight", "forward", "pre"),
    ("output", "forward", "post"),
    ("grad_output", "backward", "pre"),
    ("grad_input", "backward", "post"),
    ("grad_weight", "backward", "post"),
}
CORE_NAMES = {
    ("query", "forward", "pre"),
    ("key", "forward", "pre"),
    ("value", "forward", "pre"),
    ("attention_scores", "forward", "post"),
    ("attention_probs", "forward", "post"),
    ("output", "forward", "post"),
    ("grad_output", "backward", "pre"),
    ("grad_scores", "backward", "pre"),
    ("grad_query", "backward", "post"),
    ("grad_key", "backward", "post"),
    ("grad_value", "backward", "post"),
}


def record(root: Path, recipe: str, **options) -> tuple[GPTModel, Hooks]:
    model = build()
    hooks = Hooks(model)
    config = {"model": "m", "size": "s", "dataset": "d", "recipe": recipe}
    options = {"scores": SCORES} | options
    with Recorder(root, label="test", config=config, **options) as recorder:
        with instrument(model, recipe, recorder, backend="torch"), recorder.at(3, 1):
            step(model)
    hooks.remove()
    for layer in model.modules():
        if isinstance(layer, ParallelLinear):
            hooks.keep(layer, "grad_weight", layer.weight.grad)
    return model, hooks


@pytest.fixture(scope="module", params=["mxfp8", "FA_linear_mxfp4", "hifp8", "bf16"])
def recorded(request, tmp_path_factory):
    """(recipe, open catalog, hooks) of one recorded step."""
    root = tmp_path_factory.mktemp("recorded")
    _, hooks = record(root, request.param)
    with Catalog.open(root) as catalog:
        yield request.param, catalog, hooks


def part_formats(recipe: str) -> dict[str, str]:
    """quant type by kind of product."""
    fmt = recipe.removeprefix("FA_linear_")
    return {"linear": fmt, "qk": fmt, "pv": "bf16" if recipe.startswith("FA") else fmt}


def kind_of(row) -> str:
    if row.module != "core":
        return "linear"
    qk = ("query", "key", "attention_scores", "grad_scores", "grad_query", "grad_key")
    return "qk" if row.tensor_name in qk else "pv"


def check_product(a, b, product):
    """That a product in bf16 is that of these operands: rounded once, after a sum in float32 in any order, which
    depends on the processor."""
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    bound = exact.abs() * 2**-8 + a.shape[-1] * 2**-23 * sizes
    assert bool((product.double().view_as(exact) - exact).abs().le(bound).all())


def masked(row) -> int:
    """How many pairs of a map of attention are behind the causal mask."""
    return int(row.pairs_left_out) if row.tensor_name in MAPS else 0


class TestRecorded:
    def test_exactly_these_tensors(self, recorded):
        _, catalog, _ = recorded
        frame = catalog.tensors()
        found = Counter(frame[["layer_index", "module", "tensor_name", "operation", "phase"]].itertuples(index=False))
        expected = Counter(
            (layer, module, *names)
            for layer in (1, 2)
            for module, all_names in [*((m, LINEAR_NAMES) for m in LINEARS), ("core", CORE_NAMES)]
            for names in all_names
        )
        assert Counter(tuple(key) for key in found.elements()) == expected
        assert len(frame) == 2 * 35
        core = frame["module"] == "core"
        assert (frame["layer_type"] == np.where(core, "attention", "linear")).all()
        assert (frame["component"] == np.where(core, "FA", "linear")).all()

    def test_words_are_the_runs(self, recorded):
        recipe, catalog, _ = recorded
        frame = catalog.tensors()
        words = {"model": "m", "size": "s", "dataset": "d", "recipe": recipe}
        for name, value in (words | {"iteration": 3, "micro_batch": 1, "rank": 0}).items():
            assert set(frame[name]) == {value}, name
        assert frame["expert"].isna().all()
        for row in frame.itertuples():
            assert row.quant_type == part_formats(recipe)[kind_of(row)]

    @pytest.mark.sampled(1)
    def test_values_are_what_the_layer_saw(self, recorded):
        _, catalog, hooks = recorded
        frame = catalog.tensors()
        compared = 0
        for row in frame.itertuples():
            if row.tensor_name in ("attention_scores", "attention_probs", "grad_scores"):
                continue
            x = catalog.load(row.tensor_id)
            seen = hooks.seen[row.layer_index, row.module, row.tensor_name]
            assert torch.equal(x.float(), seen.float()), f"{row.module} {row.tensor_name}"
            assert tuple(row.shape) == tuple(x.shape) == tuple(seen.shape)
            assert x.dtype == torch.bfloat16 and row.dtype == "bfloat16" and row.nbytes == 2 * x.numel()
            compared += 1
        assert compared == 2 * 32

    def test_scores_and_probs_follow_from_query_and_key(self, recorded):
        recipe, catalog, hooks = recorded
        fmt = part_formats(recipe)["qk"]
        for layer in (1, 2):
            q, k = (hooks.seen[layer, "core", name] for name in ("query", "key"))
            k = k.repeat_interleave(SHAPE.heads // SHAPE.kv_heads, 1)
            if fmt != "bf16":
                q, k = quant.fake_quantize(q, fmt), quant.fake_quantize(k, fmt)
            scores = q @ k.mT * SHAPE.head_dim**-0.5
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            for name, expected in (
                ("attention_scores", scores),
                ("attention_probs", scores.float().masked_fill(future, -torch.inf).softmax(-1).bfloat16()),
            ):
                (row,) = catalog.tensors(Filter(layer_index=[layer], tensor_name=[name])).itertuples()
                assert torch.equal(catalog.load(row.tensor_id), expected), name

    def test_the_gradients_of_query_and_key_follow_from_that_of_the_scores(self, recorded):
        recipe, catalog, hooks = recorded
        fmt = "bf16" if recipe.startswith("FA") else {"mxfp8": "mxfp8_e5m2"}.get(recipe, recipe)
        for layer in (1, 2):
            q, k = (hooks.seen[layer, "core", name] for name in ("query", "key"))
            by_head = (SHAPE.kv_heads, SHAPE.heads // SHAPE.kv_heads, q.shape[2])
            (row,) = catalog.tensors(Filter(layer_index=[layer], tensor_name=["grad_scores"])).itertuples()
            grad, q = (x.reshape(len(x), *by_head, -1) for x in (catalog.load(row.tensor_id), q))

            def rounded(x, dim, to=recipe, fmt=fmt):
                return x if fmt == "bf16" else quant.fake_quantize(x, to, dim=dim)

            dq = hooks.seen[layer, "core", "grad_query"]
            check_product(rounded(grad, -1, fmt).flatten(2, 3), rounded(k, -2), dq)
            dk = hooks.seen[layer, "core", "grad_key"]
            check_product(rounded(grad, -2, fmt).flatten(2, 3).mT, rounded(q, -2).flatten(2, 3), dk)

    @pytest.mark.sampled(1)
    def test_summary_is_the_files(self, recorded):
        _, catalog, _ = recorded
        for row in catalog.tensors().itertuples():
            x = catalog.load(row.tensor_id).double().numpy()
            if row.tensor_name in MAPS:
                x = x[..., np.tril(np.ones(x.shape[-2:], bool))]
                assert row.numel == x.size and row.pairs_left_out > 0
            x = x.ravel()
            expected = {
                "min": x.min(), "max": x.max(), "mean": x.mean(), "std": x.std(), "rms": np.sqrt((x**2).mean()),
                "absmax": np.abs(x).max(), "absmin": np.abs(x[x != 0]).min(), "zeros": (x == 0).sum(),
                "kurtosis": ((x - x.mean()) ** 4).mean() / x.var() ** 2,
                "skewness": ((x - x.mean()) ** 3).mean() / x.std() ** 3, "nans": 0, "infs": 0,
            }  # fmt: skip
            scale = {"mean": x.std(), "skewness": 1.0}
            for name, value in expected.items():
                assert getattr(row, name) == pytest.approx(value, rel=1e-9, abs=1e-12 * scale.get(name, 0)), name

    def test_errors_are_recomputed_from_the_file(self, recorded):
        recipe, catalog, _ = recorded
        operands = {"input", "weight", "query", "key", "value", "attention_probs", "grad_output", "grad_scores"}
        checked = 0
        for row in catalog.tensors().itertuples():
            kind = kind_of(row)
            fmt = part_formats(recipe)[kind]
            quantized = row.tensor_name in operands and fmt != "bf16"
            if kind == "qk" and recipe.startswith("FA"):
                quantized = row.tensor_name in ("query", "key")
            if not quantized:
                assert pd.isna(row.format) and pd.isna(row.sqnr_db), f"{row.module} {row.tensor_name}"
                continue
            expected_format = "mxfp8_e5m2" if fmt == "mxfp8" and row.tensor_name.startswith("grad_") else fmt
            assert row.format == expected_format
            axis = -2 if row.tensor_name == "value" else -1
            assert row.contracted_axis == axis
            check_errors(catalog.load(row.tensor_id), row.format, axis, row._asdict(), masked(row))
            checked += 1
        by_layer = 0 if recipe == "bf16" else 3 * len(LINEARS) + (2 if recipe.startswith("FA") else 6)
        assert checked == 2 * by_layer

    @pytest.mark.sampled(1)
    def test_scores_are_recomputed_from_the_file(self, recorded):
        """Of every format, and along every axis that a GEMM contracts: tokens are one axis to wgrad."""
        recipe, catalog, _ = recorded
        frame = catalog.tensors().set_index("tensor_id")
        operands = frame[frame["contracted_axis"].notna()]
        assert set(operands["tensor_name"]) == {
            "input", "weight", "query", "key", "value", "attention_probs", "grad_output", "grad_scores"
        }  # fmt: skip
        assert set(catalog.scores()["tensor_id"]) == set(operands.index)
        found = catalog.table("score").to_pandas()
        assert found.groupby("tensor_id")["gemm"].nunique().eq(2).all()
        for (tensor_id, gemm), rows in found.groupby(["tensor_id", "gemm"]):
            row = frame.loc[tensor_id]
            fmt = part_formats(recipe)[kind_of(row)]
            quantized = fmt != "bf16" and not (kind_of(row) == "qk" and recipe.startswith("FA") and gemm != "forward")
            in_gradients = row.tensor_name.startswith("grad_") and fmt == "mxfp8"
            used = {"mxfp8_e5m2" if in_gradients else fmt} if quantized else set()
            assert set(rows["format"]) == {*SCORES, *used}
            assert set(rows[rows["used"]]["format"]) == used
            x, axis = catalog.load(tensor_id), int(row.contracted_axis)
            if gemm != row.gemm:
                x, axis = (x.flatten(0, -2) if row.module != "core" else x), -3 - axis
            if row.tensor_name in ("query", "attention_probs", "grad_output", "grad_scores") and row.module == "core":
                continue  # heads of a group are one axis in the product: test_group_of_heads
            for one in rows.itertuples():
                check_errors(x, one.format, axis, one._asdict(), masked(row))

    @pytest.mark.sampled(2)
    def test_errors_of_results(self, recorded):
        """Of linear layers, against the GEMMs of the operands in the files."""
        recipe, catalog, _ = recorded
        fmt = part_formats(recipe)["linear"]
        frame = catalog.tensors()
        results = frame[frame["phase"] == "post"]
        if fmt == "bf16":
            assert results["result_sqnr_db"].isna().all()
            return
        for (_, module), rows in frame[frame["module"] != "core"].groupby(["layer_index", "module"]):
            x, w, dy = (
                catalog.load(rows[rows["tensor_name"] == name]["tensor_id"].item()).flatten(0, -2)
                for name in ("input", "weight", "grad_output")
            )
            for name, exact in (("output", x @ w.T), ("grad_input", dy @ w), ("grad_weight", dy.T @ x)):
                row = rows[rows["tensor_name"] == name].iloc[0]
                got = catalog.load(row["tensor_id"]).flatten(0, -2)
                expected = errors(exact, got).sqnr_db
                assert row["result_sqnr_db"] == pytest.approx(expected, abs=1e-3), (module, name)
        attention = results[results["module"] == "core"].set_index("tensor_name")["result_sqnr_db"]
        quantized = attention if not recipe.startswith("FA") else attention[["attention_scores"]]
        assert quantized.drop(["attention_probs"], errors="ignore").between(0, 80).all()

    def test_files_describe_themselves(self, recorded):
        _, catalog, _ = recorded
        for row in catalog.tensors().itertuples():
            path = catalog.path(row.tensor_id)
            content = torch.load(path, weights_only=True, mmap=True)
            assert set(content) == {"tensor", "tensor_info", "metadata"}
            meta = content["metadata"]
            assert (meta["layer_type"], meta["layer_idx"], meta["operation"]) == (
                row.layer_type, row.layer_index, row.operation
            )  # fmt: skip
            assert (meta["tensor_name"], meta["iteration"], meta["sample_idx"]) == (row.tensor_name, 3, 1)
            assert content["tensor_info"]["shape"] == list(row.shape)
            assert path.parent.name == row.quant_type
            assert path.name.endswith(
                f"_iter003_{row.layer_type}_L{row.layer_index}_{row.operation}_{row.phase}_{row.component}_{row.quant_type}"
                f"_rank00_sample001_group000_{row.tensor_name}.pt"
            )

    def test_every_file_is_named_by_one_row(self, recorded):
        _, catalog, _ = recorded
        named = [catalog.path(tensor_id) for tensor_id in catalog.tensors()["tensor_id"]]
        assert sorted(named) == sorted(path for path in catalog.root.rglob("tensors/**/*") if path.is_file())


def test_what_the_forward_pass_had_rounded_is_part_of_the_error(tmp_path):
    """Other formats are scored as if the tensor were rounded once."""
    text = '[linear]\nforward = "mxfp4"\nwgrad.input = { spec = "mxfp8", of = "rounded" }'
    (tmp_path / "again.toml").write_text(text)
    record(tmp_path, str(tmp_path / "again.toml"), scores=("hifp8", "mxfp4"), measures=())
    with Catalog.open(tmp_path) as catalog:
        (tensor_id,) = catalog.tensors(Filter(layer_index=(1,), module=("fc1",), tensor_name=("input",)))["tensor_id"]
        x = catalog.load(tensor_id).flatten(0, -2)
        rounded = quant.fake_quantize(x, "mxfp4")
        found = catalog.table("score").to_pandas().set_index(["tensor_id", "gemm", "format"]).loc[tensor_id]
        for fmt in ("hifp8", "mxfp4"):
            check_errors(x, fmt, -2, found.loc[("wgrad", fmt)].to_dict())
        used = found.loc[("wgrad", "mxfp8")].to_dict()
        both = quant.compare(x, quant.fake_quantize(rounded, "mxfp8", -2))
        assert all(used[name] == pytest.approx(both[name], rel=1e-9) for name in ("sqnr_db", "mse", "flush_to_zero"))
        second = quant.compare(rounded, quant.fake_quantize(rounded, "mxfp8", -2))
        assert used["second_sqnr_db"] == pytest.approx(second["sqnr_db"], rel=1e-9)
        check_errors(x, "hifp8", -1, found.loc[("forward", "hifp8")].to_dict())

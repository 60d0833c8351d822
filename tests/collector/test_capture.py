"""Capture: which tensors are recorded, with what values and errors, and that nothing else changes."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from binade import quant
from binade.collector import Recorder, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.capture.recorder import RecorderError
from binade.collector.models.attention import CoreAttention
from binade.collector.models.model import GPTModel
from binade.collector.models.parallel import ParallelLinear
from binade.collector.recipes.recipe import Recipe, parse_recipe
from binade.collector.recipes.selection import SelectionError
from binade.collector.training.config import MODELS, ConfigError
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.runs import CANCELLED, DONE, FAILED, read_losses, read_run
from binade.quant.formats import FORMATS

SHAPE = replace(MODELS["llama32-1b"]["tiny"], hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16)
SCORES = ("hifp8", "mxfp8", "mxfp4", "nvfp4")
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
    ("grad_query", "backward", "post"),
    ("grad_key", "backward", "post"),
    ("grad_value", "backward", "post"),
}


def build() -> GPTModel:
    model = GPTModel(SHAPE)
    model.initialize(0)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(257, (2, 41), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def step(model: GPTModel) -> torch.Tensor:
    tokens, labels = batch()
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return logits.detach()


class Hooks:
    """What each layer saw, by torch's own hooks: {(layer, module, tensor name): tensor}."""

    def __init__(self, model: GPTModel) -> None:
        self.seen: dict[tuple, torch.Tensor] = {}
        self._handles = []
        for layer in model.modules():
            if isinstance(layer, (ParallelLinear, CoreAttention)):
                self._handles += [layer.register_forward_pre_hook(self.before), layer.register_forward_hook(self.after)]

    def keep(self, layer, name: str, tensor: torch.Tensor) -> None:
        self.seen[layer.site.layer_index, layer.site.module, name] = tensor.detach().clone()

    def before(self, layer, inputs: tuple) -> None:
        names = ("query", "key", "value") if isinstance(layer, CoreAttention) else ("input",)
        for name, x in zip(names, inputs, strict=True):
            self.keep(layer, name, x)
            x.register_hook(lambda grad, name=name: self.keep(layer, f"grad_{name}", grad))

    def after(self, layer, inputs: tuple, output: torch.Tensor) -> None:
        self.keep(layer, "output", output)
        output.register_hook(lambda grad: self.keep(layer, "grad_output", grad))
        if isinstance(layer, ParallelLinear):
            self.keep(layer, "weight", layer.weight.to(output.dtype))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


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
    qk = ("query", "key", "attention_scores", "grad_query", "grad_key")
    return "qk" if row.tensor_name in qk else "pv"


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
        assert len(frame) == 2 * 34
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

    def test_values_are_what_the_layer_saw(self, recorded):
        _, catalog, hooks = recorded
        frame = catalog.tensors()
        compared = 0
        for row in frame.itertuples():
            if row.tensor_name in ("attention_scores", "attention_probs"):
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

    def test_summary_is_the_files(self, recorded):
        _, catalog, _ = recorded
        for row in catalog.tensors().itertuples():
            x = catalog.load(row.tensor_id).double().numpy().ravel()
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
        operands = {"input", "weight", "query", "key", "value", "attention_probs", "grad_output"}
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
            expected_format = "mxfp8_e5m2" if fmt == "mxfp8" and row.tensor_name == "grad_output" else fmt
            assert row.format == expected_format
            axis = -2 if row.tensor_name == "value" else -1
            assert row.contracted_axis == axis
            check_errors(catalog.load(row.tensor_id), row.format, axis, row._asdict())
            checked += 1
        by_layer = 0 if recipe == "bf16" else 3 * len(LINEARS) + (2 if recipe.startswith("FA") else 5)
        assert checked == 2 * by_layer

    def test_scores_are_recomputed_from_the_file(self, recorded):
        _, catalog, _ = recorded
        scores = catalog.scores()
        frame = catalog.tensors().set_index("tensor_id")
        operands = frame[frame["contracted_axis"].notna()]
        assert set(operands["tensor_name"]) == {
            "input", "weight", "query", "key", "value", "attention_probs", "grad_output"
        }  # fmt: skip
        assert Counter(scores["tensor_id"]) == dict.fromkeys(operands.index, len(SCORES))
        assert set(scores["format"]) == set(SCORES)
        for tensor_id, rows in scores.groupby("tensor_id"):
            x, axis = catalog.load(tensor_id), int(frame.loc[tensor_id, "contracted_axis"])
            for row in rows.itertuples():
                check_errors(x, row.format, axis, row._asdict())

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


def check_errors(x: torch.Tensor, fmt: str, axis: int, found: dict) -> None:
    """The metrics of METRICS.md, in NumPy."""
    q = quant.fake_quantize(x, fmt, dim=axis).double().numpy()
    x = x.double().numpy()
    e = q - x
    n = x.size
    expected = {
        "sqnr_db": 10 * np.log10((x**2).sum() / (e**2).sum()) if (e**2).sum() else np.inf,
        "mse": (e**2).mean(),
        "relative_error": np.linalg.norm(e) / np.linalg.norm(x),
        "cosine": (x * q).sum() / np.linalg.norm(x) / np.linalg.norm(q) if q.any() else np.nan,
        "projection": (q * x).sum() / (x**2).sum(),
        "max_abs_error": np.abs(e).max(),
        "flush_to_zero": ((x != 0) & (q == 0)).sum() / (x != 0).sum(),
        "underflow_of_all": ((x != 0) & (q == 0)).sum() / n,
    }
    element = FORMATS[fmt].element
    if fmt == "hifp8":
        expected["saturated"] = (np.abs(x) > 32768).mean()
    elif fmt != "nvfp4":  # MX, floor rule; NVFP4's block scale is the quantizer's own tests' matter
        x = np.moveaxis(x, axis, -1)
        padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)])
        blocks = np.abs(padded.reshape(-1, 32))
        top = blocks.max(1, keepdims=True)
        scale = np.exp2(np.floor(np.log2(np.where(top > 0, top, 1))) - element.emax)
        expected["saturated"] = (blocks / scale > element.max).sum() / n
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, nan_ok=True), f"{fmt} {name}"


def gradients(model: GPTModel) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


def test_recipe_bf16_changes_nothing_to_the_bit(tmp_path):
    plain, recorded = build(), build()
    logits = step(plain)
    with Recorder(tmp_path, scores=SCORES) as recorder, instrument(recorded, "bf16", recorder):
        assert torch.equal(step(recorded), logits)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(recorded), strict=True))


@pytest.mark.parametrize("recipe", ["mxfp8", "FA_mxfp4"])
def test_recording_changes_nothing_to_the_bit(tmp_path, recipe):
    alone, recorded = build(), build()
    with instrument(alone, recipe):
        logits = step(alone)
    with Recorder(tmp_path, scores=SCORES) as recorder, instrument(recorded, recipe, recorder):
        assert torch.equal(step(recorded), logits)
    assert all(torch.equal(a, b) for a, b in zip(gradients(alone), gradients(recorded), strict=True))


class Operations(TorchDispatchMode):
    """Counts what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted_step(model: GPTModel) -> Counter[str]:
    with Operations() as operations:
        step(model)
    return operations.counts


def test_off_the_recorded_iterations_recording_costs_nothing(tmp_path):
    """The same operations as without a recorder, and nothing on disk."""
    model = build()
    layers = [m for m in model.modules() if isinstance(m, ParallelLinear)]
    with instrument(model, "mxfp4", backend="torch"):
        step(model)  # gradients are there from now on
        alone = counted_step(model)
    with Recorder(tmp_path, scores=SCORES) as recorder, instrument(model, "mxfp4", recorder, backend="torch"):
        with recorder.at(0, 0, False):
            assert [layer.quantization.tap() for layer in layers] == [None] * len(layers)
            assert counted_step(model) == alone
        assert list(tmp_path.rglob("*.pt")) == list(tmp_path.rglob("*.parquet")) == []
        with recorder.at(1, 0, True):
            assert None not in [layer.quantization.tap() for layer in layers]
            assert counted_step(model).total() > alone.total()
    with Catalog.open(tmp_path) as catalog:
        assert set(catalog.tensors()["iteration"]) == {1}


class TestMixed:
    """What is recorded where operands, GEMMs and layers are quantized differently."""

    def rows(self, root: Path, recipe: Recipe, **layers: str) -> pd.DataFrame:
        model = build()
        with Recorder(root) as recorder, instrument(model, recipe, recorder, backend="torch", **layers):
            step(model)
        with Catalog.open(root) as catalog:
            return catalog.tensors()

    def test_quant_type_is_what_was_asked_and_format_what_was_done(self, tmp_path):
        recipe = parse_recipe(
            "mxfp8", forward="mxfp4", wgrad="bf16", qk="hifp8",
            operands=("linear.forward.weight=bf16", "linear.dgrad.grad_output=mxfp6_e3m2", "pv.forward.value=nvfp4"),
        )  # fmt: skip
        rows = self.rows(tmp_path, recipe)
        found = {
            (row.component, row.tensor_name): (row.quant_type, None if pd.isna(row.format) else row.format)
            for row in rows.itertuples()
        }
        assert found == {
            ("linear", "input"): ("mxfp4", "mxfp4"),
            ("linear", "weight"): ("bf16", None),
            ("linear", "output"): ("mxfp4", None),
            ("linear", "grad_output"): ("mxfp6_e3m2", "mxfp6_e3m2"),
            ("linear", "grad_input"): ("mxfp6_e3m2", None),
            ("linear", "grad_weight"): ("bf16", None),
            ("FA", "query"): ("hifp8", "hifp8"),
            ("FA", "key"): ("hifp8", "hifp8"),
            ("FA", "attention_scores"): ("hifp8", None),
            ("FA", "attention_probs"): ("mxfp8", "mxfp8"),
            ("FA", "value"): ("nvfp4", "nvfp4"),
            ("FA", "output"): ("mxfp8", None),
            ("FA", "grad_output"): ("mxfp8", "mxfp8_e5m2"),
            ("FA", "grad_query"): ("hifp8", None),
            ("FA", "grad_key"): ("hifp8", None),
            ("FA", "grad_value"): ("mxfp8", None),
        }
        error = rows[(rows["tensor_name"] == "grad_output") & (rows["module"] == "fc1")].iloc[0]
        with Catalog.open(tmp_path) as catalog:
            check_errors(catalog.load(error["tensor_id"]), "mxfp6_e3m2", -1, error.to_dict())

    def test_a_skipped_layer_is_bf16(self, tmp_path):
        rows = self.rows(tmp_path, parse_recipe("mxfp4"), skip=r"first,layer2\.core")
        skipped = (rows["layer_index"] == 1) | (rows["module"] == "core")
        assert set(rows["quant_type"][skipped]) == {"bf16"} and rows["format"][skipped].isna().all()
        assert set(rows["quant_type"][~skipped]) == {"mxfp4"} and skipped.sum() == 34 + 10
        assert len(rows) == 68 and rows["format"].notna().sum() == 4 * 3

    def test_only_the_captured_layers_are_recorded(self, tmp_path):
        rows = self.rows(tmp_path, parse_recipe("mxfp4"), capture=r"layer2\.qkv,core")
        assert Counter(zip(rows["layer_index"], rows["module"], strict=True)) == {
            (1, "core"): 10, (2, "core"): 10, (2, "qkv"): 6
        }  # fmt: skip


def outputs(recipe: str, **layers: str) -> Hooks:
    model = build()
    hooks = Hooks(model)
    with instrument(model, recipe, backend="torch", **layers):
        step(model)
    hooks.remove()
    return hooks


def test_skipping_every_layer_is_bf16_to_the_bit():
    plain, skipped = build(), build()
    logits = step(plain)
    with instrument(skipped, "mxfp4", backend="torch", skip="layer"):
        assert torch.equal(step(skipped), logits)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(skipped), strict=True))


def test_skipping_the_first_layer_leaves_it_as_in_bf16_to_the_bit():
    plain, partly = outputs("bf16").seen, outputs("mxfp4", skip="first").seen
    for module in ("qkv", "core", "proj", "fc1", "fc2"):
        assert torch.equal(plain[1, module, "output"], partly[1, module, "output"]), module
        assert not torch.equal(plain[2, module, "output"], partly[2, module, "output"]), module


class TestInstrument:
    def quantizations(self, model: GPTModel) -> list[int]:
        return [id(m.quantization) for m in model.modules() if isinstance(m, (ParallelLinear, CoreAttention))]

    def test_puts_the_model_back(self):
        model = build()
        before, logits = self.quantizations(model), step(model)
        with instrument(model, "mxfp4"):
            assert not set(self.quantizations(model)) & set(before)
            assert not torch.equal(step(model), logits)
        assert self.quantizations(model) == before
        assert torch.equal(step(model), logits)

    def test_puts_the_model_back_after_an_exception(self):
        model = build()
        before = self.quantizations(model)
        with pytest.raises(ZeroDivisionError), instrument(model, "mxfp4"):
            raise ZeroDivisionError
        with pytest.raises(KeyboardInterrupt), instrument(model, "mxfp4"):
            raise KeyboardInterrupt
        assert self.quantizations(model) == before

    def test_can_be_nested(self):
        model = build()
        with instrument(model, "hifp8"):
            outer, logits = self.quantizations(model), step(model)
            with instrument(model, "bf16"):
                assert not torch.equal(step(model), logits)
            assert self.quantizations(model) == outer and torch.equal(step(model), logits)

    def test_blocks_left_in_another_order_are_refused(self):
        model = build()
        outer, inner = instrument(model, "hifp8"), instrument(model, "mxfp4")
        outer.__enter__(), inner.__enter__()
        with pytest.raises(InstrumentError, match="was instrumented again meanwhile: leave the later block first"):
            outer.__exit__(None, None, None)

    def test_what_a_model_of_ours_has_beside_its_own_layers_is_not_left_out(self):
        class Extended(GPTModel):
            def __init__(self, *args) -> None:
                super().__init__(*args)
                self.extra = torch.nn.Linear(8, 8)

            def forward(self, tokens):
                return super().forward(tokens) + self.extra(torch.ones(2, 8)).sum()

        torch.manual_seed(0)
        model, plain = Extended(SHAPE), build()
        model.load_state_dict(plain.state_dict(), strict=False)
        tokens = batch()[0]
        with instrument(model, "linear_mxfp4", backend="torch"), instrument(plain, "linear_mxfp4", backend="torch"):
            added = model(tokens) - plain(tokens)
        weight, bias = model.extra.weight, model.extra.bias
        expected = torch.ones(2, 8) @ quant.fake_quantize(weight, "mxfp4").t() + bias  # 1 is a code of mxfp4
        assert torch.allclose(added, expected.sum().expand_as(added), atol=1e-5)
        assert not torch.allclose(added, (torch.ones(2, 8) @ weight.t() + bias).sum().expand_as(added), atol=1e-3)
        model.attention = torch.nn.MultiheadAttention(8, 1)
        with pytest.raises(InstrumentError, match=r"attention \(MultiheadAttention\) cannot be intercepted"):
            instrument(model, "mxfp4").__enter__()
        with pytest.raises(InstrumentError, match="the LM head of collector's own models stays in bf16"):
            instrument(plain, "mxfp4", head=True).__enter__()

    def test_refuses_what_it_cannot_do(self):
        with pytest.raises(InstrumentError, match="Embedding has no layer to instrument"):
            with instrument(torch.nn.Embedding(2, 2), "mxfp8"):
                pass
        model = build()
        before = self.quantizations(model)
        with pytest.raises(ValueError, match="recipe 'nope' is unknown"), instrument(model, "nope"):
            pass
        for layers in ({"skip": "3"}, {"capture": "router"}):
            with pytest.raises(SelectionError, match="the model, which has layers 1 to 2"):
                with instrument(model, "mxfp8", **layers):
                    pass
        assert self.quantizations(model) == before


class TestRecorder:
    @pytest.mark.parametrize(
        ("error", "state", "reason"),
        [(None, DONE, None), (ValueError, FAILED, "bad"), (KeyboardInterrupt, CANCELLED, None)],
        ids=["done", "failed", "cancelled"],
    )
    def test_says_how_the_run_ended(self, tmp_path, error, state, reason):
        model = build()
        with pytest.raises(error) if error else nullcontext():
            with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
                step(model)
                if error:
                    raise error("bad\nthing")
        status = read_run(recorder.writer.directory).status
        assert (status.state, status.reason, status.tensors) == (state, reason, 68)
        with Catalog.open(tmp_path) as catalog:  # what was captured is kept
            assert catalog.totals().tensors == catalog.totals().with_values == 68

    def test_counts_iterations_for_loops_of_ones_own(self, tmp_path):
        model = build()
        with Recorder(tmp_path, tensors=("query",)) as recorder, instrument(model, "bf16", recorder):
            for _ in range(3):
                step(model)
                recorder.step()
        with Catalog.open(tmp_path) as catalog:
            assert catalog.tensors()["iteration"].tolist() == [0, 0, 1, 1, 2, 2]
            assert catalog.runs()["iteration"].tolist() == [2]
        assert len(read_run(recorder.writer.directory).segments) == 3

    def test_an_unknown_score_is_refused_before_a_run_exists(self, tmp_path):
        with pytest.raises(ValueError, match="format 'nope' is unknown"):
            Recorder(tmp_path, scores=("nope",))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"tensors": ("query", "inputt")}, "tensor 'inputt' is unknown: input, weight, "),
            ({"tensors": "input"}, r"tensors='input' is one word: .* as tensors=\('input',\)"),
            ({"scores": "mxfp8"}, "scores='mxfp8' is one word"),
            ({"config": {"size": 224}}, "config has size 224: a word was expected"),
            ({"config": {"model": {"name": "x"}}}, "config has model {'name': 'x'}"),
        ],
        ids=["tensor", "tensors", "scores", "size", "model"],
    )
    def test_what_cannot_be_recorded_is_refused_before_a_run_exists(self, tmp_path, options, said):
        with pytest.raises(ConfigError, match=said):
            Recorder(tmp_path, **options)
        assert list(tmp_path.iterdir()) == []

    def test_entered_again_it_records_another_run(self, tmp_path):
        model = build()
        recorder = Recorder(tmp_path, tensors=("query",), iterations=1, config={"size": None})
        for _ in range(2):
            with recorder, instrument(model, "bf16", recorder):
                for _ in range(2):
                    step(model)
                    recorder.step()
        with Catalog.open(tmp_path) as catalog:
            assert catalog.runs()["state"].tolist() == [DONE, DONE]
            rows = catalog.tensors()
            assert Counter(rows["run_id"]).most_common() == [(run, 2) for run in rows["run_id"].unique()]
            assert rows["iteration"].tolist() == [0] * 4 and rows["run_id"].nunique() == 2

    def test_entered_twice_it_says_so(self, tmp_path):
        with Recorder(tmp_path) as recorder, pytest.raises(RecorderError, match="is recording a run already"):
            recorder.__enter__()
        assert [read_run(path).status.state for path in tmp_path.iterdir()] == [DONE]

    def test_without_a_run_it_says_so(self, tmp_path):
        model = build()
        recorder = Recorder(tmp_path)
        with instrument(model, "bf16", recorder):
            with pytest.raises(RecorderError, match=r"call the model within `with Recorder\(...\)`"):
                step(model)
            assert list(tmp_path.iterdir()) == []
            with recorder:
                step(model)
            with pytest.raises(RecorderError, match="has no run to write to"):
                step(model)
        assert read_run(recorder.writer.directory).status.tensors == 68

    def test_float64_is_refused_by_the_layers_name(self, tmp_path):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double())
        x = torch.randn(3, 8)
        said = r"1 \(layer2\.linear\) computes in float64, which is not recorded: convert the model"
        with pytest.raises(InstrumentError, match=said), Recorder(tmp_path / "all") as recorder:
            with instrument(model, None, recorder):
                model[1](model[0](x).double())
        assert read_run(recorder.writer.directory).status.reason.startswith("1 (layer2.linear) computes in float64")
        with Recorder(tmp_path / "some") as recorder, instrument(model, None, recorder, capture="first"):
            assert model[1](model[0](x).double()).dtype == torch.float64
        assert read_run(recorder.writer.directory).status.tensors == 3

    def test_a_capture_broken_off_leaves_no_file_without_a_row(self, tmp_path):
        """Interrupted between writing a file and noting its row: the moment of a SIGTERM, chosen."""
        model = build()

        class Interrupting(Recorder):
            def _save(self, *arguments):
                path = super()._save(*arguments)
                if self._count == 40:
                    raise KeyboardInterrupt
                return path

        with pytest.raises(KeyboardInterrupt), Interrupting(tmp_path) as recorder, instrument(model, "bf16", recorder):
            step(model)
        files = list(tmp_path.rglob("*.pt"))
        with Catalog.open(tmp_path) as catalog:
            assert sorted(catalog.path(i) for i in catalog.tensors()["tensor_id"]) == sorted(files)
            assert len(files) == 40


class TestOptions:
    def rows(self, run) -> pd.DataFrame:
        with Catalog.open(run.directory.parent) as catalog:
            return catalog.tensors(Filter(run_id=[run.run_id]))

    def test_iterations_and_micro_batches(self, collect):
        run = collect("--control-iter", "5", "--capture-every", "2", "--micro-batches", "3",
                      "--collect-micro-batches", "2", "--tensors", "query,weight")  # fmt: skip
        rows = self.rows(run)
        counts = Counter(zip(rows["iteration"], rows["micro_batch"], rows["tensor_name"], strict=True))
        names = {"query": 1, "weight": 4}
        assert counts == {(i, m, name): n for i in (0, 2, 4, 6, 8) for m in (0, 1) for name, n in names.items()}
        assert run.status.tensors == len(rows) == 50 and run.status.iteration == 8

    @pytest.mark.parametrize(
        ("asked", "trained", "recorded"),
        [
            (("--control-iter", "2", "--capture-every", "3"), 4, [0, 3]),
            (("--control-iter", "2", "--capture-every", "3", "--train-iters", "6"), 6, [0, 3]),
            (("--control-iter", "0", "--train-iters", "4"), 4, [0, 1, 2, 3]),
            (("--control-iter", "0", "--capture-every", "2", "--train-iters", "4"), 4, [0, 2]),
            (("--train-iters", "3"), 3, [0]),
        ],
        ids=["just enough", "longer", "every one", "every second", "one by default"],
    )
    def test_iterations_trained_and_recorded_are_counted_apart(self, collect, tmp_path, asked, trained, recorded):
        run = collect(*asked, "--tensors", "query", "--no-raw")
        assert self.rows(run)["iteration"].tolist() == recorded and run.status.iteration == trained - 1
        assert len(read_losses(run.directory)) == trained == run.config["train_iters"]
        with Catalog.open(tmp_path / "runs") as catalog:
            assert catalog.runs()["iterations"].tolist() == [trained]

    def test_micro_batches_of_an_iteration_are_all_recorded_by_zero(self, collect):
        rows = self.rows(collect("--micro-batches", "3", "--collect-micro-batches", "0", "--tensors", "query"))
        assert rows["micro_batch"].tolist() == [0, 1, 2]

    def test_no_save_tensors_records_nothing_and_trains_the_same(self, collect):
        arguments = ("--control-iter", "2", "--quantization", "mxfp4")
        run, recorded = collect(*arguments, "--no-save-tensors"), collect(*arguments, "--save-tensors")
        assert run.status.tensors == 0 and run.segments == [] and run.status.state == DONE
        assert list(run.directory.rglob("*.pt")) == [] and recorded.status.tensors == 68
        losses = [[record["loss"] for record in read_losses(each.directory)] for each in (run, recorded)]
        assert losses[0] == losses[1] and len(losses[0]) == 2

    def test_layers_and_modules(self, collect):
        rows = self.rows(collect("--layers", "2", "--capture-layers", "last,qkv", "--modules", "qkv,core"))
        found = Counter(zip(rows["layer_index"], rows["module"], strict=True))
        assert found == {(1, "qkv"): 6, (2, "qkv"): 6, (2, "core"): 10}

    def test_no_raw_keeps_rows_only(self, collect):
        run = collect("--no-raw")
        rows = self.rows(run)
        assert len(rows) == run.status.tensors == run.status.tensors_without_raw == 34
        assert rows["path"].isna().all() and run.status.bytes == 0 and rows["kurtosis"].notna().all()
        assert list(run.directory.rglob("*.pt")) == []

    @pytest.mark.parametrize("budget", [0, 20_000, 200_000, 700_000])
    def test_files_stay_within_the_budget(self, collect, budget):
        run = collect("--max-bytes", str(budget))
        files = list(run.directory.rglob("*.pt"))
        rows = self.rows(run)
        assert sum(os.path.getsize(file) for file in files) == run.status.bytes <= budget
        assert len(rows) == 34 and rows["path"].notna().sum() == len(files)
        assert run.status.tensors_without_raw == 34 - len(files)
        assert (len(files) > 0) == (budget > 0)

    def test_scores_can_be_chosen(self, collect, tmp_path):
        run = collect("--scores", "mxint8,mxfp8_e4m3,mxfp8", "--tensors", "input")
        with Catalog.open(tmp_path / "runs") as catalog:
            assert Counter(catalog.scores(Filter(run_id=[run.run_id]))["format"]) == {"mxint8": 4, "mxfp8": 4}

    def test_warm_up_is_in_bf16_and_not_recorded(self, collect):
        plain, warm = collect("--control-iter", "3"), collect("--warmup-iterations", "2", "--quantization", "mxfp4")
        losses = [pd.read_json(run.directory / "loss.jsonl", lines=True) for run in (plain, warm)]
        assert losses[1]["iteration"].tolist() == [-2, -1, 0]
        assert losses[0]["loss"][:2].tolist() == losses[1]["loss"][:2].tolist()
        assert losses[0]["loss"][2] != losses[1]["loss"][2]
        assert set(self.rows(warm)["iteration"]) == {0}

    def test_a_run_can_be_repeated_to_the_bit(self, collect):
        first, second = (self.rows(collect("--quantization", "mxfp8", "--control-iter", "2")) for _ in range(2))
        different = {"tensor_id", "run_id", "captured", "path"}
        same = [column for column in first.columns if column not in different]
        pd.testing.assert_frame_equal(first[same], second[same], check_exact=True)

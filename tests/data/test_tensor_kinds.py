"""The table of tensor kinds: complete, and the only place that changes when a kind is added."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from binade.app.draw import style
from binade.cli import main
from binade.collector.errors import ConfigError
from binade.collector.jobs.estimate import volume_of
from binade.collector.training import loop
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.data.index.catalog import Catalog
from binade.data.run.tensor_kinds import (
    BACKWARD,
    FORWARD,
    HEAD,
    NEUTRAL,
    NORM,
    OPTIMIZER,
    PARAMETER,
    POST,
    PRE,
    QK,
    TENSOR_KINDS,
    Product,
    TensorKind,
    color_of,
    label_of,
    tensor_names,
)
from binade.quant.specs import OPERAND_FIELDS
from tests.app.test_charts import luminance
from tests.collector.instrumented import rows
from tests.conftest import PROJECT

# QKᵀ before it is scaled: the product shows it, and no entry of the table asks for it.
NEW = TensorKind("raw_scores", QK, "y", FORWARD, POST, "forward_a", None, "scores", "#f80000", "unscaled scores")


@pytest.fixture
def added() -> Iterator[None]:
    TENSOR_KINDS.append(NEW)
    yield
    TENSOR_KINDS.remove(NEW)


def test_a_name_has_one_colour_and_one_label() -> None:
    assert len({(kind.name, kind.color, kind.label) for kind in TENSOR_KINDS}) == len(tensor_names())
    assert len({color_of(name) for name in tensor_names()} | {NEUTRAL}) == len(tensor_names()) + 1
    assert len({label_of(name) for name in tensor_names()}) == len(tensor_names())


def test_every_operand_is_a_field_of_gemm_formats() -> None:
    assert {kind.operand for kind in TENSOR_KINDS if isinstance(kind.product, Product)} <= set(OPERAND_FIELDS)
    assert len({(kind.product, kind.observed) for kind in TENSOR_KINDS}) == len(TENSOR_KINDS)


@pytest.mark.parametrize("background", ["#ffffff", "#0f1219"], ids=["light", "dark"])
def test_every_colour_stands_out(background: str) -> None:
    """WCAG 2.1, 1.4.11: graphics need a contrast of 3 to 1."""
    for kind in TENSOR_KINDS:
        light, dark = sorted((luminance(kind.color), luminance(background)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, kind


def test_charts_by_tensor_name_have_the_colours_of_the_table() -> None:
    groups = ["input", "norm_output", "grad_output", "residual"]
    colors, marks = style.styles(groups, "tensor")
    assert colors == [color_of("input"), NEUTRAL, color_of("grad_output"), NEUTRAL]
    assert marks == [0, 0, 0, 1]
    assert label_of("norm_output") == "norm_output"
    assert set(style.colors(groups, "module")) <= set(style.PALETTE)


def test_what_a_model_does_not_have_is_refused() -> None:
    plan(RunConfig(model="deepseek2_lite", tensors=("router_load",)))
    for wrong in ({"tensors": ("router_load",)}, {"tensors": ("exp_avg",), "modules": ("core",)}):
        with pytest.raises(ConfigError, match=f"--tensors {wrong['tensors'][0]} matches no tensor of "):
            plan(RunConfig(**wrong))


@pytest.mark.usefixtures("added")
class TestAdded:
    """One more entry, and nothing else."""

    @pytest.mark.parametrize("line", [["run", "--help"], ["list"]], ids=" ".join)
    def test_the_command_line_lists_it(self, line: list[str]) -> None:
        """In a process of its own: the help is composed when the command is imported."""
        add = f"TENSOR_KINDS.append(pickle.loads({pickle.dumps(NEW)!r}))"
        code = f"import pickle, sys; from binade.data.run.tensor_kinds import TENSOR_KINDS; {add}; "
        code += f"from binade.cli import main; sys.exit(main({line}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
        assert "raw_scores" in done.stdout

    def test_a_run_is_checked_and_estimated(self) -> None:
        config = RunConfig(tensors=("raw_scores",), scores=())
        plan(config)
        with pytest.raises(ConfigError, match="matches no tensor of fc1"):
            plan(replace(config, modules=("fc1",)))
        assert volume_of(plan(config)) == volume_of(plan(replace(config, tensors=("attention_scores",))))

    def test_it_is_recorded(self, tmp_path: Path) -> None:
        line = f"run --tensor-save-dir {tmp_path} --quantization FA_mxfp4 --sequence-length 32 --tensors raw_scores"
        assert main(line.split()) == 0
        with Catalog.open(tmp_path) as catalog:
            rows = catalog.tensors()
        shape = plan(RunConfig()).shape
        assert len(rows) == shape.layers and set(rows["tensor_name"]) == {"raw_scores"}
        assert {tuple(each) for each in rows["shape"]} == {(2, shape.heads, 32, 32)}
        assert set(rows["operation"]) == {"forward"} and rows["contracted_axis"].isna().all()

    def test_the_app_draws_it_in_its_colour(self) -> None:
        assert style.colors(["input", "raw_scores"], "tensor") == [color_of("input"), "#f80000"]
        assert label_of("raw_scores") == "unscaled scores"


# Tensors outside of products, each with a kind of the table that has its place and size.
STEP = {
    "norm_input": TensorKind("norm_output", NORM, "y", FORWARD, POST, "", -1, "output", "#f80000", "output of norm"),
    "logits": TensorKind(
        "grad_logits", HEAD, "grad", BACKWARD, PRE, "", None, "output", "#f80000", "gradient of logits"
    ),
    "exp_avg_sq": TensorKind(
        "max_exp_avg_sq",
        PARAMETER,
        "max_exp_avg_sq",
        OPTIMIZER,
        POST,
        "",
        -1,
        "weight",
        "#f80000",
        "largest second moment",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("like", STEP)
def test_a_tensor_outside_of_products_is_one_entry(like: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new = STEP[like]
    TENSOR_KINDS.append(new)
    monkeypatch.setattr(loop, "_AdamW", partial(torch.optim.AdamW, amsgrad=True))
    try:
        config = RunConfig(tensors=(new.name,))
        plan(config)
        assert volume_of(plan(config)) == volume_of(plan(replace(config, tensors=(like,))))
        line = f"run --tensor-save-dir {tmp_path} --sequence-length 32 --backend torch --tensors {new.name},{like}"
        assert main(line.split()) == 0
        recorded = rows(tmp_path)
    finally:
        TENSOR_KINDS.remove(new)
    keys = ["layer_index", "module"]
    ours, others = (recorded[recorded["tensor_name"] == name].sort_values(keys) for name in (new.name, like))
    assert len(ours) == len(others) > 0 and (ours[keys].to_numpy() == others[keys].to_numpy()).all()
    assert set(ours["operation"]) == {new.operation.value}
    for x, y in zip(ours["tensor"], others["tensor"], strict=True):
        EXPECTED[like](x.float(), y.float())


def is_normalized(x: torch.Tensor, given: torch.Tensor) -> None:
    """Gains are 1 in the first step."""
    torch.testing.assert_close(x, F.rms_norm(given, given.shape[-1:], eps=1e-5), rtol=2**-8, atol=1e-6)


def is_gradient_of_cross_entropy(x: torch.Tensor, logits: torch.Tensor) -> None:
    chosen = logits.softmax(-1) - x * logits[..., 0].numel()
    torch.testing.assert_close(chosen.sort(-1).values[..., -1], torch.ones(logits.shape[:-1]), rtol=1e-4, atol=1e-4)
    assert chosen.sort(-1).values[..., :-1].abs().max() < 1e-4


EXPECTED = {
    "norm_input": is_normalized,
    "logits": is_gradient_of_cross_entropy,
    "exp_avg_sq": partial(torch.testing.assert_close, rtol=0, atol=0),  # equal in the first step
}

"""The table of tensor kinds: complete, and the only place that changes when a kind is added."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from binade.app import style
from binade.cli import main
from binade.collector.errors import ConfigError
from binade.collector.jobs.estimate import planned
from binade.collector.training.config import RunConfig, check
from binade.data.catalog import Catalog
from binade.data.tensor_kinds import (
    FORWARD,
    NEUTRAL,
    POST,
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
    check(RunConfig(model="deepseek2_lite", tensors=("router_load",)))
    for wrong in ({"tensors": ("router_load",)}, {"tensors": ("exp_avg",), "modules": ("core",)}):
        with pytest.raises(ConfigError, match=f"--tensors {wrong['tensors'][0]} matches no tensor of "):
            check(RunConfig(**wrong))


@pytest.mark.usefixtures("added")
class TestAdded:
    """One more entry, and nothing else."""

    @pytest.mark.parametrize("line", [["run", "--help"], ["list"]], ids=" ".join)
    def test_the_command_line_lists_it(self, line: list[str]) -> None:
        """In a process of its own: the help is composed when the command is imported."""
        add = f"TENSOR_KINDS.append(pickle.loads({pickle.dumps(NEW)!r}))"
        code = f"import pickle, sys; from binade.data.tensor_kinds import TENSOR_KINDS; {add}; "
        code += f"from binade.cli import main; sys.exit(main({line}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
        assert "raw_scores" in done.stdout

    def test_a_run_is_checked_and_estimated(self) -> None:
        config = RunConfig(tensors=("raw_scores",), scores=())
        check(config)
        with pytest.raises(ConfigError, match="matches no tensor of fc1"):
            check(replace(config, modules=("fc1",)))
        assert planned(config) == planned(replace(config, tensors=("attention_scores",)))

    def test_it_is_recorded(self, tmp_path: Path) -> None:
        line = f"run --tensor-save-dir {tmp_path} --quantization FA_mxfp4 --sequence-length 32 --tensors raw_scores"
        assert main(line.split()) == 0
        with Catalog.open(tmp_path) as catalog:
            rows = catalog.tensors()
        shape = RunConfig().shape()
        assert len(rows) == shape.layers and set(rows["tensor_name"]) == {"raw_scores"}
        assert {tuple(each) for each in rows["shape"]} == {(2, shape.heads, 32, 32)}
        assert set(rows["operation"]) == {"forward"} and rows["contracted_axis"].isna().all()

    def test_the_app_draws_it_in_its_colour(self) -> None:
        assert style.colors(["input", "raw_scores"], "tensor") == [color_of("input"), "#f80000"]
        assert label_of("raw_scores") == "unscaled scores"

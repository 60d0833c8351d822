"""Sentences about what was measured whole, about tails and bodies, and about what a run's weights do to comparisons:
against numpy, scipy and planted tensors."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from binade.app.pages.registry import PAGES
from binade.app.questions.blocks.compute import block_table
from binade.app.questions.map.question import MAP
from binade.app.questions.map.standing_out import FAR
from binade.app.questions.pair.three_way import three_way
from binade.app.questions.recipes.question import RECIPES
from binade.app.questions.shared import laws
from binade.app.questions.shared.distributions import distribution_of
from binade.app.questions.shared.rounded import Subject
from binade.data.index.catalog import Catalog
from binade.data.run.notes import rounded_twice
from binade.data.words.filter import Filter
from binade.quant.blocks import look
from tests.app.planted import drawn, make_losses, normal, operand
from tests.data.builder import make_run

PACKAGES = ("app", "data", "collector", "binade")


class TestStandingOut:
    def test_cells_far_from_normal_values_are_named_each(self, tmp_path: Path):
        """One value in 32 is 30 times as large in layers 2 and 3 of one operand; all else is normal."""
        made = []
        for layer in range(1, 5):
            x = normal(layer, 64, 64)
            if layer in (2, 3):
                x[:, ::32] *= 30
            made += [operand(x, layer), operand(normal(9 + layer, 64, 64), layer, tensor_name="weight")]
        make_run(tmp_path, made)
        with Catalog.open(tmp_path) as opened:
            said = drawn(MAP, opened, metric="sqnr_vs_normal", format="mxfp4").verdict
            table = drawn(MAP, opened, metric="sqnr_vs_normal", format="mxfp4").get("map").table
        far = table[table["value"].abs() >= FAR]
        assert set(far["layer_index"]) == {2, 3} and len(far) == 2 and (far["value"] < 0).all()
        assert said.startswith(
            "mxfp4 does what it does to normal values (18.8 dB) for 6 of 8 operands. 2 lose 2 dB or more"
        )
        worst = far.loc[far["value"].idxmin()]
        with Catalog.open(tmp_path) as opened:
            scores = opened.scores_of([worst["tensor_id"]]).query("format == 'mxfp4'")
        share = scores["flushed_error_share"].item()
        number = f"{worst['value']:.1f}".replace("-", "−")
        assert share > 0.3 and f"fc1 input of layers 2 and 3 ({number}; {share:.1%} of the error to zero)." in said
        assert "told apart" not in said

    def test_the_cells_that_are_not_named_are_counted(self, tmp_path: Path):
        """Six cells in four groups of neighboring layers, of which the headline names three."""
        factors = {1: 12, 2: 12, 4: 11, 6: 10, 8: 9, 9: 9}
        made = []
        for layer in range(1, 10):
            x = normal(layer, 64, 64)
            x[:, ::32] *= factors.get(layer, 1)
            made.append(operand(x, layer))
        make_run(tmp_path, made)
        with Catalog.open(tmp_path) as opened:
            answer = drawn(MAP, opened, metric="sqnr_vs_normal", format="mxfp4")
            table = answer.get("map").table
        far = table[table["value"] <= -FAR].sort_values("value")
        assert set(far["layer_index"]) == set(factors)
        groups = {1: "1", 2: "1", 4: "4", 6: "6", 8: "8", 9: "8"}
        named = list(dict.fromkeys(groups[layer] for layer in far["layer_index"]))[:3]
        left = sum(groups[layer] not in named for layer in factors)
        assert "6 lose 2 dB or more" in answer.verdict and f" and {left} more." in answer.verdict
        assert left == 2, "a group of two, so that cells and groups are not the same number"

    def test_normal_operands_do_not_stand_out(self, tmp_path: Path):
        make_run(tmp_path, [operand(normal(layer, 64, 64), layer) for layer in range(1, 4)])
        with Catalog.open(tmp_path) as opened:
            said = drawn(MAP, opened, metric="sqnr_db", format="mxfp4").verdict
        assert said == (
            "mxfp4 does what it does to normal values (18.8 dB) for 3 of 3 operands. None loses 2 dB or more beyond "
            "that."
        )


class TestBodyAndTails:
    def test_moments_without_zeros_are_those_of_scipy(self):
        x = np.random.default_rng(0).standard_t(9, 4000) + 0.2
        x[::3] = 0
        kept = x[x != 0]
        d = laws.nonzero(distribution_of("x", torch.from_numpy(x)))
        assert d.total == len(kept) and (d.mean, d.std) == pytest.approx((kept.mean(), kept.std()), rel=1e-6)
        moments = {"skewness": stats.skew(x), "kurtosis": stats.kurtosis(x, fisher=False)}
        row = {"numel": len(x), "nans": 0, "infs": 0, "mean": x.mean(), "std": x.std()} | moments
        expected = stats.kurtosis(kept, fisher=False)
        assert laws.kurtosis_without(row, len(kept)) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize(("law", "kurtosis"), [("normal", 3), ("laplace", 6), ("uniform", 1.8)])
    def test_a_law_has_its_kurtosis(self, law: str, kurtosis: float):
        d = distribution_of("x", torch.from_numpy(np.random.default_rng(1).normal(size=3000)))
        assert laws.fit(d, law).kurtosis == pytest.approx(kurtosis)


class TestBlocks:
    def test_energy_is_the_share_of_the_squares(self):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [10], [0.1], [0]])
        table = block_table(Subject(look(x, "mxfp4"), 1, x.numel()))
        squares = (x.double().reshape(-1, 32) ** 2).sum(1).numpy()
        assert table["energy"].to_numpy() == pytest.approx(squares / squares.sum(), rel=1e-12)

    def test_a_block_that_loses_nothing_but_float32s_own_rounding_is_exact(self):
        """x is a code times a scale that float32 cannot hold: y differs in the last place."""
        scale = torch.tensor(1 / 3, dtype=torch.float64)
        x = (torch.tensor([6.0, 3, 1.5, -0.5] * 8, dtype=torch.float64) * scale).float()[None]
        y = x * (1 + 2.0**-25)
        found = look(x, "nvfp4")
        object.__setattr__(found, "y", y.reshape(found.x.shape))
        assert torch.isinf(found.sqnr_db).all()


def test_a_gradient_of_a_weight_is_not_compared_with_a_rounding_that_it_never_had():
    x = normal(1, 32, 64)
    said = three_way(x, x + normal(2, 32, 64) * 0.1, "mxfp4", equal_weights=True, operand=False).verdict
    assert said.startswith("Propagated rounding: relative error 0.0") or said.startswith("Propagated rounding: ")
    assert "times" not in said and "not rounded" in said


class TestFirstStep:
    def test_rounding_alone_and_what_training_adds_are_apart(self, tmp_path: Path):
        words = operand(normal(1, 32, 64), recipe="mxfp4")
        make_losses(tmp_path, {"mxfp4": [0.25]}, {"mxfp4": [words]})
        with Catalog.open(tmp_path) as opened:
            answer = drawn(RECIPES, opened, of="cost")
        assert "(the same sequences and weights, with and without): mxfp4 +0.2500 nats" in answer.verdict
        assert "by the last iteration, which one seed cannot tell from chance: mxfp4 0.0000 nats" in answer.verdict
        assert "One seed cannot tell these from bf16" not in answer.verdict

    def test_weights_on_a_grid_follow_a_run_into_comparisons(self):
        config = {"weights": {"quantized": ["Q4_1"]}, "operands": ["linear.forward.weight  input size  mxfp4"]}
        assert "dequantized from Q4_1 before" in rounded_twice([config])
        kept = config | {"operands": ["linear.forward.weight  tokens  bf16", "linear.forward.input  tokens  mxfp4"]}
        assert rounded_twice([kept]) == "" and rounded_twice([{"weights": None}]) == ""
        assert "Q4_1" in rounded_twice([kept], everywhere=True)


def texts(path: Path) -> list[str]:
    """The string constants of a module, joined where Python joins them."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_texts_name_pages_and_parts_that_exist():
    titles = {page.title: {part.title for part in page.parts.values()} for page in PAGES.values()}
    named = re.compile(r"\b([A-Z][a-z]+) › ([A-Z][A-Za-z]+(?: [a-z]+)*)")
    checked = 0
    for package in PACKAGES:
        for path in Path(package).resolve().rglob("*.py"):
            for text in texts(path):
                for page, part in named.findall(text):
                    checked += 1
                    assert any(part.startswith(title) for title in titles.get(page, ())), f"{path}: {page} › {part}"
    assert checked


def test_a_filter_of_one_run_keeps_the_bf16_run(tmp_path: Path):
    make_losses(tmp_path, {"a": [0.1]}, {"a": [operand(normal(1, 32, 64), recipe="a")]})
    with Catalog.open(tmp_path) as opened:
        assert "a +0.1000 nats" in drawn(RECIPES, opened, Filter(recipe=("a",)), of="cost").verdict

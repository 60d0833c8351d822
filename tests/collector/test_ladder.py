"""Ladders: which recipes an ablation runs, and how runs on disk are found on one again."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import scipy.stats

from binade.collector.recipes.files import PUBLISHED
from binade.collector.recipes.ingredients import INGREDIENTS
from binade.collector.recipes.ladder import ladder, ladders, without
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import RecipeError
from binade.data.compare.ablation import judged
from binade.data.compare.ladder import Rung

OWN = """
[linear]
forward = "mxfp8(scale=rceil, block=8x8)"
dgrad.grad_output = "mxfp4(rounding=stochastic, hadamard=32)"
dgrad.weight = { spec = "mxfp4(hadamard=32)", of = "rounded" }

[keep]
layers = "last"

[[schedule]]
from = "50%"
linear.forward = "bf16"
"""
BOTH = ["forward", "+ dgrad", "+ wgrad"]
# What a reader of each recipe finds in it.
EXPECTED = {
    "nvidia_nvfp4": [*BOTH, "without rounding", "without rotation", "without tiles", "without keep"],
    "te_nvfp4": [*BOTH, "without rounding", "without rotation", "without tiles"],
    "quartet2": [*BOTH, "without scale", "without rounding", "without rotation", "without rounded"],
    "torchao_rowwise_gw_hp": ["without dgrad", "full recipe", "without scale"],
    "deepseek_v3": [*BOTH, "without scale", "without tiles", "without rounded"],
    "hifp8_scaled": [*BOTH, "without scale"],
    "FA_linear_mxfp4": BOTH,
    "linear_nvfp4(block=16x16)": [*BOTH, "without tiles"],
    "nvidia_nvfp4(without=keep)": [*BOTH, "without rounding", "without rotation", "without tiles"],
    "FA_nvfp4(rounding=stochastic)": ["full recipe", "without rounding"],
}


@pytest.mark.parametrize("recipe", EXPECTED)
def test_the_rungs_are_what_the_recipe_has(recipe):
    first, *rungs = ladder(recipe).rungs
    assert first == Rung("bf16", "bf16") and [rung.title for rung in rungs] == EXPECTED[recipe]
    assert rungs[0].against == "bf16"


def test_a_file_has_its_rungs(tmp_path: Path):
    (tmp_path / "own.toml").write_text(OWN)
    rungs = ladder(str(tmp_path / "own.toml")).rungs
    names = ["scale", "rounding", "rotation", "tiles", "rounded", "keep", "schedule"]
    assert [r.title for r in rungs] == ["bf16", "without dgrad", "full recipe", *(f"without {n}" for n in names)]
    assert all(parse_recipe(rung.recipe).quantized for rung in rungs[1:])
    assert not parse_recipe(rungs[-1].recipe).schedule and not parse_recipe(rungs[-2].recipe).keep


@pytest.mark.thorough
def test_state_and_communication_have_rungs(tmp_path: Path):
    (tmp_path / "own.toml").write_text('[state]\nexp_avg = "bf16"\n')
    assert [rung.title for rung in ladder(str(tmp_path / "own.toml")).rungs] == ["bf16", "full recipe"]
    with open(tmp_path / "own.toml", "a") as file:
        file.write('[communication]\nall_to_all = "mxfp8(rounding=stochastic)"\n[linear]\nforward = "mxfp8"\n')
    titles = [rung.title for rung in ladder(str(tmp_path / "own.toml")).rungs]
    assert titles == ["bf16", "full recipe", *(f"without {name}" for name in ("rounding", "state", "communication"))]


@pytest.mark.sampled(13)
@pytest.mark.parametrize("recipe", [*PUBLISHED, *EXPECTED])
def test_every_rung_is_a_recipe_of_its_own(recipe):
    """No two rungs train the same, and leaving out what no rung leaves out is refused."""
    rungs = ladder(recipe).rungs
    made = [parse_recipe(rung.recipe) for rung in rungs]
    trained = [(recipe.lines(), recipe.keep, recipe.deoscillation) for recipe in made]
    assert all(one != other for one, other in itertools.combinations(trained, 2))
    missing = [name for name in INGREDIENTS if f"without {name}" not in {rung.title for rung in rungs}]
    for name in set(missing) - {"dgrad", "wgrad", *recipe.partition("without=")[2].strip(")").split("+")}:
        with pytest.raises(RecipeError, match=f"does not have the ingredient '{name}'"):
            parse_recipe(without(recipe, name))
    off = dict(zip([rung.title for rung in rungs], trained, strict=True))
    for title, gemms in (("forward", ("dgrad", "wgrad")), ("+ dgrad", ("wgrad",))):
        for line in off.get(title, ([], ""))[0]:
            assert line.endswith("bf16") or not line.startswith(tuple(f"linear.{gemm}" for gemm in gemms)), line


@pytest.mark.sampled(27)
@pytest.mark.parametrize("recipe", [*PUBLISHED, *EXPECTED])
def test_a_ladder_is_found_again_among_other_runs(recipe):
    made = ladder(recipe)
    texts = [rung.recipe for rung in made.rungs] + ["mxint8", "bf16, PV mxfp4", "te_nvfp4(without=x)", "unnamed"]
    random.Random(1).shuffle(texts)
    assert ladders(texts) == [made]


def test_two_ladders_of_one_recipe_are_told_apart():
    first, second = ladder("nvidia_nvfp4"), ladder("nvidia_nvfp4(without=keep)")
    assert ladders(rung.recipe for each in (first, second) for rung in each.rungs) == [first, second]


def test_part_of_a_ladder_is_what_is_there():
    (found,) = ladders(["te_nvfp4", "te_nvfp4(without=tiles)", "bf16"])
    assert found.rungs == (
        Rung("bf16", "bf16"),
        Rung("full recipe", "te_nvfp4", "bf16"),
        Rung("without tiles", "te_nvfp4(without=tiles)", "te_nvfp4"),
    )
    assert ladders(["bf16", "te_nvfp4", "mxfp8", "linear_mxfp8"]) == []


@pytest.mark.parametrize("recipe", ["bf16", "FA_mxfp8"])
def test_nothing_to_turn_off_is_refused(recipe):
    with pytest.raises(RecipeError, match=f"{recipe} has no ingredient to leave out"):
        ladder(recipe)


def test_changes_are_paired_by_seed_and_judged_together():
    gaps = {
        "forward": {1: 0.1, 2: 0.2, 3: 0.15, 4: 0.18},
        "full": {1: 0.31, 2: 0.42, 3: 0.35, 4: 0.39, 5: 9.0},
        "lone": {1: 5.0},
    }
    titles = {"bf16": "bf16", "forward": "forward", "full": "full recipe"}
    found = judged(gaps, [("forward", "bf16"), ("full", "forward"), ("lone", "full"), ("gone", "bf16")], titles)
    assert [each.verdict for each in found] == [
        "higher than bf16",
        "higher than forward",
        "not distinguishable from full recipe",
        "",
    ]
    pairs = [[gaps[name][seed] for seed in range(1, 5)] for name in ("full", "forward")]
    assert found[1].change.p == pytest.approx(scipy.stats.ttest_rel(*pairs).pvalue)
    assert found[1].change.n == 4 and found[1].own.n == 5 and math.isnan(found[2].change.p)

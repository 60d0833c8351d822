"""What the pages of a tensor compute in the format that a GEMM used is what was recorded of that GEMM: for every recipe
that ships, every operand."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from binade import fake_quantize, plots
from binade.app.questions.shared.operands import along, gemms_of, scores_in
from binade.app.questions.shared.rounded import Recorded, subject
from binade.app.questions.shared.selection import recorded_in
from binade.app.questions.what_if import compute as what_if
from binade.app.questions.why.compute import zones
from binade.app.view.view import View
from binade.collector import Recorder, instrument
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.recipes.files import PUBLISHED
from binade.data.index.catalog import USED, Catalog
from binade.data.words.filter import Filter
from binade.quant.metrics import sqnr_db
from binade.quant.normal import normal_sqnr
from binade.quant.specs import Spec
from tests.app.planted import operand
from tests.data.builder import make_run

STEPS = 2
# Everything that a result may depend on besides the values, at once.
RANDOM = """
[linear.wgrad]
input = "nvfp4(rounding=stochastic, hadamard=16, signs=random)"
grad_output = "nvfp4(rounding=stochastic, hadamard=16, signs=random)"
[linear.forward]
input = "mxfp4(center=tokens, rounding=stochastic, scale=rceil)"
weight = "mxfp4(rounding=stochastic, scale=rceil)"
[linear.dgrad]
grad_output = "mxfp4(hadamard=32, signs=random)"
weight = "mxfp4(hadamard=32, signs=random)"
"""

ATTENTION = """
[qk]
forward = "mxfp8"
dquery.grad_scores = "mxfp8"
dquery.key = { spec = "mxfp4", of = "rounded" }
dkey.grad_scores = "nvfp4"
dkey.query = { spec = "nvfp4", of = "rounded" }
[pv]
forward = "mxfp4"
dprobs.grad_output = "mxfp8"
dprobs.value = { spec = "mxfp8", of = "rounded" }
dvalue.grad_output = "mxfp8"
dvalue.attention_probs = { spec = "mxfp8", of = "rounded" }
"""


def model_for(recipe: str) -> GPTModel:
    """A tiny model that has what the recipe rounds."""
    family = "deepseek2_lite" if recipe == "te_nvfp4_fwd_mxfp8_bwd" else "llama32-1b"  # the one with experts
    model = GPTModel(MODELS[family]["tiny"])
    model.initialize(0)
    return model


def record(
    root: Path,
    recipe: str,
    factors: Sequence[float] = (1.0,) * STEPS,
    mask: torch.Tensor | None = None,
    scores: Sequence[str] = (),
) -> Catalog:
    """A run of a few steps, the loss of each multiplied by a factor."""
    model, tokens = model_for(recipe), torch.randint(257, (2, 41), generator=torch.Generator().manual_seed(1))
    recorder = Recorder(root, label="d", iterations=len(factors), scores=scores)
    with recorder, instrument(model, recipe, recorder):
        for factor in factors:
            with nullcontext() if mask is None else recorder.valid(mask.t(), batch_axis=1):
                logits = model(tokens[:, :-1])
            (F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) * factor).backward()
            model.zero_grad()
            recorder.step()
    return Catalog.open(root)


def operands(catalog: Catalog) -> list[dict[Hashable, Any]]:
    table = catalog.tensors(Filter())
    return table[table["format"].notna()].to_dict("records")


def check(catalog: Catalog) -> None:
    """The errors that Why, Blocks, Codes and What if compute of each operand are the recorded ones."""
    for row in operands(catalog):
        spec, x, dim, recorded = (
            Spec.of(row["format"]), catalog.load(row["tensor_id"]), row["contracted_axis"], Recorded.of(row)
        )  # fmt: skip
        place = row["module"], row["tensor_name"], row["format"]
        found = subject(x, spec, dim, recorded=recorded)
        sums, shares = found.blocks.sums, zones(found).set_index("zone")
        assert recorded.problem(spec) == ""
        assert sqnr_db(sums.signal, sums.noise) == pytest.approx(row["sqnr_db"], abs=1e-6, nan_ok=True), place
        assert shares["of_nonzero"]["flushed"] == pytest.approx(np.nan_to_num(row["flush_to_zero"]), abs=1e-12), place
        hidden = 0 if pd.isna(row["pairs_left_out"]) else row["pairs_left_out"]  # a file has these pairs, too
        seen = row["numel"] / (row["numel"] + hidden)
        assert shares["share"]["saturated"] == pytest.approx(row["saturated"] * seen, abs=1e-12), place
        tried, _ = what_if.try_formats([what_if.TriedOperand(x, dim, recorded)], [what_if.Trial(spec)], together=False)
        again = [tried[name].iloc[0] for name in what_if.ERRORS]
        wanted = [row[name] * (seen if name == "saturated" else 1) for name in what_if.ERRORS]
        assert again == pytest.approx(wanted, abs=1e-6, nan_ok=True), place


def check_other_gemms(catalog: Catalog) -> int:
    """The same in the other GEMM that takes a tensor, which rounds it along another axis; returns their number."""
    others = 0
    for _, row in catalog.tensors(Filter()).iterrows():
        for gemm in gemms_of(catalog, row)[1:]:
            scored = scores_in(catalog, row["tensor_id"], gemm)
            for used in scored[scored["used"]].to_dict("records"):
                recorded, (x, dim) = recorded_in(catalog, row, gemm), along(catalog.load(row["tensor_id"]), row, gemm)
                spec, near = Spec.of(used["format"]), {"abs": 1e-6, "nan_ok": True}
                if recorded.other_values:
                    assert "the values on disk are P̃" in recorded.problem(spec)
                    continue
                assert recorded.problem(spec) == ""
                others += 1
                sums = subject(x, spec, dim, recorded=recorded).blocks.sums
                sqnr = sqnr_db(sums.signal, sums.noise)
                assert sqnr == pytest.approx(used["sqnr_db"], **near), (row["tensor_id"], gemm)
                if others <= 3:
                    assert recorded.score(x, spec, dim).sqnr_db == pytest.approx(used["sqnr_db"], **near)
                    assert recorded.causes(x, spec, dim).noise == pytest.approx(sums.noise, rel=1e-5, nan_ok=True)
                    part = subject(x, spec, dim, 1 << 12, recorded).blocks.sums  # of lines, rounded as all of them
                    assert abs(sqnr_db(part.signal, part.noise) - sqnr) < 3
                shown = {"tensor": [row["tensor_id"]], "gemm": [gemm]}
                if others == 1:  # the page, and What if in that format
                    said = View("tensor", {"view": ["why"], **shown}).draw(catalog).verdict
                    assert f"SQNR {used['sqnr_db']:.1f} dB" in said
                    tried = View("tensor", {"view": ["whatif"], "formats": [used["format"]], **shown}).draw(catalog)
                    of_label = tried.tables["trials"].set_index("label")["sqnr_db"]
                    assert of_label[used["format"]] == pytest.approx(used["sqnr_db"], abs=1e-6)
    return others


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", [*PUBLISHED, "mxfp8", "FA_linear_nvfp4"])
def test_every_recipe(recipe, tmp_path):
    deep = recipe in ("nemotron3_super", "nvidia_nvfp4", "torchtitan_nvfp4")  # keeps every layer of the model in bf16
    with record(tmp_path, f"{recipe}(without=keep)" if deep else recipe) as catalog:
        assert operands(catalog)
        check(catalog)
        check_other_gemms(catalog)


def test_an_operand_of_two_gemms_is_shown_in_each(tmp_path):
    with record(tmp_path, "mxfp4") as catalog:
        assert check_other_gemms(catalog)
        row = next(row for row in operands(catalog) if row["tensor_name"] == "weight")
        asked = View("tensor", {"view": ["why"], "tensor": [row["tensor_id"]], "gemm": ["wgrad"]})
        assert "is an operand of " in asked.draw(catalog).problems[0]


@pytest.mark.thorough
def test_random_numbers_are_repeated(tmp_path):
    (tmp_path / "random.toml").write_text(RANDOM)
    with record(tmp_path / "runs", str(tmp_path / "random.toml")) as catalog:
        seeds = {(row["noise_seed"], row["sign_seed"]) for row in operands(catalog)}
        assert len(seeds) == len(operands(catalog))
        check(catalog)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("factors", [(1e-5,) * 3, (1.0, 1.0, 1000.0)], ids=["small", "growing"])
def test_delayed_scales(factors, tmp_path):
    """A scale of earlier iterations, too large or too small for this one."""
    with record(tmp_path, "te_delayed", factors) as catalog:
        rows = [row for row in operands(catalog) if row["tensor_name"] == "grad_output"]
        first, last = ([row["tensor_scale"] for row in rows if row["iteration"] == at] for at in (0, len(factors) - 1))
        assert set(first) == {1.0} and 1.0 not in last
        check(catalog)
        table = View("map", {"metric": ["tensor_scale"], "across": ["iteration"]}).draw(catalog).figures[0].table
        own = table[(table["tensor"] == "grad_output") & (table["product"] == rows[-1]["module"])]
        assert own.sort_values("iteration")["value"].iloc[0] == 1.0 and len(own["value"].unique()) > 1
        row = rows[-1]
        where = Filter(tensor_name=["grad_output"])
        said = plots.why(catalog, where, tensor=row["tensor_id"], format=row["format"]).verdict
        assert f"(as recorded): SQNR {row['sqnr_db']:.1f} dB" in said
        other = plots.why(catalog, where, tensor=row["tensor_id"], format="fp8_e4m3(history=3)")
        assert not other.figures and "takes its scale from earlier iterations" in other.problems[0]
        tried = plots.what_if(catalog, where, tensor=row["tensor_id"], formats=["fp8_e4m3(history=3)", "mxfp8"])
        assert any("takes its scale from earlier iterations" in text for text in tried.sentences)
        assert "fp8_e4m3(history=3)" not in set(tried.tables["trials"]["label"])


def test_a_current_scale_follows_from_the_values(tmp_path):
    with record(tmp_path, "te_current", (1.0, 1000.0)) as catalog:
        for row in operands(catalog):
            largest = 57344.0 if "e5m2" in row["format"] else 448.0
            assert row["tensor_scale"] == np.float32(largest) / np.float32(row["absmax"])


@pytest.mark.slow
def test_what_attention_rounds_twice_or_takes_from_elsewhere(tmp_path):
    (tmp_path / "twice.toml").write_text(ATTENTION)
    (tmp_path / "flash.toml").write_text(
        '[pv]\nsoftmax = "flash(backward=rounded)"\nforward = "mxfp4"\ndvalue = "mxfp8"'
    )
    for name, others in (("twice", 12), ("flash", 2)):  # of two layers; flash: the gradient of the output in dV
        with record(tmp_path / name, str(tmp_path / f"{name}.toml")) as catalog:
            check(catalog)
            assert check_other_gemms(catalog) == others * STEPS


def test_padding_is_said(tmp_path):
    mask = torch.arange(40).expand(2, -1) < torch.tensor([[40], [25]])
    with record(tmp_path, "linear_mxfp4", mask=mask) as catalog:
        row = next(row for row in operands(catalog) if row["tensor_name"] == "input")
        said = plots.why(catalog, Filter(tensor_name=["input"]), tensor=row["tensor_id"], format="mxfp4").verdict
        assert f"In mxfp4 (as recorded without 15 padding tokens): SQNR {row['sqnr_db']:.1f} dB" in said


def test_a_large_tensor_is_tried_whole():
    """One line of 64 has the largest values, which a sample by lines may miss."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e4
    found, _ = what_if.try_formats([what_if.TriedOperand(x, -1)], [what_if.trial("hifp8")], together=False, limit=1024)
    q = fake_quantize(x, "hifp8").double().numpy()
    e = q - x.double().numpy()
    assert found["sqnr_db"].iloc[0] == pytest.approx(10 * math.log10((x.double() ** 2).sum() / (e**2).sum()), abs=1e-9)


@pytest.mark.thorough
def test_the_map_shows_a_mixed_recipe_as_it_was_used(tmp_path):
    """Gradients of mxfp8 are rounded to E5M2; each cell has the error of its own format, and is compared with what that
    format does to normal values."""
    with record(tmp_path, "mxfp8") as catalog:
        view = View("map", {"metric": ["sqnr_vs_normal"]})
        assert view.read(catalog).values["format"] == USED
        answer = view.draw(catalog)
        rows = {row["tensor_id"]: row for row in operands(catalog)}
        cells = [
            cell
            for cell in answer.figures[0].table.to_dict("records")
            if cell["gemm"] == rows[cell["tensor_id"]]["gemm"]
        ]
        assert {rows[cell["tensor_id"]]["format"] for cell in cells} == {"mxfp8", "mxfp8_e5m2"}
        for cell in cells:
            row = rows[cell["tensor_id"]]
            assert cell["value"] == pytest.approx(row["sqnr_db"] - normal_sqnr(row["format"]), abs=1e-9)
        assert "in mxfp8 and 25.4 dB in mxfp8_e5m2" in answer.verdict
        assert View("map", {"metric": ["sqnr_db"]}).draw(catalog).verdict.startswith("As used, formats do what")
        assert View("map", {"view": ["blocks"]}).read(catalog).values["format"] == "mxfp8"
        gradient = next(row for row in rows.values() if row["tensor_name"] == "grad_output")
        why = View("tensor", {"tensor": [gradient["tensor_id"]], "format": [USED]})
        assert why.read(catalog).values["format"] == "mxfp8_e5m2"


@pytest.mark.thorough
def test_a_run_that_rounds_nothing_has_no_format_in_use(tmp_path):
    with record(tmp_path, "bf16", scores=("mxfp4", "mxfp8")) as catalog:
        assert View("map").read(catalog).values["format"] == "mxfp4"
        answer = View("map", {"format": [USED], "metric": ["sqnr_db"]}).draw(catalog)
        assert not answer.figures and "None of these operands was rounded" in answer.problems[0]
        of_one = View("map", {"format": [USED], "metric": ["effect"]})
        assert of_one.read(catalog).values["format"] == "mxfp4"


def test_a_recipe_of_few_operands_opens_as_used_with_all_that_it_rounded(tmp_path):
    """nvidia_nvfp4 rounds a third of the recorded operands, in five specs: the Map has each, not those of one spec."""
    with record(tmp_path, "nvidia_nvfp4", (1.0,)) as catalog:
        used = catalog.ask("SELECT count(*) AS n FROM score WHERE used")["n"].iloc[0]
        for page in ("map", "explore"):
            assert View(page).read(catalog).values["format"] == USED
        assert f"{used} of {used} operands" in str(View("map").draw(catalog).verdict)


@pytest.mark.parametrize(("bad", "every"), [(math.nan, True), (math.inf, False), (math.nan, False)])
def test_the_map_says_which_operands_have_nan(tmp_path, bad: float, every: bool):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    torch.nn.init.constant_(model[0].weight if every else model[1].weight[0], bad)
    recorder = Recorder(tmp_path, label="d", iterations=1)
    with recorder, instrument(model, "mxfp4", recorder):
        model(torch.randn(4, 64)).sum().backward()
        recorder.step()
    with Catalog.open(tmp_path) as catalog:
        finite = catalog.ask("SELECT count(*) AS n FROM score WHERE used AND isfinite(mse)")["n"].iloc[0]
        broken = catalog.ask("SELECT count(*) AS n FROM score WHERE used AND isnan(mse)")["n"].iloc[0]
        answer = View("map").draw(catalog)
        assert broken and finite
        assert f"of {finite} operands" in str(answer.verdict)
        assert f"{broken} operands have NaN or Inf in place of a value: " in str(answer.verdict)
        labels = answer.figures[0].table.set_index("value")["label"]
        assert labels[labels.index.isna()].tolist() == ["NaN or Inf"] * broken


def test_a_run_of_nan_alone_is_not_called_unrounded(tmp_path):
    x = torch.full((32, 64), math.nan)
    make_run(tmp_path, [operand(x, layer, tensor_name=name) for layer in (1, 2) for name in ("input", "weight")])
    with Catalog.open(tmp_path) as catalog:
        problems = View("map", {"format": [USED]}).draw(catalog).problems
        assert "4 of 4 rounded operands hold NaN or Inf" in problems[0]

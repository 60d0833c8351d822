"""Recipes in TOML: what the published ones say, what a file may say, and that training does it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from binade.collector import Recorder, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.models.site import Site
from binade.collector.recipes.files import PUBLISHED, from_toml, to_toml
from binade.collector.recipes.ingredients import INGREDIENTS
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe, RecipeError
from binade.collector.recipes.selection import SelectionError
from binade.data.index.catalog import Catalog
from binade.quant.quantizer import fake_quantize
from binade.quant.specs import OPERAND_FIELDS, Spec, SpecError
from tests.collector.small_model import build, step

# The tables of RECIPES.md by hand, operands in the order of OPERAND_FIELDS; * is rounded from the rounded one.
ROW = "fp8_e4m3(block=row, scale=torchao_pow2)"
QUARTET = "mxfp4(scale=4over3, rounding=stochastic, hadamard=32, signs=random)"
EDEN = "nvfp4(scale=eden, hadamard=128, signs=random)"
TETRAJET = "nvfp4(scale=nvfp4_1x128, rounding=stochastic, hadamard=16, signs=random)"
ROTATED = "nvfp4(hadamard=128, signs=random)"
NVIDIA = (
    "nvfp4", "nvfp4(block=16x16)", "nvfp4(rounding=stochastic)", "nvfp4(block=16x16)",
    "nvfp4(rounding=stochastic, hadamard=16, signs=fixed)", "nvfp4(hadamard=16, signs=fixed)",
)  # fmt: skip
AMD = (
    "mxfp4(scale=even)", "mxfp4(block=32x32, scale=even)", "mxfp4(scale=even)", "mxfp4(block=32x32, scale=even)",
    "mxfp4(scale=even, hadamard=16)", "mxfp4(scale=even, hadamard=16)",
)  # fmt: skip
UNIFORM = "nvint4(scale=float32, hadamard=16, signs=fixed)"
TILES = tuple("fp8_e4m3(block=1x128)" if name[-1] != "b" else "fp8_e4m3(block=128x128)" for name in OPERAND_FIELDS)
EXPECTED = {
    "te_delayed": tuple(f"fp8_{e}(history=1024)" for e in ("e4m3", "e4m3", "e5m2", "e4m3", "e5m2", "e4m3")),
    "te_current": ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3"),
    "te_block": tuple(spec.replace(")", ", scale=pow2)") for spec in TILES),
    "te_mxfp8": ("mxfp8(scale=rceil)",) * 6,
    "te_nvfp4": NVIDIA,
    "torchao_tensorwise": tuple(f"fp8_{e}(scale=torchao)" for e in ("e4m3", "e4m3", "e5m2", "e4m3", "e5m2", "e4m3")),
    "torchao_rowwise": (ROW,) * 6,
    "torchao_rowwise_gw_hp": (ROW, ROW, ROW, "fp8_e4m3(scale=torchao_pow2)", None, None),
    "torchao_mxfp8": ("mxfp8(scale=rceil)",) * 6,
    "torchtitan_nvfp4": NVIDIA,
    "deepseek_v3": (
        "fp8_e4m3(scale=deepgemm)",
        "fp8_e4m3(block=128x128, scale=deepgemm)",
        "fp8_e4m3(scale=float32)",
        "fp8_e4m3(block=128x128, scale=deepgemm)",
        "fp8_e4m3(scale=float32)",
        "*fp8_e4m3(scale=deepgemm)",
    ),
    "deepseek_v4": (
        *(spec.replace(")", ", scale=pow2)") for spec in TILES[:5]),
        "*fp8_e4m3(block=1x128, scale=pow2)",
    ),
    "ufp4": (*(UNIFORM,) * 2, *(UNIFORM.replace("float32", "float32, rounding=stochastic"), UNIFORM) * 2),
    "nvidia_mxfp8": ("mxfp8(scale=rceil)",) * 6,
    "nvidia_nvfp4": NVIDIA,
    "quartet": ("mxfp4(scale=quest, hadamard=32)",) * 2 + (QUARTET, f"*{QUARTET}") * 2,
    "quartet2": ("nvfp4(scale=4over6)",) * 2 + (EDEN, f"*{EDEN}") * 2,
    "tetrajet2": ("nvfp4(scale=nvfp4_1x128)",) * 2 + (TETRAJET, f"*{TETRAJET}") * 2,
    "fp4_all_the_way": ("nvfp4", "nvfp4", "nvfp4(rounding=stochastic)", "nvfp4", *("nvfp4(rounding=stochastic)",) * 2),
    "hifp8_scaled": ("hifp8(scale=amax8)",) * 6,
    "hif4": ("hif4",) * 6,
    "te_mxfp8_fwd_nvfp4_bwd": ("mxfp8(scale=rceil)",) * 2 + (NVIDIA[2], "*nvfp4", *NVIDIA[4:]),
    "te_nvfp4_fwd_mxfp8_bwd": ("mxfp8(scale=rceil)",) * 6,
    "nemotron3_super": NVIDIA,
    "amd_mxfp4": AMD,
    "amd_mxfp4_deosc": AMD,
}


def six(recipe: Recipe) -> tuple[str | None, ...]:
    formats = recipe.linear.formats
    return tuple(
        "*" * (name in formats.of_rounded) + str(formats[name]) if formats[name] or name in formats.of_rounded else None
        for name in OPERAND_FIELDS
    )


def test_all_are_published():
    assert set(PUBLISHED) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_published_recipes_are_those_of_their_sources(name):
    recipe = parse_recipe(name)
    assert six(recipe) == EXPECTED[name]
    assert recipe.name == recipe.linear.quant_type == name
    assert recipe.about.title and recipe.about.source and re.fullmatch("code|excerpt|code, excerpt", recipe.about.read)
    whole = name == "hif4"
    assert recipe.qk.formats.quantized == recipe.pv.formats.quantized == whole and not recipe.router.formats.quantized
    recalled = [text for text in recipe.about.uncertain if "rom memory" in text]
    assert bool(recalled) == (name in ("deepseek_v3", "fp4_all_the_way", "nvidia_mxfp8", "nvidia_nvfp4"))


@pytest.mark.parametrize("name", [*EXPECTED, "mxfp8", "linear_nvfp4(block=16x16)", "FA_hifp8"])
def test_a_written_recipe_reads_as_it_was(name):
    recipe = parse_recipe(name)
    again = from_toml(to_toml(recipe), name)
    assert again.lines() == recipe.lines() and (again.keep, again.about) == (recipe.keep, recipe.about)
    assert again.deoscillation == recipe.deoscillation


def test_experts_have_a_table_of_their_own():
    """Transformer Engine's hybrid: of experts, the backward operands are rounded from the rounded forward ones."""
    recipe, mxfp8 = parse_recipe("te_nvfp4_fwd_mxfp8_bwd"), "mxfp8(scale=rceil)"
    expert = replace(recipe, linear=recipe.linear_of(Site(2, "fc1", expert=3)))
    assert six(expert) == ("nvfp4(scale=nvfp4_row)", "nvfp4", mxfp8, f"*{mxfp8}", mxfp8, f"*{mxfp8}")
    assert recipe.linear_of(Site(2, "fc1")) == recipe.linear_of(Site(2, "shared_fc1")) == recipe.linear


def test_experts_of_deepseek_v4_have_weights_of_4_bits():
    recipe = parse_recipe("deepseek_v4")
    expert = six(replace(recipe, linear=recipe.linear_of(Site(2, "fc1", expert=3))))
    assert expert[:2] == ("fp8_e4m3(block=1x128, scale=pow2)", "mxfp4(scale=rceil)")
    assert expert[3] == "*fp8_e4m3(block=128x128, scale=pow2)"


def test_a_weight_has_no_tokens_whose_mean_a_whole_gemm_subtracts():
    centered = "nvfp4(center=tokens)"
    text = "".join(f'linear.{gemm} = "{centered}"\n' for gemm in ("forward", "dgrad", "wgrad"))
    recipe = from_toml(text, "mine")
    assert six(recipe) == (centered, "nvfp4", centered, "nvfp4", centered, centered)
    assert from_toml(to_toml(recipe), "mine").linear.formats == recipe.linear.formats
    with pytest.raises(SpecError, match="a weight has no tokens"):
        from_toml(f'linear.forward.weight = "{centered}"\n', "mine")


def test_the_backward_pass_can_run_in_bf16_on_rounded_operands_or_originals():
    """backward_override of Transformer Engine."""
    mxfp8 = "mxfp8(scale=rceil)"
    assert six(parse_recipe("te_mxfp8(backward=dequantized)")) == (mxfp8, mxfp8, None, "*None", None, "*None")
    assert six(parse_recipe("te_mxfp8(backward=high_precision)")) == (mxfp8, mxfp8, None, None, None, None)
    both = parse_recipe("nvidia_nvfp4(backward=dequantized, without=keep)")
    assert (both.name, both.keep) == ("nvidia_nvfp4(backward=dequantized, without=keep)", "")
    with pytest.raises(RecipeError, match="backward=rounded is not possible: expected dequantized or high_precision"):
        parse_recipe("te_mxfp8(backward=rounded)")
    model, weight = build(1), "mxfp4(block=32x32)"
    linear = model.layers[0].mlp.linear_fc2
    x = torch.randn(4, 7, linear.weight.shape[1], requires_grad=True)
    for source, used in (
        ("dequantized", lambda t, spec: fake_quantize(t, spec)),
        ("high_precision", lambda t, spec: t),
    ):
        x.grad = linear.weight.grad = None
        with instrument(model, f"linear_mxfp4(block=32x32, backward={source})", backend="torch"):
            y = linear(x)
            y.backward(gradient := torch.ones_like(y))
        operand, rows = used(linear.weight.detach(), weight), used(x.detach().flatten(0, 1), weight)
        assert torch.equal(x.grad, gradient @ operand)
        torch.testing.assert_close(linear.weight.grad, gradient.flatten(0, 1).T @ rows, rtol=1e-5, atol=1e-6)


MINE = """
[linear]
forward = "nvfp4"
wgrad.input = { spec = "mxfp8", of = "rounded" }
[modules.fc2]
forward.input = "mxfp4"
[keep]
layers = "first"
[[schedule]]
from = 3
linear.forward = "bf16"
[[schedule]]
from = "50%"
linear.dgrad.weight = "hifp8"
qk.forward.key = "mxfp8"
"""


def test_everything_that_a_file_may_say(tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    recipe = parse_recipe(str(tmp_path / "mine.toml"))
    assert recipe.name == "mine" and recipe.keep == "first"
    assert six(recipe) == ("nvfp4", "nvfp4", None, None, None, "*mxfp8")
    fc1, fc2 = (recipe.linear_of(Site(1, module)).formats for module in ("fc1", "fc2"))
    assert str(fc2.forward_a) == "mxfp4" and str(fc2.forward_b) == str(fc1.forward_b) == "nvfp4"
    (zero, first), (start, second), (half, third) = recipe.stages(20)
    assert (zero, first, start, half) == (0, recipe, 3, 10)
    assert six(second) == (None, None, None, None, None, "*mxfp8")
    assert six(third) == (None, None, None, "hifp8", None, "*mxfp8")
    assert str(third.qk.formats.forward_b) == "mxfp8"
    assert from_toml(to_toml(recipe), "mine") == recipe
    changed = [line for line in recipe.lines() if line.startswith("from")]
    assert len(changed) == 4 and changed[-1].startswith("from 50%: ")


def test_options_replace_those_of_a_file_in_every_stage_and_module(tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    recipe = parse_recipe(str(tmp_path / "mine.toml"), forward="mxfp8", operands=["linear.dgrad.weight=fp16"])
    for _, stage in recipe.stages(20):
        for module in ("fc1", "fc2"):
            formats = stage.linear_of(Site(1, module)).formats
            assert [str(formats[name]) for name in ("forward_a", "forward_b", "dgrad_b")] == ["mxfp8", "mxfp8", "fp16"]


def test_what_replaces_an_operand_is_not_rounded_from_its_rounded_value():
    for given in ({"linear": "mxfp8"}, {"dgrad": "bf16"}, {"operands": ["linear.dgrad.weight=bf16"]}):
        recipe = parse_recipe("quartet(without=rotation)", **given)
        assert "dgrad_b" not in recipe.linear.formats.of_rounded
        assert ("wgrad_a" in recipe.linear.formats.of_rounded) == ("linear" not in given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[linear]\nforward.inputs = 'mxfp8'", "unknown key 'inputs' in linear.forward: expected one of input, weight"),
        ("[linears]\n", "unknown key 'linears' in the recipe: expected one of"),
        ("[linear]\nforward = 'mxfp9'", "linear.forward.input: .*mxfp9"),
        ("[linear]\nforward = 'mxfp8(scale=quest)'", "linear.forward.input: scale=quest is not possible for mxfp8"),
        ("[linear]\nforward = 3", "linear.forward must be a table, not 3"),
        ("[[schedule]]\nfrom = 10\n[[schedule]]\nfrom = '5%'\n[[schedule]]\nfrom = 9\n", "from = 9 follows 10"),
        ("[[schedule]]\nfrom = '90%'\n[[schedule]]\nfrom = '90.0%'\n", "from = 90.0% follows 90%"),
        ("[linear]\nforward = 'mxfp8(block=2'", r"linear.forward.input: 'mxfp8\(block=2' is not a spec"),
        ("[linear]\ndgrad.weight = { spec = 'mxfp8', of = 'round' }", "unknown of = 'round': expected of = "),
        ("[linear]\nforward.input = 3", "linear.forward.input must be a string, not 3"),
        ("[linear]\nforward.input = { spec = 'mxfp8', of = 'rounded' }", 'linear.forward.input: of = "rounded"'),
        ("linear = 'mxfp8'", r"\[linear\] must be a table"),
        ("[keep]\nlayers = '(('", r"keep.layers: '\(\(' is neither"),
        ("[keep]\nlayer = 'first'", "unknown key 'layer' in .keep.: expected layers"),
        ("[[schedule]]\nlinear.forward = 'bf16'", "from = nothing"),
        ("[[schedule]]\nfrom = '120%'", "from = 120%"),
        ("schedule = 3", "schedule is a list"),
        ("[linear", "is not TOML"),
        ("title = " + "[" * 5000, "is not TOML: maximum recursion depth"),
        ("title = " + "9" * 5000, "is not TOML: Exceeds the limit"),
        (
            "[deoscillation]\nperiods = 2",
            "unknown key 'periods' in .deoscillation.: expected one of period",
        ),
        ("[deoscillation]\nperiod = 2.5", "deoscillation.period = 2.5: expected a whole number above 0"),
        ("[deoscillation]\nratio = -1", "deoscillation.ratio = -1: expected a number above 0"),
        (
            "[state]\nexp_avgs = 'bf16'",
            "unknown key 'exp_avgs' in .state.: expected one of exp_avg, exp_avg_sq",
        ),
        ("[state]\nexp_avg = 'fp9'", "state.exp_avg: .*fp9"),
        ("[state]\nexp_avg = 8", "state.exp_avg must be a string, not 8"),
        ("state = 'bf16'", r"\[state\] must be a table"),
        (
            "[state]\nexp_avg = 'fp8_e4m3(history=16)'",
            r"state.exp_avg = fp8_e4m3\(history=16\): only operands",
        ),
        ("[communication]\nreduce = 'bf16'", "unknown key 'reduce' in .communication.: expected one of reduce_scatter"),
        ("[communication]\nall_to_all = 'mxfp8(scale=quest)'", "communication.all_to_all: scale=quest is not possible"),
        ("[[schedule]]\nfrom = 1\nstate.exp_avg = 'bf16'", "unknown key 'state' in .*schedule"),
        (
            "[linear]\nforward.input = 'mxfp8(hadamard=32)'",
            "recipe .*wrong.toml: linear: the operands of forward are rotated differently, .* and bf16",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_a_line(tmp_path, text, said):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        parse_recipe(str(path))
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused_in_a_line(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"title = '\xe9'")
    for path, said in ((tmp_path / "none.toml", "No such file"), (tmp_path / "latin.toml", "utf-8")):
        with pytest.raises(RecipeError, match=said):
            parse_recipe(str(path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvidia_nvfp4(without=rounding)", (*NVIDIA[:2], "nvfp4", NVIDIA[3], NVIDIA[5], NVIDIA[5])),
        ("nvidia_nvfp4(without=tiles)", ("nvfp4", "nvfp4", NVIDIA[2], "nvfp4", *NVIDIA[4:])),
        ("nvidia_nvfp4(without=rotation+dgrad)", (*NVIDIA[:2], None, None, NVIDIA[2], "nvfp4")),
        ("hifp8_scaled(without=scale)", ("hifp8",) * 6),
        ("quartet2(without=scale)", ("nvfp4",) * 2 + (ROTATED, f"*{ROTATED}") * 2),
        ("te_delayed(without=scale)", EXPECTED["te_current"]),
        ("te_block(without=scale)", TILES),
        ("quartet(without=rounded)", tuple(spec.strip("*") for spec in EXPECTED["quartet"])),
        ("quartet(without=dgrad)", (*EXPECTED["quartet"][:2], None, None, *EXPECTED["quartet"][4:])),
        ("linear_mxfp4(without=dgrad+wgrad)", ("mxfp4", "mxfp4", None, None, None, None)),
        ("linear_nvfp4(block=16x16, without=tiles)", ("nvfp4",) * 6),
    ],
)  # fmt: skip
def test_ingredients_can_be_left_out(name, expected):
    recipe = parse_recipe(name)
    assert six(recipe) == expected and recipe.name == name


OUTSIDE = """
[state]
exp_avg = "fp8_e4m3(block=1x128)"
exp_avg_sq = "bf16"
master_weight = "bf16(rounding=stochastic)"
[communication]
all_to_all = "fp8_e4m3(block=1x128, scale=pow2)"
"""


def test_state_and_communication_are_described_written_and_left_out(tmp_path):
    (tmp_path / "mine.toml").write_text(OUTSIDE)
    recipe = parse_recipe(f"{tmp_path}/mine.toml")
    fp8, pow2 = "fp8_e4m3(block=1x128)", "fp8_e4m3(block=1x128, scale=pow2)"
    assert [line.split(maxsplit=1) for line in recipe.lines()[-4:]] == [
        ["state.exp_avg", f"last axis    {fp8}"],
        ["state.exp_avg_sq", "last axis    bf16"],
        ["state.master_weight", "last axis    bf16(rounding=stochastic)"],
        ["communication.all_to_all", f"last axis    {pow2}"],
    ]
    state = f"state (exp_avg {fp8}, exp_avg_sq bf16, master_weight bf16(rounding=stochastic))"
    assert recipe.describe().endswith(f"pv bf16, {state}, communication (all_to_all {pow2})") and recipe.quantized
    assert from_toml(to_toml(recipe), "mine") == recipe
    without = {name: parse_recipe(f"{tmp_path}/mine.toml(without={name})") for name in ("state", "communication")}
    assert without["state"] == replace(recipe, name="mine(without=state)", state=None)
    assert without["communication"] == replace(recipe, name="mine(without=communication)", communication=None)
    nearest = parse_recipe(f"{tmp_path}/mine.toml(without=rounding)")
    assert nearest.state == replace(recipe.state, master_weight=Spec.of("bf16"))
    scale = parse_recipe(f"{tmp_path}/mine.toml(without=scale)")
    assert str(scale.communication) == f"all_to_all {fp8}" and scale.state == recipe.state
    assert from_toml("[state]\n[linear]\nforward = 'mxfp8'", "mine").state is None


def test_keep_and_schedule_can_be_left_out(tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    recipe = parse_recipe(f"{tmp_path}/mine.toml(without=keep+schedule)")
    assert (recipe.keep, recipe.schedule, recipe.name) == ("", (), "mine(without=keep+schedule)")


def test_what_cannot_be_left_out_is_refused():
    with pytest.raises(RecipeError, match=f"without=hadamard .*{', '.join(INGREDIENTS)}"):
        parse_recipe("nvidia_nvfp4(without=hadamard)")
    for name, missing in (("te_mxfp8", "rounding"), ("nvidia_nvfp4", "scale"), ("mxfp8", "keep")):
        with pytest.raises(RecipeError, match=f"does not have the ingredient '{missing}'"):
            parse_recipe(f"{name}(without={missing})")


def rows_of(tmp_path: Path):
    with Catalog.open(tmp_path) as catalog:
        return catalog.tensors()


def test_every_operand_of_a_published_recipe_is_recorded_as_it_is_rounded(tmp_path):
    model = build(3)
    with Recorder(tmp_path, tensors=("input", "weight", "grad_output")) as recorder:
        with instrument(model, "nvidia_nvfp4", recorder):
            step(model)
    rows = rows_of(tmp_path)
    linear = rows[(rows["module"] != "core") & (rows["component"] == "linear")].set_index("layer_index")
    assert linear.loc[3, "format"].isna().all() and set(linear.loc[3, "quant_type"]) == {"bf16"}
    rounded = linear.loc[[1, 2]]
    assert set(rounded["quant_type"]) == {"nvidia_nvfp4"}
    assert dict(zip(rounded["tensor_name"], rounded["format"], strict=False)) == {
        "input": NVIDIA[0], "weight": NVIDIA[1], "grad_output": NVIDIA[2],
    }  # fmt: skip


@pytest.mark.parametrize("at", [True, False], ids=["at", "step"])
def test_a_schedule_changes_what_is_rounded_while_the_model_trains(tmp_path, at):
    (tmp_path / "mine.toml").write_text(
        "[linear]\nforward = 'mxfp4'\n[[schedule]]\nfrom = 2\nlinear.forward = 'mxfp8'\n"
        "[[schedule]]\nfrom = '75%'\nlinear.forward = 'bf16'\n"
    )
    model = build()
    with Recorder(tmp_path / "runs", tensors=("input",)) as recorder:
        with instrument(model, str(tmp_path / "mine.toml"), recorder, iterations=4):
            for iteration in range(4):
                if at:
                    with recorder.at(iteration, 0):
                        step(model)
                else:
                    step(model)
                    recorder.step()
    rows = rows_of(tmp_path / "runs")
    found = rows[rows["component"] == "linear"].fillna({"format": "none"}).groupby("iteration")["format"].unique()
    assert [list(found[i]) for i in range(4)] == [["mxfp4"], ["mxfp4"], ["mxfp8"], ["none"]]


def test_a_schedule_in_percent_needs_the_number_of_iterations(tmp_path):
    (tmp_path / "mine.toml").write_text("[[schedule]]\nfrom = '75%'\nlinear.forward = 'mxfp8'\n")
    with pytest.raises(RecipeError, match="75% of the iterations"), instrument(build(), str(tmp_path / "mine.toml")):
        pass


def test_a_module_that_the_model_has_not_is_refused(tmp_path):
    for module, text in (
        ("fc7", "[modules.fc7]\nforward = 'mxfp8'\n"),
        ("core", "[modules.core]\nforward = 'mxfp8'\n"),
        ("fc7", "[linear]\nforward = 'mxfp8'\n[[schedule]]\nfrom = 2\nmodules.fc7.forward = 'mxfp4'\n"),
    ):
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(InstrumentError, match=f"formats for {module}, which the model lacks"):
            with instrument(build(), str(tmp_path / "mine.toml")):
                pass
    with pytest.raises(InstrumentError, match="keeps last in bf16, which is every layer"):
        with instrument(build(1), "nvidia_nvfp4"):
            pass
    (tmp_path / "mine.toml").write_text("[keep]\nlayers = '9'\n[linear]\nforward = 'mxfp8'\n")
    with pytest.raises(SelectionError, match="'9' is not a layer"), instrument(build(), str(tmp_path / "mine.toml")):
        pass


class TestDelayedScales:
    """Trained in one go, and with a pause, the scales restored from the first run."""

    def losses(self, pauses: tuple[int, ...], tmp_path: Path) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        directory = None
        for start, end in pairwise((0, *pauses, 6)):
            with Recorder(tmp_path / "runs") as recorder:
                with instrument(model, "te_delayed", recorder, scales_of=directory):
                    for iteration in range(start, end):
                        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(iteration)) * 4**iteration
                        loss = (model(x) - x).square().mean()
                        optimizer.zero_grad()
                        loss.backward()
                        losses.append(loss.item())
                        recorder.step()
            directory = recorder.writer.directory
        return losses

    def test_a_run_goes_on_with_the_scales_of_another(self, tmp_path):
        whole = self.losses((), tmp_path / "whole")
        assert self.losses((3,), tmp_path / "paused") == whole
        assert len(set(whole)) == 6

    def test_they_are_kept_with_the_run(self, tmp_path):
        self.losses((), tmp_path)
        (file,) = tmp_path.glob("runs/*/delayed_scales_r00.safetensors")
        state = load_file(file)
        assert len(state) == 2 * 6 * 2  # two layers, six operands, history and scale
        amaxes = next(value for name, value in state.items() if name.endswith("forward_a.amaxes"))
        assert amaxes.shape == (1024,) and amaxes[:6].gt(0).all() and not amaxes[6:].any()

    def test_a_run_without_them_is_refused(self, tmp_path):
        model = nn.Sequential(nn.Linear(32, 64))
        with pytest.raises(InstrumentError, match="delayed_scales_r00"):
            with instrument(model, "te_delayed", scales_of=tmp_path):
                pass
        self.losses((), tmp_path)
        (run,) = tmp_path.glob("runs/*/")
        with pytest.raises(InstrumentError, match="no history of length 16 for "):
            with instrument(model, "linear_fp8_e4m3(history=16)", scales_of=run):
                pass

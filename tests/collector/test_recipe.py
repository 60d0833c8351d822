"""Recipes: which operand of which GEMM gets which format, as declared and as the model really runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from binade.collector.capture.instrument import instrument
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.recipes.files import PUBLISHED
from binade.collector.recipes.ladder import without
from binade.collector.recipes.parse import gradients_note, parse_recipe
from binade.collector.recipes.recipe import OPERANDS, TEN_RECIPES, RecipeError
from binade.quant import fake_quantize, gemm
from binade.quant.formats import FORMATS, UnknownFormatError
from binade.quant.specs import OPERAND_FIELDS, GemmFormats, SpecError

# By hand from DESIGN.md: (linear, QK^T, PV), each (forward_a, forward_b, dgrad_grad, dgrad_b, wgrad_grad, wgrad_a).
NOTHING = (None,) * 6


def everything(name: str) -> tuple[str, ...]:
    gradient = "mxfp8_e5m2" if name == "mxfp8" else name
    return (name, name, gradient, name, gradient, name)


def forward_only(name: str) -> tuple[str | None, ...]:
    return (name, name, None, None, None, None)


EXPECTED = {"bf16": (NOTHING, NOTHING, NOTHING)}
for _name in ("mxfp8", "mxfp4", "hifp8"):
    EXPECTED[f"FA_{_name}"] = (NOTHING, forward_only(_name), NOTHING)
    EXPECTED[f"linear_{_name}"] = (everything(_name), NOTHING, NOTHING)
    EXPECTED[f"FA_linear_{_name}"] = (everything(_name), forward_only(_name), NOTHING)
for _name in FORMATS:
    if _name != "bf16":
        EXPECTED[_name] = (everything(_name),) * 3


def six(formats: GemmFormats) -> tuple[str | None, ...]:
    return tuple(None if formats[name] is None else str(formats[name]) for name in OPERAND_FIELDS)


def parts(recipe) -> tuple:
    return six(recipe.linear.formats), six(recipe.qk.formats), six(recipe.pv.formats)


def test_the_ten_are_the_ten():
    assert len(TEN_RECIPES) == len(set(TEN_RECIPES)) == 10
    assert set(TEN_RECIPES) <= set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_recipe_says_what_it_should(name):
    recipe = parse_recipe(name)
    assert parts(recipe) == EXPECTED[name]
    product = EXPECTED[name][0] if name in FORMATS and name not in PUBLISHED and name != "bf16" else NOTHING
    expected = [*EXPECTED[name], *([product] if product != NOTHING else [])]
    assert six(recipe.product.formats) == product
    kinds = [part.quant_type for part in recipe.parts().values()]
    assert kinds == [formats[0] or "bf16" for formats in expected]
    lines = recipe.lines()
    assert [line.split()[-1] for line in lines] == [f or "bf16" for formats in expected for f in formats]


def test_the_alias_mxfp8_e4m3_keeps_gradients_in_e4m3():
    six_of_e4m3 = ("mxfp8",) * 6
    assert parts(parse_recipe("mxfp8_e4m3")) == (six_of_e4m3,) * 3
    assert parts(parse_recipe("linear_mxfp8_e4m3")) == (six_of_e4m3, NOTHING, NOTHING)
    assert parts(parse_recipe("FA_mxfp8_e4m3")) == parts(parse_recipe("FA_mxfp8"))
    assert parse_recipe("mxfp8_e4m3").linear.quant_type == "mxfp8"


@pytest.mark.parametrize(
    ("name", "given", "linear"),
    [
        ("linear_nvfp4(block=16x16)", {}, ("nvfp4(block=16x16)",) * 6),
        ("linear_nvfp4( block = 1x16 , scale=4over6)", {}, ("nvfp4(scale=4over6)",) * 6),
        (
            "linear_mxfp8(scale=rceil)",
            {},
            ("mxfp8(scale=rceil)",) * 2 + ("mxfp8_e5m2(scale=rceil)", "mxfp8(scale=rceil)") * 2,
        ),
        ("linear_mxfp8_e4m3(scale=rceil)", {}, ("mxfp8(scale=rceil)",) * 6),
        ("bf16", {"linear": "mxfp4(rounding=stochastic)"}, ("mxfp4(rounding=stochastic)",) * 6),
        (
            "linear_nvfp4",
            {
                "wgrad": "nvfp4(rounding=stochastic, hadamard=16, signs=random)",
                "operands": (
                    "linear.forward.weight=nvfp4(block=16x16)",
                    "linear.dgrad.grad_output=nvfp4(rounding=stochastic)",
                ),
            },
            (
                "nvfp4",
                "nvfp4(block=16x16)",
                "nvfp4(rounding=stochastic)",
                "nvfp4",
                *("nvfp4(rounding=stochastic, hadamard=16, signs=random)",) * 2,
            ),
        ),
        (  # a rotation is given to both operands of a GEMM, one after the other
            "bf16",
            {"operands": tuple(f"linear.wgrad.{name}=mxfp4(hadamard=32)" for name in ("grad_output", "input"))},
            (None, None, None, None, "mxfp4(hadamard=32)", "mxfp4(hadamard=32)"),
        ),
    ],
)
def test_a_spec_stands_wherever_a_format_does(name, given, linear):
    recipe = parse_recipe(name, **given)
    assert six(recipe.linear.formats) == linear
    assert [line.split(maxsplit=1)[1].partition("  ")[2].strip() for line in recipe.lines()][:6] == [
        text or "bf16" for text in linear
    ]


def test_options_that_are_not_possible_are_refused():
    with pytest.raises(SpecError, match="scale=pow2 is not possible for mxfp8: expected floor, ceil"):
        parse_recipe("linear_mxfp8(scale=pow2)")
    with pytest.raises(SpecError, match="operands of wgrad are rotated differently"):
        parse_recipe("linear_mxfp4", operands=["linear.wgrad.input=mxfp4(hadamard=32)"])


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("bf16", {"linear": "mxfp4"}, (everything("mxfp4"), NOTHING, NOTHING)),
        ("bf16", {"pv": "mxfp8"}, (NOTHING, NOTHING, forward_only("mxfp8"))),
        ("mxfp8", {"qk": "bf16"}, (everything("mxfp8"), NOTHING, everything("mxfp8"))),
        ("FA_mxfp8", {"pv": "hifp8"}, (NOTHING, forward_only("mxfp8"), forward_only("hifp8"))),
        ("FA_linear_mxfp4", {"linear": "bf16"}, (NOTHING, forward_only("mxfp4"), NOTHING)),
        ("bf16", {"linear": "mxfp8_e4m3"}, (("mxfp8",) * 6, NOTHING, NOTHING)),
    ],
)
def test_a_part_can_be_set_alone(name, given, expected):
    assert parts(parse_recipe(name, **given)) == expected


@pytest.mark.parametrize(
    "name", ["", "FA", "FA_", "linear_", "mxfp9", "fa_mxfp8", "linear_FA_mxfp8", "mxfp8 ", "FA_FA_mxfp8", "MXFP8"]
)
def test_unknown_recipes_are_refused(name):
    with pytest.raises(RecipeError, match=r"unknown recipe .*: expected a name from `binade list recipes`"):
        parse_recipe(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("nvidia_nvfp5", "nvidia_nvfp4"),
        ("MXFP8", "mxfp8"),
        ("FA_nvfp(block=16x16)", "FA_nvfp4"),
        ("nvfp4 block=16x16", "nvfp4"),
    ],
)
def test_what_may_be_meant_is_named(name, meant):
    with pytest.raises(RecipeError) as refused:
        parse_recipe(name)
    assert meant in str(refused.value).partition("did you mean ")[2].partition("?")[0].split(", ")


@pytest.mark.parametrize("unknown", ["mxfp9", "", "FA_mxfp8"])
@pytest.mark.parametrize("part", ["linear", "qk", "pv", "router", "product", "forward", "dgrad", "wgrad"])
def test_unknown_formats_are_refused(part, unknown):
    with pytest.raises(UnknownFormatError, match=f"unknown format '{unknown}'"):
        parse_recipe("bf16", **{part: unknown})


FORWARD, DGRAD, WGRAD = slice(0, 2), slice(2, 4), slice(4, 6)


@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "bf16"])
@pytest.mark.parametrize("name", ["bf16", "hifp8", "FA_mxfp4", "linear_mxfp4"])
def test_a_gemm_of_the_linear_layers_can_be_set_alone(name, fmt, gemm):
    linear, qk, pv = (list(part) for part in EXPECTED[name])
    which = {"forward": FORWARD, "dgrad": DGRAD, "wgrad": WGRAD}[gemm]
    linear[which] = (everything(fmt) if fmt != "bf16" else NOTHING)[which]
    recipe = parse_recipe(name, **{gemm: fmt})
    assert parts(recipe) == (tuple(linear), tuple(qk), tuple(pv))
    assert six(recipe.router.formats) == NOTHING


# By hand: the operands of each part in the order of GemmFormats.
NAMES = {
    "linear": ("forward.input", "forward.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output",
               "wgrad.input"),
    "qk": ("forward.query", "forward.key", "dquery.grad_scores", "dquery.key", "dkey.grad_scores", "dkey.query"),
    "pv": ("forward.attention_probs", "forward.value", "dprobs.grad_output", "dprobs.value", "dvalue.grad_output",
           "dvalue.attention_probs"),
    "router": ("forward.input", "forward.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output",
               "wgrad.input"),
    "product": ("forward.left", "forward.right", "dgrad.grad_product", "dgrad.right", "wgrad.grad_product",
                "wgrad.left"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "index", "operand"), [(part, i, name) for part, names in NAMES.items() for i, name in enumerate(names)]
)
def test_an_operand_can_be_set_alone_and_literally(part, index, operand):
    for name, fmt, rounded in (("bf16", "mxfp8_e4m3", "mxfp8"), ("mxfp4", "bf16", None), ("mxfp8", "nvfp4", "nvfp4")):
        before, after = parse_recipe(name), parse_recipe(name, operands=[f" {part}.{operand} = {fmt} "])
        expected = {name: list(six(getattr(before, name).formats)) for name in NAMES}
        expected[part][index] = rounded
        assert {key: list(six(getattr(after, key).formats)) for key in expected} == expected


def test_the_operands_are_those_that_the_lines_show():
    recipe = parse_recipe("mxfp8", router="mxfp4")
    shown = [line.split()[0] for line in recipe.lines()]
    assert shown == [f"{part}.{operand}" for part, operands in NAMES.items() for operand in operands] == list(OPERANDS)
    for operand in shown:
        changed = parse_recipe("mxfp8", router="mxfp4", operands=[f"{operand}=mxint8"]).lines()
        different = [new for old, new in zip(recipe.lines(), changed, strict=True) if old != new]
        assert [line.split()[0] for line in different] == [operand] and different[0].endswith(" mxint8")


def test_what_is_more_exact_wins():
    """recipe < part < GEMM < operand"""
    given = {
        "linear": "hifp8",
        "dgrad": "mxfp8",
        "operands": ("linear.dgrad.weight=nvfp4", "linear.forward.input=bf16"),
    }
    expected = (None, "hifp8", "mxfp8_e5m2", "nvfp4", "hifp8", "hifp8")
    assert parts(parse_recipe("mxfp4", **given)) == (expected, everything("mxfp4"), everything("mxfp4"))
    assert parse_recipe("mxfp4", **given).describe() == (
        "linear (forward bf16 x hifp8, dgrad mxfp8_e5m2 x nvfp4, wgrad hifp8), qk mxfp4, pv mxfp4, product mxfp4"
    )


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (["qk.forward.keys=mxfp4"], "unknown operand 'qk.forward.keys': expected one of linear.forward.input, "),
        (
            ["linear.dgrad=mxfp4"],
            "unknown operand 'linear.dgrad': .*, pv.dvalue.attention_probs, router.forward.input",
        ),
        (["=mxfp4"], "unknown operand ''"),
        (["qk.forward.key"], "'qk.forward.key' does not set an operand: write PART.GEMM.OPERAND=FORMAT"),
        (["qk.forward.key=mxfp9"], "unknown format 'mxfp9'"),
        (["qk.forward.key="], "unknown format ''"),
        (
            ["qk.forward.key=mxfp4", "qk.forward.key=mxfp8"],
            "qk.forward.key is given two formats, mxfp4 and mxfp8: give one",
        ),
    ],
)
def test_operands_that_are_not_there_are_refused(operands, message):
    with pytest.raises((RecipeError, UnknownFormatError), match=message) as refused:
        parse_recipe("mxfp8", operands=operands)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(257, (2, 33), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> GPTModel:
    model = GPTModel(MODELS["llama32-1b"]["tiny"])
    model.initialize(0)
    return model


def step(model: GPTModel, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


# What contracts what: the axis each operand must be quantized along, from the end, in the order the GEMMs run.
ORDER = ("forward_a", "forward_b", "dgrad_grad", "dgrad_b", "wgrad_grad", "wgrad_a")
LINEAR = QK = tuple(zip(ORDER, (-1, -1, -1, -2, -2, -2), strict=True))
PV = tuple(zip(ORDER, (-1, -2, -1, -1, -2, -2), strict=True))


@pytest.mark.parametrize("name", [*TEN_RECIPES, "mxfp8", "nvfp4"])
def test_the_quantizer_gets_what_the_recipe_says(model, tokens, monkeypatch, name):
    """Counts what reaches quant.quantizer.apply: format, shape and contracted axis, for every GEMM of a step."""
    received: list[tuple[str, tuple[int, ...], int]] = []
    real = gemm.apply

    def listening(x, spec, dim, *arguments):
        received.append((str(spec), tuple(x.shape), dim % x.dim() - x.dim()))
        return real(x, spec, dim, *arguments)

    monkeypatch.setattr(gemm, "apply", listening)
    with instrument(model, name, backend="torch"):
        step(model, tokens)

    shape = model.shape
    length, batch = tokens.shape[1] - 1, len(tokens)
    linears = {
        "qkv": (shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
        "proj": (shape.heads * shape.head_dim, shape.hidden),
        "fc1": (shape.hidden, 2 * shape.ffn),
        "fc2": (shape.ffn, shape.hidden),
    }
    expected: list[tuple[str, tuple[int, ...], int]] = []

    def note(formats: tuple, operands: dict[str, tuple[int, ...]], axes: tuple) -> None:
        by_field = dict(zip(OPERAND_FIELDS, formats, strict=True))
        expected.extend((by_field[field], operands[field], axis) for field, axis in axes if by_field[field])

    linear, qk, pv = EXPECTED[name]
    group, per_group = (batch, shape.kv_heads), shape.heads // shape.kv_heads
    for _ in range(shape.layers):
        for inputs, outputs in linears.values():
            x, w, g = (length * batch, inputs), (outputs, inputs), (length * batch, outputs)
            note(linear, dict(zip(ORDER, (x, w, g, w, g, x), strict=True)), LINEAR)
        q, s = ((*group, per_group, length, last) for last in (shape.head_dim, length))
        kv = (*group, length, shape.head_dim)
        for formats, a, b, g, axes in ((qk, q, kv, s, QK), (pv, s, kv, q, PV)):
            note(formats, dict(zip(ORDER, (a, b, g, b, g, a), strict=True)), axes)
    assert sorted(received) == sorted(expected)


def outputs_of_first_layer(model: GPTModel, tokens: torch.Tensor, recipe: str) -> dict[str, torch.Tensor]:
    """What each module of layer 1 gives when fed the same inputs, under a recipe."""
    kept: dict[str, torch.Tensor] = {}
    attention, mlp = model.layers[0].self_attention, model.layers[0].mlp
    generator = torch.Generator().manual_seed(1)
    with instrument(model, recipe, backend="torch"), torch.no_grad():
        for name, layer in (("qkv", attention.linear_qkv), ("proj", attention.linear_proj), ("fc1", mlp.linear_fc1),
                            ("fc2", mlp.linear_fc2)):  # fmt: skip
            x = torch.randn(16, 2, layer.weight.shape[1], generator=generator).bfloat16()
            kept[name] = layer(x)
        q, k, v = (torch.randn(2, heads, 16, 32, generator=generator).bfloat16() for heads in (8, 2, 2))
        kept["core"] = attention.core_attention(q, k, v)
    return kept


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "hifp8"])
def test_each_half_leaves_the_other_alone_to_the_bit(model, tokens, fmt):
    plain = outputs_of_first_layer(model, tokens, "bf16")
    only_core = outputs_of_first_layer(model, tokens, f"FA_{fmt}")
    only_linear = outputs_of_first_layer(model, tokens, f"linear_{fmt}")
    both = outputs_of_first_layer(model, tokens, f"FA_linear_{fmt}")
    for name, y in plain.items():
        same, other = (only_core, only_linear) if name != "core" else (only_linear, only_core)
        assert torch.equal(y, same[name]), f"{name} changed"
        assert not torch.equal(y, other[name]), f"{name} did not"
        assert torch.equal(both[name], other[name])


def test_fa_leaves_the_attentions_backward_in_bf16(model):
    """The straight-through gradient of FA_x: computed from the unquantized operands."""
    core = model.layers[0].self_attention.core_attention
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 32, 32, generator=generator).bfloat16() for heads in (8, 2, 2))
    received = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            received.append(grad)
            return grad

    with instrument(model, "FA_mxfp4", backend="torch"):
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        core(q, k, v).backward(torch.ones(1, 8, 32, 32, dtype=torch.bfloat16))
    stacked = q.detach().reshape(1, 2, 128, 32)
    scores = fake_quantize(stacked, "mxfp4") @ fake_quantize(k.detach(), "mxfp4").mT * core.scale
    future = torch.ones(32, 32, dtype=torch.bool).triu(1).repeat(4, 1)
    probs = scores.float().masked_fill(future, -torch.inf).requires_grad_()
    p = probs.softmax(-1).bfloat16()
    (p @ v.detach()).backward(torch.ones(1, 2, 128, 32, dtype=torch.bfloat16))
    grad_scores = probs.grad.bfloat16() * core.scale
    assert torch.equal(q.grad, (grad_scores @ k.detach()).reshape(1, 8, 32, 32))
    assert torch.equal(k.grad, grad_scores.mT @ stacked)


def test_the_mean_over_tokens_is_subtracted_from_operands_with_tokens():
    centered, plain = "nvfp4(center=tokens)", "nvfp4"
    recipe = parse_recipe(f"linear_{centered}")
    assert [str(recipe.linear.formats[name]) for name in OPERAND_FIELDS] == [
        centered, plain, centered, plain, centered, centered,
    ]  # fmt: skip
    off = parse_recipe(without(f"linear_{centered}", "center"))
    assert off.linear.formats == parse_recipe(f"linear_{plain}").linear.formats
    with pytest.raises(SpecError, match="linear layers only"):
        parse_recipe(centered)
    with pytest.raises(SpecError, match="weight has no tokens"):
        parse_recipe("bf16", operands=[f"linear.forward.weight={centered}"])


@pytest.mark.parametrize(
    ("recipe", "is_said"),
    [
        *(("mxfp8", True), ("linear_mxfp8(scale=rceil)", True), ("FA_linear_mxfp8", True), ("FA_mxfp8", False)),
        *(("mxfp8_e4m3", False), ("mxfp8_e5m2", False), ("te_mxfp8", False), ("mxfp4", False)),
        ("linear_mxfp8(without=dgrad+wgrad)", False),
    ],
)
def test_it_is_said_that_plain_mxfp8_has_another_element_for_gradients(recipe, is_said):
    assert (gradients_note([{"recipe": recipe}]) != "") == is_said
    if is_said:
        both = gradients_note([{"recipe": "bf16"}, {"recipe": recipe}])
        assert both == "Plain mxfp8 rounds gradients to mxfp8_e5m2, and nothing else to it."


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("linear_mxfp8", "linear mxfp8 (gradients mxfp8_e5m2), qk bf16, pv bf16"),
        (
            "linear_mxfp8(scale=rceil)",
            "linear mxfp8(scale=rceil) (gradients mxfp8_e5m2(scale=rceil)), qk bf16, pv bf16",
        ),
        ("linear_mxfp8_e4m3", "linear mxfp8, qk bf16, pv bf16"),
        ("FA_mxfp8", "linear bf16, qk mxfp8, pv bf16"),
    ],
)
def test_the_text_of_a_recipe_has_the_format_of_gradients(recipe, text):
    assert parse_recipe(recipe).describe() == text


def test_a_recipe_without_its_scale_keeps_its_blocks():
    formats = parse_recipe("deepseek_v3(without=scale)").linear.formats
    assert str(formats.forward_a) == "fp8_e4m3(block=1x128)" and str(formats.forward_b) == "fp8_e4m3(block=128x128)"
    assert str(parse_recipe("linear_nvfp4(scale=4over6, without=scale)").linear.formats.forward_a) == "nvfp4"

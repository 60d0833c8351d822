"""Megatron's precision file: what it says of each linear layer to megatron-core's own parser, and to ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.quant_config import QuantizationConfig, RecipeConfig
from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from binade.collector import Recorder, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.models.registry import MODELS
from binade.collector.models.shape import Shape
from binade.collector.models.site import Site
from binade.collector.recipes.files import from_toml, label, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.precision_file import read, write
from binade.collector.recipes.recipe import GLOB, Communication, Part, Recipe, RecipeError, StateRounding
from binade.data.index.catalog import Catalog
from binade.quant.specs import OPERAND_FIELDS, Softmax, Spec
from tests.collector.megatron_cpu import build, megatron_on_cpu
from tests.collector.small_model import build as build_ours
from tests.collector.small_model import step
from tests.collector.test_recipe_files import EXPECTED

LLAMA = replace(MODELS["llama32-1b"]["tiny"], layers=3)
DEEPSEEK = replace(MODELS["deepseek2_lite"]["tiny"], layers=3)
BOTTLENECK = replace(DEEPSEEK, q_lora_rank=96)
BF16: tuple[str | None, ...] = (None,) * 6


def hybrid(specs: tuple[str | None, ...], before: str, after: str) -> tuple[str | None, ...]:
    return tuple(
        s and s.replace(before, after) if n.endswith("grad") else s for n, s in zip(OPERAND_FIELDS, specs, strict=True)
    )


# The specs that Transformer Engine's recipes have, by Megatron's name and fp8_format.
SPECS = {
    ("tensorwise", "e4m3"): ("fp8_e4m3",) * 6,
    ("tensorwise", "hybrid"): EXPECTED["te_current"],
    ("blockwise", "e4m3"): EXPECTED["te_block"],
    ("blockwise", "hybrid"): hybrid(EXPECTED["te_block"], "e4m3", "e5m2"),
    ("mxfp8", "e4m3"): EXPECTED["te_mxfp8"],
    ("mxfp8", "hybrid"): hybrid(EXPECTED["te_mxfp8"], "mxfp8", "mxfp8_e5m2"),
    ("nvfp4", "e4m3"): EXPECTED["te_nvfp4"],
    (None, "e4m3"): BF16,
}
# The examples of megatron/core/extensions/TransformerEngineMixedPrecision.md.
CONFIGS: dict[str, Any] = {
    "mxfp8": {"fp8_quantization_recipe": "mxfp8"},
    "bf16": {},
    "nvfp4": {"fp4_quantization_recipe": "nvfp4"},
    "tensorwise": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"},
    "blockwise": {"fp8_quantization_recipe": "blockwise"},
}
ATTENTION = {"*.linear_qkv": "bf16", "*.linear_proj": "bf16"}


def config(training: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": dict(training), **more}


def file_of(patterns: Mapping[str, str], **configs: Any) -> str:
    """A file with these configs by pattern, in their order."""
    matchers = {
        f"m{number}": {"config": name, "type": "glob", "pattern": pattern, "enabled": True}
        for number, (pattern, name) in enumerate(patterns.items())
    }
    known = {name: config(training) for name, training in CONFIGS.items()} | configs
    return yaml.safe_dump({"configs": known, "matchers": matchers}, sort_keys=False)


def megatrons(found: QuantizationConfig | None) -> tuple[str | None, ...]:
    """The six specs of what Megatron read."""
    if found is None:
        return BF16
    training = TEQuantizationParams.parse_from_config(found).training_recipe
    return SPECS[training.fp8_quantization_recipe or training.fp4_quantization_recipe, training.fp8_format]


def ours(recipe: Recipe, site: Site) -> tuple[str | None, ...]:
    formats = recipe.linear_of(site).formats
    assert not formats.of_rounded
    return tuple(spec and str(spec) for spec in (formats[name] for name in OPERAND_FIELDS))


def linears(shape: Shape) -> list[Site]:
    return [site for site in shape.sites() if site.module not in ("core", "router")]


@pytest.mark.slow
def test_paths_are_those_of_megatrons_model(tmp_path):
    with megatron_on_cpu(tmp_path / "store"):
        for shape in (LLAMA, DEEPSEEK, BOTTLENECK):
            named = build(shape).named_modules()
            theirs = {name for name, module in named if isinstance(module, (ColumnParallelLinear, RowParallelLinear))}
            places = [theirs.intersection(site.megatron_paths) for site in linears(shape)]
            assert all(len(place) == 1 for place in places)
            assert set().union(*places) == theirs - {"output_layer"}
    grouped, _ = Site(2, "fc1", 3).megatron_paths
    assert grouped == "decoder.layers.1.mlp.experts.linear_fc1"
    assert all(Site(1, module).megatron_paths == () for module in ("core", "router", "head"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recipe_of_transformer_engine_has_its_specs(name, tmp_path):
    (tmp_path / "mine.yaml").write_text(file_of({"*": name}))
    recipe = parse_recipe(str(tmp_path / "mine.yaml"))
    assert recipe.name == "mine" and recipe.linear.quant_type == ("bf16" if name == "bf16" else "mine")
    found = load_quantization_recipe(str(tmp_path / "mine.yaml"))
    assert ours(recipe, Site(1, "fc1")) == megatrons(get_quant_config_or_none("decoder.layers.0.mlp.linear_fc1", found))


PIECES = (
    "*",
    "?",
    "decoder.",
    "layers.",
    "0",
    "[12]",
    "[!0]",
    ".mlp",
    ".self_attention",
    ".linear_",
    "fc",
    "2",
    "proj",
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join).filter(GLOB.match),
        st.sampled_from(list(CONFIGS)),
        max_size=4,
    )
)
def test_every_layer_gets_what_megatron_gives_it(patterns):
    """The first pattern that matches decides."""
    text = file_of({pattern: name for pattern, name in patterns.items() if pattern != "*"} | {"*": "mxfp8"})
    recipe, parsed = read(text, "mine"), RecipeConfig.from_config_dict(yaml.safe_load(text))
    again = from_toml(to_toml(recipe), "mine")
    for site in {*linears(LLAMA), *linears(BOTTLENECK)}:
        if site.expert is None:
            expected = megatrons(get_quant_config_or_none(site.megatron_paths[0], parsed))
            assert ours(recipe, site) == ours(again, site) == expected


def test_experts_are_matched_as_a_group_and_one_by_one():
    patterns = {"*local_experts.3.*": "bf16", "*mlp.experts.linear_fc2": "nvfp4", "*shared_experts*": "blockwise"}
    patterns["*layers.2.mlp.*"] = "nvfp4"
    recipe = read(file_of({**patterns, "*": "mxfp8"}), "mine")
    for site, name in (
        (Site(2, "fc1", 3), "bf16"),
        (Site(2, "fc2", 2), "te_nvfp4"),
        (Site(2, "fc1", 2), "te_mxfp8"),
        (Site(2, "fc2"), "te_mxfp8"),
        (Site(2, "shared_fc2"), "te_block"),
        (Site(2, "in_proj"), "te_mxfp8"),  # is not known in GPTModel
        (Site(2, "k"), "te_mxfp8"),
        (Site(3, "up", 1), "te_nvfp4"),
        (Site(2, "router"), "bf16"),  # no module of Transformer Engine
    ):
        assert ours(recipe, site) == EXPECTED.get(name, BF16)


def test_layers_without_a_pattern_are_in_bf16_only_if_the_file_says_so():
    """Else Megatron's own options decide."""
    for patterns in (ATTENTION, {"*mixer.out_proj": "mxfp8", **ATTENTION}):
        with pytest.raises(RecipeError, match='no matcher has the pattern "\\*"'):
            read(file_of(patterns), "mine")
    own = config({"fp8_quantization_recipe": "mxfp8", "override_nonquantized_autocast": True})
    recipe = read(file_of({"*.linear_fc2": "own", **ATTENTION}, own=own), "mine")
    assert ours(recipe, Site(1, "fc2")) == EXPECTED["te_mxfp8"] and ours(recipe, Site(1, "fc1")) == BF16


def test_what_is_not_used_is_reported():
    """Of the configs that a matcher names."""
    training = {"fp8_quantization_recipe": "mxfp8", "fp8_param": True, "tp_only_amax_red": False}
    same = config(CONFIGS["mxfp8"], evaluation_recipe=CONFIGS["mxfp8"])
    other = config(training, evaluation_recipe={})
    recipe = read(file_of({"*fc1": "same", "*": "other"}, same=same, other=other, third=other), "mine")
    assert recipe.about.leaves_out == ("fp8_param of other", "evaluation_recipe of other")


def test_a_disabled_matcher_matches_nothing():
    text = file_of({"*fc2": "bf16", "*": "mxfp8"}).replace("enabled: true", "enabled: false", 1)
    assert read(text, "mine").modules == ()
    missing = file_of({"*fc2": "bf16", "*": "mxfp8"}).replace("    enabled: true\n", "", 1)
    assert read(missing, "mine").modules == ()


def part(name: str) -> Part:
    return parse_recipe(name).linear


def test_what_is_written_is_what_megatron_reads(tmp_path):
    path = tmp_path / "mine.yaml"
    recipe = Recipe(
        "mine",
        part("te_mxfp8"),
        modules=(
            ("*.linear_qkv", part("te_block")),
            ("fc2", part("te_nvfp4")),
            ("shared_fc1", Part()),
            ("layer2.fc2", part("te_current")),
            ("layer3.proj", Part()),
        ),
    )
    path.write_text(write(recipe))
    parsed, again = load_quantization_recipe(str(path)), parse_recipe(str(path))
    for site in {*linears(LLAMA), *linears(DEEPSEEK)}:
        specs = ours(recipe, site)
        for place in site.megatron_paths:
            assert megatrons(get_quant_config_or_none(place, parsed)) == specs
        assert ours(again, site) == specs
    for name, entry in yaml.safe_load(path.read_text())["configs"].items():  # nothing depends on Megatron's own options
        assert entry["training_recipe"]["override_nonquantized_autocast"], name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "te_delayed",
            r"linear.forward.input is fp8_e4m3\(history=1024\): in a precision file it can be bf16, fp8_e4m3, ",
        ),
        ("linear_mxfp8(scale=rceil, without=wgrad)", "linear.wgrad.grad_output is bf16: .* can be mxfp8_e5m2"),
        ("te_nvfp4(without=tiles)", r"linear.forward.weight is nvfp4: .* can be nvfp4\(block=16x16\)"),
        ("deepseek_v3", r"linear.forward.input is fp8_e4m3\(scale=deepgemm\)"),
        ("FA_mxfp8", "qk.forward.query is mxfp8: .* linear layers only"),
        ("nvidia_nvfp4", "has no keep: write a .toml file"),
        ("amd_mxfp4_deosc", "has no deoscillation: write a .toml file"),
    ],
)
def test_what_the_file_cannot_say_is_refused_by_the_first_operand(name, message):
    with pytest.raises(RecipeError, match=message):
        write(parse_recipe(name))


def test_so_are_state_and_communication():
    for table in ({"state": StateRounding(exp_avg=Spec.of("bf16"))}, {"communication": Communication(Spec.of("bf16"))}):
        with pytest.raises(RecipeError, match=f"a precision file has no {next(iter(table))}: write a .toml file"):
            write(Recipe("mine", **table))


def test_so_are_the_softmax_modules_and_rounded_operands():
    softmax = Part(formats=replace(Part().formats, softmax=Softmax(64)))
    with pytest.raises(RecipeError, match=r"pv.softmax is flash\(tile=64\): .* linear layers only"):
        write(Recipe("mine", pv=softmax))
    mxfp8 = part("te_mxfp8")
    for module in ("layer2.expert3.fc1", "gate", "in_proj"):
        with pytest.raises(RecipeError, match=f"modules.{module}: a precision file has no pattern"):
            write(Recipe("mine", modules=((module, mxfp8),)))
    rounded = replace(mxfp8, formats=replace(mxfp8.formats, of_rounded=("wgrad_a",)))
    with pytest.raises(RecipeError, match=r"modules\.fc2\.wgrad\.input is the rounded forward operand in mxfp8"):
        write(Recipe("mine", modules=(("fc2", rounded),)))


ALIASES = "[&a0 [x], " + ", ".join(f"&a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(4)) + "]"  # 9 ** 4 values


def changed(**changes: Any) -> str:
    return file_of({"*": "own"}, own=config(CONFIGS["mxfp8"] | changes))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("configs: [", "recipe .*wrong.yaml: is not YAML"),
        ("configs: " + "[" * 100_000, "is not YAML"),
        ("configs: " + "{a: " * 5_000 + "}" * 5_000, "is not YAML"),
        ("configs: !!python/name:os.system", "is not YAML: could not determine a constructor"),
        ("", "the file must be a table, not None"),
        ("config: {}", "unknown key 'config' in the file: expected one of configs, matchers"),
        ("configs: 2024-13-45", "is not YAML: month must be in 1..12"),
        ("configs: " + "[" * 5000, "is not YAML: maximum recursion depth"),
        ("configs: " + "9" * 5000, "is not YAML: Exceeds the limit"),
        (f"configs: {ALIASES}", r"configs must be a table, not \[\["),
        (changed(fp8_quantization_recipe="x").replace(": x", f": {ALIASES}"), r"recipe is \[\[.*: expected tensorwise"),
        (file_of({"*": "bf16"}).replace("pattern: '*'", f"pattern: {ALIASES}"), r"pattern must be a string, not \[\["),
        ("matchers: {m0: {type: glob, pattern: '*'}}", "matchers.m0 names a config, but configs is empty"),
        ("configs: 3", "configs must be a table, not 3"),
        ("{}", "no matcher has the pattern"),
        (changed(fp8_recipe="mxfp8"), "unknown key 'fp8_recipe' in configs.own.training_recipe: expected .*fp8_quant"),
        (changed(fp8_quantization_recipe="delayed"), "recipe is 'delayed': expected tensorwise or blockwise or mxfp8"),
        (changed(fp8_quantization_recipe="custom"), "recipe is 'custom': expected"),
        (changed(fp4_quantization_recipe="nvfp4"), "fp8_quantization_recipe and fp4_quantization_recipe: give one"),
        (changed(fp8_format="e5m2"), "fp8_format is 'e5m2': expected e4m3 or hybrid"),
        (changed(override_quantized_autocast=False), "override_quantized_autocast is False: expected true"),
        (file_of({"*": "own"}, own={"kitchen_config_type": "QLinearParams"}), "unknown key 'kitchen_config_type'"),
        (file_of({"*": "own"}, own=config({}, evaluation_recipe={"x": 1})), "'x' in configs.own.evaluation_recipe"),
        (file_of({"*": "none"}), "matchers.m0.config is 'none': expected mxfp8 or"),
        (file_of({"*": "bf16"}).replace("glob", "regex"), "matchers.m0.type is 'regex': expected glob"),
        (file_of({"*": "bf16"}).replace("pattern: '*'", "pattern: 3"), "matchers.m0.pattern must be a string, not 3"),
        (file_of({"fc2": "bf16"}), "matchers.m0.pattern is 'fc2': expected a glob"),
        (file_of({"*": "bf16"}).replace("enabled: true", "enabled: maybe"), "enabled is 'maybe': expected false or"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_in_a_line(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as refused:
        parse_recipe(str(path))
    assert "\n" not in str(refused.value) and str(path) in str(refused.value) and len(str(refused.value)) < 1000


def test_a_model_is_quantized_as_the_file_says(tmp_path: Path):
    path, model = tmp_path / "mine.yaml", build_ours(2)
    path.write_text(file_of({"*.linear_fc2": "bf16", "*.layers.1.*": "tensorwise", "*": "mxfp8"}))
    with Recorder(tmp_path / "runs", tensors=("input", "grad_output"), scores=()) as recorder:
        with instrument(model, str(path), recorder):
            step(model)
    with Catalog.open(tmp_path / "runs") as catalog:
        rows = catalog.tensors().query("component == 'linear'").fillna({"format": "bf16"})
    recorded = {(row.layer_index, row.module, row.tensor_name): row.format for row in rows.itertuples()}
    expected = {1: ("mxfp8(scale=rceil)",) * 2, 2: ("fp8_e4m3", "fp8_e5m2")}
    for (layer, module, tensor), spec in recorded.items():
        formats = ("bf16", "bf16") if module == "fc2" else expected[layer]
        assert spec == formats[tensor == "grad_output"]
    assert len(recorded) == 16


def test_a_pattern_that_matches_no_layer_is_a_note(tmp_path: Path, command, capsys):
    """As in Megatron: MTP layers, and experts of a dense model. A name that the model lacks may be a typing error."""
    path = tmp_path / "mine.yaml"
    path.write_text(file_of({"*mtp.layers.*": "bf16", "*.mlp.experts.*": "mxfp8", "*": "nvfp4"}))
    with pytest.warns(UserWarning, match="matches no linear layer of this model") as warned:
        with instrument(build_ours(), str(path)):
            pass
    assert [str(each.message).partition(" ")[0] for each in warned] == ["*mtp.layers.*", "*.mlp.experts.*"]
    assert command("run", "--dry-run", "--recipe", str(path), "--size", "tiny") == 0
    assert "\nnote      *mtp.layers.* of recipe mine matches no linear layer of this model\n" in capsys.readouterr().out
    mine = Recipe("mine", modules=(("out_proj", part("te_mxfp8")),))
    with pytest.raises(InstrumentError, match="formats for out_proj, which the model lacks: it has qkv, proj"):
        with instrument(build_ours(), mine):
            pass


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join).filter(GLOB.match),
        st.sampled_from(list(CONFIGS)),
        max_size=4,
    )
)
def test_layers_that_no_pattern_matches_are_those_of_the_recipe_in_front(patterns):
    text = file_of(patterns)
    base = from_toml(to_toml(parse_recipe("te_block")), "te_block")
    recipe, parsed = read(text, "mine", base), RecipeConfig.from_config_dict(yaml.safe_load(text))
    again = from_toml(to_toml(recipe), "mine")
    for site in {*linears(LLAMA), *linears(BOTTLENECK)}:
        if site.expert is None:
            found = get_quant_config_or_none(site.megatron_paths[0], parsed)
            expected = EXPECTED["te_block"] if found is None else megatrons(found)
            assert ours(recipe, site) == ours(again, site) == expected


def test_a_file_of_overrides_on_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "over.yaml"
    path.write_text(file_of({"*.linear_proj": "bf16", "*.linear_fc2": "nvfp4"}))
    with pytest.raises(RecipeError, match=r'no matcher has the pattern "\*".* as in te_mxfp8\+FILE.yaml'):
        parse_recipe(str(path))
    fc1, fc2, proj = (Site(1, module) for module in ("fc1", "fc2", "proj"))
    recipe = parse_recipe(f"te_mxfp8+{path}")
    assert recipe.name == "te_mxfp8+over" and label(f"te_mxfp8+{path}") == "te_mxfp8+over.yaml"
    assert [ours(recipe, site) for site in (fc1, fc2, proj)] == [EXPECTED["te_mxfp8"], EXPECTED["te_nvfp4"], BF16]
    assert recipe.linear.quant_type == "te_mxfp8" and dict(recipe.modules)["*.linear_fc2"].quant_type == recipe.name
    assert parse_recipe(f"linear_mxfp8(scale=rceil)+{path}").linear.quant_type == "mxfp8(scale=rceil)"
    backward = parse_recipe(f"te_mxfp8+{path}(backward=high_precision)")
    assert backward.name == "te_mxfp8+over(backward=high_precision)"
    assert ours(backward, fc2) == (*EXPECTED["te_nvfp4"][:2], *BF16[2:])
    # Where Megatron's own options quantize nothing, so does a config without override_nonquantized_autocast.
    assert [ours(parse_recipe(f"bf16+{path}"), site) for site in (fc1, fc2)] == [BF16, BF16]
    own = config({"fp8_quantization_recipe": "mxfp8", "override_nonquantized_autocast": True})
    path.write_text(file_of({"*.linear_fc2": "own"}, own=own))
    assert [ours(parse_recipe(f"bf16+{path}"), site) for site in (fc1, fc2)] == [BF16, EXPECTED["te_mxfp8"]]
    kept = parse_recipe(f"nvidia_nvfp4+{path}")
    assert kept.keep and f"autocast in {kept.keep}, which the recipe keeps in bf16" in kept.about.leaves_out[-1]


def test_patterns_of_the_recipe_in_front_come_last(tmp_path: Path):
    path, experts = tmp_path / "over.yaml", Site(2, "fc1", 3)
    path.write_text(file_of({"*.experts.*": "bf16"}))
    assert ours(parse_recipe(f"te_nvfp4_fwd_mxfp8_bwd+{path}"), experts) == BF16
    path.write_text(file_of({"*": "bf16"}))
    assert ours(parse_recipe(f"te_nvfp4_fwd_mxfp8_bwd+{path}"), experts) == BF16
    path.write_text(file_of({"*.shared_experts.*": "bf16"}))
    assert parse_recipe(f"te_nvfp4_fwd_mxfp8_bwd+{path}").linear_of(experts).formats["forward_b"] == Spec.of("nvfp4")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("nemotron3_super", "over.yaml: the recipe in front of the file has formats for modules.qkv, which would come"),
        ("te_mxfp9", r"unknown recipe 'te_mxfp9' \(did you mean te_mxfp8"),
        ("nowhere.toml", "nowhere.toml: No such file"),
        ("te_mxfp8(without=x)", "without=x is not an ingredient"),
    ],
)
def test_a_recipe_in_front_that_does_not_fit_is_refused_in_a_line(tmp_path, base, message):
    (tmp_path / "over.yaml").write_text(file_of({"*.linear_proj": "bf16"}))
    with pytest.raises(RecipeError, match=message) as refused:
        parse_recipe(f"{base}+{tmp_path / 'over.yaml'}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("first", "value"), [("{x: 1, y: 2}", "{<<: [*, *, *, *]}"), ("[x, y]", "[*, *, *]")])
def test_aliases_that_would_fill_the_memory_are_refused(first: str, value: str):
    lines = [f"a0: &a0 {first}", *(f"a{i}: &a{i} {value.replace('*', f'*a{i - 1}')}" for i in range(1, 40))]
    for text in ("\n".join(lines), "configs: &a\n  x: *a\nmatchers: {}\n"):
        with pytest.raises(RecipeError, match="more than 100,000 values"):
            read(text, "mine")


def test_an_alias_means_what_it_refers_to():
    text = file_of({"*fc1": "mxfp8", "*": "same"}, same=config(CONFIGS["mxfp8"]))
    document = yaml.safe_load(text)
    document["configs"]["same"] = document["configs"]["mxfp8"]
    assert "*id001" in (written := yaml.safe_dump(document, sort_keys=False))
    assert read(written, "mine") == read(text, "mine")

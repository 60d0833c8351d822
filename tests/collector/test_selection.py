"""Sites and selections of them: names, ranges, patterns, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from binade.collector.models.attention import CoreAttention
from binade.collector.models.model import GPTModel
from binade.collector.models.parallel import ParallelLinear
from binade.collector.models.registry import MODELS
from binade.collector.models.site import Site
from binade.collector.recipes.selection import SelectionError, SiteSelection, Term, by_layer

LLAMA = replace(MODELS["llama32-1b"]["tiny"], layers=12)
DEEPSEEK = MODELS["deepseek2_lite"]["tiny"]
SHAPES = {
    "llama": MODELS["llama32-1b"]["tiny"],
    "deepseek": DEEPSEEK,
    "deepseek of dense layers": replace(DEEPSEEK, layers=1),
    "deepseek with a query latent": replace(DEEPSEEK, layers=3, q_lora_rank=32),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sites_are_those_of_the_model(shape):
    model = GPTModel(shape)
    built = [m.site for m in model.modules() if isinstance(m, (ParallelLinear, CoreAttention))]
    listed = shape.sites()
    assert len(built) == len(listed) == len({site.name for site in listed}) and set(built) == set(listed)


def test_names():
    assert Site(1, "qkv").name == "layer1.qkv"
    assert Site(12, "core").name == "layer12.core"
    assert Site(2, "fc1", 3).name == "layer2.expert3.fc1"
    assert Site(2, "fc1", 0).name == "layer2.expert0.fc1"


def layers(found: frozenset[Site]) -> list[int]:
    return sorted({site.layer_index for site in found})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", list(range(1, 13))),
        ("first", [1]),
        ("last", [12]),
        ("3", [3]),
        ("2-4", [2, 3, 4]),
        ("12-12", [12]),
        ("first, last", [1, 12]),
        ("first 2, last  8", [1, 2, *range(5, 13)]),
        ("last 15%", [11, 12]),
        ("first 25%", [1, 2, 3]),
        ("first 26%", [1, 2, 3, 4]),
        ("last,2-3,,3", [2, 3, 12]),
        ("!2-11", [1, 12]),
        (r"!layer1[0-2]?\., 12", [*range(2, 10), 12]),
        (r"layer1\.", [1]),
        ("layer1", [1, 10, 11, 12]),
        (r"layer1[0-9]{1,2}\.", [10, 11, 12]),
        (r"[13]\.,layer[0-9]{2,}\.proj", [1, 3, 10, 11, 12]),
        ("^layer(2|5)[.]core$", [2, 5]),
    ],
)
def test_which_layers(text, expected):
    assert layers(SiteSelection.parse(text).of(LLAMA.sites())) == expected


@pytest.mark.parametrize(("count", "first"), [(32, 27), (36, 30)])
def test_the_last_layers_of_torchtitan(count, first):
    """nvfp4.md of torchtitan b5bcd76: layers 27 to 31 of Llama 3 8B and 30 to 35 of Qwen3 8B stay in bf16, from 0."""
    model = [Site(number + 1, "fc1") for number in range(count)]
    assert layers(SiteSelection.parse("last 15%").of(model)) == [number + 1 for number in range(first, count)]


def test_a_number_takes_the_whole_layer_a_pattern_what_it_finds():
    model = LLAMA.sites()
    assert len(SiteSelection.parse("3").of(model)) == 5
    assert SiteSelection.parse(r"layer3\.(core|fc)").of(model) == {Site(3, "core"), Site(3, "fc1"), Site(3, "fc2")}


def test_experts_are_found_by_name():
    found = SiteSelection.parse("expert3[.]").of(DEEPSEEK.sites())
    assert found == {Site(2, "fc1", 3), Site(2, "fc2", 3)}


def test_modules_narrow_the_layers():
    model = DEEPSEEK.sites()
    assert len(SiteSelection.parse("", ("fc1",)).of(model)) == 1 + 16
    assert SiteSelection.parse("first", ("fc1", "core")).of(model) == {Site(1, "fc1"), Site(1, "core")}
    assert SiteSelection.parse("last,layer1.q", ("q", "router")).of(model) == {
        Site(1, "q"),
        Site(2, "q"),
        Site(2, "router"),
    }


HAS = "which has layers 1 to 12 and sites such as layer12.qkv, layer12.core, layer12.proj, layer12.fc1, layer12.fc2"


@pytest.mark.parametrize(
    ("text", "modules", "message"),
    [
        ("0", (), f"'0' is not a layer of the model, {HAS}"),
        ("13", (), f"'13' is not a layer of the model, {HAS}"),
        ("2-13", (), f"'2-13' is not a layer of the model, {HAS}"),
        ("0-2", (), f"'0-2' is not a layer of the model, {HAS}"),
        ("last 13", (), f"'last 13' is not a layer of the model, {HAS}"),
        ("first 13", (), f"'first 13' is not a layer of the model, {HAS}"),
        ("last 109%", (), f"'last 109%' is not a layer of the model, {HAS}"),
        ("first,First", (), f"'First' is not a layer of the model, {HAS}"),
        ("9" * 5000, (), "is not a layer of the model"),
        ("router", (), f"'router' is not a layer of the model, {HAS}"),
        ("4-2", (), "4-2 is reversed: write 2-4"),
        ("(", (), r"'(' is neither a layer nor a regular expression: "),
        ("first,*", (), r"'*' is neither a layer nor a regular expression: no argument for repetition"),
        ("!nope", (), f"'!nope' is not a layer of the model, {HAS}"),
        ("!layer", (), f"'!layer' leaves no layer of the model, {HAS}"),
        ("!(", (), "'(' is neither a layer nor a regular expression: "),
        ("(?=layer1)", (), "'(?=layer1)' is neither a layer nor a regular expression: invalid perl operator"),
        ("(.|.|.|.|.|.|.|.)*!", (), f"'(.|.|.|.|.|.|.|.)*!' is not a layer of the model, {HAS}"),
        ("\udcff", (), "is not valid Unicode"),
        (",", (), "',' does not name a layer"),
        (" ", (), "' ' does not name a layer"),
        ("", ("fc3",), "unknown module 'fc3': expected one of qkv, core, proj, fc1, fc2"),
        ("core", ("qkv", "fc1"), "core has no qkv, fc1: the model has layers 1 to 12 and sites such as"),
    ],
)
def test_what_the_model_does_not_have_is_refused(text, modules, message):
    with pytest.raises(SelectionError) as refused:
        SiteSelection.parse(text, modules).of(LLAMA.sites())
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("shape", "text", "lines"),
    [
        (LLAMA, "first,last", ["layers 1, 12: bf16", "layers 2-11: as below"]),
        (LLAMA, "layer", ["layers 1-12: bf16"]),
        (LLAMA, r"core,^layer2\.", ["layers 1, 3-12: core bf16, the rest as below", "layer 2: bf16"]),
        (
            DEEPSEEK,
            "expert[0-2][.],expert9.fc2,router",
            ["layer 1: as below", "layer 2: router, fc1 of experts 0-2, fc2 of experts 0-2, 9 bf16, the rest as below"],
        ),
    ],
)
def test_by_layer_says_it_in_few_lines(shape, text, lines):
    model = shape.sites()
    assert by_layer(model, SiteSelection.parse(text).of(model), "bf16", "as below") == lines


def test_a_pattern_that_python_warns_of_is_taken_in_silence(recwarn):
    assert Term.parse("[[]qkv").pattern.search("[qkv") and not recwarn.list

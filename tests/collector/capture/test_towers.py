"""Models of several lists of blocks, and routers, by what transformers and plain torch build."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    HunYuanMoEV1Config,
    JetMoeConfig,
    Qwen2MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from binade.collector import Recorder, coverage, instrument
from binade.collector.capture.survey import survey
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.selection import SiteSelection
from binade.data.index.catalog import Catalog


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


class Vision(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.merger = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


class Model(nn.Module):
    """Images and text, as in Qwen2.5-VL: more blocks for images than for text."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Vision(5)
        self.language_model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(3))})
        self.projections = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


def sites(model: nn.Module) -> dict[str, str]:
    return {layer.name: layer.site.name for layer in survey(model).layers}


def test_a_layer_is_an_index_of_a_list_of_blocks():
    found = sites(Model())
    assert found["visual.blocks.4.up"] == "layer5.vision.up"
    assert found["language_model.layers.2.up"] == "layer3.up"
    assert found["visual.merger.2"] == "layer0.merger.2"
    assert found["projections.1"] == "layer0.projections.1"
    assert len({*found.values()}) == len(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("last", {"visual.blocks.4", "language_model.layers.2"}),
        ("first", {"visual.blocks.0", "language_model.layers.0"}),
        ("last 2", {f"visual.blocks.{i}" for i in (3, 4)} | {f"language_model.layers.{i}" for i in (1, 2)}),
        ("5", {"visual.blocks.4"}),
    ],
)
def test_first_and_last_apply_to_each_tower(text: str, expected: set[str]):
    layers = survey(Model()).layers
    chosen = SiteSelection.parse(text).of([layer.site for layer in layers])
    assert {layer.name.rpartition(".")[0] for layer in layers if layer.site in chosen} == expected
    kept = [row for row in coverage(Model(), "nvidia_nvfp4", skip=text) if row.reason == "skip"]
    assert sum(row.count for row in kept) <= 2 * len(expected)


def test_one_list_of_blocks_has_plain_names_whatever_it_is_called():
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"layer": nn.ModuleList([Block(), Block()])})})
    assert sites(model)["encoder.layer.1.up"] == "layer2.up"
    assert {layer.site.tower for layer in survey(model).layers} == {""}


def test_an_encoder_and_a_decoder():
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_decoder_layers=2, num_heads=2)
    )
    found = sites(model)
    assert found["encoder.block.2.layer.0.SelfAttention.q"] == "layer3.encoder.q"
    assert found["decoder.block.1.layer.2.DenseReluDense.wi"] == "layer2.fc1"
    last = SiteSelection.parse("last").of([layer.site for layer in survey(model).layers])
    assert {(site.tower, site.layer_index) for site in last} == {("encoder", 3), ("decoder", 2)}


SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (
            HunYuanMoEV1Config(
                **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=16, num_experts=4, moe_topk=2
            ),
            "model.layers.*.mlp.gate.wg",
        ),
        (
            JetMoeConfig(**SIZES, num_key_value_heads=1, kv_channels=8, intermediate_size=16, num_local_experts=4),
            "model.layers.*.self_attention.experts.router.layer",
        ),
    ],
    ids=["hunyuan", "jetmoe"],
)
def test_what_chooses_among_experts_is_a_router(config, path: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rows = {row.paths: row for row in coverage(model, "linear_mxfp8")}
    assert rows[path].recorded.endswith("router") and rows[path].format == "bf16"
    assert [row.format for row in rows.values() if "router" in row.recorded] == ["bf16"] * len(
        [row for row in rows.values() if "router" in row.recorded]
    )


def test_a_layer_with_as_many_outputs_as_layers_is_no_router():
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()]), "score": nn.Linear(8, 2)})
    assert sites(model)["score"] == "layer0.score"


class Gated(nn.Module):
    """A block that weighs its output with a gate of one value; LoRA's layers may have one output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.coefficient, self.lora_A = nn.Linear(32, 32), nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.coefficient(x).sigmoid() * self.up(x) + self.lora_A(x)


def test_a_gate_with_one_output_belongs_to_the_part_of_the_router(tmp_path):
    config = Qwen2MoeConfig(
        **SIZES, intermediate_size=32, moe_intermediate_size=16, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    rows = {row.paths: (row.recorded, row.format) for row in coverage(model, "linear_mxfp8")}
    assert rows["model.layers.*.mlp.shared_expert_gate"] == ("layer*.scalar_gate", "bf16")
    blocks = nn.ModuleDict({"blocks": nn.ModuleList([Gated(), Gated()])})
    assert sites(blocks)["blocks.1.coefficient"] == "layer2.scalar_gate"
    assert "scalar_gate" not in sites(blocks)["blocks.1.lora_A"]

    recipe = parse_recipe("bf16", router="mxfp8")
    with Recorder(tmp_path, iterations=1, scores=()) as recorder, instrument(model, recipe, recorder):
        model(torch.arange(16).reshape(2, 8)).logits.sum().backward()
        recorder.step()
    with Catalog.open(tmp_path) as catalog:
        found = catalog.tensors()
        parts = catalog.parts()
    assert set(found[found["quant_type"] == "mxfp8"]["module"]) == {"router", "scalar_gate"}
    assert {part: set(rows["format"]) for part, rows in parts.groupby("part")}["router"] == {"mxfp8"}


def test_two_lists_of_one_word_are_told_apart_by_their_second(tmp_path):
    """As in SeamlessM4T and Florence-2, whose text models have an encoder and a decoder of other depths."""
    blocks = {"text_encoder": 3, "text_decoder": 2, "vision": 4}
    model = nn.ModuleDict(
        {name: nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(n))}) for name, n in blocks.items()}
    )
    found = sites(model)
    assert found["text_encoder.layers.2.up"] == "layer3.encoder.up"
    assert found["text_decoder.layers.1.up"] == "layer2.up"
    assert found["vision.layers.3.up"] == "layer4.vision.up"
    kept = {row.paths for row in coverage(model, "mxfp8", skip="last") if row.reason}
    chosen = SiteSelection.parse("last").of([layer.site for layer in survey(model).layers])
    assert kept and {site.name for site in chosen if site.name.endswith("up")} == {
        "layer3.encoder.up", "layer2.up", "layer4.vision.up",
    }  # fmt: skip


class DeepseekMultiTokenPredictorLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eh_proj, self.block = nn.Linear(16, 8), Block()


def blocks(number: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(number))


def beside(**others: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"layers": blocks(4), **others})


MTP = DeepseekMultiTokenPredictorLayer
BESIDE = {
    "mtp of one": (beside(mtp=nn.ModuleList([MTP()])), "layers", "mtp"),
    "mtp of two": (beside(mtp=nn.ModuleList([MTP(), MTP()])), "layers", "mtp"),
    "mtp that is no list": (beside(mtp=MTP()), "layers", "mtp"),
    "a class": (beside(extra=nn.ModuleList([MTP()])), "layers", "mtp"),
    "in the list": (nn.ModuleDict({"layers": nn.ModuleList([*blocks(4), MTP()])}), "layers", "mtp"),
    "megatron": (
        nn.ModuleDict({word: nn.ModuleDict({"layers": blocks(n)}) for word, n in (("decoder", 4), ("mtp", 1))}),
        "decoder.layers",
        "mtp",
    ),
    "medusa": (beside(medusa_heads=blocks(5)), "layers", "draft"),
    "eagle": (beside(eagle=nn.ModuleDict({"layers": blocks(1)})), "layers", "draft"),
    "adapters": (beside(adapters=blocks(4)), "layers", "adapter"),
    "helpers": (beside(helper_blocks=blocks(2)), "layers", "helper_blocks"),
    "helpers first": (nn.ModuleDict({"aux": blocks(2), "layers": blocks(4)}), "layers", "aux"),
    "helpers of a decoder": (
        nn.ModuleDict({"aux": blocks(2), "decoder": nn.ModuleDict({"layers": blocks(4)})}), "decoder.layers", "aux",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_the_decoder_keeps_its_names_whatever_lies_beside_it(case: str):
    model, path, tower = BESIDE[case]
    found = {layer.name: layer.site for layer in survey(model).layers}
    for number in range(4):
        assert found[f"{path}.{number}.up"].name == f"layer{number + 1}.up"
    others = [at for name, at in found.items() if not name.startswith(tuple(f"{path}.{n}." for n in range(4)))]
    assert others and all(at.module.startswith(f"{tower}.") and at.tower == tower for at in others)
    assert len({at.name for at in found.values()}) == len(found)
    last = SiteSelection.parse("last").of([*found.values()])
    assert {at.layer_index for at in last if not at.tower} <= {4} and any(at.name == "layer4.up" for at in last)


def test_a_recipe_that_keeps_multi_token_prediction_in_bf16():
    model = nn.ModuleDict({"layers": blocks(20), "mtp": nn.ModuleList([MTP()])})
    recipe = "nemotron3_super"
    kept = {row.paths: row.format for row in coverage(model, recipe) if row.count and "Linear" in row.kind}
    assert {path: fmt == "bf16" for path, fmt in kept.items() if "mtp" in path} == dict.fromkeys(
        ("mtp.*.eh_proj", "mtp.*.block.up", "mtp.*.block.down"), True
    )
    chosen = SiteSelection.parse("mtp").of(
        [layer.site for layer in survey(nn.ModuleDict({"layers": blocks(2)})).layers]
    )
    assert chosen == frozenset()

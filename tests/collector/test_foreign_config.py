"""Configurations of other tools given as recipes: named, with a recipe that exists. Their keys are those of the tools'
documentation and examples; accelerate and transformers write their own. TORCHAO_ROW is what torchao 0.14.1 writes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from transformers import FineGrainedFP8Config, LlamaConfig

from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe, RecipeError

TITAN = '[job]\ndump_folder = "./outputs"\n[training]\nseq_len = 8192\n[model]\nname = "llama3"\n'
INSPECT = "s:\n  enabled: True\n  layers: {layer_types: [fc1]}\n  transformer_engine:\n    "
LLMC = "quant_stage:\n  quant_modifiers:\n    QuantizationModifier:\n      ignore: ['lm_head']\n      "
TORCHAO: dict[str, Any] = {"_version": 2, "_data": {}}
TORCHAO_ROW = (
    '{"_type": "Float8DynamicActivationFloat8WeightConfig", "_version": 2, "_data": {"activation_dtype": {"_type": '
    '"torch.dtype", "_data": "float8_e4m3fn"}, "granularity": [{"_type": "PerRow", "_version": 1, "_data": {}}, '
    '{"_type": "PerRow", "_version": 1, "_data": {}}], "activation_value_lb": null, "set_inductor_config": true}}'
)
FP8 = "linear.forward.weight=fp8_e4m3,linear.forward.input=fp8_e4m3"
ROW = "'linear.forward.weight=fp8_e4m3(block=row),linear.forward.input=fp8_e4m3(block=row)'"
NVFP4 = "linear.forward.weight=nvfp4,linear.forward.input=nvfp4"
# file, its content, the tool, the nearest recipe
FILES: list[tuple[str, str | dict[str, Any], str, str]] = [
    ("bf16.toml", TITAN, "torchtitan", "bf16"),
    (
        "mx.toml",
        TITAN + 'converters = ["quantize.linear.mx"]\n[quantize.linear.mx]\nrecipe_name = "mxfp8_cublas"\n',
        "torchtitan",
        "torchao_mxfp8",
    ),
    (
        "row.toml",
        TITAN + 'converters = ["float8"]\n[float8]\nrecipe_name = "rowwise_with_gw_hp"\n',
        "torchtitan",
        "torchao_rowwise_gw_hp",
    ),
    ("old.toml", TITAN + "[float8]\nenable_float8_linear = true\n", "torchtitan", "torchao_tensorwise"),
    ("off.toml", TITAN + "converters = []\n[quantize.linear.float8]\nemulate = true\n", "torchtitan", "bf16"),
    (
        "d.yaml",
        INSPECT + "DisableFP8GEMM: {enabled: True, gemms: [dgrad, wgrad]}",
        "Transformer Engine's debug features",
        "te_delayed --dgrad-quant bf16 --wgrad-quant bf16",
    ),
    (
        "d.yaml",
        INSPECT + "PerTensorScaling: {enabled: True, gemms: [wgrad]}",
        "Transformer Engine's debug features",
        "te_current",
    ),
    ("d.yaml", INSPECT + "DisableFP8Layer: {enabled: True}", "Transformer Engine's debug features", "bf16"),
    (
        "d.yaml",
        INSPECT + "LogNvfp4TensorStats: {enabled: True, stats: ['underflows%']}",
        "Transformer Engine's debug features",
        "te_nvfp4",
    ),
    (
        "d.yaml",
        INSPECT + "LogFp8TensorStats: {enabled: True, stats: ['mxfp8_mse']}",
        "Transformer Engine's debug features",
        "te_mxfp8",
    ),
    ("r.yaml", LLMC + "scheme: NVFP4\n      targets: Linear", "llm-compressor", f"bf16 --operand-quant {NVFP4}"),
    ("r.yml", LLMC + "scheme: W4A16", "llm-compressor", "bf16 --operand-quant linear.forward.weight=mxint4"),
    ("r.yaml", LLMC + "scheme: FP8_DYNAMIC", "llm-compressor", f"bf16 --operand-quant {ROW}"),
    (
        "r.yaml",
        LLMC + "config_groups: {g: {targets: [Linear], weights: {num_bits: 8, type: float, strategy: tensor}, "
        "input_activations: {num_bits: 8, type: float, strategy: tensor}}}",
        "llm-compressor",
        f"bf16 --operand-quant {FP8}",
    ),
    (
        "config.json",
        LlamaConfig().to_dict() | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "a model (config.json)",
        f"bf16 --operand-quant {NVFP4}",
    ),
    ("config.json", LlamaConfig().to_dict(), "a model (config.json)", "bf16"),
    (
        "config.json",
        LlamaConfig().to_dict() | {"quantization_config": FineGrainedFP8Config().to_dict()},
        "a model (config.json)",
        "bf16 --operand-quant "
        "'linear.forward.weight=fp8_e4m3(block=128x128),linear.forward.input=fp8_e4m3(block=1x128)'",
    ),
    (
        "ao.json",
        TORCHAO | {"_type": "Float8DynamicActivationFloat8WeightConfig"},
        "torchao",
        f"bf16 --operand-quant {FP8}",
    ),
    ("ao.json", TORCHAO_ROW, "torchao", f"bf16 --operand-quant {ROW}"),
    ("ao.json", TORCHAO | {"_type": "MXLinearConfig"}, "torchao", "torchao_mxfp8"),
    (
        "ao.json",
        TORCHAO | {"_type": "Int4WeightOnlyConfig"},
        "torchao",
        "bf16 --operand-quant linear.forward.weight=mxint4",
    ),
    (
        "hf_quant_config.json",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        "ModelOpt",
        f"bf16 --operand-quant {FP8}",
    ),
    (
        "te.yaml",
        {"distributed_type": "NO", "mixed_precision": "fp8", "fp8_config": {"backend": "TE"}},
        "accelerate",
        "te_delayed",
    ),
    (
        "ao.yaml",
        {"distributed_type": "NO", "mixed_precision": "fp8", "fp8_config": {"backend": "AO"}},
        "accelerate",
        "torchao_tensorwise",
    ),
    (
        "ds_config.json",
        {"train_batch_size": 16, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
        "DeepSpeed",
        "bf16",
    ),
    (
        "ds_config.json",
        {"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": True}},
        "DeepSpeed",
        "linear_fp16",
    ),
    (
        "nemo.yaml",
        {"trainer": {"precision": "bf16"}, "model": {"transformer_engine": True, "fp8": True, "fp8_hybrid": True}},
        "NeMo or Megatron",
        "te_delayed",
    ),
    (
        "nemo.yaml",
        {"trainer": {"precision": "bf16"}, "model": {"transformer_engine": True, "fp8": False}},
        "NeMo or Megatron",
        "bf16",
    ),
    (
        "bridge.yaml",
        {"mixed_precision": "bf16_with_mxfp8_mixed", "model": {"num_layers": 2}},
        "NeMo or Megatron",
        "te_mxfp8",
    ),
    ("bridge.yaml", {"mixed_precision": "bf16_with_fp8_subchannel_scaling_mixed"}, "NeMo or Megatron", "te_block"),
    ("mcore.yml", {"language_model": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}}, "NeMo or Megatron", "te_current"),
    (
        "mcore.yaml",
        {"fp4": "e2m1", "fp4_recipe": "nvfp4", "tensor_model_parallel_size": 2},
        "NeMo or Megatron",
        "te_nvfp4",
    ),
    (
        "tune.yaml",
        {"model": {"_component_": "torchtune.models.llama3.llama3_8b"}, "dtype": "bf16"},
        "a training (torchtune",
        "bf16",
    ),
    ("olmo.yaml", {"run_name": "x", "precision": "amp_bf16"}, "a training (torchtune", "bf16"),
    ("composer.yaml", {"max_duration": "1ep", "precision": "amp_fp8"}, "a training (torchtune", "te_delayed"),
    ("verl.yaml", {"actor_rollout_ref": {"model": {"path": "Qwen"}}}, "a training (torchtune", "bf16"),
    ("axolotl.yml", {"base_model": "NousResearch/Llama-3.2-1B", "bf16": "auto"}, "a training (torchtune", "bf16"),
]


def refusal(path: Path, content: str | dict[str, Any]) -> str:
    text = content if isinstance(content, str) else (json.dumps if path.suffix == ".json" else yaml.safe_dump)(content)
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        parse_recipe(str(path))
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"recipe {path}: ")
    return message


def as_recipe(command: str) -> Recipe:
    name, *options = shlex.split(command)
    given = dict(zip(options[::2], options[1::2], strict=True))
    operands = [text for text in given.pop("--operand-quant", "").split(",") if text]
    gemms: dict[str, Any] = {option[2:].removesuffix("-quant"): value for option, value in given.items()}
    return parse_recipe(name, operands=operands, **gemms)


@pytest.mark.parametrize(("name", "content", "tool", "nearest"), FILES)
def test_it_is_named_with_the_nearest_recipe(
    name: str, content: str | dict[str, Any], tool: str, nearest: str, tmp_path: Path
):
    message = refusal(tmp_path / name, content)
    assert f"is a configuration of {tool}" in message and message.endswith(f"--recipe {nearest}")
    as_recipe(nearest)  # exists


def test_the_file_that_accelerate_writes(tmp_path: Path):
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="NO", mixed_precision="fp8", use_cpu=False, debug=False,
        fp8_config={"backend": "TE", "use_mxfp8_block_scaling": True},
    )  # fmt: skip
    for write, name in ((config.to_yaml_file, "default_config.yaml"), (config.to_json_file, "default_config.json")):
        write(tmp_path / name)
        assert refusal(tmp_path / name, (tmp_path / name).read_text()).endswith("--recipe te_mxfp8")


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".cfg", ".json"])
def test_a_precision_file_of_megatron_may_have_other_endings(suffix: str, tmp_path: Path):
    content = {
        "configs": {"a": {"transformer_engine_config_type": "TEQuantizationParams",
                          "training_recipe": {"fp8_quantization_recipe": "mxfp8"}}},
        "matchers": {"all": {"config": "a", "type": "glob", "pattern": "*", "enabled": True}},
    }  # fmt: skip
    path = tmp_path / f"mine{suffix}"
    path.write_text(json.dumps(content, indent="\t") if suffix == ".json" else yaml.safe_dump(content))
    assert parse_recipe(str(path)).linear.formats == parse_recipe("te_mxfp8").linear.formats


@pytest.mark.parametrize(
    "content",
    ["[a]\nb = 1", "nvfp4 = true", "a: 1", "- 1",
     "enabled: {layers: 3}", "{model_type: 3, _type: 4, _data: 1}",
                "quant_type: 1", "fp8: [1", "{1: {2: 3}}", "a: &a [*a]"],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".json"])
def test_anything_else_is_refused_as_before(content: str, suffix: str, tmp_path: Path):
    assert not re.search("is a configuration of", refusal(tmp_path / f"x{suffix}", content))

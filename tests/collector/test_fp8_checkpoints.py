"""Checkpoints whose weights are in FP8 with a scale for each block, as of DeepSeek-V3, written with ml_dtypes."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from binade.collector.errors import ConfigError
from binade.collector.pretrained.checkpoint import open_checkpoint
from binade.collector.pretrained.directory import describe_weights, read_shape

ROWS, COLUMNS = 16, 32  # of a block; the weights' sizes are no multiples
SIZES = {"vocab_size": 40, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=1)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=24)),
}


def coded(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(FP8 values, the scale of each block, what they stand for)"""
    codes, values = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros_like(weight)
    scales = np.zeros((-(-weight.shape[0] // ROWS), -(-weight.shape[1] // COLUMNS)), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = slice(i * ROWS, (i + 1) * ROWS), slice(j * COLUMNS, (j + 1) * COLUMNS)
        scales[i, j] = np.abs(weight[at]).max() / np.float32(448)
        codes[at] = (weight[at] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
        values[at] = codes[at].astype(np.float32) * scales[i, j]
    return codes, scales, values


def save(directory: Path, kind: str) -> PreTrainedModel:
    """A checkpoint in FP8, and the model that it stands for."""
    model_class, config = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            codes, scales, values = coded(module.weight.detach().numpy())
            tensors[f"{name}.weight"] = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale_inv"] = torch.from_numpy(scales)
            module.weight.data = torch.from_numpy(values)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"] = {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [ROWS, COLUMNS]},
    }
    (directory / "config.json").write_text(json.dumps(settings))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_what_the_codes_stand_for(tmp_path: Path, kind: str):
    expected = save(tmp_path, kind)
    checkpoint = open_checkpoint(tmp_path, read_shape(tmp_path))
    model, tokens = checkpoint.build(), torch.arange(12)[None]
    found = checkpoint.loaded.model if checkpoint.loaded else None
    if found is not None:
        for name, weight in found.state_dict().items():
            assert torch.equal(weight, expected.state_dict()[name]), name
    else:
        for name, weight in expected.state_dict().items():
            if "layers" in name:
                assert torch.equal(checkpoint.tensors.read(name), weight), name
        with torch.no_grad():
            logits = model(tokens).float().view(12, -1)[:, : SIZES["vocab_size"]]
            assert (logits - expected(tokens).logits[0]).abs().max() < 0.05  # ours computes in bfloat16
    described = describe_weights(tmp_path)
    assert "dequantized from fp8: their values lie on a quantization grid" in described
    assert checkpoint.identity()["quantized"] == ["FP8"]


@pytest.mark.parametrize("case", ["lacking", "wrong"])
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, case: str):
    save(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    scale = tensors.pop(name)
    if case == "wrong":
        tensors[name] = scale[:2].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name} (are missing|is 2 x 2: expected 4 x 2)"):
        open_checkpoint(tmp_path, read_shape(tmp_path)).build()


def test_other_quantizations_are_refused(tmp_path: Path):
    save(tmp_path, "llama")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "hqq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"is quantized by .hqq. .*only fp8, mxfp4, compressed-tensors"):
        read_shape(tmp_path)

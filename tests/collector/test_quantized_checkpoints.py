"""`--model` with quantized checkpoints: those of tests/data/checkpoints, whose weights are checked there, and such as
transformers itself reads: gpt-oss in MXFP4, and experts in MXFP4 and MXFP8 as DeepSeek-V4 stores them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaForCausalLM, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import binade
from binade.collector.pretrained.checkpoint import open_checkpoint
from binade.collector.pretrained.directory import read_shape
from binade.data.exchange.quantized.files import SafetensorsCheckpoint
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.collector.test_directory import collected
from tests.data.test_quantized import CHECKPOINTS, NAMES, by_hand, e2m1


@pytest.mark.parametrize("name", NAMES)
def test_the_model_has_the_logits_of_transformers_with_the_same_weights(name):
    """The weights of a Llama go into our layers, those of the checkpoint are checked in tests/data."""
    checkpoint, tokens = open_checkpoint(CHECKPOINTS / name, read_shape(CHECKPOINTS / name)), torch.arange(12)[None]
    theirs = LlamaForCausalLM.from_pretrained(CHECKPOINTS / "original", dtype=torch.float32)
    stored = SafetensorsCheckpoint(CHECKPOINTS / name)
    theirs.load_state_dict({key: stored.read(key) for key in theirs.state_dict()})
    with torch.no_grad():
        ours = checkpoint.build()(tokens).float().view(12, -1)[:, :32]
        assert (ours - theirs(tokens).logits[0]).abs().max() < 0.05 * theirs(tokens).logits.abs().max()  # bfloat16
    bits = {"compressed_tensors_int3": 3, "compressed_tensors_int4": 4, "gptq": 4, "gptq_3bit": 3}.get(name, "")
    words = {weight.layout.name.format(bits=bits) for weight in stored.quantized.values()}
    assert checkpoint.identity()["quantized"] == sorted(words)


def test_a_run_trains_from_it_and_says_so(tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(CHECKPOINTS / "compressed_tensors_nvfp4", model)
    tensors, settings = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # the vocabulary of the byte tokenizer
        tensors[name] = torch.randn(320, 32).to(torch.bfloat16)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps(settings | {"vocab_size": 320}))
    run = collected(tmp_path / "runs", "--model", str(model), "--tokenizer", "byte")
    assert run["weights"]["quantized"] == ["NVFP4"]
    assert "dequantized from compressed-tensors: their values lie on a quantization grid" in capsys.readouterr().out
    with Catalog.open(tmp_path / "runs") as catalog:
        rows = catalog.tensors(Filter())
        row = rows[(rows["tensor_name"] == "weight") & (rows["module"] == "fc2") & (rows["operation"] == "forward")]
        values = by_hand("compressed_tensors_nvfp4")
        assert row.iloc[0]["absmax"] == pytest.approx(np.abs(values).max(), rel=2**-8)  # recorded in bfloat16
        assert row.iloc[0]["rms"] == pytest.approx(np.sqrt((values**2).mean()), rel=2**-8)


def mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., groups, 16], the lower half first, and E8M0 scales [..., groups] of a weight [..., out, in]."""
    blocks = weight.reshape(*weight.shape[:-1], -1, 32)
    exponent = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
    codes = (blocks / 2.0 ** exponent[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).astype(np.uint8)


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = GptOssConfig(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=16,
                          num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
                          layer_types=["full_attention"])  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(tmp_path / "gpt_oss")
    tensors = load_file(tmp_path / "gpt_oss" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        codes, scales = mxfp4(tensors.pop(name).mT.contiguous().numpy())
        tensors |= {f"{name}_blocks": torch.from_numpy(codes), f"{name}_scales": torch.from_numpy(scales)}
    save_file(tensors, tmp_path / "gpt_oss" / "model.safetensors", {"format": "pt"})
    file = tmp_path / "gpt_oss" / "config.json"
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return file.parent


def test_gpt_oss_has_the_weights_that_transformers_dequantizes(gpt_oss):
    settings = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    theirs = AutoModelForCausalLM.from_pretrained(gpt_oss, **settings).state_dict()
    checkpoint = open_checkpoint(gpt_oss, read_shape(gpt_oss))
    assert checkpoint.loaded is not None
    for name, weight in checkpoint.loaded.model.state_dict().items():
        assert torch.equal(weight.to(torch.bfloat16), theirs[name]), name
    assert checkpoint.identity()["quantized"] == ["MXFP4"]


def test_gpt_oss_is_audited_along_the_axis_of_its_blocks(gpt_oss, tmp_path):
    tensors = load_file(gpt_oss / "model.safetensors")
    plain = tmp_path / "plain"
    torch.manual_seed(0)
    settings = json.loads((gpt_oss / "config.json").read_text())
    GptOssForCausalLM(GptOssConfig.from_dict({**settings, "quantization_config": None})).save_pretrained(plain)
    audit = binade.audit(gpt_oss, plain, tmp_path / "runs")
    assert audit.findings == ()
    assert "bit-equal to mxfp4: 2 weights" in str(audit)  # floor, as `mxfp4` above scales
    assert "left out by modules_to_not_convert 'model.layers.*.mlp.router'" in str(audit)
    name = "model.layers.0.mlp.experts.down_proj"
    values = e2m1(tensors[f"{name}_blocks"].flatten(-2).flatten(0, 1).numpy())
    scales = 2.0 ** (tensors[f"{name}_scales"].flatten(0, 1).numpy() - 127.0)
    expected = (values * np.repeat(scales, 32, -1)).reshape(2, 32, 64).swapaxes(1, 2)
    assert np.array_equal(SafetensorsCheckpoint(gpt_oss).read(name).numpy(), expected)


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8", "e8m0"])
def test_block_scales_of_other_kinds_are_read_as_transformers_reads_them(kind, tmp_path):
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    if kind == "mxfp4":
        codes, scales = mxfp4(weight)
        stored = torch.from_numpy(codes).flatten(-2).view(torch.int8)
        scale = torch.from_numpy(scales).view(torch.float8_e8m0fnu)
    else:
        stored = torch.from_numpy(weight).to(torch.float8_e4m3fn)
        scale = torch.arange(120, 120 + 128, dtype=torch.uint8).reshape(64, 2)
        if kind == "e8m0":
            scale = torch.tensor([[127, 126], [130, 120]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    name, blocks = "model.layers.0.mlp.up_proj.weight", [32, 32] if kind == "e8m0" else [1, 32]
    save_file({name: stored, f"{name}_scale_inv": scale}, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": blocks}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    expected = Fp8Dequantize(None)._dequantize_one(stored, scale, torch.float32)
    assert torch.equal(SafetensorsCheckpoint(tmp_path).read(name), expected)

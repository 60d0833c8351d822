"""Configurations that leave settings out: every model by path has what transformers takes then, to the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV2Config, GPT2Config, LlamaConfig, MistralConfig

from binade.collector.errors import ConfigError
from binade.collector.models.deepseek import DeepseekShape
from binade.collector.models.gpt2 import GPT2Shape
from binade.collector.models.llama import LlamaShape
from binade.collector.models.model import GPTModel
from binade.collector.pretrained.checkpoint import open_checkpoint
from binade.collector.pretrained.directory import SAME_LAYERS, read_shape
from binade.collector.pretrained.transformers_model import TransformersShape

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "deepseek_v2": DeepseekV2Config, "gpt2": GPT2Config}
FAMILIES = {"llama": LlamaShape, "mistral": LlamaShape, "deepseek_v2": DeepseekShape, "gpt2": GPT2Shape}
ROTARY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3, "rope_theta": 500.0,
    "tie_word_embeddings": True, "head_dim": 32, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "attention_dropout": 0.0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 32,
    "q_lora_rank": 24, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5, "norm_topk_prob": False,
    "topk_method": "greedy", "head_dim": 8,
}  # fmt: skip
FULL: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "mistral": ROTARY | {"sliding_window": None},
    "deepseek_v2": ROTARY | LATENT,
    "gpt2": {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "vocab_size": 96, "n_positions": 64,
        "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False, "activation_function": "gelu_new",
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
    },
}  # fmt: skip
REQUIRED = {"num_experts_per_tok"}  # transformers has no default that works
YARN = {"rope_type": "yarn", "factor": 4.0}


def directory(path: Path, kind: str, settings: dict[str, Any]) -> Path:
    config = {"model_type": kind, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"} | settings
    (path / "config.json").write_text(json.dumps(config))
    return path


def without(kind: str, *left_out: str) -> dict[str, Any]:
    return {name: value for name, value in FULL[kind].items() if name not in left_out}


@pytest.mark.parametrize("kind", CONFIGS)
def test_defaults_are_those_of_transformers(kind: str):
    """Those of the installed version; a setting that a shape reads and that has no default must be given."""
    family, (_, others) = FAMILIES[kind], SAME_LAYERS.get(kind, ("", {}))
    theirs = {name: field.default for name, field in CONFIGS[kind].__dataclass_fields__.items()}
    theirs["rope_theta"] = CONFIGS[kind].default_theta
    ours = {**family.defaults, **others}
    assert ours == {name: theirs[name] for name in ours}
    assert {*theirs} >= {*family.aliases.values()} and CONFIGS[kind].attribute_map == dict(family.aliases)
    for name, value in ours.items() | {(n, v) for n, v in family.fixed.items() if n not in ours}:
        assert theirs.get(name, value) in (value, None)


@pytest.mark.parametrize(("kind", "left_out"), [(kind, name) for kind, full in FULL.items() for name in full])
def test_a_setting_that_is_left_out(kind: str, left_out: str, tmp_path: Path):
    path = directory(tmp_path, kind, without(kind, left_out))
    if left_out in REQUIRED:
        with pytest.raises(ConfigError, match=f"lacks '{left_out}'"):
            read_shape(path)
        return
    theirs, shape = AutoConfig.from_pretrained(path), read_shape(path)
    if left_out == "sliding_window":
        assert isinstance(shape, TransformersShape)  # 4096 tokens, which our layers have no switch for
        return
    assert (shape.layers, shape.hidden, shape.heads) == (
        theirs.num_hidden_layers, theirs.hidden_size, theirs.num_attention_heads,
    )  # fmt: skip
    assert (shape.vocab, shape.max_sequence, shape.tied_embedding) == (
        theirs.vocab_size, theirs.max_position_embeddings, theirs.tie_word_embeddings,
    )  # fmt: skip
    if isinstance(shape, GPT2Shape):
        assert (shape.ffn, shape.norm_eps) == (theirs.n_inner or 4 * theirs.n_embd, theirs.layer_norm_epsilon)
        return
    assert (shape.ffn, shape.norm_eps) == (theirs.intermediate_size, theirs.rms_norm_eps)
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"]  # type: ignore[attr-defined]
    if isinstance(shape, LlamaShape):
        assert (shape.kv_heads, shape.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    elif isinstance(shape, DeepseekShape):
        names = {
            "qk_nope": "qk_nope_head_dim", "qk_rope": "qk_rope_head_dim", "v_head": "v_head_dim",
            "kv_lora_rank": "kv_lora_rank", "q_lora_rank": "q_lora_rank", "dense_layers": "first_k_dense_replace",
            "routed_experts": "n_routed_experts", "shared_experts": "n_shared_experts",
            "expert_ffn": "moe_intermediate_size", "routed_scale": "routed_scaling_factor",
        }  # fmt: skip
        assert {ours: getattr(shape, ours) for ours in names} == {o: getattr(theirs, t) for o, t in names.items()}


def logits(path: Path) -> tuple[Tensor, Tensor]:
    """Ours and theirs, of a model with random weights."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), attn_implementation="eager").eval()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    theirs.save_pretrained(path / "weights")  # in the layout of a published checkpoint
    (path / "weights/model.safetensors").rename(path / "model.safetensors")
    shape = read_shape(path)
    assert not isinstance(shape, TransformersShape)
    model = GPTModel(shape, compute_dtype=torch.float32)
    open_checkpoint(path, shape).load_into(model)
    tokens = torch.randint(96, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens), theirs(tokens).logits


ROPES: dict[str, dict[str, Any]] = {
    "no theta": {},
    "theta within": {"rope_parameters": {"rope_theta": 700.0}},
    "theta beside": {"rope_theta": 700.0, "rope_parameters": {"rope_type": "default"}},
    "older": {"rope_theta": 700.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn": {"rope_parameters": YARN},
    "yarn, lengths": {"rope_parameters": YARN | {"original_max_position_embeddings": 16}},
    "yarn, length beside": {"rope_parameters": YARN, "original_max_position_embeddings": 16},
    "yarn, no factor": {"rope_parameters": YARN | {"factor": None, "original_max_position_embeddings": 16}},
    "yarn, attention_factor": {"rope_parameters": YARN | {"attention_factor": 1.7}},
    "yarn, mscale": {"rope_parameters": YARN | {"mscale": 0.7}},
    "yarn, mscale_all_dim": {"rope_parameters": YARN | {"mscale_all_dim": 0.7}},
    "yarn, both": {"rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.7, "beta_fast": 8}},
    "yarn, not truncated": {"rope_parameters": YARN | {"truncate": False, "beta_slow": 2}},
    "yarn, null": {"rope_parameters": YARN | {"beta_fast": None, "attention_factor": None, "mscale": None}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1, "high_freq_factor": 4}},
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", ["llama", "deepseek_v2"])
def test_logits_with_rotary_settings_left_out(kind: str, rope: str, tmp_path: Path):
    ours, theirs = logits(directory(tmp_path, kind, without(kind, "rope_theta") | ROPES[rope]))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("llama", ["head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "hidden_act"]),
        ("mistral", ["head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"]),
        ("deepseek_v2", ["q_lora_rank", "rms_norm_eps", "routed_scaling_factor", "first_k_dense_replace"]),
        ("gpt2", ["n_inner", "layer_norm_epsilon", "tie_word_embeddings", "activation_function"]),
    ],
)
def test_logits_with_settings_left_out(kind: str, left_out: list[str], tmp_path: Path):
    ours, theirs = logits(directory(tmp_path, kind, without(kind, *left_out)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_norms_of_latents_have_an_epsilon_of_their_own(tmp_path: Path):
    ours, theirs = logits(directory(tmp_path, "deepseek_v2", FULL["deepseek_v2"] | {"rms_norm_eps": 0.5}))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "yarn"}, "lacks 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks 'low_freq_factor'"),
        ({"rope_type": "llama3", "factor": "8", "low_freq_factor": 1, "high_freq_factor": 4}, "invalid"),
        ({"rope_type": "yarn", "factor": 0}, "factor of the yarn scaling is 0: expected a positive number"),
        ({"rope_type": "yarn", "factor": [4]}, "invalid"),
        ({"rope_theta": 0}, "rope_theta is 0: expected a number above 0"),
        ("yarn", "invalid"),
    ],
)
def test_rotary_settings_that_cannot_be_read_are_one_line(rope: object, said: str, tmp_path: Path):
    path = directory(tmp_path, "llama", FULL["llama"] | {"rope_parameters": rope})
    with pytest.raises(ConfigError, match=said) as caught:
        read_shape(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["fp8", True, [1], 3, float("nan")])
def test_a_quantization_that_is_no_object_is_one_line(value: object, tmp_path: Path):
    path = directory(tmp_path, "llama", FULL["llama"] | {"quantization_config": value})
    with pytest.raises(ConfigError, match=r"quantization_config is .*: expected an object"):
        read_shape(path)

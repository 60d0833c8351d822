"""Products seen in kernels, in small random models of transformers of different structure: plain torch's losses and
gradients to the bit under bf16, the rows and the quantized losses of the adapters.

Each family has code that another one lacks: see FAMILIES.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from binade.collector import instrument
from tests.collector.instrumented import Recorder, rows, same

pytestmark = pytest.mark.slow

VOCAB, HIDDEN, FFN, TOKENS = 64, 32, 64, 12
ROW = ["layer_index", "layer_type", "module", "expert", "operation", "phase", "tensor_name", "component", "shape"]
ROW = [*ROW, "dtype", "gemm", "format", "contracted_axis"]
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DENSE = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2}
DENSE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, **SPECIAL}
ENCODER = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2}
ENCODER |= {"num_attention_heads": 2, "pad_token_id": 0}
T5 = {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 16, "d_ff": FFN, "num_layers": 2, "num_decoder_layers": 2}
T5 |= {"num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0}
ALTUP = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 8, "altup_num_inputs": 2}
ALTUP |= {"num_kv_shared_layers": 0, "num_key_value_heads": 1, "sliding_window": 8}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}


@dataclass(frozen=True)
class Family:
    """A class of transformers, and the sizes of its configuration. recipe: what it is quantized with, a linear one if a
    product of activations is not intercepted."""

    model: str
    sizes: dict[str, Any]
    recipe: str = "mxfp8"
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        model: nn.Module = kind._from_config(kind.config_class(**self.sizes), **self.options).float().train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # some begin as zeros
                    parameter.normal_(std=0.1)
        return model

    def batch(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        if getattr(transformers, self.model).main_input_name == "pixel_values":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}
        tokens = torch.randint(3, VOCAB, (2, TOKENS), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


FAMILIES = {
    "weights as [in, out]": Family(
        "GPT2LMHeadModel", {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 2}
    ),
    "encoder and decoder": Family("T5ForConditionalGeneration", T5),
    "attention by baddbmm": Family(
        "BloomForCausalLM", {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 2}, "linear_mxfp8"
    ),
    "attention written out": Family("LlamaForCausalLM", DENSE, options={"attn_implementation": "eager"}),
    "attention with relative positions": Family(
        "DebertaV2ForMaskedLM", ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "linear_mxfp8"
    ),
    "a scan, and a weight on the left": Family(
        "MambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 4},
        "linear_mxfp8",
    ),
    "a scan in chunks": Family(
        "Mamba2ForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4}
        | {"head_dim": 16, "n_groups": 1, "chunk_size": 8},
        "linear_mxfp8",
    ),
    "convolutions": Family("Lfm2ForCausalLM", DENSE | {"layer_types": ["conv", "full_attention"]}),
    "a router that flattens tokens": Family("MixtralForCausalLM", DENSE | {"num_local_experts": 4}),
    "experts with biases": Family("GptOssForCausalLM", DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "experts in a list": Family(
        "SwitchTransformersForConditionalGeneration",
        T5 | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 8},
    ),
    "a clamped weight of a child": Family("Gemma3nForCausalLM", DENSE | ALTUP, "linear_mxfp8"),
    "a table of positions": Family("SwinForImageClassification", SWIN | {"num_labels": 2}),
}


def trained(family: Family, root: Path, recipe: str | None, products: Any) -> list[Tensor]:
    """The loss, and the gradient of every weight."""
    model = family.build()

    def results() -> list[Tensor]:
        torch.manual_seed(2)  # for dropout
        loss: Any = model(**family.batch()).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    if recipe is None:
        return results()
    with warnings.catch_warnings(), Recorder(root, measures=()) as recorder:
        warnings.filterwarnings("error", ".*neither (quantized|rounded) nor recorded.*")
        with instrument(model, recipe, recorder, products=products, backend="torch"):
            return results()


def recorded(root: Path) -> Counter[tuple[str, ...]]:
    """How often each row was recorded."""
    found = rows(root, values=False)
    return Counter(tuple(map(str, row)) for row in found[ROW].itertuples(index=False))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_trains_as_plain_and_records_as_with_the_adapters(tmp_path: Path, kind: str) -> None:
    family = FAMILIES[kind]
    plain = trained(family, tmp_path, None, {})
    for recipe in ("bf16", family.recipe):
        results = {}
        for way, products in {"adapters": {}, "kernel": "kernel"}.items():
            results[way] = trained(family, tmp_path / way / recipe, recipe, products)
        expected, found = (recorded(tmp_path / way / recipe) for way in ("adapters", "kernel"))
        assert found == expected and found.total() > 0
        if recipe == "bf16":
            assert same(results["kernel"], plain)
        else:
            assert torch.equal(results["kernel"][0], results["adapters"][0]) and not same(results["kernel"], plain)

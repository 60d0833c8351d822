"""A family is one file and one line in the registry: with those, everything that works for a Llama works for it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import ArceeConfig, ArceeForCausalLM, MixtralConfig, MixtralForCausalLM

from binade.cli import main
from binade.collector.jobs.estimate import estimate
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.pretrained.checkpoint import open_checkpoint
from binade.collector.pretrained.directory import read_shape
from binade.collector.training.config import RunConfig
from binade.collector.training.memory import PER_COPY, PER_WEIGHT, needed
from binade.collector.training.plan import plan
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.collector import toy_family
from tests.collector.test_memory import check_activations
from tests.conftest import run_python

pytestmark = pytest.mark.slow
TINY = toy_family.TINY
CONFIG = RunConfig(model="arcee", dataset="python-docs", sequence_length=64, backend="torch")
MODULES = ("qkv", "core", "proj", "fc1", "fc2")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "arcee", toy_family.MODELS["arcee"])


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    torch.manual_seed(0)
    return ArceeForCausalLM(
        ArceeConfig(
            hidden_size=TINY.hidden,
            intermediate_size=TINY.ffn,
            num_hidden_layers=TINY.layers,
            num_attention_heads=TINY.heads,
            num_key_value_heads=TINY.kv_heads,
            head_dim=TINY.head_dim,
            vocab_size=TINY.vocab,
            rms_norm_eps=TINY.norm_eps,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    )


def test_its_file_imports_no_torch():
    code = "import sys, tests.collector.toy_family; print('torch' in sys.modules)"
    assert run_python("-c", code).stdout.strip() == "False"


def test_its_sites_are_listed(capsys: pytest.CaptureFixture[str]):
    assert [site.name for site in TINY.sites()] == [f"layer{layer}.{module}" for layer in (1, 2) for module in MODULES]
    assert main(["list"]) == 0
    assert f"arcee tiny: {TINY.layers} layers" in capsys.readouterr().out


def test_its_weights_are_counted():
    with torch.device("meta"):
        published = ArceeForCausalLM(ArceeConfig(bos_token_id=0, eos_token_id=0))
    assert toy_family.FULL.parameters == sum(weight.numel() for weight in published.parameters())


def test_its_memory_and_its_tensors_are_estimated(tmp_path: Path):
    plan(CONFIG)
    check_activations(plan(CONFIG))
    assert needed(plan(CONFIG)).weights == (PER_WEIGHT + PER_COPY) * sum(p.numel() for p in GPTModel(TINY).parameters())
    assert estimate([plan(CONFIG)], tmp_path).tensors == TINY.layers * (4 * 6 + 11)


def test_its_checkpoint_is_read_and_its_gradients_are_those_of_transformers(reference: nn.Module, tmp_path: Path):
    reference.save_pretrained(tmp_path)
    model = GPTModel(TINY, compute_dtype=torch.float32)
    open_checkpoint(tmp_path, TINY).load_into(model)
    tokens = torch.randint(TINY.vocab, (2, 33), generator=torch.Generator().manual_seed(1))
    for logits in (ours := model(tokens[:, :-1]), theirs := reference(tokens[:, :-1]).logits):
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    wanted = dict(reference.named_parameters())
    for index, layer in enumerate(model.layers):
        for ours, name in ((layer.mlp.linear_fc1, "up_proj"), (layer.mlp.linear_fc2, "down_proj")):
            grad = wanted[f"model.layers.{index}.mlp.{name}.weight"].grad
            assert (ours.weight.grad - grad).norm() < 5e-6 * grad.norm()


def test_it_trains_quantized_and_every_tensor_is_recorded(reference: nn.Module, tmp_path: Path):
    reference.save_pretrained(tmp_path / "checkpoint")
    command = ["run", "--model", str(tmp_path / "checkpoint"), "--tokenizer", "byte", "--quantization", "mxfp8"]
    options = ["--sequence-length", "16", "--backend", "torch", "--scores", "", "--tensor-save-dir", str(tmp_path)]
    assert main([*command, *options]) == 0
    with closing(Catalog.open(tmp_path)) as catalog:
        rows = catalog.tensors(Filter())
    assert {(row.layer_index, row.module) for row in rows.itertuples()} == {
        (site.layer_index, site.module) for site in TINY.sites()
    }
    assert len(rows) == estimate([plan(CONFIG)], tmp_path).tensors
    assert set(rows[rows.module == "fc1"].quant_type) == {"mxfp8"}


def test_another_mixture_of_experts_is_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    shape = toy_family.MIXTRAL
    monkeypatch.setitem(MODELS, "mixtral", {"tiny": shape})
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_sequence,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        num_local_experts=shape.experts,
        initializer_range=0.2,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    published = MixtralForCausalLM(config)
    published.save_pretrained(tmp_path)
    assert read_shape(tmp_path) == shape
    model = GPTModel(shape, compute_dtype=torch.float32)
    open_checkpoint(tmp_path, shape).load_into(model)
    tokens = torch.randint(shape.vocab, (2, 32), generator=torch.Generator().manual_seed(1))
    ours, theirs = model(tokens), published(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for logits in (ours, theirs):
        logits.square().mean().backward()
    for layer, reference in zip(model.layers, published.model.layers, strict=True):
        torch.testing.assert_close(layer.mlp.router.weight.grad, reference.mlp.gate.weight.grad, rtol=1e-3, atol=1e-5)

"""Instrumenting transformers' own models: Llama with grouped-query attention, eager and sdpa; GPT-2's Conv1D."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from binade.collector import TrainerCallback, coverage, instrument
from binade.collector.capture.adapters.layer import InstrumentError, is_instrumented
from binade.collector.recipes.parse import parse_recipe
from tests.collector.instrumented import (
    CORE,
    LINEAR,
    Recorder,
    linear_products,
    names,
    rows,
    same,
    score_products,
    state,
    train,
    value,
)

pytestmark = pytest.mark.slow

LAYERS, LENGTH, VOCAB, HEAD_DIM = 2, 12, 64, 16
MODULES = ("q", "k", "v", "proj", "gate", "up", "fc2")
EXPECTED = {
    **{(layer, module): LINEAR for layer in (1, 2) for module in MODULES},
    **{(layer, "core"): CORE for layer in (1, 2)},
}
ATTENTION = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def llama(attention: str, dtype: torch.dtype = torch.float32, recompute: bool | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).to(dtype).train()
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    return model


def loss(model: nn.Module, micro_batch: int, **options: Any) -> Tensor:
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(micro_batch))
    return model(input_ids=tokens, labels=tokens, use_cache=False, **options).loss


def padded(model: nn.Module, micro_batch: int) -> Tensor:
    """The second sequence is padded at the left: a mask instead of is_causal, and rows that see nothing."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :4] = 0
    return loss(model, micro_batch, attention_mask=mask)


def counts(each: int) -> dict:
    return {site: dict.fromkeys(of_site, each) for site, of_site in EXPECTED.items()}


@pytest.mark.sampled(1)
@ATTENTION
@pytest.mark.parametrize("recompute", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_recording_changes_no_bit(tmp_path, attention, recompute):
    dtype = torch.float32 if recompute is None else torch.bfloat16
    plain = train(llama(attention, dtype, recompute), loss, micro_batches=2)
    model = llama(attention, dtype, recompute)
    before = state(model)
    with Recorder(tmp_path, max_bytes=0) as recorder, instrument(model, None, recorder):
        recorded = train(model, loss, micro_batches=2, after=recorder.step)
    assert same(recorded, plain)
    assert state(model) == before
    found = rows(tmp_path, values=False)
    assert names(found) == counts(2 * 2)
    assert set(found["recomputed"]) == {recompute is not None}


@pytest.mark.thorough
@ATTENTION
@pytest.mark.parametrize("loss_of", [loss, padded])
def test_mxfp8_products_are_those_of_the_recorded_operands(tmp_path, attention, loss_of):
    model = llama(attention)
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        quantized = train(model, loss_of)
    assert all(torch.isfinite(each).all() for each in quantized)
    found = rows(tmp_path, iteration=0)
    assert names(found) == counts(1)
    for layer in (1, 2):
        for module in MODULES:
            linear_products(found, layer, module)
        if attention == "eager":  # which copies keys and values to every head
            score_products(found, layer, HEAD_DIM**-0.5)
    with instrument(unrecorded := llama(attention), "mxfp8", backend="torch"):
        assert same(train(unrecorded, loss_of), quantized)
    assert not same(train(llama(attention), loss_of), quantized)


@pytest.mark.thorough
def test_both_kinds_of_attention_record_the_same(tmp_path):
    found = {}
    for attention in ("eager", "sdpa"):
        model = llama(attention)
        with Recorder(tmp_path / attention) as recorder, instrument(model, None, recorder):
            padded(model, 0).backward()
        found[attention] = rows(tmp_path / attention)
    for name in CORE:
        eager, sdpa = (value(found[attention], 1, "core", name) for attention in ("eager", "sdpa"))
        if name == "output":  # eager's is [b, s, heads, d] only after the products
            assert eager.shape == sdpa.shape
        whole_eager, whole_sdpa = eager[0], sdpa[0]  # of the second sequence rows see nothing: uniform, or zero
        assert (whole_eager - whole_sdpa).norm() <= 1e-5 * whole_sdpa.norm(), name


def test_both_kinds_of_attention_agree_under_autocast():
    losses = []
    for attention in ("eager", "sdpa"):
        model = llama(attention)
        with torch.autocast("cpu", torch.bfloat16), instrument(model, "FA_mxfp8", backend="torch"):
            found = loss(model, 0)
        found.backward()
        losses.append(found)
    assert torch.equal(*losses)


def test_gpt2_and_its_conv1d(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    weights = GPT2LMHeadModel(config).state_dict()

    def model() -> GPT2LMHeadModel:
        made = GPT2LMHeadModel(config)
        made.load_state_dict(weights)
        return made.train()

    plain = train(model(), loss)
    with Recorder(tmp_path) as recorder, instrument(made := model(), None, recorder):
        assert same(train(made, loss), plain)
    found = rows(tmp_path)
    assert {module for _, module in names(found)} == {"core", "qkv", "proj", "fc1", "fc2"}
    weight = value(found, 1, "qkv", "weight", iteration=0)
    assert torch.equal(weight, weights["transformer.h.0.attn.c_attn.weight"].t())
    with instrument(made := model(), "linear_mxfp8", backend="torch"):
        assert not torch.equal(loss(made, 0), plain[0])


def dropping(kind: str, attention: str) -> nn.Module:
    """A model of one layer whose attention drops a third of its probabilities."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=1, n_head=4, n_positions=LENGTH, attn_pdrop=1 / 3,
            embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation=attention,
        )  # fmt: skip
        return GPT2LMHeadModel(config).train()
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96,
        attention_probs_dropout_prob=1 / 3, hidden_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    return BertForMaskedLM(config).train()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@ATTENTION
def test_probabilities_are_recorded_before_dropout_and_the_mask_is_the_same(tmp_path, kind, attention):
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    found = {}
    for recipe in ("bf16", "bf16 recorded", "fp16", "FA_mxfp4"):  # fp16 loses nothing that matters here
        model = dropping(kind, attention)
        torch.manual_seed(2)
        if recipe == "bf16":
            output = model(input_ids=tokens).logits
        else:
            options = {"pv": "fp16"} if recipe == "fp16" else {}
            made = parse_recipe(recipe.split()[0] if recipe != "fp16" else "bf16", **options)
            with Recorder(tmp_path / recipe, tensors=("attention_probs",), label="x") as recorder:
                with instrument(model, made, recorder):
                    output = model(input_ids=tokens).logits
        found[recipe] = output.detach()
    assert torch.equal(found["bf16 recorded"], found["bf16"])
    assert torch.allclose(found["fp16"], found["bf16"], atol=1e-3)  # another mask would differ by far more
    recorded = ("bf16 recorded", "fp16", "FA_mxfp4")
    probs = {name: value(rows(tmp_path / name), 1, "core", "attention_probs") for name in recorded}
    for each in probs.values():
        assert torch.allclose(each.float().sum(-1), torch.ones(()), atol=1e-2)  # a third of them would be missing
    assert torch.allclose(probs["fp16"], probs["bf16 recorded"], atol=1e-6)


class TestRefusals:
    def refused(self, model: nn.Module, match: str, **options: Any) -> None:
        before = state(model)
        with pytest.raises(InstrumentError, match=match), instrument(model, "mxfp8", backend="torch", **options):
            loss(model, 0)
        assert state(model) == before

    def test_another_implementation_of_attention(self):
        model = llama("sdpa")
        model.config._attn_implementation = "flash_attention_2"  # a package of its own
        self.refused(
            model,
            r"model\.layers\.0\.self_attn and 1 more \(LlamaAttention\) cannot be intercepted: its att.*"
            r"exclude=\['model\.layers\.\*\.self_attn'\]",
        )
        (left,) = [row for row in coverage(model, "linear_mxfp8") if row.kind == "LlamaAttention"]
        with instrument(model, "linear_mxfp8", backend="torch"):  # which leaves attention alone
            pass
        assert left.reason.startswith("its attention is flash_attention_2")


@pytest.mark.thorough
def test_the_lm_head_is_left_unless_it_is_asked_for(tmp_path):
    model = llama("sdpa")
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch", head=True):
        loss(model, 0).backward()
    found = rows(tmp_path)
    linear_products(found, 0, "head")
    assert torch.equal(value(found, 0, "head", "weight"), model.lm_head.weight)


def test_lora_records_the_base_and_its_adapters(tmp_path):
    def adapted() -> nn.Module:
        model = llama("sdpa")  # which draws the same weights each time
        return get_peft_model(model, LoraConfig(r=32, target_modules=["q_proj", "down_proj", "lm_head"]))

    plain = train(adapted(), loss)
    with Recorder(tmp_path / "bf16", max_bytes=0) as recorder, instrument(model := adapted(), None, recorder):
        assert same(train(model, loss), plain)
    with Recorder(tmp_path / "mxfp8") as recorder, instrument(model := adapted(), "mxfp8", recorder, backend="torch"):
        train(model, loss, steps=2)
    found = rows(tmp_path / "mxfp8", iteration=1)  # in which the adapters have left 0
    frozen = LINEAR - {"grad_weight"}
    expected = {site: frozen if "core" not in site else CORE for site in EXPECTED}
    expected |= {(0, f"lm_head.lora_{x}"): LINEAR for x in "AB"}
    expected |= {(layer, f"{word}.lora_{x}"): LINEAR for layer in (1, 2) for word in ("q", "fc2") for x in "AB"}
    # Nothing before layer 1 is trained.
    expected |= {(1, word): {"input", "weight", "output"} for word in "qkv"}
    expected |= {(1, "q.lora_A"): LINEAR - {"grad_input"}, (1, "core"): CORE - {"grad_key", "grad_value"}}
    assert names(found) == {site: dict.fromkeys(of_site, 1) for site, of_site in expected.items()}
    linear_products(found, 2, "fc2.lora_A")
    linear_products(found, 2, "q.lora_B")
    assert all(row.reason == "LM head, unless head=True" for row in coverage(model) if "lm_head.base" in row.paths)


def test_the_callback_of_a_trainer(tmp_path):
    """With bf16 autocast, which gives the model another forward, accumulated gradients, and an evaluation a step."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    settings = {"max_steps": 3, "eval_steps": 1, "eval_strategy": "steps", "save_strategy": "no", "report_to": []}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": True, "use_cpu": True}
    arguments = TrainingArguments(tmp_path / "trainer", disable_tqdm=True, **settings)
    tokens = torch.arange(LENGTH) % VOCAB
    data = [{"input_ids": tokens, "labels": tokens}] * 12
    model = llama("sdpa")
    with Recorder(tmp_path, tensors=("weight",), max_bytes=0, iterations=2) as recorder:
        callback = TrainerCallback("linear_mxfp8", recorder)
        Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[callback]).train()
    assert not any(is_instrumented(module) for module in model.modules())
    found = rows(tmp_path, values=False)
    assert found.groupby(["operation", "iteration", "micro_batch"]).size().to_dict() == {
        ("forward", iteration, micro_batch): LAYERS * len(MODULES) for iteration in (0, 1) for micro_batch in (0, 1)
    }
    assert set(found["format"]) == {"mxfp8"} and set(found["dtype"]) == {"bfloat16"}

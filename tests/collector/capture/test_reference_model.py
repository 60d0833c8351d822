"""What docs/reference_model.md says, of a small Llama of transformers and its copy."""

from __future__ import annotations

import copy
import warnings
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from binade.collector import Recorder, instrument
from binade.data.run.directory import read_run
from tests.collector.instrumented import rows

TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
RECIPES = ("bf16", "mxfp8", "te_delayed", "nvfp4(rounding=stochastic)")


def build(**options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes, **options))


def log_probability(model: nn.Module, tokens: Tensor) -> Tensor:
    """[b]"""
    logits = model(tokens).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))


def ratio(policy: nn.Module, reference: nn.Module, first: bool = True) -> Tensor:
    """The log ratio; first: whether the reference pass comes first."""
    ours = None if first else log_probability(policy, TOKENS)
    with torch.no_grad():
        theirs = log_probability(reference, TOKENS)
    return (log_probability(policy, TOKENS) if ours is None else ours) - theirs


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_the_policy_and_both(tmp_path, recipe):
    policy = build()
    reference = copy.deepcopy(policy)
    with Recorder(tmp_path / "policy", scores=()) as recorder, instrument(policy, recipe, recorder, backend="torch"):
        assert bool(ratio(policy, reference).any()) == (recipe != "bf16")
    root = tmp_path / "both"
    with Recorder(root, scores=()) as recorder, instrument(policy, recipe, recorder, backend="torch"):
        with instrument(reference, recipe, backend="torch"):
            found = ratio(policy, reference)
            (-F.logsigmoid(found)).mean().backward()
    assert not found.any()
    recorded = rows(root, values=False)
    inputs = recorded[recorded["tensor_name"] == "input"].groupby(["layer_index", "module"]).size()
    assert set(inputs) == {1} and set(recorded["operation"]) == {"forward", "backward"}


def test_both_with_one_recorder(tmp_path):
    policy, reference = build(), build()
    with Recorder(tmp_path, scores=()) as recorder, ExitStack() as instrumented:
        instrumented.enter_context(instrument(policy, "mxfp8", recorder, backend="torch"))
        with pytest.warns(UserWarning, match="told apart") as warned:
            instrumented.enter_context(instrument(reference, "bf16", recorder))
        ratio(policy, reference).sum().backward()
    texts = [str(warning.message) for warning in warned]
    assert any("rows of the other, with bf16, have the recipe mxfp8 too" in text for text in texts)
    assert read_run(recorder.writer.directory).config["recipe"] == "mxfp8"
    recorded = rows(tmp_path, values=False)
    assert set(recorded["recipe"]) == {"mxfp8"} and recorded["micro_batch"].max() == 0
    of_inputs = recorded[recorded["tensor_name"] == "input"]
    assert set(of_inputs.groupby(["layer_index", "module"]).size()) == {1} and set(of_inputs["format"]) == {"mxfp8"}


def with_adapters() -> nn.Module:
    return get_peft_model(build(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_that_are_disabled(tmp_path, recipe):
    model = with_adapters()
    for first in (True, False):
        with Recorder(tmp_path / str(first), scores=()) as recorder:
            with instrument(model, recipe, recorder, backend="torch"):
                if first:
                    with torch.no_grad(), model.disable_adapter():
                        reference = log_probability(model, TOKENS)
                ours = log_probability(model, TOKENS)
                if not first:
                    with torch.no_grad(), model.disable_adapter():
                        reference = log_probability(model, TOKENS)
                ours.sum().backward()
        assert bool((ours - reference).any()) == (recipe == "te_delayed" and not first)
        recorded = rows(tmp_path / str(first), values=False)
        assert set(recorded["micro_batch"]) == {0} and not (recorded["operation"] == "evaluation").any()
        counts = recorded[recorded["tensor_name"] == "input"].groupby("module").size()
        assert counts["q"] == counts["q.lora_A"] == counts["q.lora_B"] == 1


@pytest.mark.parametrize(("recipe", "same"), [("mxfp8", True), ("te_current", False)])
def test_sequences_evaluated_alone(recipe, same):
    model = build()
    with instrument(model, recipe, backend="torch"), torch.no_grad():
        together = log_probability(model, TOKENS)
        alone = torch.cat([log_probability(model, tokens[None]) for tokens in TOKENS])
    assert torch.allclose(together, alone, atol=1e-4) == same


def test_what_makes_the_log_ratio_another(tmp_path):
    policy, reference = build(attention_dropout=0.5).train(), build(attention_dropout=0.5).eval()
    assert ratio(policy, reference).any() and not ratio(policy.eval(), reference).any()
    with instrument(policy, RECIPES[-1], seed=1, backend="torch"), instrument(reference, RECIPES[-1], backend="torch"):
        assert ratio(policy, reference).any()


@pytest.mark.parametrize("evaluation", [True, False])
def test_a_reference_pass_is_an_evaluation_unless_it_has_gradients(tmp_path, evaluation):
    model = with_adapters()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with Recorder(tmp_path, scores=(), tensors=("input",), evaluation=evaluation) as recorder:
        with instrument(model, "bf16", recorder), warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                for _ in range(2):
                    with torch.no_grad(), model.disable_adapter():
                        log_probability(model, TOKENS)
                    log_probability(model, TOKENS).sum().backward()
                optimizer.step()
    found = rows(tmp_path, values=False).groupby(["iteration", "operation", "micro_batch"]).size()
    operations = ["evaluation", "forward"] if evaluation else ["forward"]
    assert [*found.index] == [
        (step, operation, batch) for step in (0, 1) for operation in operations for batch in (0, 1)
    ]

    with Recorder(tmp_path / "with", scores=(), tensors=("input",)) as recorder, instrument(model, "bf16", recorder):
        with model.disable_adapter():
            log_probability(model, TOKENS)
        log_probability(model, TOKENS).sum().backward()
    assert set(rows(tmp_path / "with", values=False)["micro_batch"]) == {0, 1}

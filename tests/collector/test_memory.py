"""What a run is said to take, against what autograd keeps of a real model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from binade.collector.capture.instrument import instrument
from binade.collector.errors import ConfigError
from binade.collector.models.model import GPTModel
from binade.collector.training.config import RunConfig
from binade.collector.training.memory import PER_COPY, PER_LOGIT, PER_WEIGHT, check_memory, needed
from binade.collector.training.plan import Plan, plan
from binade.data.run.tensor_kinds import Measure


def kept(planned: Plan) -> tuple[int, int]:
    """(bytes of the storages that a forward pass keeps, parameters aside; number of parameters)."""
    config, shape = planned.config, planned.shape
    model = GPTModel(shape)
    model.initialize(0)
    found: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    tokens = torch.randint(shape.vocab, (config.micro_batch_size, config.sequence_length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), instrument(model, "bf16", backend="torch"):
        F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    total = sum(nbytes for place, nbytes in found.items() if place not in own)
    return total, sum(weight.numel() for weight in model.parameters())


CASES = {
    "Llama, as wide as published": RunConfig(size="full", layers=1, sequence_length=512, vocab_size=384),
    "Llama, long sequences": RunConfig(sequence_length=1024),
    "Llama, two sequences": RunConfig(sequence_length=256, micro_batch_size=2),
    "GPT-2": RunConfig(model="gpt2", sequence_length=512),
    "GPT-2, as wide as published": RunConfig(model="gpt2", size="full", layers=1, sequence_length=512, vocab_size=384),
    "DeepSeek": RunConfig(model="deepseek2_lite", sequence_length=512),
}


def check_activations(planned: Plan) -> None:
    """Assert that the estimate is what autograd keeps."""
    config, shape, memory = planned.config, planned.shape, needed(planned)
    measured, parameters = kept(planned)
    assert memory.weights == (PER_WEIGHT + PER_COPY) * parameters
    logits = config.micro_batch_size * config.sequence_length * shape.vocab
    estimate = memory.activations - (PER_LOGIT - 4) * logits + PER_COPY * parameters  # no gradients yet
    assert estimate == pytest.approx(measured, rel=0.1)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * ("published" in name)) for name in CASES]
)
def test_activations_are_what_autograd_keeps(name: str) -> None:
    planned = plan(CASES[name])
    layers = planned.shape.layers + (planned.config.layers is None)  # one more than the tiny models have
    check_activations(replace(planned, shape=replace(planned.shape, layers=layers)))


def test_tensor_parallel_ranks_share_layers_but_not_the_embedding():
    config = RunConfig(size="full")
    whole, half = needed(plan(config)), needed(plan(replace(config, tp=2)))
    embedding = plan(config).shape.vocab * plan(config).shape.hidden
    assert half.weights == (PER_WEIGHT + PER_COPY) * (embedding + (plan(config).shape.parameters - embedding) // 2)
    assert whole.activations / 2 < half.activations < whole.activations
    assert needed(plan(replace(config, tp=2, sequence_parallel=True))).activations < half.activations


def test_ranks_of_one_machine_count_together():
    config = RunConfig(size="full", dp=2)
    each = needed(plan(config)).total
    check_memory(plan(config), 2 * each, ranks=2)
    with pytest.raises(ConfigError, match=r"^llama32-1b full with 16 layers needs 20.7 GiB .* on each of 2 ranks, "):
        check_memory(plan(config), 2 * each - 1, ranks=2)


def test_rounding_and_recording_take_buffers(tmp_path):
    """Rounded copies of a layer's three tensors, on a CPU float32 copies, and the result of unrounded operands."""
    config = RunConfig(size="full", sequence_length=512, device="cuda", measures=())
    largest = max(max(spec.elements(1, 512, 1).values()) for spec in plan(config).recorded)
    layer = max(sum(spec.elements(1, 512, 1).values()) for spec in plan(config).shape.specs())
    config = replace(config, micro_batch_size=1)
    assert needed(plan(config)).buffers == 0
    assert needed(plan(replace(config, recipe="mxfp4"))).buffers == 2 * layer
    assert needed(plan(replace(config, recipe="mxfp4", device="cpu"))).buffers == (2 + 4) * layer
    state = tmp_path / "state.toml"
    state.write_text('[state]\nexp_avg = "bf16"\n')
    for measures in ((), (Measure.RESULT,)):
        assert needed(plan(replace(config, recipe=str(state), measures=measures))).buffers == 0
    results = replace(config, recipe="mxfp4", measures=(Measure.RESULT,))
    assert needed(plan(results)).buffers == 2 * layer + 2 * largest
    assert needed(plan(replace(results, save_tensors=False))).buffers == 2 * layer

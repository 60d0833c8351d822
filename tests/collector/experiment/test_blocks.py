"""Own and inherited errors of blocks against torch alone, to the bit: hooks of the test swap inputs and round."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from binade import quant
from binade.cli import main
from binade.collector import instrument
from binade.collector.errors import ConfigError
from binade.collector.experiment.evaluator import Evaluator, evaluator_of
from binade.collector.experiment.treatments import Treatment, recipes_of, treatments_of
from binade.data.run.block_errors import block_errors, block_sentence
from binade.data.run.directory import list_runs
from binade.data.run.effects import measured_effects
from binade.data.run.experiment import NONE, BlockError, experiment_files, read_blocks, read_results
from tests.collector.small_model import batch, build

MXFP4 = recipes_of(["mxfp4"])
TOKENS = torch.randint(64, (3, 20), generator=torch.Generator().manual_seed(1))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, intermediate_size=128, **sizes)).eval()


def logits(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return model(tokens).logits[:, :-1], tokens[:, 1:]


def found_by(evaluator: Evaluator, given: Any) -> list[list[BlockError]]:
    """The errors of the blocks of each sequence, with all linear layers in mxfp4."""
    (planned,) = treatments_of(evaluator.products, MXFP4, ["part"], parts=["linear"], keeps_blocks=True)
    evaluator.begin(Treatment(NONE), given, 0)
    return [list(own) for own in evaluator.evaluate(planned).blocks]


@torch.no_grad()
def outputs_of(model: nn.Module, layers: nn.ModuleList, given: Any, inputs: list[Tensor] | None = None):
    """(the hidden states that each layer gets, those that it returns) in a pass, in which it gets these inputs if there
    are any."""
    received, returned, undo = [], [], []
    for at, layer in enumerate(layers):

        def before(module: nn.Module, args: Any, at: int = at) -> Any:
            args = args if inputs is None else (inputs[at], *args[1:])
            received.append(args[0])
            return args

        undo.append(layer.register_forward_pre_hook(before))
        undo.append(layer.register_forward_hook(lambda module, args, output: returned.append(output)))
    model(given)
    for hook in undo:
        hook.remove()
    return received, [x[0] if isinstance(x, tuple) else x for x in returned]


def error(y: Tensor, exact: Tensor) -> float:
    """Of one sequence."""
    y, exact = y.double().flatten(), exact.double().flatten()
    return float(((y - exact).square().sum() / exact.square().sum()).sqrt())


def test_of_a_transformers_model_to_the_bit():
    """The cache of keys and values, which the model keeps while it is evaluated, is that of each pass."""
    model, rounded = llama(), llama()
    for module in rounded.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = quant.fake_quantize(module.weight.data, "mxfp4")
            module.register_forward_pre_hook(lambda _, args: (quant.fake_quantize(args[0], "mxfp4"),))
    inputs, exact = outputs_of(model, model.model.layers, TOKENS)
    _, received = outputs_of(rounded, rounded.model.layers, TOKENS)
    _, own = outputs_of(rounded, rounded.model.layers, TOKENS, inputs)
    with evaluator_of(model, logits, attention=False, backend="torch") as evaluator:
        found = found_by(evaluator, TOKENS)
    for sequence, errors in enumerate(found):
        assert [each.layer_index for each in errors] == [1, 2, 3]
        for at, each in enumerate(errors):
            assert each.error == error(received[at][sequence], exact[at][sequence]) > 0
            assert each.own_error == error(own[at][sequence], exact[at][sequence]) > 0
        assert errors[0].error == errors[0].own_error and errors[2].error > errors[2].own_error


def test_of_a_model_whose_first_axis_is_tokens():
    model, (tokens, labels) = build(3), batch()
    rounded = deepcopy(model)
    inputs, exact = outputs_of(model, model.layers, tokens)
    with instrument(rounded, "linear_mxfp4", backend="torch"):
        _, received = outputs_of(rounded, rounded.layers, tokens)
        _, own = outputs_of(rounded, rounded.layers, tokens, inputs)
    with evaluator_of(
        model, lambda model, tokens: (model(tokens), labels), attention=False, backend="torch"
    ) as evaluator:
        found = found_by(evaluator, tokens)
    for sequence, errors in enumerate(found):
        for at, each in enumerate(errors):
            assert each.error == error(received[at][:, sequence], exact[at][:, sequence])
            assert each.own_error == error(own[at][:, sequence], exact[at][:, sequence])


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Repeated(nn.Sequential):
    """A model that runs its first block twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](super().forward(x)).mean(-1)


def blocks(*before: nn.Module) -> list[nn.Module]:
    return [nn.Sequential(*before, nn.Linear(64, 64)) for _ in range(2)]


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Repeated(nn.Identity(), *blocks()), "one runs twice"), (nn.Sequential(*blocks(Noise())), "another output")],
    ids=["twice", "noisy"],
)
def test_what_cannot_be_measured(model: nn.Module, reason: str):
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2))
    with evaluator_of(model, lambda model, x: model(x).flatten(1), backend="torch") as evaluator:
        with pytest.raises(ConfigError, match=reason):
            found_by(evaluator, x)
        with pytest.raises(ConfigError, match="add part or model"):
            treatments_of(evaluator.products, MXFP4, ["site"], keeps_blocks=True)


def test_random_numbers_between_blocks_are_none_of_their_errors():
    first, second = blocks()
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2))
    model = nn.Sequential(first, Noise(), second)
    with evaluator_of(model, lambda model, x: model(x).flatten(1), attention=False, backend="torch") as evaluator:
        found = found_by(evaluator, x)
    assert all(own[0].error == own[0].own_error and own[1].error > 1.5 * own[1].own_error for own in found)


def test_the_command_adds_them_to_what_it_has_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = [
        "measure", "llama32-1b", "--layers", "2", "--sequence-length", "32", "--sequences", "3", "--formats", "mxfp4",
        "--by", "part", "--backend", "torch", "--tensor-save-dir", str(tmp_path),
    ]  # fmt: skip
    assert main(line) == 0
    (run,), _ = list_runs(tmp_path)
    before = measured_effects(read_results(run.directory))
    assert not read_blocks(run.directory)
    for _ in range(2):
        capsys.readouterr()
        assert main([*line, "--blocks"]) == 0
        printed = capsys.readouterr().out
    (effect,) = before
    ((name, rows),) = block_errors(read_results(run.directory), read_blocks(run.directory)).items()
    (again,) = measured_effects(read_results(run.directory))
    assert (again.changes, again.exact) == (effect.changes, effect.exact) and len(list_runs(tmp_path)[0]) == 1
    assert name == "linear in mxfp4" and [(row.layer_index, len(row.errors)) for row in rows] == [(1, 3), (2, 3)]
    assert "layer1" in printed and str(rows[1].own) in printed and str(block_sentence(name, rows)) in printed
    mean, error = np.mean(rows[1].errors), stats.sem(rows[1].errors)
    low, high = stats.t.interval(0.95, 2, mean, error)
    assert (rows[1].error.value, rows[1].error.low, rows[1].error.high) == pytest.approx((mean, low, high))
    files = experiment_files(run.directory)
    assert main([*line, "--blocks"]) == 0 and experiment_files(run.directory) == files
    fewer = [*line, "--blocks", "--sequences", "2", "--micro-batch-size", "3"]
    assert main([*line, "--blocks", "--micro-batch-size", "3"]) == 0 and main(fewer) == 0
    files = {run.run_id: experiment_files(run.directory) for run in list_runs(tmp_path)[0]}
    capsys.readouterr()
    assert main(fewer) == 0
    assert {run.run_id: experiment_files(run.directory) for run in list_runs(tmp_path)[0]} == files
    assert "2 sequences" in (printed := capsys.readouterr().out) and "3 sequences)" not in printed

"""`binade diff` on dumps of two tools, rebuilt from one small model of transformers that runs twice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from binade.collector.imports import importer
from tests.collector.logs_made import read_here
from tests.collector.statistics_made import ms_tensor

LAYERS, PLANTED = 4, 2  # the layer with this index is changed: layer 3
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
Call = tuple[str, str, Tensor, Tensor]  # path and class of a module, input and output


def run(dtype: torch.dtype, change: str = "") -> list[Call]:
    """The calls of modules in the order in which they end, in a forward pass of 8 tokens. change: the path of a module
    of which a tenth of the weights is 1.5 times as large."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if change:
        weight = model.get_submodule(change).weight.data
        weight[: len(weight) // 10] *= 1.5
    model.to(dtype)
    calls: list[Call] = []

    def watch(path: str, module: nn.Module) -> None:
        def ended(module: nn.Module, args: tuple, output: Tensor) -> None:
            calls.append((path, type(module).__name__, args[0].detach().clone(), output.detach().clone()))

        module.register_forward_hook(ended)

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) or "norm" in path:
            watch(path, module)
    with torch.no_grad():
        model(torch.arange(8)[None] * 7 % 64)
    return calls


def msprobe(directory: Path, calls: list[Call], step: int = 0) -> None:
    folder, data = directory / f"step{step}/rank0", {}
    (folder / "dump_tensor_data").mkdir(parents=True)
    for path, kind, x, y in calls:
        name = f"Module.{path}.{kind}.forward.0"
        sides = {"input": ("input_args", x), "output": ("output", y)}
        data[name] = {side: [ms_tensor(t) | {"data_name": f"{name}.{own}.0.pt"}] for own, (side, t) in sides.items()}
        for own, (_, t) in sides.items():
            torch.save(t, folder / f"dump_tensor_data/{name}.{own}.0.pt")
    content = {"task": "tensor", "level": "mix", "framework": "pytorch", "dump_data_dir": str(folder), "data": data}
    (folder / "dump.json").write_text(json.dumps(content))


def fused(calls: list[Call]) -> list[Call]:
    """As an inference engine computes them: q, k and v, and gate and up, in one product each; tokens without batch."""
    found: list[Call] = []
    for path, kind, x, y in calls:
        parent, _, last = path.rpartition(".")
        whole = next((name for name, parts in PARTS.items() if last in parts), None)
        if whole is None:
            found.append((path, kind, x[0], y[0]))
        elif last == PARTS[whole][-1]:
            parts = [out for at, _, _, out in calls if at in {f"{parent}.{part}" for part in PARTS[whole]}]
            found.append((f"{parent}.{whole}", kind, x[0], torch.cat(parts, -1)[0]))
    return found


def sglang(directory: Path, calls: list[Call]) -> None:
    directory.mkdir()
    index = 0
    for path, _, x, y in fused(calls):
        for side, t in (("inputs.0", x), ("output", y)):
            index += 1
            name = f"step=1___rank=0___dump_index={index}___name=non_intrusive__{path}.{side}.pt"
            torch.save({"value": t, "meta": {}}, directory / name)


def passes(directory: Path, calls: list[Call]) -> None:
    folder = directory / "TP0_PP0_Rank0_pid7"
    folder.mkdir(parents=True)
    torch.save({path: y for path, _, _, y in fused(calls)}, folder / "Pass00000.pt")


@pytest.fixture
def diff(command: Callable[..., int], capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """(the exit status, what `binade diff` prints) on two dumps, each written from its calls."""
    monkeypatch.setattr(importer, "scatter", read_here)

    def call(a: tuple[Callable, list[Call]], b: tuple[Callable, list[Call]]) -> tuple[int, str]:
        runs = []
        for name, (write, calls) in (("a", a), ("b", b)):
            write(tmp_path / name, calls)
            assert command("import", str(tmp_path / name), "--scores", "", "--workers", "1") == 0
            runs += re.findall(r"^(\w+): \d", capsys.readouterr().out, re.MULTILINE)
        return command("diff", *runs), capsys.readouterr().out

    return call


DOWN, QUERY, NORM = "mlp.down_proj", "self_attn.q_proj", "input_layernorm"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("a", "b", "module", "named"),
    [
        (msprobe, msprobe, QUERY, "q output"),  # a GPU and an NPU
        (msprobe, sglang, DOWN, "fc2 output"),  # training and inference
        (sglang, msprobe, DOWN, "fc2 output"),
        (msprobe, sglang, NORM, "input_layernorm output.0, in RUN_B L3 input_layernorm output"),
        (msprobe, passes, DOWN, "fc2 output"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_planted_layer_is_named(diff, dtype, a, b, module, named):
    status, printed = diff((a, run(torch.float32)), (b, run(dtype, f"model.layers.{PLANTED}.{module}")))
    (first,) = re.findall(r"first difference, after (\d+) tensors that do not: (.*)", printed)
    where = "iteration 0, micro-batch 0, " if a is msprobe else "iteration 1, "
    assert status == 1 and first[1].startswith(f"{where}L{PLANTED + 1} {named.split(',')[0]} ")
    assert named.partition(", ")[2] in first[1] and int(first[0]) > 4 * PLANTED


@pytest.mark.sampled(1)
@pytest.mark.parametrize("b", [msprobe, sglang, passes])
def test_nothing_is_named_where_only_the_dtype_differs(diff, b):
    status, printed = diff((msprobe, run(torch.float32)), (b, run(torch.bfloat16)))
    assert status == 0 and "No tensor differs by more than their dtypes explain" in printed
    compared = int(re.search(r"(\d+) tensors compared", printed)[1])
    assert compared >= LAYERS * (4 if b is passes else 7)


def test_results_of_fused_layers_are_not_those_of_their_parts(diff):
    calls = run(torch.float32)
    _, printed = diff((msprobe, calls), (sglang, calls))
    assert "No tensor differs" in printed
    assert f"{5 * LAYERS + 3 * LAYERS} only in RUN_A, first " in printed  # outputs of five parts, inputs of three
    assert f"{2 * LAYERS} only in RUN_B, first iteration 1, L1 qkv output" in printed


def without_order(directory: Path, calls: list[Call]) -> None:
    """A dump of which the list of calls is cut."""
    msprobe(directory, calls)
    lists = directory / "step0/rank0/dump.json"
    lists.write_bytes(lists.read_bytes()[:-200])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("b", "order"), [(sglang, ""), (without_order, " in the order of names")])
def test_the_order_of_either_tool_counts(diff, b, order):
    plain, changed = run(torch.float32), run(torch.float32, f"model.layers.{PLANTED}.self_attn.o_proj")
    status, printed = diff((without_order, plain), (b, changed))
    assert status == 1 and f"first difference{order}, after " in printed
    assert ("L3 proj output" in printed.partition("first difference")[2].splitlines()[0]) == (not order)

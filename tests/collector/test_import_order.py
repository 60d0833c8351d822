"""The order of execution of imported tensors: `binade diff` names the first layer that differs, not the first name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest
import torch
from torch import Tensor

from binade.collector.imports import importer, msprobe
from binade.collector.imports.registry import interpret
from binade.data.index.catalog import Catalog
from binade.data.words.text import natural
from tests.collector.logs_made import read_here, tensor
from tests.collector.statistics_made import ms_tensor

LAYERS, FIRST = 12, 2  # the difference starts in the layer with this index
Write = Callable[[Path, list[tuple[str, Tensor]]], None]


def calls(factor: float) -> list[tuple[str, Tensor]]:
    """The outputs of a model in the order of execution, which is not that of their names."""
    found = []
    for layer in range(LAYERS):
        for number, module in enumerate(("self_attn.q_proj", "mlp.down_proj")):
            x = tensor(2 * layer + number, 4, 16, dtype=torch.float32)
            found.append((f"model.layers.{layer}.{module}", x * factor if layer >= FIRST else x))
    return found


def msprobe_dump(directory: Path, outputs: list[tuple[str, Tensor]], task: str = "tensor") -> None:
    folder, data = directory / "step0/rank0", {}
    (folder / "dump_tensor_data").mkdir(parents=True)
    for path, x in outputs:
        name = f"Module.{path}.Linear.forward.0"
        data[name] = {"output": [ms_tensor(x) | {"data_name": f"{name}.output.0.pt"}]}
        if task == "tensor":
            torch.save(x, folder / f"dump_tensor_data/{name}.output.0.pt")
    content = {"task": task, "level": "mix", "framework": "pytorch", "dump_data_dir": str(folder), "data": data}
    (folder / "dump.json").write_text(json.dumps(content))


def msprobe_statistics(directory: Path, outputs: list[tuple[str, Tensor]]) -> None:
    msprobe_dump(directory, outputs, "statistics")


def sglang_dumper(directory: Path, outputs: list[tuple[str, Tensor]]) -> None:
    directory.mkdir()
    for index, (path, x) in enumerate(outputs, 1):
        name = f"step=0___rank=0___dump_index={index}___name=non_intrusive__{path}.output.pt"
        torch.save({"value": x, "meta": {}}, directory / name)


def sglang_passes(directory: Path, outputs: list[tuple[str, Tensor]]) -> None:
    folder = directory / "TP0_PP0_Rank0_pid7"
    folder.mkdir(parents=True)
    torch.save(dict(outputs), folder / "Pass00000.pt")


def plain(directory: Path, outputs: list[tuple[str, Tensor]]) -> None:
    directory.mkdir()
    for path, x in outputs:
        torch.save(x, directory / f"{path.replace('model.layers.', 'layer')}.pt")


@pytest.fixture
def diff(command: Callable[..., int], capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What `binade diff` prints on two dumps, of which the second differs from a layer on."""
    monkeypatch.setattr(importer, "scatter", read_here)

    def call(write: Write, *more: str) -> str:
        runs = []
        for name, factor in (("a", 1.0), ("b", 1.5)):
            write(tmp_path / name, calls(factor))
            assert command("import", str(tmp_path / name), "--scores", "", "--workers", "1") == 0
            (run_id,) = re.findall(r"^(\w+): \d", capsys.readouterr().out, re.MULTILINE)
            runs.append(run_id)
        assert command("diff", *runs, *more) == 1
        return capsys.readouterr().out

    return call


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write", [msprobe_dump, msprobe_statistics, sglang_dumper, sglang_passes])
def test_the_first_layer_that_differs_is_named(diff: Callable[..., str], write: Write):
    printed = diff(write)
    where = "iteration 0, micro-batch 0" if "msprobe" in write.__name__ else "iteration 0"
    assert f"first difference, after {2 * FIRST} tensors that do not: {where}, L{FIRST + 1} q " in printed


def test_without_an_order_names_decide_and_diff_says_so(diff: Callable[..., str]):
    printed = diff(plain)
    assert (
        f"first difference in the order of names, after {2 * FIRST} tensors that do not: L{FIRST + 1} fc2 unnamed"
        in printed
    )


def test_a_cut_list_of_calls_leaves_the_order_unknown(diff: Callable[..., str], tmp_path: Path):
    def cut(directory: Path, outputs: list[tuple[str, Tensor]]) -> None:
        msprobe_dump(directory, outputs)
        lists = directory / "step0/rank0/dump.json"
        lists.write_bytes(lists.read_bytes()[:-200])

    # nothing is lost, and "mlp" precedes "self_attn"
    assert f"in the order of names, after {2 * FIRST} tensors that do not: iteration 0, L{FIRST + 1} fc2" in diff(cut)
    with Catalog.open(tmp_path / "runs") as catalog:
        table = catalog.tensors()
    assert len(table) == 4 * LAYERS and table["execution_order"].isna().all()


def test_gradients_of_parameters_follow_the_backward_pass(tmp_path: Path):
    """Their entries in dump.json are made during the forward pass (msprobe's `_init_params_grad_info`)."""
    (tmp_path / "dump.json").write_text(
        json.dumps(
            {
                "data": {
                    "Module.a.Linear.forward.0": {"output": [ms_tensor(torch.ones(2))]},
                    "Module.a.Linear.parameters_grad": {"weight": [ms_tensor(torch.ones(2))]},
                    "Module.b.Linear.forward.0": {"output": [ms_tensor(torch.ones(2))]},
                    "Module.b.Linear.parameters_grad": {"weight": [ms_tensor(torch.ones(2))]},
                    "Module.b.Linear.backward.0": {"input": [ms_tensor(torch.ones(2))]},
                    "Module.b.Linear.backward.1": {"input": [ms_tensor(torch.ones(2))]},
                    "Module.c.Linear.backward.0": {"input": [None, ms_tensor(torch.ones(2))]},
                }
            }
        )
    )

    def order_of(name: str) -> int | None:
        return interpret(tmp_path / msprobe.DATA / f"Module.{name}.pt").order

    names = ["a.Linear.forward.0.output.0", "b.Linear.forward.0.output.0", "b.Linear.backward.0.input.0",
             "b.Linear.backward.1.input.0", "b.Linear.parameters_grad.weight", "c.Linear.backward.0.input.1",
             "a.Linear.parameters_grad.weight"]  # fmt: skip
    assert [order_of(name) for name in names] == list(range(7))
    assert order_of("d.Linear.forward.0.output.0") is None


@pytest.mark.parametrize("content", ["", "[]", '{"data": 3}', '{"data": {"x": "y"}}', "[" * 100_000, "\0"])
def test_a_damaged_list_of_calls_gives_no_order(tmp_path: Path, content: str):
    (tmp_path / "dump.json").write_text(content)
    log = interpret(tmp_path / msprobe.DATA / "Module.a.Linear.forward.0.output.0.pt")
    assert log.version == msprobe.NAME and log.tensor_name == "output" and log.order is None


def test_an_index_that_is_no_number_gives_no_order():
    name = "step=0___rank=0___dump_index={}___name=query.pt"
    orders = [interpret(PurePath(name.format(index)), None, "value").order for index in ("12", "x", "9" * 400, "-1")]
    assert orders == [12, None, None, None]


def test_natural_order():
    names = ["layer10", "layer2", "layer02.b", "a", "2", "10", "layer" + "9" * 5000, ""]
    assert sorted(names, key=natural) == [
        "", "2", "10", "a", "layer2", "layer02.b", "layer10", "layer" + "9" * 5000,
    ]  # fmt: skip

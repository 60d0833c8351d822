"""A recorded step asks a GPU for no value and waits for no copy, shown on a device that is not there (fake_cuda)."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from itertools import chain

import pytest
import torch

from tests.conftest import PROJECT, run_python

WAITS = {"item", "tolist", "cpu", "nonzero", "is_nonzero", "synchronize"}
STEP = (
    *("collector/capture/*.py", "collector/probes/*.py", "collector/capture/adapters/*.py", "collector/models/*.py"),
    *("collector/pretrained/causal_lm.py", "quant/backends/runs.py", "quant/backends/triton_*.py"),
    *(
        f"quant/{name}.py"
        for name in ("gemm", "quantizer", "rotation", "transform", "rounding", "scaling", "delayed", "reference")
    ),
    *("quant/metrics.py", "quant/block_histograms.py", "quant/traces.py", "quant/later.py"),
)
# Outside the step: the thread that writes calls functions named `fetch`.
ALLOWED = {
    ("collector/models/feedforward.py", "forward"): "how many tokens each expert gets decides the shapes",
    ("collector/capture/adapters/weights.py", "_grouped"): "the same, of grouped products",
    ("collector/capture/delayed_scales.py", "save"): "a checkpoint of the training script",
    ("collector/probes/deoscillation.py", "save"): "the same",
    ("collector/probes/deoscillation.py", "_restore"): "once, when a run is continued",
    ("collector/capture/reduction.py", "of"): "once, when a recorder is entered",
    ("collector/probes/provenance.py", "_judge"): "on the thread that writes, of a copy that has arrived",
    ("collector/capture/curves.py", "_number"): "the same, of a loss that was logged",
    ("collector/capture/evaluation.py", "sequence_losses"): "an evaluation or a measurement, which trains nothing",
    ("collector/capture/recorder.py", "valid"): "once per micro-batch, for a mask that the user gives on a GPU",
    ("collector/capture/valid.py", "rows"): "of a mask on the host",
    ("collector/capture/evaluations.py", "_pass"): "a twin step, which the user asks for and which trains nothing",
    ("quant/later.py", "__call__"): "of a result that was not fetched with others",
    ("quant/later.py", "copied"): "on the thread that writes",
    ("quant/metrics.py", "_measured"): "of what a CPU measured",
}


def waiting(path: str) -> Iterator[tuple[str, str]]:
    """The functions of a file, by their own names, that call a method that waits for a GPU."""

    def within(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and getattr(child.func, "attr", "") in WAITS and function != "fetch":
                yield path, function
            yield from within(child, child.name if isinstance(child, ast.FunctionDef) else function)

    yield from within(ast.parse((PROJECT / path).read_text()), "")


def test_no_source_of_a_step_waits_but_in_the_places_named():
    paths = {path.relative_to(PROJECT).as_posix() for pattern in STEP for path in PROJECT.glob(pattern)}
    assert {"collector/capture/recorder.py", "collector/models/feedforward.py", "quant/gemm.py"} <= paths
    assert set(chain.from_iterable(map(waiting, paths))) == set(ALLOWED)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_recorded_layer_takes_few_launches_one_copy_and_little_memory():
    """Counted by tests.bench.bench_launches for a layer of 4096 × 4096. An H100 took the same memory to 0.1 MB."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch asks a real driver: the CPU build is needed")
    done = run_python("-m", "tests.bench.bench_launches", "--only", "linear", "--tokens", "2048", timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if line[:1] == "|"
    ]
    rows = {row[1]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}
    counts = {
        step: {name: float(row[name]) for name in ("launches", "copies", "GEMMs", "peak MB")}
        for step, row in rows.items()
    }
    bare, attached, statistics, defaults, everything = counts.values()
    assert bare["GEMMs"] == attached["GEMMs"] == statistics["GEMMs"] == defaults["GEMMs"] == 3
    assert attached["launches"] <= bare["launches"] + 1  # the data's hash takes a sample
    assert statistics["launches"] <= attached["launches"] + 6 + 1  # tensors, and the packed copy
    assert defaults["launches"] <= attached["launches"] + 19
    assert defaults["copies"] == everything["copies"] == attached["copies"] + 1
    assert defaults["peak MB"] <= 1.01 * bare["peak MB"]  # of which operands are the most


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_recorded_step_waits_for_no_gpu():
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch asks a real driver: the CPU build is needed")
    done = run_python("-m", "tests.collector.fake_cuda", env={"TRITON_INTERPRET": "0"}, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = re.findall(r"^(\S+): (\d+) tensors, (\d+) launches$", done.stdout, re.MULTILINE)
    assert [recipe for recipe, *_ in steps] == ["mxfp8", "nvidia_nvfp4(without=keep)", "te_delayed"], (
        done.stdout + done.stderr
    )
    assert all(int(tensors) == 35 and int(launches) > 100 for _, tensors, launches in steps)
    # What waits is found, in the backward pass too, and nothing else.
    caught = dict(re.findall(r"^(\w+): (refused|passed)$", done.stdout, re.MULTILINE))
    waits = ("item", "cpu", "tolist", "nonzero", "bool", "mask", "constant")
    assert caught == dict.fromkeys(waits, "refused") | {"sum": "passed"}


WARMED = """
from tests.collector import fake_cuda  # before torch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from binade.quant.backends import triton_kernels, triton_summary

class Keys:
    "Stands for a kernel, and collects what Triton compiles it for: constants, and what it knows of whole numbers."
    seen = set()
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return self.launch
    def launch(self, *args, **constants):
        given = [a for p, a in zip(self.kernel.params, args) if isinstance(a, int) and not p.do_not_specialize]
        self.seen.add((self.kernel.__name__, str([(a == 1, a % 16 == 0, a >= 2**31) for a in given]), str(constants)))

kernels = {m: {n: k for n, k in vars(m).items() if n.endswith("_kernel")} for m in (triton_kernels, triton_summary)}
fake_cuda.pretend()
for module, own in kernels.items():
    vars(module).update({name: Keys(kernel) for name, kernel in own.items()})

import tempfile, threading
from binade.collector.capture.instrument import instrument
from binade.collector.capture.recorder import Recorder

torch.cuda.is_initialized = lambda: False
from binade.quant import rotation
with FakeTensorMode():
    rotation._fixed_signs(torch.device("cuda", 0))  # the thread of a backward pass can make no fake constant
    for recipe in ("bf16", "linear_mxfp8", "te_nvfp4"):
        model = torch.nn.Sequential(torch.nn.Linear(4096, 14336, bias=False, dtype=torch.bfloat16, device="cuda"))
        Keys.seen.clear()
        with tempfile.TemporaryDirectory() as root, Recorder(root, measures=("blocks",)) as recorder, \
             instrument(model, recipe, recorder):
            stopped, tasks = threading.Event(), recorder.session.writing._tasks
            tasks.put(lambda: stopped.wait())  # fake values cannot be written
            warmed = set(Keys.seen)
            x = torch.empty(2, 4096, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            y = model(x)
            y.backward(torch.empty_like(y))
            recorder.observing.measurer.drafts.drafts.clear()
            while not tasks.empty():
                tasks.get()
            stopped.set()
        print(recipe, len(warmed), len(Keys.seen - warmed))
"""


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_what_is_compiled_before_the_first_step_is_what_a_layer_needs():
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch asks a real driver: the CPU build is needed")
    done = run_python("-c", WARMED, env={"TRITON_INTERPRET": "0"}, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {recipe: (int(warmed), int(more)) for recipe, warmed, more in map(str.split, done.stdout.splitlines())}
    assert found["bf16"] == (3, 0)  # a summary, and the formats along two axes
    assert {recipe: more for recipe, (_, more) in found.items()} == {"bf16": 0, "linear_mxfp8": 0, "te_nvfp4": 0}

"""Parts of tests.gpu.all that no benchmark covers: python -m tests.gpu.measure PART --device cuda

Each prints Markdown tables. On a CPU every size is tiny, so that the script is tried where there is no GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from binade.collector.models.shape import Shape

TINY = "--sequence-length", "32", "--micro-batch-size", "1", "--layers", "1"
TRAINED = "mxfp8", "nvfp4", "hifp8_scaled"
COMPILERS = 12  # processes


def device(on: str) -> None:
    import torch

    from tests.bench.bench_quantize import measure, tensor

    print("| what | is |\n|---|---|")
    for name in ("torch", "triton", "numpy", "transformers"):
        try:
            version = __import__(name).__version__
        except ImportError:
            version = "not installed"
        print(f"| {name} | {version} |")
    print(f"| python | {platform.python_version()} |")
    if on == "cuda":
        properties = torch.cuda.get_device_properties(0)
        print(f"| device | {properties.name}, sm_{properties.major}{properties.minor} |")
        print(f"| multiprocessors | {properties.multi_processor_count} |")
        print(f"| memory | {properties.total_memory / 1e9:.1f} GB |")
        print(f"| CUDA of torch | {torch.version.cuda} |")
    x = tensor((16384, 8192) if on == "cuda" else (64, 64), torch.bfloat16, on)
    target = torch.empty_like(x)
    seconds = measure(lambda: target.copy_(x), lambda: target.copy_(x), on, 10).call
    print(f"| copy, read and written | {2 * x.numel() * 2 / seconds / 1e9:.1f} GB/s |")


def _compile(text: str) -> None:
    import torch

    from binade.quant.quantizer import apply
    from binade.quant.specs import Spec
    from tests.bench.bench_quantize import tensor

    x = tensor((16384, 8192), torch.bfloat16, "cuda")  # Triton compiles for what divides its arguments
    for dim in (-1, 0):
        apply(x, Spec.of(text), dim)
    torch.cuda.synchronize()


def quantize(on: str) -> None:
    """bench_quantize, after processes side by side have compiled its kernels into TRITON_CACHE_DIR."""
    from binade.quant import FORMATS
    from binade.quant.specs import Spec, SpecError
    from tests.bench import bench_quantize

    specs = ["mxfp8"]
    arguments = ["--size", "64", "--repeats", "1"]
    if on == "cuda":
        specs = [str(Spec.of(text)) for text in (*FORMATS, *bench_quantize.SPECS)]
        for name in FORMATS:
            try:
                specs.append(str(Spec.of(name, rounding="stochastic")))
            except SpecError:  # its rounding is fixed
                continue
        specs = list(dict.fromkeys(specs))
        workers = min(COMPILERS, len(os.sched_getaffinity(0)))
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.map(_compile, specs, chunksize=1)
        arguments = ["--device", "cuda", "--keep-builds"]
    with mock.patch.object(sys, "argv", ["bench_quantize", *arguments, *(f"--spec={spec}" for spec in specs)]):
        bench_quantize.main()


def train(on: str) -> None:
    """One layer of each model (two of a mixture of experts: its first is dense), under a few recipes: milliseconds of
    a step, and the largest memory that torch had allocated."""
    import torch

    from binade.collector.models.registry import MODELS

    print("| model | recipe | ms | of bf16 | peak GB | of bf16's |\n|---|---|---|---|---|---|")
    for name, sizes in MODELS.items():
        shape = sizes["full" if on == "cuda" else "tiny"]
        shape = replace(shape, layers=1 + getattr(shape, "dense_layers", 0), vocab=384)
        bare, least = None, None
        for recipe, seconds, peak in _training(shape, on):
            bare, least = bare or seconds, least or peak
            ratio = f"{peak:.2f} | {peak / least:.2f}" if least else " | "
            print(f"| {name} | {recipe} | {seconds * 1e3:.1f} | {seconds / bare:.2f} | {ratio} |")
        if on == "cuda":
            torch.cuda.empty_cache()


def _training(shape: Shape, on: str) -> Iterator[tuple[str, float, float]]:
    """(recipe, seconds of a step, peak GB) of each recipe, the last with everything but values recorded."""
    import torch

    from binade.collector.capture.instrument import instrument
    from binade.collector.capture.recorder import Recorder
    from tests.bench.bench_step import build, recording

    cuda = on == "cuda"
    step = build(shape, torch.device(on), 2048 if cuda else 8)

    def times(run: Callable[[], None], rounds: int = 7 if cuda else 1) -> tuple[float, float]:
        found = []
        for number in range(rounds + 1):
            if number == 1 and cuda:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:]), torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0

    yield "bf16", *times(step)
    for recipe in TRAINED if cuda else TRAINED[:1]:
        with instrument(step.model, recipe, backend="triton" if cuda else "torch"):
            yield recipe, *times(step)
    if cuda:
        numbers = iter(range(1 << 30))
        with tempfile.TemporaryDirectory() as root, Recorder(root, max_bytes=0) as recorder:

            def recorded() -> None:
                with instrument(step.model, "bf16", recorder), recording(recorder, numbers):
                    step()

            yield "bf16, recorded without values", *times(recorded, 2)


def _binade(*arguments: str) -> None:
    from binade.cli import main

    if status := main(arguments):
        sys.exit(status)


def _runs(root: Path) -> None:
    from binade.data.run.directory import list_runs

    print("| recipe | tensors | MB | first loss | last loss | state |\n|---|---|---|---|---|---|")
    for run in list_runs(root)[0]:
        status = run.status
        losses = f"{status.loss_first:.4f} | {status.loss_last:.4f}"
        print(f"| {run.config['recipe']} | {status.tensors} | {status.bytes / 1e6:.1f} | {losses} | {status.state} |")


def collect(on: str) -> None:
    """The ten recipes by `binade batch`."""
    import torch

    size = (
        ("--size", "full", "--layers", "4") if on == "cuda" else (*TINY, "--quantization", "mxfp8", "--scores", "mxfp4")
    )
    how = ("--device", "cuda") if on == "cuda" else ("--backend", "torch")
    with tempfile.TemporaryDirectory() as root:
        start = time.perf_counter()
        _binade("batch", *size, *how, "--max-bytes", "256M", "--tensor-save-dir", root)
        seconds = time.perf_counter() - start
        _runs(Path(root))
    peak = f", peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB on the device" if on == "cuda" else ""
    print(f"\n{seconds:.1f} s{peak}")


def ranks(on: str) -> None:
    """Two ranks on one device, tensor-parallel, against one: the losses agree as far as sums in another order do."""
    size = ("--size", "full", "--layers", "2", "--train-iters", "3") if on == "cuda" else (*TINY, "--train-iters", "2")
    how = ("--device", "cuda") if on == "cuda" else ("--backend", "torch")
    command = (*size, *how, "--quantization", "mxfp8", "--no-raw", "--scores", "mxfp4", "--measures", "result")
    with tempfile.TemporaryDirectory() as place:
        _binade("run", *command, "--tensor-save-dir", f"{place}/1")
        start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        two = ("run", *command, "--tp", "2", "--tensor-save-dir", f"{place}/2")
        subprocess.run([*start, "-m", "tests.gpu.measure", "rank", *two], check=True)
        from binade.data.run.directory import list_runs
        from binade.data.run.losses import read_losses

        losses = [
            [each["loss"] for run in list_runs(Path(place, n))[0] for each in read_losses(run.directory)] for n in "12"
        ]
    print("| iteration | one rank | two ranks |\n|---|---|---|")
    for iteration, pair in enumerate(zip(*losses, strict=True)):
        print(f"| {iteration} | {pair[0]:.5f} | {pair[1]:.5f} |")
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(f"\nlargest difference of the loss: {worst:.1e}")
    sys.exit(worst > 0.02)


def rank(arguments: list[str]) -> None:
    """One of two ranks that share a GPU. NCCL refuses that, so they talk by gloo."""
    import torch
    import torch.distributed as dist

    start, choose = dist.init_process_group, torch.cuda.set_device

    def by_gloo(_: str, **options: Any) -> None:
        start("gloo", **options)

    def first(_: int) -> None:
        choose(0)

    dist.init_process_group, torch.cuda.set_device = by_gloo, first
    _binade(*arguments)


PARTS = {each.__name__: each for each in (device, quantize, train, collect, ranks)}


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    args = parser.parse_args()
    PARTS[args.part](args.device)


if __name__ == "__main__":
    main()

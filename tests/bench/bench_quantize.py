"""How fast quantize-dequantize and summarize are, compared with a plain copy timed in the same run.

    python -m tests.bench.bench_quantize                  CPU, 4096×4096 float32, two threads
    python -m tests.bench.bench_quantize --device cuda    16384×8192 bfloat16

Each line is the median of its repeats; the copy is timed again next to every line, so that a machine that slows down
meanwhile slows both. Kernels are built or compiled afresh: "first" is the first call, build included. Formats that
share a kernel share its build, so only the first of them shows it.

CPU   ratio = values per second, divided by torch.clone's. summarize is given in values per second.
CUDA  ratio = bytes read and written per second, divided by those of a device-to-device copy of the same tensor. A
      tensor scale needs its absmax first, and so do most block scales: those read the tensor twice, and twice is
      counted. summarize reads once: its ratio is to the rate of the copy.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from binade.quant.specs import Spec


@dataclass(frozen=True)
class Timing:
    """Seconds: of the first call, of a call, and of the copy timed beside it."""

    first: float
    call: float
    copy: float


SPECS = (
    *("nvfp4(block=16x16)", "nvfp4(scale=nvfp4_row)", "nvfp4(scale=nvfp4_1x128)", "nvfp4(scale=4over6)"),
    *(
        "nvfp4(scale=4over6, error=mae)",
        "nvfp4(block=16x16, scale=4over6)",
        "nvfp4(scale=16over17, rounding=stochastic)",
    ),
    *(
        "nvfp4(rounding=stochastic)",
        "mxfp8(rounding=stochastic)",
        "mxfp8(block=32x32, scale=rceil)",
        "mxfp4(scale=quest)",
    ),
    *("mxfp4(scale=4over3)", "mxfp4(block=16, scale=e4m3)", "mxfp4(block=16, scale=ue5m3)", "mxfp4(scale=float32)"),
    *("fp8_e4m3(block=1x128)", "fp8_e4m3(block=1x128, scale=pow2)", "fp8_e4m3(block=128x128)", "fp8_e4m3(block=row)"),
    *("fp8_e4m3(block=row, scale=pow2)", "fp8_e4m3(scale=pow2)", "fp8_e4m3(history=16)", "hifp8(scale=amax8)"),
)
"""Specs that are no format's default."""


CLOCK = time.perf_counter


def timed(call: Callable[[], object], device: str) -> float:
    """Seconds of one call, waited for."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    start = CLOCK()
    call()
    return CLOCK() - start


def measure(call: Callable[[], object], copy: Callable[[], object], device: str, repeats: int) -> Timing:
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - begin
    call(), copy()
    pairs = [(timed(call, device), timed(copy, device)) for _ in range(repeats)]
    return Timing(first, statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs))


def tensor(shape: tuple[int, int], dtype: torch.dtype, device: str) -> Tensor:
    g = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=g, device=device).to(dtype)


def cpu_table(formats: list[str], repeats: int, size: int, dtypes: list[str]) -> None:
    from binade import quant

    print("| format | axis | dtype | M values/s | clone, M values/s | ratio | first call, s |")
    print("|---|---|---|---|---|---|---|")
    for kind in dtypes:
        x = tensor((size, size), getattr(torch, kind), "cpu")
        for name in formats:
            for dim, axis in ((-1, "last"), (0, "first")):
                t = measure(lambda: quant.fake_quantize(x, name, dim), x.clone, "cpu", repeats)  # noqa: B023
                rate, copy = x.numel() / t.call / 1e6, x.numel() / t.copy / 1e6
                print(f"| {name} | {axis} | {kind} | {rate:.0f} | {copy:.0f} | {rate / copy:.2f} | {t.first:.2f} |")
        t = measure(lambda: quant.summarize(x), x.clone, "cpu", repeats)  # noqa: B023
        rate, copy = x.numel() / t.call / 1e6, x.numel() / t.copy / 1e6
        print(f"| summarize | – | {kind} | {rate:.0f} | {copy:.0f} | {rate / copy:.2f} | {t.first:.2f} |")


def _passes(spec: Spec) -> int:
    """How often the tensor is read or written at the least, by the way in which the kernels work."""
    from binade.quant.backends.triton_kernels import rule_of  # the interpreter or a GPU is chosen at its import

    if spec.block is None or spec.history:
        return 2
    if spec.error:
        return 5  # largest magnitudes, the errors of two scales, the rounding
    return 2 if rule_of(spec) and not spec.scaling.outer else 3


def cuda_table(formats: list[str], repeats: int, shape: tuple[int, int]) -> None:
    from binade import quant
    from binade.quant.quantizer import apply

    x = tensor(shape, torch.bfloat16, "cuda")
    target = torch.empty_like(x)
    nbytes = x.numel() * x.element_size()

    def copy() -> None:
        target.copy_(x)

    print("| format | axis | GB/s | copy, GB/s | ratio | first call, s |")
    print("|---|---|---|---|---|---|")
    for name in formats:
        spec = Spec.of(name)
        passes = _passes(spec)
        for dim, axis in ((-1, "last"), (0, "first")):
            t = measure(lambda: apply(x, spec, dim), copy, "cuda", repeats)  # noqa: B023
            rate, best = passes * nbytes / t.call / 1e9, 2 * nbytes / t.copy / 1e9
            print(f"| {name} | {axis} | {rate:.0f} | {best:.0f} | {rate / best:.2f} | {t.first:.2f} |")
    t = measure(lambda: quant.summarize(x), copy, "cuda", repeats)
    rate, best = nbytes / t.call / 1e9, 2 * nbytes / t.copy / 1e9
    print(f"| summarize | – | {rate:.0f} | {best:.0f} | {rate / best:.2f} | {t.first:.2f} |")


def versions(device: str) -> str:
    found = f"torch {torch.__version__}, Python {platform.python_version()}"
    if device == "cuda":
        import triton

        return f"{torch.cuda.get_device_name()}, {found}, triton {triton.__version__}"
    return f"{processor()}, {torch.get_num_threads()} threads, {found}"


def processor() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--spec", action="append", help="a format or spec, once each; all by default")
    parser.add_argument("--repeats", type=int, help="timed calls a line; 7 on a CPU, 30 on CUDA by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns on a CPU")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument(
        "--processor-time", action="store_true", help="on a busy machine: time of the processor, for one thread"
    )
    parser.add_argument(
        "--keep-builds", action="store_true", help="use and keep the builds of BINADE_CACHE_DIR and TRITON_CACHE_DIR"
    )
    args = parser.parse_args()
    if args.processor_time:
        global CLOCK
        CLOCK, args.threads = time.process_time, 1
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "bench_quantize: no CUDA device was found; --device cpu runs here\n")
    with tempfile.TemporaryDirectory() as builds:
        if not args.keep_builds:
            os.environ["BINADE_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = builds
        from binade.quant import FORMATS

        formats = [str(Spec.of(text)) for text in args.spec or (*FORMATS, *SPECS)]
        torch.set_num_threads(args.threads)
        print(versions(args.device), end="\n\n")
        if args.device == "cuda":
            cuda_table(formats, args.repeats or 30, (16384, 8192))
        else:
            cpu_table(formats, args.repeats or 7, args.size, args.dtype)


if __name__ == "__main__":
    main()

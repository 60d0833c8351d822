"""How long `identify` takes for 4096×4096 values, compared with rounding them to one format in the same run.

    python -m tests.bench.bench_identify

Each line is one call: a tensor that a spec made, with blocks along the last or the first axis; or one with a fault, for
which all hypotheses up to the right one are tried. seconds: by the clock; processor: of all threads, which depends less
on what else the machine does. ratio = processor seconds of identify / those of `fake_quantize` to nvfp4, the median of
five, after its kernel is built. "right" says whether the spec or the fault was named.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from binade.quant import fake_quantize
from binade.quant.identification.search import identify
from binade.quant.specs import Spec

SPECS = (
    *("mxfp4", "mxfp8(scale=rceil)", "nvfp4", "nvfp4(block=16x16)", "fp8_e4m3(block=128x128, scale=deepgemm)"),
    *("fp8_e4m3", "hifp8", "hif4", "bf16", "mxfp8_e5m2(rounding=half_away)"),
)


def timed(call) -> tuple[float, float, object]:
    """(seconds by the clock, processor seconds, the result)."""
    begin, work = time.perf_counter(), time.process_time()
    result = call()
    return time.perf_counter() - begin, time.process_time() - work, result


def faults(x: Tensor) -> dict[str, tuple[Tensor, str]]:
    """The values, and a part of the answer."""
    half = fake_quantize(x, "mxfp8(scale=rceil)")
    half[1::2] = fake_quantize(x[1::2], "mxfp8(scale=floor)")
    return {
        "x rounded to bfloat16": (fake_quantize(x.bfloat16(), "mxfp4").float(), "bfloat16"),
        "rounded twice": (fake_quantize(fake_quantize(x, "mxfp8"), "mxfp4"), "rounded twice"),
        "nibbles swapped": (fake_quantize(x, "mxfp4").reshape(-1, 2).flip(-1).reshape(x.shape), "swapped"),
        "every second row": (half, "every second line"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    size = parser.parse_args().size
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    fake_quantize(x, "nvfp4")
    quantize = statistics.median(timed(lambda: fake_quantize(x, "nvfp4"))[1] for _ in range(5))
    print(f"{torch.get_num_threads()} threads, {size}×{size}, fake_quantize to nvfp4: {quantize:.3f} processor seconds")
    print(f"{'tensor':44}  axis  seconds  processor    ratio  right")

    def report(name: str, dim: int, q: Tensor, wanted: Spec | str) -> None:
        seconds, work, found = timed(lambda: identify(x, q))
        named = {outcome.spec for outcome in found.matches}
        right = wanted in str(found) if isinstance(wanted, str) else wanted in named
        print(f"{name:44}  {dim:4}  {seconds:7.2f}  {work:9.2f}  {work / quantize:7.0f}  {right}", flush=True)

    for spec in SPECS:
        for dim in (-1, 0):
            report(spec, dim, fake_quantize(x, spec, dim), Spec.of(spec))
    for name, (q, part) in faults(x).items():
        report(name, -1, q, part)


if __name__ == "__main__":
    main()

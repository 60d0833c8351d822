"""Products of bfloat16 operands on a CPU: `gemm.multiply` against torch's own, for the three GEMMs of a linear layer.

    python -m tests.bench.bench_products [TOKENS IN OUT]

The result depends on the instructions of the processor, which are printed.
"""

from __future__ import annotations

import sys
from time import perf_counter

import torch

from binade.quant.gemm import multiply


def main() -> None:
    tokens, features, out = map(int, sys.argv[1:4]) if len(sys.argv) > 1 else (512, 256, 1024)
    x, weight, grad = (torch.randn(shape).bfloat16() for shape in ((tokens, features), (out, features), (tokens, out)))
    gemms = {"forward": (x, weight.t()), "dgrad": (grad, weight), "wgrad": (grad.t(), x)}
    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, {tokens} tokens")
    for name, operands in gemms.items():
        own, of_torch = (min(_time(function, operands) for _ in range(5)) for function in (multiply, torch.matmul))
        print(f"{name:8} torch {of_torch * 1e3:8.2f} ms, multiply {own * 1e3:8.2f} ms, ratio {of_torch / own:6.1f}")


def _time(function, operands) -> float:
    start = perf_counter()
    function(*operands)
    return perf_counter() - start


if __name__ == "__main__":
    main()

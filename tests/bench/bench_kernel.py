"""What a step costs when products are seen in kernels, against the adapters and against a plain model.

    python -m tests.bench.bench_kernel [--rounds 9] [--layers 2] [--hidden 512] [--length 128] [--steps 3]

Forward and backward of a Llama of transformers with bfloat16 activations, on one thread. All variants take turns, round
after round: each turn instruments the model anew, runs a step that is not timed, then the timed ones. Times are
processor times, since the machine may be busy. A ratio is the median of those of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from binade.collector import Recorder, Watch, instrument
from tests.bench.bench_instrument import hugging_face

WAYS: dict[str, Any] = {"adapters": {}, "kernel": "kernel"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rounds", 9), ("layers", 2), ("hidden", 512), ("length", 128), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = hugging_face(given.layers, given.hidden)
    tokens = torch.randint(256, (1, given.length))
    print(f"torch {torch.__version__}, {given.layers} layers, hidden {given.hidden}, {given.length} tokens, 1 thread")
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        keep = stack.enter_context(Recorder(root, max_bytes=0, scores=(), measures=()))
        idle = stack.enter_context(Recorder(root, watch=Watch(watch="every 1000000 steps")))
        position = iter(range(1 << 30))

        def step() -> None:
            loss(model, tokens).backward()

        def recorded() -> None:
            with keep.at(next(position), 0):
                step()
            keep.settle()

        def passed() -> None:
            with idle.at(1 + next(position), 0, record=False):
                step()

        def timed(run: Callable[[], None], recipe: str | None, recorder: Recorder | None, products: Any) -> float:
            with ExitStack() as undo:
                if recipe:
                    undo.enter_context(instrument(model, recipe, recorder, products=products, backend="torch"))
                run()
                start = time.process_time()
                for _ in range(given.steps):
                    run()
                return (time.process_time() - start) / given.steps

        kinds: dict[str, tuple[str, Recorder | None, Callable[[], None]]] = {
            "bf16, recorder waits": ("bf16", idle, passed),
            "bf16, recorded": ("bf16", keep, recorded),
            "mxfp8": ("mxfp8", None, step),
            "mxfp8, recorded": ("mxfp8", keep, recorded),
        }
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(given.rounds):
            times.setdefault(("plain", ""), []).append(timed(step, None, None, {}))
            for kind, (recipe, recorder, run) in kinds.items():
                for way, products in WAYS.items():
                    times.setdefault((kind, way), []).append(timed(run, recipe, recorder, products))
    plain = times["plain", ""]
    print(f"plain: {statistics.median(plain) * 1e3:.2f} ms")
    for kind in kinds:
        of_plain = [ratio(times[kind, way], plain) for way in WAYS]
        print(
            f"{kind:<20} of plain: adapters {of_plain[0]:.3f}, kernel {of_plain[1]:.3f}; "
            f"kernel of adapters {ratio(times[kind, 'kernel'], times[kind, 'adapters']):.3f}"
        )


def ratio(times: list[float], of: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, of, strict=True))


if __name__ == "__main__":
    main()

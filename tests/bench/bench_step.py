"""What recording costs: a training step, bare, quantized and recorded, beside what plain hooks do on the same tensors.

    python -m tests.bench.bench_step [--device cuda] [--full] [--rounds N]

All variants train the same model on the same batch in turn, round after round; a ratio is of medians to the bare
step's. Plain hooks see every tensor that the recorder sees (inputs, weights, outputs and their gradients of every
GEMM), and take its min, max, mean and std, or copy it to the host, or torch.save it, within the step. What the recorder
writes behind the step is waited for within it too. `every 20th` is a recorded step and 19 others, over 20 bare ones.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from collector.capture import Recorder, instrument
from collector.config import DEFAULT_SCORES
from collector.model import GPTModel
from collector.shapes import MODELS, Shape
from quant.gemm import Observed
from tests.bench.bench_quantize import versions

RECIPE = "mxfp8"


class PlainHooks:
    """Stands where a Recorder stands, and does with each tensor what users' own hooks do."""

    def __init__(self, use: Callable[[torch.Tensor], object]) -> None:
        self.use = use

    def tap(self, *_: object) -> Callable[[Observed], None]:
        def see(seen: Observed) -> None:
            self.use(seen.tensor)

        return see


def four_numbers(x: torch.Tensor) -> list[float]:
    x = x.float()
    return [x.min().item(), x.max().item(), x.mean().item(), x.std().item()]


def saver(directory: Path) -> Callable[[torch.Tensor], None]:
    count = iter(range(1 << 40))
    return lambda x: torch.save(x.clone(), directory / f"{next(count):06d}.pt")


@contextmanager
def recording(recorder: Recorder, number: Iterator[int]) -> Iterator[None]:
    with recorder.at(next(number), 0):
        yield


def build(shape: Shape, device: torch.device, length: int) -> Callable[[], None]:
    """A step: forward, backward, optimizer."""
    with device:
        model = GPTModel(shape)
    model.initialize(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(shape.vocab, (1, length), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    step.model = model
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--full", action="store_true", help="the published width, on a CPU one layer of it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequence-length", type=int, default=512)
    given = parser.parse_args()
    device = torch.device(given.device)
    shape = MODELS["llama32-1b"]["full" if given.full else "tiny"]
    if given.full and device.type == "cpu":
        shape = replace(shape, layers=1, vocab=384)
    print(f"{versions(given.device)}; {shape.describe()}, {given.sequence_length} tokens", end="\n\n")
    step = build(shape, device, given.sequence_length)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        root = Path(place)
        (root / "saved").mkdir()

        def recorder(**options: object) -> Recorder:
            return stack.enter_context(Recorder(root / "runs", max_bytes=1 << 40, **options))

        def hooked(use: Callable[[torch.Tensor], object]) -> Callable[[], None]:
            def run() -> None:
                with instrument(step.model, "bf16", PlainHooks(use)):
                    step()

            return run

        def quantized(backend: str, recipe: str = RECIPE) -> Callable[[], None]:
            def run() -> None:
                with instrument(step.model, recipe, backend=backend):
                    step()

            return run

        def recorded(keep: Recorder, recipe: str = "bf16") -> Callable[[], None]:
            number = iter(range(1 << 30))

            def run() -> None:
                with instrument(step.model, recipe, keep, backend="torch"), recording(keep, number):
                    step()

            return run

        variants: dict[str, Callable[[], None]] = {
            "bare": step,
            "hooks: min, max, mean, std": hooked(four_numbers),
            "hooks: copy to the host": hooked(lambda x: x.cpu().clone()),
            "hooks: torch.save each": hooked(saver(root / "saved")),
            f"{RECIPE} by torch": quantized("torch"),
            f"{RECIPE} by Triton": quantized("triton"),
            "recorded: statistics, sketch": recorded(recorder(raw=False)),
            "recorded: + four scores": recorded(recorder(raw=False, scores=DEFAULT_SCORES)),
            "recorded: statistics, raw": recorded(recorder()),
            "recorded: + four scores, raw": recorded(recorder(scores=DEFAULT_SCORES)),
            f"recorded: all, {RECIPE} by torch": recorded(recorder(scores=DEFAULT_SCORES), RECIPE),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(given.rounds + 1):
            for name, run in variants.items():
                start = time.perf_counter()
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
            for path in (root / "saved").iterdir():
                path.unlink()
    bare = statistics.median(seconds["bare"])
    print("| step | ms | of a bare step | every 20th |\n|---|---|---|---|")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"| {name} | {median * 1e3:.1f} | {median / bare:.2f} | {(19 * bare + median) / (20 * bare):.2f} |")


if __name__ == "__main__":
    main()

"""What recording costs: a training step, bare, quantized and recorded, compared with plain hooks on the same tensors.

    python -m tests.bench.bench_step [--device cuda] [--full] [--layers N] [--rounds N] [--only watched]

All variants train the same model on the same batch in turn, round after round; a ratio is that of medians to the bare
step's. Plain hooks see every tensor that the recorder sees (inputs, weights, outputs and their gradients of every
GEMM), and take its min, max, mean and std, or copy it to the host, or torch.save it, within the step. The recorder
writes in the background: `until written` also waits until all is on the disk (synchronized, which torch.save is not).
`every 20th` is the time of one such step until written and 19 bare ones, divided by that of 20 bare ones. `processor`
is the processor time of all threads until then, divided by that of the bare step: use it on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the collector does

import torch
import torch.nn.functional as F

from binade.collector.capture.clock import Clock
from binade.collector.capture.instrument import instrument
from binade.collector.capture.options import Watch
from binade.collector.capture.recorder import Recorder
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.models.shape import Shape
from binade.collector.probes.probe import Probes
from binade.collector.settings import DEFAULT_SCORES
from binade.data.run.tensor_kinds import LATER, Measure
from binade.quant.gemm import Observed
from tests.bench.bench_quantize import versions

RECIPE = "mxfp8"
TRIGGERS = ("sqnr_db < 12 for 3", "saturated > 99%", "absmax > 800 x median(20)", "loss > mean + 4 sd", "nan")
ALL = tuple(Measure)  # the results' errors first


@dataclass(frozen=True)
class PlainHooks:
    """Stands where a Recorder's Observing stands, and does with each tensor what users' own hooks do."""

    use: Callable[[torch.Tensor], object]
    probes, places = Probes(Clock()), frozenset()

    def tap(self, *_: object) -> Callable[[Observed], None]:
        def see(seen: Observed) -> None:
            if seen.name not in LATER:
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
    parser.add_argument("--layers", type=int, help="how many, with a vocabulary of 384; with --full on a CPU 1")
    parser.add_argument("--only", default="", help="a regular expression: the variants to measure beside the bare step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequence-length", type=int, default=512)
    given = parser.parse_args()
    device = torch.device(given.device)
    shape = MODELS["llama32-1b"]["full" if given.full else "tiny"]
    if layers := given.layers or (1 if given.full and device.type == "cpu" else None):
        shape = replace(shape, layers=layers, vocab=384)  # a whole vocabulary would outweigh few layers
    print(f"{versions(given.device)}; {shape.describe()}, {given.sequence_length} tokens", end="\n\n")
    step = build(shape, device, given.sequence_length)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        root = Path(place)
        (root / "saved").mkdir()

        def recorder(**options: object) -> Recorder:
            return stack.enter_context(Recorder(root / "runs", **{"scores": (), "max_bytes": 1 << 40} | options))

        def hooked(use: Callable[[torch.Tensor], object]) -> Callable[[], None]:
            def run() -> None:
                plain = Recorder(enabled=True)
                plain.observing, plain.compile = PlainHooks(use), lambda *_: None
                with instrument(step.model, "bf16", plain):
                    step()

            return run

        def quantized(backend: str, recipe: str = RECIPE) -> Callable[[], None]:
            def run() -> None:
                with instrument(step.model, recipe, backend=backend):
                    step()

            return run

        def recorded(name: str, recipe: str = "bf16", **options: object) -> None:
            keep, number = recorder(**options), iter(range(1 << 30))

            def run() -> None:
                with instrument(step.model, recipe, keep, backend="torch"), recording(keep, number):
                    step()

            variants[name], settle[name] = run, keep.settle

        def watched(name: str, recipe: str = "bf16", **options: object) -> None:
            """A model of its own that stays instrumented; its recorder watches every step, or none of these."""
            own, keep = build(shape, device, given.sequence_length), recorder(watch=Watch(**options))
            stack.enter_context(instrument(own.model, recipe, keep, backend="torch"))
            number = iter(range(1, 1 << 30))

            def run() -> None:
                with keep.at(next(number), 0, record=False):
                    own()

            variants[name], settle[name] = run, keep.settle

        variants: dict[str, Callable[[], None]] = {
            "bare": step,
            "hooks: min, max, mean, std": hooked(four_numbers),
            "hooks: copy to the host": hooked(lambda x: x.cpu().clone()),
            "hooks: torch.save each": hooked(saver(root / "saved")),
            f"{RECIPE} by torch": quantized("torch"),
            f"{RECIPE} by Triton": quantized("triton"),
        }
        settle: dict[str, Callable[[], None]] = {}
        scored = {"max_bytes": 0, "scores": DEFAULT_SCORES}
        recorded("recorded: statistics, sketch", max_bytes=0, scores=(), measures=())
        recorded(f"recorded: + {len(DEFAULT_SCORES)} scores along two axes", **scored, measures=())
        recorded("recorded: + blocks", **scored, measures=("blocks",))
        recorded("recorded: + raw, all of bf16", scores=DEFAULT_SCORES)
        recorded(f"recorded: {RECIPE} by torch, without results", RECIPE, scores=DEFAULT_SCORES, measures=ALL[1:])
        recorded(f"recorded: {RECIPE} by torch, all", RECIPE, scores=DEFAULT_SCORES, measures=ALL)
        watched("watched: not in this step", watch="every 1000000 steps")
        watched("watched: not in this step, find_nan", watch="every 1000000 steps", find_nan=True)
        watched("watched: basic", watch="every step")
        watched("watched: basic, and five triggers", watch="every step", trigger=TRIGGERS, capture_steps=0)
        watched(f"watched: {RECIPE} by torch, not in this step", RECIPE, watch="every 1000000 steps")
        watched(f"watched: {RECIPE} by torch, basic", RECIPE, watch="every step")
        variants = {name: run for name, run in variants.items() if name == "bare" or re.search(given.only, name)}
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in variants}
        for number in range(given.rounds + 1):
            for name, run in variants.items():
                start, used = time.perf_counter(), time.process_time()
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                stepped = time.perf_counter() - start
                if name in settle:
                    settle[name]()
                if number:  # the first round warms up
                    times[name].append((stepped, time.perf_counter() - start, time.process_time() - used))
            for path in (root / "saved").iterdir():
                path.unlink()
    median = {name: [statistics.median(column) for column in zip(*each, strict=True)] for name, each in times.items()}
    bare, _, bare_used = median["bare"]
    print("| step | ms | of a bare step | until written | every 20th | processor |\n|---|---|---|---|---|---|")
    for name, (step_time, written, used) in median.items():
        rest = (step_time / bare, written / bare, (19 * bare + written) / (20 * bare), used / bare_used)
        print(f"| {name} | {step_time * 1e3:.1f} | {' | '.join(f'{one:.2f}' for one in rest)} |")


if __name__ == "__main__":
    main()

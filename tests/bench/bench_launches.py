"""What a recorded step costs on a GPU: counted without one, or measured on it.

    python -m tests.bench.bench_launches [--tokens 8192] [--recipe mxfp8] [--only linear] [--device cuda]

One forward and backward pass of a linear layer (4096 × 4096) and of an attention core (32 heads, 8 of them key-value,
128 wide) of an 8B model in bfloat16: bare, attached (not recorded), and recorded with statistics, the defaults of a
Recorder on a GPU, and everything. Values are not kept.

    launches   kernels, GEMMs included; memory that is filled counts as one
    copies     from the device to the host
    GEMMs      matrix products
    GB         read and written by all kernels but GEMMs
    peak MB    the most memory allocated on the device, beyond what is allocated before the step

Without a device they are counted on tensors that have no values (tests/collector/fake_cuda.py), which needs torch's CPU
build and a C++ compiler. The milliseconds are then an estimate: bytes at COPY, LAUNCH for each kernel, GEMMs at GEMM.
With `--device cuda`, launches and copies are those that torch.profiler saw, the peak is the allocator's, and the
milliseconds are measured with CUDA events while the writer's thread rests; the bytes are not known.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from binade.collector.capture.recorder import Recorder

COPY, LAUNCH, GEMM = 2.80e12, 5e-6, 700e12  # bytes/s of an H100's copy, measured; s; FLOP/s
HIDDEN, HEADS, GROUPS, HEAD = 4096, 32, 8, 128
CASES = ("bare", "attached", "statistics", "defaults", "everything")


@dataclass
class Counts:
    launches: int = 0
    copies: int = 0
    gemms: int = 0
    flops: float = 0.0
    nbytes: int = 0
    peak: int = 0
    seconds: float = 0.0

    @property
    def estimate(self) -> float:
        return self.nbytes / COPY + self.launches * LAUNCH + self.flops / GEMM


def linear(tokens: int, device: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A linear layer, and its forward pass."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN, bias=False, device=device, dtype=torch.bfloat16))
    x = torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    return model, lambda: model(x)


def attention(tokens: int, device: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    import torch

    class Core(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    model = torch.nn.Sequential()
    model.core = Core()
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    q = torch.randn(1, HEADS, tokens, HEAD, **options)
    k, v = (torch.randn(1, GROUPS, tokens, HEAD, **options) for _ in range(2))
    return model, lambda: model.core(q, k, v)


LAYERS = {"linear": linear, "attention": attention}


class Steps:
    """The steps of one case: `run` is one pass and the end of the iteration."""

    def __init__(self, stack: ExitStack, layer: str, case: str, recipe: str, tokens: int, device: str) -> None:
        from binade.collector.capture.instrument import instrument
        from binade.collector.capture.recorder import Recorder
        from binade.collector.settings import DEFAULT_SCORES
        from binade.data.run.tensor_kinds import Measure

        self.model, self.forward = LAYERS[layer](tokens, device)
        self.recorder: Recorder | None = None
        if case == "bare":
            return
        root = stack.enter_context(tempfile.TemporaryDirectory())
        asked: dict[str, Any] = {
            "attached": {"iterations": 0},
            "statistics": {"scores": (), "measures": ()},
            "defaults": {"measures": (Measure.BLOCKS,)},
            "everything": {"measures": tuple(Measure)},
        }[case]
        self.recorder = stack.enter_context(Recorder(root, max_bytes=0, **{"scores": DEFAULT_SCORES} | asked))
        stack.enter_context(instrument(self.model, recipe, self.recorder))

    def run(self) -> None:
        y = self.forward()
        y.backward(y.detach())
        self.model.zero_grad()
        if self.recorder:
            self.recorder.step()


@contextmanager
def resting(recorder: Recorder | None, discard: bool) -> Iterator[None]:
    """The writer's thread rests; at the end, what waits for it is discarded or done."""
    if recorder is None:
        yield
        return
    go_on, tasks = threading.Event(), recorder.session.writing._tasks
    tasks.put(lambda: go_on.wait())
    try:
        yield
    finally:
        if discard:
            recorder.observing.measurer.drafts.drafts.clear()
            while not tasks.empty():
                tasks.get()
        go_on.set()


def counted(layer: str, case: str, recipe: str, tokens: int) -> Counts:
    """Of the second of two steps on a device that is not there: the first makes what is kept."""
    from tests.collector import fake_cuda

    with ExitStack() as stack:
        steps = Steps(stack, layer, case, recipe, tokens, "cuda")
        with resting(steps.recorder, discard=True):  # values that are not there cannot be written
            steps.run()
            with meter_of(fake_cuda) as counts:
                steps.run()
    return counts


def meter_of(fake_cuda: Any) -> Any:
    """A context that counts what runs on the device."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    gemms = {
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    }
    free = {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "detach",
        "_unsafe_view",
        "set_",
        "is_pinned",
        "lift_fresh",
    }

    class Meter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.counts, self.now = Counts(), 0
            self.known: weakref.WeakSet = weakref.WeakSet()

        def __enter__(self) -> Counts:
            super().__enter__()
            fake_cuda.Launches.launched = staticmethod(self.launched)
            return self.counts

        def __exit__(self, *error: Any) -> None:
            fake_cuda.Launches.launched = staticmethod(lambda _: None)
            super().__exit__(*error)

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name, counts = func.overloadpacket.__name__, self.counts
            before = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            after = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            on_device = {id(each): each.nbytes for each in (*before, *after) if each.device.type == "cuda"}
            for each in before:
                self.known.add(each.untyped_storage())
            for each in after:
                self.allocate(each)
            if not on_device or func.is_view or func.namespace == "prim" or name in free:
                return result
            if any(each.device.type == "cpu" and each.dim() for each in after):
                counts.copies += 1
                return result
            counts.launches += 1
            if name in gemms:
                counts.gemms += 1
                counts.flops += 2.0 * after[0].numel() * before[-2].shape[-1]
            else:
                counts.nbytes += sum(on_device.values())
            return result

        def launched(self, tensors: list[Tensor]) -> None:
            """A Triton kernel, which reads or writes each of its tensors once."""
            self.counts.launches += 1
            self.counts.nbytes += sum({id(each): each.nbytes for each in tensors}.values())

        def allocate(self, tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cuda" and storage not in self.known:
                self.known.add(storage)
                size = storage.nbytes()
                self.now += size
                self.counts.peak = max(self.counts.peak, self.now)
                weakref.finalize(storage, self.free, size)

        def free(self, size: int) -> None:
            self.now -= size

    return Meter()


def measured(layer: str, case: str, recipe: str, tokens: int) -> Counts:
    """On the device, after two steps that compile kernels and make what is kept."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    counts = Counts()
    with ExitStack() as stack:
        steps = Steps(stack, layer, case, recipe, tokens, "cuda")
        for _ in range(2):
            steps.run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps.run()
        torch.cuda.synchronize()
        counts.peak = torch.cuda.max_memory_allocated() - before
        times = []
        for _ in range(7):
            if steps.recorder:
                steps.recorder.settle()  # the writer's thread has nothing left of the step before
            with resting(steps.recorder, discard=False):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                steps.run()
                end.record()
                torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        counts.seconds = statistics.median(times)
        if steps.recorder:
            steps.recorder.settle()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            steps.run()
            torch.cuda.synchronize()
        for event in profiler.events():
            name = event.name.lower()
            if "dtoh" in name:
                counts.copies += 1
            elif "memcpy htod" not in name and event.device_type == torch.autograd.DeviceType.CUDA:
                counts.launches += 1
                counts.gemms += any(word in name for word in ("gemm", "nvjet", "flash", "cutlass", "fmha"))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--only", choices=LAYERS)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="measure there; cpu counts, without a device")
    args = parser.parse_args()
    real = args.device == "cuda"
    if not real:
        os.environ["TRITON_INTERPRET"] = "0"
        from tests.collector import fake_cuda

        fake_cuda.pretend()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() if not real else ExitStack():
        print(f"{torch.cuda.get_device_name() if real else 'counted'}, {args.recipe}, {args.tokens} tokens\n")
        time = "ms" if real else "ms, estimated"
        print(f"| layer | step | launches | copies | GEMMs | GB | peak MB | {time} | of bare |\n|{'---|' * 9}")
        for layer in [args.only] if args.only else LAYERS:
            bare = 0.0
            for case in CASES:
                counts = (measured if real else counted)(layer, case, args.recipe, args.tokens)
                seconds = counts.seconds if real else counts.estimate
                bare = bare or seconds
                amount = "" if real else f"{counts.nbytes / 1e9:.2f}"
                print(
                    f"| {layer} | {case} | {counts.launches} | {counts.copies} | {counts.gemms} | {amount} "
                    f"| {counts.peak / 1e6:.1f} | {seconds * 1e3:.3f} | {seconds / bare:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

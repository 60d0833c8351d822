"""A recorded step on a CUDA device that is not there, as a program: python -m tests.collector.fake_cuda [RECIPE ...]

Torch's FakeTensorMode gives every tensor a shape, a dtype and the device "cuda", but no values. What would ask a GPU
for a value (`.item()`, `.tolist()`, `bool(tensor)`, `nonzero`, a mask as an index) fails there, and `NoWaiting` refuses
the copies that wait. The Triton kernels are not launched. Autograd asks the CUDA build of torch for streams and events:
the library built from SOURCE answers in its place.

Prints, for each recipe, how many tensors were recorded and how many kernels would have been launched.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
struct OneDevice : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, OneDevice)
}
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""


def load_device() -> None:
    """Before torch is imported: it asks only once which devices it was built for."""
    package = importlib.util.find_spec("torch")
    assert package and package.origin and "torch" not in sys.modules
    home = Path(package.origin).parent
    with tempfile.TemporaryDirectory() as place:
        built = Path(place, "device.so")
        command = ["c++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{home}/include", "-x", "c++", "-", "-o", built]
        libraries = [f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-ltorch_cpu", "-lc10"]
        subprocess.run([*command, *libraries], input=SOURCE, text=True, check=True)
        ctypes.CDLL(str(built))


load_device()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from binade.collector.capture import delayed_scales  # noqa: E402
from binade.collector.capture.instrument import instrument  # noqa: E402
from binade.collector.capture.recorder import Recorder  # noqa: E402
from binade.collector.models.model import GPTModel  # noqa: E402
from binade.collector.settings import DEFAULT_SCORES  # noqa: E402
from binade.quant import memory, rotation  # noqa: E402
from binade.quant.backends import triton_kernels, triton_summary  # noqa: E402
from tests.collector.small_model import SHAPE  # noqa: E402

RECIPES = ("mxfp8", "nvidia_nvfp4(without=keep)", "te_delayed")
KERNELS = {
    triton_kernels: ("quantize_dequantize", "score_formats", "run_errors", "run_moments"),
    triton_summary: ("summarize",),
}


Spoil = Callable[[torch.Tensor], object]


class WaitedError(AssertionError):
    """The step would have waited for the GPU."""


class NoWaiting(TorchDispatchMode):
    """Refuses copies between devices that wait: all but those to and from pinned memory with non_blocking=True."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self.refuse(args[0].device, torch.device(kwargs.get("device") or args[0].device), "to()")
        elif func is torch.ops.aten.copy_.default and not (len(args) > 2 and args[2]):
            self.refuse(args[1].device, args[0].device, "copy_()")
        elif func is torch.ops.aten._local_scalar_dense.default:
            raise WaitedError("a value was asked for")
        return func(*args, **kwargs)

    @staticmethod
    def refuse(source: torch.device, target: torch.device, what: str) -> None:
        if source.type != target.type:
            raise WaitedError(f"{what} from {source} to {target} waits")


class Launches:
    """Stands for a kernel and counts what would be launched. launched: is told the tensors of each launch."""

    count = 0
    launched: Callable[[list[torch.Tensor]], None] = staticmethod(lambda tensors: None)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *args: Any, **_: Any) -> None:
        Launches.count += 1
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        assert all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)
        Launches.launched(tensors)


class Event:
    """What a copy to pinned memory records. Only the writing thread may wait for it, and it does not run here."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        raise WaitedError("the step waits for a copy")


def pretend() -> None:
    """The parts of torch.cuda and Triton that ask for the GPU itself, and fake tensors that pass for real ones."""
    vars(memory).update(_has_memory=lambda x: True, _ORDINARY=(*memory._ORDINARY, FakeTensor))
    vars(memory).update(_disable_current_modes=nullcontext)  # all that recording does is seen
    for module, kernels in KERNELS.items():
        vars(module)["INTERPRETED"] = False
        vars(module).update({f"{name}_kernel": Launches() for name in kernels})
    torch.cuda.Event = Event
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(name="none", multi_processor_count=132)
    torch.cuda.current_device = lambda: 0
    delayed_scales.save = lambda tensors: b""  # at the end of a run: fake values cannot be written


def build() -> GPTModel:
    with torch.device("cuda"):
        return GPTModel(replace(SHAPE, layers=1))


def backward(model: GPTModel, spoil: Spoil | None = None) -> None:
    """A forward and a backward pass, in which `spoil` is called with a value of the logits' gradient."""
    tokens = torch.empty(2, 40, dtype=torch.int64, device="cuda")
    logits = model(tokens)

    def hook(gradient: torch.Tensor) -> None:
        if spoil:
            spoil(gradient[0, 0, :1])

    logits.register_hook(hook)
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()


def recorded(model: GPTModel, recipe: str) -> str:
    """Two recorded steps, of which the second must not wait: the first makes what is kept, such as constants on the
    device."""
    with (
        tempfile.TemporaryDirectory() as root,
        Recorder(root, scores=DEFAULT_SCORES) as recorder,
        instrument(model, recipe, recorder),
    ):
        stopped, tasks = threading.Event(), recorder.session.writing._tasks
        tasks.put(lambda: stopped.wait())  # the thread would fetch what was measured
        before = Launches.count
        try:
            backward(model)
            with NoWaiting():
                recorder.step()
                backward(model)
                captured = len(recorder.observing.measurer.drafts.drafts)
                recorder.step()
        finally:
            recorder.observing.measurer.drafts.drafts.clear()
            while not tasks.empty():  # fake values cannot be written
                tasks.get()
            stopped.set()
    return f"{recipe}: {captured} tensors, {Launches.count - before} launches"


def refused(model: GPTModel, spoil: Spoil) -> bool:
    """Whether a backward pass that does this fails, as those of a recorded step must not."""
    try:
        with NoWaiting():
            backward(model, spoil)
    except (WaitedError, RuntimeError):
        return True
    return False


SPOILS: dict[str, Spoil] = {
    "item": lambda x: x.item(),
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "bool": lambda x: bool(x > 0),
    "mask": lambda x: x[x > 0],
    "constant": lambda x: x + torch.tensor([1.0], device="cuda"),
    "sum": lambda x: x.sum() + torch.full((), 1.0, device="cuda"),  # waits for nothing
}


def main() -> None:
    pretend()
    with FakeTensorMode():
        model = build()
        backward(model)
        for name, spoil in SPOILS.items():
            print(f"{name}: {'refused' if refused(model, spoil) else 'passed'}", flush=True)
        rotation._fixed_signs(torch.device("cuda", 0))  # the thread of a backward pass can make no fake constant
        for recipe in sys.argv[1:] or RECIPES:
            print(recorded(build(), recipe), flush=True)


if __name__ == "__main__":
    main()

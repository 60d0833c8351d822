"""A recorded step on an accelerator other than CUDA, as a program: python -m tests.collector.fake_accelerator

Tensors of the device "npu" are a subclass that computes with tensors of the CPU. Torch takes the device for real:
autograd has a thread for it, and nothing there asks for CUDA. Compares the rows of each recipe with those of a CPU, and
prints their number.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from binade.collector import Recorder, Watch, instrument
from binade.collector.probes.provenance import stays
from binade.collector.ranks import Ranks
from binade.data.index.catalog import Catalog
from binade.data.run.tensor_kinds import Measure

_setup_privateuseone_for_python_backend("npu")
DEVICE, CPU = torch.device("npu", 0), torch.device("cpu")
RECIPES = ("bf16", "mxfp8", "mxfp8(rounding=stochastic)", "nvidia_nvfp4(without=keep)", "te_delayed")
NAMES = {DEVICE: '"device": "npu"', CPU: '"device": "cpu, '}
EXACT = ("numel", "zeros", "absmax", "min", "max")
CLOSE = ("mean", "std", "rms", "sqnr_db", "flush_to_zero", "result_sqnr_db")


class OnAccelerator(Tensor):
    @staticmethod
    def __new__(cls, inner: Tensor) -> OnAccelerator:
        made: OnAccelerator = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )
        made.on_cpu = inner
        return made

    def tolist(self) -> Any:  # which torch refuses for subclasses
        return self.on_cpu.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("tensors of an accelerator have no numpy array")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = computed(func, args, kwargs or {})
        return return_and_correct_aliasing(func, args, kwargs or {}, result)


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """func on the CPU. Its result is on the accelerator, unless it copies to the CPU."""
    leaves = func in (torch.ops.aten._to_copy.default,) and torch.device(kwargs.get("device") or DEVICE) == CPU

    def inner(x: Any) -> Any:
        return x.on_cpu if isinstance(x, OnAccelerator) else CPU if x == DEVICE else x

    given, options = (tree_map(inner, each, is_leaf=lambda x: isinstance(x, Tensor)) for each in (args, kwargs))
    options.pop("pin_memory", None)
    result = func(*given, **options)
    return result if leaves else tree_map_only(Tensor, OnAccelerator, result)


aten = torch.library.Library("aten", "IMPL")
aten.impl("copy_", lambda x, source, _=False: (x.on_cpu.copy_(getattr(source, "on_cpu", source)), x)[1], "PrivateUse1")
library = torch.library.Library("_", "IMPL")
library.fallback(lambda func, *args, **kwargs: computed(func, args, kwargs), "PrivateUse1")  # what makes tensors


def recorded(recipe: str, device: torch.device) -> pd.DataFrame:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 32)).to(device)
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(1)).to(device)
    with tempfile.TemporaryDirectory() as root:
        options = {"scores": ("mxfp8", "nvfp4"), "measures": tuple(Measure), "iterations": 2}
        with (
            Recorder(root, watch=Watch(find_nan=True), **options) as recorder,
            instrument(model, recipe, recorder),
        ):
            for _ in range(2):
                model(x).square().mean().backward()
                recorder.step()
        assert NAMES[device] in (Path(recorder.writer.directory) / "run.json").read_text()
        with Catalog.open(root) as catalog:
            found = catalog.tensors()
            found["values"] = [catalog.load(name).float().numpy().tobytes() for name in found["tensor_id"]]
    return found.set_index(["iteration", "layer_index", "module", "tensor_name"]).sort_index()


def fake_group(rank: int, size: int, _: object) -> FakeProcessGroup:
    return FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())


def main() -> None:
    assert stays(torch.ones(2, device=DEVICE))
    dist.Backend.register_backend("hccl", lambda _, *place: fake_group(*place), devices=["npu"])
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=2)
    assert Ranks(0, 2).device.type == "npu"
    dist.destroy_process_group()
    for recipe in RECIPES:
        found, expected = (recorded(recipe, device) for device in (DEVICE, CPU))
        assert found.index.equals(expected.index) and len(found) >= 20, len(found)
        assert (found["values"] == expected["values"]).all()
        pd.testing.assert_frame_equal(found[[*EXACT]], expected[[*EXACT]])
        pd.testing.assert_frame_equal(found[[*CLOSE]], expected[[*CLOSE]], rtol=1e-5)
        print(f"{recipe}: {len(found)} tensors", flush=True)


if __name__ == "__main__":
    main()

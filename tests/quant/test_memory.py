"""Tensors without memory of their own: kernels of the CPU would read address 0, which ends the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from binade import quant
from binade.quant.backends import cpu, moments, native
from binade.quant.memory import address, ordinary
from binade.quant.specs import Spec
from binade.quant.statistics import channel_absmax

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The compiled kernels, where there is a compiler: without them, nothing reads an address."""
    unit = cpu.unit_of(Spec.of("mxfp8"), torch.float32)
    assert unit is not None
    native.built(unit)
    native.built(moments.UNITS[torch.float32])


class Wrapper(Tensor):
    """A tensor that holds another one and does nothing by itself."""

    held: Tensor

    @staticmethod
    def __new__(cls, x: Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=torch.float32)
        made.held = x
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{cls.__name__} does not implement {op}")


class Coded(Wrapper):
    """As 8-bit optimizers keep a state."""

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.held.float() * 2


class Converting(Wrapper):
    """As an AsyncCollectiveTensor: every operation gives an ordinary tensor."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*(x.held if isinstance(x, Converting) else x for x in args), **(kwargs or {}))


class Named(Tensor):
    """A subclass with memory of its own."""


def freed() -> Tensor:
    x = X.clone()
    x.untyped_storage().resize_(0)
    return x


def fake() -> Tensor:
    return FakeTensorMode().from_tensor(X)


COMPLEX = torch.complex(X, X.flip(0))
GIVEN: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
    "dequantize": (lambda: Coded(X), 2 * X),
    "converts": (lambda: Converting(X), X),
    "subclass": (lambda: X.as_subclass(Named), X),
    "negative bit": (lambda: torch._neg_view(X), -X),
    "imaginary part": (lambda: COMPLEX.conj().imag, -X.flip(0)),
    "zero tensor": (lambda: torch._efficientzerotensor(X.shape), torch.zeros_like(X)),
}
REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "implements nothing": (lambda: Wrapper(X), "Wrapper keeps its values"),
    "masked": (lambda: torch.masked.masked_tensor(X, X > 0), "MaskedTensor keeps its values"),
    "fake": (fake, "FakeTensor"),
    "functional": (lambda: torch._to_functional_tensor(X), "functional"),
    "jagged": (lambda: torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged), "nested.*jagged"),
    "nested": (lambda: torch.nested.nested_tensor([X, X[:2]]), "nested"),
    "sparse": (lambda: X.to_sparse(), "sparse_coo"),
    "mkldnn": (lambda: X.to_mkldnn(), "mkldnn"),
    "freed": (freed, "freed"),
}
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "fake_quantize": lambda x: quant.fake_quantize(x, "mxfp8"),
    "transformed": lambda x: quant.fake_quantize(x, "mxfp4(hadamard=32)"),
    "quantize": lambda x: quant.quantize(x, "nvfp4").dequantize(),
    "score": lambda x: quant.score(x, "mxfp8").sqnr_db,
    "compare": lambda x: quant.compare(x, x, "mxfp8")["dynamic_range"],
    "summarize": lambda x: quant.summarize(x).absmax,
    "usage": lambda x: quant.usage(x, "nvfp4").codes.tolist(),
    "look": lambda x: quant.look(x, "mxfp8").result,
    "channels": channel_absmax,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", GIVEN)
def test_a_tensor_that_gives_its_values_is_read_as_these(kind: str, function: str) -> None:
    make, values = GIVEN[kind]
    torch.testing.assert_close(
        FUNCTIONS[function](make()), FUNCTIONS[function](values.clone()), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_without_values_is_refused_by_name(kind: str, function: str) -> None:
    make, text = REFUSED[kind]
    with pytest.raises(TypeError, match=text):
        FUNCTIONS[function](make())


def test_a_transform_of_torch_func_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.vmap(lambda x: quant.fake_quantize(x, "mxfp8"))(X)
    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.grad(lambda x: quant.fake_quantize(x, "mxfp8").sum())(X)


def test_an_address_is_given_of_memory_of_the_cpu_alone() -> None:
    assert address(X) == X.data_ptr()
    assert ordinary(X).data_ptr() == X.data_ptr()
    for x in (Wrapper(X), fake(), freed(), X.to("meta"), torch._neg_view(X)):
        with pytest.raises(TypeError, match="kernel of the CPU"):
            address(x)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_default_device_and_dispatch_modes_change_nothing(function: str) -> None:
    expected = FUNCTIONS[function](X)
    with torch.device("meta"), FlopCounterMode(display=False) as flops:
        given = FUNCTIONS[function](X)
    torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
    assert flops.get_total_flops() == 0


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("place", [Replicate(), Shard(0)], ids=str)
def test_a_dtensor_stays_one_and_its_part_is_rounded(group: None, place: Any) -> None:
    x = distribute_tensor(X, init_device_mesh("cpu", (1,)), [place]).requires_grad_()
    y = quant.fake_quantize(x, "mxfp8")
    assert isinstance(y, DTensor)
    assert y.placements == (place,)
    assert torch.equal(y.to_local(), quant.fake_quantize(X, "mxfp8"))
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.ones_like(X))  # type: ignore[union-attr]

"""Results that a device computes now and the host reads later, many of them with one copy.

later = Later(make, Part(tensor))       nothing waits for the device
arrived = fetch([later, ...])           one copy for each stream that computed some of the tensors
arrived()                               waits for these copies
later()                                 make(array)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

PACKED = 1 << 26

T = TypeVar("T")
S = TypeVar("S")


class LaterPart:
    """A tensor that was computed on the device's current stream, and its values on the host once they were fetched."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.stream = None if tensor.device.type == "cpu" else torch.accelerator.current_stream(tensor.device)
        self.array: np.ndarray | None = None
        self.parts = (self,)

    @property
    def nbytes(self) -> int:
        tensor = self.tensor
        return 0 if tensor is None else tensor.nbytes

    def __call__(self) -> np.ndarray:
        if self.array is None:
            assert self.tensor is not None
            if self.stream is not None:
                self.stream.synchronize()
            self.arrive(self.tensor.cpu().numpy())
        assert self.array is not None
        return self.array

    def arrive(self, array: np.ndarray) -> None:
        self.array, self.tensor, self.stream = array, None, None


class Later(Generic[T]):
    """make(*sources), computed by the first call. A source is the array of a Part, or the result of another Later."""

    def __init__(self, make: Callable[..., T], *sources: LaterPart | Later[Any]) -> None:
        self._make: Callable[..., T] | None = make
        self._sources = sources
        self.parts: tuple[LaterPart, ...] = tuple(part for source in sources for part in source.parts)

    @classmethod
    def known(cls, value: T) -> Later[T]:
        return cls(lambda: value)

    def map(self, make: Callable[[T], S]) -> Later[S]:
        return Later(make, self)

    def __call__(self) -> T:
        if self._make is not None:
            self._value = self._make(*(source() for source in self._sources))
            self._make, self._sources, self.parts = None, (), ()  # what they keep alive is needed no more
        return self._value


def _waiting(results: Iterable[Later[Any]]) -> dict[Any, list[LaterPart]]:
    """The parts that are on a device, by the stream that computed them."""
    streams: dict[Any, dict[int, LaterPart]] = {}
    for result in results:
        for part in result.parts:
            if (stream := part.stream) is not None:  # the thread that writes may fetch it meanwhile
                streams.setdefault(stream, {})[id(part)] = part
    return {stream: list(parts.values()) for stream, parts in streams.items()}


def fetched_nbytes(results: Iterable[Later[Any]]) -> int:
    """How many bytes `fetch` would copy."""
    return sum(part.nbytes for parts in _waiting(results).values() for part in parts)


def fetch(results: Iterable[Later[Any]]) -> Callable[[], None]:
    """A function that waits until the results are on the host.

    The tensors that one stream computed are packed on that stream and copied to pinned memory, about PACKED bytes at a
    time. The pinned memory is freed when they have arrived.
    """
    copies = []
    for stream, parts in _waiting(results).items():
        ends = np.cumsum([part.nbytes for part in parts])
        for pack in np.split(np.array(parts, dtype=object), np.flatnonzero(np.diff(ends // PACKED)) + 1):
            copies.append(_copy(stream, list(pack)))

    def arrived() -> None:
        for copy in copies:
            copy()

    return arrived


def _copy(stream: torch.Stream, parts: list[LaterPart]) -> Callable[[], None]:
    waiting = [(part, tensor) for part in parts if (tensor := part.tensor) is not None]
    if not waiting:
        return lambda: None
    layout = [(part, tensor.shape, tensor.dtype, tensor.nbytes) for part, tensor in waiting]
    done: torch.Event | None = None
    with stream:
        packed = host = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in waiting])
        if packed.is_cuda:  # other accelerators need not have pinned memory
            host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            done = torch.Event(packed.device)
            done.record(stream)

    def copied() -> None:
        if done is None:
            with stream:
                values = host.cpu()
        else:
            done.synchronize()
            values = host
        start = 0
        for part, shape, dtype, nbytes in layout:
            aligned = values[start : start + nbytes].clone()  # which also lets go of pinned memory
            part.arrive(aligned.view(dtype).reshape(shape).numpy())
            start += nbytes

    return copied

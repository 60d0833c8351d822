"""The curves of an instrumented run, in loss.jsonl: one line per iteration, with what the training loop logged and the
hashes by which runs on the same data are matched (data.same_data).

A forward pass that trains is a micro-batch, identified by all tensors that enter the model: ids, labels, masks, images,
embeddings (see `read_by`). Labels and masks that only the loss sees are not known. Tensors on a GPU are copied without
waiting; the writer's thread hashes them. The digests are a chain, so that a training that resumes from a checkpoint
goes on with it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.collector.capture.adapters.products import tensors_in
from binade.collector.capture.writing import copy_later
from binade.data.run.run_writer import RunWriter
from binade.quant.memory import ordinary

SAMPLE = 64  # values of each parameter that are hashed at the start
MOST = 1 << 20  # values of an input that are hashed; of integers, all
Copied = tuple[Tensor, Callable[[], None]]  # as `copy_later` returns them


class Curves:
    """Writes the curves of a run on rank 0. queue: runs a task on the writer's thread, in order. recorded: the latest
    iterations that were recorded in full."""

    def __init__(
        self, writer: RunWriter, queue: Callable[[Callable[[], None]], None], recorded: Collection[int]
    ) -> None:
        self._writer, self._queue, self._recorded = writer, queue, recorded
        self._model: nn.Module | None = None  # the first that trained: of several chunks, only this one is read
        self._iteration: int | None = None  # whose line is not written yet
        self._logged: dict[str, float | Copied] = {}
        self._at = 0  # the recorder's iteration in the last call of `log`
        self._began: float | None = None
        # Only the writer's thread writes the following variables.
        self._digest = ""  # of all data that was read so far; hashed with what is read next
        self._read: int | None = None  # the last iteration whose data is hashed
        self._weights: str | None = None
        self._first: dict[str, Any] | None = None  # the first iteration and its digests, as of `first_step`
        self._writes_first = True  # whether the next line is the run's first

    def begin(self, iteration: int, model: nn.Module, given: object) -> None:
        """A forward pass that trains begins with these arguments."""
        self._go_to(iteration)
        if self._began is None:
            self._began = time.perf_counter()
        if self._model is None:
            self._model = model
            sample = _copies(sample_of(model))
            self._queue(lambda: self._hash_weights(sample))
        if model is self._model:
            copies = _copies(read_by(given))
            self._queue(lambda: self._hash(iteration, copies))

    def log(self, iteration: int, values: Mapping[str, float | Tensor]) -> None:
        """Values of the iteration of the last pass, or of this one if there was no pass."""
        if self._model is None:
            self._go_to(iteration)
        elif "loss" in self._logged and iteration != self._at:  # passes of compiled code are not seen
            self._go_to(iteration - (self._at - (self._iteration or 0)))
        self._at = iteration
        copied = {name: copy_later(x) if isinstance(x, Tensor) else x for name, x in values.items()}
        self._logged |= {"time": time.time()} | copied

    def _go_to(self, iteration: int) -> None:
        if iteration != self._iteration:
            self.close(time.perf_counter() - self._began if self._began is not None else None)
            self._iteration = iteration

    def close(self, seconds: float | None = None) -> None:
        """Queue the line of the iteration that has ended, if it was logged or recorded."""
        recorded = self._iteration in self._recorded
        if self._iteration is not None and (self._logged or recorded):
            line: dict[str, Any] = {"iteration": self._iteration, "loss": None, "time": time.time(), "seconds": seconds}
            line |= {"recorded": recorded} | self._logged
            if line.get("window") == 1:
                del line["window"]
            logged = "loss" in self._logged
            self._queue(lambda: self._write(line, logged))
        self._iteration, self._logged, self._began = None, {}, None

    def resume(self, reading: Mapping[str, Any]) -> None:
        """The training goes on after what `reading` says was read, in another run."""
        self._queue(lambda: self._resume(reading))

    def reading(self) -> dict[str, Any] | None:
        """What was read so far, for `resume`; None for nothing. Call it once the writer's thread has nothing to do."""
        first = self._first or self._start()
        return {"data_sha256": self._digest, "first": first} if first else None

    # The writer's thread runs the methods below.

    def _resume(self, reading: Mapping[str, Any]) -> None:
        self._digest, self._first = reading["data_sha256"], dict(reading["first"])
        self._weights = self._first["weights_sha256"]

    def _start(self) -> dict[str, Any] | None:
        """The iteration that was read last, with its digests; None without one."""
        if self._read is None:
            return None
        return {"iteration": self._read, "data_sha256": self._digest, "weights_sha256": self._weights}

    def _hash_weights(self, sample: Sequence[Copied]) -> None:
        if self._weights is None:
            sha = hashlib.sha256()
            _update(sha, sample)
            self._weights = sha.hexdigest()

    def _hash(self, iteration: int, copies: Sequence[Copied]) -> None:
        if iteration != self._read:
            self._first = self._first or self._start()
        sha = hashlib.sha256(self._digest.encode())
        _update(sha, copies)
        self._digest, self._read = sha.hexdigest(), iteration if copies else None

    def _write(self, line: dict[str, Any], logged: bool) -> None:
        line = {name: _number(value) for name, value in line.items()}
        if logged and line["loss"] is None:
            line["not_finite"] = True
        if self._read == line["iteration"]:
            line |= {"data_sha256": self._digest, "weights_sha256": self._weights}
        if self._writes_first and self._first:
            line["first"] = self._first
        self._writes_first = False
        self._writer.append_loss(line)
        changes: dict[str, Any] = {"iteration": max(line["iteration"], self._writer.status.iteration)}
        if (loss := line["loss"]) is not None:
            first = self._writer.status.loss_first
            changes |= {"loss_first": loss if first is None else first, "loss_last": loss}
        self._writer.update(**changes)


def hash_of(tensors: Iterable[Tensor]) -> str:
    """The SHA-256 of tensors: their dtypes, shapes and values."""
    sha = hashlib.sha256()
    _update(sha, _copies(list(tensors)))
    return sha.hexdigest()


def sample_of(model: nn.Module) -> list[Tensor]:
    """Some values of each parameter that has values, evenly spaced."""
    flat = []
    for parameter in model.parameters():
        with suppress(TypeError):
            flat.append(ordinary(parameter).reshape(-1))
    samples: list[Tensor] = [x[:: max(1, len(x) // SAMPLE)][:SAMPLE].float() for x in flat if x.is_floating_point()]
    devices = dict.fromkeys(x.device for x in samples)
    return [torch.cat([x for x in samples if x.device == device]) for device in devices]


def read_by(given: object) -> list[Tensor]:
    """What a forward pass with these arguments reads: all integers, and all or MOST values of other tensors. A tensor
    that depends on trained weights, such as the activations that enter a part of a model, is no data: it counts only
    if there is nothing else."""
    tensors = [part for x in tensors_in(given) for part in _parts(x)]
    data = [x for x in tensors if not x.requires_grad] or tensors
    return [x if _is_integer(x) or x.numel() <= MOST else _spread(x, MOST) for x in data]


def _parts(x: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of: the values and offsets of a nested one, the part of this rank."""
    if is_dtensor(x):
        return [cast(Any, x).to_local()]
    if x.is_nested:
        return [x.values(), cast(Any, x).offsets()] if x.layout == torch.jagged else list(x.unbind())
    return [x] if x.layout == torch.strided and not x.is_meta else []


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _spread(x: Tensor, most: int) -> Tensor:
    """At most so many values of x, flat and evenly spaced by an odd step, which meets all columns of usual sizes."""
    flat = x.detach().reshape(-1)
    return flat[:: -(-len(flat) // most) | 1]


def _copies(tensors: Sequence[Tensor]) -> list[Copied]:
    return [copy_later(x) for x in tensors]


def _update(sha: Any, copies: Sequence[Copied]) -> None:
    for copy, arrived in copies:
        arrived()
        sha.update(f"{copy.dtype} {tuple(copy.shape)} ".encode())
        sha.update(copy.reshape(-1).view(torch.uint8).numpy())  # without the interpreter's lock


def _number(value: Any) -> Any:
    """A value of a line: a number that JSON has, or None."""
    if isinstance(value, tuple):
        copy, arrived = value
        arrived()
        value = copy.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value

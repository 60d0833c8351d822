"""An observed tensor becomes a draft row: its statistics, sketch and scores, and a copy of its values.

All is computed at once, on the tensor's device; the writer's thread fetches it.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from binade.collector.capture.clock import Moment
from binade.collector.capture.rows import Draft, Drafts, completed
from binade.collector.capture.tried import Tried, specs_for, try_specs
from binade.collector.errors import ConfigError
from binade.collector.models.site import Site
from binade.collector.ranks import Ranks
from binade.collector.recipes.recipe import BF16
from binade.data.run.columns import Identity, RoundedWith, Shard, TensorRow, Trace
from binade.data.run.tensor_kinds import LATER, MAPS, Gemm, Measure, Operation, Phase
from binade.data.words.text import plain_name
from binade.quant.backends.counts import Counted, counted
from binade.quant.blocks import look
from binade.quant.gemm import Observed, Rounding, linear
from binade.quant.later import Later, LaterPart
from binade.quant.measurements import Summary
from binade.quant.quantizer import DTYPES
from binade.quant.specs import GemmFormats, Spec
from binade.quant.summary import summarize_later
from binade.quant.traces import hot_channels_later, sample_later

WORDS = ("model", "size", "dataset", "recipe")  # keys of a configuration that each row has


class Run(Protocol):
    """The run that rows belong to, see `capture.session.RecordingSession`."""

    @property
    def run_id(self) -> str: ...

    def offer(
        self,
        path: Path,
        x: Tensor,
        describe: Callable[[], tuple[dict[str, Any], dict[str, Any]]],
        results: Sequence[Later[Any]],
    ) -> bool: ...

    def is_merged(self, moment: Moment) -> bool: ...


@dataclass(eq=False)
class Measurer:
    """Measures tensors of this rank.

    words      the configuration's WORDS
    run        None outside the Recorder's context
    keeps      whether values are kept
    replica    which data-parallel copy of the model this rank belongs to
    part       which of a replica's ranks this is, of how many
    """

    ranks: Ranks
    measures: frozenset[str]
    keeps: bool
    words: Mapping[str, Any]
    drafts: Drafts

    def __post_init__(self) -> None:
        self.run: Run | None = None
        self.replica = self.ranks.replica
        self.part = self.ranks.tensor.rank, self.ranks.tensor.size
        self.reset()

    def reset(self) -> None:
        """Reset all counts, as before the first run."""
        self.start(0)
        self.drafts.reset()

    def start(self, recorded: int) -> None:
        """So many tensors were recorded before."""
        self.count, self.numbers = recorded, itertools.count(recorded + 1)

    def identity(self, site: Site, moment: Moment, **words: str | None) -> Identity:
        """words: tensor_name, operation and phase; of a tensor of a product also layer_type, component, quant_type."""
        words = {"layer_type": None, "component": None, "quant_type": BF16} | words
        if moment.evaluation and words["operation"] == Operation.FORWARD:
            words["operation"] = Operation.EVALUATION.value
        return Identity(
            **{word: self.words.get(word) for word in WORDS},
            **words,
            layer_index=site.layer_index,
            module=site.module,
            iteration=moment.iteration,
            micro_batch=None if words["operation"] == Operation.OPTIMIZER else moment.micro_batch,
            rank=self.ranks.rank,
            expert=site.expert,
        )

    def measure(
        self,
        seen: Observed,
        site: Site,
        identity: Callable[[], Identity],
        moment: Moment,
        scores: Sequence[Spec],
        gemm: Gemm | None,
        contracted_axis: int | None,
        shard: Shard,
        result_sqnr: Later[float] | None = None,
        merged: bool = True,
        rows: Tensor | None = None,
        tokens_left_out: int | None = None,
    ) -> Draft:
        """Measure and copy a tensor; on a GPU, asynchronously. Returns its row, to whose scores those of later GEMMs
        may be added until the step ends. In a watched step, whatever needs no values is left to the writer's thread:
        here, between the GEMMs of a step, Python takes several times as long.

        merged: whether ranks may merge it. rows: those of the tensor's valid tokens, in [rows, columns], if padding is
        left out. Raises RecorderError outside the Recorder's context.
        """
        run = self._begun
        x, whole = seen.tensor, not moment.basic
        shape, dtype, nbytes = tuple(seen.shape or x.shape), x.dtype, x.numel() * x.element_size()
        identity = cache(identity)  # the file has it too
        traced = whole and Measure.TRACE in self.measures and identity().tensor_name not in MAPS
        valid = x if rows is None else x.flatten(0, -2).index_select(0, rows)
        shown = x.reshape(shape) if rows is None else valid
        trace = _trace_later(seen, shown, identity().tensor_name) if traced else None
        codes = counted(valid) if whole and x.device.type == "cpu" else None
        summary, pairs_left_out = summarized(seen, valid, rows, codes, whole)
        scores = specs_for(tuple(scores), identity().layer_type, identity().tensor_name) if whole else ()
        tried = try_specs(seen, scores, gemm, whole and Measure.BLOCKS in self.measures, codes, rows=rows)
        last_bin = _last_bin_later(x, scores) if x.dim() == 1 and identity().tensor_name == "norm_gain" else None
        captured = datetime.now(UTC)
        shard = self._placed(shard)
        merged = merged and run.is_merged(moment)
        self.count = number = next(self.numbers)  # backward passes of several devices have a thread each
        fmt = next((str(trial.spec) for trial in tried if trial.used), None)
        keeps = whole and self.keeps and not merged
        path = self._save(run, number, x.reshape(shape), identity(), summary, fmt, captured) if keeps else None

        def row(recomputed: bool) -> TensorRow:
            statistics, pairs = summary(), pairs_left_out() if pairs_left_out else None
            scores = [completed(trial, statistics, tokens_left_out, pairs) for trial in tried]
            used = next((score for score in scores if score.used and score.gemm == gemm), None)
            return TensorRow(
                tensor_id=f"r{self.ranks.rank:02d}-{number:06d}",
                run_id=run.run_id,
                identity=identity(),
                captured=captured.replace(tzinfo=None),
                shape=shape,
                dtype=dtype_name(dtype),
                nbytes=nbytes,
                path=str(path) if path else None,
                contracted_axis=contracted_axis,
                summary=statistics,
                shard=replace(shard, replica=self.replica),  # which the first DTensor of a step may have corrected
                recomputed=recomputed,
                tokens_left_out=tokens_left_out,
                pairs_left_out=pairs,
                gemm=gemm,
                result_sqnr_db=result_sqnr() if result_sqnr else None,
                format=fmt,
                rounded_with=used.rounded_with if used else RoundedWith(),
                error=used.error if used else None,
                scores=scores,
                trace=trace() if trace else None,
                last_bin=last_bin() if last_bin else {},
            )

        results = [result for result in (result_sqnr, trace, last_bin, pairs_left_out) if result]
        return self.drafts.add(Draft((site, moment), path, merged, summary, tried, results, row))

    @property
    def _begun(self) -> Run:
        if self.run is None:
            raise RecorderError("the Recorder has no run to write to: call the model within `with Recorder(...)`")
        return self.run

    def _placed(self, shard: Shard) -> Shard:
        """The shard with this rank's place among those that have a whole tensor in common."""
        if shard.count > 1 and self.ranks.tensor.size == 1:  # a DTensor's mesh knows ranks that Ranks does not
            self.replica, self.part = shard.replica, (shard.index, shard.count)
        return replace(shard, index=self.part[0], count=self.part[1]) if shard.kind == "whole" else shard

    def _save(
        self,
        run: Run,
        number: int,
        x: Tensor,
        identity: Identity,
        summary: Later[Summary],
        fmt: str | None,
        captured: datetime,
    ) -> Path | None:
        """Queue the values if they fit the budget; the file's path relative to the run."""
        i = identity
        stamp, quant_type = captured.astimezone(), plain_name(str(i.quant_type))
        name = (
            f"{stamp:%Y%m%d_%H%M%S}_{number:04d}_iter{i.iteration:03d}_{i.layer_type or 'other'}"
            f"_L{i.layer_index}_{i.operation}_{i.phase}_{i.component or 'other'}_{quant_type}_rank{i.rank:02d}"
            f"_sample{i.micro_batch or 0:03d}_group{i.expert or 0:03d}_{i.tensor_name}.pt"
        )
        metadata = {
            "layer_type": i.layer_type,
            "layer_idx": i.layer_index,
            "module": i.module,
            "operation": i.operation,
            "phase": i.phase,
            "component": i.component,
            "quant_type": i.quant_type,
            "format": fmt,
            "tensor_name": i.tensor_name,
            "iteration": i.iteration,
            "sample_idx": i.micro_batch,
            "rank": i.rank,
            "expert": i.expert,
            "save_time": f"{stamp:%Y-%m-%d %H:%M:%S}",
            "run_id": run.run_id,
        }
        info = {"shape": list(x.shape), "dtype": str(x.dtype), "device": str(x.device)}

        def description() -> tuple[dict[str, Any], dict[str, Any]]:
            return metadata, info | {key: getattr(summary(), key) for key in ("min", "max", "mean", "std")}

        relative = Path("tensors", quant_type, name)
        return relative if run.offer(relative, x, description, (summary,)) else None


def hidden_in(seen: Observed, rows: Tensor | None) -> Tensor | None:
    """Which values of a map of attention, or of these of its rows, the softmax does not see; None if it sees all."""
    if seen.hidden is None:
        return None
    hidden, shape = seen.hidden, tuple(seen.shape or seen.tensor.shape)
    if hidden.numel() == math.prod(shape):
        hidden = hidden.reshape(shape)
    elif all(size in (1, wanted) for size, wanted in zip(hidden.shape[::-1], shape[::-1], strict=False)):
        hidden = hidden.expand(shape)
    else:  # a product of something else, in a module that is named as a core and is none
        return None
    return hidden if rows is None else hidden.flatten(0, -2).index_select(0, rows)


def summarized(
    seen: Observed, values: Tensor, rows: Tensor | None, codes: Counted | None = None, sketch: bool = True
) -> tuple[Later[Summary], Later[int] | None]:
    """(the statistics of the values, those of these rows, and the number of those that are left out as the softmax does
    not see them; None without a mask). codes: `counted` of the values, if known."""
    hidden = hidden_in(seen, rows)
    if hidden is None:
        return summarize_later(values, codes=codes, sketch=sketch), None
    count = Later(int, LaterPart(hidden.sum()))
    summary = summarize_later(values.reshape(hidden.shape).masked_fill(hidden, torch.nan), sketch=sketch)
    return Later(_without_hidden, summary, count), count


def _without_hidden(summary: Summary, hidden: int) -> Summary:
    """The summary of values among which so many are hidden, as NaN, without these."""
    return replace(summary, numel=summary.numel - hidden, nans=summary.nans - hidden)


def warm_up(scores: Sequence[Spec], blocks: bool, formats: Iterable[GemmFormats], device: torch.device) -> float:
    """Compile the Triton kernels that a recorded linear layer in bfloat16 takes, for each of these formats. Returns the
    seconds; 0 on a device without such kernels.

    A kernel is compiled for what a large tensor has in common with this one: whole tiles, and sizes divisible by 16.
    """
    if device.type != "cuda":
        return 0.0
    start = time.monotonic()
    for gemm_formats in formats:
        x, weight = (torch.zeros(2048, 2048, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2))
        tried: dict[str, list[Tried]] = {}

        def measure(
            seen: Observed, gemm_formats: GemmFormats = gemm_formats, tried: dict[str, list[Tried]] = tried
        ) -> None:
            first = LATER.get(seen.name)
            if first is None:
                summarize_later(seen.tensor)
            if first or seen.name in LATER.values():
                before = tried[first] if first and gemm_formats.is_same(seen.name) else []
                tried[first or seen.name] = try_specs(seen, scores, None, blocks and first is None, before=before)

        with torch.enable_grad():
            y = linear(x, weight, Rounding(gemm_formats), tap=measure)
            torch.autograd.backward(y, torch.zeros_like(y))
    return time.monotonic() - start


class RecorderError(RuntimeError):
    """A Recorder is used outside its context, or entered twice."""


def _trace_later(seen: Observed, shown: Tensor, name: str | None) -> Later[Trace]:
    """The values for following the tensor over iterations."""
    hot, sample = hot_channels_later(shown), None
    if name == "weight" and seen.spec and seen.coded is not None and seen.quantized is not None:
        sample = sample_later(seen.coded, seen.quantized, seen.spec, seen.scales, seen.dim, seen.absmax)
    if sample is None:
        return hot.map(lambda channels: Trace(*channels))
    return Later(
        lambda channels, drawn: Trace(channels[0], channels[1], drawn.values, drawn.rounded, drawn.at_bin_edge),
        hot,
        sample,
    )


def _last_bin_later(x: Tensor, scores: Sequence[Spec]) -> Later[dict[str, float]]:
    """`Blocks.last_bin` of a vector in each MX format among these, on the writer's thread."""
    specs = [spec for spec in scores if spec.format.name.startswith("mx")]

    def shares(values: np.ndarray) -> dict[str, float]:
        return {str(spec): look(torch.from_numpy(values), spec).last_bin for spec in specs}

    return Later(shares, LaterPart(x.detach().to(torch.float32, copy=True)))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_record(
    name: str, tensor: Tensor, layer: int, module: str, operation: str, phase: str, expert: int | None, dim: int | None
) -> int:
    """The axis to compute scores along, from the end. Raises ConfigError."""
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name)):
        raise ConfigError(f"name={name!r} is not a tensor name: expected at most 64 letters, digits, _ . and -")
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor")
    if tensor.dtype not in DTYPES:
        raise ConfigError(
            f"{name} is {dtype_name(tensor.dtype)}, which is not recorded: convert it to float32 or bfloat16"
        )
    if not tensor.dim():
        raise ConfigError(f"{name} is a scalar: expected a tensor with at least one axis, such as x.reshape(1)")
    for option, value in (("layer", layer), ("expert", expert)):
        if not (isinstance(value, int) and 0 <= value < 2**31) and (option, value) != ("expert", None):
            raise ConfigError(f"{option}={value!r} of {name} is not an index: expected a non-negative integer")
    if not (isinstance(module, str) and module):
        raise ConfigError(f"module={module!r} of {name} is not a module: expected a word, such as module='norm'")
    for option, word, known in (("operation", operation, tuple(Operation)), ("phase", phase, tuple(Phase))):
        if word not in known:
            raise ConfigError(f"{option}={word!r} of {name}: expected one of {', '.join(known)}")
    axis = -1 if dim is None else dim
    if not -tensor.dim() <= axis < tensor.dim():
        raise ConfigError(f"dim={dim} of {name} is not an axis of its shape {tuple(tensor.shape)}")
    return axis if axis < 0 else axis - tensor.dim()

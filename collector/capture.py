"""Capture: `instrument` makes a model's GEMMs run as a recipe says, a Recorder writes what passes through them.

    with Recorder(root, label="mine", config={"recipe": "mxfp8"}) as recorder, instrument(model, "mxfp8", recorder):
        train_step()

A tensor is recorded as it enters or leaves a GEMM, before quantization, with the error that quantization made. Its
statistics, sketch and scores are computed at once, on its device; its values are copied, while the byte budget lasts.
All is written behind the step, the rows of a micro-batch as a segment after the files that they name: only there are
results fetched from a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from collector.model import CoreAttention, CoreQuantization
from collector.parallel import ParallelLinear, PeerLost, Quantization
from collector.ranks import Ranks
from collector.recipe import BF16, Part, Recipe, parse_recipe
from collector.selection import Selection
from collector.site import Site
from collector.writing import Pending, Writing
from data.runs import CANCELLED, DONE, FAILED, RunWriter, resolve_root
from data.segment import Identity, Shard, TensorRow
from quant.counts import Counted, counted
from quant.formats import FORMATS
from quant.gemm import Observed, Tap
from quant.metrics import Errors, errors_later, score_later
from quant.quantizer import plan
from quant.summary import Summary, summarize_later

OPERANDS = ("a", "b", "grad")


@dataclass(frozen=True)
class Place:
    """What an observed tensor is called: its name, the side of the operation it stands on, and the operand (a field of
    GemmFormats) whose format its quant_type is: itself, or the first of the GEMM that it results from."""

    tensor_name: str
    operation: str
    phase: str
    operand: str


LINEAR_PLACES = {
    "a": Place("input", "forward", "pre", "forward_a"),
    "b": Place("weight", "forward", "pre", "forward_b"),
    "y": Place("output", "forward", "post", "forward_a"),
    "grad": Place("grad_output", "backward", "pre", "dgrad_grad"),
    "grad_a": Place("grad_input", "backward", "post", "dgrad_grad"),
    "grad_b": Place("grad_weight", "backward", "post", "wgrad_grad"),
}
QK_PLACES = {
    "a": Place("query", "forward", "pre", "forward_a"),
    "b": Place("key", "forward", "pre", "forward_b"),
    "scores": Place("attention_scores", "forward", "post", "forward_a"),
    "grad_a": Place("grad_query", "backward", "post", "dgrad_grad"),
    "grad_b": Place("grad_key", "backward", "post", "wgrad_grad"),
}
PV_PLACES = {
    "a": Place("attention_probs", "forward", "post", "forward_a"),
    "b": Place("value", "forward", "pre", "forward_b"),
    "y": Place("output", "forward", "post", "forward_a"),
    "grad": Place("grad_output", "backward", "pre", "dgrad_grad"),
    "grad_b": Place("grad_value", "backward", "post", "wgrad_grad"),
}


class InstrumentError(ValueError):
    """The model holds nothing that a recipe could be applied to."""


class Recorder:
    """Writes a run: its directory, tensor files and segments. A context manager; leaving it ends the run.

    root       where runs are kept; None as `data.runs.resolve_root`
    label      goes into the run's id
    config     kept as run.json; its model, size, dataset and recipe become the tensors' words
    tensors    names to record, empty for all
    scores     formats to try on every operand
    raw        keep values (else statistics, sketch and scores only), while this rank's files stay within max_bytes
    ranks      of a run on several: each has a Recorder of its own, and rank 0 makes the directory

    The run ends as done, as cancelled on KeyboardInterrupt, else as failed with the exception's first line; what was
    captured until then is kept. Raises RunError if the root cannot be written; what the disk refuses later, as the
    OSError that it was, in the next call or at the end.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        label: str = "run",
        config: dict[str, Any] | None = None,
        tensors: tuple[str, ...] = (),
        scores: tuple[str, ...] = (),
        raw: bool = True,
        max_bytes: int = 4 << 30,
        ranks: Ranks | None = None,
    ) -> None:
        self.root = resolve_root(root)
        self.label = label
        self.config = dict(config or {})
        self.tensors = frozenset(tensors)
        self.scores = tuple(dict.fromkeys(FORMATS[name].name for name in scores))
        self.raw = raw
        self.max_bytes = max_bytes
        self.ranks = ranks or Ranks()
        self.rank = self.ranks.rank
        self.recording = True
        self.iteration = 0
        self.micro_batch = 0
        self._pending: list[Pending] = []
        self._count = 0

    def __enter__(self) -> Recorder:
        ranks = self.ranks
        if ranks.rank == 0:
            made = None
            try:
                made = RunWriter.create(self.root, self.label, self.config, ranks=ranks.size, owner=ranks.owner)
                self.writer = made
            finally:
                ranks.share(made and made.run_id)
        else:
            run_id = ranks.share(None)
            if run_id is None:
                raise PeerLost("rank 0 could not start the run")
            self.writer = RunWriter.join(self.root / run_id, ranks.rank, ranks.size)
        self._writing = Writing(self.writer, self.max_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        failure: Exception | None = None
        try:
            self._publish()
        except Exception as refused:  # an earlier write's; what else there is to write is written
            failure = refused
        later = self._writing.close()
        failure = failure or later
        if error is None and failure is None:
            state = DONE
        else:
            state = CANCELLED if isinstance(error, KeyboardInterrupt) else FAILED
        try:
            self.writer.finish(state, describe(error or failure) if state == FAILED else None)
        except OSError as refused:  # not even a status fits: the run will be seen to have ended without a word
            failure = failure or refused
        if error is None and failure is not None:
            raise failure

    @contextmanager
    def at(self, iteration: int, micro_batch: int, record: bool = True) -> Iterator[None]:
        """Within it, tensors belong to this micro-batch, and are recorded or not. Publishes at the end."""
        self.iteration, self.micro_batch, self.recording = iteration, micro_batch, record
        try:
            yield
        finally:
            self.recording = False
        self._publish()

    def settle(self) -> None:
        """Wait until all that was published is on the disk. Raises OSError if it refused."""
        self._writing.settle()

    def step(self) -> None:
        """Publish what was captured and count one iteration on, for training loops of one's own."""
        self._publish()
        self.iteration, self.micro_batch = self.iteration + 1, 0
        self.writer.update(iteration=self.iteration - 1)

    def tap(self, layer: ParallelLinear | CoreAttention, part: Part, places: dict[str, Place]) -> Tap | None:
        """The observer of one call of one product, or None while nothing is recorded."""
        if not self.recording:
            return None
        site, iteration, micro_batch = layer.site, self.iteration, self.micro_batch

        def observe(seen: Observed) -> None:
            place = places.get(seen.name)
            if site.expert is not None and not seen.tensor.numel():  # no token was routed to it
                return
            if place and (not self.tensors or place.tensor_name in self.tensors):
                core = site.module == "core"
                identity = Identity(
                    model=self.config.get("model"),
                    size=self.config.get("size"),
                    dataset=self.config.get("dataset"),
                    recipe=self.config.get("recipe"),
                    quant_type=part.asked(place.operand),
                    layer_type="attention" if core else "linear",
                    layer_index=site.layer_index,
                    module=site.module,
                    component="FA" if core else "linear",
                    operation=place.operation,
                    phase=place.phase,
                    tensor_name=place.tensor_name,
                    iteration=iteration,
                    micro_batch=micro_batch,
                    rank=self.rank,
                    expert=site.expert,
                )
                self._record(seen, identity, replace(layer.shard(seen.name), replica=self.ranks.replica))

        return observe

    def _record(self, seen: Observed, identity: Identity, shard: Shard) -> None:
        """Measure and copy a tensor; on a GPU nothing waits for it until the rows are published."""
        shown = seen.tensor.reshape(seen.shape or seen.tensor.shape)
        codes = counted(seen.tensor) if seen.tensor.device.type == "cpu" else None
        summary = cache(summarize_later(seen.tensor, codes=codes))  # the file tells it too
        error = None
        if seen.format:
            error = errors_later(seen.tensor, seen.quantized, plan(seen.format), seen.scales, seen.dim)
        operand = seen.name in OPERANDS
        scores = self._scores(seen, error, codes) if operand else {}
        captured = datetime.now(UTC)
        path = self._save(shown, identity, summary, seen.format, captured)
        self._count += 1
        about = dict(
            tensor_id=f"r{self.rank:02d}-{self._count:06d}",
            run_id=self.writer.run_id,
            identity=identity,
            captured=captured.replace(tzinfo=None),
            shape=tuple(shown.shape),
            dtype=str(shown.dtype).removeprefix("torch."),
            nbytes=shown.numel() * shown.element_size(),
            path=path and str(path),
            contracted_axis=seen.dim - seen.tensor.dim() if seen.dim >= 0 else seen.dim if operand else None,
            format=seen.format,
            shard=shard,
        )

        def row() -> TensorRow:
            found = {name: score() for name, score in scores.items()}
            return TensorRow(**about, summary=summary(), error=error and error(), scores=found)

        self._pending.append(Pending(path, row))

    def _scores(
        self, seen: Observed, error: Callable[[], Errors] | None, codes: Counted | None
    ) -> dict[str, Callable[[], Errors]]:
        return {
            name: error
            if error and name == seen.format
            else score_later(seen.tensor, plan(name), seen.dim, codes=codes)
            for name in self.scores
        }

    def _save(
        self, x: Tensor, identity: Identity, summary: Callable[[], Summary], fmt: str | None, captured: datetime
    ) -> Path | None:
        """Have the values written if they are wanted and fit the budget; the file's path relative to the run."""
        if not self.raw:
            return None
        i = identity
        stamp = captured.astimezone()
        name = (
            f"{stamp:%Y%m%d_%H%M%S}_{self._count + 1:04d}_iter{i.iteration:03d}_{i.layer_type}_L{i.layer_index}"
            f"_{i.operation}_{i.phase}_{i.component}_{i.quant_type}_rank{i.rank:02d}_sample{i.micro_batch:03d}"
            f"_group{i.expert or 0:03d}_{i.tensor_name}.pt"
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
            "run_id": self.writer.run_id,
        }
        info = {"shape": list(x.shape), "dtype": str(x.dtype), "device": str(x.device)}

        def about() -> tuple[dict[str, Any], dict[str, Any]]:
            found = summary()
            return metadata, info | {key: getattr(found, key) for key in ("min", "max", "mean", "std")}

        relative = Path("tensors", i.quant_type, name)
        return relative if self._writing.offer(relative, x, about) else None

    def _publish(self) -> None:
        """Have the pending rows written as a segment. Raises what an earlier write did."""
        pending, self._pending = self._pending, []
        self._writing.publish(pending)


def describe(error: BaseException) -> str:
    """An exception as one line for people."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror.lower()}{where}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return (str(error) or type(error).__name__).splitlines()[0]


@contextmanager
def instrument(
    model: nn.Module,
    recipe: Recipe | str | None,
    recorder: Recorder | None = None,
    *,
    backend: str = "auto",
    skip: Selection | str | None = None,
    capture: Selection | str | None = None,
) -> Iterator[None]:
    """Within it, the model's GEMMs run as the recipe says and pass their tensors to the recorder.

    skip       layers that stay unquantized whatever the recipe says, as a Selection or its text: "first,last"
    capture    layers that are recorded, likewise; None for all

    Nothing of the model is changed but the `quantization` of its ParallelLinear and CoreAttention modules, which is
    put back at the end. Raises InstrumentError if there are none, RecipeError for an unknown recipe, SelectionError for
    layers that the model does not have.
    """
    if not isinstance(recipe, Recipe):
        recipe = parse_recipe(recipe or BF16)
    layers = [m for m in model.modules() if isinstance(m, (ParallelLinear, CoreAttention))]
    if not layers:
        raise InstrumentError(f"{type(model).__name__} has no ParallelLinear or CoreAttention to instrument")
    sites = [layer.site for layer in layers]
    skipped = _chosen(skip, sites) if skip else frozenset()
    recorded = _chosen(capture, sites) if capture else frozenset(sites)

    def quantization(layer: ParallelLinear | CoreAttention, part: Part, places: dict[str, Place]) -> Quantization:
        part = Part() if layer.site in skipped else part
        listening = recorder and layer.site in recorded
        tap = (lambda: recorder.tap(layer, part, places)) if listening else (lambda: None)
        return Quantization(part.formats, backend, tap)

    before = [(layer, layer.quantization) for layer in layers]
    try:
        for layer in layers:
            if isinstance(layer, CoreAttention):
                layer.quantization = CoreQuantization(
                    quantization(layer, recipe.qk, QK_PLACES), quantization(layer, recipe.pv, PV_PLACES)
                )
            else:
                part = recipe.router if layer.site.module == "router" else recipe.linear
                layer.quantization = quantization(layer, part, LINEAR_PLACES)
        yield
    finally:
        for layer, original in before:
            layer.quantization = original


def _chosen(selection: Selection | str, sites: Sequence[Site]) -> frozenset[Site]:
    return (Selection.parse(selection) if isinstance(selection, str) else selection).of(sites)

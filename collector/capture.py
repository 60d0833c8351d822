"""Capture: `instrument` makes a model's GEMMs run as a recipe says, a Recorder writes what passes through them.

    with Recorder(root, label="mine", config={"recipe": "mxfp8"}) as recorder, instrument(model, "mxfp8", recorder):
        train_step()

A tensor is recorded as it enters or leaves a GEMM, before quantization, with the error that quantization made. Its
statistics, sketch and scores are computed at once; its values go to a file while the byte budget lasts. Rows are
published as a segment at the end of each micro-batch, after the files they name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from collector.model import CoreAttention, CoreQuantization
from collector.parallel import ParallelLinear, PeerLost, Quantization
from collector.ranks import Ranks
from collector.recipe import BF16, Part, Recipe, parse_recipe
from data.runs import CANCELLED, DONE, FAILED, RunWriter, resolve_root
from data.segment import Identity, Shard, TensorRow, write_segment
from data.store import encode, write_atomic
from quant.formats import FORMATS
from quant.gemm import Observed, Tap
from quant.metrics import Errors, score, score_of
from quant.summary import Summary, summarize

OPERANDS = ("a", "b", "grad")


@dataclass(frozen=True)
class Place:
    """What an observed tensor is called: its name, and the side of the operation it stands on."""

    tensor_name: str
    operation: str
    phase: str


LINEAR_PLACES = {
    "a": Place("input", "forward", "pre"),
    "b": Place("weight", "forward", "pre"),
    "y": Place("output", "forward", "post"),
    "grad": Place("grad_output", "backward", "pre"),
    "grad_a": Place("grad_input", "backward", "post"),
    "grad_b": Place("grad_weight", "backward", "post"),
}
QK_PLACES = {
    "a": Place("query", "forward", "pre"),
    "b": Place("key", "forward", "pre"),
    "scores": Place("attention_scores", "forward", "post"),
    "grad_a": Place("grad_query", "backward", "post"),
    "grad_b": Place("grad_key", "backward", "post"),
}
PV_PLACES = {
    "a": Place("attention_probs", "forward", "post"),
    "b": Place("value", "forward", "pre"),
    "y": Place("output", "forward", "post"),
    "grad": Place("grad_output", "backward", "pre"),
    "grad_b": Place("grad_value", "backward", "post"),
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
    raw        keep values (else statistics, sketch and scores only), while their files stay within max_bytes, which the
               ranks share out among them
    ranks      of a run on several: each has a Recorder of its own, and rank 0 makes the directory

    The run ends as done, as cancelled on KeyboardInterrupt, else as failed with the exception's first line; what was
    captured until then is kept. Raises RunError if the root cannot be written, OSError if the disk refuses later.
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
        self.max_bytes = max_bytes // (ranks.size if ranks else 1)
        self.ranks = ranks or Ranks()
        self.rank = self.ranks.rank
        self.recording = True
        self.iteration = 0
        self.micro_batch = 0
        self._pending: list[TensorRow] = []
        self._unnamed: Path | None = None  # a tensor file whose row is not pending yet
        self._count = 0
        self._without_raw = 0
        self._bytes = 0

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
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        full: OSError | None = None
        try:
            self._forget_unnamed()
            self._publish()
        except OSError as refused:
            full = refused
            self._abandon()
        if error is None and full is None:
            state = DONE
        else:
            state = CANCELLED if isinstance(error, KeyboardInterrupt) else FAILED
        try:
            self.writer.finish(state, describe(error or full) if state == FAILED else None)
        except OSError as refused:  # not even a status fits: the run will be seen to have ended without a word
            full = full or refused
        if error is None and full is not None:
            raise full

    @contextmanager
    def at(self, iteration: int, micro_batch: int, record: bool = True) -> Iterator[None]:
        """Within it, tensors belong to this micro-batch, and are recorded or not. Publishes at the end."""
        self.iteration, self.micro_batch, self.recording = iteration, micro_batch, record
        try:
            yield
        finally:
            self.recording = False
        self._publish()

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
                    quant_type=part.quant_type,
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
        shown = seen.tensor.reshape(seen.shape or seen.tensor.shape)
        summary = summarize(seen.tensor)
        error = None
        if seen.format:
            error = score_of(seen.tensor, seen.quantized, FORMATS[seen.format], seen.scales, seen.dim)
        operand = seen.name in OPERANDS
        scores = self._scores(seen, error) if operand else {}
        captured = datetime.now(UTC)
        path = self._save(shown, identity, summary, seen.format, captured)
        self._count += 1
        self._without_raw += path is None
        self._pending.append(
            TensorRow(
                tensor_id=f"r{self.rank:02d}-{self._count:06d}",
                run_id=self.writer.run_id,
                identity=identity,
                captured=captured.replace(tzinfo=None),
                shape=tuple(shown.shape),
                dtype=str(shown.dtype).removeprefix("torch."),
                nbytes=shown.numel() * shown.element_size(),
                path=path,
                contracted_axis=seen.dim - seen.tensor.dim() if seen.dim >= 0 else seen.dim if operand else None,
                summary=summary,
                format=seen.format,
                error=error,
                scores=scores,
                shard=shard,
            )
        )
        self._unnamed = None

    def _scores(self, seen: Observed, error: Errors | None) -> dict[str, Errors]:
        return {
            name: error if error and name == seen.format else score(seen.tensor, name, seen.dim) for name in self.scores
        }

    def _save(self, x: Tensor, identity: Identity, summary: Summary, fmt: str | None, captured: datetime) -> str | None:
        """Write the values if they are wanted and fit the budget; the file's path relative to the run."""
        if not self.raw or self._bytes + x.numel() * x.element_size() > self.max_bytes:
            return None
        i = identity
        stamp = captured.astimezone()
        name = (
            f"{stamp:%Y%m%d_%H%M%S}_{self._count + 1:04d}_iter{i.iteration:03d}_{i.layer_type}_L{i.layer_index}"
            f"_{i.operation}_{i.phase}_{i.component}_{i.quant_type}_rank{i.rank:02d}_sample{i.micro_batch:03d}"
            f"_group{i.expert or 0:03d}_{i.tensor_name}.pt"
        )
        relative = Path("tensors", i.quant_type, name)
        path = self.writer.directory / relative
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
        info = {
            "shape": list(x.shape),
            "dtype": str(x.dtype),
            "device": str(x.device),
            **{key: getattr(summary, key) for key in ("min", "max", "mean", "std")},
        }
        content = encode(x, metadata, info)
        if self._bytes + len(content) > self.max_bytes:
            return None
        path.parent.mkdir(exist_ok=True)
        self._unnamed = path
        write_atomic(path, content)
        self._bytes += len(content)
        return str(relative)

    def _publish(self) -> None:
        """Make the pending rows a segment, and say how far the run is."""
        if self._pending:
            name = self.writer.next_segment_name()
            write_segment(self.writer.directory / "segments", name, self._pending)
            self._pending = []
        self.writer.update(tensors=self._count, tensors_without_raw=self._without_raw, bytes=self._bytes)

    def _abandon(self) -> None:
        """Drop the pending rows with their files: the disk has no room to publish them."""
        for row in self._pending:
            if row.path:
                (self.writer.directory / row.path).unlink(missing_ok=True)
        self._pending = []

    def _forget_unnamed(self) -> None:
        """Remove the file of a capture that was broken off before its row was there."""
        named = {row.path for row in self._pending}
        if self._unnamed and str(self._unnamed.relative_to(self.writer.directory)) not in named:
            self._unnamed.unlink(missing_ok=True)


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
    model: nn.Module, recipe: Recipe | str | None, recorder: Recorder | None = None, *, backend: str = "auto"
) -> Iterator[None]:
    """Within it, the model's GEMMs run as the recipe says and pass their tensors to the recorder.

    Nothing of the model is changed but the `quantization` of its ParallelLinear and CoreAttention modules, which is
    put back at the end. Raises InstrumentError if there are none, RecipeError for an unknown recipe.
    """
    if not isinstance(recipe, Recipe):
        recipe = parse_recipe(recipe or BF16)
    layers = [m for m in model.modules() if isinstance(m, (ParallelLinear, CoreAttention))]
    if not layers:
        raise InstrumentError(f"{type(model).__name__} has no ParallelLinear or CoreAttention to instrument")

    def quantization(layer: ParallelLinear | CoreAttention, part: Part, places: dict[str, Place]) -> Quantization:
        tap = (lambda: recorder.tap(layer, part, places)) if recorder else (lambda: None)
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

"""The state of delayed scaling, kept with a run: `delayed_scales_r00.safetensors` of each rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.models.site import Site
from binade.collector.probes.probe import Probe
from binade.data.run.store import staged_file
from binade.data.run.tensor_kinds import Product
from binade.data.words.text import describe
from binade.quant.delayed import ScaleHistory
from binade.quant.specs import OPERAND_FIELDS, GemmFormats


class DelayedScales(Probe):
    """The histories of a model's operands on one rank, starting with those of an earlier run if one is given.

    Raises InstrumentError if that run has none, or none of an operand that needs one.
    """

    def __init__(self, directory: str | Path | None, rank: int) -> None:
        self.histories: dict[str, ScaleHistory] = {}
        self.name = f"delayed_scales_r{rank:02d}.safetensors"
        self.former: dict[str, Tensor] | None = None
        if directory is not None:
            path = Path(directory) / self.name
            try:
                self.former = load(path.read_bytes())
            except (OSError, SafetensorError) as error:
                raise InstrumentError(f"no delayed scales can be read from {path}: {describe(error)}") from None

    def of(self, site: Site, product: Product, stages: Iterable[GemmFormats]) -> dict[str, ScaleHistory]:
        """The histories of a product's operands, by their names in GemmFormats."""
        histories: dict[str, ScaleHistory] = {}
        for formats in stages:
            for operand in OPERAND_FIELDS:
                spec = formats[operand]
                if spec and spec.history and operand not in histories:
                    key = f"{site.name}.{product.value}.{operand}"
                    histories[operand] = self.histories[key] = history = ScaleHistory(spec)
                    if self.former is not None:
                        self._restore(key, history)
        return histories

    def _restore(self, key: str, history: ScaleHistory) -> None:
        wanted, former = history.state(), self.former or {}
        kept = {name: former[f"{key}.{name}"] for name in wanted if f"{key}.{name}" in former}
        if {name: value.shape for name, value in kept.items()} != {n: v.shape for n, v in wanted.items()}:
            raise InstrumentError(f"{self.name} has no history of length {history.spec.history} for {key}")
        history.load(kept)

    def save(self, directory: Path) -> None:
        """Write the histories, if there are any."""
        if not self.histories:
            return
        tensors = {
            f"{key}.{name}": value.cpu().contiguous()
            for key, history in self.histories.items()
            for name, value in history.state().items()
        }
        with staged_file(directory / self.name) as file:
            file.write(save(tensors))

"""`binade.measure`: an experiment on a model in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from binade.collector.capture.adapters.declared import Equations
from binade.collector.capture.adapters.products import tensors_in
from binade.collector.capture.curves import hash_of, sample_of
from binade.collector.capture.evaluation import Evaluate
from binade.collector.capture.instrument import model_name
from binade.collector.errors import ConfigError
from binade.collector.experiment.evaluator import evaluator_of
from binade.collector.experiment.runner import record, run_treatments
from binade.collector.experiment.treatments import BY, recipes_of, treatments_of
from binade.collector.recipes.recipe import PARTS
from binade.data.run.continued import continued_run
from binade.data.run.directory import resolve_root
from binade.data.run.effects import Measured, measured_effects
from binade.data.run.experiment import EXPERIMENT, SAME

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "format", "part", "layer_index", "module", "sequences", "loss", "change", "low", "high", "divergence",
    "change_by_sequence",
)  # fmt: skip


def check_requested(by: Iterable[str], parts: Iterable[str]) -> None:
    """Raise ConfigError for a granularity or a part that does not exist."""
    for what, words, known in (("by", by, BY), ("parts", parts, PARTS)):
        if unknown := [word for word in words if word not in known]:
            raise ConfigError(f"{what} has {unknown[0]!r}: expected {', '.join(known)}")


def rounds_attention(by: Iterable[str], parts: Sequence[str]) -> bool:
    """Whether products of attention are rounded. parts: all if empty."""
    return "model" in by or bool({"qk", "pv"} & set(parts)) or not parts


def table_of(rows: Iterable[Measured]) -> pd.DataFrame:
    """A row for each format and group, with COLUMNS: change is in nats per token, low and high are its 95% interval,
    Student's t over sequences."""
    import pandas as pd

    return pd.DataFrame(
        [
            (
                row.format,
                *row.group,
                len(row.changes),
                sum(row.exact) / len(row.exact),
                row.change.value,
                row.change.low,
                row.change.high,
                row.divergence.value,
                list(row.changes),
            )
            for row in rows
        ],
        columns=list(COLUMNS),
    )


def measure(
    model: nn.Module,
    loss: Evaluate,
    batches: Iterable[Any],
    treatments: Sequence[str] = ("mxfp4", "nvfp4", "mxfp8"),
    *,
    by: Sequence[str] = ("part", "site"),
    parts: Sequence[str] = ("linear",),
    root: str | Path | None = None,
    label: str = "measure",
    config: Mapping[str, Any] | None = None,
    backend: str = "auto",
    seed: int = 0,
    exclude: Sequence[str] = (),
    cores: Sequence[str] = (),
    products: Mapping[str, Equations] = {},
    head: bool = False,
) -> pd.DataFrame:
    """Measure the change of the loss when one group of products is rounded, on the same weights and batches.

        def loss(model, batch):
            return model(batch["input_ids"]).logits[:, :-1], batch["input_ids"][:, 1:]

        binade.measure(model, loss, batches, ["mxfp4", "nvfp4"])

    Args:
        model: As for `instrument`.
        loss: Evaluates a batch: called with the model and a batch, it returns the loss of each sequence [sequences],
            the loss of each token [sequences, tokens], or logits [sequences, tokens, vocabulary] and labels
            [sequences, tokens], where -100 does not count. With logits, the divergence is measured, too.
        batches: The batches, which the model was not trained on; each is evaluated once per format and group.
        treatments: Formats, specs or recipes, by name or path.
        by: What is rounded together: "part" (all linear layers, all QKᵀ, all PV), "layer" or "module" (a part in one
            layer, or one module in all), "site" (a module of a layer), "model" (all that the recipe rounds).
        parts: linear, qk, pv, router, product. With attention, its products are computed one by one in all passes.
        root: If given, the measurements are a run there: they are shown in the app and used by `binade advise`. The
            same call continues one that was interrupted.
        label: Part of the run's id.
        config: Kept in run.json, such as {"model": ..., "dataset": ...}.
        backend, exclude, cores, products, head, seed: As for `instrument`.

    Returns a row per format and group: the loss without rounding, its change, in nats per token, with its 95% interval
    (Student's t over sequences) and by sequence, and the divergence, the mean KL(p ‖ q) of the next token.

    Raises ConfigError, RecipeError, SpecError, InstrumentError, and RunError if the root cannot be written.
    """
    check_requested(by, parts)
    listed, recipes = list(batches), recipes_of(treatments)
    if not listed:
        raise ConfigError("batches is empty: give at least one batch")
    attention = rounds_attention(by, parts)
    options: dict[str, Any] = {"exclude": exclude, "cores": cores, "products": products, "head": head}
    with evaluator_of(model, loss, attention=attention, backend=backend, seed=seed, **options) as evaluator:
        planned = treatments_of(evaluator.products, recipes, by, parts=parts)
        if root is None:
            return table_of(measured_effects(run_treatments(evaluator, listed, planned)))
        weights, data = hash_of(sample_of(model)), hashlib.sha256()
        for batch in listed:
            data.update(hash_of(tensors_in(batch)).encode())
        measures = {"weights_sha256": weights, "data_sha256": data.hexdigest(), "seed": seed, "attention": attention}
        facts = {"model": model_name(model)} | dict(config or {}) | {"weights": {"sha256": weights}}
        facts |= {"kind": EXPERIMENT, "measures": measures}
        with continued_run(resolve_root(root), label, facts, SAME, "results are being measured") as (writer, _):
            return table_of(measured_effects(record(writer, evaluator, listed, planned)))

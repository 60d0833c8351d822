"""A measurement of effects as a run on disk, and `binade.measure`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from binade.collector.capture.adapters.declared import Equations
from binade.collector.capture.adapters.products import tensors_in
from binade.collector.capture.curves import hash_of, sample_of
from binade.collector.capture.effects import (
    BY,
    EffectMeter,
    EffectTask,
    effects,
    measuring,
    part_of,
    recipes_of,
    tasks_of,
)
from binade.collector.capture.evaluation import Evaluate
from binade.collector.capture.instrument import model_name
from binade.collector.errors import ConfigError
from binade.collector.recipes.recipe import PARTS
from binade.data.continued import continued_run
from binade.data.effects import MEASURE, Effect, EffectGroup, Measured, append_effect, continue_effects, merged
from binade.data.runs import DONE, RunWriter, resolve_root

if TYPE_CHECKING:
    import pandas as pd

SAME = ("kind", "measures")  # two measurements that agree in these fields of run.json are one run
COLUMNS = (
    "format", "part", "layer_index", "module", "sequences", "loss", "change", "low", "high", "divergence",
    "change_by_sequence",
)  # fmt: skip
Done = Callable[[Effect, int, int], None]  # a measurement, and how many are done, of how many


def check_requested(by: Iterable[str], parts: Iterable[str]) -> None:
    """Raise ConfigError for a granularity or a part that does not exist."""
    for what, words, known in (("by", by, BY), ("parts", parts, PARTS)):
        if unknown := [word for word in words if word not in known]:
            raise ConfigError(f"{what} has {unknown[0]!r}: expected {', '.join(known)}")


def record(
    writer: RunWriter,
    measured: EffectMeter,
    batches: Collection[Any],
    tasks: Sequence[EffectTask],
    done: Done = lambda effect, count, of: None,
) -> list[Measured]:
    """Measure what the run does not have yet, and add it. Returns the effects of the tasks. Raises OSError."""
    before = continue_effects(writer.directory)
    wanted = {task.of(number) for task in tasks for number in range(len(batches))}
    known = {effect.of_batch for effect in before} & wanted
    task_effects = [effect for effect in before if effect.of_batch in wanted]
    for effect in effects(measured, batches, tasks, known):
        append_effect(writer.directory, effect)
        writer.update()  # the heartbeat
        task_effects.append(effect)
        done(effect, len(task_effects), len(wanted))
    writer.finish(DONE)
    return merged(task_effects)


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
    formats: Sequence[str] = ("mxfp4", "nvfp4", "mxfp8"),
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
        formats: Formats, specs or recipes, by name or path.
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
    listed, recipes = list(batches), recipes_of(formats)
    if not listed:
        raise ConfigError("batches is empty: give at least one batch")
    attention = "model" in by or bool({"qk", "pv"} & set(parts))
    options: dict[str, Any] = {"exclude": exclude, "cores": cores, "products": products, "head": head}
    with measuring(model, loss, attention=attention, backend=backend, seed=seed, **options) as measured:
        tasks = tasks_of(measured, recipes, by, parts)
        if root is None:
            return table_of(merged(effects(measured, listed, tasks)))
        weights, data = hash_of(sample_of(model)), hashlib.sha256()
        for batch in listed:
            data.update(hash_of(tensors_in(batch)).encode())
        facts = {"model": model_name(model)} | dict(config or {}) | {"weights": {"sha256": weights}}
        measures = {"weights_sha256": weights, "data_sha256": data.hexdigest(), "seed": seed, "attention": attention}
        with continued_run(
            resolve_root(root),
            label,
            facts | {"kind": MEASURE, "measures": measures},
            SAME,
            "effects are being measured",
        ) as (writer, _):
            return table_of(record(writer, measured, listed, tasks))


__all__ = ["EffectGroup", "check_requested", "measure", "part_of", "record", "table_of"]

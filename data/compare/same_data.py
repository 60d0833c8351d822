"""Which runs start from the same weights and read the same data, and up to which iteration.

Each line of loss.jsonl has the SHA-256 of all data that the run has read so far, warm-up included. Two runs have read
the same data at an iteration if these digests agree there; two runs may agree at first and differ later. A branch
starts from the weights of another run's checkpoint: it agrees with other branches of it, and with that run. Runs
without digests match by their configuration, if it has all of CONFIGURATION, imported losses by what the user said of
them, if that is all of IMPORTED, or by the run that they are said to be like. What is unknown never matches.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pandas as pd

from binade.data.compare.evidence import listed
from binade.data.index.catalog import Catalog
from binade.data.run.directory import IMPORT
from binade.data.run.losses import LOSS
from binade.data.words.filter import Filter
from binade.data.words.text import one_line

# The settings that make two runs of `binade run` start from the same weights and read the same data.
CONFIGURATION = (
    "model", "size", "parameters", "dataset", "tokenizer", "seed", "learning_rate", "warmup_iterations",
    "micro_batches", "micro_batch_size", "sequence_length",
)  # fmt: skip
IMPORTED = ("model", "dataset", "seed")
UNKNOWN = "unknown"
NATS = "nats per token"  # what losses are in if run.json does not say so
OF_RUN = (
    *CONFIGURATION, "branch_of", "kind", "layers", "dp", "data", "corpus_sha256", "device", "tp", "sequence_parallel",
    "vocab_size",
)  # fmt: skip
Steps = Iterable[Mapping[str, Any]]
T = TypeVar("T")


def data_key(config: Mapping[str, Any], first: str | None) -> str | None:
    """What a run has in common with all runs that start from the same weights and read the same data, None if that is
    unknown, or if its losses are in another unit than NATS. config: its run.json; first: `first_step` of the run.
    Settings that only one of two runs states differ."""
    if unit_of(config) != NATS:
        return None
    like = like_of(config)
    config, first = (like["config"], like["first"]) if like else (config, first)
    stated = {name: config[name] for name in CONFIGURATION if name in config}
    step = _step(first)
    hashed = step.get("data_sha256") and (step.get("weights_sha256") or stated.get("seed") is not None)
    if config.get("kind") == IMPORT:
        complete = all(stated.get(name) is not None for name in IMPORTED)
    else:
        complete = states_all(config)
    if not (hashed or complete):
        return None
    known = [stated, config.get("dp") or 1, corpus_of(config), step if hashed else None]
    if branch := branch_of(config):
        known.append((branch["run_id"], branch["iteration"]))
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def unit_of(config: Mapping[str, Any]) -> str:
    """The unit of a run's losses, from its run.json: "unknown" if the log does not say."""
    unit = config.get("loss_unit", NATS)
    return one_line(unit, 40) if isinstance(unit, str) and unit.strip() else UNKNOWN


def trained_by_binade(config: Mapping[str, Any]) -> str | None:
    """What two trainings of Binade have in common whose first losses differ by rounding alone, if they read the same
    data: the same program on the same kind of device. None for other runs, where masks, labels, the loss or the model's
    code may differ unseen. config: run.json."""
    if not states_all(config) or not isinstance(config.get("versions"), dict):
        return None
    known = [config["versions"], config.get("device"), *map(config.get, CONFIGURATION)]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def branch_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where a run branched off from another one: see `data.run.directory.BranchOf`. config: its run.json."""
    return config.get("branch_of")


def branched_at(config: Mapping[str, Any]) -> float:
    """The first iteration that a branch trained itself; minus infinity for a run from the start."""
    branch = branch_of(config)
    return float(branch["iteration"]) if branch else -math.inf


def like(run_id: str, config: Mapping[str, Any], first: str | None) -> dict[str, Any]:
    """What an import keeps of the run that it is said to be like: the same model, data and seed. first: `first_step` of
    that run, config its run.json."""
    if known := like_of(config):
        return known | {"run_id": run_id}
    return {"run_id": run_id, "config": {name: config[name] for name in OF_RUN if name in config}, "first": first}


def like_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an import keeps of the run that it is like; None without one. config: its run.json."""
    kept = config.get("like") if config.get("kind") == IMPORT else None
    sound = isinstance(kept, dict) and isinstance(kept.get("config"), dict) and _is_step(kept.get("first"))
    return kept if sound else None


def _is_step(first: Any) -> bool:
    """Whether this is a line of loss.jsonl, as `first_step` returns it, or None."""
    try:
        return first is None or isinstance(json.loads(first), dict)
    except (TypeError, ValueError, RecursionError):
        return False


def shared_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings that runs have in common which are compared: run.json of a run, or what it keeps of the run that it
    is like."""
    kept = like_of(config)
    return {**config, **kept["config"]} if kept else config


def unknown(config: Mapping[str, Any], first: str | None) -> str:
    """What is not known of a run, so that it may have no run to be compared with; "" if all is. As `data_key`."""
    if (start := _step(first).get("iteration") or 0) > 0 and config.get("kind") != IMPORT:
        return f"it starts at iteration {start}, and what was read before is unknown"
    if data_key(config, first):
        return ""
    if (unit := unit_of(config)) != NATS:
        return f"the unit of its loss is {unit}" if unit == UNKNOWN else f"its loss is in {unit}, not in {NATS}"
    missing = [name for name in IMPORTED if config.get(name) is None]
    if config.get("kind") == IMPORT and missing:
        return f"its {listed(missing)} {'is' if len(missing) == 1 else 'are'} unknown"
    return "its data is unknown"


def _step(first: str | None) -> dict[str, Any]:
    step: dict[str, Any] = json.loads(first) if first else {}
    return step


def states_all(config: Mapping[str, Any]) -> bool:
    """Whether run.json states all of CONFIGURATION, as those of imported and of instrumented runs do not."""
    return config.get("kind") != IMPORT and all(name in config for name in CONFIGURATION)


def corpus_of(config: Mapping[str, Any]) -> Any:
    """The SHA-256 of a run's corpus, from its run.json; None if it is unknown."""
    data = config.get("data")
    return data.get("corpus_sha256") or data.get("idx_sha256") if isinstance(data, dict) else None


def digests_of(steps: Steps) -> dict[int, str]:
    """The digest of all data read until the end of each iteration, of those that have one."""
    return {step["iteration"]: step["data_sha256"] for step in steps if step.get("data_sha256")}


def same_data(a: Steps, b: Steps) -> Callable[[int], bool]:
    """Whether two runs with the same `data_key` had read the same data at an iteration. a, b: their lines of
    loss.jsonl."""
    digests, other = digests_of(a), digests_of(b)
    if not digests or not other:  # of a run and an import, the user has said that it is like the run
        return lambda iteration: True
    return lambda iteration: iteration in digests and digests[iteration] == other.get(iteration)


def window_of(step: Mapping[str, Any]) -> int | None:
    """Of how many iterations the loss of a line of loss.jsonl is the mean; None if that is unknown."""
    window: int | None = step.get("window", 1)
    return window


def losses_on_same_data(run: Steps, reference: Steps) -> list[tuple[int, float, float]]:
    """(iteration, the run's loss, the reference's), in nats per token, of each iteration from 0 that both have
    finished, at which they had read the same data, and at which both losses are the mean of as many iterations. Both
    have the same `data_key`."""
    same, other = same_data(run, reference), {step["iteration"]: step for step in reference}
    return [
        (iteration, float(step["loss"]), float(other[iteration]["loss"]))
        for step in sorted(run, key=lambda step: step["iteration"])
        if (iteration := step["iteration"]) in other and iteration >= 0 and same(iteration)
        if window_of(step) == window_of(other[iteration])
    ]


def closest(run: Steps, references: Sequence[tuple[T, Steps]]) -> T | None:
    """Of the runs that a run may be compared with, the one whose losses can be compared at most iterations; of several
    the first one, None if there are no runs. references: each with its lines of loss.jsonl."""
    if len(references) < 2:
        return references[0][0] if references else None
    return max(references, key=lambda pair: len(losses_on_same_data(run, pair[1])))[0]


def equal_weights(catalog: Catalog, run_id: str, reference: str, iteration: int, branched: float = -math.inf) -> bool:
    """Whether two runs that are compared are known to have computed the same up to an iteration but for rounding: two
    trainings of Binade (`trained_by_binade`) in the first one under the recipe, after the same losses in the warm-up;
    of branches, in the first one. branched: as in `equal_warm_up`."""
    runs = catalog.runs().set_index("run_id")["config"]
    trained = [trained_by_binade(json.loads(runs.get(name, "{}"))) for name in (run_id, reference)]
    if iteration != max(branched, 0) or None in trained or trained[0] != trained[1]:
        return False
    steps = catalog.records(LOSS, (run_id, reference))
    return equal_warm_up(steps[run_id], steps[reference], branched)


def equal_warm_up(run: Steps, reference: Steps, branched: float = -math.inf) -> bool:
    """Whether two runs that are compared had the same losses before iteration 0, so have the same weights. branched:
    the iteration at which they branched off from one run, with equal weights; minus infinity if they did not."""
    first, second = (
        [(step["iteration"], step["loss"]) for step in steps if branched <= step["iteration"] < 0]
        for steps in (run, reference)
    )
    return first == second


def pairs_on_same_data(catalog: Catalog, run_id: str, reference: str, where: Filter | None = None) -> pd.DataFrame:
    """`Catalog.pairs` of two runs with the same `data_key`, at the iterations at which they had read the same data."""
    steps = catalog.records(LOSS, (run_id, reference))
    same = same_data(steps[run_id], steps[reference])
    pairs = catalog.pairs(run_id, reference, where)
    return pairs[pairs["iteration"].map(same).astype(bool)]

"""Log-probabilities that tools for reinforcement learning dump: those of the rollout engine and of the trainer.

| tool | file | written by |
|---|---|---|
| NeMo-RL | train_data_step{N}.jsonl | `log_batched_dict_as_jsonl` in utils/logger.py, from algorithms/grpo.py |
| prime-rl | token_exports/step_{N}/rank_{R}.jsonl | `TokenExporter` in trainer/rl/token_export.py |
| slime | torch file of --save-debug-train-data | `save_debug_train_data` in observability/train_data_utils.py |
| miles | the same, one file per rank | `save_debug_train_data_for_rank` in utils/train_dump_utils.py |

To read another tool's JSON lines, add a reader to LINES. Torch files are loaded with weights_only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from binade.collector.errors import ConfigError, raising
from binade.data.compare.parity import Floats, Policies
from binade.data.run.continued import continued_run
from binade.data.run.directory import DONE
from binade.data.run.experiment import EXPERIMENT, SAME, BatchResult, ExperimentWriter, TreatmentKey, read_results
from binade.data.run.parity_results import TRAINER
from binade.data.run.store import TensorFileError, regular, sha256

Record = Mapping[str, Any]
TORCH = (b"PK\x03\x04", b"\x80")  # how the files of torch.save begin
NAME = re.compile(r"train_data_step(\d+)")


class RolloutSequence(NamedTuple):
    """A sequence: log-probabilities and mask, each with a value per token."""

    rollout: Sequence[float]
    training: Sequence[float]
    mask: Sequence[float]


@dataclass(frozen=True)
class Rollouts:
    """The tokens of one step.

    step               its number as text, or the name of the file
    rollout, training  the log-probabilities of the tokens that count, of each sequence
    """

    tool: str
    step: str
    policies: Policies
    rollout: tuple[Floats, ...]
    training: tuple[Floats, ...]


@dataclass(frozen=True)
class JsonLinesTool:
    """A tool that writes a JSON object per sequence.

    keys    those that tell its lines from those of other tools
    sample  the sequence of a line; raises ValueError
    step    the step of a line in this file; raises ValueError
    """

    tool: str
    keys: frozenset[str]
    sample: Callable[[Record], RolloutSequence]
    step: Callable[[Record, Path], str]


def read_rollouts(paths: Iterable[Path]) -> list[Rollouts]:
    """The log-probabilities of dumps by tool and step, in the order of the files. Raises ConfigError for a file that
    has none or cannot be read."""
    samples: dict[tuple[str, str], list[RolloutSequence]] = {}
    for path in paths:
        with raising(ConfigError, f"{path} cannot be read", OSError):
            read = list(_read(path))
        if not read:
            raise ConfigError(f"{path} contains no sequence: give a dump of NeMo-RL, prime-rl or slime")
        for tool, step, sample in read:
            samples.setdefault((tool, step), []).append(sample)
    rollouts = []
    for (tool, step), sequences in samples.items():
        with raising(ConfigError, f"{tool}, step {step}", ValueError):
            rollouts.append(_rollouts(tool, step, sequences))
    return rollouts


def save_rollouts(root: Path, paths: Sequence[Path], rollouts: Sequence[Rollouts]) -> str:
    """Write log-probabilities as an experiment, or in place of that of the same files: the base has those of the
    trainer, the treatment those of the rollout engine, and a batch is a step. Returns the run's id. Raises RunError,
    ReadOnlyError and OSError."""
    tools = ", ".join(dict.fromkeys(rollout.tool for rollout in rollouts))
    facts = {"files": [str(path) for path in paths], "steps": [rollout.step for rollout in rollouts],
             "measures": {"sha256": sorted(map(sha256, paths))}, "kind": EXPERIMENT,
             "compares": f"dumps of {tools}"}  # fmt: skip
    with continued_run(root, f"parity_{tools}", facts, SAME, "log-probabilities are being saved") as (writer, _):
        known = {result.place for result in read_results(writer.directory)}
        results = ExperimentWriter(writer.directory)
        for number, rollout in enumerate(rollouts):
            for result in _results(tools, number, rollout):
                if result.place not in known:
                    results.add(result)
        writer.finish(DONE)
    return writer.run_id


def _results(tool: str, step: int, rollout: Rollouts) -> Iterator[BatchResult]:
    """The base and the treatment of a step."""
    for key, sequences in ((TRAINER, rollout.training), (TreatmentKey(tool, base=TRAINER), rollout.rollout)):
        losses = tuple(-float(x.mean()) for x in sequences)
        yield BatchResult(key, step, losses, tuple(map(len, sequences)), logprobs=sequences)


def _rollouts(tool: str, step: str, samples: Sequence[RolloutSequence]) -> Rollouts:
    """Raises ValueError as `Policies.of`."""
    rollout, training, mask = (np.concatenate([np.asarray(sample[at], float) for sample in samples]) for at in range(3))
    bounds = np.cumsum([len(sample.mask) for sample in samples])[:-1]
    sequence = np.repeat(np.arange(len(samples)), [len(sample.mask) for sample in samples])
    policies = Policies.of(rollout, training, mask, sequence)
    counts = np.split(mask > 0, bounds)
    of_rollout, of_training = (
        tuple(x[own] for x, own in zip(np.split(column, bounds), counts, strict=True) if own.any())
        for column in (rollout, training)
    )
    return Rollouts(tool, step, policies, of_rollout, of_training)


def _read(path: Path) -> Iterator[tuple[str, str, RolloutSequence]]:
    with open(path, "rb", opener=regular) as file:
        if file.peek(4).startswith(TORCH):
            yield from _torch_samples(path)
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            with raising(ConfigError, f"{path}, line {number}", ValueError, RecursionError, OverflowError):
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"it is a {type(record).__name__}, expected an object per sequence")
                reader = _reader(record)
                yield reader.tool, reader.step(record, path), _checked(reader.sample(record))


def _reader(record: Record) -> JsonLinesTool:
    if reader := next((candidate for candidate in LINES if candidate.keys <= record.keys()), None):
        return reader
    if {"input", "output"} <= record.keys():
        raise ValueError("verl's JSON lines contain no log-probabilities: use the metrics that verl logs")
    expected = "; ".join(f"{', '.join(sorted(reader.keys))} ({reader.tool})" for reader in LINES)
    raise ValueError(f"it has no log-probabilities of two policies: expected the keys {expected}")


def _checked(sample: RolloutSequence) -> RolloutSequence:
    lengths = [len(column) for column in sample]
    if len(set(lengths)) > 1:
        raise ValueError(f"{lengths[0]} rollout log-probabilities, {lengths[1]} of training and {lengths[2]} of mask")
    return sample


def _numbers(record: Record, key: str) -> list[float]:
    """The list of a key. null is NaN. A list in a list of one, as NeMo-RL slices batches, is that list."""
    numbers = record.get(key)
    if isinstance(numbers, list) and len(numbers) == 1 and isinstance(numbers[0], list):
        numbers = numbers[0]
    if not isinstance(numbers, list) or not all(
        number is None or isinstance(number, int | float) for number in numbers
    ):
        raise ValueError(f"{key} is not a list of numbers")
    return [math.nan if number is None else float(number) for number in numbers]


def _nemo_sample(record: Record) -> RolloutSequence:
    """The first token has no log-probability: NeMo-RL leaves it out, too (`ClippedPGLossFn`)."""
    keys = "generation_logprobs", "prev_logprobs", "token_loss_mask", "sample_loss_mask"
    rollout, training, mask, whole = (_numbers(record, key) for key in keys)
    if len(whole) != 1:
        raise ValueError(f"sample_loss_mask has {len(whole)} values: expected 1, of one sequence")
    return RolloutSequence(rollout[1:], training[1:], [flag * whole[0] for flag in mask[1:]])


def _nemo_step(record: Record, path: Path) -> str:
    match = NAME.search(path.name)
    return match[1] if match else path.name


def _prime_sample(record: Record) -> RolloutSequence:
    """Tokens that were not sampled from the rollout policy do not count, as in trainer/rl/train.py."""
    if (version := record.get("schema_version", 1)) != 1:
        raise ValueError(f"schema_version is {version}: expected 1")
    mask, rl = _numbers(record, "loss_mask"), _weights(record, "rl_weights")
    if rl:
        ref = _weights(record, "ref_kl_weights") or [0.0] * len(mask)
        mask = [flag * any(weights) for flag, *weights in zip(mask, rl, ref, strict=True)]
    return RolloutSequence(_numbers(record, "inference_logprobs"), _numbers(record, "trainer_logprobs"), mask)


def _weights(record: Record, key: str) -> list[float]:
    """[] if the key is missing or null for every token: then each token has the default weight."""
    weights = record.get(key)
    return [] if not isinstance(weights, list) or all(weight is None for weight in weights) else _numbers(record, key)


def _prime_step(record: Record, path: Path) -> str:
    return str(record.get("step", path.name))


LINES = (
    JsonLinesTool(
        "NeMo-RL", frozenset({"generation_logprobs", "prev_logprobs", "token_loss_mask"}), _nemo_sample, _nemo_step
    ),
    JsonLinesTool(
        "prime-rl", frozenset({"inference_logprobs", "trainer_logprobs", "loss_mask"}), _prime_sample, _prime_step
    ),
)


def _torch_samples(path: Path) -> Iterator[tuple[str, str, RolloutSequence]]:
    """slime: a dict per sequence in `samples`. miles, and slime before its version 2: a list per key."""
    from binade.data.run.tensor_files import load_plain  # imports torch

    with raising(ConfigError, f"{path} cannot be read", TensorFileError):
        content = load_plain(path)
    with raising(ConfigError, str(path), ValueError):
        if not isinstance(content, dict):
            raise ValueError(f"it contains a {type(content).__name__}: expected what --save-debug-train-data writes")
        tool = "slime" if "samples" in content else "miles"
        records = content.get("samples")
        if records is None:
            records = _transposed(content.get("rollout_data"))
        if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
            raise ValueError("it has neither samples nor rollout_data: expected what --save-debug-train-data writes")
        for number, record in enumerate(records):
            with raising(ValueError, f"sample {number}", ValueError):
                yield tool, str(content.get("rollout_id", path.name)), _checked(_slime_sample(record))


def _transposed(columns: Any) -> list[Record] | None:
    if not isinstance(columns, dict):
        return None
    names = [name for name in ("log_probs", "rollout_log_probs", "loss_masks") if isinstance(columns.get(name), list)]
    if len({len(columns[name]) for name in names}) > 1:
        raise ValueError(f"{' and '.join(names)} have different numbers of samples")
    return [dict(zip(names, values, strict=True)) for values in zip(*(columns[name] for name in names), strict=True)]


def _slime_sample(record: Record) -> RolloutSequence:
    rollout, training, mask = (_values(record, key) for key in ("rollout_log_probs", "log_probs", "loss_masks"))
    if training is None:
        raise ValueError("log_probs are missing: give the file of --save-debug-train-data, not of rollouts")
    if rollout is None:
        raise ValueError("rollout_log_probs are missing: the rollout engine did not return them")
    return RolloutSequence(rollout, training, [1] * len(training) if mask is None else mask)


def _values(record: Record, key: str) -> Any:
    """The values of a tensor or list as a list; None if there is none."""
    values = record.get(key)
    if values is None:
        return None
    return _numbers({key: values.reshape(-1).tolist() if hasattr(values, "reshape") else values}, key)

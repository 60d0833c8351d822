"""One loss per step, of losses in the order of a log in which steps occur more than once.

| the log | is read as |
|---|---|
| the step goes back while the epoch goes on | steps within epochs: each epoch follows the one before |
| the step goes back to one after the first | resumed from a checkpoint: later losses replace earlier ones |
| the step goes back to the first, and no epoch is logged | a question |
| each step has as many losses, one after the other | micro-batches: their mean |
| other repeated steps, at most a third of the losses | the last finite loss of each step |
| more than a third | a question |
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from binade.collector.imports.readers.series import Repeats

LEFT_OUT = "{:,} losses were left out: the last finite one of each step counts"
MOST_REPLACED = 1 / 3  # of the losses, without a question


class RepeatedStepError(Exception):
    """Several losses of one step may be several things. The message says which steps."""


@dataclass(frozen=True)
class LossesInOrder:
    """Losses in the order of a log. epochs: NaN where none is logged; totals: M of a step "N/M", or 0; micro_batches:
    whether each is that of a micro-batch."""

    steps: array[int]
    losses: array[float]
    epochs: array[float]
    totals: array[int]
    micro_batches: bool = False


@dataclass(frozen=True)
class OnePerStep:
    """replaced: the losses that another one of the same step replaces; facts: in words."""

    losses: dict[int, float]
    replaced: int = 0
    facts: tuple[str, ...] = ()


def one_per_step(log: LossesInOrder, choice: Repeats | None = None, usual: Repeats | None = None) -> OnePerStep:
    """choice: instead of what the log shows; usual: what repeated steps within an epoch are in such logs. Raises
    RepeatedStepError."""
    steps = log.steps
    left_out = len(steps) - len(set(steps))
    if choice == Repeats.CONTINUE or (choice is None and _epochs_go_on(log)):
        return _continued(log, usual)
    choice = choice or usual
    if not left_out:
        return OnePerStep(dict(zip(steps, log.losses, strict=True)))
    if choice == Repeats.MEAN:
        return OnePerStep(_means(log), 0, ("the loss of a step is the mean of its losses",))
    if choice == Repeats.FIRST:
        firsts = dict(zip(reversed(steps), reversed(log.losses), strict=True))
        return OnePerStep(firsts, 0, (f"{left_out:,} losses left out: the first one of each step counts",))
    if choice == Repeats.LAST:
        return OnePerStep(_last(log), left_out, (LEFT_OUT.format(left_out),))
    if log.micro_batches:
        return OnePerStep(_means(log), 0, ("the loss of a step is the mean of its micro-batches",))
    replaced = _different(log)
    if replaced and (times := _times(log)) > 1:
        fact = f"each step has {times} losses, as of micro-batches or ranks: their mean was read (else --repeats last)"
        return OnePerStep(_means(log), 0, (fact,))
    backs = [*_backs(log)]
    restart = next((i for _, i in backs if steps[i] <= steps[0] and math.isnan(log.epochs[i])), None)
    if replaced and restart is not None:
        at = f"after step {steps[restart - 1]}, the steps start again at {steps[restart]}"
        raise RepeatedStepError(f"{at}, with another epoch or a training that replaces the one before")
    if replaced > MOST_REPLACED * len(steps):
        twice = next(step for step, count in Counter(steps).items() if count > 1)
        of = f"{replaced:,} of {len(steps):,} losses are of a step that has another one, such as step {twice}"
        raise RepeatedStepError(of)
    fact = LEFT_OUT.format(left_out)
    if backs:
        before, after = backs[0]
        more = f", and {len(backs) - 1} more times" if len(backs) > 1 else ""
        back = f"the log goes back from step {steps[before]} to {steps[after]}{more}, as if resumed from a checkpoint"
        fact = f"{back}: {left_out:,} earlier losses were left out"
    return OnePerStep(_last(log), left_out, (fact,))


def is_unexplained(log: LossesInOrder) -> bool:
    """Whether steps are repeated for which the log names no epochs or micro-batches."""
    return len(set(log.steps)) < len(log.steps) and not log.micro_batches and not _epochs_go_on(log)


def _epochs_go_on(log: LossesInOrder) -> bool:
    """Whether the steps go back somewhere while the epoch goes on, or there is one step, in several epochs."""
    pairs = pairwise(zip(log.steps, log.epochs, strict=True))
    if any(after[0] < before[0] and after[1] > before[1] for before, after in pairs):
        return True
    epochs = {epoch for epoch in log.epochs if not math.isnan(epoch)}
    return len(set(log.steps)) == 1 < len(log.steps) == len(epochs)


def _continued(log: LossesInOrder, usual: Repeats | None) -> OnePerStep:
    """The steps of each epoch follow those before. An epoch is as long as the log says, or as its steps."""
    members: dict[float, list[int]] = {}
    logged = not any(map(math.isnan, log.epochs)) and _epochs_go_on(log)
    part = 0.0
    for i, step in enumerate(log.steps):
        part += bool(i) and step < log.steps[i - 1]
        members.setdefault(log.epochs[i] if logged else part, []).append(i)
    done = {epoch: one_per_step(_some(log, members[epoch]), None, usual) for epoch in sorted(members)}
    totals = set(log.totals)
    length = totals.pop() if len(totals) == 1 else 0
    if length < max(log.steps):
        length = 0
    found: dict[int, float] = {}
    start = 0
    ordered = [each.losses for each in done.values()]
    for losses, following in zip(ordered, [*ordered[1:], None], strict=True):
        found |= {start + step: loss for step, loss in losses.items()}
        if following:
            gaps = Counter(after - before for before, after in pairwise(sorted(losses)))
            gap = gaps.most_common(1)[0][0] if gaps else 1
            start += length or max(1, max(losses) + gap - min(following))
    by = f"with {length:,} steps each" if length else "each from the last step that is logged of the one before"
    fact = f"the steps start again in each of {len(done):,} epochs and are counted on, {by}"
    within = dict.fromkeys(fact for each in done.values() for fact in each.facts)
    return OnePerStep(found, sum(each.replaced for each in done.values()), (fact, *within))


def _some(log: LossesInOrder, members: list[int]) -> LossesInOrder:
    """Some of the losses, which are all of one epoch."""
    return LossesInOrder(
        array("q", (log.steps[i] for i in members)),
        array("d", (log.losses[i] for i in members)),
        array("d", (log.epochs[i] for i in members)),
        array("q", (log.totals[i] for i in members)),
        log.micro_batches,
    )


def _times(log: LossesInOrder) -> int:
    """How many losses each step has, one after the other, if all have as many; the last step may have fewer."""
    counts = [len([*group]) for _, group in groupby(log.steps)]
    if len(counts) != len(set(log.steps)) or len(counts) < 2:
        return 1
    if len({*counts[:-1]}) > 1 or counts[-1] > counts[0]:
        return 1
    return counts[0]


def _backs(log: LossesInOrder) -> Iterator[tuple[int, int]]:
    """Where the log goes back to a step that it has had."""
    seen: set[int] = set()
    for i, step in enumerate(log.steps):
        if i and step < log.steps[i - 1] and step in seen:
            yield i - 1, i
        seen.add(step)


def _different(log: LossesInOrder) -> int:
    """The finite losses that differ from another finite one of the same step, which replaces them."""
    last: dict[int, float] = {}
    number = 0
    for step, loss in zip(log.steps, log.losses, strict=True):
        if math.isfinite(loss):
            number += last.setdefault(step, loss) != loss
            last[step] = loss
    return number


def _last(log: LossesInOrder) -> dict[int, float]:
    """The last finite loss of each step; after the log went back, the last one, which replaces those before."""
    found: dict[int, float] = {}
    part_of: dict[int, int] = {}
    backs = {i for _, i in _backs(log)}
    part = 0
    for i, (step, loss) in enumerate(zip(log.steps, log.losses, strict=True)):
        part += i in backs
        if math.isfinite(loss) or part_of.get(step) != part:
            found[step] = loss
        part_of[step] = part
    return found


def _means(log: LossesInOrder) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for step, loss in zip(log.steps, log.losses, strict=True):
        found.setdefault(step, []).append(loss)
    return {step: sum(losses) / len(losses) for step, losses in found.items()}

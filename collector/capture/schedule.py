"""Changes to bf16 during training: for a layer, a GEMM or everything, from a given step or when a trigger fires."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from binade.collector.capture.observer import Hook
from binade.collector.capture.recorder import Recorder
from binade.collector.capture.triggers import Trigger
from binade.collector.errors import ConfigError
from binade.collector.models.site import Site
from binade.collector.recipes.recipe import Part
from binade.collector.recipes.selection import Selection
from binade.data.tensor_kinds import Gemm


@dataclass(frozen=True)
class Switch:
    """A change to bf16; see `schedule`."""

    layers: str
    gemm: str
    at: int | None
    when: str | None

    @property
    def text(self) -> str:
        """What changes: "the dgrad GEMM runs in bf16 (layers: first 2)"."""
        what = f"the {self.gemm} GEMM" if self.gemm else "everything"
        return f"{what} runs in bf16 (layers: {self.layers or 'all'})"

    def sites(self, sites: Sequence[Site]) -> frozenset[Site]:
        """Raises SelectionError for layers that the model does not have."""
        return Selection.parse(self.layers).of(sites)

    def applied(self, stages: Sequence[tuple[int, Part]], start: int) -> list[tuple[int, Part]]:
        """The stages of a product (see observer.Hook), with this change from iteration `start` on."""
        before = [stage for stage in stages if stage[0] < start]
        current = next((part for at, part in reversed(stages) if at <= start), stages[0][1])
        later = [(at, part.without(self.gemm)) for at, part in stages if at > start]
        return [*before, (start, current.without(self.gemm)), *later]


def schedule(*, layers: str = "", gemm: str = "", at: int | None = None, when: str | None = None) -> Switch:
    """Turn quantization off during a run: a change for `instrument(schedule=[...])`.

        binade.schedule(at=1000)                                            # everything, from iteration 1000 on
        binade.schedule(layers="last 2", gemm="dgrad", when="sqnr_db < 12 for 3")

    layers  as in `skip` of instrument; default: all
    gemm    forward, dgrad or wgrad; default: all three
    at      the iteration from which the change applies
    when    one of the Recorder's triggers: the change takes effect in the next step that starts after the trigger is
            known to have fired

    The change is written to the run as an event. Raises ConfigError unless exactly one of at and when is given,
    for an unknown GEMM, and for an invalid trigger.
    """
    if (at is None) == (when is None):
        raise ConfigError("a schedule needs exactly one of at=ITERATION and when=TRIGGER")
    if gemm and gemm not in tuple(Gemm):
        raise ConfigError(f"gemm={gemm!r}: expected one of {', '.join(Gemm)}")
    if at is not None and at < 0:
        raise ConfigError(f"at={at} is not an iteration: expected 0 or more")
    return Switch(layers, gemm, at, None if when is None else Trigger.parse(when).text)


@dataclass
class Pending:
    """The changes of an instrumented model that have not been made yet.

    hooks   of the products of each change
    """

    hooks: dict[Switch, list[Hook]]

    @contextmanager
    def following(self, recorder: Recorder) -> Iterator[None]:
        """A context in which the changes are made when they are due, and written to the run as events."""

        def change() -> None:
            for switch in self._due(recorder.clock.iteration, recorder.fired):
                recorder.changed(switch.text, switch.when)

        recorder.clock.followers.append(change)
        change()
        try:
            yield
        finally:
            recorder.clock.followers.remove(change)

    def _due(self, iteration: int, fired: Sequence[str]) -> list[Switch]:
        """Make the changes that are due, and return them. fired: the triggers that have."""
        found = [each for each in self.hooks if (each.at is not None and each.at <= iteration) or each.when in fired]
        for switch in found:
            for hook in self.hooks.pop(switch):
                if switch.when is not None:
                    hook.stages = switch.applied(hook.stages, iteration)
        return found

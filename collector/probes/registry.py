"""All probes, and when each is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from binade.collector.capture.instrumented import Instrumented
from binade.collector.probes.deoscillation import Deoscillator
from binade.collector.probes.gradient_sums import GradientSums
from binade.collector.probes.hidden_products import HiddenProducts
from binade.collector.probes.missed_weights import MissedWeights
from binade.collector.probes.optimizer_state import StateRounder
from binade.collector.probes.probe import Probe, Recording
from binade.collector.probes.provenance import FirstNonFinite
from binade.collector.probes.recomputation import Recomputation
from binade.collector.probes.unchanged_weights import UnchangedWeights
from binade.data.run.tensor_kinds import Measure

Begin = Callable[[Recording], Probe | None]

# During a run, unless its warnings are off (`Watch(warn=())`).
WARNINGS: tuple[Begin, ...] = (UnchangedWeights, Recomputation, HiddenProducts)

# During a run whose Recorder has this measure.
MEASURES: Mapping[Measure, Begin] = {Measure.ACCUMULATED: GradientSums}

# As long as a model is instrumented, with a run or without; None if its recipe and its Recorder ask for nothing.
OF_A_MODEL: tuple[Callable[[Instrumented], Probe | None], ...] = (
    StateRounder.of,
    Deoscillator.of,
    FirstNonFinite.of,
    MissedWeights.of,
)


def of_a_run(recording: Recording) -> list[Probe]:
    """Those of a run that begins."""
    begins = [*(WARNINGS if recording.watch.warn else ()), *(MEASURES[m] for m in MEASURES if m in recording.measures)]
    return [probe for begin in begins if (probe := begin(recording))]


def of_a_model(instrumented: Instrumented) -> list[Probe]:
    """Those of a model that is instrumented. Raises InstrumentError for a model that one of them cannot work on."""
    return [probe for begin in OF_A_MODEL if (probe := begin(instrumented))]

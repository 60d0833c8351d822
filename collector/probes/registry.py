"""All probes."""

from __future__ import annotations

from collections.abc import Callable

from binade.collector.probes.hidden_products import HiddenProducts
from binade.collector.probes.probe import Probe
from binade.collector.probes.recomputation import Recomputation
from binade.collector.probes.unchanged_weights import UnchangedWeights

PROBES: tuple[Callable[[], Probe], ...] = (UnchangedWeights, Recomputation, HiddenProducts)

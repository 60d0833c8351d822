"""Former places of modules: `binade.data.events` is `binade.data.run.events`. What imports them finds the same module.

The rooms of data and app came after users had written scripts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ROOMS = {
    "data.run": (
        "runs:directory columns tensor_kinds segment store tensor_files json_files events notes twin:evaluations "
        "effects parity_results continued merge verify access experiment rounding_alone"
    ),
    "data.index": (
        "index_tables:tables intake catalog cache open_index:opened sketches score_queries sandbox statement "
        "run_table tensor_values whole_tensors"
    ),
    "data.compare": (
        "ablation comparison held_out difference difference_text evidence gap_bands gradients loss_gaps matching "
        "parity same_data step_sums student trends coverage routing outcomes ladder"
    ),
    "data.exchange": "bundle export foreign read_tables untrusted python",
    "data.words": "fields names filter text",
    "app.view": "params budget",
    "app.frame": (
        "address bar base_path first_scripts downloads fair_queue guard header one_address palette "
        "palette_view preloading reruns sharing state uploads users"
    ),
    "app.draw": "plot figure style theme numbers formatting text_width control exports show components glossary",
}
MOVED = {
    f"binade.{room.split('.')[0]}.{name.partition(':')[0]}": f"binade.{room}.{name.partition(':')[2] or name}"
    for room, names in _ROOMS.items()
    for name in names.split()
}
"""The former name of each module, and the present one."""


class _Former(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}  # of modules by their present names, while they are imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(MOVED[spec.name])
        self._specs[module.__name__] = module.__spec__  # which importlib replaces by that of the former name
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It was executed under its present name, whose spec it gets back."""
        module.__spec__ = self._specs.pop(module.__name__)


def install() -> None:
    """Let imports find modules by their former names, where there is none of that name."""
    if not any(isinstance(finder, _Former) for finder in sys.meta_path):
        sys.meta_path.append(_Former())

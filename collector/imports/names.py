"""Names of imported modules that are distinct over an import."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from binade.collector.imports.log import place, without_layer

Rows = Sequence[Mapping[str, Any]]  # tensor_id, layer_index, module, expert and module_path of each


def distinct_modules(segments: Mapping[str, Rows]) -> dict[str, dict[str, str]]:
    """By segment and tensor_id, the new names of modules: those at different paths that have the same name in the same
    layer are named by their paths."""
    every = [*itertools.chain(*segments.values())]
    usual = {row["module_path"]: place(row["module_path"]).get("module") for row in every}
    paths: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for row in every:
        paths[row["layer_index"], usual[row["module_path"]], row["expert"]].add(row["module_path"])
    renamed: dict[str, dict[str, str]] = {}
    for name, rows in segments.items():
        for row in rows:
            path, usual_name = row["module_path"], usual[row["module_path"]]
            if len(paths[row["layer_index"], usual_name, row["expert"]]) > 1:
                module = _by_path(row["module"], path, usual_name)
                if module != row["module"]:
                    renamed.setdefault(name, {})[row["tensor_id"]] = module
    return renamed


def _by_path(module: str | None, path: str, usual: str | None) -> str:
    """The name of a module by its path, with the number of its call if its name so far has that."""
    name = without_layer(path)
    if module is None or module == usual:
        return name
    known = name if module == name or module.startswith(f"{name}.") else usual or ""
    return name + module.removeprefix(known)

"""Names of imported tensors and runs that are distinct over an import."""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from binade.collector.imports.log import LONGEST, place, plain_word, without_layer
from binade.collector.imports.model_paths import CHECKPOINT, NAME
from binade.data.run.columns import Identity

IDENTITY = (*Identity.__annotations__,)
COLUMNS = ["tensor_id", *IDENTITY, "module_path", "source_version", "path", "file_key"]
Row = Mapping[str, Any]  # COLUMNS of a tensor
ELLIPSIS = "…"


def distinct_modules(rows: Iterable[Row]) -> dict[str, str]:
    """By tensor_id, the modules of which the name changes: those at different paths that have the same name in the same
    layer are named by their paths; and where tensors that no tool has named agree in all fields, their modules are
    named after what differs in their keys and files, too."""
    rows = sorted(rows, key=lambda row: row["tensor_id"])
    renamed = _by_path(rows)
    return renamed | _by_name(rows, {row["tensor_id"]: row["module"] for row in rows} | renamed)


def _by_path(rows: Iterable[Row]) -> dict[str, str]:
    rows = [row for row in rows if row["module_path"] is not None]
    usual = {row["module_path"]: place(row["module_path"]).get("module") for row in rows}
    paths: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for row in rows:
        paths[row["layer_index"], usual[row["module_path"]], row["expert"]].add(row["module_path"])
    return {
        row["tensor_id"]: _path_name(row["module"], row["module_path"], usual[row["module_path"]])
        for row in rows
        if len(paths[row["layer_index"], usual[row["module_path"]], row["expert"]]) > 1
    }


def _path_name(module: str | None, path: str, usual: str | None) -> str:
    """The name of a module by its path, with what follows its usual name, such as the number of its call."""
    name = without_layer(path)
    if module is None or module == usual:
        return plain_word(name) or name
    return name + module.removeprefix(usual or "")


def _by_name(rows: Iterable[Row], modules: Mapping[str, str | None]) -> dict[str, str]:
    """A module for each of the tensors that would have the same identity."""
    alike: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["source_version"] in (None, CHECKPOINT, NAME):
            identity = tuple(modules[row["tensor_id"]] if n == "module" else row[n] for n in IDENTITY)
            alike[identity].append(row)
    found: dict[str, str] = {}
    for group in alike.values():
        if len(group) < 2:
            continue
        names = [f"{os.path.splitext(row['path'] or '')[0]}/{row['file_key'] or ''}" for row in group]
        taken: set[str] = set()
        for row, label in zip(group, differing(names), strict=True):
            module = modules[row["tensor_id"]]
            label = re.sub(r"[^A-Za-z0-9_.+-]+", "_", label)
            word = plain_word(f"{module}.{label}" if module else label) or "tensor"
            numbered = (f"{word[: LONGEST - 8]}.{number}" for number in itertools.count(2))
            word = next(w for w in itertools.chain([word], numbered) if w not in taken)
            taken.add(word)
            found[row["tensor_id"]] = word
    return found


def differing(names: Sequence[str]) -> list[str]:
    """What differs in names, by their parts: "bf16" and "fp8" of "runs/bf16/layers.0.q" and "runs/fp8/layers.0.q"."""
    parts = [[part for part in re.split(r"[/.]", name) if part] for name in names]
    before = _equal(parts)
    after = _equal([part[before:][::-1] for part in parts])
    labels = [".".join(p[before : len(p) - after]) for p in parts]
    if max(map(len, labels)) <= LONGEST // 2:
        return labels
    start, end = _common(labels)
    return [label[start : len(label) - end] for label in labels]


def _common(names: Sequence[str]) -> tuple[int, int]:
    """The characters that names have in common at their beginnings, and at their ends."""
    start = _equal(names)
    return start, _equal([name[start:][::-1] for name in names])


def _equal(names: Sequence[str] | Sequence[list[str]]) -> int:
    """How many elements at the beginnings of names are the same."""
    listed = [[*name] for name in names]
    first, last = min(listed), max(listed)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


def shortened(names: Sequence[str], longest: int) -> list[str]:
    """Names of at most this many characters, where "…" stands for what is left out. Names that differ stay different:
    what they have in common is left out first."""
    kept = {name: _ends(name, longest) for name in names}
    alike = defaultdict(set)
    for name, short in kept.items():
        alike[short].add(name)
    for group in (sorted(group) for group in alike.values() if len(group) > 1):
        start, end = _common(group)
        for number, name in enumerate(group, 1):
            differs = name[start : len(name) - end]
            room = longest - len(differs) - 2
            if room >= 0:
                before, after = room - room // 2, room // 2
                head, tail = name[:start][:before], name[len(name) - end :][end - min(end, after) :]
                kept[name] = f"{head}{ELLIPSIS}{differs}{ELLIPSIS}{tail}"
            else:
                kept[name] = f"{_ends(name, longest - len(str(number)) - 1)}~{number}"
    return [kept[name] for name in names]


def _ends(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    tail = (longest - 1) // 3
    return f"{name[: longest - 1 - tail]}{ELLIPSIS}{name[len(name) - tail :]}"

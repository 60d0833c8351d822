"""Where the layers of a model are: a layer's number is its index in a list of blocks, and the lists of a model with
several are its towers, such as those for images and for text. The decoder's modules have plain names, whatever lies
beside it; those of another tower begin with its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from binade.collector.capture.adapters.layer import Layer
from binade.collector.models.site import MTP, path_parts, site

# Words in the path of a list of blocks; an earlier one goes first: vision_model.encoder.layers is of images.
OF_MTP = r"mtp|multi_?token|next_?n(?![a-z])"
TOWERS = {
    MTP: OF_MTP,
    "draft": r"draft|eagle|medusa|hydra|speculat",
    "adapter": "adapter",
    "vision": r"vision|visual|image|vit",
    "audio": r"audio|speech",
    "text": r"text|language|llm",
    "encoder": "encoder",
    "decoder": "decoder",
}
MAIN = ("", "text", "decoder")  # the first of these that a model has is the tower whose modules have plain names
GENERIC = re.compile(r"layers?|blocks?|h|model|modules?|modulelist|transformer|backbone|\d+")


def placed(modules: Mapping[str, nn.Module], layers: Sequence[Layer]) -> list[Layer]:
    """The layers with their numbers and towers: "vision.qkv" is a module of the tower for images. Without a list of
    blocks, the first number of a path counts."""
    lists = list(_outermost(name for name, module in modules.items() if _is_of_blocks(module)))
    towers, main = _towers(modules, lists)
    return [_placed(modules, layer, towers, main) for layer in layers]


def _is_of_blocks(module: nn.Module) -> bool:
    """Whether this is a list of modules with parts; in an nn.Sequential, two of them or more are of the same class."""
    blocks = [type(child) for name, child in module.named_children() if name.isdecimal() and any(child.children())]
    if isinstance(module, nn.Sequential):
        return len({*blocks}) < len(blocks)
    return bool(blocks)


def _outermost(paths: Iterator[str]) -> Iterator[str]:
    """Those that are in no other; a list comes before those in it."""
    before: list[str] = []
    for path in paths:
        if not any(path.startswith(f"{outer}." if outer else "") for outer in before):
            before.append(path)
            yield path


def _towers(modules: Mapping[str, nn.Module], lists: Sequence[str]) -> tuple[dict[str, str], str | None]:
    """The tower of each list of blocks by its path, and which of them has plain names.

    A tower is the first of TOWERS that the path names, or the second of lists that these tell apart, as of
    text_encoder.layers and text_decoder.layers. Of lists that no word tells apart, the one with the most parameters is
    the tower, and the others have names of their own."""
    words = {path: [tower for tower, word in TOWERS.items() if re.search(word, path.lower())] for path in lists}
    sizes = {path: sum(p.numel() for p in modules[path].parameters()) for path in lists}
    towers = {path: named[0] if named else "" for path, named in words.items()}
    if len({*towers.values()}) == 1:
        towers = dict.fromkeys(lists, "")
    for tower in {*towers.values()}:
        alike = [path for path in lists if towers[path] == tower]
        seconds = {words[path][1] for path in alike if len(words[path]) > 1}
        if len(seconds) == len(alike) > 1:
            towers |= {path: words[path][1] for path in alike}
        else:
            largest = max(alike, key=lambda path: sizes[path])
            towers |= {path: _own_name(path, tower) for path in alike if path != largest}
    mains = [tower for tower in MAIN if tower in towers.values()]
    of_tower = {tower: path for path, tower in towers.items()}
    if len(mains) > 1 and mains[0] == "" and sizes[of_tower[""]] < max(sizes[of_tower[tower]] for tower in mains[1:]):
        towers[of_tower[""]] = _own_name(of_tower[""], "")
        mains = mains[1:]
    return towers, next(iter(mains), None)


def _own_name(path: str, tower: str) -> str:
    """A tower of its own for a list of blocks: the words of its path that say what it is."""
    parts = path_parts(path)
    said = [part for part in parts if not GENERIC.fullmatch(part.lower())]
    return ".".join(said or parts[-1:]) or tower


def _placed(modules: Mapping[str, nn.Module], layer: Layer, towers: Mapping[str, str], main: str | None) -> Layer:
    parts = layer.name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    block = next((at for at in numbers if ".".join(parts[:at]) in towers), None)
    tower = main if block is None else towers[".".join(parts[:block])]
    if _is_of_mtp(modules, parts if block is None else parts[: block + 1]):
        tower = MTP
    where = layer.site
    if towers and block is None and numbers and where.layer_index == int(parts[numbers[0]]) + 1:
        # The number is not of a block: merger.mlp.2
        unnamed = numbers[0] == len(parts) - 1 and where == site(layer.name)[0]
        where = replace(where, layer_index=0, module=".".join(parts[-2:]) if unnamed else where.module)
    if tower is None or (block is None and tower != MTP):
        return replace(layer, site=where)
    return replace(
        layer, site=replace(where, module=where.module if tower == main else f"{tower}.{where.module}", tower=tower)
    )


def _is_of_mtp(modules: Mapping[str, nn.Module], parts: Sequence[str]) -> bool:
    """Whether a module belongs to multi-token prediction, as its path or a class says."""
    paths = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    classes = (type(modules[path]).__name__ for path in paths if path in modules)
    return any(re.search(OF_MTP, word.lower()) for word in (*parts, *classes))

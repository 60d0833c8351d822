"""Where the layers of a model are: a layer's number is its index in a list of blocks, and the lists of a model with
several are its towers, such as those for images and for text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from binade.collector.capture.adapters.layer import Layer
from binade.collector.models.site import site

# Words in the path of a list of blocks; an earlier one goes first: vision_model.encoder.layers is of images.
TOWERS = {
    "vision": r"vision|visual|image|vit",
    "audio": r"audio|speech",
    "text": r"text|language|llm",
    "encoder": "encoder",
    "decoder": "decoder",
}
MAIN = ("", "text", "decoder")  # the first of these that a model has is the tower whose modules have plain names


def placed(modules: Mapping[str, nn.Module], layers: Sequence[Layer]) -> list[Layer]:
    """The layers with their numbers and towers: "vision.qkv" is a module of the tower for images. Without a list of
    blocks, the first number of a path counts."""
    lists = [name for name, module in modules.items() if _is_of_blocks(module)]
    if not lists:
        return list(layers)
    towers = _towers(lists)
    main = next((tower for tower in MAIN if tower in towers.values()), None)
    if len({*towers.values()}) == 1:
        towers = dict.fromkeys(towers, main := "")
    return [_placed(layer, towers, main) for layer in layers]


def _is_of_blocks(module: nn.Module) -> bool:
    """Whether this is a list of modules with parts; in an nn.Sequential, two of them or more are of the same class."""
    blocks = [type(child) for name, child in module.named_children() if name.isdecimal() and any(child.children())]
    if isinstance(module, nn.Sequential):
        return len({*blocks}) < len(blocks)
    return bool(blocks)


def _towers(lists: Sequence[str]) -> dict[str, str]:
    """The tower of each list of blocks by its path: the first of TOWERS that it names, or the second of lists that
    these tell apart, as of text_encoder.layers and text_decoder.layers."""
    words = {path: [tower for tower, word in TOWERS.items() if re.search(word, path.lower())] for path in lists}
    towers = {path: named[0] if named else "" for path, named in words.items()}
    for tower in {*towers.values()}:
        alike = [path for path in lists if towers[path] == tower]
        seconds = {words[path][1] for path in alike if len(words[path]) > 1}
        if len(seconds) == len(alike) > 1:
            towers |= {path: words[path][1] for path in alike}
    return towers


def _placed(layer: Layer, towers: Mapping[str, str], main: str | None) -> Layer:
    parts = layer.name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    block = next((at for at in numbers if ".".join(parts[:at]) in towers), None)
    if block is not None:
        tower, module = towers[".".join(parts[:block])], layer.site.module
        return replace(
            layer, site=replace(layer.site, module=module if tower == main else f"{tower}.{module}", tower=tower)
        )
    if not numbers or layer.site.layer_index != int(parts[numbers[0]]) + 1:
        return layer
    # The number is not of a block: merger.mlp.2
    unnamed = numbers[0] == len(parts) - 1 and layer.site == site(layer.name)[0]
    module = ".".join(parts[-2:]) if unnamed else layer.site.module
    return replace(layer, site=replace(layer.site, layer_index=0, module=module))

"""What a model multiplies and no kernel is known to multiply with a weight: it is neither rounded nor recorded.

A copy of a weight that autograd does not know (a detached, stacked, computed or no-grad copy) is no weight to a kernel,
and products of vectors, convolutions and kernels of other packages are not seen at all. So both are named: the modules
that multiply what is not recognized, and the weights that took part in no product although their module ran.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType

from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap

from binade.collector.capture.adapters.products import APPLY
from binade.collector.capture.kernel.weights import MatchedWeight, Owner
from binade.data.words.text import and_more

CALL = nn.Module._call_impl.__code__
TRANSFORMS = (eager_transforms.__file__, vmap.__file__)


class Unseen:
    """left: modules whose products stay as they are on purpose, with all that they contain. show: called with what to
    say, once for a module and a weight."""

    def __init__(self, model: nn.Module, left: Iterable[nn.Module], show: Callable[[str], None]) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.left = {inner for module in left for inner in module.modules()}
        self.show = show
        self.expected: dict[nn.Module, set[str]] = {}
        self.ran: dict[nn.Module, None] = {}
        self.products: dict[nn.Module, str] = {}
        self.named: set[nn.Module] = set()
        self.warned_of_backward = False

    def expect(self, owner: Owner) -> None:
        """A weight whose products are to be seen."""
        module, name = owner
        self.expected.setdefault(module, set()).add(name)

    def seen(self, owners: Iterable[Owner]) -> None:
        for module, name in owners if self.expected else ():
            if names := self.expected.get(module):
                names.discard(name)

    def begins(self, module: nn.Module) -> None:
        if module in self.expected:
            self.ran[module] = None

    def product(self, module: nn.Module, name: str, left: Tensor, right: Tensor, match: MatchedWeight | None) -> None:
        """A product that the module computes, with a weight that is not that of a layer or with none. Products of
        integers, and outer products, such as those of rotary angles, are none of a layer."""
        if module in self.named or module in self.left or not left.is_floating_point() or left.shape[-1] < 2:
            return
        if match is None:
            what = f"multiplies {list(left.shape)} by {list(right.shape)} ({name}) and neither is known as a weight"
        elif any(owner in self.left for owner, _ in match.held.owners):
            return
        else:
            what = f"multiplies by {self._weight(*match.held.owners[0])} ({name}), which is not seen"
        self.products.setdefault(module, what)

    def backward(self, weight: MatchedWeight | None, name: str, left: Tensor, right: Tensor) -> None:
        """A product in the backward pass of this weight's product that is not a GEMM of it, as an autograd function may
        compute."""
        if weight is None or self.warned_of_backward or not left.is_floating_point() or left.shape[-1] < 2:
            return
        self.warned_of_backward = True
        self.show(
            f"the backward pass of a product by {self._weight(*weight.held.owners[0])} multiplies {list(left.shape)} "
            f"by {list(right.shape)} ({name}), which is neither its dgrad nor its wgrad: such products are neither "
            "rounded nor recorded"
        )

    def ends(self) -> None:
        """A forward pass is complete."""
        if not (self.ran or self.products):
            return
        weights = [self._weight(module, name) for module in self.ran for name in sorted(self.expected.pop(module))]
        modules = {self.names.get(module, "") or "the model": what for module, what in self.products.items()}
        self.named.update(self.products)
        self.ran.clear()
        self.products.clear()
        found = []
        if modules:
            first = next(iter(modules))
            count = len(modules) - 1
            more = (
                f" (so do{'es' if count == 1 else ''} {count} more module{'s' if count > 1 else ''})" if count else ""
            )
            found.append(f"{first} {modules[first]}{more}")
        if weights:
            found.append(f"{weights[0]}{and_more(weights)} took part in no product that was seen")
        if found:
            self.show(
                f"{'; '.join(found)}: this is neither rounded nor recorded. products='kernel' knows a weight by its "
                "memory, and by casts with gradients"
            )

    def _weight(self, module: nn.Module, name: str) -> str:
        return ".".join(filter(None, (self.names.get(module, ""), name)))


def in_function() -> bool:
    """Whether the innermost module that runs calls an autograd function that computes this."""
    return _in_module(lambda code: code is APPLY)


def in_transform() -> bool:
    """Whether the innermost module that runs calls a transform of torch.func that computes this. In a kernel torch's
    own stack of them is empty."""
    return _in_module(lambda code: code.co_filename in TRANSFORMS)


def _in_module(wanted: Callable[[CodeType], bool]) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not CALL:
        if wanted(frame.f_code):
            return True
        frame = frame.f_back
    return False

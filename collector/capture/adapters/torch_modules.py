"""Plain torch modules: nn.Linear, modules whose code calls F.scaled_dot_product_attention or FlexAttention, itself or
through functions, and modules whose code multiplies by a weight of their own (see weights).

A layer's number is one more than the first number in its path ("layers.3.mlp.up" belongs to layer 4, a module without a
number to layer 0). Its module is one of collector's names if the path has a usual ending, else the last part of the
path. Prefixes that DistributedDataParallel, FSDP, torch.compile and PEFT add to a name are not part of it; LoRA's parts
are "q.lora_A".

The LM head stays as it is unless head=True: a linear layer whose weight is an embedding's, or that has a usual name, or
that comes last, outside of the numbered layers, and has the shape of an embedding's weight; see `heads`.

A linear layer that holds the codes of its weight (4-bit and 8-bit layers of bitsandbytes, GPTQ, AWQ, HQQ) is watched
from outside: its input, its result and their gradients are recorded, and a recipe that rounds it is refused.

Not intercepted, and refused: nn.MultiheadAttention (and so nn.Transformer's layers), recurrent networks, nn.Bilinear,
and what torch.jit has compiled. A module whose attention is written
out in matrix products must be named in `cores`; if it is not, and the recipe quantizes attention, `first_pass` refuses
it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.attention import SdpaMode, core_forward
from binade.collector.capture.adapters.boundary import multiplies_itself, watched_forward
from binade.collector.capture.adapters.dtensor import core_shard_of, shard_of
from binade.collector.capture.adapters.layer import Layer, Refused, is_a, replaces, whole
from binade.collector.capture.adapters.products import names_in
from binade.collector.capture.adapters.weights import NAMES, OWN_KERNELS, OwnProducts, functional_linear, is_linear
from binade.collector.models.parallel import Begin
from binade.collector.models.site import HEAD, path_parts, site
from binade.data.run.tensor_kinds import ROUTER, SCALAR_GATE

ATTENTION = frozenset(("scaled_dot_product_attention", "flex_attention"))
SHOWN = "coverage(..., batch=...) shows whether it is rounded"
UNSEEN = f"its code names no product of torch: {SHOWN}"
OWN_FUNCTION = f"its code applies an autograd function of its own: {SHOWN}"
Shapes = dict[nn.Module, dict[str, torch.Size]]  # by the weight's name
NOT_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
HEADS = (["lm_head"], ["embed_out"], ["unembed"], ["output_head"])
HIDDEN = (
    (nn.MultiheadAttention, "it computes its products itself: use F.scaled_dot_product_attention and nn.Linear"),
    (nn.RNNBase, "a recurrent network's products cannot be intercepted"),
    (nn.RNNCellBase, "a recurrent network's products cannot be intercepted"),
    (nn.Bilinear, "its product is not that of a linear layer"),
    (nn.DataParallel, "it copies the model: use torch.nn.parallel.DistributedDataParallel"),
    (torch.jit.ScriptModule, "it is compiled: instrument the Python module"),
)


def find(model: nn.Module) -> Iterator[Layer | Refused]:
    inside = ""
    modules = dict(model.named_modules())
    output = heads(modules)
    shapes = own_shapes(modules.values())
    owners: dict[str, OwnProducts] = {}  # by the module's name
    for name, module in modules.items():
        if inside and name.startswith(inside):  # of a module that was refused
            continue
        if reason := _refusal(module):
            yield Refused(name, reason)
            inside = f"{name}." if name else "."
            continue
        if (codes := packed_dtype(module)) is not None:
            yield _packed_layer(name, module, codes, module in output)
            continue
        if isinstance(module, nn.Linear):
            layer, parts = linear_layer(name, module), list[Layer]()
            if type(module).forward is not nn.Linear.forward:  # it may have LoRA's parts
                owner = OwnProducts(name, module, is_linear=True)
                parts = [part for part in own_layers(modules, shapes, name, owner) if part.part]
                layer = replace(layer, attach=partial(owner.attach, "weight", 0)) if parts else layer
            is_head = module in output
            for parent, weight in multiplying(modules, name):
                owner = owners.setdefault(parent, OwnProducts(parent, modules[parent]))
                other = modules[parent], partial(owner.attach, weight, 0)
                layer = replace(layer, others=(*layer.others, other))
            if word := router_word(modules, shapes, name, module.out_features, module.in_features):
                layer = replace(layer, site=replace(layer.site, module=word), path=f"{layer.path}.{word}")
            yield replace(layer, site=HEAD, is_head=True) if is_head else layer
            yield from parts
            continue
        if calls(module, ATTENTION):
            yield core_layer(name, module, SdpaMode)
        if not isinstance(module, NOT_PRODUCTS) and (is_linear(module) or calls(module, NAMES)):
            owner = owners.setdefault(name, OwnProducts(name, module, is_linear(module)))
            yield from own_layers(modules, shapes, name, owner)


def heads(modules: Mapping[str, nn.Module]) -> set[nn.Module]:
    """The linear layers that compute the logits, whatever they are called.

    Such a layer shares its weight with an embedding, or has a usual name, or the shape [vocabulary, width] of an
    embedding, if no layer takes as many inputs. If one does, or only the number of outputs is the vocabulary's, it must
    come last: no other linear layer follows it, except others like it. A linear layer in a numbered layer
    ("layers.3.up") is none, but a numbered linear layer ("heads.1") may be. LoRA's parts are none.
    """
    tables = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    weights = {vars(table)["_parameters"].get("weight") for table in tables} - {None}
    most = max((table.num_embeddings for table in tables), default=0)  # positions and types of tokens are fewer
    shapes = {(most, table.embedding_dim) for table in tables if table.num_embeddings == most}
    vocabularies = {outputs for outputs, width in shapes if outputs != width}
    linears = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and not any(part.startswith("lora_") for part in path_parts(name))
    }
    taken = {module.in_features for module in linears.values()}
    logits = {shape for shape in shapes if shape[0] > shape[1] and shape[0] not in taken}
    output_layers: set[nn.Module] = {
        module
        for name, module in linears.items()
        if vars(module)["_parameters"].get("weight") in weights
        or any([part] in HEADS for part in path_parts(name))
        or (not _is_in_block(name) and (module.out_features, module.in_features) in logits)
    }
    last = True
    for name, module in reversed(linears.items()):
        inside = _is_in_block(name)
        shape = module.out_features, module.in_features
        last = last and not inside and (shape in shapes or (not output_layers and shape[0] in vocabularies))
        if last:
            output_layers.add(module)
    return output_layers


def _is_in_block(name: str) -> bool:
    return any(part.isdecimal() for part in path_parts(name)[:-1])


def own_shapes(modules: Iterable[nn.Module]) -> Shapes:
    """The whole shapes of the weights that each module holds itself. Between passes FSDP1 leaves the module a rank's
    part of them, flat, or nothing: its flat parameter knows the shapes."""
    shapes = {module: {name: p.shape for name, p in module.named_parameters(recurse=False)} for module in modules}
    for module in list(shapes):
        handle: Any = getattr(module, "_handle", None)
        if handle and is_a("torch.distributed.fsdp", "FullyShardedDataParallel", module):
            for info, shape in zip(handle.flat_param._param_infos, handle.flat_param._shapes, strict=True):
                shapes[info.module][info.param_name] = shape
    return shapes


def own_layers(
    modules: dict[str, nn.Module], shapes: Shapes, name: str, owner: OwnProducts, *, every: bool = False
) -> Iterator[Layer]:
    """The layers of the weights that a module holds itself: those of two axes that are called `weight` or that its code
    names in an operand of a product, or every one, and all of three."""
    module = owner.module
    experts = {shape[0] for shape in shapes[module].values() if len(shape) == 3}  # whose biases have two axes
    for weight, shape in shapes[module].items():
        if len(shape) == 2 and weight == "weight":
            where, path = site(name, router_word(modules, shapes, name, *shape))
            yield Layer(name, module, where, whole, partial(owner.attach, weight, 0), path)
        elif (
            len(shape) == 2 and min(shape) > 1 and shape[0] not in experts and (every or multiplies_by(module, weight))
        ):
            where, path = site(f"{name}.{weight}")
            yield Layer(name, module, where, whole, partial(owner.attach, weight, 0), path, part=weight)
        elif len(shape) == 3 and shape[0] > 1:
            where, path = site(f"{name}.{weight}")
            for expert in range(shape[0]):
                attach, at = partial(owner.attach, weight, expert), replace(where, expert=expert)
                yield Layer(name, module, at, whole, attach, path, part=f"{weight}.{expert}")


def parent_of(modules: dict[str, nn.Module], name: str) -> tuple[str, str]:
    """The path of the module that contains this one, and the name that it has there, which may have dots; ("", "") of
    the model itself."""
    parts = name.split(".")
    for length in reversed(range(len(parts))):
        parent, last = ".".join(parts[:length]), ".".join(parts[length:])
        if parent in modules and getattr(modules[parent], "_modules", {}).get(last) is modules[name]:
            return parent, last
    return "", ""


def multiplying(modules: dict[str, nn.Module], name: str) -> Iterator[tuple[str, str]]:
    """The modules of its block that contain a linear layer and may multiply by its weight themselves, in torch or in an
    autograd function: (the module's path, the path of the weight in it)."""
    owner, path, child = name, "weight", modules[name]
    while owner and not owner.rpartition(".")[2].isdecimal():
        owner, last = parent_of(modules, owner)
        if "." in last:
            return
        path = f"{last}.{path}"
        parent = modules[owner]
        if applies_function(parent, last) or (child is modules[name] and calls(parent, last, "weight", NAMES)):
            yield owner, path
        child = parent


def router_word(modules: dict[str, nn.Module], shapes: Shapes, name: str, outputs: int, inputs: int) -> str | None:
    """The module of ROUTERS that this layer is, if any. A gate has a single output and is in a block; LoRA's layers of
    rank 1 are none."""
    parts = path_parts(name)
    if outputs == 1 and any(map(str.isdecimal, parts[:-1])) and not any(part.startswith("lora_") for part in parts):
        return SCALAR_GATE
    return ROUTER if is_router(modules, shapes, name, outputs, inputs) else None


def is_router(modules: dict[str, nn.Module], shapes: Shapes, name: str, outputs: int, inputs: int) -> bool:
    """Whether this layer chooses among experts: a module of its block that contains it owns as many experts, in a list
    of that name or as stacked weights, which have an axis for what the layer takes."""
    parts = name.split(".")
    for length in reversed(range(len(parts))):
        owner = modules.get(".".join(parts[:length]))
        if owner is None:
            continue
        others = {last: child for last, child in owner.named_children() if last != parts[length]}
        owners = [module for module in (owner, *others.values()) if not isinstance(module, NOT_PRODUCTS)]
        whole_shapes = [shape for module in owners for shape in shapes[module].values()]
        stacked = [shape[0] for shape in whole_shapes if len(shape) == 3 and inputs in shape[1:]]
        experts = [child.children() for last, child in others.items() if "expert" in last]
        listed = [sum(any(True for _ in expert.parameters()) for expert in children) for children in experts]
        if outputs > 1 and outputs in (*stacked, *listed):
            return True
        if length and parts[length - 1].isdecimal():
            break
    return False


def is_compiled(module: nn.Module) -> bool:
    return is_a("torch._dynamo", "OptimizedModule", module) or module._compiled_call_impl is not None


def _refusal(module: nn.Module) -> str | None:
    for kind, reason in HIDDEN:
        if isinstance(module, kind):
            return reason
    return None


def packed_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype in which a linear layer holds the codes of its weight, if these are integers: of torch, or with the
    numbers of features that GPTQ, AWQ and HQQ name."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    weight = own.get("weight")
    if isinstance(module, nn.Linear):
        return None if weight is None or weight.is_floating_point() or weight.is_complex() else weight.dtype
    sizes = [getattr(module, name, None) for name in ("in_features", "infeatures", "out_features", "outfeatures")]
    if sum(isinstance(size, int) for size in sizes) < 2 or (weight is not None and weight.is_floating_point()):
        return None
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return next((x.dtype for x in own.values() if x.dim() > 1 and x.dtype in kinds), None)


def calls(module: nn.Module, *words: str | frozenset[str]) -> bool:
    """Whether one of the module's own methods, or a function that they reach by name, uses each of these names, or
    one name of each set; "@" is the operator."""
    wanted = [{word} if isinstance(word, str) else word for word in words]
    return any(all(names & names_in(function.__code__) for names in wanted) for function in _code_of(module))


def multiplies_by(module: nn.Module, weight: str) -> bool:
    """Whether the module's code, or functions that it reaches, name its own weight in an operand of a product, as in
    `F.linear(x, self.fn.float())`."""
    return any(weight in _factors(function) for function in _code_of(module))


@lru_cache(maxsize=4096)
def _factors(function: FunctionType) -> frozenset[str]:
    """The attributes that a function names in operands of products; none if its source is not known."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return frozenset()
    operands: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            operands += [node.left, node.right]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in NAMES:
            operands += [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
    attributes = (node for operand in operands for node in ast.walk(operand))
    return frozenset(node.attr for node in attributes if isinstance(node, ast.Attribute))


def applies_function(module: nn.Module, child: str) -> bool:
    """Whether the module's own methods, or functions that they reach, name a child of the module and an autograd
    function that is not torch's."""
    code = _code_of(module)
    names = any(child in names_in(function.__code__) for function in code if function.__name__ != "__init__")
    return names and any(_applies(function, type(module)) for function in code)


def _applies(function: FunctionType, kind: type[nn.Module]) -> bool:
    names = names_in(function.__code__)
    near = [space[name] for space in (function.__globals__, vars(kind)) for name in names if name in space]
    near += [vars(space).get(name) for space in near if isinstance(space, ModuleType) for name in names]
    owners = (getattr(value, "__self__", value) for value in near)  # of a name for `Function.apply`, too
    return any(
        isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and not _foreign(owner)
        for owner in owners
    )


def _code_of(module: nn.Module) -> list[FunctionType]:
    """The methods of a module, those that were set on it alone included, and the functions that they reach."""
    methods = (getattr(value, "__func__", value) for value in vars(module).values())
    on_it = [function for function in methods if isinstance(function, FunctionType)]
    return [reached for start in (type(module), *on_it) for reached in _reached(start)]


@lru_cache(maxsize=1024)
def _reached(start: type[nn.Module] | FunctionType) -> tuple[FunctionType, ...]:
    """The methods of a module class, or a function, and the functions outside torch and transformers that these
    reach: by a global name, from a closure, or as an attribute of a module or namespace of such a name."""
    functions: dict[CodeType, FunctionType] = {}
    waiting: list[Any] = [] if isinstance(start, type) else [start]
    for base in start.__mro__ if isinstance(start, type) else ():
        if base is nn.Module or base.__name__ == "PreTrainedModel":  # of which every model of transformers is one
            break
        waiting += vars(base).values()
    while waiting:
        function = waiting.pop()
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, FunctionType) or function.__code__ in functions:
            continue
        functions[function.__code__] = function
        names = names_in(function.__code__)
        near = [function.__globals__[name] for name in names if name in function.__globals__]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                near.append(cell.cell_contents)
        spaces = [value for value in near if isinstance(value, (ModuleType, SimpleNamespace))]
        near += [vars(space).get(name) for space in spaces for name in names if not _foreign(space)]
        waiting += [value for value in near if isinstance(value, FunctionType) and not _foreign(value)]
    return tuple(functions.values())


def _foreign(value: Any) -> bool:
    """Whether this belongs to torch or transformers, whose functions are known."""
    name = value.__module__ if isinstance(value, (FunctionType, type)) else getattr(value, "__name__", "")
    return str(name).partition(".")[0] in ("torch", "transformers")


def _packed_layer(name: str, module: nn.Module, codes: torch.dtype, is_head: bool) -> Layer:
    where, path = site(name)
    kernels = f"can only be recorded, because its weight is already quantized ({codes}): use the recipe bf16"
    attach = replaces(module, "forward", watched_forward(module))
    return Layer(name, module, HEAD if is_head else where, whole, attach, path, is_head, kernels=kernels)


def linear_layer(name: str, module: nn.Linear) -> Layer:
    def forward(begin: Begin) -> Callable[..., Tensor]:
        return lambda input: functional_linear(name, begin(), input, module.weight, module.bias)

    where, path = site(name)
    attach = (
        replaces(module, "forward", forward)
        if is_plain_linear(module)
        else partial(OwnProducts(name, module, is_linear=True).attach, "weight", 0)
    )
    return Layer(name, module, where, partial(shard_of, module), attach, path)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether this is torch's linear layer, whose code and weight are torch's, too."""
    own = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "forward" not in vars(module)
    return own and not multiplies_itself(vars(module)["_parameters"].get("weight"))


def unseen_products(module: nn.Module) -> str:
    """What is not known of a linear layer before its first pass; "" if its own code names a product of torch. In an
    autograd function of its own, that may be a product of something else than the weight."""
    if isinstance(module, nn.Linear) and multiplies_itself(vars(module)["_parameters"].get("weight")):
        return OWN_KERNELS
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if plain or not is_linear(module):
        return ""
    if any(_applies(function, type(module)) for function in _code_of(module)):
        return OWN_FUNCTION
    return "" if calls(module, NAMES) else UNSEEN


def core_layer(name: str, module: nn.Module, mode: type[SdpaMode]) -> Layer:
    where, path = site(name, "core")
    attach = replaces(module, "forward", core_forward(name, module, mode))
    by_sdpa = mode is SdpaMode and not calls(module, "flex_attention")
    return Layer(name, module, where, partial(core_shard_of, module), attach, path, by_sdpa=by_sdpa)

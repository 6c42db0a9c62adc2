"""A model's weights on the virtual device for a while, and the model as before afterwards."""

import contextlib
import functools
import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from mmcollate.audit.rules import DEVICE, Memory
from mmcollate.audit.virtual import Session, VirtualTensor
from mmcollate.errors import CollateTypeError, CollateValueError

_CONTAINERS = (dict, OrderedDict, list, set)


@contextlib.contextmanager
def on_device(
    session: Session, modules: Iterable[torch.nn.Module], *, attributes: bool = False
) -> Iterator[None]:
    """Makes parameters and buffers virtual device tensors that stem from no field.

    Afterwards every attribute of the modules is the same object as before, every list and
    dictionary among them has the same content, and every byte of the weights is as it was, whatever
    the forward wrote. Functions of the model that remember tensors (``functools.lru_cache``) forget
    them before and after.

    Args:
        session: Which makes the tensors.
        modules: With all modules inside.
        attributes: Whether tensors that are plain attributes, which ``Module.to`` leaves where they
            are, are on the device too, and devices named in attributes are it.

    Raises:
        CollateTypeError: A weight is of a type whose data is elsewhere (a ``DTensor`` …).
        CollateValueError: A weight is not on the CPU.
    """
    inside = list(dict.fromkeys(inner for module in modules for inner in module.modules()))
    caches = _caches(inside)
    snapshot = [(box, _content(box)) for box in _boxes(inside)]
    _forget_tensors(caches)
    try:
        _swap(session, inside, attributes)
        yield
    finally:
        for box, content in snapshot:
            _put_back(box, content)
        session.restore_guarded()
        _forget_tensors(caches)


# Tensors


def _swap(session: Session, modules: list[torch.nn.Module], attributes: bool) -> None:
    made: dict[int, torch.Tensor] = {}
    memories: dict[int, Memory] = {}

    def virtual(tensor: torch.Tensor, name: str, owner: str) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _virtual(session, tensor, f"{owner}.{name}", memories)
        return made[id(tensor)]

    for module in modules:
        owner = type(module).__name__
        _replace(module._parameters, functools.partial(virtual, owner=owner))
        _replace(module._buffers, functools.partial(virtual, owner=owner))
        if attributes:
            own = {name: value for name, value in vars(module).items() if name not in _MODULE_OWN}
            for box in _boxes_in(own):
                _replace(box, functools.partial(virtual, owner=owner))
            vars(module).update((name, _on_device(name, value)) for name, value in own.items())


_MODULE_OWN = frozenset(vars(torch.nn.Module()))


def _on_device(name: str, value: Any) -> Any:
    """What an attribute would be, had the module been made on the device."""
    if isinstance(value, torch.device) and value.type == "cpu":
        return DEVICE
    if value == "cpu" and isinstance(value, str) and "device" in name:
        return DEVICE.type
    return value


def _swappable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (
        isinstance(value, VirtualTensor) or torch.nn.parameter.is_lazy(value)
    )


def _replace(box: Any, virtual: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
    """Swaps the tensors in a dictionary or list."""
    if isinstance(box, (dict, list)):
        for key, value in list(box.items() if isinstance(box, dict) else enumerate(box)):
            if _swappable(value):
                box[key] = virtual(value, str(key))


def _virtual(
    session: Session, tensor: torch.Tensor, name: str, memories: dict[int, Memory]
) -> torch.Tensor:
    if not tensor.is_cpu:
        raise CollateValueError(
            f"weight {name} is on {tensor.device}; move the model to the CPU for the audit"
        )
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        raise CollateTypeError(
            f"weight {name} is a {type(tensor).__name__}; audit the model with plain weights"
        )
    if tensor.layout is not torch.strided:
        return tensor
    with torch.no_grad():
        held = tensor.detach().as_subclass(torch.Tensor)
        if held.is_inference():
            # Only a copy can be used outside inference mode, and nothing writes to the original.
            with torch.inference_mode(False):
                held = held.clone()
    session.guard(held)
    memory = memories.setdefault(held.untyped_storage()._cdata, Memory(on_device=True))
    made = VirtualTensor.of(session, held, memory)
    # Weights of engines carry more than data: loaders, dimensions of shards.
    made.__dict__.update({**vars(tensor), **vars(made)})
    if isinstance(tensor, torch.nn.Parameter):
        made._is_param = True
    return made


# Everything else


def _boxes(modules: list[torch.nn.Module]) -> list[Any]:
    """The dictionaries, lists and sets that hold the modules' state, however deep."""
    found: dict[int, Any] = {}
    for module in modules:
        for box in _boxes_in(vars(module)):
            found.setdefault(id(box), box)
    return list(found.values())


def _boxes_in(root: Any) -> list[Any]:
    found, queue = {id(root): root}, deque([root])
    while queue:
        box = queue.popleft()
        for value in box.values() if isinstance(box, dict) else box:
            if type(value) in _CONTAINERS and id(value) not in found:
                found[id(value)] = value
                queue.append(value)
    return list(found.values())


def _content(box: Any) -> Any:
    return type(box)(box) if type(box) in _CONTAINERS else dict(box)


def _put_back(box: Any, content: Any) -> None:
    if isinstance(box, dict):
        same = list(box) == list(content) and all(box[key] is content[key] for key in content)
        if not same:
            box.clear()
            box.update(content)
    elif isinstance(box, list):
        box[:] = content
    else:
        box.clear()
        box.update(content)


def _caches(modules: list[torch.nn.Module]) -> list[Any]:
    """The functions of the models' classes, and beside them, that remember results."""
    owners: dict[int, dict[str, Any]] = {}
    for module in modules:
        for cls in type(module).__mro__:
            if cls.__module__.partition(".")[0] in ("torch", "builtins"):
                continue
            beside = sys.modules.get(cls.__module__)
            for names in (vars(cls), vars(beside) if beside is not None else {}):
                owners[id(names)] = dict(names)
    found: dict[int, Any] = {}
    for names in owners.values():
        for value in names.values():
            inner = getattr(value, "__func__", value)
            if isinstance(inner, functools._lru_cache_wrapper):
                found[id(inner)] = inner
    return list(found.values())


def _forget_tensors(caches: Iterable[Any]) -> None:
    """Empties those in which there is a tensor; what else they hold may be there to stay."""
    for cache in caches:
        held = gc.get_referents(cache)
        if any(isinstance(x, torch.Tensor) for x in _within(held)):
            cache.cache_clear()


def _within(values: Iterable[Any], depth: int = 4) -> Iterator[Any]:
    for value in values:
        yield value
        if depth and isinstance(value, (dict, list, tuple, set)):
            inner = value.values() if isinstance(value, dict) else value
            yield from _within(inner, depth - 1)

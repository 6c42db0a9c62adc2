"""A model's weights on the virtual device for a while, and the model as before afterwards."""

import contextlib
import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from mmcollate.audit.contents import CONTAINERS, within
from mmcollate.audit.rules import DEVICE, Memory
from mmcollate.audit.session import Session
from mmcollate.audit.virtual import VirtualTensor
from mmcollate.errors import CollateTypeError, CollateValueError


@contextlib.contextmanager
def on_device(
    session: Session, modules: Iterable[torch.nn.Module], *, attributes: bool = False
) -> Iterator[None]:
    """Makes parameters and buffers virtual device tensors that stem from no field.

    Afterwards every attribute of the modules is the same object as before, every list and
    dictionary among them has the same content, and every byte of the tensors in them is as it was,
    whatever the forward wrote. Where the forward put virtual tensors into other objects that the
    modules hold, or into their classes and what is beside these in a file, that is taken back too.
    Functions of the model that remember tensors (``functools.lru_cache``) forget them before and
    after. The session is told of all virtual tensors that were there.

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
    state = _State(session, inside)
    try:
        _swap(session, inside, attributes)
        yield
    finally:
        state.put_back()
        session.restore_guarded()


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
    return isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)


def _replace(box: Any, virtual: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
    """Swaps the tensors in a dictionary or list, and in its tuples."""

    def swapped(value: Any, key: Any) -> Any:
        if type(value) is tuple:
            return tuple(swapped(x, key) for x in value)
        return virtual(value, str(key)) if _swappable(value) else value

    if isinstance(box, (dict, list)):
        for key, value in list(box.items() if isinstance(box, dict) else enumerate(box)):
            if _swappable(value) or type(value) is tuple:
                box[key] = swapped(value, key)


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
    made.take_after(tensor)
    return made


# Everything else


class _State:
    """What modules, their classes and the files of these hold, as it was."""

    def __init__(self, session: Session, modules: list[torch.nn.Module]) -> None:
        self._session = session
        self._classes = list(dict.fromkeys(cls for x in modules for cls in _classes_of(x)))
        files = dict.fromkeys(cls.__module__ for cls in self._classes)
        self._files = [vars(sys.modules[x]) for x in files if x in sys.modules]
        self._caches = _caches([*map(vars, self._classes), *self._files])
        _forget_tensors(self._caches)
        self._attributes = [vars(module) for module in modules]
        own = {id(box): box for x in self._attributes for box in _boxes_in(x)}
        self._own = [(box, _content(box)) for box in own.values()]
        self._others, self._tensors = [], []
        self._namespaces = [(cls, dict(vars(cls))) for cls in self._classes]
        for value in self._now():
            if type(value) in CONTAINERS and id(value) not in own:
                self._others.append((value, _content(value)))
            elif _is_plain(value):
                session.guard(value)
                self._tensors.append((value, value.detach()))

    def _now(self) -> Iterator[Any]:
        """All that is there now."""
        caches = [gc.get_referents(cache) for cache in self._caches]
        classes = [list(vars(cls).values()) for cls in self._classes]
        return within([*self._attributes, *self._files, *caches, *classes])

    def put_back(self) -> None:
        for value in list(self._now()):
            if isinstance(value, VirtualTensor):
                self._session.leaves(value, "state")
        for tensor, same in self._tensors:
            if isinstance(tensor, VirtualTensor):
                self._session.made.pop(id(tensor), None)
                tensor.become_plain()
            if _geometry(tensor) != _geometry(same):
                tensor.data = same
        for box, content in self._own:
            _put_back(box, content)
        for box, content in self._others:
            if _any_virtual(_values(box), _values(content)):
                _put_back(box, content)
        for cls, content in self._namespaces:
            now = dict(vars(cls))
            for name, value in now.items():
                if name not in content and _any_virtual([value], []):
                    delattr(cls, name)
            for name, value in content.items():
                if _any_virtual([now.get(name)], [value]):
                    setattr(cls, name, value)
        _forget_tensors(self._caches)


def _is_plain(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.is_cpu and value.layout is torch.strided and not value.is_nested


def _geometry(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _any_virtual(now: Iterable[Any], before: Iterable[Any]) -> bool:
    """Whether what was not there before is, or holds, a virtual tensor."""
    known = set(map(id, before))
    return any(isinstance(x, VirtualTensor) for x in within(x for x in now if id(x) not in known))


def _classes_of(module: torch.nn.Module) -> Iterator[type]:
    for cls in type(module).__mro__:
        if cls.__module__.partition(".")[0] not in ("torch", "builtins"):
            yield cls


def _boxes_in(root: dict[str, Any]) -> list[Any]:
    """A dictionary and the containers in it, however deep; not those in objects."""
    found, queue = {id(root): root}, deque([root])
    while queue:
        for value in _values(queue.popleft()):
            if (type(value) in CONTAINERS or isinstance(value, tuple)) and id(value) not in found:
                found[id(value)] = value
                queue.append(value)
    return [x for x in found.values() if not isinstance(x, tuple)]


def _values(box: Any) -> Iterable[Any]:
    return list(box.values() if isinstance(box, dict) else box)


def _content(box: Any) -> Any:
    return box.copy() if type(box) in CONTAINERS else dict(box)


def _put_back(box: Any, content: Any) -> None:
    if isinstance(box, dict):
        for key in [key for key in box if key not in content]:
            del box[key]
        for key, value in content.items():
            if key not in box or box[key] is not value:
                box[key] = value
        if list(box) != list(content):
            box.clear()
            box.update(content)
    elif isinstance(box, (list, deque)):
        box.clear()
        box.extend(content)
    else:
        box.clear()
        box.update(content)


def _caches(namespaces: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The functions that remember results."""
    found: dict[int, Any] = {}
    for names in namespaces:
        for value in list(names.values()):
            inner = getattr(value, "__func__", value)
            if isinstance(inner, functools._lru_cache_wrapper):
                found[id(inner)] = inner
    return list(found.values())


def _forget_tensors(caches: Iterable[Any]) -> None:
    """Empties those in which there is a tensor; what else they hold may be there to stay."""
    for cache in caches:
        if any(isinstance(x, torch.Tensor) for x in within([gc.get_referents(cache)])):
            cache.cache_clear()

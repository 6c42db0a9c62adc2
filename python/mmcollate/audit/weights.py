"""A model's weights on the virtual device for a while, and the model as before afterwards."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mmcollate.audit.contents import within
from mmcollate.audit.rules import DEVICE, Memory
from mmcollate.audit.session import Session
from mmcollate.audit.state import State
from mmcollate.audit.virtual import VirtualTensor
from mmcollate.errors import CollateTypeError, CollateValueError


@contextlib.contextmanager
def on_device(
    session: Session, modules: Iterable[torch.nn.Module], *, attributes: bool = False
) -> Iterator[None]:
    """Makes parameters and buffers virtual device tensors that stem from no field.

    A parameter that is also held elsewhere, as by an object or a closure, is on the device there
    too: ``Module.to`` keeps the object, but makes new buffers.

    Afterwards all that the modules hold is as before, however deep in containers and objects: the
    same objects, and in the tensors among them the same bytes, whatever the forward wrote. Files
    of the modules' classes are as before, with these classes, if the forward touched a tensor
    there. Functions of the model that remember tensors (``functools.lru_cache``) forget them before
    and after. The session is told of all virtual tensors that were there.

    Args:
        session: Which makes the tensors.
        modules: With all modules inside.
        attributes: Whether tensors and modules that are plain attributes, or in containers and
            dataclasses among these, are on the device too, which ``Module.to`` leaves where they
            are, and devices named in attributes are it. What else objects hold stays: engines have
            caches that are the host's there.

    Raises:
        CollateTypeError: A module is compiled by ``torch.jit``, or a weight is of a type whose data
            is elsewhere (a ``DTensor`` …).
        CollateValueError: A weight is not on the CPU.
    """
    registered = list(dict.fromkeys(inner for module in modules for inner in module.modules()))
    state = State(session, _with_held(registered))
    try:
        _swap(session, state, registered, attributes)
        yield
    finally:
        session.standing.clear()
        state.put_back()


def _with_held(modules: list[torch.nn.Module], *, data_only: bool = False) -> list[torch.nn.Module]:
    """Modules, and those in what they hold."""
    found = dict.fromkeys(modules)
    new = modules
    while new:
        inside = within([vars(module) for module in new], data_only=data_only)
        holders = [x for x in inside if issubclass(type(x), torch.nn.Module) and x not in found]
        new = [x for x in dict.fromkeys(y for z in holders for y in z.modules()) if x not in found]
        found.update(dict.fromkeys(new))
    return list(found)


def _swap(session: Session, state: State, modules: list[torch.nn.Module], attributes: bool) -> None:
    made: dict[int, torch.Tensor] = {}
    virtual = _Virtual(session)

    def swapped(value: Any, name: str) -> Any:
        if issubclass(type(value), tuple):
            parts = tuple(swapped(x, name) for x in tuple.__iter__(value))
            same = all(a is b for a, b in zip(parts, tuple.__iter__(value), strict=True))
            return value if same else tuple.__new__(type(value), parts)
        if not issubclass(type(value), torch.Tensor) or torch.nn.parameter.is_lazy(value):
            return value
        # What was made for another holder.
        if issubclass(type(value), VirtualTensor):
            return value
        if id(value) not in made:
            made[id(value)] = virtual.of(value, name)
        return made[id(value)]

    if attributes:
        modules = _with_held(modules, data_only=True)
    for module in modules:
        owner = type(module).__name__
        if issubclass(type(module), torch.jit.ScriptModule):
            raise CollateTypeError(
                f"{owner} is compiled by torch.jit, whose operations can't be followed; audit the"
                " module that it was made from"
            )
        for box in (module._parameters, module._buffers):
            box.update((name, swapped(x, f"{owner}.{name}")) for name, x in list(box.items()))
    if attributes:
        state.replace(swapped, within(map(vars, modules), data_only=True))
        for module in modules:
            own = vars(module)
            own.update((x, _on_device(x, own[x])) for x in own.keys() - _MODULE_OWN)


_MODULE_OWN = frozenset(vars(torch.nn.Module()))


def _on_device(name: str, value: Any) -> Any:
    """What an attribute would be, had the module been made on the device."""
    if type(value) is torch.device and value.type == "cpu":
        return DEVICE
    if type(value) is str and value == "cpu" and "device" in name:
        return DEVICE.type
    return value


class _Virtual:
    """Makes virtual device tensors of weights; such that share memory share it still."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._memories: dict[int, Memory] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The virtual tensor; of a parameter, the parameter itself is on the device too."""
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
        key = held.untyped_storage()._cdata
        memory = self._memories.setdefault(key, Memory(on_device=True))
        if held.is_inference():
            held = self._copied(held)
        self._session.saved.guard(held)
        made = VirtualTensor.of(self._session, held, memory)
        # Weights of engines carry more than data: loaders, dimensions of shards.
        made.take_after(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            self._session.standing[id(tensor)] = tensor, memory
        return made

    def _copied(self, held: torch.Tensor) -> torch.Tensor:
        """Of an inference tensor only a copy can be used outside inference mode, and nothing writes
        to the original."""
        storage = held.untyped_storage()
        with torch.inference_mode(False), torch.no_grad():
            if storage._cdata not in self._copies:
                self._copies[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
            copied = torch.empty(0, dtype=held.dtype).set_(
                self._copies[storage._cdata],
                held.storage_offset(),
                held.shape,
                held.stride(),
            )
            copied = copied.conj() if held.is_conj() else copied
            return torch._neg_view(copied) if held.is_neg() else copied

"""What is inside of a value: in containers and objects.

Nothing here runs code of the values' classes: what a class says of its iteration, attributes or
class is not asked; iterators are not run.
"""

import contextlib
import functools
import gc
import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from types import (
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
    NoneType,
)
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

CONTAINERS: tuple[type, ...] = (OrderedDict, dict, list, set, deque)
"""Whose content can change, subclasses before their bases."""
_ITEMS = (*CONTAINERS, tuple, frozenset)
_CLOSED = (torch.Tensor, torch.nn.Module, type, ModuleType, FunctionType, logging.Logger)
"""Values whose attributes are no data of their own."""
_ATOMS = frozenset({int, float, complex, bool, str, bytes, NoneType, torch.dtype, torch.device})


def within(
    values: Iterable[Any], *, data_only: bool = False, package: str | None = None
) -> Iterator[Any]:
    """The values and all that is in them, however deep, each object once; numbers, strings and
    such in them left out.

    In modules, classes and functions nothing is looked for, in tensors only for those that they
    are made of.

    Args:
        values: Where to start.
        data_only: Whether of objects only dataclasses are looked into.
        package: Whose objects are looked into, and no others, if one is named.
    """
    seen = {id(x): x for x in values}
    queue = deque(seen.values())
    while queue:
        value = queue.popleft()
        yield value
        for part in _parts(value, data_only, package):
            if type(part) not in _ATOMS and id(part) not in seen:
                seen[id(part)] = part
                queue.append(part)


def holds_tensor(values: Iterable[Any]) -> bool:
    """Whether a tensor is among the values or in them."""
    return any(issubclass(type(x), torch.Tensor) for x in within(values))


def container_of(kind: type, kinds: tuple[type, ...] = CONTAINERS) -> type | None:
    """The type of container that a class is, or is made from."""
    return next((base for base in kinds if issubclass(kind, base)), None)


def _parts(value: Any, data_only: bool, package: str | None) -> Iterator[Any]:
    kind = type(value)
    if issubclass(kind, _CLOSED):
        if issubclass(kind, torch.Tensor) and is_traceable_wrapper_subclass(value):
            yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
        return
    base: Any = container_of(kind, _ITEMS)
    if base is not None:
        yield from list(base.__iter__(value))
    if base in (dict, OrderedDict):
        yield from list(dict.values(value))
    elif kind is MappingProxyType:
        yield from gc.get_referents(value)
    if data_only and not _is_dataclass(kind):  # type: ignore[arg-type]
        return
    if package is not None and _package_of(kind) not in (package, "types"):
        return
    attributes = attributes_of(value)
    if attributes is not None:
        yield attributes
    for member in _members(kind):  # type: ignore[arg-type]
        with contextlib.suppress(AttributeError):
            yield member.__get__(value)


def _package_of(kind: type) -> str:
    """Where a class is made; ``types`` of a ``SimpleNamespace``."""
    return str(vars(kind).get("__module__", "types")).partition(".")[0]


@functools.lru_cache(maxsize=4096)
def _is_dataclass(kind: Any) -> bool:
    return any("__dataclass_fields__" in vars(cls) for cls in kind.__mro__)


@functools.lru_cache(maxsize=4096)
def _members(kind: Any) -> tuple[MemberDescriptorType, ...]:
    members = (member for cls in kind.__mro__ for member in vars(cls).values())
    return tuple(x for x in members if type(x) is MemberDescriptorType)


@functools.lru_cache(maxsize=4096)
def slots_of(kind: Any) -> tuple[MemberDescriptorType, ...]:
    """What instances keep outside of their dictionary, and can be set."""
    return tuple(x for x in _members(kind) if "__slots__" in vars(x.__objclass__))


@functools.lru_cache(maxsize=4096)
def _attributes_in(kind: Any) -> GetSetDescriptorType | None:
    found = (vars(cls).get("__dict__") for cls in kind.__mro__)
    return next((x for x in found if type(x) is GetSetDescriptorType), None)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's own dictionary; none of a tensor, module, class or function."""
    kind = type(value)
    if issubclass(kind, _CLOSED) or (descriptor := _attributes_in(kind)) is None:  # type: ignore[arg-type]
        return None
    try:
        found = descriptor.__get__(value)
    except AttributeError:
        return None
    return found if type(found) is dict else None

"""What is inside of a value: in containers, objects, and iterators that have yet to run."""

import contextlib
import functools
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from types import FunctionType, GeneratorType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_ITEMS = (list, tuple, set, frozenset, deque)
_ITERATORS: tuple[type, ...] = (
    *(GeneratorType, map, filter, zip, enumerate, reversed, itertools.chain),
    *(type(iter([])), type(iter(())), type(iter({}.values()))),
)
_CLOSED = (torch.Tensor, torch.nn.Module, type, ModuleType, FunctionType)
"""Values whose attributes are no data of their own."""


def within(values: Iterable[Any], *, run: bool = False) -> Iterator[Any]:
    """The values and all that is in them, however deep, each object once.

    In modules, classes and functions nothing is looked for, in tensors only for those that they
    are made of.

    Args:
        values: Where to start.
        run: Whether iterators are run to their end, and what they give is looked at.
    """
    seen = {id(x): x for x in values}
    queue = deque(seen.values())
    while queue:
        value = queue.popleft()
        yield value
        inside: Any = value if run and isinstance(value, _ITERATORS) else _parts(value)
        for part in inside:
            if id(part) not in seen:
                seen[id(part)] = part
                queue.append(part)


def _parts(value: Any) -> Iterator[Any]:
    kind = type(value)
    if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
    if issubclass(kind, _CLOSED):
        return
    if issubclass(kind, (dict, MappingProxyType)):
        yield from list(value.values())
    elif issubclass(kind, _ITEMS):
        yield from list(value)
    attributes = attributes_of(value)
    if attributes is not None:
        yield attributes
    for member in _slots(kind):  # type: ignore[arg-type]
        with contextlib.suppress(AttributeError):
            yield member.__get__(value)


@functools.lru_cache(maxsize=4096)
def _slots(kind: Any) -> tuple[MemberDescriptorType, ...]:
    members = (member for cls in kind.__mro__ for member in vars(cls).values())
    return tuple(x for x in members if type(x) is MemberDescriptorType)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's own dictionary; none of a tensor, module, class or function."""
    if issubclass(type(value), _CLOSED):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


CONTAINERS = (dict, OrderedDict, list, set, deque)
"""Whose content can be put back."""

"""The tensors in what a forward returns."""

import functools
import itertools
from collections import deque
from collections.abc import Iterator
from types import FunctionType, GeneratorType
from typing import Any

import torch

from mmcollate.audit.contents import within

_ITERATORS: tuple[type, ...] = (
    *(GeneratorType, map, filter, zip, enumerate, reversed, itertools.chain),
    *(type(iter([])), type(iter(())), type(iter({}.values()))),
)
_ITEMS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """All tensors in a result, however deep: in containers and their keys, in objects, in modules,
    and in what functions close over. Iterators are run that the result is, or has in containers;
    those that its objects hold are theirs."""
    for value in within(_leaves(result, {})):
        if issubclass(type(value), torch.Tensor):
            yield value


def _leaves(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The value, and what is in it if it is a container, an iterator, a module or a function."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    for part in _parts(value):
        yield from _leaves(part, seen)
    if not issubclass(type(value), _ITERATORS):
        yield value


def _parts(value: Any) -> Any:
    kind = type(value)
    if issubclass(kind, _ITERATORS):
        return value
    if issubclass(kind, dict):
        return [*dict.keys(value), *dict.values(value)]
    if issubclass(kind, torch.nn.Module):
        return [vars(value)]
    if kind is functools.partial:
        return [value.func, value.args, value.keywords]
    if kind is FunctionType:
        return [*(value.__defaults__ or ()), *_enclosed(value)]
    items = next((base for base in _ITEMS if issubclass(kind, base)), None)
    return () if items is None else list(items.__iter__(value))


def _enclosed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # nothing is in it yet

"""OMITTED: what stands where a payload was left out on purpose."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias, final

Missing: TypeAlias = Literal["error", "split", "omit"]


@final
class Omitted:
    """The class of :data:`OMITTED`, which is its only object."""

    __slots__ = ()

    def __new__(cls) -> "Omitted":
        return OMITTED

    def __repr__(self) -> str:
        return "OMITTED"

    def __reduce__(self) -> str:
        # Pickles and copies are then the object of this name, in any process.
        return "OMITTED"


OMITTED: Omitted = object.__new__(Omitted)
"""Stands for an item, or for a field's value, whose payload was left out on purpose: the receiver
has it already, or does without. ``None`` in such a place is a payload that got lost. Compare with
``is``: there is one, in copies and after pickling too."""


class Present(NamedTuple):
    """A batch of the items that were not left out.

    >>> import torch
    >>> from mmcollate import OMITTED, Batched, collate
    >>> items = [{"x": torch.tensor(5)}, OMITTED, {"x": torch.tensor(7)}]
    >>> batch, indices = collate(items, {"x": Batched()}, missing="omit")
    >>> batch["x"].tolist(), indices["x"]
    ([5, 7], [0, 2])
    """

    batch: dict[str, Any]
    indices: dict[str, list[int]]
    """For each field of the batch, in its order: which of the items have their values in it."""

    @property
    def items(self) -> list[int]:
        """Which of the items have a value in any field of the batch."""
        return sorted({index for known in self.indices.values() for index in known})


def holds_omitted(values: Iterable[Any]) -> bool:
    """Whether :data:`OMITTED` is one of the values, or within one: in its lists, tuples and dicts,
    however deep."""
    nests: tuple[type, ...] = (list, tuple, dict)
    level = list(values)
    seen: dict[int, Any] = {}  # a list may hold itself, or another many times
    while level:
        # The classes of many leaves are few: a leaf costs some nanoseconds.
        kinds = set(map(type, level))
        if Omitted in kinds:
            return True
        if not any(issubclass(kind, nests) for kind in kinds):
            return False
        found = {id(x): x for x in level if isinstance(x, nests) and id(x) not in seen}
        seen |= found
        level = list(chain.from_iterable(map(_inner, found.values())))
    return False


def _inner(value: Any) -> Iterable[Any]:
    """What a container holds, whatever its class says when it is asked."""
    if isinstance(value, dict):
        return dict.values(value)
    return list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)


Values: TypeAlias = Callable[[Any], Iterable[tuple[str, Any]]]
"""The names and values of an item."""


def omitted_names(item: Any, values: Values) -> list[str]:
    """Names of the item's fields whose values were left out."""
    return [name for name, value in values(item) if value is OMITTED]


def by_fields_present(
    rows: Sequence[tuple[int, Mapping[str, Any]]], values: Values
) -> list[tuple[list[str], list[int]]]:
    """Items that have the same fields, however far apart.

    Args:
        rows: Items that were not left out as a whole, with their indices.
        values: As it says.

    Returns:
        Names of fields and indices of items, by first item. Items that have no field are in none.
    """
    found: dict[frozenset[str], tuple[list[str], list[int]]] = {}
    for index, item in rows:
        names = [name for name, value in values(item) if value is not OMITTED]
        if names:
            found.setdefault(frozenset(names), (names, []))[1].append(index)
    return list(found.values())


def by_items_present(
    rows: Sequence[tuple[int, Mapping[str, Any]]], values: Values
) -> list[tuple[list[str], list[int]]]:
    """Fields that the same items have.

    Args:
        rows: Items that were not left out as a whole, with their indices.
        values: As it says.

    Returns:
        Names of fields and indices of items, by first field. Fields that no item has are in none.
    """
    having: dict[str, list[int]] = {}
    for index, item in rows:
        for name, value in values(item):
            known = having.setdefault(name, [])
            if value is not OMITTED:
                known.append(index)
    found: dict[tuple[int, ...], tuple[list[str], list[int]]] = {}
    for name, indices in having.items():
        if indices:
            found.setdefault(tuple(indices), ([], indices))[0].append(name)
    return list(found.values())

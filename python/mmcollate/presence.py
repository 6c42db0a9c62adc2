"""Which items, and which of their fields, are there: what is required, and what was left out."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from mmcollate import errors
from mmcollate.fields import Field
from mmcollate.omitting import OMITTED, Missing, holds_omitted, omitted_names

Item: TypeAlias = Mapping[str, Any]
Required: TypeAlias = Iterable[str] | Mapping[str, Iterable[str]] | None


class Context(NamedTuple):
    """What the core hands back to the functions below, for their messages."""

    modality: str | None
    start: int
    """Index of the group's first item."""
    indices: Sequence[int] | None = None
    """Of the items among those that the caller gave, if some were left out."""

    def item(self, index: int) -> int:
        """The index that the caller knows the item by."""
        return index if self.indices is None else self.indices[index]


_ABSENT = object()
"""Stands for a field that an item does not have."""

_Required: TypeAlias = Mapping[str, Sequence[str]] | Sequence[str]


def required_of(require: Required, fields: Mapping[str, Field] | None) -> _Required:
    """The names of required fields, of each modality or of all; read once."""
    if isinstance(require, Mapping):
        return {modality: _names(names, fields) for modality, names in require.items()}
    return _names(require, fields)


def _names(names: Any, fields: Mapping[str, Field] | None) -> list[str]:
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise errors.CollateTypeError(
            f"require is {errors.describe(names)}, expected the names of fields, or such for each"
            " modality; put a single name into a list"
        )
    listed = list(names)
    for name in listed:
        if not isinstance(name, str):
            raise errors.CollateTypeError(
                f"require has {errors.describe(name)}, expected the names of fields"
            )
        if isinstance(fields, Mapping) and name not in fields:
            raise errors.CollateKeyError(
                f"{errors.where(None, name)}: required, but not declared; the fields are"
                f" {list(fields)}",
                field=name,
            )
    return listed


def check_required(items: Sequence[Any], required: _Required, context: Context) -> None:
    """Raises if an item is without a field that is required."""
    for row, item in enumerate(items):
        gone = item is None or item is OMITTED
        if not gone and not isinstance(item, Mapping):
            continue  # the core says what is wrong with it
        lacks = {}
        for name in of_modality(required, context.modality):
            value = item if gone else _value(item, name)
            if value is None or value is OMITTED or value is _ABSENT:
                lacks[name] = value
        if lacks:
            index = context.item(context.start + row)
            raise errors.lacks(context.modality, index, lacks, _ABSENT)


def of_modality(required: _Required, modality: str | None) -> Sequence[str]:
    """The names of fields that items of this modality must have."""
    if not isinstance(required, Mapping):
        return required
    if not required:
        return ()
    if modality is None:
        raise errors.CollateValueError(
            f"require has names for the modalities {list(required)}, and the items have none; give"
            " their modality, or names that hold for all"
        )
    return required.get(modality, ())


def _value(item: Mapping[str, Any], name: str) -> Any:
    element = item.get(name, _ABSENT)
    return _of_element(element) if _is_vllm_item(item) else element


def _of_element(element: Any) -> Any:
    """The value of an element of vLLM's, or what stands in its place."""
    return getattr(element, "data", element)


def values_of(item: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The item's names and values."""
    if _is_vllm_item(item):
        return [(name, _of_element(element)) for name, element in item.items()]
    return list(item.items())


def _is_vllm_item(item: Any) -> bool:
    inputs = sys.modules.get("vllm.multimodal.inputs")
    return inputs is not None and isinstance(item, inputs.MultiModalKwargsItem)


def check_missing(missing: Any, *known: Missing) -> None:
    """Raises if that is none of the ways to deal with what is missing, ``"error"`` besides."""
    if missing not in known:
        every = ", ".join(map(repr, ("error", *known)))
        raise errors.CollateValueError(f"missing is {missing!r}, expected one of {every}")


def present_rows(
    items: Sequence[Any], fields: Mapping[str, Field] | None, modality: str | None
) -> list[tuple[int, Item]]:
    """The items that were not left out as a whole, with their indices; all can be read."""
    rows = [(index, item) for index, item in enumerate(items) if item is not OMITTED]
    if fields is None:
        context = Context(modality, 0, [index for index, _ in rows])
        check_vllm_items([item for _, item in rows], context)
        return rows
    if not isinstance(fields, Mapping):
        raise errors.no_fields(modality, fields)
    for index, item in rows:
        if not isinstance(item, Mapping):
            raise errors.no_item(modality, item, index, "a mapping from field name to value")
        _check_omitted(item, index, fields, modality)
    return rows


def _check_omitted(
    item: Item, index: int, fields: Mapping[str, Field] | None, modality: str | None
) -> None:
    """Raises if a value is left out of a field that nobody knows; the core sees only others."""
    for name in omitted_names(item, values_of):
        if fields is not None and name not in fields:
            raise errors.undeclared_field(modality, name, OMITTED, index)


def check_alike(
    rows: Sequence[tuple[int, Item]], fields: Mapping[str, Field] | None, modality: str | None
) -> None:
    """Raises if items have different names, counting those of values that were left out."""
    for (before, left), (at, right) in pairwise(rows):
        if set(left) == set(right):
            continue
        if fields is None:
            raise errors.unlike(modality, before, at)
        raise errors.unlike_names(left, right, before, at, fields, modality)


def only(item: Item, names: Sequence[str]) -> Item:
    """The item with these of its fields."""
    if len(names) == len(item):
        return item
    kept = {name: item[name] for name in names}
    if not _is_vllm_item(item):
        return kept
    # Not of a subclass, which may be made in another way: as vLLM's own function strips items.
    plain: Item = sys.modules["vllm.multimodal.inputs"].MultiModalKwargsItem(kept)
    return plain


def lean(item: Any, index: int, fields: Mapping[str, Field] | None) -> Any:
    """The item without what was left out."""
    if item is OMITTED:
        inputs = sys.modules.get("vllm.multimodal.inputs")
        if fields is not None:
            return {}
        return item if inputs is None else inputs.MultiModalKwargsItem()
    if not isinstance(item, Mapping) or (fields is None and not _is_vllm_item(item)):
        return item  # the core, or the check of all items, says what is wrong with it
    _check_omitted(item, index, fields if isinstance(fields, Mapping) else None, None)
    return only(item, [name for name, value in values_of(item) if value is not OMITTED])


def check_values(items: Sequence[Any], context: Context, *, within: bool) -> None:
    """Raises if a value of vLLM's items was left out, or, if ``within``, something in one."""
    for row, item in enumerate(items):
        for name, value in values_of(item):
            index = context.item(context.start + row)
            if value is OMITTED:
                raise errors.omitted_value(context.modality, name, index)
            if within and holds_omitted([value]):
                raise errors.omitted_within(context.modality, name, index)


def check_batch(
    batch: Mapping[str, Any], items: Sequence[Any], context: Context, *, within: bool
) -> None:
    """Raises if the batch of vLLM's items has in it what was left out: lists and shared values are
    passed on by the core whatever they hold.

    Args:
        batch: The core's.
        items: Of which it is.
        context: Theirs.
        within: Whether to look into lists, which can take longer than to collate them.
    """
    values = batch.values()
    if not (holds_omitted(values) if within else any(value is OMITTED for value in values)):
        return
    check_values(items, context, within=within)
    # An iterator gave it, so that the item has it no more.
    name = next(name for name, value in batch.items() if holds_omitted([value]))
    raise errors.omitted_within(context.modality, name, None)


def check_vllm_items(items: Sequence[Any], context: Context) -> None:
    """Raises if one is not an item of vLLM's, which carry their fields."""
    inputs = sys.modules.get("vllm.multimodal.inputs")
    for index, item in enumerate(items):
        if inputs is None or not isinstance(item, inputs.MultiModalKwargsItem):
            if item is None or item is OMITTED:
                raise errors.no_item(context.modality, item, context.item(index), "an item")
            raise errors.CollateTypeError(
                f"{errors.where(context.modality, None, context.item(index))}: found"
                f" {errors.describe(item)} and no fields; pass fields={{name: Batched() …}}, which"
                " only vLLM's items can do without",
                modality=context.modality,
                item=context.item(index),
            )

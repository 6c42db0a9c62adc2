"""Builds the engine's items, and holds mmcollate's answers for them against the engine's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mmcollate
import numpy as np
import pytest
import torch
from compare import Outcome, assert_same, assert_same_outcome, outcome

pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")

from mmcollate.integrations import vllm as plugin
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

ORIGINAL = plugin.originals()
DEVICES = [None, "cpu", torch.device("cpu"), "meta"]
GRAD_MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
HAS_ACCELERATOR = torch.accelerator.is_available()


def batched(data: Any, *, keep_on_cpu: bool = False) -> MultiModalFieldElem:
    return MultiModalFieldElem(data, MultiModalBatchedField(keep_on_cpu=keep_on_cpu))


def flat(data: Any, *, dim: int = 0, keep_on_cpu: bool = False) -> MultiModalFieldElem:
    field = MultiModalFlatField(slices=[], dim=dim, keep_on_cpu=keep_on_cpu)
    return MultiModalFieldElem(data, field)


def shared(data: Any, *, keep_on_cpu: bool = False) -> MultiModalFieldElem:
    return MultiModalFieldElem(data, MultiModalSharedField(batch_size=1, keep_on_cpu=keep_on_cpu))


def item(**elems: MultiModalFieldElem) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(elems)


def items_of(make: Callable[..., MultiModalFieldElem], leaves: Sequence[Any], **options: Any):
    """One item for each leaf, with the single field "x"."""
    return [item(x=make(leaf, **options)) for leaf in leaves]


def leaves_of(items: Any) -> list[Any]:
    """The data of all elements, as far as ``items`` are items of elements."""
    if not isinstance(items, (list, tuple)):
        return []
    return [elem.data for x in items if isinstance(x, Mapping) for elem in x.values()]


def to_plain(items: Sequence[MultiModalKwargsItem]) -> tuple[list[dict], dict] | None:
    """The same items as plain dicts with mmcollate's own fields, where those can say it."""
    specs: dict[str, Any] = {}
    for x in items:
        if items[0].keys() != x.keys():
            return None
        for name, elem in x.items():
            field = elem.field
            if type(field) is not type(items[0][name].field):
                return None
            if type(field) is MultiModalBatchedField:
                spec: Any = mmcollate.Batched(keep_on_cpu=field.keep_on_cpu)
            elif type(field) is MultiModalFlatField:
                spec = mmcollate.Flat(dim=field.dim, keep_on_cpu=field.keep_on_cpu)
            elif type(field) is MultiModalSharedField:
                spec = mmcollate.Shared(keep_on_cpu=field.keep_on_cpu)
            else:
                return None
            specs.setdefault(name, spec)
    return [{name: elem.data for name, elem in x.items()} for x in items], specs


def from_plain(
    items: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
) -> list[MultiModalKwargsItem]:
    """The engine's items for plain dicts with mmcollate's fields."""

    def elem(data: Any, field: Any) -> MultiModalFieldElem:
        if isinstance(field, mmcollate.Flat):
            return flat(data, dim=field.dim, keep_on_cpu=field.keep_on_cpu)
        make = batched if isinstance(field, mmcollate.Batched) else shared
        return make(data, keep_on_cpu=field.keep_on_cpu)

    return [item(**{name: elem(x[name], fields[name]) for name in x}) for x in items]


BUILTIN = (TypeError, ValueError, IndexError, KeyError, RuntimeError)


def builtin_kind(exception: type[BaseException] | None) -> type[BaseException]:
    return next((x for x in BUILTIN if exception and issubclass(exception, x)), Exception)


def _assert_collate(
    ours: Callable[[], Any], theirs: Outcome, inputs: Any, error: type[Exception]
) -> None:
    """``ours`` twice: the results of ``theirs``, or an ``error`` of the same built-in kind."""
    for _ in range(2):
        mine = outcome(ours)
        if theirs.exception is None:
            assert mine.exception is None, f"{mine}, where the engine has a result"
            assert_same(mine.result, theirs.result, inputs=inputs)
        else:
            assert mine.exception is not None, f"no error, where the engine has {theirs}"
            kinds = (error, builtin_kind(theirs.exception))
            assert all(issubclass(mine.exception, k) for k in kinds), f"{mine} for {theirs}"


def same_groups(items: Any, **options: Any) -> Outcome:
    """Compare the two generators, drained; return the outcome of the engine's."""
    assert not plugin.is_active(), "the engine's own functions would call mmcollate's"
    return assert_same_outcome(
        lambda: plugin.group_and_batch_mm_items(items, **options),
        lambda: ORIGINAL.group_and_batch_mm_items(items, **options),
        inputs=leaves_of(items),
    )


def same_batch(items: Any, **options: Any) -> Outcome:
    """Compare the batch of all items; return the outcome of the engine's."""
    assert not plugin.is_active(), "the engine's own functions would call mmcollate's"
    return assert_same_outcome(
        lambda: plugin.batch_mm_items(items, **options),
        lambda: ORIGINAL._batch_mm_items(items, **options),
        inputs=leaves_of(items),
    )


def same_collate(items: Sequence[MultiModalKwargsItem], groups: Outcome, **options: Any) -> None:
    """Compare mmcollate's own entry with ``groups``, which the engine made of the same items."""
    inputs = leaves_of(items)
    plain = to_plain(items)
    # mmcollate's own entry takes numpy arrays for tensors, the engine's does not
    if plain is None or any(isinstance(x, np.ndarray) for x in inputs):
        return
    if groups.exception is not None and not groups.result:
        expected = groups
    elif groups.exception is not None or len(groups.result) > 1:
        expected = Outcome(None, ValueError, "more than one batch")
    else:
        expected = Outcome(groups.result[0][1] if groups.result else {})
    error = mmcollate.MMCollateError
    _assert_collate(lambda: mmcollate.collate(*plain, **options), expected, inputs, error)
    # the engine's own items get the engine's own exceptions, the reference's are torch's
    _assert_collate(lambda: mmcollate.collate(items, None, **options), expected, inputs, Exception)
    if expected is groups or groups.exception is None:
        reference = mmcollate.reference.collate
        _assert_collate(lambda: reference(*plain, **options), expected, inputs, Exception)


def same(items: Any, **options: Any) -> Outcome:
    """All three comparisons; return the engine's outcome for the batch of all items."""
    same_collate(items, same_groups(items, **options), **options)
    return same_batch(items, **options)


def value_of(result: Outcome, name: str = "x") -> Any:
    """The batch of field ``name`` in a successful outcome."""
    assert result.exception is None, str(result)
    return result.result[name]

"""collate(): items to batch."""

import functools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch

from mmcollate import _core, config, errors, reference
from mmcollate.fields import Batched, Field, Flat, Shared
from mmcollate.torch_modes import only_device_contexts

Item: TypeAlias = Mapping[str, Any]


class Group(NamedTuple):
    """One batch of consecutive items."""

    modality: str | None
    """The items' modality, if modalities were given."""
    num_items: int
    batch: dict[str, Any]


def collate(
    items: Sequence[Item],
    fields: Mapping[str, Field] | None = None,
    *,
    device: torch.device | str | int | None = None,
    pin_memory: bool = False,
    modality: str | None = None,
) -> dict[str, Any]:
    """Makes one batch of items.

    Args:
        items: Mappings from field name to value, all with the same names. A value is a tensor of
            any dtype and shape, a numpy array (taken as the tensor of the same values), a number,
            a string, ``None``, or a list of such.
        fields: What each named field is. ``None`` for vLLM's ``MultiModalKwargsItem``, which
            carry their fields.
        device: Where the tensors go, copied without blocking, but for fields that are kept on the
            CPU; ``None`` leaves every tensor where it is.
        pin_memory: Whether such copies go through pinned memory.
        modality: Named in errors.

    Returns:
        From field name, in the first item's order, to that field's batch. Tensors are fresh and
        contiguous, but for these, which are the items' own memory: the batch of one item (a view
        if batched, the tensor itself if flat), shared fields, and the elements of lists.

    Raises:
        MMCollateError: The items do not fit together; see its subclasses. No item was changed,
            and the next call works.
    """
    sequence = _as_list(items, modality)
    if not sequence:
        return {}
    core, known = _core_and_fields(fields, sequence, modality)
    context = _Context(modality, 0)
    end, batch = core.next_group(sequence, 0, len(sequence), known, device, pin_memory, context)
    if end < len(sequence):
        if known is None:
            raise errors.CollateValueError(
                f"{errors.where(modality, None, end)}: does not form one batch with item"
                f" {end - 1}; use collate_groups()",
                modality=modality,
                item=end,
            )
        raise errors.not_one_batch(sequence, end, known, modality)
    return _or_reference(batch, sequence, device, pin_memory)


def collate_groups(
    items: Sequence[Item],
    fields: Mapping[str, Field] | None = None,
    *,
    modalities: Sequence[str] | None = None,
    device: torch.device | str | int | None = None,
    pin_memory: bool = False,
) -> Iterator[Group]:
    """Makes batches of consecutive items that fit together; lazily.

    Neighbours are in one group if they have the same modality, the same names, and equal values
    of shared fields. Each group is collated when it is asked for, and nothing before the first.

    Args:
        items: As for :func:`collate`.
        fields: As for :func:`collate`.
        modalities: One for each item, if there are several.
        device: As for :func:`collate`.
        pin_memory: As for :func:`collate`.

    Yields:
        ``(modality, num_items, batch)``, in the items' order.

    Raises:
        MMCollateError: As for :func:`collate`, when the group is asked for.
    """
    sequence = _as_list(items, None)
    core, known = _core_and_fields(fields, sequence, None)
    for modality, first, stop in _runs(sequence, modalities):
        start = first
        while start < stop:
            end, batch = core.next_group(
                sequence, start, stop, known, device, pin_memory, _Context(modality, start)
            )
            group = sequence[start:end]
            yield Group(modality, end - start, _or_reference(batch, group, device, pin_memory))
            start = end


def explained_groups(
    items: Sequence[Item],
    fields: Mapping[str, Field] | None,
    modalities: Sequence[str] | None,
    device: Any,
    pin_memory: bool,
) -> Iterator[tuple[str | None, list[Item], list[Any] | None]]:
    """The groups of :func:`collate_groups`: modality, items, and the core's plan of each field;
    ``None`` where the reference would take the whole group."""
    sequence = _as_list(items, None)
    core, known = _core_and_fields(fields, sequence, None)
    for modality, first, stop in _runs(sequence, modalities):
        start = first
        while start < stop:
            end, plan = core.explain_group(
                sequence, start, stop, known, device, pin_memory, _Context(modality, start)
            )
            yield modality, sequence[start:end], plan
            start = end


def _runs(
    items: Sequence[Item], modalities: Sequence[str] | None
) -> Iterator[tuple[str | None, int, int]]:
    """Consecutive items of one modality: its name, start and stop."""
    if modalities is None:
        yield None, 0, len(items)
        return
    if not isinstance(modalities, Sequence) or isinstance(modalities, str):
        raise errors.CollateTypeError(
            f"modalities are {errors.describe(modalities)}, expected one for each item"
        )
    if len(modalities) != len(items):
        raise errors.CollateValueError(
            f"{len(modalities)} modalities for {len(items)} items; give one for each"
        )
    start = 0
    for modality, run in groupby(modalities):
        stop = start + len(list(run))
        yield modality, start, stop
        start = stop


def _as_list(items: Sequence[Item], modality: str | None) -> list[Item]:
    if isinstance(items, (str, bytes, Mapping)):
        raise errors.CollateTypeError(
            f"{errors.where(modality, None)}: found {type(items).__name__}, expected a sequence of"
            " items; put a single item into a list",
            modality=modality,
        )
    try:
        return items if type(items) is list else list(items)
    except TypeError as error:
        raise errors.CollateTypeError(
            f"{errors.where(modality, None)}: found {type(items).__name__}, expected a sequence of"
            " items",
            modality=modality,
        ) from error


class _Context(NamedTuple):
    """What the core hands back to the functions below, for their messages."""

    modality: str | None
    start: int
    """Index of the group's first item."""


def _core_and_fields(
    fields: Mapping[str, Field] | None, items: Sequence[Item], modality: str | None
) -> tuple[_core.Collator, dict[str, Any] | None]:
    if fields is None:
        inputs = sys.modules.get("vllm.multimodal.inputs")
        for index, item in enumerate(items):
            if inputs is None or not isinstance(item, inputs.MultiModalKwargsItem):
                raise errors.CollateTypeError(
                    f"{errors.where(modality, None, index)}: found {errors.describe(item)} and no"
                    " fields; pass fields={name: Batched() …}, which only vLLM's items can do"
                    " without",
                    modality=modality,
                    item=index,
                )
        from mmcollate.integrations import vllm

        return vllm.collator(), None
    if not isinstance(fields, Mapping):
        raise errors.CollateTypeError(
            f"{errors.where(modality, None)}: fields are {type(fields).__name__}, expected a"
            " mapping from field name to Batched, Flat or Shared",
            modality=modality,
        )
    return collator(), fields if type(fields) is dict else dict(fields)


def _or_reference(
    batch: dict[str, Any] | None, group: Sequence[Any], device: Any, pin_memory: bool
) -> dict[str, Any]:
    """Items of a class that the core does not know: vLLM's own function, for vLLM's items."""
    if batch is not None:
        return batch
    from mmcollate.integrations import vllm

    return vllm.originals()._batch_mm_items(group, device=device, pin_memory=pin_memory)


@functools.cache
def collator() -> _core.Collator:
    """The core for plain mappings; made at the first call, since it looks into torch."""
    core = _core.Collator.of_mappings(
        normalize=_normalize,
        report=errors.unreadable,
        batched=Batched,
        flat=Flat,
        shared=Shared,
        reduce=_reduce,
        can_batch=_can_batch,
        only_device_contexts=only_device_contexts,
        skip_table=config.skip_exchange_table(),
    )
    warn_if_slow(core)
    return core


_warned = False


def warn_if_slow(core: _core.Collator) -> None:
    """Says once in a process that tensors are read the slow way."""
    global _warned
    if not core.has_exchange_table and not _warned:
        _warned = True
        if config.skip_exchange_table():
            why = "MMCOLLATE_SKIP_EXCHANGE_TABLE is set"
        else:
            why = f"torch {torch.__version__} has no DLPack exchange table (2.10 and later have)"
        warnings.warn(
            f"{why}: mmcollate reads tensors through Python attributes, which is slower",
            stacklevel=2,
        )


def _reduce(
    name: str,
    field: Field,
    leaves: list[Any],
    device: Any,
    pin_memory: bool,
    reason: str,
    context: _Context,
) -> Any:
    modality, start = context
    if type(field) not in (Batched, Flat, Shared):
        raise errors.unknown_kind(modality, name, field)
    try:
        return reference.reduce(field, leaves, device=device, pin_memory=pin_memory)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise errors.of_field(
            error,
            modality=modality,
            name=name,
            field=field,
            leaves=leaves,
            start=start,
            target=(device, pin_memory),
        ) from error


def _can_batch(left: Item, right: Item, fields: dict[str, Field], context: _Context) -> bool:
    modality, start = context

    def normalized(item: Item) -> dict[str, Any]:
        return {name: _normalize(value, name, start, context) for name, value in item.items()}

    try:
        return reference.can_batch(normalized(left), normalized(right), fields)
    except (errors.MMCollateError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        for name, field in fields.items():
            if isinstance(field, Shared) and name in left and name in right:
                pair = [left[name], right[name]]
                raise errors.of_field(
                    error, modality=modality, name=name, field=field, leaves=pair, start=start
                ) from error
        raise


def _normalize(value: Any, name: str, index: int, context: _Context) -> Any:
    """numpy arrays as tensors, also in lists; everything else as it is."""
    modality = context.modality
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return value
    if type(value) in (list, tuple):
        try:
            inner = [_normalize(x, name, index, context) for x in value]
        except RecursionError as error:
            raise errors.CollateValueError(
                f"{errors.where(modality, name, index)}: a list too deep to look into; flatten it",
                modality=modality,
                field=name,
                item=index,
            ) from error
        same = all(a is b for a, b in zip(inner, value, strict=True))
        return value if same else type(value)(inner)
    if not isinstance(value, numpy.ndarray):
        return value
    try:
        if isinstance(value, numpy.ma.MaskedArray):
            raise TypeError("a masked array; fill or drop its mask first")
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        elif not value.flags.writeable or any(stride < 0 for stride in value.strides):
            # torch has neither read-only tensors nor negative strides.
            value = value.copy()
        return torch.from_numpy(numpy.asarray(value))
    except (TypeError, ValueError) as error:
        raise errors.CollateTypeError(
            f"{errors.where(modality, name, index)}: found {errors.describe(value)}, which torch"
            f" can't take ({error})",
            modality=modality,
            field=name,
            item=index,
        ) from error

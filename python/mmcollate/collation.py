"""collate(): items to batch."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch

from mmcollate import _core, config, errors, omitting, presence, reference, staging
from mmcollate.backends import Backend
from mmcollate.fields import Batched, Field, Flat, Shared
from mmcollate.omitting import OMITTED, Missing, Omitted, Present
from mmcollate.presence import Context as _Context
from mmcollate.presence import Required
from mmcollate.torch_modes import only_device_contexts

Item: TypeAlias = presence.Item
Device: TypeAlias = torch.device | str | int | Backend | None


class Group(NamedTuple):
    """One batch of consecutive items."""

    modality: str | None
    """The items' modality, if modalities were given."""
    num_items: int
    batch: dict[str, Any]


@overload
def collate(
    items: Sequence[Item | Omitted],
    fields: Mapping[str, Field] | None = None,
    *,
    device: Device = None,
    pin_memory: bool = False,
    modality: str | None = None,
    require: Required = None,
    missing: Literal["error"] = "error",
) -> dict[str, Any]: ...


@overload
def collate(
    items: Sequence[Item | Omitted],
    fields: Mapping[str, Field] | None = None,
    *,
    device: Device = None,
    pin_memory: bool = False,
    modality: str | None = None,
    require: Required = None,
    missing: Literal["omit"],
) -> Present: ...


@overload
def collate(
    items: Sequence[Item | Omitted],
    fields: Mapping[str, Field] | None = None,
    *,
    device: Device = None,
    pin_memory: bool = False,
    modality: str | None = None,
    require: Required = None,
    missing: Literal["split"],
) -> list[Present]: ...


def collate(
    items: Sequence[Item | Omitted],
    fields: Mapping[str, Field] | None = None,
    *,
    device: Device = None,
    pin_memory: bool = False,
    modality: str | None = None,
    require: Required = None,
    missing: Missing = "error",
) -> dict[str, Any] | Present | list[Present]:
    """Makes one batch of items.

    Args:
        items: Mappings from field name to value, all with the same names, in any iterable. A
            value is a tensor of any dtype and shape, a numpy array (taken as the tensor of the
            same values), a number, a string, ``None``, or a list or tuple of such.
        fields: What each named field is. ``None`` for vLLM's ``MultiModalKwargsItem``, which
            carry their fields.
        device: Where the tensors go, copied without blocking; fields that are kept on the CPU go
            there instead. ``None`` leaves every tensor where it is.
        pin_memory: Whether copies to a device go through pinned memory; all of the batch then go
            together, and their tensors share one allocation (``docs/staging.md``). Without a
            device: whether fresh tensors of fields that are not kept on the CPU are pinned.
        modality: Named in errors.
        require: Names of fields that each item must have, with a value that is neither ``None`` nor
            ``OMITTED``; or from modality to such names, for the one that ``modality`` names.
        missing: What to do where :data:`mmcollate.OMITTED` stands for an item or a value:
            ``"error"``; ``"omit"``, a batch of what is there, and the indices of the items that
            it is from; ``"split"``, a batch for each set of fields that items have.

    Returns:
        With ``missing="omit"`` a :class:`Present`: ``(batch, indices)``. A field's batch is of the
        items that have a value there, so fields may be of different lengths; an item that was left
        out of a field that is required is left out of all. With ``"split"`` a list of such, by
        first item, one for each set of names: those of one have the same items. Items of which
        nothing is there are in none. Otherwise, as well as within these, the batch:

        From field name, in the first item's order, to that field's batch. Stacked and joined
        tensors are fresh and contiguous. Not fresh, unless the device made a copy necessary, are
        the batch of one item (a view if batched, the tensor itself if flat), shared fields (the
        first item's value), and the elements of lists. The memory of a numpy array is used as it
        is where torch can use it.

    Raises:
        MMCollateError: The items do not fit together; see its subclasses. Its cause is what torch
            raised, if it did. No item was changed, and the next call works. What is missing makes a
            :class:`CollateTypeError`, or a :class:`CollateKeyError` if it is required; its
            ``omitted`` says whether it was left out or lost. A marker within a value is found in
            vLLM's items with ``missing`` or ``require`` only.
        torch.OutOfMemoryError: torch's own, unchanged.
        Exception: Of vLLM's items, vLLM's own, with a note (Python 3.11 on) if it is a field that
            fails. Of others, what the caller's own mappings or iterator raise when they are read.
    """
    if missing != "error":
        return _without_missing(items, fields, device, pin_memory, modality, require, missing)
    find = functools.partial(staging.backend_for, device, pin_memory)
    batch, plan = _one_batch(items, fields, device, pin_memory, find, modality, require)
    if plan is not None:
        plan.send(batch)
    return batch


def stage(
    items: Sequence[Item],
    fields: Mapping[str, Field] | None = None,
    *,
    device: Device = None,
    modality: str | None = None,
    require: Required = None,
) -> staging.Staged:
    """Does the half of :func:`collate` that the host does: what is bound for the device is gathered
    into pinned memory, and ready to be copied.

    Args:
        items: As for :func:`collate`.
        fields: As for :func:`collate`.
        device: Where the batch will go; torch's current accelerator if ``None``.
        modality: As for :func:`collate`.
        require: As for :func:`collate`.

    Returns:
        The batch on its way; its method ``to()`` starts the copies.

    Raises:
        CollateValueError: There is no such device here.
        MMCollateError: As for :func:`collate`.
    """
    backend = staging.staged_to(device)
    target = backend if device is None else device

    def find() -> Backend | None:
        return backend if staging.has_room(backend) else None

    batch, plan = _one_batch(items, fields, target, True, find, modality, require)
    return staging.Staged(batch, backend, plan)


def _one_batch(
    items: Sequence[Any],
    fields: Mapping[str, Field] | None,
    device: Any,
    pin_memory: bool,
    find_backend: Callable[[], Backend | None],
    modality: str | None,
    require: Required,
    indices: Sequence[int] | None = None,
) -> tuple[dict[str, Any], staging.Bound | None]:
    """The batch, and what of it is bound for the device and not there yet: nothing if there is no
    backend to stage through. That is asked for after all else was looked at."""
    _check_modality(modality)
    sequence = _as_list(items, modality)
    context = _Context(modality, 0, indices)
    if require is not None:
        presence.check_required(sequence, presence.required_of(require, fields), context)
    if not sequence:
        return {}, None
    core, known = _core_and_fields(fields, sequence, context)
    backend = find_backend()
    end, batch, plan = _next_group(
        core, sequence, len(sequence), known, device, pin_memory, context, backend
    )
    if end < len(sequence):
        if known is None:
            raise errors.unlike(modality, context.item(end - 1), context.item(end))
        raise _apart(sequence[end - 1], sequence[end], known, context, end)
    within = require is not None or indices is not None
    if batch is None:
        return _of_reference(sequence, known, device, pin_memory, context, within), None
    if known is None:
        presence.check_batch(batch, sequence, context, within=within)
    return batch, _bound(plan, backend, known)


def _next_group(
    core: _core.Collator,
    items: Sequence[Any],
    stop: int,
    known: dict[str, Any] | None,
    device: Any,
    pin_memory: bool,
    context: _Context,
    backend: Backend | None,
) -> tuple[int, dict[str, Any] | None, _core.DevicePlan | None]:
    """The core's. A marker in the place of one of vLLM's elements is what it fails at, not vLLM."""
    start = context.start
    try:
        return core.next_group(
            items, start, stop, known, device, pin_memory, context, backend is not None
        )
    except AttributeError as error:
        if known is None and error.obj is OMITTED:
            presence.check_values(items[start:stop], context, within=False)
        raise


def _bound(
    plan: _core.DevicePlan | None, backend: Backend | None, fields: dict[str, Field] | None
) -> staging.Bound | None:
    if plan is None or backend is None:
        return None
    return staging.Bound(plan, backend, fields)


def collate_groups(
    items: Sequence[Item | Omitted],
    fields: Mapping[str, Field] | None = None,
    *,
    modalities: Sequence[str] | None = None,
    device: Device = None,
    pin_memory: bool = False,
    require: Required = None,
    missing: Literal["error", "split"] = "error",
) -> Iterator[Group]:
    """Makes batches of consecutive items that fit together; lazily.

    Neighbours are in one group if they have the same modality, the same names, and equal values
    of shared fields; vLLM's items, if they have the same modality and vLLM would batch them. Each
    group is collated when it is asked for, and nothing before the first.

    Args:
        items: As for :func:`collate`.
        fields: As for :func:`collate`.
        modalities: One for each item, if there are several.
        device: As for :func:`collate`.
        pin_memory: As for :func:`collate`.
        require: As for :func:`collate`; from modality to names for items of several modalities.
        missing: ``"split"`` takes a value that is :data:`mmcollate.OMITTED` for a name that the
            item does not have, so that it starts a new group, and such an item for one without
            fields: its group's batch is empty. ``"error"``: as for :func:`collate`.

    Yields:
        ``(modality, num_items, batch)``, in the items' order.

    Raises:
        MMCollateError: As for :func:`collate`, when the group is asked for; what is wrong with
            the arguments, when the first is.
        torch.OutOfMemoryError: As for :func:`collate`.
        Exception: As for :func:`collate`.
    """
    given = _as_list(items, None)
    required = () if require is None else presence.required_of(require, fields)
    within = require is not None or missing != "error"
    if missing != "error":
        presence.check_missing(missing, "split")
        sequence = [presence.lean(item, index, fields) for index, item in enumerate(given)]
    else:
        sequence = given
    core, known = _core_and_fields(fields, sequence, _Context(None, 0))
    backend = staging.backend_for(device, pin_memory)
    for modality, first, stop in _runs(sequence, modalities):
        start = first
        while start < stop:
            context = _Context(modality, start)
            try:
                end, batch, plan = _next_group(
                    core, sequence, stop, known, device, pin_memory, context, backend
                )
            except errors.MMCollateError:
                # It may be what is required that the core can't read.
                if required:
                    presence.check_required(given[start:stop], required, context)
                raise
            if required:
                presence.check_required(given[start:end], required, context)
            if batch is None:
                group = sequence[start:end]
                batch = _of_reference(group, known, device, pin_memory, context, within)
            elif known is None:
                presence.check_batch(batch, sequence[start:end], context, within=within)
            if (bound := _bound(plan, backend, known)) is not None:
                bound.send(batch)
            yield Group(modality, end - start, batch)
            start = end


def _without_missing(
    items: Sequence[Any],
    fields: Mapping[str, Field] | None,
    device: Any,
    pin_memory: bool,
    modality: str | None,
    require: Required,
    missing: Missing,
) -> Present | list[Present]:
    """The batch, or batches, of what was not left out."""
    presence.check_missing(missing, "split", "omit")
    _check_modality(modality)
    given = _as_list(items, modality)
    rows = presence.present_rows(given, fields, modality)
    required = () if require is None else presence.required_of(require, fields)
    if missing == "split":
        presence.check_required(given, required, _Context(modality, 0))
        parts = omitting.by_fields_present(rows, presence.values_of)
    else:
        needed = set(presence.of_modality(required, modality))
        rows = [
            row
            for row in rows
            if needed.isdisjoint(omitting.omitted_names(row[1], presence.values_of))
        ]
        indices = [index for index, _ in rows]
        presence.check_required(
            [item for _, item in rows], required, _Context(modality, 0, indices)
        )
        presence.check_alike(rows, fields, modality)
        parts = omitting.by_items_present(rows, presence.values_of)
    find = functools.partial(staging.backend_for, device, pin_memory)
    found = []
    for names, indices in parts:
        picked = [presence.only(given[index], names) for index in indices]
        batch, plan = _one_batch(picked, fields, device, pin_memory, find, modality, None, indices)
        if plan is not None:
            plan.send(batch)
        found.append(Present(batch, {name: list(indices) for name in batch}))
    if missing == "split":
        return found
    part = {name: present for present in found for name in present.batch}
    order = [name for _, item in rows[:1] for name in item if name in part]
    return Present(
        {name: part[name].batch[name] for name in order},
        {name: part[name].indices[name] for name in order},
    )


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
    core, known = _core_and_fields(fields, sequence, _Context(None, 0))
    backend = staging.backend_for(device, pin_memory)
    for modality, first, stop in _runs(sequence, modalities):
        start = first
        while start < stop:
            context = _Context(modality, start)
            end, rows, plan = core.explain_group(
                sequence, start, stop, known, device, pin_memory, context, backend is not None
            )
            if rows is not None and (bound := _bound(plan, backend, known)) is not None:
                rows = bound.explained(rows)
            yield modality, sequence[start:end], rows
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
    modalities = list(modalities)
    for index, modality in enumerate(modalities):
        _check_modality(modality, index)
    start = 0
    for modality, run in groupby(modalities):
        stop = start + len(list(run))
        yield modality, start, stop
        start = stop


def _check_modality(modality: Any, index: int | None = None) -> None:
    if modality is None or isinstance(modality, str):
        return
    where = "" if index is None else f"item {index}: "
    many = "; collate_groups() takes one for each item" if index is None else ""
    raise errors.CollateTypeError(
        f"{where}the modality is {errors.describe(modality)}, expected a string or None{many}",
        item=index,
    )


def _as_list(items: Sequence[Any], modality: str | None) -> list[Any]:
    if type(items) is list:
        # A copy: reading a mapping may run code that changes the caller's.
        return items.copy()
    if isinstance(items, (str, bytes, Mapping)):
        raise errors.CollateTypeError(
            f"{errors.where(modality, None)}: found {type(items).__name__}, expected a sequence of"
            " items; put a single item into a list",
            modality=modality,
        )
    try:
        iterator = iter(items)
    except TypeError as error:
        raise errors.CollateTypeError(
            f"{errors.where(modality, None)}: found {type(items).__name__}, expected a sequence of"
            " items",
            modality=modality,
        ) from error
    return list(iterator)


def _core_and_fields(
    fields: Mapping[str, Field] | None, items: Sequence[Item], context: _Context
) -> tuple[_core.Collator, dict[str, Any] | None]:
    if fields is None:
        presence.check_vllm_items(items, context)
        from mmcollate.integrations import vllm

        return vllm.collator(), None
    if type(fields) is dict:
        return collator(), fields
    if not isinstance(fields, Mapping):
        raise errors.no_fields(context.modality, fields)
    return collator(), dict(fields)


def _of_reference(
    group: Sequence[Any],
    fields: dict[str, Field] | None,
    device: Any,
    pin_memory: bool,
    context: _Context,
    within: bool,
) -> dict[str, Any]:
    """The batch of items that the core can't read: vLLM's own function, for vLLM's items."""
    if fields is not None:
        first, last = context.start, context.start + len(group) - 1
        raise errors.changed(context.modality, context.item(first), context.item(last))
    presence.check_values(group, context, within=within)
    from mmcollate.integrations import vllm

    return vllm.originals()._batch_mm_items(group, device=device, pin_memory=pin_memory)


@functools.cache
def collator() -> _core.Collator:
    """The core for plain mappings; made at the first call, since it looks into torch."""
    config.tell_core()
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
    modality, start = context.modality, context.start
    if type(field) not in (Batched, Flat, Shared):
        raise errors.unknown_kind(modality, name, field)
    reduce = functools.partial(reference.reduce, field, leaves)
    try:
        if isinstance(device, Backend):
            return device.reference(reduce, keep_on_cpu=field.keep_on_cpu, pin_memory=pin_memory)
        return reduce(device=device, pin_memory=pin_memory)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise errors.of_field(
            error,
            modality=modality,
            name=name,
            field=field,
            leaves=leaves,
            items=[context.item(start + row) for row in range(len(leaves))],
            target=(device, pin_memory),
        ) from error


def _can_batch(
    left: Item, right: Item, fields: dict[str, Field], context: _Context, at: int
) -> bool:
    """:func:`reference.can_batch`, with errors that name the field and item ``at``, the right."""
    # Under a torch mode the core asks before it has read the right item.
    if not isinstance(right, Mapping):
        raise errors.unreadable("not_a_mapping", right, at, None, context)
    if set(left) != set(right):
        return False
    return _first_unequal(left, right, fields, context, at) is None


def _first_unequal(
    left: Item, right: Item, fields: dict[str, Field], context: _Context, at: int
) -> tuple[str, Any, Any] | None:
    """The first shared field whose values differ, with the values; compares no further."""
    for name in left:
        if not isinstance(fields.get(name), Shared):
            continue
        a = _normalize(left[name], name, at - 1, context)
        b = _normalize(right[name], name, at, context)
        try:
            equal = reference.values_equal(a, b)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise errors.incomparable(
                error,
                modality=context.modality,
                name=name,
                left=a,
                right=b,
                before=context.item(at - 1),
                at=context.item(at),
            ) from error
        if not equal:
            return name, a, b
    return None


def _apart(
    left: Item, right: Item, fields: dict[str, Field], context: _Context, at: int
) -> errors.MMCollateError:
    """Why items ``at - 1`` and ``at`` are not in one batch."""
    before, index = context.item(at - 1), context.item(at)
    if set(left) != set(right):
        return errors.unlike_names(left, right, before, index, fields, context.modality)
    unequal = _first_unequal(left, right, fields, context, at)
    if unequal is None:
        return errors.changed(context.modality, before, index)
    return errors.unlike_values(*unequal, before, index, context.modality)


def _normalize(value: Any, name: str, index: int, context: _Context) -> Any:
    """numpy arrays as tensors, also in lists; everything else as it is, but for what only stands
    for a value."""
    if type(value) in (list, tuple):
        try:
            inner = [_inner(x, name, index, context) for x in value]
        except RecursionError as error:
            index = context.item(index)
            raise errors.CollateValueError(
                f"{errors.where(context.modality, name, index)}: a list too deep to look into;"
                " flatten it",
                modality=context.modality,
                field=name,
                item=index,
            ) from error
        same = all(a is b for a, b in zip(inner, value, strict=True))
        return value if same else type(value)(inner)
    if value is OMITTED:
        raise errors.omitted_value(context.modality, name, context.item(index))
    if isinstance(value, (list, tuple, dict)) and omitting.holds_omitted([value]):
        raise errors.omitted_within(context.modality, name, context.item(index))
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return value
    modality, index = context.modality, context.item(index)
    masked = isinstance(value, numpy.ma.MaskedArray)
    try:
        if masked:
            raise TypeError("it has a mask")
        return _as_tensor(numpy.asarray(value))
    except MemoryError as error:
        raise errors.CollateMemoryError(
            f"{errors.where(modality, name, index)}: found {errors.describe(value)}, which has to"
            f" be copied, and there is no memory for it; give a smaller array, or one that torch"
            f" can use as it is: writable, of native byte order and positive strides ({error})",
            modality=modality,
            field=name,
            item=index,
        ) from error
    except (TypeError, ValueError) as error:
        advice = "fill or drop its mask first" if masked else "convert it to a dtype that torch has"
        raise errors.CollateTypeError(
            f"{errors.where(modality, name, index)}: found {errors.describe(value)}, which torch"
            f" can't take; {advice} ({error})",
            modality=modality,
            field=name,
            item=index,
        ) from error


def _inner(value: Any, name: str, index: int, context: _Context) -> Any:
    """:func:`_normalize` for what a list holds."""
    if value is OMITTED:
        raise errors.omitted_within(context.modality, name, context.item(index))
    return _normalize(value, name, index, context)


def _as_tensor(array: Any) -> torch.Tensor:
    """The numpy array's own memory where torch can use it, else a copy."""
    # torch has no read-only tensors: writing to one would write to the array.
    if array.flags.writeable:
        # Refused: foreign byte order, strides that are negative or no whole number of elements.
        with contextlib.suppress(ValueError):
            return torch.from_numpy(array)
    # Where the stride is 0, one element stands for as many as the shape says, maybe terabytes.
    once = (slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)
    held = array[(..., *once)]
    copied = held.astype(held.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(copied).expand(array.shape)

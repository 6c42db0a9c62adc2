"""What goes wrong, said so that it can be mended: modality, field, item, shape, dtype, advice."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch

from mmcollate import reference
from mmcollate.fields import Batched, Field, Flat, Shared
from mmcollate.omitting import OMITTED


class MMCollateError(Exception):
    """Base of all errors raised here. Each is also the built-in that fits (``TypeError`` …)."""

    def __init__(
        self,
        message: str = "",
        *,
        modality: str | None = None,
        field: str | None = None,
        item: int | None = None,
        missing: Sequence[str] = (),
        omitted: bool = False,
    ) -> None:
        super().__init__(message)
        self.modality = modality
        """The modality that the caller named, if any."""
        self.field = field
        """Name of the field, if the error concerns one."""
        self.item = item
        """Index of the item, if the error concerns one."""
        self.missing = tuple(missing)
        """Names of the required fields that the item is without."""
        self.omitted = omitted
        """Whether all that is missing was left out on purpose, not lost."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CollateTypeError(MMCollateError, TypeError):
    """Something is of a type that can't be collated."""


class CollateValueError(MMCollateError, ValueError):
    """Values that don't fit together."""


class CollateKeyError(MMCollateError, KeyError):
    """A field is missing or not declared, or a value's own code raised a ``KeyError``."""


class CollateIndexError(MMCollateError, IndexError):
    """A dimension that a tensor does not have."""


class CollateRuntimeError(MMCollateError, RuntimeError):
    """torch refused an operation."""


class CollateMemoryError(MMCollateError, MemoryError):
    """Python or numpy had no memory. torch's own complaint becomes a :class:`CollateRuntimeError`,
    or passes through as ``torch.OutOfMemoryError``."""


class VerificationError(MMCollateError, AssertionError):
    """With ``MMCOLLATE_VERIFY=1``: mmcollate and vLLM disagree about a batch. A bug here."""


_BY_CAUSE: tuple[tuple[type[Exception], type[MMCollateError]], ...] = (
    (KeyError, CollateKeyError),
    (IndexError, CollateIndexError),
    (TypeError, CollateTypeError),
    (ValueError, CollateValueError),
    (AssertionError, CollateValueError),
    (MemoryError, CollateMemoryError),
)


def describe(value: object) -> str:
    """A value in a few words: ``float32 (3, 4)``, ``list of 2``, ``NoneType``; never raises."""
    try:
        return _described(value)
    except Exception:  # the value's own code, which must not hide what is to be said of it
        return type(value).__name__


def _described(value: object) -> str:
    if value is OMITTED:
        return "OMITTED"
    if isinstance(value, torch.Tensor):
        kind = "" if type(value) is torch.Tensor else f"{type(value).__name__} of "
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        layout = "" if value.layout is torch.strided else f" ({value.layout})"
        try:
            shape: object = tuple(value.shape)
        except RuntimeError:  # ragged nested tensors have no shape
            shape = "(ragged)"
        return f"{kind}{str(value.dtype).removeprefix('torch.')} {shape}{place}{layout}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        if type(value).__name__ == str(dtype):
            return f"numpy.{dtype}"
        return f"{type(value).__name__} {dtype} {shape}"
    return type(value).__name__


def where(modality: str | None, name: object, item: int | None = None) -> str:
    """``modality 'image', field 'pixel_values', item 3``: what is known of it."""
    parts = [f"modality {modality!r}"] if modality is not None else []
    if name is not None:
        parts.append(f"field {name!r}")
    if item is not None:
        parts.append(f"item {item}")
    return ", ".join(parts) or "items"


def diagnose(field: object, leaves: Sequence[Any], start: int = 0) -> tuple[int | None, str]:
    """The leaf that most likely made the reference raise, and what to do about it.

    Args:
        field: The field; one with an attribute ``dim`` is flat.
        leaves: The items' values.
        start: Index of the item that the first leaf belongs to, for the sentence.

    Returns:
        The index of the leaf in ``leaves`` (``None`` if no one stands out), and a sentence.
    """
    try:
        found = _diagnose(field, leaves, start)
    except Exception:  # tensors so strange that they can't be asked; the cause says the rest
        found = None
    return found or (None, _found(leaves))


def _found(leaves: Sequence[Any]) -> str:
    return f"found {', '.join(map(describe, leaves[:3]))}{', …' if len(leaves) > 3 else ''}"


def _diagnose(field: object, leaves: Sequence[Any], start: int) -> tuple[int, str] | None:
    flat = hasattr(field, "dim")
    dim: Any = getattr(field, "dim", None)
    if flat and (isinstance(dim, bool) or not isinstance(dim, SupportsIndex)):
        return 0, f"dim is {dim!r}, expected an int"
    first = _First(start, leaves[0])
    checks: list[_Check] = []
    if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        checks += [_place(first), _plainness(first)]
        if flat and len(leaves) > 1:
            checks.append(_dimensions(first, dim))
        checks += [_cast(first), _gradient]
    elif flat:
        checks.append(_form(first, dim))
    for check in checks:
        for i, leaf in enumerate(leaves):
            problem = check(leaf)
            if problem:
                return i, f"found {describe(leaf)}{problem}"
    return None


class _First(NamedTuple):
    """The first item of the batch, to which the others must fit."""

    item: int
    leaf: Any

    def __str__(self) -> str:
        return f"item {self.item} is {describe(self.leaf)}"


_Check = Callable[[Any], str]


def _form(first: _First, dim: int) -> _Check:
    def check(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            return ", without a dimension to join along" if leaf.dim() == 0 else ""
        if not isinstance(leaf, Iterable):
            why = _why_missing(leaf)
            if isinstance(first.leaf, torch.Tensor):
                return f", {first}; give all items one form{why}"
            return f"; a flat field takes tensors or lists{why}"
        return f"; lists are joined with dim=0 only, not dim={dim}" if dim != 0 else ""

    return check


def _why_missing(value: object) -> str:
    """What to say of a payload that is not there: whether it is lost or was left out."""
    if value is OMITTED:
        return f"; {_LEFT_OUT}"
    return f"; {_LOST}" if value is None else ""


_LEFT_OUT = "it was left out on purpose, as OMITTED says"
_LOST = "None is a payload that got lost; what is left out on purpose is mmcollate.OMITTED"


def _place(first: _First) -> _Check:
    def check(leaf: Any) -> str:
        if leaf.device != first.leaf.device:
            return f", {first}; move them to one device first"
        return ""

    return check


def _plainness(first: _First) -> _Check:
    def check(leaf: Any) -> str:
        if leaf.is_nested:
            return ", a nested tensor; pad it, or give each part as an item"
        if leaf.layout is not torch.strided:
            return "; make it dense with to_dense()"
        if leaf.is_quantized:
            return ", quantized; make it plain with dequantize()"
        if type(leaf) is not type(first.leaf):
            return f", {first}; give all items one type of tensor"
        return ""

    return check


def _dimensions(first: _First, dim: int) -> _Check:
    expected = first.leaf.dim()

    def check(leaf: Any) -> str:
        rank = leaf.dim()
        if rank != expected:
            return f", expected {expected} dimensions as item {first.item} has; reshape"
        return "" if -rank <= dim < rank else f", which has no dimension {dim}"

    return check


def _cast(first: _First) -> _Check:
    def check(leaf: Any) -> str:
        if not _casts(leaf.dtype, first.leaf.dtype):
            return f", which torch can't cast, {first}; give all items one dtype"
        return ""

    return check


def _casts(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether torch joins a tensor of the one dtype to a first one of the other."""
    try:
        torch.promote_types(dtype, to)
    except RuntimeError:  # such as uint16 and int32
        return False
    return torch.can_cast(dtype, to)


def _gradient(leaf: Any) -> str:
    return " that requires grad; detach it or use torch.no_grad()" if leaf.requires_grad else ""


def of_field(
    cause: Exception,
    *,
    modality: str | None,
    name: str,
    field: object,
    leaves: Sequence[Any],
    items: Sequence[int],
    target: tuple[Any, Any] = (None, False),
) -> MMCollateError:
    """The error to raise for a field whose reference raised ``cause``.

    Args:
        cause: What the reference raised.
        modality: Named in the message.
        name: The field's name.
        field: The field.
        leaves: The items' values.
        items: The items' indices.
        target: The call's ``device`` and ``pin_memory``.
    """
    device, pin_memory = target
    leaf, advice = None, _target_advice(cause, field, device, pin_memory)
    if advice:
        advice = f"{_found(leaves)}; {advice}"
    else:
        leaf, advice = diagnose(field, leaves, items[0])
        if leaf is None and "can't allocate memory" in str(cause):
            advice += "; there is no memory for their batch, give fewer or smaller items"
        elif leaf is None and (device is not None or pin_memory):
            advice += f"; check device={device!r} and pin_memory={pin_memory!r}"
    item = None if leaf is None else items[leaf]
    message = (
        f"{where(modality, name, item)} ({field}): {advice} (the reference raised {_said(cause)})"
    )
    return _class_for(cause)(message, modality=modality, field=name, item=item)


def _target_advice(cause: Exception, field: object, device: Any, pin_memory: Any) -> str:
    """What to do if the device or pinned memory is to blame: if plain tensors fail as well."""
    keep_on_cpu = getattr(field, "keep_on_cpu", False)
    if not isinstance(keep_on_cpu, bool):
        return f"keep_on_cpu is {describe(keep_on_cpu)}, expected a bool"
    if device is None and pin_memory is False:
        return ""
    probe = Flat(keep_on_cpu=keep_on_cpu)

    def fails(pin_memory: Any) -> bool:
        try:
            plain = [torch.empty(0, device="cpu")] * 2
            reference.reduce(probe, plain, device=device, pin_memory=pin_memory)
        except Exception as error:
            return _said(error) == _said(cause)
        return False

    if fails(False):
        return f"torch can't use device={device!r} here; pass one that it can, or None"
    if fails(pin_memory):
        return (
            f"torch can't use pin_memory={pin_memory!r} here; pass False, or True where torch has"
            " an accelerator"
        )
    return ""


def _said(error: Exception) -> str:
    # torch lists every backend when one lacks an operator.
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def _class_for(cause: Exception) -> type[MMCollateError]:
    fitting = (raised for caught, raised in _BY_CAUSE if isinstance(cause, caught))
    return next(fitting, CollateRuntimeError)


def incomparable(
    cause: Exception,
    *,
    modality: str | None,
    name: str,
    left: Any,
    right: Any,
    before: int,
    at: int,
) -> MMCollateError:
    """The error to raise for two neighbours' shared values whose comparison raised ``cause``.

    Args:
        cause: What the comparison raised.
        modality: Named in the message.
        name: The field's name.
        left: The first item's value.
        right: The second item's value.
        before: Index of the first item.
        at: Index of the second item.
    """
    message = (
        f"{where(modality, name, at)}: found {describe(right)}, which can't be compared with item"
        f" {before}'s {describe(left)}; give shared values as dense tensors on one device, lists of"
        f" such, or what == compares (comparing raised {_said(cause)})"
    )
    return _class_for(cause)(message, modality=modality, field=name, item=at)


def unknown_kind(modality: str | None, name: str, field: object) -> CollateTypeError:
    """A field whose declaration is none of the three kinds."""
    kinds = ", ".join(kind.__name__ for kind in (Batched, Flat, Shared))
    hints = [f"; use {kind.__name__}()" for kind in (Batched, Flat, Shared) if field is kind]
    return CollateTypeError(
        f"{where(modality, name)}: declared as {_shown(field)}; expected one of {kinds}"
        f" from mmcollate, such as Batched(keep_on_cpu=True){''.join(hints)}",
        modality=modality,
        field=name,
    )


def _shown(value: object) -> str:
    try:
        return repr(value)[:200]
    except Exception:  # the value's own code
        return describe(value)


def unreadable(what: str, value: object, index: int, name: object, context: Any) -> MMCollateError:
    """An item that can't be read; called by the core, which raises what this returns."""
    modality, index = context.modality, context.item(index)
    if what == "unknown_field":
        return undeclared_field(modality, name, value, index)
    return no_item(modality, value, index, "a mapping from field name to value")


def no_fields(modality: str | None, fields: object) -> CollateTypeError:
    """Something else in the place of the fields."""
    return CollateTypeError(
        f"{where(modality, None)}: fields are {type(fields).__name__}, expected a mapping from"
        " field name to Batched, Flat or Shared",
        modality=modality,
    )


def no_item(modality: str | None, value: object, index: int, expected: str) -> CollateTypeError:
    """Something else in the place of an item."""
    advice = f"{_why_missing(value)}{_DO_WITHOUT if value is OMITTED else ''}"
    return CollateTypeError(
        f"{where(modality, None, index)}: found {describe(value)}, expected {expected}{advice}",
        modality=modality,
        item=index,
        omitted=value is OMITTED,
    )


_DO_WITHOUT = "; collate() the others with missing='omit' or 'split'"


def omitted_value(modality: str | None, name: Any, index: int | None) -> CollateTypeError:
    """A value that was left out on purpose, where all are needed."""
    return CollateTypeError(
        f"{where(modality, name, index)}: found OMITTED, expected a value; {_LEFT_OUT}"
        f"{_DO_WITHOUT}",
        modality=modality,
        field=name,
        item=index,
        omitted=True,
    )


def omitted_within(modality: str | None, name: Any, index: int | None) -> CollateTypeError:
    """A marker within a value, which stands for no value."""
    return CollateTypeError(
        f"{where(modality, name, index)}: found OMITTED within a value; put OMITTED in the"
        " place of the whole value, and collate() with missing='omit' or 'split'",
        modality=modality,
        field=name,
        item=index,
        omitted=True,
    )


def lacks(
    modality: str | None, index: int, values: Mapping[str, Any], absent: object
) -> CollateKeyError:
    """An item is without fields that are required.

    Args:
        modality: Named in the message.
        index: The item's.
        values: What is there instead of each: ``OMITTED``, ``None``, or ``absent``.
        absent: Stands for a field that the item does not have.
    """
    names = list(values)
    said = {OMITTED: "OMITTED: left out on purpose", None: "None: lost", absent: "no such field"}
    each = ", ".join(f"{name!r} ({said[value]})" for name, value in values.items())
    return CollateKeyError(
        f"{where(modality, None, index)}: lacks {each}, which is required; give the item with its"
        " payload, or keep it out of this batch",
        modality=modality,
        field=names[0],
        item=index,
        missing=names,
        omitted=all(value is OMITTED for value in values.values()),
    )


def undeclared_field(
    modality: str | None, name: Any, value: object, index: int | None
) -> CollateKeyError:
    """An item has a field that nothing is said about."""
    return CollateKeyError(
        f"{where(modality, name, index)}: {describe(value)} is not declared;"
        f" add {name!r} to the fields, or leave it out of the item",
        modality=modality,
        field=name,
        item=index,
    )


_SEVERAL = "use collate_groups() for items that form several batches"


def unlike_names(
    left: Mapping[str, Any],
    right: Mapping[str, Any],
    before: int,
    at: int,
    fields: Mapping[str, Field],
    modality: str | None,
) -> CollateKeyError:
    """Items ``before`` and ``at`` can't be in one batch, since their names differ."""
    missing = [name for name in left if name not in right]
    extra = [name for name in right if name not in left]
    undeclared = [name for name in extra if name not in fields]
    if undeclared:
        return undeclared_field(modality, undeclared[0], right[undeclared[0]], at)
    lacks = f" lacks {missing}" if missing else ""
    has = f" has {extra} besides" if extra else ""
    name = (missing or extra)[0]
    return CollateKeyError(
        f"{where(modality, name, at)}: item {at}{lacks}{' and' * bool(lacks and has)}{has},"
        f" unlike item {before}; {_SEVERAL}",
        modality=modality,
        field=name,
        item=at,
    )


def not_gathered(
    modality: str | None, name: str, index: int, found: object, *, is_address: bool
) -> CollateKeyError:
    """A feature has no value of a field that all must have.

    Args:
        modality: Named in the message.
        name: The field's.
        index: The feature's.
        found: What is there instead: no payload, a payload without the field, or no value.
        is_address: Whether the payload lies in shared memory.
    """
    if is_address:
        why = "the payload lies in shared memory; fetch it first"
    elif isinstance(found, Mapping):
        why = f"the feature has {list(found)}; strip with positions_needed=True to keep metadata"
    else:
        why = f"found {describe(found)}; gather before what is covered is stripped"
    return CollateKeyError(
        f"{where(modality, name, index)}: no value; {why}",
        modality=modality,
        field=name,
        item=index,
        missing=(name,),
        omitted=found is OMITTED,
    )


def unlike(modality: str | None, before: int, at: int) -> CollateValueError:
    """Two of vLLM's items can't be in one batch."""
    return CollateValueError(
        f"{where(modality, None, at)}: does not form one batch with item {before}; use"
        " collate_groups()",
        modality=modality,
        item=at,
    )


def unlike_values(
    name: str, left: object, right: object, before: int, at: int, modality: str | None
) -> CollateValueError:
    """Items ``before`` and ``at`` can't be in one batch, since these shared values differ."""
    return CollateValueError(
        f"{where(modality, name, at)}: the shared value, {describe(right)}, is not equal to"
        f" item {before}'s, {describe(left)}; {_SEVERAL}",
        modality=modality,
        field=name,
        item=at,
    )


def changed(modality: str | None, first: int, last: int) -> CollateValueError:
    """One of these items gave something else when it was read again."""
    return CollateValueError(
        f"{where(modality, None)}: one of the items {first} to {last} changed while it was read;"
        " give items whose names and values stay the same",
        modality=modality,
    )


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception that passes through, where Python has them (3.11 on)."""
    with contextlib.suppress(Exception):  # the note must never take the exception's place
        if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def note_missing(error: BaseException, items: Sequence[Any], start: int = 0) -> None:
    """Adds a note that names the first item from ``start`` on that is not there, if there is one,
    to an exception that passes through."""
    for index, item in enumerate(items[start:], start):
        if item is None or item is OMITTED:
            why = _why_missing(item).removeprefix("; ")
            add_note(error, f"mmcollate: {where(None, None, index)}: found {describe(item)}; {why}")
            return

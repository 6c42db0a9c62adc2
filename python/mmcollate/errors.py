"""What goes wrong, said so that it can be mended: modality, field, item, shape, dtype, advice."""

from collections.abc import Sequence
from typing import Any

import torch

from mmcollate import reference
from mmcollate.fields import Batched, Field, Flat, Shared


class MMCollateError(Exception):
    """Base of all errors raised here. Each is also the built-in that fits (``TypeError`` …)."""

    def __init__(
        self,
        message: str = "",
        *,
        modality: str | None = None,
        field: str | None = None,
        item: int | None = None,
    ) -> None:
        super().__init__(message)
        self.modality = modality
        """The modality that the caller named, if any."""
        self.field = field
        """Name of the field, if the error concerns one."""
        self.item = item
        """Index of the item, if the error concerns one."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CollateTypeError(MMCollateError, TypeError):
    """Something is of a type that can't be collated."""


class CollateValueError(MMCollateError, ValueError):
    """Values that don't fit together."""


class CollateKeyError(MMCollateError, KeyError):
    """A field is missing, or not declared."""


class CollateIndexError(MMCollateError, IndexError):
    """A dimension that a tensor does not have."""


class CollateRuntimeError(MMCollateError, RuntimeError):
    """torch refused an operation."""


class VerificationError(MMCollateError, AssertionError):
    """With ``MMCOLLATE_VERIFY=1``: mmcollate and vLLM disagree about a batch. A bug here."""


_BY_CAUSE: tuple[tuple[type[Exception], type[MMCollateError]], ...] = (
    (KeyError, CollateKeyError),
    (IndexError, CollateIndexError),
    (TypeError, CollateTypeError),
    (ValueError, CollateValueError),
    (AssertionError, CollateValueError),
)


def describe(value: object) -> str:
    """A value in a few words: ``float32 (3, 4)``, ``list of 2``, ``NoneType``."""
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


def diagnose(concat_dim: object, leaves: Sequence[Any]) -> tuple[int | None, str]:
    """The item that most likely made the reference raise, and what to do about it.

    Args:
        concat_dim: The dimension of a flat field; ``None`` for other kinds.
        leaves: The items' values.
    """
    try:
        found = _diagnose(concat_dim, leaves)
    except Exception:  # tensors so strange that they can't be asked; the cause says the rest
        found = None
    return found or (None, f"values are {', '.join(map(describe, leaves[:3]))}")


def _diagnose(concat_dim: object, leaves: Sequence[Any]) -> tuple[int, str] | None:
    first: Any = leaves[0] if leaves else None
    if concat_dim is not None and type(concat_dim) is not int:
        return 0, f"dim is {concat_dim!r}, expected an int"
    for i, leaf in enumerate(leaves):
        found = describe(leaf)
        if isinstance(leaf, torch.Tensor) != isinstance(first, torch.Tensor):
            return i, f"found {found} where item 0 has {describe(first)}; give all items one form"
        if not isinstance(leaf, torch.Tensor):
            if concat_dim is None:
                continue
            if not isinstance(leaf, (list, tuple)):
                return i, f"found {found}; a flat field takes tensors or lists"
            if concat_dim != 0:
                return i, f"found {found}; lists are joined with dim=0 only, not dim={concat_dim}"
            continue
        if leaf.device != first.device:
            return i, f"found {found}, item 0 is {describe(first)}; move them to one device first"
        if isinstance(concat_dim, int) and len(leaves) > 1:
            rank = leaf.dim()
            if rank != first.dim():
                return i, f"found {found}, expected {first.dim()} dimensions as item 0 has; reshape"
            if not -rank <= concat_dim < rank:
                return i, f"found {found}, which has no dimension {concat_dim}"
        if leaf.layout != first.layout or leaf.dtype != first.dtype:
            return i, f"found {found}, item 0 is {describe(first)}; cast them to one dtype"
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return i, f"found {describe(leaf)} that requires grad; detach it or use torch.no_grad()"
    return None


def of_field(
    cause: Exception,
    *,
    modality: str | None,
    name: str,
    field: object,
    leaves: Sequence[Any],
) -> MMCollateError:
    """The error to raise for a field whose reference raised ``cause``."""
    item, advice = diagnose(getattr(field, "dim", None), leaves)
    fitting = (raised for caught, raised in _BY_CAUSE if isinstance(cause, caught))
    raised = next(fitting, CollateRuntimeError)
    message = (
        f"{where(modality, name, item)} ({field}): {advice}"
        f" (the reference raised {type(cause).__name__}: {cause})"
    )
    return raised(message, modality=modality, field=name, item=item)


def unknown_kind(modality: str | None, name: str, field: object) -> CollateTypeError:
    """A field whose declaration is none of the three kinds."""
    kinds = ", ".join(kind.__name__ for kind in (Batched, Flat, Shared))
    return CollateTypeError(
        f"{where(modality, name)}: declared as {field!r}; expected one of {kinds}"
        " from mmcollate, such as Batched(keep_on_cpu=True)",
        modality=modality,
        field=name,
    )


def unreadable(what: str, value: object, index: int, name: object, modality: Any) -> MMCollateError:
    """An item that can't be read; called by the core, which raises what this returns."""
    if what == "unknown_field":
        return CollateKeyError(
            f"{where(modality, name, index)}: {describe(value)} is not declared;"
            f" add {name!r} to the fields, or leave it out of the item",
            modality=modality,
            field=str(name),
            item=index,
        )
    return CollateTypeError(
        f"{where(modality, None, index)}: found {describe(value)}, expected a mapping from field"
        " name to value",
        modality=modality,
        item=index,
    )


def not_one_batch(
    items: Sequence[Any], end: int, fields: dict[str, Field], modality: str | None
) -> MMCollateError:
    """Items ``end - 1`` and ``end`` can't be in one batch: says why."""
    left, right = items[end - 1], items[end]
    advice = "use collate_groups() for items that form several batches"
    missing, extra = left.keys() - right.keys(), right.keys() - left.keys()
    if missing or extra:
        lacks = f" lacks {sorted(missing)}" if missing else ""
        has = f" has {sorted(extra)} besides" if extra else ""
        name = sorted(missing or extra)[0]
        return CollateKeyError(
            f"{where(modality, name, end)}: item {end}{lacks}{' and' * bool(lacks and has)}{has},"
            f" unlike item {end - 1}; {advice}",
            modality=modality,
            field=name,
            item=end,
        )
    shared = [name for name in left if type(fields[name]) is Shared]
    name = next((name for name in shared if _unlike(left[name], right[name])), shared[0])
    return CollateValueError(
        f"{where(modality, name, end)}: the shared value, {describe(right[name])}, is not equal to"
        f" item {end - 1}'s; {advice}",
        modality=modality,
        field=name,
        item=end,
    )


def _unlike(left: Any, right: Any) -> bool:
    try:
        return not reference.values_equal(left, right)
    except Exception:  # a value that can't be compared is not the one that differed
        return False


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception that passes through, where Python has them (3.11 on)."""
    if hasattr(error, "add_note"):
        error.add_note(note)

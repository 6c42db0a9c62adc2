"""What goes wrong, said so that it can be mended: modality, field, item, shape, dtype, advice."""

import contextlib
from collections.abc import Callable, Sequence
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


def diagnose(field: object, leaves: Sequence[Any]) -> tuple[int | None, str]:
    """The leaf that most likely made the reference raise, and what to do about it.

    Args:
        field: The field; one with an attribute ``dim`` is flat.
        leaves: The items' values.

    Returns:
        The index of the leaf in ``leaves`` (``None`` if no one stands out), and a sentence.
    """
    try:
        found = _diagnose(field, leaves)
    except Exception:  # tensors so strange that they can't be asked; the cause says the rest
        found = None
    if found is not None:
        return found
    some = ", ".join(map(_described, leaves[:3]))
    return None, f"found {some}{', …' if len(leaves) > 3 else ''}"


def _described(value: object) -> str:
    try:
        return describe(value)
    except Exception:
        return type(value).__name__


def _diagnose(field: object, leaves: Sequence[Any]) -> tuple[int, str] | None:
    first: Any = leaves[0]
    flat = hasattr(field, "dim")
    dim: Any = getattr(field, "dim", None)
    if flat and type(dim) is not int:
        return 0, f"dim is {dim!r}, expected an int"
    checks = [_form(first, flat, dim), _place(first), _plainness(first)]
    if flat and isinstance(first, torch.Tensor) and len(leaves) > 1:
        checks.append(_dimensions(first, dim))
    checks.append(_dtype(first))
    for check in checks:
        for i, leaf in enumerate(leaves):
            problem = check(leaf)
            if problem:
                return i, f"found {describe(leaf)}{problem}"
    return None


_Check = Callable[[Any], str]


def _form(first: Any, flat: bool, dim: Any) -> _Check:
    def check(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor) != isinstance(first, torch.Tensor):
            return f" where item 0 has {describe(first)}; give all items one form"
        if isinstance(leaf, torch.Tensor) or not flat:
            return ""
        if not isinstance(leaf, (list, tuple)):
            return "; a flat field takes tensors or lists"
        return f"; lists are joined with dim=0 only, not dim={dim}" if dim != 0 else ""

    return check


def _place(first: Any) -> _Check:
    def check(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor) and leaf.device != first.device:
            return f", item 0 is {describe(first)}; move them to one device first"
        return ""

    return check


def _plainness(first: Any) -> _Check:
    def check(leaf: Any) -> str:
        if not isinstance(leaf, torch.Tensor):
            return ""
        if leaf.is_nested:
            return ", a nested tensor; pad it, or give each part as an item"
        if leaf.layout is not torch.strided:
            return "; make it dense with to_dense()"
        if leaf.is_quantized:
            return ", quantized; make it plain with dequantize()"
        if type(leaf) is not type(first):
            return f", item 0 is {describe(first)}; give all items one type of tensor"
        return ""

    return check


def _dimensions(first: torch.Tensor, dim: int) -> _Check:
    def check(leaf: Any) -> str:
        rank = leaf.dim()
        if rank != first.dim():
            return f", expected {first.dim()} dimensions as item 0 has; reshape"
        return "" if -rank <= dim < rank else f", which has no dimension {dim}"

    return check


def _dtype(first: Any) -> _Check:
    def check(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor) and leaf.dtype != first.dtype:
            return f", item 0 is {describe(first)}; cast them to one dtype"
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return " that requires grad; detach it or use torch.no_grad()"
        return ""

    return check


def of_field(
    cause: Exception,
    *,
    modality: str | None,
    name: str,
    field: object,
    leaves: Sequence[Any],
    start: int = 0,
    target: tuple[Any, Any] = (None, False),
) -> MMCollateError:
    """The error to raise for a field whose reference raised ``cause``.

    Args:
        cause: What the reference raised.
        modality: Named in the message.
        name: The field's name.
        field: The field.
        leaves: The items' values.
        start: Index of the item that the first leaf belongs to.
        target: The call's ``device`` and ``pin_memory``.
    """
    leaf, advice = diagnose(field, leaves)
    item = None if leaf is None else start + leaf
    device, pin_memory = target
    if leaf is None and (device is not None or pin_memory):
        advice += f"; check device={device!r} and pin_memory={pin_memory!r}"
    fitting = (raised for caught, raised in _BY_CAUSE if isinstance(cause, caught))
    raised = next(fitting, CollateRuntimeError)
    # torch lists every backend when one lacks an operator.
    said = (str(cause).splitlines() or [""])[0][:300]
    message = (
        f"{where(modality, name, item)} ({field}): {advice}"
        f" (the reference raised {type(cause).__name__}: {said})"
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


def unreadable(what: str, value: object, index: int, name: object, context: Any) -> MMCollateError:
    """An item that can't be read; called by the core, which raises what this returns."""
    modality = context.modality
    if what == "unknown_field":
        return undeclared_field(modality, name, value, index)
    return CollateTypeError(
        f"{where(modality, None, index)}: found {describe(value)}, expected a mapping from field"
        " name to value",
        modality=modality,
        item=index,
    )


def undeclared_field(
    modality: str | None, name: object, value: object, index: int
) -> CollateKeyError:
    """An item has a field that nothing is said about."""
    return CollateKeyError(
        f"{where(modality, name, index)}: {describe(value)} is not declared;"
        f" add {name!r} to the fields, or leave it out of the item",
        modality=modality,
        field=str(name),
        item=index,
    )


def not_one_batch(
    items: Sequence[Any], end: int, fields: dict[str, Field], modality: str | None
) -> MMCollateError:
    """Items ``end - 1`` and ``end`` can't be in one batch: says why."""
    left, right = items[end - 1], items[end]
    advice = "use collate_groups() for items that form several batches"
    missing = [name for name in left if name not in right]
    extra = [name for name in right if name not in left]
    undeclared = [name for name in extra if name not in fields]
    if undeclared:
        return undeclared_field(modality, undeclared[0], right[undeclared[0]], end)
    if missing or extra:
        lacks = f" lacks {missing}" if missing else ""
        has = f" has {extra} besides" if extra else ""
        name = (missing or extra)[0]
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
    with contextlib.suppress(Exception):  # the note must never take the exception's place
        if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):
            error.add_note(note)

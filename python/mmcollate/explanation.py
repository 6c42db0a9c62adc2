"""explain(): what a collation would do, and why, before it is done."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from mmcollate import collation
from mmcollate.collation import Device, Item
from mmcollate.fields import Field

REASONS = {
    "device_target": "torch copies it to the device",
    "small": "one or two small tensors, which torch copies as well",
    "pinned_leaf": "in pinned memory already, from where torch copies it",
    "no_slot": "every slot of the arena is in use",
    "capturing": "the stream is capturing",
    "changed": "a leaf was changed meanwhile",
    "pinned": "the result is asked for in pinned memory",
    "pin_memory_type": "pin_memory is no bool",
    "item_class": "an item of an unknown class",
    "field_class": "a declaration of no known kind, or whose keep_on_cpu is no bool",
    "mixed_kinds": "items declare different kinds",
    "mixed_leaves": "tensors and other values in one field",
    "not_a_tensor": "values that are neither plain tensors nor plain scalars",
    "nested": "lists of tensors that may have to move, or of unknown values",
    "not_on_cpu": "a tensor on another device",
    "no_plain_data": "sparse, quantized, meta or otherwise without plain data",
    "dtype": "an element type that the core leaves to torch",
    "mixed_dtypes": "different dtypes, which torch casts to the first",
    "requires_grad": "a gradient is asked for",
    "negated": "a lazily negated tensor",
    "expanded": "an expanded tensor (stride 0)",
    "rank_mismatch": "different numbers of dimensions",
    "dim": "a concat dimension that is out of range, no int, or not 0 for lists",
    "too_large": "sizes beyond 64 bits",
    "no_memory": "no memory for the batch",
    "side_by_side": "leaves side by side in several storages, or that a view would not stand for",
    "torch_mode": "a torch mode wants to see the operations",
}
"""What each reason in ``stats()["reference_reasons"]`` means."""


@dataclass(frozen=True)
class FieldPlan:
    """What becomes of one field of one group."""

    name: Any
    """As the items have it; a string as a rule."""
    placement: str
    """``cpu`` (kept there) or ``device`` (bound for the device, if one is given)."""
    way: str
    """``alias`` (the same object), ``view``, ``list`` (of the same objects), ``gather`` (fresh
    memory, written by the core), ``stage`` (gathered into pinned memory and copied to the device
    with the others) or ``reference`` (computed by torch)."""
    nbytes: int
    """Bytes of the values' elements, as their shapes say; 0 for values that have no such size."""
    copied: int
    """Bytes that the core writes."""
    buffer: int | None
    """Which buffer of the core a gathered field goes to: small kept fields of a batch share one.
    ``None`` if torch allocates it, as it does where tensors are not read through the exchange
    table."""
    offset: int | None
    """Where it starts there, in bytes."""
    why: str


@dataclass(frozen=True)
class GroupPlan:
    """What becomes of one group."""

    modality: str | None
    num_items: int
    fields: tuple[FieldPlan, ...]


@dataclass(frozen=True)
class Plan:
    """What :func:`explain` returns; printed as a table."""

    groups: tuple[GroupPlan, ...]

    def __str__(self) -> str:
        rows = [("items", "field", "placement", "way", "bytes", "copied", "why")]
        for group in self.groups:
            items = str(group.num_items) + (f" {group.modality}" if group.modality else "")
            for field in group.fields:
                columns = (str(field.name), field.placement, field.way, f"{field.nbytes:,}")
                rows.append((items, *columns, f"{field.copied:,}", field.why))
                items = ""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [
                cell.rjust(width) if k in (4, 5) else cell.ljust(width)
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def explain(
    items: Sequence[Item],
    fields: Mapping[str, Field] | None = None,
    *,
    modalities: Sequence[str] | None = None,
    device: Device = None,
    pin_memory: bool = False,
    file: TextIO | None = None,
) -> Plan:
    """Prints and returns what :func:`mmcollate.collate_groups` would do with the same arguments.

    Nothing is copied and no batch is made.

    Args:
        items: As for :func:`mmcollate.collate`.
        fields: As for :func:`mmcollate.collate`.
        modalities: As for :func:`mmcollate.collate_groups`.
        device: As for :func:`mmcollate.collate`.
        pin_memory: As for :func:`mmcollate.collate`.
        file: Where to print; standard output if ``None``.

    Raises:
        MMCollateError: The items can't be read, as for :func:`mmcollate.collate`. What only
            computing a field would find is not found here.
    """
    groups = []
    for modality, group, rows in collation.explained_groups(
        items, fields, modalities, device, pin_memory
    ):
        if rows is None:
            planned = [FieldPlan("(all)", "", "reference", 0, 0, None, None, REASONS["item_class"])]
        else:
            planned = [_field_plan(group, fields, *row) for row in rows]
        groups.append(GroupPlan(modality, len(group), tuple(planned)))
    plan = Plan(tuple(groups))
    print(plan, file=file or sys.stdout)
    return plan


def _field_plan(
    group: Sequence[Any],
    fields: Mapping[str, Field] | None,
    name: Any,
    placement: str,
    way: str,
    copied: int,
    buffer: int | None,
    offset: int | None,
    reason: str,
) -> FieldPlan:
    values = [item[name] if fields is not None else item[name].data for item in group]
    field = fields[name] if fields is not None else group[0][name].field
    kind = type(field).__name__.removeprefix("MultiModal").removesuffix("Field").lower()
    shared = kind == "shared"
    nbytes = sum(_nbytes(value) for value in (values[:1] if shared else values))
    tensors = all(hasattr(value, "shape") for value in values)
    why = _why(kind, way, len(group), tensors, reason)
    return FieldPlan(name, placement, way, nbytes, copied, buffer, offset, why)


def _why(kind: str, way: str, count: int, tensors: bool, reason: str) -> str:
    if way == "reference":
        return REASONS[reason]
    if way == "alias":
        return "shared: the first item's" if kind == "shared" else f"{kind}, one item: its own"
    if way == "stage":
        return f"{kind}: gathered, and copied with the others"
    if way == "view":
        if count > 1:
            return f"{kind}: {count} items that lie side by side in one tensor"
        return f"{kind}, one item: its own, with a first dimension"
    if way == "list":
        if kind == "flat":
            return "flat: lists joined"
        return "batched: no common shape" if tensors else "batched: not tensors alone"
    return f"{kind}, {count} items of one dtype"


def _nbytes(value: Any, depth: int = 0) -> int:
    try:
        if type(value) in (list, tuple):
            # A list may hold itself.
            return 0 if depth == 16 else sum(_nbytes(inner, depth + 1) for inner in value)
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        return int(getattr(value, "nbytes", 0))
    except Exception:  # ragged nested tensors, subclasses that refuse
        return 0

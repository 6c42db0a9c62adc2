"""The same semantics in plain torch: oracle of the tests, and fallback at run time.

The rules are those of vLLM 0.32's ``vllm/multimodal/inputs.py`` (``reduce_data`` of its field
classes) and ``utils.py`` (``group_and_batch_mm_items``):
https://github.com/vllm-project/vllm/tree/v0.32.0/vllm/multimodal. Exceptions are torch's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from mmcollate.fields import Batched, Field, Flat, Shared


def collate(
    items: Sequence[Mapping[str, Any]],
    fields: Mapping[str, Field],
    *,
    device: Any = None,
    pin_memory: bool = False,
) -> dict[str, Any]:
    """All items as one batch; see :func:`mmcollate.collate`.

    Raises:
        ValueError: The items do not form one batch.
    """
    batches = [b for _, b in collate_groups(items, fields, device=device, pin_memory=pin_memory)]
    if len(batches) > 1:
        raise ValueError(f"the items form {len(batches)} batches, not one")
    return batches[0] if batches else {}


def collate_groups(
    items: Sequence[Mapping[str, Any]],
    fields: Mapping[str, Field],
    *,
    device: Any = None,
    pin_memory: bool = False,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Consecutive items that can be batched together, as ``(num_items, batch)``; lazily."""
    for start, end in group_bounds(items, fields):
        group = items[start:end]
        yield (
            end - start,
            {
                name: reduce(
                    fields[name],
                    [item[name] for item in group],
                    device=device,
                    pin_memory=pin_memory,
                )
                for name in group[0]
            },
        )


def group_bounds(
    items: Sequence[Mapping[str, Any]], fields: Mapping[str, Field]
) -> Iterator[tuple[int, int]]:
    """Start and end of each group, lazily."""
    start = 0
    for end, (left, right) in enumerate(pairwise(items), 1):
        if not can_batch(left, right, fields):
            yield start, end
            start = end
    if items:
        yield start, len(items)


def can_batch(
    left: Mapping[str, Any], right: Mapping[str, Any], fields: Mapping[str, Field]
) -> bool:
    """Whether two neighbours belong to one group: the same names, and equal shared values."""
    if left.keys() != right.keys():
        return False
    return all(
        values_equal(left[name], right[name])
        for name in left
        if isinstance(fields.get(name), Shared)
    )


def values_equal(left: Any, right: Any) -> bool:
    """Equality of shared values: tensors by dtype, shape and values (a NaN equals nothing); lists
    and tuples element by element; everything else by ``==``."""
    for kind in (torch.Tensor, list, tuple):
        if isinstance(left, kind) != isinstance(right, kind):
            return False
        if isinstance(left, kind):
            break
    else:
        return bool(left == right)
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    return len(left) == len(right) and all(map(values_equal, left, right))


def reduce(
    field: Field, leaves: Sequence[Any], *, device: Any = None, pin_memory: bool = False
) -> Any:
    """The batch of one field.

    Args:
        field: A batched, flat or shared field.
        leaves: The items' values, one for each item; at least one.
        device: Where the tensors go, copied without blocking; ``None`` leaves them where they are.
            A field that is kept on the CPU goes there instead.
        pin_memory: Whether the host side of such a copy is pinned.

    Returns:
        A fresh tensor or list, but for: one tensor (a view of it if batched, itself if flat), a
        shared field (the first item's value), tensors in lists (the same objects if they are on
        the device already).
    """
    if device is not None and field.keep_on_cpu:
        device = "cpu"
    if field.keep_on_cpu or device == "cpu" or device == torch.device("cpu"):
        pin_memory = False
    batch = list(leaves)
    if pin_memory and any(isinstance(x, torch.Tensor) and not x.is_cpu for x in iter_leaves(batch)):
        pin_memory = False
    batch = _REDUCERS[type(field)](field, batch, pin_memory)
    return (
        batch if device is None else map_leaves(lambda x: _to_device(x, device, pin_memory), batch)
    )


def _batched(field: Batched, batch: list[Any], pin_memory: bool) -> Any:
    if not batch or not all(isinstance(x, torch.Tensor) for x in batch):
        return batch
    if len(batch) == 1:
        return batch[0].unsqueeze(0)
    shape = batch[0].shape
    if any(x.shape != shape for x in batch):
        return batch
    return torch.stack(batch, out=batch[0].new_empty((len(batch), *shape), pin_memory=pin_memory))


def _flat(field: Flat, batch: list[Any], pin_memory: bool) -> Any:
    if not batch or not all(isinstance(x, torch.Tensor) for x in batch):
        if field.dim != 0:
            raise AssertionError("dim == 0 is required for nested list")
        return [inner for x in batch for inner in x]
    if len(batch) == 1:
        return batch[0]
    first, rank = batch[0], batch[0].dim()
    if not -rank <= field.dim < rank:
        raise IndexError(f"dim {field.dim} is out of range for tensors of {rank} dimensions")
    dim = field.dim % rank
    around = [(x.shape[:dim], x.shape[dim + 1 :]) for x in batch]
    joined = sum(x.shape[dim] for x in batch)
    if all(x == around[0] for x in around):
        sizes = (*first.shape[:dim], joined, *first.shape[dim + 1 :])
        out = first.new_empty(sizes, pin_memory=pin_memory)
        return torch.concat(batch, dim=field.dim, out=out)
    sizes = tuple(
        joined if d == dim else max(x.shape[d] for x in batch) for d in range(first.dim())
    )
    out, offset = first.new_zeros(sizes, pin_memory=pin_memory), 0
    for x in batch:
        place = [slice(0, x.shape[d]) for d in range(first.dim())]
        place[dim] = slice(offset, offset + x.shape[dim])
        out[tuple(place)] = x
        offset += x.shape[dim]
    return out


def _shared(field: Shared, batch: list[Any], pin_memory: bool) -> Any:
    return batch[0]


_REDUCERS: dict[type[Field], Callable[..., Any]] = {
    Batched: _batched,
    Flat: _flat,
    Shared: _shared,
}


def iter_leaves(value: Any) -> Iterator[Any]:
    """What a nest of dicts, lists and tuples holds, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from iter_leaves(inner)
    else:
        yield value


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nest of dicts, lists and tuples, with each leaf replaced by ``function(leaf)``."""
    if isinstance(value, dict):
        return {name: map_leaves(function, inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [map_leaves(function, inner) for inner in value]
    if isinstance(value, tuple):
        return tuple(map_leaves(function, inner) for inner in value)
    return function(value)


def _to_device(leaf: Any, device: Any, pin_memory: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if pin_memory and leaf.is_cpu and not (leaf.is_pinned() and _is_dense(leaf)):
        leaf = leaf.new_empty(leaf.shape, pin_memory=True).copy_(leaf)
    # A copy to the host that does not block is not there yet when it returns.
    to_host = torch.device(device).type == "cpu"
    return leaf.to(device=device, non_blocking=not to_host)


def _is_dense(leaf: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True

"""Tables that audits left where no audit looks: in caches of helpers, closures, default arguments.

They were made on the virtual device, and are plain tensors of the CPU between audits. The code that
keeps them still takes them for the device's, under a key such as ``cuda:0``: in the next audit they
are there again. What was computed from a batch is not: that went into somebody's hands.
"""

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mmcollate.audit.rules import Memory

Adopted = dict[int, tuple[Memory, torch.UntypedStorage]]
"""What is known of storages, by their address, which is theirs for as long as they live."""

_left: dict[int, tuple[Memory, StorageWeakRef]] = {}


def remember(storages: Iterable[tuple[Memory, torch.UntypedStorage]]) -> None:
    """Has what is known of storages recalled for as long as these are alive; what was remembered
    before is forgotten."""
    _left.clear()
    for memory, storage in storages:
        if memory.on_device and not memory.fields:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            _left[storage._cdata] = memory.copy(), reference


def recall() -> Adopted:
    """Of those that are alive."""
    found = ((memory, _alive(reference)) for memory, reference in _left.values())
    return {x._cdata: (memory, x) for memory, x in found if x is not None}


def _alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    if reference.expired():  # type: ignore[no-untyped-call]
        return None
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)

"""Counters of this process: what was collated, and what took the reference and why."""

from typing import TypedDict

from mmcollate import _core


class FieldCounts(TypedDict):
    """Fields collated, by the way they took."""

    alias: int
    """The item's own object: a flat field of one item, or a shared field."""
    view: int
    """A view of the only item's tensor, or of the one that all items are slices of."""
    list: int
    """A list of the items' objects."""
    gather: int
    """A fresh tensor, written by the core."""
    stage: int
    """Gathered into pinned memory and copied to a device with the others."""
    reference: int
    """Computed by the reference."""


class Stats(TypedDict):
    """What :func:`stats` returns. All are sums but ``detached_peak`` and ``warm_pool_bytes``."""

    batches: int
    items: int
    fields: FieldCounts
    reference_reasons: dict[str, int]
    """Fields that took the reference, by reason. ``item_class`` counts whole batches."""
    bytes_gathered: int
    detached_gathers: int
    """Gathers large enough to let other Python threads run meanwhile."""
    detached_peak: int
    """The most of these that ever ran at one time."""
    shared_pieces: int
    """Pieces (of 2 MiB) of large gathers that other threads wrote; see ``MMCOLLATE_THREADS``."""
    warm_pool_bytes: int
    """Memory of batches that are gone, which waits for the next; see ``MMCOLLATE_WARM_MAX_MB``."""


def stats() -> Stats:
    """The counters of this process since it started, or since :func:`reset_stats`; a copy."""
    return _core.stats()


def reset_stats() -> None:
    """Sets all counters to zero."""
    _core.reset_stats()

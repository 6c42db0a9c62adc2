"""What the batch of a field is: batched, flat or shared, and where it lives."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Field:
    """Base of the three kinds; not a kind itself."""

    keep_on_cpu: bool = False
    """Whether the batch stays on the CPU whatever device is asked for: metadata that only the
    host reads (grids, lengths, counts)."""
    outlives_batch: bool = False
    """Whether the batch may be kept when the others are gone: it then gets an allocation of its own
    on the device. Fields named ``*_embeds`` always do."""


@dataclass(frozen=True, kw_only=True)
class Batched(Field):
    """One element per item, stacked in a new first dimension.

    ``n`` tensors of shape ``(…)`` become one of shape ``(n, …)``. Tensors of different shapes, and
    elements that are no tensors, become a list of the same objects.
    """


@dataclass(frozen=True, kw_only=True)
class Flat(Field):
    """Elements joined end to end along ``dim``.

    Tensors are concatenated; where other dimensions differ, each is padded with zeros to the
    largest. Lists are joined into one list (``dim`` must be 0).
    """

    dim: int = 0
    """Dimension to join along; negative ones count from the end."""


@dataclass(frozen=True, kw_only=True)
class Shared(Field):
    """The same element for every item of a batch; the first item's object is the batch's."""

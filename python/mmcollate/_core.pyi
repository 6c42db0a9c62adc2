"""The Rust core. Private: call it through the package."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from mmcollate.stats import Stats

__all__ = [
    "COPY_UP_TO",
    "Arena",
    "Collator",
    "DevicePlan",
    "__version__",
    "reset_stats",
    "set_threads",
    "set_warm_max",
    "stats",
    "trim_warm",
]
__version__: str
COPY_UP_TO: int
"""Of a batch of up to this many bytes no view is made, though its leaves lie side by side."""

@final
class Collator:
    """Collates items of one form. Holds no data between calls."""

    @staticmethod
    def of_elements(
        *,
        item: type,
        element: type,
        batched: type,
        flat: type,
        shared: type,
        reduce: Callable[..., Any],
        can_batch: Callable[..., bool],
        only_device_contexts: Callable[[], bool],
        skip_table: bool = False,
        alias: bool = False,
        counted: bool = True,
    ) -> Collator:
        """Of items whose attribute `data` is a dict of elements with `data` and `field`."""

    @staticmethod
    def of_mappings(
        *,
        normalize: Callable[..., Any],
        report: Callable[..., BaseException],
        batched: type,
        flat: type,
        shared: type,
        reduce: Callable[..., Any],
        can_batch: Callable[..., bool],
        only_device_contexts: Callable[[], bool],
        skip_table: bool = False,
        counted: bool = True,
    ) -> Collator:
        """Of mappings from name to value."""

    def next_group(
        self,
        items: Sequence[Any],
        start: int,
        stop: int,
        fields: dict[str, Any] | None,
        device: Any,
        pin_memory: bool,
        context: Any,
        staging: bool,
    ) -> tuple[int, dict[str, Any] | None, DevicePlan | None]:
        """Collates the group that starts at `start`; it ends before `stop` at the latest.

        Returns the index after its last item, its batch (`None` if only the reference can make it),
        and with `staging` a plan of what is bound for the device: in the batch these fields are
        `None`."""

    def batch(
        self, items: Sequence[Any], device: Any, pin_memory: bool, staging: bool
    ) -> tuple[dict[str, Any] | None, DevicePlan | None]:
        """Collates all items into one batch, as they are; `None` if only the reference can."""

    def explain_group(
        self,
        items: Sequence[Any],
        start: int,
        stop: int,
        fields: dict[str, Any] | None,
        device: Any,
        pin_memory: bool,
        context: Any,
        staging: bool,
    ) -> tuple[
        int,
        list[tuple[Any, str, str, int, int | None, int | None, str]] | None,
        DevicePlan | None,
    ]:
        """What `next_group` would do, without doing it."""

    @property
    def has_exchange_table(self) -> bool:
        """Whether tensors are read through torch's exchange table."""

@final
class Arena:
    """Slots of one size: which is free, leased, or read by a device. See `rust/src/arena.rs`."""

    def __new__(cls, slot_bytes: int, cap: int) -> Arena: ...
    def lease(self) -> tuple[int, int] | None:
        """Takes a free slot, or says that there is none."""

    def grow(self) -> tuple[int, int] | None:
        """Takes a place for a new slot, if the cap has room; `settled` must follow."""

    def settled(self, taken: tuple[int, int], has_memory: bool) -> None:
        """Whether the place that grew has memory now: it is then leased, else given back."""

    def launch(self, taken: tuple[int, int]) -> None:
        """A device is about to read the slot."""

    def release(self, taken: tuple[int, int]) -> None:
        """Gives the slot back; one that was launched must have passed its fence."""

    def retire(self, taken: tuple[int, int]) -> None:
        """Takes a leased slot out of use: its memory may go."""

    def census(self) -> tuple[int, int, int, int]:
        """How many slots are growing, free, leased and in flight."""

    @property
    def slot_bytes(self) -> int: ...
    @property
    def capacity(self) -> int:
        """Most slots that there can be."""

@final
class DevicePlan:
    """The fields of one batch that go to a device."""

    @property
    def fields(self) -> list[tuple[Any, bool, int, bool]]:
        """For each field `(name, whether it is a list, bytes of the smallest load, whether each is
        of one leaf)`."""

    @property
    def totals(self) -> tuple[int, int]:
        """How many loads there are, and their bytes."""

    def first_leaves(self, field: int) -> list[torch.Tensor]:
        """The first leaf of each load of a field."""

    def lay_out(self, own: Sequence[bool | None]) -> list[tuple[int, int]]:
        """Lays the loads of some fields out: the ranges of the host buffer that are an allocation
        each."""

    def large_leaves(self, at_least: int) -> list[tuple[torch.Tensor, int, int, int, bool]]:
        """The leaves of at least so many bytes that lie in the layout as they are: `(leaf, its
        part, offset in the part, bytes, whether its load has no other)`."""

    def carve(
        self, field: int, buffers: list[torch.Tensor], sent: int, batch: dict[str, Any]
    ) -> bool:
        """Puts a field into the batch, as tensors in the buffers; `False` if some of it does not
        lie in the first `sent` bytes of the layout."""

    def gather(self, into: torch.Tensor, at: int, start: int, stop: int) -> bool:
        """Writes the bytes `start..stop` of the host buffer to `into`, from its byte `at` on."""

    def count(self, fields: int) -> None:
        """Counts so many fields as staged."""

    def reduce(self, field: int, reason: str) -> Any:
        """What the reference makes of one field."""

def stats() -> Stats:
    """Sums since the process started, or since `reset_stats`."""

def reset_stats() -> None:
    """All sums back to zero."""

def set_threads(threads: int) -> None:
    """How many threads may work on one copy from now on, the caller included."""

def set_warm_max(nbytes: int) -> None:
    """The most bytes that wait in the warm pool from now on; 0 turns it off."""

def trim_warm() -> int:
    """Gives the memory in the warm pool back; returns how many bytes."""

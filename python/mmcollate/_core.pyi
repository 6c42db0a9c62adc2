"""The Rust core. Private: call it through the package."""

from collections.abc import Callable, Sequence
from typing import Any, final

from mmcollate.stats import Stats

__all__ = ["Collator", "__version__", "reset_stats", "stats"]
__version__: str

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
    ) -> tuple[int, dict[str, Any] | None]:
        """Collates the group that starts at `start`; it ends before `stop` at the latest."""

    def batch(self, items: Sequence[Any], device: Any, pin_memory: bool) -> dict[str, Any] | None:
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
    ) -> tuple[int, list[tuple[str, str, str, int, int | None, int | None, str]] | None]:
        """What `next_group` would do, without doing it."""

    @property
    def has_exchange_table(self) -> bool:
        """Whether tensors are read through torch's exchange table."""

def stats() -> Stats:
    """Sums since the process started, or since `reset_stats`."""

def reset_stats() -> None:
    """All sums back to zero."""

"""Environment variables. Those of staging are read when a device is first used, the core's (the
warm pool, threads) at the first batch, the others whenever they are needed; none is set."""

import os

from mmcollate import _core


def is_set(name: str) -> bool:
    """Whether the variable says yes: anything but empty, 0, false, no or off."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def disabled() -> bool:
    """``MMCOLLATE_DISABLE``: the vLLM plugin stays off."""
    return is_set("MMCOLLATE_DISABLE")


def verify() -> bool:
    """``MMCOLLATE_VERIFY``: the vLLM plugin computes every batch both ways and compares."""
    return is_set("MMCOLLATE_VERIFY")


def debug() -> bool:
    """``MMCOLLATE_DEBUG``: slots of the arena are filled with a pattern while they are free, and
    checked when they are used again; slow. To be set before the first batch."""
    return is_set("MMCOLLATE_DEBUG")


def strict_pin() -> bool:
    """``MMCOLLATE_STRICT_PIN``: an error where memory can't be pinned, not a slower way."""
    return is_set("MMCOLLATE_STRICT_PIN")


def direct() -> bool:
    """``MMCOLLATE_DIRECT``: leaves in pinned memory are copied from there also where they are
    stacked or joined. Whoever wrote them must then leave them as they are until the copies have
    run, not only until ``collate()`` has returned."""
    return is_set("MMCOLLATE_DIRECT")


def no_alias() -> bool:
    """``MMCOLLATE_NO_ALIAS``: leaves that lie side by side in one tensor are copied like any
    others, and their batch is no view. To be set before the first batch."""
    return is_set("MMCOLLATE_NO_ALIAS")


def pinned_max() -> int:
    """``MMCOLLATE_PINNED_MAX_MB``: most memory, in bytes, that is pinned for each device; 64 MiB if
    unset, and never more than there is. Less than a page (4096 bytes) turns staging off."""
    cap = min(_mib("MMCOLLATE_PINNED_MAX_MB", 64), _physical())
    return cap if cap >= 4096 else 0


def staging_chunk() -> int:
    """``MMCOLLATE_STAGING_CHUNK_MB``: bytes of one slot, and so of one copy to the device; 4 MiB if
    unset."""
    return max(_mib("MMCOLLATE_STAGING_CHUNK_MB", 4), 4096)


def warm_max() -> int:
    """``MMCOLLATE_WARM_MAX_MB``: most memory of large batches that are gone, in bytes, that is kept
    for those to come; none if unset."""
    return _mib("MMCOLLATE_WARM_MAX_MB", 0)


def threads() -> int:
    """``MMCOLLATE_THREADS``: threads that may work on one large copy, the calling one included; 1
    if unset. Never more than the process may use at one time."""
    text = os.environ.get("MMCOLLATE_THREADS", "").strip()
    if not text:
        return 1
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 1024:
        raise ValueError(f"MMCOLLATE_THREADS is {text!r}, expected a number from 1 to 1024")
    return int(text)


def tell_core() -> None:
    """Gives the core what it is to know of all this.

    Raises:
        ValueError: A variable can't be read.
    """
    warm, most = warm_max(), threads()
    _core.set_warm_max(warm)
    _core.set_threads(most)


def _physical() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 1 << 62


def check() -> None:
    """Raises ``ValueError`` if a variable can't be read."""
    pinned_max()
    staging_chunk()
    warm_max()
    threads()


def _mib(name: str, default: float) -> int:
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
        if not 0 <= value < 2**40:
            raise ValueError
    except ValueError:
        raise ValueError(f"{name} is {text!r}, expected a number of MiB, 0 or more") from None
    return int(value * 2**20)


def skip_exchange_table() -> bool:
    """``MMCOLLATE_SKIP_EXCHANGE_TABLE``: read tensors through Python attributes."""
    return is_set("MMCOLLATE_SKIP_EXCHANGE_TABLE")

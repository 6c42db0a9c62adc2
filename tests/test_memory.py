"""Large results: where their memory comes from, where it goes, and what is kept of it."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mmcollate
import pytest
import torch
from mmcollate import (
    Batched,
    CollateRuntimeError,
    CollateValueError,
    Flat,
    _core,
    collate,
    collation,
    config,
    reference,
)
from mmcollate.bench import machine
from processes import addresses_and_memory, in_child, run_script

MIB = 1 << 20
LARGE = 32 * MIB
HUGE_PAGE = 2 * MIB

linux = pytest.mark.skipif(sys.platform != "linux", reason="mappings are Linux's alone")
own_mappings = pytest.mark.skipif(
    sys.platform != "linux" or machine.allocator() in machine.ALLOCATORS,
    reason="all memory is the allocator's",
)


@pytest.fixture(autouse=True)
def nothing_left_from_before() -> None:
    gc.collect()
    give_free_pages_back()


def give_free_pages_back() -> None:
    """Makes the heap cold: a large result would be put there while a free block has its pages.

    Items and masks that a test itself has dropped leave such blocks, too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def warm() -> Iterator[Callable[[int], None]]:
    """Sets the pool's cap, which the first batch would set too."""
    collation.collator()
    yield _core.set_warm_max
    gc.collect()
    _core.set_warm_max(0)
    assert pooled() == 0


def pooled() -> int:
    return mmcollate.stats()["warm_pool_bytes"]


def items_of(nbytes: int, value: int = 1) -> list[dict[str, torch.Tensor]]:
    """Two items whose batch has this many bytes."""
    half = nbytes // 2
    sizes = (half, nbytes - half)
    return [{"x": torch.full((size,), value, dtype=torch.uint8)} for size in sizes]


def large(nbytes: int, value: int = 1) -> torch.Tensor:
    """A batch that lies in a mapping, its own or the pool's."""
    items = items_of(nbytes, value)
    give_free_pages_back()
    out = collate(items, {"x": Flat()})["x"]
    assert isinstance(out, torch.Tensor)
    return out


def is_all(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


# Huge pages


@own_mappings
@pytest.mark.parametrize("nbytes", [LARGE, LARGE + 1, 40 * MIB + 12345, 47 * MIB - 1])
def test_a_large_result_uses_no_more_memory_than_it_has_bytes(nbytes):
    items = items_of(nbytes)
    assert is_all(large(nbytes), 1)
    before, resident = addresses_and_memory()
    out = collate(items, {"x": Flat()})["x"]
    after = addresses_and_memory()
    assert is_all(out, 1)
    assert out.data_ptr() % HUGE_PAGE == 0
    assert after[0] - before < nbytes + MIB
    assert nbytes - MIB < after[1] - resident < nbytes + MIB
    del out
    end = addresses_and_memory()
    assert end[0] - before < MIB
    assert end[1] - resident < MIB


@own_mappings
@pytest.mark.skipif(machine.huge_pages() in ("none", "never"), reason="no huge pages here")
def test_a_large_result_lies_on_huge_pages():
    out = large(40 * MIB + 12345)
    huge, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(address, 16) for address in found.groups())
            inside = start <= out.data_ptr() < end
        elif inside and line.startswith("AnonHugePages:"):
            huge = int(line.split()[1]) * 1024
    # A system whose memory is in pieces has fewer to give.
    assert 0 < huge <= 40 * MIB


@linux
def test_nothing_grows_with_the_number_of_batches():
    rng = random.Random(0)
    sizes = [rng.randrange(LARGE, 48 * MIB) for _ in range(60)]
    items = {size: items_of(size) for size in sizes[:4]}
    large(sizes[0])
    before = addresses_and_memory()
    for size in sizes[4:]:
        kept = [collate(items[chosen], {"x": Flat()})["x"] for chosen in sizes[:2]]
        del kept[size % 2]
    del kept
    after = addresses_and_memory()
    assert after[0] - before[0] < 16 * MIB
    assert after[1] - before[1] < 16 * MIB


@linux
def test_without_memory_the_reference_says_so():
    def check() -> None:
        # More than the C library could have in one piece from tests before.
        items = items_of(LARGE) * 16
        large(LARGE)
        limit = addresses_and_memory()[0] + 40 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        mmcollate.reset_stats()
        with pytest.raises(CollateRuntimeError, match="no memory for their batch"):
            collate(items, {"x": Flat()})
        assert mmcollate.stats()["reference_reasons"] == {"no_memory": 1}

    assert in_child(check) == 0


# The warm pool


def test_nothing_is_kept_unless_it_is_asked_for():
    large(LARGE)
    assert pooled() == 0
    assert mmcollate.trim() == 0


@own_mappings
def test_a_block_is_used_again_when_its_last_view_is_gone(warm):
    warm(100 * MIB)
    out = large(40 * MIB)
    address, view = out.data_ptr(), out[5:]
    del out
    assert pooled() == 0
    other = large(40 * MIB, 2)
    assert other.data_ptr() != address
    assert is_all(view, 1)
    del view
    assert pooled() == 40 * MIB
    again = large(38 * MIB, 3)
    assert (again.data_ptr(), pooled()) == (address, 0)
    assert is_all(again, 3)
    assert is_all(other, 2)
    del again, other
    # The larger block comes last, and the smaller has to go.
    large(70 * MIB)
    assert pooled() == 70 * MIB
    assert mmcollate.trim() == 70 * MIB
    assert pooled() == 0


@own_mappings
def test_the_pool_holds_no_more_than_its_cap(warm):
    warm(100 * MIB)
    kept = [large(size * MIB) for size in (40, 45, 50, 101)]
    before = addresses_and_memory()[1]
    while kept:
        del kept[0]
    assert pooled() == 95 * MIB
    freed = before - addresses_and_memory()[1]
    assert abs(freed - (40 + 101) * MIB) < 8 * MIB
    large(33 * MIB)
    assert pooled() == 83 * MIB
    warm(60 * MIB)
    assert pooled() == 33 * MIB


def padded(rows: int, fill: float) -> list[dict[str, torch.Tensor]]:
    shapes = ((rows, 900), (rows, 1024), (0, 5))
    return [{"x": torch.full(shape, fill)} for shape in shapes]


FIELDS = {
    "padded": (padded, Flat()),
    "padded, joined along the second dimension": (
        lambda n, fill: [{"x": torch.full(s, fill)} for s in ((n // 2, 1024), (n, 1024))],
        Flat(dim=1),
    ),
    "strided": (
        lambda n, fill: [{"x": torch.full((1024, n), fill).T} for _ in range(2)],
        Batched(),
    ),
    "rows": (lambda n, fill: [{"x": torch.full((n, 1024), fill)} for _ in range(2)], Batched()),
}


@own_mappings
@pytest.mark.parametrize("what", FIELDS)
def test_old_bytes_never_show(warm, what):
    make, field = FIELDS[what]
    rows = 5 * 1024
    expected = reference.collate(make(rows, 1.5), {"x": field})["x"]
    warm(100 * MIB)
    old = large(expected.nbytes + MIB, 0xA5)
    address = old.data_ptr()
    del old
    out = collate(make(rows, 1.5), {"x": field})["x"]
    assert out.data_ptr() == address
    assert torch.equal(out, expected)


@own_mappings
def test_threads_share_a_pool_and_no_bytes(warm):
    cap = 150 * MIB
    warm(cap)
    sources = {size: items_of(size) for size in range(LARGE, 40 * MIB, 3 * MIB + 7)}
    errors: list[str] = []
    addresses: set[int] = set()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[torch.Tensor, int]] = []
        for turn in range(10):
            out = collate(sources[rng.choice(list(sources))], {"x": Flat()})["x"]
            addresses.add(out.data_ptr())
            value = (16 * seed + turn) % 256
            out[::4096] = value
            held.append((out, value))
            if len(held) > 2:
                tensor, value = held.pop(rng.randrange(3))
                if not is_all(tensor[::4096], value) or not is_all(tensor[1:4096], 1):
                    errors.append("changed bytes")
                del tensor
            if pooled() > cap:
                errors.append("over the cap")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(addresses) < 80
    assert pooled() <= cap


@own_mappings
def test_a_signal_handler_may_collate_and_drop(warm):
    warm(100 * MIB)
    items, seen = items_of(LARGE), []
    kept = [large(LARGE, 2)]

    def handler(*_: Any) -> None:
        kept.clear()
        kept.append(collate(items, {"x": Flat()})["x"])
        seen.append(is_all(kept[0][::4096], 1))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.03)
    try:
        while len(seen) < 10:
            seen.append(is_all(collate(items, {"x": Flat()})["x"][::4096], 1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(seen)


@own_mappings
def test_a_forked_child_uses_its_copy_of_the_pool(warm):
    warm(100 * MIB)
    kept = large(40 * MIB, 1)
    large(45 * MIB, 2)

    def check() -> None:
        assert pooled() == 45 * MIB
        assert is_all(kept, 1)
        out = large(45 * MIB, 3)
        assert pooled() == 0
        assert is_all(out, 3)
        del out
        assert mmcollate.trim() == 45 * MIB

    assert in_child(check) == 0
    assert pooled() == 45 * MIB
    assert is_all(large(45 * MIB, 4), 4)
    assert is_all(kept, 1)


@own_mappings
def test_children_forked_while_threads_use_the_pool_do_not_hang(warm):
    warm(150 * MIB)
    items, stop = items_of(LARGE), threading.Event()

    def work() -> None:
        while not stop.is_set():
            collate(items, {"x": Flat()})

    def check() -> None:
        for value in range(3):
            assert is_all(large(LARGE, value)[::4096], value)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        ends = [in_child(check) for _ in range(10)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert ends == [0] * 10


@own_mappings
def test_the_pool_gives_way_where_memory_is_short(warm):
    warm(400 * MIB)
    items = items_of(20 * MIB) * 10
    large(300 * MIB)

    def check() -> None:
        limit = addresses_and_memory()[0] + 10 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        assert pooled() == 300 * MIB
        assert is_all(collate(items, {"x": Flat()})["x"][::4096], 1)
        assert pooled() == 200 * MIB

    assert in_child(check) == 0


# The setting


@own_mappings
@pytest.mark.parametrize(
    ("value", "kept", "of"),
    [
        ("", 0, "mappings"),
        ("0", 0, "mappings"),
        ("39.9", 0, "mappings"),
        ("40", 40, "mappings"),
        ("40", 40, "vLLM's items"),
    ],
)
def test_the_environment_sets_the_cap(monkeypatch, value, kept, of):
    if of == "mappings":
        made = collation.collator
    else:
        pytest.importorskip("vllm", reason="needs vLLM")
        made = importlib.import_module("mmcollate.integrations.vllm").collator
    monkeypatch.setenv("MMCOLLATE_WARM_MAX_MB", value)

    def check() -> None:
        collation.collator()
        made.cache_clear()
        made()
        large(40 * MIB)
        assert pooled() == kept * MIB

    assert in_child(check) == 0


@pytest.mark.parametrize("value", ["-1", "nan", "1e30", "1 GB"])
def test_a_cap_that_is_none_is_said(monkeypatch, value):
    monkeypatch.setenv("MMCOLLATE_WARM_MAX_MB", value)
    for read in (config.warm_max, config.check, collation.collator.__wrapped__):
        with pytest.raises(ValueError, match="MMCOLLATE_WARM_MAX_MB"):
            read()


@linux
def test_an_allocator_that_keeps_large_blocks_gets_them():
    library = machine.library_of("tcmalloc")
    if library is None:
        pytest.skip("needs tcmalloc")
    script = """
import torch, mmcollate
items = [{"x": torch.ones(20 << 20, dtype=torch.uint8)}] * 2
mmcollate.collate(items, {"x": mmcollate.Batched()})
print(mmcollate.stats()["bytes_gathered"] >> 20, mmcollate.stats()["warm_pool_bytes"])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "MMCOLLATE_WARM_MAX_MB": "100", "LD_PRELOAD": str(library)},
    )
    assert (done.returncode, done.stdout) == (0, "40 0\n"), done.stderr


def test_only_a_named_device_must_have_pinned_memory():
    with pytest.raises(CollateValueError, match="no such accelerator"):
        mmcollate.trim("cpu")


FREED_AND_TAKEN_AGAIN = """
import torch
from mmcollate import Flat, collate
leaf = torch.ones(5 << 19, dtype=torch.uint8)
# Freed, it makes the C library keep blocks of this size in the heap.
torch.ones(30 << 20, dtype=torch.uint8)
places = {collate([{"x": leaf}] * 2, {"x": Flat()})["x"].data_ptr() for _ in range(64)}
print(len(places))
"""


@own_mappings
def test_a_batch_takes_the_block_of_the_one_before():
    code, out, err = run_script(FREED_AND_TAKEN_AGAIN)
    assert (code, err) == (0, "")
    assert int(out) <= 4


WARM_HEAP = """
import torch
from mmcollate import Flat, collate
# Freed, these leave a large free block in the heap, with its pages.
blocks = [torch.ones(20 << 20, dtype=torch.uint8) for _ in range(6)]
del blocks
blocks = [torch.ones(20 << 20, dtype=torch.uint8) for _ in range(6)]
# One would do, above them, but may find a gap below.
last = [bytearray(100_000) for _ in range(200)]
del blocks
leaf = torch.ones(24 << 20, dtype=torch.uint8)
kept = [collate([{"x": leaf}] * 2, {"x": Flat()})["x"] for _ in range(4)]
print([kept[at].data_ptr() % (2 << 20) > 0 for at in (0, -1)])
"""


@own_mappings
def test_a_free_block_with_its_pages_is_used_and_then_mappings_again():
    # It is not taken for the heap of an allocator that keeps all of its blocks. Whether the C
    # library has such a block is up to where things lie in a process: in two of three it has.
    seen = []
    while len(seen) < 12 and "[True, False]\n" not in seen:
        code, out, err = run_script(WARM_HEAP)
        assert (code, err) == (0, "")
        seen.append(out)
    assert seen.pop() == "[True, False]\n"
    assert set(seen) <= {"[False, False]\n"}


LARGE_HOLE = """
import torch
from mmcollate import Flat, collate
leaf = torch.ones(40 << 20, dtype=torch.uint8)
torch.ones(30 << 20, dtype=torch.uint8)
blocks = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(60)]
last = torch.ones(1 << 20, dtype=torch.uint8)
del blocks
print([collate([{"x": leaf}] * 2, {"x": Flat()})["x"].data_ptr() % (2 << 20) for _ in range(2)])
"""


@own_mappings
def test_the_c_library_is_known_where_the_executable_takes_addresses_of_it():
    """Debian's Python lies at a fixed address, and ``malloc`` is found in it."""
    python = Path(f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
    if not python.exists() or python.read_bytes()[16:18] != b"\x02\x00":
        pytest.skip(f"needs a {python} that is linked to a fixed address")
    places = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [python, "-c", LARGE_HOLE],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": places},
    )
    assert (done.returncode, done.stdout) == (0, "[0, 0]\n"), done.stderr


@own_mappings
def test_a_free_block_without_its_pages_is_not_used():
    cold = WARM_HEAP.replace("leaf =", "import ctypes; ctypes.CDLL(None).malloc_trim(0)\nleaf =")
    assert run_script(cold) == (0, "[False, False]\n", "")

"""Identity is not content: no address, id or hash known from a call decides what a later one gives.

Each way to collate runs through situations in which a memory of earlier calls would be wrong: items
in recycled memory, items edited in place, threads, results that are held while others are made. The
same situations must then find planted caches out, one for each kind of shortcut.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")

from mmcollate import (
    Batched,
    Flat,
    Shared,
    _core,
    collate,
    collate_groups,
    collation,
    stage,
    stats,
    trim,
)
from mmcollate.bench import machine
from mmcollate.integrations import vllm as plugin
from mmcollate.testing import FakeDevice
from test_staging import arena_of_slots
from vllm_items import from_plain

FIELDS: dict[str, Any] = {
    "pixels": Flat(),
    "grid": Batched(keep_on_cpu=True),
    "ragged": Batched(),
    "token": Shared(keep_on_cpu=True),
}
# Leaves of this size are recycled at once; together they are more than a view is made for.
ROWS, WIDTH = 32, 512
Items = list[dict[str, Any]]
Batch = dict[str, Any]
Way = Callable[[Items], Batch]


def items_of(marks: list[int]) -> Items:
    """Items in which every byte tells the mark."""
    return [
        {
            "pixels": torch.full((ROWS, WIDTH), mark, dtype=torch.int32),
            "grid": torch.tensor([mark, mark]),
            "ragged": torch.full((at % 2 + 1,), mark),
            "token": torch.tensor(marks[0]),
        }
        for at, mark in enumerate(marks)
    ]


def slices_of(marks: list[int]) -> Items:
    """The same, with pixels that lie side by side in one tensor: the plugin makes a view of it."""
    whole = torch.cat([torch.full((ROWS, WIDTH), mark, dtype=torch.int32) for mark in marks])
    return [
        x | {"pixels": part} for x, part in zip(items_of(marks), whole.split(ROWS), strict=True)
    ]


def check(batch: Batch, marks: list[int]) -> None:
    """Raises :class:`Stale` unless the batch is of items with these marks, and of no others."""
    pixels = batch["pixels"].reshape(len(marks), -1)
    expected = torch.tensor(marks, dtype=torch.int32)[:, None].expand(pixels.shape)
    found = [int(x[0]) for x in batch["ragged"]]
    same = (
        torch.equal(pixels, expected)
        and batch["grid"].tolist() == [[mark, mark] for mark in marks]
        and found == marks
        and int(batch["token"]) == marks[0]
    )
    if not same:
        raise Stale(f"{batch['grid'].tolist()} and {found} of {marks}")


class Stale(AssertionError):
    """Content of another call."""


# The ways

_devices = threading.local()


def device() -> FakeDevice:
    """A device for each thread, whose arena all of its calls share."""
    if not hasattr(_devices, "one"):
        _devices.one = FakeDevice()
    return _devices.one


def on_device(items: Items) -> Batch:
    batch = collate(items, FIELDS, device=device(), pin_memory=True)
    device().synchronize()
    return batch


def staged(items: Items) -> Batch:
    batch = stage(items, FIELDS, device=device()).to()
    device().synchronize()
    return batch


def in_plugin_on_device(items: Items) -> Batch:
    options = {"device": device(), "pin_memory": True}
    [(_, batch)] = plugin.group_and_batch_mm_items(from_plain(items, FIELDS), **options)
    device().synchronize()
    return batch


def in_plugin(items: Items) -> Batch:
    [(_, batch)] = plugin.group_and_batch_mm_items(from_plain(items, FIELDS))
    return batch


WAYS: dict[str, Way] = {
    "collate": lambda items: collate(items, FIELDS),
    "collate_groups": lambda items: next(iter(collate_groups(items, FIELDS))).batch,
    "omit": lambda items: collate(items, FIELDS, missing="omit").batch,
    "plugin": in_plugin,
    "plugin, batch": lambda items: plugin.batch_mm_items(from_plain(items, FIELDS)),
    "device": on_device,
    "stage": staged,
    "plugin, device": in_plugin_on_device,
}


@pytest.fixture(autouse=True)
def small_arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Three slots, each smaller than a batch: every call uses them again.
    arena_of_slots(monkeypatch, 64 << 10, 3)
    _devices.__dict__.clear()
    yield
    _devices.__dict__.clear()


# The situations


def recycled_addresses(way: Way) -> None:
    """Items that are freed between calls, and others in their memory."""
    seen: set[tuple[Any, ...]] = set()
    recycled = 0
    # Where the allocator puts them is chance: as long as it takes.
    for step in range(2000):
        if step >= 60 and recycled > 10:
            break
        marks = [step * 3 % 180 + k + 1 for k in range(3)]
        items = items_of(marks)
        identity = tuple(x["pixels"].data_ptr() for x in items)
        recycled += identity in seen
        seen.add(identity)
        check(way(items), marks)
        del items
    assert recycled > 10, "the memory of items was not used again"


def recycled_objects(way: Way) -> None:
    """The same tensor objects, with other memory."""
    items = items_of([1, 2])
    for step in range(20):
        marks = [10 * step + 3, 10 * step + 4]
        for x, fresh in zip(items, items_of(marks), strict=True):
            for name in x:
                x[name].set_(fresh[name])
        check(way(items), marks)


def edits_in_place(way: Way) -> None:
    """The same items, with other content."""
    items = items_of([1, 2, 3])
    for step in range(20):
        marks = [step, step + 5, step + 9]
        for x, mark in zip(items, marks, strict=True):
            x["pixels"].fill_(mark)
            x["grid"].fill_(mark)
            x["ragged"].fill_(mark)
            x["token"].fill_(marks[0])
        check(way(items), marks)


def edits_that_torch_does_not_count(way: Way) -> None:
    """As ``edits_in_place``, through numpy: no tensor's version tells."""
    items = items_of([1, 2, 3])
    for step in range(20):
        marks = [step, step + 5, step + 9]
        for x, mark in zip(items, marks, strict=True):
            versions = [value._version for value in x.values()]
            for name in ("pixels", "grid", "ragged"):
                x[name].numpy()[...] = mark
            x["token"].numpy()[...] = marks[0]
            assert [value._version for value in x.values()] == versions
        check(way(items), marks)


def other_values_in_the_same_items(way: Way) -> None:
    """The same item objects, with other tensors in them."""
    items = items_of([1, 2])
    for step in range(20):
        marks = [step + 1, step + 30]
        for x, fresh in zip(items, items_of(marks), strict=True):
            x.update(fresh)
        check(way(items), marks)


def eight_threads(way: Way) -> None:
    """Threads whose payloads no other has; each looks at its last results again."""
    barrier = threading.Barrier(8)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            barrier.wait()
            held: list[tuple[Batch, list[int]]] = []
            for step in range(25):
                marks = [number * 10_000 + step * 10 + k for k in range(1 + step % 3)]
                make = slices_of if step % 2 else items_of
                held = [*held[-2:], (way(make(marks)), marks)]
                for batch, of in held:
                    check(batch, of)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def results_that_are_held(way: Way) -> None:
    """Results of earlier calls, after the items are gone and many more calls were made."""
    held = []
    for step in range(30):
        marks = [step * 3 + k for k in range(1 + step % 3)]
        items = (slices_of if step % 2 else items_of)(marks)
        held.append((way(items), marks))
        del items
        if step % 7 == 0:
            trim()
    for batch, marks in held:
        check(batch, marks)
    # The second half goes while the first is still held.
    del held[15:], batch
    for step in range(10):
        way(items_of([1000 + step] * 3))
    for batch, marks in held:
        check(batch, marks)


SITUATIONS = {
    situation.__name__: situation
    for situation in (
        recycled_addresses,
        recycled_objects,
        edits_in_place,
        edits_that_torch_does_not_count,
        other_values_in_the_same_items,
        eight_threads,
        results_that_are_held,
    )
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("way", WAYS)
def test_only_the_content_of_this_call_decides(way, situation):
    SITUATIONS[situation](WAYS[way])


def test_the_arena_and_the_views_were_used():
    """Guards the above: these are the memories that could be stale."""
    before = stats()["fields"]
    check(in_plugin(slices_of([1, 2, 3])), [1, 2, 3])
    assert stats()["fields"]["view"] == before["view"] + 1
    for way in (on_device, staged, in_plugin_on_device):
        before = stats()["fields"]
        check(way(items_of([1, 2, 3])), [1, 2, 3])
        assert stats()["fields"]["stage"] > before["stage"]
    assert device().copies > 3


@pytest.mark.skipif(
    sys.platform != "linux" or machine.allocator() in machine.ALLOCATORS,
    reason="all memory is the allocator's",
)
def test_warm_memory_of_large_batches_has_nothing_of_those_before():
    collation.collator()  # which sets the cap itself when it is made
    _core.set_warm_max(128 << 20)
    try:
        # 45 MiB each: only such large results are kept for later ones.
        for step in range(6):
            items = [
                {"x": torch.full((9 << 19,), 10 * step)},
                {"x": torch.full((9 << 17,), 10 * step + 5)},
            ]
            batch = collate(items, {"x": Flat()})["x"]
            assert batch[: 9 << 19].eq(10 * step).all()
            assert batch[9 << 19 :].eq(10 * step + 5).all()
            if step == 2:
                held = batch
            elif step > 2:
                assert held[: 9 << 19].eq(20).all()
            del batch, items
        assert stats()["warm_pool_bytes"] > 0, "no memory was kept"
    finally:
        held = None
        _core.set_warm_max(0)


# Planted shortcuts


def cached(key: Callable[[Items], Any]) -> Way:
    """Collates right, but once for each key."""
    known: dict[Any, Batch] = {}

    def remembered(items: Items) -> Batch:
        at = key(items)
        if at not in known:
            # Copies, so that the cache itself keeps no item.
            known[at] = collate([{n: v.clone() for n, v in x.items()} for x in items], FIELDS)
        return known[at]

    return remembered


def leaves(items: Items) -> list[torch.Tensor]:
    return [value for x in items for value in x.values()]


def reused_buffer() -> Way:
    """Writes every batch of one size into the same memory."""
    known: dict[Any, Batch] = {}

    def way(items: Items) -> Batch:
        batch = collate([{n: v.clone() for n, v in x.items()} for x in items], FIELDS)
        for name in ("pixels", "grid"):
            kept = known.setdefault((name, batch[name].shape), batch[name].clone())
            kept.copy_(batch[name])
            batch[name] = kept
        return batch

    return way


SHORTCUTS: dict[str, tuple[Callable[[], Way], set[str]]] = {
    "addresses": (
        lambda: cached(lambda items: tuple(x["pixels"].data_ptr() for x in items)),
        {"recycled_addresses", "edits_in_place", "edits_that_torch_does_not_count"},
    ),
    "the first address": (
        lambda: cached(lambda items: (items[0]["pixels"].data_ptr(), len(items))),
        {"recycled_addresses", "edits_in_place", "edits_that_torch_does_not_count"},
    ),
    "ids of tensors": (
        lambda: cached(lambda items: tuple(map(id, leaves(items)))),
        {"recycled_objects", "edits_in_place", "edits_that_torch_does_not_count"},
    ),
    "hashes of tensors": (
        lambda: cached(lambda items: tuple(map(hash, leaves(items)))),
        {"recycled_objects", "edits_in_place", "edits_that_torch_does_not_count"},
    ),
    "ids of items": (
        lambda: cached(lambda items: tuple(map(id, items))),
        {
            "recycled_objects",
            "edits_in_place",
            "edits_that_torch_does_not_count",
            "other_values_in_the_same_items",
        },
    ),
    "ids and versions": (
        lambda: cached(lambda items: tuple((id(x), x._version) for x in leaves(items))),
        {"edits_that_torch_does_not_count"},
    ),
    "shapes": (
        lambda: cached(lambda items: tuple(x.shape for x in leaves(items))),
        set(SITUATIONS),
    ),
    "a buffer used again": (reused_buffer, {"results_that_are_held", "eight_threads"}),
}


@pytest.mark.parametrize(
    ("shortcut", "situation"),
    [(name, situation) for name, (_, caught) in SHORTCUTS.items() for situation in sorted(caught)],
)
def test_a_planted_shortcut_is_found_out(shortcut, situation):
    plant, _ = SHORTCUTS[shortcut]
    with pytest.raises(Stale):
        SITUATIONS[situation](plant())


def test_every_situation_finds_a_shortcut_out():
    found = set().union(*(caught for _, caught in SHORTCUTS.values()))
    assert found == set(SITUATIONS)


def test_a_way_without_a_shortcut_passes():
    """Guards the planted ones: copies alone are not what is found out."""

    def way(items: Items) -> Batch:
        return collate([{n: v.clone() for n, v in x.items()} for x in items], FIELDS)

    for situation in SITUATIONS.values():
        situation(way)

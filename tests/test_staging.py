"""Staging, on a device in host memory whose streams run late: writing or freeing too early shows.

Sizes are small: most tests make slots of some KiB, where the real ones are of 4 MiB.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mmcollate
import numpy as np
import pytest
import torch
from compare import assert_same
from mmcollate import (
    Batched,
    CollateRuntimeError,
    CollateTypeError,
    CollateValueError,
    Flat,
    Shared,
    _core,
    arena_stats,
    backends,
    collate,
    collation,
    detach,
    explain,
    pinned,
    reference,
    retained_bytes,
    stage,
    staging,
    testing,
    trim,
)
from mmcollate.testing import FakeDevice, FakeStream
from processes import in_child, run_script

KIB, MIB = 1 << 10, 1 << 20
SLOT = 4096
NOISE = torch.randint(0, 256, (MIB,), dtype=torch.uint8)
Items = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PINNED_MAX_MB", "STAGING_CHUNK_MB", "STRICT_PIN", "DEBUG", "DIRECT"):
        monkeypatch.delenv(f"MMCOLLATE_{name}", raising=False)
    # Small batches are enough to show most things.
    monkeypatch.setattr(staging, "SMALL_COUNT", 1)
    mmcollate.reset_stats()


def as_detached_view(
    tensor: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], start: int
) -> torch.Tensor:
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + start).detach()


# What torch's private function might become.
ODD = {"odd start": torch.Tensor.as_strided, "shared counter": as_detached_view}


@pytest.fixture(params=["table", "attributes", "public views", *ODD])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways of reading tensors, and of making those of a batch on a device."""
    monkeypatch.setenv("MMCOLLATE_SKIP_EXCHANGE_TABLE", str(int(request.param == "attributes")))
    guards = torch._C._dynamo.guards
    if request.param == "public views":
        monkeypatch.delattr(guards, "_reinterpret_tensor")
    elif request.param in ODD:
        monkeypatch.setattr(guards, "_reinterpret_tensor", ODD[request.param])
    collation.collator.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collation.collator()
    yield
    collation.collator.cache_clear()


def arena_of_slots(monkeypatch: pytest.MonkeyPatch, slot: int, count: int) -> None:
    """Arenas made from here on have so many slots of so many bytes; 0: the system pins none."""
    monkeypatch.setenv("MMCOLLATE_STAGING_CHUNK_MB", repr(slot / MIB))
    monkeypatch.setenv("MMCOLLATE_PINNED_MAX_MB", repr(slot * max(count, 1) / MIB))
    if count == 0:

        def refuses(*_: Any) -> None:
            raise RuntimeError("no locked memory")

        monkeypatch.setattr(FakeDevice, "pinned", refuses)
        monkeypatch.setattr(warnings, "warn", lambda *_, **__: None)


def noise(*shape: int, dtype: torch.dtype = torch.float32, at: int = 0) -> torch.Tensor:
    """Bytes that are all different from those of another place."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    at %= len(NOISE) - min(nbytes, len(NOISE)) or 1
    repeated = NOISE.repeat(-(-(at + nbytes) // len(NOISE)))[at : at + nbytes].clone()
    if dtype == torch.bool:
        repeated %= 2
    return repeated.view(dtype).reshape(shape) if shape else repeated.view(dtype).reshape(())


def constant(value: int, nbytes: int = MIB) -> Items:
    """Two items whose batch has so many bytes of one value."""
    return [{"x": torch.full((nbytes // 2,), value, dtype=torch.uint8)} for _ in range(2)]


def send(device: FakeDevice, items: Items, fields: Any = None) -> dict[str, Any]:
    return collate(items, fields or {"x": Flat()}, device=device, pin_memory=True)


def is_all(batch: dict[str, Any], value: int) -> bool:
    return bool((batch["x"] == value).all())


def is_right(batch: dict[str, Any], items: Items, fields: Any = None) -> bool:
    """As the reference has it; strides may differ where it hands a leaf on as it is."""
    assert_same(batch, reference.collate(items, fields or {"x": Flat()}), strides=False)
    return True


def reasons() -> dict[str, int]:
    return {name: count for name, count in mmcollate.stats()["reference_reasons"].items() if count}


def census(device: FakeDevice) -> tuple[int, int, int]:
    """Slots that are free, leased and in flight."""
    stats = arena_stats(device)
    return stats["free"], stats["leased"], stats["in_flight"]


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    before = time.monotonic()
    yield
    assert time.monotonic() - before < seconds


def run_together(*work: Callable[[], None]) -> None:
    """Runs all at one time, each in a thread of its own; raises what one of them raised."""
    raised: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "hangs"
    if raised:
        raise raised[0]


class Dice(random.Random):
    """Random batches."""

    def items(self, most: int) -> Items:
        """Items of some fields of at most so many bytes in all, if none is padded."""
        count = self.randint(1, 4)
        each = max(most // (4 * count), 8)
        grid = self.randint(1, 4)
        return [
            {
                "rows": noise(self.randint(0, each // 16), 4, at=self.randrange(MIB)),
                "grid": noise(grid, dtype=torch.int64, at=self.randrange(MIB)),
                "wide": noise(2, self.randint(1, each // 2), dtype=torch.uint8),
                "kept": torch.tensor(self.random()),
                "some_embeds": noise(
                    self.randint(1, each // 2), dtype=torch.bfloat16, at=self.randrange(MIB)
                ),
            }
            for _ in range(count)
        ]


FIELDS: dict[str, Any] = {
    "rows": Flat(),
    "grid": Batched(),
    "wide": Flat(dim=1),
    "kept": Batched(keep_on_cpu=True),
    "some_embeds": Batched(),
}


# Slots and fences


@pytest.mark.timeout(60)
def test_a_slot_in_flight_is_not_written_to_and_not_waited_for(monkeypatch):
    monkeypatch.setenv("MMCOLLATE_PINNED_MAX_MB", "4")
    device = FakeDevice(manual=True)
    first = send(device, constant(1))
    assert (device.stream.pending(), reasons()) == (2, {})
    with at_most(5):
        second = send(device, constant(2))
    assert reasons() == {"no_slot": 1}
    device.stream.advance()
    assert is_all(first, 1)
    assert is_all(second, 2)
    assert device.peak_pinned_bytes == 4 * MIB
    third = send(device, constant(3))
    device.stream.advance()
    assert is_all(third, 3)
    assert reasons() == {"no_slot": 1}


@pytest.mark.parametrize("how", ["given back at once", "taken for passed"])
def test_without_the_fence_the_fake_device_shows_wrong_bytes(monkeypatch, how):
    """If this fails, the fake hides what the other tests look for."""
    monkeypatch.setenv("MMCOLLATE_PINNED_MAX_MB", "4")
    if how == "given back at once":
        monkeypatch.setattr(pinned.Arena, "fence", lambda self: pinned.Passed())
    else:
        monkeypatch.setattr(pinned, "_has_passed", lambda fence: True)
    device = FakeDevice(manual=True)
    first = send(device, constant(1))
    second = send(device, constant(2))
    device.stream.advance()
    assert reasons() == {}
    assert is_all(first, 2), "the copy did not read late"
    assert is_all(second, 2)


def test_without_the_fence_one_batch_of_many_slots_is_wrong_too(monkeypatch):
    arena_of_slots(monkeypatch, 4 * KIB, 2)
    items = [{"x": noise(3 * 4096, dtype=torch.uint8)} for _ in range(8)]
    device = FakeDevice(delay=0.001)
    batch = send(device, items)
    device.stream.synchronize()
    assert is_right(batch, items)
    monkeypatch.setattr(pinned.Arena, "fence", lambda self: pinned.Passed())
    device = FakeDevice(manual=True)
    batch = send(device, items)
    device.stream.synchronize()
    with pytest.raises(AssertionError, match="the bits differ"):
        is_right(batch, items)


@pytest.mark.parametrize("staged", [False, True])
def test_pageable_memory_that_is_freed_too_early_shows(monkeypatch, staged):
    arena_of_slots(monkeypatch, 4 * MIB, 0)
    copy = FakeDevice.copy

    def never_blocking(*args: Any, blocking: bool) -> None:
        copy(*args, blocking=False)

    monkeypatch.setattr(FakeDevice, "copy", never_blocking)
    device = FakeDevice(manual=True, pageable_copies_are_staged=staged)
    batch = send(device, constant(1))
    device.stream.advance()
    assert is_all(batch, 1 if staged else testing.FREED)


def test_the_host_that_does_not_wait_sees_memory_that_was_never_written():
    device = FakeDevice(manual=True)
    assert is_all(send(device, constant(1)), testing.NEVER_WRITTEN)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("in_flight", [2, 8])
def test_batches_in_flight_from_many_threads_are_right_and_stay_below_the_cap(
    monkeypatch, threads, in_flight
):
    slot, slots = 8 * KIB, in_flight
    arena_of_slots(monkeypatch, slot, slots)
    device = FakeDevice(delay=0.003)
    kept: list[tuple[dict[str, Any], Items]] = []

    def work(seed: int) -> None:
        dice = Dice(seed)
        for _ in range(20):
            items = dice.items(dice.choice([KIB, 4 * KIB, 24 * KIB]))
            kept.append((send(device, items, FIELDS), items))
            assert device.pinned_bytes <= slot * slots

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        run_together(*(lambda seed=seed: work(seed) for seed in range(threads)))
    finally:
        sys.setswitchinterval(before)
    device.stream.synchronize()
    assert all(is_right(batch, items, FIELDS) for batch, items in kept)
    assert len(kept) == 20 * threads
    assert 0 < device.peak_pinned_bytes <= slot * slots
    assert census(device) == (device.pinned_bytes // slot, 0, 0)
    assert mmcollate.stats()["fields"]["stage"] > 0


def test_threads_that_use_a_device_first_at_one_time_share_one_arena(monkeypatch):
    before = pinned.Arena.__init__

    def slow(self: Any, *args: Any) -> None:
        time.sleep(0.01)
        before(self, *args)

    monkeypatch.setattr(pinned.Arena, "__init__", slow)
    for _ in range(3):
        device, arenas = FakeDevice(), []
        run_together(*(lambda d=device, a=arenas: a.append(staging.arena_of(d)),) * 4)
        assert {id(arena) for arena in arenas} == {id(staging.arena_of(device))}


def test_one_torch_device_has_one_backend_whatever_threads_ask_first(monkeypatch):
    before = backends.Torch.__init__

    def slow(self: Any, device: torch.device) -> None:
        time.sleep(0.01)
        before(self, device)

    monkeypatch.setattr(backends.Torch, "__init__", slow)
    found: list[Any] = []
    run_together(*(lambda: found.append(backends._of_torch("cuda", 77)),) * 4)
    assert {id(backend) for backend in found} == {id(backends._of_torch("cuda", 77))}


@pytest.mark.timeout(60)
def test_a_slow_consumer_never_sees_a_mix(monkeypatch):
    """Each thread sends its own values, over slots that the others use too."""
    arena_of_slots(monkeypatch, 64 * KIB, 4)
    device = FakeDevice(delay=0.004)
    until = time.monotonic() + 5
    sent = []

    def work(own: int) -> None:
        kept: list[tuple[int, dict[str, Any], list[torch.Tensor]]] = []
        step = 0
        while time.monotonic() < until:
            value = own + step % 16
            batch = send(device, constant(value, 80 * KIB))
            seen: list[torch.Tensor] = []

            def consume(x: torch.Tensor = batch["x"], seen: list[torch.Tensor] = seen) -> None:
                seen.append(x.unique())

            device.stream.launch(consume)
            kept.append((value, batch, seen))
            if step % 8 == 0:
                time.sleep(0.002)
            if len(kept) == 64:
                device.stream.synchronize()
                for value, batch, seen in kept:
                    assert is_all(batch, value)
                    assert [unique.tolist() for unique in seen] == [[value]]
                kept.clear()
            step += 1
        sent.append(step)

    run_together(*(lambda own=own: work(own) for own in (1, 65, 129)))
    assert min(sent) > 64


@pytest.mark.parametrize("manual", [True, False])
def test_kernels_behind_the_copies_see_them_whatever_is_collated_later(monkeypatch, manual):
    arena_of_slots(monkeypatch, 4 * KIB, 4)
    device = FakeDevice(manual=manual, delay=0.002)
    seen = []
    for step in range(12):
        batch = send(device, constant(step, 2 * KIB) + constant(step, KIB), {"x": Batched()})
        batch = send(device, constant(step, 6 * KIB)) if step % 2 else batch
        for x in batch["x"]:
            device.stream.launch(lambda x=x, step=step: seen.append((step, x.unique().tolist())))
        del batch, x
    device.stream.synchronize()
    assert seen
    assert all(values == [step] for step, values in seen)


@pytest.mark.parametrize("dropped", [False, True])
def test_another_stream_waits_for_the_copies(dropped):
    class Recording(FakeDevice):
        recorded: list[torch.Tensor]

        def wait_on(self, stream: Any, fence: Any, tensors: Any) -> None:
            self.recorded = list(tensors)
            super().wait_on(stream, fence, tensors)

    device = Recording(manual=True)
    fields = {"x": Flat(), "y_embeds": Batched(), "z": Batched()}
    items = [
        {"x": noise(MIB, dtype=torch.uint8), "y_embeds": noise(999), "z": pinned_leaf(device, 999)}
    ]
    other, seen = FakeStream(device), []
    staged = stage(items, fields, device=device)
    batch = staged.to()
    staged.wait(other)
    # The memory of all that was made on the device is said to be used there, by whoever copied it.
    held = {tensor.untyped_storage().data_ptr() for tensor in device.recorded}
    assert {x.untyped_storage().data_ptr() for x in batch.values()} <= held
    device.recorded.clear()
    assert reasons() == {"pinned_leaf": 1}
    other.launch(lambda x=batch["x"]: seen.append(x.clone()))
    if dropped:
        del batch, staged
        gc.collect()
    send(device, constant(9))
    assert (other.advance(), len(seen)) == (0, 0)
    device.stream.advance()
    assert other.advance() == 2
    assert torch.equal(seen[0], items[0]["x"])


# Leases


def test_a_lease_that_was_given_back_is_refused():
    books = _core.Arena(4096, 8192)
    lease = books.grow()
    assert lease is not None
    for not_yet in (books.launch, books.release):
        with pytest.raises(RuntimeError, match="stale lease"):
            not_yet(lease)
    books.settled(lease, True)
    with pytest.raises(RuntimeError, match="stale lease"):
        books.settled(lease, True)
    books.launch(lease)
    with pytest.raises(RuntimeError, match="stale lease"):
        books.launch(lease)
    books.release(lease)
    for twice in (books.release, books.launch):
        with pytest.raises(RuntimeError, match="stale lease"):
            twice(lease)
    again = books.lease()
    assert again is not None
    assert again != lease
    assert again[0] == lease[0]
    with pytest.raises(RuntimeError, match="stale lease"):
        books.release(lease)
    books.release(again)
    last = books.lease()
    assert last is not None
    books.retire(last)
    with pytest.raises(RuntimeError, match="stale lease"):
        books.retire(last)
    for gone in (books.release, books.launch):
        with pytest.raises(RuntimeError, match="stale lease"):
            gone(again)
    for nowhere in ((7, 0), (0, 2**63)):
        with pytest.raises(RuntimeError, match="stale lease"):
            books.release(nowhere)
    assert books.census() == (0, 0, 0, 0)


def test_an_arena_refuses_a_stale_lease_and_stays_usable():
    device = FakeDevice(manual=True)
    arena = staging.arena_of(device)
    assert arena.lease() is None
    slot = arena.grow()
    assert slot is not None
    slot.is_read = True
    slot.close()
    slot.close()
    assert census(device) == (0, 0, 1)
    [pair] = arena.flying
    device.stream.advance()
    arena.land()
    assert census(device) == (1, 0, 0)
    with pytest.raises(RuntimeError, match="stale lease"):
        arena.free(pair)
    with pytest.raises(AssertionError, match="given back"):
        slot.memory.fill_(1)
    batch = send(device, constant(1))
    device.stream.advance()
    assert is_all(batch, 1)


# Failures


def fails_then_works(device: FakeDevice, error: BaseException, items: Items | None = None) -> None:
    items = items or constant(1)
    with pytest.raises(type(error)) as raised:
        send(device, items)
    assert raised.value is error
    del raised
    device.stream.synchronize()
    assert census(device)[1:] == (0, 0)
    batch = send(device, items)
    device.stream.synchronize()
    assert is_right(batch, items)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("empty", torch.OutOfMemoryError("no memory")),
        ("copy", RuntimeError("no copy")),
        ("copy", KeyboardInterrupt()),
        ("pinned", KeyboardInterrupt()),
    ],
    ids=str,
)
def test_what_a_device_raises_passes_and_the_slots_come_back(what, error, warm):
    device = FakeDevice(manual=True)
    if warm:
        send(device, constant(7))
        if what == "pinned":  # so that the arena grows, and the batch fits
            assert census(device) == (0, 0, 1)
        else:
            device.stream.advance()
    device.fail_next(what, error)
    fails_then_works(device, error)


@pytest.mark.parametrize("after", range(3))
def test_a_copy_that_fails_in_the_middle_of_a_batch_leaves_nothing_behind(monkeypatch, after):
    arena_of_slots(monkeypatch, 4 * KIB, 4)
    monkeypatch.setattr(staging, "SMALL", 0)
    device = FakeDevice(delay=0.001)
    error, copy, given = RuntimeError("no copy"), FakeDevice.copy, []

    def failing(self: FakeDevice, *args: Any, **options: Any) -> None:
        given.append(1)
        if len(given) == after + 1:
            raise error
        copy(self, *args, **options)

    monkeypatch.setattr(FakeDevice, "copy", failing)
    fails_then_works(device, error, constant(3, 14 * KIB))
    given.clear()
    with pytest.raises(RuntimeError, match="no copy"):
        stage(constant(3, 14 * KIB), {"x": Flat()}, device=device).to()
    device.stream.synchronize()
    assert census(device) == (4, 0, 0)


def test_without_a_fence_the_host_waits():
    device = FakeDevice(manual=True)
    device.fail_next("fence", RuntimeError("no fence"))
    waited = []
    synchronize = device.synchronize

    def waiting() -> None:
        # Until then the slot is nobody's.
        assert census(device) == (0, 1, 0)
        waited.append(device.stream.pending())
        synchronize()

    device.synchronize = waiting  # type: ignore[method-assign]
    batch = send(device, constant(1))
    assert waited == [1]
    assert is_all(batch, 1)
    assert census(device) == (1, 0, 0)
    assert is_all(batch, 1)


def test_without_a_fence_and_without_waiting_a_slot_is_given_up():
    device = FakeDevice(manual=True)

    def no_wait() -> None:
        raise RuntimeError("no waiting either")

    device.fail_next("fence", RuntimeError("no fence"))
    device.fail_next("fence", RuntimeError("no fence again"))
    device.synchronize = no_wait  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no waiting") as raised:
        send(device, constant(1))
    # It is tried once more when the slot is dropped.
    del raised
    gc.collect()
    assert census(device) == (0, 1, 0)
    del device.synchronize
    batch = send(device, constant(2))
    device.stream.advance()
    assert is_all(batch, 2)
    assert census(device) == (1, 1, 0)


def test_a_fence_that_can_not_be_asked_has_not_passed(monkeypatch):
    arena_of_slots(monkeypatch, 4 * MIB, 1)
    device = FakeDevice(manual=True)
    first = send(device, constant(1))
    device.stream.advance()
    device.fail_next("query", RuntimeError("no answer"))
    second = send(device, constant(2))
    assert reasons() == {"no_slot": 1}
    third = send(device, constant(3))
    assert reasons() == {"no_slot": 1}
    device.stream.advance()
    assert [is_all(batch, k + 1) for k, batch in enumerate([first, second, third])] == [True] * 3
    assert census(device) == (1, 0, 0)


@pytest.mark.parametrize("pageable_copies_are_staged", [False, True])
@pytest.mark.parametrize("when", ["at first", "later", "beyond the budget"])
def test_memory_that_can_not_be_pinned_is_said_once_and_done_without(
    when, pageable_copies_are_staged
):
    device = FakeDevice(manual=True, pageable_copies_are_staged=pageable_copies_are_staged)
    cause = "no locked memory"
    busy = []
    if when != "at first":
        busy.append(send(device, constant(7)))
    if when == "beyond the budget":
        device.pinned_budget = 6 * MIB
        cause = "budget exceeded"
    else:
        device.fail_next("pinned", RuntimeError(cause))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        batches = [send(device, constant(k)) for k in (1, 2, 3)]
    assert [warning.category for warning in said] == [RuntimeWarning]
    assert "can't pin 4,194,304 bytes" in str(said[0].message)
    assert cause in str(said[0].message)
    device.stream.advance()
    assert all(is_all(batch, k) for k, batch in zip((1, 2, 3), batches, strict=True))
    assert all(is_all(batch, 7) for batch in busy)
    stats = arena_stats(device)
    assert (stats["refusals"], stats["leased"], reasons()) == (1, 0, {})
    assert stats["pageable_batches"] > 0
    # The arena tries again after a trim.
    device.pinned_budget = None
    trim(device)
    pageable = device.pageable_copies
    batch = send(device, constant(4))
    device.stream.advance()
    assert is_all(batch, 4)
    assert device.pageable_copies == pageable


@pytest.mark.parametrize("when", ["at first", "later"])
def test_strict_pinning_makes_it_an_error(monkeypatch, when):
    monkeypatch.setenv("MMCOLLATE_STRICT_PIN", "1")
    device = FakeDevice(manual=True)
    if when == "later":
        send(device, constant(7))
    own = RuntimeError("no locked memory")
    device.fail_next("pinned", own)
    with pytest.raises(CollateRuntimeError, match=r"can't pin 4,194,304 .*no locked") as raised:
        send(device, constant(1))
    assert raised.value.__cause__ is own
    assert census(device)[1] == 0
    # Until the system is asked again.
    with pytest.raises(CollateRuntimeError, match="STRICT_PIN is set"):
        send(device, constant(1))
    assert arena_stats(device)["refused"]
    later = time.monotonic() + 61
    monkeypatch.setattr(pinned.time, "monotonic", lambda: later)
    assert not arena_stats(device)["refused"]
    batch = send(device, constant(2))
    device.stream.advance()
    assert is_all(batch, 2)


@pytest.mark.parametrize("cap", ["0", "0.003"])
def test_a_cap_of_less_than_a_page_turns_staging_off(monkeypatch, cap):
    monkeypatch.setenv("MMCOLLATE_PINNED_MAX_MB", cap)
    device, items = FakeDevice(), Dice(1).items(64 * KIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = send(device, items, FIELDS)
    device.stream.synchronize()
    assert is_right(batch, items, FIELDS)
    assert device.peak_pinned_bytes == 0
    assert reasons().keys() == {"device_target"}


def test_what_is_no_refusal_passes_and_turns_nothing_off():
    device = FakeDevice(manual=True)
    device.fail_next("pinned", RecursionError("too deep"))
    with pytest.raises(RecursionError):
        send(device, constant(1))
    broken = torch.AcceleratorError("an illegal address was accessed")
    device.fail_next("pinned", broken)
    with pytest.raises(torch.AcceleratorError):
        send(device, constant(1))
    assert not arena_stats(device)["refused"]
    batch = send(device, constant(2))
    device.stream.advance()
    assert is_all(batch, 2)
    assert arena_stats(device)["pinned_bytes"] == 4 * MIB


@pytest.mark.parametrize("text", ["99999999", "1e9"])
def test_a_cap_beyond_all_memory_is_taken_as_all_memory(monkeypatch, text):
    monkeypatch.setenv("MMCOLLATE_PINNED_MAX_MB", text)
    monkeypatch.setenv("MMCOLLATE_STAGING_CHUNK_MB", "0.01")
    device = FakeDevice()
    send(device, constant(1))
    stats = arena_stats(device)
    assert stats["cap_bytes"] <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert stats["cap_bytes"] // stats["slot_bytes"] <= 8192


@pytest.mark.parametrize("value", ["x", "-1", "nan", "1e99"])
@pytest.mark.parametrize("name", ["MMCOLLATE_PINNED_MAX_MB", "MMCOLLATE_STAGING_CHUNK_MB"])
def test_a_setting_that_can_not_be_read_is_said(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        send(FakeDevice(), constant(1))


# Growth


def log_uniform(dice: random.Random, least: int, most: int) -> int:
    return int(least * (most / least) ** dice.random())


@pytest.mark.parametrize(
    ("rounds", "scale"), [(10_000, 1024), (60, 1)], ids=["many", "of full size"]
)
def test_pinned_memory_is_flat_after_warming_up(monkeypatch, rounds, scale):
    """64 KiB to 64 MiB; the many are all, and all limits with them, 1024 times smaller."""
    slot, cap = 4 * MIB // scale, 64 * MIB // scale
    arena_of_slots(monkeypatch, slot, cap // slot)
    monkeypatch.setattr(staging, "SMALL", staging.SMALL // scale)
    device, dice = FakeDevice(delay=1e-5), random.Random(5)
    leaf = NOISE.repeat(64 // scale or 1)
    pinned = []
    for _ in range(rounds):
        nbytes = log_uniform(dice, 64 * KIB // scale, 64 * MIB // scale)
        part = dice.randint(0, nbytes)
        items = [{"x": leaf[:part]}, {"x": leaf[: nbytes - part]}]
        batch = send(device, items)
        pinned.append(device.pinned_bytes)
        if scale == 1 or dice.random() < 0.01:
            device.stream.synchronize()
            assert torch.equal(batch["x"], torch.cat([item["x"] for item in items]))
    assert max(pinned) == device.peak_pinned_bytes <= cap
    assert set(pinned[rounds // 2 :]) == {pinned[-1]}
    del batch
    device.stream.synchronize()
    assert device.memory_bytes == 0
    assert census(device) == (pinned[-1] // slot, 0, 0)


@pytest.mark.parametrize("staged", [False, True])
def test_a_batch_pins_a_few_slots_and_the_next_some_more(monkeypatch, staged):
    arena_of_slots(monkeypatch, SLOT, 16)
    device, items, few = FakeDevice(manual=True), constant(1, 100 * KIB), staging.GROW_PER_BATCH
    for done in range(1, 8):
        if staged:
            stage(items, {"x": Flat()}, device=device).to()
        else:
            send(device, items)
        assert device.pinned_bytes == min(few * done, 16) * SLOT
        device.stream.synchronize()
    fits = constant(2, 64 * KIB - 100)
    monkeypatch.setattr(staging, "SMALL", 0)
    pageable = device.pageable_copies
    batch = stage(fits, {"x": Flat()}, device=device).to()
    assert device.pageable_copies == pageable
    device.stream.advance()
    assert is_all(batch, 2)


# Whose memory lives how long


def gone(refs: list[weakref.ref[torch.Tensor]]) -> bool:
    """At once: nothing waits for the garbage collector."""
    return all(ref() is None for ref in refs)


def noted(items: Items) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(x) for item in items for x in item.values() if torch.is_tensor(x)]


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("how", ["collate", "stage", "closed", "dropped", "pageable", "no slot"])
def test_inputs_die_once_the_copies_are_given(monkeypatch, how):
    if how in ("pageable", "no slot"):
        arena_of_slots(monkeypatch, 4 * KIB, int(how == "no slot"))
    device, items = FakeDevice(manual=True), constant(1) + constant(1)
    refs = noted(items)
    if how in ("collate", "pageable", "no slot"):
        batch = send(device, items)
    else:
        staged = stage(items, {"x": Flat()}, device=device)
        del items
        assert not gone(refs)
        if how == "closed":
            staged.close()
        elif how == "dropped":
            del staged
        else:
            batch = staged.to()
    items = []
    assert gone(refs)
    if how not in ("closed", "dropped"):
        device.stream.advance()
        assert is_all(batch, 1)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("what", ["empty", "copy", "pinned", "strict"])
def test_inputs_die_with_an_error_too(monkeypatch, what):
    device, items = FakeDevice(manual=True), constant(1)
    refs = noted(items)
    monkeypatch.setenv("MMCOLLATE_STRICT_PIN", str(int(what == "strict")))
    device.fail_next("pinned" if what == "strict" else what, RuntimeError("none"))
    # A refusal to pin is no error, but what it says must keep nothing either.
    expected: Any = pytest.warns if what == "pinned" else pytest.raises
    with expected(Warning if what == "pinned" else RuntimeError):
        send(device, items)
    device.stream.advance()
    del expected
    items.clear()
    device._failures.clear()
    assert gone(refs)


@pytest.mark.usefixtures("no_gc")
def test_device_memory_goes_with_the_last_tensor():
    device = FakeDevice(manual=True)
    batch = send(device, Dice(3).items(64 * KIB), FIELDS)
    assert device.memory_bytes > 0
    device.stream.advance()
    rows = batch["rows"]
    del batch
    assert device.memory_bytes >= rows.nbytes > 0
    del rows
    assert device.memory_bytes == 0


# Chunks


def strided(*shape: int) -> torch.Tensor:
    """Column by column."""
    return noise(*shape[::-1]).permute(*reversed(range(len(shape))))


STRIDED: dict[str, tuple[Any, list[torch.Tensor]]] = {
    "rows": (Flat(), [noise(n, 33, at=n) for n in (1, 70, 0, 55)]),
    "stacked": (Batched(), [noise(37, 41, at=n) for n in range(5)]),
    "transposed": (Batched(), [strided(31, 53) for _ in range(4)]),
    "transposed rows": (Flat(), [strided(n, 29) for n in (40, 1, 77)]),
    "channels_last": (
        Batched(),
        [noise(2, 3, 20, 21).contiguous(memory_format=torch.channels_last) for _ in range(3)],
    ),
    "columns": (Flat(dim=1), [noise(25, n, at=n) for n in (7, 100, 3)]),
    "last": (Flat(dim=-1), [strided(5, 6, n) for n in (30, 1, 60)]),
    "padded": (Flat(), [noise(9, 80), noise(30, 11), noise(1, 100)]),
    "padded both": (Flat(dim=1), [noise(9, 80, 2), noise(30, 11, 1), noise(1, 5, 3)]),
    "one": (Batched(), [strided(64, 65)]),
    "ragged": (Batched(), [strided(n, 11) for n in (100, 1, 50)]),
    "sliced": (Flat(), [noise(60, 60)[::2, 3:50:3], noise(60, 60)[5:, :16]]),
    "bytes": (Flat(dim=1), [noise(100, n, dtype=torch.uint8) for n in (1, 50, 77)]),
}


@pytest.mark.parametrize("dirty", [False, True])
@pytest.mark.parametrize("name", STRIDED)
def test_fields_are_right_wherever_they_are_cut(monkeypatch, door, name, dirty):
    field, leaves = STRIDED[name]
    arena_of_slots(monkeypatch, SLOT, 64)
    monkeypatch.setattr(staging, "GROW_PER_BATCH", 64)
    monkeypatch.setattr(staging, "SMALL", 0)
    device = FakeDevice(manual=True)
    # If larger, what comes before moves the cuts to other places.
    for before in (1, 256 * 9, 256 * 12 - 64, 5000):
        if dirty:
            for value in (0xFF, 0x77):
                send(device, constant(value, 40 * KIB))
            device.stream.advance()
        items = [{"x": leaf, "y": noise(before, dtype=torch.float64)} for leaf in leaves]
        fields = {"x": field, "y": Flat()}
        copies, counted = device.copies, arena_stats(device)["copies"]
        batch = send(device, items, fields)
        assert device.copies - copies == arena_stats(device)["copies"] - counted > 0
        device.stream.advance()
        assert is_right(batch, items, fields)
        made = batch["x"] if isinstance(batch["x"], list) else [batch["x"]]
        assert all(x.is_contiguous() and x.data_ptr() % 256 == 0 for x in made)
    assert reasons() == {}


@pytest.mark.parametrize("slots", [1, 2, 64])
@pytest.mark.parametrize("by", [-1, 0, 1])
@pytest.mark.parametrize("times", [1, 2, 3, 7])
def test_sizes_round_the_size_of_a_slot(monkeypatch, times, by, slots):
    arena_of_slots(monkeypatch, SLOT, slots)
    monkeypatch.setattr(staging, "SMALL", 0)
    nbytes = times * SLOT + by
    fits = -(-nbytes // SLOT) <= min(slots, staging.GROW_PER_BATCH)
    device = FakeDevice(manual=fits, delay=1e-4)
    items = [{"x": noise(n, dtype=torch.uint8, at=n)} for n in (nbytes // 3, nbytes - nbytes // 3)]
    batch = send(device, items)
    assert device.copies == -(-nbytes // SLOT)
    assert device.bytes_copied == nbytes
    device.stream.synchronize()
    assert is_right(batch, items)
    assert device.peak_pinned_bytes <= min(slots, staging.GROW_PER_BATCH) * SLOT
    if fits:
        assert device.peak_pinned_bytes == device.copies * SLOT
    assert reasons() == {}


@pytest.mark.timeout(60)
def test_what_a_stuck_stream_leaves_takes_the_reference(monkeypatch):
    """Fields that fitted into the slots stay staged."""
    arena_of_slots(monkeypatch, SLOT, 2)
    device = FakeDevice(manual=True)
    sizes = {"a": 3000, "b": 2500, "c": 2400, "d": 2000}
    items = [
        {name: noise(n, dtype=torch.uint8, at=n) for name, n in sizes.items()} for _ in range(2)
    ]
    fields = dict.fromkeys(sizes, Flat())
    # Laid out: 6000 bytes, then 5000, 4800 and 4000: two slots hold all of the first and no other.
    with at_most(5):
        batch = send(device, items, fields)
    assert reasons() == {"no_slot": 3}
    assert mmcollate.stats()["fields"]["stage"] == 1
    assert arena_stats(device)["waits"] == 1
    device.stream.advance()
    assert is_right(batch, items, fields)


def test_one_batch_that_fits_is_one_copy_and_one_more_for_each_kept_field(monkeypatch):
    items = [
        {
            "a": noise(100, 7),
            "b": torch.tensor(n),
            "c_embeds": noise(n, 5),
            "d": noise(3 * n, dtype=torch.float16),
            "e": noise(8),
        }
        for n in (1, 2, 3)
    ]
    fields = {
        "a": Batched(),
        "b": Batched(),
        "c_embeds": Flat(),
        "d": Batched(),
        "e": Flat(outlives_batch=True),
    }
    device = FakeDevice(manual=True)
    batch = send(device, items, fields)
    assert (device.copies, device.blocking_copies, device.pageable_copies) == (3, 0, 0)
    assert device.pinned_bytes == arena_stats(device)["slot_bytes"] == 4 * MIB
    device.stream.advance()
    assert is_right(batch, items, fields)
    assert mmcollate.stats()["fields"]["stage"] == 5


@pytest.mark.parametrize("outlives", [True, np.True_, 1, False, np.False_, 0, None])
def test_what_outlives_a_batch_may_be_said_by_any_truth(outlives):
    items = [{"x": noise(2, 40_000), "y": [noise(n, 9)]} for n in (4, 5, 6)]
    fields = {name: Batched(outlives_batch=outlives) for name in ("x", "y")}
    device = FakeDevice()
    for made in (stage(items, fields, device=device).to(), send(device, items, fields)):
        device.synchronize()
        assert is_right(made, items, fields)
    assert device.copies == (8 if outlives else 2)


def test_items_are_looked_at_before_the_settings_of_pinned_memory(monkeypatch):
    monkeypatch.setenv("MMCOLLATE_PINNED_MAX_MB", "many")
    fields = {"x": Batched()}
    assert collate([], fields, device=FakeDevice(), pin_memory=True) == {}
    with pytest.raises(CollateTypeError, match="a sequence of items"):
        collate(5, fields, device=FakeDevice(), pin_memory=True)
    with pytest.raises(ValueError, match="MMCOLLATE_PINNED_MAX_MB"):
        collate([{"x": noise(3)}], fields, device=FakeDevice(), pin_memory=True)


def test_gaps_and_padding_are_zero_although_slots_are_dirty(monkeypatch):
    arena_of_slots(monkeypatch, 16 * KIB, 1)
    device = FakeDevice(manual=True)
    for value in (0xFF, 0xFF):
        send(device, constant(value, 90 * KIB))
        device.stream.synchronize()
    items = [{"a": noise(3), "b": noise(7, dtype=torch.uint8), "c": noise(2, n)} for n in (9, 5)]
    fields = {"a": Flat(), "b": Flat(), "c": Flat()}
    batch = send(device, items, fields)
    [(memory,)] = [staging.arena_of(device).slots.values()]
    device.stream.synchronize()
    assert is_right(batch, items, fields)
    assert (batch["c"][2:, 5:] == 0).all()
    # c is the largest: 144 bytes, then a (24 bytes at 256), then b (14 bytes at 512).
    ends = {144: 256, 256 + 24: 512}
    base = batch["c"].data_ptr()
    assert [batch[name].data_ptr() - base for name in "cab"] == [0, 256, 512]
    on_device = torch.as_strided(
        batch["c"].view(-1).view(torch.uint8), (526,), (1,), batch["c"].storage_offset() * 4
    )
    for start, stop in ends.items():
        assert (memory[start:stop] == 0).all()
        assert (on_device[start:stop] == 0).all()
    assert (memory[526:] == 0xFF).all()


# Empty tensors, dtypes, alignment


@pytest.mark.parametrize(
    ("field", "leaves"),
    [
        (Batched(), [torch.ones(0, 3)] * 2),
        (Flat(), [torch.ones(0, 3), torch.ones(0, 5)]),
        (Batched(), [torch.ones(0), torch.ones(0, 2)]),
        (Batched(), [torch.ones(4, 0)]),
        (Flat(outlives_batch=True), [torch.ones(0, dtype=torch.int64)] * 2),
    ],
    ids=str,
)
def test_what_has_no_bytes_is_neither_pinned_nor_copied(field, leaves):
    device = FakeDevice(manual=True)
    items, fields = [{"x": leaf, "y": torch.ones(0)} for leaf in leaves], {"x": field, "y": Flat()}
    batch = send(device, items, fields)
    assert (device.copies, device.peak_pinned_bytes, device.stream.pending()) == (0, 0, 0)
    assert is_right(batch, items, fields)
    assert mmcollate.stats()["fields"]["stage"] == 2
    with_bytes = [{**item, "z": torch.arange(3)} for item in items]
    fields["z"] = Batched()
    batch = send(device, with_bytes, fields)
    assert device.copies == 1
    device.stream.advance()
    assert is_right(batch, with_bytes, fields)
    assert reasons() == {}


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.float32, torch.float64,
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("field", [Batched(), Flat(), Flat(dim=1)], ids=str)
def test_every_dtype_keeps_its_bits(door, field, dtype):
    items = [
        {"x": noise(3, n, dtype=dtype, at=64 * n), "y": noise(3, n, at=n), "0d": noise(dtype=dtype)}
        for n in (5, 5, 5 + (field == Flat(dim=1)))
    ]
    fields = {"x": field, "y": field, "0d": Batched()}
    device = FakeDevice(manual=True)
    for count in (1, 3):
        batch = send(device, items[:count], fields)
        device.stream.advance()
        assert is_right(batch, items[:count], fields)
        for x in batch.values():
            assert x.data_ptr() % 256 == 0 or dtype.is_complex
    if dtype not in (torch.bool, torch.complex64, torch.complex128):
        assert reasons() == {}


@pytest.mark.parametrize("count", [1, 2])
def test_conjugated_and_negated_leaves_are_the_reference_s(count):
    z = torch.tensor([1 + 2j, 3 - 1j])
    items = [{"c": z.conj(), "n": z.conj().imag, "y": torch.ones(3)} for _ in range(count)]
    fields = {"c": Flat(), "n": Flat(), "y": Flat()}
    device = FakeDevice(manual=True)
    batch = send(device, items, fields)
    device.stream.advance()
    assert batch["c"].tolist() == [1 - 2j, 3 + 1j] * count
    assert batch["n"].tolist() == [-2, 1] * count


@pytest.mark.parametrize("seed", range(6))
def test_tensors_are_aligned_and_the_largest_floats_come_first(monkeypatch, seed):
    dice = Dice(seed)
    names = dice.sample("abcdefgh", 6)
    dtypes = {name: dice.choice(DTYPES[1:16]) for name in names}
    dtypes[names[0]] = torch.bfloat16
    sizes = {name: dice.randint(1, 3000) for name in names}
    items = [
        {name: noise(sizes[name], dtype=dtypes[name], at=k) for name in names} for k in range(2)
    ]
    device = FakeDevice(manual=True)
    batch = send(device, items, dict.fromkeys(names, Flat()))
    device.stream.advance()
    assert is_right(batch, items, dict.fromkeys(names, Flat()))
    starts = {name: batch[name].data_ptr() for name in names}
    assert all(start % 256 == 0 for start in starts.values())
    assert len({x.untyped_storage().data_ptr() for x in batch.values()}) == 1
    floats = [name for name in names if dtypes[name].is_floating_point]
    largest = max(floats, key=lambda name: batch[name].nbytes)
    assert min(starts, key=starts.__getitem__) == largest
    others = sorted((start, -batch[name].nbytes) for name, start in starts.items())[1:]
    assert sorted(others, key=lambda pair: pair[1]) == others


# Pinned leaves


def pinned_leaf(device: FakeDevice, nbytes: int, at: int = 0) -> torch.Tensor:
    return device.pinned(nbytes).copy_(noise(nbytes, dtype=torch.uint8, at=at))


LARGE = staging.DIRECT_FROM


def test_one_pinned_leaf_is_left_to_the_reference():
    device = FakeDevice(manual=True)
    leaf = pinned_leaf(device, 2 * LARGE)
    before = device.pinned_bytes
    items = [{"x": leaf, "y": noise(LARGE)}]
    batch = send(device, items, {"x": Flat(), "y": Flat()})
    assert reasons() == {"pinned_leaf": 1}
    device.stream.advance()
    assert is_right(batch, items, {"x": Flat(), "y": Flat()})
    assert device.pinned_bytes == before + 4 * MIB
    assert device.blocking_copies == 0


@pytest.mark.parametrize("slot", [SLOT, 4 * MIB])
@pytest.mark.parametrize(
    "leaves",
    ["pinned", "pageable", "mixed", "mixed, last pinned", "small pinned", "one just too small"],
)
def test_large_pinned_leaves_are_copied_from_where_they_are(monkeypatch, leaves, slot):
    monkeypatch.setenv("MMCOLLATE_DIRECT", "1")
    arena_of_slots(monkeypatch, slot, 16)
    device = FakeDevice(delay=1e-4)
    sizes = {
        "pinned": [LARGE, LARGE + 1, 2 * LARGE],
        "pageable": [-LARGE, -2 * LARGE],
        "mixed": [LARGE, -5000, LARGE, -LARGE, 100, LARGE + 3],
        "mixed, last pinned": [-LARGE, LARGE],
        "small pinned": [1000, 2000],
        "one just too small": [LARGE, LARGE - 1],
    }[leaves]
    make = [
        pinned_leaf(device, n, at=k) if n > 0 else noise(-n, dtype=torch.uint8, at=k)
        for k, n in enumerate(sizes)
    ]
    items = [{"x": leaf, "y": noise(3, at=k)} for k, leaf in enumerate(make)]
    fields = {"x": Flat(), "y": Batched()}
    gathered = mmcollate.stats()["bytes_gathered"]
    batch = send(device, items, fields)
    direct = [n for n in sizes if n >= LARGE]
    stats = arena_stats(device)
    assert stats["direct_copies"] == len(direct)
    assert (stats["copies"], stats["bytes_copied"]) == (device.copies, device.bytes_copied)
    written = mmcollate.stats()["bytes_gathered"] - gathered
    assert written == batch["y"].nbytes + sum(map(abs, sizes)) - sum(direct)
    device.stream.synchronize()
    assert is_right(batch, items, fields)
    assert device.pageable_copies == 0
    assert reasons() == {}


@pytest.mark.parametrize(
    ("sizes", "staged"),
    [
        ([4096], False),
        ([64 * KIB], False),
        ([64 * KIB + 1], True),
        ([60 * KIB, 4096], False),
        ([60 * KIB, 4097], True),
        ([8, 8, 8], True),
        ([0], True),
    ],
)
def test_what_is_small_takes_the_reference(monkeypatch, sizes, staged):
    monkeypatch.undo()
    device = FakeDevice()
    items = [{f"x{k}": noise(n, dtype=torch.uint8) for k, n in enumerate(sizes)}]
    fields = {name: Flat() for name in items[0]}
    plan = explain(items, fields, device=device, pin_memory=True, file=io.StringIO())
    batch = send(device, items, fields)
    device.stream.synchronize()
    assert is_right(batch, items, fields)
    assert reasons() == ({} if staged else {"small": len(sizes)})
    assert {field.way for field in plan.groups[0].fields} == {"stage" if staged else "reference"}
    assert device.peak_pinned_bytes == (4 * MIB if staged and sum(sizes) else 0)


def test_pinned_leaves_that_are_stacked_or_joined_are_free_at_once():
    device = FakeDevice(manual=True)
    leaves = [pinned_leaf(device, 2 * LARGE, at=k) for k in range(2)]
    items = [{"x": leaf, "y": leaf, "z": torch.ones(3)} for leaf in leaves]
    fields = {"x": Flat(), "y": Batched(), "z": Batched()}
    expected = reference.collate(items, fields)
    batch = send(device, items, fields)
    for leaf in leaves:
        leaf.fill_(9)
    device.stream.advance()
    assert_same(batch, expected)
    assert arena_stats(device)["direct_copies"] == 0


def test_a_ragged_list_of_pinned_leaves(monkeypatch):
    device = FakeDevice(manual=True)
    large = [pinned_leaf(device, n, at=n) for n in (LARGE, LARGE + 9)]
    items = [{"x": leaf, "y": torch.ones(3)} for leaf in large]
    fields = {"x": Batched(), "y": Batched()}
    batch = send(device, items, fields)
    assert reasons() == {"pinned_leaf": 1}
    device.stream.advance()
    assert is_right(batch, items, fields)
    items = [{"x": x, "y": torch.ones(3)} for x in (large[0], pinned_leaf(device, 9))]
    batch = send(device, items, fields)
    assert reasons() == {"pinned_leaf": 1}
    assert arena_stats(device)["direct_copies"] == 1
    device.stream.advance()
    assert is_right(batch, items, fields)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("how", ["collate", "stage"])
@pytest.mark.parametrize("change", ["no longer pinned", "shorter", "strided", "another dtype"])
def test_a_pinned_leaf_that_was_changed_is_the_reference_s(monkeypatch, change, how, alone):
    monkeypatch.setenv("MMCOLLATE_DIRECT", "1")
    device = FakeDevice(manual=True)
    leaves = [pinned_leaf(device, 2 * LARGE, at=k) for k in range(2)]
    # Alone, all there is to copy lies in the leaves, and nothing is gathered.
    items = [{"x": leaf} if alone else {"x": leaf, "y": torch.ones(3)} for leaf in leaves]

    def changed() -> None:
        if change == "no longer pinned":
            leaves[1].set_(noise(2 * LARGE, dtype=torch.uint8, at=77))
        elif change == "shorter":
            leaves[1].resize_(LARGE)
        elif change == "another dtype":
            for leaf in leaves:
                leaf.data = leaf.view(torch.int8)
        else:
            leaves[1].set_(leaves[1].untyped_storage(), 0, (LARGE,), (2,))

    batch = with_a_change(device, items, changed, how)
    device.stream.advance()
    assert arena_stats(device)["direct_copies"] == 0
    assert is_right(batch, items, {"x": Flat(), "y": Flat()})
    assert reasons() == {"changed": 1 if alone else 2}
    assert census(device)[1:] == (0, 0)


def with_a_change(
    device: FakeDevice, items: Items, change: Callable[[], None], how: str
) -> dict[str, Any]:
    """A batch whose leaves are changed after they were planned (and, staged, gathered)."""
    empty, fields = device.empty, {"x": Flat(), "y": Flat()}

    def changing(nbytes: int) -> torch.Tensor:
        if device.empty is changing:
            device.empty = empty  # type: ignore[method-assign]
            change()
        return empty(nbytes)

    device.empty = changing  # type: ignore[method-assign]
    if how == "collate":
        return send(device, items, fields)
    return stage(items, fields, device=device).to()


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shorter": lambda x: x.resize_(5, 8),
    "longer": lambda x: x.resize_(100_000, 8).fill_(3),
    "other memory": lambda x: x.set_(noise(7, 8)),
    "strided": lambda x: x.set_(noise(8, 10).t()),
    "nothing": lambda x: x.resize_(0, 8),
    "no memory": lambda x: (x.resize_(0, 8), x.untyped_storage().resize_(0)),
    "another dtype": lambda x: setattr(x, "data", torch.ones(10, 8, dtype=torch.float64)),
    "other rank": lambda x: setattr(x, "data", torch.ones(80)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("slot", [4096, 4 * MIB])
def test_a_leaf_that_changes_after_it_was_planned_is_the_reference_s(
    monkeypatch, door, change, slot
):
    arena_of_slots(monkeypatch, slot, 8)
    device = FakeDevice(delay=1e-4)
    items: Items = [{"x": noise(10, 8, at=k), "y": noise(2000, 8, at=k)} for k in range(3)]
    try:
        batch = with_a_change(device, items, lambda: CHANGES[change](items[1]["x"]), "collate")
    except mmcollate.MMCollateError:
        with pytest.raises(Exception):  # noqa: B017, PT011  # as the reference
            reference.collate(items, {"x": Flat(), "y": Flat()})
        batch = None
    device.stream.synchronize()
    assert census(device)[1:] == (0, 0)
    if batch is not None:
        assert is_right(batch, items, {"x": Flat(), "y": Flat()})
        if change == "other memory":
            assert batch["x"].shape == (27, 8)
    assert reasons().keys() == {"changed"}
    fine = constant(4)
    batch = send(device, fine)
    device.stream.synchronize()
    assert is_all(batch, 4)


@pytest.mark.parametrize("name", STRIDED)
def test_any_range_of_a_layout_is_gathered_as_the_whole(door, name):
    field, leaves = STRIDED[name]
    items = [{"x": leaf, "y": noise(50, at=9), "z_embeds": noise(7)} for leaf in leaves]
    fields = {"x": field, "y": Flat(), "z_embeds": Batched()}
    core = collation.collator()
    _, _, plan = core.next_group(items, 0, len(items), fields, FakeDevice(), True, None, True)
    assert plan is not None
    nbytes = plan.lay_out([False, False, True])[-1][1]
    whole = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
    assert plan.gather(whole, 0, 0, nbytes)
    dice = random.Random(name)
    for _ in range(60):
        start = dice.randint(0, nbytes)
        stop = min(nbytes, start + dice.choice([0, 1, 3, 100, 1000, nbytes]))
        at = dice.randint(0, 300)
        part = torch.full((at + stop - start + 8,), 0xFF, dtype=torch.uint8)
        assert plan.gather(part, at, start, stop)
        assert torch.equal(part[at : at + stop - start], whole[start:stop])
        assert (part[:at] == 0xFF).all() and (part[at + stop - start :] == 0xFF).all()
    for start, stop in ((1, 0), (0, nbytes + 1), (-1, 5)):
        with pytest.raises((ValueError, OverflowError)):
            plan.gather(whole, 0, start, stop)
    for at in (1, nbytes, 2**63, 2**64 - 1):
        with pytest.raises(ValueError, match="contiguous uint8"):
            plan.gather(whole, at, 0, nbytes)
    for into in (whole[: nbytes - 1], torch.zeros(2 * nbytes, dtype=torch.uint8)[::2], whole[:0]):
        with pytest.raises(ValueError, match="contiguous uint8"):
            plan.gather(into, 0, 0, nbytes)


@pytest.mark.parametrize("grad", [True, False])
def test_tensors_of_a_batch_have_a_version_counter_each(door, grad):
    """As if each had memory of its own: else changing one would make another's backward fail."""
    device = FakeDevice()
    ragged = [
        {"list": noise(1 + i, 9), "x": torch.ones(400), "y": torch.ones(70)} for i in range(3)
    ]
    with torch.set_grad_enabled(grad):
        batch = send(device, ragged, dict.fromkeys(ragged[0], Batched()))
        device.synchronize()
    assert mmcollate.stats()["fields"]["stage"] == 3
    leaves = [*batch["list"], batch["x"], batch["y"]]
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == 1
    for leaf in leaves:
        assert (leaf._version, leaf._base, leaf._is_view()) == (0, None, False)
        assert not leaf.requires_grad
    weight = torch.full((70,), 2.0, requires_grad=True)
    loss = (weight * batch["y"]).sum()
    batch["x"].mul_(weight.sum())
    batch["list"][0].zero_()
    assert [leaf._version for leaf in leaves] == [1, 0, 0, 1, 0]
    assert [leaf.requires_grad for leaf in leaves] == [False, False, False, True, False]
    loss.backward()
    assert torch.equal(weight.grad, torch.full((70,), 3.0))


FIRST_UNDER_A_MODE = """
import sys, torch
from mmcollate import Batched, Flat, collate
from mmcollate.testing import FakeDevice
from torch._subclasses.fake_tensor import FakeTensorMode

guards, asked = torch._C._dynamo.guards, []
made_by = guards._reinterpret_tensor
guards._reinterpret_tensor = lambda *given: asked.append(0) or made_by(*given)

def first(x):
    collate([{"x": torch.ones(5)}], {"x": Flat()})
    return (x * x).sum()

if sys.argv[1] == "fake":
    with FakeTensorMode():
        first(torch.ones(5))
else:
    getattr(torch.func, sys.argv[1])(first)(torch.ones(5))
print(len(asked))
device = FakeDevice()
items = [{"x": torch.full((3 + i, 100), float(i))} for i in range(5)]
batch = collate(items, {"x": Batched()}, device=device, pin_memory=True)
device.synchronize()
print(len(asked), all(map(torch.equal, batch["x"], [item["x"] for item in items])))
"""


@pytest.mark.parametrize("mode", ["fake", "grad", "functionalize"])
def test_what_is_tried_of_torch_is_tried_under_no_mode(mode):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_UNDER_A_MODE, mode],
        capture_output=True,
        text=True,
        check=False,
    )
    # Once to try it, and once for each tensor.
    assert (done.returncode, done.stdout) == (0, "0\n6 True\n"), done.stderr


def test_what_saving_a_batch_of_a_device_takes(tmp_path):
    device = FakeDevice()
    items = [{"x": torch.ones(40, 10), "y": torch.ones(400), "z": torch.ones(9).int()}] * 3
    batch = send(device, items, dict.fromkeys(items[0], Batched()))
    device.synchronize()
    with pytest.raises(RuntimeError, match="as different types"):
        torch.save(batch, tmp_path / "batch")
    torch.save(batch["y"], tmp_path / "whole")
    torch.save(batch["y"].clone(), tmp_path / "clone")
    assert (tmp_path / "whole").stat().st_size > retained_bytes(batch["y"]) > 9600
    assert (tmp_path / "clone").stat().st_size < 9600
    assert torch.equal(torch.load(tmp_path / "whole"), batch["y"].cpu())


def test_tensors_made_in_inference_mode_are_inference_tensors(door):
    device = FakeDevice()
    with torch.inference_mode():
        batch = send(device, [{"x": noise(70, 8)} for _ in range(3)], {"x": Batched()})
    assert batch["x"].is_inference()


def test_nothing_is_carved_outside_of_its_buffer(door):
    items = [{"x": noise(n, 100)} for n in (3, 2)]
    core = collation.collator()
    fields = {"x": Batched()}
    _, batch, plan = core.next_group(items, 0, 2, fields, FakeDevice(), True, None, True)
    assert batch is not None and plan is not None
    nbytes = plan.lay_out([False])[-1][1]
    whole = torch.zeros(4 * nbytes, dtype=torch.uint8)
    short = torch.zeros(nbytes - 4, dtype=torch.uint8)
    for buffer in (short, short[:0], whole[: nbytes - 4], whole[::2], whole.view(torch.int32)):
        with pytest.raises(ValueError, match="contiguous uint8 buffer with room"):
            plan.carve(0, [buffer], nbytes, batch)
        assert batch == {"x": [None, None]}
    with pytest.raises(ValueError, match="buffer is missing"):
        plan.carve(0, [], nbytes, batch)
    inside = torch.zeros(nbytes + 512, dtype=torch.uint8)[512:]
    assert plan.carve(0, [inside], nbytes, batch)
    assert batch["x"][0].data_ptr() == inside.data_ptr()
    assert batch["x"][1].data_ptr() == inside.data_ptr() + 1280


# What may be kept


def test_fields_that_outlive_their_batch_have_memory_of_their_own():
    device = FakeDevice()
    items = [
        {
            "a": noise(500, at=n),
            "b": noise(70, at=n),
            "same_embeds": noise(90, 4, at=n),
            "ragged_embeds": noise(n, 100, at=n),
            "kept": noise(80, at=n),
        }
        for n in (1, 3, 2)
    ]
    fields = dict.fromkeys(items[0], Batched())
    fields["kept"] = Batched(outlives_batch=True)
    batch = send(device, items, fields)
    device.stream.synchronize()
    assert is_right(batch, items, fields)
    assert device.copies == 1 + 1 + 3 + 1
    slack = 1024  # of the fake's allocations, and of rounding
    own = [batch["same_embeds"], batch["kept"], *batch["ragged_embeds"]]
    for x in own:
        assert x.nbytes <= retained_bytes(x) <= x.nbytes + slack
    storages = {x.untyped_storage().data_ptr() for x in [*own, batch["a"]]}
    assert len(storages) == len(own) + 1
    common = batch["a"].nbytes + batch["b"].nbytes
    assert common <= retained_bytes(batch["b"]) <= common + slack
    assert retained_bytes(batch["a"], batch["b"]) == retained_bytes(batch["b"])
    assert retained_bytes(*own) == sum(map(retained_bytes, own))
    assert retained_bytes() == 0
    kept = detach(batch["b"])
    assert_same(kept, batch["b"])
    assert retained_bytes(kept) == kept.nbytes
    assert detach(kept) is kept
    used = device.memory_bytes
    del batch["a"], batch["b"]
    assert device.memory_bytes <= used - common
    del batch, x
    assert device.memory_bytes == sum(-(-x.nbytes // 256) * 256 for x in own)


# Processes


def test_a_forked_child_has_an_arena_of_its_own():
    device = FakeDevice(manual=True)
    first = send(device, constant(1))
    staged = stage(constant(2), {"x": Flat()}, device=device)
    slots = staging.arena_of(device).slots
    before = {slot: memory.clone() for slot, memory in slots.items()}
    stats = arena_stats(device)

    def check() -> None:
        assert arena_stats(device)["pinned_bytes"] == 0
        assert arena_stats(device)["copies"] == 0
        for value in (3, 4, 5):
            batch = send(device, constant(value))
            device.stream.advance()
            assert is_all(batch, value)
        assert arena_stats(device)["pinned_bytes"] == 4 * MIB
        assert trim(device) == 4 * MIB
        gc.collect()
        # The parent's slots are neither written to nor unpinned here.
        assert all(torch.equal(slots[slot], memory) for slot, memory in before.items())
        assert device.pinned_bytes == 8 * MIB

    assert in_child(check) == 0
    assert arena_stats(device) == stats
    batch = staged.to()
    device.stream.advance()
    assert is_all(first, 1)
    assert is_all(batch, 2)


def test_children_forked_while_threads_stage_do_not_hang(monkeypatch):
    arena_of_slots(monkeypatch, 64 * KIB, 4)
    device, stop = FakeDevice(delay=1e-3), threading.Event()

    def work() -> None:
        while not stop.is_set():
            send(device, constant(1, 200 * KIB))
            trim(device)

    def check() -> None:
        for value in (2, 3):
            batch = send(device, constant(value, 200 * KIB))
            device.stream.synchronize()
            assert is_all(batch, value)

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


AT_EXIT = """
import threading
import torch
from mmcollate import Flat, collate, stage
from mmcollate.testing import FakeDevice

device, slow = FakeDevice(manual=True), FakeDevice(delay=0.002)
items = [{"x": torch.ones(1 << 18)}] * 2
kept = [stage(items, {"x": Flat()}, device=device) for _ in range(3)]
kept.append(stage(items, {"x": Flat()}, device=device).to())
kept.append(collate(items, {"x": Flat()}, device=device, pin_memory=True))
kept[0].kept = kept  # a cycle
started = threading.Barrier(3)

def work():
    mine = stage(items, {"x": Flat()}, device=slow)
    for _ in range(6):
        kept.append(collate(items, {"x": Flat()}, device=slow, pin_memory=True))
    # Not in a batch: torch itself aborts where a daemon thread frees a tensor at the end.
    started.wait()
    threading.Event().wait()

for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
started.wait()
"""


def test_the_interpreter_ends_cleanly_with_all_of_it_alive():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AT_EXIT],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Modes and settings of torch


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def copied(batch: dict[str, Any]) -> Any:
    """A copy, whose tensors are none of inference mode."""
    return reference.map_leaves(torch.clone, batch)


AROUND: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
    "meta by default": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "plain": contextlib.nullcontext,
}


@pytest.mark.parametrize("pageable", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_modes_change_neither_the_arena_nor_the_batch(monkeypatch, around, pageable):
    arena_of_slots(monkeypatch, 16 * KIB, 0 if pageable else 4)
    monkeypatch.setenv("MMCOLLATE_DEBUG", "1")
    device, dice = FakeDevice(manual=True), Dice(1)
    for step in range(6):
        items = dice.items(50 * KIB)
        mode = AROUND[around if step % 2 == 0 else "plain"]
        with mode():
            batch = send(device, items, FIELDS)
        device.stream.synchronize()
        assert batch["rows"].is_inference() == (around == "inference" and step % 2 == 0)
        assert is_right(copied(batch), items, FIELDS)
        # And across: gathered in the mode, sent outside of it.
        with mode():
            staged = stage(items, FIELDS, device=device)
        batch = staged.to()
        device.stream.synchronize()
        assert is_right(copied(batch), items, FIELDS)
    assert (device.peak_pinned_bytes == 0) == pageable
    assert reasons() == {}


def test_leaves_with_gradients_are_staged_where_none_are_recorded():
    device = FakeDevice(manual=True)
    items = [{"x": torch.ones(3, requires_grad=True), "y": torch.ones(3)} for _ in range(2)]
    fields = {"x": Batched(), "y": Batched()}
    with torch.no_grad():
        batch = send(device, items, fields)
    assert reasons() == {}
    device.stream.advance()
    assert batch["x"].tolist() == [[1] * 3] * 2
    assert not batch["x"].requires_grad


@pytest.mark.parametrize("pageable_copies_are_staged", [False, True])
@pytest.mark.parametrize("copies_are_ordered", [False, True])
@pytest.mark.parametrize("slots", [0, 4])
def test_copies_block_where_the_device_needs_it(
    monkeypatch, slots, copies_are_ordered, pageable_copies_are_staged
):
    device = FakeDevice(
        manual=True,
        copies_are_ordered=copies_are_ordered,
        pageable_copies_are_staged=pageable_copies_are_staged,
    )
    items = Dice(2).items(40 * KIB)
    large = pinned_leaf(device, LARGE)
    arena_of_slots(monkeypatch, 16 * KIB, slots)
    monkeypatch.setenv("MMCOLLATE_DIRECT", "1")
    items = [{**item, "large": x} for item in items for x in (large, noise(9, dtype=torch.uint8))]
    fields = {**FIELDS, "large": Flat()}
    batch = send(device, items, fields)
    blocks = device.copies if not copies_are_ordered else 0
    if copies_are_ordered and slots == 0 and not pageable_copies_are_staged:
        blocks = device.pageable_copies
    assert device.blocking_copies == blocks
    if not copies_are_ordered:
        assert is_right(batch, items, fields)
    del items
    device.stream.synchronize()
    assert arena_stats(device)["direct_copies"] > 0


# Capture


def test_while_a_stream_captures_nothing_is_pinned_asked_or_waited_for(monkeypatch):
    monkeypatch.setenv("MMCOLLATE_PINNED_MAX_MB", "8")
    device = FakeDevice(manual=True, pageable_copies_are_staged=True)
    first = send(device, constant(1))
    asked = []
    monkeypatch.setattr(FakeDevice, "_not_while_capturing", lambda self, what: asked.append(what))
    # What takes the reference waits in the fake, which knows no better.
    blocking = FakeDevice.copy
    monkeypatch.setattr(
        FakeDevice, "copy", lambda *args, blocking_=blocking, **_: blocking_(*args, blocking=False)
    )
    device.capturing = True
    items = [{"x": torch.full((3,), 2), "y": torch.full((2,), 3)} for _ in range(2)]
    fields = {"x": Flat(), "y": Batched()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = send(device, items, fields)
        staged = stage(items, fields, device=device)
        second = staged.to()
        stats = arena_stats(device)
        assert trim(device) == 0
        plan = explain(items, fields, device=device, pin_memory=True, file=io.StringIO())
    assert asked == []
    assert {field.why for field in plan.groups[0].fields} == {"the stream is capturing"}
    assert reasons() == {"capturing": 4}
    assert (stats["pinned_bytes"], stats["in_flight"]) == (4 * MIB, 1)
    device.capturing = False
    device.stream.advance()
    assert is_right(batch, items, fields)
    assert is_right(second, items, fields)
    assert is_all(first, 1)
    third = send(device, constant(3))
    device.stream.advance()
    assert is_all(third, 3)
    assert device.peak_pinned_bytes == 4 * MIB


def test_the_fake_device_refuses_what_a_capture_forbids():
    device = FakeDevice(manual=True)
    fence = device.fence()
    device.capturing = True
    for forbidden in (
        lambda: device.pinned(9),
        fence.query,
        fence.synchronize,
        device.synchronize,
    ):
        with pytest.raises(RuntimeError, match="while a stream captures"):
            forbidden()


# stage()


def test_a_staged_batch_goes_when_it_is_told_to():
    device, items = FakeDevice(manual=True), Dice(7).items(64 * KIB)
    staged = stage(items, FIELDS, device=device)
    assert (device.copies, device.memory_bytes, device.stream.pending()) == (0, 0, 0)
    assert census(device) == (0, 1, 0)
    assert not staged.ready()
    with pytest.raises(CollateRuntimeError, match=r"call to\(\) first"):
        staged.wait()
    batch = staged.to(device)
    assert device.copies > 0
    assert not staged.ready()
    assert census(device) == (0, 0, 1)
    device.stream.advance()
    assert staged.ready()
    assert is_right(batch, items, FIELDS)
    assert census(device) == (1, 0, 0)
    with pytest.raises(CollateRuntimeError, match="before"):
        staged.to()
    staged.close()
    staged.close()
    assert staged.ready()
    assert census(device) == (1, 0, 0)


def test_waiting_for_a_staged_batch_runs_its_copies():
    device = FakeDevice(manual=True)
    staged = stage(constant(1), {"x": Flat()}, device=device)
    batch = staged.to()
    staged.wait()
    assert is_all(batch, 1)
    assert staged.ready()


@pytest.mark.parametrize("how", ["closed", "dropped", "in a cycle"])
def test_a_staged_batch_that_goes_nowhere_gives_its_slots_back(monkeypatch, how):
    arena_of_slots(monkeypatch, 16 * KIB, 4)
    device = FakeDevice(manual=True)
    staged: Any = stage(
        [{"x": x["x"], "y": torch.ones(2)} for x in constant(1, 50 * KIB)],
        {"x": Flat(), "y": Flat()},
        device=device,
    )
    assert census(device) == (0, 4, 0)
    if how == "closed":
        staged.close()
        with pytest.raises(CollateRuntimeError, match="closed"):
            staged.to()
    elif how == "in a cycle":
        staged.itself = staged
    del staged
    gc.collect()
    assert census(device) == (4, 0, 0)
    assert (device.copies, device.memory_bytes) == (0, 0)


def test_a_staged_batch_goes_to_its_own_device_alone():
    device = FakeDevice(manual=True)
    staged = stage(constant(1), {"x": Flat()}, device=device)
    for other in (FakeDevice(), "cpu", "meta", torch.device("cpu"), "nonsense"):
        with pytest.raises(CollateValueError, match="staged for"):
            staged.to(other)
    batch = staged.to()
    staged.wait()
    assert is_all(batch, 1)


def test_there_is_no_staging_without_a_device():
    for device in ("cpu", "meta", torch.device("cpu")):
        for call in (
            lambda device=device: stage(constant(1), {"x": Flat()}, device=device),
            lambda device=device: arena_stats(device),
            lambda device=device: trim(device),
        ):
            with pytest.raises(CollateValueError, match="no such accelerator"):
                call()


NO_MEMORY = {
    "staged": ([{"x": torch.arange(10), "y": torch.ones(3)}] * 2, 0),
    "staged, the second part": ([{"x": torch.arange(10), "y_embeds": torch.ones(3)}] * 2, 1),
    "all of the reference": ([{"x": torch.arange(10)}] * 2, 0),
    "and one of the reference": ([{"x": torch.arange(9), "y": torch.arange(4)}] * 2, 1),
}


@pytest.mark.parametrize("what", NO_MEMORY)
def test_a_device_without_memory_can_be_tried_again(what):
    items, after = NO_MEMORY[what]
    device = FakeDevice(manual=True)
    if what == "and one of the reference":
        items = [{"x": pinned_leaf(device, LARGE), "y": torch.arange(4), "z": torch.ones(3)}]
    fields = dict.fromkeys(items[0], Flat())
    staged = stage(items, fields, device=device)
    slots = census(device)
    error = torch.OutOfMemoryError("none")
    empty, calls = device.empty, []

    def failing(nbytes: int) -> torch.Tensor:
        calls.append(nbytes)
        if len(calls) in (after + 1, 2 * (after + 1)):
            raise error
        return empty(nbytes)

    device.empty = failing  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            staged.to()
        assert raised.value is error
        del raised
        # Nothing is held meanwhile, or there might be no memory for the next try.
        error.__traceback__ = None
        gc.collect()
        assert device.memory_bytes == 0
        assert census(device) == slots
    batch = staged.to()
    staged.wait()
    assert is_right(batch, items, fields)
    assert census(device)[1:] == (0, 0)


@pytest.mark.parametrize("pageable_copies_are_staged", [False, True])
def test_more_than_the_cap_can_be_staged_at_one_time(monkeypatch, pageable_copies_are_staged):
    slot, slots = 16 * KIB, 6
    arena_of_slots(monkeypatch, slot, slots)
    device = FakeDevice(manual=True, pageable_copies_are_staged=pageable_copies_are_staged)
    all_items = [Dice(seed).items(60 * KIB) for seed in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = [stage(items, FIELDS, device=device) for items in all_items]
    assert census(device) == (0, slots, 0)
    batches = [staged.to() for staged in reversed(many)]
    many[0].wait()
    assert device.pageable_copies > 0
    for batch, items in zip(reversed(batches), all_items, strict=True):
        assert is_right(batch, items, FIELDS)
    assert device.peak_pinned_bytes == slot * slots
    assert census(device) == (slots, 0, 0)


def test_staged_batches_and_others_cross(monkeypatch):
    """Whatever comes between stage() and to(), and in whatever order they go."""
    arena_of_slots(monkeypatch, 16 * KIB, 8)
    device, dice = FakeDevice(delay=1e-3), Dice(11)
    waiting: list[tuple[Any, Items]] = []
    done = []
    for _ in range(150):
        items = dice.items(dice.choice([2 * KIB, 30 * KIB]))
        if dice.random() < 0.5:
            waiting.append((stage(items, FIELDS, device=device), items))
        else:
            done.append((send(device, items, FIELDS), items))
        if len(waiting) > 3:
            staged, items = waiting.pop(dice.randrange(len(waiting)))
            if dice.random() < 0.8:
                done.append((staged.to(), items))
    done.extend((staged.to(), items) for staged, items in waiting)
    del staged
    device.stream.synchronize()
    assert all(is_right(batch, items, FIELDS) for batch, items in done)
    assert census(device)[1:] == (0, 0)
    assert device.peak_pinned_bytes <= 128 * KIB


# explain()


@pytest.mark.parametrize("case", ["small", "mixed", "staged"])
def test_explain_says_what_stats_then_count(case):
    device = FakeDevice(manual=True)
    items: Items = [
        {
            "pinned": pinned_leaf(device, LARGE),
            "casts": torch.ones(2, dtype=(torch.float32, torch.float64)[k]),
            "expanded": torch.ones(1).expand(3),
            "rows": noise(k + 1, 5),
            "ragged": noise(k + 1, 5),
            "kept": torch.tensor(k),
            "words": "word",
            "shared": torch.arange(3),
        }
        for k in range(2)
    ]
    fields: dict[str, Any] = {**dict.fromkeys(items[0], Batched()), "rows": Flat()}
    fields |= {"kept": Batched(keep_on_cpu=True), "shared": Shared()}
    if case == "small":
        items = [{"rows": item["rows"], "words": "word"} for item in items]
    elif case == "staged":
        items = [{name: item[name] for name in ("rows", "ragged", "kept")} for item in items]
    options = {"device": device, "pin_memory": True}
    before = (device.copies, device.pinned_bytes, device.memory_bytes)
    [group] = explain(items, fields, file=io.StringIO(), **options).groups
    assert (device.copies, device.pinned_bytes, device.memory_bytes) == before
    assert reasons() == {}
    batch = collate(items, fields, **options)
    device.stream.advance()
    assert is_right(batch, items, fields)
    counted = {way: n for way, n in mmcollate.stats()["fields"].items() if n}
    expected: dict[str, int] = {}
    whys: dict[str, int] = {}
    for field in group.fields:
        expected[field.way] = expected.get(field.way, 0) + 1
        if field.way == "reference":
            whys[field.why] = whys.get(field.why, 0) + 1
    assert counted == expected
    assert {mmcollate.explanation.REASONS[reason]: n for reason, n in reasons().items()} == whys
    ways = {field.name: field.way for field in group.fields}
    assert ways["rows"] == ("reference" if case == "small" else "stage")
    if case == "mixed":
        assert ways["pinned"] == "stage"
        assert reasons().keys() == {"mixed_dtypes", "expanded"}
    if case == "small":
        assert reasons() == {"small": 1}


def test_explain_knows_pinned_leaves():
    device = FakeDevice(manual=True)
    items = [{"x": pinned_leaf(device, 9), "y": noise(LARGE)}]
    fields = {"x": Batched(), "y": Flat()}
    out = io.StringIO()
    [group] = explain(items, fields, device=device, pin_memory=True, file=out).groups
    assert [field.way for field in group.fields] == ["reference", "stage"]
    assert "in pinned memory already" in out.getvalue()
    send(device, items, fields)
    assert reasons() == {"pinned_leaf": 1}
    [group] = explain(items, fields, device=device, file=out).groups
    assert [field.way for field in group.fields] == ["reference", "reference"]


# Debug, trim


def test_a_write_to_a_free_slot_is_found(monkeypatch):
    monkeypatch.setenv("MMCOLLATE_DEBUG", "1")
    device = FakeDevice(manual=True)
    for value in (1, 2):
        batch = send(device, constant(value))
        device.stream.advance()
        assert is_all(batch, value)
    assert census(device) == (1, 0, 0)
    [memory] = staging.arena_of(device).slots.values()
    assert (memory == pinned.POISON).all()
    memory[12345] = 1
    with pytest.raises(AssertionError, match="slot 0 was written to while it was free"):
        send(device, constant(3))
    # Who writes to it may do so again: it is not used any more.
    batch = send(device, constant(4))
    device.stream.advance()
    assert is_all(batch, 4)


def test_trimming_unpins_what_is_free_and_the_arena_grows_again(monkeypatch):
    arena_of_slots(monkeypatch, 16 * KIB, 4)
    device = FakeDevice(manual=True)
    freed = []
    device.free_pinned = lambda: freed.append(device.pinned_bytes)  # type: ignore[method-assign]
    assert trim(device) == 0
    assert freed == []
    fields = {"x": Flat(), "y": Flat()}
    first = [{**item, "y": torch.ones(3)} for item in constant(1, 30 * KIB)]
    second = [{**item, "y": torch.ones(3)} for item in constant(2, 30 * KIB)]
    early = send(device, first, fields)
    device.stream.advance()
    late = send(device, second, fields)
    staged = stage(first, fields, device=device)
    assert census(device) == (0, 2, 2)
    # In flight and leased: these stay.
    assert trim(device) == 0
    staged.close()
    assert trim(device) == 32 * KIB
    assert device.pinned_bytes == 32 * KIB == arena_stats(device)["pinned_bytes"]
    # They had been unpinned when the device was asked to give them back.
    assert freed == [32 * KIB]
    again = send(device, first, fields)
    assert device.pinned_bytes == 64 * KIB
    device.stream.advance()
    assert trim(device) == 64 * KIB
    assert device.pinned_bytes == 0
    for batch, value in ((early, 1), (late, 2), (again, 1)):
        assert is_all(batch, value)
    assert arena_stats(device)["peak_pinned_bytes"] == 64 * KIB == device.peak_pinned_bytes
    last = send(device, second, fields)
    device.stream.advance()
    assert is_all(last, 2)


def test_a_slot_that_an_interrupt_leaves_half_made_comes_back():
    class Interrupted(dict[int, torch.Tensor]):
        def __getitem__(self, slot: int) -> torch.Tensor:
            raise KeyboardInterrupt

    device = FakeDevice()
    send(device, constant(1))
    device.synchronize()
    arena = staging.arena_of(device)
    arena.slots = Interrupted(arena.slots)
    with pytest.raises(KeyboardInterrupt):
        send(device, constant(2))
    arena.slots = dict(arena.slots)
    assert census(device) == (1, 0, 0)


@pytest.mark.parametrize("what", ["copied", "failed"])
def test_a_slot_that_was_trimmed_is_held_by_nobody(monkeypatch, what):
    """Or more than the cap is pinned once the arena has grown again."""
    device, left = FakeDevice(), []
    close = pinned.Slot.close

    def close_and_trim(self: pinned.Slot) -> None:
        close(self)
        staging.arena_of(device).trim()
        left.append(device.pinned_bytes)

    if what == "copied":
        monkeypatch.setattr(pinned.Slot, "close", close_and_trim)
        send(device, constant(1))
        assert left[0] == 0
        return
    monkeypatch.setattr(staging.Transfer, "_parts_with_bytes", lambda self: [(0, 0, 1 << 40)])
    with pytest.raises(ValueError, match="range outside") as raised:
        send(device, constant(1))
    assert census(device) == (1, 0, 0)
    trim(device)
    assert device.pinned_bytes == 0
    assert raised.value.__traceback__ is not None


def test_trimming_while_threads_stage(monkeypatch):
    arena_of_slots(monkeypatch, 16 * KIB, 4)
    device, stop = FakeDevice(delay=1e-3), threading.Event()

    def work(value: int) -> None:
        kept = []
        for step in range(60):
            kept.append(send(device, constant(value + step, 80 * KIB)))
        device.stream.synchronize()
        assert all(is_all(batch, value + step) for step, batch in enumerate(kept))

    def trimming() -> None:
        while not stop.is_set():
            trim(device)
            assert device.pinned_bytes <= 64 * KIB

    def all_work() -> None:
        try:
            run_together(*(lambda v=value: work(v) for value in (1, 100, 180)))
        finally:
            stop.set()

    run_together(trimming, all_work)
    assert census(device)[1:] == (0, 0)
    assert arena_stats(device)["peak_pinned_bytes"] <= 64 * KIB


# Groups and lists


def test_each_group_is_staged():
    device, items = FakeDevice(manual=True), [*constant(1, 100 * KIB), *constant(2, 200 * KIB)]
    items = [{**item, "n": torch.tensor(k // 2)} for k, item in enumerate(items)]
    fields = {"x": Flat(), "n": Shared()}
    groups = mmcollate.collate_groups(items, fields, device=device, pin_memory=True)
    first = next(groups)
    assert device.copies == 1
    [second] = groups
    assert device.copies == 2
    device.stream.advance()
    assert reasons() == {}
    for group, own in ((first, items[:2]), (second, items[2:])):
        assert group.num_items == 2
        assert is_right(group.batch, own, fields)


@pytest.mark.parametrize("slots", [0, 1, 8])
def test_lists_of_tensors_are_as_the_reference_has_them(monkeypatch, slots):
    arena_of_slots(monkeypatch, SLOT, slots)
    device = FakeDevice(delay=1e-4)
    items = [
        {
            "lists": [noise(k + 1, 30), noise(2000 * k), noise(1, dtype=torch.int64)],
            "joined_embeds": [noise(50, at=k)] * k,
            "x": noise(k, 7),
        }
        for k in range(3)
    ]
    fields = {"lists": Batched(), "joined_embeds": Flat(), "x": Flat()}
    for _ in range(2):
        batch = send(device, items, fields)
        device.stream.synchronize()
        # The reference hands on the same object twice, which is two on a device.
        assert is_right(copied(batch), [copied(item) for item in items], fields)
    batch = stage(items, fields, device=device).to()
    device.stream.synchronize()
    assert is_right(copied(batch), [copied(item) for item in items], fields)
    assert census(device)[1:] == (0, 0)


def test_memory_can_be_reserved(monkeypatch):
    arena_of_slots(monkeypatch, 16 * KIB, 4)
    device = FakeDevice(manual=True)
    assert mmcollate.reserve(device, 17 * KIB) == 32 * KIB == device.pinned_bytes
    assert mmcollate.reserve(device, 1) == 32 * KIB
    assert census(device) == (2, 0, 0)
    assert mmcollate.reserve(device) == 64 * KIB == device.pinned_bytes
    assert mmcollate.reserve(device, MIB) == 64 * KIB
    batch = send(device, constant(1, 100 * KIB))
    device.stream.synchronize()
    assert is_all(batch, 1)
    assert device.pinned_bytes == 64 * KIB


@pytest.mark.filterwarnings("ignore:mmcollate. can't pin:RuntimeWarning")
@pytest.mark.parametrize("pageable", [False, True])
def test_the_fence_of_a_staged_batch_is_its_slots_and_waited_for_if_it_fails(pageable):
    device = FakeDevice(manual=True, pinned_budget=0 if pageable else None)
    batch = mmcollate.stage(
        [{"x": torch.ones(40_000), "y": torch.tensor(n)} for n in (5, 6)],
        {"x": Flat(), "y": Batched()},
        device=device,
    )
    calls = []

    def fence() -> Any:
        calls.append(None)
        raise RuntimeError("no more events")

    device.fence = fence  # type: ignore[method-assign]
    made = batch.to()
    assert batch.ready() and len(calls) == 1
    assert made["y"].tolist() == [5, 6]
    batch.wait(FakeStream(device))
    batch.wait()
    assert mmcollate.arena_stats(device)["leased"] == 0


def test_an_interrupt_while_a_fence_is_made_does_not_lose_the_slot():
    device = FakeDevice()
    device.fail_next("fence", KeyboardInterrupt())
    items = [{"x": torch.ones(40_000)} for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        mmcollate.collate(items, {"x": Flat()}, device=device, pin_memory=True)
    stats = mmcollate.arena_stats(device)
    assert (stats["leased"], stats["free"]) == (0, 1)


def test_reserving_while_the_stream_captures_pins_nothing():
    device = FakeDevice()
    device.capturing = True
    assert mmcollate.reserve(device, 8 << 20) == 0


# Interrupts, re-entry, ownership


class Interrupt(BaseException):
    """As KeyboardInterrupt, at a place that a test chooses."""


@pytest.mark.parametrize("where", ["before", "behind"])
def test_an_interrupt_while_slots_land_loses_none(monkeypatch, where):
    arena_of_slots(monkeypatch, 4 * MIB, 2)
    device = FakeDevice(manual=True)
    arena = staging.arena_of(device)
    batches = [send(device, constant(value)) for value in (1, 2)]
    device.stream.advance()
    free = pinned.Arena.free

    def interrupted(self: pinned.Arena, pair: tuple[int, int]) -> None:
        if where == "behind":
            free(self, pair)
        raise Interrupt

    monkeypatch.setattr(pinned.Arena, "free", interrupted)
    with pytest.raises(Interrupt):
        arena.land()
    monkeypatch.setattr(pinned.Arena, "free", free)
    assert census(device) == (2, 0, 0)
    batches += [send(device, constant(value)) for value in (3, 4)]
    device.stream.advance()
    assert all(is_all(batch, value) for value, batch in enumerate(batches, 1))
    assert device.peak_pinned_bytes == 8 * MIB


def test_what_runs_while_slots_are_pinned_or_asked_may_use_the_arena():
    """A lock that is held meanwhile would never be given back."""

    class Busy(FakeDevice):
        depth = 0

        def pinned(self, nbytes: int) -> torch.Tensor:
            if self.depth < 2:
                self.depth += 1
                arena_stats(self)
                send(self, constant(7))
            return super().pinned(nbytes)

    with at_most(20):
        device = Busy(manual=False)
        batch = send(device, constant(1))
        seen: list[Any] = []
        device.manual = True
        device.stream.launch(lambda: seen.append(arena_stats(device)["slot_bytes"]))
        other = send(device, constant(2))
        device.manual = False
        third = send(device, constant(3))
        device.synchronize()
    assert seen == [4 * MIB]
    for value, made in ((1, batch), (2, other), (3, third)):
        assert is_all(made, value)


def test_a_staged_batch_can_not_be_doubled():
    device = FakeDevice()
    staged = stage(constant(1), {"x": Flat()}, device=device)
    for double in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="slots of the arena"):
            double(staged)
    batch = staged.to()
    device.synchronize()
    assert is_all(batch, 1)


def test_one_of_several_threads_gets_a_staged_batch():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(30):
            device = FakeDevice(manual=True)
            staged = stage(constant(1), {"x": Flat()}, device=device)
            made: list[Any] = []
            refused: list[Any] = []

            def take(staged: Any = staged, made: Any = made, refused: Any = refused) -> None:
                try:
                    made.append(staged.to())
                except CollateRuntimeError as error:
                    refused.append(error)

            run_together(take, take)
            device.stream.advance()
            assert (len(made), len(refused)) == (1, 1)
            assert is_all(made[0], 1)
            assert census(device)[1:] == (0, 0)
    finally:
        sys.setswitchinterval(interval)


def test_a_staged_batch_does_not_enter_a_capture():
    device = FakeDevice(manual=True)
    staged = stage(constant(1), {"x": Flat()}, device=device)
    device.capturing = True
    with pytest.raises(CollateRuntimeError, match="the stream captures"):
        staged.to()
    assert device.copies == 0
    device.capturing = False
    batch = staged.to()
    device.stream.advance()
    assert is_all(batch, 1)


def test_a_cycle_through_the_items_is_collected():
    device = FakeDevice()
    leaf = torch.ones(40_000)
    leaf.owner = stage(  # type: ignore[attr-defined]
        [{"x": leaf, "y": torch.ones(3).to_sparse()}], {"x": Flat(), "y": Flat()}, device=device
    )
    gone = weakref.ref(leaf)
    assert census(device) == (0, 1, 0)
    del leaf
    gc.collect()
    assert gone() is None
    assert census(device) == (1, 0, 0)


def test_a_device_that_is_dropped_is_freed():
    device = FakeDevice()
    send(device, constant(1))
    gone = weakref.ref(device)
    del device
    gc.collect()
    assert gone() is None


def test_gathers_of_many_leaves_read_each_once(monkeypatch):
    # 20,000 leaves through slots that hold a few of them each: seconds, if each read all.
    arena_of_slots(monkeypatch, 4 * KIB, 16)
    device = FakeDevice()
    leaves = noise(20_000 * 25, dtype=torch.uint8).split(25)
    items = [{"x": leaf, "y": leaf[: 1 + k % 25]} for k, leaf in enumerate(leaves)]
    fields = {"x": Batched(), "y": Flat()}
    with at_most(20):
        batch = send(device, items, fields)
        device.synchronize()
    assert is_right(batch, items, fields)


def test_the_interpreter_ends_quietly_with_a_staged_batch():
    script = (
        "import torch\n"
        "from mmcollate import Flat, stage\n"
        "from mmcollate.testing import FakeDevice\n"
        "device = FakeDevice()\n"
        "kept = [stage([{'x': torch.ones(40_000)}], {'x': Flat()}, device=device)]\n"
        "kept.append(kept)\n"
    )
    assert run_script(script) == (0, "", "")

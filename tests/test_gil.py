"""Threads, processes and memory: who may run meanwhile, who survives, what is freed when."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import mmcollate
import pytest
import torch
from mmcollate import Batched, Flat, collate
from processes import in_child, resident
from torch.utils.data import DataLoader

MIB = 1 << 20
DETACHES_FROM = MIB


def sized(nbytes: int) -> list[dict[str, torch.Tensor]]:
    """Two items whose batch has this many bytes."""
    leaf = torch.arange(nbytes // 2, dtype=torch.int32).to(torch.uint8)
    return [{"x": leaf}, {"x": leaf}]


# The interpreter lock


def test_two_large_gathers_run_at_one_time():
    # Impossible while either holds the interpreter lock.
    items, tries = sized(64 * MIB), 50
    together = threading.Barrier(2)
    met = threading.Event()
    mmcollate.reset_stats()

    def work() -> None:
        for _ in range(tries):
            together.wait(60)
            if met.is_set():
                return
            collate(items, {"x": Batched()})
            if mmcollate.stats()["detached_peak"] == 2:
                met.set()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mmcollate.stats()["detached_peak"] == 2


@pytest.mark.parametrize(("nbytes", "detached"), [(DETACHES_FROM - 2, 0), (DETACHES_FROM, 1)])
def test_only_large_gathers_give_the_lock_up(nbytes, detached):
    items = sized(nbytes)
    mmcollate.reset_stats()
    assert collate(items, {"x": Batched()})["x"].nbytes == nbytes
    assert mmcollate.stats()["detached_gathers"] == detached
    assert mmcollate.stats()["detached_peak"] == detached


def test_threads_that_share_items_get_the_same_batches():
    items, expected = sized(2 * MIB), torch.stack([x["x"] for x in sized(2 * MIB)])
    wrong: list[int] = []

    def work() -> None:
        for i in range(50):
            if not torch.equal(collate(items, {"x": Batched()})["x"], expected):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("form", ["mappings", "engine items"])
def test_items_that_another_thread_changes_give_a_batch_or_an_error(form):
    leaf = torch.arange(3)
    names = [f"x{k}" for k in range(30)]
    fields: Any = {name: Batched() for name in [*names, "extra"]}
    if form == "mappings":
        items: Any = [dict.fromkeys(names, leaf) for _ in range(3)]
        changed, value = items[1], leaf
    else:
        inputs = pytest.importorskip("vllm.multimodal.inputs", reason="needs vLLM")
        value = inputs.MultiModalFieldElem(data=leaf, field=inputs.MultiModalBatchedField())
        items = [inputs.MultiModalKwargsItem(dict.fromkeys(names, value)) for _ in range(3)]
        changed, fields = items[1].data, None
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            changed["extra"] = value
            changed.pop("x3", None)
            changed["x3"] = value
            changed.pop("extra", None)

    expected, ends = torch.stack([leaf] * 3), set()
    thread = threading.Thread(target=change)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        until = time.monotonic() + 30
        while time.monotonic() < until and not (dict in ends and len(ends) > 1):
            try:
                batch = collate(items, fields)
            except mmcollate.MMCollateError as error:
                ends.add(type(error))
            else:
                ends.add(dict)
                assert all(torch.equal(out, expected) for out in batch.values())
    finally:
        sys.setswitchinterval(before)
        stop.set()
        thread.join()
    assert dict in ends
    assert len(ends) > 1, "nothing was changed meanwhile"


# Processes


def test_a_forked_child_collates_after_large_gathers_of_its_parent():
    items = sized(8 * MIB)
    expected = collate(items, {"x": Batched()})["x"]

    def check() -> None:
        assert torch.equal(collate(items, {"x": Batched()})["x"], expected)
        assert torch.equal(expected, torch.stack([x["x"] for x in items]))

    assert in_child(check) == 0


def test_a_child_forked_during_a_large_gather_collates():
    items, stop = sized(16 * MIB), threading.Event()
    mmcollate.reset_stats()

    def work() -> None:
        while not stop.is_set():
            collate(items, {"x": Batched()})

    def check() -> None:
        assert collate(items, {"x": Batched()})["x"].nbytes == 16 * MIB

    busy = threading.Thread(target=work)
    busy.start()
    try:
        ends = [in_child(check) for _ in range(10)]
    finally:
        stop.set()
        busy.join()
    assert ends == [0] * 10
    assert mmcollate.stats()["detached_gathers"] > 0


FORKS_WHILE_FIRST_USED = """
import os, signal, sys, threading
import torch
from mmcollate import Batched, Flat, Shared, collate

leaf = torch.arange(6.0).reshape(2, 3)
items = [{"a": leaf, "b": leaf, "c": leaf.int(), "d": 1} for _ in range(4)]
fields = {"a": Batched(keep_on_cpu=True), "b": Flat(dim=1), "c": Shared(), "d": Batched()}
start = threading.Barrier(7)

def use():
    start.wait()
    for _ in range(200):
        collate(items, fields)

threads = [threading.Thread(target=use) for _ in range(6)]
for thread in threads:
    thread.start()
start.wait()
children = []
for _ in range(12):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        os._exit(0 if collate(items, fields)["b"].shape == (2, 12) else 1)
    children.append(pid)
for thread in threads:
    thread.join()
sys.exit(str([code for pid in children if (code := os.waitpid(pid, 0)[1])] or ""))
"""


def test_children_forked_while_threads_collate_for_the_first_time_do_not_hang():
    # Whatever is set up at first use must not be a lock that a child can find taken. What torch is
    # asked to compute is left out, such as whether shared floats are equal: there it gives up the
    # interpreter lock, and a child forked while a thread calls one of its operations for the first
    # time waits for ever (in `__cxa_guard_acquire`).
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FORKS_WHILE_FIRST_USED],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.stderr.strip() == "", done.stderr


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_data_loader_collates_in_its_workers(context):
    fields = {"pixels": Flat(), "grid": Batched(keep_on_cpu=True), "large": Batched()}
    items = [
        {
            "pixels": torch.full((i + 1, 3), float(i)),
            "grid": torch.tensor([1, i, i]),
            "large": torch.full((MIB,), i, dtype=torch.uint8),
        }
        for i in range(6)
    ]
    collator = functools.partial(collate, fields=fields)
    collator(items)
    loader = DataLoader(
        items,
        batch_size=3,
        num_workers=2,
        collate_fn=collator,
        multiprocessing_context=context,
        timeout=120,
    )
    batches = list(loader)
    assert len(batches) == 2
    for batch, of in zip(batches, (items[:3], items[3:]), strict=True):
        expected = collator(of)
        assert list(batch) == list(expected)
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


AT_EXIT = {
    "views alive": """
kept = [collate(items, {"x": Batched()}), collate(items[:1], {"x": Batched()})]
""",
    "a daemon thread in collate": """
# Children of fork end as any interpreter does, without importing torch again. They keep all
# batches: torch itself aborts where a daemon thread is freeing a tensor when the interpreter ends.
kept = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        mmcollate.reset_stats()
        def work():
            while True:
                kept.append(collate(items, {"x": Batched()}))
        threading.Thread(target=work, daemon=True).start()
        while mmcollate.stats()["detached_gathers"] < 3:
            pass
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, code
""",
}


@pytest.mark.parametrize("what", AT_EXIT)
def test_the_interpreter_ends_cleanly_with(what):
    script = (
        "import os, sys, threading, torch, mmcollate\n"
        "from mmcollate import Batched, collate\n"
        "items = [{'x': torch.zeros(1 << 20, dtype=torch.uint8)}] * 2\n"
        f"{AT_EXIT[what]}"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Memory


def fails() -> None:
    """Fails after the gather of a field before."""
    items = [{"x": sized(4 * MIB)[0]["x"], "y": [1]}, {"x": sized(4 * MIB)[0]["x"], "y": 2}]
    with pytest.raises(mmcollate.CollateTypeError):
        collate(items, {"x": Batched(), "y": Flat()})


@pytest.mark.parametrize(
    ("rounds", "make"),
    [
        (2000, functools.partial(collate, sized(2 * MIB), {"x": Batched(keep_on_cpu=True)})),
        (2000, functools.partial(collate, sized(2 * MIB), {"x": Flat()})),
        (300, fails),
    ],
    ids=["kept", "bound for a device", "failing"],
)
def test_batches_that_are_dropped_are_freed(rounds, make):
    make()
    before = resident()
    for _ in range(rounds):
        make()
    # All of them together are more than a gigabyte.
    assert resident() - before < 100 * MIB


def test_a_large_kept_field_goes_with_its_own_tensor():
    leaf = torch.arange(64 * MIB, dtype=torch.int32).to(torch.uint8)
    small = torch.arange(5)
    fields = {"large": Batched(keep_on_cpu=True), "small": Batched(keep_on_cpu=True)}
    batch = collate([{"large": leaf, "small": small}] * 2, fields)
    before = resident()
    del batch["large"]
    assert resident() - before < -100 * MIB
    assert batch["small"].tolist() == [list(range(5))] * 2


def test_one_of_the_small_kept_fields_alone_keeps_their_buffer():
    # 200 batches of 16 fields of 64 KiB.
    leaf = torch.arange(8 << 10, dtype=torch.int32)
    items = [{f"x{k}": leaf for k in range(16)}] * 2
    fields = {f"x{k}": Batched(keep_on_cpu=True) for k in range(16)}
    before = resident()
    kept = [collate(items, fields)["x3"] for _ in range(200)]
    assert resident() - before > 120 * MIB
    assert all(torch.equal(x, torch.stack([leaf, leaf])) for x in kept)
    kept.clear()
    assert resident() - before < 60 * MIB


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another thread"])
def test_outputs_outlive_items_and_one_another(elsewhere):
    names = [f"f{i}" for i in range(4)]
    fields = {name: Batched(keep_on_cpu=name != "f3") for name in names}
    leaves = [{n: torch.full((MIB,), i, dtype=torch.uint8) for i, n in enumerate(names)}] * 2
    sources = [weakref.ref(leaf) for leaf in leaves[0].values()]
    batch = collate(leaves, fields)
    doomed = [batch.pop("f0"), batch.pop("f2"), leaves]
    del leaves

    def drop() -> None:
        doomed.clear()

    if elsewhere:
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
    else:
        drop()
    gc.collect()
    assert [ref() for ref in sources] == [None] * 4
    # Whatever was freed by mistake is overwritten.
    garbage = [torch.full((2 * MIB,), 255, dtype=torch.uint8) for _ in range(32)]
    assert (batch["f1"] == 1).all()
    assert (batch["f3"] == 3).all()
    assert len(garbage) == 32


def test_the_view_of_one_item_keeps_its_memory():
    batch = collate([{"x": torch.full((MIB,), 7, dtype=torch.uint8)}], {"x": Batched()})
    garbage = [torch.full((MIB,), 255, dtype=torch.uint8) for _ in range(32)]
    assert (batch["x"] == 7).all()
    assert len(garbage) == 32

"""``MMCOLLATE_THREADS``: helpers take part in large copies, bit for bit, and are no burden else."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mmcollate import Batched, Flat, _core, collate, collation, config, reset_stats, stats
from mmcollate.testing import FakeDevice
from processes import in_child, run_script

MIB = 1 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
two_cpus = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two CPUs: on one, nothing is shared",
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Two, which the first batch would set to one."""
    collation.collator()
    _core.set_threads(2)
    reset_stats()
    yield
    _core.set_threads(1)


def bytes_of(seed: int, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8).to(dtype)


def shared() -> int:
    return stats()["shared_pieces"]


def batch_of(leaves: list[torch.Tensor], field: Batched | Flat, **target: object) -> torch.Tensor:
    result = collate([{"x": leaf} for leaf in leaves], {"x": field}, **target)["x"]
    assert isinstance(result, torch.Tensor)
    return result


KINDS = {
    "stacked": (Batched(), [bytes_of(i, 7 * MIB + 13) for i in range(3)]),
    "joined": (Flat(), [bytes_of(i, 2 * MIB + 999 * i, 3) for i in range(4)]),
    "joined along dim 1": (Flat(dim=1), [bytes_of(i, 1000, 5000 + i) for i in range(3)]),
    "padded": (Flat(), [bytes_of(i, 3, 1500 + i, 1000) for i in range(4)]),
    "strided": (Batched(), [bytes_of(i, 3000, 2000).T for i in range(3)]),
    "small leaves": (Batched(), [bytes_of(i, 5003) for i in range(3000)]),
}


@two_cpus
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_the_same(kind):
    field, leaves = KINDS[kind]
    seen = 0
    for _ in range(5):
        ours = batch_of(leaves, field)
        seen += shared()
        _core.set_threads(1)
        reset_stats()
        alone = batch_of(leaves, field)
        assert shared() == 0
        assert stats()["fields"]["gather"] == 1
        _core.set_threads(2)
        assert torch.equal(ours, alone)
    assert seen > 0


@two_cpus
def test_what_is_bound_for_a_device_is_shared_too(monkeypatch):
    monkeypatch.setenv("MMCOLLATE_STAGING_CHUNK_MB", "32")
    leaves = [bytes_of(i, 3 * MIB + 7 * i) for i in range(6)]
    device = FakeDevice()
    for _ in range(5):
        batch = collate(
            [{"x": leaf} for leaf in leaves], {"x": Batched()}, device=device, pin_memory=True
        )["x"]
        device.synchronize()
        assert all(map(torch.equal, batch, leaves))
    assert stats()["fields"]["stage"] == 5
    assert shared() > 0


def test_small_batches_are_not_shared():
    for _ in range(20):
        batch_of([bytes_of(i, MIB) for i in range(7)], Batched())
    assert shared() == 0


@two_cpus
def test_batches_of_several_threads_do_not_mix():
    wrong: list[int] = []

    def collate_own(mark: int) -> None:
        leaves = [torch.full((3 * MIB + mark,), mark * 10 + k, dtype=torch.uint8) for k in range(4)]
        expected = torch.stack(leaves)
        wrong.extend(
            mark for _ in range(25) if not torch.equal(batch_of(leaves, Batched()), expected)
        )

    workers = [threading.Thread(target=collate_own, args=(mark,)) for mark in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert shared() > 0


@two_cpus
def test_a_forked_child_has_helpers_of_its_own():
    leaves = [bytes_of(i, 6 * MIB) for i in range(3)]
    expected = torch.stack(leaves)
    batch_of(leaves, Batched())

    def check() -> None:
        for _ in range(10):
            # Not `torch.equal`, whose first call in a child may wait for ever: see test_gil.py.
            assert bytes(batch_of(leaves, Batched()).numpy()) == bytes(expected.numpy())
        assert shared() > 0

    reset_stats()
    for _ in range(3):
        assert in_child(check) == 0
    assert bool((batch_of(leaves, Batched()) == expected).all())


def helpers() -> list[Path]:
    return [
        task
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().strip() == "mmcollate"
    ]


@two_cpus
@linux
def test_helpers_sleep_and_are_sent_no_signals():
    for _ in range(3):
        batch_of([bytes_of(i, 8 * MIB) for i in range(3)], Batched())
    [helper] = helpers()

    def ticks() -> int:
        fields = (helper / "stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(0.5)
    assert ticks() == before
    status = dict(line.split(":", 1) for line in (helper / "status").read_text().splitlines())
    # SIGINT, SIGTERM, SIGCHLD, SIGUSR1: the host process's own threads get them.
    for signal_number in (2, 15, 17, 10):
        assert int(status["SigBlk"], 16) >> (signal_number - 1) & 1


ONE_CPU = """
import os, torch
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import mmcollate
leaf = torch.ones(12 << 20, dtype=torch.uint8)
for _ in range(5):
    mmcollate.collate([{"x": leaf}] * 2, {"x": mmcollate.Batched()})
print(mmcollate.stats()["shared_pieces"], os.listdir("/proc/self/task").__len__())
"""


@linux
def test_no_more_threads_than_the_process_may_use():
    code, out, err = run_script(ONE_CPU, MMCOLLATE_THREADS="8", OMP_NUM_THREADS="1")
    assert (code, out) == (0, "0 1\n"), err


WANTED = """
import torch, mmcollate
leaf = torch.ones(12 << 20, dtype=torch.uint8)
for _ in range(20):
    mmcollate.collate([{"x": leaf}] * 2, {"x": mmcollate.Batched()})
print(mmcollate.stats()["shared_pieces"] > 0)
"""


@two_cpus
@pytest.mark.parametrize(("value", "found"), [("2", True), ("1", False), ("", False)])
def test_the_environment_says_how_many(value, found):
    code, out, err = run_script(WANTED, MMCOLLATE_THREADS=value)
    assert (code, out) == (0, f"{found}\n"), err


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "2000", "²"])
def test_a_number_that_is_none_is_said(monkeypatch, value):
    monkeypatch.setenv("MMCOLLATE_THREADS", value)
    for read in (config.threads, config.check, collation.collator.__wrapped__):
        with pytest.raises(ValueError, match="MMCOLLATE_THREADS"):
            read()

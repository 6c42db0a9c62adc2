"""Is staging right and fast on this device? `python benches/device_check.py` where torch has one.

Needs torch and mmcollate alone, no network, and some minutes. Prints a table and writes JSON;
exits with 1 if a check fails. `--fake` runs the same script on `mmcollate.testing.FakeDevice`: its
checks are real, its times mean nothing.

Times come from one process with the arms interleaved in random order, torch at one thread,
inference mode, results destroyed inside the timing; medians and quartiles. "blocked" is how long
the host is held, "ready" how long until the device has the data. Where vLLM's files `inputs.py`,
`utils.py` (of `vllm/multimodal`) and `jsontree.py` (of `vllm/utils`) lie in `.cache/vllm-batcher`,
vLLM's own functions are an arm too.
"""

import argparse
import ast
import contextlib
import gc
import json
import math
import platform
import random
import statistics
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mmcollate
import torch
from mmcollate import Batched, Flat, Shared, collate, reference, staging, testing

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20

Items = list[dict[str, Any]]
Fields = dict[str, mmcollate.Field]


class Rig(ABC):
    """A device, with what the checks need of it besides."""

    device: Any
    name: str

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all of it."""

    @abstractmethod
    def spin(self, seconds: float) -> None:
        """Keeps the current stream busy without holding the host."""

    @abstractmethod
    def copies(self, run: Callable[[], Any]) -> int:
        """How many copies to the device a call makes."""

    @abstractmethod
    def pinned_bytes(self) -> int:
        """What this process has pinned, used or not."""

    @abstractmethod
    def syncs_are_errors(self) -> contextlib.AbstractContextManager[Any]:
        """While it is open, waiting for the device raises."""

    @abstractmethod
    def other_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Makes another stream current."""

    @abstractmethod
    def capture(self, run: Callable[[], Any]) -> Any:
        """Calls while the current stream captures; ``None`` if the device has no such thing."""

    @abstractmethod
    def plain_copy(self, nbytes: int) -> Callable[[], Any]:
        """One copy of so many bytes from pinned memory: the link's own speed."""


class TorchRig(Rig):
    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise SystemExit("torch has no accelerator here; --fake runs the checks without one")
        self.device = torch.device(accelerator.type, 0)
        self.is_cuda = accelerator.type == "cuda"
        self.name = torch.cuda.get_device_name(0) if self.is_cuda else accelerator.type

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def spin(self, seconds: float) -> None:
        if self.is_cuda:
            torch.cuda._sleep(int(seconds * 1.5e9))
        else:
            square = torch.ones(4096, 4096, device=self.device)
            for _ in range(int(seconds * 1000)):
                square @ square

    def copies(self, run: Callable[[], Any]) -> int:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self.is_cuda else [ProfilerActivity.XPU]
        self.synchronize()
        with profile(activities=activities) as profiled:
            kept = run()
            self.synchronize()
        del kept
        events = profiled.events() or []
        return sum(
            "memcpy" in event.name.lower() and "htod" in event.name.lower() for event in events
        )

    def pinned_bytes(self) -> int:
        if not self.is_cuda:
            return 0
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])

    @contextlib.contextmanager
    def syncs_are_errors(self) -> Iterator[None]:
        if not self.is_cuda:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @contextlib.contextmanager
    def other_stream(self) -> Iterator[Any]:
        stream = torch.Stream(self.device)
        with stream:
            yield stream
        self.synchronize()

    def capture(self, run: Callable[[], Any]) -> Any:
        if not self.is_cuda:
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
        graph.replay()
        self.synchronize()
        return result

    def plain_copy(self, nbytes: int) -> Callable[[], Any]:
        source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return lambda: target.copy_(source, non_blocking=True)


class FakeRig(Rig):
    name = "mmcollate.testing.FakeDevice"

    def __init__(self) -> None:
        self.fake = testing.FakeDevice(pageable_copies_are_staged=True)
        self.device = self.fake

    def synchronize(self) -> None:
        self.fake.synchronize()

    def spin(self, seconds: float) -> None:
        # Nothing runs until somebody waits.
        self.fake.manual = True

    def copies(self, run: Callable[[], Any]) -> int:
        before = self.fake.copies
        run()
        return self.fake.copies - before

    def pinned_bytes(self) -> int:
        return self.fake.pinned_bytes

    @contextlib.contextmanager
    def syncs_are_errors(self) -> Iterator[None]:
        before = self.fake.blocking_copies
        yield
        assert self.fake.blocking_copies == before, "a copy that held the host"

    @contextlib.contextmanager
    def other_stream(self) -> Iterator[Any]:
        stream = testing.FakeStream(self.fake)
        with self.fake.use(stream):
            yield stream
            self.fake.synchronize()

    def capture(self, run: Callable[[], Any]) -> Any:
        self.fake.capturing = True
        try:
            result = run()
        finally:
            self.fake.capturing = False
        self.synchronize()
        return result

    def plain_copy(self, nbytes: int) -> Callable[[], Any]:
        source, target = self.fake.pinned(nbytes), self.fake.empty(nbytes)
        return lambda: self.fake.copy(target, source, blocking=False)


# What is collated


def images(count: int, patches: int) -> tuple[Items, Fields]:
    items = [
        {
            "pixel_values": torch.randn(patches + i, 1176).bfloat16(),
            "image_grid_thw": torch.tensor([1, 2, patches + i]),
        }
        for i in range(count)
    ]
    return items, {"pixel_values": Flat(), "image_grid_thw": Batched(keep_on_cpu=True)}


def ragged(count: int, side: int) -> tuple[Items, Fields]:
    items = [
        {"pixel_values": torch.randn(3, side + 14 * (i % 5), side).bfloat16()} for i in range(count)
    ]
    return items, {"pixel_values": Batched()}


def several(count: int, patches: int) -> tuple[Items, Fields]:
    items = [
        {
            "pixel_values": torch.randn(patches, 588).bfloat16(),
            "indices": torch.randint(0, 999, (patches, 4)),
            "tokens": torch.randint(0, 999, (60 + i,)),
            "scale": torch.rand(()),
            "sizes": torch.tensor([i, 4]),
        }
        for i in range(count)
    ]
    fields: Fields = {name: Flat() for name in ("pixel_values", "indices", "tokens")}
    return items, fields | {"scale": Batched(), "sizes": Batched(keep_on_cpu=True)}


def audio(count: int, frames: int) -> tuple[Items, Fields]:
    items = [{"features": torch.randn(128, frames + 7 * i).half()} for i in range(count)]
    return items, {"features": Flat(dim=1)}


def odd(count: int, size: int) -> tuple[Items, Fields]:
    items = [
        {
            "padded": torch.randn(2 + i % 3, size + i),
            "strided": torch.randn(size, 6).t(),
            "bytes": torch.randint(0, 255, (size,), dtype=torch.uint8),
            "flags": torch.rand(size) > 0.5,
            "halves": torch.randn(size).to(torch.float8_e4m3fn),
            "empty": torch.empty(0, 3),
            "words": f"item {i}",
            "same": torch.tensor([7]),
            "image_embeds": torch.randn(3 + i, 64).bfloat16(),
        }
        for i in range(count)
    ]
    fields: Fields = {name: Batched() for name in ("strided", "bytes", "flags", "halves", "words")}
    return items, fields | {
        "padded": Flat(),
        "empty": Flat(),
        "same": Shared(),
        "image_embeds": Flat(),
    }


WORKLOADS: dict[str, Callable[[], tuple[Items, Fields]]] = {
    "1 image, 4.8 MB": lambda: images(1, 2048),
    "8 images, 38 MB": lambda: images(8, 2048),
    "8 ragged images": lambda: ragged(8, 336),
    "32 ragged images": lambda: ragged(32, 224),
    "4 items of four fields": lambda: several(4, 729),
    "16 clips, dim 1": lambda: audio(16, 300),
    "5 odd items": lambda: odd(5, 40),
    "1 odd item": lambda: odd(1, 40),
}


# Checks


def same(ours: Any, expected: Any, at: str) -> None:
    """Bit for bit, on the host."""
    if isinstance(expected, dict):
        assert list(ours) == list(expected), f"{at}: {list(ours)}"
        for name in expected:
            same(ours[name], expected[name], f"{at}[{name!r}]")
    elif isinstance(expected, list):
        assert type(ours) is list, f"{at}: no list"
        assert len(ours) == len(expected), f"{at}: {len(ours)} tensors"
        for k, (a, b) in enumerate(zip(ours, expected, strict=True)):
            same(a, b, f"{at}[{k}]")
    elif isinstance(expected, torch.Tensor):
        a, b = ours.cpu(), expected.cpu()
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{at}: {a.dtype} {tuple(a.shape)}"
        raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        assert torch.equal(*raw), f"{at}: other bits"
    else:
        assert ours == expected, at


def parity(rig: Rig, quick: bool) -> dict[str, Any]:
    """Every workload, in and out of inference mode: the bits of the reference."""
    checked = 0
    for name, make in WORKLOADS.items():
        items, fields = make()
        expected = reference.collate(items, fields)
        for inference in (False, True):
            with torch.inference_mode(inference):
                batch = collate(items, fields, device=rig.device, pin_memory=True)
                rig.synchronize()
                same(batch, expected, name)
            checked += 1
        for tensor in leaves_of(batch):
            assert tensor.data_ptr() % 256 == 0 or tensor.is_cpu, f"{name}: not aligned"
    return {"batches": checked}


def leaves_of(value: Any) -> Iterator[torch.Tensor]:
    for leaf in reference.iter_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def copies(rig: Rig, quick: bool) -> dict[str, Any]:
    """Copies to the device for one batch: ours, the reference's."""
    counts = {}
    for name, make in WORKLOADS.items():
        items, fields = make()
        ours = rig.copies(partial(by_mmcollate, rig, items, fields))
        theirs = rig.copies(partial(by_reference, rig, items, fields))
        counts[name] = {"mmcollate": ours, "reference": theirs}
        chunks = math.ceil(bytes_of(items, fields) / staging.arena_of(backend(rig)).slot_bytes)
        most = max(theirs, chunks + 1)
        assert ours <= most, f"{name}: {ours} copies, the reference makes {theirs}"
    return counts


def bytes_of(items: Items, fields: Fields) -> int:
    batch = reference.collate(items, fields)
    bound = [batch[name] for name, field in fields.items() if not field.keep_on_cpu]
    return sum(tensor.nbytes for tensor in leaves_of(bound))


def by_mmcollate(rig: Rig, items: Items, fields: Fields) -> dict[str, Any]:
    return collate(items, fields, device=rig.device, pin_memory=True)


def by_reference(rig: Rig, items: Items, fields: Fields) -> dict[str, Any]:
    if isinstance(rig, FakeRig):
        batch = {}
        for name, field in fields.items():
            values = [item[name] for item in items]
            batch[name] = rig.fake.reference(
                partial(reference.reduce, field, values),
                keep_on_cpu=field.keep_on_cpu,
                pin_memory=True,
            )
        return batch
    return reference.collate(items, fields, device=rig.device, pin_memory=True)


def backend(rig: Rig) -> Any:
    found = staging.backend_for(rig.device, True)
    assert found is not None
    return found


def reuse(rig: Rig, quick: bool) -> dict[str, Any]:
    """Batches while a kernel keeps the stream busy, more than there are slots: none is lost."""
    count = 12 if quick else 40
    rig.spin(0.5)
    batches = []
    for k in range(count):
        items = [
            {"x": torch.full((300_000,), k, dtype=torch.int32), "y": torch.tensor(k)} for _ in "ab"
        ]
        batches.append(
            collate(items, {"x": Flat(), "y": Batched()}, device=rig.device, pin_memory=True)
        )
        del items
    rig.synchronize()
    if isinstance(rig, FakeRig):
        rig.fake.manual = False
    for k, batch in enumerate(batches):
        assert bool((batch["x"] == k).all()), f"batch {k}"
        assert batch["y"].tolist() == [k, k], f"batch {k}"
    return {"batches": count, **arena_of(rig)}


def arena_of(rig: Rig) -> dict[str, Any]:
    return dict(staging.arena_of(backend(rig)).stats())


def threads(rig: Rig, quick: bool) -> dict[str, Any]:
    """Batches from several threads at once, each with its own fingerprint."""
    wrong: list[str] = []

    def work(me: int) -> None:
        for k in range(10 if quick else 60):
            value = me * 1000 + k
            items = [{"x": torch.full((50_000 + 999 * k,), value), "y": torch.tensor(value)}]
            fields: Fields = {"x": Flat(), "y": Batched()}
            batch = collate(items, fields, device=rig.device, pin_memory=True)
            rig.synchronize()
            if not bool((batch["x"] == value).all()):
                wrong.append(f"thread {me}, batch {k}")

    running = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong, wrong
    return {"threads": len(running)}


def sync_free(rig: Rig, quick: bool) -> dict[str, Any]:
    """Staging never waits for the device."""
    items, fields = several(4, 729)
    collate(items, fields, device=rig.device, pin_memory=True)
    rig.synchronize()
    with rig.syncs_are_errors():
        for _ in range(3):
            collate(items, fields, device=rig.device, pin_memory=True)
    rig.synchronize()
    return {}


def streams(rig: Rig, quick: bool) -> dict[str, Any]:
    """On the default stream, on another, and from one to another."""
    items, fields = several(4, 729)
    expected = reference.collate(items, fields)
    with rig.other_stream():
        batch = collate(items, fields, device=rig.device, pin_memory=True)
    same(batch, expected, "other stream")
    rig.spin(0.1)
    staged = mmcollate.stage(items, fields, device=rig.device)
    batch = staged.to()
    with rig.other_stream() as stream:
        staged.wait(stream)
        if not isinstance(rig, FakeRig):
            copied = {name: batch[name].clone() for name in ("pixel_values", "indices", "tokens")}
            same(copied, {name: expected[name] for name in copied}, "consumer's stream")
    rig.synchronize()
    if isinstance(rig, FakeRig):
        rig.fake.manual = False
        rig.synchronize()
    same(batch, expected, "handed over")
    return {}


def capture(rig: Rig, quick: bool) -> dict[str, Any]:
    """While the stream captures: no error, and nothing pinned or waited for by the arena."""
    items, fields = several(2, 64)
    before = arena_of(rig)
    try:
        batch = rig.capture(lambda: collate(items, fields, device=rig.device, pin_memory=True))
    except RuntimeError as error:
        # torch itself refuses what the reference does there.
        said = str(error).splitlines()[0][:120]
        rig.synchronize()
        assert arena_of(rig)["batches"] == before["batches"]
        return {"refused": said}
    assert arena_of(rig)["batches"] == before["batches"], "staged while capturing"
    if batch is None:
        return {"supported": False}
    same(batch, reference.collate(items, fields), "captured")
    return {"supported": True}


def growth(rig: Rig, quick: bool) -> dict[str, Any]:
    """Batches of many sizes: the arena under its cap and flat, beside torch's own pinned memory."""
    chosen = random.Random(0)
    low, high = 64 << 10, (8 if quick else 64) * MIB
    sizes = [
        int(math.exp(chosen.uniform(math.log(low), math.log(high))))
        for _ in range(30 if quick else 300)
    ]
    source = torch.zeros(high, dtype=torch.uint8)
    fields: Fields = {"x": Flat()}
    cap = arena_of(rig)["cap_bytes"]
    before = rig.pinned_bytes()
    for size in sizes:
        collate(
            [{"x": source[: size // 2]}, {"x": source[: size // 2]}],
            fields,
            device=rig.device,
            pin_memory=True,
        )
        assert arena_of(rig)["pinned_bytes"] <= cap
    rig.synchronize()
    ours = rig.pinned_bytes() - before
    before = rig.pinned_bytes()
    for size in sizes:
        by_reference(rig, [{"x": source[: size // 2]}, {"x": source[: size // 2]}], fields)
    rig.synchronize()
    theirs = rig.pinned_bytes() - before
    return {
        "cap": cap,
        "arena peak": arena_of(rig)["peak_pinned_bytes"],
        "pinned by mmcollate": ours,
        "pinned by torch": theirs,
    }


def failure(rig: Rig, quick: bool) -> dict[str, Any]:
    """No memory on the device: the exception passes, the slot comes back, the next batch works."""
    if isinstance(rig, FakeRig):
        rig.fake.fail_next("empty", torch.OutOfMemoryError("no memory"))
        items, fields = several(2, 64)
    else:
        items = [{"x": torch.empty(1).expand(1), "y": torch.ones(2)}] * 2
        free = (
            torch.accelerator.get_memory_info(rig.device)[0]
            if hasattr(torch.accelerator, "get_memory_info")
            else torch.cuda.mem_get_info()[0]
        )
        hog = [torch.empty(max(free - 64 * MIB, 0), dtype=torch.uint8, device=rig.device)]
        leaf = torch.zeros(200 * MIB, dtype=torch.uint8)
        items, fields = [{"x": leaf}, {"x": leaf}], {"x": Flat()}
    try:
        collate(items, fields, device=rig.device, pin_memory=True)
        raised = False
    except torch.OutOfMemoryError:
        raised = True
    if not isinstance(rig, FakeRig):
        del hog
        gc.collect()
        torch.accelerator.empty_cache()
    assert raised, "the device had memory after all"
    assert arena_of(rig)["leased"] == 0
    items, fields = several(2, 64)
    batch = collate(items, fields, device=rig.device, pin_memory=True)
    rig.synchronize()
    same(batch, reference.collate(items, fields), "after the failure")
    return {}


CHECKS: dict[str, Callable[[Rig, bool], dict[str, Any]]] = {
    "parity": parity,
    "copies": copies,
    "reuse": reuse,
    "threads": threads,
    "sync-free": sync_free,
    "streams": streams,
    "capture": capture,
    "growth": growth,
    "no memory": failure,
}


# Times


def vllm_arm(folder: Path) -> Callable[[Items, Fields, Any], dict[str, Any]] | None:
    """vLLM's own functions from its files, without vLLM: only what a batch needs of them."""
    files = [folder / name for name in ("jsontree.py", "inputs.py", "utils.py")]
    if not all(file.exists() for file in files):
        return None
    wanted = {
        "jsontree.py": {"json_map_leaves", "json_iter_leaves"},
        "inputs.py": {
            "BaseMultiModalField", "MultiModalBatchedField", "MultiModalFlatField",
            "MultiModalSharedField", "MultiModalFieldElem", "MultiModalKwargsItem",
            "_nested_tensors_are_cpu", "_nested_tensors_h2d", "_is_dense", "nested_tensors_equal",
        },
        "utils.py": {"_batch_mm_items", "_can_batch_mm_items", "group_and_batch_mm_items"},
    }  # fmt: skip
    import collections
    import dataclasses
    import functools
    import itertools
    import typing

    names: dict[str, Any] = {"torch": torch, "math": math}
    for module in (typing, collections, collections.abc, dataclasses, functools, itertools):
        names |= {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    names["abstractmethod"], names["ABC"] = abstractmethod, ABC
    names["is_list_of"] = lambda value, typ, check="first": (
        isinstance(value, list)
        and (all if check == "all" else any)(isinstance(x, typ) for x in value)
    )
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        kept = [
            node
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in wanted[file.name]
        ]
        future = ast.parse("from __future__ import annotations").body
        code = compile(ast.Module(body=[*future, *kept], type_ignores=[]), str(file), "exec")
        exec(code, names)  # vLLM's code, put there by whoever runs this

    def run(items: Items, fields: Fields, device: Any) -> dict[str, Any]:
        kinds: dict[str, Any] = {}
        for name, field in fields.items():
            keep = field.keep_on_cpu
            if isinstance(field, Flat):
                kinds[name] = names["MultiModalFlatField"](
                    slices=[], dim=field.dim, keep_on_cpu=keep
                )
            elif isinstance(field, Batched):
                kinds[name] = names["MultiModalBatchedField"](keep_on_cpu=keep)
            else:
                kinds[name] = names["MultiModalSharedField"](
                    batch_size=len(items), keep_on_cpu=keep
                )
        elem = names["MultiModalFieldElem"]
        wrapped = [
            names["MultiModalKwargsItem"](
                {name: elem(data=value, field=kinds[name]) for name, value in item.items()}
            )
            for item in items
        ]
        return dict(names["_batch_mm_items"](wrapped, device=device, pin_memory=True))

    return run


def times(rig: Rig, quick: bool) -> dict[str, Any]:
    """For each workload and arm, microseconds: the host is held; the data is there."""
    rounds = 5 if quick else 60
    vllm = None if isinstance(rig, FakeRig) else vllm_arm(ROOT / ".cache" / "vllm-batcher")
    table: dict[str, Any] = {}
    for name, make in WORKLOADS.items():
        items, fields = make()
        nbytes = bytes_of(items, fields)
        arms: dict[str, Callable[[], Any]] = {
            "mmcollate": partial(by_mmcollate, rig, items, fields),
            "reference": partial(by_reference, rig, items, fields),
            "reference again": partial(by_reference, rig, items, fields),
            "plain pinned copy": rig.plain_copy(nbytes),
        }
        if vllm is not None:
            arms["vLLM"] = partial(vllm, items, fields, rig.device)
        figures: dict[str, tuple[list[float], list[float]]] = {arm: ([], []) for arm in arms}
        with torch.inference_mode():
            for round_ in range(rounds + 5):
                for arm in random.sample(list(arms), len(arms)):
                    rig.synchronize()
                    start = time.perf_counter_ns()
                    kept = arms[arm]()
                    held = time.perf_counter_ns()
                    rig.synchronize()
                    ready = time.perf_counter_ns()
                    del kept
                    if round_ >= 5:
                        figures[arm][0].append((held - start) / 1e3)
                        figures[arm][1].append((ready - start) / 1e3)
        table[name] = {"bytes": nbytes} | {
            arm: {
                "blocked": quartiles(held),
                "ready": quartiles(ready),
                "GB/s": round(nbytes / statistics.median(ready) / 1e3, 2),
            }
            for arm, (held, ready) in figures.items()
        }
    return table


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 1) for value in statistics.quantiles(values, n=4)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fake", action="store_true", help="run without a device")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rig: Rig = FakeRig() if chosen.fake else TorchRig()
    report: dict[str, Any] = {
        "device": rig.name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mmcollate": mmcollate.__version__,
        "checks": {},
    }
    print(f"{rig.name}, torch {torch.__version__}, mmcollate {mmcollate.__version__}", flush=True)
    failed = 0
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            found, verdict = check(rig, chosen.quick), "ok"
        except Exception as error:
            found, verdict = {"error": f"{type(error).__name__}: {error}"}, "FAILED"
            failed += 1
        seconds = time.perf_counter() - start
        report["checks"][name] = {"verdict": verdict, "seconds": round(seconds, 1), **found}
        print(f"{name:12}{verdict:8}{seconds:6.1f} s  {json.dumps(found)[:400]}", flush=True)
    report["times"] = times(rig, chosen.quick)
    for name, arms in report["times"].items():
        print(f"\n{name}, {arms['bytes'] / 1e6:.2f} MB: microseconds, median (quartiles)")
        for arm, figures in arms.items():
            if arm != "bytes":
                (a, b, c), (d, e, f) = figures["blocked"], figures["ready"]
                held, ready = f"{b:9.1f} ({a}-{c})", f"{e:9.1f} ({d}-{f})"
                print(f"  {arm:20} blocked {held}  ready {ready}  {figures['GB/s']:6.2f} GB/s")
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

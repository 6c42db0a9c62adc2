"""The work that `make gate` counts, under callgrind: `benches/gate.py` runs it.

Importing torch is 5 G instructions that vary from start to start, so nothing is instrumented until
the items are made; then each case is one part of what callgrind writes. The items look like
vLLM's, whose import would take ten minutes under valgrind.
"""

import ctypes
import gc
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mmcollate
import torch
from mmcollate import Batched, Flat, _core, collate
from mmcollate.bench.instant import InstantDevice, tensor_over
from mmcollate.torch_modes import only_device_contexts

FLOOR = "torch alone: "
"""As in `gate.py`."""
CALLS = 100
"""Calls of each case: what starting and stopping the count takes is then under 0.1 %."""


@dataclass
class Item:
    data: dict[str, Any]


@dataclass
class Element:
    data: Any
    field: Any


@dataclass(frozen=True)
class BatchedField:
    keep_on_cpu: bool = False


@dataclass(frozen=True)
class FlatField:
    keep_on_cpu: bool = False
    dim: int = 0


@dataclass(frozen=True)
class SharedField:
    keep_on_cpu: bool = False


PLAIN = {BatchedField: Batched, FlatField: Flat}

Values = dict[str, torch.Tensor]


def no_reference(*_: object) -> Any:
    raise AssertionError("the reference was asked: other code than ours would be counted")


def collator() -> _core.Collator:
    return _core.Collator.of_elements(
        item=Item,
        element=Element,
        batched=BatchedField,
        flat=FlatField,
        shared=SharedField,
        reduce=no_reference,
        can_batch=no_reference,
        only_device_contexts=only_device_contexts,
    )


def groups(core: _core.Collator, items: list[Item]) -> list[dict[str, Any]]:
    """As the plugin does it."""
    batches, start = [], 0
    while start < len(items):
        start, batch, _ = core.next_group(items, start, len(items), None, "cpu", False, None, False)
        assert batch is not None
        batches.append(batch)
    return batches


def cases() -> dict[str, Callable[[], object]]:
    core = collator()
    kept, batched, flat = BatchedField(keep_on_cpu=True), BatchedField(), FlatField()
    torch.manual_seed(0)

    def metadata(_: int) -> Values:
        return {f"grid_{k}": torch.randint(0, 99, (3,)) for k in range(12)}

    def image(_: int) -> Values:
        return {
            "pixel_values": torch.randn(8, 1176).bfloat16(),
            "image_grid_thw": torch.randint(0, 99, (3,)),
        }

    def ragged(i: int) -> Values:
        return {
            "pixel_values": torch.randn(3, 14 + 14 * (i % 5), 14).bfloat16(),
            "image_sizes": torch.randint(0, 999, (2,)),
        }

    def leaf(i: int) -> Values:
        return {"features": torch.randn(512 + 3 * i).bfloat16()}  # 1 to 4 KiB

    found: dict[str, Callable[[], object]] = {}

    def add(name: str, count: int, make: Callable[[int], Values], field: Any) -> None:
        values = [make(i) for i in range(count)]
        declared = {
            key: field if key in ("pixel_values", "features") else kept for key in values[0]
        }
        items = [
            Item({key: Element(value, declared[key]) for key, value in item.items()})
            for item in values
        ]
        fields = {
            key: PLAIN[type(declared)](keep_on_cpu=declared.keep_on_cpu)
            for key, declared in declared.items()
        }
        found[name] = lambda: groups(core, items)
        found[f"collate: {name}"] = lambda: collate(values, fields, device="cpu")

    add("1 x 12 kept fields", 1, metadata, kept)
    add("16 x 12 kept fields", 16, metadata, kept)
    add("1 image", 1, image, flat)
    add("2 images", 2, image, flat)
    add("8 images of different shapes", 8, ragged, batched)
    add("512 leaves", 512, leaf, flat)
    device = InstantDevice()
    for count in (8, 64):
        packed = [leaf(i) for i in range(count)]
        found[f"to a device: {count} leaves"] = lambda packed=packed: collate(
            packed, {"features": Batched()}, device=device, pin_memory=True
        )
    return found


def floors() -> dict[str, Callable[[], object]]:
    """Cases as torch alone does them, on lists that are ready, and without a check."""
    one = [torch.randint(0, 99, (3,)) for _ in range(12)]
    many = [[torch.randint(0, 99, (3,)) for _ in range(16)] for _ in range(12)]
    pixels = [torch.randn(8, 1176).bfloat16() for _ in range(2)]
    leaves = [torch.randn(512 + 3 * i).bfloat16() for i in range(512)]
    strides, starts = (1,), [1024 * i for i in range(64)]

    def packed(count: int) -> list[torch.Tensor]:
        torch.cat(leaves[:count])
        device = torch.empty(1024 * count, dtype=torch.bfloat16)
        places = zip(leaves, starts[:count], strict=False)
        return [tensor_over(device, leaf.shape, strides, start) for leaf, start in places]

    return {
        "1 x 12 kept fields": lambda: [x.unsqueeze(0) for x in one],
        "16 x 12 kept fields": lambda: [torch.stack(xs) for xs in many],
        "1 image": lambda: one[0].unsqueeze(0),
        "2 images": lambda: (torch.cat(pixels), torch.stack(one[:2])),
        "512 leaves": lambda: torch.cat(leaves),
        "to a device: 8 leaves": lambda: packed(8),
        "to a device: 64 leaves": lambda: packed(64),
    }


def key() -> dict[str, str]:
    """What the counts depend on, as this process sees it."""
    return {
        "machine": platform.machine(),
        # valgrind shows programs a CPU of its own, so this is not what the machine has.
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "libc": " ".join(platform.libc_ver()),
        "python": sys.version,
        "torch": torch.__version__,
        "exchange table": str(collator().has_exchange_table),
    }


def main() -> None:
    requests, report = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2])
    assert requests.running(), "not under valgrind"
    torch.set_num_threads(1)
    table = cases()
    alone = {FLOOR + name: call for name, call in floors().items()}
    gc.collect()
    gc.disable()
    described = {
        "key": key(),
        "core": str(Path(_core.__file__).resolve()),
        "calls": CALLS,
        "cases": list(table),
        "floors": list(alone),
    }
    report.write_text(json.dumps(described))
    with torch.inference_mode():
        requests.start()
        for name, call in {**table, **alone}.items():
            for _ in range(5):
                call()
            label = name.encode()
            requests.zero()
            for _ in range(CALLS):
                call()
            requests.dump(label)
    requests.stop()
    assert mmcollate.stats()["fields"]["reference"] == 0


if __name__ == "__main__":
    main()

"""Uses an installed mmcollate where nothing but torch is installed with it: no pytest, no numpy.

test_wheel.py runs it as ``python -I wheel_smoke.py yes|no``, which says whether this torch is to
have an exchange table.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import mmcollate
import torch
from mmcollate import Batched, Flat, Shared, cli, collate, collate_groups, explain
from mmcollate.testing import FakeDevice

FIELDS = {
    "pixels": Flat(),
    "grid": Batched(keep_on_cpu=True),
    "ragged": Batched(),
    "names": Batched(),
    "tokens": Shared(),
}
DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16, torch.float16)
DTYPES += (torch.float32, torch.float64, torch.bfloat16)


def item(rows: int, tokens: int = 7) -> dict[str, object]:
    return {
        "pixels": torch.full((rows, 3), float(rows), dtype=torch.bfloat16),
        "grid": torch.tensor([1, rows, rows]),
        "ragged": torch.arange(rows),
        "names": f"{rows} rows",
        "tokens": torch.tensor(tokens),
    }


def comes_alone_and_from_the_wheel() -> None:
    for name in ("numpy", "vllm", "pytest"):
        assert importlib.util.find_spec(name) is None, name
    assert Path(mmcollate.__file__).is_relative_to(sys.prefix), mmcollate.__file__


def collates() -> None:
    items = [item(2), item(4)]
    batch = collate(items, FIELDS)
    assert list(batch) == list(FIELDS)
    assert torch.equal(batch["pixels"], torch.cat([x["pixels"] for x in items]))
    assert batch["grid"].tolist() == [[1, 2, 2], [1, 4, 4]]
    assert [x.tolist() for x in batch["ragged"]] == [[0, 1], [0, 1, 2, 3]]
    assert batch["names"] == ["2 rows", "4 rows"]
    assert batch["tokens"] is items[0]["tokens"]
    on_cpu = collate(items, FIELDS, device="cpu")
    assert torch.equal(on_cpu["pixels"], batch["pixels"])


def collates_every_dtype_strided_padded_and_large() -> None:
    for dtype in DTYPES:
        leaf = torch.arange(6).reshape(2, 3).to(dtype)
        batch = collate([{"x": leaf}, {"x": leaf.t().contiguous().t()}], {"x": Batched()})
        assert batch["x"].dtype == dtype
        assert batch["x"].tolist() == [leaf.tolist()] * 2, dtype
    padded = collate([{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 1)}], {"x": Flat()})
    assert padded["x"].tolist() == [[1, 1], [1, 0], [1, 0]]
    large = torch.arange(1 << 20)
    assert torch.equal(collate([{"x": large}] * 2, {"x": Flat()})["x"], torch.cat([large] * 2))


def groups() -> None:
    items = [item(2), item(4), item(2, tokens=8), item(2, tokens=8)]
    made = list(collate_groups(items, FIELDS, modalities=["image", "image", "image", "video"]))
    assert [(g.modality, g.num_items) for g in made] == [("image", 2), ("image", 1), ("video", 1)]
    assert made[1].batch["pixels"] is items[2]["pixels"]


def explains() -> None:
    plan = explain([item(2), item(4)], FIELDS, file=io.StringIO())
    ways = [field.way for field in plan.groups[0].fields]
    assert ways == ["gather", "gather", "list", "list", "alias"], ways


def stages() -> None:
    device = FakeDevice(manual=True)
    items = [
        {"x": torch.arange(5 * n).reshape(n, 5), "y": torch.ones(n), "z": torch.tensor(n)}
        for n in (3, 4)
    ]
    fields = {"x": Flat(), "y": Batched(), "z": Batched(keep_on_cpu=True)}
    batch = collate(items, fields, device=device, pin_memory=True)
    assert (device.copies, device.stream.advance()) == (1, 2)
    assert torch.equal(batch["x"], torch.cat([x["x"] for x in items])), batch
    assert [y.tolist() for y in batch["y"]] == [[1.0] * 3, [1.0] * 4], batch
    assert batch["z"].tolist() == [3, 4], batch


def raises() -> None:
    bad = [{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2)}]
    error = None
    try:
        collate(bad, {"x": Flat()}, modality="image")
    except mmcollate.CollateIndexError as raised:
        error = raised
    assert isinstance(error, IndexError), "ranks that differ were accepted"
    assert (error.modality, error.field, error.item) == ("image", "x", 1), error
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def counts() -> None:
    mmcollate.reset_stats()
    collate([item(2), item(4)], FIELDS)
    counted = mmcollate.stats()
    assert (counted["batches"], counted["items"]) == (1, 2)
    ways = {way: number for way, number in counted["fields"].items() if number}
    assert ways == {"alias": 1, "list": 2, "gather": 2}, counted
    assert counted["bytes_gathered"] == 6 * 3 * 2 + 2 * 3 * 8


def doctor() -> None:
    [script] = entry_points(group="console_scripts", name="mmcollate")
    assert script.load() is cli.main
    command = [sys.executable, "-I", "-m", "mmcollate", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    rows = dict(re.split(r"  +|(?<=table) ", line, maxsplit=1) for line in done.stdout.splitlines())
    assert rows["mmcollate"] == mmcollate.__version__, done.stdout
    assert rows["vllm"].startswith("not installed"), done.stdout
    assert re.split(r"\W", rows["exchange table"])[0] == sys.argv[1], done.stdout


CHECKS: tuple[Callable[[], None], ...] = (
    comes_alone_and_from_the_wheel,
    collates,
    collates_every_dtype_strided_padded_and_large,
    groups,
    explains,
    stages,
    raises,
    counts,
    doctor,
)

if __name__ == "__main__":
    for check in CHECKS:
        check()
    print(f"{len(CHECKS)} checks with Python {sys.version.split()[0]}, torch {torch.__version__}")

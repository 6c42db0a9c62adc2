"""Items as the processors of real model families make them, at a fraction of their size."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mmcollate
import torch

_FILE = Path(__file__).parent / "data" / "field_sets.json"
FAMILIES: dict[str, Any] = json.loads(_FILE.read_text())["families"]
SETS = [(family, name) for family, x in FAMILIES.items() for name in x["sets"]]

Item = dict[str, Any]


def shrink(size: int) -> int:
    """A smaller size; equal sizes stay equal, and larger ones larger or equal."""
    return size if size <= 8 else 8 + math.isqrt(size - 8)


def fields_of(family: str) -> dict[str, Any]:
    """The family's fields, as mmcollate declares them."""
    return {name: _spec(field) for name, field in FAMILIES[family]["fields"].items()}


def _spec(field: dict[str, Any]) -> Any:
    keep_on_cpu = field.get("keep_on_cpu", False)
    if field["kind"] == "flat":
        return mmcollate.Flat(dim=field.get("dim", 0), keep_on_cpu=keep_on_cpu)
    kind = {"batched": mmcollate.Batched, "shared": mmcollate.Shared}[field["kind"]]
    return kind(keep_on_cpu=keep_on_cpu)


def items_of_set(
    family: str,
    name: str,
    n: int,
    *,
    mixed: bool = True,
    model_dtype: torch.dtype = torch.bfloat16,
) -> list[Item]:
    """``n`` items of one set of fields; of different sizes if ``mixed``."""
    fields, examples = FAMILIES[family]["fields"], FAMILIES[family]["sets"][name]["items"]
    items = []
    for i in range(n):
        shapes = examples[i % len(examples) if mixed else 0]
        grow = i % 3 if mixed else 0
        items.append({k: _value(fields[k], k, s, i, grow, model_dtype) for k, s in shapes.items()})
    return items


def mixed_items(family: str, n: int) -> Iterator[tuple[str, Item]]:
    """``n`` items in turn from all sets of the family, three of a set at a time, and modalities."""
    sets = list(FAMILIES[family]["sets"].items())
    pools = {name: iter(items_of_set(family, name, n)) for name, _ in sets}
    for i in range(n):
        name, x = sets[i // 3 % len(sets)]
        yield x["modality"], next(pools[name])


def _value(
    field: dict[str, Any], name: str, shape: Any, index: int, grow: int, model_dtype: torch.dtype
) -> Any:
    if field["dtype"] is None:
        return {
            "floats": [i * 0.5 for i in range(4 + grow)],
            "ints": [7] * (4 + grow),
            "int": 1000 + index,
            "pair": (336, 336 + grow),
        }[field["value"]]
    if shape and isinstance(shape[0], list):
        return [
            _value(field, f"{name}{i}", s, index, grow, model_dtype) for i, s in enumerate(shape)
        ]
    dtype = model_dtype if field["dtype"] == "model" else getattr(torch, field["dtype"])
    vary = field.get("vary", [])
    sizes = [shrink(s) + (grow if d in vary else 0) for d, s in enumerate(shape)]
    if field["kind"] == "shared":
        return torch.ones(sizes, dtype=dtype)  # equal values, or the items would not merge
    return random_bits(sizes, dtype, seed=zlib.crc32(name.encode()) + index)


def random_bits(shape: list[int], dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    """Any bits the dtype can hold: a copy that is not exact shows."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    raw = (math.prod(shape) * dtype.itemsize,)
    return torch.randint(high, raw, dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def sliced(items: list[Item], fields: dict[str, Any]) -> list[Item]:
    """The same items, as slices of one tensor for each field, as a processor leaves them."""
    out: list[Item] = [dict(x) for x in items]
    for name in items[0]:
        leaves = [x[name] for x in items]
        if not all(isinstance(x, torch.Tensor) for x in leaves):
            continue
        field = fields[name]
        if isinstance(field, mmcollate.Flat):
            dim = field.dim
            if len({(x.shape[:dim], x.shape[dim + 1 :]) for x in leaves}) == 1:
                parts = torch.cat(leaves, dim).split([x.shape[dim] for x in leaves], dim)
                for x, part in zip(out, parts, strict=True):
                    x[name] = part
        elif isinstance(field, mmcollate.Batched) and len({x.shape for x in leaves}) == 1:
            for x, part in zip(out, torch.stack(leaves), strict=True):
                x[name] = part
    return out

"""What is collated. Items are made when a row's turn comes, and go with it."""

import json
import math
import mmap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mmcollate.fields import Batched, Field, Flat, Shared

Item = dict[str, Any]

MOST_BYTES = 700_000_000
"""Batches of more are left out."""

HUGE_FROM = 32_000_000
"""Bytes from which the C library takes a large block fresh from the system each time (its
threshold grows to 32 MiB at most), so that its pages have to be made first."""

APART_FROM = 1 << 20
"""Bytes of a leaf from which it has a mapping of its own."""

PATCH = 1176
"""Values of a patch: 3 channels, 2 frames, 14 x 14 pixels."""

# Arms by name; see arms.py.
TIMED = ("vllm", "vllm again", "mmcollate")
BATCH = ("vllm batch", "mmcollate batch")
HAND = ("torch",)
STACKED = (*HAND, "default_collate")
PACKED = ("mmcollate packed", "u8 pack", "tensordict", "views")
MEMORY = ("memcpy",)


class Source(NamedTuple):
    """Where the leaves lie."""

    shift: int = 0
    """Bytes past a multiple of 64."""
    empty: Callable[[int], torch.Tensor] | None = None
    """Gives memory of so many bytes, if it is not to be the usual one."""


USUAL = Source()


@dataclass(frozen=True)
class Workload:
    """One row: items, and the conditions they are collated under."""

    name: str
    title: str
    n: int
    fields: Mapping[str, Field]
    make: Callable[[Source], list[Item]]
    arms: tuple[str, ...]
    grad: bool = False
    """Whether torch records gradients; otherwise inference mode, as in vLLM's workers."""
    cold: bool = False
    """Whether the caches are overwritten before each call."""
    shift: int = 0
    pinned: bool = False
    quick: bool = False
    """Whether it is part of ``--quick``."""
    weight: float = 1.0
    """Its share of the seconds for a row."""
    rank: int = 0
    """The highest are measured first."""

    @property
    def group(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]

    @property
    def is_plain(self) -> bool:
        """Whether it is the usual condition: inference mode, hot caches, aligned, pageable."""
        return not (self.grad or self.cold or self.shift or self.pinned)

    def condition(self) -> dict[str, str]:
        """The conditions, in words."""
        return {
            "mode": "grad mode" if self.grad else "inference mode",
            "caches": "cold caches" if self.cold else "hot caches",
            "alignment": f"{self.shift} bytes off" if self.shift else "aligned",
            "memory": "pinned" if self.pinned else "pageable",
        }

    def under(self, **conditions: Any) -> "Workload":
        """The same under other conditions, which its name and title tell."""
        words = {
            "grad": "grad mode",
            "cold": "cold caches",
            "shift": "2-byte aligned",
            "pinned": "pinned",
        }
        keys = {"grad": "grad", "cold": "cold", "shift": "unaligned", "pinned": "pinned"}
        changed = [name for name in words if conditions.get(name)]
        return replace(
            self,
            name="/".join([self.name, *(keys[x] for x in changed)]),
            title=", ".join([self.title, *(words[x] for x in changed)]),
            **{"quick": False, **conditions},
        )


def all_workloads(families: Path | None = None) -> Iterator[Workload]:
    """Every row, in the order of the report."""
    yield from _metadata()
    yield from _images()
    yield from _slices()
    yield from _others()
    yield from _lists()
    if families is not None:
        yield from _families(families)


def noise(
    shape: Sequence[int], dtype: torch.dtype, seed: int, source: Source = USUAL
) -> torch.Tensor:
    """A tensor of any bits: a copy that is not exact shows."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = (source.empty or _apart)(nbytes + 64)
    shift = (-memory.data_ptr()) % 64 + source.shift
    if shift + nbytes > memory.numel():
        shift = source.shift
    data = memory[shift : shift + nbytes]
    # Of a prime length, so that no two rows of a field are alike.
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    block = torch.randint(high, (65521,), dtype=torch.uint8, generator=generator)
    for start in range(0, nbytes, block.numel()):
        part = data[start : start + block.numel()]
        part.copy_(block[: part.numel()])
    return data.view(dtype).view(tuple(shape))


def _apart(nbytes: int) -> torch.Tensor:
    """Memory; large blocks not from the heap. Freed, they would leave room there for the next rows'
    results, which then fit or do not fit by chance."""
    if nbytes < APART_FROM:
        return torch.empty(nbytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def numbers(size: int, seed: int) -> torch.Tensor:
    """A few whole numbers: a grid, a size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 999, (size,), generator=generator)


def metadata(n: int, count: int = 12) -> Workload:
    """``n`` items of ``count`` small fields that are kept on the CPU."""

    def make(_: Source) -> list[Item]:
        return [{f"grid_{k}": numbers(3, i * count + k) for k in range(count)} for i in range(n)]

    return Workload(
        name=f"metadata/{n}",
        title=f"{n} x {count} kept fields",
        n=n,
        fields={f"grid_{k}": Batched(keep_on_cpu=True) for k in range(count)},
        make=make,
        arms=(*TIMED, *BATCH, *STACKED),
        quick=n in (1, 16, 64),
    )


def _metadata() -> Iterator[Workload]:
    for n in (1, 4, 16, 64, 256):
        yield metadata(n)
    for n in (1, 16, 64):
        yield metadata(n).under(grad=True)
        yield metadata(n).under(cold=True)


def _images() -> Iterator[Workload]:
    fields = {"pixel_values": Flat(), "image_grid_thw": Batched(keep_on_cpu=True)}

    def rows_of(n: int, patches: int) -> Workload:
        def make(source: Source) -> list[Item]:
            return [
                {
                    "pixel_values": noise((patches, PATCH), torch.bfloat16, i, source),
                    "image_grid_thw": numbers(3, i),
                }
                for i in range(n)
            ]

        nbytes = n * patches * PATCH * 2
        huge = nbytes >= HUGE_FROM
        arms = TIMED if huge else (*TIMED, *BATCH)
        arms = (*arms, *HAND)
        if n > 1:
            arms = (*arms, *MEMORY, "memcpy warm", *(["memcpy huge pages"] if huge else []))
        return Workload(
            name=f"images/{n}x{patches}",
            title=f"{n} image{'s' * (n > 1)}, {nbytes / 1e6:.1f} MB",
            n=n,
            fields=fields,
            make=make,
            arms=arms,
            quick=(n, patches) in ((1, 1024), (2, 256), (8, 1024), (8, 4096)),
            weight=2.0 if huge else 1.0,
            # Freed leaves and results of other rows leave holes in the C library's heap, in which
            # vLLM's large results would find memory whose pages are there already.
            rank=patches if huge else 0,
        )

    for n in (1, 2, 8, 32):
        for patches in (256, 1024, 4096):
            if n * patches * PATCH * 2 <= MOST_BYTES:
                yield rows_of(n, patches)
    for n, patches in ((1, 1024), (8, 256), (8, 1024)):
        yield rows_of(n, patches).under(grad=True)
        yield rows_of(n, patches).under(cold=True)
    for n, patches in ((8, 256), (8, 1024), (8, 4096)):
        yield rows_of(n, patches).under(shift=2)
    bound = replace(
        rows_of(8, 1024),
        name="device/8x1024",
        title="8 images, 19.3 MB, bound for a device",
        arms=("vllm", "vllm again", "mmcollate packed", *MEMORY),
        quick=False,
    )
    yield bound
    yield bound.under(pinned=True)


def _slices() -> Iterator[Workload]:
    fields = {"pixel_values": Flat(), "image_grid_thw": Batched(keep_on_cpu=True)}

    def rows_of(megabytes: int) -> Workload:
        n = 8
        patches = megabytes * 1_000_000 // (n * PATCH * 2)

        def make(source: Source) -> list[Item]:
            pixels = noise((n * patches, PATCH), torch.bfloat16, 0, source).chunk(n)
            grids = torch.stack([numbers(3, i) for i in range(n)])
            return [{"pixel_values": pixels[i], "image_grid_thw": grids[i]} for i in range(n)]

        return Workload(
            name=f"slices/{megabytes}MB",
            title=f"{n} neighbouring slices of one tensor, {megabytes} MB",
            n=n,
            fields=fields,
            make=make,
            arms=(*TIMED, *HAND, *MEMORY),
            quick=megabytes in (1, 77),
        )

    for megabytes in (1, 19, 77, 300):
        yield rows_of(megabytes)


def _others() -> Iterator[Workload]:
    def audio(n: int, *, padded: bool) -> Workload:
        def make(source: Source) -> list[Item]:
            # 80 bins; of different lengths, so that they are joined in time or padded with zeros.
            shapes = [(80, 1500 + 100 * (i % 3)) for i in range(n)]
            return [
                {
                    "input_features": noise(
                        (1, *shape) if padded else shape, torch.float32, i, source
                    ),
                    "feature_lens": torch.tensor(shape[-1]),
                }
                for i, shape in enumerate(shapes)
            ]

        dim = 0 if padded else 1
        return Workload(
            name=f"{'padded-audio' if padded else 'audio'}/{n}",
            title=f"{n} audio clips, {'padded with zeros' if padded else 'joined in time'}",
            n=n,
            fields={"input_features": Flat(dim=dim), "feature_lens": Batched(keep_on_cpu=True)},
            make=make,
            arms=(*TIMED, *BATCH, *HAND),
        )

    def six(n: int) -> Workload:
        def make(source: Source) -> list[Item]:
            shared = torch.tensor([2, 14])
            return [
                {
                    "pixel_values": noise((64, PATCH), torch.bfloat16, i, source),
                    "image_grid_thw": numbers(3, i),
                    "num_patches": torch.tensor(64),
                    "aspect_ratio_mask": numbers(4, i) % 2,
                    "image_sizes": numbers(2, i),
                    "patch_size": shared.clone(),
                }
                for i in range(n)
            ]

        return Workload(
            name=f"six-fields/{n}",
            title=f"{n} item{'s' * (n > 1)} of six fields",
            n=n,
            fields={
                "pixel_values": Flat(),
                "image_grid_thw": Batched(keep_on_cpu=True),
                "num_patches": Batched(keep_on_cpu=True),
                "aspect_ratio_mask": Batched(),
                "image_sizes": Batched(keep_on_cpu=True),
                "patch_size": Shared(keep_on_cpu=True),
            },
            make=make,
            arms=(*TIMED, *BATCH, *HAND),
        )

    def embeds(n: int) -> Workload:
        def make(source: Source) -> list[Item]:
            items: list[Item] = []
            for i in range(n):
                # Every fourth comes as embeddings, which makes groups.
                if i % 4 == 3:
                    value = {"image_embeds": noise((256, 1024), torch.bfloat16, i, source)}
                else:
                    value = {"pixel_values": noise((256, PATCH), torch.bfloat16, i, source)}
                items.append({**value, "image_grid_thw": numbers(3, i)})
            return items

        return Workload(
            name=f"embeds/{n}",
            title=f"{n} images, some as embeddings",
            n=n,
            fields={
                "pixel_values": Flat(),
                "image_embeds": Flat(),
                "image_grid_thw": Batched(keep_on_cpu=True),
            },
            make=make,
            arms=TIMED,
        )

    for n in (2, 8):
        yield audio(n, padded=False)
        yield audio(n, padded=True)
    for n in (1, 8, 64):
        yield six(n)
    yield embeds(8)
    yield Workload("text/0", "no items: a text-only step", 0, {}, lambda _: [], TIMED, quick=True)


def _lists() -> Iterator[Workload]:
    def ragged(n: int, *, small: bool) -> Workload:
        def make(source: Source) -> list[Item]:
            shapes = [
                (3, 6 + i % 5, 16) if small else (3, 224 + 14 * (i % 5), 224) for i in range(n)
            ]
            return [
                {
                    "pixel_values": noise(shape, torch.bfloat16, i, source),
                    "image_sizes": torch.tensor(shape[1:]),
                }
                for i, shape in enumerate(shapes)
            ]

        return Workload(
            name=f"{'ragged-small' if small else 'ragged'}/{n}",
            title=f"{n} {'small leaves' if small else 'images'} of different shapes",
            n=n,
            fields={"pixel_values": Batched(), "image_sizes": Batched(keep_on_cpu=True)},
            make=make,
            arms=(*TIMED, *PACKED) if small else (*TIMED, *BATCH),
            quick=n == 32,
        )

    def leaves(count: int) -> Workload:
        def make(source: Source) -> list[Item]:
            # 1 to 4 KiB, of different lengths.
            sizes = [512 + (i * 389) % 1537 for i in range(count)]
            return [
                {"x": noise((size,), torch.bfloat16, i, source)} for i, size in enumerate(sizes)
            ]

        return Workload(
            name=f"leaves/{count}",
            title=f"{count} leaves of 1 to 4 KiB",
            n=count,
            fields={"x": Batched()},
            make=make,
            arms=(*TIMED, *PACKED),
            quick=True,
        )

    for n in (8, 32, 64):
        yield ragged(n, small=False)
    for n in (8, 16, 32, 64):
        yield ragged(n, small=True)
    yield leaves(512)


def _families(file: Path) -> Iterator[Workload]:
    families = json.loads(file.read_text())["families"]

    def row_of(name: str, n: int) -> Workload:
        declared = families[name]["fields"]
        sets = list(families[name]["sets"].values())

        def make(source: Source) -> list[Item]:
            return [
                {
                    field: _value(declared[field], field, shape, i, source)
                    for field, shape in one["items"][i % len(one["items"])].items()
                }
                for one in sets
                for i in range(n)
            ]

        return Workload(
            name=f"families/{name}/{n}",
            title=f"{name}, {n} item{'s' * (n > 1)} of each of {len(sets)} sets",
            n=n * len(sets),
            fields={field: _field(x) for field, x in declared.items()},
            make=make,
            arms=TIMED,
            weight=0.25,
        )

    for name in families:
        for n in (1, 8):
            yield row_of(name, n)


def _field(declared: Mapping[str, Any]) -> Field:
    keep_on_cpu = declared.get("keep_on_cpu", False)
    if declared["kind"] == "flat":
        return Flat(dim=declared.get("dim", 0), keep_on_cpu=keep_on_cpu)
    kind = {"batched": Batched, "shared": Shared}[declared["kind"]]
    return kind(keep_on_cpu=keep_on_cpu)


def _value(declared: Mapping[str, Any], name: str, shape: Any, index: int, source: Source) -> Any:
    """A family's value, at a fraction of its size: large copies have rows of their own."""
    grow = index % 3
    if declared["dtype"] is None:
        return {
            "floats": [i * 0.5 for i in range(4 + grow)],
            "ints": [7] * (4 + grow),
            "int": 1000 + index,
            "pair": (336, 336 + grow),
        }[declared["value"]]
    if shape and isinstance(shape[0], list):
        inner = enumerate(shape)
        return [_value(declared, f"{name}{i}", s, index, source) for i, s in inner]
    dtype = torch.bfloat16 if declared["dtype"] == "model" else getattr(torch, declared["dtype"])
    vary = declared.get("vary", [])
    sizes = [_shrunk(s) + (grow if d in vary else 0) for d, s in enumerate(shape)]
    if declared["kind"] == "shared":
        return torch.ones(sizes, dtype=dtype)  # equal values, or the items would not merge
    return noise(sizes, dtype, zlib.crc32(name.encode()) + index, source)


def _shrunk(size: int) -> int:
    """A smaller size; equal sizes stay equal, and larger ones larger or equal."""
    return size if size <= 8 else 8 + math.isqrt(size - 8)

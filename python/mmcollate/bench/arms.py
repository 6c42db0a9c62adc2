"""Who collates. An arm is made for one row's items, or does not apply there."""

import ctypes
import functools
import importlib.util
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import mmcollate
from mmcollate import _core
from mmcollate.bench.instant import InstantDevice, tensor_over
from mmcollate.bench.workloads import Item, Source, Workload
from mmcollate.fields import Batched, Field, Flat, Shared
from mmcollate.reference import collate_groups, iter_leaves
from mmcollate.testing import FakeDevice

HUGE_PAGE = 2 << 20
"""Of x86-64, and of 64-bit Arm with pages of 4 KiB."""


def has_vllm() -> bool:
    """Whether vLLM is installed; does not import it."""
    return importlib.util.find_spec("vllm") is not None


def prepare_vllm() -> None:
    """Imports vLLM, quietly."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Some of it logs before it has read that variable.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    importlib.import_module("vllm.multimodal.utils")


class Case:
    """One row's items, in every form that an arm takes."""

    def __init__(self, workload: Workload, *, vllm: bool) -> None:
        self.workload = workload
        # Ordinary tensors, made outside inference mode: what vLLM's workers are sent.
        self.plain: list[Item] = workload.make(_source_of(workload))
        self.items = engine_items(self.plain, workload.fields) if vllm else None
        self.leaves: list[torch.Tensor] = [
            leaf for leaf in iter_leaves(self.plain) if isinstance(leaf, torch.Tensor)
        ]
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)

    @functools.cached_property
    def groups(self) -> list[tuple[int, dict[str, Any]]]:
        """The result: vLLM's own, or the reference's without vLLM."""
        if self.items is None:
            return list(collate_groups(self.plain, self.workload.fields, device="cpu"))
        return list(_originals().group_and_batch_mm_items(self.items, device="cpu"))

    @property
    def batch(self) -> dict[str, Any]:
        """The result, of one group."""
        [(_, batch)] = self.groups
        return batch

    @property
    def packed(self) -> list[torch.Tensor]:
        """The leaves that packing is about: those of the first field, in the items' order."""
        name = next(iter(self.plain[0]))
        return [item[name] for item in self.plain]

    @property
    def large(self) -> list[torch.Tensor]:
        """The leaves whose copy takes the time."""
        return [leaf for leaf in self.leaves if leaf.nbytes >= 16 << 10]

    @property
    def outputs(self) -> int:
        """Tensors in the result."""
        return sum(isinstance(x, torch.Tensor) for _, batch in self.groups for x in batch.values())


@dataclass(frozen=True)
class Run:
    """An arm that is ready to be timed."""

    call: Callable[[], Any]
    wanted: Callable[[], Any]
    """What its result has to equal."""
    result: Callable[[], Any] | None = None
    """Its result, if ``call`` does not return it as it is compared."""

    def difference(self) -> str | None:
        """Where its result is not what is wanted; ``None`` if it is."""
        return first_difference((self.result or self.call)(), self.wanted())


def first_difference(ours: Any, theirs: Any, at: str = "result") -> str | None:
    """Where two results differ in nesting, dtype, shape or bits; ``None`` if they do not. Whose
    memory it is does not count: a view and a copy of the same bits are alike here."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor):
            return f"{at}: {type(ours).__name__}, expected a tensor"
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            found, expected = (f"{x.dtype} {tuple(x.shape)}" for x in (ours, theirs))
            return f"{at}: {found}, expected {expected}"
        return None if torch.equal(_bits(ours), _bits(theirs)) else f"{at}: other bits"
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or list(ours) != list(theirs):
            return f"{at}: fields {list(ours)}, expected {list(theirs)}"
        pairs = [(f"{at}[{name!r}]", ours[name], theirs[name]) for name in theirs]
    elif isinstance(theirs, (list, tuple)):
        if not isinstance(ours, (list, tuple)) or len(ours) != len(theirs):
            return f"{at}: {len(ours)} elements, expected {len(theirs)}"
        both = enumerate(zip(ours, theirs, strict=True))
        pairs = [(f"{at}[{i}]", a, b) for i, (a, b) in both]
    else:
        return None if ours == theirs else f"{at}: {ours!r}, expected {theirs!r}"
    return next(filter(None, (first_difference(a, b, where) for where, a, b in pairs)), None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def shares_memory(case: Case, groups: Sequence[tuple[int, dict[str, Any]]]) -> bool:
    """Whether a result's tensors that are large enough for views lie in the items' own memory."""
    given = {leaf.untyped_storage().data_ptr() for leaf in case.leaves}
    found = [x for _, batch in groups for x in iter_leaves(batch) if isinstance(x, torch.Tensor)]
    large = [x.untyped_storage().data_ptr() for x in found if x.nbytes > _core.COPY_UP_TO]
    return bool(large) and given.issuperset(large)


def engine_items(items: Sequence[Item], fields: Mapping[str, Field]) -> list[Any]:
    """vLLM's items of the same values."""
    from vllm.multimodal import inputs

    def field_of(field: Field) -> Any:
        keep = field.keep_on_cpu
        if isinstance(field, Flat):
            return inputs.MultiModalFlatField(slices=[], dim=field.dim, keep_on_cpu=keep)
        if isinstance(field, Shared):
            return inputs.MultiModalSharedField(batch_size=1, keep_on_cpu=keep)
        return inputs.MultiModalBatchedField(keep_on_cpu=keep)

    theirs = {name: field_of(field) for name, field in fields.items()}
    return [
        inputs.MultiModalKwargsItem(
            {
                name: inputs.MultiModalFieldElem(data=data, field=theirs[name])
                for name, data in item.items()
            }
        )
        for item in items
    ]


def _originals() -> Any:
    from mmcollate.integrations import vllm

    return vllm.originals()


# Collation


def _vllm(case: Case) -> Run | None:
    if case.items is None:
        return None
    function, items = _originals().group_and_batch_mm_items, case.items
    return Run(lambda: list(function(items, device="cpu")), lambda: case.groups)


def _vllm_batch(case: Case) -> Run | None:
    if case.items is None or len(case.groups) != 1:
        return None
    function, items = _originals()._batch_mm_items, case.items
    return Run(lambda: function(items, device="cpu"), lambda: case.batch)


def _mmcollate(case: Case) -> Run:
    if case.items is None:
        items, fields = case.plain, case.workload.fields
        call = mmcollate.collate_groups
        return Run(
            lambda: list(call(items, fields, device="cpu")),
            lambda: case.groups,
            lambda: [tuple(group[1:]) for group in call(items, fields, device="cpu")],
        )
    from mmcollate.integrations import vllm

    function, theirs = vllm.group_and_batch_mm_items, case.items
    return Run(lambda: list(function(theirs, device="cpu")), lambda: case.groups)


def _mmcollate_batch(case: Case) -> Run | None:
    if len(case.groups) != 1:
        return None
    if case.items is None:
        items, fields = case.plain, case.workload.fields
        return Run(lambda: mmcollate.collate(items, fields, device="cpu"), lambda: case.batch)
    from mmcollate.integrations import vllm

    function, theirs = vllm.batch_mm_items, case.items
    return Run(lambda: function(theirs, device="cpu"), lambda: case.batch)


def _torch(case: Case) -> Run | None:
    """What one writes by hand for these fields, on lists that are ready."""
    if len(case.groups) != 1:
        return None
    steps = [
        (name, *_by_hand(case.workload.fields[name], [item[name] for item in case.plain]))
        for name in case.plain[0]
    ]
    return Run(
        lambda: {name: function(values) for name, function, values in steps}, lambda: case.batch
    )


def _by_hand(field: Field, values: list[Any]) -> tuple[Callable[[Any], Any], Any]:
    """A function and its argument."""
    if isinstance(field, Shared):
        return _first, values
    if isinstance(field, Batched):
        if len(values) == 1:
            return _unsqueezed, values
        same = len({value.shape for value in values}) == 1
        return (torch.stack if same else list), values
    if len(values) == 1:
        return _first, values
    dim = field.dim if isinstance(field, Flat) else 0
    around = {(x.shape[:dim], x.shape[dim + 1 :]) for x in values}
    return functools.partial(torch.cat if len(around) == 1 else _padded, dim=dim), values


def _first(values: list[Any]) -> Any:
    return values[0]


def _unsqueezed(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0].unsqueeze(0)


def _padded(values: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Joined; the last dimension padded with zeros."""
    length = max(x.shape[-1] for x in values)
    pad = torch.nn.functional.pad
    return torch.cat([pad(x, (0, length - x.shape[-1])) for x in values], dim=dim)


def _default_collate(case: Case) -> Run | None:
    """torch's own, which stacks everything."""
    if len(case.groups) != 1 or not all(
        isinstance(x, torch.Tensor) and isinstance(case.workload.fields[name], Batched)
        for name, x in case.batch.items()
    ):
        return None
    from torch.utils.data import default_collate

    items = case.plain
    return Run(lambda: default_collate(items), lambda: case.batch)


# Packing


def _packed(case: Case) -> Run:
    """All that is bound for a device goes there through pinned memory."""
    device, instant = _fake(), InstantDevice()

    def batch(device: FakeDevice) -> dict[str, Any]:
        if case.items is None:
            fields = case.workload.fields
            return mmcollate.collate(case.plain, fields, device=device, pin_memory=True)
        from mmcollate.integrations import vllm

        groups = vllm.group_and_batch_mm_items(case.items, device=device, pin_memory=True)
        [(_, made)] = groups
        return made

    def result() -> dict[str, Any]:
        made = batch(device)
        device.synchronize()
        return made

    return Run(lambda: batch(instant), lambda: case.batch, result)


def _u8_pack(case: Case) -> Run:
    """The leaves as bytes, joined, and taken apart again as views."""
    leaves = case.packed

    def call() -> list[torch.Tensor]:
        raw = [leaf.reshape(-1).view(torch.uint8) for leaf in leaves]
        parts = torch.split(torch.cat(raw), [part.numel() for part in raw])
        both = zip(parts, leaves, strict=True)
        return [part.view(leaf.dtype).view(leaf.shape) for part, leaf in both]

    return Run(call, lambda: leaves)


def _views(case: Case) -> Run:
    """A tensor for each leaf, over memory that holds them all already."""
    leaves = case.packed
    joined = torch.cat([leaf.reshape(-1) for leaf in leaves])
    places, start = [], 0
    for leaf in leaves:
        places.append((tuple(leaf.shape), leaf.stride(), start))
        start += leaf.numel()
    return Run(lambda: [tensor_over(joined, *place) for place in places], lambda: leaves)


def _tensordict(case: Case) -> Run | None:
    """Of a TensorDict that is ready: making it is not timed."""
    if importlib.util.find_spec("tensordict") is None:
        return None
    tensordict = importlib.import_module("tensordict")
    names = [str(i) for i in range(len(case.packed))]
    with torch.inference_mode(False):
        ready = tensordict.TensorDict(dict(zip(names, case.packed, strict=True)), batch_size=[])
    return Run(
        ready.consolidate,
        lambda: case.packed,
        lambda: [ready.consolidate()[name] for name in names],
    )


# The roofline


class _Copies:
    """The bare copy of the large leaves, one call of ``memmove`` each."""

    def __init__(self, case: Case) -> None:
        self.leaves = case.large
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)
        self._moves: list[tuple[int, int, int]] = []
        at = 0
        for leaf in self.leaves:
            self._moves.append((at, leaf.data_ptr(), leaf.nbytes))
            at += leaf.nbytes

    def into(self, address: int) -> None:
        for at, source, nbytes in self._moves:
            ctypes.memmove(address + at, source, nbytes)

    def wanted(self) -> torch.Tensor:
        return torch.cat([_bits(leaf) for leaf in self.leaves])

    def read(self, address: int) -> torch.Tensor:
        memory = (ctypes.c_ubyte * self.nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).clone()


def _memcpy(case: Case) -> Run | None:
    """Into memory as ``torch.empty`` gives it."""
    copies = _Copies(case)
    if not copies.leaves:
        return None

    def call() -> torch.Tensor:
        out = torch.empty(copies.nbytes, dtype=torch.uint8)
        copies.into(out.data_ptr())
        return out

    return Run(call, copies.wanted)


def _memcpy_warm(case: Case) -> Run | None:
    """Into one block that is used again and again."""
    copies = _Copies(case)
    if not copies.leaves:
        return None
    out = torch.zeros(copies.nbytes, dtype=torch.uint8)
    address = out.data_ptr()

    def result() -> torch.Tensor:
        copies.into(address)
        return out

    return Run(lambda: copies.into(address), copies.wanted, result)


def _memcpy_huge(case: Case) -> Run | None:
    """Into fresh memory of huge pages, where the system gives them."""
    copies = _Copies(case)
    if not copies.leaves or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = -(-copies.nbytes // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

    def fresh() -> tuple[int, int]:
        start = libc.mmap(None, size, protection, kind, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"no {size} bytes of memory")
        address = -(-start // HUGE_PAGE) * HUGE_PAGE
        # Refused by a kernel without them: then these are ordinary pages.
        libc.madvise(address, size - HUGE_PAGE, mmap.MADV_HUGEPAGE)
        copies.into(address)
        return start, address

    def result() -> torch.Tensor:
        start, address = fresh()
        try:
            return copies.read(address)
        finally:
            libc.munmap(start, size)

    return Run(lambda: libc.munmap(fresh()[0], size), copies.wanted, result)


Maker = Callable[[Case], Run | None]

ARMS: dict[str, Maker] = {
    "vllm": _vllm,
    "vllm again": _vllm,
    "mmcollate": _mmcollate,
    "vllm batch": _vllm_batch,
    "mmcollate batch": _mmcollate_batch,
    "torch": _torch,
    "default_collate": _default_collate,
    "mmcollate packed": _packed,
    "u8 pack": _u8_pack,
    "tensordict": _tensordict,
    "views": _views,
    "memcpy": _memcpy,
    "memcpy warm": _memcpy_warm,
    "memcpy huge pages": _memcpy_huge,
}

MEANINGS = {
    "vllm": "vLLM's group_and_batch_mm_items",
    "vllm again": "the same once more: how far a ratio strays by noise alone (A/A)",
    "mmcollate": "mmcollate in its place",
    "vllm batch": "vLLM's _batch_mm_items",
    "mmcollate batch": "mmcollate in its place",
    "torch": "torch.stack and torch.cat by hand, on lists that are ready",
    "default_collate": "torch.utils.data.default_collate",
    "mmcollate packed": "mmcollate in vLLM's place, to a device that takes no time",
    "u8 pack": "views as bytes, torch.cat, split, views back",
    "tensordict": "TensorDict.consolidate, of one that is ready",
    "views": "one tensor for each leaf, by torch alone, over memory that holds them already",
    "memcpy": "the bare copy of the same bytes, into memory as torch.empty gives it",
    "memcpy warm": "the bare copy into one block that is used again",
    "memcpy huge pages": "the bare copy into fresh memory of huge pages",
}


def runs_of(case: Case, makers: Mapping[str, Maker] | None = None) -> Iterator[tuple[str, Run]]:
    """The arms of a row that apply, in its order."""
    for name in case.workload.arms:
        made = (makers or ARMS)[name](case)
        if made is not None:
            yield name, made


def missing() -> list[str]:
    """What is not installed, and which arms are left out for it."""
    lines = []
    if not has_vllm():
        lines.append("vLLM is not installed: its arms are left out, and no ratio to it is given")
    if importlib.util.find_spec("tensordict") is None:
        lines.append("tensordict is not installed: its arm is left out")
    lines.append(
        "pinned memory and packing for a device are those of a fake device, whose memory is not"
        " locked and whose copies take no time: what the host does is the same"
    )
    return lines


def _source_of(workload: Workload) -> Source:
    return Source(workload.shift, _fake().pinned if workload.pinned else None)


@functools.cache
def _fake() -> FakeDevice:
    return FakeDevice()

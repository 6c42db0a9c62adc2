"""Batches that go to a device through the arena, against the engine's own, on a fake device.

The engine's functions run as they are, but for the last line of their copy to a device: there the
tensor stays in host memory, dense and contiguous as the engine pins it. The fake device is a CPU
too, so that results can be compared in all that a consumer could notice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mmcollate
import pytest
import torch
from compare import Outcome, assert_same_outcome, outcome
from families import FAMILIES, SETS, fields_of, items_of_set, mixed_items, sliced
from mmcollate import pinned, staging
from mmcollate.reference import iter_leaves
from mmcollate.testing import FakeDevice

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis")
pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")

import test_parity_batched
import test_parity_flat
from hypothesis import assume, given, note
from hypothesis import strategies as st
from mmcollate.integrations import vllm as plugin
from test_differential import GRAD_MODES, batches, build_items, declare
from test_parity_batched import DTYPES, filled
from test_parity_grouping import MERGES
from test_parity_leaves import FIELDS, KINDS, LAYOUTS, LEAVES
from vllm.distributed.ec_transfer.ec_connector.mooncake.transfer import MooncakeTransfer
from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding import backend as ec_store
from vllm.model_executor.models import vision
from vllm.model_executor.models.gemma4_mm import Gemma4ForConditionalGeneration
from vllm.model_executor.models.internvl import InternVLChatModel
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.multimodal import inputs as vllm_inputs
from vllm.multimodal import utils as vllm_utils
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.mm import encoder_runner
from vllm_items import (
    ORIGINAL,
    batched,
    flat,
    from_plain,
    item,
    items_of,
    leaves_of,
    shared,
)

THERE = object()
"""The device that the engine's functions are given."""


def _arrived(leaf: Any) -> Any:
    """As the engine makes the pinned copy that it sends on."""
    return leaf.new_empty(leaf.shape).copy_(leaf) if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def copies_stay_in_host_memory() -> Iterator[None]:
    real = vllm_inputs._nested_tensors_h2d

    def h2d(tensors: Any, device: Any, *, pin_memory: bool = False) -> Any:
        if device is THERE:
            return vllm_inputs.json_map_leaves(_arrived, tensors)
        return real(tensors, device, pin_memory=pin_memory)

    vllm_inputs._nested_tensors_h2d = h2d
    try:
        yield
    finally:
        vllm_inputs._nested_tensors_h2d = real


class Device(FakeDevice):
    """Runs when told to, and knows which memory is its own."""

    def __init__(self, *, slot: int | None = None, **options: Any) -> None:
        super().__init__(**{"manual": True, **options})
        self._own: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._starts: dict[int, int] = {}
        if slot is not None:
            self.arenas = {os.getpid(): pinned.Arena(self, 256 * slot, slot)}

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = super().empty(nbytes)
        storage = memory.untyped_storage()
        self._own[storage.data_ptr()] = storage
        self._starts[storage.data_ptr()] = memory.data_ptr()
        return memory

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in memory that :meth:`empty` returned."""
        return tensor.untyped_storage().data_ptr() in self._own

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where the tensor starts in its allocation, in bytes."""
        return tensor.data_ptr() - self._starts[tensor.untyped_storage().data_ptr()]


def their_groups(items: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    with copies_stay_in_host_memory():
        yield from ORIGINAL.group_and_batch_mm_items(items, device=THERE)


def their_batch(items: Any) -> dict[str, Any]:
    with copies_stay_in_host_memory():
        return ORIGINAL._batch_mm_items(items, device=THERE)


def our_groups(items: Any, device: FakeDevice) -> Iterator[tuple[int, dict[str, Any]]]:
    """Drained before a manual device has copied anything."""
    try:
        yield from plugin.group_and_batch_mm_items(items, device=device, pin_memory=True)
    finally:
        device.synchronize()


def our_batch(items: Any, device: FakeDevice) -> dict[str, Any]:
    batch = plugin.batch_mm_items(items, device=device, pin_memory=True)
    device.synchronize()
    return batch


def assert_in_place(batch: dict[str, Any], items: Sequence[Any], device: Device) -> None:
    """Each tensor is in the device's memory or, of a kept field, is not."""
    for name, value in batch.items():
        field = next(x[name].field for x in items if name in x)
        for leaf in iter_leaves(value):
            if isinstance(leaf, torch.Tensor) and type(leaf) is torch.Tensor:
                assert device.has(leaf) is not field.keep_on_cpu, name
                assert field.keep_on_cpu or leaf.is_contiguous(), name


def same_groups(items: Any, device: Device | None = None) -> Outcome:
    device = Device() if device is None else device
    made: list[tuple[int, dict[str, Any]]] = []

    def ours() -> Iterator[tuple[int, dict[str, Any]]]:
        made.clear()
        for group in our_groups(items, device):
            made.append(group)
            yield group

    theirs = assert_same_outcome(ours, lambda: their_groups(items), inputs=leaves_of(items))
    start = 0
    for count, batch in made:
        assert_in_place(batch, items[start : start + count], device)
        start += count
    assert staging.arena_of(device).stats()["leased"] == 0
    return theirs


def same_batch(items: Any, device: Device | None = None) -> Outcome:
    device = Device() if device is None else device
    made: list[dict[str, Any]] = []

    def ours() -> dict[str, Any]:
        made.append(our_batch(items, device))
        return made[-1]

    theirs = assert_same_outcome(ours, lambda: their_batch(items), inputs=leaves_of(items))
    for batch in made:
        assert_in_place(batch, items, device)
    assert staging.arena_of(device).stats()["leased"] == 0
    return theirs


def same(items: Any) -> Outcome:
    same_groups(items)
    return same_batch(items)


SLOTS = [None, 4096, 256]
"""Bytes of a slot: as configured, or such that a batch needs several."""


@pytest.fixture(autouse=True)
def stages_small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages also what is small and takes the reference as a rule, but with ``as_configured``."""
    if "as_configured" not in request.fixturenames:
        monkeypatch.setattr(staging, "SMALL", 0)


@pytest.fixture
def as_configured() -> None:
    pass


@pytest.fixture
def activated() -> Iterator[None]:
    assert plugin.activate()
    try:
        yield
    finally:
        plugin.deactivate()


def vec(*values: float) -> torch.Tensor:
    return torch.tensor([float(x) for x in values])


def beside(make: Any, leaves: Sequence[Any], **options: Any) -> list[Any]:
    """Items with the leaves in a field among others that are staged, and one that is kept."""
    return [
        item(
            a=batched(vec(i, 2)),
            x=make(leaf, **options),
            k=batched(torch.tensor(i), keep_on_cpu=True),
            z=flat(torch.full((i % 3, 2), i)),
        )
        for i, leaf in enumerate(leaves)
    ]


# Leaves


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("keep_on_cpu", [False, True])
@torch.no_grad()  # the fake device copies no gradients, and some of these have one
def test_any_leaf_alone_repeated_and_mixed(name, kind, keep_on_cpu):
    make = LEAVES[name]
    for leaves in (
        [make()],
        [make(), make()],
        [make(), vec(1, 2)],
        [vec(1, 2), vec(1, 2), make(), None],
    ):
        if not keep_on_cpu:
            same_groups(items_of(KINDS[kind], leaves))
        same_batch(beside(KINDS[kind], leaves, keep_on_cpu=keep_on_cpu))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_any_layout_arrives_contiguous(layout, kind, n):
    leaves = [LAYOUTS[layout]() for _ in range(n)]
    for i, leaf in enumerate(leaves):
        memory = torch.empty(0).set_(leaf.untyped_storage())
        memory.copy_(torch.arange(i, i + memory.numel()))
    same(items_of(KINDS[kind], leaves))
    same(beside(KINDS[kind], leaves))


@pytest.mark.parametrize("first", test_parity_batched.LAYOUTS)
def test_stacking_any_layouts(first):
    layouts, numbered = test_parity_batched.LAYOUTS, test_parity_batched.numbered
    for second in layouts.values():
        make = (layouts[first], second)
        leaves = [m(numbered(2, 3, 4, 5, start=i)) for i, m in enumerate(make)]
        same_groups(beside(batched, leaves))


@pytest.mark.parametrize("first", test_parity_flat.LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_joining_any_layouts(first, dim):
    layouts, numbered = test_parity_flat.LAYOUTS, test_parity_flat.numbered
    for second in layouts.values():
        leaves = [m(numbered(4, 6, start=i)) for i, m in enumerate((layouts[first], second))]
        same_groups(beside(flat, leaves, dim=dim))


SHAPES = {
    "0-d": [(), (), ()],
    "equal": [(2, 3)] * 4,
    "many": [(3,)] * 40,
    "empty": [(0, 3)] * 2,
    "one empty": [(0, 3), (2, 3), (0, 3)],
    "other first size": [(1, 3), (4, 3), (2, 3)],
    "other last size": [(2, 1), (2, 4)],
    "both differ": [(2, 3), (3, 2), (1, 1)],
    "other rank": [(2, 3), (3,)],
    "0-d and 1-d": [(), (1,)],
    "legacy empty": [(0,), (2, 3)],
    "4-d": [(2, 3, 4, 5), (1, 3, 4, 5)],
}


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("dim", [0, 1, -1, 2])
@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes_joined_and_listed(shapes, dim, slot):
    leaves = [filled(torch.bfloat16, *shape) for shape in SHAPES[shapes]]
    for items in (items_of(flat, leaves, dim=dim), items_of(batched, leaves)):
        same_groups(items, Device(slot=slot))
        same_batch(items, Device(slot=slot))
    same_groups(beside(batched, leaves), Device(slot=slot))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype, kind):
    for n in (1, 3):
        leaves = [filled(dtype, 4, 3)] * n
        same(items_of(KINDS[kind], leaves))
        same(beside(KINDS[kind], leaves))


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_inference_tensors_come_where_the_engine_makes_them(kind, mode):
    with GRAD_MODES[mode]():
        same(beside(KINDS[kind], [vec(1, 2)] * 3))


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2])
def test_parameters_arrive_without_a_gradient(kind, n, mode):
    leaves = [torch.nn.Parameter(vec(1, 2)) for _ in range(n)]
    with GRAD_MODES[mode]():
        result = same(beside(KINDS[kind], leaves)).result
    assert not result["x"].requires_grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("make", [torch.Tensor.conj, torch._neg_view])
def test_lazy_bits_are_resolved_on_the_way(make, n, kind):
    leaves = [make(torch.tensor([1 + 2j, 3 - 1j])) for _ in range(n)]
    result = same(beside(KINDS[kind], leaves)).result["x"]
    assert not result.is_conj()
    assert not result.is_neg()


def test_a_default_device_of_torch_changes_nothing():
    with torch.device("meta"):
        same(beside(batched, [torch.ones(2, device="cpu")] * 3))


# Groups


@pytest.mark.parametrize("case", MERGES)
def test_shared_values_merge_where_they_are_equal(case):
    left, right, merges = MERGES[case]
    if merges is None and any(isinstance(x, torch.Tensor) and x.is_meta for x in (left, right)):
        pytest.skip("the fake device takes no other device's tensors")
    items = [item(x=shared(right if i % 2 else left), y=batched(vec(i))) for i in range(4)]
    with torch.no_grad():
        theirs = same_groups(items)
    if merges is not None:
        assert len(theirs.result) == (1 if merges else 4)


@pytest.mark.parametrize("flags", [(True, False, True), (False, True, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_item_decides_the_placement(kind, flags):
    leaf = vec(1, 2)
    items = [item(x=KINDS[kind](leaf, keep_on_cpu=f), y=batched(vec(1))) for f in flags]
    device = Device()
    ((_, batch),) = same_groups(items, device).result
    assert type(batch["x"]) is torch.Tensor


def test_different_names_and_orders():
    a, b, c = batched(vec(1)), flat(vec(2, 3)), shared(vec(4))
    rows = [item(a=a, b=b), item(b=b, a=a), item(a=a), item(a=a, c=c), item(c=c, a=a), item()]
    for order in (rows, rows[::-1], rows[1:] + rows[:1], [*rows, *rows[1:3]]):
        theirs = same_groups(order)
        assert sum(n for n, _ in theirs.result) == len(order)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_one_item_many_times(n):
    one = item(x=batched(vec(1, 2)), y=flat(vec(3)), z=shared(vec(4)))
    same([one] * n)


def test_no_items():
    assert same_groups([]).result == []
    assert same_batch([]).result == {}


def test_a_kept_field_is_never_copied():
    device = Device()
    items = [item(x=batched(vec(i), keep_on_cpu=True), y=shared([1])) for i in range(3)]
    same_groups(items, device)
    same_batch(items, device)
    assert (device.copies, device.memory_bytes, device.pinned_bytes) == (0, 0, 0)


def test_objects_are_the_items_own():
    marker = object()
    items = [item(x=shared(marker), y=batched(None), z=batched(vec(1))) for _ in range(3)]
    ((_, batch),) = our_groups(items, Device())
    assert batch["x"] is marker
    assert batch["y"] == [None] * 3


def test_each_group_is_collated_and_copied_when_it_is_asked_for():
    device = Device()
    items = [item(x=batched(vec(i)), s=shared(i)) for i in range(3)]
    groups = plugin.group_and_batch_mm_items(items, device=device, pin_memory=True)
    assert (device.copies, device.pinned_bytes) == (0, 0)
    late = vec(50)
    for i in range(3):
        _, batch = next(groups)
        assert device.copies == i + 1
        device.synchronize()
        assert batch["x"].tolist() == [[50 if i == 2 else i]]
        items[2] = item(x=batched(late), s=shared(2))
    assert next(groups, None) is None
    assert device.copies == 3


def test_a_group_that_is_never_asked_for_is_never_collated():
    device = Device()
    items = [item(x=batched(vec(1)), s=shared(0)), item(x=flat(5), s=shared(1))]
    groups = plugin.group_and_batch_mm_items(items, device=device, pin_memory=True)
    assert next(groups)[0] == 1
    groups.close()
    assert device.copies == 1


# Errors


BAD = {
    "ranks differ": lambda: [flat(torch.ones(2, 3)), flat(torch.ones(3))],
    "0-d joined": lambda: [flat(torch.tensor(1)), flat(torch.tensor(2))],
    "dim out of range": lambda: [flat(torch.ones(2), dim=3), flat(torch.ones(2), dim=3)],
    "lists with a dim": lambda: [flat([torch.ones(2)], dim=1)],
    "not iterable": lambda: [flat(5)],
    "none": lambda: [flat(None), flat(None)],
    "0-d beside a list": lambda: [flat(torch.tensor(1)), flat([torch.ones(1)])],
    "cast refused": lambda: [batched(torch.ones(2).long()), batched(torch.ones(2))],
    "cast refused, joined": lambda: [flat(torch.ones(2).bool()), flat(torch.ones(2))],
    "float8 mixed": lambda: [
        batched(torch.ones(2).to(torch.float8_e5m2)),
        batched(torch.ones(2).to(torch.float8_e4m3fn)),
    ],
    "gradient": lambda: [batched(torch.ones(2, requires_grad=True)), batched(torch.ones(2))],
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("place", ["first", "last", "alone"])
def test_errors_are_the_engines(name, place):
    def items() -> list[Any]:
        rows = []
        for i, x in enumerate(BAD[name]()):
            fields = {} if place == "alone" else {"a": batched(vec(i, 2)), "b": flat(vec(i))}
            rows.append(item(x=x, **fields) if place == "first" else item(**fields, x=x))
        return rows

    device = Device()
    theirs = same_groups(items(), device)
    assert theirs.exception is not None
    assert same_batch(items(), device).exception is theirs.exception
    # The device is none the worse for it.
    assert same_batch([item(a=batched(vec(1)), b=flat(vec(2)))], device).exception is None


@pytest.mark.parametrize("kept", [(False, False), (True, False), (False, True), (True, True)])
def test_of_several_errors_the_first_is_raised(kept):
    def items() -> list[Any]:
        return [
            item(
                x=flat(torch.ones(2, 3), dim=dim, keep_on_cpu=kept[0]),
                y=batched(vec(1)),
                z=flat(5, keep_on_cpu=kept[1]),
            )
            for dim in (9, 9)
        ]

    assert same_groups(items()).exception is IndexError
    assert same_batch(items()).exception is IndexError


@pytest.mark.parametrize("items", [[None], [None, None], [5], [item(), 5]])
def test_what_are_no_items(items):
    assert same_groups(items).exception is AttributeError


def test_a_batch_of_mixed_field_classes_is_a_value_error():
    for first in FIELDS:
        for second in FIELDS:
            elem = vllm_inputs.MultiModalFieldElem
            items = [item(x=elem(vec(1, 2), FIELDS[k]), y=batched(vec(1))) for k in (first, second)]
            assert same_batch(items).exception is (None if first == second else ValueError)


def test_an_error_comes_after_the_groups_before_it():
    items = [item(x=batched(vec(1))), item(y=flat(5)), item(x=batched(vec(2)))]
    theirs = same_groups(items)
    assert (len(theirs.result), theirs.exception) == (1, TypeError)


# Families


@pytest.mark.parametrize("n", [1, 2, 7, 33])
@pytest.mark.parametrize(("family", "name"), SETS)
def test_items_of_mixed_sizes(family, name, n):
    fields = fields_of(family)
    items = from_plain(items_of_set(family, name, n), fields)
    ((count, _),) = same_groups(items, Device(slot={7: 1024, 33: 65536}.get(n))).result
    assert count == n


@pytest.mark.parametrize(("family", "name"), SETS)
def test_items_of_one_size_as_configured(family, name, as_configured):
    fields = fields_of(family)
    for n in (1, 4):
        same_batch(from_plain(items_of_set(family, name, n, mixed=False), fields))


@pytest.mark.parametrize(("family", "name"), SETS)
def test_slices_of_pixels_of_another_dtype(family, name):
    fields = fields_of(family)
    items = sliced(items_of_set(family, name, 3, model_dtype=torch.uint8), fields)
    same_groups(from_plain(items, fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_and_embeddings_and_modalities_in_turn(family, activated):
    """Through ``group_and_batch_mm_kwargs``, which looks up the function that is replaced."""
    modalities, plain = zip(*mixed_items(family, 13), strict=True)
    items = from_plain(plain, fields_of(family))
    pairs = list(zip(modalities, items, strict=True))
    device = Device()

    def ours() -> Iterator[Any]:
        try:
            yield from vllm_utils.group_and_batch_mm_kwargs(pairs, device=device, pin_memory=True)
        finally:
            device.synchronize()

    def theirs() -> Iterator[Any]:
        with copies_stay_in_host_memory(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_utils, "group_and_batch_mm_items", ORIGINAL.group_and_batch_mm_items)
            yield from vllm_utils.group_and_batch_mm_kwargs(pairs, device=THERE)

    result = assert_same_outcome(ours, theirs, inputs=leaves_of(items)).result
    assert sum(n for _, n, _ in result) == 13
    start = 0
    for _, count, batch in outcome(ours).result:
        assert_in_place(batch, items[start : start + count], device)
        start += count


# At random


def in_pinned_memory(items: Sequence[Any], device: Device, every: int) -> None:
    """Moves some of the leaves to memory that the device can read."""
    for i, elem in enumerate(elem for x in items for elem in x.values()):
        leaf = elem.data
        if i % every or type(leaf) is not torch.Tensor or leaf.requires_grad or not leaf.numel():
            continue
        if leaf.dtype in DTYPES and not leaf.is_complex():
            memory = device.pinned(leaf.nbytes).view(leaf.dtype).view(leaf.shape)
            elem.data = memory.copy_(leaf)


@given(
    batch=batches(),
    mode=st.sampled_from(sorted(GRAD_MODES)),
    dropped=st.lists(st.tuples(st.integers(0, 8), st.sampled_from("abcdef")), max_size=3),
    turned=st.lists(st.integers(0, 8), max_size=3),
    slot=st.sampled_from([None, 256, 512]),
    small=st.sampled_from([0, 0, staging.SMALL]),
    direct_from=st.sampled_from([1, 16, staging.DIRECT_FROM]),
    pinned=st.sampled_from([0, 0, 1, 2, 3]),
    ordered=st.booleans(),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.timeout(3600)
def test_random_items(batch, mode, dropped, turned, slot, small, direct_from, pinned, ordered):
    cases, n = batch
    plain_items = build_items(cases, n)
    for i, name in dropped:
        if i < n:
            plain_items[i].pop(name, None)
    for i in turned:
        if i < n:
            plain_items[i] = dict(reversed(plain_items[i].items()))
    items = from_plain(plain_items, declare(cases))
    # The fake device copies no gradients.
    leaves = [x for x in iter_leaves(leaves_of(items)) if isinstance(x, torch.Tensor)]
    assume(mode != "grad" or not any(x.requires_grad for x in leaves))
    device = Device(slot=slot, copies_are_ordered=ordered)
    if pinned:
        in_pinned_memory(items, device, pinned)
    with pytest.MonkeyPatch.context() as patch, GRAD_MODES[mode]():
        patch.setattr(staging, "SMALL", small)
        patch.setattr(staging, "DIRECT_FROM", direct_from)
        note(f"the engine gave {same_groups(items, device)}")
        # A batch of items with unlike names is left to the engine, which knows no fakes.
        if n < 4 and len({frozenset(x) for x in plain_items}) == 1:
            same_batch(items, device)


# Copies per batch


def tables() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "docs" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_copies_than_the_engine_makes(family, n, as_configured):
    copies_of = tables().copies_of
    for name in FAMILIES[family]["sets"]:
        theirs, ours = copies_of(family, name, n)
        assert ours <= theirs, name


def test_the_table_in_the_docs_is_what_is_counted(as_configured):
    module = tables()
    assert module.copies() in (module.ROOT / "docs" / "staging.md").read_text()


# What the engine does with a batch


GRID = [(1, 2, 4), (1, 4, 4), (1, 2, 2), (1, 6, 2), (1, 2, 4)]


def qwen_items(dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Images as Qwen's processor makes them, at a fraction of the size."""
    pixels = torch.arange(sum(h * w for _, h, w in GRID) * 6).view(-1, 6).to(dtype)
    parts = pixels.split([h * w for _, h, w in GRID])
    return [
        item(
            pixel_values=flat(part),
            image_grid_thw=batched(torch.tensor(grid), keep_on_cpu=True),
        )
        for part, grid in zip(parts, GRID, strict=True)
    ]


def both(items: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any], Device]:
    """Our batch and theirs, and the device that ours is on."""
    device = Device()
    ours, theirs = our_batch(items, device), their_batch(items)
    assert_in_place(ours, items, device)
    return ours, theirs, device


def equal(ours: Any, theirs: Any) -> bool:
    """Whether all that a model was given is the same."""
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(equal(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


def unmade(cls: type) -> Any:
    """A model of which only the methods are there."""
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    return model


CUDA_GRAPH_MODELS = {
    "qwen3_vl": (Qwen3VLForConditionalGeneration, qwen_items),
    "internvl": (
        InternVLChatModel,
        lambda: [
            item(
                pixel_values_flat=flat(torch.full((n, 3, 4, 4), n)),
                image_num_patches=batched(torch.tensor(n), keep_on_cpu=True),
            )
            for n in (1, 3, 2, 1, 4)
        ],
    ),
    "gemma4, one size": (
        Gemma4ForConditionalGeneration,
        lambda: [
            item(
                pixel_values=batched(torch.full((4, 6), float(n))),
                pixel_position_ids=batched(torch.full((4, 2), n)),
            )
            for n in range(5)
        ],
    ),
    "gemma4, many sizes": (
        Gemma4ForConditionalGeneration,
        lambda: [
            item(
                pixel_values=batched(torch.full((n, 6), float(n))),
                pixel_position_ids=batched(torch.full((n, 2), n)),
            )
            for n in (1, 3, 2, 1, 4)
        ],
    ),
}


@pytest.mark.parametrize("name", CUDA_GRAPH_MODELS)
@pytest.mark.parametrize("indices", [[0, 1, 2, 3, 4], [3], [4, 1], []])
def test_cuda_graphs_select_items_and_copy_them_to_their_buffers(name, indices):
    """``EncoderCudaGraphManager._select_items`` and ``_run_budget_graph``
    (v1/worker/encoder_cudagraph.py): slices of a batch joined by ``torch.cat``, or elements of a
    list, are copied into the buffers that were captured; nothing keeps the batch."""
    cls, make = CUDA_GRAPH_MODELS[name]
    manager = EncoderCudaGraphManager.__new__(EncoderCudaGraphManager)
    manager.model, manager._capture_axes = unmade(cls), ()
    ours, theirs, device = both(make())
    selected, _ = manager._select_items(ours, indices)
    assert equal(selected, manager._select_items(theirs, indices)[0])
    buffers = {}
    for key, source in selected.items():
        for i, part in enumerate(source if isinstance(source, list) else [source]):
            if isinstance(part, torch.Tensor):
                buffers[key, i] = part.new_full((part.shape[0] + 3, *part.shape[1:]), 9)
                manager._copy_padded_buffer(buffers[key, i], part)
                assert torch.equal(buffers[key, i][: len(part)], part)
    assert not any(device.has(buffer) for buffer in buffers.values())
    del ours, selected
    part = source = None
    assert device.memory_bytes == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_data_parallel_vision_slices_the_pixels(ranks, monkeypatch):
    """``run_dp_sharded_mrope_vision_model`` (model_executor/models/vision.py): each rank joins its
    slices of ``pixel_values`` by ``torch.cat``, by grids that are lists."""

    class Vision(torch.nn.Module):
        spatial_merge_size, out_hidden_size = 2, 6

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

        def forward(self, pixels: torch.Tensor, grids: list[list[int]]) -> torch.Tensor:
            assert len(pixels) == sum(t * h * w for t, h, w in grids)
            assert not device.has(pixels)
            return pixels.view(-1, 4, 6).sum(1)

    def run(batch: dict[str, Any]) -> Any:
        parts: dict[int, torch.Tensor] = {}
        for now in [*range(ranks), 0]:

            def gather(part: torch.Tensor, dim: int, now: int = now) -> torch.Tensor:
                parts[now] = part
                return torch.cat([parts.get(r, torch.zeros_like(part)) for r in range(ranks)], dim)

            monkeypatch.setattr(vision, "get_tensor_model_parallel_rank", lambda now=now: now)
            monkeypatch.setattr(vision, "tensor_model_parallel_all_gather", gather)
            grids = batch["image_grid_thw"].tolist()
            pixels = batch["pixel_values"]
            out = vision.run_dp_sharded_mrope_vision_model(
                Vision(), pixels, grids, rope_type="rope_3d"
            )
        return out

    monkeypatch.setattr(vision, "get_tensor_model_parallel_world_size", lambda: ranks)
    ours, theirs, device = both(qwen_items())
    with torch.inference_mode():
        found = run(ours)
        assert [len(x) for x in found] == [h * w // 4 for _, h, w in GRID]
        assert equal(found, run(theirs))


class Runner(SimpleNamespace):
    """What the engine's runners ask of themselves, on a fake device."""

    def __init__(self, model: Any = None, **more: Any) -> None:
        super().__init__(device=Device(manual=False), model=model, **more)


@pytest.fixture
def pins(activated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine, with its batcher replaced, on a platform where it pins."""
    for module in (gpu_model_runner, encoder_runner):
        monkeypatch.setattr(module, "PIN_MEMORY", True)


def videos(n: int) -> list[tuple[str, Any]]:
    return [
        (
            "video",
            item(
                pixel_values_videos=flat(torch.full((4 + i, 6), float(i))),
                second_per_grid=batched(torch.tensor(0.5 * i)),
                video_grid_thw=batched(torch.tensor([1, 1, 4 + i]), keep_on_cpu=True),
            ),
        )
        for i in range(n)
    ]


class Embeds:
    """A model that returns an embedding for each video or image, and keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def embed_multimodal(self, **batch: Any) -> list[torch.Tensor]:
        self.calls.append(batch)
        for name in ("pixel_values_videos", "pixel_values"):
            if name in batch:
                grid = batch["video_grid_thw" if "videos" in name else "image_grid_thw"]
                return list(batch[name].split(grid.prod(-1).tolist()))
        return list(batch["image_embeds"])


@pytest.mark.parametrize("one_by_one", [True, False])
def test_videos_are_encoded_one_by_one_where_tokens_are_pruned(one_by_one, pins):
    """``GPUModelRunner._execute_mm_encoder`` (v1/worker/gpu_model_runner.py): the whole batch is
    made, and where videos are pruned (EVS) or must come in sequence,
    ``next(group_and_batch_mm_kwargs([one]))`` for each."""
    pairs = videos(3)
    runner = Runner(
        Embeds(),
        observability_config=None,
        lora_config=None,
        is_multimodal_pruning_enabled=one_by_one,
        requires_sequential_video_encoding=False,
        encoder_cudagraph_manager=None,
        timed_encoder_operation=lambda *args: contextlib.nullcontext(),
        _batch_mm_inputs_from_scheduler=lambda output: (["a", "b", "c"], pairs, [None] * 3),
        encoder_cache={},
    )

    def cache(name: str, output: torch.Tensor, *rest: Any) -> None:
        runner.encoder_cache[name] = output

    runner._cache_encoder_output = cache
    output = SimpleNamespace(ec_manager_metadata=None, free_encoder_mm_hashes=[])
    found = gpu_model_runner.GPUModelRunner._execute_mm_encoder(runner, output)
    runner.device.synchronize()
    assert equal(found, [x["pixel_values_videos"].data for _, x in pairs])
    assert all(runner.device.has(x) for x in found)
    assert len(runner.model.calls) == (3 if one_by_one else 1)
    for i, call in enumerate(runner.model.calls):
        assert equal(call, their_batch([x for _, x in (pairs[i : i + 1] if one_by_one else pairs)]))


def test_profiling_takes_the_next_batch_of_one_item_many_times(pins):
    """``GPUModelRunner._get_mm_dummy_batch`` (v1/worker/gpu_model_runner.py), and
    ``_measure_on_worker`` (ec_connector/encoder_output_width.py): ``next(...)`` of the batches, so
    they come from an iterator."""
    pairs = videos(2)[1:] * 5
    budget = SimpleNamespace(get_dummy_encoder_profile_inputs=lambda modality, n: pairs)
    runner = Runner(mm_budget=budget)
    found = gpu_model_runner.GPUModelRunner._get_mm_dummy_batch(runner, "video", 5)
    runner.device.synchronize()
    assert found["pixel_values_videos"].shape == (25, 6)
    assert equal(found, their_batch([x for _, x in pairs]))
    groups = vllm_utils.group_and_batch_mm_kwargs(pairs, device=runner.device, pin_memory=True)
    assert iter(groups) is groups


def test_raw_inputs_are_merged_from_all_batches(pins):
    """``GPUModelRunner._extract_mm_kwargs`` (v1/worker/gpu_model_runner.py), for Terratorch and the
    like: ``dict.update`` with each batch, so that a later one wins."""
    first = [("image", item(pixel_values=batched(torch.full((2, 3), i)))) for i in (1, 2)]
    second = [("more", item(pixel_values=batched(vec(5, 6)), location=batched(vec(7, 8))))]
    requests = [
        SimpleNamespace(
            mm_features=[
                SimpleNamespace(modality=m, data=data) for m, data in (*pairs, ("x", None))
            ]
        )
        for pairs in (first, second)
    ]
    runner = Runner(is_multimodal_raw_input_only_model=True)
    output = SimpleNamespace(scheduled_new_reqs=requests)
    found = gpu_model_runner.GPUModelRunner._extract_mm_kwargs(runner, output)
    runner.device.synchronize()
    assert equal(found, {"pixel_values": vec(5, 6)[None], "location": vec(7, 8)[None]})
    assert all(map(runner.device.has, found.values()))


def test_the_default_runner_encodes_modality_by_modality(pins):
    """``EncoderRunner.execute_mm_encoder`` (v1/worker/gpu/mm/encoder_runner.py): sorted by
    modality, each batch handed to the model as it comes, outputs in the order of the items."""
    images = [("image", x) for x in qwen_items()]
    pairs = [x for two in zip(images, videos(5), strict=True) for x in two]
    runner = Runner(Embeds(), cudagraph_manager=None)
    with torch.inference_mode():
        found = encoder_runner.EncoderRunner.execute_mm_encoder(runner, pairs)
        runner.device.synchronize()
    names = {"image": "pixel_values", "video": "pixel_values_videos"}
    assert equal(found, [x[names[m]].data for m, x in pairs])
    assert len(runner.model.calls) == 2
    assert all(x.is_inference() for x in found)


def embeds_items(sizes: Sequence[int] = (3, 700, 5)) -> list[Any]:
    """Embeddings of different sizes with other fields."""
    return [
        item(
            image_embeds=batched(torch.full((n, 8), float(n))),
            scores=flat(torch.full((n, 4), n)),
            pixel_mask=flat(torch.ones(4000, dtype=torch.uint8)),
        )
        for n in sizes
    ]


def test_a_store_of_embeddings_charges_their_own_memory():
    """``MooncakeEmbeddingStoreBackend._enqueue_save``
    (ec_connector/mooncake_store_embedding/backend.py): takes contiguous outputs only, and charges
    ``untyped_storage().nbytes()`` once for each storage."""
    store = SimpleNamespace(exists=lambda key: True)
    backend = ec_store.MooncakeEmbeddingStoreBackend(
        store, "test", max_pending_items=9, max_pending_bytes=1 << 20
    )
    ours, _, _ = both(embeds_items())
    for name, tensor in enumerate(ours["image_embeds"]):
        assert tensor.is_contiguous()
        before = backend._pending_bytes
        assert backend._enqueue_save(str(name), tensor)
        # Rounded up to the alignment, and some bytes for the fake device's own.
        assert backend._pending_bytes - before <= tensor.nbytes + 256 + 512
    assert len(backend._pending_storages) == 3
    backend._executor.shutdown()


@pytest.mark.parametrize("name", ["image_embeds", "scores"])
def test_transfers_register_each_tensor_as_memory_of_its_own(name):
    """``MooncakeTransfer.acquire_sources`` (ec_connector/mooncake/transfer.py): registers
    ``(data_ptr, nbytes)`` of each output, and refuses one address with two sizes."""
    found: list[tuple[int, int]] = []

    def register(addresses: list[int], sizes: list[int]) -> int:
        found.extend(zip(addresses, sizes, strict=True))
        return 0

    transfer = MooncakeTransfer("here", "tcp")
    transfer._engine = SimpleNamespace(batch_register_memory=register)
    ours, _, _ = both(embeds_items())
    outputs = ours[name] if name == "image_embeds" else list(ours[name].split([3, 700, 5]))
    transfer.acquire_sources(outputs)
    transfer.acquire_sources([x for x in ours.values() if isinstance(x, torch.Tensor)][1:])
    assert len(found) == len(outputs) + 1
    found.sort()
    for (start, nbytes), (following, _) in pairwise(found):
        assert start + nbytes <= following


@pytest.mark.parametrize("make", [embeds_items, qwen_items])
def test_streams_can_be_recorded_on_outputs(make):
    """``src.record_stream(save_stream)`` in ec_connector/cpu/worker/__init__.py: torch ignores it
    for memory that it did not allocate, so all is a view of what the backend's ``empty`` made."""
    items = make()
    ours, _, device = both(items)
    for name, value in ours.items():
        for leaf in iter_leaves(value):
            kept = items[0][name].field.keep_on_cpu
            assert device.has(leaf) is not kept
            assert kept or leaf._base is None or device.has(leaf._base)


def test_items_are_as_they_were():
    """The LoRA mapping in ``GPUModelRunner._execute_mm_encoder`` reads the items
    (``get_mm_lora_token_counts(mm_kwargs=item)``), not the batch; the next step batches the same
    items anew."""
    items = [*qwen_items(), *embeds_items()]
    before = [y for x in items for k, e in x.items() for y in (k, e, e.data, e.field)]
    values = [e.data.clone() for x in items for e in x.values()]
    versions = [e.data._version for x in items for e in x.values()]
    device = Device()
    first = outcome(lambda: our_groups(items, device)).result
    for _, batch in first:
        for value in iter_leaves(batch):
            if device.has(value):
                value.zero_()
    now = [y for x in items for k, e in x.items() for y in (k, e, e.data, e.field)]
    assert all(a is b for a, b in zip(now, before, strict=True))
    assert equal([e.data for x in items for e in x.values()], values)
    assert [e.data._version for x in items for e in x.values()] == versions
    same_groups(items, device)


def kept_by_the_cache(batch: dict[str, Any]) -> list[torch.Tensor]:
    return [x.view_as(x) for x in batch["image_embeds"]]


def test_a_cache_of_embeddings_keeps_no_other_memory():
    """``encoder_cache[mm_hash] = output`` in ``GPUModelRunner._cache_encoder_output``: models
    return views of ``*_embeds`` (``image_embeds.split(sizes)`` in qwen2_vl.py, ``return
    image_input["data"]`` in internvl.py), which stay for many steps. All else is freed with the
    batch, and each of a list with the item that is evicted."""
    device = Device()
    batch = our_batch(embeds_items(), device)
    alone = sum(-(-x.nbytes // 256) * 256 for x in batch["image_embeds"])
    assert device.memory_bytes > alone + 12000
    cache = kept_by_the_cache(batch)
    del batch
    assert device.memory_bytes == alone
    del cache[1]
    assert device.memory_bytes == 2 * 256
    cache.clear()
    assert device.memory_bytes == 0


def test_a_cache_of_views_of_stacked_embeddings_keeps_no_other_field():
    """As above, where items have one size: one allocation for the embeddings, as the engine's."""
    device = Device()
    batch = our_batch(embeds_items([32, 32]), device)
    cache = list(batch["image_embeds"])
    del batch
    assert device.memory_bytes == sum(x.nbytes for x in cache)


def test_saving_a_tensor_saves_what_it_was_staged_with_unless_it_is_detached():
    """Debug dumps of a worker, by ``torch.save`` or pickle: a view takes all its storage along."""
    batch = our_batch(embeds_items(), Device())
    small = batch["scores"][:1]

    def saved(tensor: torch.Tensor) -> int:
        file = io.BytesIO()
        torch.save(tensor, file)
        return len(file.getvalue())

    assert saved(small) > 12000
    assert saved(mmcollate.detach(small)) < 3000
    assert equal(mmcollate.detach(small), small)


OTHERS: dict[str, Callable[[int], Any]] = {
    "a larger mask": lambda i: batched(torch.ones(4096, dtype=torch.bool)),
    "larger indices": lambda i: flat(torch.full((512, 2), i)),
    "a smaller float": lambda i: batched(vec(i)),
    "smaller floats in a list": lambda i: batched(torch.ones(i + 1)),
    "embeddings": lambda i: batched(torch.ones(900, 2)),
    "a kept field": lambda i: batched(torch.ones(900, 2), keep_on_cpu=True),
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("large", [False, True])
def test_pixels_lie_at_the_start_of_their_memory_in_any_company(n, large, monkeypatch):
    """``profile_run`` and ``_dummy_run`` compile with dummy items; compiled patch embeddings
    (qwen2_5_vl.py and others) may be specialised on the offset of ``pixel_values`` in its
    storage and on its alignment: both are the same whichever fields come along."""
    monkeypatch.setattr(staging, "SMALL", 64 << 10)
    width = 300 if large else 3
    for names in ([], *([k] for k in OTHERS), list(OTHERS), list(OTHERS)[::-1]):
        items = []
        for i in range(n):
            elems = {f"{k}_embeds" if k == "embeddings" else k: OTHERS[k](i) for k in names}
            pixels = {"pixel_values": flat(torch.full((40, width), float(i)))}
            # Before the others, and behind them.
            items.append(item(**pixels, **elems) if len(names) % 2 else item(**elems, **pixels))
        ours, theirs, device = both(items)
        assert equal(ours, theirs)
        assert device.offset_of(ours["pixel_values"]) == 0, names
        for value in iter_leaves(ours):
            assert not device.has(value) or value.data_ptr() % 256 == 0, names


def test_memory_while_profiling_is_what_a_real_batch_takes():
    """``profile_run``: a batch of other items of the same sizes takes as much memory."""
    sizes = []
    for items in (embeds_items([9]) * 4, embeds_items([9] * 4)):
        device = Device()
        batch = our_batch(items, device)
        sizes.append(device.memory_bytes)
        assert sum(x.nbytes for x in batch.values()) <= sizes[-1]
    assert sizes[0] == sizes[1]

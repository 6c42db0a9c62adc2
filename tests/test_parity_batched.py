"""Batched fields: one tensor is viewed, equal shapes are stacked, all else stays a list."""

from __future__ import annotations

import mmcollate
import numpy as np
import pytest
import torch
from compare import assert_same, assert_same_outcome

pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")

from mmcollate.integrations import vllm as plugin
from vllm_items import (
    DEVICES,
    GRAD_MODES,
    ORIGINAL,
    batched,
    item,
    items_of,
    leaves_of,
    same,
    same_groups,
    value_of,
)

CPU_DEVICES = [None, "cpu", torch.device("cpu")]


def numbered(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    count = int(np.prod(shape))
    return torch.arange(start, start + count, dtype=torch.float32).to(dtype).reshape(shape)


def batch(leaves, **options):
    return value_of(same(items_of(batched, leaves), **options))


# One tensor


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (0, 3), (1, 1, 1), (2, 0, 3)])
def test_one_tensor_gains_a_dim(shape, mode, device):
    leaf = numbered(*shape)
    with GRAD_MODES[mode]():
        out = batch([leaf], device=device)
    assert out.shape == (1, *shape)
    if device != "meta":
        assert out.untyped_storage()._cdata == leaf.untyped_storage()._cdata


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x[:, 1:3],
        lambda x: x[:1].expand(4, 6),
        lambda x: x[0, 0].expand(3),
        lambda x: x[1:2],
        lambda x: x.as_strided((1, 3), (77, 1)),
        lambda x: x.as_strided((3, 3), (1, 1)),
        lambda x: x[2, 4],
    ],
)
@pytest.mark.parametrize("device", CPU_DEVICES)
def test_one_strided_tensor_is_viewed_as_it_lies(view, device):
    leaf = view(numbered(4, 6))
    out = batch([leaf], device=device)
    assert out.stride()[1:] == leaf.stride()
    assert out.data_ptr() == leaf.data_ptr()
    if leaf.dim():
        assert out.stride(0) == leaf.shape[0] * leaf.stride(0)


def test_a_write_through_the_view_reaches_the_item():
    leaf = torch.zeros(2)
    (ours,) = plugin.group_and_batch_mm_items(items_of(batched, [leaf]))
    ours[1]["x"].fill_(5)
    assert leaf.tolist() == [5, 5]


# Equal shapes


@pytest.mark.parametrize("n", [2, 3, 17])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (0, 3), (1, 1), (2, 3, 4, 5)])
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_equal_shapes_are_stacked(shape, n, mode, device):
    leaves = [numbered(*shape, start=i) for i in range(n)]
    with GRAD_MODES[mode]():
        out = batch(leaves, device=device)
        assert out.is_inference() == (mode == "inference")
    assert out.shape == (n, *shape)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(x.shape),
    "gapped": lambda x: torch.stack([x, x], -1)[..., 0],
    "offset": lambda x: torch.cat([x, x])[len(x) :],
    "odd strides": lambda x: x[:, :1].contiguous().as_strided((2, 1, 4, 5), (20, 99, 5, 1)),
}


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_stacking_makes_a_contiguous_tensor_of_any_layout(first, second):
    leaves = [LAYOUTS[k](numbered(2, 3, 4, 5, start=i)) for i, k in enumerate((first, second))]
    if "odd strides" in (first, second):
        leaves = [x[:, :1] for x in leaves]
    out = batch(leaves)
    assert out.stride() == torch.empty(out.shape).stride()
    batch(leaves, device="meta")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [2, 9])
def test_the_same_leaf_many_times_is_copied_many_times(device, n):
    leaf = numbered(2, 3)
    out = batch([leaf] * n, device=device)
    assert out.shape == (n, 2, 3)
    if device != "meta":
        assert out.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()


# Leaves of one storage

BASE = torch.arange(24, dtype=torch.int64)


def never_viewed(leaves):
    """Strictly the engine's copies: these leaves do not lie side by side in order."""
    items = items_of(batched, leaves)
    assert_same_outcome(
        lambda: plugin.group_and_batch_mm_items(items),
        lambda: ORIGINAL.group_and_batch_mm_items(items),
        inputs=leaves_of(items),
    )


@pytest.mark.parametrize(
    "leaves",
    [
        [BASE[0:3], BASE[3:6]],
        [BASE[3 * i : 3 * i + 3] for i in range(8)],
        list(BASE.view(6, 4)),
        list(BASE.view(2, 3, 4)),
        list(BASE),
        [BASE[5:6], BASE[6:7]],
        [BASE[0:3].view(1, 3), BASE[3:6].view(1, 3)],
    ],
)
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_leaves_that_lie_side_by_side(leaves, mode, device):
    with GRAD_MODES[mode]():
        out = batch(leaves, device=device)
    if device != "meta":
        assert_same(out.tolist(), [x.tolist() for x in leaves])


@pytest.mark.parametrize(
    "leaves",
    [
        [BASE[3:6], BASE[0:3]],
        [BASE[0:3], BASE[4:7]],
        [BASE[0:3], BASE[2:5]],
        [BASE[0:3], BASE[0:3]],
        [BASE[0:3], BASE[3:6], BASE[3:6]],
        [BASE[0:3], BASE[3:6], BASE[9:12]],
        [BASE[0:3], BASE[3:6].clone()],
        [BASE[0:3], BASE[3:6].view(torch.float64)],
        [BASE[0:3], BASE[3:6].view(torch.uint64)],
        [BASE[0:6:2], BASE[1:7:2]],
        [BASE[0:6:2], BASE[6:12:2]],
        [BASE.view(4, 6)[:, 0], BASE.view(4, 6)[:, 1]],
        [BASE[0:4].view(2, 2).t(), BASE[4:8].view(2, 2).t()],
        [BASE[0:4].view(2, 2), BASE[4:8].view(2, 2).t()],
        [BASE[0:1].expand(3), BASE[1:2].expand(3)],
        [BASE[0:1].expand(2), BASE[1:3]],
        [BASE[0:3], BASE[3:6].flip(0)],
    ],
)
def test_leaves_of_one_storage_that_do_not_lie_side_by_side_are_copied(leaves):
    never_viewed(leaves)
    same(items_of(batched, leaves))


def test_two_fields_of_the_same_leaves_do_not_share_a_batch():
    leaves = [torch.ones(3) * i for i in range(4)]
    items = [item(a=batched(x), b=batched(x)) for x in leaves]
    assert_same_outcome(
        lambda: plugin.group_and_batch_mm_items(items),
        lambda: ORIGINAL.group_and_batch_mm_items(items),
        inputs=leaves,
    )


# Ragged and other lists


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shapes",
    [
        [(1,), (2,)],
        [(2, 3), (3, 2)],
        [(), (1,)],
        [(1,), ()],
        [(2,), (2, 1)],
        [(0,), (0, 0)],
        [(3,), (3,), (4,)],
        [(0,), (1,)],
    ],
)
def test_ragged_leaves_stay_a_list_of_the_same_objects(shapes, device):
    leaves = [numbered(*s) for s in shapes]
    out = batch(leaves, device=device)
    assert type(out) is list
    if device != "meta":
        assert all(a is b for a, b in zip(out, leaves, strict=True))


def test_nested_lists_are_neither_stacked_nor_entered():
    leaves = [[numbered(2), numbered(2)], [numbered(2), numbered(2)]]
    out = batch(leaves)
    assert out[0] is leaves[0]
    assert out[1] is leaves[1]


@pytest.mark.parametrize("leaf", [1, 1.5, None, "a", (1,), [1], np.ones(2), np.float64(1)])
def test_what_is_no_tensor_is_listed_as_it_is(leaf):
    for leaves in ([leaf], [leaf, leaf], [torch.ones(2), leaf], [leaf, torch.ones(2)]):
        out = batch(leaves)
        assert type(out) is list
        assert all(a is b for a, b in zip(out, leaves, strict=True))


# Dtypes

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every kind of value a dtype can hold, by its bits."""
    generator = torch.Generator().manual_seed(5)
    high = 2 if dtype is torch.bool else 256
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_dtype_keeps_its_bits(dtype, device, n):
    out = batch([filled(dtype, 3, 4) for _ in range(n)], device=device)
    assert out.dtype is dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:Casting complex")
@pytest.mark.parametrize("first", DTYPES, ids=str)
@pytest.mark.parametrize("second", DTYPES, ids=str)
def test_mixed_dtypes_are_cast_to_the_first_or_refused(first, second):
    for order in ((first, second), (first, first, second), (first, second, first)):
        theirs = same(items_of(batched, [filled(d, 4) for d in order]))
        if theirs.exception is None:
            assert value_of(theirs).dtype is first


def test_the_known_casts():
    assert batch([torch.ones(1).bfloat16(), torch.tensor([1.001])]).tolist() == [[1.0], [1.0]]
    wraps = batch([torch.zeros(1, dtype=torch.int32), torch.tensor([2**32 + 5])])
    assert wraps.tolist() == [[0], [5]]
    assert batch([torch.ones(1), torch.tensor([3])]).tolist() == [[1.0], [3.0]]
    assert batch([torch.ones(1), torch.tensor([True])]).tolist() == [[1.0], [1.0]]
    for pair in (
        [torch.tensor([1]), torch.ones(1)],
        [torch.tensor([True]), torch.tensor([1])],
        [torch.ones(1), torch.ones(1) * 1j],
    ):
        theirs = same(items_of(batched, pair))
        assert theirs.exception is RuntimeError or theirs.exception is TypeError
        assert "can't be cast" in theirs.message


def test_mixed_dtypes_of_different_shapes_stay_a_list():
    leaves = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
    assert batch(leaves)[1] is leaves[1]


@pytest.mark.parametrize("order", [("cpu", "meta"), ("meta", "cpu")])
@pytest.mark.parametrize("device", DEVICES)
def test_mixed_devices_are_refused(order, device):
    theirs = same(items_of(batched, [torch.ones(2, device=d) for d in order]), device=device)
    assert theirs.exception is not None
    ragged = [torch.ones(i + 1, device=d) for i, d in enumerate(order)]
    same(items_of(batched, ragged), device=device)


# Autograd


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_leaves_that_require_grad(mode, which, device):
    leaves = [torch.ones(2).requires_grad_(grad) for grad in which]
    items = items_of(batched, leaves)
    with GRAD_MODES[mode]():
        theirs = same(items, device=device)
    if mode == "grad":
        assert theirs.exception is RuntimeError
    else:
        assert not value_of(theirs).requires_grad


@pytest.mark.parametrize("mode", GRAD_MODES)
def test_one_leaf_that_requires_grad_keeps_it(mode):
    leaf = torch.ones(2, requires_grad=True)
    with GRAD_MODES[mode]():
        out = batch([leaf])
    assert out.requires_grad
    if mode == "grad":
        out.sum().backward()
        assert leaf.grad.tolist() == [1, 1]


def test_ragged_leaves_that_require_grad_are_no_error():
    leaves = [torch.ones(2, requires_grad=True), torch.ones(3)]
    assert batch(leaves)[0] is leaves[0]


@pytest.mark.parametrize("n", [1, 2])
def test_inference_tensors_collated_outside_inference_mode(n):
    with torch.inference_mode():
        leaves = [torch.ones(2) * i for i in range(n)]
    out = batch(leaves)
    assert out.is_inference() == (n == 1)


def test_a_normal_tensor_collated_in_inference_mode():
    leaf = torch.ones(2)
    with torch.inference_mode():
        out = batch([leaf])
    assert not out.is_inference()  # a view of a normal tensor


# Lazy bits, other layouts, subclasses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2])
def test_conj_and_neg_bits(n, device):
    z = torch.tensor([1 + 2j, 3 - 4j])
    for leaf in (z.conj(), z.conj().imag, torch._neg_view(z)):
        out = batch([leaf] * n, device=device)
        if device is None:
            assert out.is_conj() == (leaf.is_conj() and n == 1)
    mixed = batch([z, z.conj()])
    assert mixed[1].tolist() == z.conj().tolist()
    batch([z.conj(), z])


class Sub(torch.Tensor):
    pass


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_tensor_subclasses_are_preserved(n, device):
    out = batch([torch.ones(2).as_subclass(Sub) for _ in range(n)], device=device)
    assert type(out) is Sub


@pytest.mark.parametrize("kinds", [(Sub, Other), (torch.Tensor, Sub), (Sub, torch.Tensor)])
def test_mixed_subclasses(kinds):
    same(items_of(batched, [torch.ones(2).as_subclass(k) for k in kinds]))
    same(items_of(batched, [torch.ones(i + 1).as_subclass(k) for i, k in enumerate(kinds)]))


@pytest.mark.parametrize("n", [1, 2])
def test_parameters_are_tensors_too(n):
    leaves = [torch.nn.Parameter(torch.ones(2), requires_grad=False) for _ in range(n)]
    assert type(batch(leaves)) is torch.Tensor


def test_attributes_of_a_leaf_stay_on_the_leaf():
    leaf = torch.ones(2)
    leaf.modality = "image"
    assert not hasattr(batch([leaf]), "modality")
    assert batch([leaf, torch.ones(3)])[0].modality == "image"


# No elements, and arrays at mmcollate's own entry


def test_no_elements_are_an_empty_list():
    field = batched(None).field
    assert_same(mmcollate.reference.reduce(mmcollate.Batched(), []), field.reduce_data([]))


class ArraySubclass(np.ndarray):
    pass


ARRAYS = {
    "plain": lambda: np.arange(6.0).reshape(2, 3),
    "float32": lambda: np.arange(6, dtype=np.float32).reshape(2, 3),
    "int64": lambda: np.arange(6).reshape(2, 3),
    "bool": lambda: np.array([[True, False]]),
    "uint16": lambda: np.arange(6, dtype=np.uint16),
    "complex": lambda: np.array([1 + 2j, 3]),
    "half": lambda: np.arange(6, dtype=np.float16),
    "0-d": lambda: np.array(5.0),
    "empty": lambda: np.zeros((0, 3)),
    "big-endian": lambda: np.arange(6, dtype=">f4").reshape(2, 3),
    "big-endian int": lambda: np.arange(6, dtype=">i8"),
    "negative strides": lambda: np.arange(6.0)[::-1],
    "negative strides in 2-D": lambda: np.arange(6.0).reshape(2, 3)[:, ::-1],
    "transposed": lambda: np.arange(6.0).reshape(3, 2).T,
    "strided": lambda: np.arange(12.0)[::2],
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (2, 3)),
    "unaligned": lambda: np.frombuffer(bytes(25), dtype=np.uint8)[1:].view(np.float64),
    "subclass": lambda: np.arange(6.0).view(ArraySubclass),
}


def read_only(array):
    array = array.view()
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lock", [False, True], ids=["writable", "read-only"])
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_arrays_count_as_tensors(name, n, lock, device):
    arrays = [read_only(ARRAYS[name]()) if lock else ARRAYS[name]() for _ in range(n)]
    before = [a.tobytes() for a in arrays]
    native = [np.array(a, dtype=a.dtype.newbyteorder("="), subok=False, order="C") for a in arrays]
    expected = ORIGINAL._batch_mm_items(
        items_of(batched, [torch.tensor(a) for a in native]), device=device
    )
    items = [{"x": a} for a in arrays]
    out = mmcollate.collate(items, {"x": mmcollate.Batched()}, device=device)
    assert_same(out, expected, strides=n > 1)
    assert [a.tobytes() for a in arrays] == before


@pytest.mark.parametrize("order", [0, 1])
def test_arrays_and_tensors_mix(order):
    pair = [np.arange(3.0), torch.arange(3.0, dtype=torch.float64) + 5]
    pair = pair[::-1] if order else pair
    items = [{"x": x} for x in pair]
    out = mmcollate.collate(items, {"x": mmcollate.Batched()})
    assert_same(out["x"], torch.stack([torch.as_tensor(x) for x in pair]))


def test_the_engines_entry_leaves_arrays_alone():
    arrays = [np.ones(2), np.ones(2)]
    (group,) = same_groups(items_of(batched, arrays)).result
    assert group[1]["x"][0] is arrays[0]

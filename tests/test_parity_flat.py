"""Flat fields: one tensor is passed on, equal other dims are joined, others zero-padded."""

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
    flat,
    item,
    items_of,
    leaves_of,
    same,
    same_batch,
    same_groups,
    value_of,
)

CPU_DEVICES = [None, "cpu", torch.device("cpu")]


def numbered(*shape: int, start: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(np.prod(shape))
    return torch.arange(start, start + count, dtype=torch.float32).to(dtype).reshape(shape)


def check(leaves, *, dim=0, **options):
    return same(items_of(flat, leaves, dim=dim), **options)


def joined(leaves, *, dim=0, **options):
    return value_of(check(leaves, dim=dim, **options))


# One tensor


@pytest.mark.parametrize("device", CPU_DEVICES)
@pytest.mark.parametrize("dim", [0, 1, -1, 7])
@pytest.mark.parametrize("mode", GRAD_MODES)
def test_one_tensor_is_the_same_object_whatever_the_dim(device, dim, mode):
    for leaf in (
        numbered(2, 3),
        torch.tensor(5),
        torch.zeros(0),
        numbered(3, 2).t(),
        numbered(4, 4)[::2],
        torch.ones(2, requires_grad=True),
        torch.tensor([1j]).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ):
        with GRAD_MODES[mode]():
            assert joined([leaf], dim=dim, device=device) is leaf


@pytest.mark.parametrize("dim", [0, 1, -1, 7])
def test_one_tensor_on_its_way_to_a_device(dim):
    for leaf in (numbered(2, 3), torch.tensor(5), torch.zeros(0), numbered(3, 2).t()):
        out = joined([leaf], dim=dim, device="meta")
        assert out.shape == leaf.shape
        assert out.stride() == leaf.stride()


# Equal other dims


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize(
    ("shapes", "dim", "expected"),
    [
        ([(2, 3), (4, 3)], 0, (6, 3)),
        ([(2, 3), (4, 3)], -2, (6, 3)),
        ([(2, 3), (2, 5)], 1, (2, 8)),
        ([(2, 3), (2, 5)], -1, (2, 8)),
        ([(2, 3), (2, 3), (2, 3)], 1, (2, 9)),
        ([(2, 3), (2, 3)], 0, (4, 3)),
        ([(3,), (1,), (2,)], 0, (6,)),
        ([(3,), (1,), (2,)], -1, (6,)),
        ([(1, 2, 3), (1, 5, 3)], 1, (1, 7, 3)),
        ([(1, 2, 3), (1, 5, 3)], -2, (1, 7, 3)),
        ([(2, 1, 1, 2)] * 5, 3, (2, 1, 1, 10)),
        ([(2, 3)] * 33, 0, (66, 3)),
        ([(1,)] * 33, 0, (33,)),
    ],
)
def test_equal_other_dims_are_joined(shapes, dim, expected, mode, device):
    leaves = [numbered(*s, start=100 * i) for i, s in enumerate(shapes)]
    with GRAD_MODES[mode]():
        out = joined(leaves, dim=dim, device=device)
        assert out.is_inference() == (mode == "inference")
    assert out.shape == expected
    assert out.stride() == torch.empty(expected).stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shapes", "dim", "expected"),
    [
        ([(0, 3), (2, 3)], 0, (2, 3)),
        ([(2, 3), (0, 3)], 0, (2, 3)),
        ([(0, 3), (2, 3), (0, 3), (1, 3)], 0, (3, 3)),
        ([(0, 3), (0, 3)], 0, (0, 3)),
        ([(0,), (0,)], 0, (0,)),
        ([(2, 0), (3, 0)], 0, (5, 0)),
        ([(2, 0), (2, 3)], 1, (2, 3)),
        ([(0, 3, 4, 4), (6, 3, 4, 4)], 0, (6, 3, 4, 4)),
    ],
)
def test_items_without_elements_are_fine(shapes, dim, expected, device):
    leaves = [numbered(*s) for s in shapes]
    assert joined(leaves, dim=dim, device=device).shape == expected


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(x.shape),
    "gapped": lambda x: torch.stack([x, x], -1)[..., 0],
    "offset": lambda x: torch.cat([x, x])[len(x) :],
    "columns": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "flipped": lambda x: x.flip(0),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_joining_makes_a_contiguous_tensor_of_any_layout(first, second, dim):
    leaves = [LAYOUTS[k](numbered(3, 4, start=20 * i)) for i, k in enumerate((first, second))]
    out = joined(leaves, dim=dim)
    assert out.is_contiguous()
    joined(leaves, dim=dim, device="meta")


def test_channels_last_is_not_kept():
    leaves = [numbered(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)] * 2
    assert joined(leaves).is_contiguous()


@pytest.mark.parametrize("n", [2, 9])
def test_the_same_leaf_many_times(n):
    leaf = numbered(2, 3)
    assert joined([leaf] * n).tolist() == leaf.tolist() * n
    assert joined([leaf] * n, dim=1).shape == (2, 3 * n)


# Leaves of one storage

BASE = torch.arange(24, dtype=torch.int64)
GRID = BASE.view(4, 6)


@pytest.mark.parametrize(
    ("leaves", "dim"),
    [
        ([BASE[0:3], BASE[3:4], BASE[4:9]], 0),
        ([GRID[:1], GRID[1:3], GRID[3:]], 0),
        (list(GRID.split(1)), 0),
        (list(GRID.split(2, dim=1)), 1),
        ([GRID[:, :1], GRID[:, 1:6]], 1),
        ([GRID[:, 1:2], GRID[:, 2:4]], -1),
        ([GRID[:1, :2], GRID[:1, 2:3]], 1),
        ([GRID[:2], GRID[2:2], GRID[2:]], 0),
        ([GRID[0:0], GRID[0:2]], 0),
        ([GRID[0:1], GRID[1:2]], 1),
        ([GRID[0:1], GRID[1:2]], 0),
    ],
)
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_leaves_that_lie_side_by_side(leaves, dim, mode, device):
    expected = np.concatenate([x.numpy() for x in leaves], axis=dim)
    with GRAD_MODES[mode]():
        out = joined(leaves, dim=dim, device=device)
    if device != "meta":
        assert out.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("leaves", "dim"),
    [
        ([GRID[2:], GRID[:2]], 0),
        ([GRID[:1], GRID[2:]], 0),
        ([GRID[:2], GRID[1:]], 0),
        ([GRID[:2], GRID[:2]], 0),
        ([GRID[:2], GRID[2:].clone()], 0),
        ([GRID[:2], GRID[2:].view(torch.uint64)], 0),
        ([GRID[:, :2], GRID[:, 2:4]], 0),
        ([GRID[:2, :3], GRID[2:, :3]], 0),
        ([GRID[::2], GRID[1::2]], 0),
        ([GRID[:2].t(), GRID[2:].t()], 0),
        ([GRID[:2].t(), GRID[2:].t()], 1),
        ([GRID[:, 3:], GRID[:, :3]], 1),
        ([GRID[:, :2], GRID[:, 3:]], 1),
        ([BASE[:4].view(2, 2), BASE[4:10].view(2, 3)], 1),
        ([BASE[:6].view(2, 3), BASE[6:12].view(2, 3)], 1),
        ([BASE[:6].view(1, 6), BASE[6:8].view(1, 2)], 0),
        ([BASE[0:1].expand(2), BASE[1:2].expand(2)], 0),
    ],
)
def test_leaves_of_one_storage_that_do_not_lie_side_by_side_are_copied(leaves, dim):
    items = items_of(flat, leaves, dim=dim)
    assert_same_outcome(
        lambda: plugin.group_and_batch_mm_items(items),
        lambda: ORIGINAL.group_and_batch_mm_items(items),
        inputs=leaves_of(items),
    )
    same(items)


# Other dims that differ


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize(
    ("shapes", "dim", "expected"),
    [
        ([(2, 3), (1, 5)], 0, (3, 5)),
        ([(2, 3), (1, 5)], 1, (2, 8)),
        ([(2, 3), (1, 5)], -1, (2, 8)),
        ([(2, 3), (1, 5), (4, 4)], 0, (7, 5)),
        ([(1, 2, 3), (2, 1, 4), (1, 3, 1)], 0, (4, 3, 4)),
        ([(1, 2, 3), (2, 1, 4), (1, 3, 1)], 1, (2, 6, 4)),
        ([(1, 2, 3), (2, 1, 4), (1, 3, 1)], 2, (2, 3, 8)),
        ([(1, 0), (1, 2)], 0, (2, 2)),
        ([(0, 4), (1, 2)], 0, (1, 4)),
        ([(0, 4), (0, 2)], 0, (0, 4)),
        ([(3, 1), (3, 2)], 0, (6, 2)),
    ],
)
def test_other_dims_that_differ_are_padded_with_zeros(shapes, dim, expected, mode, device):
    leaves = [numbered(*s, start=10 * (i + 1)) for i, s in enumerate(shapes)]
    with GRAD_MODES[mode]():
        out = joined(leaves, dim=dim, device=device)
    assert out.shape == expected
    if device != "meta":
        assert out.count_nonzero() == sum(x.numel() for x in leaves)


def test_where_the_zeros_are():
    out = joined([numbered(1, 3), numbered(2, 2, start=7)])
    assert out.tolist() == [[1, 2, 3], [7, 8, 0], [9, 10, 0]]
    out = joined([numbered(1, 2), numbered(2, 1, start=7)], dim=1)
    assert out.tolist() == [[1, 2, 7], [0, 0, 8]]


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_padding_of_any_layout(first, second):
    pair = (LAYOUTS[first](numbered(3, 4)), LAYOUTS[second](numbered(2, 5, start=50)))
    assert joined(pair).is_contiguous()


def test_padding_casts_with_truncation_where_joining_refuses():
    ints, floats = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1.7], [-2.7]])
    out = joined([ints, floats])
    assert out.tolist() == [[0, 0], [1, 0], [-2, 0]]
    assert check([ints[:, :1], floats]).exception is TypeError


def test_padding_keeps_autograd_where_joining_refuses():
    leaves = [torch.ones(1, 2, requires_grad=True), torch.ones(1, 3, requires_grad=True)]
    out = joined(leaves)
    out.sum().backward()
    assert leaves[0].grad.tolist() == [[1, 1]]
    assert check([x[:, :2] for x in leaves]).exception is RuntimeError


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shapes", [[(2, 2), (1, 2)], [(2, 2), (1, 3)]], ids=["joined", "padded"])
@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_leaves_that_require_grad(mode, which, shapes, device):
    pairs = zip(shapes, which, strict=True)
    leaves = [torch.ones(shape).requires_grad_(grad) for shape, grad in pairs]
    with GRAD_MODES[mode]():
        theirs = check(leaves, device=device)
    if mode != "grad":
        assert not value_of(theirs).requires_grad


# What cannot be joined


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(
    "shapes",
    [
        [(2,), (2, 3)],
        [(2, 3), (2,)],
        [(0,), (2, 3)],
        [(2, 3), (0,)],
        [(2, 3), (2, 3, 4)],
        [(2, 3, 4), (2, 3)],
        [(), (1,)],
        [(1,), ()],
        [(2, 3), (2, 3), (6,)],
        [(1, 2), (2,)],
        [(2,), (1, 2)],
        [(3, 1), (3,)],
    ],
)
def test_ranks_that_differ(shapes, dim, device):
    theirs = check([numbered(*s) for s in shapes], dim=dim, device=device)
    if theirs.exception is not None:
        assert theirs.exception in (IndexError, RuntimeError)


def test_a_legacy_empty_tensor_is_not_skipped():
    for shapes in ([(0,), (2, 3)], [(2, 3), (0,)]):
        assert check([numbered(*s) for s in shapes]).exception is not None


@pytest.mark.parametrize("dim", [0, -1, 1, 3, -4])
@pytest.mark.parametrize("n", [2, 3])
def test_scalars_cannot_be_joined(dim, n):
    assert check([torch.tensor(1.0)] * n, dim=dim).exception is IndexError


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shapes", [[(2, 3), (2, 3)], [(2, 3), (2, 4)], [(2, 3), (4, 3)]])
@pytest.mark.parametrize("dim", [2, 3, 100, -3, -4, -100])
def test_a_dim_out_of_range(dim, shapes, device):
    items = items_of(flat, [numbered(*s) for s in shapes], dim=dim)
    same_groups(items, device=device)
    theirs = same_batch(items, device=device)
    # of different shapes, a negative one may pass: the engine then pads
    if dim >= 0 or shapes[0] == shapes[1]:
        assert theirs.exception is not None
    plain = [{"x": numbered(*s)} for s in shapes]
    with pytest.raises(mmcollate.CollateIndexError, match=f"no dimension {dim}"):
        mmcollate.collate(plain, {"x": mmcollate.Flat(dim=dim)}, device=device)


@pytest.mark.parametrize("dim", [2**40, -(2**40), True, False, 1.0, "0", None])
def test_a_dim_that_is_no_sensible_number(dim):
    items = items_of(flat, [numbered(2, 3)] * 2, dim=dim)
    assert_same_outcome(
        lambda: plugin.batch_mm_items(items),
        lambda: ORIGINAL._batch_mm_items(items),
        inputs=leaves_of(items),
    )


@pytest.mark.parametrize("order", [("cpu", "meta"), ("meta", "cpu")])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", [(2, 2), (2, 3)])
def test_mixed_devices(order, device, widths):
    pairs = zip(order, widths, strict=True)
    theirs = check([torch.ones(2, w, device=d) for d, w in pairs], device=device)
    if order == ("cpu", "meta") or widths == (2, 2):
        assert theirs.exception is not None


# Lists


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_lists_are_flattened_one_level(n, device):
    leaves = [[numbered(i + 1), numbered(2), [numbered(3)]] for i in range(n)]
    out = joined(leaves, device=device)
    assert type(out) is list
    assert len(out) == 3 * n
    if device is None:
        assert out[0] is leaves[0][0]
        assert out[2] is leaves[0][2]
    joined([tuple(x) for x in leaves], device=device)
    joined([dict(enumerate(x)) for x in leaves], device=device)


@pytest.mark.parametrize("dim", [1, -1, 2])
def test_lists_need_dim_0(dim):
    for leaves in ([[numbered(1)]], [[1], [2]], [["a"], numbered(2)], [5], [None]):
        theirs = check(leaves, dim=dim)
        assert theirs.exception is AssertionError
        assert theirs.message == "dim == 0 is required for nested list"


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_beside_a_list_falls_into_rows(device):
    tensor = numbered(2, 3)
    out = joined([tensor, [numbered(4)]], device=device)
    assert [tuple(x.shape) for x in out] == [(3,), (3,), (4,)]
    out = joined([[numbered(4)], tensor, [1, "a"]], device=device)
    assert len(out) == 5
    assert joined([torch.zeros(0, 3), []], device=device) == []


def test_a_scalar_tensor_beside_a_list_cannot_be_iterated():
    assert check([torch.tensor(1), [1]]).exception is TypeError


@pytest.mark.parametrize("leaf", [5, None, 1.5, object])
def test_what_cannot_be_iterated_is_a_type_error(leaf):
    for leaves in ([leaf], [leaf, leaf], [[1], leaf], [numbered(2), leaf]):
        assert check(leaves).exception is TypeError


def test_a_string_falls_into_characters():
    assert joined(["ab", "c"]) == ["a", "b", "c"]


def test_an_array_falls_into_rows_at_the_engines_entry():
    out = joined([np.arange(6.0).reshape(2, 3), numbered(2, 3)])
    assert [type(x) for x in out] == [np.ndarray] * 2 + [torch.Tensor] * 2


def test_an_iterator_is_used_up_as_by_the_engine():
    def run(group):
        return [x for _, x in group(items_of(flat, [iter([1, 2]), (c for c in "ab")]))]

    theirs = assert_same_outcome(
        lambda: run(plugin.group_and_batch_mm_items),
        lambda: run(ORIGINAL.group_and_batch_mm_items),
    )
    assert theirs.result == [{"x": [1, 2, "a", "b"]}]


def test_no_elements_are_an_empty_list():
    assert mmcollate.reference.reduce(mmcollate.Flat(), []) == []


@pytest.mark.parametrize("odd", [False, True], ids=["zeros and ones", "another byte"])
@pytest.mark.parametrize("strided", [False, True])
def test_padded_bools_keep_what_torch_makes_of_their_bytes(odd, strided):
    masks = [torch.ones(3, n, dtype=torch.uint8) for n in (5, 8)]
    masks[1][1, 3] = 7 if odd else 0
    masks = [mask.t().contiguous().t() if strided else mask for mask in masks]
    items = [item(x=flat(mask.view(torch.bool))) for mask in masks]
    before = mmcollate.stats()["fields"]["gather"]
    both = same_groups(items, device="cpu")
    gathered = mmcollate.stats()["fields"]["gather"] - before
    assert (gathered > 0) == (not odd and not strided)
    assert both.result[0][1]["x"].shape == (6, 8)


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
def test_every_dtype_keeps_its_bits(dtype, device):
    for dim in (0, 1):
        for n in (1, 2, 5):
            theirs = check([filled(dtype, 3, 4)] * n, dim=dim, device=device)
            if dtype is not torch.float4_e2m1fn_x2:  # which torch has no kernel for
                assert value_of(theirs).dtype is dtype
    check([filled(dtype, 3, 4), filled(dtype, 2, 5)], device=device)


# a cast out of range is undefined for integers of floats, so the values are small here
def small(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.float4_e2m1fn_x2:
        return filled(dtype, *shape)
    return torch.ones(shape).to(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:Casting complex")
@pytest.mark.parametrize("first", DTYPES, ids=str)
@pytest.mark.parametrize("second", DTYPES, ids=str)
def test_mixed_dtypes_are_cast_to_the_first_or_refused(first, second):
    for order in ((first, second), (first, first, second)):
        theirs = check([small(d, 2, 3) for d in order])
        if theirs.exception is None:
            assert value_of(theirs).dtype is first
        padded = check([small(d, 2, 3 + i) for i, d in enumerate(order)])
        if padded.exception is None:
            assert value_of(padded).dtype is first


# Lazy bits and subclasses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("extra", [0, 1])
def test_conj_and_neg_bits(n, device, extra):
    z = torch.tensor([[1 + 2j, 3 - 4j]])
    for leaf in (z.conj(), z.conj().imag, torch._neg_view(z)):
        other = torch.ones(1, 2 + extra, dtype=leaf.dtype)
        joined([leaf] * n, device=device)
        joined([leaf, other], device=device)
        joined([other, leaf], device=device)


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("extra", [0, 1])
def test_tensor_subclasses(n, extra):
    leaves = [torch.ones(2, 2 + extra * i).as_subclass(Sub) for i in range(n)]
    assert type(joined(leaves)) is Sub
    for kinds in ((Sub, torch.Tensor), (torch.Tensor, Sub)):
        joined([torch.ones(2, 2 + extra * i).as_subclass(k) for i, k in enumerate(kinds)])


# Arrays at mmcollate's own entry


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", ["f4", ">f4", ">i8", "?", "f2", "c8"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_arrays_count_as_tensors(dtype, dim, n):
    arrays = [np.arange(6 * i, 6 * i + 6).reshape(2, 3).astype(dtype)[:, ::-1] for i in range(n)]
    for array in arrays:
        array.flags.writeable = False
    native = [torch.tensor(a.astype(a.dtype.newbyteorder("=")).copy()) for a in arrays]
    (expected,) = [x for _, x in ORIGINAL.group_and_batch_mm_items(items_of(flat, native, dim=dim))]
    out = mmcollate.collate([{"x": a} for a in arrays], {"x": mmcollate.Flat(dim=dim)})
    assert_same(out, expected, strides=n > 1)

"""The plain package: what it takes, what it refuses and how it says so, and whose memory it gives.

All of it runs with both ways of reading tensors: torch's exchange table, and Python attributes as
for a torch that has none.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import types
import warnings
from collections.abc import Iterator
from typing import Any

import mmcollate
import numpy as np
import pytest
import torch
from compare import assert_same
from mmcollate import (
    Batched,
    CollateIndexError,
    CollateKeyError,
    CollateRuntimeError,
    CollateTypeError,
    CollateValueError,
    Field,
    Flat,
    MMCollateError,
    Shared,
    collate,
    collate_groups,
    collation,
    errors,
    reference,
)
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(params=["table", "attributes"], autouse=True)
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MMCOLLATE_SKIP_EXCHANGE_TABLE", str(int(request.param == "attributes")))
    collation.collator.cache_clear()
    assert collation.collator().has_exchange_table == (request.param == "table")
    yield request.param
    collation.collator.cache_clear()


@pytest.fixture
def table(door: str) -> None:
    if door != "table":
        pytest.skip("where outputs lie is promised for the exchange table alone")


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def of(*values: Any) -> list[dict[str, Any]]:
    """One item for each value, with the single field "x"."""
    return [{"x": value} for value in values]


def batch_of(field: Field, *values: Any, **options: Any) -> Any:
    return collate(of(*values), {"x": field}, **options)["x"]


def with_warnings_off(make: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **kwargs)


# Values of tensors

VALUES: dict[str, tuple[Field, list[Any]]] = {
    "stacked": (Batched(), [torch.arange(6).reshape(2, 3), torch.arange(6, 12).reshape(2, 3)]),
    "scalars": (Batched(keep_on_cpu=True), [torch.tensor(1.5), torch.tensor(-0.0)]),
    "bools": (Batched(), [torch.tensor([True, False]), torch.tensor([False, False])]),
    "bfloat16": (Batched(), [torch.randn(3, 4).to(torch.bfloat16) for _ in range(3)]),
    "NaN": (Batched(), [torch.tensor([float("nan")]), torch.tensor([float("-inf")])]),
    "ragged": (Batched(), [torch.arange(2), torch.arange(3)]),
    "transposed": (Batched(), [torch.arange(6).reshape(2, 3).t(), torch.arange(6).reshape(3, 2)]),
    "sliced": (Flat(), [torch.arange(20).reshape(4, 5)[::2, 1:4], torch.arange(3).reshape(1, 3)]),
    "rows": (Flat(), [ones(2, 3), ones(0, 3), ones(4, 3)]),
    "columns": (Flat(dim=1), [torch.arange(6).reshape(2, 3), torch.arange(4).reshape(2, 2)]),
    "last": (Flat(dim=-1), [torch.arange(6).reshape(1, 2, 3), torch.arange(2).reshape(1, 2, 1)]),
    "padded": (Flat(), [ones(2, 3), ones(1, 5), ones(3, 1)]),
    "zero-size": (Batched(), [ones(0, 3), ones(0, 3)]),
    "conjugated": (Batched(), [torch.tensor([1 + 2j]).conj(), torch.tensor([3 - 1j]).conj()]),
    "negated": (Flat(), [torch.tensor([1 + 2j, 3j]).conj().imag, torch.tensor([5.0])]),
    "expanded": (Batched(), [torch.tensor([1.0]).expand(3), torch.tensor([2.0]).expand(3)]),
    "cast": (Batched(), [ones(2, dtype=torch.float64), ones(2)]),
    "subclass": (Batched(), [ones(2).as_subclass(torch.nn.Buffer), ones(2)]),
    "meta": (Flat(), [ones(2, 3, device="meta"), ones(1, 3, device="meta")]),
    "sparse": (Flat(), [ones(2, 3).to_sparse()]),
    "shared": (Shared(), [torch.arange(3), torch.arange(3)]),
    "numbers": (Batched(), [1, 2.5, True, 3j]),
    "words": (Batched(), ["a", b"b", None, ""]),
    "lists": (Batched(), [[1, [2, ones(2)]], (3,), []]),
    "joined": (Flat(), [[1, [2]], (3, ones(2)), []]),
    "objects": (Batched(keep_on_cpu=True), [{"a": 1}, object, range(3)]),
    "tensor and None": (Batched(), [ones(2), None]),
}


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("count", [1, None])
@pytest.mark.parametrize("name", VALUES)
def test_agrees_with_the_reference(name, count, device):
    field, values = VALUES[name]
    if name == "meta" and device:
        pytest.skip("meta tensors can't be copied to another device")
    items = of(*values[:count])
    fields = {"x": field}
    ours = collate(items, fields, device=device)
    theirs = reference.collate(items, fields, device=device)
    assert_same(ours, theirs, inputs=values)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.float32, torch.float64,
        torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("field", [Batched(), Flat(), Flat(dim=1)], ids=str)
def test_every_dtype_keeps_its_bits(field, dtype):
    noise = torch.randint(0, 256, (2, 3 * dtype.itemsize), dtype=torch.uint8)
    if dtype == torch.bool:
        noise %= 2
    leaf = noise.view(dtype)
    out = batch_of(field, leaf, leaf)
    join = torch.stack if type(field) is Batched else torch.cat
    dim = getattr(field, "dim", 0) * dtype.itemsize
    expected = join([noise, noise], dim=1 if dim else 0)
    assert out.dtype == dtype
    assert torch.equal(out.view(torch.uint8), expected)


def test_conjugated_and_negated_views_give_their_values():
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert batch_of(Batched(), z.conj(), z).tolist() == [[1 - 2j, 3 + 1j], [1 + 2j, 3 - 1j]]
    negated = z.conj().imag
    assert negated.is_neg()
    assert batch_of(Flat(), negated, negated[:1]).tolist() == [-2, 1, -2]


def test_subclasses_and_fake_tensors_stay_what_they_are():
    class Tagged(torch.Tensor):
        pass

    leaf = ones(2).as_subclass(Tagged)
    for values in ([leaf], [leaf, leaf], [ones(2), leaf]):
        out = batch_of(Flat(), *values)
        assert type(out) is Tagged
        assert out.tolist() == [1] * 2 * len(values)
    with FakeTensorMode():
        fake = ones(2, 3)
    out = batch_of(Batched(), fake, fake)
    assert type(out) is type(fake)
    assert out.shape == (2, 2, 3)


def test_gradients_are_refused_only_where_they_are_recorded():
    leaf = ones(2).requires_grad_()
    assert batch_of(Shared(), leaf, leaf) is leaf
    assert batch_of(Flat(), leaf) is leaf
    assert batch_of(Batched(), leaf).requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert batch_of(Batched(), leaf, leaf).tolist() == [[1, 1], [1, 1]]


def test_a_meta_device_takes_all_but_what_is_kept():
    fields = {"x": Batched(), "kept": Batched(keep_on_cpu=True)}
    batch = collate([{"x": ones(2), "kept": ones(2)}] * 2, fields, device="meta")
    assert (batch["x"].device.type, batch["kept"].device.type) == ("meta", "cpu")
    assert batch["kept"].tolist() == [[1, 1], [1, 1]]


# numpy

ARRAYS: dict[str, np.ndarray] = {
    "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
    "read-only": np.arange(6.0),
    "big-endian": np.array([1, -2, 3], ">i4"),
    "big-endian uint16": np.array([1, 65535], ">u2"),
    "big-endian, read-only, backwards": np.array([1.5, 2.5, 3.5], ">f8")[::-1],
    "backwards": np.arange(6).reshape(2, 3)[::-1, ::-1],
    "every other": np.arange(10)[::2],
    "Fortran order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
    "unaligned": np.frombuffer(b"\1" * 17, np.uint8)[1:].view(np.int64),
    "0-d": np.array(3.5),
    "zero-size": np.zeros((0, 3)),
    "bool": np.array([True, False]),
    "uint16": np.array([0, 65535], np.uint16),
    "uint64": np.array([0, 2**64 - 1], np.uint64),
    "float16": np.array([0.5], np.float16),
    "complex": np.array([1 - 2j]),
    "matrix": np.arange(4).reshape(2, 2).view(np.matrix),
}
ARRAYS["read-only"].flags.writeable = False
ARRAYS["big-endian, read-only, backwards"].flags.writeable = False


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_taken_as_tensors_of_their_values_without_a_warning(name):
    array = ARRAYS[name]
    before, flags = array.copy(), array.flags.writeable
    expected = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stacked = batch_of(Batched(), array, array)
        alone = batch_of(Batched(), array)
        shared = batch_of(Shared(), array, array)
        [inner] = batch_of(Flat(), [array])
        mixed = batch_of(Batched(), array, torch.tensor(expected))
    assert stacked.dtype == torch.from_numpy(expected).dtype
    for out in (stacked, mixed):
        assert torch.equal(out, torch.tensor(np.stack([expected, expected])))
    for out in (alone[0], shared, inner):
        assert torch.equal(out, torch.tensor(expected))
    assert (array.flags.writeable, array.tolist()) == (flags, before.tolist())


def test_a_writable_array_is_shared_and_a_read_only_one_is_copied():
    array = np.zeros(3)
    batch_of(Batched(), array)[0, 0] = 1
    assert array[0] == 1
    array.flags.writeable = False
    batch_of(Batched(), array)[0, 0] = 2
    assert array[0] == 1


BAD_ARRAYS: dict[str, np.ndarray] = {
    "object": np.array([1, "a"], object),
    "<U1": np.array(["a"]),
    "|S1": np.array([b"a"]),
    "datetime64[D]": np.array(["2020-01-01"], "datetime64[D]"),
    "timedelta64[s]": np.array([1], "timedelta64[s]"),
    "[('a', '<i4')]": np.zeros(2, [("a", "<i4")]),
    np.dtype(np.longdouble).name: np.zeros((2, 3), np.longdouble),
    np.dtype(np.clongdouble).name: np.zeros(2, np.clongdouble),
    "MaskedArray": np.ma.array([1, 2], mask=[True, False]),
}


@pytest.mark.parametrize("field", [Batched(), Flat(), Shared()], ids=str)
@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_arrays_without_a_torch_dtype_are_refused_by_name(name, field):
    bad = BAD_ARRAYS[name]
    for value in (bad, [ones(2), [bad]]):
        with pytest.raises(CollateTypeError) as raised:
            collate(of(np.zeros(2), value), {"x": field}, modality="image")
        message = str(raised.value)
        assert message.startswith("modality 'image', field 'x', item 1: ")
        assert name in message
        assert str(bad.shape) in message
        assert (raised.value.field, raised.value.item) == ("x", 1)


def test_numpy_scalars_and_python_values_are_passed_on_as_they_are():
    values = [np.float32(1.5), np.int64(3), np.bool_(True), np.str_("a"), 1, "b", None, [1, (2,)]]
    out = batch_of(Batched(), *values)
    assert type(out) is list
    assert all(a is b for a, b in zip(out, values, strict=True))
    assert batch_of(Shared(), values[0], values[0]) is values[0]
    inner = object()
    assert batch_of(Flat(), [inner], ([inner],)) == [inner, [inner]]


# What comes in

SOME = {"x": Batched()}
EQUAL = [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    "items",
    [
        [{"x": ones(2)}, {"x": ones(2)}],
        ({"x": ones(2)}, {"x": ones(2)}),
        iter([{"x": ones(2)}, {"x": ones(2)}]),
        [collections.OrderedDict(x=ones(2)), types.MappingProxyType({"x": ones(2)})],
        collections.deque([{"x": ones(2)}, {"x": ones(2)}]),
    ],
    ids=["list", "tuple", "iterator", "mappings", "deque"],
)
def test_items_may_be_any_mappings_in_any_iterable(items, request):
    # Both doors get an iterator of their own.
    items = copy.copy(items) if "iterator" in request.node.name else items
    assert collate(items, types.MappingProxyType(SOME))["x"].tolist() == EQUAL


def test_nothing_to_collate_is_an_empty_batch():
    assert collate([], SOME) == {}
    assert collate([{}, {}], SOME) == {}
    assert list(collate_groups([], SOME)) == []
    [group] = collate_groups([{}, {}], SOME)
    assert group == (None, 2, {})


def test_fields_come_in_the_first_items_order():
    fields = {"a": Batched(), "b": Batched(), "unused": Flat()}
    batch = collate([{"b": ones(1), "a": ones(2)}, {"a": ones(2), "b": ones(1)}], fields)
    assert list(batch) == ["b", "a"]
    assert batch["a"].shape == (2, 2)


def test_groups_end_where_modality_names_or_shared_values_change():
    a, b = torch.tensor([1]), torch.tensor([2])
    fields = {"x": Batched(), "y": Batched(), "s": Shared()}
    items = [{"x": ones(2), "s": s} for s in (a, a.clone(), b, b)]
    items += [{"x": ones(2), "y": 0, "s": b}, {"y": 1, "x": ones(2), "s": b}]
    groups = list(collate_groups(items, fields, modalities=["i", "i", "i", "v", "v", "v"]))
    assert [(g.modality, g.num_items) for g in groups] == [("i", 2), ("i", 1), ("v", 1), ("v", 2)]
    assert groups[0].batch["s"] is a
    assert groups[3].batch["y"] == [0, 1]
    without = [g.num_items for g in collate_groups(items, fields)]
    assert without == [2, 2, 2] == [n for n, _ in reference.collate_groups(items, fields)]


def test_groups_are_made_when_they_are_asked_for():
    items = [{"x": ones(2)}, {"x": [1], "y": 1}, {"x": 2, "y": 1}]
    groups = collate_groups(items, {"x": Flat(), "y": Batched()})
    assert next(groups).batch["x"] is items[0]["x"]
    with pytest.raises(CollateTypeError):
        next(groups)


# What is refused


@dataclasses.dataclass
class Bad:
    """Items that are refused, and what the error must say of them."""

    items: Any
    error: type[MMCollateError]
    *words: str = ()


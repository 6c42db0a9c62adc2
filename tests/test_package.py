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
from collections.abc import Callable, Iterator
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
    CollateMemoryError,
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

ALIGNMENT = 256


@pytest.fixture(params=["table", "attributes"], autouse=True)
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MMCOLLATE_SKIP_EXCHANGE_TABLE", str(int(request.param == "attributes")))
    collation.collator.cache_clear()
    made = quietly(collation.collator)
    assert made.has_exchange_table == (request.param == "table")
    yield request.param
    collation.collator.cache_clear()


@pytest.fixture
def table(door: str) -> None:
    """For what is promised of outputs that are made through the table."""
    if door != "table":
        pytest.skip("without the exchange table, torch decides where outputs lie")


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def of(*values: Any) -> list[dict[str, Any]]:
    """One item for each value, with the single field "x"."""
    return [{"x": value} for value in values]


def batch_of(field: Field, *values: Any, **options: Any) -> Any:
    return collate(of(*values), {"x": field}, **options)["x"]


def quietly(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch warns of what it calls a prototype or deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **kwargs)


def fake(*shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return ones(*shape)


def test_the_slow_way_of_reading_is_said_once(door, monkeypatch):
    monkeypatch.setattr(collation, "_warned", False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            collation.collator.cache_clear()
            collate(of(1), SOME)
    assert len(said) == (door == "attributes")
    # This torch has the table: the variable is why it isn't used.
    assert all("MMCOLLATE_SKIP_EXCHANGE_TABLE" in str(warning.message) for warning in said)


# Values of tensors

FIXED = torch.nn.Parameter(torch.ones(2), requires_grad=False)
VALUES: dict[str, tuple[Field, list[Any]]] = {
    "stacked": (Batched(), [torch.arange(6).reshape(2, 3), torch.arange(6, 12).reshape(2, 3)]),
    "scalars": (Batched(keep_on_cpu=True), [torch.tensor(1.5), torch.tensor(-0.0)]),
    "bools": (Batched(), [torch.tensor([True, False]), torch.tensor([False, False])]),
    "bfloat16": (Batched(), [torch.randn(3, 4).to(torch.bfloat16) for _ in range(3)]),
    "NaN": (Batched(), [torch.tensor([float("nan")]), torch.tensor([float("-inf")])]),
    "ragged": (Batched(), [torch.arange(2), torch.arange(3)]),
    "ranks": (Batched(), [ones(2, 3), ones(2)]),
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
    "subclass": (Batched(), [FIXED, ones(2)]),
    "meta": (Flat(), [ones(2, 3, device="meta"), ones(1, 3, device="meta")]),
    "shared": (Shared(), [torch.arange(3), torch.arange(3)]),
    "numbers": (Batched(), [1, 2.5, True, 3j]),
    "words": (Batched(), ["a", b"b", None, ""]),
    "lists": (Batched(), [[1, [2, ones(2)]], (3,), []]),
    "joined": (Flat(), [[1, [2]], (3, ones(2)), []]),
    "objects": (Batched(keep_on_cpu=True), [{"a": 1}, object, range(3)]),
    "tensor and None": (Batched(), [ones(2), None]),
}


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("count", [1, None], ids=["one", "all"])
@pytest.mark.parametrize("name", VALUES)
def test_agrees_with_the_reference(name, count, device):
    field, values = VALUES[name]
    items = of(*values[:count])
    if name == "meta" and device:
        device = "meta"
    ours = collate(items, {"x": field}, device=device)
    theirs = reference.collate(items, {"x": field}, device=device)
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
    is_flat = isinstance(field, Flat)
    expected = torch.cat([noise] * 2, field.dim) if is_flat else torch.stack([noise] * 2)
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
    leaf = fake(2, 3)
    out = batch_of(Batched(), leaf, leaf)
    assert type(out) is type(leaf)
    assert out.shape == (2, 2, 3)


def test_one_sparse_or_quantised_tensor_is_handed_on():
    sparse = ones(2, 3).to_sparse()
    assert batch_of(Flat(), sparse) is sparse
    assert batch_of(Batched(), sparse).to_dense().tolist() == [[[1] * 3] * 2]
    quantised = quietly(torch.quantize_per_tensor, ones(3), 0.5, 0, torch.qint8)
    assert batch_of(Batched(), quantised).dequantize().tolist() == [[1] * 3]


def test_gradients_are_refused_only_where_they_are_recorded():
    leaf = ones(2).requires_grad_()
    assert batch_of(Shared(), leaf, leaf) is leaf
    assert batch_of(Flat(), leaf) is leaf
    assert batch_of(Batched(), leaf).requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert batch_of(Batched(), leaf, leaf).tolist() == [[1, 1], [1, 1]]


def test_a_device_takes_all_but_what_is_kept():
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
    "unaligned": np.ones(17, np.uint8)[1:].view(np.int64),
    "0-d": np.array(3.5),
    "zero-size": np.zeros((0, 3)),
    "bool": np.array([True, False]),
    "uint16": np.array([0, 65535], np.uint16),
    "uint64": np.array([0, 2**64 - 1], np.uint64),
    "float16": np.array([0.5], np.float16),
    "complex": np.array([1 - 2j]),
    "subclass": np.arange(4).view(np.recarray),
    "field of records": np.array([(1.5, 2), (-3.5, 4)], [("x", "f4"), ("y", "u1")])["x"],
    "broadcast scalar": np.broadcast_to(np.float32(2.5), (3, 2)),
    "broadcast between": np.broadcast_to(np.arange(6).reshape(2, 1, 3), (2, 4, 3)),
    "broadcast, backwards": np.broadcast_to(np.arange(3), (2, 3))[::-1, ::-1],
    "broadcast, big-endian": np.broadcast_to(np.array([1, -2], ">i2"), (3, 2)),
    "broadcast, zero-size": np.broadcast_to(np.zeros((0, 1)), (0, 3)),
    "repeated, writable": np.lib.stride_tricks.as_strided(np.arange(2.0), (3, 2), (0, 8)),
    "repeated, writable, backwards": np.lib.stride_tricks.as_strided(
        np.arange(2.0), (3, 2), (0, 8)
    )[:, ::-1],
    "0-d big-endian": np.array(3.5, ">f8"),
    "int8": np.array([-1], np.int8),
    "uint32": np.array([0, 2**32 - 1], np.uint32),
    "complex64": np.array([1 - 2j], np.complex64),
}
for name in ("read-only", "big-endian, read-only, backwards"):
    ARRAYS[name].flags.writeable = False


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_taken_as_tensors_of_their_values_without_a_warning(name):
    array = ARRAYS[name]
    values, flags = array.tolist(), array.flags.writeable
    native = np.array(array, array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stacked = batch_of(Batched(), array, array)
        mixed = batch_of(Batched(), array, torch.from_numpy(native))
        alone = batch_of(Batched(), array)
        shared = batch_of(Shared(), array, array)
        [inner] = batch_of(Flat(), [array])
    assert stacked.dtype == torch.from_numpy(native).dtype
    for out, expected in (
        (stacked, np.stack([native, native])),
        (mixed, np.stack([native, native])),
        (alone, native[None]),
        (shared, native),
        (inner, native),
    ):
        assert type(out) is torch.Tensor
        assert (out.dtype, out.shape) == (stacked.dtype, expected.shape)
        assert out.tolist() == expected.tolist()
    assert (array.tolist(), array.flags.writeable) == (values, flags)


def test_a_writable_array_is_shared_and_a_read_only_one_is_copied():
    array = np.zeros(3)
    batch_of(Batched(), array)[0, 0] = 1
    assert array[0] == 1
    array.flags.writeable = False
    batch_of(Batched(), array)[0, 0] = 2
    assert array[0] == 1


HUGE = 10**6, 10**6
HUGE_ARRAYS = {
    "one element": np.broadcast_to(np.float32(1.5), HUGE),
    "backwards": np.broadcast_to(np.arange(3, dtype=np.float32), (*HUGE, 3))[::-1, :, ::-1],
    "big-endian": np.broadcast_to(np.array([1.5], ">f4"), HUGE),
    "first axis": np.broadcast_to(np.arange(2.0)[:, None, None], (2, *HUGE)),
}


@pytest.mark.parametrize("name", HUGE_ARRAYS)
def test_a_broadcast_array_takes_no_more_memory_than_its_elements(name):
    array = HUGE_ARRAYS[name]
    for out in (batch_of(Batched(), array)[0], batch_of(Flat(), array), batch_of(Shared(), array)):
        assert out.shape == array.shape
        assert out.untyped_storage().nbytes() <= 16
        for k in (0, 1, -1):
            place = (k,) * array.ndim
            assert out[place].item() == array[place]


@pytest.mark.parametrize("dtype", ["u1", ">i2"])
def test_no_memory_for_a_copy_is_said(dtype):
    width = np.dtype(dtype).itemsize
    array = np.lib.stride_tricks.as_strided(np.zeros(1, dtype), (2**60,), (width,), writeable=False)
    for value in (array, [array]):
        with pytest.raises(CollateMemoryError, match="no memory for it; give") as raised:
            collate(of(np.zeros(1), value), SOME, modality="image")
        where = f"modality 'image', field 'x', item 1: found ndarray {array.dtype} ({2**60},)"
        assert str(raised.value).startswith(where)
        assert isinstance(raised.value.__cause__, MemoryError)


def test_no_memory_in_the_reference_is_said(monkeypatch):
    def reduce(*args: Any, **options: Any) -> None:
        raise MemoryError("none")

    monkeypatch.setattr(reference, "reduce", reduce)
    with pytest.raises(CollateMemoryError, match="field 'x'"):
        batch_of(Batched(), ones(2), ones(2, dtype=torch.float64))


def test_out_of_memory_on_a_device_passes_through(monkeypatch):
    own = torch.OutOfMemoryError("none")

    def reduce(*args: Any, **options: Any) -> None:
        raise own

    monkeypatch.setattr(reference, "reduce", reduce)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        batch_of(Batched(), ones(2), ones(2, dtype=torch.float64))
    assert raised.value is own


BAD_ARRAYS: dict[str, np.ndarray] = {
    "ndarray object (2,)": np.array([1, "a"], object),
    "ndarray <U1 (1,)": np.array(["a"]),
    "ndarray |S1 (1,)": np.array([b"a"]),
    "ndarray datetime64[D] (1,)": np.array(["2020-01-01"], "datetime64[D]"),
    "ndarray timedelta64[s] (1,)": np.array([1], "timedelta64[s]"),
    "ndarray [('a', '<i4')] (2,)": np.zeros(2, [("a", "<i4")]),
    f"ndarray {np.dtype(np.longdouble).name} (2, 3)": np.zeros((2, 3), np.longdouble),
    f"ndarray {np.dtype(np.clongdouble).name} (2,)": np.zeros(2, np.clongdouble),
    "ndarray |V3 (2,)": np.zeros(2, "V3"),
    "ndarray object (1000000, 1000000)": np.broadcast_to(np.array(None, object), HUGE),
    "MaskedArray int64 (2,)": np.ma.array([1, 2], mask=[True, False]),
}


@pytest.mark.parametrize("field", [Batched(), Flat(), Shared()], ids=str)
@pytest.mark.parametrize("found", BAD_ARRAYS)
def test_arrays_that_torch_has_no_dtype_for_are_refused(found, field):
    bad = BAD_ARRAYS[found]
    for value in (bad, [ones(2), [bad]]):
        with pytest.raises(CollateTypeError) as raised:
            collate(of(np.zeros(2), value), {"x": field}, modality="image")
        where = f"modality 'image', field 'x', item 1: found {found}, which torch can't take"
        assert str(raised.value).startswith(where)
        advice = "fill or drop its mask" if "Masked" in found else "convert it to a dtype"
        assert advice in str(raised.value)
        assert (raised.value.field, raised.value.item) == ("x", 1)


def test_numpy_scalars_and_python_values_are_passed_on_as_they_are():
    values = [np.float32(1.5), np.int64(3), np.bool_(True), np.str_("a"), 1, "b", None, [1, (2,)]]
    out = batch_of(Batched(), *values)
    assert type(out) is list
    assert all(a is b for a, b in zip(out, values, strict=True))
    assert batch_of(Shared(), values[0], values[0]) is values[0]
    inner = object()
    assert batch_of(Flat(), [inner], ([inner],)) == [inner, [inner]]


# What items and fields may be

SOME = {"x": Batched()}


@pytest.mark.parametrize("make", [list, tuple, iter, collections.deque, lambda x: (y for y in x)])
@pytest.mark.parametrize("item", [dict, collections.OrderedDict, types.MappingProxyType])
def test_items_are_any_mappings_in_any_iterable(item, make):
    items = make([item({"x": ones(2)}), {"x": ones(2)}])
    assert collate(items, types.MappingProxyType(SOME))["x"].tolist() == [[1, 1], [1, 1]]


class Items:
    """Iterable, but neither a list nor an iterator."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for value in self.values:
            if isinstance(value, Exception):
                raise value
            yield {"x": value}


@pytest.mark.parametrize("error", [TypeError("mine"), KeyError("x"), OSError()], ids=repr)
def test_what_the_callers_own_iterator_raises_passes_through(error):
    for make in (lambda: iter(Items(1, error)), lambda: Items(1, error)):
        for call in (collate, lambda *args: list(collate_groups(*args))):
            with pytest.raises(type(error)) as raised:
                call(make(), SOME)
            assert raised.value is error


class Strange(collections.abc.Mapping):
    """A mapping with the single name "x", whose reading does something."""

    def __init__(self, read: Callable[[], Any], names: Callable[[], list[Any]] | None = None):
        self.read, self.names = read, names or (lambda: ["x"])

    def __getitem__(self, name: Any) -> Any:
        return self.read()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.names())

    def __len__(self) -> int:
        return 1


def raises(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("mine"), OSError()], ids=repr)
@pytest.mark.parametrize("pin_memory", [False, 0])
@pytest.mark.parametrize("field", [Batched(), Shared()], ids=str)
def test_what_a_mapping_raises_passes_through(field, error, pin_memory):
    for broken in (Strange(lambda: raises(error)), Strange(lambda: 1, lambda: raises(error))):
        for items in ([broken], [{"x": 1}, broken]):
            with pytest.raises(type(error)) as raised:
                collate(items, {"x": field}, pin_memory=pin_memory)
            assert raised.value is error


def test_the_callers_list_may_change_while_it_is_read():
    items: list[Any] = [{"x": 1}]
    items += [Strange(lambda: items.clear() or 2), {"x": 3}]
    assert collate(items, SOME) == {"x": [1, 2, 3]}
    items = [{"x": 1}]
    items += [Strange(lambda: items.append({"x": 9}) or 2)]
    assert collate(items, SOME) == {"x": [1, 2]}
    items = [{"x": 1}, {"x": 2, "y": 2}]
    groups = collate_groups(items, {"x": Batched(), "y": Batched()})
    assert next(groups).batch == {"x": [1]}
    items.clear()
    assert [group.batch for group in groups] == [{"x": [2], "y": [2]}]


def test_an_item_that_changes_is_an_error_that_says_so():
    # Equal when the core compares names, not when it reads them.
    names = iter([["x"], ["y"], ["x"], ["y"]])
    fields = {"x": Batched(), "y": Batched()}
    item = Strange(lambda: 1, lambda: next(names))
    with pytest.raises(CollateValueError, match="one of the items 0 to 1 changed while"):
        collate([{"x": 1}, item], fields, pin_memory=0)
    # Unequal whenever the core asks, equal when it is asked why.
    values = iter([[1], [2], [1]])
    item = Strange(lambda: next(values))
    with pytest.raises(CollateValueError, match="one of the items 0 to 1 changed while"):
        collate([{"x": [1]}, item], {"x": Shared()})


@pytest.mark.parametrize("names", [(1, 2), ((1, "a"), b"b"), (1, "a"), (True, None)], ids=str)
def test_names_need_not_be_strings(names):
    a, b = names
    fields = {a: Batched(), b: Flat()}
    item = {a: ones(2), b: [1]}
    assert collate([item, item], fields)[b] == [1, 1]
    with pytest.raises(CollateKeyError) as raised:
        collate([item, {a: ones(2)}], fields)
    assert f"lacks [{b!r}]" in str(raised.value)
    with pytest.raises(CollateKeyError, match="is not declared") as undeclared:
        collate([item], {a: Batched()})
    assert raised.value.field == undeclared.value.field == b
    with pytest.raises(CollateTypeError) as raised:
        collate([{a: ones(2), b: 1}], fields, modality="image")
    assert raised.value.field == b


def test_nothing_to_collate_is_an_empty_batch():
    assert collate([], SOME) == {}
    assert collate([{}, {}], SOME) == {}
    assert list(collate_groups([], SOME)) == []
    assert list(collate_groups([{}, {}], SOME)) == [(None, 2, {})]


def test_fields_come_in_the_first_items_order():
    fields = {"a": Batched(), "b": Batched(), "unused": Flat()}
    batch = collate([{"b": ones(1), "a": ones(2)}, {"a": ones(2), "b": ones(1)}], fields)
    assert list(batch) == ["b", "a"]
    assert (batch["a"].shape, batch["b"].shape) == ((2, 2), (2, 1))


def test_groups_end_where_modality_names_or_shared_values_change():
    a, b = torch.tensor([1]), torch.tensor([2])
    fields = {"x": Batched(), "y": Batched(), "s": Shared()}
    items = [{"x": ones(2), "s": s} for s in (a, a.clone(), b, b)]
    items += [{"x": ones(2), "y": 0, "s": b}, {"y": 1, "x": ones(2), "s": b}]
    groups = list(collate_groups(items, fields, modalities=["i", "i", "i", "v", "v", "v"]))
    assert [(g.modality, g.num_items) for g in groups] == [("i", 2), ("i", 1), ("v", 1), ("v", 2)]
    assert groups[0].batch["s"] is a
    assert groups[3].batch["y"] == [0, 1]
    without = [(g.num_items, g.batch) for g in collate_groups(items, fields)]
    assert_same(without, list(reference.collate_groups(items, fields)))


def test_groups_are_made_when_they_are_asked_for():
    items = [{"x": [1]}, {"x": [2], "y": 1}, {"x": 3, "y": 1}]
    groups = collate_groups(items, {"x": Flat(), "y": Batched()})
    assert next(groups).batch == {"x": [1]}
    with pytest.raises(CollateTypeError):
        next(groups)


@pytest.mark.parametrize("kind", [Batched, Flat, Shared])
def test_declarations_are_frozen_keyword_only_and_compare_by_value(kind):
    field = kind(keep_on_cpu=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        field.keep_on_cpu = False
    with pytest.raises(TypeError, match="positional"):
        kind(True)
    assert field == kind(keep_on_cpu=True) != kind()
    assert hash(field) == hash(kind(keep_on_cpu=True))
    assert pickle.loads(pickle.dumps(field)) == field


# What is refused


@dataclasses.dataclass(frozen=True)
class Bad:
    """A call that is refused, and what the error must say: where, what was found, what to do."""

    items: Any
    error: type[MMCollateError]
    says: tuple[str, ...]
    fields: Any = dataclasses.field(default_factory=lambda: SOME)
    field: str | None = "x"
    item: int | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def flat(dim: Any = 0) -> dict[str, Field]:
    return {"x": Flat(dim=dim)}


class SubclassOfShared(Shared):
    pass


def no_item(what: Any, found: str) -> Bad:
    says = (f"found {found}", "expected a mapping from field name to value")
    return Bad([{"x": 1}, what], CollateTypeError, says, field=None, item=1)


def no_kind(what: Any) -> Bad:
    says = (f"declared as {what!r}", "expected one of Batched, Flat, Shared", "keep_on_cpu=True")
    if what is Batched:
        says += (f"use {what.__name__}()",)
    return Bad(of(ones(2), ones(2)), CollateTypeError, says, fields={"x": what})


def no_target(*says: str, error: type[MMCollateError] = CollateRuntimeError, **options: Any) -> Bad:
    # Of two shapes if there is a device, so that nothing but the copy fails. The second would be
    # blamed if the target were not.
    second = ones(3).requires_grad_() if "device" in options else RECORDED
    says = ("found float32 (2,), float32 ", "; torch can't use ", *says)
    return Bad(of(ones(2), second), error, says, options=options)


def no_modality(what: Any, found: str) -> Bad:
    says = (f"the modality is {found}, expected a string or None; collate_groups() takes",)
    return Bad(of(1), CollateTypeError, says, field=None, options={"modality": what})


def no_items(what: Any, *says: str) -> Bad:
    says = (f"found {type(what).__name__}", "expected a sequence of items", *says)
    return Bad(what, CollateTypeError, says, field=None)


def no_fields(what: Any) -> Bad:
    says = (f"fields are {type(what).__name__}", "expected a mapping from field name to Batched")
    return Bad(of(1), CollateTypeError, says, fields=what, field=None)


def no_plain_data(leaf: torch.Tensor, *says: str, beside: tuple[Any, ...] = ()) -> Bad:
    fields, item = flat(), len(beside)
    return Bad(of(*beside, leaf, leaf), CollateRuntimeError, says, fields=fields, item=item)


class Evil:
    @property
    def shape(self) -> None:
        raise OSError("no shape")


SPARSE = ones(2, 3).to_sparse()
RAGGED = [ones(2), ones(3)]
STRIDED_NESTED = quietly(torch.nested.nested_tensor, RAGGED)
JAGGED = quietly(torch.nested.nested_tensor, RAGGED, layout=torch.jagged)
QUANTISED = quietly(torch.quantize_per_tensor, ones(3), 0.1, 0, torch.qint8)
RECORDED = ones(2).requires_grad_()

BAD: dict[str, Bad] = {
    "an item that raises when it is looked at": no_item(Evil(), "Evil"),
    "an item None": no_item(None, "NoneType"),
    "an item list": no_item([1, 2], "list of 2"),
    "an item string": no_item("ab", "str"),
    "an item number": no_item(3, "int"),
    "an item tensor": no_item(ones(2, 3), "float32 (2, 3)"),
    "a value None": Bad(
        of([1], None), CollateTypeError, ("NoneType", "takes tensors or lists"), flat(), item=1
    ),
    "a value None beside a tensor": Bad(
        of(ones(2, 3), None),
        CollateTypeError,
        ("found NoneType", "item 0 is float32 (2, 3)", "one form"),
        flat(),
        item=1,
    ),
    "a value number beside a tensor and a list": Bad(
        of(ones(2, 3), [1], np.float32(2)),
        CollateTypeError,
        ("found numpy.float32", "item 0 is float32 (2, 3)", "one form"),
        flat(),
        item=2,
    ),
    "a value that raises when it is looked at": Bad(
        of(Evil(), [1]), CollateTypeError, ("found Evil; a flat field takes",), flat(), item=0
    ),
    "a scalar tensor beside a list": Bad(
        of([1], ones()),
        CollateTypeError,
        ("found float32 (), without a dimension",),
        flat(),
        item=1,
    ),
    "a value number": Bad(
        of(1, 2), CollateTypeError, ("found int", "takes tensors or lists"), flat(), item=0
    ),
    "a field missing": Bad(
        [{"x": 1, "y": 2}, {"x": 1}],
        CollateKeyError,
        ("lacks ['y']", "unlike item 0", "collate_groups()"),
        {"x": Batched(), "y": Batched()},
        field="y",
        item=1,
    ),
    "a field too many": Bad(
        [{"x": 1}, {"x": 1}, {"x": 1, "y": 2}],
        CollateKeyError,
        ("has ['y'] besides", "unlike item 1", "collate_groups()"),
        {"x": Batched(), "y": Batched()},
        field="y",
        item=2,
    ),
    "a field undeclared": Bad(
        [{"x": 1, "y": ones(2, 3)}],
        CollateKeyError,
        ("float32 (2, 3) is not declared", "add 'y' to the fields", "leave it out"),
        field="y",
        item=0,
    ),
    "fewer dimensions": Bad(
        of(ones(2, 3), ones(2)),
        CollateIndexError,
        ("found float32 (2,)", "expected 2 dimensions", "reshape"),
        flat(),
        item=1,
    ),
    "more dimensions": Bad(
        of(ones(2), ones(2), ones(4, 1, dtype=torch.int8)),
        CollateRuntimeError,
        ("found int8 (4, 1)", "expected 1 dimension", "reshape"),
        flat(),
        item=2,
    ),
    "a dimension out of range": Bad(
        of(ones(2, 3), ones(2, 3)),
        CollateIndexError,
        ("found float32 (2, 3)", "has no dimension 2"),
        flat(2),
        item=0,
    ),
    "a dimension of scalars": Bad(
        of(ones(), ones()), CollateIndexError, ("float32 ()", "no dimension 0"), flat(), item=0
    ),
    "a dimension string": Bad(
        of(ones(2), ones(2)), CollateTypeError, ("dim is 'a'", "expected an int"), flat("a"), item=0
    ),
    "a dimension None": Bad(
        of(ones(2), ones(2)),
        CollateTypeError,
        ("dim is None", "expected an int"),
        flat(None),
        item=0,
    ),
    "a dimension bool": Bad(
        of(ones(2, 2), ones(2, 2)),
        CollateTypeError,
        ("dim is True", "expected an int"),
        flat(True),
        item=0,
    ),
    "fewer dimensions, with numpy's int": Bad(
        of(ones(2, 3), ones(2)),
        CollateIndexError,
        ("found float32 (2,)", "expected 2 dimensions", "reshape"),
        flat(np.int64(0)),
        item=1,
    ),
    "a dimension of lists": Bad(
        of([1], [2]), CollateValueError, ("found list of 1", "dim=0 only"), flat(1), item=0
    ),
    "two devices": Bad(
        of(ones(2), ones(2, device="meta")),
        CollateRuntimeError,
        ("found float32 (2,) on meta", "item 0 is float32 (2,);", "one device"),
        item=1,
    ),
    "dtypes that torch won't cast": Bad(
        of(ones(2, dtype=torch.int32), ones(3)),
        CollateTypeError,
        ("found float32 (3,), which torch can't cast", "item 0 is int32 (2,)", "one dtype"),
        flat(),
        item=1,
    ),
    "a dtype that torch won't cast after one that it does": Bad(
        of(ones(2), ones(2, dtype=torch.float64), ones(2, dtype=torch.complex64)),
        CollateTypeError,
        ("found complex64 (2,), which torch can't cast", "item 0 is float32 (2,)", "one dtype"),
        item=2,
    ),
    "integers, then a number with a fraction": Bad(
        of(*(ones(2, dtype=dtype) for dtype in (torch.int64, torch.int8, torch.bool)), ones(2)),
        CollateTypeError,
        ("found float32 (2,), which torch can't cast", "item 0 is int64 (2,)", "one dtype"),
        item=3,
    ),
    "dtypes that torch won't join": Bad(
        of(ones(2, dtype=torch.uint16), ones(2, dtype=torch.int32)),
        CollateRuntimeError,
        ("found int32 (2,), which torch can't cast", "item 0 is uint16 (2,)", "one dtype"),
        item=1,
    ),
    "a gradient after another dtype": Bad(
        of(ones(2), ones(2, dtype=torch.float64), RECORDED),
        CollateRuntimeError,
        ("found float32 (2,)", "requires grad", "detach it or use torch.no_grad()"),
        item=2,
    ),
    "a gradient": Bad(
        of(ones(2), RECORDED),
        CollateRuntimeError,
        ("found float32 (2,)", "requires grad", "detach it or use torch.no_grad()"),
        item=1,
    ),
    "shared values that differ": Bad(
        of(torch.arange(2), torch.arange(2), torch.arange(3)),
        CollateValueError,
        ("int64 (3,)", "not equal to item 1's, int64 (2,)", "collate_groups()"),
        {"x": Shared()},
        item=2,
    ),
    "no mapping, and pin_memory no bool": dataclasses.replace(
        no_item(None, "NoneType"), options={"pin_memory": 0}
    ),
    "a device of no kind": no_target("device='foo' here; pass one that", device="foo"),
    "a device number": no_target("device=1.5", device=1.5, error=CollateTypeError),
    "pin_memory string": no_target(
        "pin_memory='yes' here; pass False", pin_memory="yes", error=CollateTypeError
    ),
    "keep_on_cpu array": Bad(
        of(ones(2), ones(3)),
        CollateValueError,
        ("found float32 (2,), float32 (3,); keep_on_cpu is ndarray float64 (2,), expected a bool",),
        {"x": Batched(keep_on_cpu=np.ones(2))},
    ),
    "too little memory for the batch": Bad(
        # More than there are addresses, wherever memory is promised freely.
        of(*[ones(1).expand(2**29, 2**29)] * 2),
        CollateRuntimeError,
        (
            "found float32 (536870912, 536870912), ",
            "no memory for their batch, give fewer or smaller",
        ),
    ),
    "a modality number": no_modality(3, "int"),
    "a modality list": no_modality(["image"], "list of 1"),
    "sparse": no_plain_data(SPARSE, "float32 (2, 3)", "sparse_coo", "to_dense()"),
    "sparse beside dense": no_plain_data(
        SPARSE, "float32 (2, 3)", "sparse_coo", "to_dense()", beside=(ones(2, 3),)
    ),
    "quantised": no_plain_data(QUANTISED, "qint8 (3,)", "dequantize()"),
    "nested": no_plain_data(STRIDED_NESTED, "float32 (ragged)", "; "),
    "jagged": no_plain_data(JAGGED, "NestedTensor of float32", "; "),
    "one nested": Bad(of(STRIDED_NESTED), CollateRuntimeError, ("float32 (ragged)", "; "), item=0),
    "one compressed": Bad(
        of(quietly(ones(2, 3).to_sparse_csr)),
        CollateRuntimeError,
        ("float32 (2, 3)", "sparse_csr", "to_dense()"),
        item=0,
    ),
    "fake beside real": Bad(
        of(ones(2), fake(2)),
        CollateValueError,
        ("FakeTensor of float32 (2,)", "; "),
        item=1,
    ),
    "a kind string": no_kind("batched"),
    "a kind class": no_kind(Batched),
    "a kind of another class": no_kind(int),
    "a kind None": no_kind(None),
    "a kind base": no_kind(Field()),
    "a kind of a subclass": no_kind(SubclassOfShared()),
    "fields list": no_fields([Batched()]),
    "fields string": no_fields("x"),
    "fields kind": no_fields(Batched()),
    "items dict": no_items({"x": 1}, "put a single item into a list"),
    "items string": no_items("ab"),
    "items number": no_items(3),
    "items None": no_items(None),
}

BUILT_IN = {
    CollateTypeError: TypeError,
    CollateValueError: ValueError,
    CollateKeyError: KeyError,
    CollateIndexError: IndexError,
    CollateMemoryError: MemoryError,
    CollateRuntimeError: RuntimeError,
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_and_says_where_what_and_what_to_do(name):
    bad = BAD[name]
    with pytest.raises(MMCollateError) as raised:
        quietly(collate, bad.items, bad.fields, **{"modality": "image", **bad.options})
    error = raised.value
    own = str(error).partition(" (the reference raised ")[0]
    assert type(error) is bad.error
    assert isinstance(error, BUILT_IN[bad.error])
    assert (error.field, error.item) == (bad.field, bad.item), own
    if "modality" not in bad.options:
        assert error.modality == "image"
        assert own.startswith(errors.where("image", bad.field, bad.item))
    assert [words for words in bad.says if words not in own] == [], own
    # torch's own text may be a dump of its dispatch tables.
    assert len(str(error)) < 1000
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
    # Nothing is left behind.
    assert collate(of(ones(2), ones(2)), SOME)["x"].tolist() == [[1, 1], [1, 1]]


def test_all_errors_are_built_in_ones_too():
    public = {name for name in mmcollate.__all__ if name.endswith("Error")} - {"MMCollateError"}
    assert public == {kind.__name__ for kind in BUILT_IN}
    for kind, built_in in BUILT_IN.items():
        assert issubclass(kind, (MMCollateError, built_in))
    assert str(CollateKeyError("no quotes")) == "no quotes"


def test_the_cause_is_torchs_own_exception():
    with pytest.raises(CollateIndexError) as raised:
        batch_of(Flat(), ones(2, 3), ones(2))
    assert type(raised.value.__cause__) is IndexError


@pytest.mark.parametrize("modalities", [[], ["image"], ["image"] * 3])
def test_modalities_of_another_length_are_refused(modalities):
    with pytest.raises(CollateValueError, match=f"{len(modalities)} modalities for 2 items; give"):
        list(collate_groups(of(1, 2), SOME, modalities=modalities))


NO_ACCELERATOR = not torch.accelerator.is_available()


@pytest.mark.skipif(not NO_ACCELERATOR, reason="for a torch without an accelerator")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda"}, "device='cuda'"),
        ({"device": 7}, "device=7"),
        ({"device": "cuda", "pin_memory": True}, "device='cuda'"),
        ({"pin_memory": True}, "pin_memory=True"),
    ],
    ids=str,
)
def test_a_target_that_is_not_here_is_blamed_alone(options, says):
    items = of(ones(2), ones(2, dtype=torch.float64))
    with pytest.raises(MMCollateError, match=f"torch can't use {says} here; pass") as raised:
        collate(items, SOME, **options)
    assert raised.value.item is None
    # What stays on the host is none of its business.
    assert collate(items, {"x": Batched(keep_on_cpu=True)}, **options)["x"].shape == (2, 2)


@pytest.mark.parametrize("bad", [3, ones(2), ["a"]], ids=errors.describe)
def test_modalities_are_strings(bad):
    with pytest.raises(CollateTypeError) as raised:
        next(collate_groups(of(1, 2), SOME, modalities=["image", bad]))
    says = f"item 1: the modality is {errors.describe(bad)}, expected a string or None"
    assert str(raised.value) == says
    assert raised.value.item == 1


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise OSError("no ==")

    __hash__ = None


@pytest.mark.parametrize("pin_memory", [False, 0])
def test_a_comparison_that_raises_names_the_pair_and_the_field(pin_memory):
    odd = Incomparable()
    fields = {"a": Shared(), "b": Shared(), "c": Shared(), "d": Batched()}
    same = {"a": 1, "b": [1], "d": 0}
    items = [{**same, "c": c} for c in ("x", "y", "y", "y", odd)]
    groups = collate_groups(items, fields, modalities=["i", *["v"] * 4], pin_memory=pin_memory)
    assert next(groups).num_items == 1
    with pytest.raises(CollateRuntimeError) as raised:
        next(groups)
    says = "modality 'v', field 'c', item 4: found Incomparable, which can't be compared with item"
    assert str(raised.value).startswith(f"{says} 3's str; give shared values")
    assert (raised.value.modality, raised.value.field, raised.value.item) == ("v", "c", 4)
    assert type(raised.value.__cause__) is OSError
    # The first that is unequal ends the comparison, as in the reference.
    items[4]["a"] = 2
    assert [group.num_items for group in collate_groups(items[1:], fields)] == [3, 1]
    assert list(reference.group_bounds(items[1:], fields)) == [(0, 3), (3, 4)]


def test_dicts_of_arrays_cannot_be_shared():
    with pytest.raises(CollateValueError, match="field 'x', item 1: found dict, which can't be"):
        batch_of(Shared(), {"a": np.zeros(2)}, {"a": np.zeros(2)})


def test_of_two_shared_arrays_the_one_that_differs_is_named():
    fields = {"a": Shared(), "b": Shared(), "c": Shared()}
    same = {"a": np.zeros(2), "b": [np.zeros(2)]}
    with pytest.raises(CollateValueError) as raised:
        collate([{**same, "c": np.zeros(2)}, {**same, "c": np.ones(2)}], fields)
    assert str(raised.value).startswith("field 'c', item 1: the shared value, float64 (2,), is not")
    with pytest.raises(CollateValueError, match="field 'b', item 1: the shared value, list of 1"):
        collate([{**same, "c": 1}, {**same, "b": [np.ones(2)], "c": 2}], fields)


def test_a_comparison_reads_shared_values_only(monkeypatch):
    seen = []
    normalize = collation._normalize
    monkeypatch.setattr(
        collation, "_normalize", lambda *args: seen.append(args) or normalize(*args)
    )
    fields = {"x": Batched(), "s": Shared()}
    left, right = {"x": np.zeros(2), "s": np.ones(2)}, {"x": np.zeros(2), "s": np.ones(2)}
    assert collation._can_batch(left, right, fields, collation._Context(None, 3), 7)
    assert [(name, index) for _, name, index, _ in seen] == [("s", 6), ("s", 7)]


@pytest.mark.parametrize(
    ("leaves", "says"),
    [
        ([ones(2, 3), ones(2)], "expected 2 dimensions as item 3 has"),
        ([ones(2, 3), None], "item 3 is float32 (2, 3); give all items one form"),
        ([ones(2, dtype=torch.int8), ones(2)], "item 3 is int8 (2,); give all items one dtype"),
        ([ones(2), ones(2, device="meta")], "item 3 is float32 (2,); move them"),
        ([ones(2), fake(2)], "item 3 is float32 (2,); give all items one type"),
    ],
)
def test_errors_of_later_groups_compare_with_the_groups_first_item(leaves, says):
    items = of([1], [2], [3], *leaves)
    groups = collate_groups(items, flat(), modalities=["i", "i", "i", "v", "v"])
    assert next(groups).num_items == 3
    with pytest.raises(MMCollateError) as raised:
        next(groups)
    assert raised.value.item == 4
    assert says in str(raised.value)
    assert "item 0" not in str(raised.value)


@pytest.mark.parametrize("bad", [np.array(["a"]), 5], ids=["unreadable", "refused by the kind"])
def test_errors_of_later_groups_name_the_items_as_they_were_given(bad):
    items = [*of([1], [2], [3], [4]), {"x": bad}]
    groups = collate_groups(items, flat(), modalities=["image", "image", "image", "video", "video"])
    assert next(groups).num_items == 3
    with pytest.raises(CollateTypeError) as raised:
        next(groups)
    assert (raised.value.modality, raised.value.field, raised.value.item) == ("video", "x", 4)
    assert "modality 'video', field 'x', item 4" in str(raised.value)


def test_plain_items_without_fields_are_refused():
    pytest.importorskip("vllm", reason="without fields, items are vLLM's; needs vLLM")
    with pytest.raises(CollateTypeError, match="fields"):
        collate(of(ones(2), ones(2)))


def test_of_vllms_items_the_exceptions_are_vllms_own():
    inputs = pytest.importorskip("vllm.multimodal.inputs", reason="needs vLLM")
    field = inputs.MultiModalFlatField(slices=[])
    items = [
        inputs.MultiModalKwargsItem({"x": inputs.MultiModalFieldElem(leaf, field)})
        for leaf in (ones(2, 3), None)
    ]
    for call in (collate, lambda items: list(collate_groups(items))):
        with pytest.raises(TypeError) as raised:
            call(items)
        assert type(raised.value) is TypeError
        notes = getattr(raised.value, "__notes__", ["field 'x', item 1"])
        assert any("field 'x', item 1" in note for note in notes)


# Whose memory it is


def test_the_batch_of_one_item_is_its_own_memory():
    leaf = torch.arange(6).reshape(2, 3)
    stacked = batch_of(Batched(), leaf)
    assert stacked.data_ptr() == leaf.data_ptr()
    assert stacked.shape == (1, 2, 3)
    assert batch_of(Flat(), leaf) is leaf
    assert batch_of(Shared(), leaf, leaf.clone()) is leaf
    assert batch_of(Batched(), [leaf], 1)[0][0] is leaf
    assert batch_of(Flat(), [leaf], [1])[0] is leaf


@pytest.mark.parametrize("field", [Batched(), Batched(keep_on_cpu=True), Flat()], ids=str)
def test_the_batch_of_several_items_shares_memory_with_none(field):
    # Neighbours in memory, so that their batch could be a view.
    base = torch.arange(12).reshape(4, 3)
    out = batch_of(field, *base.chunk(2))
    base.fill_(-1)
    assert out.flatten().tolist() == list(range(12))
    out.fill_(5)
    assert (base == -1).all()


@pytest.mark.usefixtures("table")
def test_kept_fields_lie_side_by_side_in_one_allocation():
    shapes = {"a": (3,), "b": (32,), "c": (100, 5), "d": ()}
    fields = {name: Batched(keep_on_cpu=True) for name in shapes}
    item = {name: ones(*shape, dtype=torch.int64) for name, shape in shapes.items()}
    batch = collate([item, item], fields)
    expected = batch["a"].data_ptr()
    for name in shapes:
        assert batch[name].data_ptr() == expected
        assert batch[name].untyped_storage().nbytes() == batch[name].nbytes
        # The second is 512 bytes long: separate allocations could not follow so closely.
        expected += -(-batch[name].nbytes // ALIGNMENT) * ALIGNMENT
    assert batch["b"].nbytes == 512


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("keep_on_cpu", [False, True])
def test_every_gathered_output_is_aligned_and_contiguous(keep_on_cpu):
    kinds = (Batched(keep_on_cpu=keep_on_cpu), Flat(keep_on_cpu=keep_on_cpu))
    for size in (1, 3, 255, 257, 4097):
        leaf = ones(size, 2, dtype=torch.uint8)
        items = [{"a": leaf, "b": leaf, "c": leaf.t()}] * 3
        batch = collate(items, {"a": kinds[0], "b": kinds[1], "c": kinds[0]})
        for out in batch.values():
            assert out.data_ptr() % ALIGNMENT == 0
            assert out.is_contiguous()


def test_outputs_can_be_written_resized_and_kept():
    kept = {"a": Batched(keep_on_cpu=True), "b": Batched(keep_on_cpu=True)}
    batch = collate([{"a": ones(2), "b": ones(2)}] * 2, kept)
    batch["a"].zero_()
    assert batch["b"].tolist() == [[1, 1], [1, 1]]
    assert batch["a"].add_(2).tolist() == [[2, 2], [2, 2]]

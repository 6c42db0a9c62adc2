"""MMCOLLATE_VERIFY: every difference from vLLM is seen, and none that is not there."""

from __future__ import annotations

import copy
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

utils: Any = pytest.importorskip(
    "vllm.multimodal.utils", reason="needs vLLM, which has no wheel for this Python"
)

from mmcollate import bits, errors
from mmcollate.integrations import vllm as plugin
from vllm.multimodal import inputs
from vllm_items import batched, flat, item, items_of, shared

first_difference = bits.first_difference


def differs(ours: Any, theirs: Any, match: str, given: Any = ()) -> None:
    found = first_difference(ours, theirs, "batch['x']", given)
    assert found is not None
    assert found.startswith("batch['x']") and match in found
    assert first_difference(theirs, ours, "batch['x']", given) is not None


# Comparing


DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    ours, theirs = raw.clone().view(dtype), raw.clone().view(dtype)
    assert first_difference(ours, theirs) is None
    theirs.untyped_storage()[37] ^= 1
    differs(ours, theirs, "byte 37")


def test_nans_and_zeros_are_told_apart_by_their_bits() -> None:
    nan, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert first_difference(nan, nan.clone()) is None
    differs(nan, other, "byte 0")
    differs(torch.tensor(0.0), torch.tensor(-0.0), "byte 3")
    assert first_difference(math.nan, float("nan")) is None
    differs(0.0, -0.0, "-0.0")
    differs(complex(0.0, 0.0), complex(0.0, -0.0), "expected")


@pytest.mark.parametrize("values", [[1.0, 2.0], [1 + 2j, 3 - 4j]])
def test_lazy_bits_are_flags_and_not_values(values: list[Any]) -> None:
    plain = torch.tensor(values)
    lazy = plain.conj() if plain.is_complex() else torch._neg_view(plain)
    other = (plain + 1).conj() if plain.is_complex() else torch._neg_view(plain + 1)
    assert first_difference(lazy, copy.copy(lazy)) is None
    differs(lazy, plain, "is_")
    differs(lazy, other, "byte")


def test_expanded_terabytes_cost_what_they_repeat() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    try:
        ones = torch.ones(2, 1).expand(2, 1 << 40)
        assert first_difference(ones, torch.ones(2, 1).expand(2, 1 << 40)) is None
        differs(ones, torch.zeros(2, 1).expand(2, 1 << 40), "byte")
        wide = np.broadcast_to(np.ones(1), (1 << 40,))
        assert first_difference(wide, np.broadcast_to(np.ones(1), (1 << 40,))) is None
        differs(wide, np.broadcast_to(np.zeros(1), (1 << 40,)), "values")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_strided_tensor_is_compared_where_it_has_elements() -> None:
    ours, theirs = torch.zeros(4, 4), torch.zeros(4, 4)
    theirs[:, 3] = 1
    assert first_difference(ours[:, :3], theirs[:, :3]) is None
    differs(ours[:, 1:], theirs[:, 1:], "byte")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_other_layouts_are_compared_by_their_parts() -> None:
    eye = torch.eye(4)
    for sparse in (
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda x: x.to_sparse_bsr((2, 2)),
        lambda x: x.to_sparse_bsc((2, 2)),
    ):
        assert first_difference(sparse(eye), sparse(eye.clone())) is None
        differs(sparse(eye), sparse(2 * eye), "values")
        differs(sparse(eye), sparse(eye.roll(1, 0).roll(2, 1)), "ind")
    differs(eye.to_sparse(), eye.to_sparse_csr(), "layout")
    rows, other = [torch.zeros(1), torch.zeros(2)], [torch.zeros(1), torch.ones(2)]
    for layout in (torch.strided, torch.jagged):
        ours, theirs, alike = (
            torch.nested.nested_tensor(x, layout=layout) for x in (rows, other, rows)
        )
        assert first_difference(ours, alike) is None
        differs(ours, theirs, "byte")
    differs(eye.to_mkldnn(), (2 * eye).to_mkldnn(), "byte")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_tensors_are_compared_by_code_scale_and_zero_point() -> None:
    def quantised(values: list[float], scale: float = 0.1, zero_point: int = 0) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.tensor(values), scale, zero_point, torch.quint8)

    def by_channel(scales: list[float], points: list[int]) -> torch.Tensor:
        codes = torch.zeros(2, 2)
        return torch.quantize_per_channel(
            codes, torch.tensor(scales, dtype=torch.float64), torch.tensor(points), 0, torch.qint8
        )

    assert first_difference(quantised([1.0, 2.0]), quantised([1.0, 2.0])) is None
    differs(quantised([1.0, 2.0]), quantised([1.0, 3.0]), "byte 1")
    differs(quantised([1.0]), quantised([1.0], scale=0.2), "scale")
    differs(quantised([1.0]), quantised([1.0], zero_point=1), "zero_point")
    assert first_difference(by_channel([1, 2], [0, 1]), by_channel([1, 2], [0, 1])) is None
    differs(by_channel([1, 2], [0, 0]), by_channel([1, 3], [0, 0]), "scales")


def test_fake_meta_and_emptied_tensors_are_compared_without_contents(
    recwarn: pytest.WarningsRecorder,
) -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        ours, theirs, other = torch.zeros(2), torch.ones(2), torch.zeros(3)
        empty, none = torch.zeros(0), torch.zeros(0)
        assert first_difference(ours, theirs) is None
        differs(ours, other, "shape")
    assert first_difference(ours, theirs) is None
    assert first_difference(empty, none) is None
    assert first_difference(ours, theirs, given=[ours]) is not None
    differs(ours, torch.zeros(2), "FakeTensor")
    differs(torch.zeros(2, device="meta"), torch.zeros(3, device="meta"), "shape")
    gone, also = torch.ones(4), torch.ones(4)
    for x in (gone, also):
        x.untyped_storage().resize_(0)
    assert first_difference(gone, also) is None
    differs(gone, torch.ones(4), "memory")
    assert not recwarn.list


def test_torch_modes_do_not_change_the_comparison() -> None:
    ours, theirs, other = torch.ones(3), torch.ones(3), torch.zeros(3)

    def under_vmap(x: torch.Tensor) -> torch.Tensor:
        assert first_difference(ours, theirs) is None
        assert first_difference(ours, other) is not None
        assert first_difference(x, x * 2) is not None
        return x

    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert first_difference(ours, theirs) is None
        differs(ours, other, "byte")
    with torch.device("meta"), torch.inference_mode():
        assert first_difference(ours, theirs) is None
        differs(ours, other, "byte")
    torch.vmap(under_vmap)(torch.ones(2, 2))


def test_autograd_is_compared_by_flag_and_operation() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    differs(leaf, torch.zeros(2), "requires_grad")
    differs(leaf, leaf + 0, "grad_fn")
    differs(leaf + 0, leaf * 1, "grad_fn")
    assert first_difference(leaf * 1, leaf * 1) is None


def test_subclasses_that_refuse_to_be_looked_at_are_compared() -> None:
    class Shy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            raise RuntimeError("no")

    ours, theirs, other = (
        torch.Tensor._make_subclass(Shy, x) for x in (torch.ones(2), torch.ones(2), torch.zeros(2))
    )
    assert first_difference(ours, theirs) is None
    differs(ours, other, "byte")


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Incomparable:
    def __init__(self, text: str, error: Exception | None = None) -> None:
        self.text = text
        self.error = error

    def __eq__(self, other: object) -> Any:
        if self.error is not None:
            raise self.error
        return np.array([True, False])

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return self.text


def test_objects_are_compared_by_identity_equality_or_text() -> None:
    held = Unprintable()
    assert first_difference(held, held) is None
    differs(held, Unprintable(), "Unprintable")
    for error in (None, RuntimeError("no"), RecursionError()):
        one, same, other = (Incomparable(text, error) for text in ("a", "a", "b"))
        assert first_difference(one, one) is None
        assert first_difference(one, same) is None
        differs(one, other, "expected b")
    assert first_difference({1, 2}, {2, 1}) is None
    differs({1, 2}, {1, 3}, "{1, 3}")
    differs("a" * 10_000, "b" * 10_000, "expected")
    assert len(str(first_difference("a" * 10_000, "b" * 10_000))) < 1000


def test_arrays_are_compared_by_all_their_bytes() -> None:
    ours = np.zeros(100_000)
    theirs = ours.copy()
    assert first_difference(ours, theirs) is None
    theirs[50_000] = 1
    assert repr(ours) == repr(theirs)
    differs(ours, theirs, "values")
    differs(np.zeros(2, "f4"), np.zeros(2, "f8"), "dtype")
    differs(np.zeros(2, "i8"), np.zeros(2, "f8"), "dtype")
    differs(np.zeros((2, 3)), np.zeros((3, 2)), "shape")
    differs(np.zeros((2, 2)), np.zeros((2, 2), order="F"), "strides")
    differs(np.array([0.0]), np.array([-0.0]), "values")
    nan = np.array([np.nan])
    assert first_difference(nan, nan.copy()) is None
    held = [object(), held_too] if (held_too := Unprintable()) else []
    objects = np.array(held, dtype=object)
    assert first_difference(objects, objects.copy()) is None
    differs(objects, np.array([held[1], held[0]], dtype=object), "values")
    assert first_difference(np.float32(np.nan), np.float32(np.nan)) is None
    differs(np.float32(0.0), np.float32(-0.0), "expected")


def test_keys_are_compared_with_their_types() -> None:
    differs({1: 0}, {True: 0}, "fields")
    differs({"a": 1, "b": 2}, {"b": 2, "a": 1}, "fields")


# What is shared with the items


def test_the_very_object_of_an_item_must_be_so_in_both() -> None:
    leaf, nested = torch.ones(3), [1000, "x"]
    differs(leaf.view(3), leaf, "the item's own", [leaf])
    differs(leaf.clone(), leaf, "the item's own", {"a": (leaf,)})
    differs(list(nested), nested, "the item's own", [nested])
    differs([list(nested)], [nested], "the item's own", [nested])
    assert first_difference([nested], [nested], given=[nested]) is None
    one, same = np.zeros(3), np.zeros(3)
    differs(one, same, "the item's own", [one])


def test_memory_of_an_item_must_be_shared_in_both() -> None:
    leaf = torch.ones(4)
    assert first_difference(leaf.unsqueeze(0), leaf.unsqueeze(0), given=[leaf]) is None
    differs(torch.ones(1, 4), leaf.unsqueeze(0), "memory", [leaf])
    differs(leaf[:2], leaf[2:], "memory", [leaf])
    whole = torch.ones(8)
    differs(whole[4:].view(1, 4), whole[:4].view(1, 4), "memory", [whole[:4], whole[4:]])
    for empty in (torch.zeros(0, 2), torch.zeros(3, 2, device="meta")):
        assert first_difference(empty.unsqueeze(0), empty.unsqueeze(0), given=[empty]) is None
        differs(torch.empty_like(empty).unsqueeze(0), empty.unsqueeze(0), "memory", [empty])
    sparse = leaf.to_sparse()
    assert first_difference(sparse.detach(), sparse.detach(), given=[sparse]) is None
    differs(sparse.clone(), sparse.detach(), "memory", [sparse])


def test_values_that_hold_themselves_are_walked_once() -> None:
    held: list[Any] = [1]
    held.append(held)
    assert first_difference([held], [held], given=held) is None


# Verified batches


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MMCOLLATE_VERIFY", "1")
    plugin.deactivate()
    assert plugin.activate()
    yield
    monkeypatch.undo()
    plugin.deactivate()
    assert not plugin.is_active()


class Altered:
    """The core, with a field of each batch replaced."""

    def __init__(self, alter: Callable[[dict[str, Any]], Any]) -> None:
        self.right = plugin.collator()
        self.alter = alter

    def next_group(self, *arguments: Any) -> Any:
        result = self.right.next_group(*arguments)
        self.alter(result[1])
        return result

    def batch(self, *arguments: Any) -> Any:
        result = self.right.batch(*arguments)
        self.alter(result[0] if isinstance(result, tuple) else result)
        return result


def altered(monkeypatch: pytest.MonkeyPatch, alter: Callable[[dict[str, Any]], Any]) -> None:
    core = Altered(alter)
    monkeypatch.setattr(plugin, "collator", lambda: core)


def drained(items: Any, **options: Any) -> list[Any]:
    return list(utils.group_and_batch_mm_items(items, **options))


@pytest.mark.usefixtures("verified")
def test_the_error_names_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    ragged = [torch.zeros(1), torch.zeros(2), torch.zeros(3)]
    items = [item(pixel_values=batched(x), y=batched(1)) for x in ragged]

    def alter(batch: dict[str, Any]) -> None:
        batch["pixel_values"][2] = torch.ones(3)

    altered(monkeypatch, alter)
    for call in (drained, utils._batch_mm_items):
        with pytest.raises(errors.VerificationError, match=r" batch\['pixel_values'\]\[2\]: "):
            call(items)


@pytest.mark.usefixtures("verified")
def test_a_copy_for_an_alias_and_an_alias_for_a_copy_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaf = torch.ones(2, 3)

    def copies(batch: dict[str, Any]) -> None:
        batch["x"] = batch["x"].clone()

    for make in (batched, flat, shared):
        assert len(drained(items_of(make, [leaf]))) == 1
    with monkeypatch.context() as patch:
        altered(patch, copies)
        for make in (batched, flat, shared):
            with pytest.raises(errors.VerificationError, match=r"batch\['x'\]: .*item"):
                drained(items_of(make, [leaf]))
            with pytest.raises(errors.VerificationError, match=r"batch\['x'\]: .*item"):
                utils._batch_mm_items(items_of(make, [leaf]))
    values = [1, 2]
    with monkeypatch.context() as patch:
        altered(patch, lambda batch: batch.update(x=values))
        with pytest.raises(errors.VerificationError, match=r"batch\['x'\]: "):
            drained(items_of(flat, [values]))
    assert drained(items_of(flat, [values])) == [(1, {"x": [1, 2]})]


@pytest.mark.usefixtures("verified")
def test_aliases_are_looked_for_in_the_items_of_the_group() -> None:
    shares = [torch.ones(2), torch.ones(2), torch.zeros(2)]
    assert [count for count, _ in drained(items_of(shared, shares))] == [2, 1]


@pytest.mark.usefixtures("verified")
def test_iterators_are_not_used_up() -> None:
    def thrice(*values: Any) -> Any:
        return flat(iter(values)), flat(x for x in values), flat(map(int, values))

    for i in range(3):
        items = [item(x=thrice(1, 2)[i]), item(x=thrice(3, 4)[i])]
        assert drained(items) == [(2, {"x": [1, 2, 3, 4]})]
        items = [item(x=thrice(1, 2)[i])]
        assert utils._batch_mm_items(items) == {"x": [1, 2]}
    held = iter([1])
    assert drained([item(x=batched({"a": (held,)}))]) == [(1, {"x": [{"a": (held,)}]})]
    assert next(held) == 1


@pytest.mark.usefixtures("verified")
def test_items_that_are_no_list_are_read_once() -> None:
    class Once:
        def __init__(self, items: list[Any]) -> None:
            self.items = items
            self.read: list[Any] = []

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, at: Any) -> Any:
            self.read.append(at)
            return self.items[at]

    items = Once(items_of(batched, [1]))
    assert drained(items) == [(1, {"x": [1]})]
    assert len(items.read) == 1


@pytest.mark.usefixtures("verified")
def test_other_leaves_are_verified_without_an_alarm() -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = [torch.zeros(2), torch.zeros(2)]
        assert drained(items_of(batched, fake))[0][1]["x"].shape == (2, 2)
    wide = torch.ones(1).expand(1 << 40)
    held = Unprintable()
    for leaf in (wide, held, Incomparable("a", RuntimeError()), torch.eye(2).to_sparse()):
        for make in (batched, shared):
            assert len(drained(items_of(make, [leaf]))) == 1
    for dtype in (torch.uint1, torch.int1, torch.bits8, torch.float8_e4m3fn):
        leaves = [torch.zeros(2, dtype=torch.uint8).view(dtype)] * 2
        assert drained(items_of(batched, leaves[:1]))[0][1]["x"].dtype == dtype


@pytest.mark.usefixtures("verified")
def test_interrupts_pass() -> None:
    class Interrupting(inputs.MultiModalBatchedField):
        def _reduce_data(self, batch: Any, *, pin_memory: bool) -> Any:
            raise KeyboardInterrupt

    items = [item(x=inputs.MultiModalFieldElem(1, Interrupting()))]
    for call in (drained, utils._batch_mm_items):
        with pytest.raises(KeyboardInterrupt):
            call(items)


@pytest.mark.usefixtures("verified")
def test_equal_exceptions_are_raised_with_their_notes_and_groups_before_them() -> None:
    items = [item(y=batched(1)), *items_of(flat, [torch.zeros(2, 3), torch.zeros(4)])]
    groups = utils.group_and_batch_mm_items(items)
    assert next(groups) == (1, {"y": [1]})
    with pytest.raises((IndexError, RuntimeError)) as caught:
        next(groups)
    notes = getattr(caught.value, "__notes__", ["mmcollate: field 'x', item 1"])
    assert len(notes) == 1 and "field 'x', item 1" in notes[0]
    assert list(groups) == []


class Failing(inputs.MultiModalBatchedField):
    raised: list[Exception]

    def _reduce_data(self, batch: Any, *, pin_memory: bool) -> Any:
        raise Failing.raised.pop(0)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        ([ValueError("a"), ValueError("a")], ValueError),
        ([ValueError("at 0x12"), ValueError("at 0x3f")], ValueError),
        ([Mute(), Mute()], Mute),
        ([ValueError("a"), ValueError("b")], errors.VerificationError),
        ([ValueError("a"), TypeError("a")], errors.VerificationError),
    ],
)
def test_exceptions_are_compared_by_type_and_message(
    raised: list[Exception], seen: type[Exception]
) -> None:
    for call in (drained, utils._batch_mm_items):
        Failing.raised = list(raised)
        with pytest.raises(seen) as caught:
            call([item(x=inputs.MultiModalFieldElem(1, Failing()))])
        if seen is errors.VerificationError:
            assert "vLLM raised ValueError: a" in str(caught.value)


@pytest.mark.usefixtures("verified")
def test_an_exception_in_one_only_and_other_groups_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(Altered):
        def next_group(self, items: Any, start: int, *arguments: Any) -> Any:
            if start:
                raise ValueError("lost")
            return self.right.next_group(items, start, start + 1, *arguments[1:])

    items = items_of(batched, [1, 2])
    core = Broken(id)
    with monkeypatch.context() as patch:
        patch.setattr(plugin, "collator", lambda: core)
        with pytest.raises(errors.VerificationError, match="1 items, vLLM of 2"):
            drained(items)
        with pytest.raises(errors.VerificationError, match="raised ValueError: lost, vLLM gave"):
            drained([*items[:1], item(y=batched(1))])

"""Leaves that lie side by side in one tensor: their batch is a view, and no byte is copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from mmcollate import (
    Batched,
    CollateRuntimeError,
    Flat,
    Shared,
    collate,
    collation,
    errors,
    explain,
    stats,
)
from mmcollate.integrations import vllm as plugin
from mmcollate.testing import FakeDevice
from vllm_items import from_plain

# 64 KiB and one row.
ROWS, WIDTH = 65, 256
SIDE_BY_SIDE = [20, 1, 44]


@pytest.fixture(params=["table", "attributes"], autouse=True)
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MMCOLLATE_SKIP_EXCHANGE_TABLE", str(int(request.param == "attributes")))
    monkeypatch.setattr(collation, "_warned", True)
    collators = (plugin.collator, collation.collator)
    for collator in collators:
        collator.cache_clear()
    yield request.param
    for collator in collators:
        collator.cache_clear()


def base(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> torch.Tensor:
    return torch.arange(rows * WIDTH).reshape(rows, WIDTH).to(dtype)


def batch_of(leaves: Any, field: Any, **options: Any) -> torch.Tensor:
    [(_, batch)] = groups_of([{"x": leaf} for leaf in leaves], {"x": field}, **options)
    assert isinstance(batch["x"], torch.Tensor)
    return batch["x"]


def groups_of(items: Any, fields: Any, **options: Any) -> list[tuple[int, dict[str, Any]]]:
    return list(plugin.group_and_batch_mm_items(from_plain(items, fields), **options))


def shares(batch: torch.Tensor, whole: torch.Tensor) -> bool:
    return batch.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("keep_on_cpu", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
def test_slices_of_one_tensor_are_joined_without_a_copy(dtype, keep_on_cpu, device):
    whole = base(dtype, 4 * ROWS)
    leaves = whole.split([4 * rows for rows in SIDE_BY_SIDE])
    batch = batch_of(leaves, Flat(keep_on_cpu=keep_on_cpu), device=device)
    assert shares(batch, whole)
    assert torch.equal(batch, torch.cat(leaves))
    assert batch.data_ptr() == whole.data_ptr()
    assert batch.stride() == (WIDTH, 1)


def test_rows_of_one_tensor_are_stacked_without_a_copy():
    whole = base().reshape(5, 13, WIDTH)
    batch = batch_of(whole.unbind(), Batched())
    assert shares(batch, whole)
    assert batch.shape == whole.shape
    assert torch.equal(batch, whole)


def test_a_part_of_a_tensor_is_a_view_of_that_part():
    whole = base(rows=3 * ROWS)
    batch = batch_of(whole[ROWS : 2 * ROWS].split(SIDE_BY_SIDE), Flat())
    assert batch.storage_offset() == ROWS * WIDTH
    assert torch.equal(batch, whole[ROWS : 2 * ROWS])


def test_audio_frames_with_a_leading_one_are_joined_without_a_copy():
    whole = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(1, -1)
    leaves = torch.arange(ROWS * WIDTH, dtype=torch.float32).split(
        [n * WIDTH for n in SIDE_BY_SIDE]
    )
    storage = leaves[0].untyped_storage().data_ptr()
    batch = batch_of([leaf[None] for leaf in leaves], Flat(dim=1))
    assert torch.equal(batch, whole)
    assert batch.untyped_storage().data_ptr() == storage


def test_the_view_and_the_items_see_each_others_changes():
    whole = base()
    batch = batch_of(whole.split(SIDE_BY_SIDE), Flat())
    batch[0, 0] = -1
    assert whole[0, 0] == -1
    whole[-1, -1] = -2
    assert batch[-1, -1] == -2


def test_the_view_keeps_the_memory():
    batch = batch_of(base().split(SIDE_BY_SIDE), Flat())
    garbage = [torch.full((ROWS, WIDTH), -1.0) for _ in range(64)]
    assert torch.equal(batch, base())
    assert len(garbage) == 64


def out_of_one_buffer() -> list[torch.Tensor]:
    """At consecutive addresses, but each with a storage of its own."""
    memory = bytearray(base().numpy().tobytes())
    starts = [0, 20 * WIDTH * 4, 21 * WIDTH * 4]
    pairs = zip(starts, SIDE_BY_SIDE, strict=True)
    return [
        torch.frombuffer(memory, dtype=torch.float32, offset=at, count=rows * WIDTH).reshape(
            rows, WIDTH
        )
        for at, rows in pairs
    ]


NOT_ADJACENT = {
    "in another order": lambda: base().split(SIDE_BY_SIDE)[::-1],
    "with a gap": lambda: base(rows=2 * ROWS).split(13)[::2],
    "overlapping": lambda: [base(rows=2 * ROWS)[i : i + 40] for i in (0, 20, 40)],
    "the same twice": lambda: [base()] * 2,
    "each with a storage of its own": lambda: [x.clone() for x in base().split(SIDE_BY_SIDE)],
    "out of one buffer": out_of_one_buffer,
    "columns": lambda: base(rows=2 * ROWS).split(64, dim=1),
    "no more than 64 KiB": lambda: base(rows=64).split([20, 1, 43]),
    "expanded": lambda: [base(rows=1).expand(ROWS, WIDTH)] * 2,
}


@pytest.mark.parametrize("make", NOT_ADJACENT.values(), ids=NOT_ADJACENT.keys())
def test_any_other_leaves_are_copied(make):
    leaves = make()
    batch = batch_of(leaves, Flat())
    assert torch.equal(batch, torch.cat(list(leaves)))
    assert not any(shares(batch, leaf) for leaf in leaves)


def test_leaves_out_of_one_buffer_are_joined_beside_other_fields():
    leaves = out_of_one_buffer()
    items = [{"a": torch.tensor([i]), "x": leaf, "z": leaf} for i, leaf in enumerate(leaves)]
    fields = {"a": Batched(keep_on_cpu=True), "x": Flat(), "z": Flat(keep_on_cpu=True)}
    before = stats()
    [(_, batch)] = groups_of(items, fields)
    after = stats()
    assert batch["a"].tolist() == [[0], [1], [2]]
    assert torch.equal(batch["x"], base())
    assert torch.equal(batch["z"], base())
    assert list(batch) == ["a", "x", "z"]
    assert after["fields"]["view"] == before["fields"]["view"]
    reasons = [found["reference_reasons"].get("side_by_side", 0) for found in (before, after)]
    assert reasons[1] - reasons[0] == 2


def test_it_counts_as_a_view_and_explain_says_so():
    def explained(leaves: Any) -> tuple[str, int, str]:
        items = from_plain([{"x": leaf} for leaf in leaves], {"x": Flat()})
        [group] = explain(items).groups
        [field] = group.fields
        return field.way, field.copied, field.why

    before = stats()
    batch_of(base().split(SIDE_BY_SIDE), Flat())
    after = stats()
    assert after["fields"]["view"] - before["fields"]["view"] == 1
    assert after["bytes_gathered"] == before["bytes_gathered"]
    view = ("view", 0, "flat: 3 items that lie side by side in one tensor")
    assert explained(base().split(SIDE_BY_SIDE)) == view
    assert explained(out_of_one_buffer())[:2] == ("reference", 0)
    assert "side by side" in explained(out_of_one_buffer())[2]


def test_plain_mappings_are_always_copied():
    whole = base()
    items = [{"x": leaf} for leaf in whole.split(SIDE_BY_SIDE)]
    batch = collate(items, {"x": Flat()})["x"]
    assert torch.equal(batch, whole)
    assert not shares(batch, whole)


def test_two_fields_of_the_same_leaves_are_two_views_beside_others():
    whole = base()
    items = [
        {"n": torch.tensor(i), "x": leaf, "y": leaf, "s": "one"}
        for i, leaf in enumerate(whole.split(SIDE_BY_SIDE))
    ]
    fields = {"n": Batched(keep_on_cpu=True), "x": Flat(), "y": Flat(), "s": Shared()}
    [(_, batch)] = groups_of(items, fields, device="cpu")
    assert shares(batch["x"], whole)
    assert shares(batch["y"], whole)
    assert torch.equal(batch["y"], whole)
    assert (batch["n"].tolist(), batch["s"]) == ([0, 1, 2], "one")


def test_a_view_is_no_inference_tensor_where_a_fresh_one_is_none():
    usual = base()
    with torch.inference_mode():
        made_there = base()
        inside = batch_of(made_there.split(SIDE_BY_SIDE), Flat())
        of_usual = batch_of(usual.split(SIDE_BY_SIDE), Flat())
    assert inside.is_inference()
    assert shares(inside, made_there)
    assert shares(of_usual, usual)
    outside = batch_of(made_there.split(SIDE_BY_SIDE), Flat())
    assert not outside.is_inference()
    assert not shares(outside, made_there)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_leaves_that_require_a_gradient_are_copied(mode):
    # A view of them would require one, too.
    whole = base().requires_grad_()
    leaves = whole.split(SIDE_BY_SIDE)
    with mode():
        batch = batch_of(leaves, Flat())
        plugin._verified_batch_mm_items(from_plain([{"x": x} for x in leaves], {"x": Flat()}))
    assert not batch.requires_grad
    assert not shares(batch, whole)
    assert torch.equal(batch, whole)
    with pytest.raises(RuntimeError, match="requires grad"):
        batch_of(leaves, Flat())
    with pytest.raises(CollateRuntimeError, match="requires grad"):
        collate([{"x": leaf} for leaf in leaves], {"x": Flat()})


def test_attributes_of_a_tensor_are_not_taken_for_its_methods():
    whole = base()
    leaves = whole.split(SIDE_BY_SIDE)
    for leaf in leaves:
        for name in (
            "as_strided",
            "untyped_storage",
            "is_inference",
            "is_neg",
            "data_ptr",
            "stride",
        ):
            setattr(leaf, name, lambda *_: pytest.fail("called"))
    batch = batch_of(leaves, Flat())
    assert torch.equal(batch, whole)
    numbers = [torch.tensor(2.0), torch.tensor(3.0)]
    for number in numbers:
        number.is_neg = lambda: pytest.fail("called")
    assert batch_of(numbers, Batched()).tolist() == [2, 3]


def test_nothing_is_a_view_of_what_goes_to_a_device():
    device = FakeDevice()
    whole = base()
    items = from_plain([{"x": leaf} for leaf in whole.split(SIDE_BY_SIDE)], {"x": Flat()})
    batch = collate(items, device=device, pin_memory=True)["x"]
    device.synchronize()
    assert not shares(batch, whole)
    assert torch.equal(batch.as_subclass(torch.Tensor), whole)


def test_one_item_more_that_is_elsewhere_makes_it_a_copy():
    leaves = [*base().split(SIDE_BY_SIDE), torch.zeros(1, WIDTH)]
    batch = batch_of(leaves, Flat())
    assert torch.equal(batch, torch.cat(leaves))


def test_empty_slices_between_others_change_nothing():
    whole = base()
    batch = batch_of(whole.split([20, 0, 45, 0]), Flat())
    assert torch.equal(batch, whole)


@pytest.mark.parametrize(("value", "is_view"), [("1", False), ("0", True), ("", True)])
def test_it_can_be_switched_off(value, is_view, monkeypatch):
    monkeypatch.setenv("MMCOLLATE_NO_ALIAS", value)
    plugin.collator.cache_clear()
    whole = base()
    batch = batch_of(whole.split(SIDE_BY_SIDE), Flat())
    assert torch.equal(batch, whole)
    assert shares(batch, whole) == is_view


class TestVerification:
    """``MMCOLLATE_VERIFY`` takes the view for what it is, and nothing else for it."""

    def verified(self, leaves: Any, monkeypatch: Any, ours: Any = None) -> torch.Tensor:
        if ours is not None:
            monkeypatch.setattr(plugin, "batch_mm_items", lambda items, **_: {"x": ours})
        items = from_plain([{"x": leaf} for leaf in leaves], {"x": Flat()})
        return plugin._verified_batch_mm_items(items, device="cpu")["x"]

    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
    def test_a_view_passes(self, monkeypatch, mode):
        whole = base()
        with mode():
            assert shares(self.verified(whole.split(SIDE_BY_SIDE), monkeypatch), whole)

    def test_its_bytes_are_compared(self, monkeypatch):
        whole = base(rows=ROWS + 1)
        with pytest.raises(errors.VerificationError, match="bytes that differ"):
            self.verified(whole[1:].split(SIDE_BY_SIDE), monkeypatch, ours=whole[:-1])

    def test_the_memory_of_one_item_is_not_taken_for_a_view_over_all(self, monkeypatch):
        leaves = [base(), base()[:0]]
        with pytest.raises(errors.VerificationError, match="in memory of an item"):
            self.verified(leaves, monkeypatch, ours=leaves[0].view(ROWS, WIDTH))

    def test_an_inference_tensor_where_none_is_expected_is_a_difference(self, monkeypatch):
        with torch.inference_mode():
            whole = base()
        with pytest.raises(errors.VerificationError, match="is_inference"):
            self.verified(whole.split(SIDE_BY_SIDE), monkeypatch, ours=whole.view(ROWS, WIDTH))

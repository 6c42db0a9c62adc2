"""explain() says beforehand exactly what collating will do, and does nothing itself."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mmcollate
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmcollate import Batched, Flat, Plan, Shared, collate_groups, explain
from mmcollate.explanation import REASONS
from processes import resident

REASON_RS = Path(__file__).parents[1] / "rust" / "src" / "python" / "reason.rs"

# A field, and its value in the item of each index.
CASES: dict[str, tuple[mmcollate.Field, Callable[[int], Any]]] = {
    "stacked": (Batched(), lambda i: torch.arange(3) + i),
    "kept": (Batched(keep_on_cpu=True), lambda i: torch.tensor([1, i, i])),
    "kept numbers": (Batched(keep_on_cpu=True), lambda i: torch.tensor(i / 2)),
    "kept rows": (Flat(keep_on_cpu=True), lambda i: torch.ones(i, 3)),
    "strided": (Batched(), lambda i: torch.arange(12.0).reshape(3, 4).t() + i),
    "rows": (Flat(), lambda i: torch.full((i, 5), i, dtype=torch.bfloat16)),
    "columns": (Flat(dim=-1), lambda i: torch.full((2, i + 1), i, dtype=torch.uint8)),
    "padded": (Flat(), lambda i: torch.ones(i + 1, 3 - i % 2)),
    "empty": (Flat(), lambda i: torch.ones(0, 3)),
    "ragged": (Batched(), lambda i: torch.arange(i + 1)),
    "array": (Batched(), lambda i: np.full((2, 2), i, dtype=np.uint16)),
    "words": (Batched(), lambda i: f"item {i}"),
    "nothing": (Batched(keep_on_cpu=True), lambda i: None),
    "lists": (Batched(), lambda i: [torch.ones(i), i]),
    "joined lists": (Flat(), lambda i: [torch.ones(i), torch.ones(2)]),
    "equal": (Shared(), lambda i: torch.tensor([3, 4])),
    "pairwise equal": (Shared(keep_on_cpu=True), lambda i: i // 2),
    "casts": (Batched(), lambda i: torch.ones(2, dtype=(torch.float64, torch.float32)[i % 2])),
    "mixed": (Batched(), lambda i: (torch.ones(2), 5)[i % 2]),
    "expanded": (Batched(), lambda i: torch.tensor([i]).expand(4)),
    "complex": (Flat(), lambda i: torch.tensor([1j * i])),
    "subclass": (Batched(), lambda i: torch.nn.Parameter(torch.ones(2), requires_grad=False)),
}


def quietly(*args: Any, **kwargs: Any) -> Plan:
    return explain(*args, file=io.StringIO(), **kwargs)


def buffers_are_as_announced(plan: Plan, batches: list[dict[str, Any]]) -> None:
    """Each output of one buffer lies at its offset from the same start."""
    for group, batch in zip(plan.groups, batches, strict=True):
        starts: dict[int | None, set[int]] = {}
        for field in group.fields:
            if field.way == "gather":
                assert batch[field.name].nbytes == field.copied
                if field.copied:
                    start = batch[field.name].data_ptr() - (field.offset or 0)
                    starts.setdefault(field.buffer, set()).add(start)
            else:
                assert (field.copied, field.buffer, field.offset) == (0, None, None)
        assert all(len(found) == 1 for found in starts.values())
        assert len(set().union(*starts.values())) == len(starts)


@given(
    names=st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=6, unique=True),
    count=st.integers(1, 5),
    device=st.sampled_from([None, "cpu", torch.device("cpu"), "meta"]),
    two_modalities=st.booleans(),
)
def test_what_is_announced_is_what_is_counted(names, count, device, two_modalities):
    items = [{name: CASES[name][1](i) for name in names} for i in range(count)]
    fields = {name: CASES[name][0] for name in names}
    modalities = [("image", "video")[i > 1] for i in range(count)] if two_modalities else None
    options = {"modalities": modalities, "device": device}

    mmcollate.reset_stats()
    nothing = mmcollate.stats()
    plan = quietly(items, fields, **options)
    assert mmcollate.stats() == nothing
    groups = list(collate_groups(items, fields, **options))
    counted = mmcollate.stats()

    announced = [(group.modality, group.num_items) for group in plan.groups]
    assert announced == [(group.modality, group.num_items) for group in groups]
    assert [[field.name for field in group.fields] for group in plan.groups] == [
        list(group.batch) for group in groups
    ]
    planned = [field for group in plan.groups for field in group.fields]
    ways = {way: number for way, number in counted["fields"].items() if number}
    assert Counter(field.way for field in planned) == ways
    reasons = {REASONS[name]: number for name, number in counted["reference_reasons"].items()}
    assert Counter(field.why for field in planned if field.way == "reference") == reasons
    assert sum(field.copied for field in planned) == counted["bytes_gathered"]
    assert (len(groups), count) == (counted["batches"], counted["items"])
    buffers_are_as_announced(plan, [group.batch for group in groups])


def test_each_way_is_what_it_says():
    one = {name: make(2) for name, (_, make) in CASES.items()}
    fields = {name: field for name, (field, _) in CASES.items()}
    seen = set()
    for items in ([one], [one, {name: make(3) for name, (_, make) in CASES.items()}]):
        plan = quietly(items, fields)
        [group] = collate_groups(items, fields)
        for field in plan.groups[0].fields:
            seen.add(field.way)
            out, first = group.batch[field.name], items[0][field.name]
            if field.way == "alias" and isinstance(first, torch.Tensor):
                assert out is first
            elif field.way == "view" and isinstance(first, torch.Tensor):
                assert out.data_ptr() == first.data_ptr()
            elif field.way == "gather":
                assert isinstance(out, torch.Tensor)
                assert out.untyped_storage().nbytes() == field.copied
            elif field.way == "list":
                assert type(out) is list
    assert seen == {"alias", "view", "list", "gather", "reference"}


def test_prints_the_plan_it_returns(capsys):
    items = [
        {"pixels": torch.zeros(rows, 300), "grid": torch.tensor([1, rows, rows]), "name": "a"}
        for rows in (2, 4)
    ]
    fields = {"pixels": Flat(), "grid": Batched(keep_on_cpu=True), "name": Batched()}
    plan = explain(items, fields, modalities=["image", "image"])
    printed = capsys.readouterr().out
    assert printed == f"{plan}\n"
    header, *rows = [line.split(maxsplit=1) for line in printed.splitlines()]
    assert header[0] == "items"
    assert rows[0][0] == "2"
    for row, name in zip(printed.splitlines()[1:], fields, strict=True):
        assert re.search(rf"\b{name}\b", row)
    assert re.search(r"pixels +device +gather +7,200 +7,200 +flat, 2 items of one dtype", printed)
    assert re.search(r"grid +cpu +gather +48 +48 +batched, 2 items of one dtype", printed)
    assert re.search(r"name +device +list +0 +0 +batched: not tensors alone", printed)


def test_prints_elsewhere_if_asked_to(capsys):
    file = io.StringIO()
    plan = explain([{"x": torch.ones(2)}], {"x": Batched()}, file=file)
    assert file.getvalue() == f"{plan}\n"
    assert capsys.readouterr().out == ""


def test_nothing_is_copied():
    # Memory that was never touched takes no room; reading or copying it would.
    leaf = torch.empty(1 << 30, dtype=torch.uint8)
    before = resident()
    plan = quietly([{"x": leaf}, {"x": leaf}], {"x": Batched()})
    [field] = plan.groups[0].fields
    assert (field.way, field.nbytes, field.copied) == ("gather", 2 << 30, 2 << 30)
    assert resident() - before < 64 << 20


def test_items_that_cannot_be_read_raise_as_in_collate():
    with pytest.raises(mmcollate.CollateKeyError) as raised:
        quietly([{"x": 1, "y": 2}], {"x": Batched()})
    assert (raised.value.field, raised.value.item) == ("y", 0)
    with pytest.raises(mmcollate.CollateTypeError) as raised:
        quietly([{"x": 1}, None], {"x": Batched()})
    assert raised.value.item == 1
    with pytest.raises(mmcollate.CollateValueError, match="3 modalities for 1 items"):
        quietly([{"x": 1}], {"x": Batched()}, modalities=["a"] * 3)


def test_what_only_computing_would_find_is_announced_as_the_references():
    items = [{"x": torch.ones(2, 3)}, {"x": torch.ones(2)}]
    [field] = quietly(items, {"x": Flat()}).groups[0].fields
    assert (field.way, field.why) == ("reference", REASONS["rank_mismatch"])
    with pytest.raises(mmcollate.CollateIndexError):
        mmcollate.collate(items, {"x": Flat()})


def reason_of(field: mmcollate.Field, *values: Any, **options: Any) -> str:
    [group] = quietly([{"x": value} for value in values], {"x": field}, **options).groups
    [planned] = group.fields
    return planned.why


def test_reasons_are_the_ones_that_apply():
    ones = torch.ones(2)
    assert reason_of(Flat(dim=1), [ones], [ones]) == REASONS["dim"]
    assert reason_of(Flat(dim=True), ones, ones) == REASONS["dim"]
    assert reason_of(Batched(keep_on_cpu=1), ones, ones) == REASONS["field_class"]
    assert reason_of(Batched(), ones, ones, pin_memory=0) == REASONS["pin_memory_type"]
    assert reason_of(Shared(), {"a": 1}, device="cpu") == REASONS["not_a_tensor"]
    assert reason_of(Shared(), [{"a": 1}], device="cpu") == REASONS["nested"]
    assert reason_of(Shared(), ones.to("meta"), device="cpu") == REASONS["not_on_cpu"]
    assert reason_of(Batched(), "a", "b") == "batched: not tensors alone"
    assert reason_of(Batched(), ones, torch.ones(3)) == "batched: no common shape"
    assert reason_of(Batched(), np.ones(2), np.ones(3)) == "batched: no common shape"


def test_strange_names_and_values_are_printed():
    class Refuses(torch.Tensor):
        def numel(self):
            raise NotImplementedError("not here")

    deep: list[Any] = [torch.ones(2)]
    for _ in range(40):
        deep = [deep]
    items = [{1: 2, "x": torch.ones(2).as_subclass(Refuses), (3, "y"): deep}]
    fields = {1: Batched(), "x": Batched(), (3, "y"): Batched()}
    plan = quietly(items, fields)
    assert [field.name for field in plan.groups[0].fields] == list(fields)
    assert [field.nbytes for field in plan.groups[0].fields] == [0, 0, 0]
    for name in fields:
        assert f" {name} " in str(plan)


def test_buffers_are_the_cores_own(monkeypatch):
    items = [{"x": torch.ones(2)}, {"x": torch.ones(2)}]
    [field] = quietly(items, {"x": Batched()}).groups[0].fields
    assert (field.buffer, field.offset) == (0, 0)
    monkeypatch.setenv("MMCOLLATE_SKIP_EXCHANGE_TABLE", "1")
    monkeypatch.setattr("mmcollate.collation._warned", True)
    mmcollate.collation.collator.cache_clear()
    try:
        [field] = quietly(items, {"x": Batched()}).groups[0].fields
        assert (field.way, field.buffer, field.offset) == ("gather", None, None)
    finally:
        mmcollate.collation.collator.cache_clear()


def test_large_kept_fields_have_their_own_memory():
    large, small = 64 << 10, 24
    items = [
        {"a": torch.ones(3), "large": torch.zeros(large // 8, dtype=torch.float32), "b": i}
        | {"c": torch.ones(3), "limit": torch.zeros(large // 8)}
        for i in range(2)
    ]
    items = [item | {"larger": torch.zeros(large // 8 + 1)} for item in items]
    fields = {name: Batched(keep_on_cpu=True) for name in items[0]}
    planned = {field.name: field for field in quietly(items, fields).groups[0].fields}
    assert {planned[name].buffer for name in ("a", "c", "limit", "large")} == {0}
    assert planned["larger"].buffer == 1
    assert planned["a"].copied == small
    [batch] = [group.batch for group in collate_groups(items, fields)]
    gap = batch["limit"].data_ptr() - batch["a"].data_ptr()
    assert gap == planned["limit"].offset - planned["a"].offset


def test_no_items_are_no_groups():
    assert quietly([], {"x": Batched()}).groups == ()


def test_every_reason_of_the_core_is_explained():
    named = re.findall(r'^ +\w+ => "(\w+)",$', REASON_RS.read_text(), re.MULTILINE)
    assert len(named) > 10
    assert list(REASONS) == named


def test_the_engines_items_are_explained_without_fields():
    inputs = pytest.importorskip("vllm.multimodal.inputs", reason="needs vLLM")
    batched = inputs.MultiModalBatchedField(keep_on_cpu=True)
    flat = inputs.MultiModalFlatField(slices=[], dim=0)

    def item(rows: int) -> Any:
        elem = inputs.MultiModalFieldElem
        pixels, grid = torch.ones(rows, 3), torch.tensor([1, rows])
        return inputs.MultiModalKwargsItem({"a": elem(pixels, flat), "b": elem(grid, batched)})

    [group] = quietly([item(1), item(2)]).groups
    assert [(f.name, f.placement, f.way, f.copied) for f in group.fields] == [
        ("a", "device", "gather", 36),
        ("b", "cpu", "gather", 32),
    ]

    class Other(inputs.MultiModalKwargsItem):
        pass

    [group] = quietly([Other(item(1).data)]).groups
    assert [(f.way, f.why) for f in group.fields] == [("reference", REASONS["item_class"])]

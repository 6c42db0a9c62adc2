"""The items of 42 model families, collated as the engine does it."""

from __future__ import annotations

import mmcollate
import pytest
import torch
from compare import assert_same, assert_same_outcome
from families import FAMILIES, SETS, fields_of, items_of_set, mixed_items, shrink, sliced

DEVICES = [None, "cpu", "meta"]


def check(items, fields, device):
    """Ours against plain torch always, and against the engine where it is installed."""
    inputs = [x for each in items for x in each.values()]
    options = {"device": device}
    assert_same_outcome(
        lambda: [tuple(g)[1:] for g in mmcollate.collate_groups(items, fields, **options)],
        lambda: list(mmcollate.reference.collate_groups(items, fields, **options)),
        inputs=inputs,
    )
    engine_items = pytest.importorskip(
        "vllm_items", reason="compared with plain torch only: needs vLLM"
    )
    return engine_items.same_groups(engine_items.from_plain(items, fields), **options).result


def test_the_file_covers_the_families_it_says():
    assert len(FAMILIES) == 42
    for family, x in FAMILIES.items():
        declared, used = (
            set(x["fields"]),
            {name for each in x["sets"].values() for shapes in each["items"] for name in shapes},
        )
        assert declared == used, family
    kinds = [f["kind"] for x in FAMILIES.values() for f in x["fields"].values()]
    assert set(kinds) == {"batched", "flat", "shared"}


def test_shrinking_keeps_equal_and_different_sizes_so():
    sizes = [1, 3, 8, 9, 14, 1024, 1176, 5476, 10764]
    assert sorted({shrink(x) for x in sizes}) == [shrink(x) for x in sizes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2, 7, 33])
@pytest.mark.parametrize(("family", "name"), SETS)
def test_items_of_mixed_sizes(family, name, n, device):
    fields = fields_of(family)
    ((count, batch),) = check(items_of_set(family, name, n), fields, device)
    assert count == n
    for field, value in batch.items():
        if device == "meta" and isinstance(value, torch.Tensor):
            assert value.device.type == ("cpu" if fields[field].keep_on_cpu else "meta")


@pytest.mark.parametrize(("family", "name"), SETS)
def test_items_of_one_size(family, name):
    items = items_of_set(family, name, 4, mixed=False)
    ((_, batch),) = check(items, fields_of(family), None)
    for field, spec in fields_of(family).items():
        value = items[0].get(field)
        if isinstance(spec, mmcollate.Batched) and isinstance(value, torch.Tensor):
            assert batch[field].shape == (4, *value.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize(("family", "name"), SETS)
def test_pixels_of_another_dtype(family, name, dtype):
    check(items_of_set(family, name, 3, model_dtype=dtype), fields_of(family), "cpu")


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("family", "name"), SETS)
def test_items_that_are_slices_of_what_a_processor_returned(family, name, mixed):
    fields = fields_of(family)
    check(sliced(items_of_set(family, name, 5, mixed=mixed), fields), fields, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_and_embeddings_and_modalities_in_turn(family, device):
    fields = fields_of(family)
    modalities, items = zip(*mixed_items(family, 13), strict=True)
    groups = list(mmcollate.collate_groups(items, fields, modalities=modalities, device=device))
    assert sum(g.num_items for g in groups) == 13
    start = 0
    for group in groups:
        members = items[start : start + group.num_items]
        assert set(modalities[start : start + group.num_items]) == {group.modality}
        assert_same(
            group.batch,
            mmcollate.reference.collate(members, fields, device=device),
            inputs=[x for each in members for x in each.values()],
        )
        start += group.num_items
    engine_items = pytest.importorskip(
        "vllm_items", reason="compared with plain torch only: needs vLLM"
    )
    engine_items.same_groups(engine_items.from_plain(items, fields), device=device)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_item_many_times_as_in_memory_profiling(family):
    for name in FAMILIES[family]["sets"]:
        check(items_of_set(family, name, 1) * 5, fields_of(family), "cpu")

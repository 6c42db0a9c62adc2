"""What was left out on purpose, what got lost, and what is required."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import subprocess
import sys
from collections import UserDict
from typing import Any, NamedTuple

import mmcollate
import numpy as np
import pytest
import torch
from compare import assert_same
from mmcollate import (
    OMITTED,
    Batched,
    CollateKeyError,
    CollateTypeError,
    CollateValueError,
    Flat,
    MMCollateError,
    Present,
    Shared,
    arena_stats,
    collate,
    collate_groups,
    explain,
    presence,
    reference,
    stage,
    staging,
)
from mmcollate.omitting import Omitted
from mmcollate.testing import FakeDevice

FIELDS: dict[str, Any] = {
    "pixels": Flat(),
    "grid": Batched(keep_on_cpu=True),
    "token": Shared(keep_on_cpu=True),
    "name": Batched(),
}


def image(k: int, **values: Any) -> dict[str, Any]:
    pixels = torch.full((k % 3 + 1, 4), float(k))
    whole = {"pixels": pixels, "grid": torch.tensor([1, k]), "token": 7, "name": f"image {k}"}
    return whole | values


def lean(k: int) -> dict[str, Any]:
    return image(k, pixels=OMITTED)


def every(names: Any, indices: list[int]) -> dict[str, list[int]]:
    return dict.fromkeys(names, indices)


def raised(call: Any, *args: Any, **options: Any) -> MMCollateError:
    with pytest.raises(MMCollateError) as caught:
        list(call(*args, **options))
    return caught.value


def vllm_items(items: Any, fields: Any = FIELDS) -> list[Any]:
    pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")
    from vllm_items import from_plain

    return [x if x in (None, OMITTED) else from_plain([x], fields)[0] for x in items]


# The marker


def test_there_is_one_marker():
    assert Omitted() is OMITTED
    assert repr([OMITTED]) == "[OMITTED]"
    assert copy.copy(OMITTED) is OMITTED
    assert copy.deepcopy({"x": [OMITTED]})["x"][0] is OMITTED
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps({"x": OMITTED}, protocol))["x"] is OMITTED
    with pytest.raises(AttributeError):
        OMITTED.value = 1


def test_it_is_itself_in_another_process():
    script = "import pickle, sys; found = pickle.load(sys.stdin.buffer)"
    script += "; import mmcollate; assert found is mmcollate.OMITTED"
    subprocess.run([sys.executable, "-c", script], input=pickle.dumps(OMITTED), check=True)


# An error, unless asked otherwise


@pytest.mark.parametrize("how", [collate, collate_groups, stage, explain])
def test_what_is_left_out_is_an_error(how):
    options = {"device": FakeDevice()} if how is stage else {}
    error = raised(how, [image(1), OMITTED], FIELDS, **options)
    assert type(error) is CollateTypeError
    assert (error.item, error.field, error.omitted) == (1, None, True)
    assert "found OMITTED" in str(error) and "left out on purpose" in str(error)
    error = raised(how, [image(1), image(2), lean(3)], FIELDS, **options)
    assert type(error) is CollateTypeError
    assert (error.item, error.field, error.omitted) == (2, "pixels", True)
    assert "missing='omit'" in str(error)


@pytest.mark.parametrize("name", FIELDS)
def test_a_marker_is_found_in_any_field_and_in_lists(name):
    for value in (OMITTED, [1, (OMITTED,)]):
        for items in ([image(1, **{name: value})], [image(1), image(1, **{name: value}), image(1)]):
            error = raised(collate, items, FIELDS, modality="image")
            assert (error.field, error.item) == (name, len(items) // 2)
            assert str(error).startswith(
                f"modality 'image', field {name!r}, item {len(items) // 2}: "
            )


def test_what_got_lost_is_told_apart():
    error = raised(collate, [image(1), None], FIELDS)
    assert (type(error), error.item, error.omitted) == (CollateTypeError, 1, False)
    assert (
        "None is a payload that got lost; what is left out on purpose is mmcollate.OMITTED"
        in str(error)
    )
    error = raised(collate, [image(1), image(2, pixels=None)], FIELDS)
    assert (error.field, error.item, error.omitted) == ("pixels", 1, False)
    assert "got lost" in str(error)
    # As ever, None is a value where the field's kind takes any.
    assert collate([image(1, name=None)], FIELDS)["name"] == [None]


@pytest.mark.parametrize("missing", ["omit", "split"])
def test_what_got_lost_is_never_omitted(missing):
    error = raised(collate, [OMITTED, image(1), None], FIELDS, missing=missing)
    assert (type(error), error.item, error.omitted) == (CollateTypeError, 2, False)
    assert "got lost" in str(error)


def test_nothing_is_asked_of_items_that_are_all_there(monkeypatch):
    """The default costs nothing: no Python code sees an item or a value."""
    from mmcollate import collation, presence

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("called")

    items = [image(k) for k in range(1, 4)]
    for name, value in list(vars(presence).items()):
        if (
            callable(value)
            and getattr(value, "__module__", "") == presence.__name__
            and name != "Context"
        ):
            monkeypatch.setattr(presence, name, never)
    monkeypatch.setattr(collation, "_normalize", never)
    collation.collator.cache_clear()
    try:
        assert collate(items, FIELDS)["grid"].tolist() == [[1, 1], [1, 2], [1, 3]]
        assert len(list(collate_groups(items, FIELDS))) == 1
    finally:
        collation.collator.cache_clear()


@pytest.mark.parametrize("how", [collate, collate_groups])
def test_an_unknown_way_to_treat_it(how):
    error = raised(how, [image(1)], FIELDS, missing="drop")
    assert type(error) is CollateValueError
    assert "missing is 'drop', expected one of 'error', 'split'" in str(error)


# "omit"


def test_the_others_are_collated_with_their_indices():
    found = collate([OMITTED, image(1), OMITTED, image(2)], FIELDS, missing="omit")
    assert isinstance(found, Present)
    batch, indices = found
    assert_same(batch, collate([image(1), image(2)], FIELDS))
    assert indices == every(FIELDS, [1, 3])
    assert list(batch) == list(indices) == list(FIELDS)
    assert found.items == [1, 3]


def test_a_field_is_of_the_items_that_have_it():
    items = [lean(1), image(2, name=OMITTED), OMITTED, image(3)]
    found = collate(items, FIELDS, missing="omit")
    assert found.indices == {
        "pixels": [1, 3],
        "grid": [0, 1, 3],
        "token": [0, 1, 3],
        "name": [0, 3],
    }
    assert list(found.batch) == list(FIELDS)
    assert found.batch["grid"].tolist() == [[1, 1], [1, 2], [1, 3]]
    assert found.batch["name"] == ["image 1", "image 3"]
    assert torch.equal(found.batch["pixels"], torch.cat([image(k)["pixels"] for k in (2, 3)]))
    assert found.items == [0, 1, 3]
    # No list is shared.
    found.indices["grid"].clear()
    assert found.indices["token"] == [0, 1, 3]


@pytest.mark.parametrize("items", [[], [OMITTED], [OMITTED] * 3, [{}], [{"grid": OMITTED}]])
def test_nothing_is_there(items):
    assert collate(items, FIELDS, missing="omit") == ({}, {})
    assert collate(items, FIELDS, missing="split") == []


def by_hand(items: list[Any], fields: Any = FIELDS) -> Present:
    """What ``"omit"`` gives, field by field, in plain torch."""
    rows = [(k, x) for k, x in enumerate(items) if x is not OMITTED]
    batch, indices = {}, {}
    for name in rows[0][1] if rows else ():
        there = [(k, x[name]) for k, x in rows if x[name] is not OMITTED]
        if there:
            indices[name] = [k for k, _ in there]
            batch[name] = reference.reduce(fields[name], [value for _, value in there])
    return Present(batch, indices)


def random_items(rng: random.Random) -> list[Any]:
    def one(k: int) -> Any:
        if rng.random() < 0.2:
            return OMITTED
        return {name: OMITTED if rng.random() < 0.3 else x for name, x in image(k).items()}

    return [one(k) for k in range(rng.randint(0, 6))]


@pytest.mark.parametrize("seed", range(60))
def test_random_items_as_field_by_field_in_plain_torch(seed):
    items = random_items(random.Random(seed))
    before = [x if x is OMITTED else dict(x) for x in items]
    for _ in range(2):
        found = collate(items, FIELDS, missing="omit")
        expected = by_hand(items)
        assert_same(found.batch, expected.batch)
        assert found.indices == expected.indices
        assert list(found.batch) == list(found.indices) == list(expected.batch)
    assert all(
        x is OMITTED or list(x.values()) == list(y.values())
        for x, y in zip(items, before, strict=True)
    )


@pytest.mark.parametrize("missing", ["omit", "split"])
def test_on_a_device(missing):
    items = [image(1), lean(2), OMITTED, image(3)]
    device = FakeDevice()
    ours = collate(items, FIELDS, missing=missing, device=device, pin_memory=True)
    device.synchronize()
    assert_same(ours, collate(items, FIELDS, missing=missing), strides=False)
    assert device.bytes_copied > 0


SLOT = 4 << 10
WIDE: dict[str, Any] = {
    "pixels": Flat(),
    "mask": Batched(),
    "tiles": Batched(),
    "ragged": Batched(),
    "kept": Batched(keep_on_cpu=True),
    "kept_flat": Flat(keep_on_cpu=True),
    "image_embeds": Flat(),
    "token": Shared(),
}


def wide_item(rng: random.Random, k: int, nbytes: int) -> dict[str, Any]:
    """An item with about so many bytes for each of the device's fields, none of them alike."""
    generator = torch.Generator().manual_seed(k)

    def noise(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8).to(dtype)

    return {
        "pixels": noise(nbytes + rng.randint(-3, 3)),
        "mask": noise(max(nbytes // 4, 1), dtype=torch.float32),
        "tiles": [noise(rng.randint(0, nbytes // 2 + 1)) for _ in range(rng.randint(0, 3))],
        "ragged": noise(rng.randint(1, 3), nbytes // 8 + 1, dtype=torch.int16),
        "kept": noise(3, dtype=torch.int64),
        "kept_flat": noise(rng.randint(0, nbytes // 4), 2),
        "image_embeds": noise(rng.randint(0, 2), nbytes // 4 + 1, dtype=torch.bfloat16),
        "token": torch.arange(nbytes // 16 + 1),
    }


def arena_of(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """Arenas made from here on have so many slots; batches of any size are staged."""
    mib = 1 << 20
    monkeypatch.setenv("MMCOLLATE_STAGING_CHUNK_MB", repr(SLOT / mib))
    monkeypatch.setenv("MMCOLLATE_PINNED_MAX_MB", repr(slots * SLOT / mib))
    monkeypatch.setattr(staging, "SMALL_COUNT", 1)


def with_gaps(rng: random.Random, nbytes: int, share: float) -> list[Any]:
    return [
        OMITTED
        if rng.random() < share
        else {
            name: OMITTED if rng.random() < share else value
            for name, value in wide_item(rng, k, nbytes).items()
        }
        for k in range(rng.randint(1, 7))
    ]


def as_list(found: Any) -> list[Present]:
    return [found] if isinstance(found, Present) else found


def expected_of(items: list[Any], missing: str) -> Any:
    """As the reference has it, of the present items alone."""
    if missing == "omit":
        return by_hand(items, WIDE)
    sets: dict[frozenset[str], list[int]] = {}
    for k, x in enumerate(items):
        if x is not OMITTED and (there := frozenset(n for n in x if x[n] is not OMITTED)):
            sets.setdefault(there, []).append(k)
    return [
        Present(
            reference.collate(
                [{n: x for n, x in items[k].items() if n in names} for k in at], WIDE
            ),
            every([n for n in WIDE if n in names], at),
        )
        for names, at in sets.items()
    ]


@pytest.mark.parametrize("slots", [1, 2, 8, 64])
@pytest.mark.parametrize("missing", ["omit", "split"])
@pytest.mark.parametrize("around", [64, SLOT // 8, SLOT, 3 * SLOT])
@pytest.mark.parametrize("by", [-1, 0, 1])
@pytest.mark.parametrize("of_vllm", [False, True])
def test_large_batches_with_gaps_are_staged_as_the_present_items_alone(
    monkeypatch, of_vllm, by, around, missing, slots
):
    arena_of(monkeypatch, slots)
    device = FakeDevice(delay=1e-4)
    rng = random.Random(f"{around} {by} {missing} {slots}")
    left = []
    for share in (0.0, 0.2, 0.2, 0.5):
        items = with_gaps(rng, around + by, share)
        given, fields = (vllm_items(items, WIDE), None) if of_vllm else (items, WIDE)
        ours = collate(given, fields, missing=missing, device=device, pin_memory=True)
        expected = expected_of(items, missing)
        left.append((ours, expected))
        # What is kept on the CPU is there at once.
        for mine, other in zip(*map(as_list, (ours, expected)), strict=True):
            for name in {"kept", "kept_flat"} & {*other.batch}:
                assert_same(mine.batch[name], other.batch[name], strides=False)
    # The device reads late: a slot that was used again too early would show.
    device.synchronize()
    for ours, expected in left:
        assert_same(ours, expected, strides=False)
    few = 1 if around < SLOT else min(slots, 2)
    assert few * SLOT <= device.peak_pinned_bytes <= slots * SLOT
    stats = arena_stats(device)
    assert (stats["leased"], stats["in_flight"]) == (0, 0)
    assert mmcollate.stats()["fields"]["stage"] > 0


@pytest.mark.parametrize(
    "kind", [UserDict, lambda x: {k: v.numpy() if k == "grid" else v for k, v in x.items()}]
)
def test_items_of_other_kinds(kind):
    items = [image(1), lean(2), image(3)]
    ours = collate([kind(x) for x in items], FIELDS, missing="omit")
    assert_same(ours, collate(items, FIELDS, missing="omit"))


@pytest.mark.parametrize("missing", ["omit", "split"])
def test_errors_name_the_items_as_they_were_given(missing):
    bad = image(2, grid=torch.zeros(2).requires_grad_())
    error = raised(collate, [OMITTED, image(1), OMITTED, bad], FIELDS, missing=missing)
    assert (error.field, error.item) == ("grid", 3)
    assert ", item 3 (" in str(error)
    bad = image(2, pixels=torch.zeros(1))
    error = raised(collate, [OMITTED, image(1), OMITTED, bad], FIELDS, missing=missing)
    assert (error.field, error.item) == ("pixels", 3)
    assert "expected 2 dimensions as item 1 has" in str(error)
    error = raised(
        collate, [OMITTED, image(1), OMITTED, image(2, token=8)], FIELDS, missing=missing
    )
    assert (error.field, error.item) == ("token", 3)
    assert "not equal to item 1's" in str(error)
    error = raised(
        collate,
        [OMITTED, image(1, token=[[]]), OMITTED, image(2, token={1: np.ones(2)})],
        FIELDS,
        missing=missing,
    )
    assert error.item == 3
    error = raised(collate, [OMITTED, image(1), 5], FIELDS, missing=missing)
    assert (error.item, "found int" in str(error)) == (2, True)
    error = raised(collate, [OMITTED, image(1, more=OMITTED)], FIELDS, missing=missing)
    assert (type(error), error.field, error.item) == (CollateKeyError, "more", 1)
    error = raised(collate, [OMITTED, image(1, more=1)], FIELDS, missing=missing)
    assert (type(error), error.field, error.item) == (CollateKeyError, "more", 1)
    array = np.array(["a"])
    error = raised(collate, [OMITTED, image(1), image(1, name=array)], FIELDS, missing=missing)
    assert (error.field, error.item) == ("name", 2)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    error = raised(collate, [OMITTED, image(1), image(1, name=deep)], FIELDS, missing=missing)
    assert (error.field, error.item) == ("name", 2)


@pytest.mark.parametrize(
    ("two", "name"), [({"grid": 1}, "pixels"), (image(1, more=OMITTED), "more")]
)
def test_a_name_that_is_not_there_was_not_left_out(two, name):
    fields = FIELDS | {"more": Batched()}
    error = raised(collate, [image(1), OMITTED, two], fields, missing="omit")
    assert (type(error), error.field, error.item) == (CollateKeyError, name, 2)
    assert "unlike item 0" in str(error)


@pytest.mark.parametrize("missing", ["omit", "split"])
def test_fields_and_modality_are_checked_first(missing):
    assert "fields are list" in str(raised(collate, [image(1)], [Flat()], missing=missing))
    assert "the modality is int" in str(
        raised(collate, [image(1)], FIELDS, missing=missing, modality=3)
    )
    assert "found dict" in str(raised(collate, image(1), FIELDS, missing=missing))
    assert "and no fields" in str(raised(collate, [OMITTED, image(1)], missing=missing))


# "split"


def test_one_batch_for_each_set_of_fields():
    items = [image(1), lean(2), OMITTED, image(3), lean(4), image(5, grid=OMITTED)]
    full, leans, last = collate(items, FIELDS, missing="split")
    assert_same(full.batch, collate([image(1), image(3)], FIELDS))
    assert full.indices == every(FIELDS, [0, 3])
    assert leans.indices == every(["grid", "token", "name"], [1, 4])
    assert leans.batch["grid"].tolist() == [[1, 2], [1, 4]]
    assert last.indices == every(["pixels", "token", "name"], [5])


@pytest.mark.parametrize("seed", range(30))
def test_each_item_that_has_something_is_in_one_batch(seed):
    items = random_items(random.Random(seed))
    found = collate(items, FIELDS, missing="split")
    there = [
        k
        for k, x in enumerate(items)
        if x is not OMITTED and any(v is not OMITTED for v in x.values())
    ]
    assert sorted(itertools.chain.from_iterable(x.items for x in found)) == there
    for one in found:
        plain = [{n: v for n, v in items[k].items() if v is not OMITTED} for k in one.items]
        assert_same(one.batch, collate(plain, FIELDS))
    names = [frozenset(one.batch) for one in found]
    assert len(set(names)) == len(names)


def test_groups_are_split_where_something_was_left_out():
    items = [image(1), image(2), lean(3), lean(4), OMITTED, OMITTED, image(5)]
    groups = list(collate_groups(items, FIELDS, missing="split", modalities=["image"] * 7))
    assert [(g.modality, g.num_items, sorted(g.batch)) for g in groups] == [
        ("image", 2, sorted(FIELDS)),
        ("image", 2, ["grid", "name", "token"]),
        ("image", 2, []),
        ("image", 1, sorted(FIELDS)),
    ]
    assert groups[1].batch["grid"].tolist() == [[1, 3], [1, 4]]
    error = raised(collate_groups, [image(1), OMITTED, None], FIELDS, missing="split")
    assert (error.item, error.omitted) == (2, False)
    error = raised(collate_groups, [image(1, more=OMITTED)], FIELDS, missing="split")
    assert (type(error), error.field) == (CollateKeyError, "more")
    assert "fields are int" in str(raised(collate_groups, [image(1)], 3, missing="split"))


# Required


@pytest.mark.parametrize("how", [collate, collate_groups, stage])
@pytest.mark.parametrize(
    ("item", "says", "omitted"),
    [
        (OMITTED, "OMITTED: left out on purpose", True),
        (None, "None: lost", False),
        (lean(2), "OMITTED: left out on purpose", True),
        (image(2, pixels=None), "None: lost", False),
        ({"grid": torch.tensor([1, 2]), "token": 7, "name": ""}, "no such field", False),
    ],
)
def test_what_is_required_and_missing_is_an_error(how, item, says, omitted):
    device = FakeDevice()
    options = {"device": device} if how is stage else {"device": device, "pin_memory": True}
    options |= {"modalities": ["image"] * 2} if how is collate_groups else {"modality": "image"}
    error = raised(how, [image(1), item], FIELDS, require=["pixels"], **options)
    assert (error.item, error.omitted) == (1, omitted)
    assert type(error) is CollateKeyError
    assert (error.field, error.missing) == ("pixels", ("pixels",))
    assert f"modality 'image', item 1: lacks 'pixels' ({says}), which is required" in str(error)


def test_all_missing_names_are_named():
    item = image(1, pixels=OMITTED, name=None)
    error = raised(collate, [image(1), item], FIELDS, require=["name", "grid", "pixels"])
    assert error.missing == ("name", "pixels")
    assert not error.omitted
    assert "lacks 'name' (None: lost), 'pixels' (OMITTED" in str(error)


def test_nothing_is_copied_of_a_batch_that_lacks_something():
    device = FakeDevice()
    items = [image(k, name=None) for k in range(1, 9)]
    groups = collate_groups(items, FIELDS, require=["name"], device=device, pin_memory=True)
    assert isinstance(raised(lambda: groups), CollateKeyError)
    assert device.copies == 0
    with pytest.raises(CollateKeyError):
        stage(items, FIELDS, require=["name"], device=device)
    assert device.copies == 0


def test_groups_before_the_one_that_lacks_something_are_collated():
    items = [image(1), image(2), {"grid": torch.tensor([1, 2])}]
    groups = collate_groups(items, FIELDS, require=(name for name in ["pixels", "grid"]))
    assert next(groups).num_items == 2
    error = raised(lambda: groups)
    assert (error.item, error.missing) == (2, ("pixels",))


def test_required_by_modality():
    items = [image(1), {"grid": torch.tensor([1, 2])}, {"name": "a"}]
    kinds = ["image", "grids", "names"]
    require = {"image": ["pixels", "grid"], "grids": ["grid"]}
    assert len(list(collate_groups(items, FIELDS, modalities=kinds, require=require))) == 3
    error = raised(
        collate_groups, items, FIELDS, modalities=kinds, require=require | {"names": ["grid"]}
    )
    assert (error.modality, error.item, error.missing) == ("names", 2, ("grid",))
    assert collate(items[:1], FIELDS, modality="audio", require=require)
    error = raised(collate, items[1:2], FIELDS, modality="image", require=require)
    assert error.missing == ("pixels",)
    error = raised(collate, items[:1], FIELDS, require=require)
    assert (type(error), "the items have none" in str(error)) == (CollateValueError, True)
    assert collate(items[:1], FIELDS, require={})


def test_what_is_there_is_as_without_require():
    items = [image(1), image(2)]
    assert_same(collate(items, FIELDS, require=list(FIELDS)), collate(items, FIELDS))
    assert collate([], FIELDS, require=["pixels"]) == {}
    assert collate([UserDict(image(1))], FIELDS, require=["grid"])["grid"].tolist() == [[1, 1]]
    error = raised(collate, [image(1), 5], FIELDS, require=["pixels"])
    assert "found int" in str(error)


@pytest.mark.parametrize("how", [collate, collate_groups])
@pytest.mark.parametrize(
    ("require", "kind", "says"),
    [
        ("pixels", CollateTypeError, "require is str, expected the names of fields"),
        (3, CollateTypeError, "require is int"),
        ({"image": "pixels"}, CollateTypeError, "put a single name into a list"),
        (["pixel"], CollateKeyError, "field 'pixel': required, but not declared; the fields are"),
    ],
)
def test_names_that_are_none(how, require, kind, says):
    for items in ([image(1)], []):
        error = raised(how, items, FIELDS, require=require)
        assert type(error) is kind
        assert says in str(error)


def test_an_item_left_out_of_a_required_field_is_left_out_of_all():
    items = [image(1), lean(2), OMITTED, image(3)]
    found = collate(items, FIELDS, missing="omit", require=["pixels"])
    assert found.indices == every(FIELDS, [0, 3])
    assert_same(found.batch, collate([image(1), image(3)], FIELDS))
    error = raised(
        collate, [*items, image(4, pixels=None)], FIELDS, missing="omit", require=["pixels"]
    )
    assert (error.item, error.omitted) == (4, False)
    without = {name: value for name, value in image(5).items() if name != "pixels"}
    for call, how in ((collate, {"missing": "omit"}), (collate, {}), (collate_groups, {})):
        error = raised(call, [image(1), without], FIELDS, require=["pixels"], **how)
        assert (error.item, error.missing, error.omitted) == (1, ("pixels",), False)
        assert "lacks 'pixels' (no such field), which is required" in str(error)
    # Split batches are all to be used.
    error = raised(collate, items, FIELDS, missing="split", require=["pixels"])
    assert (error.item, error.omitted) == (1, True)
    error = raised(collate, items[2:], FIELDS, missing="split", require=["pixels"])
    assert (error.item, error.omitted) == (0, True)


# vLLM's items


def test_vllm_items_are_treated_alike():
    items = [image(1), lean(2), OMITTED, image(3), image(4, token=OMITTED)]
    given = vllm_items(items)
    for missing in ("omit", "split"):
        assert_same(collate(given, missing=missing), collate(items, FIELDS, missing=missing))
    groups = [(g.num_items, g.batch) for g in collate_groups(given, missing="split")]
    assert_same(
        groups, [(g.num_items, g.batch) for g in collate_groups(items, FIELDS, missing="split")]
    )
    found = collate(given, missing="omit", require=["pixels", "token"])
    assert found.items == [0, 3]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_marker_in_vllm_items_is_an_error(name, device):
    for at, items in enumerate(
        ([image(1, **{name: OMITTED})], [image(1), image(1, **{name: OMITTED})])
    ):
        if name == "token" and at:
            continue  # the values differ, so that the items are no group
        for call in (collate, collate_groups):
            error = raised(call, vllm_items(items), device=device)
            assert (type(error), error.field, error.item) == (CollateTypeError, name, at)
            assert error.omitted


class Listed(list):  # type: ignore[type-arg]
    """A list of another class."""


class Pair(NamedTuple):
    left: Any
    right: Any


def in_itself() -> list[Any]:
    value: list[Any] = [1]
    value += [value, [value, OMITTED]]
    return value


def very_deep() -> list[Any]:
    value: list[Any] = [OMITTED]
    for _ in range(100_000):
        value = [value]
    return value


WITHIN: dict[str, Any] = {
    "list": [1, OMITTED],
    "tuple": (OMITTED,),
    "dict": {"a": OMITTED},
    "deep": [torch.ones(2), [("a", {"b": [OMITTED]})]],
    "beside tensors": [torch.ones(2), OMITTED],
    "list subclass": Listed([OMITTED]),
    "tuple subclass": Pair(1, OMITTED),
}
BOUND = {"cpu": lambda: "cpu", "none": lambda: None, "device": FakeDevice}
KINDS = {"batched": Batched, "flat": Flat, "shared": Shared}


ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "omit": (collate, {"missing": "omit", "modality": "image"}),
    "split": (collate, {"missing": "split", "modality": "image"}),
    "require": (collate, {"require": ["pixels"], "modality": "image"}),
    "staged": (stage, {"require": ["pixels"], "modality": "image"}),
    "groups": (collate_groups, {"missing": "split", "modalities": ["image"] * 2}),
    "groups require": (collate_groups, {"require": ["pixels"], "modalities": ["image"] * 2}),
}


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ASKED)
def test_a_marker_within_a_value_of_vllm_items_is_an_error(asked, kind, keep, within):
    if (kind, within) == ("flat", "dict"):
        return  # joined of a dict are its names alone
    items = with_value(kind, keep, within)
    before = [dict(item) for item in items]
    at = 0 if kind == "shared" else 1
    call, how = ASKED[asked]
    for to in BOUND if call is not stage else ["device"]:
        target = {"device": BOUND[to]()}
        if call is not stage:
            target["pin_memory"] = to == "device"
        error = raised(call, items, **how, **target)
        assert type(error) is CollateTypeError
        assert (error.modality, error.field, error.item, error.omitted) == ("image", "x", at, True)
        assert f"field 'x', item {at}: found OMITTED within a value" in str(error)
    assert [dict(item) for item in items] == before


def with_value(kind: str, keep: bool, within: str) -> list[Any]:
    """Two items; the value of the second, or of both if it is shared, has a marker in it."""
    fields = {"pixels": Flat(), "x": KINDS[kind](keep_on_cpu=keep)}
    value = WITHIN[within]
    other = value if kind == "shared" else [1]
    pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")
    from vllm_items import from_plain

    return from_plain([{"pixels": torch.ones(2, 4), "x": x} for x in (other, value)], fields)


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("kind", KINDS)
def test_without_asking_nothing_looks_into_lists(kind, within):
    """It would take longer than to collate them."""
    items = with_value(kind, True, within)
    from mmcollate.integrations import vllm as plugin

    assert_same(collate(items), plugin.originals()._batch_mm_items(items))


def test_an_exception_of_vllm_is_not_blamed_on_a_marker_within_another_value():
    from vllm_items import batched, flat, item

    mixed = [item(x=flat(torch.ones(2), dim=1)), item(x=flat([torch.ones(2)], dim=1))]
    with pytest.raises(AssertionError, match="nested list"):
        list(collate_groups([*mixed, item(y=batched([OMITTED]))]))


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_marker_within_a_value_is_an_error_in_plain_items_too(kind, within):
    items = [{"x": [1]}, {"x": WITHIN[within]}]
    if kind == "shared":
        items = items[1:]
    for call in (collate, collate_groups, explain):
        error = raised(call, items, {"x": KINDS[kind]()})
        assert (error.field, error.item) == ("x", len(items) - 1)
        assert (type(error), error.omitted) == (CollateTypeError, True)
        assert "found OMITTED within a value" in str(error)


class Lazy(list):
    def __iter__(self):
        raise RuntimeError("read")


class LazyDict(dict):
    def values(self):
        raise RuntimeError("read")


@pytest.mark.parametrize("value", [Lazy([1, 2]), LazyDict(a=1)])
def test_looking_for_a_marker_runs_no_code_of_the_values(value):
    [found] = collate([{"x": value}], {"x": Batched()})["x"]
    assert found is value
    assert "OMITTED within" in str(raised(collate, [{"x": Lazy([OMITTED])}], {"x": Batched()}))
    assert "OMITTED within" in str(raised(collate, [{"x": LazyDict(a=OMITTED)}], {"x": Batched()}))


@pytest.mark.parametrize("value", [in_itself, very_deep])
@pytest.mark.parametrize("kind", KINDS)
def test_a_marker_is_found_in_a_list_without_end(kind, value):
    from vllm_items import from_plain

    found = value()
    fields = {"x": KINDS[kind]()}
    items = from_plain([{"x": [1]}, {"x": found}], fields)
    if kind == "shared":
        items = items[1:]
    error = raised(collate, items, require=["x"])
    assert (type(error), error.field, error.item) == (CollateTypeError, "x", len(items) - 1)


def test_lists_without_a_marker_are_passed_on():
    """Also where looking into them has to end."""
    from vllm_items import batched, item

    cyclic: list[Any] = [1]
    cyclic += [cyclic, (cyclic, {"a": cyclic})]
    [found] = collate([item(x=batched(cyclic))], require=["x"])["x"]
    assert found is cyclic
    often: Any = [0]
    for _ in range(100):
        often = [often] * 10
    [found] = collate([item(x=batched(often))], require=["x"])["x"]
    assert found is often


@pytest.mark.parametrize("missing", ["omit", "split"])
def test_what_is_within_a_value_is_not_left_out_with_it(missing):
    items = [image(1), OMITTED, image(2, name=[OMITTED]), image(3, name=OMITTED)]
    for given, fields in ((items, FIELDS), (vllm_items(items), None)):
        error = raised(collate, given, fields, missing=missing)
        assert (type(error), error.field, error.item) == (CollateTypeError, "name", 2)
        assert "put OMITTED in the place of the whole value" in str(error)
        error = raised(collate_groups, given, fields, missing="split")
        assert (type(error), error.field, error.item) == (CollateTypeError, "name", 2)


def test_a_marker_that_an_iterator_gives_is_an_error():
    from vllm_items import flat, item

    error = raised(collate, [item(x=flat([1])), item(x=flat(iter([OMITTED])))], require=["x"])
    assert (type(error), error.field, error.item) == (CollateTypeError, "x", None)


def test_a_marker_in_items_of_a_subclass_is_an_error():
    pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm_items import batched, item

    class Item(MultiModalKwargsItem):
        pass

    whole = item(x=batched(1))
    for gone in (OMITTED, batched(OMITTED)):
        exact = [whole, MultiModalKwargsItem({"x": gone})]
        assert raised(collate, exact).item == raised(collate_groups, exact).item == 1
        for items in ([whole, Item({"x": gone})], [Item(whole), MultiModalKwargsItem({"x": gone})]):
            for call in (collate, collate_groups):
                error = raised(call, items)
                assert (type(error), error.field, error.item) == (CollateTypeError, "x", 1)
    items = [whole, Item({"x": batched([OMITTED])})]
    assert collate(items) == {"x": [1, [OMITTED]]}
    error = raised(collate, items, require=["x"])
    assert (type(error), error.field, error.item) == (CollateTypeError, "x", 1)


@pytest.mark.parametrize("options", [{}, {"missing": "omit"}, {"require": ["x"]}])
def test_what_is_no_element_raises_what_vllm_raises(options):
    pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")
    from mmcollate.integrations import vllm as plugin
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm_items import batched, item

    items = [item(x=batched(1)), MultiModalKwargsItem({"x": 3})]
    with pytest.raises(AttributeError) as expected:
        list(plugin.originals().group_and_batch_mm_items(items))
    with pytest.raises(AttributeError) as caught:
        collate(items, **options)
    assert str(caught.value) == str(expected.value)


def test_subclasses_of_vllm_items_are_picked_from_as_vllm_strips_them():
    pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")
    from vllm.multimodal.inputs import MultiModalKwargsItem

    class Item(MultiModalKwargsItem):
        def __init__(self, elements: Any, *, name: str) -> None:
            super().__init__(elements)
            self.name = name

    items = [image(1), lean(2), image(3)]
    given = [Item(x, name="mine") for x in vllm_items(items)]
    before = [dict(x) for x in given]
    for missing in ("omit", "split"):
        assert_same(collate(given, missing=missing), collate(items, FIELDS, missing=missing))
    groups = [(g.num_items, g.batch) for g in collate_groups(given, missing="split")]
    assert_same(
        groups, [(g.num_items, g.batch) for g in collate_groups(items, FIELDS, missing="split")]
    )
    assert [dict(x) for x in given] == before
    assert type(presence.only(given[0], ["grid"])) is MultiModalKwargsItem


# vLLM's own message encoding


def payload_of_a_feature(gone: Any) -> tuple[Any, Any]:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=0, length=4)
    return MultiModalFeatureSpec(gone, "image", "id", place), MultiModalFeatureSpec


def item_among_items(gone: Any) -> tuple[Any, Any]:
    from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems

    items = [MultiModalKwargsItem.dummy(), gone]
    return MultiModalKwargsItems({"image": items}), MultiModalKwargsItems


def element_of_an_item(gone: Any) -> tuple[Any, Any]:
    from vllm.multimodal.inputs import MultiModalKwargsItem

    return MultiModalKwargsItem({"x": gone}), MultiModalKwargsItem


def value_of_an_element(gone: Any) -> tuple[Any, Any]:
    from vllm_items import batched

    return element_of_an_item(batched(gone))


def value_within_a_list(gone: Any) -> tuple[Any, Any]:
    return value_of_an_element([torch.ones(2), [1, gone]])


PLACES = [
    payload_of_a_feature,
    item_among_items,
    element_of_an_item,
    value_of_an_element,
    value_within_a_list,
]


@pytest.mark.parametrize("insecure", ["0", "1"])
@pytest.mark.parametrize("place", PLACES)
def test_vllm_messages_refuse_a_marker_wherever_it_is(place, insecure, monkeypatch):
    pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", insecure)
    value, kind = place(OMITTED)
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(kind)
    if place is payload_of_a_feature and insecure == "1":
        encoded = encoder.encode(value)  # pickled, into a message that can't be read
        with pytest.raises(AttributeError, match="'Omitted' object"):
            decoder.decode(encoded)
    else:
        with pytest.raises((TypeError, AttributeError), match="Omitted"):
            encoder.encode(value)
    # Neither is the worse for it.
    other, kind = payload_of_a_feature(None)
    assert MsgpackDecoder(kind).decode(encoder.encode(other)) == other
    assert pickle.loads(pickle.dumps(OMITTED)) is OMITTED


def test_vllm_memory_for_items_refuses_a_marker():
    pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")
    from vllm.distributed.device_communicators.shm_object_storage import MsgpackSerde

    for place in (value_of_an_element, value_within_a_list, element_of_an_item):
        with pytest.raises((TypeError, AttributeError), match="Omitted"):
            MsgpackSerde().serialize(place(OMITTED)[0])


@pytest.mark.parametrize("place", PLACES)
def test_what_vllm_pickles_carries_a_marker(place):
    pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")
    value, _ = place(OMITTED)
    found = pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    held: Any = found
    while held is not OMITTED:
        if hasattr(held, "mm_position") or hasattr(held, "field"):
            held = held.data
        else:
            held = list(held.values())[-1] if hasattr(held, "values") else held[-1]


def test_vllm_items_that_are_not_there():
    for gone, omitted in ((None, False), (OMITTED, True)):
        error = raised(collate, vllm_items([image(1), gone]))
        assert (type(error), error.item, error.omitted) == (CollateTypeError, 1, omitted)
    error = raised(collate, vllm_items([OMITTED, image(1), None]), missing="omit")
    assert (error.item, error.omitted) == (2, False)
    error = raised(collate, vllm_items([image(1), image(2, pixels=None)]), require=["pixels"])
    assert (error.item, error.missing) == (1, ("pixels",))
    items = vllm_items([image(1), OMITTED, {"grid": torch.tensor([1])}])
    error = raised(collate, items, missing="omit")
    assert "item 2: does not form one batch with item 0" in str(error)


# In the plugin: vLLM's own exceptions, with a note

HAS_NOTES = sys.version_info >= (3, 11)


@pytest.mark.skipif(not HAS_NOTES, reason="exceptions have notes since Python 3.11")
@pytest.mark.parametrize("gone", [None, OMITTED])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_plugin_notes_which_item_is_not_there(gone, before):
    items = vllm_items([*map(image, range(1, before + 1)), gone, image(9)])
    from mmcollate.integrations import vllm as plugin

    theirs = plugin.originals()
    pairs = [
        (plugin.batch_mm_items, theirs._batch_mm_items),
        (
            lambda x: list(plugin.group_and_batch_mm_items(x)),
            lambda x: list(theirs.group_and_batch_mm_items(x)),
        ),
    ]
    for ours, original in pairs:
        with pytest.raises(AttributeError) as expected:
            original(items)
        with pytest.raises(AttributeError) as caught:
            ours(items)
        assert str(caught.value) == str(expected.value)
        [note] = caught.value.__notes__
        word = "got lost" if gone is None else "left out on purpose"
        assert note.startswith(f"mmcollate: item {before}: found ")
        assert word in note


@pytest.mark.skipif(not HAS_NOTES, reason="exceptions have notes since Python 3.11")
@pytest.mark.parametrize("gone", [None, OMITTED])
def test_the_plugin_notes_which_value_is_not_there(gone):
    items = vllm_items([image(1), image(2, pixels=gone)])
    from mmcollate.integrations import vllm as plugin

    with pytest.raises(TypeError) as caught:
        plugin.batch_mm_items(items)
    [note] = caught.value.__notes__
    assert note.startswith("mmcollate: field 'pixels', item 1: found ")
    assert ("got lost" if gone is None else "left out on purpose") in note


def test_the_plugin_does_what_vllm_does_with_a_marker():
    items = vllm_items([image(1), image(2, name=OMITTED)])
    from mmcollate.integrations import vllm as plugin

    for batch in (plugin.batch_mm_items(items), plugin.originals()._batch_mm_items(items)):
        assert batch["name"] == ["image 1", OMITTED]


@pytest.mark.skipif(not HAS_NOTES, reason="exceptions have notes since Python 3.11")
def test_other_attribute_errors_of_the_plugin_get_no_such_note():
    from mmcollate.integrations import vllm as plugin

    pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")
    with pytest.raises(AttributeError) as caught:
        plugin.batch_mm_items([5])
    assert not hasattr(caught.value, "__notes__")


def test_the_names_are_public():
    for name in ("OMITTED", "Present"):
        assert name in mmcollate.__all__


@pytest.mark.parametrize("lost", [None, OMITTED])
def test_groups_without_what_is_required_say_so_as_collate_does(lost):
    fields = {"p": Flat(), "g": Batched(keep_on_cpu=True)}
    items = [{"p": torch.ones(2), "g": torch.ones(1)}, {"p": lost, "g": torch.ones(1)}]
    with pytest.raises(CollateKeyError, match="item 1: lacks 'p'") as caught:
        list(collate_groups(items, fields, require=["p"]))
    assert caught.value.missing == ("p",)
    assert caught.value.item == 1


def test_a_required_name_that_is_none_is_said():
    with pytest.raises(CollateTypeError, match="require has list of 1, expected the names"):
        collate([], {"p": Flat()}, require=[["p"]])

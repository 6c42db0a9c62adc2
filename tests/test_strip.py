"""What the prefix cache covers is left out: as vLLM has it, remembered, and never stale."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")

import mmcollate
from mmcollate import (
    OMITTED,
    Batched,
    CollateKeyError,
    CollateTypeError,
    CollateValueError,
    CoveredPrefix,
    FeaturePolicy,
    Flat,
    Stripped,
    collate,
    collate_groups,
    gather_field,
    strip_covered,
)
from mmcollate.integrations import vllm as plugin
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.utils import strip_covered_mm_data
from vllm_items import batched, flat, item, shared

FIELDS = {
    "pixel_values": lambda rng: flat(torch.rand(rng.randint(1, 4), 3)),
    "image_embeds": lambda rng: flat(torch.rand(2, 3), keep_on_cpu=rng.random() < 0.2),
    "image_grid_thw": lambda rng: batched(
        torch.tensor([1, 2, rng.randint(1, 9)]), keep_on_cpu=True
    ),
    "timestamps": lambda rng: batched(
        [0.5 * k for k in range(rng.randint(0, 3))], keep_on_cpu=True
    ),
    "tiles": lambda rng: batched([torch.rand(2), torch.rand(rng.randint(0, 3), 2)]),
    "image_token_id": lambda rng: shared(7, keep_on_cpu=rng.random() < 0.5),
    "lost": lambda rng: batched(None, keep_on_cpu=rng.random() < 0.5),
}


def address() -> MultiModalKwargsItem:
    """What the shared-memory cache puts in the place of an item."""
    elements = {"address": 4096, "monotonic_id": 3, "signature": [1, 2]}
    return item(**{name: batched(value) for name, value in elements.items()})


def feature(data: Any, offset: int = 0, length: int = 4, **more: Any) -> MultiModalFeatureSpec:
    position = PlaceholderRange(offset=offset, length=length)
    values = {"modality": "image", "identifier": f"at {offset}", "mm_position": position, **more}
    return MultiModalFeatureSpec(data=data, **values)


def image(offset: int, value: int = 0) -> MultiModalFeatureSpec:
    """Four tokens, 96 bytes of pixels and a kept grid of 24."""
    return feature(
        item(
            pixel_values=flat(torch.full((4, 6), float(value))),
            image_grid_thw=batched(torch.tensor([1, 2, value]), keep_on_cpu=True),
        ),
        offset,
    )


class Item(MultiModalKwargsItem):
    """An item of another class, which is not made as vLLM's is."""

    def __init__(self, elements: Any, *, name: str) -> None:
        super().__init__(elements)
        self.name = name


@dataclass
class Spec(MultiModalFeatureSpec):
    """A feature with more than vLLM's has: given, derived, and set later."""

    extra: int = 0
    has_data: bool = field(init=False)
    seen: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.has_data = self.data is not None


ITEMS: list[Callable[[Any], Any]] = [
    MultiModalKwargsItem,
    partial(Item, name="mine"),
    dict,
    partial(defaultdict, list),
]

DROPPED = {False: 120, True: 96}
"""Bytes of an :func:`image` that are dropped, without positions and with."""


def random_features(rng: random.Random) -> list[MultiModalFeatureSpec]:
    features, at = [], 0
    for _ in range(rng.randint(0, 8)):
        at += rng.randint(0, 3)
        length = rng.randint(0, 5)
        names = rng.sample(sorted(FIELDS), rng.randint(0, len(FIELDS)))
        data = rng.choice([{name: FIELDS[name](rng) for name in names}] * 6 + [None, address()])
        if data is not None:
            data = rng.choice(ITEMS)(data)
        kind = rng.choice(["image", "video", "audio"])
        one = feature(data, at, length, modality=kind, mm_hash=rng.choice([None, "h"]))
        if rng.random() < 0.3:
            one = Spec(**vars(one), extra=rng.randint(1, 9))
            one.seen = 1
        features.append(one)
        at += length
    if rng.random() < 0.2:
        rng.shuffle(features)
    return features


def picture(features: Any) -> Any:
    """All objects in features, by identity."""
    return [
        (id(x), id(x.data), {k: (id(e), id(e.data)) for k, e in (x.data or {}).items()}, vars(x))
        for x in features
    ]


def assert_as_vllm(ours: Stripped, features: list[Any], computed: int, positions: bool) -> None:
    theirs = strip_covered_mm_data(features, computed, uses_mrope=positions)
    assert len(ours.features) == len(theirs)
    for mine, other, original in zip(ours.features, theirs, features, strict=True):
        assert (mine is original) == (other is original)
        assert type(mine) is type(other)
        assert list(vars(mine)) == list(vars(other))
        assert all(vars(mine)[name] is vars(other)[name] for name in vars(other) if name != "data")
        assert type(mine.data) is type(other.data)
        if other.data is not None:
            assert list(mine.data) == list(other.data)
            assert all(mine.data[name] is other.data[name] for name in other.data)
    assert ours.num_stripped == sum(x is not y for x, y in zip(theirs, features, strict=True))
    dropped = [
        leaf
        for original, left in zip(features, theirs, strict=True)
        for name, element in (original.data or {}).items()
        if left is not original and name not in (left.data or {})
        for leaf in (element.data if isinstance(element.data, list) else [element.data])
    ]
    assert ours.bytes_dropped == sum(x.nbytes for x in dropped if isinstance(x, torch.Tensor))


# As vLLM


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_random_features_are_stripped_as_vllm_does(seed, positions):
    rng = random.Random(seed)
    features = random_features(rng)
    before = picture(features)
    prefix = CoveredPrefix(positions_needed=positions)
    ends = [x.mm_position.offset + x.mm_position.length for x in features]
    steps = [
        0,
        *ends,
        *(end - 1 for end in ends if end),
        1000,
        0,
        *(rng.randint(0, 40) for _ in "abc"),
    ]
    rng.shuffle(steps)
    for computed in steps:
        once = strip_covered(features, computed, positions_needed=positions)
        assert_as_vllm(once, features, computed, positions)
        assert_as_vllm(prefix.strip(features, computed), features, computed, positions)
    assert picture(features) == before


@pytest.mark.parametrize("positions", [False, True])
def test_the_boundary_counts_as_covered(positions):
    features = [image(2), image(6)]
    for computed, stripped in [(5, 0), (6, 1), (9, 1), (10, 2)]:
        found = strip_covered(features, computed, positions_needed=positions)
        assert (found.num_stripped, found.bytes_dropped) == (
            stripped,
            DROPPED[positions] * stripped,
        )
        assert_as_vllm(found, features, computed, positions)


@pytest.mark.parametrize("positions", [False, True])
def test_addresses_in_shared_memory_and_features_without_data_stay(positions):
    features = [feature(address()), feature(None, 4), image(8)]
    found = strip_covered(features, 12, positions_needed=positions)
    assert found.features[0] is features[0]
    assert found.features[1] is features[1]
    assert (found.num_stripped, found.bytes_dropped) == (1, DROPPED[positions])


def test_with_positions_exactly_the_kept_fields_are_left():
    # For M-RoPE and XD-RoPE alike: both are what vLLM calls M-RoPE.
    one = image(0)
    left = strip_covered([one], 4, positions_needed=True).features[0]
    assert type(left.data) is MultiModalKwargsItem
    assert list(left.data) == ["image_grid_thw"]
    assert left.data["image_grid_thw"] is one.data["image_grid_thw"]
    assert list(one.data) == ["pixel_values", "image_grid_thw"]
    assert strip_covered([one], 4, positions_needed=False).features[0].data is None


def test_the_list_is_a_new_one():
    features = [image(0)]
    for computed in (0, 1, 4):
        found = strip_covered(features, computed, positions_needed=False).features
        found.append(None)
        assert len(features) == 1


def test_bytes_of_all_that_has_some():
    data = item(
        tensor=flat(torch.zeros(3, dtype=torch.int16)),
        nested=batched({"a": [torch.zeros(2), b"abc"], "b": (np.zeros(5, np.uint8), "text", 1)}),
        view=batched(torch.zeros(100)[:1]),
    )
    found = strip_covered([feature(data)], 4, positions_needed=False)
    assert found.bytes_dropped == 6 + 8 + 3 + 5 + 4


class Refuses:
    @property
    def nbytes(self) -> int:
        raise RuntimeError("not now")


def nested_in_itself() -> list[Any]:
    value: list[Any] = [torch.ones(2)]
    value.append(value)
    return value


def very_deep() -> list[Any]:
    value: list[Any] = [torch.ones(2)]
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize(
    ("data", "nbytes"),
    [
        (nested_in_itself, 8),
        (very_deep, 8),
        (lambda: torch.eye(2).to_sparse(), 0),
        (lambda: torch.ones(3, device="meta"), 12),
        (lambda: [Refuses(), torch.Tensor, np.ndarray, torch.ones(1)], 4),
        (lambda: SimpleNamespace(nbytes="many"), 0),
        (lambda: SimpleNamespace(nbytes=-8), 0),
        (lambda: SimpleNamespace(nbytes=np.int64(9)), 9),
        (lambda: iter([1]), 0),
    ],
)
def test_what_can_not_be_counted_is_stripped_all_the_same(data, nbytes, positions):
    value = data()
    features = [feature(item(x=batched(value)))]
    found = strip_covered(features, 4, positions_needed=positions)
    [theirs] = strip_covered_mm_data(features, 4, uses_mrope=positions)
    assert found.features == [theirs]
    assert (found.num_stripped, found.bytes_dropped) == (1, nbytes)
    if hasattr(value, "__next__"):
        assert list(value) == [1]


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 0),
        (4, 0),
        (-9, 3),
        (0.5, 3.75),
        (2.0, 2.0),
        (np.int32(1), np.uint8(3)),
        (torch.tensor(1), torch.tensor(3)),
        (0, 10**30),
        (True, True),
    ],
)
def test_unusual_positions_are_taken_as_vllm_takes_them(offset, length, positions):
    one = feature(image(0).data, offset, length)
    prefix = CoveredPrefix(positions_needed=positions)
    for computed in (1, 2, 4, 5, 3, 10**15):
        for found in (
            strip_covered([one], computed, positions_needed=positions),
            prefix.strip([one], computed),
        ):
            assert_as_vllm(found, [one], computed, positions)


def test_one_feature_several_times_and_places_that_overlap():
    one, other = image(0), image(2)
    features = [other, one, one, image(1), other]
    for positions in (False, True):
        prefix = CoveredPrefix(positions_needed=positions)
        for computed in (4, 5, 6, 4, 0, 6):
            assert_as_vllm(prefix.strip(features, computed), features, computed, positions)
            found = strip_covered(iter(features), computed, positions_needed=positions)
            assert_as_vllm(found, features, computed, positions)


@pytest.mark.parametrize("positions", [False, True])
def test_a_mask_of_embeddings_changes_nothing(positions):
    mask = torch.tensor([False, True, True, False])
    place = PlaceholderRange(offset=2, length=4, is_embed=mask)
    one = replace(image(0), mm_position=place)
    for computed in (4, 5, 6):
        found = strip_covered([one], computed, positions_needed=positions)
        assert_as_vllm(found, [one], computed, positions)
        assert found.features[0].mm_position.is_embed is mask


class SaysAddress(MultiModalKwargsItem):
    """Has an address by what it says, which vLLM asks, and not by what it holds."""

    def __contains__(self, name: object) -> bool:
        return name == "address" or super().__contains__(name)


def test_addresses_are_what_vllm_takes_for_them():
    for data in (Item(address(), name="a"), dict(address()), SaysAddress(image(0).data)):
        one = feature(data)
        for positions in (False, True):
            found = strip_covered([one], 4, positions_needed=positions)
            assert_as_vllm(found, [one], 4, positions)
            assert found.features[0] is one


@dataclass(frozen=True)
class Frozen:
    data: Any
    mm_position: Any
    derived: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", "full" if self.data else "empty")


@dataclass(slots=True)
class WithSlots(MultiModalFeatureSpec):
    extra: int = 0


@dataclass
class Asks(MultiModalFeatureSpec):
    """Can't be made again from what it has."""

    more: InitVar[int] = field(kw_only=True)


@pytest.mark.parametrize("positions", [False, True])
def test_a_dataclass_is_copied_as_vllm_copies_it(positions):
    whole = image(0)
    place = whole.mm_position
    features = [
        Frozen(whole.data, place),
        WithSlots(**vars(whole), extra=3),
        Spec(**vars(whole), extra=4),
    ]
    features[2].seen = 5
    features[2].unknown = 6
    ours = strip_covered(features, 4, positions_needed=positions).features
    theirs = strip_covered_mm_data(features, 4, uses_mrope=positions)
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine) is type(other)
        assert mine == other
    # Derived anew, as whether there is data; and so is what was set from outside.
    assert (ours[0].derived, theirs[0].derived) == ("full" if positions else "empty",) * 2
    assert (ours[2].has_data, ours[2].seen, ours[2].extra) == (positions, 0, 4)
    assert hasattr(ours[2], "unknown") == hasattr(theirs[2], "unknown")

    asks = Asks(**vars(whole), more=1)
    with pytest.raises(ValueError, match="InitVar 'more'") as theirs_error:
        strip_covered_mm_data([asks], 4, uses_mrope=positions)
    with pytest.raises(ValueError, match="InitVar 'more'") as our_error:
        strip_covered([asks], 4, positions_needed=positions)
    assert str(our_error.value) == str(theirs_error.value)


@pytest.mark.parametrize("make", ITEMS)
def test_what_is_left_of_any_item_is_an_item_of_vllm(make):
    kept = batched(torch.ones(3), keep_on_cpu=True)
    one = feature(make({"grid": kept, "pixels": flat(torch.ones(2, 2))}))
    [left] = strip_covered([one], 4, positions_needed=True).features
    assert type(left.data) is MultiModalKwargsItem
    assert left.data == {"grid": kept}
    # Of another engine's feature with such elements, where neither is vLLM's: a dict.
    other = SimpleNamespace(data=one.data, mm_position=one.mm_position)
    [left] = strip_covered([other], 4, positions_needed=True).features
    is_vllm = isinstance(one.data, MultiModalKwargsItem)
    assert type(left.data) is (MultiModalKwargsItem if is_vllm else dict)
    assert dict(left.data) == {"grid": kept}


def test_requests_of_several_threads_are_stripped_at_one_time():
    requests = [[image(4 * k, r) for k in range(20)] for r in range(4)]
    shared_by_all = [image(4 * k) for k in range(20)]
    wrong: list[Any] = []

    def serve(features: list[Any]) -> None:
        prefix = CoveredPrefix(positions_needed=True)
        try:
            for computed in [*range(0, 84, 3), 12, 80, 0, 41] * 3:
                for given in (features, shared_by_all):
                    ours = strip_covered(given, computed, positions_needed=True)
                    assert_as_vllm(ours, given, computed, True)
                assert_as_vllm(prefix.strip(features, computed), features, computed, True)
        except BaseException as error:
            wrong.append(error)

    threads = [Thread(target=serve, args=(features,)) for features in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("positions", [False, True])
def test_an_element_of_none_raises_what_vllm_raises_and_changes_nothing(positions):
    broken = feature(MultiModalKwargsItem({"x": None, "y": batched(1)}), 4)
    features = [image(0), broken]
    prefix = CoveredPrefix(positions_needed=positions)
    if positions:
        for call in (
            lambda: strip_covered_mm_data(features, 8, uses_mrope=True),
            lambda: strip_covered(features, 8, positions_needed=True),
            lambda: prefix.strip(features, 8),
        ):
            with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'field'"):
                call()
    else:
        assert_nothing_left(prefix.strip(features, 8), features)
    assert_as_vllm(prefix.strip(features, 4), features, 4, positions)


def assert_nothing_left(found: Stripped, features: list[Any]) -> None:
    theirs = strip_covered_mm_data(features, 100)
    assert [x.data for x in found.features] == [x.data for x in theirs] == [None] * len(features)


@pytest.mark.parametrize(
    ("tokens", "kind", "says"),
    [
        (-1, CollateValueError, "is -1, expected 0 or more"),
        (1.5, CollateTypeError, "is float, expected an int"),
        (True, CollateTypeError, "is bool, expected an int"),
        (None, CollateTypeError, "is NoneType, expected an int"),
    ],
)
def test_what_is_no_number_of_tokens(tokens, kind, says):
    with pytest.raises(kind, match=f"num_computed_tokens {says}"):
        strip_covered([image(0)], tokens, positions_needed=False)
    assert strip_covered([image(0)], np.int64(4), positions_needed=False).num_stripped == 1


# Remembered


class Counting(FeaturePolicy):
    """Counts what is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []
        self.read = 0

    def with_payload(self, feature: Any, payload: Any) -> Any:
        self.made.append(feature)
        return super().with_payload(feature, payload)

    def value(self, element: Any) -> Any:
        self.read += 1
        return super().value(element)

    def payload(self, feature: Any) -> Any:
        self.read += 1
        return super().payload(feature)

    def end(self, feature: Any) -> int:
        self.read += 1
        return super().end(feature)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_the_next_step_makes_only_what_is_new(positions, frozen):
    policy = Counting()
    prefix = CoveredPrefix(positions_needed=positions, policy=policy, frozen=frozen)
    features = [image(4 * k) for k in range(100)]
    first = prefix.strip(features, 4 * 90)
    assert policy.made == features[:90]
    policy.made.clear()
    second = prefix.strip(features, 4 * 93 + 1)
    assert policy.made == features[90:93]
    assert all(map(lambda x, y: x is y, first.features[:90], second.features[:90]))
    assert (second.num_stripped, second.bytes_dropped) == (93, 93 * DROPPED[positions])
    assert_as_vllm(second, features, 4 * 93 + 1, positions)
    policy.made.clear()
    for computed in (4 * 93, 40, 0, 41, 4 * 93):
        assert_as_vllm(prefix.strip(features, computed), features, computed, positions)
    assert policy.made == []


def test_of_frozen_features_the_known_are_not_even_read():
    policy = Counting()
    prefix = CoveredPrefix(positions_needed=True, policy=policy, frozen=True)
    features = [image(4 * k) for k in range(200)]
    prefix.strip(features, 4 * 197)
    policy.read = 0
    prefix.strip(features, 4 * 198)
    assert 0 < policy.read < 20


def test_tokens_that_are_no_longer_computed():
    features = [image(4 * k) for k in range(6)]
    prefix = CoveredPrefix(positions_needed=True)
    # Up, preempted, again from the start, and past where it was.
    for computed in (12, 16, 0, 8, 12, 24, 5, 24):
        assert_as_vllm(prefix.strip(features, computed), features, computed, True)


def put_address(x: Any) -> None:
    x.data.data["address"] = batched(1)


CHANGES: dict[str, Callable[[list[Any]], None]] = {
    "another feature": lambda fs: fs.__setitem__(1, image(4, 9)),
    "an equal feature": lambda fs: fs.__setitem__(1, copy.copy(fs[1])),
    "another item": lambda fs: setattr(fs[1], "data", image(4, 9).data),
    "an equal item": lambda fs: setattr(fs[1], "data", copy.copy(fs[1].data)),
    "no item": lambda fs: setattr(fs[1], "data", None),
    "an address": lambda fs: setattr(fs[1], "data", address()),
    "an address put in": lambda fs: put_address(fs[1]),
    "another place": lambda fs: setattr(fs[1], "mm_position", PlaceholderRange(4, 5)),
    "another hash": lambda fs: setattr(fs[1], "mm_hash", "other"),
    "another identifier": lambda fs: setattr(fs[1], "identifier", "other"),
    "one less": lambda fs: fs.pop(1),
    "one less at the end": lambda fs: fs.pop(),
    "one more": lambda fs: fs.insert(1, image(4, 9)),
    "exchanged": lambda fs: fs.reverse(),
    "none at all": lambda fs: fs.clear(),
}
IN_ITEM: dict[str, Callable[[list[Any]], None]] = {
    "a kept element": lambda fs: fs[1].data.update(
        image_grid_thw=batched(torch.tensor([9]), keep_on_cpu=True)
    ),
    "a kept element more": lambda fs: fs[1].data.update(more=batched(1, keep_on_cpu=True)),
    "a kept element less": lambda fs: fs[1].data.pop("image_grid_thw"),
    "another name": lambda fs: fs[1].data.update(other=fs[1].data.pop("image_grid_thw")),
    "no longer kept": lambda fs: setattr(fs[1].data["image_grid_thw"], "field", batched(1).field),
    "moved to the next": lambda fs: fs[2].data.update(a=fs[1].data.pop("image_grid_thw")),
}


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("name", [*CHANGES, *IN_ITEM])
def test_features_that_were_changed_or_replaced(name, positions):
    features = [image(0), image(4, 5), image(8)]
    prefix = CoveredPrefix(positions_needed=positions)
    for _ in range(2):
        prefix.strip(features, 10)
    (CHANGES | IN_ITEM)[name](features)
    for computed in (8, 10, 12, 0, 9):
        found = prefix.strip(features, computed)
        if name not in IN_ITEM or positions:
            assert_as_vllm(found, features, computed, positions)
        else:
            # Nothing of the item is left; only its bytes are as they were.
            theirs = strip_covered_mm_data(features, computed, uses_mrope=False)
            assert [x.data for x in found.features] == [x.data for x in theirs]


def test_an_element_that_moved_from_the_end_of_one_item_to_the_start_of_the_next():
    kept = [batched(n, keep_on_cpu=True) for n in range(3)]
    features = [feature(item(a=kept[0], b=kept[1])), feature(item(c=kept[2]), 4)]
    prefix = CoveredPrefix(positions_needed=True)
    prefix.strip(features, 8)
    element = features[0].data.pop("b")
    features[1].data.data = {"b": element} | features[1].data.data
    assert_as_vllm(prefix.strip(features, 8), features, 8, True)


@pytest.mark.parametrize("positions", [False, True])
def test_what_a_receiver_puts_into_a_result_does_not_come_back(positions):
    features = [image(0), image(4)]
    prefix = CoveredPrefix(positions_needed=positions)
    sent = prefix.strip(features, 8).features
    sent[0].data = image(0, 9).data
    assert_as_vllm(prefix.strip(features, 8), features, 8, positions)
    if positions:
        prefix.strip(features, 8).features[1].data.clear()
        assert_as_vllm(prefix.strip(features, 8), features, 8, positions)


def test_data_that_an_element_gets_shows_in_what_is_left():
    features = [image(0)]
    prefix = CoveredPrefix(positions_needed=True)
    prefix.strip(features, 4)
    features[0].data["image_grid_thw"].data = torch.tensor([7, 7, 7])
    features[0].data["image_grid_thw"].data[0] = 8
    [left] = prefix.strip(features, 4).features
    assert left.data["image_grid_thw"].data.tolist() == [8, 7, 7]


def test_features_in_recycled_memory_are_not_taken_for_the_known():
    prefix = CoveredPrefix(positions_needed=True)
    for step in range(200):
        features = [image(0, step)]
        [left] = prefix.strip(features, 4).features
        assert left.data["image_grid_thw"].data[2] == step
        # Freed here, but for what the prefix keeps so that no other can be in its place.
        del features, left


def test_forgotten_features_are_let_go():
    import weakref

    features = [image(0)]
    pixels = weakref.ref(features[0].data["pixel_values"].data)
    prefix = CoveredPrefix(positions_needed=True)
    prefix.strip(features, 4)
    prefix.forget()
    del features
    assert pixels() is None
    again = [image(0, 3)]
    assert_as_vllm(prefix.strip(again, 4), again, 4, True)


# Other engines


class Clip(NamedTuple):
    data: Any
    mm_position: Any
    modality: str = "clip"


@dataclass
class Slotted:
    __slots__ = ("data", "mm_position")
    data: Any
    mm_position: Any


class Bare:
    __slots__ = ("data", "mm_position")

    def __init__(self, data: Any, mm_position: Any) -> None:
        self.data, self.mm_position = data, mm_position


PLAIN = FeaturePolicy({"pixels": Flat(), "grid": Batched(keep_on_cpu=True)})


@pytest.mark.parametrize("kind", [Clip, Slotted, Bare, SimpleNamespace])
def test_features_of_other_engines(kind):
    at = SimpleNamespace(offset=0, length=4)
    plain = {"pixels": torch.zeros(5), "grid": [1, 2]}
    one = kind(data=plain, mm_position=at)
    for prefix in (CoveredPrefix(positions_needed=True, policy=PLAIN) for _ in "ab"):
        for _ in range(3):
            found = prefix.strip([one], 4)
            [left] = found.features
            assert type(left) is kind
            assert left.data == {"grid": [1, 2]}
            assert left.data["grid"] is plain["grid"]
            assert left.mm_position is at
            assert found.bytes_dropped == 20
    assert one.data is plain and list(plain) == ["pixels", "grid"]
    if kind is not Clip:
        one.data = {"pixels": torch.zeros(1), "grid": [3]}
        assert prefix.strip([one], 4).features[0].data == {"grid": [3]}
        prefix = CoveredPrefix(positions_needed=False, policy=PLAIN)
        prefix.strip([one], 4)
        one.mm_position = SimpleNamespace(offset=1, length=2)
        assert prefix.strip([one], 4).features[0].mm_position is one.mm_position


def test_a_policy_for_features_that_are_quite_different():
    class Mine(FeaturePolicy):
        dropped = OMITTED

        def payload(self, feature: Any) -> Any:
            return feature["item"]

        def end(self, feature: Any) -> int:
            return feature["until"]

        def modality(self, feature: Any) -> str:
            return feature["kind"]

        def with_payload(self, feature: Any, payload: Any) -> Any:
            return feature | {"item": payload}

    fields = {"x": Batched()}
    features = [{"item": {"x": torch.tensor([k])}, "until": k, "kind": "image"} for k in (3, 5)]
    policy = Mine(fields)
    prefix = CoveredPrefix(positions_needed=False, policy=policy)
    for _ in range(2):
        found = prefix.strip(features, 3)
        assert found.features == [features[0] | {"item": OMITTED}, features[1]]
        assert found.bytes_dropped == 8
    # What was left out is no error, and what is there is collated.
    batch, indices = collate(policy_items(found, policy), fields, missing="omit")
    assert batch["x"].tolist() == [[5]]
    assert indices["x"] == [1]
    assert strip_covered(found.features, 3, positions_needed=False, policy=policy).num_stripped == 0
    assert gather_field(found.features, "x", policy=policy) == [None, torch.tensor([5])]
    with pytest.raises(
        CollateKeyError, match=r"modality 'image', field 'x', item 0: .*OMITTED"
    ) as raised:
        gather_field(found.features, "x", policy=policy, strict=True)
    assert raised.value.omitted


def policy_items(found: Stripped, policy: FeaturePolicy) -> list[Any]:
    return [policy.payload(x) for x in found.features]


def test_a_field_that_the_policy_does_not_know():
    one = SimpleNamespace(data={"gird": 1}, mm_position=SimpleNamespace(offset=0, length=1))
    with pytest.raises(CollateKeyError, match="field 'gird': int is not declared"):
        strip_covered([one], 1, positions_needed=True, policy=PLAIN)


# A field of them all


def test_a_field_has_a_slot_for_every_feature():
    features = [image(0, 1), image(4, 2), feature(address(), 8), image(12, 3), feature(None, 16)]
    stripped = strip_covered(features, 8, positions_needed=False).features
    # vLLM's own list is shorter than the features.
    theirs = MultiModalFeatureSpec.gather_kwargs(stripped, {"image_grid_thw"})["image_grid_thw"]
    ours = gather_field(stripped, "image_grid_thw")
    assert [x if x is None else x.tolist() for x in ours] == [None, None, None, [1, 2, 3], None]
    assert len(theirs) == 1
    assert theirs[0] is ours[3]


@pytest.mark.parametrize("seed", range(30))
def test_what_is_gathered_is_what_vllm_gathers(seed):
    rng = random.Random(seed)
    features = random_features(rng)
    for positions in (False, True):
        for given in (features, strip_covered(features, 20, positions_needed=positions).features):
            theirs = MultiModalFeatureSpec.gather_kwargs(given, set(FIELDS))
            for name in FIELDS:
                ours = gather_field(given, name)
                assert len(ours) == len(given)
                here, there = (
                    [x for x in y if x is not None] for y in (ours, theirs.get(name, []))
                )
                assert list(map(id, here)) == list(map(id, there))


def test_kept_metadata_is_gathered_from_stripped_features_too():
    features = [image(4 * k, k) for k in range(3)]
    stripped = strip_covered(features, 8, positions_needed=True).features
    left = gather_field(stripped, "image_grid_thw", strict=True)
    assert all(map(lambda x, y: x is y, left, gather_field(features, "image_grid_thw")))
    with pytest.raises(CollateKeyError) as raised:
        gather_field(stripped, "pixel_values", strict=True)
    assert (raised.value.field, raised.value.item, raised.value.modality) == (
        "pixel_values",
        0,
        "image",
    )
    assert raised.value.missing == ("pixel_values",)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (lambda: None, r"found NoneType; gather before what is covered is stripped"),
        (address, r"the payload lies in shared memory; fetch it first"),
        (lambda: item(y=batched(1)), r"the feature has \['y'\]; strip with positions_needed=True"),
        (lambda: item(x=batched(None)), r"found NoneType; gather before"),
        (lambda: item(x=batched(OMITTED)), r"found OMITTED; gather before"),
    ],
)
def test_a_strict_gather_says_what_is_missing_where(data, says):
    features = [feature(item(x=batched(1))), feature(data(), modality="video")]
    assert gather_field(features, "x") == [1, None]
    with pytest.raises(
        CollateKeyError, match=f"modality 'video', field 'x', item 1: no value; {says}"
    ):
        gather_field(features, "x", strict=True)


# Collation of what is left


@pytest.mark.parametrize("active", [False, True])
def test_lean_items_form_groups_of_their_own(active):
    features = [image(4 * k, k) for k in range(4)]
    stripped = strip_covered(features[:2], 8, positions_needed=True).features
    items = [stripped[0].data, stripped[1].data, features[2].data, features[3].data]
    group = (
        plugin.group_and_batch_mm_items if active else plugin.originals().group_and_batch_mm_items
    )
    groups = list(group(items))
    assert [count for count, _ in groups] == [2, 2]
    assert [sorted(batch) for _, batch in groups] == [
        ["image_grid_thw"],
        ["image_grid_thw", "pixel_values"],
    ]
    assert groups[0][1]["image_grid_thw"].tolist() == [[1, 2, 0], [1, 2, 1]]
    ours = list(collate_groups(items))
    assert [(x.num_items, sorted(x.batch)) for x in ours] == [(n, sorted(b)) for n, b in groups]
    # Nothing lean reaches an encoder that needs pixels.
    with pytest.raises(CollateKeyError, match=r"item 0: lacks 'pixel_values' \(no such field\)"):
        list(collate_groups(items, require=["pixel_values"]))


def test_nothing_of_this_is_counted_or_collated():
    mmcollate.reset_stats()
    strip_covered([image(0)], 4, positions_needed=True)
    assert mmcollate.stats()["batches"] == 0


def test_replaced_features_keep_their_class_and_what_it_adds():
    @dataclass
    class Spec(MultiModalFeatureSpec):
        extra: int = 0

    one = Spec(**vars(image(0)), extra=5)
    [left] = strip_covered([one], 4, positions_needed=False).features
    assert left == replace(one, data=None)
    assert (type(left), left.extra) == (Spec, 5)


@dataclass(slots=True)
class Slotted:
    data: Any
    mm_position: Any
    modality: str = "image"


class WithoutSlots(Slotted):
    """Has a dict of its own, and what counts is not in it."""


class Properties:
    """Shows what an inner object has."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    data = property(lambda self: self._inner.data)
    mm_position = property(lambda self: self._inner.mm_position)
    modality = "image"


@pytest.mark.parametrize("positions_needed", [False, True])
@pytest.mark.parametrize("form", ["namespace", "slots", "properties"])
@pytest.mark.parametrize("edit", ["in place", "replaced"])
def test_a_feature_that_moved_is_no_longer_covered(form, edit, positions_needed):
    def feature(offset: int) -> Any:
        position = SimpleNamespace(offset=offset, length=4)
        plain = SimpleNamespace(data={"p": torch.ones(4)}, mm_position=position, modality="image")
        if form == "namespace":
            return plain
        if form == "slots":
            return WithoutSlots(plain.data, position)
        return Properties(plain)

    features = [feature(0), feature(4)]
    policy = Copied({"p": mmcollate.Flat()})
    prefix = mmcollate.CoveredPrefix(positions_needed=positions_needed, policy=policy)
    assert prefix.strip(features, 8).num_stripped == 2
    if edit == "in place":
        features[1].mm_position.offset = 100
    else:
        inner = features[1]._inner if form == "properties" else features[1]
        inner.mm_position = SimpleNamespace(offset=100, length=4)
    assert prefix.strip(features, 8).num_stripped == 1


class Copied(mmcollate.FeaturePolicy):
    def with_payload(self, feature: Any, payload: Any) -> Any:
        return SimpleNamespace(
            data=payload, mm_position=feature.mm_position, modality=feature.modality
        )


def test_a_marker_in_the_place_of_an_element_is_left_out():
    element = MultiModalFieldElem(data=torch.ones(2), field=MultiModalBatchedField())
    whole = MultiModalKwargsItem({"p": element, "q": element})
    lean = MultiModalKwargsItem({"p": mmcollate.OMITTED, "q": element})
    batch, indices = mmcollate.collate([whole, lean], missing="omit")
    assert indices == {"p": [0], "q": [0, 1]}
    assert batch["p"].shape == (1, 2)
    with pytest.raises(mmcollate.CollateKeyError, match="item 1: lacks 'p'"):
        mmcollate.collate([whole, lean], require=["p"])
    features = [SimpleNamespace(data=item, modality="image") for item in (whole, lean)]
    assert mmcollate.gather_field(features, "p")[1] in (None, mmcollate.OMITTED)


@pytest.mark.parametrize("positions", [False, True])
def test_a_marker_in_the_place_of_an_element_says_what_it_says_when_the_rest_is_stripped(positions):
    whole = image(0)
    lean = feature(MultiModalKwargsItem(whole.data.data | {"image_grid_thw": OMITTED}), 4)
    prefix = CoveredPrefix(positions_needed=positions)
    for computed in (4, 8, 12, 8):
        for found in (
            strip_covered([whole, lean], computed, positions_needed=positions),
            prefix.strip([whole, lean], computed),
        ):
            covered = computed >= 8
            assert found.num_stripped == 1 + covered
            assert found.bytes_dropped == DROPPED[positions] + 96 * covered
            left = found.features[1].data
            if covered:
                assert left == ({"image_grid_thw": OMITTED} if positions else None)
    if positions:
        with pytest.raises(CollateKeyError, match="item 1: no value; found OMITTED") as raised:
            gather_field(found.features, "image_grid_thw", strict=True)
        assert raised.value.omitted
    # Where the field is known, it is left out as any of its values.
    features = [SimpleNamespace(data={"pixels": OMITTED, "grid": OMITTED}, mm_position=place(0))]
    [left] = strip_covered(features, 4, positions_needed=True, policy=PLAIN).features
    assert left.data == {"grid": OMITTED}


def place(offset: int) -> SimpleNamespace:
    return SimpleNamespace(offset=offset, length=4)

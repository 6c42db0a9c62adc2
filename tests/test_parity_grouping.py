"""Which items are batched together, when that happens, and in what order: as the engine does it."""

from __future__ import annotations

import collections
import inspect
import pickle
import types
from dataclasses import dataclass

import mmcollate
import numpy as np
import pytest
import torch
from compare import assert_same, assert_same_outcome, outcome

pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")

import vllm.multimodal.utils as engine
from mmcollate.integrations import vllm as plugin
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
)
from vllm_items import (
    DEVICES,
    GRAD_MODES,
    ORIGINAL,
    batched,
    flat,
    item,
    items_of,
    leaves_of,
    same_batch,
    same_groups,
    shared,
    to_plain,
)

ENTRIES = {
    "ours": plugin.group_and_batch_mm_items,
    "theirs": ORIGINAL.group_and_batch_mm_items,
}


@pytest.fixture
def activated():
    plugin.activate()
    try:
        yield
    finally:
        plugin.deactivate()


def sizes(result) -> list[int]:
    return [n for n, _ in result.result]


def vec(*values: float) -> torch.Tensor:
    return torch.tensor([float(v) for v in values])


# Which items merge


@pytest.mark.parametrize("device", DEVICES)
def test_no_items_yield_nothing(device):
    assert same_groups([], device=device).result == []
    assert same_groups((), device=device).result == []
    assert same_batch([], device=device).result == {}


@pytest.mark.parametrize("n", [1, 2, 5])
def test_items_without_fields_are_one_empty_group(n):
    assert same_groups([item() for _ in range(n)]).result == [(n, {})]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", GRAD_MODES)
def test_different_key_sets_split_and_equal_ones_merge(device, mode):
    items = [
        item(x=batched(vec(1)), y=batched(vec(2))),
        item(y=batched(vec(3)), x=batched(vec(4))),
        item(x=batched(vec(5))),
        item(x=batched(vec(6)), z=batched(vec(7))),
        item(x=batched(vec(8)), y=batched(vec(9))),
        item(),
        item(x=batched(vec(1))),
    ]
    with GRAD_MODES[mode]():
        result = same_groups(items, device=device)
    assert sizes(result) == [2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("n", [2, 3, 9])
def test_keys_come_in_the_order_of_the_first_item(n):
    names = ["c", "a", "d", "b"]
    items = [
        item(**{name: batched(vec(i, j)) for j, name in enumerate(names[i % 4 :] + names[: i % 4])})
        for i in range(n)
    ]
    (group,) = same_groups(items).result
    assert list(group[1]) == names
    assert list(same_batch(items).result) == names


def test_a_batch_of_items_with_different_keys_takes_what_each_has():
    items = [
        item(x=batched(vec(1))),
        item(y=batched(vec(2)), x=batched(vec(3))),
        item(y=batched(vec(4))),
    ]
    theirs = assert_same_outcome(
        lambda: plugin.batch_mm_items(items),
        lambda: ORIGINAL._batch_mm_items(items),
        inputs=leaves_of(items),
    )
    assert {name: len(x) for name, x in theirs.result.items()} == {"x": 2, "y": 2}


def test_different_kinds_of_field_split():
    items = [item(x=kind(vec(1, 2))) for kind in (batched, batched, flat, flat, shared, batched)]
    assert sizes(same_groups(items)) == [2, 2, 1, 1]


@dataclass(frozen=True, kw_only=True)
class MyShared(MultiModalSharedField):
    pass


@dataclass(frozen=True, kw_only=True)
class MyBatched(MultiModalBatchedField):
    pass


def test_subclasses_of_a_field_class_split_from_it():
    x = vec(1, 2)
    for mine, engines in (
        (MyShared(batch_size=1), MultiModalSharedField(batch_size=1)),
        (MyBatched(), MultiModalBatchedField()),
    ):
        items = [item(x=MultiModalFieldElem(x, f)) for f in (mine, engines, engines, mine, mine)]
        assert sizes(same_groups(items)) == [1, 2, 2]


def test_shared_values_of_a_subclassed_field_are_compared_too():
    fields = [MyShared(batch_size=1) for _ in range(3)]
    values = [vec(1), vec(1), vec(2)]
    items = [item(x=MultiModalFieldElem(*pair)) for pair in zip(values, fields, strict=True)]
    assert sizes(same_groups(items)) == [2, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (-1, 0), (0, 9)])
def test_dim_is_not_compared_and_the_first_decides(device, dims):
    items = [item(x=flat(torch.ones(2, 2) * d, dim=d)) for d in dims]
    result = same_groups(items, device=device)
    assert sizes(result) == [2]
    assert result.result[0][1]["x"].shape == ((4, 2) if dims[0] == 0 else (2, 4))


@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_placement_is_not_compared_and_the_first_decides(flags):
    items = [item(x=batched(vec(1, 2), keep_on_cpu=f)) for f in flags]
    result = same_groups(items, device="meta")
    assert sizes(result) == [2]
    assert result.result[0][1]["x"].device.type == ("cpu" if flags[0] else "meta")


# When shared values are equal

NAN_TENSOR = vec(1, float("nan"))
NAN = float("nan")
F8 = vec(1).to(torch.float8_e4m3fn)
NAMED = collections.namedtuple("NAMED", "a b")


class Odd:
    """Compares as it was told to."""

    def __init__(self, answer):
        self.answer = answer

    def __eq__(self, other):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    __hash__ = None


class MyList(list):
    pass


class PlainSubclass(torch.Tensor):
    pass


MERGES = {
    "equal tensors": (vec(1, 2), vec(1, 2), True),
    "the same tensor": (NAN_TENSOR[:1], NAN_TENSOR[:1], True),
    "other values": (vec(1, 2), vec(1, 3), False),
    "other dtype": (torch.tensor([1, 2]), vec(1, 2), False),
    "other int dtype": (torch.tensor([1]), torch.tensor([1], dtype=torch.int32), False),
    "other shape": (vec(1, 2), vec(1, 2).view(1, 2), False),
    "0-d and 1-element": (torch.tensor(1.0), vec(1), False),
    "0-d": (torch.tensor(7), torch.tensor(7), True),
    "empty": (torch.zeros(0, 2), torch.zeros(0, 2), True),
    "empty of other shape": (torch.zeros(0, 2), torch.zeros(2, 0), False),
    "nan": (NAN_TENSOR, NAN_TENSOR.clone(), False),
    "the same tensor with nan": (NAN_TENSOR, NAN_TENSOR, False),
    "nan in bfloat16": (NAN_TENSOR.bfloat16(), NAN_TENSOR.bfloat16(), False),
    "nan in complex": (torch.tensor([complex(0, NAN)]), torch.tensor([complex(0, NAN)]), False),
    "negative zero": (vec(0.0), vec(-0.0), True),
    "negative zero in half": (vec(0.0).half(), vec(-0.0).half(), True),
    "bool": (torch.tensor([True]), torch.tensor([True]), True),
    "other layout in memory": (torch.ones(2, 3), torch.ones(3, 2).t(), True),
    "expanded": (torch.ones(1).expand(4), torch.ones(4), True),
    "strided slices": (torch.arange(6)[::2], torch.tensor([0, 2, 4]), True),
    "conj": (torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1j]), True),
    "neg": (torch._neg_view(vec(1)), vec(-1), True),
    "requires_grad": (vec(1), vec(1).requires_grad_(), True),
    "parameter": (vec(1), torch.nn.Parameter(vec(1)), True),
    "subclass": (vec(1), vec(1).as_subclass(PlainSubclass), True),
    "float8": (F8, F8.clone(), True),
    "other float8": (F8, vec(2).to(F8.dtype), False),
    "the same float8 tensor": (F8, F8, None),
    "uint16": (vec(1).to(torch.uint16), vec(1).to(torch.uint16), True),
    "meta": (torch.zeros(2, device="meta"), torch.zeros(2, device="meta"), None),
    "cpu and meta": (torch.zeros(2), torch.zeros(2, device="meta"), None),
    "tensor and number": (torch.tensor(1), 1, False),
    "number and tensor": (1, torch.tensor(1), False),
    "tensor and list": (vec(1), [1.0], False),
    "list and tensor": ([1.0], vec(1), False),
    "int and bool": (1, True, True),
    "int and float": (1, 1.0, True),
    "bool and float": (True, 1.0, True),
    "nan number": (NAN, NAN, False),
    "big ints": (10**30, 10**30, True),
    "none": (None, None, True),
    "none and zero": (None, 0, False),
    "strings": ("a", "a", True),
    "other strings": ("a", "b", False),
    "equal lists": ([1, [vec(1)]], [1, [vec(1)]], True),
    "other nested value": ([1, [vec(1)]], [1, [vec(2)]], False),
    "other length": ([1, 2], [1], False),
    "empty lists": ([], [], True),
    "list and tuple": ([1], (1,), False),
    "tuple and list": ((1,), [1], False),
    "nested list and tuple": ([(1,)], [[1]], False),
    "equal tuples": ((1, vec(1)), (1, vec(1)), True),
    "other tuples": ((1, vec(1)), (1, vec(1), 2), False),
    "tuple and its subclass": ((1, 2), NAMED(1, 2), True),
    "list and its subclass": ([1], MyList([1]), True),
    "empty list and none": ([], None, False),
    "list and number": ([1], 1, False),
    "list with nan": ([NAN], [NAN], False),
    "list with nan tensor": ([NAN_TENSOR], [NAN_TENSOR], False),
    "dicts": ({"a": 1}, {"a": 1}, True),
    "other dicts": ({"a": 1}, {"a": 2}, False),
    "dicts of 1-element tensors": ({"a": vec(1)}, {"a": vec(1)}, True),
    "dicts of tensors": ({"a": vec(1, 2)}, {"a": vec(1, 2)}, None),
    "numpy of 1 element": (np.array([1]), np.array([1]), True),
    "numpy": (np.array([1, 2]), np.array([1, 2]), None),
    "numpy of other shape": (np.array([1, 2]), np.array([1, 2, 3]), None),
    "numpy and tensor": (np.array([1, 2]), torch.tensor([1, 2]), False),
    "object with a truthy answer": (Odd("yes"), 0, True),
    "object with a falsy answer": (Odd([]), 0, False),
    "object that answers NotImplemented": (Odd(NotImplemented), 0, False),
    "object that raises": (Odd(KeyError("mine")), 0, None),
    "array for an answer": (Odd(np.ones(2)), 0, None),
}


@pytest.mark.parametrize("case", MERGES)
@pytest.mark.parametrize("n", [2, 4])
def test_shared_values_merge_where_they_are_equal(case, n):
    left, right, merges = MERGES[case]
    items = [item(x=shared(right if i % 2 else left), y=batched(vec(i))) for i in range(n)]
    result = same_groups(items)
    if merges is None:
        assert result.exception is not None
    else:
        assert result.exception is None, str(result)
        # equality is asked of neighbours only, in both orders
        assert sizes(result)[0] >= 2 if merges else sizes(result) == [1] * n


def test_the_first_of_equal_shared_values_is_kept():
    items = [item(x=shared(v)) for v in (1, True, 1.0)]
    assert type(same_groups(items).result[0][1]["x"]) is int
    items = [item(x=shared(v)) for v in (vec(-0.0), vec(0.0))]
    assert same_groups(items).result[0][1]["x"] is items[0]["x"].data


def test_only_neighbours_are_compared():
    values = [vec(1), vec(1), vec(2), vec(1), vec(1), vec(1)]
    items = items_of(shared, values)
    assert sizes(same_groups(items)) == [2, 1, 3]


def test_comparison_stops_at_the_first_difference_in_the_order_of_the_left_item():
    unequal, raises = (1, 2), (np.ones(2), np.ones(2))
    first = [item(x=shared(a), y=shared(b)) for a, b in zip(unequal, raises, strict=True)]
    assert sizes(same_groups(first)) == [1, 1]
    last = [item(y=shared(b), x=shared(a)) for a, b in zip(unequal, raises, strict=True)]
    assert same_groups(last).exception is ValueError
    by_left = [first[0], last[1]]
    assert sizes(same_groups(by_left)) == [1, 1]
    by_kind = [item(x=batched(1), y=shared(raises[0])), item(x=shared(1), y=shared(raises[1]))]
    assert sizes(same_groups(by_kind)) == [1, 1]


# What is taken for items


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_same_item_many_times(device, n):
    one = item(a=batched(vec(1, 2)), b=flat(torch.ones(2, 3)), c=shared(3), d=batched("s"))
    result = same_groups([one] * n, device=device)
    assert sizes(result) == [n]
    same_batch([one] * n, device=device)


@pytest.mark.parametrize("items", [[None], [None, None], [item(x=batched(vec(1))), None]])
def test_an_item_that_is_none_is_an_attribute_error(items):
    assert same_groups(items).exception is AttributeError
    result = assert_same_outcome(
        lambda: plugin.batch_mm_items(items), lambda: ORIGINAL._batch_mm_items(items)
    )
    assert result.exception is AttributeError
    assert "NoneType" in result.message


def test_a_none_item_behind_a_group_is_met_when_its_turn_comes():
    items = [item(x=batched(vec(1))), item(y=batched(vec(1))), item(), None]
    result = same_groups(items)
    assert result.exception is AttributeError
    assert sizes(result) == [1, 1]


def test_plain_dicts_are_taken_for_items():
    items = [dict(item(x=batched(vec(i)), y=flat(vec(i, i)))) for i in range(3)]
    assert sizes(same_groups(items)) == [3]
    mixed = [items[0], item(x=batched(vec(8)), y=flat(vec(9)))]
    assert sizes(same_groups(mixed)) == [2]


class Indexed(collections.abc.Sequence):
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        return self.values[i]


@pytest.mark.parametrize("kind", [tuple, collections.UserList, Indexed])
def test_any_sequence_that_can_be_sliced_will_do(kind):
    items = kind([item(x=batched(vec(i // 2)), y=shared(i // 2)) for i in range(4)])
    assert sizes(same_groups(items)) == [2, 2]
    result = assert_same_outcome(
        lambda: plugin.batch_mm_items(items), lambda: ORIGINAL._batch_mm_items(items)
    )
    assert len(result.result["x"]) == 4


ONE = item(x=batched(vec(1)))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: iter([ONE]), TypeError),
        (lambda: (x for x in [ONE]), TypeError),
        (lambda: map(id, [ONE]), TypeError),
        (lambda: None, TypeError),
        (lambda: 5, TypeError),
        (lambda: {ONE["x"].data: ONE}, None),
        (lambda: {0: ONE}, None),
        (lambda: collections.deque([ONE]), TypeError),
        (lambda: "ab", AttributeError),
        (lambda: [1, 2], AttributeError),
        (lambda: [{"x": 1}], AttributeError),
        (lambda: [{"x": 1}, {"x": 1}], AttributeError),
        (lambda: [item(x=None)], AttributeError),
        (lambda: [item(x=None), item(x=None)], AttributeError),
        (lambda: [[("x", ONE["x"])]], AttributeError),
    ],
)
def test_what_is_no_sequence_of_items_raises_what_the_engine_raises(make, error):
    result = assert_same_outcome(
        lambda: plugin.group_and_batch_mm_items(make()),
        lambda: ORIGINAL.group_and_batch_mm_items(make()),
    )
    assert result.exception is not None
    assert error in (None, result.exception)


@pytest.mark.parametrize("make", [lambda: iter([ONE, ONE]), lambda: None, lambda: [5]])
def test_a_batch_takes_any_iterable_of_items(make):
    assert_same_outcome(
        lambda: plugin.batch_mm_items(make()), lambda: ORIGINAL._batch_mm_items(make())
    )


class Renamed(MultiModalKwargsItem):
    """Shows one more field than its data holds."""

    def items(self):
        yield from super().items()
        yield "extra", batched(5)


class Hiding(MultiModalKwargsItem):
    def __iter__(self):
        return (k for k in self.data if not k.startswith("_"))


class Counting(MultiModalKwargsItem):
    def __getitem__(self, key):
        self.__dict__.setdefault("asked", []).append(key)
        return super().__getitem__(key)


class Doubling(MultiModalKwargsItem):
    def __getitem__(self, key):
        elem = super().__getitem__(key)
        return MultiModalFieldElem(elem.data * 2, elem.field)


@pytest.mark.parametrize("kind", [Renamed, Hiding, Counting, Doubling])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mixed", [False, True])
def test_overridden_methods_of_an_item_are_honoured(kind, n, mixed):
    items = [kind({"x": batched(vec(i)), "_y": flat(vec(i))}) for i in range(n)]
    if mixed:
        items.append(MultiModalKwargsItem({"x": batched(vec(9)), "_y": flat(vec(9))}))
    result = assert_same_outcome(
        lambda: plugin.group_and_batch_mm_items(items),
        lambda: ORIGINAL.group_and_batch_mm_items(items),
    )
    compared = len(items) > 1
    assert result.exception is (KeyError if kind is Renamed and compared else None)
    assert_same_outcome(
        lambda: plugin.batch_mm_items(items), lambda: ORIGINAL._batch_mm_items(items)
    )


@dataclass(frozen=True, kw_only=True)
class Summing(MultiModalBatchedField):
    def _reduce_data(self, batch, *, pin_memory):
        return sum(batch)


@dataclass(frozen=True, kw_only=True)
class Public(MultiModalFlatField):
    def reduce_data(self, elems, *, device=None, pin_memory=False):
        return (len(elems), device, pin_memory, self.dim)


@dataclass(frozen=True, kw_only=True)
class LastShared(MultiModalSharedField):
    def _reduce_data(self, batch, *, pin_memory):
        return batch[-1]


@pytest.mark.parametrize("field", [Summing(), Public(slices=[], dim=3), LastShared(batch_size=1)])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_overridden_methods_of_a_field_are_honoured(field, n, device):
    items = [item(x=MultiModalFieldElem(vec(1), field), y=batched(vec(i))) for i in range(n)]
    same_groups(items, device=device, pin_memory=False)
    same_batch(items, device=device)
    if type(field) is Public:
        result = same_groups(items, device=device, pin_memory=False)
        assert result.result[0][1]["x"] == (n, device, False, 3)


@dataclass
class MyElem(MultiModalFieldElem):
    note: str = ""


class Lazy:
    """Not an element at all, but has what the engine reads."""

    field = MultiModalBatchedField()

    @property
    def data(self):
        return vec(4, 2)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_elements_need_only_look_like_elements(n):
    for make in (lambda i: MyElem(vec(i, i), MultiModalBatchedField(), "n"), lambda i: Lazy()):
        same_groups([item(x=make(i)) for i in range(n)])
        same_groups([item(x=batched(vec(0, 0))), *(item(x=make(i)) for i in range(n))])


# When things happen


class Touchy(MultiModalKwargsItem):
    def keys(self):
        raise LookupError("keys were read")

    def items(self):
        raise LookupError("items were read")


@pytest.mark.parametrize("who", ENTRIES)
def test_nothing_runs_before_the_first_next(who):
    for bad in ([Touchy()], [Touchy(), Touchy()], None, 5):
        generator = ENTRIES[who](bad)
        with pytest.raises((LookupError, TypeError)):
            next(generator)
        with pytest.raises(StopIteration):
            next(generator)


@pytest.mark.parametrize("who", ENTRIES)
def test_a_generator_is_what_is_returned(who):
    generator = ENTRIES[who]([ONE])
    assert type(generator) is types.GeneratorType
    n, batch = next(generator)
    assert (type(n), type(batch)) == (int, dict)
    assert next(generator, "end") == "end"
    generator = ENTRIES[who]([ONE, item()])
    next(generator)
    generator.close()
    assert next(generator, "end") == "end"


def test_groups_are_tuples_of_a_count_and_a_dict():
    (group,) = plugin.group_and_batch_mm_items([ONE])
    assert type(group) is tuple


def test_each_group_is_reduced_when_it_is_asked_for():
    bad = item(y=flat(5))
    items = [item(x=batched(vec(1))), bad, item(z=batched(vec(1)))]
    result = same_groups(items)
    assert result.exception is TypeError
    assert sizes(result) == [1]
    for group in ENTRIES.values():
        generator = group(items)
        next(generator)
        bad["y"].data = [vec(3)]
        assert len(list(generator)) == 2
        bad["y"].data = 5


MUTATIONS = {
    "replace a later item": lambda items: items.__setitem__(3, item(x=batched(vec(8)))),
    "replace data": lambda items: setattr(items[2]["x"], "data", vec(5, 5)),
    "replace a field": lambda items: setattr(
        items[2]["x"], "field", MultiModalFlatField(slices=[])
    ),
    "write into a tensor": lambda items: items[2]["x"].data.fill_(9),
    "drop a field": lambda items: items[3].pop("x"),
    "add a field": lambda items: items[3].update(z=batched(vec(1))),
    "append an item": lambda items: items.append(item(x=batched(vec(7)))),
    "remove the last item": lambda items: items.pop(),
    "clear": lambda items: items.clear(),
    "replace an item that was yielded": lambda items: items.__setitem__(0, None),
    "make an item none": lambda items: items.__setitem__(2, None),
    "change a shared value": lambda items: setattr(items[3]["s"], "data", 5),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_items_changed_between_two_groups_are_read_as_they_are_then(name):
    def run(group):
        items = [item(x=batched(vec(i)), s=shared(i // 2)) for i in range(4)]
        generator = group(items)
        yield next(generator)
        MUTATIONS[name](items)
        yield from generator

    assert_same_outcome(lambda: run(ENTRIES["ours"]), lambda: run(ENTRIES["theirs"]))


def test_the_next_call_works_after_an_error():
    good = items_of(batched, [vec(1, 2), vec(3, 4)])
    for bad in (items_of(flat, [5]), [None], items_of(shared, [np.ones(2), np.ones(2)])):
        for _ in range(3):
            assert outcome(lambda: plugin.group_and_batch_mm_items(bad)).exception is not None  # noqa: B023
            same_groups(good)


def test_a_generator_left_unfinished_keeps_nothing_alive_and_does_no_harm():
    items = [item(x=batched(vec(i)), s=shared(i)) for i in range(5)]
    for _ in range(3):
        next(plugin.group_and_batch_mm_items(items))
    assert sizes(same_groups(items)) == [1] * 5


def test_two_generators_over_the_same_items_do_not_disturb_each_other():
    items = [item(x=batched(vec(i // 2, i)), s=shared(i // 2)) for i in range(6)]
    expected = list(ENTRIES["theirs"](items))
    a, b = ENTRIES["ours"](items), ENTRIES["ours"](items)
    got = [next(a), next(b), next(b), next(a), next(a), next(b)]
    for ours, theirs in zip(got, [expected[i] for i in (0, 0, 1, 1, 2, 2)], strict=True):
        assert_same(ours, theirs, inputs=leaves_of(items))


# Signatures, and standing in for the engine's functions


def test_signatures_are_the_engines(activated):
    for ours, theirs in (
        (plugin.group_and_batch_mm_items, ORIGINAL.group_and_batch_mm_items),
        (plugin.batch_mm_items, ORIGINAL._batch_mm_items),
    ):
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert inspect.isgeneratorfunction(ours) == inspect.isgeneratorfunction(theirs)


@pytest.mark.parametrize(("args", "options"), [((), {}), (([], "cpu"), {}), (([],), {"dtype": 1})])
def test_wrong_arguments_are_refused_at_the_call(args, options):
    for ours in (plugin.group_and_batch_mm_items, plugin.batch_mm_items):
        with pytest.raises(TypeError):
            ours(*args, **options)


def test_activation_replaces_both_functions_and_deactivation_restores_them():
    before = (engine.group_and_batch_mm_items, engine._batch_mm_items)
    originals = plugin.originals()
    for mine, engines in zip(
        (originals.group_and_batch_mm_items, originals._batch_mm_items), before, strict=True
    ):
        assert mine.__code__ is engines.__code__
    assert not plugin.is_active()
    for _ in range(2):
        plugin.activate()
        plugin.activate()
        assert plugin.is_active()
        assert engine.group_and_batch_mm_items is plugin.group_and_batch_mm_items
        assert engine._batch_mm_items is plugin.batch_mm_items
        assert plugin.originals() == originals
        plugin.deactivate()
        plugin.deactivate()
        assert not plugin.is_active()
        assert (engine.group_and_batch_mm_items, engine._batch_mm_items) == before


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_replaced_functions_can_be_pickled(activated, protocol):
    for function in (engine.group_and_batch_mm_items, engine._batch_mm_items):
        assert pickle.loads(pickle.dumps(function, protocol)) is function


MODALITIES = [
    ("image", item(x=batched(vec(1)))),
    ("image", item(x=batched(vec(2)))),
    ("audio", item(x=batched(vec(3)))),
    ("image", item(x=batched(vec(4)))),
    ("image", item(x=batched(vec(5)), y=batched(vec(5)))),
    ("video", item()),
    ("video", item()),
]


@pytest.mark.parametrize("device", DEVICES)
def test_only_consecutive_items_of_one_modality_merge(device):
    expected = list(engine.group_and_batch_mm_kwargs(MODALITIES, device=device))
    assert [(m, n) for m, n, _ in expected] == [
        ("image", 2),
        ("audio", 1),
        ("image", 1),
        ("image", 1),
        ("video", 2),
    ]
    inputs = leaves_of([x for _, x in MODALITIES])
    plugin.activate()
    try:
        got = list(engine.group_and_batch_mm_kwargs(MODALITIES, device=device))
    finally:
        plugin.deactivate()
    assert_same(got, expected, inputs=inputs)
    names, items = zip(*MODALITIES, strict=True)
    groups = list(mmcollate.collate_groups(items, None, modalities=names, device=device))
    assert {type(g) for g in groups} == {mmcollate.Group}
    assert [g._fields for g in groups] == [("modality", "num_items", "batch")] * len(groups)
    assert_same([tuple(g) for g in groups], expected, inputs=inputs)


def test_collate_groups_of_plain_dicts_follow_the_same_rules():
    items = [item(x=batched(vec(i)), s=shared(i // 2)) for i in range(5)]
    plain, specs = to_plain(items)
    expected = list(ENTRIES["theirs"](items))
    for make in (mmcollate.collate_groups, mmcollate.reference.collate_groups):
        groups = make(plain, specs)
        assert type(groups) is types.GeneratorType
        got = [tuple(g)[-2:] for g in groups]
        assert_same(got, expected, inputs=leaves_of(items))


def test_collate_groups_is_lazy():
    for make in (mmcollate.collate_groups, mmcollate.reference.collate_groups):
        groups = make(
            [{"x": vec(1), "s": 1}, {"x": 5, "s": 2}],
            {"x": mmcollate.Flat(), "s": mmcollate.Shared()},
        )
        next(groups)
        with pytest.raises(TypeError):
            next(groups)


# The engine's own way in: MultiModalKwargsItems.get_data

REQUESTS = {
    "one modality": {"image": items_of(batched, [vec(1), vec(2)])},
    "two modalities": {
        "image": items_of(batched, [vec(1), vec(2)]),
        "audio": [item(y=flat(vec(1, 2)))],
    },
    "a modality without items": {"image": [], "audio": [item(y=flat(vec(1, 2)))]},
    "equal keys of two modalities": {
        "image": items_of(batched, [vec(1), vec(2)]),
        "audio": items_of(batched, [vec(3, 4)]),
    },
    "more than one batch": {
        "image": [item(x=batched(vec(1))), item(y=batched(vec(1)))],
        "audio": [item(z=batched(vec(1)))],
    },
    "an item that is none": {"image": [item(x=batched(vec(1))), None]},
    "shared values that differ": {"image": items_of(shared, [1, 2])},
    "nothing": {},
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("device", DEVICES)
def test_get_data_of_a_request(name, device):
    request = MultiModalKwargsItems(REQUESTS[name])
    theirs = outcome(lambda: request.get_data(device=device))
    if name in ("more than one batch", "an item that is none", "shared values that differ"):
        assert theirs.exception is RuntimeError

    def ours():
        plugin.activate()
        try:
            return request.get_data(device=device)
        finally:
            plugin.deactivate()

    leaves = leaves_of([x for xs in REQUESTS[name].values() for x in xs])

    def again():
        if theirs.exception is not None:
            raise theirs.exception(theirs.message)
        return theirs.result

    assert_same_outcome(ours, again, inputs=leaves)


def test_the_later_modality_wins_an_equal_key():
    request = MultiModalKwargsItems(REQUESTS["equal keys of two modalities"])
    assert request.get_data()["x"].tolist() == [[3.0, 4.0]]

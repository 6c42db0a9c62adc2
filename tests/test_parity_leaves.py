"""What becomes of the leaves of a batch: where they go, which stay the same object, what pins."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from compare import assert_same_outcome

pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")

from mmcollate.integrations import vllm as plugin
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
)
from vllm_items import (
    DEVICES,
    GRAD_MODES,
    HAS_ACCELERATOR,
    ORIGINAL,
    batched,
    flat,
    item,
    items_of,
    leaves_of,
    same,
    shared,
    value_of,
)

KINDS = {"batched": batched, "flat": flat, "shared": shared}
NAMED = collections.namedtuple("NAMED", "a b")

needs_no_accelerator = pytest.mark.skipif(
    HAS_ACCELERATOR, reason="tests the refusal to pin on a machine without an accelerator"
)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


# Which field decides


@dataclass(frozen=True, kw_only=True)
class MyFlat(MultiModalFlatField):
    pass


FIELDS = {
    "batched": MultiModalBatchedField(),
    "flat": MultiModalFlatField(slices=[]),
    "shared": MultiModalSharedField(batch_size=1),
    "subclass of flat": MyFlat(slices=[]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", FIELDS)
@pytest.mark.parametrize("second", FIELDS)
def test_a_batch_of_mixed_field_classes_is_a_value_error(first, second, device):
    items = [item(x=MultiModalFieldElem(ones(2, 3), FIELDS[k])) for k in (first, second, first)]
    theirs = assert_same_outcome(
        lambda: plugin.batch_mm_items(items, device=device),
        lambda: ORIGINAL._batch_mm_items(items, device=device),
        inputs=leaves_of(items),
    )
    if first != second:
        assert theirs.exception is ValueError
        assert theirs.message.startswith("Cannot merge different field_types=")


def test_mixed_field_classes_are_named_before_any_data_is_touched():
    items = [item(x=batched(5)), item(x=shared(ones(2)))]
    theirs = assert_same_outcome(
        lambda: plugin.batch_mm_items(items, device="nowhere", pin_memory=True),
        lambda: ORIGINAL._batch_mm_items(items, device="nowhere", pin_memory=True),
    )
    assert theirs.exception is ValueError


@dataclass(frozen=True, kw_only=True)
class Joining(BaseMultiModalField):
    """A kind of field of its own."""

    def build_elems(self, modality, key, data):
        raise NotImplementedError

    def _reduce_data(self, batch, *, pin_memory):
        return {"joined": batch, "pin": pin_memory}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 3])
def test_a_kind_of_field_nobody_knows_reduces_itself(device, n):
    items = [item(x=MultiModalFieldElem(ones(i), Joining()), y=batched(ones(2))) for i in range(n)]
    theirs = same(items, device=device)
    assert len(value_of(theirs)["joined"]) == n


# Where leaves go


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_placement(kind, n, mode, device):
    for keep_on_cpu in (False, True):
        leaves = [torch.arange(6.0).view(2, 3)] * n
        with GRAD_MODES[mode]():
            theirs = same(items_of(KINDS[kind], leaves, keep_on_cpu=keep_on_cpu), device=device)
        where = "meta" if device == "meta" and not keep_on_cpu else "cpu"
        assert value_of(theirs).device.type == where


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0), torch.device("meta", 0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_device_with_an_index(device, kind, n):
    leaves = [ones(2, 3) * i for i in range(n)]
    theirs = same(items_of(KINDS[kind], leaves), device=device)
    if torch.device(device).type == "cpu" and n == 1 and kind != "batched":
        # asking for "cpu:0" makes a copy only where torch thinks it another device than "cpu"
        assert value_of(theirs).device.type == "cpu"


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", -1, 3.5, "cpu:7", object(), "mps"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("keep_on_cpu", [False, True])
def test_a_device_that_does_not_exist(device, kind, n, keep_on_cpu):
    tensors = items_of(KINDS[kind], [ones(2)] * n, keep_on_cpu=keep_on_cpu)
    result = same(tensors, device=device)
    if keep_on_cpu:
        assert result.exception is None
    elif device != "cpu:7":
        assert result.exception is not None
    # only tensors are moved, so nobody asks the device where there is none
    assert same(items_of(KINDS[kind], [["a"]] * n), device=device).exception is None


def test_fields_are_reduced_in_order_so_the_first_error_wins():
    items = [item(a=batched(ones(1)), b=flat(5), c=flat(ones(2), dim=7)) for _ in range(2)]
    assert same(items).exception is TypeError
    assert same([item(c=x["c"], b=x["b"]) for x in items]).exception is IndexError


def test_a_field_behind_a_failing_one_is_not_asked():
    class Never:
        field = Joining()

        @property
        def data(self):
            raise AssertionError("was read")

    items = [item(a=flat(5), b=Never())]
    theirs = assert_same_outcome(
        lambda: plugin.batch_mm_items(items), lambda: ORIGINAL._batch_mm_items(items)
    )
    assert theirs.exception is TypeError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2])
def test_data_on_a_device_stays_there_when_no_device_is_named(kind, n):
    leaves = [torch.ones(2, 3, device="meta")] * n
    theirs = same(items_of(KINDS[kind], leaves, keep_on_cpu=True))
    assert value_of(theirs).device.type == "meta"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_device_data_kept_on_cpu_is_copied_back_when_a_device_is_named(kind, n, device):
    leaves = [torch.ones(2, 3, device="meta")] * n
    theirs = same(items_of(KINDS[kind], leaves, keep_on_cpu=True), device=device)
    assert theirs.exception is NotImplementedError  # meta data cannot be copied: it was tried


# Containers and plain objects


class MyList(list):
    pass


class MyDict(dict):
    pass


MODULE = torch.nn.Linear(1, 1)

LEAVES = {
    "list of tensors": lambda: [ones(1), ones(2)],
    "tuple of tensors": lambda: (ones(1), ones(2)),
    "dict of tensors": lambda: {"a": ones(1), 5: ones(2)},
    "deeply nested": lambda: [{"a": (ones(1), [ones(2), {"b": ones(3)}])}],
    "named tuple": lambda: NAMED(ones(1), 2),
    "list subclass": lambda: MyList([ones(1)]),
    "dict subclass": lambda: MyDict(a=ones(1)),
    "ordered dict": lambda: collections.OrderedDict(b=ones(1), a=ones(2)),
    "user dict": lambda: collections.UserDict(a=ones(1)),
    "parameter list": lambda: torch.nn.ParameterList([torch.nn.Parameter(ones(1))]),
    "module": lambda: MODULE,
    "set": lambda: {1, 2},
    "range": lambda: range(3),
    "bytes": lambda: b"ab",
    "string": lambda: "ab",
    "empty string": lambda: "",
    "int": lambda: 12345,
    "float": lambda: 1.5,
    "nan": lambda: float("nan"),
    "bool": lambda: True,
    "none": lambda: None,
    "numpy": lambda: np.arange(6.0).reshape(2, 3),
    "numpy scalar": lambda: np.float32(1.5),
    "numpy of 0-d": lambda: np.array(1.5),
    "list of ints": lambda: [1, 2, 3],
    "list of floats": lambda: [0.5, 1.5],
    "list of lists": lambda: [[1], [2, 3]],
    "empty list": list,
    "empty tuple": lambda: (),
    "empty dict": dict,
    "list of none": lambda: [None, None],
    "tensor subclass": lambda: ones(2).as_subclass(type("Sub", (torch.Tensor,), {})),
    "size": lambda: torch.Size([1, 2]),
    "dtype": lambda: torch.float32,
    "exception": lambda: ValueError("x"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("keep_on_cpu", [False, True])
def test_any_leaf_alone_repeated_and_mixed(name, kind, device, keep_on_cpu):
    make = KINDS[kind]
    for leaves in (
        [LEAVES[name]()],
        [LEAVES[name](), LEAVES[name]()],
        [LEAVES[name]()] * 3,
        [LEAVES[name](), ones(2)],
        [ones(2), LEAVES[name]()],
        [ones(2), ones(2), LEAVES[name](), None],
    ):
        same(items_of(make, leaves, keep_on_cpu=keep_on_cpu), device=device)


def test_containers_are_rebuilt_when_a_device_is_named_and_only_then():
    leaf = [ones(1), {"a": ones(2)}]
    assert value_of(same(items_of(shared, [leaf]))) is leaf
    rebuilt = value_of(same(items_of(shared, [leaf]), device="cpu"))
    assert rebuilt is not leaf
    assert rebuilt[0] is leaf[0]
    assert value_of(same(items_of(batched, [leaf])))[0] is leaf


def test_rebuilding_flattens_named_tuples_and_subclasses_to_the_plain_types():
    leaves = [NAMED(ones(1), 2), MyList([1]), MyDict(a=1)]
    rebuilt = value_of(same(items_of(shared, [leaves]), device="cpu"))
    assert [type(x) for x in rebuilt] == [tuple, list, dict]


@pytest.mark.parametrize("kind", ["flat", "shared"])
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_a_tensor_that_is_where_it_should_be_is_the_same_object(kind, device):
    leaf = torch.arange(6.0).view(2, 3)
    assert value_of(same(items_of(KINDS[kind], [leaf]), device=device)) is leaf


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_ragged_leaves_are_the_same_objects(device):
    leaves = [ones(i) for i in range(4)]
    batch = value_of(same(items_of(batched, leaves), device=device))
    assert type(batch) is list
    assert all(a is b for a, b in zip(batch, leaves, strict=True))


LAYOUTS = {
    "contiguous": lambda: torch.empty(3, 4),
    "transposed": lambda: torch.empty(4, 3).t(),
    "permuted": lambda: torch.empty(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "gapped": lambda: torch.empty(4, 4)[:, ::2],
    "gapped rows": lambda: torch.empty(6, 4)[::2],
    "sliced columns": lambda: torch.empty(4, 8)[:, 2:5],
    "expanded": lambda: torch.empty(1, 3).expand(4, 3),
    "expanded 0-d": lambda: torch.empty(()).expand(4),
    "0-d": lambda: torch.empty(()),
    "empty": lambda: torch.empty(0, 3),
    "odd stride of a size-1 dim": lambda: torch.empty(3).as_strided((1, 3), (77, 1)),
    "overlapping": lambda: torch.empty(6).as_strided((3, 3), (1, 1)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2])
def test_strides_of_what_arrives(layout, kind, device, n):
    leaves = [LAYOUTS[layout]() for _ in range(n)]
    theirs = same(items_of(KINDS[kind], leaves), device=device)
    if device == "meta" and n == 1 and kind == "shared" and layout != "overlapping":
        dense = layout in ("contiguous", "transposed", "permuted", "channels last")
        if dense:
            assert value_of(theirs).stride() == leaves[0].stride()
        elif layout in ("gapped", "gapped rows", "sliced columns", "expanded"):
            assert value_of(theirs).is_contiguous()


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("n", [1, 2])
def test_parameters_and_grads_on_the_way_to_a_device(device, kind, mode, n):
    for make in (
        torch.nn.Parameter,
        lambda x: x.requires_grad_(),
        lambda x: x.requires_grad_() * 2,
    ):
        with torch.enable_grad():
            leaves = [make(ones(2, 3)) for _ in range(n)]
        with GRAD_MODES[mode]():
            same(items_of(KINDS[kind], leaves), device=device)


# Pinning


@needs_no_accelerator
class TestPinningWithoutAnAccelerator:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("device", [None, "cpu:0", "meta", torch.device("cpu", 0)])
    def test_several_tensors_are_refused_wherever_memory_is_allocated(self, kind, device):
        theirs = same(items_of(KINDS[kind], [ones(2)] * 2), device=device, pin_memory=True)
        if kind == "shared" and device is None:
            assert theirs.exception is None
        else:
            assert theirs.exception is RuntimeError

    @pytest.mark.parametrize("kind", KINDS)
    def test_one_tensor_allocates_nothing_unless_it_is_moved(self, kind):
        assert same(items_of(KINDS[kind], [ones(2)]), pin_memory=True).exception is None
        for device in ("cpu:0", "meta"):
            theirs = same(items_of(KINDS[kind], [ones(2)]), device=device, pin_memory=True)
            assert theirs.exception is RuntimeError

    @pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("n", [1, 2])
    def test_nothing_is_pinned_for_the_cpu(self, device, kind, n):
        theirs = same(items_of(KINDS[kind], [ones(2)] * n), device=device, pin_memory=True)
        assert theirs.exception is None

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("n", [1, 2])
    def test_nothing_is_pinned_that_is_kept_on_the_cpu(self, device, kind, n):
        items = items_of(KINDS[kind], [ones(2)] * n, keep_on_cpu=True)
        assert same(items, device=device, pin_memory=True).exception is None

    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_is_pinned_where_any_leaf_is_on_a_device(self, kind):
        on_meta = torch.ones(2, device="meta")
        for leaves in ([on_meta, on_meta], [on_meta]):
            for device in (None, "meta"):
                items = items_of(KINDS[kind], leaves)
                assert same(items, device=device, pin_memory=True).exception is None
        mixed = items_of(batched, [[ones(2)], [[on_meta]], {"a": ones(3)}])
        assert same(mixed, device="meta", pin_memory=True).exception is None
        without = items_of(batched, [[ones(2)], {"a": ones(3)}])
        assert same(without, device="meta", pin_memory=True).exception is RuntimeError

    def test_a_list_pins_each_leaf_only_on_the_way_to_a_device(self):
        ragged = items_of(batched, [ones(1), ones(2)])
        assert same(ragged, pin_memory=True).exception is None
        assert same(ragged, device="meta", pin_memory=True).exception is RuntimeError

    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_is_pinned_where_there_is_no_tensor(self, kind):
        for leaf in ([1, 2], ["a"], [None]):
            items = items_of(KINDS[kind], [leaf, leaf])
            assert same(items, device="meta", pin_memory=True).exception is None

    def test_empty_tensors_are_never_pinned_already(self):
        items = items_of(flat, [torch.zeros(0, 3)])
        assert same(items, device="meta", pin_memory=True).exception is RuntimeError

    def test_padding_is_pinned_too(self):
        items = items_of(flat, [ones(1, 2), ones(1, 3)])
        assert same(items, pin_memory=True).exception is RuntimeError

    def test_the_next_call_works_after_a_refusal(self):
        good = items_of(batched, [ones(2)] * 2)
        for _ in range(2):
            assert same(good, pin_memory=True).exception is RuntimeError
            assert same(good).exception is None

    @pytest.mark.parametrize("pin", [1, "yes", 0, None, [], [0]])
    def test_pin_memory_is_taken_for_true_or_false(self, pin):
        same(items_of(batched, [ones(2)]), pin_memory=pin)
        same(items_of(batched, [ones(2)] * 2), device="cpu", pin_memory=pin)
        same(items_of(batched, [ones(2)] * 2), pin_memory=pin)

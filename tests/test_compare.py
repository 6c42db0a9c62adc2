"""The comparer must see every difference it is there for, and none that is not there."""

from __future__ import annotations

import collections
import copy
import math

import numpy as np
import pytest
import torch
from compare import Outcome, assert_same, assert_same_outcome, outcome


def differs(ours, theirs, match, **options):
    with pytest.raises(AssertionError, match=match):
        assert_same(ours, theirs, **options)
    with pytest.raises(AssertionError):
        assert_same({"f": [ours]}, {"f": [theirs]}, **options)


def f32_from_bits(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


ARANGE = torch.arange(6.0).reshape(2, 3)
QNAN = f32_from_bits(0x7FC00000)

DIFFERENT = {
    "list and tuple": ([1], (1,), "type"),
    "list and tensor": ([torch.zeros(2)], torch.zeros(1, 2), "type"),
    "int and bool": (1, True, "type"),
    "int and float": (1, 1.0, "type"),
    "dict and a subclass": ({}, collections.OrderedDict(), "type"),
    "tensor and parameter": (
        torch.zeros(1),
        torch.nn.Parameter(torch.zeros(1), requires_grad=False),
        "type",
    ),
    "length of a list": ([1, 2], [1], "length"),
    "missing key": ({"a": 1}, {"a": 1, "b": 2}, "keys"),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "keys"),
    "nested value": ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, r"\['a'\]\[0\]\['b'\]"),
    "string": ("a", "b", "'a' != 'b'"),
    "negative zero as a float": (0.0, -0.0, "0.0 != -0.0"),
    "nan and a number": (math.nan, 1.0, "nan"),
    "numpy dtype": (np.zeros(2, "f4"), np.zeros(2, "f8"), "!="),
    "numpy values": (np.zeros(2), np.ones(2), "!="),
    "dtype": (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.float32), "dtype"),
    "shape": (torch.zeros(2, 1), torch.zeros(2), "rank"),
    "shape of the same rank": (torch.zeros(1, 2), torch.zeros(2, 1), "shape"),
    "shape without elements": (torch.zeros(0, 2), torch.zeros(0, 3), "shape"),
    "strides": (ARANGE, ARANGE.t().contiguous().t(), "strides"),
    "stride of a size-1 dim": (
        torch.zeros(1, 2),
        torch.zeros(2).as_strided((1, 2), (7, 1)),
        "strides",
    ),
    "device": (torch.zeros(2), torch.zeros(2, device="meta"), "device"),
    "meta shape": (torch.zeros(2, device="meta"), torch.zeros(3, device="meta"), "shape"),
    "meta strides": (
        torch.empty_strided((2, 2), (2, 1), device="meta"),
        torch.empty_strided((2, 2), (1, 2), device="meta"),
        "strides",
    ),
    "requires_grad": (torch.zeros(2), torch.zeros(2, requires_grad=True), "requires_grad"),
    "grad_fn": (
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, requires_grad=True) + 0,
        "grad_fn",
    ),
    "value": (torch.zeros(3), torch.tensor([0.0, 0.0, 1.0]), r"first at \(2,\)"),
    "value of a 0-d tensor": (torch.tensor(1), torch.tensor(2), "bits"),
    "value in a strided tensor": (ARANGE.t(), (ARANGE + torch.eye(2, 3)).t(), "2 of 6"),
    "bool": (torch.tensor([True]), torch.tensor([False]), "bits"),
    "negative zero": (torch.tensor([0.0]), torch.tensor([-0.0]), "bits"),
    "nan payload": (QNAN, f32_from_bits(0x7FC00001), "bits"),
    "nan sign": (QNAN, f32_from_bits(0xFFC00000), "bits"),
    "quiet and signalling nan": (QNAN, f32_from_bits(0x7FA00000), "bits"),
    "bfloat16": (
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1.0078125], dtype=torch.bfloat16),
        "bits",
    ),
    "imaginary part": (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), "bits"),
    "conj bit": (
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 - 2j]),
        "conj bit",
    ),
    "value under the conj bit": (
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 3j]).conj(),
        "bits",
    ),
    "neg bit": (torch._neg_view(torch.tensor([1.0])), torch.tensor([-1.0]), "neg bit"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_difference_is_seen_from_both_sides(case):
    ours, theirs, match = DIFFERENT[case]
    differs(ours, theirs, match)
    differs(theirs, ours, ":")


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_thing_is_the_same_as_itself_and_as_its_deep_copy(case):
    for x in DIFFERENT[case][:2]:
        assert_same(x, x)
        # deepcopy makes no copy of a non-leaf, and resolves the lazy bits
        if not isinstance(x, torch.Tensor) or not (x.grad_fn or x.is_conj() or x.is_neg()):
            assert_same(copy.deepcopy(x), x)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_and_nested_tensors_are_compared_by_their_parts():
    eye = torch.eye(2)
    differs(eye.to_sparse(), (2 * eye).to_sparse(), "values")
    differs(eye.to_sparse(), eye.flip(0).to_sparse(), "indices")
    differs(eye.to_sparse(), eye.to_sparse_csr(), "layout")
    differs(eye.to_sparse_csr(), (2 * eye).to_sparse_csr(), "values")
    rows, other = [torch.zeros(1), torch.zeros(2)], [torch.zeros(1), torch.ones(2)]
    for layout, part in ((torch.strided, "unbind 1"), (torch.jagged, "values")):
        ours, theirs = (torch.nested.nested_tensor(x, layout=layout) for x in (rows, other))
        differs(ours, theirs, part)
        if layout is torch.strided:  # two jagged ones never have equal shapes
            assert_same(ours, torch.nested.nested_tensor(rows, layout=layout))
    if torch.backends.mkldnn.is_available():
        differs(eye.to_mkldnn(), (2 * eye).to_mkldnn(), "dense")


ALL_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_one_flipped_bit_is_seen_in_every_dtype(dtype):
    raw = torch.arange(64, dtype=torch.uint8)
    ours, theirs = raw.clone().view(dtype), raw.clone().view(dtype)
    assert_same(ours, theirs)
    theirs.untyped_storage()[37] ^= 1
    differs(ours, theirs, "bits")


def test_quantised_tensors_are_compared_by_code_scale_and_zero_point():
    def quantised(values, scale=0.1, zero_point=0):
        return torch.quantize_per_tensor(torch.tensor(values), scale, zero_point, torch.quint8)

    assert_same(quantised([1.0, 2.0]), quantised([1.0, 2.0]))
    differs(quantised([1.0, 2.0]), quantised([1.0, 3.0]), "bits")
    differs(quantised([1.0]), quantised([1.0], scale=0.2), "scale")
    differs(quantised([1.0]), quantised([1.0], zero_point=1), "zero point")


def test_inference_tensors_are_told_from_normal_ones():
    with torch.inference_mode():
        inference = torch.zeros(2)
        assert_same(inference, inference.clone())
    differs(inference, torch.zeros(2), "inference")


def test_attributes_of_a_tensor_count():
    ours, theirs = torch.zeros(2), torch.zeros(2)
    theirs.modality = "image"
    differs(ours, theirs, "modality")
    ours.modality = "image"
    assert_same(ours, theirs)


def test_strides_can_be_left_out():
    assert_same(ARANGE, ARANGE.t().contiguous().t(), strides=False)
    differs(ARANGE, (ARANGE + 1).t().contiguous().t(), "bits", strides=False)


def test_fake_tensors_are_compared_without_contents():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        ours, theirs, other = torch.zeros(2), torch.ones(2), torch.zeros(3)
    assert_same(ours, theirs)
    differs(ours, other, "shape")
    differs(ours, torch.zeros(2), "type")


def test_storage_taken_away_is_neither_read_nor_equal_to_real_data():
    gone = torch.ones(4)
    gone.untyped_storage().resize_(0)
    assert_same(gone, gone.view(4))
    differs(gone, torch.ones(4), "readable")


def test_expanded_terabytes_are_compared_by_what_they_repeat():
    assert_same(torch.ones(1).expand(1 << 40), torch.ones(1).expand(1 << 40))
    differs(torch.ones(1).expand(1 << 40), torch.zeros(1).expand(1 << 40), "bits")
    assert_same(torch.ones(2, 1).expand(2, 3), torch.ones(1, 3).expand(2, 3), strides=False)


# Identity and shared memory


def test_identity_with_an_input_must_hold_in_both():
    leaf = torch.ones(3)
    assert_same(leaf, leaf, inputs=[leaf])
    differs(leaf.clone(), leaf, "the very object", inputs=[leaf])
    differs(leaf, leaf.clone(), "the very object", inputs=[leaf])
    differs(leaf.view(3), leaf, "the very object", inputs=[{"a": (leaf,)}])


def test_identity_counts_for_containers_and_plain_objects():
    nested = [1000, "x"]
    assert_same([nested], [nested], inputs=[nested])
    differs([list(nested)], [nested], "the very object", inputs=[nested])
    thing = collections.UserDict(a=1)
    differs(collections.UserDict(a=1), thing, "the very object", inputs=[thing])


def test_memory_shared_with_an_input_must_be_shared_in_both():
    leaf = torch.ones(4)
    assert_same(leaf.unsqueeze(0), leaf.unsqueeze(0), inputs=[leaf])
    differs(torch.ones(1, 4), leaf.unsqueeze(0), "theirs shares", inputs=[leaf])
    differs(leaf.unsqueeze(0), torch.ones(1, 4), "ours shares", inputs=[leaf])
    differs(leaf[:2], leaf[2:], "shares", inputs=[leaf[:2]])


def test_another_storage_on_the_same_memory_is_not_a_view_of_the_input():
    leaf = torch.ones(4)
    imported = torch.from_dlpack(leaf.numpy()).unsqueeze(0)
    differs(imported, leaf.unsqueeze(0), "storage of", inputs=[leaf])
    differs(imported, torch.ones(1, 4), "bytes of", inputs=[leaf])


def test_empty_and_meta_outputs_share_by_storage():
    for leaf in (torch.zeros(0, 2), torch.zeros(3, 2, device="meta")):
        assert_same(leaf.unsqueeze(0), leaf.unsqueeze(0), inputs=[leaf])
        differs(torch.empty_like(leaf).unsqueeze(0), leaf.unsqueeze(0), "shares", inputs=[leaf])


def test_a_view_of_adjacent_inputs_is_no_copy_of_them():
    base = torch.arange(6)
    batch = base[:4].view(2, 2)
    differs(batch, batch.clone(), "ours shares", inputs=[base[:2], base[2:4]])


def test_outputs_that_overlap_one_another_are_seen():
    slab = torch.zeros(6)
    apart = [torch.zeros(4), torch.zeros(4)]
    differs([slab[:4], slab[2:]], apart, "shares memory with")
    differs(apart, [slab[:4], slab[2:]], "shares memory with")
    assert_same([slab[:3], slab[3:]], [torch.zeros(3), torch.zeros(3)])


# Outcomes


def test_outcome_keeps_what_a_generator_yielded_before_it_failed():
    def broken():
        yield 1
        raise KeyError("k")

    assert outcome(broken) == Outcome([1], KeyError, "'k'")
    assert outcome(lambda: 5) == Outcome(5)


def _raiser(kind, text):
    def fn():
        raise kind(text)

    return fn


def test_outcomes_differ_by_exception_type_message_and_result():
    assert_same_outcome(_raiser(ValueError, "a"), _raiser(ValueError, "a"))
    assert_same_outcome(_raiser(ValueError, "at 0x12"), _raiser(ValueError, "at 0x3f"))
    for ours, theirs in (
        (_raiser(ValueError, "a"), _raiser(ValueError, "b")),
        (_raiser(ValueError, "a"), _raiser(TypeError, "a")),
        (_raiser(UnicodeError, "a"), _raiser(ValueError, "a")),
        (lambda: 1, _raiser(ValueError, "a")),
        (_raiser(ValueError, "a"), lambda: 1),
        (lambda: 1, lambda: 2),
    ):
        with pytest.raises(AssertionError):
            assert_same_outcome(ours, theirs)


def test_a_second_call_that_behaves_otherwise_is_seen():
    calls = []

    def fails_later():
        calls.append(1)
        if len(calls) > 1:
            raise ValueError

    with pytest.raises(AssertionError, match="second call"):
        assert_same_outcome(fails_later, lambda: None)


def test_a_reused_output_buffer_is_seen():
    buffer, count = torch.zeros(2), iter(range(9))

    def reuses():
        return buffer.fill_(next(count))

    with pytest.raises(AssertionError, match="first call"):
        assert_same_outcome(reuses, lambda: torch.zeros(2))


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.numpy().fill(7)])
def test_a_write_to_an_input_is_seen(write):
    leaf = torch.zeros(2)
    with pytest.raises(AssertionError, match="changed its inputs"):
        assert_same_outcome(lambda: write(leaf) and None, lambda: None, inputs=[leaf])


def test_a_change_of_an_input_list_is_seen():
    leaf = [1]
    with pytest.raises(AssertionError, match="changed its inputs"):
        assert_same_outcome(lambda: leaf.append(2), lambda: None, inputs=[leaf])

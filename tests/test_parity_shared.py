"""Shared fields: the batch has what the first item has."""

from __future__ import annotations

import collections

import mmcollate
import numpy as np
import pytest
import torch
from compare import outcome

pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")

from vllm_items import (
    DEVICES,
    GRAD_MODES,
    batched,
    item,
    items_of,
    same,
    same_groups,
    shared,
    value_of,
)

CPU_DEVICES = [None, "cpu", torch.device("cpu")]

TENSORS = {
    "plain": lambda: torch.arange(6.0).view(2, 3),
    "0-d": lambda: torch.tensor(5),
    "bool": lambda: torch.tensor(True),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "gapped": lambda: torch.arange(6.0)[::2],
    "expanded": lambda: torch.ones(1).expand(3),
    "requires grad": lambda: torch.ones(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "conj": lambda: torch.tensor([1j]).conj(),
    "neg": lambda: torch._neg_view(torch.ones(2)),
    "bfloat16": lambda: torch.ones(2).bfloat16(),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "subclass": lambda: torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("device", CPU_DEVICES)
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("keep_on_cpu", [False, True])
@pytest.mark.parametrize("mode", GRAD_MODES)
def test_the_first_tensor_itself(name, n, device, keep_on_cpu, mode):
    leaves = [TENSORS[name]() for _ in range(n)]
    with GRAD_MODES[mode]():
        theirs = same(items_of(shared, leaves, keep_on_cpu=keep_on_cpu), device=device)
    assert value_of(theirs) is leaves[0]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("n", [1, 3])
def test_the_first_tensor_on_its_way_to_a_device(name, n):
    leaves = [TENSORS[name]() for _ in range(n)]
    theirs = same(items_of(shared, leaves), device="meta")
    assert value_of(theirs).device.type == "meta"


OBJECTS = {
    "int": 7,
    "bool": False,
    "float": 0.5,
    "nan": float("nan"),
    "none": None,
    "string": "ab",
    "bytes": b"ab",
    "list": [1, [2]],
    "list of tensors": [torch.ones(1), torch.ones(2)],
    "tuple": (1, torch.ones(1)),
    "dict": {"a": torch.ones(1)},
    "user dict": collections.UserDict(a=1),
    "array": np.ones(3),
    "array of 1": np.ones(1),
    "set": frozenset([1]),
    "function": len,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("n", [1, 2])
def test_any_object(name, n, device):
    theirs = same(items_of(shared, [OBJECTS[name]] * n), device=device)
    if device is None:
        assert value_of(theirs) is OBJECTS[name]


def test_in_a_batch_nobody_asks_whether_the_others_are_equal():
    leaves = [torch.ones(2), torch.zeros(3), None]
    theirs = same(items_of(shared, leaves))
    assert value_of(theirs) is leaves[0]
    assert len(same_groups(items_of(shared, leaves)).result) == 3


@pytest.mark.parametrize("device", DEVICES)
def test_one_shared_object_among_other_fields(device):
    token = torch.tensor(151667)
    items = [item(x=batched(torch.ones(i + 1)), t=shared(token)) for i in range(4)]
    result = same_groups(items, device=device)
    assert [n for n, _ in result.result] == [4]
    if device != "meta":
        assert result.result[0][1]["t"] is token


def test_no_elements_are_an_index_error():
    result = outcome(lambda: mmcollate.reference.reduce(mmcollate.Shared(), []))
    assert issubclass(result.exception, IndexError)

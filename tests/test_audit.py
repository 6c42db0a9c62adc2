"""Audits of small models: each finding, each flip of a flag, each way of torch's to a tensor."""

from __future__ import annotations

import copy
import doctest
import functools
import importlib
import json
import pickle
import subprocess
import sys
import threading
import weakref
from collections import UserDict, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmcollate import (
    Batched,
    CollateKeyError,
    CollateTypeError,
    CollateValueError,
    Flat,
    Shared,
    collate_groups,
)
from mmcollate.audit import audit
from mmcollate.audit.observe import MAX_DEVICE_USES
from mmcollate.audit.virtual import VirtualTensor
from torch import nn

FIELDS = {"patches": Flat(), "grid": Batched(keep_on_cpu=True)}


def batch() -> dict[str, Any]:
    patches = torch.arange(60, dtype=torch.float32).reshape(10, 6)
    return {"patches": patches, "grid": torch.tensor([[1, 2, 2], [1, 2, 3]])}


def audited(forward: Any, batches: Any, fields: Any, **options: Any) -> Any:
    """An audit; of plain functions as such that use no weights."""
    owner = getattr(forward, "func", forward)
    if not isinstance(getattr(owner, "__self__", owner), nn.Module):
        options.setdefault("modules", [])
    return audit(forward, batches, fields, **options)


def reports(forward: Any, given: Any = None, fields: Any = None, **options: Any) -> Any:
    """The report, and of each field its own."""
    found = audited(forward, [given or batch()], fields or FIELDS, **options)
    assert found.error is None
    return found, {field.field: field for field in found.fields}


def verdicts(forward: Any, given: Any = None, fields: Any = None, **options: Any) -> dict[str, str]:
    return {name: x.verdict for name, x in reports(forward, given, fields, **options)[1].items()}


def told(events: Any, *, uses: bool = False) -> list[str]:
    """Events in short; without device uses, which most operations are."""
    return [
        " ".join([event.kind, event.operation, *event.fields])
        for event in events
        if uses or event.kind != "device_use"
    ]


def events_of(report: Any) -> list[Any]:
    """All events once: those of several fields are in each one's report."""
    found = [event for field in report.fields for event in field.events]
    return list(dict.fromkeys([*found, *report.other_events]))


class Encoder(nn.Module):
    """A stock encoder: patches go through weights, sizes are read from the grid."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 4)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = grid.prod(-1).tolist()
        return self.proj(patches).split(sizes)


# Verdicts, and how they change with the flag


def test_a_field_that_weights_meet_is_right_on_the_device_and_wrong_on_the_cpu():
    model = Encoder()
    found = reports(model)[1]["patches"]
    assert (found.verdict, found.keep_on_cpu, found.kind) == ("right", False, "flat")
    assert told(found.events, uses=True)[0] == "device_use aten.addmm.default patches"
    assert found.num_bytes == 240
    flipped = reports(model, keep_on_cpu={"patches": True})[1]["patches"]
    assert (flipped.verdict, flipped.keep_on_cpu) == ("wrong", True)
    assert told(flipped.events) == ["mismatch aten.addmm.default patches"]
    assert flipped.events[0].detail == (
        "float32 (4) on cuda:0, float32 (10, 6) on cpu [patches], float32 (6, 4) on cuda:0"
    )
    assert "test_audit.py" in flipped.reason and "aten.addmm.default" in flipped.reason


def test_a_field_that_the_host_reads_is_right_on_the_cpu_and_could_be_kept_on_the_device():
    model = Encoder()
    kept = reports(model)[1]["grid"]
    assert (kept.verdict, told(kept.events)) == ("right", ["host_read Tensor.tolist grid"])
    moved = reports(model, keep_on_cpu={"grid": False})[1]["grid"]
    assert moved.verdict == "could be kept"
    assert told(moved.events, uses=True) == ["sync Tensor.tolist grid"]


class Restoring(nn.Module):
    def __init__(self, non_blocking: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.non_blocking = non_blocking

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        there = grid.to(patches.device, torch.float32, non_blocking=self.non_blocking)
        return patches.sum() + there * self.scale


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_kept_field_that_the_model_moves_is_restored(non_blocking):
    found = reports(Restoring(non_blocking))[1]["grid"]
    assert (found.verdict, told(found.events)) == ("restored", ["restored Tensor.to grid"])
    [event] = [event for event in found.events if event.kind == "restored"]
    assert (event.num_bytes, event.count, event.non_blocking) == (24, 1, non_blocking)
    assert verdicts(Restoring(), keep_on_cpu={"grid": False})["grid"] == "right"


def test_what_nothing_reads_is_unused_whatever_its_flag():
    def forward(patches, grid, spare):
        return len(spare), patches * 2

    given = {**batch(), "spare": torch.ones(3)}
    for keep in (True, False):
        fields = {**FIELDS, "spare": Batched(keep_on_cpu=keep)}
        found = reports(forward, given, fields)[1]
        assert (found["grid"].verdict, found["grid"].reason) == ("unused", "nothing touched it")
        assert found["spare"].verdict == "unused"
        assert found["spare"].reason.startswith("only its shape is asked for at test_audit.py:")
        assert found["spare"].events == ()


@pytest.mark.parametrize(
    "ask",
    [
        len,
        torch.numel,
        lambda x: x.shape,
        lambda x: x.size(0),
        lambda x: x.dim(),
        lambda x: x.ndim,
        lambda x: x.numel(),
    ],
)
def test_each_way_to_ask_for_a_shape_is_seen(ask):
    found = reports(lambda patches, grid: ask(grid))[1]["grid"]
    assert "only its shape" in found.reason


def test_what_is_computed_and_dropped_is_unused_on_the_device_alone():
    def forward(patches, grid):
        (grid * 2).sum()

    assert verdicts(forward)["grid"] == "right"
    found = reports(forward, keep_on_cpu={"grid": False})[1]["grid"]
    assert (found.verdict, found.reason) == ("unused", "what is computed from it goes nowhere")


def test_what_reaches_the_result_is_used_on_the_device():
    @dataclass
    class Output:
        features: Any
        lengths: Any

    def forward(patches, grid):
        return Output([{"all": (patches.half(),)}], grid + 1)

    for keep, verdict in ((True, "right"), (False, "right")):
        found = reports(forward, keep_on_cpu={"grid": keep})[1]
        assert told(found["patches"].events, uses=True) == ["device_use result patches"]
        assert found["patches"].reason == "used on the device as part of the forward's result"
        assert found["grid"].verdict == verdict
        assert told(found["grid"].events, uses=True) == ([] if keep else ["device_use result grid"])


def test_a_field_on_the_device_that_meets_the_cpu_alone_is_wrong():
    def forward(patches, grid):
        return (grid * torch.tensor([1, 2, 2])).sum().tolist()

    moved = reports(forward, keep_on_cpu={"grid": False})[1]["grid"]
    assert (moved.verdict, told(moved.events)) == (
        "wrong",
        ["mismatch aten.mul.Tensor", "sync Tensor.tolist grid"],
    )
    assert verdicts(forward)["grid"] == "right"


def test_a_mismatch_of_the_models_own_is_not_held_against_a_field():
    def forward(patches, grid):
        return patches @ torch.ones(6, 2)

    found, fields = reports(forward, modules=[])
    assert fields["patches"].verdict == "right"
    assert told(found.other_events) == ["mismatch aten.mm.default"]
    assert told(fields["patches"].events) == []


def test_lengths_of_a_packed_sequence_need_the_cpu():
    packed = []

    def forward(k, d, i, **options):
        lengths = i[:, 2].clamp(min=1)
        packed.append(nn.utils.rnn.pack_padded_sequence(d, lengths, batch_first=True, **options))
        return packed[-1].data, packed[-1].batch_sizes.tolist()

    for sorted_first, kept in ((True, "right"), (False, "restored")):
        run = functools.partial(forward, enforce_sorted=sorted_first)
        found = reports(run, kdi(), KDI)[1]
        assert (found["d"].verdict, found["i"].verdict) == ("right", "wrong")
        assert "where the CPU needs it" in found["i"].reason
        assert told(found["i"].events) == [
            "mismatch aten._pack_padded_sequence.default",
            "host_read Tensor.tolist i",
        ]
        assert told(found["d"].events) == []
        assert packed.pop().batch_sizes.tolist() == [2, 1]
        assert verdicts(run, kdi(), KDI, keep_on_cpu={"i": True})["i"] == kept
        # With the padded batch on the CPU too, only the lengths are where they must not be.
        flipped = reports(run, kdi(), KDI, keep_on_cpu={"d": True})[1]
        assert flipped["i"].verdict == "wrong"


def test_what_needs_the_cpu_is_held_against_a_field_that_the_device_uses_too():
    def forward(patches, grid):
        return grid.numpy().sum() * (patches.sum() + grid)

    found, fields = reports(forward, keep_on_cpu={"grid": False})
    assert (fields["grid"].verdict, told(fields["grid"].events)) == (
        "wrong",
        ["mismatch Tensor.numpy"],
    )
    assert found.other_events == ()
    assert fields["patches"].verdict == "right"


def test_numpy_needs_the_cpu():
    def forward(patches, grid):
        return grid.numpy().sum()

    found = reports(forward, keep_on_cpu={"grid": False})[1]["grid"]
    assert (found.verdict, told(found.events)) == ("wrong", ["mismatch Tensor.numpy"])
    assert "where the CPU needs it" in found.reason
    assert verdicts(forward)["grid"] == "right"


def test_what_is_made_beside_a_kept_field_meets_the_device_too():
    def forward(patches, grid):
        device = grid.device
        positions = torch.arange(6, device=device).repeat(10, 1)
        return patches + positions

    kept = reports(forward)[1]["grid"]
    assert (kept.verdict, told(kept.events)) == ("wrong", ["mismatch aten.add.Tensor grid"])
    assert "int64 (10, 6) on cpu [placed as grid]" in kept.events[0].detail
    moved = reports(forward, keep_on_cpu={"grid": False})[1]["grid"]
    assert (moved.verdict, told(moved.events)) == ("right", [])


BESIDE = {
    "new_zeros": lambda x: x.new_zeros(6),
    "zeros_like": lambda x: torch.zeros_like(x[0]).repeat(2),
    "full": lambda x: torch.full((6,), 2, device=x.device),
    "tensor": lambda x: torch.tensor([1.0] * 6, device=x.device),
    "as_tensor": lambda x: torch.as_tensor(np.ones(6), device=x.device),
    "new_tensor": lambda x: x.new_tensor([1] * 6),
    "to": lambda x: torch.ones(6).to(x.device),
    "to other": lambda x: torch.ones(6).to(x),
    "type_as": lambda x: torch.ones(6).type_as(x),
    "view": lambda x: torch.ones(6, device=x.view(-1)[:2].device).view(2, 3).flatten(),
    "pinned": lambda x: (
        torch.ones(6, device=x.device).cpu()
        if x.is_cuda
        else torch.ones(6, device=x.device).pin_memory()
    ),
    "name": lambda x: torch.ones(6, device=str(x.device)),
    "name in a text": lambda x: torch.tensor([1.0] * 6, device=f"{x.device}"),
    "type": lambda x: torch.ones(6, device=x.device.type),
    "device of type": lambda x: torch.ones(6, device=torch.device(x.device.type, 0)),
    "device of device": lambda x: torch.ones(6, device=torch.device(x.device)),
    "inside a function": lambda x: made_there(x.device.type),
    "new": lambda x: x.new(6).fill_(1),
    "new of values": lambda x: x.new([1] * 6),
}


def made_there(place: str) -> torch.Tensor:
    there = torch.device(place)
    return torch.ones(6, device=there)


@pytest.mark.parametrize(
    "way", [name for name in BESIDE if name not in ("to", "to other", "type_as")]
)
def test_each_way_to_make_a_tensor_where_a_kept_field_is(way):
    found = reports(lambda patches, grid: patches + BESIDE[way](grid))[1]["grid"]
    assert found.verdict == "wrong"


@pytest.mark.parametrize("way", ["to", "to other", "type_as"])
def test_a_tensor_brought_to_the_cpu_for_a_kept_fields_sake_meets_the_device(way):
    def forward(patches, grid):
        weights = torch.ones(6, device="cuda")
        there = {
            "to": lambda: weights.to(grid.device),
            "to other": lambda: weights.to(grid),
            "type_as": lambda: weights.type_as(grid),
        }[way]()
        return patches + there

    assert verdicts(forward)["grid"] == "wrong"
    assert verdicts(forward, keep_on_cpu={"grid": False})["grid"] == "unused"


def test_a_place_that_is_named_is_nobodys_fault():
    def forward(patches, grid):
        return patches + torch.ones(6, device=grid.device).to("cuda")

    assert verdicts(forward)["grid"] == "unused"


@pytest.mark.parametrize("place", ["cpu", torch.device("cpu"), json.loads('"cpu"')])
def test_a_place_that_is_spelled_out_beside_a_question_is_nobodys_fault(place):
    def spelled(patches, grid):
        assert grid.device.type == "cpu"
        return patches + torch.ones(6, device="cpu") + torch.ones(6, device=torch.device("cpu"))

    def given(patches, grid):
        return grid.device, patches + made_at(place)

    for forward in (spelled, given):
        found, fields = reports(forward)
        assert fields["grid"].verdict == "unused"
        assert [event.fields for event in found.other_events if event.kind == "mismatch"]


def made_at(place: Any) -> torch.Tensor:
    assert torch.ones(1).device.type == "cpu"
    return torch.ones(6, device=place)


def test_made_beside_a_field_is_nothing_foreign_to_it():
    def forward(patches, grid):
        return (grid * torch.tensor([1, 2, 2], device=grid.device)).tolist()

    assert verdicts(forward, keep_on_cpu={"grid": False})["grid"] == "could be kept"


BROUGHT_BACK = {
    "copied": lambda grid, patches: grid.cpu().float().to(patches.device),
    "read": lambda grid, patches: torch.tensor(grid.cpu().tolist(), device=patches.device),
    "array": lambda grid, patches: torch.from_numpy(np.stack(grid.cpu().numpy())).cuda(),
    "written": lambda grid, patches: patches.new_zeros(2, 3).copy_(grid.cpu()),
    "index": lambda grid, patches: patches.new_zeros(9)[grid.cpu()],
    "number": lambda grid, patches: patches.new_zeros(9) + grid.cpu()[0, 1],
}


@pytest.mark.parametrize("way", BROUGHT_BACK)
def test_what_the_host_brings_back_to_the_device_does_not_need_the_field_there(way):
    def forward(patches, grid):
        return patches.sum() * BROUGHT_BACK[way](grid, patches)

    def direct(patches, grid):
        return forward(patches, grid), patches.sum() * grid

    moved = reports(forward, keep_on_cpu={"grid": False})[1]["grid"]
    assert moved.verdict == "could be kept"
    assert "(Tensor.cpu)" in moved.reason
    assert verdicts(direct, keep_on_cpu={"grid": False})["grid"] == "right"


def test_values_of_another_field_are_foreign_wherever_they_were_put():
    def forward(patches, grid):
        (patches.sum() + grid.to(patches.device)).tolist()

    assert verdicts(forward) == {"patches": "right", "grid": "restored"}


# Each way of torch's. k is kept, d and i are on the device.

KDI = {"k": Batched(keep_on_cpu=True), "d": Batched(), "i": Batched()}


def kdi() -> dict[str, torch.Tensor]:
    return {
        "k": torch.tensor([[1, 2, 3], [4, 5, 6]]),
        "d": torch.arange(6.0).reshape(2, 3),
        "i": torch.tensor([[1, 0, 2], [0, 1, 1]]),
    }


def device_zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda")


def written(target: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    target[index] = value
    return target


def in_inference_mode(function: Any) -> Any:
    @functools.wraps(function)
    def run(**given: Any) -> Any:
        with torch.inference_mode():
            return function(**given)

    return run


READS = {
    "tolist": (lambda x: x.tolist(), "Tensor.tolist"),
    "item": (lambda x: x[0, 0].item(), "Tensor.item"),
    "bool": (lambda x: bool(x[0, 0]), "Tensor.__bool__"),
    "if": (lambda x: 1 if x.any() else 2, "Tensor.__bool__"),
    "int": (lambda x: int(x[0, 0]), "Tensor.__int__"),
    "float": (lambda x: float(x[0, 0]), "Tensor.__float__"),
    "complex": (lambda x: complex(x[0, 0]), "Tensor.__complex__"),
    "index": (lambda x: [7, 8, 9][x[0, 0]], "Tensor.__index__"),
    "range": (lambda x: range(x[0, 0]), "Tensor.__index__"),
    "slice": (lambda x: torch.arange(9)[: x[0, 0]], "Tensor.__index__"),
    "arange": (lambda x: torch.arange(x[0, 0]), "torch.arange"),
    "repr": (repr, "Tensor.__repr__"),
    "format": (lambda x: f"{x[0, 0]:>3}", "Tensor.__format__"),
    "unpacked": (lambda x: [int(a + b + c) for a, b, c in x], "Tensor.__int__"),
    "contains": (lambda x: 3 in x, "Tensor.item"),
    "tensor of": (lambda x: torch.tensor([x[0, 0], 1]), "torch.tensor"),
    "unbound": (torch.Tensor.tolist, "Tensor.tolist"),
    "operation": (
        lambda x: torch.ops.aten._local_scalar_dense(x[0, 0]),
        "torch._local_scalar_dense",
    ),
}


@pytest.mark.parametrize("mode", [lambda x: x, in_inference_mode], ids=["no_grad", "inference"])
@pytest.mark.parametrize("way", READS)
def test_the_host_reads(way, mode):
    """A sync of a device tensor, and nothing of a kept one."""
    read, operation = READS[way]
    plain = read(kdi()["k"])
    got = []

    def forward(k, d, i):
        got.append(read(k))
        read(i)

    found = reports(mode(forward), kdi(), KDI)[1]
    assert set(told(found["k"].events)) == {f"host_read {operation} k"}
    assert set(told(found["i"].events)) == {f"sync {operation} i"}
    assert (found["k"].verdict, found["i"].verdict) == ("right", "could be kept")
    if way not in ("repr", "tensor of"):
        assert str(got[0]) == str(plain)


WAITS = {
    "nonzero": (lambda x: x.nonzero(), "aten.nonzero.default"),
    "where": (torch.where, "aten.nonzero.default"),
    "argwhere": (torch.argwhere, "aten.nonzero.default"),
    "mask": (lambda x: x[x > 1], "aten.index.Tensor"),
    "two masks": (lambda x: x[x[:, 1] > 0, x[0] > 1], "aten.index.Tensor"),
    "masked_select": (lambda x: x.masked_select(x > 1), "aten.masked_select.default"),
    "unique": (torch.unique, "aten._unique2.default"),
    "unique of dim": (lambda x: x.unique(dim=0), "aten.unique_dim.default"),
    "unique_consecutive": (torch.unique_consecutive, "aten.unique_consecutive.default"),
    "repeats": (lambda x: torch.repeat_interleave(x[0]), "aten.repeat_interleave.Tensor"),
    "repeated": (lambda x: x.repeat_interleave(x[0], dim=1), "aten.repeat_interleave.Tensor"),
    "bincount": (lambda x: x.flatten().bincount(), "aten.bincount.default"),
    "equal": (lambda x: torch.equal(x, x), "aten.equal.default"),
    "allclose": (lambda x: torch.allclose(x, x), "aten.allclose.default"),
    "mask put": (lambda x: written(x, x > 1, x.sum()), "aten.index_put_.default"),
    "cpu": (lambda x: x.cpu(), "Tensor.cpu"),
    "to cpu": (lambda x: x.to("cpu"), "Tensor.to"),
    "to type": (lambda x: x.type("torch.FloatTensor"), "Tensor.type"),
    "to like": (lambda x: x.to(torch.ones(1)), "Tensor.to"),
    "copied": (lambda x: torch.zeros(2, 3).copy_(x), "aten.copy_.default"),
    "set": (lambda x: written(torch.zeros(4), slice(3), x[0]), "aten.copy_.default"),
    "forced array": (lambda x: x.numpy(force=True), "Tensor.numpy"),
    "copied to a number": (lambda x: torch.tensor(0).copy_(x[0, 0]), "aten.copy_.default"),
    "filled": (lambda x: torch.zeros(3).fill_(x[0, 0]), "aten.fill_.Tensor"),
    "a number filled": (lambda x: torch.tensor(0).fill_(x[0, 0]), "aten.fill_.Tensor"),
}


@pytest.mark.parametrize("mode", [lambda x: x, in_inference_mode], ids=["no_grad", "inference"])
@pytest.mark.parametrize("way", WAITS)
def test_the_host_waits(way, mode):
    """For a device; the same of a kept tensor is an operation like others."""
    run, operation = WAITS[way]

    def forward(k, d, i):
        run(i)
        run(k)

    found = reports(mode(forward), kdi(), KDI)[1]
    if way in ("argwhere",) and mode is not in_inference_mode:
        operation = found["i"].events[0].operation
    assert told(found["i"].events) == [f"sync {operation} i"]
    assert not [event for event in found["k"].events if event.kind != "host_read"]
    assert found["k"].verdict == "right"


NO_WAITS = {
    "known size": lambda x: x.repeat_interleave(x[0], dim=1, output_size=3),
    "fixed size": lambda x: torch.nonzero_static(x, size=2),
    "where of two": lambda x: torch.where(x > 1, x, 0),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0),
    "mask filled": lambda x: written(x, x > 1, 0),
    "indices": lambda x: x[:, x[0]],
    "views": lambda x: x.view(-1)[1:].reshape(5, 1).expand(5, 2).t().contiguous(),
    "list of": lambda x: torch.stack(list(x)).sum().neg(),
    "in place": lambda x: x.add_(1).clamp_(0, 3),
    "shape changed in place": lambda x: x.t_().unsqueeze_(0).squeeze_(0) @ x.t(),
    "sorted": lambda x: (x.sort(), x.topk(2), x.max(dim=1), x.argmax()),
    "dtype": lambda x: (x.float(), x.to(torch.float64), x.half().to(x.dtype)),
    "copy": lambda x: (copy.deepcopy(x), x.clone(), x.to("cuda", copy=True), x.cuda(), x.detach()),
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "out of no size": lambda x: torch.cat([x, x], out=x.new_empty(0)).add(1),
    "data": lambda x: x.data + 1,
}


@pytest.mark.parametrize("mode", [lambda x: x, in_inference_mode], ids=["no_grad", "inference"])
@pytest.mark.parametrize("way", NO_WAITS)
def test_the_host_does_not_wait(way, mode):
    found, fields = reports(mode(lambda k, d, i: NO_WAITS[way](i)), kdi(), KDI)
    assert told(events_of(found)) == []
    assert fields["i"].verdict == "right"


COPIES = {
    "to": (lambda x: x.to("cuda"), "Tensor.to", 48, False),
    "to cuda:0": (lambda x: x.to(torch.device("cuda:0")), "Tensor.to", 48, False),
    "to number": (lambda x: x.to(0), "Tensor.to", 48, False),
    "to keyword": (lambda x: x.to(device="cuda", non_blocking=True), "Tensor.to", 48, True),
    "to all": (lambda x: x.to("cuda", torch.float16, True), "Tensor.to", 12, True),
    "to other": (lambda x: x.to(device_zeros(1), non_blocking=True), "Tensor.to", 24, True),
    "unbound": (lambda x: torch.Tensor.to(x, "cuda"), "Tensor.to", 48, False),
    "cuda": (lambda x: x.cuda(non_blocking=True), "Tensor.cuda", 48, True),
    "type": (lambda x: x.type("torch.cuda.HalfTensor"), "Tensor.type", 12, False),
    "type_as": (lambda x: x.type_as(device_zeros(1)), "Tensor.type_as", 24, False),
    "tensor": (lambda x: torch.tensor([x[0, 0], 2], device="cuda"), "torch.tensor", 16, False),
    "tensor of tensor": (lambda x: torch.tensor(x, device="cuda"), "torch.tensor", 48, False),
    "as_tensor": (lambda x: torch.as_tensor(x, device="cuda"), "torch.as_tensor", 48, False),
    "asarray": (lambda x: torch.asarray(x, device="cuda"), "torch.asarray", 48, False),
    "new_tensor": (lambda x: device_zeros(1).new_tensor(x), "Tensor.new_tensor", 24, False),
    "new_tensor of numbers": (
        lambda x: device_zeros(1).new_tensor(data=[x[0, 0]]),
        "Tensor.new_tensor",
        4,
        False,
    ),
    "copied": (
        lambda x: device_zeros(2, 3).copy_(x, non_blocking=True),
        "aten.copy_.default",
        24,
        True,
    ),
    "set": (lambda x: written(device_zeros(4), slice(3), x[0]), "aten.copy_.default", 12, False),
    "index": (lambda x: device_zeros(9)[x[0]], "aten.index.Tensor", 24, False),
    "mask": (lambda x: device_zeros(2, 3)[x > 1], "aten.index.Tensor", 6, False),
    "index put": (
        lambda x: written(device_zeros(9), x[0], 1.0),
        "aten.index_put_.default",
        24,
        False,
    ),
    "nested list index": (
        lambda x: device_zeros(9)[[[x[0, 0], 2]]],
        "aten.index.Tensor",
        16,
        False,
    ),
    "list index": (lambda x: device_zeros(9)[[x[0, 0], 2]], "aten.index.Tensor", 16, False),
    "pinned": (lambda x: x.pin_memory().to("cuda", non_blocking=True), "Tensor.to", 48, True),
    "computed": (lambda x: F.pad(x[0].cumsum(0), (1, 0)).to("cuda"), "Tensor.to", 32, False),
    "written": (lambda x: torch.zeros(3).copy_(x[0]).to("cuda"), "Tensor.to", 12, False),
    "array": (
        lambda x: torch.from_numpy(np.cumsum(x.numpy(), 0)).to("cuda"),
        "Tensor.to",
        48,
        False,
    ),
    "array's view": (
        lambda x: torch.from_numpy(np.asarray(x)[:1]).cuda(),
        "Tensor.cuda",
        24,
        False,
    ),
    "arrays": (
        lambda x: torch.tensor(2 * x.numpy() + np.ones(3), device="cuda"),
        "torch.tensor",
        48,
        False,
    ),
    "array index": (lambda x: device_zeros(9)[x.numpy()[0]], "aten.index.Tensor", 24, False),
    "new": (lambda x: device_zeros(1).new([x[0, 0]]), "Tensor.new_tensor", 4, False),
    **{
        f"np.{name}": (lambda x, call=call: torch.from_numpy(call(x.numpy())).cuda(), *rest)
        for name, call, *rest in (
            (
                "concatenate",
                lambda x: np.concatenate([np.zeros((1, 3)), x]),
                "Tensor.cuda",
                72,
                False,
            ),
            ("stack", lambda x: np.stack([x[0], x[1]]), "Tensor.cuda", 48, False),
            ("where", lambda x: np.where(x > 2, 1, 0), "Tensor.cuda", 48, False),
            ("take", lambda x: np.take(x, [[0, 1, 2]] * 2), "Tensor.cuda", 48, False),
            ("split", lambda x: np.split(x, 2)[1], "Tensor.cuda", 24, False),
        )
    },
    "np.stack of tensors": (
        lambda x: torch.from_numpy(np.stack([x[0], x[1]])).cuda(),
        "Tensor.cuda",
        48,
        False,
    ),
    "nested": (
        lambda x: torch.nested.nested_tensor([x[0]], device="cuda"),
        "torch.tensor",
        24,
        False,
    ),
    "targets": (
        lambda x: F.ctc_loss(device_zeros(3, 1, 4), x[:1, :2], (3,), (2,)),
        "torch.nn.functional.ctc_loss",
        16,
        False,
    ),
}


@pytest.mark.parametrize("mode", [lambda x: x, in_inference_mode], ids=["no_grad", "inference"])
@pytest.mark.parametrize("way", COPIES)
def test_a_kept_field_is_restored(way, mode):
    run, operation, num_bytes, non_blocking = COPIES[way]
    there = []
    found = reports(mode(lambda k, d, i: there.append(run(k).is_cuda)), kdi(), KDI)[1]["k"]
    [event] = [event for event in found.events if event.kind == "restored"]
    assert (event.operation, event.fields) == (operation, ("k",))
    assert (event.num_bytes, event.non_blocking) == (num_bytes, non_blocking)
    assert (found.verdict, there) == ("restored", [True])


MIXED = {
    "add": lambda d, k: d + k,
    "add in place": lambda d, k: d.add_(k),
    "into the cpu": lambda d, k: k.mul_(d.long()),
    "cat": lambda d, k: torch.cat([d, k]),
    "stack of numbers": lambda d, k: torch.stack([d[0, 0], k[0, 0]]),
    "matmul": lambda d, k: d @ k.t().float(),
    "where": lambda d, k: torch.where(k > 1, d, 0),
    "embedding": lambda d, k: F.embedding(k, device_zeros(9, 2)),
    "gather": lambda d, k: d.gather(1, k.clamp(max=2)),
    "index_select": lambda d, k: d.index_select(1, k[0].clamp(max=2)),
    "cpu indexed": lambda d, k: k[:, d[0].long()],
    "value put": lambda d, k: written(d, d[0, :2].long(), k.float()),
    "repeats": lambda d, k: d.repeat_interleave(k[0], dim=1),
    "attention": lambda d, k: F.scaled_dot_product_attention(
        *[d[None]] * 3, attn_mask=k[:, :2] > 1
    ),
    "linear": lambda d, k: F.linear(d, k.float()),
    "array": lambda d, k: d + torch.from_numpy(k.numpy()),
    "array's view": lambda d, k: d + torch.as_tensor(np.asarray(k)),
    "written": lambda d, k: d + written(torch.zeros(2, 3), 0, k[0]),
    "numbers": lambda d, k: d[0] + torch.tensor([k[0, 0], k[0, 1], 2]),
    "pinned": lambda d, k: d + k.pin_memory(),
    "data": lambda d, k: d + k.data,
    "copy": lambda d, k: d + copy.deepcopy(k),
    "brought back": lambda d, k: d + k.to("cuda").cpu(),
    "into a cpu number": lambda d, k: k[0, 0].add_(d[0, 0].long()),
    "out of a cpu number": lambda d, k: torch.neg(d[0, 0].long(), out=k[0, 0]),
}


@pytest.mark.parametrize("mode", [lambda x: x, in_inference_mode], ids=["no_grad", "inference"])
@pytest.mark.parametrize("way", MIXED)
def test_a_kept_field_meets_a_device_tensor(way, mode):
    results = []

    def forward(k, d, i):
        results.append(MIXED[way](d, k).is_cuda)

    found, fields = reports(mode(forward), kdi(), KDI)
    mismatches = [event for event in events_of(found) if event.kind == "mismatch"]
    assert [event.fields for event in mismatches] == [("k",)]
    assert fields["k"].verdict == "wrong"
    if way not in ("into the cpu", "cpu indexed", "into a cpu number", "out of a cpu number"):
        # The forward goes on, as if all had been on the device.
        assert results == [True]


LEGAL = {
    "numbers": lambda d, k: d * k[0, 0] + torch.tensor(2.0),
    "filled": lambda d, k: d.masked_fill(d > 1, k[0, 0]),
    "where": lambda d, k: torch.where(d > 1, d, k[0, 0]),
    "one value put": lambda d, k: written(d, d[0, :2].long(), k[0, 0].float()),
    "a row": lambda d, k: d[k[0, 0]],
    "parts": lambda d, k: d.tensor_split(k[0, :2] - 1),
    "pad": lambda d, k: (
        nn.utils.rnn.pack_padded_sequence(
            d, torch.tensor([3, 2]) + 0 * k[:, 0], batch_first=True
        ).data
    ),
    "a number added in place": lambda d, k: d.add_(k[0, 0]),
    "a number filled in": lambda d, k: d.fill_(k[0, 0]),
    "sizes of a packed sequence": lambda d, k: (
        nn.LSTM(3, 2, device=d.device)(nn.utils.rnn.pack_padded_sequence(d[:, None], k[0, :1] + 1))[
            0
        ].data
    ),
    "lengths of a loss": lambda d, k: F.ctc_loss(
        d[:, None].log_softmax(-1), d.new_ones(1, 1).long(), k[0, 1:2], k[0, :1]
    ),
}


@pytest.mark.parametrize("mode", [lambda x: x, in_inference_mode], ids=["no_grad", "inference"])
@pytest.mark.parametrize("way", LEGAL)
def test_a_kept_field_may_be_beside_a_device_tensor(way, mode):
    found, fields = reports(mode(lambda k, d, i: LEGAL[way](d, k)), kdi(), KDI)
    assert not [event for event in events_of(found) if event.kind in ("mismatch", "restored")]
    assert (fields["k"].verdict, fields["d"].verdict) == ("right", "right")


RULES: dict[str, dict[str, Any]] = {
    "reads": READS,
    "waits": WAITS,
    "no waits": NO_WAITS,
    "mixed": MIXED,
    "legal": LEGAL,
}


def test_only_shapes_are_asked_of_a_tensor_that_another_is_made_like():
    def forward(k, d, i):
        return d.view_as(k) + d.expand_as(k) + torch.zeros_like(k, device=d.device)

    assert verdicts(forward, kdi(), KDI)["k"] == "unused"


FACTORIES = {
    "zeros": lambda: torch.zeros(3, device="cuda"),
    "arange": lambda: torch.arange(3, device="cuda:0"),
    "randn": lambda: torch.randn(3, device=torch.device("cuda")),
    "full": lambda: torch.full((3,), 2.0, device=0),
    "linspace": lambda: torch.linspace(0, 1, 3, device="cuda"),
    "eye": lambda: torch.eye(3, device="cuda"),
    "ones_like": lambda: torch.ones_like(torch.zeros(3), device="cuda"),
    "new_ones": lambda: torch.zeros(3).new_ones(3, device="cuda"),
    "context": lambda: in_context(torch.device("cuda"), lambda: torch.zeros(3)),
    "module": lambda: nn.Linear(3, 3, device="cuda").weight,
    "bag": lambda: F.embedding_bag(
        torch.ones(3, 2, device="cuda", dtype=torch.int64), torch.ones(9, 3, device="cuda")
    ),
    "cuda": lambda: torch.ones(3).cuda(),
    "back and forth": lambda: torch.ones(3).cpu().cuda().cpu().to("cuda"),
    "window": lambda: torch.hann_window(3, device="cuda"),
    "moved module": lambda: nn.Linear(3, 3).cuda().weight,
    "module moved to": lambda: nn.Sequential(nn.BatchNorm1d(3)).to("cuda")[0].running_mean,
    "data": lambda: with_data(nn.Parameter(torch.ones(1)), torch.ones(3, device="cuda")),
    "new": lambda: torch.ones(1, device="cuda").new(3).fill_(1),
    "new of size": lambda: torch.ones(1, device="cuda").new(torch.Size([3])).fill_(1),
    "new of values": lambda: torch.ones(1, device="cuda").new([1, 2, 3]),
    "new of tensor": lambda: torch.ones(1, device="cuda").new(torch.ones(3)),
    "generator": lambda: torch.randn(
        3, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)
    ),
    "drawn": lambda: torch.ones(3, device="cuda").uniform_(generator=torch.Generator("cuda")),
    "nested": lambda: torch.nested.nested_tensor([[1, 2, 3]], device="cuda").to_padded_tensor(0),
}


def with_data(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    tensor.data = data
    return tensor


def in_context(context: Any, function: Any) -> Any:
    with context:
        return function()


@pytest.mark.parametrize("way", FACTORIES)
def test_tensors_are_made_on_the_device(way):
    places = []

    def forward(k, d, i):
        made = FACTORIES[way]()
        places.extend([made.device, made.is_cuda, made.is_cpu, (made.float() @ d.t()).is_cuda])

    found, fields = reports(forward, kdi(), KDI)
    moved = way in (
        *("cuda", "back and forth", "moved module", "module moved to"),
        *("new of values", "new of tensor", "nested"),
    )
    assert places == [torch.device("cuda", 0), True, False, True]
    assert bool(told(events_of(found))) == moved
    assert fields["d"].verdict == "right"


def test_copies_of_the_models_own_values_are_listed():
    def forward(k, d, i):
        d + torch.tensor([1, 2, 3], device="cuda")
        d + torch.arange(3).to(d.device, non_blocking=True)
        d[:, [0, 1]]
        d[0, 0] = 5
        torch.cuda.synchronize()

    found = reports(forward, kdi(), KDI)[0]
    assert told(found.other_events) == [
        "restored torch.tensor",
        "restored Tensor.to",
        "restored aten.index.Tensor",
        "restored aten.copy_.default",
        "sync torch.cuda.synchronize",
    ]
    assert [event.num_bytes for event in found.other_events] == [24, 24, 16, 4, 0]


LAYERS = {
    "LSTM": lambda: nn.LSTM(3, 4),
    "GRU": lambda: nn.GRU(3, 4),
    "BatchNorm": lambda: nn.BatchNorm1d(3),
    "LayerNorm": lambda: nn.LayerNorm(3),
    "RMSNorm": lambda: nn.RMSNorm(3),
    "MultiheadAttention": lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0),
    "Conv": lambda: nn.Conv1d(2, 3, 2),
    "Sequential": lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("mode", [lambda x: x, in_inference_mode], ids=["no_grad", "inference"])
@pytest.mark.parametrize("way", LAYERS)
def test_layers_run_as_they_do_on_the_cpu(way, mode):
    torch.manual_seed(0)
    layer = LAYERS[way]().eval()
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    with torch.no_grad():
        expected = first(layer(kdi()["d"])).tolist()
    got = []

    def forward(k, d, i):
        out = first(layer(d))
        got.append(out.tolist())
        return out.is_cuda

    found, fields = reports(mode(forward), kdi(), KDI, modules=[layer])
    assert told(found.other_events) == []
    assert fields["d"].verdict == "right"
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(expected))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_followed(layout):
    got = []

    def forward(k, d, i):
        nested = torch.nested.as_nested_tensor([d[0], d[1, :2]], layout=layout)
        padded = nested.to_padded_tensor(9.0)
        got.extend([nested.is_cuda, padded.is_cuda, padded.tolist()])
        rows = torch.nested.as_nested_tensor([d, d[:1]], layout=layout)
        heads = rows.unsqueeze(2).transpose(1, 2).contiguous()
        return (
            nested * 2,
            nn.Linear(3, 2).cuda()(rows),
            F.scaled_dot_product_attention(*[heads] * 3),
        )

    found, fields = reports(forward, kdi(), KDI)
    assert got == [True, True, [[0, 1, 2], [3, 4, 9]]]
    assert not [event for event in events_of(found) if event.kind == "mismatch"]
    assert {"sync Tensor.tolist d", "device_use result d"} <= set(
        told(fields["d"].events, uses=True)
    )
    assert (
        verdicts(
            lambda k, d, i: torch.nested.as_nested_tensor([k[0]]).to_padded_tensor(0) * d,
            kdi(),
            KDI,
        )["k"]
        == "wrong"
    )


def test_a_module_made_and_moved_in_the_forward_runs_on_the_device():
    got = []

    def forward(k, d, i):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(d.device).eval()
        assert isinstance(layer[0].weight, nn.Parameter)
        got.append(layer(d).tolist())
        return layer.cpu()(d.cpu()), layer.cuda()(d)

    found = reports(forward, kdi(), KDI)[0]
    assert not [event for event in events_of(found) if event.kind == "mismatch"]
    torch.manual_seed(0)
    with torch.no_grad():
        layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
        torch.testing.assert_close(torch.tensor(got[0]), layer(kdi()["d"]))


def test_attention_is_one_operation():
    def forward(k, d, i):
        return F.scaled_dot_product_attention(d[None], d[None], i[None].float())

    found = reports(forward, kdi(), KDI)[1]["i"]
    assert told(found.events, uses=True)[0] == ("device_use torch.scaled_dot_product_attention i")


def test_cuda_answers_as_with_one_gpu_and_as_before_afterwards():
    before = {(x, name): getattr(x, name) for x in (torch.cuda, torch) for name in dir(x)}
    answers = []

    def forward(k, d, i):
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.device(d.device), torch.cuda.stream(stream):
            d.record_stream(stream)
            event.record(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.current_stream().wait_event(event)
        answers.extend(
            [
                torch.cuda.is_available(),
                torch.cuda.device_count(),
                torch.cuda.current_device(),
                torch.cuda.is_bf16_supported(),
                torch.cuda.get_device_capability(),
                torch.cuda.get_device_properties(0).total_memory > 0,
                stream.query(),
                event.query(),
                torch.cuda.is_current_stream_capturing(),
                torch.accelerator.is_available(),
            ]
        )
        event.synchronize()
        stream.synchronize()
        with stream as same:
            assert same is stream
        assert stream.record_event(event) is event
        stream.record_event().wait(stream)
        assert event.elapsed_time(event) == 0
        torch.cuda.empty_cache()
        raise ValueError

    found = audited(forward, [kdi()], KDI)
    assert found.error.startswith("ValueError at test_audit.py:")
    assert answers == [True, 1, 0, True, (9, 0), True, True, True, False, True]
    assert told(found.other_events) == ["sync torch.cuda.synchronize"] * 2
    assert {(x, name): getattr(x, name) for x, name in before} == before


def test_classes_of_cuda_are_classes():
    plain_generator = torch.Generator()

    held: list[Any] = []

    class OfMyOwn(torch.cuda.device):
        pass

    def forward(k, d, i):
        stream, other = torch.Stream(device="cuda"), torch.cuda.Stream()
        with OfMyOwn(d.device), torch.cuda.device_of(d), torch.cuda.StreamContext(stream):
            assert isinstance(torch.cuda.device(0), torch.cuda.device)
            assert isinstance(torch.cuda.stream(other), torch.cuda.StreamContext)
        assert isinstance(stream, torch.Stream) and isinstance(other, torch.cuda.Stream)
        torch.Event(device="cuda").record(stream)
        there, here = torch.Generator(device=d.device), torch.Generator()
        for generator, place in ((there, "cuda"), (here, "cpu"), (plain_generator, "cpu")):
            assert isinstance(generator, torch.Generator)
            assert generator.device.type == place
        assert isinstance(d.device, torch.device) and torch.device("cuda", 0) == d.device
        assert not isinstance("cuda", torch.device)
        assert (
            copy.deepcopy(d.device) == d.device and pickle.loads(pickle.dumps(k.device)) == k.device
        )
        assert isinstance(None, torch.device | None)
        held.extend([torch.device, torch.Generator])
        torch.cuda.manual_seed_all(1)
        torch.cuda.reset_peak_memory_stats(d.device)

    reports(forward, kdi(), KDI)
    device, generator = held
    assert device("cpu") == torch.device("cpu")
    assert type(generator("cpu")) is torch.Generator


def test_pinned_memory_is_said_to_be():
    answers = []

    def forward(k, d, i):
        pinned = k.pin_memory()
        answers.extend(
            [
                pinned.is_pinned(),
                pinned[0].is_pinned(),
                pinned.pin_memory() is pinned,
                torch.ones(3, pin_memory=True).is_pinned(),
                torch.ones(3).pin_memory().is_pinned(),
                torch.ones(3).pin_memory(device="cuda").is_pinned(device="cuda"),
                torch.tensor([1], pin_memory=True).is_pinned(),
                k.new_empty(k.shape, pin_memory=True).copy_(k).is_pinned(),
                k.is_pinned(),
                d.is_pinned(),
                torch.ones(3).is_pinned(),
                pinned.clone().is_pinned(),
            ]
        )
        with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
            d.pin_memory()

    reports(forward, kdi(), KDI)
    assert answers == [True] * 8 + [False] * 4


def test_other_devices_and_layouts_are_left_alone():
    def forward(k, d, i):
        assert k.to("meta").is_meta and torch.ones(2, device="meta").is_meta
        assert d.to(device="meta").is_meta
        assert torch.ops.aten._to_copy(d, device=torch.device("meta")).is_meta
        assert (d > 1).to_sparse().layout is torch.sparse_coo
        with pytest.raises(BufferError, match="no real device"):
            torch.from_dlpack(d)
        assert torch.from_dlpack(k).tolist() == [[1, 2, 3], [4, 5, 6]]

    reports(forward, kdi(), KDI)


def test_errors_of_torch_are_torchs_own():
    def forward(k, d, i):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(d, d)
        with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one"):
            bool(d)

    reports(forward, kdi(), KDI)


def test_a_kept_fields_memory_is_there():
    def forward(k, d, i):
        assert k.data_ptr() == k.view(-1).data_ptr() != 0
        assert k.untyped_storage().nbytes() == 48
        assert np.asarray(k, dtype=np.float32).dtype == np.float32
        k.numpy()[0, 0] = 9
        assert k[0, 0] == 9
        assert np.array(k, copy=True)[0, 0] == 9

    reports(forward, kdi(), KDI)


def test_arrays_remember_through_what_numpy_does_in_place():
    def forward(k, d, i):
        array = k.numpy().astype(np.float32)
        array += 1
        other = np.zeros((2, 3), dtype=np.float32)
        assert np.add(array, 1, out=array) is array
        assert np.divmod(array, 2, out=(array, other))[1] is other
        return torch.from_numpy(array).to("cuda")

    assert verdicts(forward, kdi(), KDI)["k"] == "restored"


def test_arrays_remember_all_that_went_in():
    def forward(k, d, i):
        first = k.numpy().astype(np.float32)
        first += i.numpy()
        second = k.numpy() * 1.0
        np.copyto(second, d.numpy())
        return torch.from_numpy(first).cuda() * torch.from_numpy(second).cuda()

    fields = dict.fromkeys(KDI, Batched(keep_on_cpu=True))
    found = reports(forward, kdi(), fields)[1]
    assert {name: x.verdict for name, x in found.items()} == dict.fromkeys(KDI, "restored")
    copies = {
        event.fields for x in found.values() for event in x.events if event.kind == "restored"
    }
    assert copies == {("i", "k"), ("d", "k")}


def test_arrays_remember_whatever_takes_or_gives_them():
    ways = {
        "set": lambda k, d: written(k.numpy() * 1.0, 0, d.numpy()[0]),
        "with a tensor": lambda k, d: np.concatenate([k.numpy(), d]),
        "two results": lambda k, d: np.divmod(k.numpy(), d.numpy() + 1, out=(None, d.numpy() * 1))[
            0
        ],
        "written": lambda k, d: np.multiply(k.numpy(), 2, out=d.numpy() * 1),
        "by keyword": lambda k, d: np.clip(k.numpy(), a_min=d.numpy(), a_max=9),
    }
    for way in ways.values():

        def forward(k, d, i, way=way):
            return torch.from_numpy(way(k, d)).cuda()

        fields = dict.fromkeys(KDI, Batched(keep_on_cpu=True))
        found = reports(forward, kdi(), fields)[1]
        restored = [event for event in found["k"].events if event.kind == "restored"]
        assert [event.fields for event in restored] == [("d", "k")]


def test_a_tensor_has_the_shape_that_an_operation_gave_it():
    plain = torch.zeros(2, 3).t_().unsqueeze_(0)

    def forward(k, d, i):
        for x in (k, d):
            x.t_()
            x.unsqueeze_(0)
            assert (x.shape, x.stride()) == (plain.shape, plain.stride())
        out = torch.empty(0, device="cuda")
        torch.cat([i, i], out=out)
        assert out.shape == (4, 3)

    reports(forward, kdi(), KDI)


def test_a_cpu_tensor_that_device_values_are_copied_to_stays_there():
    def forward(k, d, i):
        target = torch.zeros(2, 3).copy_(i)
        assert target.is_cpu and target.device.type == "cpu"
        return target.tolist()

    found = reports(forward, kdi(), KDI)[1]["i"]
    assert told(found.events) == ["sync aten.copy_.default i", "host_read Tensor.tolist i"]


def test_weights_that_share_memory_share_what_is_written_there():
    model = nn.Module()
    model.register_buffer("all", torch.zeros(6))
    model.register_buffer("first", model.all[:2])

    def forward(patches, grid):
        model.all.copy_(patches[0])
        return model.first.tolist()

    found = reports(forward, modules=[model])[1]["patches"]
    assert told(found.events) == ["sync Tensor.tolist patches"]
    assert model.first.tolist() == [0, 0]


def test_data_can_be_set():
    def forward(k, d, i):
        made = torch.empty(0, device="cuda")
        made.data = d
        return made + 1

    assert verdicts(forward, kdi(), KDI)["d"] == "right"


def test_functions_over_batches():
    def forward(k, d, i):
        offset = torch.ones(3)

        def row(x, n):
            return x * 2 + offset.to(x.device) + n.to(x.device) + torch.zeros(3, device="cuda")

        return torch.vmap(row)(d, k)

    found, fields = reports(forward, kdi(), KDI)
    assert {name: x.verdict for name, x in fields.items()} == {
        "k": "restored",
        "d": "right",
        "i": "unused",
    }
    assert not [event for event in events_of(found) if event.kind == "mismatch"]


def test_a_compiled_function_runs_as_it_is_written():
    importlib.import_module("torch._dynamo")
    plain = lambda x: x.tolist()  # noqa: E731
    compiled = torch.compile(plain, backend="eager")
    found = reports(lambda k, d, i: compiled(i), kdi(), KDI)[1]
    assert found["i"].verdict == "could be kept"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_rules_are_those_of_a_real_device():
    cases = [(table, way) for table in RULES for way in RULES[table]]
    assert [case for case in cases if not holds_on_a_device(*case)] == []


def holds_on_a_device(table: str, way: str) -> bool:
    """Whether torch itself refuses or waits, or does not, as the table has it."""
    k, d, i = kdi()["k"], kdi()["d"].cuda(), kdi()["i"].cuda()
    run = RULES[table][way]
    torch.cuda.synchronize()
    try:
        if table in ("mixed", "legal"):
            run(d, k)
        else:
            torch.cuda.set_sync_debug_mode("error")
            (run if table == "no waits" else run[0])(i)
    except (RuntimeError, TypeError):
        return table not in ("legal", "no waits")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return table in ("legal", "no waits")


# Operations that are not torch's


def scale_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    out.copy_(x * weight)


@pytest.fixture(scope="module")
def custom() -> Any:
    library = torch.library.Library("mmcollate_audit_test", "DEF")
    library.define("scaled(Tensor x, Tensor weight) -> Tensor")
    library.define("scaled_into(Tensor(a!) out, Tensor x, Tensor weight) -> ()")
    library.impl("scaled", lambda x, weight: x * weight, "CPU")
    library.impl("scaled_into", scale_into, "CPU")
    yield torch.ops.mmcollate_audit_test
    library._destroy()


def test_hidden_weights_of_a_custom_operation_count_as_the_devices(custom):
    packed = torch.full((3,), 2.0)
    places = []

    def forward(k, d, i):
        out = torch.empty(2, 3)  # where the operation's own device would have made it
        custom.scaled_into(out, d, packed)
        places.extend([out.device, out.is_cuda, out.is_cpu])
        return custom.scaled(d, packed) + out + out.to(d.device)

    found, fields = reports(forward, kdi(), KDI)
    assert told(events_of(found)) == []
    assert places == [torch.device("cuda", 0), True, False]
    assert fields["d"].verdict == "right"
    assert packed.tolist() == [2, 2, 2]


def test_a_kept_field_is_refused_by_custom_operations(custom):
    found = reports(lambda k, d, i: custom.scaled(d, k[0].float()), kdi(), KDI)[1]["k"]
    assert told(found.events) == ["mismatch mmcollate_audit_test.scaled.default k"]


# The model and the batch are as before


class Changing(nn.Module):
    """A module that changes all that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))
        self.tied = self.weight
        self.part = nn.Parameter(self.weight.data[:2])
        self.register_buffer("seen", torch.zeros(6))
        self.cache = {"list": [1, 2], "set": {3}}
        self.inner = nn.BatchNorm1d(6)
        self.calls = 0
        self.fails = False

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        assert self.weight is self.tied
        assert isinstance(self.weight, nn.Parameter)
        self.weight.add_(1)
        assert self.part.sum().item() == 24
        self.seen += patches.sum(0)
        self.calls += 1
        self.made = patches * 2
        self.cache["list"].append(self.made)
        self.cache["set"].add(4)
        self.cache["new"] = self.made
        self.register_buffer("late", patches)
        self.register_parameter("tied", None)
        self.inner(patches)
        patches.zero_()
        grid.zero_()
        torch.rand(3)
        if self.fails:
            raise ValueError("on purpose")
        return self.weight @ self.made.t()


def state(model: nn.Module) -> Any:
    """All that can be told of a module: which objects, and what is in them."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    return (
        {name: (id(x), x.data_ptr(), type(x), x.tolist()) for name, x in tensors.items()},
        [(name, id(x)) for module in model.modules() for name, x in vars(module).items()],
        [copy.deepcopy(list(vars(module).get("cache", {}).items())) for module in model.modules()],
    )


@pytest.mark.parametrize("fails", [False, True])
def test_model_batch_and_random_numbers_are_as_before(fails):
    model, given = Changing().train(), batch()
    model.fails = fails
    before, random = state(model), torch.get_rng_state()
    kept = copy.deepcopy(given)
    for _ in range(2):
        found = audited(model, [given], FIELDS)
        assert (found.error is not None) == fails
        assert state(model) == before
        assert torch.equal(torch.get_rng_state(), random)
        for name, value in kept.items():
            assert torch.equal(given[name], value)
    assert not hasattr(model, "made") and not hasattr(model, "late")


def test_what_ended_the_forward_is_in_the_report():
    model = Changing()
    model.fails = True
    line = (
        Path(__file__).read_text().splitlines().index('            raise ValueError("on purpose")')
    )
    found = audited(model, [("image", 1, batch()), ("video", 1, batch())], FIELDS)
    first, second = found.error.splitlines()
    assert first == f"image: ValueError at test_audit.py:{line + 1}: on purpose"
    assert second.startswith("video: ")
    assert found.num_forwards == 2


def test_a_verdict_says_that_the_forward_did_not_end():
    def forward(patches, grid):
        grid.tolist()
        raise ValueError

    found = audited(forward, [batch()], FIELDS, keep_on_cpu={"grid": False})
    assert [(x.verdict, x.reason.endswith(", until the forward failed")) for x in found.fields] == [
        ("unused", True),
        ("could be kept", True),
    ]


def wants_the_cpu(patches: torch.Tensor, grid: torch.Tensor) -> None:
    if not grid.is_cpu:  # as an assert, which pytest would make more of
        raise AssertionError


def wants_the_cpu_in_words(patches: torch.Tensor, grid: torch.Tensor) -> None:
    if grid.device.type != "cpu":
        message = "the grid has to be on the CPU"
        raise ValueError(message)


def wants_the_device(patches: torch.Tensor, grid: torch.Tensor) -> None:
    if not grid.is_cuda:
        raise AssertionError


def asks_and_fails_elsewhere(patches: torch.Tensor, grid: torch.Tensor) -> None:
    if grid.is_cuda and patches.is_cuda:
        grid.sum()
    patches.sum()
    grid.sum()
    raise ValueError


def wants_the_cpu_after_all(patches: torch.Tensor, grid: torch.Tensor) -> None:
    if (
        patches.shape[0] > 0
        and grid.is_cpu
    ):  # fmt: skip
        grid.sum()
    else:
        message = "the grid has to be on the CPU: "
        for part in ("this", "is", "far", "below"):
            message += part
        raise ValueError(
            message
        )  # fmt: skip


@pytest.mark.parametrize(
    ("forward", "keep", "label", "fields"),
    [
        (wants_the_cpu_after_all, False, "Tensor.is_cpu", []),
        (wants_the_cpu, False, "Tensor.is_cpu", []),
        (wants_the_cpu_in_words, False, "Tensor.device", []),
        (wants_the_device, True, "Tensor.is_cuda", ["grid"]),
    ],
)
def test_a_model_that_refuses_a_place_is_believed(forward, keep, label, fields):
    found = audited(forward, [batch()], FIELDS, keep_on_cpu={"grid": keep})
    grid = {x.field: x for x in found.fields}["grid"]
    assert grid.verdict == "wrong"
    assert told(grid.events) == [" ".join(["mismatch", label, *fields])]
    assert grid.events[0].site.function == forward.__name__
    assert f"({label})" in grid.reason
    other = audited(forward, [batch()], FIELDS, keep_on_cpu={"grid": not keep})
    assert other.error is None


def fails_beside_the_question(patches: torch.Tensor, grid: torch.Tensor) -> None:
    place = grid.device
    if patches.shape[0] > 3:
        raise ValueError(f"too many for {place}")


def fails_after_the_question(patches: torch.Tensor, grid: torch.Tensor) -> None:
    if grid.is_cuda:
        pass
    raise ValueError("always")


def fails_under_another_condition(patches: torch.Tensor, grid: torch.Tensor) -> None:
    if grid.is_cpu:
        pass
    elif patches.shape[0] > 3:
        raise ValueError("too many")


def fails_inside_of_an_assert(patches: torch.Tensor, grid: torch.Tensor) -> None:
    assert torch.ones(3, device=grid.device).reshape(7).sum() > 0


@pytest.mark.parametrize(
    "forward",
    [
        fails_beside_the_question,
        fails_after_the_question,
        fails_under_another_condition,
        fails_inside_of_an_assert,
    ],
)
def test_a_model_that_fails_near_a_question_has_not_refused_a_place(forward):
    found = audited(forward, [batch()], FIELDS, keep_on_cpu={"grid": False})
    assert found.error.startswith(("ValueError", "RuntimeError"))
    assert told(events_of(found)) == []


def test_a_model_that_asks_for_a_place_and_fails_elsewhere_has_not_refused_it():
    found = audited(asks_and_fails_elsewhere, [batch()], FIELDS, keep_on_cpu={"grid": False})
    assert told(events_of(found)) == []


def asks_and_torch_fails(patches: torch.Tensor, grid: torch.Tensor) -> None:
    made = torch.zeros(3, 5, device=grid.device)
    made @ torch.zeros(4, 5, device=grid.device)


def test_what_torch_raises_after_a_model_asked_for_a_place_is_no_refusal():
    found = audited(asks_and_torch_fails, [batch()], FIELDS, keep_on_cpu={"grid": False})
    assert "shapes cannot be multiplied" in found.error
    assert told(events_of(found)) == []


@pytest.mark.parametrize(
    "mixes",
    [
        lambda patches, grid: torch.meshgrid(
            patches[:, 0], grid.reshape(-1).float(), indexing="ij"
        ),
        lambda patches, grid: torch.quantile(patches, grid.reshape(-1).float() / 99),
    ],
)
def test_what_torch_refuses_before_any_operation_is_a_mismatch(mixes):
    found = audited(mixes, [batch()], FIELDS, keep_on_cpu={"grid": True, "patches": False})
    assert found.error is None
    assert {x.field: x.verdict for x in found.fields}["grid"] == "wrong"


def test_an_interrupt_passes_and_leaves_the_model_as_before():
    model = Changing()
    before = state(model)

    def forward(**given):
        model(**given)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audited(forward, [batch()], FIELDS, modules=[model])
    assert state(model) == before
    assert torch.ones(1).tolist() == [1]


def test_a_buffer_that_changes_its_size_is_as_before():
    model = Encoder()
    model.register_buffer("seen", torch.arange(6.0))
    model.plain = torch.ones(3)

    def forward(patches, grid):
        model.seen.resize_(100).fill_(patches.sum())
        model.plain.add_(1)
        return model(patches, grid), model.seen.sum()

    for _ in range(2):
        assert verdicts(forward, modules=[model]) == {"patches": "right", "grid": "right"}
        assert model.seen.tolist() == [0, 1, 2, 3, 4, 5]
        assert model.seen.untyped_storage().nbytes() == 24
        assert model.plain.tolist() == [1, 1, 1]


PLAIN = {
    "data": lambda x, d: with_data(x, d * 2),
    "data of the cpu": lambda x, d: with_data(x, torch.zeros(5)),
    "resized": lambda x, d: x.resize_(100).fill_(d.sum()),
    "set": lambda x, d: x.set_(torch.zeros(5)),
    "turned": lambda x, d: x.t_(),
    "given for results": lambda x, d: torch.cat([torch.ones(9)], out=x.resize_(0)),
}


@pytest.mark.parametrize("way", PLAIN)
def test_plain_tensors_of_the_model_are_as_before(way):
    model = Keeping()
    parameter = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    model.plain, model.box.inside = torch.ones(2, 3), (parameter,)
    tensors = model.plain, model.box.inside[0]
    before = [(type(x), x.stride(), x.storage_offset(), x.tolist()) for x in tensors]

    def forward(k, d, i):
        for tensor in tensors:
            PLAIN[way](tensor, d)

    for _ in range(2):
        reports(forward, kdi(), KDI, modules=[model])
        assert [(type(x), x.stride(), x.storage_offset(), x.tolist()) for x in tensors] == before
        assert model.plain is tensors[0] and model.box.inside[0] is tensors[1]


def test_tensors_of_the_model_start_each_batch_as_they_were():
    model, got = Keeping(), []
    model.plain, model.box.inside = torch.ones(3).long(), (torch.ones(3).long(),)

    def forward(patches, grid):
        for tensor in (model.plain, model.box.inside[0]):
            got.append(tensor.tolist())
            tensor.copy_(grid[0])

    found = audited(forward, [batch(), batch()], FIELDS, modules=[model])
    assert got == [[1, 1, 1]] * 4
    assert told(events_of(found)) == []
    assert model.plain.tolist() == model.box.inside[0].tolist() == [1, 1, 1]


class Box:
    """An object as any."""


class Slotted:
    __slots__ = ("inside",)


def with_inside(box: Any, value: Any) -> Any:
    box.inside = value
    return box


LEFT = {
    "object": lambda x: with_inside(Box(), [x]),
    "slots": lambda x: with_inside(Slotted(), x),
    "namespace": lambda x: {"a": SimpleNamespace(x=x)},
    "generator": lambda x: (0, (y * 2 for y in [x])),
    "map": lambda x: [map(torch.neg, x)],
    "iterator": lambda x: iter([x]),
    "deque": lambda x: deque([x]),
    "mapping": lambda x: UserDict(a=x),
    "packed": lambda x: nn.utils.rnn.pack_padded_sequence(x[:, None], torch.tensor([2])),
    "distribution": lambda x: torch.distributions.Normal(x * 2, 1.0, validate_args=False),
}


@pytest.mark.parametrize("way", LEFT)
def test_what_leaves_in_any_object_is_used(way):
    found = reports(lambda k, d, i: LEFT[way](d), kdi(), KDI)[1]["d"]
    assert found.verdict == "right"
    assert found.reason == "used on the device as part of the forward's result"


@pytest.mark.parametrize("keep", [False, True])
def test_what_leaves_as_it_came_is_right_wherever_it_is(keep):
    found = reports(lambda k, d, i: {"k": k}, kdi(), KDI, keep_on_cpu={"k": keep})[1]["k"]
    where = "on the CPU" if keep else "used on the device"
    assert (found.verdict, found.reason) == ("right", f"{where} as part of the forward's result")
    model = Keeping()

    def forward(k, d, i):
        model.kept = k

    found = reports(forward, kdi(), KDI, keep_on_cpu={"k": keep}, modules=[model])[1]["k"]
    assert (found.verdict, found.reason) == ("right", f"{where} as part of what the model keeps")


def test_a_generator_that_is_run_at_the_end_is_the_models_too():
    def forward(patches, grid):
        return [x.tolist() for x in ()], (row.tolist() for row in grid)

    [event] = reports(forward)[1]["grid"].events
    assert (event.kind, event.count) == ("host_read", 2)
    assert event.site.source.startswith("return [x.tolist()")


kept_here: list[Any] = []
kept_name: Any = None


class Keeping(nn.Module):
    """A module that keeps what it gets, in many places."""

    kept_by_class: Any = None
    boxes_of_class: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.box = with_inside(Box(), ([1], "text"))
        self.queue = deque([1, 2], maxlen=2)
        self.pair = ([], {})
        self.ways: dict[str, Any] = {}
        self.register_buffer("buffer", torch.zeros(2, 3))

    def forward(self, way: str, d: torch.Tensor) -> None:
        KEEPS[way](self, d * 2)


def keep_globally(model: nn.Module, x: torch.Tensor) -> None:
    global kept_name
    kept_name = [x]


KEEPS = {
    "attribute": with_inside,
    "object": lambda m, x: with_inside(m.box, x),
    "list in an object": lambda m, x: m.box.inside[0].append(x),
    "new object": lambda m, x: with_inside(m.box, with_inside(Box(), (x,))),
    "deque": lambda m, x: m.queue.append(x),
    "tuple": lambda m, x: m.pair[0].append(x),
    "dict in a tuple": lambda m, x: m.pair[1].update(a=x),
    "class": lambda m, x: setattr(Keeping, "kept_by_class", x),
    "new name of a class": lambda m, x: setattr(Keeping, "late", [x]),
    "dict of a class": lambda m, x: Keeping.boxes_of_class.update(x=x),
    "global": keep_globally,
    "global list": lambda m, x: kept_here.append(x),
    "buffer": lambda m, x: m.buffer.copy_(x),
    "cache": lambda m, x: remember_it(Twice(x)),
}


class Twice:
    """Hashed by what it is."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@functools.lru_cache
def remember_it(box: Twice) -> torch.Tensor:
    return box.x * 2


def all_of(model: nn.Module) -> Any:
    box = model.box.inside
    return [
        *(dict(vars(model)), list(model.queue), model.queue.maxlen, copy.deepcopy(model.pair)),
        *(type(box), copy.deepcopy(box), model.buffer.tolist(), list(kept_here), kept_name),
        *(dict(vars(Keeping)), dict(Keeping.boxes_of_class), remember_it.cache_info().currsize),
    ]


@pytest.mark.parametrize("way", KEEPS)
def test_what_the_model_keeps_is_used_and_taken_back(way):
    model = Keeping()
    remember_it.cache_clear()
    before = all_of(model)

    def forward(k, d, i):
        model(way, d)

    for _ in range(2):
        found = reports(forward, kdi(), KDI, modules=[model])[1]["d"]
        assert (found.verdict, told(found.events, uses=True)) == ("right", ["device_use state d"])
        assert found.reason == "used on the device as part of what the model keeps"
        assert all_of(model) == before


def left_over(keep: bool) -> tuple[torch.Tensor, Any]:
    """A tensor that stays where no audit looks, and an array."""
    kept: list[Any] = []

    def forward(patches, grid):
        kept.extend([grid * 2, grid.numpy(force=True)])

    reports(forward, keep_on_cpu={"grid": keep})
    return kept[0], kept[1]


@pytest.mark.parametrize("keep", [False, True])
def test_a_tensor_that_stays_is_one_of_the_cpu(keep, tmp_path):
    tensor = left_over(keep)[0]
    expected = batch()["grid"] * 2
    assert tensor.device == torch.device("cpu")
    assert tensor.is_cpu and not tensor.is_cuda
    assert repr(tensor) == repr(expected)
    for plain in (
        *(tensor + 0, tensor.cpu(), tensor.to("cpu"), tensor.clone(), copy.copy(tensor)),
        *(copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), torch.stack([tensor])[0]),
        torch.from_dlpack(tensor),
    ):
        assert type(plain) is torch.Tensor and plain.device.type == "cpu"
        assert torch.equal(plain, expected)
    torch.save(tensor, tmp_path / "saved.pt")
    assert torch.equal(torch.load(tmp_path / "saved.pt"), expected)
    assert tensor.tolist() == expected.tolist() and tensor.sum().item() == expected.sum()
    assert type(tensor.numpy()) is np.ndarray
    tensor.add_(1)
    assert tensor[0, 0] == expected[0, 0] + 1
    assert torch.ones(2, 3, dtype=torch.int64).copy_(tensor)[0, 0] == expected[0, 0] + 1


def test_what_stays_of_gradients_and_weak_references():
    """In time torch lets go of the one, and Python of the other."""
    kept: list[Any] = []

    def forward(k, d, i):
        with torch.enable_grad():
            leaf = d.clone().requires_grad_()
            made = leaf.exp() * 2
        layer = nn.Linear(3, 3).cuda()
        kept.extend([made, leaf, made[0], layer.weight, d.t(), d])
        kept.append(weakref.ref(d))

    assert verdicts(forward, kdi(), KDI)["d"] == "unused"
    made, leaf, row, weight, turned, d, reference = kept
    assert {type(x) for x in (made, leaf, row, turned)} == {torch.Tensor}
    assert isinstance(weight, nn.Parameter) and not isinstance(weight, VirtualTensor)
    assert all(x.device.type == "cpu" for x in (made, leaf, row, weight, turned))
    assert torch.equal(turned.t(), kdi()["d"]) and torch.equal(row, made[0])
    # What could not become plain is taken for plain by the next audit.
    assert reference() is d and d.tolist() == kdi()["d"].tolist()
    found, fields = reports(lambda k, d, i: i + kept[5], kdi(), KDI)
    assert told(found.other_events) == ["mismatch aten.add.Tensor"]
    assert fields["d"].verdict == "unused"


@pytest.mark.parametrize("keep", [False, True])
def test_the_next_audit_takes_what_stayed_for_its_own_values_only(keep):
    tensor, array = left_over(keep)

    def forward(patches, grid):
        assert tensor.is_cpu and tensor.device.type == "cpu"
        return patches.sum() + tensor, torch.from_numpy(array).cuda(), tensor.tolist()

    found, fields = reports(forward)
    assert fields["grid"].verdict == "unused"
    assert told(found.other_events) == ["mismatch aten.add.Tensor", "restored Tensor.cuda"]
    given = {"patches": batch()["patches"], "grid": tensor}
    assert verdicts(lambda patches, grid: grid.tolist(), given)["grid"] == "right"


def test_what_stays_from_batch_to_batch_is_known_again():
    kept: dict[str, torch.Tensor] = {}

    def forward(patches, grid):
        if not kept:
            kept.update(table=torch.ones(6, device="cuda"), sizes=grid * 2)
        return patches * kept["table"], kept["sizes"].tolist()

    found = audited(forward, [batch(), batch()], FIELDS)
    assert [x.verdict for x in found.fields] == ["right", "right"]
    assert told(events_of(found)) == ["host_read Tensor.tolist grid"]


remembered: list[Any] = []


@functools.lru_cache
def remember(size: int) -> torch.Tensor:
    remembered.append(size)
    return torch.ones(size)


@functools.cache
def only_one() -> object:
    return object()


class Remembering(nn.Module):
    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return self.scale(6) * remember(6).to(patches.device) * patches

    @functools.lru_cache  # noqa: B019
    def scale(self, size: int) -> torch.Tensor:
        return torch.ones(size, device="cuda")


def test_functions_that_remember_results_forget_them():
    model, one = Remembering(), only_one()
    remember(6)
    remembered.clear()
    for _ in range(2):
        found = reports(model)[0]
        assert told(found.other_events) == ["restored Tensor.to"]
    assert remembered == [6, 6]
    assert not isinstance(remember(6), VirtualTensor)
    assert Remembering.scale.cache_info().currsize == 0
    assert only_one() is one


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(6)
        self.tables = {"all": [torch.ones(6), 3, (torch.ones(6), "x")]}
        self.place, self.device_type = torch.device("cpu"), "cpu"

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> Any:
        patches.to(self.place).to(self.device_type)
        return patches * self.table + self.tables["all"][0] - self.tables["all"][2][0]


def test_plain_attributes_are_on_the_device_if_asked_for():
    model = Attributes()
    before = dict(vars(model)), model.tables["all"][0]
    found = reports(model)[0]
    assert told(found.other_events) == [
        f"mismatch aten.{name}.Tensor" for name in ("mul", "add", "sub")
    ]
    assert told(events_of(reports(model, attributes=True)[0])) == []
    assert (dict(vars(model)), model.tables["all"][0]) == before


class MarkedParameter(nn.Parameter):
    @property
    def doubled(self) -> int:
        return 2 * self.mark


def test_odd_weights():
    model = Encoder()
    model.proj.weight = MarkedParameter(model.proj.weight.data)
    model.proj.weight.mark = 4
    with torch.inference_mode():
        model.register_buffer("made_in_inference_mode", torch.ones(6))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("none", None)

    def forward(patches, grid):
        assert (model.proj.weight.mark, model.none) == (4, None)
        patches *= model.made_in_inference_mode
        model.made_in_inference_mode.add_(1)
        return model(patches, grid)

    for _ in range(2):
        assert verdicts(forward, modules=[model]) == {"patches": "right", "grid": "right"}
    assert model.made_in_inference_mode.tolist() == [1] * 6
    assert type(model.proj.weight) is MarkedParameter and model.proj.weight.doubled == 8
    lazy = nn.LazyLinear(3)
    assert verdicts(lambda **_: lazy.in_features, modules=[lazy])["grid"] == "unused"


def test_weights_that_are_elsewhere_are_refused():
    with pytest.raises(CollateValueError, match=r"weight Linear.weight is on meta; move the model"):
        audited(nn.Linear(3, 3, device="meta"), [batch()], FIELDS)
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(Elsewhere(torch.ones(3, 3)))
    before = dict(model._parameters)
    with pytest.raises(CollateTypeError, match=r"weight Linear.weight is a Elsewhere; audit the"):
        audited(model, [batch()], FIELDS)
    assert {name: id(x) for name, x in model._parameters.items()} == {
        name: id(x) for name, x in before.items()
    }


class Elsewhere(torch.Tensor):
    """As ``DTensor`` and others: its data is in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Elsewhere(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Elsewhere(args[0].inner)


# Batches


def test_nested_and_ragged_fields_and_such_without_tensors():
    def forward(ragged, nested, shared, text, number, nothing, numbers):
        assert text == "clip" and number == 3 and nothing is None and numbers == [(4, 6), (8, 8)]
        assert type(nested["b"]) is tuple
        lengths = [len(x) for x in ragged]
        return torch.cat(ragged).split(lengths), nested["b"][0].tolist(), shared.item()

    given = {
        "ragged": [torch.ones(2, 3), torch.ones(5, 3)],
        "nested": {"a": [torch.ones(3)], "b": (torch.ones(2), "x")},
        "shared": torch.tensor(7),
        "text": "clip",
        "number": 3,
        "nothing": None,
        "numbers": [(4, 6), (8, 8)],
    }
    fields = {
        "ragged": Batched(),
        "nested": Batched(),
        "shared": Shared(keep_on_cpu=True),
        "text": Batched(keep_on_cpu=True),
        "number": Batched(),
        "nothing": Batched(),
        "numbers": Flat(),
    }
    found = reports(forward, given, fields)[1]
    assert {name: x.verdict for name, x in found.items()} == {
        "ragged": "right",
        "nested": "could be kept",
        "shared": "right",
        "text": "right",
        "number": "right",
        "nothing": "right",
        "numbers": "right",
    }
    assert found["number"].reason == "no tensor in it, so there is nothing to place"
    assert (found["ragged"].num_bytes, found["nested"].num_bytes) == (84, 20)
    assert [found[name].kind for name in ("ragged", "shared", "numbers")] == [
        "batched",
        "shared",
        "flat",
    ]
    assert [type(x) for x in given["ragged"]] == [torch.Tensor] * 2


def test_one_tensor_twice_in_a_field_stays_one():
    shared, seen = torch.ones(3), []
    audited(
        lambda pair: seen.append(pair[0] is pair[1]),
        [{"pair": [shared, shared]}],
        {"pair": Batched()},
    )
    assert seen == [True]


def test_arrays_and_sparse_tensors_of_a_batch_are_copied():
    array, sparse = np.ones(3), torch.eye(2).to_sparse()
    objects = np.array([[1], [2]], dtype=object)

    def forward(arrays, sparse, objects):
        assert arrays[0] is arrays[1]
        arrays[0][0] = 9
        sparse.values().zero_()
        objects[0, 0] = 9

    given = {"arrays": [array, array], "sparse": sparse, "objects": objects}
    reports(forward, given, dict.fromkeys(given, Batched()))
    assert array.tolist() == [1, 1, 1] and objects.tolist() == [[1], [2]]
    assert torch.equal(sparse.to_dense(), torch.eye(2))


def test_odd_leaves():
    leaf = torch.arange(6.0, requires_grad=True).reshape(2, 3).t()
    sparse = torch.eye(3).to_sparse()
    with torch.inference_mode():
        inference = torch.ones(3)

    def forward(leaf, sparse, inference):
        assert sparse.layout is torch.sparse_coo
        inference += 1
        assert leaf.stride() == (1, 3)
        return leaf @ torch.ones(2, device="cuda")

    given = {"leaf": leaf, "sparse": sparse, "inference": inference}
    found = reports(forward, given, dict.fromkeys(given, Batched()))[1]
    assert found["leaf"].verdict == "right"
    assert inference.tolist() == [1, 1, 1]


def test_batches_of_several_modalities():
    def forward(grid, pixels=None, clips=None):
        if clips is not None:
            return clips * grid.to("cuda").sum()
        return pixels[: grid.sum().item()]

    items = [
        {"pixels": torch.ones(6), "grid": torch.tensor(1)},
        {"clips": torch.ones(6), "grid": torch.tensor(2)},
        {"clips": torch.ones(6), "grid": torch.tensor(2)},
    ]
    flat = {"pixels": Flat(), "clips": Flat(), "grid": Batched(keep_on_cpu=True), "spare": Flat()}
    modalities = ["image", "video", "video"]
    groups = list(collate_groups(items, flat, modalities=modalities))
    by_modality = {
        "image": {name: flat[name] for name in ("pixels", "grid")},
        "video": {name: flat[name] for name in ("clips", "grid")},
    }
    for fields in (flat, by_modality):
        found = audited(forward, groups, fields)
        assert [(x.modality, x.field, x.verdict) for x in found.fields] == [
            ("image", "pixels", "right"),
            ("image", "grid", "right"),
            ("video", "clips", "right"),
            ("video", "grid", "restored"),
        ]
        assert found.num_forwards == 2
    unnamed = audited(forward, [(None, 1, groups[0].batch)], flat, modality="picture")
    assert {x.modality for x in unnamed.fields} == {"picture"}


def test_events_of_all_batches_are_added_up():
    found = audited(Restoring(), [batch(), batch(), batch()], FIELDS)
    grid = {x.field: x for x in found.fields}["grid"]
    [event] = [event for event in grid.events if event.kind == "restored"]
    assert (event.count, event.num_bytes, grid.num_bytes) == (3, 72, 144)
    assert found.num_forwards == 3


def test_a_copy_that_blocks_once_is_not_called_non_blocking():
    def forward(patches, grid):
        for non_blocking in (True, False, True):
            grid.to(patches.device, non_blocking=non_blocking)

    [event] = reports(forward)[1]["grid"].events
    assert (event.count, event.non_blocking) == (3, False)


def test_the_first_lines_of_device_uses_are_kept():
    def forward(patches, grid):
        ones = device_zeros(6)
        for _ in range(7):
            patches = patches * ones
        first = patches + ones, patches - ones
        second = patches / ones, patches.maximum(ones)
        third = patches.minimum(ones), patches.hypot(ones)
        return first, second, third

    events = reports(forward)[1]["patches"].events
    assert len(events) == MAX_DEVICE_USES
    assert events[0].count == 7


# Whose code it was


def test_the_line_is_the_models_own(tmp_path, monkeypatch):
    package = tmp_path / "some_models" / "vision"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(
        "def sizes(grid):\n    return [sorted([int(x)])  # read\n            for x in grid]\n"
    )
    (package / "encoder.py").write_text(
        "import functools\n"
        "import torch\n"
        "from some_models.vision import sizes\n\n\n"
        "class Encoder(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = torch.nn.Sequential(Inner())\n\n"
        "    def forward(self, patches, grid):\n"
        "        return functools.reduce(lambda _, x: self.inner(x), [0, grid])\n\n\n"
        "class Inner(torch.nn.Module):\n"
        "    def forward(self, grid):\n"
        "        return sizes(grid[0])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    encoder = importlib.import_module("some_models.vision.encoder")
    [event] = reports(encoder.Encoder())[1]["grid"].events
    files = [(site.file, site.line) for site in event.stack if "listcomp" not in site.function]
    inner, outer = "some_models/vision/__init__.py", "some_models/vision/encoder.py"
    assert (event.site.file, event.site.line) == (inner, 2)
    assert event.site.source == "return [sorted([int(x)])  # read"
    assert files[-3:] == [(outer, 17), (outer, 12), (outer, 12)]
    assert event.stack[-1].function.endswith("forward")
    assert {site.file for site in event.stack} == {inner, outer}
    assert event.count == 3
    for name in [name for name in sys.modules if name.startswith("some_models")]:
        del sys.modules[name]


def test_code_of_a_prompt_and_code_without_lines():
    import linecache

    source = "def forward(patches, grid):\n    return grid.tolist()\n"
    names: dict[str, Any] = {}
    exec(compile(source, "<cell>", "exec"), names)
    [event] = reports(names["forward"])[1]["grid"].events
    assert event.site is None
    found = reports(names["forward"])[1]["grid"]
    assert found.reason == "read by the host outside the model's code (Tensor.tolist)"
    name = "<cell of a notebook>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), names)
    [event] = reports(names["forward"])[1]["grid"].events
    assert (event.site.file, event.site.line, event.site.source) == (
        name,
        2,
        "return grid.tolist()",
    )
    assert event.site.function == "forward"


# Calls


def test_what_can_be_audited():
    model = Encoder()
    right = {"patches": "right", "grid": "right"}
    assert verdicts(model) == verdicts(model.forward) == right

    def call(**given):
        return model(**given)

    assert verdicts(call, modules=[model]) == right
    mixed = reports(call, modules=[])[0]
    assert told(mixed.other_events) == ["mismatch aten.addmm.default"]
    assert reports(model)[0].model == reports(model.forward)[0].model == "Encoder"
    assert reports(model, name="mine")[0].model == "mine"
    for partial in (functools.partial(model), functools.partial(functools.partial(model.forward))):
        assert verdicts(partial) == right
        assert reports(partial)[0].model == "Encoder"
    assert "test_what_can_be_audited" in mixed.model


class Runner:
    """An object with a model inside, and no module itself."""

    def __init__(self) -> None:
        self.model = Encoder()

    def encode(self, **given: Any) -> Any:
        return self.model(**given)

    __call__ = encode


@pytest.mark.parametrize(
    "forward",
    [
        lambda **given: None,
        functools.partial(lambda model, **given: model(**given), Encoder()),
        Runner(),
        Runner().encode,
        functools.wraps(Encoder.forward)(lambda **given: None),
    ],
)
def test_a_function_has_to_say_whose_weights_it_uses(forward):
    with pytest.raises(CollateValueError, match=r"modules=\[model\], or .* none, modules=\[\]"):
        audit(forward, [batch()], FIELDS)
    assert audit(forward, [batch()], FIELDS, modules=[]).num_forwards == 1


def test_versions_of_what_took_part(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "__version__", "1.2.3", raising=False)
    versions = reports(Encoder())[0].versions
    assert versions["torch"] == torch.__version__
    assert versions[__name__] == "1.2.3"
    assert {"mmcollate", "python"} <= versions.keys()


def test_a_generator_is_run():
    def forward(patches, grid):
        yield grid.tolist()

    assert reports(forward)[1]["grid"].verdict == "right"


def test_inside_other_modes():
    with torch.inference_mode():
        assert verdicts(Encoder()) == {"patches": "right", "grid": "right"}
        assert torch.is_inference_mode_enabled()
    with torch.enable_grad():
        assert verdicts(Encoder()) == {"patches": "right", "grid": "right"}
        assert torch.is_grad_enabled()


def test_a_forward_can_not_start_an_audit():
    def forward(patches, grid):
        return audited(Encoder(), [batch()], FIELDS)

    found = audited(forward, [batch()], FIELDS)
    assert found.error.startswith("CollateRuntimeError")
    assert "an audit is running here" in found.error
    assert verdicts(Encoder()) == {"patches": "right", "grid": "right"}


def test_audits_of_several_threads_take_turns():
    inside, most, got = [], [], []

    def forward(patches, grid):
        inside.append(1)
        most.append(len(inside))
        sizes = grid.tolist()
        inside.pop()
        return sizes

    def run():
        for _ in range(5):
            got.append(verdicts(forward)["grid"])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == ["right"] * 20
    assert max(most) == 1


def test_a_thread_of_the_forward_is_followed_too():
    def forward(patches, grid):
        results = []
        thread = threading.Thread(target=lambda: results.append((grid + 1).tolist()))
        thread.start()
        thread.join()
        return results

    found = reports(forward, keep_on_cpu={"grid": False})[1]["grid"]
    assert told(found.events) == ["sync Tensor.tolist grid"]


WRONG: dict[str, Any] = {
    "a batch alone": (CollateTypeError, "put a single one into a list", {"batches": batch()}),
    "no batches": (CollateTypeError, "batches are int", {"batches": 3}),
    "no batch": (CollateValueError, "no batch: nothing would be run", {"batches": []}),
    "odd batch": (CollateTypeError, "modality 'image': a batch is list of 1", {"batches": [[1]]}),
    "odd fields": (CollateTypeError, "fields are list of 1", {"fields": [Flat()]}),
    "odd field": (
        CollateTypeError,
        "modality 'image', field 'grid': str, expected Batched, Flat or Shared",
        {"fields": {**FIELDS, "grid": "batched"}},
    ),
    "unknown field": (
        CollateKeyError,
        "modality 'image', field 'grid': not in fields; say what it is",
        {"fields": {"patches": Flat()}},
    ),
    "unknown modality": (
        CollateKeyError,
        "field 'patches': not in fields",
        {"fields": {"video": FIELDS}},
    ),
    "unknown flag": (
        CollateKeyError,
        "keep_on_cpu has 'gird', which no batch has",
        {"keep_on_cpu": {"gird": True}},
    ),
    "odd forward": (
        CollateTypeError,
        "forward is int, expected a module or a callable",
        {"forward": 3},
    ),
    "flags that are none": (
        CollateTypeError,
        "keep_on_cpu is list of 1, expected a mapping from field name to True or False",
        {"keep_on_cpu": ["grid"]},
    ),
    "a flag that is none": (
        CollateTypeError,
        "keep_on_cpu is dict",
        {"keep_on_cpu": {"grid": "no"}},
    ),
    "a module alone": (
        CollateTypeError,
        "modules are Linear, expected a list of modules",
        {"modules": torch.nn.Linear(2, 2)},
    ),
    "no modules": (
        CollateTypeError,
        "modules have str, expected modules alone",
        {"modules": ["model"]},
    ),
    "elsewhere": (
        CollateValueError,
        r"modality 'image', field 'grid': float32 \(2,\) on meta; give batches on the CPU",
        {"batches": [{**batch(), "grid": [torch.ones(2, device="meta")]}]},
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused_before_anything_runs(what):
    error, message, given = WRONG[what]

    def forward(**given):
        raise AssertionError

    options = {"forward": forward, "batches": [batch()], "fields": FIELDS, "modality": "image"}
    with pytest.raises(error, match=message):
        audited(**{**options, **given})


def test_the_example_in_the_docstring():
    ran = doctest.testmod(importlib.import_module("mmcollate.audit"))
    assert ran.attempted == 7 and not ran.failed


def test_importing_mmcollate_does_not_import_audits():
    code = "import sys, mmcollate; assert not any('audit' in x for x in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Models of Transformers, without weights to download


def tiny_llava_next() -> Any:
    transformers = pytest.importorskip("transformers")
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        projection_dim=32,
    )
    text = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=200,
    )
    config = transformers.LlavaNextConfig(
        vision_config=vision,
        text_config=text,
        image_grid_pinpoints=[[56, 112], [112, 112]],
        vision_feature_layer=-1,
    )
    return transformers.LlavaNextForConditionalGeneration(config).eval()


def tiny_qwen() -> Any:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 200,
            "rope_parameters": rope,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def test_llava_next_of_transformers():
    """Its sizes are for the host alone."""
    model = tiny_llava_next()
    weights = {name: (id(x), x.clone()) for name, x in model.named_parameters()}
    given = {
        "pixel_values": torch.randn(2, 5, 3, 56, 56),
        "image_sizes": torch.tensor([[112, 112], [100, 110]]),
    }
    fields = {"pixel_values": Batched(), "image_sizes": Batched(keep_on_cpu=True)}
    run = functools.partial(reports, model.get_image_features, given, fields, modality="image")
    found = run()[1]
    assert {name: x.verdict for name, x in found.items()} == dict.fromkeys(fields, "right")
    assert found["pixel_values"].events[0].site.file == "transformers/models/clip/modeling_clip.py"
    moved = run(keep_on_cpu={"image_sizes": False})[1]["image_sizes"]
    assert moved.verdict == "could be kept"
    assert set(told(moved.events)) == {"sync Tensor.tolist image_sizes"}
    assert {event.site.file for event in moved.events} == {
        "transformers/models/llava_next/modeling_llava_next.py"
    }
    assert run(keep_on_cpu={"pixel_values": True})[1]["pixel_values"].verdict == "wrong"
    for name, x in model.named_parameters():
        assert id(x) == weights[name][0] and torch.equal(x, weights[name][1])


def test_qwen_of_transformers():
    """It makes positions where the grid is, and so needs it on the device that its weights are on;
    there each read of it waits."""
    model = tiny_qwen()
    given = {
        "pixel_values": torch.randn(40, 1176),
        "image_grid_thw": torch.tensor([[1, 4, 6], [1, 4, 4]]),
    }
    fields = {"pixel_values": Flat(), "image_grid_thw": Batched(keep_on_cpu=True)}
    run = functools.partial(reports, model.get_image_features, given, fields, modality="image")
    kept = run()[1]["image_grid_thw"]
    assert kept.verdict == "wrong"
    assert "host_read Tensor.tolist image_grid_thw" in told(kept.events)
    moved = run(keep_on_cpu={"image_grid_thw": False})[1]["image_grid_thw"]
    assert moved.verdict == "right"
    assert "sync Tensor.tolist image_grid_thw" in told(moved.events)
    assert not [event for event in moved.events if event.kind == "mismatch"]
    assert run(keep_on_cpu={"pixel_values": True})[1]["pixel_values"].verdict == "wrong"

"""Random fields and items: mmcollate against the engine, and against plain torch.

An example is drawn as a description, whose repr says all there is to it; ``build`` makes the
items. Equal descriptions become one object, so that repeated and shared leaves occur too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import mmcollate
import pytest
import torch
from compare import assert_same, outcome

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis")
from hypothesis import given, note
from hypothesis import strategies as st

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.timeout(3600),  # for the nightly profile
]

GRAD_MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
COMMON = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float16]
# torch allocates too little for these, and writes past the end when it joins them
PACKED = {torch.quint4x2, torch.quint2x4}
EVERY = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)} - PACKED, key=str)


# Descriptions


@dataclass(frozen=True)
class Leaf:
    """A tensor of random bits."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str = "contiguous"
    seed: int = 0
    copy: int = 0
    """Tells equal leaves that are different objects apart."""
    grad: bool = False
    inference: bool = False
    conj: bool = False


@dataclass(frozen=True)
class Slice:
    """Part of a larger leaf, in its storage."""

    base: Leaf
    dim: int
    start: int
    length: int
    drop_dim: bool = False


@dataclass(frozen=True)
class Nested:
    kind: type
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Plain:
    value: Any


@dataclass(frozen=True)
class FieldCase:
    kind: str
    dim: int
    keep_on_cpu: bool
    leaves: tuple[Any, ...]


# Building


def raw_bits(dtype: torch.dtype, count: int, seed: int, *, offset: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    size = count * dtype.itemsize
    data = torch.randint(high, (size,), dtype=torch.uint8, generator=generator)
    if offset:
        buffer = bytearray(offset) + bytearray(data.numpy().tobytes())
        data = torch.frombuffer(buffer, dtype=torch.uint8, offset=offset, count=size)
    return data.view(dtype)


LAYOUTS = {
    "contiguous": lambda x, shape: x.as_strided(shape, contiguous(shape)),
    "transposed": lambda x, shape: (
        x.as_strided(shape, (*contiguous((*shape[:-2], shape[-1], shape[-2]))[:-2], 1, shape[-2]))
        if len(shape) > 1
        else x.as_strided(shape, contiguous(shape))
    ),
    "gapped": lambda x, shape: x.as_strided(shape, [2 * s for s in contiguous(shape)]),
    "padded rows": lambda x, shape: x.as_strided(shape, padded(shape)),
    "expanded": lambda x, shape: x.as_strided(shape, (0, *contiguous(shape)[1:])[: len(shape)]),
    "all expanded": lambda x, shape: x.as_strided(shape, [0] * len(shape)),
    "overlapping": lambda x, shape: x.as_strided(shape, [1] * len(shape)),
    "odd size-1 strides": lambda x, shape: x.as_strided(
        shape, [77 if n == 1 else s for n, s in zip(shape, contiguous(shape), strict=True)]
    ),
    "storage offset": lambda x, shape: x[3:].as_strided(shape, contiguous(shape), 3),
    "unaligned": lambda x, shape: x.as_strided(shape, contiguous(shape)),
}


def contiguous(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape))]


def padded(shape: tuple[int, ...]) -> list[int]:
    """Strides of a slice of something wider in its last dim."""
    return [s if d == len(shape) - 1 else 2 * s for d, s in enumerate(contiguous(shape))]


def build(spec: Any, made: dict[Any, Any]) -> Any:
    if spec not in made:
        made[spec] = _build(spec, made)
    return made[spec]


def _build(spec: Any, made: dict[Any, Any]) -> Any:
    if isinstance(spec, Slice):
        part = build(spec.base, made).narrow(spec.dim, spec.start, spec.length)
        return part.select(spec.dim, 0) if spec.drop_dim and spec.length == 1 else part
    if isinstance(spec, Nested):
        parts = [build(x, made) for x in spec.parts]
        return dict(enumerate(parts)) if spec.kind is dict else spec.kind(parts)
    if isinstance(spec, Plain):
        return spec.value
    count = 2 * math.prod(max(n, 1) for n in spec.shape) + 80
    with torch.inference_mode(spec.inference):
        # torch crashes on complex128 that does not lie on a multiple of 16 bytes
        unaligned = spec.layout == "unaligned" and spec.dtype.itemsize <= 8
        x = raw_bits(spec.dtype, count, spec.seed, offset=int(unaligned))
        x = LAYOUTS[spec.layout](x, spec.shape)
        if spec.conj and spec.dtype.is_complex:
            x = x.conj()
    if spec.grad and not spec.inference and (spec.dtype.is_floating_point or spec.dtype.is_complex):
        x = x.detach().requires_grad_()
    return x


def build_items(cases: dict[str, FieldCase], n: int) -> list[dict[str, Any]]:
    made: dict[Any, Any] = {}
    return [{name: build(c.leaves[i], made) for name, c in cases.items()} for i in range(n)]


def declare(cases: dict[str, FieldCase]) -> dict[str, Any]:
    kinds = {
        "batched": lambda c: mmcollate.Batched(keep_on_cpu=c.keep_on_cpu),
        "flat": lambda c: mmcollate.Flat(dim=c.dim, keep_on_cpu=c.keep_on_cpu),
        "shared": lambda c: mmcollate.Shared(keep_on_cpu=c.keep_on_cpu),
    }
    return {name: kinds[c.kind](c) for name, c in cases.items()}


# Drawing

sizes = st.sampled_from([2, 3, 1, 4, 0])
shapes = st.lists(sizes, max_size=4).map(tuple)
common = st.sampled_from(COMMON)
dtypes = st.one_of(common, common, common, st.sampled_from(EVERY))
layouts = st.one_of(st.just("contiguous"), st.sampled_from(sorted(LAYOUTS)))
seeds = st.integers(0, 3)
plain = st.sampled_from([None, 1, 2.5, "ab", True, 10**9]).map(Plain)
half = st.booleans()
seldom = st.integers(0, 7).map(lambda x: x == 7)


@st.composite
def leaves(draw: Any, dtype: Any = dtypes, shape: Any = shapes) -> Leaf:
    return Leaf(
        dtype=draw(dtype),
        shape=draw(shape),
        layout=draw(layouts),
        seed=draw(seeds),
        copy=draw(seeds),
        grad=draw(seldom),
        inference=draw(seldom),
        conj=draw(half),
    )


@st.composite
def similar(draw: Any, first: Leaf) -> Leaf:
    """A leaf like another, but perhaps of another size, rank or dtype."""
    shape, dtype = first.shape, first.dtype
    change = draw(st.sampled_from(["none", "none", "size", "rank", "dtype"]))
    if change == "size" and shape:
        dim = draw(st.integers(0, len(shape) - 1))
        shape = (*shape[:dim], draw(sizes), *shape[dim + 1 :])
    elif change == "rank":
        shape = shape[1:] if draw(half) else (*shape, draw(sizes))
    elif change == "dtype":
        dtype = draw(dtypes)
    return draw(leaves(dtype=st.just(dtype), shape=st.just(shape)))


@st.composite
def slices(draw: Any, n: int) -> list[Any]:
    """Slices of one leaf: side by side, or with gaps, overlaps, repeats or out of order."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    equal = draw(half)
    length = draw(st.integers(0, 3))
    lengths = [length if equal else draw(st.integers(0, 3)) for _ in range(n)]
    shape[dim] = sum(lengths) + 2
    base = draw(leaves(shape=st.just(tuple(shape))))
    base = replace(base, grad=False)
    starts = [sum(lengths[:i]) for i in range(n)]
    parts = [
        Slice(base, dim, start, size, drop_dim=equal and length == 1 and draw(st.just(True)))
        for start, size in zip(starts, lengths, strict=True)
    ]
    disorder = draw(st.sampled_from(["none", "none", "shuffle", "shift", "repeat"]))
    if disorder == "shuffle":
        parts = draw(st.permutations(parts))
    elif disorder == "shift" and parts:
        i = draw(st.integers(0, n - 1))
        parts[i] = replace(parts[i], start=min(parts[i].start + 1, shape[dim] - parts[i].length))
    elif disorder == "repeat" and parts:
        parts[draw(st.integers(0, n - 1))] = parts[0]
    return list(parts)


@st.composite
def nested(draw: Any) -> Nested:
    kind = draw(st.sampled_from([list, list, tuple, dict]))
    inner = st.one_of(leaves(), plain, st.just(Nested(list, ())))
    return Nested(kind, tuple(draw(st.lists(inner, max_size=3))))


@st.composite
def field_leaves(draw: Any, n: int) -> list[Any]:
    how = draw(st.sampled_from(["equal", "equal", "similar", "same", "slices", "any", "nested"]))
    if n == 0:
        return []
    if how == "slices":
        return draw(slices(n))
    if how == "nested":
        return draw(st.lists(nested(), min_size=n, max_size=n))
    if how == "any":
        anything = st.one_of(leaves(), plain, nested())
        return draw(st.lists(anything, min_size=n, max_size=n))
    first = draw(leaves())
    if how == "same":
        return [first] * n
    if how == "similar":
        return [first, *(draw(similar(first)) for _ in range(n - 1))]
    exact = leaves(dtype=st.just(first.dtype), shape=st.just(first.shape))
    return [first, *(draw(exact) for _ in range(n - 1))]


@st.composite
def usual_leaves(draw: Any, n: int, dim: int) -> list[Any]:
    """Tensors that can be joined along ``dim``: most fields of real models are such."""
    if n and draw(st.integers(0, 3)) == 3:
        return draw(slices(n))
    shape = list(draw(shapes))
    shape += [2] * (dim + 1 - len(shape))
    first = draw(leaves(dtype=common))
    ragged = draw(half)
    found = []
    for _ in range(n):
        if ragged:
            shape[dim] = draw(sizes)
        leaf = draw(leaves(dtype=st.just(first.dtype), shape=st.just(tuple(shape))))
        found.append(replace(leaf, grad=False))
    return found


@st.composite
def field_cases(draw: Any, n: int) -> FieldCase:
    kind = draw(st.sampled_from(["batched", "flat", "batched", "flat", "shared"]))
    if draw(st.integers(0, 4)):
        dim = draw(st.sampled_from([0, 0, 0, 1, 2]))
        found = draw(usual_leaves(n, dim))
    else:
        dim = draw(st.sampled_from([0, 0, 0, 1, -1, 2, -2, 5, -5]))
        found = draw(field_leaves(n))
    if kind == "shared" and draw(st.integers(0, 3)):
        found = found[:1] * n  # or they would hardly ever merge
    if isinstance(found[0] if found else None, Leaf) and draw(half) and dim > 0:
        dim -= len(found[0].shape)
    return FieldCase(kind, dim if kind == "flat" else 0, draw(half), tuple(found))


@st.composite
def batches(draw: Any) -> tuple[dict[str, FieldCase], int]:
    n = draw(st.integers(0, 9))
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True))
    return {name: draw(field_cases(n)) for name in names}, n


devices = st.sampled_from([None, "cpu", "meta"])
modes = st.sampled_from(sorted(GRAD_MODES))
pins = seldom


# Tests


def kind_of(exception: type[BaseException] | None) -> type[BaseException]:
    kinds = (TypeError, ValueError, IndexError, KeyError, RuntimeError)
    return next((x for x in kinds if exception and issubclass(exception, x)), Exception)


@given(batch=batches(), device=devices, mode=modes, pin_memory=pins)
def test_collate_is_the_reference(batch, device, mode, pin_memory):
    cases, n = batch
    items, fields = build_items(cases, n), declare(cases)
    with GRAD_MODES[mode]():
        inputs = [x for each in items for x in each.values()]
        options = {"device": device, "pin_memory": pin_memory}
        theirs = outcome(lambda: mmcollate.reference.collate(items, fields, **options))
        bounds = outcome(lambda: mmcollate.reference.group_bounds(items, fields))
        several = len(bounds.result) + bool(bounds.exception) > 1
        for _ in range(2):
            ours = outcome(lambda: mmcollate.collate(items, fields, **options))
            if theirs.exception is None:
                assert ours.exception is None, f"{ours}, where the reference has a result"
                assert_same(ours.result, theirs.result, inputs=inputs)
            else:
                assert ours.exception is not None, f"a result, for the reference's {theirs}"
                assert issubclass(ours.exception, mmcollate.MMCollateError), f"{ours} for {theirs}"
                assert several or issubclass(ours.exception, kind_of(theirs.exception)), (
                    f"{ours} for {theirs}"
                )


@given(
    batch=batches(),
    device=devices,
    mode=modes,
    pin_memory=pins,
    dropped=st.lists(st.tuples(st.integers(0, 8), st.sampled_from("abcdef")), max_size=3),
    turned=st.lists(st.integers(0, 8), max_size=3),
)
def test_groups_are_the_engines(batch, device, mode, pin_memory, dropped, turned):
    vllm_items = pytest.importorskip("vllm_items", reason="needs vLLM")
    cases, n = batch
    plain_items = build_items(cases, n)
    for i, name in dropped:
        if i < n:
            plain_items[i].pop(name, None)
    for i in turned:
        if i < n:
            plain_items[i] = dict(reversed(plain_items[i].items()))
    items = vllm_items.from_plain(plain_items, declare(cases))
    options = {"device": device, "pin_memory": pin_memory}
    with GRAD_MODES[mode]():
        note(f"the engine gave {vllm_items.same_groups(items, **options)}")
        vllm_items.same_batch(items, **options)


@given(n=st.integers(1, 9), data=st.data(), device=devices, mode=modes)
def test_one_field_of_each_kind_is_the_engines(n, data, device, mode):
    vllm_items = pytest.importorskip("vllm_items", reason="needs vLLM")
    case = data.draw(field_cases(n))
    cases = {"x": case}
    items = vllm_items.from_plain(build_items(cases, n), declare(cases))
    with GRAD_MODES[mode]():
        note(f"the engine gave {vllm_items.same_batch(items, device=device)}")


@given(spec=leaves())
def test_a_description_says_what_is_built(spec):
    x, again = build(spec, {}), build(spec, {})
    assert (x.dtype, tuple(x.shape)) == (spec.dtype, spec.shape)
    assert x is not again
    assert_same(x, again)

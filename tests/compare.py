"""Whether two collated results are the same, down to the bit.

``assert_same`` looks at everything a consumer of a batch could notice: Python types, the order of
keys, list or tuple or tensor, dtype, shape, strides, device, autograd and inference flags, the raw
bits (a NaN keeps its payload, -0.0 is not 0.0), and which outputs share memory with which inputs.
``assert_same_outcome`` does the same for two callables that may raise.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

_FINGERPRINT_BYTES = 1 << 20
_LISTED_ELEMENTS = 1 << 20
_UNSET = object()


# ---------------------------------------------------------------------------------- tensors


def is_opaque(t: torch.Tensor) -> bool:
    """Whether ``t`` has no memory of its own that could be read or aliased byte by byte."""
    if t.layout is not torch.strided or t.is_nested or t.device.type == "meta":
        return True
    if torch._C._functorch.is_batchedtensor(t) or torch._is_functional_tensor(t):
        return True
    if isinstance(t, FakeTensor) or (not _storage_address(t) and t.numel()):
        return True
    return t.numel() > 0 and _extent(t) > t.untyped_storage().nbytes()  # storage taken away


def byte_view(t: torch.Tensor, repeated: frozenset[int] = frozenset()) -> torch.Tensor:
    """The memory of a strided tensor as uint8, with a last dim of ``element_size`` bytes.

    Works without any kernel for the dtype. Only the first index is kept of dims in ``repeated``,
    so that an expanded tensor costs no more than what it was expanded from.
    """
    with torch.no_grad():
        base = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    size = t.element_size()
    shape = [1 if d in repeated else n for d, n in enumerate(t.shape)]
    strides = [s * size for s in t.stride()]
    return base.as_strided((*shape, size), (*strides, 1), t.storage_offset() * size)


def _storage_address(t: torch.Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _extent(t: torch.Tensor) -> int:
    """The number of bytes from the start of the storage to the end of the last element."""
    last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


def _span(t: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last address of the elements of ``t``; empty where it has none."""
    if is_opaque(t) or t.numel() == 0:
        return (0, 0)
    start = _storage_address(t)
    return (start + t.storage_offset() * t.element_size(), start + _extent(t))


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


def _storage_id(t: torch.Tensor) -> Any:
    try:
        return t.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return id(t)


def _facts(t: torch.Tensor, strides: bool) -> dict[str, Any]:
    """All that can be said of a tensor short of its contents."""
    facts: dict[str, Any] = {
        "layout": t.layout,
        "dtype": t.dtype,
        "device": t.device,
        "rank": t.dim(),
        "nested": t.is_nested,
        "requires_grad": t.requires_grad,
        "has grad_fn": t.grad_fn is not None,
        "inference tensor": t.is_inference(),
        "conj bit": t.is_conj(),
        "neg bit": t.is_neg(),
        "quantised": t.is_quantized,
        "readable memory": not is_opaque(t),
    }
    if not t.is_nested:
        facts["shape"] = tuple(t.shape)
    if t.layout is torch.strided and not t.is_nested and strides:
        facts["strides"] = tuple(t.stride())
    if facts["readable memory"] and t.device.type == "cpu":
        facts["pinned"] = t.is_pinned()
    if t.is_quantized:
        facts["qscheme"] = t.qscheme()
        if t.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            facts["scale"], facts["zero point"] = t.q_scale(), t.q_zero_point()
    if t.is_sparse:
        facts["coalesced"] = t.is_coalesced()
    return facts


def _parts(t: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The tensors that an opaque tensor consists of; None where it has no contents at all."""
    if torch._C._functorch.is_batchedtensor(t):
        return {"unwrapped": torch._C._functorch.get_unwrapped(t)}
    if torch._is_functional_tensor(t):
        torch._sync(t)
        return {"functional": torch._from_functional_tensor(t)}
    if t.layout is torch.jagged:
        return {"values": t.detach().values(), "offsets": t.offsets()}
    if t.is_nested:
        return {f"unbind {i}": x for i, x in enumerate(t.detach().unbind())}
    if t.layout is torch.sparse_coo:
        return {"indices": t.detach()._indices(), "values": t.detach()._values()}
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {"crow": t.crow_indices(), "col": t.col_indices(), "values": t.detach().values()}
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return {"ccol": t.ccol_indices(), "row": t.row_indices(), "values": t.detach().values()}
    if t.is_mkldnn:
        return {"dense": t.detach().to_dense()}
    if hasattr(t, "__tensor_flatten__") and not isinstance(t, FakeTensor):
        names, _ = t.__tensor_flatten__()
        return {name: getattr(t, name) for name in names}
    return None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach(), b.detach()
    if type(a) is not torch.Tensor:
        a, b = a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor)
    if a.is_conj() or a.is_neg():
        a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if a.numel() == 0:
        return True
    if (_span(a), a.stride()) == (_span(b), b.stride()):
        return True  # the same memory
    both = zip(a.stride(), b.stride(), strict=True)
    repeated = frozenset(d for d, (s, t) in enumerate(both) if s == 0 and t == 0)
    return torch.equal(byte_view(a, repeated).cpu(), byte_view(b, repeated).cpu())


def _first_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    if a.numel() > _LISTED_ELEMENTS:
        return "the bits differ"
    differs = (byte_view(a).cpu() != byte_view(b).cpu()).any(-1)
    index = tuple(differs.nonzero()[0].tolist())
    return (
        f"the bits differ in {int(differs.sum())} of {a.numel()} elements, first at {index}: "
        f"{byte_view(a)[index].tolist()} != {byte_view(b)[index].tolist()}"
    )


# --------------------------------------------------------------------------------- other leaves


def _same_leaf(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every object of a nested value, containers included."""
    yield path, value
    if isinstance(value, Mapping):
        for key in value:
            yield from _walk(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            yield from _walk(x, f"{path}[{i}]")


# ------------------------------------------------------------------------------- the comparer


class _Comparer:
    def __init__(self, inputs: Any, strides: bool) -> None:
        self.strides = strides
        self.known = {id(x): path for path, x in _walk(tuple(inputs), "inputs")}
        self.inputs: dict[int, torch.Tensor] = {}
        for _, x in _walk(tuple(inputs)):
            if isinstance(x, torch.Tensor):
                self.inputs[id(x)] = x
        self.spans = {i: _span(x) for i, x in self.inputs.items()}
        self.storages: dict[Any, set[tuple[str, int]]] = {}
        for i, x in self.inputs.items():
            self.storages.setdefault(_storage_id(x), set()).add(("the storage of", i))
        self.outputs: list[tuple[str, tuple[int, int], tuple[int, int]]] = []

    def compare(self, ours: Any, theirs: Any, path: str) -> None:
        mine, other = self.known.get(id(ours)), self.known.get(id(theirs))
        if ours is not theirs and other is not None:
            _fail(path, f"theirs is the very object {other}, ours is another")
        if ours is not theirs and mine is not None:
            _fail(path, f"ours is the very object {mine}, theirs is another")
        if type(ours) is not type(theirs):
            _fail(path, f"type {_name(type(ours))} != {_name(type(theirs))}")
        if isinstance(ours, torch.Tensor):
            self._tensor(ours, theirs, path)
        elif isinstance(ours, dict):
            if list(ours) != list(theirs):
                _fail(path, f"keys {list(ours)} != {list(theirs)}")
            for key in ours:
                self.compare(ours[key], theirs[key], f"{path}[{key!r}]")
        elif isinstance(ours, (list, tuple)):
            if len(ours) != len(theirs):
                _fail(path, f"length {len(ours)} != {len(theirs)}")
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                self.compare(a, b, f"{path}[{i}]")
        elif not _same_leaf(ours, theirs):
            _fail(path, f"{ours!r} != {theirs!r}")

    def _tensor(self, ours: torch.Tensor, theirs: torch.Tensor, path: str) -> None:
        if ours is not theirs:
            mine, other = _facts(ours, self.strides), _facts(theirs, self.strides)
            if self._is_view_of_neighbours(ours):
                # A view of an ordinary tensor is one, too; a fresh tensor may be another.
                del mine["inference tensor"], other["inference tensor"]
            for fact in other:
                if mine.get(fact, _UNSET) != other[fact]:
                    _fail(path, f"{fact} {mine.get(fact)} != {other[fact]}")
            if mine.keys() != other.keys():
                _fail(path, f"{sorted(mine.keys() - other.keys())} only in ours")
            self._attributes(ours, theirs, path)
            self._contents(ours, theirs, path)
            self._aliases(ours, theirs, path)
        self.outputs.append((path, _span(ours), _span(theirs)))

    def _attributes(self, ours: torch.Tensor, theirs: torch.Tensor, path: str) -> None:
        if type(ours) in (torch.Tensor, torch.nn.Parameter):
            for name in sorted(vars(ours).keys() | vars(theirs).keys()):
                a, b = vars(ours).get(name, _UNSET), vars(theirs).get(name, _UNSET)
                if a is not b:
                    _fail(path, f"attribute {name!r} of the tensor differs")

    def _contents(self, ours: torch.Tensor, theirs: torch.Tensor, path: str) -> None:
        if not is_opaque(ours):
            if not _same_bits(ours, theirs):
                _fail(path, _first_difference(ours, theirs))
            return
        mine, other = _parts(ours), _parts(theirs)
        if mine is not None and other is not None:
            if mine.keys() != other.keys():
                _fail(path, f"parts {list(mine)} != {list(other)}")
            for name in mine:
                _Comparer((), self.strides).compare(mine[name], other[name], f"{path}.{name}")

    def _aliases(self, ours: torch.Tensor, theirs: torch.Tensor, path: str) -> None:
        mine, other = self._shared_with(ours), self._shared_with(theirs)
        if other - mine:
            _fail(path, f"theirs shares {self._names(other - mine)}, ours does not")
        if mine - other and not self._is_view_of_neighbours(ours):
            _fail(path, f"ours shares {self._names(mine - other)}, theirs does not")

    def _is_view_of_neighbours(self, ours: torch.Tensor) -> bool:
        """Whether it is more than 64 KiB, and exactly what several inputs side by side cover: there
        a view is made in the place of a copy, by design."""
        if type(ours) is not torch.Tensor or ours.layout is not torch.strided:
            return False
        start, end = _span(ours)
        if end - start <= 64 << 10 or id(ours) in self.inputs:
            return False
        covered = sorted({x for x in self.spans.values() if _overlap(x, (start, end))})
        ends = [start, *(stop for _, stop in covered)]
        neighbours = all(x[0] == stop for x, stop in zip(covered, ends, strict=False))
        return len(covered) > 1 and neighbours and ends[-1] == end

    def _shared_with(self, t: torch.Tensor) -> set[tuple[str, int]]:
        span = _span(t)
        found = set(self.storages.get(_storage_id(t), ()))
        if span != (0, 0):
            found |= {("bytes of", i) for i, x in self.spans.items() if _overlap(x, span)}
        return found

    def _names(self, shared: set[tuple[str, int]]) -> str:
        return ", ".join(sorted(f"{how} {self.known[i]}" for how, i in shared))

    def outputs_apart(self) -> None:
        """Outputs must overlap one another exactly where the reference's do."""
        paths, ours, theirs = zip(*self.outputs, strict=True) if self.outputs else ((), (), ())
        for i, j in sorted(_overlapping(ours) ^ _overlapping(theirs)):
            _fail(paths[i], f"shares memory with {paths[j]} in only one of the two results")


def _overlapping(spans: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """The pairs of spans that overlap."""
    pairs, open_spans = set(), []
    for i in sorted(range(len(spans)), key=spans.__getitem__):
        start, end = spans[i]
        open_spans = [j for j in open_spans if spans[j][1] > start]
        if start < end:
            pairs.update((min(i, j), max(i, j)) for j in open_spans)
            open_spans.append(i)
    return pairs


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _fail(path: str, what: str) -> None:
    raise AssertionError(f"{path}: {what}")


def assert_same(
    ours: Any,
    theirs: Any,
    *,
    inputs: Any = (),
    strides: bool = True,
) -> None:
    """Raise AssertionError, naming the place, unless ``ours`` equals the reference ``theirs``.

    ``inputs`` are the leaves that both were made from (nested containers are walked). An object
    of ``inputs`` in one result must be in the other, and memory shared with an input in one must
    be shared in the other. ``strides=False`` leaves strides out.
    """
    # subclasses are looked at as they are, not as their __torch_function__ would have it
    with torch._C.DisableTorchFunctionSubclass():
        comparer = _Comparer(inputs, strides)
        comparer.compare(ours, theirs, "result")
        comparer.outputs_apart()


# -------------------------------------------------------------------------------- outcomes


@dataclass
class Outcome:
    """What a call came to. ``result`` of a generator is the list of what it yielded so far."""

    result: Any
    exception: type[BaseException] | None = None
    message: str | None = None

    def __str__(self) -> str:
        if self.exception is None:
            return "a result"
        return f"{_name(self.exception)}: {self.message}"


def outcome(fn: Callable[[], Any]) -> Outcome:
    """Run ``fn``, drain what it returns if that is a generator, and capture any exception."""
    result: Any = None
    try:
        result = fn()
        if isinstance(result, GeneratorType):
            generator, result = result, []
            for value in generator:
                result.append(value)
    except Exception as e:
        # torch adds a C++ backtrace to some messages: that is where, not what
        message = str(e).split("\nException raised from")[0]
        return Outcome(result, type(e), re.sub(r"\b0x[0-9a-f]+\b", "0x", message))
    return Outcome(result)


def _fingerprint(inputs: Any) -> list[Any]:
    """Enough of the inputs to notice that a call wrote to them."""
    seen = []
    for path, x in _walk(tuple(inputs)):
        entry: tuple[Any, ...] = (path, id(x) if path else None)
        if isinstance(x, torch.Tensor) and not is_opaque(x):
            entry += (tuple(x.shape), x.stride(), x.requires_grad, x.is_inference())
            entry += (None if x.is_inference() else x._version,)
            repeated = frozenset(d for d, s in enumerate(x.stride()) if s == 0)
            data = byte_view(x.detach(), repeated if x.numel() else frozenset())
            if data.numel() <= _FINGERPRINT_BYTES:
                entry += (zlib.crc32(data.cpu().contiguous().numpy().tobytes()),)
        seen.append(entry)
    return seen


def assert_same_outcome(
    ours_fn: Callable[[], Any],
    theirs_fn: Callable[[], Any],
    *,
    inputs: Any = (),
    strides: bool = True,
) -> Outcome:
    """Compare results, or exception types and messages, of two callables; return the reference's.

    Ours runs twice, with the first result held: an error must leave nothing behind, a later call
    must not overwrite an earlier result, and no call may write to its inputs.
    """
    inputs = tuple(inputs)
    theirs = outcome(theirs_fn)
    with torch._C.DisableTorchFunctionSubclass():
        before = _fingerprint(inputs)
    first = outcome(ours_fn)
    second = outcome(ours_fn)
    with torch._C.DisableTorchFunctionSubclass():
        if _fingerprint(inputs) != before:
            raise AssertionError("the call changed its inputs")
    for ours, which in ((first, "first call"), (second, "second call")):
        if (ours.exception, ours.message) != (theirs.exception, theirs.message):
            raise AssertionError(f"{which}: ours gave {ours}\n  theirs gave {theirs}")
        try:
            assert_same(ours.result, theirs.result, inputs=inputs, strides=strides)
        except AssertionError as e:
            raise AssertionError(f"{which}: {e}") from None
    return theirs

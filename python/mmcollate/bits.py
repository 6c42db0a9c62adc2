"""Comparing batches bit by bit."""

import contextlib
import struct
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from mmcollate import _core


def first_difference(ours: Any, theirs: Any, at: str = "", given: Any = ()) -> str | None:
    """Where two results first differ, as text; ``None`` if they are alike.

    Types, key order, dtype, shape, strides, device, flags and bits count (a NaN equals only a NaN
    of the same bits), and what is shared with the items, but that a view over items that lie side
    by side is taken for the copy that is expected (``docs/divergences.md``).

    Args:
        ours: One result.
        theirs: The other: it is what is expected.
        at: What to call the results.
        given: The items' values; containers are looked into. An object among them must be in both
            results or in neither, and so must memory of theirs.
    """
    # Looked at as they are, not as a subclass or the caller's modes would have them.
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        return _Comparison(given).difference(ours, theirs, at)


def walk(value: Any) -> Iterator[Any]:
    """Every object of a nested value, containers included, each once."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        found = todo.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            if isinstance(found, dict):
                todo += found.values()
            elif isinstance(found, (list, tuple)):
                todo += found


class _Comparison:
    def __init__(self, given: Any) -> None:
        self.given = {id(found): found for found in walk(given)}
        tensors = (found for found in self.given.values() if isinstance(found, torch.Tensor))
        # With the bytes of the largest tensor in each.
        self.storages: dict[object, int] = {}
        for tensor in tensors:
            for storage in _storages(tensor):
                self.storages[storage] = max(self.storages.get(storage, 0), _nbytes(tensor))

    def difference(self, ours: Any, theirs: Any, at: str) -> str | None:
        if ours is theirs:
            return None
        if type(ours) is not type(theirs):
            return f"{at}: {type(ours).__name__}, expected {type(theirs).__name__}"
        if id(ours) in self.given:
            return f"{at}: the item's own {type(ours).__name__}, expected another"
        if id(theirs) in self.given:
            return f"{at}: another {type(ours).__name__}, expected the item's own"
        if isinstance(ours, torch.Tensor):
            return self._tensors(ours, theirs, at)
        if isinstance(ours, dict):
            names, expected = list(ours), list(theirs)
            if len(names) != len(expected) or not all(map(_same_value, names, expected)):
                return f"{at}: fields {shown(names)}, expected {shown(expected)}"
            pairs = [(f"{at}[{shown(name)}]", ours[name], theirs[name]) for name in ours]
        elif isinstance(ours, (list, tuple)):
            if len(ours) != len(theirs):
                return f"{at}: {len(ours)} elements, expected {len(theirs)}"
            both = enumerate(zip(ours, theirs, strict=True))
            pairs = [(f"{at}[{i}]", a, b) for i, (a, b) in both]
        elif _is_array(ours):
            return _arrays(ours, theirs, at)
        else:
            same = _same_value(ours, theirs)
            return None if same else f"{at}: {shown(ours)}, expected {shown(theirs)}"
        for where, a, b in pairs:
            found = self.difference(a, b, where)
            if found is not None:
                return found
        return None

    def _tensors(self, ours: torch.Tensor, theirs: torch.Tensor, at: str) -> str | None:
        place, other = _place(ours), _place(theirs)
        shared, wanted = place[0] in self.storages, other[0] in self.storages
        facts, expected = _facts(ours), _facts(theirs)
        # In the place of a copy, a view over leaves that lie side by side: larger than any of them.
        more_than = max(_core.COPY_UP_TO, self.storages.get(place[0], 0))
        is_view = shared and not wanted and _nbytes(ours) > more_than
        if is_view and not facts["is_inference"]:
            del expected["is_inference"]
        for name in expected:
            if facts.get(name) != expected[name]:
                return f"{at}: {name} {facts.get(name)}, expected {expected[name]}"
        if shared and wanted and place != other:
            return f"{at}: in other memory of the items than expected"
        if shared != wanted and not is_view:
            return f"{at}: " + (
                "in memory of an item, expected memory of its own"
                if shared
                else "in memory of its own, expected memory of an item"
            )
        if _is_readable(ours):
            return None if place == other else _bytes(ours, theirs, at)
        parts, others = _parts(ours), _parts(theirs)
        for name, part in parts.items():
            found = self.difference(part, others[name], f"{at}: {name}")
            if found is not None:
                return found
        return None


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    """All that can be said of a tensor short of its contents."""
    facts: dict[str, Any] = {
        "dtype": tensor.dtype,
        "device": tensor.device,
        "layout": tensor.layout,
        "is_nested": tensor.is_nested,
        "is_quantized": tensor.is_quantized,
        "requires_grad": tensor.requires_grad,
        "grad_fn": None if tensor.grad_fn is None else type(tensor.grad_fn).__name__,
        "is_inference": tensor.is_inference(),
        "is_conj": tensor.is_conj(),
        "is_neg": tensor.is_neg(),
        "readable memory": _is_readable(tensor),
    }
    if not tensor.is_nested:
        facts["shape"] = tuple(tensor.shape)
        if tensor.layout is torch.strided:
            facts["strides"] = tensor.stride()
    if tensor.is_sparse:
        facts["is_coalesced"] = tensor.is_coalesced()
    if tensor.is_quantized:
        facts["qscheme"] = tensor.qscheme()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            facts["scale"], facts["zero_point"] = tensor.q_scale(), tensor.q_zero_point()
        else:
            facts["scales"] = tensor.q_per_channel_scales().tolist()
            facts["zero_points"] = tensor.q_per_channel_zero_points().tolist()
            facts["axis"] = tensor.q_per_channel_axis()
    return facts


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements; 0 if it can't be told."""
    try:
        return tensor.numel() * tensor.element_size()
    except Exception:  # ragged nested tensors, subclasses that refuse
        return 0


def _parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that one without plain memory consists of; none if it has no contents."""
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(tensor):
        return {"unwrapped": functorch.get_unwrapped(tensor)}
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
        return {"functional": torch._from_functional_tensor(tensor)}
    if tensor.layout is torch.jagged:
        offsets = tensor.offsets()  # type: ignore[attr-defined]
        return {"values": tensor.values(), "offsets": offsets}
    if tensor.is_nested:
        return {f"part {i}": part for i, part in enumerate(tensor.unbind())}
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        indices = {"crow_indices": tensor.crow_indices(), "col_indices": tensor.col_indices()}
        return {**indices, "values": tensor.values()}
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        indices = {"ccol_indices": tensor.ccol_indices(), "row_indices": tensor.row_indices()}
        return {**indices, "values": tensor.values()}
    if tensor.is_mkldnn:
        return {"dense": tensor.to_dense()}
    if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, FakeTensor):
        names, _ = tensor.__tensor_flatten__()
        return {name: getattr(tensor, name) for name in names}
    return {}


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in memory of its own, as its strides say."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    if torch._C._functorch.is_batchedtensor(tensor) or torch._is_functional_tensor(tensor):
        return False
    if isinstance(tensor, FakeTensor) or not tensor.numel() or not _address(tensor):
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in steps)
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _address(tensor: torch.Tensor) -> int:
    """Where the tensor's storage is; 0 if that is nowhere."""
    if isinstance(tensor, FakeTensor):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _storage(tensor: torch.Tensor) -> object:
    """What two tensors have in common that share memory."""
    try:
        return _address(tensor) or tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _storages(tensor: torch.Tensor) -> list[object]:
    """The storages of a tensor, and of what it consists of."""
    found = [_storage(tensor)]
    # What is too odd to be asked is told by its own storage alone; mkldnn's part is a copy.
    with contextlib.suppress(Exception):
        if not tensor.is_mkldnn:
            found += [storage for part in _parts(tensor).values() for storage in _storages(part)]
    return found


def _place(tensor: torch.Tensor) -> tuple[object, object]:
    """Where the tensor begins."""
    try:
        return _storage(tensor), tensor.storage_offset()
    except (RuntimeError, NotImplementedError):
        return _storage(tensor), None


def _bytes(ours: torch.Tensor, theirs: torch.Tensor, at: str) -> str | None:
    a, b = _byte_view(ours), _byte_view(theirs)
    if torch.equal(a, b):
        return None
    differs = (a != b).flatten()
    first, count = int(differs.nonzero()[0]), int(differs.sum())
    return f"{at}: the first of {count} bytes that differ is byte {first}"


def _byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a readable tensor, without a kernel for its dtype. Of a dimension that repeats
    the same memory only the first index: its length may be beyond any memory."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory = memory.set_(tensor.untyped_storage())
    size = tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    shape = [n if step else 1 for n, step in steps]
    strides = [step * size for step in tensor.stride()]
    return memory.as_strided((*shape, size), (*strides, 1), tensor.storage_offset() * size)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # it is no requirement
    return numpy is not None and isinstance(value, numpy.ndarray)


def _arrays(ours: Any, theirs: Any, at: str) -> str | None:
    for name in ("dtype", "shape", "strides"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return f"{at}: {name} {a}, expected {b}"
    once = tuple(slice(None) if step else slice(1) for step in ours.strides)
    # Of objects these are the addresses.
    same = ours[once].tobytes() == theirs[once].tobytes()
    return None if same else f"{at}: the array's values differ"


def _same_value(ours: Any, theirs: Any) -> bool:
    """Whether two plain objects are alike."""
    if ours is theirs:
        return True
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, complex):
        return struct.pack("dd", ours.real, ours.imag) == struct.pack(
            "dd", theirs.real, theirs.imag
        )
    if isinstance(ours, float):
        return struct.pack("d", ours) == struct.pack("d", theirs)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(ours, numpy.generic):
        return bool(ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes())
    try:
        equal = ours == theirs
        if isinstance(equal, bool):
            return equal
    except Exception:  # what can't be compared may still look alike
        pass
    try:
        return repr(ours) == repr(theirs)
    except Exception:
        return False


def shown(value: Any) -> str:
    """A value in a message, shortened."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else text[:200] + "…"

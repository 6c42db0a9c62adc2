"""Comparing batches bit by bit."""

from typing import Any

import torch


def first_difference(ours: Any, theirs: Any, at: str = "") -> str | None:
    """Where two batches first differ in type, key order, dtype, shape, strides, device, flags or
    bits, as text; ``None`` if they are alike. A NaN equals only a NaN of the same bits."""
    if type(ours) is not type(theirs):
        return f"{at}: {type(ours).__name__}, expected {type(theirs).__name__}"
    if isinstance(ours, dict):
        if list(ours) != list(theirs):
            return f"{at}: fields {list(ours)}, expected {list(theirs)}"
        pairs = [(f"{at}[{name!r}]", ours[name], theirs[name]) for name in ours]
    elif isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{at}: {len(ours)} elements, expected {len(theirs)}"
        pairs = [(f"{at}[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, torch.Tensor):
        return _tensor_difference(ours, theirs, at)
    else:
        same = ours is theirs or repr(ours) == repr(theirs)
        return None if same else f"{at}: {ours!r}, expected {theirs!r}"
    for where, a, b in pairs:
        found = first_difference(a, b, where)
        if found is not None:
            return found
    return None


def _tensor_difference(ours: torch.Tensor, theirs: torch.Tensor, at: str) -> str | None:
    if ours is theirs:
        return None
    for name in ("dtype", "device", "layout", "shape", "requires_grad", "is_nested"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return f"{at}: {name} {a}, expected {b}"
    if ours.layout is not torch.strided or ours.is_nested or ours.is_quantized or ours.is_meta:
        return None  # made by the reference; there are no plain bytes to compare
    if ours.stride() != theirs.stride():
        return f"{at}: strides {ours.stride()}, expected {theirs.stride()}"
    for name in ("is_inference", "is_conj", "is_neg"):
        if getattr(ours, name)() != getattr(theirs, name)():
            return f"{at}: {name} differs"
    a, b = raw_bytes(ours), raw_bytes(theirs)
    if not torch.equal(a, b):
        first = int((a != b).flatten().nonzero()[0])
        return f"{at}: the first of {int((a != b).sum())} bytes that differ is byte {first}"
    return None


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values' bytes in C order, lazy conjugation and negation carried out."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)

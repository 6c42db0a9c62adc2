"""restore(): kept fields to the device, where a consumer needs them there."""

import copy
import operator
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from mmcollate import collation, errors, staging
from mmcollate.backends import Backend, backend_of
from mmcollate.fields import Shared
from mmcollate.reference import iter_leaves


def restore(
    batch: Mapping[str, Any],
    device: torch.device | str | int | Backend,
    keys: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Brings fields of a batch that were kept on the CPU to a device, together.

    Args:
        batch: From field name to value, as :func:`mmcollate.collate` returns it; it is not changed.
            Tensors are looked for in dicts, lists and tuples too, and nowhere else.
        device: Where the tensors go; it is never taken from one of them.
        keys: Names of the fields that are wanted there; all if ``None``.

    Returns:
        A new dict with the batch's names in their order. A tensor that is not on the device yet is
        a copy, of the same dtype and values; the copies go there as a batch's tensors do
        (``docs/staging.md``): in one copy that does not block, and they are then contiguous and
        share one allocation, but for fields named ``*_embeds``. Where nothing is staged, torch
        copies tensor by tensor. A tensor that is in several places is copied once. Lists, tuples
        and dicts that hold a copied tensor are new ones of the same type. All else is the same
        object: other fields, tensors that are on the device, values that are no tensors.

    Raises:
        CollateKeyError: One of ``keys`` is not in the batch.
        CollateTypeError: ``batch`` is no mapping, ``keys`` are no names, or there is no device.
        CollateValueError: torch knows no such device, or a list holds itself.
        MMCollateError: torch can't copy a tensor; the cause is what it raised.
        torch.OutOfMemoryError: torch's own, unchanged.
    """
    asked = _asked(batch, keys)
    there = _device(device)
    result = dict(batch)
    found: dict[int, tuple[_Leaf, torch.Tensor]] = {}
    name = None
    try:
        for name in asked:
            for leaf in iter_leaves(result[name]):
                if isinstance(leaf, torch.Tensor) and leaf.device != there:
                    found.setdefault(id(leaf), (_Leaf(name, len(found)), leaf))
        if not found:
            return result
        copied = _copied(dict(found.values()), device)
        copies = {key: copied[leaf] for key, (leaf, _) in found.items()}
        for name in asked:
            result[name] = _replaced(result[name], copies)
    except RecursionError as error:
        raise errors.CollateValueError(
            f"{errors.where(None, name)}: a list too deep to look into; flatten it", field=name
        ) from error
    return result


def restored(
    batch: Mapping[str, Any],
    device: torch.device | str | int | Backend,
    keys: Iterable[str] | None = None,
) -> Mapping[str, Any]:
    """The batch, with fields that come to the device only if they are used.

    Args:
        batch: As for :func:`restore`. What is put into it later does not show.
        device: As for :func:`restore`.
        keys: As for :func:`restore`.

    Returns:
        A read-only mapping with the batch's names in their order. The first look at one of ``keys``
        restores all of them, on the stream that is current then; every look, of any thread, gives
        the same objects. Other names give the batch's own objects, and move nothing.

    Raises:
        MMCollateError: What is wrong with the arguments, as for :func:`restore`, at once; what
            torch can't copy, at the first look. The next look tries again.
    """
    asked = _asked(batch, keys)
    _device(device)
    return _Restored(dict(batch), device, frozenset(asked))


class _Restored(Mapping[str, Any]):
    def __init__(self, values: dict[str, Any], device: Any, asked: frozenset[str]) -> None:
        self._values = values
        self._device = device
        self._asked = asked
        self._is_restored = not asked
        # Taken again by what a garbage collection or a signal runs in the midst of a copy.
        self._lock = threading.RLock()

    def __getitem__(self, name: str) -> Any:
        if not self._is_restored and name in self._asked:
            with self._lock:
                if not self._is_restored:
                    values = restore(self._values, self._device, self._asked)
                    # Whoever took the lock again in between was first.
                    if not self._is_restored:
                        self._values = values
                        self._is_restored = True
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Leaf(NamedTuple):
    """Names a tensor that is to be copied: by its field, and by how many were found before it."""

    field: Any
    number: int

    def __repr__(self) -> str:
        # As errors name it.
        return repr(self.field)


def _asked(batch: Mapping[str, Any], keys: Iterable[str] | None) -> list[str]:
    """The names of the wanted fields, in the batch's order."""
    if not isinstance(batch, Mapping):
        raise errors.CollateTypeError(
            f"the batch is {errors.describe(batch)}, expected a mapping from field name to value"
        )
    if keys is None:
        return list(batch)
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise errors.CollateTypeError(
            f"keys are {keys!r}, expected the names of fields; put a single name into a list"
        )
    names = list(keys)
    for name in names:
        if name not in batch:
            raise errors.CollateKeyError(
                f"{errors.where(None, name)}: not in the batch, which has {list(batch)}; leave it"
                " out of keys, or give the batch that has it",
                field=name,
            )
    wanted = set(names)
    return [name for name in batch if name in wanted]


def _device(device: Any) -> torch.device | None:
    """The device as torch knows it; ``None`` if torch doesn't."""
    if device is None:
        raise errors.CollateTypeError(
            "there is no device to restore to; pass the one that the consumer's model is on"
        )
    backend = backend_of(device)
    if backend is not None:
        return backend.device
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise errors.CollateValueError(
            f"torch knows no device {device!r}; pass one that it does, such as 'cuda:0'"
        ) from error


def _copied(leaves: dict[Any, torch.Tensor], device: Any) -> dict[Any, torch.Tensor]:
    """Copies on the device. Each is a field of its own: what is left to torch keeps none back."""
    fields = {leaf: Shared(outlives_batch=staging.is_embeds(leaf.field)) for leaf in leaves}
    # Where there is no arena, nothing is pinned.
    staged = staging.backend_for(device, True) is not None
    try:
        return collation.collate([leaves], fields, device=device, pin_memory=staged)
    except errors.MMCollateError as error:
        if isinstance(error.field, _Leaf):
            error.field = error.field.field
        raise


def _replaced(value: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    """The value with copies in the place of tensors; the same object if it holds none of them."""
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if isinstance(value, dict):
        values = list(value.values())
        inner = _replaced(values, copies)
        if inner is values:
            return value
        # A copy keeps what a subclass has besides.
        named = copy.copy(value)
        named.update(zip(value, inner, strict=True))
        return named
    if isinstance(value, (list, tuple)):
        inner = [_replaced(x, copies) for x in value]
        if all(map(operator.is_, inner, value)):
            return value
        if isinstance(value, tuple):
            return getattr(type(value), "_make", type(value))(inner)
        listed = copy.copy(value)
        listed[:] = inner
        return listed
    return value

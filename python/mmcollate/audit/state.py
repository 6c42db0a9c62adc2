"""What a model holds, recorded before a forward and put back after it.

What belongs together is put back together: a table without the flag that says it was made, or a
list without its index, would be a state that the model was never in. There are two kinds of
wholes:

- what modules hold, which is always put back;
- a file of the modules' classes, with these classes: it is put back if a tensor came into it, went
  from it, or was written to. What else a forward did there, as to count its calls, stays.

No code of the model's runs meanwhile, so that none can be in the way.
"""

import contextlib
import functools
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_not
from typing import Any

import torch

from mmcollate.audit.contents import container_of, holds_tensor, slots_of, within
from mmcollate.audit.session import Session
from mmcollate.audit.virtual import VirtualTensor


class State:
    """What modules, their classes and the files of these hold.

    Args:
        session: Has the tensors' memory saved before it is written to.
        modules: With all modules inside.
    """

    def __init__(self, session: Session, modules: list[torch.nn.Module]) -> None:
        self._session = session
        classes: dict[str, list[type]] = {}
        for cls in dict.fromkeys(cls for module in modules for cls in _classes_of(module)):
            classes.setdefault(cls.__module__, []).append(cls)
        files = [vars(sys.modules[x]) if x in sys.modules else {} for x in classes]
        self._caches = _caches([*files, *(vars(cls) for x in classes.values() for cls in x)])
        _forget_tensors(self._caches)
        self._own = _Whole(session, [vars(module) for module in modules], [], None)
        self._files = [
            # What is imported from elsewhere may lead to all that a process holds.
            _Whole(session, [names], own, name.partition(".")[0])
            for (name, own), names in zip(classes.items(), files, strict=True)
        ]
        for array in self._own.arrays:
            array.save()

    def replace(self, replaced: Callable[[Any, str], Any], boxes: Iterable[Any]) -> None:
        """Puts other values in the place of those in some of what modules hold."""
        chosen = set(map(id, boxes))
        for box in self._own.boxes:
            if id(box.box) in chosen:
                box.replace(replaced)

    def put_back(self) -> None:
        """All is as before; the session is told of the virtual tensors that were there."""
        touched = self._files
        with contextlib.ExitStack() as last:
            # Each is done whatever becomes of the others, the last one first.
            last.callback(_forget_tensors, self._caches)
            last.callback(lambda: _put_back(touched))
            last.callback(self._session.restore_saved)
            last.callback(_put_back, [self._own])
            for value in list(self._now()):
                if issubclass(type(value), VirtualTensor):
                    self._session.leaves(value, "state")
            touched = [whole for whole in self._files if whole.is_touched()]

    def _now(self) -> Iterator[Any]:
        caches = within([gc.get_referents(cache) for cache in self._caches])
        wholes = (whole.values() for whole in (self._own, *self._files))
        return chain(chain.from_iterable(wholes), caches)


def _put_back(wholes: Iterable["_Whole"]) -> None:
    with contextlib.ExitStack() as last:
        for whole in wholes:
            for part in whole.parts():
                last.callback(part.put_back)


class _Whole:
    """Values with all that is in them, and classes, as they were."""

    def __init__(
        self,
        session: Session,
        namespaces: list[dict[str, Any]],
        classes: list[type],
        package: str | None,
    ) -> None:
        self._session = session
        self._namespaces = namespaces
        self._package = package
        self._classes = [_Class(cls) for cls in classes]
        self.boxes: list[_Box] = []
        self.arrays: list[_Array] = []
        self._tensors: list[_Tensor] = []
        numpy = sys.modules.get("numpy")
        for value in self.values():
            kind = type(value)
            base = container_of(kind)
            if base is not None:
                self.boxes.append(_Box(value, base))
            if slots_of(kind):  # type: ignore[arg-type]
                self.boxes.append(_Box(value, None))
            if numpy is not None and kind is numpy.ndarray:
                self.arrays.append(_Array(value))
            elif _is_plain(value):
                session.saved.guard(value)
                self._tensors.append(_Tensor(value, session))

    def values(self) -> Iterator[Any]:
        """All that is there now."""
        roots: list[Any] = [*self._namespaces, *(x.values() for x in self._classes)]
        return within(roots, package=self._package)

    def is_touched(self) -> bool:
        """Whether a tensor came, went, or was written to."""
        if any(self._session.saved.is_changed(x.tensor) for x in self._tensors):
            return True
        boxes: list[_Box | _Class] = [*self.boxes, *self._classes]
        return any(holds_tensor(x.exchanged()) for x in boxes)

    def parts(self) -> list[Any]:
        """What is put back, each by itself."""
        return [*self._classes, *self.arrays, *self.boxes, *self._tensors]


_ABSENT = object()


class _Box:
    """A container, or an object with slots."""

    def __init__(self, box: Any, base: Any) -> None:
        self.box = box
        self._base = base
        self._keys, self._values = self._now()

    def _now(self) -> tuple[list[Any], list[Any]]:
        box, base = self.box, self._base
        if base in (dict, OrderedDict):
            return list(base.keys(box)), list(base.values(box))
        if base is None:
            slots = slots_of(type(box))  # type: ignore[arg-type]
            return list(slots), [_slot(slot, box) for slot in slots]
        return [], list(base.__iter__(box))

    def exchanged(self) -> list[Any]:
        """What came and what went."""
        keys, values = self._now()
        return _exchanged(keys, self._keys) + _exchanged(values, self._values)

    def replace(self, replaced: Callable[[Any, str], Any]) -> None:
        """Puts other values in the place of its own; sets and queues have none to replace."""
        box, base = self.box, self._base
        keys, values = self._now()
        for key, value in zip(range(len(values)) if base is list else keys, values, strict=False):
            if (other := replaced(value, str(getattr(key, "__name__", key)))) is not value:
                if base is None:
                    key.__set__(box, other)
                else:
                    base.__setitem__(box, key, other)

    def put_back(self) -> None:
        box, base = self.box, self._base
        keys, values = self._now()
        if not (_differ(keys, self._keys) or _differ(values, self._values)):
            return
        if base is list:
            list.__setitem__(box, slice(None), self._values)
        elif base is None:
            for slot, value, before in zip(self._keys, values, self._values, strict=True):
                if before is _ABSENT is not value:
                    slot.__delete__(box)
                elif before is not value:
                    slot.__set__(box, before)
        elif base not in (dict, OrderedDict):
            base.clear(box)
            (set.update if base is set else base.extend)(box, self._values)
        else:
            known = set(map(id, self._keys))
            for key in keys:
                if id(key) not in known:
                    base.__delitem__(box, key)
            for key, value in zip(self._keys, self._values, strict=True):
                if dict.get(box, key, _ABSENT) is not value:
                    base.__setitem__(box, key, value)
            if _differ(list(base.keys(box)), self._keys):
                base.clear(box)
                for key, value in zip(self._keys, self._values, strict=True):
                    base.__setitem__(box, key, value)


class _Class:
    """What a class has."""

    def __init__(self, cls: type) -> None:
        self._class = cls
        self._content = dict(vars(cls))

    def values(self) -> list[Any]:
        """What it has now."""
        return list(vars(self._class).values())

    def exchanged(self) -> list[Any]:
        """What came and what went."""
        return _exchanged(self.values(), list(self._content.values()))

    def put_back(self) -> None:
        # Not as the metaclass would have it.
        now = dict(vars(self._class))
        for name in now.keys() - self._content.keys():
            type.__delattr__(self._class, name)
        for name, value in self._content.items():
            if name not in now or now[name] is not value:
                type.__setattr__(self._class, name, value)


class _Tensor:
    """A plain tensor; what is in its memory is the session's to put back."""

    def __init__(self, tensor: torch.Tensor, session: Session) -> None:
        self.tensor = tensor
        self._session = session
        self._same = tensor.detach()
        self._requires_grad = tensor.requires_grad

    def put_back(self) -> None:
        tensor: Any = self.tensor
        if isinstance(tensor, VirtualTensor):
            self._session.made.pop(id(tensor), None)
            tensor.become_plain()
        if _geometry(tensor) != _geometry(self._same):
            tensor.data = self._same
        if tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)


class _Array:
    """An array of numpy's."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._saved: Any = None

    def save(self) -> None:
        """Copies what can be written to."""
        if self._array.flags.writeable:
            self._saved = self._array.copy()

    def put_back(self) -> None:
        if self._saved is not None:
            self._array.setflags(write=True)
            self._array[...] = self._saved


def _slot(slot: Any, box: Any) -> Any:
    try:
        return slot.__get__(box)
    except AttributeError:
        return _ABSENT


def _differ(now: list[Any], before: list[Any]) -> bool:
    return len(now) != len(before) or any(map(is_not, now, before))


def _exchanged(now: list[Any], before: list[Any]) -> list[Any]:
    if not _differ(now, before):
        return []
    here, there = set(map(id, now)), set(map(id, before))
    return [
        *(x for x in now if id(x) not in there),
        *(x for x in before if id(x) not in here),
    ]


def _is_plain(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.is_cpu and value.layout is torch.strided and not value.is_nested


def _geometry(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _classes_of(module: torch.nn.Module) -> Iterator[type]:
    for cls in type(module).__mro__:
        if cls.__module__.partition(".")[0] not in ("torch", "builtins"):
            yield cls


def _caches(namespaces: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The functions that remember results."""
    found: dict[int, Any] = {}
    for names in namespaces:
        for value in list(names.values()):
            inner = value.__func__ if type(value) in (classmethod, staticmethod) else value
            if type(inner) is functools._lru_cache_wrapper:
                found[id(inner)] = inner
    return list(found.values())


def _forget_tensors(caches: Iterable[Any]) -> None:
    """Empties those in which there is a tensor; what else they hold may be there to stay."""
    for cache in caches:
        if holds_tensor([gc.get_referents(cache)]):
            cache.cache_clear()

"""Places as a model names them: an answer of a tensor's is known again where something is made."""

from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

Device = torch.device
"""torch's own, also where something else stands for it."""

_LITERALS = ("cpu", "cuda")
"""Names as code spells them: Python keeps one object for each."""


def is_device(device: Any) -> bool:
    """Whether this is the virtual device: a ``torch.device`` of CUDA, whatever its index."""
    return isinstance(device, Device) and device.type == "cuda"


class Places:
    """The answers of tensors that were asked where they are, with the fields behind."""

    def __init__(self, frames: Callable[[], Iterator[FrameType]]) -> None:
        self._frames = frames
        """The model's own frames now, the innermost first."""
        self._devices: dict[int, tuple[torch.device, set[str]]] = {}
        self._asked: dict[tuple[CodeType, str], set[str]] = {}
        """The fields behind the last tensor that a function asked for its place, by function and
        type of device."""

    def answer(self, place: torch.device, fields: set[str]) -> torch.device:
        """An object for a place that is known again."""
        device = Device(place.type, place.index)
        if fields:
            self._devices[id(device)] = device, fields
        return device

    def asked(self, device: torch.device, fields: set[str]) -> None:
        """The function at work was answered this."""
        if (frame := next(self._frames(), None)) is not None:
            self._asked[frame.f_code, device.type] = set(fields)

    def resolve(self, device: Any) -> torch.device | None:
        """A device however it is named, ``str(grid.device)`` as if it were ``grid.device``; a bare
        number is one of the accelerator's."""
        if device is None or isinstance(device, Device):
            return device
        if isinstance(device, int):
            return Device("cuda", device)
        found = Device(device)
        if isinstance(device, str) and (fields := self._named_after(device, found.type)):
            self._devices[id(found)] = found, fields
        return found

    def _named_after(self, name: str, place: str) -> set[str]:
        """The fields behind a device's name: those of the tensor that the function at work asked
        for its place, if neither the name nor the function spells the place out."""
        if any(name is literal for literal in _LITERALS):
            return set()
        for frame in self._frames():
            fields = self._asked.get((frame.f_code, place))
            if fields is not None:
                return set() if _spells_out(frame.f_code, place) else set(fields)
        return set()

    def fields_behind(self, device: Any) -> set[str]:
        """The fields behind a tensor that answered with this object; a new set."""
        return set(self._devices[id(device)][1]) if id(device) in self._devices else set()

    def made_from(self, device: torch.device, given: torch.device | None) -> torch.device:
        """Another object for a place, with the fields behind the one that it was made from."""
        if fields := self.fields_behind(given):
            self._devices[id(device)] = device, fields
        return device


def _spells_out(code: CodeType, place: str) -> bool:
    return any(isinstance(x, str) and x.partition(":")[0] == place for x in code.co_consts)

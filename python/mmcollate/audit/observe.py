"""From what tensors do while a forward runs to one verdict for each field.

A :class:`Recorder` is told each thing as it happens, adds the line of the model's own code, and
counts what is equal. :meth:`Recorder.report` then judges a field by what was seen of it.
"""

import functools
import linecache
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType

import torch

from mmcollate.audit.findings import Event, EventKind, FieldKind, FieldReport, Site, Verdict

MAX_DEVICE_USES = 5
"""Lines of a field's device uses that are kept. A field that the model computes with is used by
every line that follows; the first ones tell where it is needed."""

LEFT = {
    "result": "as part of the forward's result",
    "state": "as part of what the model keeps",
}
"""Where a tensor is when the forward is over; a device use then, though no operation's."""

_OWN = str(Path(__file__).resolve().parents[1]) + "/"
_TORCH = str(Path(torch.__file__).resolve().parent) + "/"
_STANDARD = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) + "/" for name in ("stdlib", "platstdlib")
)
_PACKAGES = ("site-packages", "dist-packages")

_Key = tuple[EventKind, str, tuple[str, ...], frozenset[str], tuple[Site, ...]]


# The model's own lines


def stack_of(frame: FrameType | None, boundary: CodeType | None) -> tuple[Site, ...]:
    """The model's own frames, the innermost first.

    Left out are frames of torch, of mmcollate, of the standard library, of generated code, and all
    outside the one that runs ``boundary``.
    """
    return tuple(_site(own, own.f_lineno) for own in own_frames(frame, boundary))


def own_frames(frame: FrameType | None, boundary: CodeType | None) -> Iterator[FrameType]:
    """The frames of :func:`stack_of`."""
    while frame is not None and frame.f_code is not boundary:
        if _place_of(frame) is not None:
            yield frame
        frame = frame.f_back


def raised_at(error: BaseException) -> Site | None:
    """The innermost of the model's own lines that an exception came through."""
    found = raised_in(error)
    return None if found is None else _site(*found)


def raised_in(error: BaseException) -> tuple[FrameType, int] | None:
    """The frame and the line of :func:`raised_at`."""
    own = [
        (frame, line)
        for frame, line in walk_tb(error.__traceback__)
        if _place_of(frame) is not None
    ]
    return own[-1] if own else None


def _place_of(frame: FrameType) -> str | None:
    return _place(frame.f_code.co_filename, frame.f_globals.get("__name__"))


def _site(frame: FrameType, line: int) -> Site:
    source = linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
    return Site(_place_of(frame) or "", line, _name(frame.f_code), source)


def _name(code: CodeType) -> str:
    # Python 3.10 knows the last part only.
    return getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")


@functools.lru_cache(maxsize=4096)
def _place(name: str, module: str | None) -> str | None:
    """The file relative to the folder that holds its package; ``None`` if it is not the model's."""
    if name.startswith("<"):
        # A cell or a prompt has lines; what dataclasses and others compile has none.
        return name if linecache.getline(name, 1) else None
    path = Path(name).resolve()
    text = str(path)
    if text.startswith((_OWN, _TORCH)):
        return None
    if text.startswith(_STANDARD) and not any(part in _PACKAGES for part in path.parts):
        return None
    depth = (module or "").count(".") + (path.name == "__init__.py")
    expected = (module or "").split(".")
    found = list(path.with_suffix("").parts[-depth - 1 :])
    if path.name == "__init__.py":
        found.pop()
    return "/".join(path.parts[-depth - 1 :]) if found == expected else path.name


# What was seen


@dataclass
class _Seen:
    event: Event
    on_device: frozenset[str]
    """Of a mismatch: the fields of its device tensors, which met something of the CPU."""
    misplaced: frozenset[str]
    """Of a mismatch: the fields of its device tensors that have to be on the CPU."""


@dataclass
class Recorder:
    """What was seen of the fields of one modality."""

    boundary: CodeType | None = None
    """Of the function whose callers are not the model's."""
    touched: set[str] = field(default_factory=set)
    """Fields whose data took part in any operation."""
    left: dict[str, str] = field(default_factory=dict)
    """Where tensors on the CPU are at the end that stem from a field, as in :data:`LEFT`."""
    shape_reads: dict[str, Site | None] = field(default_factory=dict)
    """The first line that asked for a field's shape or the like."""
    asked: dict[str, Site] = field(default_factory=dict)
    """The last line that asked where a field is."""
    _seen: dict[_Key, _Seen] = field(default_factory=dict)
    _device_uses: dict[str, int] = field(default_factory=dict)

    def record(
        self,
        kind: EventKind,
        operation: str,
        fields: Iterable[str],
        *,
        on_device: Iterable[str] = (),
        misplaced: Iterable[str] = (),
        detail: str = "",
        num_bytes: int = 0,
        non_blocking: bool | None = None,
        stack: tuple[Site, ...] | None = None,
    ) -> None:
        """Adds what the caller's callers, as far as they are the model, are doing now.

        Args:
            kind: As of the event.
            operation: As of the event.
            fields: From which the tensors concerned stem; of a mismatch, those on the CPU.
            on_device: Of a mismatch, the fields of the device tensors that met them.
            misplaced: Of a mismatch, the fields of device tensors that have to be on the CPU.
            detail: Of the first such event.
            num_bytes: Added up.
            non_blocking: Stays true while all are.
            stack: Where it was, if not where the caller is now.
        """
        if stack is None:
            stack = self.stack()
        names = tuple(sorted(fields))
        others, misplaced = frozenset(on_device), frozenset(misplaced)
        key = (kind, operation, names, others | misplaced, stack)
        seen = self._seen.get(key)
        if seen is None:
            event = Event(kind, operation, names, stack, detail, 1, num_bytes, non_blocking)
            self._seen[key] = _Seen(event, others, misplaced)
            return
        event = seen.event
        if non_blocking is not None:
            non_blocking = non_blocking and bool(event.non_blocking)
        seen.event = replace(
            event,
            count=event.count + 1,
            num_bytes=event.num_bytes + num_bytes,
            non_blocking=non_blocking,
        )

    def device_use(
        self,
        name: str,
        operation: str,
        detail: str = "",
        stack: tuple[Site, ...] | None = None,
    ) -> None:
        """Adds that a device tensor which stems from a field met another, or is left at the end."""
        before = self._device_uses.get(name, 0)
        if before < MAX_DEVICE_USES:
            known = len(self._seen)
            self.record("device_use", operation, (name,), detail=detail, stack=stack)
            self._device_uses[name] = before + len(self._seen) - known

    def shape_read(self, name: str) -> None:
        """Adds that a field's own tensor was asked for its shape, dtype or the like."""
        if name not in self.shape_reads:
            stack = self.stack()
            self.shape_reads[name] = stack[0] if stack else None

    def frames(self) -> Iterator[FrameType]:
        """The model's own frames now, the innermost first."""
        return own_frames(sys._getframe(1), self.boundary)

    def stack(self) -> tuple[Site, ...]:
        """The lines of these frames."""
        return stack_of(sys._getframe(1), self.boundary)

    # Verdicts

    def report(
        self,
        modality: str,
        name: str,
        kind: FieldKind,
        *,
        keep_on_cpu: bool,
        num_bytes: int,
        has_tensors: bool,
        complete: bool,
    ) -> FieldReport:
        """Judges a field.

        Args:
            modality: As of the report.
            name: Of the field.
            kind: As of the report.
            keep_on_cpu: As of the report.
            num_bytes: As of the report.
            has_tensors: Whether there is a tensor in any batch of it.
            complete: Whether all forwards came to their end.
        """
        events = tuple(self._events_of(name))
        verdict, reason = self._judge(name, events, keep_on_cpu, has_tensors)
        if not complete and verdict == "unused" and name in self.asked:
            reason = f"the forward failed after it was asked {_of(self.asked[name])} where it is"
        elif not complete and verdict in ("unused", "could be kept"):
            reason += ", until the forward failed"
        return FieldReport(modality, name, kind, keep_on_cpu, num_bytes, events, verdict, reason)

    def _events_of(self, name: str) -> Iterator[Event]:
        used = name in self._device_uses
        for seen in self._seen.values():
            met = not used and not seen.event.fields and name in seen.on_device
            if met or name in seen.misplaced or name in seen.event.fields:
                yield seen.event

    def other_events(self, reported: Iterable[str]) -> tuple[Event, ...]:
        """The events that are in none of these fields' reports."""
        names = set(reported)
        unused = names - self._device_uses.keys()
        return tuple(
            seen.event
            for seen in self._seen.values()
            if not names & {*seen.event.fields, *seen.misplaced}
            and (seen.event.fields or not unused.intersection(seen.on_device))
        )

    def _judge(
        self, name: str, events: tuple[Event, ...], keep_on_cpu: bool, has_tensors: bool
    ) -> tuple[Verdict, str]:
        if not has_tensors:
            return "right", "no tensor in it, so there is nothing to place"
        first = {event.kind: event for event in reversed(events)}
        if (event := first.get("mismatch")) is not None:
            if name in event.fields:
                return "wrong", f"on the CPU, where the device needs it {_at(event)}"
            return "wrong", f"on the device, where the CPU needs it {_at(event)}"
        if keep_on_cpu:
            if (event := first.get("restored")) is not None:
                return "restored", f"copied to the device {_at(event)}"
            if (event := first.get("host_read")) is not None:
                return "right", f"read by the host {_at(event)}"
            if name in self.touched:
                return "right", "used in operations of the CPU alone"
            if name in self.left:
                return "right", f"on the CPU {LEFT[self.left[name]]}"
        else:
            if (event := first.get("device_use")) is not None:
                return "right", f"used on the device {_at(event)}"
            if (event := first.get("sync")) is not None:
                return "could be kept", f"only the host reads it {_at(event)}"
            if name in self.touched:
                return "unused", "what is computed from it goes nowhere"
        if name in self.shape_reads:
            return "unused", f"only its shape is asked for {_of(self.shape_reads[name])}"
        return "unused", "nothing touched it"


def _at(event: Event) -> str:
    if event.operation in LEFT:
        return LEFT[event.operation]
    return f"{_of(event.site)} ({event.operation})"


def _of(site: Site | None) -> str:
    return "outside the model's code" if site is None else f"at {site.file}:{site.line}"

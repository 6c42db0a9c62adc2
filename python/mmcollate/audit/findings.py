"""What an audit finds: events in the model's code, and from them one verdict for each field."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

FieldKind: TypeAlias = Literal["batched", "flat", "shared"]

EventKind: TypeAlias = Literal["mismatch", "sync", "restored", "host_read", "device_use"]
"""``mismatch``: a tensor on the CPU met a tensor on the device in one operation that torch refuses;
or the host wanted the memory of a tensor on the device; or the model itself refused a place.
``sync``: the host read a tensor of the device, and so waited for it.
``restored``: a kept tensor was copied to the device, by the model or, as an index, by torch.
``host_read``: the host read a kept tensor, at no cost.
``device_use``: a device tensor met another one that does not stem from the same field, or reached
the forward's result, or is kept by the model.
"""

Verdict: TypeAlias = Literal["right", "wrong", "could be kept", "restored", "unused"]
"""``right``: what was seen fits the flag. ``wrong``: kept, and needed on the device, where nothing
restores it; or on the device, and needed on the CPU. ``could be kept``: on the device, and only the
host reads it. ``restored``: kept, read by the host or not, and copied to the device by the model
itself. ``unused``: nothing read its values."""


@dataclass(frozen=True)
class Site:
    """A line of the model's own code."""

    file: str
    """Relative to the folder that holds the package: ``vllm/model_executor/models/x.py``."""
    line: int
    function: str
    source: str
    """The line itself, stripped."""


@dataclass(frozen=True)
class Event:
    """One kind of thing that one line did to a field's data."""

    kind: EventKind
    operation: str
    """torch's name of it, such as ``aten.add.Tensor`` or ``Tensor.tolist``; ``result`` if the
    forward returned it, ``state`` if the model keeps it."""
    fields: tuple[str, ...]
    """The fields from which the tensors involved stem, sorted. Of a mismatch: of those on the CPU,
    also the fields beside which they were made (``device=grid.device``); none if they have none."""
    stack: tuple[Site, ...]
    """The model's own frames, the innermost first."""
    detail: str = ""
    """The tensors involved: shapes, dtypes, devices, and in brackets the fields."""
    count: int = 1
    """How often this line did this."""
    num_bytes: int = 0
    """Moved, over all ``count`` times; 0 if nothing was."""
    non_blocking: bool | None = None
    """Of a copy between CPU and device: whether all were."""

    @property
    def site(self) -> Site | None:
        """The innermost line of the model's own code."""
        return self.stack[0] if self.stack else None


@dataclass(frozen=True)
class FieldReport:
    """One field of one modality: its flag, what was seen of it, and whether they fit."""

    modality: str
    field: str
    kind: FieldKind
    keep_on_cpu: bool
    """The flag under which the forward ran."""
    num_bytes: int
    """Of the field's batch, over all forwards."""
    events: tuple[Event, ...]
    """In the order in which they were first seen. Of the device uses the first lines only."""
    verdict: Verdict
    reason: str
    """One sentence, with the line that decided."""


@dataclass(frozen=True)
class ModelReport:
    """The audit of one model."""

    model: str
    """Its class."""
    fields: tuple[FieldReport, ...]
    other_events: tuple[Event, ...]
    """What is no reason of a verdict: the model's own mixed operations, its reads of the device and
    its copies to it."""
    num_forwards: int
    versions: dict[str, str]
    error: str | None = None
    """What ended the forward early; the fields then show what was seen until there."""

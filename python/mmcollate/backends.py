"""What staging needs of a device: memory, copies, fences."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mmcollate.reference import iter_leaves


class Fence(Protocol):
    """A mark on a stream. It has passed when the device has done all that came before it."""

    def query(self) -> bool:
        """Whether it has passed; never waits."""

    def synchronize(self) -> None:
        """Waits until it has passed."""


class Backend(ABC):
    """One device. All calls concern the stream that is current when they are made."""

    pageable_copies_are_staged: bool = False
    """Whether a copy from pageable memory has read its source when the call returns. If not, such
    copies are made blocking."""
    copies_are_ordered: bool = False
    """Whether what the stream runs later sees what an asynchronous copy wrote. If not, copies are
    made blocking."""

    arenas: dict[int, Any]
    """Where :mod:`mmcollate.staging` keeps this device's arena, by process; made by it."""

    device: torch.device | None = None
    """As torch knows it."""

    def reference(self, reduce: Callable[..., Any], *, keep_on_cpu: bool, pin_memory: bool) -> Any:
        """A field's batch as the reference makes it, ``reduce(device=…, pin_memory=…)``, here."""
        return reduce(device="cpu" if keep_on_cpu else self.device, pin_memory=pin_memory)

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Fresh memory of the host that the device can read by itself: ``uint8``, ``(nbytes,)``.

        Raises:
            RuntimeError: The system refuses.
        """

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Fresh memory of the device: ``uint8``, ``(nbytes,)``, aligned to 256 bytes at least.

        Raises:
            torch.OutOfMemoryError: There is none.
        """

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, *, blocking: bool) -> None:
        """Copies from the host to the device: both ``uint8`` and contiguous, of one length.

        A copy that does not block reads ``source`` until a fence that is made after it has passed.
        """

    @abstractmethod
    def fence(self) -> Fence:
        """A fence behind all that the stream was given so far."""

    @abstractmethod
    def wait_on(self, stream: Any, fence: Fence | None, tensors: Sequence[torch.Tensor]) -> None:
        """Makes a stream wait for a fence, if there is one, and says that it uses tensors of this
        device: their memory is not given to others before it has come to here."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the stream has done all that it was given so far."""

    @abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the device can read this tensor by itself."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the stream records what it is given instead of running it, so that no memory
        may be pinned, no fence asked and nothing waited for."""

    @abstractmethod
    def free_pinned(self) -> None:
        """Gives the system back what was pinned and is no longer used."""


class Torch(Backend):
    """An accelerator that torch knows, through its generic interface."""

    # CUDA (and ROCm, which says "cuda"): cudaMemcpyAsync from pageable memory returns once the
    # source has been read, and streams order copies and kernels:
    # https://docs.nvidia.com/cuda/cuda-driver-api/api-sync-behavior.html
    # XPU orders them too, but may still read pageable memory after the call.
    _PAGEABLE_COPIES_ARE_STAGED = frozenset({"cuda"})
    _COPIES_ARE_ORDERED = frozenset({"cuda", "xpu"})

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device = device
        self.pageable_copies_are_staged = device.type in self._PAGEABLE_COPIES_ARE_STAGED
        self.copies_are_ordered = device.type in self._COPIES_ARE_ORDERED

    def pinned(self, nbytes: int) -> torch.Tensor:
        # An arena made in inference mode must serve outside of it too.
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, blocking: bool) -> None:
        target.copy_(source, non_blocking=not blocking)

    def fence(self) -> Fence:
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def wait_on(self, stream: Any, fence: Fence | None, tensors: Sequence[torch.Tensor]) -> None:
        if fence is not None:
            stream.wait_event(fence)
        for tensor in tensors:
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.accelerator.current_stream(self.device).synchronize()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def is_capturing(self) -> bool:
        # Newer streams can be asked; before, CUDA's current one alone.
        capturing = getattr(torch.accelerator.current_stream(self.device), "is_capturing", None)
        if capturing is not None:
            return bool(capturing())
        if self.device.type != "cuda":
            return False
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def free_pinned(self) -> None:
        free = getattr(torch.accelerator, "empty_host_cache", None)
        if free is not None:
            free()


def backend_of(device: Any) -> Backend | None:
    """The backend of a device as callers name it; ``None`` if its fields are left to the reference:
    the host, the meta device, and what torch has no streams and events for."""
    if type(device) is torch.device:  # as engines have it: first, for it is asked for each batch
        known = device
    elif isinstance(device, Backend):
        return device
    else:
        try:
            known = torch.device(device)
        except (RuntimeError, TypeError):
            return None  # the reference's attempt raises its own error
    # The host first: asking for accelerators may start a driver, which a process that is yet to
    # fork must not do.
    if known.type in ("cpu", "meta") or known.type != _accelerator():
        return None
    index = torch.accelerator.current_device_index() if known.index is None else known.index
    return _of_torch(known.type, index)


def wait_for_host(given: Any, made: Any) -> None:
    """Waits until what was copied from an accelerator to the host is there: torch's non-blocking
    copies to the host are not, when they return."""
    tensors = (leaf for leaf in iter_leaves(given) if isinstance(leaf, torch.Tensor))
    devices = {leaf.device for leaf in tensors if not leaf.is_cpu}
    # Most batches stop here. Where there is no accelerator, torch takes 150 us to say so.
    if not devices:
        return
    if not any(isinstance(leaf, torch.Tensor) and leaf.is_cpu for leaf in iter_leaves(made)):
        return
    for device in devices:
        if device.type == _accelerator():
            # By an event: where torch or vLLM look for needless waits, a stream's would raise.
            Torch(device).fence().synchronize()


def current() -> Backend | None:
    """The backend of torch's current accelerator, if there is one."""
    accelerator = _accelerator()
    return None if accelerator is None else backend_of(accelerator)


_found: list[str] = []


def _accelerator() -> str | None:
    # Only what is found is remembered: torch may learn of a device later.
    if not _found:
        if not torch.accelerator.is_available():
            return None
        found = torch.accelerator.current_accelerator()
        if found is None:
            return None
        _found.append(found.type)
    return _found[0]


_known: dict[tuple[str, int], Torch] = {}


def _of_torch(device_type: str, index: int) -> Torch:
    # Of threads that come here at one time, all take the first one's: each has an arena.
    key = device_type, index
    return _known.get(key) or _known.setdefault(key, Torch(torch.device(device_type, index)))

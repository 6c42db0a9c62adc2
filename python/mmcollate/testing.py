"""A device that exists nowhere: to test, without one, code that stages batches.

>>> import torch
>>> from mmcollate import Batched, collate
>>> from mmcollate.testing import FakeDevice
>>> device = FakeDevice(manual=True)
>>> items = [{"x": torch.ones(10_000), "y": torch.tensor(n)} for n in (5, 6)]
>>> batch = collate(items, {"x": Batched(), "y": Batched()}, device=device, pin_memory=True)
>>> device.stream.advance()  # runs the copy, and the fence behind it
2
>>> batch["y"].tolist()
[5, 6]
"""

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mmcollate.backends import Backend
from mmcollate.reference import map_leaves

NEVER_WRITTEN = 0xCD
"""What each byte of fresh device memory is."""
FREED = 0xDD
"""What a copy reads, byte by byte, whose pageable source is gone."""


class FakeDevice(Backend):
    """A device in host memory whose streams run late, or only when told to.

    Copies are made when the stream gets to them, from what the source holds *then*: who writes to
    a source too early, or frees it, finds wrong bytes on the device, as with hardware. Tensors on
    this device are CPU tensors.

    Args:
        manual: Whether streams run only when told (:meth:`FakeStream.advance`, or by waiting).
            Otherwise each operation runs ``delay`` seconds after it was given, at the next look.
        delay: See ``manual``.
        pinned_budget: Bytes that can be pinned; more is refused as a driver would.
        memory_budget: Bytes of device memory.
        pageable_copies_are_staged: See :class:`mmcollate.backends.Backend`.
        copies_are_ordered: See :class:`mmcollate.backends.Backend`.
    """

    def __init__(
        self,
        *,
        manual: bool = False,
        delay: float = 0.0,
        pinned_budget: int | None = None,
        memory_budget: int | None = None,
        pageable_copies_are_staged: bool = False,
        copies_are_ordered: bool = True,
    ) -> None:
        self.manual = manual
        self.delay = delay
        self.pinned_budget = pinned_budget
        self.memory_budget = memory_budget
        self.pageable_copies_are_staged = pageable_copies_are_staged
        self.copies_are_ordered = copies_are_ordered
        self.stream = FakeStream(self)
        """The stream that is current."""
        self.copies = 0
        """Copies given so far, blocking ones included."""
        self.bytes_copied = 0
        self.blocking_copies = 0
        self.pageable_copies = 0
        self.pinned_bytes = 0
        """Bytes pinned now."""
        self.peak_pinned_bytes = 0
        self.memory_bytes = 0
        """Bytes of device memory in use now."""
        self.capturing = False
        """Set to stand for a stream that captures: then nothing is to be pinned, asked or waited
        for, and doing so raises."""
        self._lock = threading.RLock()
        _devices.add(self)
        self._failures: dict[str, deque[BaseException]] = {}
        self._pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )

    def __repr__(self) -> str:
        return f"FakeDevice(manual={self.manual}, delay={self.delay})"

    def fail_next(self, what: str, error: BaseException, times: int = 1) -> None:
        """Makes the next calls raise.

        Args:
            what: ``"pinned"``, ``"empty"``, ``"copy"``, ``"fence"`` or ``"query"``.
            error: What they raise.
            times: How many.
        """
        self._failures.setdefault(what, deque()).extend([error] * times)

    def _maybe_fail(self, what: str) -> None:
        waiting = self._failures.get(what)
        if waiting:
            raise waiting.popleft()

    @contextlib.contextmanager
    def use(self, stream: "FakeStream") -> Iterator[None]:
        """Makes another stream of this device current."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def pinned(self, nbytes: int) -> torch.Tensor:
        self._not_while_capturing("memory pinned")
        self._maybe_fail("pinned")
        if self.pinned_budget is not None and self.pinned_bytes + nbytes > self.pinned_budget:
            raise RuntimeError(f"FakeDevice: can't pin {nbytes} bytes, budget exceeded")
        with torch.inference_mode(False):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        storage = tensor.untyped_storage()
        with self._lock:
            self.pinned_bytes += nbytes
            self.peak_pinned_bytes = max(self.peak_pinned_bytes, self.pinned_bytes)
            self._pinned[storage.data_ptr()] = storage
        weakref.finalize(storage, _call_if_alive, weakref.WeakMethod(self._unpin), nbytes)
        return tensor

    def _unpin(self, nbytes: int) -> None:
        with self._lock:
            self.pinned_bytes -= nbytes

    def empty(self, nbytes: int) -> torch.Tensor:
        self._maybe_fail("empty")
        if self.memory_budget is not None and self.memory_bytes + nbytes > self.memory_budget:
            raise torch.OutOfMemoryError(f"FakeDevice: no {nbytes} bytes of device memory")
        # A byte more than asked for, so that each allocation has an address; aligned by hand.
        memory = torch.full((nbytes + 512,), NEVER_WRITTEN, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % 512
        with self._lock:
            self.memory_bytes += nbytes
        weakref.finalize(
            memory.untyped_storage(), _call_if_alive, weakref.WeakMethod(self._free), nbytes
        )
        return memory[start : start + nbytes]

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self.memory_bytes -= nbytes

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, blocking: bool) -> None:
        self._maybe_fail("copy")
        assert target.shape == source.shape, "a copy of another length"
        assert target.dtype == source.dtype == torch.uint8
        pinned = self.is_pinned(source)
        with self._lock:
            self.copies += 1
            self.bytes_copied += source.numel()
            self.blocking_copies += blocking
            self.pageable_copies += not pinned
        bytes_of: Callable[[], torch.Tensor | None]
        if pinned:
            bytes_of = functools.partial(_itself, source)
        elif self.pageable_copies_are_staged:
            bytes_of = functools.partial(_itself, source.clone())
        else:
            bytes_of = weakref.ref(source)

        def run() -> None:
            found = bytes_of()
            with torch.inference_mode(target.is_inference()):
                if found is None:
                    target.fill_(FREED)
                else:
                    target.copy_(found)

        self.stream.launch(run)
        if blocking:
            self.stream.synchronize()

    def fence(self) -> "FakeFence":
        self._maybe_fail("fence")
        return FakeFence(self.stream)

    def reference(self, reduce: Callable[..., Any], *, keep_on_cpu: bool, pin_memory: bool) -> Any:
        if keep_on_cpu:
            return reduce(device="cpu", pin_memory=False)
        return map_leaves(self._upload, reduce(device=None, pin_memory=False))

    def _upload(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)
        if not plain or leaf.layout is not torch.strided or not leaf.is_cpu:
            return leaf.clone()
        leaf = leaf.detach()
        if not (self.is_pinned(leaf) and leaf.is_contiguous()):
            leaf = leaf.new_empty(leaf.shape).copy_(leaf)
        source = leaf.reshape(-1).view(torch.uint8)
        target = self.empty(-(-source.numel() // 16) * 16)
        if source.numel():
            self.copy(target[: source.numel()], source, blocking=not self.is_pinned(source))
        return target.view(leaf.dtype).as_strided(leaf.shape, leaf.stride())

    def wait_on(self, stream: Any, fence: Any, tensors: Sequence[torch.Tensor]) -> None:
        if fence is not None:
            stream.wait_fence(fence)

    def synchronize(self) -> None:
        self._not_while_capturing("waited for")
        self.stream.synchronize()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def is_capturing(self) -> bool:
        return self.capturing

    def free_pinned(self) -> None:
        pass

    def _not_while_capturing(self, what: str) -> None:
        if self.capturing:
            raise RuntimeError(f"FakeDevice: nothing may be {what} while a stream captures")


_devices: weakref.WeakSet[FakeDevice] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: a thread of the parent's may have held them."""
    for device in _devices:
        device._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def _call_if_alive(method: weakref.WeakMethod[Callable[[int], None]], nbytes: int) -> None:
    found = method()
    if found is not None:
        found(nbytes)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class FakeStream:
    """Operations of a :class:`FakeDevice`, run one after the other."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._waiting: deque[tuple[float, Callable[[], None], FakeFence | None]] = deque()

    def launch(self, kernel: Callable[[], Any]) -> None:
        """Gives the stream something to run: a consumer's kernel, in a test."""
        due = time.monotonic() + self._device.delay
        self._waiting.append((due, kernel, None))

    def wait_fence(self, fence: "FakeFence") -> None:
        """Holds what comes later back until a fence, of any stream, has passed."""
        self._waiting.append((time.monotonic() + self._device.delay, lambda: None, fence))

    def advance(self, count: int | None = None) -> int:
        """Runs the next operations, all if ``count`` is ``None``; returns how many ran. Stops at
        one that waits for a fence that has not passed."""
        ran = 0
        while self._waiting and (count is None or ran < count):
            if not self._run_next():
                break
            ran += 1
        return ran

    def synchronize(self) -> None:
        """Runs all."""
        while self._waiting:
            if not self._run_next():
                self._help()

    def _help(self) -> None:
        """Runs what the next operation waits for."""
        with self._device._lock:
            fence = self._waiting[0][2] if self._waiting else None
        if fence is not None:
            fence.synchronize()

    def pending(self) -> int:
        """Operations that have not run."""
        self._run_due()
        return len(self._waiting)

    def _run_due(self) -> None:
        if self._device.manual:
            return
        with self._device._lock:
            while self._waiting and self._waiting[0][0] <= time.monotonic() and self._run_next():
                pass

    def _run_next(self) -> bool:
        with self._device._lock:
            if not self._waiting:
                return False
            _, run, fence = self._waiting[0]
            if fence is not None and not fence.has_passed():
                return False
            self._waiting.popleft()
            run()
            return True


class FakeFence:
    """A mark on a :class:`FakeStream`."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self._passed = False
        stream.launch(self._pass)

    def _pass(self) -> None:
        self._passed = True

    def has_passed(self) -> bool:
        """Whether it has passed, as the device itself sees it."""
        self._stream._run_due()
        return self._passed

    def query(self) -> bool:
        """Whether it has passed."""
        self._stream._device._not_while_capturing("asked")
        self._stream._device._maybe_fail("query")
        return self.has_passed()

    def synchronize(self) -> None:
        """Runs the stream until it has passed."""
        self._stream._device._not_while_capturing("waited for")
        while not self._passed:
            if not self._stream._run_next():
                self._stream._help()

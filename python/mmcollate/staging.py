"""Staging: all that is bound for a device goes there through a bounded arena of pinned memory.

One batch, from leaves to device::

    choose       which fields are worth it; the others take the reference
    lay out      where each tensor lies, in the host layout and in its device allocation
    fill         lease a slot, gather into it the next part of the layout
    copy         from the slot to the device, not blocking; a fence behind it
    carve        the tensors, as views of the device allocations

A batch that does not fit into one slot fills several, and while the device reads one the next is
filled. A slot is written to again only when its fence has passed.
"""

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from mmcollate import _core, config, errors
from mmcollate.backends import Backend, Fence, backend_of, current
from mmcollate.reference import iter_leaves

ALIGN = 256
"""As ``SEGMENT_ALIGN`` in ``rust/src/align.rs``."""

DIRECT_FROM = 256 << 10
"""A leaf of at least so many bytes that lies in pinned memory is copied from there: below it, one
more copy costs more than the gather."""

SMALL = 64 << 10
"""A batch of one tensor of at most so many bytes takes the reference, which makes one copy too."""

GROW_PER_BATCH = 4
"""Most slots that one batch pins: it takes some milliseconds for each, once in the process."""

WAIT_AT_MOST = 0.1
"""Seconds that a batch under way waits for one of its own slots, before the reference takes the
fields that are left."""

POISON = 0xA5
"""What free slots are filled with under ``MMCOLLATE_DEBUG``."""

_Lease = tuple[int, int]


class _Sums(TypedDict):
    batches: int
    """Batches that were staged."""
    copies: int
    """Copies to the device, ``direct_copies`` included."""
    direct_copies: int
    """Copies from pinned leaves where they lay."""
    bytes_copied: int
    pageable_batches: int
    """Batches that went through pageable memory, for want of pinned memory."""
    refusals: int
    """Times that the system refused to pin a slot."""
    waits: int
    """Times that a batch waited for one of its own slots."""


class ArenaStats(_Sums):
    """What :func:`arena_stats` returns."""

    cap_bytes: int
    """Most that may be pinned."""
    slot_bytes: int
    pinned_bytes: int
    """Pinned now."""
    peak_pinned_bytes: int
    free: int
    """Slots that wait to be used."""
    leased: int
    """Slots that are written to."""
    in_flight: int
    """Slots that the device may still read."""


class Arena:
    """The pinned slots of one device in one process.

    ``rust/src/arena.rs`` keeps the books; here is the memory, and what proves that a slot is free.
    """

    def __init__(self, backend: Backend, cap: int, slot_bytes: int) -> None:
        if cap > 0:
            # torch rounds what it pins up to a power of two.
            slot_bytes = min(1 << (slot_bytes.bit_length() - 1), 1 << (cap.bit_length() - 1))
        self.backend = backend
        self.refused = False
        self._cap = cap
        self._books = _core.Arena(slot_bytes, cap)
        self._slots: dict[int, torch.Tensor] = {}
        self._flying: list[tuple[_Lease, Fence]] = []
        # Held for bookkeeping and while a slot is pinned. A forked child has an arena of its own.
        self._lock = threading.Lock()
        self._sums = _Sums(
            batches=0,
            copies=0,
            direct_copies=0,
            bytes_copied=0,
            pageable_batches=0,
            refusals=0,
            waits=0,
        )
        self._peak = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot."""
        return self._books.slot_bytes

    @property
    def has_none(self) -> bool:
        """Whether there is no slot and there will be none."""
        return not self._slots and (self.refused or self._books.capacity == 0)

    def memory(self, lease: _Lease) -> torch.Tensor:
        """The slot's memory: ``uint8``, ``(slot_bytes,)``."""
        return self._slots[lease[0]]

    def lease(self) -> _Lease | None:
        """Takes a slot that nobody writes to and no device reads; ``None`` if there is none."""
        lease = self._books.lease()
        if lease is None:
            self.land()
            lease = self._books.lease()
        if lease is None:
            return None
        if config.debug() and not bool((self.memory(lease) == POISON).all()):
            raise AssertionError(f"mmcollate: slot {lease[0]} was written to while it was free")
        return lease

    def grow(self) -> _Lease | None:
        """Pins one more slot and takes it; ``None`` if the cap or the system allows no more."""
        with self._lock:
            lease = None if self.refused else self._books.grow()
            if lease is None:
                return None
            try:
                self._slots[lease[0]] = self.backend.pinned(self.slot_bytes)
            except (RuntimeError, MemoryError) as error:
                self._books.settled(lease, False)
                self.refused = True
                self._sums["refusals"] += 1
                pinned = len(self._slots) * self.slot_bytes
                message = (
                    f"mmcollate: can't pin {self.slot_bytes:,} bytes more than the {pinned:,} that"
                    f" are pinned ({error}); batches take slower ways where these do not do"
                )
                cause = error
            except BaseException:
                self._books.settled(lease, False)
                raise
            else:
                self._books.settled(lease, True)
                self._peak = max(self._peak, len(self._slots) * self.slot_bytes)
                return lease
        try:
            if config.strict_pin():
                raise errors.CollateRuntimeError(
                    f"{message}; MMCOLLATE_STRICT_PIN is set"
                ) from cause
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        finally:
            # It refers to this frame, and so to the items.
            del cause
        return None

    def launch(self, lease: _Lease) -> None:
        """The device has been given copies from this slot: it comes back when they are done."""
        try:
            fence = self.backend.fence()
        except BaseException as error:
            # No fence, so nothing less than waiting for all proves that the slot has been read. If
            # that fails too, the slot stays leased for good.
            self.backend.synchronize()
            self.release(lease)
            if isinstance(error, Exception):
                return
            raise
        with self._lock:
            self._books.launch(lease)
            self._flying.append((lease, fence))

    def release(self, lease: _Lease) -> None:
        """Gives back a slot that no device reads."""
        if config.debug():
            self.memory(lease).fill_(POISON)
        self._books.release(lease)

    def land(self) -> None:
        """Takes back the slots whose fences have passed."""
        with self._lock:
            still_flying = []
            for lease, fence in self._flying:
                if _has_passed(fence):
                    self.release(lease)
                else:
                    still_flying.append((lease, fence))
            self._flying = still_flying

    def reserve(self, nbytes: int) -> int:
        """Pins slots until so many bytes are pinned, or no more can be; returns what is."""
        while len(self._slots) * self.slot_bytes < nbytes and not self.backend.is_capturing():
            lease = self.grow()
            if lease is None:
                break
            self.release(lease)
        return len(self._slots) * self.slot_bytes

    def trim(self) -> int:
        """Unpins the slots that are free; returns their bytes. While the stream captures, none."""
        if self.backend.is_capturing():
            return 0
        self.land()
        with self._lock:
            slots = self._books.trim()
            for slot in slots:
                del self._slots[slot]
            self.refused = False
        if slots:
            self.backend.free_pinned()
        return len(slots) * self.slot_bytes

    def count(self, **sums: int) -> None:
        """Adds to the sums."""
        with self._lock:
            for name, by in sums.items():
                self._sums[name] += by  # type: ignore[literal-required]

    def stats(self) -> ArenaStats:
        """See :class:`ArenaStats`."""
        if not self.backend.is_capturing():
            self.land()
        with self._lock:
            _, free, leased, in_flight = self._books.census()
            return {
                "cap_bytes": self._cap,
                "slot_bytes": self.slot_bytes,
                "pinned_bytes": len(self._slots) * self.slot_bytes,
                "peak_pinned_bytes": self._peak,
                "free": free,
                "leased": leased,
                "in_flight": in_flight,
                **self._sums,
            }


class _Passed:
    """The fence of what was waited for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def _has_passed(fence: Fence) -> bool:
    try:
        return fence.query()
    except Exception:  # a device in trouble has read nothing for sure
        return False


def arena_of(backend: Backend) -> Arena:
    """The arena of a device in this process; made when it is first asked for."""
    pid = os.getpid()
    # Those of the processes that this one was forked from stay: never used, and never freed, for
    # their memory is not this one's to unpin.
    arenas: dict[int, Arena] = backend.__dict__.setdefault("arenas", {})
    arena = arenas.get(pid)
    if arena is None:
        # Of threads that come here at one time, all take the first one's; without a lock, which a
        # forked child could find taken.
        arena = arenas.setdefault(pid, Arena(backend, config.pinned_max(), config.staging_chunk()))
    return arena


def backend_for(device: Any, pin_memory: Any) -> Backend | None:
    """The backend to stage through; ``None`` where the reference copies field by field."""
    if device is None or pin_memory is not True:
        return None
    return backend_of(device)


def is_embeds(name: Any) -> bool:
    """Whether a field has embeddings: engines hand views of them on to caches that outlive the
    batch by many steps."""
    return isinstance(name, str) and name.endswith("_embeds")


class NoSlot(Exception):
    """No slot is free, and none became free in time."""


class Changed(Exception):
    """A leaf was changed since it was planned."""


@dataclass
class _Filled:
    """A host buffer with what is to be copied from it."""

    lease: _Lease | None
    """The slot that is the buffer. Its memory is only looked up: who gave the lease back must keep
    nothing that a trim is to unpin."""
    pageable: torch.Tensor | None = None
    """The buffer if it is no slot."""
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)
    """``(part, offset in the part, offset in the host buffer, bytes)``"""


class Transfer:
    """One batch on its way: the fields of a plan that are staged."""

    def __init__(self, bound: "Bound", own: Sequence[bool | None]) -> None:
        plan, backend = bound.plan, bound.backend
        self._plan = plan
        self._backend = backend
        self._arena = arena_of(backend)
        self._fields = bound.fields
        self._loads = bound.loads
        self._dtypes = [leaf.dtype for leaf, *_ in self._loads]
        _, self._parts, self._places = plan.lay_out(own)
        self.buffers: list[torch.Tensor] = []
        self._direct = [
            (load, offset, nbytes, leaf, leaf.dtype, leaf.shape)
            for load, place in enumerate(self._places)
            if place is not None and self._loads[load][3] >= DIRECT_FROM
            for leaf, offset, nbytes in plan.large_leaves(load, DIRECT_FROM)
            if backend.is_pinned(leaf)
        ]
        self._runs = deque(self._runs_to_gather())
        self._grown = 0
        self._launched = 0
        self._copied = 0
        self._pageable = False
        self._sent_until = 0
        self._all_sent = False

    def _host_offset(self, load: int) -> int:
        place = self._places[load]
        assert place is not None
        part, offset = place
        return self._parts[part][0] + offset

    def _runs_to_gather(self) -> list[tuple[int, int, int]]:
        """``(part, start, stop)`` of the host layout, without what is copied directly."""
        skipped = sorted(
            (self._host_offset(load) + offset, nbytes) for load, offset, nbytes, *_ in self._direct
        )
        runs = []
        for part, (start, stop) in enumerate(self._parts):
            at = start
            for skip, nbytes in skipped:
                if start <= skip < stop:
                    runs.append((part, at, skip))
                    at = skip + nbytes
            runs.append((part, at, stop))
        return [run for run in runs if run[1] < run[2]]

    def allocate(self) -> None:
        """Allocates on the device."""
        # A multiple of the alignment, so that it is one of every item size.
        self.buffers = [
            self._backend.empty(-(-(stop - start) // ALIGN) * ALIGN) for start, stop in self._parts
        ]

    def copy_direct(self) -> None:
        """Copies from pinned leaves where they lie.

        Raises:
            Changed: One of them was changed; nothing was copied.
        """
        for _, _, _, leaf, dtype, shape in self._direct:
            as_planned = (leaf.dtype, leaf.shape, leaf.is_contiguous()) == (dtype, shape, True)
            if not (as_planned and self._backend.is_pinned(leaf)):
                raise Changed
        for load, offset, nbytes, leaf, *_ in self._direct:
            place = self._places[load]
            assert place is not None
            part, start = place
            target = self.buffers[part][start + offset : start + offset + nbytes]
            source = leaf.detach().reshape(-1).view(torch.uint8)
            self._backend.copy(target, source, blocking=not self._backend.copies_are_ordered)
            self._copied += nbytes

    def run(self) -> None:
        """Fills and copies, until all is sent.

        Raises:
            NoSlot: No slot was free, or none became free in time. What was sent before is good.
            Changed: A leaf was changed. As above.
        """
        while self._runs:
            self.copy(self.fill())
        self._all_sent = True

    def fill_all(self) -> list[_Filled]:
        """Gathers all of it, into pageable memory where no slot is free."""
        filled: list[_Filled] = []
        try:
            while self._runs:
                filled.append(self.fill(or_pageable=True))
        except BaseException:
            self.discard(filled)
            raise
        return filled

    def discard(self, filled: Sequence[_Filled]) -> None:
        """Gives back what was filled and is not copied."""
        for one in filled:
            if one.lease is not None:
                self._arena.release(one.lease)

    def copy_all(self, filled: deque[_Filled]) -> None:
        """Copies what :meth:`fill_all` returned, and takes out of it what was given on."""
        while filled:
            self.copy(filled.popleft())
        self._all_sent = True

    def fill(self, *, or_pageable: bool = False) -> _Filled:
        """Gathers the next part of the layout into host memory."""
        filled = self._host_memory(or_pageable)
        used, room = 0, self._memory(filled).numel()
        try:
            while self._runs and used < room:
                part, start, stop = self._runs[0]
                taken = min(stop - start, room - used)
                into = slice(used, used + taken)
                if not self._plan.gather(self._memory(filled)[into], start, start + taken):
                    raise Changed
                filled.copies.append((part, start - self._parts[part][0], used, taken))
                if start + taken < stop:
                    self._runs[0] = (part, start + taken, stop)
                else:
                    self._runs.popleft()
                used = -(-(used + taken) // ALIGN) * ALIGN
        except BaseException:
            if filled.lease is not None:
                self._arena.release(filled.lease)
            raise
        return filled

    def _host_memory(self, or_pageable: bool) -> _Filled:
        arena = self._arena
        if not self._pageable:
            lease = arena.lease()
            if lease is None and self._grown < GROW_PER_BATCH:
                lease = arena.grow()
                self._grown += lease is not None
            if lease is None and not arena.has_none and self._launched:
                lease = self._wait_for_slot()
            if lease is not None:
                return _Filled(lease)
            # Where memory can't be pinned, the reference would ask for it in vain too.
            if not (or_pageable or arena.refused or arena.has_none):
                raise NoSlot
            self._pageable = True
        left = sum(-(-(stop - start) // ALIGN) * ALIGN for _, start, stop in self._runs)
        return _Filled(None, torch.empty(left, dtype=torch.uint8, device="cpu"))

    def _memory(self, filled: _Filled) -> torch.Tensor:
        if filled.lease is not None:
            return self._arena.memory(filled.lease)
        assert filled.pageable is not None
        return filled.pageable

    def _wait_for_slot(self) -> _Lease | None:
        self._arena.count(waits=1)
        until = time.monotonic() + WAIT_AT_MOST
        while True:
            lease = self._arena.lease()
            if lease is not None or time.monotonic() > until:
                return lease
            time.sleep(50e-6)

    def copy(self, filled: _Filled) -> None:
        """Gives the device the copies from a filled buffer, and a fence behind them."""
        backend = self._backend
        pinned = filled.lease is not None
        given = 0
        blocking = not backend.copies_are_ordered
        blocking = blocking or not (pinned or backend.pageable_copies_are_staged)
        try:
            for part, offset, at, nbytes in filled.copies:
                target = self.buffers[part][offset : offset + nbytes]
                given += 1
                backend.copy(target, self._memory(filled)[at : at + nbytes], blocking=blocking)
                self._copied += nbytes
                self._sent_until = self._parts[part][0] + offset + nbytes
        finally:
            if filled.lease is not None:
                if given:
                    self._arena.launch(filled.lease)
                else:
                    self._arena.release(filled.lease)
            self._launched += given

    def is_sent(self, load: int) -> bool:
        """Whether all bytes of a load have been given to the device."""
        if self._all_sent:
            return True
        return self._host_offset(load) + self._loads[load][3] <= self._sent_until

    def carve(self, load: int) -> torch.Tensor:
        """The tensor of a load: a view of its device allocation."""
        place = self._places[load]
        assert place is not None
        part, offset = place
        _, sizes, strides, _, _ = self._loads[load]
        dtype = self._dtypes[load]
        typed = self.buffers[part].view(dtype)
        start = typed.storage_offset() + offset // dtype.itemsize
        return typed.as_strided(sizes, strides, start)

    def put(self, k: int, batch: dict[str, Any]) -> bool:
        """Puts a field into the batch; ``False`` if not all of it was sent."""
        name, start, stop = self._fields[k]
        if not all(map(self.is_sent, range(start, stop))):
            return False
        for load in range(start, stop):
            home = self._plan.home(load)
            if home is None:
                batch[name] = self.carve(load)
            else:
                nest, index = home
                nest[index] = self.carve(load)
        return True

    def finish(self) -> None:
        """Counts what was done."""
        self._arena.count(
            batches=1,
            copies=self._launched + len(self._direct),
            direct_copies=len(self._direct),
            bytes_copied=self._copied,
            pageable_batches=int(self._pageable),
        )


@dataclass
class Bound:
    """What of a batch is bound for a device, and not there yet."""

    plan: _core.DevicePlan
    backend: Backend
    outlives: Callable[[Any], bool]
    """Whether a field's batch may be kept when the others are gone."""

    def __post_init__(self) -> None:
        self.fields = self.plan.fields
        self.loads = self.plan.loads

    def choose(self) -> list[bool | str]:
        """For each field of the plan: whether it gets an allocation of its own, or why it takes the
        reference."""
        fields, loads = self.fields, self.loads
        is_pinned = self.backend.is_pinned
        if self.backend.is_capturing():
            return ["capturing"] * len(fields)
        if len(loads) == 1 and 0 < loads[0][3] <= SMALL:
            return ["small"]
        chosen: list[bool | str] = []
        for name, start, stop in fields:
            mine = loads[start:stop]
            is_list = self.plan.home(start) is not None
            single = all(leaves == 1 for *_, leaves in mine)
            large = all(nbytes >= DIRECT_FROM for _, _, _, nbytes, _ in mine)
            # The reference copies such leaves from where they are, and keeps their strides.
            if single and (large or not is_list) and all(is_pinned(leaf) for leaf, *_ in mine):
                chosen.append("pinned_leaf")
            else:
                chosen.append(self.outlives(name))
        return chosen

    def send(self, batch: dict[str, Any]) -> None:
        """Brings the fields to the device and puts them into the batch.

        The copies are given to the current stream and may not have run when this returns; whoever
        uses the tensors on another stream makes that one wait, as after any ``non_blocking`` copy.
        """
        chosen = self.choose()
        staged = [k for k, choice in enumerate(chosen) if not isinstance(choice, str)]
        if staged:
            transfer = self.transfer(chosen)
            transfer.allocate()
            left = "no_slot"
            try:
                transfer.copy_direct()
                transfer.run()
            except NoSlot:
                pass
            except Changed:
                left = "changed"
            for k in staged:
                if not transfer.put(k, batch):
                    chosen[k] = left
            transfer.finish()
        self.count(chosen)
        self.reduce(chosen, batch)

    def transfer(self, chosen: Sequence[bool | str]) -> Transfer:
        """Of the fields that are staged."""
        own = [None if isinstance(choice, str) else choice for choice in chosen]
        return Transfer(self, own)

    def reduce(self, chosen: Sequence[bool | str], batch: dict[str, Any]) -> None:
        """Leaves the fields that are not staged to the reference."""
        for k, choice in enumerate(chosen):
            if isinstance(choice, str):
                self.reduce_one(k, choice, batch)

    def reduce_one(self, k: int, reason: str, batch: dict[str, Any]) -> None:
        """Leaves one field to the reference."""
        batch[self.fields[k][0]] = self.plan.reduce(k, reason)

    def count(self, chosen: Sequence[bool | str]) -> None:
        """Counts the fields that were staged."""
        self.plan.count(sum(not isinstance(choice, str) for choice in chosen))

    def taken(self, chosen: Sequence[bool | str]) -> set[Any]:
        """Names of the fields that take the reference."""
        pairs = zip(self.fields, chosen, strict=True)
        return {name for (name, *_), choice in pairs if isinstance(choice, str)}

    def explained(self, rows: list[Any]) -> list[Any]:
        """The rows of an explanation, with the reasons of what would not be staged after all."""
        reasons = {
            name: choice
            for (name, *_), choice in zip(self.fields, self.choose(), strict=True)
            if isinstance(choice, str)
        }
        return [
            (*row[:2], "reference", 0, None, None, reasons[row[0]]) if row[0] in reasons else row
            for row in rows
        ]


class Staged:
    """A batch in host memory that is ready to be copied: what :func:`mmcollate.stage` returns.

    It holds the items and slots of the arena until :meth:`to` or :meth:`close`; after :meth:`to`
    it holds the device's memory of the batch.
    """

    def __init__(self, batch: dict[str, Any], backend: Backend, bound: Bound | None) -> None:
        self._batch: dict[str, Any] | None = batch
        self._backend = backend
        self._bound = bound
        self._chosen: list[bool | str] = []
        self._transfer: Transfer | None = None
        self._filled: deque[_Filled] = deque()
        self._fence: Fence | None = None
        self._buffers: list[torch.Tensor] = []
        if bound is None:
            return
        self._chosen = bound.choose()
        if any(not isinstance(choice, str) for choice in self._chosen):
            transfer = bound.transfer(self._chosen)
            try:
                self._filled.extend(transfer.fill_all())
            except Changed:
                self._chosen = ["changed"] * len(self._chosen)
            else:
                self._transfer = transfer

    def to(self, device: Any = None) -> dict[str, Any]:
        """Gives the device the copies and returns the batch; once.

        The copies may not have run when this returns: kernels on the current stream come after
        them, for others see :meth:`wait`. If the device has no memory, torch's exception passes and
        this can be called again.

        Args:
            device: The device that was given to :func:`mmcollate.stage`, or ``None``.
        """
        if device is not None and backend_of(device) is not self._backend:
            raise errors.CollateValueError(
                f"this batch was staged for {self._backend!r}, not for {device!r}"
            )
        batch, bound, transfer = self._batch, self._bound, self._transfer
        if batch is None:
            raise errors.CollateRuntimeError(
                "this batch was given to the device, or closed, before"
            )
        try:
            if transfer is not None:
                transfer.allocate()
            if bound is not None:
                # Before anything is given up, for here the device may have no memory too.
                bound.reduce(self._chosen, batch)
        except BaseException:
            if transfer is not None:
                transfer.buffers = []
            raise
        self._batch = self._bound = self._transfer = None
        if transfer is not None and bound is not None:
            try:
                transfer.copy_direct()
                transfer.copy_all(self._filled)
            except Changed:
                pass
            finally:
                transfer.discard(self._filled)
                self._filled.clear()
            staged = [k for k, choice in enumerate(self._chosen) if not isinstance(choice, str)]
            for k in staged:
                if not transfer.put(k, batch):
                    self._chosen[k] = "changed"
                    bound.reduce_one(k, "changed", batch)
            transfer.finish()
            self._buffers.extend(transfer.buffers)
        taken = set()
        if bound is not None:
            bound.count(self._chosen)
            taken = bound.taken(self._chosen)
        self._buffers.extend(
            leaf
            for name, value in batch.items()
            for leaf in iter_leaves(value)
            if type(leaf) is torch.Tensor
            and leaf.layout is torch.strided
            and (name in taken or not leaf.is_cpu)
        )
        if not self._backend.is_capturing():
            self._fence = self._made_fence()
        return batch

    def _made_fence(self) -> Fence:
        try:
            return self._backend.fence()
        except Exception:
            self._backend.synchronize()
            return _Passed()

    def ready(self) -> bool:
        """Whether the copies have run; never waits."""
        return self._fence is not None and self._fence.query()

    def wait(self, stream: Any = None) -> None:
        """Waits until the copies have run.

        Args:
            stream: The stream that waits, and that the tensors are then used on; ``None`` for the
                host.
        """
        if self._fence is None:
            raise errors.CollateRuntimeError("nothing was given to the device yet; call to() first")
        if stream is None:
            self._fence.synchronize()
        else:
            fence = None if isinstance(self._fence, _Passed) else self._fence
            self._backend.wait_on(stream, fence, self._buffers)

    def close(self) -> None:
        """Gives the slots back if the batch was not given to the device."""
        transfer, self._batch, self._bound, self._transfer = self._transfer, None, None, None
        if transfer is not None:
            transfer.discard(self._filled)
            self._filled.clear()

    def __del__(self) -> None:
        if getattr(self, "_transfer", None) is not None:
            self.close()


def detach(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own: itself if nothing else is in its memory, else a copy.

    A tensor of a batch keeps all that was staged with it: see ``docs/staging.md``.
    """
    return tensor.clone() if retained_bytes(tensor) - tensor.nbytes >= ALIGN else tensor


def retained_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of memory that these tensors keep; what several share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({(s.device, s.data_ptr()): s.nbytes() for s in storages}.values())


def arena_stats(device: Any = None) -> ArenaStats:
    """Figures of a device's arena of pinned memory in this process; see :class:`ArenaStats`.

    Raises:
        CollateValueError: Nothing is staged for such a device.
    """
    return arena_of(staged_to(device)).stats()


def reserve(device: Any = None, nbytes: int | None = None) -> int:
    """Pins memory now, so that no batch has to wait for it later.

    Args:
        device: Whose arena; torch's current accelerator if ``None``.
        nbytes: How much is to be pinned in all; as much as the cap allows if ``None``.

    Returns:
        Bytes that are pinned then: less if the cap or the system allows no more.

    Raises:
        CollateValueError: Nothing is staged for such a device.
    """
    arena = arena_of(staged_to(device))
    return arena.reserve(arena.stats()["cap_bytes"] if nbytes is None else nbytes)


def trim(device: Any = None) -> int:
    """Unpins what a device's arena does not use now; returns how many bytes.

    Raises:
        CollateValueError: Nothing is staged for such a device.
    """
    return arena_of(staged_to(device)).trim()


def staged_to(device: Any) -> Backend:
    """The backend of a device, or of the current accelerator if it is ``None``; an error if there
    is none."""
    backend = current() if device is None else backend_of(device)
    if backend is None:
        raise errors.CollateValueError(
            f"nothing is staged for {'want of a device' if device is None else repr(device)}:"
            " torch has no such accelerator here"
        )
    return backend

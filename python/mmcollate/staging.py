"""Staging: all that is bound for a device goes there through a bounded arena of pinned memory.

One batch, from leaves to device::

    choose       which fields are worth it; the others take the reference
    lay out      where each tensor lies, in the host layout and in its device allocation
    fill         lease a slot, gather into it the next part of the layout
    copy         from the slot to the device, not blocking; a fence behind it
    carve        the tensors, in the memory of the device allocations

A batch that does not fit into one slot fills several, and while the device reads one the next is
filled. A slot is written to again only when its fence has passed.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mmcollate import _core, errors
from mmcollate.backends import Backend, Fence, backend_of, current
from mmcollate.fields import Field
from mmcollate.pinned import ArenaStats, Passed, Slot, arena_of
from mmcollate.reference import iter_leaves

ALIGN = 256
"""As ``SEGMENT_ALIGN`` in ``rust/src/align.rs``."""

DIRECT_FROM = 256 << 10
"""A leaf of at least so many bytes that lies in pinned memory is copied from there: below it, one
more copy costs more than the gather. Where the reference gathers it is done with the leaves when it
returns, and callers may write to them: such leaves only under ``MMCOLLATE_DIRECT``."""

SMALL = 64 << 10
"""A batch of at most :data:`SMALL_COUNT` tensors and so many bytes takes the reference: a lease, a
fence and the books cost the host more than the copies that are saved."""

SMALL_COUNT = 2
"""See :data:`SMALL`."""

GROW_PER_BATCH = 4
"""Most slots that one batch pins, so that no batch pays for all of them."""

WAIT_AT_MOST = 0.1
"""Seconds that a batch under way waits for slots of its own, in all, before the reference takes the
fields that are left."""


def backend_for(device: Any, pin_memory: Any) -> Backend | None:
    """The backend to stage through; ``None`` where the reference copies field by field."""
    if device is None or pin_memory is not True:
        return None
    backend = backend_of(device)
    return backend if backend is not None and has_room(backend) else None


def has_room(backend: Backend) -> bool:
    """Whether anything may be pinned for a device."""
    return arena_of(backend).cap > 0


def is_embeds(name: Any) -> bool:
    """Whether a field has embeddings: engines hand views of them on to caches that outlive the
    batch by many steps."""
    return isinstance(name, str) and name.endswith("_embeds")


class NoSlot(Exception):
    """No slot is free, and none became free in time."""


class Changed(Exception):
    """A leaf was changed since it was planned."""


class _Pageable:
    """Host memory in the place of a slot, for want of one."""

    fence = None

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.copies: list[tuple[int, int, int, int]] = []
        self.is_read = False

    def close(self) -> None:
        """Nothing to give back."""


class _Direct(NamedTuple):
    """A pinned leaf that is copied from where it lies, and where to."""

    part: int
    offset: int
    nbytes: int
    leaf: torch.Tensor
    dtype: torch.dtype
    shape: torch.Size


class Transfer:
    """One batch on its way: the fields of a plan that are staged."""

    def __init__(self, bound: "Bound", own: Sequence[bool | None]) -> None:
        plan, backend = bound.plan, bound.backend
        self._plan = plan
        self._backend = backend
        self._arena = arena_of(backend)
        self.pid = self._arena.pid
        self._parts = plan.lay_out(own)
        self.buffers: list[torch.Tensor] = []
        self._direct: list[_Direct] = []
        if self._parts[-1][1] >= DIRECT_FROM:
            self._direct += [
                _Direct(part, offset, nbytes, leaf, leaf.dtype, leaf.shape)
                for leaf, part, offset, nbytes, alone in plan.large_leaves(DIRECT_FROM)
                if (alone or self._arena.direct) and backend.is_pinned(leaf)
            ]
        runs = self._runs_beside_direct() if self._direct else self._parts_with_bytes()
        self._runs = deque(runs)
        self._grown = 0
        self._launched = 0
        self._pageable = False
        self._sent_until = 0
        self._sent = 0
        self._to_send = sum([stop - start for _, start, stop in runs])
        self._waited = 0.0
        self.fence: Fence | None = None
        """Behind the last copy from a slot; ``None`` if there was none, or others came after it."""
        self._direct_are_sent = not self._direct

    def _parts_with_bytes(self) -> list[tuple[int, int, int]]:
        """``(part, start, stop)`` of the host layout."""
        parts = enumerate(self._parts)
        return [(part, start, stop) for part, (start, stop) in parts if start < stop]

    def _runs_beside_direct(self) -> list[tuple[int, int, int]]:
        """``(part, start, stop)`` of the host layout, without what is copied directly."""
        skipped = sorted(
            (self._parts[one.part][0] + one.offset, one.nbytes) for one in self._direct
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
        # A multiple of the alignment is one of every item size.
        self.buffers = [self._backend.empty(_aligned(stop - start)) for start, stop in self._parts]

    def copy_direct(self) -> None:
        """Copies from pinned leaves where they lie.

        Raises:
            Changed: One of them was changed; nothing was copied.
        """
        for one in self._direct:
            leaf = one.leaf
            as_planned = (leaf.dtype, leaf.shape, leaf.is_contiguous())
            if as_planned != (one.dtype, one.shape, True) or not self._backend.is_pinned(leaf):
                raise Changed
        for one in self._direct:
            target = self.buffers[one.part][one.offset : one.offset + one.nbytes]
            source = one.leaf.detach().reshape(-1).view(torch.uint8)
            self._backend.copy(target, source, blocking=not self._backend.copies_are_ordered)
        self._direct_are_sent = True

    def run(self) -> None:
        """Fills and copies, until all is sent.

        Raises:
            NoSlot: No slot was free, or none became free in time. What was sent before is good.
            Changed: A leaf was changed. As above.
        """
        while self._runs:
            self.copy(self.fill())

    def fill_all(self) -> deque[Slot | _Pageable]:
        """Gathers all of it, into pageable memory where no slot is free."""
        filled: deque[Slot | _Pageable] = deque()
        try:
            while self._runs:
                filled.append(self.fill(or_pageable=True))
        except BaseException:
            for one in filled:
                one.close()
            raise
        return filled

    def fill(self, *, or_pageable: bool = False) -> Slot | _Pageable:
        """Gathers the next part of the layout into host memory, and notes what is to be copied."""
        filled = self._host_memory(or_pageable)
        memory, used = filled.memory, 0
        room = memory.numel()
        runs = self._runs
        try:
            while runs and used < room:
                part, start, stop = runs[0]
                taken = min(stop - start, room - used)
                if not self._plan.gather(memory, used, start, start + taken):
                    raise Changed
                filled.copies.append((part, start - self._parts[part][0], used, taken))
                if start + taken < stop:
                    runs[0] = (part, start + taken, stop)
                else:
                    runs.popleft()
                used = _aligned(used + taken)
        except BaseException:
            # Nor may the traceback keep what a trim is to unpin.
            del memory
            filled.close()
            raise
        return filled

    def _host_memory(self, or_pageable: bool) -> Slot | _Pageable:
        arena = self._arena
        if not self._pageable:
            slot = arena.lease()
            if slot is None and self._grown < GROW_PER_BATCH:
                slot = arena.grow()
                self._grown += slot is not None
            if slot is None and not arena.has_none and self._launched:
                slot = self._wait_for_slot()
            if slot is not None:
                return slot
            # Where memory can't be pinned, the reference would ask for it in vain too.
            if not (or_pageable or arena.refused):
                raise NoSlot
            self._pageable = True
        return _Pageable(sum([_aligned(stop - start) for _, start, stop in self._runs]))

    def _wait_for_slot(self) -> Slot | None:
        self._arena.count(waits=1)
        start = time.monotonic()
        try:
            while True:
                slot = self._arena.lease()
                if slot is not None or self._waited + time.monotonic() - start > WAIT_AT_MOST:
                    return slot
                time.sleep(50e-6)
        finally:
            self._waited += time.monotonic() - start

    def copy(self, filled: Slot | _Pageable) -> None:
        """Gives the device the copies from filled memory, and a fence behind them."""
        backend, memory = self._backend, filled.memory
        blocking = not backend.copies_are_ordered
        if type(filled) is _Pageable:
            blocking = blocking or not backend.pageable_copies_are_staged
        try:
            for part, offset, at, nbytes in filled.copies:
                target = self.buffers[part][offset : offset + nbytes]
                filled.is_read = True
                backend.copy(target, memory[at : at + nbytes], blocking=blocking)
                self._launched += 1
                self._sent += nbytes
                self._sent_until = self._parts[part][0] + offset + nbytes
        finally:
            del memory
            filled.close()
        self.fence = filled.fence

    def put(self, batch: dict[str, Any], own: Sequence[bool | None], left: str) -> dict[int, str]:
        """Puts fields into the batch, as tensors in the device's allocations. Returns those that
        were not sent whole, each with ``left`` as its reason."""
        staged = [k for k, choice in enumerate(own) if choice is not None]
        if not self._direct_are_sent:
            return dict.fromkeys(staged, left)
        sent = self._sent_until if self._sent < self._to_send else self._parts[-1][1]
        carve, buffers = self._plan.carve, self.buffers
        return {k: left for k in staged if not carve(k, buffers, sent, batch)}

    def finish(self) -> None:
        """Counts what was done."""
        nbytes = self._sent
        direct = self._direct if self._direct_are_sent else []
        if direct:
            nbytes += sum([one.nbytes for one in direct])
        copies = self._launched + len(direct)
        self._arena.count_batch(copies, len(direct), nbytes, pageable=self._pageable)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Bound:
    """What of a batch is bound for a device, and not there yet."""

    def __init__(
        self, plan: _core.DevicePlan, backend: Backend, declared: Mapping[Any, Field] | None
    ) -> None:
        self.plan = plan
        self.backend = backend
        self.fields = plan.fields
        self._declared = declared

    def _outlives(self, name: Any) -> bool:
        """Whether a field's batch may be kept when the others are gone."""
        declared = self._declared
        return is_embeds(name) or (declared is not None and bool(declared[name].outlives_batch))

    def choose(self) -> "Choice":
        """What becomes of each field."""
        if self.backend.is_capturing():
            return self.left("capturing")
        count, nbytes = self.plan.totals
        if count <= SMALL_COUNT and 0 < nbytes <= SMALL:
            return self.left("small")
        own: list[bool | None] = []
        reasons: dict[int, str] = {}
        for k, (name, is_list, smallest, single) in enumerate(self.fields):
            # The reference copies such leaves from where they are, and keeps their strides.
            may_be_left = single and (smallest >= DIRECT_FROM or not is_list)
            if may_be_left and all(map(self.backend.is_pinned, self.plan.first_leaves(k))):
                own.append(None)
                reasons[k] = "pinned_leaf"
            else:
                own.append(self._outlives(name))
        return Choice(own, reasons)

    def left(self, reason: str) -> "Choice":
        """All fields take the reference."""
        count = len(self.fields)
        return Choice([None] * count, dict.fromkeys(range(count), reason))

    def send(self, batch: dict[str, Any]) -> None:
        """Brings the fields to the device and puts them into the batch.

        The copies are given to the current stream and may not have run when this returns; whoever
        uses the tensors on another stream makes that one wait, as after any ``non_blocking`` copy.
        """
        own, reasons = self.choose()
        if len(reasons) < len(own):
            transfer = Transfer(self, own)
            transfer.allocate()
            left = "no_slot"
            try:
                transfer.copy_direct()
                transfer.run()
            except NoSlot:
                pass
            except Changed:
                left = "changed"
            reasons |= transfer.put(batch, own, left)
            transfer.finish()
        self.plan.count(len(own) - len(reasons))
        self.reduce(reasons, batch)

    def reduce(self, reasons: Mapping[int, str], batch: dict[str, Any]) -> None:
        """Leaves fields to the reference, each for its reason."""
        for k, reason in reasons.items():
            batch[self.fields[k][0]] = self.plan.reduce(k, reason)

    def explained(self, rows: list[Any]) -> list[Any]:
        """The rows of an explanation, with the reasons of what would not be staged after all."""
        reasons = {self.fields[k][0]: reason for k, reason in self.choose().reasons.items()}
        return [
            (*row[:2], "reference", 0, None, None, reasons[row[0]]) if row[0] in reasons else row
            for row in rows
        ]


class Choice(NamedTuple):
    """What becomes of the fields of a plan."""

    own: list[bool | None]
    """For each field whether it gets an allocation of its own, ``None`` if it takes the
    reference."""
    reasons: dict[int, str]
    """Of those that take the reference, why."""


class _Work(NamedTuple):
    """What of a batch is still to be done."""

    batch: dict[str, Any]
    bound: Bound | None
    own: list[bool | None]
    reasons: dict[int, str]
    transfer: Transfer | None
    filled: deque[Slot | _Pageable]


class Staged:
    """A batch in host memory that is ready to be copied: what :func:`mmcollate.stage` returns.

    It holds the items and slots of the arena until :meth:`to` or :meth:`close`; after :meth:`to`
    it holds the device's memory of the batch.
    """

    def __init__(self, batch: dict[str, Any], backend: Backend, bound: Bound | None) -> None:
        self._backend = backend
        self._fence: Fence | None = None
        self._tensors: list[torch.Tensor] = []
        own, reasons = Choice([], {}) if bound is None else bound.choose()
        transfer: Transfer | None = None
        filled: deque[Slot | _Pageable] = deque()
        if bound is not None and len(reasons) < len(own):
            transfer = Transfer(bound, own)
            try:
                filled = transfer.fill_all()
            except Changed:
                transfer = None
                own, reasons = bound.left("changed")
        # Whoever takes it out has it alone.
        self._work = [_Work(batch, bound, own, reasons, transfer, filled)]

    def to(self, device: Any = None) -> dict[str, Any]:
        """Gives the device the copies and returns the batch; once.

        The copies may not have run when this returns: kernels on the current stream come after
        them, for others see :meth:`wait`. If the device has no memory, torch's exception passes and
        this can be called again.

        Args:
            device: The device that was given to :func:`mmcollate.stage`, or ``None``.

        Raises:
            CollateValueError: It is another device.
            CollateRuntimeError: The batch was given to the device before, or closed; or the stream
                captures, and would read the slots again when it is replayed.
        """
        if device is not None and backend_of(device) is not self._backend:
            raise errors.CollateValueError(
                f"this batch was staged for {self._backend!r}, not for {device!r}"
            )
        try:
            work = self._work.pop()
        except IndexError:
            raise errors.CollateRuntimeError(
                "this batch was given to the device, or closed, before"
            ) from None
        batch, bound, own, reasons, transfer, filled = work
        capturing = self._backend.is_capturing()
        if transfer is not None and capturing:
            self._work.append(work)
            raise errors.CollateRuntimeError(
                "the stream captures; call to() before the capture, or stage() within it"
            )
        if transfer is not None and transfer.pid != os.getpid():
            raise errors.CollateRuntimeError(
                "this batch was staged in the process that this one was forked from"
            )
        try:
            if transfer is not None:
                transfer.allocate()
            if bound is not None:
                # Before anything is given up, for here the device may have no memory too.
                bound.reduce(reasons, batch)
        except BaseException:
            if transfer is not None:
                transfer.buffers = []
            self._work.append(work)
            raise
        changed = False
        if transfer is not None and bound is not None:
            try:
                transfer.copy_direct()
                while filled:
                    transfer.copy(filled.popleft())
            except Changed:
                pass
            finally:
                for one in filled:
                    one.close()
            late = transfer.put(batch, own, "changed")
            changed = bool(late)
            bound.reduce(late, batch)
            reasons |= late
            transfer.finish()
            self._tensors.extend(transfer.buffers)
        if bound is not None:
            bound.plan.count(len(own) - len(reasons))
        self._tensors.extend(_on_device(batch, bound, reasons))
        if not capturing:
            # All but the copies from slots was given before these.
            last = None if transfer is None or changed else transfer.fence
            self._fence = arena_of(self._backend).fence() if last is None else last
        return batch

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
            raise errors.CollateRuntimeError(
                "nothing was given to the device yet, or while the stream captured; call to() first"
            )
        if stream is None:
            self._fence.synchronize()
        else:
            fence = None if isinstance(self._fence, Passed) else self._fence
            self._backend.wait_on(stream, fence, self._tensors)

    def close(self) -> None:
        """Gives the slots back if the batch was not given to the device."""
        while self._work:
            for one in self._work.pop().filled:
                one.close()

    def __reduce__(self) -> Any:
        raise TypeError("a staged batch can't be copied or pickled: it holds slots of the arena")


def _on_device(
    batch: Mapping[Any, Any], bound: Bound | None, reasons: Mapping[int, str]
) -> Iterator[torch.Tensor]:
    """The tensors of a batch that a device has, but those that were staged: they are in buffers
    that are known."""
    fields = [] if bound is None else bound.fields
    # A fake device keeps them on the host.
    taken = {fields[k][0] for k in reasons}
    staged = {name for name, *_ in fields} - taken
    for name, value in batch.items():
        for leaf in iter_leaves(value) if name not in staged else ():
            is_plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
            if is_plain and (name in taken or not leaf.is_cpu):
                yield leaf


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
    """Gives memory back that is not in use now; returns how many bytes.

    Args:
        device: Whose pinned memory; that of torch's current accelerator, if there is one, and the
            warm pool's memory too, if ``None``.

    Raises:
        CollateValueError: Nothing is staged for such a device.
    """
    warm = _core.trim_warm() if device is None else 0
    if device is None and current() is None:
        return warm
    return warm + arena_of(staged_to(device)).trim()


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

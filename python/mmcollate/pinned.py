"""The arena: pinned memory with a hard cap, in slots that come back when a device has read them."""

import os
import threading
import time
import warnings
from typing import TypedDict

import torch

from mmcollate import _core, config, errors
from mmcollate.backends import Backend, Fence

POISON = 0xA5
"""What free slots are filled with under ``MMCOLLATE_DEBUG``."""

RETRY_AFTER = 60.0
"""Seconds after which a system that refused to pin is asked again."""

_MOST_SLOTS = 4096
"""More would make the search for a free one slow; with a larger cap, slots are larger."""

_process = os.getpid()


def _forked() -> None:
    global _process
    _process = os.getpid()


# To ask the system at each batch would take as long as leasing a slot does.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


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
    """What :func:`mmcollate.arena_stats` returns."""

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
    refused: bool
    """Whether the system refused to pin more, a short while ago."""


class Arena:
    """The pinned slots of one device in one process.

    ``rust/src/arena.rs`` keeps the books; here is the memory, and what proves that a slot is free.
    No lock is held while the device, or anything else that may run code of others, is called.
    """

    def __init__(self, backend: Backend, cap: int, slot_bytes: int) -> None:
        # torch rounds what it pins up to a power of two.
        slot_bytes = max(_floor_power(slot_bytes), _floor_power(cap) // _MOST_SLOTS)
        self.backend = backend
        self.pid = os.getpid()
        self.cap = cap
        # Read once: a look at the environment takes as long as all the books do.
        self.debug = config.debug()
        self.direct = config.direct()
        self._strict = config.strict_pin()
        self.slot_bytes = min(slot_bytes, _floor_power(cap)) or 1
        self.books = _core.Arena(self.slot_bytes, cap)
        self.slots: dict[int, torch.Tensor] = {}
        self.flying: dict[tuple[int, int], Fence] = {}
        self._refused_until = 0.0
        self._warned = False
        self._peak = 0
        # Of the sums alone; taken again by a signal handler that asks for them.
        self._lock = threading.RLock()
        self._sums = _Sums(
            batches=0,
            copies=0,
            direct_copies=0,
            bytes_copied=0,
            pageable_batches=0,
            refusals=0,
            waits=0,
        )

    @property
    def refused(self) -> bool:
        """Whether the system refused to pin more, a short while ago."""
        return time.monotonic() < self._refused_until

    @property
    def has_none(self) -> bool:
        """Whether there is no slot, and none can be had."""
        return not self.slots and self.refused

    def lease(self) -> "Slot | None":
        """Takes a slot that nobody writes to and no device reads; ``None`` if there is none."""
        slot = self._take()
        if slot is None:
            self.land()
            slot = self._take()
        return slot

    def _take(self) -> "Slot | None":
        pair = self.books.lease()
        if pair is None:
            return None
        slot = Slot(self, pair)
        if self.debug and not bool((slot.memory == POISON).all()):
            # Whoever wrote to it may do so again.
            slot.abandon()
            raise AssertionError(f"mmcollate: slot {pair[0]} was written to while it was free")
        return slot

    def grow(self) -> "Slot | None":
        """Pins one more slot and takes it; ``None`` if the cap or the system allows no more."""
        if self.refused:
            if self._strict:
                raise errors.CollateRuntimeError(
                    f"{self._without(self.slot_bytes)}; MMCOLLATE_STRICT_PIN is set"
                )
            return None
        pair = self.books.grow()
        if pair is None:
            return None
        settled = False
        try:
            self.slots[pair[0]] = self.backend.pinned(self.slot_bytes)
            self.books.settled(pair, True)
            settled = True
            return Slot(self, pair)
        except (RuntimeError, MemoryError) as error:
            if settled or not _is_refusal(error):
                raise
            self._refuse(error)
            return None
        finally:
            if not settled:
                self.slots.pop(pair[0], None)
                self.books.settled(pair, False)
            self._peak = max(self._peak, len(self.slots) * self.slot_bytes)

    def _refuse(self, error: Exception) -> None:
        self._refused_until = time.monotonic() + RETRY_AFTER
        self.count(refusals=1)
        message = f"{self._without(self.slot_bytes)} ({error})"
        if self._strict:
            raise errors.CollateRuntimeError(f"{message}; MMCOLLATE_STRICT_PIN is set") from error
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{message}; batches take slower ways where these do not do",
                RuntimeWarning,
                stacklevel=2,
            )

    def _without(self, nbytes: int) -> str:
        pinned = len(self.slots) * self.slot_bytes
        return f"mmcollate: can't pin {nbytes:,} bytes more than the {pinned:,} that are pinned"

    def land(self) -> None:
        """Takes back the slots whose fences have passed."""
        # An interrupt or another thread at any point leaves an entry too many, never one too few:
        # the books refuse to take a slot back twice.
        for pair in tuple(self.flying):
            fence = self.flying.get(pair)
            if fence is None or not _has_passed(fence):
                continue
            if self.debug and self.flying.pop(pair, None) is None:
                continue
            try:  # noqa: SIM105, as in `fly`
                self.free(pair)
            except RuntimeError:
                pass
            self.flying.pop(pair, None)

    def free(self, pair: tuple[int, int]) -> None:
        """Gives back a slot that no device reads.

        Raises:
            RuntimeError: It was given back before.
        """
        if self.debug:
            self.slots[pair[0]].fill_(POISON)
        self.books.release(pair)

    def fly(self, pair: tuple[int, int], fence: Fence) -> None:
        """Takes a slot back when a fence has passed; can be repeated."""
        self.flying[pair] = fence
        # Refused if it was said before, or if the fence has passed meanwhile. (A context manager
        # would take as long as all else here.)
        try:  # noqa: SIM105
            self.books.launch(pair)
        except RuntimeError:
            pass

    def fence(self) -> Fence:
        """A fence behind all that the stream was given."""
        try:
            return self.backend.fence()
        except Exception:
            # Nothing less than waiting for all proves now that a slot has been read.
            self.backend.synchronize()
            return Passed()

    def reserve(self, nbytes: int) -> int:
        """Pins slots until so many bytes are pinned, or no more can be; returns what is."""
        while len(self.slots) * self.slot_bytes < nbytes and not self.backend.is_capturing():
            slot = self.grow()
            if slot is None:
                break
            slot.close()
        return len(self.slots) * self.slot_bytes

    def trim(self) -> int:
        """Unpins the slots that are free; returns their bytes. While the stream captures, none."""
        if self.backend.is_capturing():
            return 0
        self.land()
        taken: list[Slot] = []
        while (pair := self.books.lease()) is not None:
            taken.append(Slot(self, pair))
        for slot in taken:
            slot.retire()
        self._refused_until = 0.0
        if taken:
            self.backend.free_pinned()
        return len(taken) * self.slot_bytes

    def count(self, **sums: int) -> None:
        """Adds to the sums."""
        with self._lock:
            for name, by in sums.items():
                self._sums[name] += by  # type: ignore[literal-required]

    def count_batch(self, copies: int, direct: int, nbytes: int, *, pageable: bool) -> None:
        """Adds a batch to the sums: its copies, those from pinned leaves among them, and bytes."""
        sums = self._sums
        with self._lock:
            sums["batches"] += 1
            sums["copies"] += copies
            sums["direct_copies"] += direct
            sums["bytes_copied"] += nbytes
            sums["pageable_batches"] += pageable

    def stats(self) -> ArenaStats:
        """See :class:`ArenaStats`."""
        if not self.backend.is_capturing():
            self.land()
        _, free, leased, in_flight = self.books.census()
        with self._lock:
            return {
                "cap_bytes": self.cap,
                "slot_bytes": self.slot_bytes,
                "pinned_bytes": len(self.slots) * self.slot_bytes,
                "peak_pinned_bytes": self._peak,
                "free": free,
                "leased": leased,
                "in_flight": in_flight,
                "refused": self.refused,
                **self._sums,
            }


class Slot:
    """Exclusive use of one slot of the arena, until :meth:`close`; dropping it closes it too."""

    _pair: tuple[int, int] | None = None
    _memory: torch.Tensor | None = None
    fence: Fence | None = None
    """Behind all that the device was given from it; made when it is given back."""
    is_read = False
    """To be set before the device is given a copy from it."""

    def __init__(self, arena: Arena, pair: tuple[int, int]) -> None:
        # These two first: with them, one that an interrupt leaves half made can be closed.
        self._arena = arena
        self._pair = pair
        self._memory = arena.slots[pair[0]]
        self.copies: list[tuple[int, int, int, int]] = []
        """What its holder is to give the device of it: ``(part of the batch, offset in the part,
        offset in the memory, bytes)``."""

    @property
    def memory(self) -> torch.Tensor:
        """``uint8``, ``(slot_bytes,)``."""
        assert self._memory is not None, "a slot that was given back"
        return self._memory

    def close(self) -> None:
        """Gives the slot back: at once, or if the device was given copies from it, when a fence
        behind them has passed."""
        arena, pair = self._arena, self._pair
        # Of a process that this one was forked from, it is not this one's to give back.
        if pair is None or arena.pid != os.getpid():
            return
        # An interrupt anywhere below leaves what `__del__` can finish.
        if self.is_read:
            if self.fence is None:
                self.fence = arena.fence()
            arena.fly(pair, self.fence)
        else:
            arena.free(pair)
        self._pair = self._memory = None

    def abandon(self) -> None:
        """Leaves the slot leased for good."""
        self._pair = self._memory = None

    def retire(self) -> None:
        """Takes the slot out of use; its memory goes."""
        pair = self._pair
        assert pair is not None
        self._pair = self._memory = None
        self._arena.slots.pop(pair[0], None)
        self._arena.books.retire(pair)

    def __del__(self) -> None:
        # Nearly always closed by now. At interpreter exit, even modules may be gone.
        if self._pair is not None:
            try:  # noqa: SIM105
                self.close()
            except BaseException:
                pass


class Passed:
    """The fence of what was waited for."""

    def query(self) -> bool:
        """It has passed."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _has_passed(fence: Fence) -> bool:
    try:
        return fence.query()
    except Exception:  # a device in trouble has read nothing for sure
        return False


def _is_refusal(error: Exception) -> bool:
    """Whether it says that there is no more to pin, and not that something is broken."""
    if isinstance(error, RecursionError):
        return False
    broken = getattr(torch, "AcceleratorError", None)
    return not (broken and isinstance(error, broken) and "memory" not in str(error))


def _floor_power(value: int) -> int:
    return 1 << (value.bit_length() - 1) if value > 0 else 0


def arena_of(backend: Backend) -> Arena:
    """The arena of a device in this process; made when it is first asked for."""
    try:
        arena: Arena = backend.arenas[_process]
    except (AttributeError, KeyError):
        # Those of the processes that this one was forked from stay: never used, and never freed,
        # for their memory is not this one's to unpin. Of threads that come here at one time, all
        # take the first one's; without a lock, which a forked child could find taken.
        arenas: dict[int, Arena] = backend.__dict__.setdefault("arenas", {})
        fresh = Arena(backend, config.pinned_max(), config.staging_chunk())
        arena = arenas.setdefault(_process, fresh)
    return arena

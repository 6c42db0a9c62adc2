"""What tensors are where while an audit runs, and what becomes of each operation on them.

Every operation comes to :meth:`Session.dispatch`: it runs on the tensors held, and what comes out
is wrapped again: on the device if anything that went in was, with all fields of what went in. On
the way :class:`~mmcollate.audit.rules.Rules` say what a device would have done.

A :class:`Session` lasts for one audit, so that what a model remembers from one batch to the next is
known again. At its end all tensors that it made become plain ones of the CPU.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from mmcollate.audit import leftovers
from mmcollate.audit.arrays import Source, known_sources, traced_array
from mmcollate.audit.leftovers import Adopted
from mmcollate.audit.observe import Recorder
from mmcollate.audit.places import Places, is_device
from mmcollate.audit.rules import (
    COPIES,
    CPU,
    DEVICE,
    HOST_SIZES,
    VALUES_UNUSED,
    Memory,
    Operand,
    Rules,
    decided_by,
    fields_of,
)
from mmcollate.audit.saved import Saved, storage_of, values_of
from mmcollate.audit.virtual import VirtualTensor

_numbers = itertools.count()


class To(NamedTuple):
    """What ``Tensor.to`` was asked for."""

    device: torch.device | None
    dtype: torch.dtype | None
    non_blocking: bool
    copy: bool
    memory_format: torch.memory_format


class Session:
    """Makes virtual tensors and runs their operations."""

    recorder: Recorder
    rules: Rules
    _device_fields: frozenset[str]

    def __init__(self) -> None:
        self.ended = False
        self.made: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        """The virtual tensors that are alive, by id."""
        self._number = next(_numbers)
        self._caller = ""
        self._adopted: Adopted = leftovers.recall()
        """Storages of plain tensors that virtual ones were written to, and of what earlier audits
        left."""
        self.standing: dict[int, tuple[torch.Tensor, Memory]] = {}
        """Plain tensors that are on the device themselves, by id: the model's parameters."""
        self.places = Places(self._frames)
        self._exported: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}
        """Storages that arrays use."""
        self.saved = Saved()
        """Memory of the model's, as it was."""
        self._mode = _Mode(self)

    def _frames(self) -> Iterator[FrameType]:
        return self.recorder.frames()

    def start(self, recorder: Recorder, device_fields: frozenset[str]) -> None:
        """A forward starts, of which this recorder is told; these fields are not kept."""
        self.recorder, self.rules = recorder, Rules(recorder)
        self._device_fields = device_fields

    def end(self) -> None:
        """What is left of virtual tensors becomes plain."""
        self.ended = True
        left = [x for x in self.made.values() if isinstance(x, VirtualTensor)]
        found = [(x._memory, x._held.untyped_storage()) for x in left]
        known = [x for x in (*self._adopted.values(), *found) if not self.saved.was_guarded(x[1])]
        # To which there must be no weak references.
        self.made.clear()
        # Views before what they are views of.
        while len(rest := [x for x in left if not x.become_plain()]) < len(left):
            left = rest
        leftovers.remember(known)
        self._adopted.clear()
        self._exported.clear()

    # Tensors and places

    def operand(self, tensor: torch.Tensor, argument: str = "", written: bool = False) -> Operand:
        """A tensor with what is known of it."""
        memory, held = None, tensor
        if isinstance(tensor, VirtualTensor):
            held = tensor._held
            # That of another session is one that could not become plain.
            if tensor._session is self:
                return Operand(tensor, argument, held, tensor._memory, written)
        if id(tensor) in self.standing:
            memory = self.standing[id(tensor)][1]
        elif self._adopted and (key := storage_of(held)) in self._adopted:
            memory = self._adopted[key][0]
        return Operand(tensor, argument, held, memory, written)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """``Tensor.device``: an object that is known again when something is made there."""
        op = self.operand(tensor)
        return self.places.answer(DEVICE if op.on_device else op.held.device, op.decided_by)

    def asked(self, tensor: torch.Tensor) -> torch.device:
        """:meth:`device_of`, for the model: what it makes of the answer is recognised."""
        op, device = self.operand(tensor), self.device_of(tensor)
        self.rules.ask("Tensor.device", op)
        self.places.asked(device, op.decided_by)
        return device

    def leaves(self, tensor: torch.Tensor, label: str) -> None:
        """A tensor is there when the forward is over: in its result, or in what the model keeps."""
        op = self.operand(tensor)
        for name in sorted(op.fields):
            if op.on_device:
                self.recorder.device_use(name, label, stack=())
            else:
                self.recorder.left.setdefault(name, label)

    def _made_of(self, operands: Iterable[Operand], on_device: bool) -> Memory:
        """Of a result. What the host read of a field of the device, and brings back there, is the
        host's: the field itself was not needed there."""
        made = Memory(on_device)
        for op in operands:
            brought = self._device_fields if on_device and not op.on_device else frozenset()
            made.fields |= op.fields - brought
            made.placed_by |= op.decided_by - brought
        made.placed_by -= made.fields
        return made

    def place(self, held: torch.Tensor, memory: Memory) -> torch.Tensor:
        """A result: wrapped if there is anything to know about it."""
        if not (memory.on_device or memory.fields or memory.placed_by or memory.pinned):
            return held
        key = storage_of(held)
        if held.layout is torch.strided and not (held.is_nested and key):
            return VirtualTensor.of(self, held, memory)
        if key:
            # Has no shape, or no memory, that a wrapper could have.
            self._adopted[key] = memory, values_of(held).untyped_storage()
        return held

    def restore_saved(self) -> None:
        """Undoes what was written to guarded memory; nothing is guarded then."""
        for key in self.saved.put_back():
            self._adopted.pop(key, None)

    # Modes

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While active, the calling thread's operations come here."""
        with self._mode:
            yield

    @contextlib.contextmanager
    def called(self, name: str) -> Iterator[None]:
        """While a torch function runs that Python called: names what its operations read."""
        before, self._caller = self._caller, self._caller or name
        try:
            yield
        finally:
            self._caller = before

    # Operations

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs one operation on what its tensors hold."""
        aliases = {argument.name: argument.alias_info for argument in func._schema.arguments}
        arguments = {**dict(zip(aliases, args, strict=False)), **kwargs}
        operands = [
            self.operand(leaf, name, aliases[name] is not None and aliases[name].is_write)
            for name, value in arguments.items()
            for leaf in tree_leaves(value)
            if isinstance(leaf, torch.Tensor)
        ]
        target = arguments.get("device")
        if not is_device(target) and all(op.memory is None for op in operands):
            for op in operands:
                if op.written:
                    self.saved.before_write(op.held)
            return func(*args, **kwargs)
        if any(is_traceable_wrapper_subclass(op.tensor) for op in operands):
            # Such as nested tensors: they take themselves apart, into virtual ones.
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        nested = any(op.held.is_nested for op in operands)
        if func.namespace == "aten" and not nested and func._can_decompose():
            # Only inference mode leaves these whole; nested tensors have kernels of their own.
            with self._mode:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name == "_to_copy":
            return self._to_copy(args[0], str(func), **kwargs)
        if name in COPIES:
            self._tell_copies(str(func), operands, bool(arguments.get("non_blocking")))
        elif name not in VALUES_UNUSED:
            # Nested tensors bring sizes along, which stay on the CPU.
            strict = func.namespace in ("aten", "prims") and not name.startswith("_nested")
            self.rules.operation(
                str(func),
                name,
                operands,
                arguments,
                caller=self._caller,
                strict=strict,
                scalars=_is_pointwise(func.namespace, name),
            )
        return self._run(func, name, operands, target, args, kwargs)

    def _tell_copies(self, label: str, operands: Sequence[Operand], non_blocking: bool) -> None:
        targets = [op for op in operands if op.argument in ("self", "out")]
        sources = [op for op in operands if op.argument == "src"]
        for target, source in zip(targets, sources, strict=False):
            self.rules.transfer(label, source, target.on_device, target.held.nbytes, non_blocking)

    def _run(
        self,
        func: Any,
        name: str,
        operands: Sequence[Operand],
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if target is not None:
            on_device = is_device(target)
        else:
            deciding = operands[:1] if name in COPIES else operands
            on_device = any(op.on_device for op in deciding)
        held_args, held_kwargs = tree_map(_unwrapped, (list(args), dict(kwargs)))
        written = [op for op in operands if op.written]
        for op in written:
            self.saved.before_write(op.held)
        result = func(*held_args, **held_kwargs)
        memory = self._made_of(operands, on_device)
        for op in written:
            self._wrote(op, memory, func.namespace == "aten")
        if name in VALUES_UNUSED:
            placed_by = decided_by(operands) if target is None else set()
            memory = Memory(on_device, set(), placed_by)
        if name in HOST_SIZES:
            result, sizes = result
            stems = fields_of(op for op in operands if op.argument == HOST_SIZES[name])
            made = self._wrapped(result, operands, memory)
            return made, self.place(sizes, Memory(False, stems))
        return self._wrapped(result, operands, memory)

    def _wrote(self, op: Operand, memory: Memory, by_torch: bool) -> None:
        """What is known of a tensor that results of an operation were written to."""
        if op.memory is not None:
            op.memory.fields |= memory.fields
        elif memory.fields or memory.on_device:
            # A plain tensor can't be made a virtual one; its memory is followed instead. What
            # torch's operations write to on the CPU stays there. Others were given it only because
            # they run without a device.
            storage = op.held.untyped_storage()
            adopted = memory.copy()
            adopted.on_device = memory.on_device and not by_torch
            self._adopted[storage._cdata] = adopted, storage
        if isinstance(op.tensor, VirtualTensor):
            _match_shape(op.tensor)

    def _wrapped(self, result: Any, operands: Sequence[Operand], memory: Memory) -> Any:
        """Results: an operand as itself, a view with what is known of its memory, what is new with
        a copy of ``memory``."""
        same = {id(op.held): op.tensor for op in operands}
        shared = {storage_of(op.held): op.memory for op in operands}

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, VirtualTensor):
                return value
            if id(value) in same:
                return same[id(value)]
            return self.place(value, shared.get(storage_of(value)) or memory.copy())

        return tree_map(wrapped, result)

    def opaque(
        self,
        func: Callable[..., Any],
        label: str,
        args: Any,
        kwargs: Any,
        *,
        strict: bool = True,
        scalars: bool = True,
    ) -> Any:
        """Runs a function as one operation that returns fresh tensors.

        Args:
            func: Called with what the tensors hold.
            label: For events.
            args: Its arguments.
            kwargs: Its keyword arguments.
            strict: Whether plain tensors on the CPU are refused by a device.
            scalars: Whether tensors without dimensions may be on the CPU.
        """
        leaves = tree_leaves((args, kwargs))
        operands = [self.operand(x) for x in leaves if isinstance(x, torch.Tensor)]
        self.rules.operation(label, "", operands, {}, caller="", strict=strict, scalars=scalars)
        held_args, held_kwargs = tree_map(_unwrapped, (list(args), dict(kwargs)))
        result = func(*held_args, **held_kwargs)
        memory = self._made_of(operands, any(op.on_device for op in operands))
        return self._wrapped(result, operands, memory)

    # What has no operation of its own

    def read(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """The CPU tensor held, for the host to read."""
        op = self.operand(tensor)
        self.rules.read(label, op)
        return op.held

    def as_array(self, tensor: torch.Tensor, label: str, *, force: bool = False) -> Any:
        """``Tensor.numpy``: an array of the same memory that knows the fields."""
        op = self.operand(tensor)
        held = op.held
        if op.on_device:
            held = held.clone()
        if op.on_device and not force:
            self.rules.refused_place(label, op)
        else:
            self.rules.read(label, op)
        # The array may be written to.
        self.saved.before_write(held)
        array = held.numpy(force=force)
        if not op.fields:
            return array
        self._exported[storage_of(held)] = held, frozenset(op.fields)
        return traced_array(array, {Source(self._number, name) for name in op.fields})

    def fields_of_array(self, array: Any) -> frozenset[str]:
        """The fields that an array knows, or that a tensor does whose memory it uses."""
        while array is not None:
            if (sources := known_sources(array)) is not None:
                return frozenset(x.field for x in sources if x.session == self._number)
            if isinstance(array, torch.Tensor):
                return self._exported.get(storage_of(array), (None, frozenset()))[1]
            array = getattr(array, "base", None)
        return frozenset()

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``Tensor.to``."""
        asked = self._parse_to(*args, **kwargs)
        if asked.device is not None and asked.device.type not in ("cpu", "cuda"):
            return self.operand(tensor).held.to(*args, **kwargs)
        return self.move(tensor, asked.device, "Tensor.to", **_without_device(asked))

    def _parse_to(self, *args: Any, **kwargs: Any) -> To:
        """The arguments of ``Tensor.to`` in all its forms."""
        given, left = dict(kwargs), list(args)
        if left and isinstance(left[0], torch.Tensor):
            given["other"] = left.pop(0)
        elif left and isinstance(left[0], torch.dtype):
            given["dtype"] = left.pop(0)
        elif left:
            given["device"] = left.pop(0)
            if left and (left[0] is None or isinstance(left[0], torch.dtype)):
                given["dtype"] = left.pop(0)
        given.update(zip(("non_blocking", "copy"), left, strict=False))
        if (other := given.get("other")) is not None:
            given["device"], given["dtype"] = self.device_of(other), other.dtype
        return To(
            self.places.resolve(given.get("device")),
            given.get("dtype"),
            bool(given.get("non_blocking")),
            bool(given.get("copy")),
            given.get("memory_format", torch.preserve_format),
        )

    def move(
        self,
        tensor: torch.Tensor,
        device: torch.device | None,
        label: str,
        *,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        """What ``Tensor.to`` returns: the tensor itself if there is nothing to do, else a copy."""
        op = self.operand(tensor)
        to_device = op.on_device if device is None else is_device(device)
        moved = to_device != op.on_device
        held = op.held.to(dtype=dtype, copy=copy or moved, memory_format=memory_format)
        self.rules.touch(op)
        if held is op.held:
            return tensor
        self.rules.transfer(label, op, to_device, held.nbytes, non_blocking)
        placed_by = self.places.fields_behind(device) if moved else op.decided_by
        fields = self._made_of([op], to_device).fields
        return self.place(held, Memory(to_device, fields, placed_by - fields))

    def _to_copy(self, tensor: torch.Tensor, label: str, **kwargs: Any) -> torch.Tensor:
        layout, device = kwargs.pop("layout", None), kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        if layout not in (None, torch.strided) or (device is not None and device.type == "meta"):
            held = self.operand(tensor).held
            return torch.ops.aten._to_copy(held, layout=layout, device=device, **kwargs)  # type: ignore[no-any-return]
        if kwargs.get("memory_format") is None:
            kwargs["memory_format"] = torch.preserve_format
        return self.move(tensor, device, self._caller or label, copy=True, **kwargs)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """``Tensor.pin_memory``: a copy that says it is pinned."""
        op = self.operand(tensor)
        if op.on_device:
            raise RuntimeError(f"cannot pin {op}: only dense CPU tensors can be pinned")
        if op.memory is not None and op.memory.pinned:
            return tensor
        held = op.held.clone(memory_format=torch.contiguous_format)
        memory = Memory(False, set(op.fields), op.decided_by - op.fields, pinned=True)
        return VirtualTensor.of(self, held, memory)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    # torch starts CUDA for a factory's sake, in code of its own too, unless a mode is of this kind.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._session.dispatch(func, args, kwargs or {})


@functools.lru_cache(maxsize=4096)
def _is_pointwise(namespace: str, name: str) -> bool:
    """Whether torch says so of any form of an operation; not all that are in place have the tag."""
    packets = (getattr(getattr(torch.ops, namespace), x, None) for x in (name, name[:-1]))
    return any(
        torch.Tag.pointwise in getattr(packet, overload).tags
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
    )


def _without_device(asked: To) -> dict[str, Any]:
    return {name: value for name, value in asked._asdict().items() if name != "device"}


def _unwrapped(value: Any) -> Any:
    if isinstance(value, VirtualTensor):
        return value._held
    return CPU if is_device(value) else value


def _match_shape(tensor: VirtualTensor) -> None:
    """After an operation that changes a tensor's own shape: the wrapper's is as that held."""
    held = tensor._held
    if tensor.shape != held.shape or tensor.stride() != held.stride():
        with no_dispatch():
            tensor.as_strided_(held.shape, held.stride(), held.storage_offset())

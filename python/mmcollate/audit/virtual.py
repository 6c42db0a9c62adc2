"""Virtual devices: tensors that hold real data on the CPU and say that they live on ``cuda:0``.

A :class:`VirtualTensor` is one of two things. One *on the device* is a wrapper: it has the shape,
strides and dtype of the CPU tensor that it holds, answers ``cuda:0``, and has no memory that
anything could read behind its back. One *on the CPU* shares its memory with the tensor that it
holds, and is there to be followed. Both know the fields from which their values stem.

Every operation comes to :meth:`Session.dispatch`: it runs on the tensors held, and what comes out
is wrapped again: on the device if anything that went in was, with all fields of what went in. On
the way :class:`~mmcollate.audit.rules.Rules` say what a device would have done.

What never becomes an operation, or starts CUDA before it does (``tolist``, ``numpy``,
``to("cuda")``, factories), is caught by ``interception.py``.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mmcollate.audit.arrays import known_fields, traced_array
from mmcollate.audit.observe import Recorder
from mmcollate.audit.rules import (
    COPIES,
    CPU,
    CPU_RESULTS,
    DEVICE,
    VALUES_UNUSED,
    Memory,
    Operand,
    Rules,
    decided_by,
    fields_of,
)

_ANY_SIZE = 1 << 62


class VirtualTensor(torch.Tensor):
    """A tensor of a :class:`Session`; see the module."""

    _session: "Session"
    _held: torch.Tensor
    _memory: Memory
    field_name: str | None = None
    """Of a field's own tensor, not of what is made of it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(session: "Session", held: torch.Tensor, memory: Memory) -> "VirtualTensor":
        """Wraps a CPU tensor; no copy, the wrapper keeps it alive."""
        # In inference mode torch refuses to make tensors of these kinds.
        with torch.inference_mode(False):
            if memory.on_device:
                made = torch.Tensor._make_wrapper_subclass(
                    VirtualTensor,
                    held.shape,
                    strides=held.stride(),
                    storage_offset=held.storage_offset(),
                    dtype=held.dtype,
                    layout=held.layout,
                    device=DEVICE,
                    # Operations that give a tensor a larger shape look whether there is memory.
                    storage_size=_ANY_SIZE,
                )
            else:
                made = torch.Tensor._make_subclass(VirtualTensor, held)
        made._session, made._held, made._memory = session, held, memory
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Where no mode is active: in other threads, and of tensors that outlive their session.
        owners = (x for x in tree_leaves((args, kwargs)) if isinstance(x, VirtualTensor))
        return next(owners)._session.dispatch(func, args, kwargs or {})

    # What torch does without an operation, or would refuse to do for a subclass.

    def tolist(self) -> Any:
        return self._session.read(self, "Tensor.tolist").tolist()

    def item(self) -> Any:
        return self._session.read(self, "Tensor.item").item()

    def __bool__(self) -> bool:
        return bool(self._session.read(self, "Tensor.__bool__"))

    def __int__(self) -> int:
        return int(self._session.read(self, "Tensor.__int__"))

    def __float__(self) -> float:
        return float(self._session.read(self, "Tensor.__float__"))

    def __complex__(self) -> complex:
        return complex(self._session.read(self, "Tensor.__complex__"))

    def __index__(self) -> int:
        return self._session.read(self, "Tensor.__index__").__index__()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{self._session.read(self, 'Tensor.__repr__')!r} on {self.device}"

    def __format__(self, spec: str) -> str:
        return format(self._session.read(self, "Tensor.__format__"), spec)

    def numpy(self, *, force: bool = False) -> Any:
        return self._session.as_array(self, "Tensor.numpy", force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self._session.as_array(self, "Tensor.__array__")
        if dtype is not None:
            array = array.astype(dtype, copy=False)
        return array.copy() if copy else array

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self._memory.on_device:
            raise BufferError("a virtual tensor is on no real device: no other library can read it")
        return self._session.read(self, "Tensor.__dlpack__").__dlpack__(**kwargs)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._session.to(self, *args, **kwargs)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        return self._session.move(
            self, DEVICE, "Tensor.cuda", non_blocking=non_blocking, memory_format=memory_format
        )

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        return self._session.move(self, CPU, "Tensor.cpu", memory_format=memory_format)

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        return self._session.pin(self)

    def is_pinned(self, device: Any = None) -> bool:
        return self._memory.pinned

    def record_stream(self, stream: Any) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._held.untyped_storage()

    def data_ptr(self) -> int:
        return self._held.data_ptr()


class To(NamedTuple):
    """What ``Tensor.to`` was asked for."""

    device: torch.device | None
    dtype: torch.dtype | None
    non_blocking: bool
    copy: bool
    memory_format: torch.memory_format


class Session:
    """Makes virtual tensors and runs their operations."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.rules = Rules(recorder)
        self._caller = ""
        self._adopted: dict[int, tuple[Memory, torch.UntypedStorage]] = {}
        """Storages of plain tensors that virtual ones were written to."""
        self._devices: dict[int, tuple[torch.device, set[str]]] = {}
        """What tensors answered when asked where they are, with the fields behind."""
        self._exported: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}
        """Storages that arrays use."""
        self._guarded: set[int] = set()
        self._saved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._mode = _Mode(self)

    # Tensors and places

    def operand(self, tensor: torch.Tensor, argument: str = "") -> Operand:
        """A tensor with what is known of it."""
        if isinstance(tensor, VirtualTensor):
            return Operand(tensor, argument, tensor._held, tensor._memory)
        memory = None
        if self._adopted and (key := _storage_of(tensor)) in self._adopted:
            memory = self._adopted[key][0]
        return Operand(tensor, argument, tensor, memory)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """``Tensor.device``: an object that is known again when something is made there."""
        op = self.operand(tensor)
        place = DEVICE if op.on_device else op.held.device
        device = torch.device(place.type, place.index)
        if op.decided_by:
            self._devices[id(device)] = device, op.decided_by
        return device

    def placed_by(self, device: Any) -> set[str]:
        """The fields behind a tensor that answered with this object; a new set."""
        return set(self._devices[id(device)][1]) if id(device) in self._devices else set()

    def place(self, held: torch.Tensor, memory: Memory) -> torch.Tensor:
        """A result: wrapped if there is anything to know about it."""
        known = memory.on_device or memory.fields or memory.placed_by or memory.pinned
        if not known or held.layout is not torch.strided:
            return held
        return VirtualTensor.of(self, held, memory)

    # Memory that has to be as before

    def guard(self, tensor: torch.Tensor) -> None:
        """Has a tensor's memory saved before an operation writes to it."""
        self._guarded.add(_storage_of(tensor))

    def restore_guarded(self) -> None:
        """Undoes what was written to guarded memory."""
        for storage, saved in self._saved:
            storage.copy_(saved)
        self._saved.clear()

    def _before_write(self, held: torch.Tensor) -> None:
        if (key := _storage_of(held)) in self._guarded:
            self._guarded.remove(key)
            storage = held.untyped_storage()
            self._saved.append((storage, storage.clone()))  # type: ignore[no-untyped-call]

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
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        operands = [
            self.operand(leaf, name)
            for name, value in arguments.items()
            for leaf in tree_leaves(value)
            if isinstance(leaf, torch.Tensor)
        ]
        if not is_device(kwargs.get("device")) and all(op.memory is None for op in operands):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "aten" and func._can_decompose():
            # Only inference mode leaves these whole.
            with self._mode:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name == "_to_copy":
            return self._to_copy(args[0], str(func), **kwargs)
        if name in COPIES:
            self._tell_copies(str(func), operands, bool(arguments.get("non_blocking")))
        elif name not in VALUES_UNUSED:
            strict = func.namespace in ("aten", "prims")
            self.rules.operation(
                str(func), name, operands, arguments, caller=self._caller, strict=strict
            )
        return self._run(func, name, operands, args, kwargs)

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
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        target = kwargs.get("device")
        on_device = any(op.on_device for op in operands) if target is None else is_device(target)
        held_args, held_kwargs = tree_map(_unwrapped, (list(args), dict(kwargs)))
        written = _written(func, operands)
        for op in written:
            self._before_write(op.held)
        result = func(*held_args, **held_kwargs)
        memory = Memory(on_device, fields_of(operands))
        memory.placed_by = decided_by(operands) - memory.fields
        for op in written:
            self._wrote(op, memory, func.namespace == "aten")
        if name in VALUES_UNUSED:
            placed_by = decided_by(operands) if target is None else set()
            memory = Memory(on_device, set(), placed_by)
        if name in CPU_RESULTS:
            results, at = list(result), CPU_RESULTS[name]
            results[at] = self.place(results[at], Memory(False, set(memory.fields)))
            result = tuple(results)
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
        shared = {_storage_of(op.held): op.memory for op in operands}

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, VirtualTensor):
                return value
            if id(value) in same:
                return same[id(value)]
            return self.place(value, shared.get(_storage_of(value)) or memory.copy())

        return tree_map(wrapped, result)

    def opaque(
        self, func: Callable[..., Any], label: str, args: Any, kwargs: Any, *, strict: bool = True
    ) -> Any:
        """Runs a function as one operation that returns fresh tensors.

        Args:
            func: Called with what the tensors hold.
            label: For events.
            args: Its arguments.
            kwargs: Its keyword arguments.
            strict: Whether plain tensors on the CPU are refused by a device.
        """
        leaves = tree_leaves((args, kwargs))
        operands = [self.operand(x) for x in leaves if isinstance(x, torch.Tensor)]
        self.rules.operation(label, "", operands, {}, caller="", strict=strict)
        held_args, held_kwargs = tree_map(_unwrapped, (list(args), dict(kwargs)))
        result = func(*held_args, **held_kwargs)
        memory = Memory(any(op.on_device for op in operands), fields_of(operands))
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
            self.rules.refused_read(label, op)
        else:
            self.rules.read(label, op)
        array = held.numpy(force=force)
        if not op.fields:
            return array
        self._exported[_storage_of(held)] = held, frozenset(op.fields)
        return traced_array(array, op.fields)

    def fields_of_array(self, array: Any) -> frozenset[str]:
        """The fields that an array knows, or that a tensor does whose memory it uses."""
        while array is not None:
            if (fields := known_fields(array)) is not None:
                return fields
            if isinstance(array, torch.Tensor):
                return self._exported.get(_storage_of(array), (None, frozenset()))[1]
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
            as_device(given.get("device")),
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
        placed_by = self.placed_by(device) if moved else op.decided_by
        return self.place(held, Memory(to_device, set(op.fields), placed_by - op.fields))

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


def is_device(device: Any) -> bool:
    """Whether this is the virtual device: a ``torch.device`` of CUDA, whatever its index."""
    return isinstance(device, torch.device) and device.type == "cuda"


def as_device(device: Any) -> torch.device | None:
    """A device however it is named; a bare number is one of the accelerator's."""
    if device is None or isinstance(device, torch.device):
        return device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _without_device(asked: To) -> dict[str, Any]:
    return {name: value for name, value in asked._asdict().items() if name != "device"}


def _unwrapped(value: Any) -> Any:
    if isinstance(value, VirtualTensor):
        return value._held
    return CPU if is_device(value) else value


def _written(func: Any, operands: Iterable[Operand]) -> list[Operand]:
    """The tensors that an operation writes to."""
    names = {
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return [op for op in operands if op.argument in names]


def _storage_of(tensor: torch.Tensor) -> int:
    """Which storage this is, for as long as it lives; 0 if it has none."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def _match_shape(tensor: VirtualTensor) -> None:
    """After an operation that changes a tensor's own shape: the wrapper's is as that held."""
    held = tensor._held
    if tensor.shape != held.shape or tensor.stride() != held.stride():
        with no_dispatch():
            tensor.as_strided_(held.shape, held.stride(), held.storage_offset())

"""What of torch has to be caught before it becomes an operation: it would start CUDA, or refuse.

:class:`Interception` stands between Python and torch's functions: it answers for plain tensors what
:class:`~mmcollate.audit.virtual.VirtualTensor` answers itself, and runs factories for the virtual
device on the CPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from mmcollate.audit.arrays import known_sources
from mmcollate.audit.places import is_device
from mmcollate.audit.rules import CPU, DEVICE, Memory
from mmcollate.audit.session import Session
from mmcollate.audit.virtual import VirtualTensor


class Interception(TorchFunctionMode):
    """Calls of torch from Python, while active, in the calling thread."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._functorch.peek_interpreter_stack() is not None:
            # Inside vmap and the like tensors are batches of others; torch takes them apart first.
            return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self._session, func, *args, **kwargs)
        with self._session.called(name_of(func)):
            device = self._session.places.resolve(kwargs.get("device"))
            if (
                kwargs.get("pin_memory")
                or is_device(device)
                or self._session.places.fields_behind(device)
            ):
                return _make(self._session, func, args, {**kwargs, "device": device})
            try:
                return func(*args, **kwargs)
            except (AssertionError, NotImplementedError, RuntimeError) as error:
                # torch looked at the devices before there was an operation.
                refused = _refuses_a_mixture(error)
                if not refused and "from the 'CPU' backend" not in str(error):
                    raise
                return self._session.opaque(func, name_of(func), args, kwargs, scalars=not refused)


def _refuses_a_mixture(error: Exception) -> bool:
    text = str(error)
    return "on the same device" in text or "all tensors to have the same device" in text


@functools.lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """``Tensor.add``, ``torch.cat``, ``torch.nn.functional.pad``."""
    name = getattr(func, "__name__", repr(func))
    owner = getattr(func, "__objclass__", None) or getattr(func, "__self__", None)
    if isinstance(owner, type) or getattr(torch.Tensor, name, None) is func:
        return f"Tensor.{name}"
    module = getattr(func, "__module__", None) or "torch"
    return f"{module}.{name}" if module.startswith("torch.nn") else f"torch.{name}"


def _make(session: Session, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs a factory on the CPU; what it makes stems from no field."""
    device = kwargs.get("device")
    given = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if device is not None:
        given["device"] = CPU
    memory = Memory(
        is_device(device),
        placed_by=session.places.fields_behind(device),
        pinned=bool(kwargs.get("pin_memory")),
    )

    def placed(made: torch.Tensor) -> torch.Tensor:
        return session.place(session.operand(made).held, memory.copy())

    return tree_map_only(torch.Tensor, placed, func(*args, **given))


# Functions that are handled by themselves


def _from_data(
    session: Session,
    func: Any,
    *args: Any,
    device: Any = None,
    pin_memory: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """``torch.tensor``, ``as_tensor``, ``asarray`` and ``Tensor.new_tensor``."""
    given = list(args)
    if not args or (func is torch.Tensor.new_tensor and len(args) == 1):
        given.append(kwargs.pop("obj" if "obj" in kwargs else "data"))
    *owner, data = given
    name = name_of(func)
    target = session.places.resolve(device)
    if target is None and owner:
        target = session.device_of(owner[0])
    if owner and kwargs.get("dtype") is None:
        kwargs["dtype"] = session.operand(owner[0]).held.dtype
    if isinstance(data, torch.Tensor):
        copy = kwargs.pop("copy", None) or name in ("torch.tensor", "Tensor.new_tensor")
        made = session.move(data, target, name, dtype=kwargs.get("dtype"), copy=bool(copy))
        return session.pin(made) if pin_memory else made
    fields: set[str] = set()

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            fields.update(session.operand(value).fields)
            return session.read(value, name).tolist()
        fields.update(session.fields_of_array(value))
        return value

    values = tree_map(plain, data) if isinstance(data, (list, tuple)) else plain(data)
    held_owner = [session.operand(x).held for x in owner]
    held = func(*held_owner, values, **kwargs, **({} if target is None else {"device": CPU}))
    placed_by = session.places.fields_behind(target)
    made = session.place(held, Memory(False, fields, placed_by - fields, pin_memory))
    if is_device(target):
        made = session.move(made, target, name)
    return made


def _to(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return session.to(tensor, *args, **kwargs)


def _cuda(
    session: Session,
    func: Any,
    tensor: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    return session.move(
        tensor,
        DEVICE,
        "Tensor.cuda",
        non_blocking=non_blocking,
        memory_format=memory_format,
    )


def _cpu(
    session: Session,
    func: Any,
    tensor: torch.Tensor,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    return session.move(tensor, CPU, "Tensor.cpu", memory_format=memory_format)


def _type(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.type``: its old names of types say the device too."""
    name = args[0] if args else kwargs.get("dtype")
    if not isinstance(name, str):
        return func(tensor, *args, **kwargs)
    last = name.rpartition(".")[2]
    return session.move(
        tensor,
        DEVICE if ".cuda." in name else CPU,
        "Tensor.type",
        dtype=torch.empty(0).type(f"torch.{last}").dtype,
        non_blocking=bool(kwargs.get("non_blocking", False)),
    )


def _type_as(
    session: Session, func: Any, tensor: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    return session.move(tensor, session.device_of(other), "Tensor.type_as", dtype=other.dtype)


def _pin(session: Session, func: Any, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return session.pin(tensor)


def _is_pinned(session: Session, func: Any, tensor: torch.Tensor, device: Any = None) -> bool:
    memory = session.operand(tensor).memory
    return memory.pinned if memory is not None else False


def _tolist(session: Session, func: Any, tensor: torch.Tensor) -> Any:
    return session.read(tensor, "Tensor.tolist").tolist()


def _numpy(session: Session, func: Any, tensor: torch.Tensor, *, force: bool = False) -> Any:
    return session.as_array(tensor, "Tensor.numpy", force=force)


def _device(session: Session, func: Any, tensor: torch.Tensor) -> torch.device:
    return session.asked(tensor)


def _is_cuda(session: Session, func: Any, tensor: torch.Tensor) -> bool:
    op = session.operand(tensor)
    session.rules.ask("Tensor.is_cuda", op)
    return op.on_device or bool(func(op.held))


def _is_cpu(session: Session, func: Any, tensor: torch.Tensor) -> bool:
    op = session.operand(tensor)
    session.rules.ask("Tensor.is_cpu", op)
    return bool(func(tensor)) and not op.on_device


def _get_device(session: Session, func: Any, tensor: torch.Tensor) -> int:
    op = session.operand(tensor)
    session.rules.ask("Tensor.get_device", op)
    return DEVICE.index if op.on_device else int(func(op.held))


def _shape(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, VirtualTensor) and tensor.field_name is not None:
        session.recorder.shape_read(tensor.field_name)
    return func(tensor, *args, **kwargs)


def _tensor_split(
    session: Session, func: Any, tensor: torch.Tensor, parts: Any, *args: Any, **kwargs: Any
) -> Any:
    """Its parts may be a tensor, which torch reads and wants on the CPU."""
    if isinstance(parts, torch.Tensor):
        parts = session.as_array(parts, name_of(func)).tolist()
    return func(tensor, parts, *args, **kwargs)


def _set_data(session: Session, func: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value``."""
    op = session.operand(value)
    if isinstance(tensor, VirtualTensor):
        func(tensor, value)
        tensor._held, tensor._memory = op.held, op.memory or Memory(on_device=False)
    elif op.memory is None:
        func(tensor, op.held)
    else:
        made = VirtualTensor.of(session, op.held, op.memory)
        made.requires_grad_(tensor.requires_grad)
        made.take_after(tensor)
        del session.made[id(made)]
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
        session.made[id(tensor)] = tensor


def _getitem(session: Session, func: Any, tensor: torch.Tensor, index: Any) -> Any:
    with session.called(name_of(func)):
        return func(tensor, _indices(session, index))


def _setitem(session: Session, func: Any, tensor: torch.Tensor, index: Any, value: Any) -> None:
    with session.called(name_of(func)):
        func(tensor, _indices(session, index), value)


def _indices(session: Session, index: Any) -> Any:
    """Lists and arrays as the CPU tensors that torch makes of them, to copy them to the device."""
    if isinstance(index, tuple):
        return tuple(_indices(session, part) for part in index)
    if type(index).__module__ == "numpy" or known_sources(index) is not None:
        return index if getattr(index, "ndim", 0) == 0 else _from_data(session, torch.tensor, index)
    if isinstance(index, list) and index and all(map(_is_index, index)):
        return _from_data(session, torch.tensor, index)
    return index


def _is_index(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_index, value))
    return isinstance(value, int) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _new(session: Session, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.new``: of sizes, or of values, which may be another tensor's."""
    if len(args) == 1 and isinstance(args[0], (torch.Tensor, list, tuple)):
        if not isinstance(args[0], torch.Size):
            return _from_data(session, torch.Tensor.new_tensor, tensor, args[0], **kwargs)
    elif args and not isinstance(args[0], int):
        return func(tensor, *args, **kwargs)
    sizes = args if args else (0,)
    return torch.Tensor.new_empty(tensor, *sizes, **kwargs)


def _ctc_loss(
    session: Session,
    func: Any,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Takes its targets to where the probabilities are; the host reads the lengths."""
    name = name_of(func)
    lengths = (
        session.read(x, name).tolist() if isinstance(x, torch.Tensor) else x
        for x in (input_lengths, target_lengths)
    )
    there = session.move(targets, session.device_of(log_probs), name)
    made: torch.Tensor = session.opaque(func, name, (log_probs, there, *lengths, *args), kwargs)
    return made


def _recurrent(session: Session, func: Any, *args: Any) -> Any:
    """``torch.lstm`` and the like, which of a packed sequence get its sizes, on the CPU."""
    name = name_of(func)
    if not isinstance(args[3], (list, tuple)):
        return session.opaque(func, name, args, {})
    data, sizes, *others = args
    op = session.operand(sizes)
    if op.on_device:
        session.rules.refused_place(name, op)

    def packed(data: torch.Tensor, *others: Any) -> Any:
        return func(data, op.held, *others)

    return session.opaque(packed, name, (data, *others), {})


def _whole(session: Session, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Functions whose parts depend on which kernels the device has."""
    return session.opaque(func, name_of(func), args, kwargs)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    torch.Tensor.new_tensor: _from_data,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.type: _type,
    torch.Tensor.type_as: _type_as,
    torch.Tensor.pin_memory: _pin,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.tolist: _tolist,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.device.__get__: _device,
    torch.Tensor.is_cuda.__get__: _is_cuda,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: _is_cpu,  # type: ignore[attr-defined]
    torch.Tensor.get_device: _get_device,
    torch.get_device: _get_device,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem,
    torch.Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__: _shape,  # type: ignore[attr-defined]
    torch.Tensor.size: _shape,
    torch.Tensor.dim: _shape,
    torch.Tensor.numel: _shape,
    torch.numel: _shape,
    torch.Tensor.__len__: _shape,
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
    torch.nn.functional.scaled_dot_product_attention: _whole,
    torch.Tensor.new: _new,
    torch.ctc_loss: _ctc_loss,
    torch.nn.functional.ctc_loss: _ctc_loss,
    torch.lstm: _recurrent,
    torch.gru: _recurrent,
    torch.rnn_tanh: _recurrent,
    torch.rnn_relu: _recurrent,
}

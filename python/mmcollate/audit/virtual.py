"""Virtual devices: tensors that hold real data on the CPU and say that they live on ``cuda:0``.

A :class:`VirtualTensor` is one of two things. One *on the device* is a wrapper: it has the shape,
strides and dtype of the CPU tensor that it holds, answers ``cuda:0``, and has no memory that
anything could read behind its back. One *on the CPU* shares its memory with the tensor that it
holds, and is there to be followed. Both know the fields from which their values stem.

What becomes an operation comes to :meth:`~mmcollate.audit.session.Session.dispatch`. What never
does, or starts CUDA before it does (``tolist``, ``numpy``, ``to("cuda")``, factories), is caught
here and by ``interception.py``.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map

from mmcollate.audit.rules import CPU, DEVICE, Memory

if TYPE_CHECKING:
    from mmcollate.audit.session import Session

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
        session.made[id(made)] = made
        return made

    def take_after(self, tensor: torch.Tensor) -> None:
        """Has what else a tensor carries, and is a parameter if that is one."""
        self.__dict__.update({**vars(tensor), **vars(self)})
        if isinstance(tensor, torch.nn.Parameter):
            self._is_param = True

    def become_plain(self) -> bool:
        """The same object is a plain tensor from now on: that of the CPU which it held.

        Returns:
            Whether it is; not if torch itself holds on to it, as to what others are views of, nor
            if there are weak references to it.
        """
        held_by_torch = self._use_count() > 1  # type: ignore[attr-defined]
        if held_by_torch or weakref.getweakrefs(self):
            return False
        plain = self._held.detach()
        if getattr(self, "_is_param", False):
            plain = torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        torch.utils.swap_tensors(self, plain)  # type: ignore[no-untyped-call]
        return True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        # Where no mode is active: in other threads.
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

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Functions of numpy's, called with tensors."""

        def array(x: Any) -> Any:
            return x.__array__() if isinstance(x, VirtualTensor) else x

        return func(*tree_map(array, args), **tree_map(array, kwargs))

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

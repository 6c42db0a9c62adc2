"""``torch.cuda`` and what else of torch names devices, as one GPU would answer."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mmcollate.audit.places import is_device
from mmcollate.audit.rules import DEVICE, Memory
from mmcollate.audit.session import Session


class _Stream:
    """Stands for ``torch.cuda.Stream`` where nothing runs later."""

    device = DEVICE
    cuda_stream = stream_id = device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return _Event() if event is None else event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class _Event:
    """Stands for ``torch.cuda.Event``; passed from the start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class _Properties:
    """What models ask of a device's properties."""

    name = "virtual device"
    major, minor = 9, 0
    total_memory = 80 << 30
    multi_processor_count = 132
    warp_size = 32


class _Generator(torch.Generator):
    """Stands for a generator of the device; its numbers are those of the CPU's."""

    device = DEVICE

    def __new__(cls, device: Any = None) -> "_Generator":
        return super().__new__(cls)


def _made_by(real: type, make: Callable[..., Any], made: type) -> type:
    """Stands for a class whose objects something else makes."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (real, made))

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, (real, made))

    return Meta(real.__name__, (), {"__module__": real.__module__, "__doc__": real.__doc__})


def _lasting(session: Session, module: Any, name: str, answer: Any) -> Any:
    """An answer that a module which is imported meanwhile may hold on to: after the session it is
    what stands in its place then."""

    def current(*args: Any, **kwargs: Any) -> Any:
        found = getattr(module, name) if session.ended else answer
        return found(*args, **kwargs)

    real = getattr(module, name)
    if isinstance(real, type):
        return _made_by(real, current, answer if isinstance(answer, type) else real)
    return functools.wraps(real)(current)


def _answers(session: Session) -> Iterator[tuple[Any, str, Any]]:
    """Module, name and the answer, which takes the place of torch's own."""

    def synchronize(device: Any = None) -> None:
        session.recorder.record("sync", "torch.cuda.synchronize", ())

    always: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_stream": lambda device=None: _Stream(),
        "set_stream": lambda stream: None,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    cuda: dict[str, Any] = {
        "current_device": lambda: DEVICE.index,
        "set_device": lambda device: None,
        # What is left of torch's own contexts when nothing is to be switched.
        "_exchange_device": lambda device: DEVICE.index,
        "_maybe_exchange_device": lambda device: DEVICE.index,
        "Stream": _Stream,
        "ExternalStream": _Stream,
        "Event": _Event,
        "default_stream": lambda device=None: _Stream(),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": None,
        "get_device_name": lambda device=None: _Properties.name,
        "get_device_capability": lambda device=None: (_Properties.major, _Properties.minor),
        "get_device_properties": lambda device=None: _Properties(),
        "mem_get_info": lambda device=None: (_Properties.total_memory,) * 2,
    }
    accelerator: dict[str, Any] = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: DEVICE.index,
        "set_device_index": lambda device: None,
    }
    from_numpy, real_device, real_generator = torch.from_numpy, torch.device, torch.Generator

    def device(*args: Any, **kwargs: Any) -> torch.device:
        made = real_device(*args, **kwargs)
        named = args[0] if args else kwargs.get("type", kwargs.get("device"))
        return session.places.made_from(made, session.places.resolve(named))

    def generator(device: Any = "cpu") -> torch.Generator:
        there = is_device(session.places.resolve(device))
        return _Generator() if there else real_generator(device=device)

    def traced_from_numpy(array: Any) -> torch.Tensor:
        return session.place(from_numpy(array), Memory(False, set(session.fields_of_array(array))))

    def nested_tensor(values: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        dtype, layout = kwargs.get("dtype"), kwargs.get("layout")
        made = [torch.tensor(x, dtype=dtype, device=device) for x in values]
        return torch.nested.as_nested_tensor(made, layout=layout)

    # Modes see none of these.
    yield torch, "from_numpy", traced_from_numpy
    yield torch.nested, "nested_tensor", nested_tensor
    yield torch, "device", device
    yield torch, "Generator", generator
    yield torch, "Stream", _Stream
    yield torch, "Event", _Event
    for module, own in ((torch.cuda, cuda), (getattr(torch, "accelerator", None), accelerator)):
        for name, answer in (always | own).items():
            if hasattr(module, name):
                yield module, name, answer


@contextlib.contextmanager
def virtual_cuda(session: Session) -> Iterator[None]:
    """Has ``torch.cuda`` and ``torch.accelerator`` answer as with one GPU; for all threads.

    ``torch.cuda.synchronize`` is told to the session's recorder.
    """
    answers = [
        (module, name, _lasting(session, module, name, answer))
        for module, name, answer in _answers(session)
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in answers]
    try:
        for module, name, answer in answers:
            setattr(module, name, answer)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)

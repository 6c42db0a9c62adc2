"""What staging asks of torch's accelerators, with torch's streams and events stood in for."""

from __future__ import annotations

from typing import Any

import mmcollate
import pytest
import torch
from mmcollate import Batched, Flat, backends, collate
from mmcollate.testing import FakeDevice
from processes import run_script

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "cpu:0", CPU, "meta", torch.device("meta")])
def test_the_host_is_recognised_without_asking_for_accelerators(monkeypatch, device):
    def asked() -> None:
        raise AssertionError("this may start a driver")

    monkeypatch.setattr(backends, "_accelerator", asked)
    assert backends.backend_of(device) is None
    batch = collate([{"x": torch.ones(2)}] * 2, {"x": Batched(keep_on_cpu=True)}, device=device)
    assert batch["x"].shape == (2, 2)


@pytest.mark.parametrize("device", ["foo", "cuda", 0, 3.5, object(), None, "xpu:1"])
def test_what_torch_has_not_here_is_left_to_the_reference(device):
    if torch.accelerator.is_available():
        pytest.skip("torch has an accelerator here")
    assert backends.backend_of(device) is None


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(backends, "_known", {})


@pytest.mark.usefixtures("two_devices")
def test_each_device_has_one_backend():
    first, second = backends.backend_of("cuda:0"), backends.backend_of("cuda")
    assert isinstance(first, backends.Torch) and isinstance(second, backends.Torch)
    assert first is not second
    assert (first.device, second.device) == (torch.device("cuda", 0), torch.device("cuda", 1))
    assert backends.backend_of(torch.device("cuda", 1)) is second is backends.current()
    assert backends.backend_of("cpu") is None and backends.backend_of("xpu") is None


@pytest.mark.parametrize(
    ("kind", "staged", "ordered"),
    [("cuda", True, True), ("xpu", False, True), ("npu", False, False), ("mps", False, False)],
)
def test_what_is_not_known_of_a_device_is_not_relied_on(kind, staged, ordered):
    device = torch.device(kind if kind != "npu" else "privateuseone")
    backend = backends.Torch(device)
    assert backend.pageable_copies_are_staged == staged
    assert backend.copies_are_ordered == ordered


class Stream:
    def __init__(self, device: Any) -> None:
        self.device = device
        self.waited: list[Any] = []

    def synchronize(self) -> None:
        self.waited.append("host")

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


class Event:
    def __init__(self, device: Any) -> None:
        self.device = device
        self.on: Any = None

    def record(self, stream: Any) -> None:
        self.on = stream

    def query(self) -> bool:
        return True


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> backends.Torch:
    """The backend for torch's devices, on the host: its memory counts as pinned."""
    streams: dict[Any, Stream] = {}
    empty = torch.empty
    pinned: set[int] = set()

    def made(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        assert "device" in options and "dtype" in options
        tensor = empty(*sizes, **options)
        if pin_memory:
            pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(
        torch.accelerator,
        "current_stream",
        lambda device=None: streams.setdefault(device, Stream(device)),
    )
    backend = backends.Torch(CPU)
    backend.copies_are_ordered = True
    monkeypatch.setattr(
        backend, "is_pinned", lambda tensor: tensor.untyped_storage().data_ptr() in pinned
    )
    return backend


def test_a_batch_goes_through_torchs_own_calls(host):
    items = [{"x": torch.arange(10_000) + n, "y": torch.ones(n)} for n in (2, 3)]
    fields = {"x": Batched(), "y": Flat()}
    batch = collate(items, fields, device=host, pin_memory=True)
    assert batch["x"].tolist() == [item["x"].tolist() for item in items]
    assert batch["y"].tolist() == [1.0] * 5
    stats = mmcollate.arena_stats(host)
    assert (stats["batches"], stats["copies"], stats["in_flight"]) == (1, 1, 0)
    assert stats["pinned_bytes"] == stats["slot_bytes"]


@pytest.mark.parametrize("inference", [False, True])
def test_slots_are_ordinary_tensors_in_every_mode(host, inference):
    with torch.inference_mode(inference):
        slot, memory = host.pinned(64), host.empty(64)
    assert not slot.is_inference()
    assert memory.is_inference() == inference
    assert (slot.dtype, slot.device, memory.dtype) == (torch.uint8, CPU, torch.uint8)
    with torch.device("meta"):
        assert host.pinned(64).device == host.empty(64).device == CPU


def test_fences_and_waits_name_the_device_and_its_stream(host, monkeypatch):
    fence = host.fence()
    assert fence.device == CPU
    assert fence.on is torch.accelerator.current_stream(CPU)
    host.synchronize()
    assert fence.on.waited == ["host"]
    other, used = Stream(CPU), []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: used.append(stream))
    host.wait_on(other, fence, [torch.ones(2), torch.ones(3)])
    assert other.waited == [fence] and used == [other, other]
    host.wait_on(other, None, [])
    assert other.waited == [fence]


def test_whether_a_stream_captures_is_asked_of_the_devices_own(host, monkeypatch):
    assert not host.is_capturing()  # a stream that can't be asked
    stream = torch.accelerator.current_stream(CPU)
    stream.is_capturing = lambda: True
    assert host.is_capturing()
    del stream.is_capturing
    entered: list[Any] = []

    class Entered:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: Any) -> None:
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    older = backends.Torch(torch.device("cuda", 1))
    assert older.is_capturing()
    assert entered == [torch.device("cuda", 1), "left"]


def test_kept_fields_that_lie_on_a_device_are_waited_for(monkeypatch):
    # meta stands for the accelerator; its copy to the host is stood in for.
    waits: list[Any] = []
    monkeypatch.setattr(backends, "_accelerator", lambda: "meta")

    class Waiting(Event):
        def synchronize(self) -> None:
            assert self.on.device == self.device
            waits.append(self.device)

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    monkeypatch.setattr(torch, "Event", Waiting)
    there, here = torch.ones(2, device="meta"), torch.ones(2)
    backends.wait_for_host([there, [there]], here)
    assert waits == [torch.device("meta")]
    backends.wait_for_host([here], here)
    backends.wait_for_host([there], there)
    assert waits == [torch.device("meta")]


def test_copies_to_the_host_block():
    seen: list[dict[str, Any]] = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.Tensor.to:
                seen.append(kwargs or {})
            return super().__torch_function__(func, types, args, kwargs or {})

    value = torch.ones(2).as_subclass(Seen)
    for device, field in (("cpu", Flat()), ("cpu:0", Flat()), ("meta", Flat(keep_on_cpu=True))):
        mmcollate.reference.reduce(field, [value], device=device)
    mmcollate.reference.reduce(Flat(), [value], device="meta")
    assert [call["non_blocking"] for call in seen] == [False, False, False, True]


def test_importing_and_collating_on_the_host_starts_no_driver():
    script = (
        "import torch, mmcollate\n"
        "from mmcollate import Batched, collate, stage\n"
        "collate([{'x': torch.ones(2)}] * 2, {'x': Batched()}, device='cpu', pin_memory=True)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'libcuda.so' not in open('/proc/self/maps').read()\n"
    )
    code, _, said = run_script(script)
    assert code == 0, said


def test_a_fake_device_given_twice_is_one_backend():
    device = FakeDevice()
    assert backends.backend_of(device) is device


def test_torch_is_not_asked_for_an_accelerator_where_all_is_on_the_host(monkeypatch):
    # It takes 150 us to say that there is none.
    monkeypatch.setattr(backends, "_accelerator", lambda: pytest.fail("asked"))
    backends.wait_for_host([torch.ones(2), [torch.ones(2), 3]], torch.ones(2))
    backends.wait_for_host([None, "x"], [])

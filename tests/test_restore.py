"""Kept fields restored to a device: as a loop of copies would, together, and nothing else moved."""

from __future__ import annotations

import gc
import importlib
import random
import threading
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import mmcollate
import pytest
import torch
from compare import assert_same
from mmcollate import (
    Batched,
    CollateKeyError,
    CollateTypeError,
    CollateValueError,
    Flat,
    MMCollateError,
    arena_stats,
    collate,
    restore,
    restored,
    retained_bytes,
)
from mmcollate.reference import iter_leaves, map_leaves
from mmcollate.testing import FakeDevice
from test_staging import arena_of_slots

Pair = namedtuple("Pair", "a b")
META = torch.device("meta")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PINNED_MAX_MB", "STAGING_CHUNK_MB", "STRICT_PIN", "DEBUG", "DIRECT"):
        monkeypatch.delenv(f"MMCOLLATE_{name}", raising=False)
    mmcollate.reset_stats()


def kept() -> dict[str, Any]:
    """A batch with kept fields of most forms."""
    return {
        "image_grid_thw": torch.tensor([[1, 4, 6], [1, 8, 8], [2, 2, 2]]),
        "is_video": torch.tensor([True, False, True]),
        "patches": [torch.arange(6).reshape(2, 3), torch.arange(3, dtype=torch.int32)],
        "name": "clip",
        "seconds": {"start": torch.tensor(0.5), "more": (torch.ones(2, dtype=torch.uint8), None)},
        "sizes": [(4, 6), (8, 8)],
        "scale": torch.rand(3, 5, dtype=torch.float64).t(),
        "every_other": torch.arange(20, dtype=torch.int16)[::2],
        "none": torch.zeros(0, 3, dtype=torch.bfloat16),
        "count": 3,
    }


ODD = {
    "complex": torch.ones(3, dtype=torch.complex64) * 1j,
    "sparse": torch.eye(3).to_sparse(),
    "expanded": torch.tensor([7]).expand(4),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "negated": torch.ones(3, dtype=torch.complex64).conj().imag,
}


def tensors_of(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    return [x for x in iter_leaves(dict(batch)) if isinstance(x, torch.Tensor)]


def loop(device: FakeDevice, batch: Any) -> Any:
    """What models do: one copy for each tensor that is on the host."""
    return map_leaves(device._upload, batch)


def places(value: Any) -> Any:
    """Which objects are where."""
    inner = value.values() if isinstance(value, dict) else value
    return id(value), [places(x) for x in inner] if isinstance(value, (dict, list, tuple)) else ()


def run_together(count: int, work: Callable[[], Any]) -> list[Any]:
    """What each of so many threads gets, all started at one time."""
    barrier, got = threading.Barrier(count), []

    def run() -> None:
        barrier.wait()
        got.append(work())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


# As a loop of copies


def test_all_go_in_one_copy_and_are_as_a_loop_has_them():
    batch, device, other = kept(), FakeDevice(), FakeDevice()
    ours, theirs = restore(batch, device), loop(other, batch)
    device.synchronize()
    other.synchronize()
    assert_same(ours, theirs, strides=False)
    assert list(ours) == list(batch)
    assert (device.copies, device.blocking_copies) == (1, 0)
    # Of the tensors, one has no bytes.
    assert other.copies == len(tensors_of(batch)) - 1 == 8


@pytest.mark.parametrize("name", ODD)
def test_what_only_torch_can_copy_keeps_none_of_the_others_back(name):
    batch = kept() | {name: [ODD[name], torch.ones(4)]}
    device, other = FakeDevice(), FakeDevice()
    with torch.no_grad():
        ours, theirs = restore(batch, device), loop(other, batch)
    device.synchronize()
    other.synchronize()
    assert_same(ours, theirs, strides=False)
    assert ours[name][0] is not ODD[name]
    assert arena_stats(device)["copies"] == 1
    assert device.copies <= 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_or_two_small_tensors_are_left_to_torch(count):
    device = FakeDevice()
    batch = {str(n): torch.tensor([n]) for n in range(count)}
    ours = restore(batch, device)
    device.synchronize()
    assert [ours[name].item() for name in batch] == list(range(count))
    assert device.copies == (1 if count == 3 else count)
    assert arena_stats(device)["batches"] == (count == 3)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_results_are_inference_tensors_only_where_a_copy_would_be(mode):
    batch, device = kept(), FakeDevice()
    with mode():
        ours = restore(batch, device)
        device.synchronize()
        assert_same(ours, loop(FakeDevice(), batch), strides=False)


def test_without_pinned_memory_torch_copies_tensor_by_tensor(monkeypatch):
    monkeypatch.setenv("MMCOLLATE_PINNED_MAX_MB", "0")
    batch, device, other = kept(), FakeDevice(), FakeDevice()
    ours, theirs = restore(batch, device), loop(other, batch)
    assert_same(ours, theirs, strides=False)
    assert device.copies == other.copies
    assert device.peak_pinned_bytes == 0
    assert arena_stats(device)["batches"] == 0


def test_a_device_that_nothing_is_staged_for():
    batch = kept()
    ours = restore(batch, META)
    for there, here in zip(tensors_of(ours), tensors_of(batch), strict=True):
        assert (there.device, there.dtype, there.shape) == (META, here.dtype, here.shape)
    assert (ours["name"], ours["count"]) == ("clip", 3)


def test_the_kept_fields_of_a_collated_batch():
    items = [
        {"pixels": torch.rand(n * 16, 8), "grid": torch.tensor([1, 4, 4 * n]), "n": torch.tensor(n)}
        for n in (1, 2, 3)
    ]
    fields = {"pixels": Flat(), "grid": Batched(keep_on_cpu=True), "n": Batched(keep_on_cpu=True)}
    device = FakeDevice()
    batch = collate(items, fields, device=device, pin_memory=True)
    ours = restore(batch, device, ["grid", "n"])
    device.synchronize()
    assert ours["pixels"] is batch["pixels"]
    assert ours["grid"].tolist() == [[1, 4, 4], [1, 4, 8], [1, 4, 12]]
    assert ours["n"].tolist() == [1, 2, 3]
    assert ours["grid"].dtype is ours["n"].dtype is torch.int64


# The same objects


def test_nothing_in_the_batch_changes():
    batch, device = kept(), FakeDevice(manual=True)
    before, values = places(batch), [x.clone() for x in tensors_of(batch)]
    ours = restore(batch, device)
    for tensor in tensors_of(ours):
        tensor.zero_()
    device.synchronize()
    assert places(batch) == before
    assert all(map(torch.equal, tensors_of(batch), values))


def test_only_what_is_asked_for_moves():
    batch, device = kept(), FakeDevice()
    asked = iter(["patches", "image_grid_thw", "name", "patches"])
    ours = restore(batch, device, asked)
    device.synchronize()
    assert list(ours) == list(batch)
    same = {name for name in batch if ours[name] is batch[name]}
    assert same == set(batch) - {"patches", "image_grid_thw"}
    assert device.bytes_copied < 2048
    assert restore(batch, device, []) == batch
    assert (device.copies, arena_stats(device)["batches"]) == (1, 1)


def test_on_the_cpu_all_are_the_same_objects():
    batch = kept() | ODD
    for device in ("cpu", torch.device("cpu")):
        ours = restore(batch, device)
        assert ours is not batch
        assert all(ours[name] is batch[name] for name in batch)
    assert mmcollate.stats()["batches"] == 0


def test_tensors_that_are_there_are_the_same_objects():
    there = torch.ones(3, device="meta")
    batch = {"a": there, "b": [there, 1], "c": [there, torch.ones(2)], "d": (torch.ones(2), "x")}
    ours = restore(batch, "meta")
    assert ours["a"] is there
    assert ours["b"] is batch["b"]
    assert ours["c"] is not batch["c"]
    assert ours["c"][0] is there
    again = restore(ours, "meta")
    assert all(again[name] is ours[name] for name in ours)


def test_a_tensor_in_two_places_is_one_on_the_device_too():
    grid, device = torch.arange(12), FakeDevice()
    ours = restore(
        {"a": grid, "b": [grid, torch.ones(3)], "c": {"d": (grid, torch.ones(2))}}, device
    )
    device.synchronize()
    assert ours["a"] is ours["b"][0] is ours["c"]["d"][0]
    assert arena_stats(device)["bytes_copied"] < 3 * 256


def test_containers_keep_their_type_and_what_holds_no_tensor_is_the_same():
    class Lengths(list):
        unit = "frames"

    class Named(dict):
        pass

    plain = [1, {"x": (None, "s")}]
    opaque = UserDict(t=torch.ones(2))
    lengths, named = Lengths([torch.tensor(1), 2]), Named(t=torch.tensor(3), u=plain)
    lengths.unit = "seconds"
    batch = {
        "pair": Pair(torch.ones(2), plain),
        "ordered": OrderedDict(z=torch.ones(1), a=1),
        "lengths": lengths,
        "named": named,
        "shape": torch.Size([2, 3]),
        "top": torch.topk(torch.arange(5), 2),
        "opaque": opaque,
        "empty": ((), [], {}),
    }
    device = FakeDevice()
    ours = restore(batch, device)
    device.synchronize()
    assert {name: type(value) for name, value in ours.items()} == {
        name: type(value) for name, value in batch.items()
    }
    same = {name for name in batch if ours[name] is batch[name]}
    assert same == {"shape", "opaque", "empty"}
    assert ours["pair"].b is plain
    assert ours["named"]["u"] is plain
    assert list(ours["ordered"]) == ["z", "a"]
    assert ours["lengths"].unit == "seconds"
    assert ours["lengths"] == [1, 2]
    assert ours["top"].values.tolist() == [4, 3]


def test_embeddings_get_an_allocation_of_their_own():
    device = FakeDevice()
    batch = {name: torch.rand(100, 10) for name in ("grid", "image_embeds", "mask")}
    ours = restore(batch, device)
    assert retained_bytes(ours["image_embeds"]) < 2 * ours["image_embeds"].nbytes
    assert retained_bytes(ours["grid"]) > 2 * ours["grid"].nbytes
    assert retained_bytes(ours["grid"], ours["mask"]) == retained_bytes(ours["grid"])


# Later


@pytest.mark.parametrize("slots", [1, 4, 64])
def test_results_stay_right_when_slots_are_used_again(monkeypatch, slots):
    arena_of_slots(monkeypatch, 4096, slots)
    monkeypatch.setenv("MMCOLLATE_DEBUG", "1")
    device, rng, held = FakeDevice(manual=True), random.Random(slots), []
    for _ in range(30):
        batch = {
            str(k): torch.randint(0, 1 << 40, (rng.randint(1, 150),))
            for k in range(rng.randint(3, 9))
        }
        wanted = {name: value.tolist() for name, value in batch.items()}
        held.append((restore(batch, device), wanted))
        # Nor may the copies need what they were made from.
        for tensor in batch.values():
            tensor.fill_(-1)
        del batch, tensor
        device.stream.advance(rng.randint(0, 4))
    gc.collect()
    device.synchronize()
    for ours, wanted in held:
        assert {name: value.tolist() for name, value in ours.items()} == wanted
    assert arena_stats(device)["batches"] > 0
    assert device.peak_pinned_bytes <= slots * 4096


def test_memory_on_the_device_goes_with_the_last_tensor():
    device = FakeDevice()
    ours = restore(kept(), device)
    device.synchronize()
    assert device.memory_bytes > 0
    del ours
    gc.collect()
    assert device.memory_bytes == 0


# Errors


@pytest.mark.parametrize("call", [restore, restored])
@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ((["gird"],), CollateKeyError, ["'gird'", "'image_grid_thw', 'is_video'", "leave it out"]),
        (("count",), CollateTypeError, ["'count'", "put a single name into a list"]),
        ((3,), CollateTypeError, ["keys are 3", "names of fields"]),
    ],
)
def test_keys_that_are_none(call, arguments, kind, says):
    device = FakeDevice()
    with pytest.raises(kind) as raised:
        call(kept(), device, *arguments)
    assert [words for words in says if words not in str(raised.value)] == []
    assert device.copies == 0


def test_the_error_has_the_unknown_name():
    with pytest.raises(CollateKeyError) as raised:
        restore(kept(), "cpu", ["count", "gird"])
    assert raised.value.field == "gird"


@pytest.mark.parametrize("call", [restore, restored])
def test_the_device_is_never_guessed(call):
    batch = {"there": torch.ones(3, device="meta"), "here": torch.ones(3)}
    with pytest.raises(TypeError, match="device"):
        call(batch)
    with pytest.raises(CollateTypeError, match="no device to restore to; pass the one"):
        call(batch, None)
    with pytest.raises(CollateValueError, match="torch knows no device 'gpu7'; pass one"):
        call(batch, "gpu7")
    with pytest.raises(CollateTypeError, match="the batch is list of 1, expected a mapping"):
        call([batch], "cpu")


def test_a_list_that_holds_itself():
    endless: list[Any] = [torch.ones(2)]
    endless.append(endless)
    with pytest.raises(CollateValueError, match="'endless': a list too deep"):
        restore({"endless": endless}, "cpu")


def test_what_torch_cannot_copy_is_named():
    batch = {"here": torch.ones(2), "gone": [1, torch.ones(2, device="meta")]}
    with pytest.raises(MMCollateError, match="field 'gone'") as raised:
        restore(batch, "cpu")
    assert raised.value.field == "gone"
    assert isinstance(raised.value.__cause__, NotImplementedError)


def test_a_device_without_memory_can_be_asked_again():
    batch, device = kept(), FakeDevice(manual=True)
    before = places(batch)
    device.fail_next("empty", torch.OutOfMemoryError("no memory"), times=2)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        restore(batch, device)
    lazy = restored(batch, device)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        lazy["image_grid_thw"]
    assert places(batch) == before
    ours = lazy["image_grid_thw"]
    device.synchronize()
    assert torch.equal(ours, batch["image_grid_thw"])
    assert arena_stats(device)["leased"] == 0


# On first use


def test_restored_copies_once_and_only_if_used():
    batch, device = kept(), FakeDevice(manual=True)
    lazy = restored(batch, device, ["is_video", "patches", "count"])
    assert list(lazy) == list(batch)
    assert len(lazy) == len(batch)
    assert "patches" in lazy
    assert "gird" not in lazy
    assert lazy["image_grid_thw"] is batch["image_grid_thw"]
    assert lazy.get("gird") is None
    with pytest.raises(KeyError):
        lazy["gird"]
    assert device.copies == 0
    first = lazy["patches"]
    assert (device.copies, device.blocking_copies) == (1, 0)
    assert lazy["patches"] is first
    assert lazy["is_video"] is dict(lazy)["is_video"]
    assert dict(lazy.items()).keys() == batch.keys()
    device.synchronize()
    assert device.copies == 1
    assert [x.tolist() for x in first] == [x.tolist() for x in batch["patches"]]
    assert lazy["is_video"].tolist() == [True, False, True]
    assert lazy["image_grid_thw"] is batch["image_grid_thw"]
    with pytest.raises(TypeError):
        lazy["count"] = 4  # type: ignore[index]


def test_restored_is_as_restore_has_it():
    batch, device = kept(), FakeDevice()
    ours, theirs = dict(restored(batch, device)), restore(batch, device)
    device.synchronize()
    assert_same(ours, theirs)


def test_restored_keeps_to_the_batch_that_it_was_given():
    batch, device = kept(), FakeDevice()
    lazy = restored(batch, device)
    batch["count"] = 4
    del batch["image_grid_thw"]
    assert lazy["count"] == 3
    assert lazy["image_grid_thw"].shape == (3, 3)


def test_threads_get_the_same_objects_from_one_copy(monkeypatch):
    original = FakeDevice.empty

    def slow(device: FakeDevice, nbytes: int) -> torch.Tensor:
        threading.Event().wait(0.05)  # so that the others come meanwhile
        return original(device, nbytes)

    monkeypatch.setattr(FakeDevice, "empty", slow)
    batch, device = kept(), FakeDevice()
    lazy = restored(batch, device)
    got = run_together(8, lambda: (lazy["image_grid_thw"], lazy["patches"]))
    assert len(got) == 8
    assert all(grid is got[0][0] and patches is got[0][1] for grid, patches in got)
    assert device.copies == 1


def test_a_look_in_the_midst_of_the_first_one(monkeypatch):
    original, looks = FakeDevice.empty, []

    def looking(device: FakeDevice, nbytes: int) -> torch.Tensor:
        if not looks:  # as a finalizer or a signal handler may
            looks.append(None)
            looks.append(lazy["image_grid_thw"])
        return original(device, nbytes)

    monkeypatch.setattr(FakeDevice, "empty", looking)
    lazy = restored(kept(), FakeDevice())
    assert lazy["image_grid_thw"] is looks[1]


# The engine's models


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device that the models below copy to, tensor by tensor."""
    pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")
    from vllm.model_executor.models import qwen2_5_omni_thinker, qwen3_asr
    from vllm.model_executor.models.transformers import multimodal

    device = FakeDevice()
    for module in (multimodal, qwen2_5_omni_thinker, qwen3_asr):
        monkeypatch.setattr(module, "async_tensor_h2d", lambda tensor, _: device._upload(tensor))
    return device


def test_as_the_transformers_backend_restores(copied):
    from vllm.model_executor.models.transformers.multimodal import MultiModalMixin

    batch = {name: value for name, value in kept().items() if name != "seconds"}
    seen: dict[str, Any] = {}

    def features(pixel_values: torch.Tensor, return_dict: bool, **kwargs: Any) -> Any:
        seen.update(kwargs)
        return SimpleNamespace(pooler_output=pixel_values)

    model = SimpleNamespace(model=SimpleNamespace(get_image_features=features))
    MultiModalMixin._get_features(model, "image", torch.ones(2), **batch)
    device = FakeDevice()
    ours = restore(batch, device, [k for k, v in batch.items() if isinstance(v, torch.Tensor)])
    device.synchronize()
    copied.synchronize()
    assert_same(ours, seen, strides=False)
    assert (copied.copies, device.copies) == (4, 1)


class Tower:
    """An audio tower that keeps what it is given."""

    dtype = torch.float32

    def __init__(self, *, is_omni: bool) -> None:
        self._is_omni = is_omni
        self.lengths: list[torch.Tensor] = []

    def _get_feat_extract_output_lengths(self, lengths: torch.Tensor) -> Any:
        after = (lengths - 1) // 2 + 1
        return after, (after - 2) // 2 + 1

    def __call__(self, features: torch.Tensor, *, feature_lens: Any, aftercnn_lens: Any) -> Any:
        self.lengths.append(feature_lens)
        if self._is_omni:
            rows = int(self._get_feat_extract_output_lengths(feature_lens)[1].sum())
            return SimpleNamespace(last_hidden_state=torch.arange(rows))
        return torch.arange(int(aftercnn_lens.sum()))


@pytest.mark.parametrize(
    ("module", "owner"),
    [
        ("qwen2_5_omni_thinker", "Qwen2_5OmniConditionalGenerationMixin"),
        ("qwen3_asr", "Qwen3ASRForConditionalGeneration"),
    ],
)
def test_as_the_audio_models_restore(copied, monkeypatch, module, owner):
    models = importlib.import_module(f"vllm.model_executor.models.{module}")
    process = getattr(models, owner)._process_audio_input
    model = SimpleNamespace(audio_tower=Tower(is_omni="omni" in module))
    batch = {
        "input_features": torch.zeros(128, 377),
        "audio_feature_lengths": torch.tensor([100, 37, 240]),
        "feature_attention_mask": torch.ones(3, 240, dtype=torch.bool),
        "chunks": [torch.tensor(2), torch.tensor([1, 2])],
    }
    theirs = process(model, batch)
    device = FakeDevice()
    ours = restore(batch, device, [name for name in batch if name != "input_features"])
    device.synchronize()
    assert_same(ours["audio_feature_lengths"], model.audio_tower.lengths[0])
    assert (copied.copies, device.copies) == (1, 1)
    # A tensor that is on the device stays as it is.
    monkeypatch.setattr(models, "async_tensor_h2d", lambda tensor, _: tensor)
    assert_same(process(model, ours), theirs)
    assert model.audio_tower.lengths[1] is ours["audio_feature_lengths"]

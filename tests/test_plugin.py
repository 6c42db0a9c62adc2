"""The vLLM plugin as vLLM sees it: on, off, and out of the way when something is not as known."""

from __future__ import annotations

import functools
import inspect
import logging
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import mmcollate
import pytest
import torch

utils: Any = pytest.importorskip(
    "vllm.multimodal.utils", reason="needs vLLM, which has no wheel for this Python"
)

from mmcollate import bits, errors
from mmcollate.integrations import vllm as plugin
from mmcollate.integrations import vllm_source
from vllm.multimodal import inputs
from vllm.utils import jsontree
from vllm_items import batched, flat, items_of, shared

NAMES = ("group_and_batch_mm_items", "_batch_mm_items")


@pytest.fixture(autouse=True)
def inactive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MMCOLLATE_DISABLE", "MMCOLLATE_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    plugin.deactivate()
    yield
    monkeypatch.undo()
    plugin.deactivate()
    assert not plugin.is_active()


def functions() -> list[Any]:
    return [getattr(utils, name) for name in NAMES]


def test_activation_and_its_reverse_can_be_repeated() -> None:
    before = functions()
    for _ in range(2):
        assert plugin.activate() and plugin.activate() and plugin.is_active()
        assert all(ours is not theirs for ours, theirs in zip(functions(), before, strict=True))
        assert plugin.deactivate() and plugin.deactivate() and not plugin.is_active()
        assert functions() == before


def test_the_batches_of_an_active_plugin_come_from_the_core() -> None:
    plugin.activate()
    mmcollate.reset_stats()
    pairs = [("image", item) for item in items_of(batched, [torch.arange(3), torch.arange(3)])]
    [(modality, count, batch)] = utils.group_and_batch_mm_kwargs(pairs)
    assert (modality, count) == ("image", 2)
    assert batch["x"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert mmcollate.stats()["fields"]["gather"] == 1


@pytest.mark.parametrize("used", [False, True])
def test_activation_leaves_no_trace_in_the_counters(used: bool) -> None:
    mmcollate.reset_stats()
    if used:
        sparse = torch.ones(2).to_sparse()
        with pytest.raises(mmcollate.MMCollateError):
            mmcollate.collate([{"x": sparse}, {"x": sparse}], {"x": mmcollate.Flat()})
        mmcollate.collate([{"x": torch.ones(2)}], {"x": mmcollate.Flat()})
    before = mmcollate.stats()
    assert plugin.activate()
    assert mmcollate.stats() == before


def test_a_setting_that_cannot_be_read_keeps_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCOLLATE_PINNED_MAX_MB", "plenty")
    assert not plugin.activate()
    assert "MMCOLLATE_PINNED_MAX_MB is 'plenty', expected a number" in plugin.status()


def test_a_line_not_yet_said_is_not_said_twice(heard: Heard) -> None:
    logger = logging.getLogger("vllm.plugins.mmcollate")
    logger.setLevel(logging.WARNING)
    plugin.register()
    logger.setLevel(logging.INFO)
    plugin.register()
    list(utils.group_and_batch_mm_items(items_of(batched, [torch.arange(3)])))
    assert len(heard.lines) == 1


def test_the_functions_look_like_those_they_replace() -> None:
    signatures = [inspect.signature(function) for function in functions()]
    plugin.activate()
    assert [inspect.signature(function) for function in functions()] == signatures
    for name, function in zip(NAMES, functions(), strict=True):
        assert (function.__module__, function.__qualname__) == (utils.__name__, name)
        assert pickle.loads(pickle.dumps(function)) is function


def test_an_unknown_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = functions()
    monkeypatch.setattr(vllm_source, "KNOWN", {})
    assert not plugin.activate()
    assert functions() == before
    assert "unknown" in plugin.status() and "fingerprint" in plugin.status()


def test_a_changed_rule_is_an_unknown_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def _can_batch_mm_items(left: Any, right: Any) -> bool:
        return True

    monkeypatch.setattr(utils, "_can_batch_mm_items", _can_batch_mm_items)
    assert not plugin.activate()
    assert "unknown" in plugin.status()


@pytest.mark.parametrize("name", [*NAMES, "_can_batch_mm_items"])
def test_a_missing_or_odd_function_is_an_unknown_vllm(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(utils, name)
        assert not plugin.activate()
        assert "unknown" in plugin.status()
        patch.setattr(utils, name, functools.partial(print), raising=False)
        assert not plugin.activate()
        assert "unknown" in plugin.status()
    assert plugin.activate()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (utils, "nested_tensors_equal"),
        (inputs, "nested_tensors_equal"),
        (inputs, "_nested_tensors_h2d"),
        (inputs, "json_map_leaves"),
        (jsontree, "json_map_leaves"),
        (jsontree, "json_iter_leaves"),
        (inputs.BaseMultiModalField, "reduce_data"),
        (inputs.MultiModalBatchedField, "reduce_data"),
        (inputs.MultiModalBatchedField, "_reduce_data"),
        (inputs.MultiModalFlatField, "_reduce_data"),
        (inputs.MultiModalSharedField, "_reduce_data"),
    ],
)
def test_a_patch_of_what_the_batcher_calls_is_an_unknown_vllm(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    theirs, before = getattr(owner, name), functions()

    def patched(*arguments: Any, **options: Any) -> Any:
        return theirs(*arguments, **options)

    monkeypatch.setattr(owner, name, patched, raising=False)
    assert not plugin.activate()
    assert "unknown" in plugin.status()
    assert functions() == before


ITEM, ELEM = inputs.MultiModalKwargsItem, inputs.MultiModalFieldElem
MAPPING = ["__getitem__", "__iter__", "__contains__", "__len__", "keys", "items", "values"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *[(ITEM, name) for name in [*MAPPING, "__getattribute__", "__getattr__", "data"]],
        *[(ELEM, name) for name in ("data", "field", "__getattribute__", "__getattr__")],
        (inputs.BaseMultiModalField, "keep_on_cpu"),
        (inputs.MultiModalBatchedField, "keep_on_cpu"),
        (inputs.MultiModalFlatField, "dim"),
        (inputs.MultiModalSharedField, "__getattribute__"),
    ],
)
def test_classes_that_compute_what_is_read_are_an_unknown_vllm(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def computed(self: Any, *arguments: Any) -> Any:
        return object.__getattribute__(self, *arguments)

    value = computed if name.startswith("__") or name in MAPPING else property(computed)
    before = functions()
    monkeypatch.setattr(owner, name, value, raising=False)
    active, why = plugin.activate(), plugin.status()
    monkeypatch.undo()
    assert not active and "unknown" in why and f"{owner.__name__}.{name}" in why
    assert functions() == before


class OtherItem(ITEM):
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)


class OtherElem(ELEM):
    pass


class OtherShared(inputs.MultiModalSharedField):
    pass


@pytest.mark.parametrize(
    ("module", "name", "other"),
    [
        (inputs, "MultiModalKwargsItem", OtherItem),
        (inputs, "MultiModalFieldElem", OtherElem),
        (inputs, "MultiModalSharedField", OtherShared),
        (utils, "MultiModalSharedField", OtherShared),
    ],
)
def test_other_classes_are_an_unknown_vllm(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, other: Any
) -> None:
    monkeypatch.setattr(module, name, other)
    assert not plugin.activate()
    assert "unknown" in plugin.status()


PLAIN = """
def f(x, *, y=1):
    return x + y

class C(dict):
    a = 1

    def get(self, name):
        return self[name]
"""
DRESSED = """
def f(x: int, *, y: int = 1) -> int:
    '''Adds.'''
    # so
    return x + y

class C(dict):
    '''Holds.'''
    a = 1
    '''The first.'''

    def get(self, name: str) -> int:
        return self[name]

    def build_elems(self):
        return []
"""


def test_comments_docstrings_and_annotations_do_not_make_another_vllm() -> None:
    def canonical(source: str) -> list[str]:
        found = vllm_source._definitions(source)
        function = next(node for key, node in found.items() if isinstance(key, int))
        return [vllm_source._canonical(node) for node in (function, found["C"])]

    function, cls = canonical(PLAIN)
    assert canonical(DRESSED) == [function, cls]
    assert canonical(PLAIN.replace("x + y", "x - y")) != [function, cls]
    for old, new in (
        ("a = 1", "a = 2"),
        ("(dict)", "(dict, metaclass=M)"),
        ("class C", "@dataclass\nclass C"),
        ("self[name]", "self.data[name]"),
        ("    def get", "    @property\n    def get"),
        ("    a = 1", "    a = 1\n    def __getitem__(self, name): return 1"),
    ):
        assert canonical(PLAIN.replace(old, new))[1] != cls


def test_the_self_check_keeps_a_wrong_result_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = plugin._groups

    def wrong(*arguments: Any, **options: Any) -> Iterator[Any]:
        for count, batch in right(*arguments, **options):
            if isinstance(batch["x"], torch.Tensor) and batch["x"].dtype == torch.bfloat16:
                batch["x"] = -batch["x"]
            yield count, batch

    before = functions()
    monkeypatch.setattr(plugin, "_groups", wrong)
    assert not plugin.activate()
    assert functions() == before
    assert "difference" in plugin.status() and "['x']" in plugin.status()


def test_a_broken_core_does_not_take_vllm_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**options: Any) -> Any:
        raise ImportError("no such symbol")

    monkeypatch.setattr(plugin, "collator", broken)
    plugin.register()
    assert not plugin.is_active()
    assert "no such symbol" in plugin.status()


class Panic(BaseException):
    """As pyo3's, which is no ``Exception`` either."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("where", ["collator", "_self_check", "activate"])
def test_a_panic_does_not_take_vllm_down(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    raised: BaseException = Panic()

    def panicking(**options: Any) -> Any:
        raise raised

    before = functions()
    monkeypatch.setattr(plugin, where, panicking)
    plugin.register()
    assert not plugin.is_active() and functions() == before
    assert "Panic" in plugin.status()
    if where != "activate":
        assert not plugin.activate()
    for raised in (KeyboardInterrupt(), SystemExit(), GeneratorExit()):
        with pytest.raises(type(raised)):
            plugin.register()
        assert not plugin.is_active() and functions() == before


def test_a_broken_log_does_not_make_it_look_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise Panic

    logger = logging.getLogger("vllm.plugins.mmcollate")
    monkeypatch.setattr(logger, "isEnabledFor", broken)
    plugin.register()
    assert plugin.is_active() and plugin.status().startswith("vLLM ")


def test_the_off_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCOLLATE_DISABLE", "1")
    plugin.register()
    assert not plugin.is_active()
    assert "MMCOLLATE_DISABLE" in plugin.status()
    monkeypatch.setenv("MMCOLLATE_DISABLE", "0")
    plugin.register()
    assert plugin.is_active()


def test_what_was_patched_on_top_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.activate()
    ours = utils._batch_mm_items

    def theirs(items: Any, **options: Any) -> Any:
        return ours(items, **options)

    monkeypatch.setattr(utils, "_batch_mm_items", theirs)
    assert not plugin.is_active()
    assert not plugin.deactivate()
    assert utils._batch_mm_items is theirs
    monkeypatch.undo()
    assert plugin.is_active()


def test_the_status_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = dict(zip(NAMES, functions(), strict=True))
    plugin.activate()
    active = plugin.status()
    with monkeypatch.context() as patch:
        patch.setattr(utils, "_batch_mm_items", lambda items, **options: {})
        assert "replaced by another" in plugin.status()
        patch.delattr(utils, "_batch_mm_items")
        assert "replaced by another" in plugin.status()
    assert plugin.status() == active
    with monkeypatch.context() as patch:
        patch.setattr(utils, "_batch_mm_items", theirs["_batch_mm_items"])
        assert not plugin.is_active()
        assert "put back" in plugin.status()
    assert plugin.status() == active
    plugin.deactivate()
    assert plugin.status() == "deactivated"


def test_what_others_put_back_can_be_replaced_again() -> None:
    theirs = dict(zip(NAMES, functions(), strict=True))
    for put_back in (NAMES, NAMES[:1]):
        plugin.activate()
        active = plugin.status()
        for name in put_back:
            setattr(utils, name, theirs[name])
        assert plugin.activate() and plugin.is_active() and plugin.status() == active
        for name in put_back:
            setattr(utils, name, theirs[name])
        assert plugin.deactivate() and plugin.status() == "deactivated"
        assert functions() == list(theirs.values())


def test_functions_of_mmcollate_put_back_by_others_still_know_those_of_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = functions()
    plugin.activate()
    ours = dict(zip(NAMES, functions(), strict=True))
    plugin.deactivate()
    for name in NAMES:
        setattr(utils, name, ours[name])
    with monkeypatch.context() as patch:
        patch.setattr(utils, NAMES[0], functools.partial(print))
        assert not plugin.activate()
        assert "replaced by another" in plugin.status()
        assert plugin.originals()._batch_mm_items(items_of(batched, [1])) == {"x": [1]}
    assert plugin.activate()
    assert plugin.originals()._batch_mm_items(items_of(batched, [1])) == {"x": [1]}
    plugin.deactivate()
    assert functions() == theirs


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[Heard]:
    logger, handler = logging.getLogger("vllm.plugins.mmcollate"), Heard()
    level = logger.level
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_one_line_says_that_it_is_active(heard: Heard) -> None:
    logging.getLogger("vllm.plugins.mmcollate").setLevel(logging.INFO)
    plugin.register()
    list(utils.group_and_batch_mm_items(items_of(batched, [torch.arange(3)])))
    [line] = heard.lines
    assert line.startswith(f"mmcollate {mmcollate.__version__} is active: vLLM ")


def test_a_line_that_nobody_could_hear_is_said_with_the_first_batch(heard: Heard) -> None:
    logger = logging.getLogger("vllm.plugins.mmcollate")
    logger.setLevel(logging.WARNING)
    plugin.register()
    assert heard.lines == []
    logger.setLevel(logging.INFO)
    for _ in range(2):
        list(utils.group_and_batch_mm_items(items_of(batched, [torch.arange(3)])))
    assert len(heard.lines) == 1


def test_verification_passes_right_batches_and_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCOLLATE_VERIFY", "1")
    assert plugin.activate() and "verified" in plugin.status()
    items = items_of(batched, [torch.arange(3), torch.arange(3)])
    assert len(list(utils.group_and_batch_mm_items(items))) == 1
    assert utils._batch_mm_items(items)["x"].shape == (2, 3)
    assert list(utils.group_and_batch_mm_items([])) == []
    ranks = items_of(flat, [torch.zeros(2), torch.zeros(2, 3)])
    with pytest.raises(RuntimeError, match="expand"):
        list(utils.group_and_batch_mm_items(ranks))


def test_verification_names_the_field_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCOLLATE_VERIFY", "1")
    plugin.activate()
    right = plugin.collator()

    class Wrong:
        def next_group(self, *arguments: Any) -> Any:
            result = right.next_group(*arguments)
            result[1]["x"][0, 0] += 1
            return result

    items = items_of(batched, [torch.arange(3), torch.arange(3)])
    monkeypatch.setattr(plugin, "collator", Wrong)
    with pytest.raises(errors.VerificationError, match=r"\['x'\].* byte 0"):
        list(utils.group_and_batch_mm_items(items))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
def test_exceptions_carry_a_note_that_names_field_and_item() -> None:
    plugin.activate()
    items = items_of(flat, [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(4)])
    with pytest.raises(IndexError) as caught:
        list(utils.group_and_batch_mm_items(items))
    [note] = caught.value.__notes__
    assert "field 'x', item 2" in note and "float32 (4,)" in note


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1]), torch.tensor([1], dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, 2), torch.zeros(2, 2).t().contiguous().t()),
        ([1], (1,)),
        ([1], [1, 2]),
        ([1], [True]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (None, 0),
    ],
)
def test_the_comparison_sees_every_difference(ours: Any, theirs: Any) -> None:
    assert bits.first_difference(ours, theirs) is not None
    assert bits.first_difference(ours, ours) is None
    nan = torch.tensor([float("nan")])
    assert bits.first_difference(nan, nan.clone()) is None


def test_a_patch_made_before_activation_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs_first = plugin.originals()._batch_mm_items

    def patched(items: Any, **options: Any) -> Any:
        return theirs_first(items, **options)

    monkeypatch.setattr(utils, "_batch_mm_items", patched)
    assert not plugin.activate()
    assert utils._batch_mm_items is patched
    monkeypatch.undo()
    assert plugin.activate()


def test_a_patch_on_top_survives_another_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.activate()
    ours = utils._batch_mm_items

    def patched(items: Any, **options: Any) -> Any:
        return ours(items, **options)

    monkeypatch.setattr(utils, "_batch_mm_items", patched)
    assert not plugin.activate()
    assert utils._batch_mm_items is patched


def elements(**fields: tuple[Any, Any]) -> Any:
    from vllm.multimodal import inputs

    return inputs.MultiModalKwargsItem(
        {
            name: inputs.MultiModalFieldElem(data=data, field=field)
            for name, (data, field) in fields.items()
        }
    )


def test_a_list_that_grows_into_itself_meanwhile_is_an_error_and_no_crash() -> None:
    from vllm.multimodal.inputs import MultiModalBatchedField

    held: list[Any] = [1]

    class Growing(MultiModalBatchedField):
        def _reduce_data(self, batch: Any, *, pin_memory: bool) -> Any:
            held.append(held)
            return batch

    item = elements(a=(torch.ones(2), Growing()), b=(held, MultiModalBatchedField()))
    with pytest.raises(RecursionError):
        list(plugin.group_and_batch_mm_items([item], device="cpu"))


def test_a_declaration_that_runs_code_can_not_free_what_is_gathered() -> None:
    from vllm.multimodal.inputs import MultiModalBatchedField

    leaves = [torch.ones(1 << 22) for _ in range(2)]

    class Freeing:
        def __bool__(self) -> bool:
            for leaf in leaves:
                leaf.untyped_storage().resize_(0)
            return False

    field = MultiModalBatchedField(keep_on_cpu=Freeing())  # type: ignore[arg-type]
    items = [
        elements(a=(leaf, MultiModalBatchedField()), b=(torch.ones(2), field)) for leaf in leaves
    ]
    [(_, batch)] = plugin.group_and_batch_mm_items(items)
    assert batch["a"].sum().item() == 2 << 22


@pytest.mark.parametrize("kind", [batched, flat])
def test_bools_of_other_bytes_than_0_and_1_come_out_as_from_vllm(kind: Any) -> None:
    odd = torch.tensor([[2, 0, 7], [0, 3, 1]], dtype=torch.uint8).view(torch.bool)
    for leaves in ([odd, odd], [odd.t(), odd.t()], [odd, odd[:, :2]]):
        ours = list(plugin.group_and_batch_mm_items(items_of(kind, leaves)))
        theirs = list(plugin.originals().group_and_batch_mm_items(items_of(kind, leaves)))
        assert bits.first_difference(ours, theirs) is None


def test_the_reference_gets_the_elements_of_the_walk() -> None:
    from vllm.multimodal import inputs

    class Changing(inputs.MultiModalBatchedField):
        def _reduce_data(self, batch: Any, *, pin_memory: bool) -> Any:
            items[0]["z"] = inputs.MultiModalFieldElem(data=99, field=Changing())
            return batch

    items = [elements(a=(1, Changing()), z=(5, Changing()))]
    [(_, batch)] = plugin.group_and_batch_mm_items(items)
    assert batch["z"] == [5]


def test_a_patch_made_later_counts_only_where_the_core_asks_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin.activate()
    monkeypatch.setattr(inputs.MultiModalBatchedField, "_reduce_data", lambda *_, **__: "patched")
    monkeypatch.setattr(inputs, "nested_tensors_equal", lambda *_, **__: False)
    monkeypatch.setattr(utils, "nested_tensors_equal", lambda *_, **__: False)
    leaves = [torch.ones(2), torch.ones(2)]
    [(_, batch)] = utils.group_and_batch_mm_items(items_of(batched, leaves))
    assert batch["x"].shape == (2, 2)
    [(_, batch)] = utils.group_and_batch_mm_items(
        items_of(batched, [x.to_sparse() for x in leaves])
    )
    assert batch["x"] == "patched"
    whole = [torch.arange(3), torch.arange(3)]
    assert len(list(utils.group_and_batch_mm_items(items_of(shared, whole)))) == 1
    assert len(list(utils.group_and_batch_mm_items(items_of(shared, leaves)))) == 2
    plugin.deactivate()
    assert not plugin.activate()

"""What an audit finds in a model besides its weights, and that all is as before afterwards."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from mmcollate import Batched, CollateTypeError
from mmcollate.audit import audit
from mmcollate.audit.contents import within
from mmcollate.audit.session import Session
from mmcollate.audit.virtual import VirtualTensor
from torch import nn


def audited(model: Any, times: int = 1, **options: Any) -> Any:
    """Audits one after the other, of which each has to find the same: the last one."""
    found = []
    for _ in range(times):
        found.append(audit(model, [{"x": torch.ones(4, 6)}], {"x": Batched()}, **options))
        assert found[-1].error is None
    assert len({str(x) for x in found}) == 1
    return found[-1]


def mismatches(report: Any) -> list[str]:
    events = [*report.other_events, *report.fields[0].events]
    return [event.operation for event in events if event.kind == "mismatch"]


class Model(nn.Module):
    """Weights, and a function to be run with what they give."""

    def __init__(self, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return y if self.run is None else self.run(self, y)


def table(size: int, device: Any) -> torch.Tensor:
    return torch.arange(float(size), device=device)


# State that belongs together


class LRU:
    """As those that engines keep: an order, sizes, and what is kept."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self.order: OrderedDict[int, None] = OrderedDict()

    def put(self, key: int, value: Any) -> None:
        self.kept[key] = value
        self.order[key] = None
        self.order.move_to_end(key)
        while len(self.order) > 2:
            del self.kept[self.order.popitem(last=False)[0]]


class Slots:
    __slots__ = ("made", "ready")

    def __init__(self) -> None:
        self.ready = False


class Ring:
    def __init__(self) -> None:
        self.position, self.rows = 3, torch.zeros(5, 6)


class Holder:
    """In the place of a module: what it has is a class's."""

    lru = LRU()
    lists: tuple[list[Any], list[Any]] = ([], [])
    ring = Ring()
    slots = Slots()
    lazily: ClassVar[Any] = defaultdict(list)
    made: Any = None
    ready = False


tables: dict[int, torch.Tensor] = {}
tables_made: set[int] = set()


def use_lru(holder: Any, y: torch.Tensor) -> torch.Tensor:
    assert holder.lru.kept.keys() == holder.lru.order.keys() == {1, 2}
    holder.lru.put(1, 0)
    holder.lru.put(6, table(6, y.device))
    return y * holder.lru.kept[6]


def use_lists(holder: Any, y: torch.Tensor) -> torch.Tensor:
    keys, made = holder.lists
    if 6 not in keys:
        keys.append(6)
        made.append(table(6, y.device))
    return y * made[keys.index(6)]


def use_ring(holder: Any, y: torch.Tensor) -> torch.Tensor:
    assert holder.ring.position == 3
    holder.ring.rows[holder.ring.position] = y[0].cpu()
    holder.ring.position = (holder.ring.position + 1) % 5
    return y


def use_slots(holder: Any, y: torch.Tensor) -> torch.Tensor:
    if not holder.slots.ready:
        holder.slots.made, holder.slots.ready = table(6, y.device), True
    return y * holder.slots.made


def use_lazily(holder: Any, y: torch.Tensor) -> torch.Tensor:
    if not holder.lazily["made"]:
        holder.lazily["made"].append(table(6, y.device))
    return y * holder.lazily["made"][0]


def use_flag(holder: Any, y: torch.Tensor) -> torch.Tensor:
    if not holder.ready:
        holder.made, holder.ready = table(6, y.device), True
    return y * holder.made


TOGETHER = {
    "an order and what is kept": use_lru,
    "two lists": use_lists,
    "a position and rows": use_ring,
    "slots": use_slots,
    "a dictionary that makes its values": use_lazily,
    "a flag and a table": use_flag,
}


def state_of(holder: Any) -> Any:
    return copy.deepcopy(
        [
            *(dict(holder.lru.kept), list(holder.lru.order), holder.lists, dict(holder.lazily)),
            *(holder.ring.position, holder.ring.rows.tolist(), holder.ready, holder.made),
            *(holder.slots.ready, hasattr(holder.slots, "made")),
        ]
    )


@pytest.mark.parametrize("where", ["module", "class"])
@pytest.mark.parametrize("way", TOGETHER)
def test_what_belongs_together_is_put_back_together(way, where):
    class Holding(Model):
        pass

    model = Holding()
    holder: Any = model if where == "module" else Holding
    holder.run = staticmethod(lambda y: None) if where == "class" else None
    for name, value in vars(Holder).items():
        if not name.startswith("__"):
            setattr(holder, name, copy.deepcopy(value))
    holder.lru.put(1, 0)
    holder.lru.put(2, 0)
    model.run = lambda model, y: TOGETHER[way](holder, y)
    before = state_of(holder)
    assert mismatches(audited(model, 3)) == []
    assert state_of(holder) == before
    model(torch.ones(4, 6))


def test_a_file_is_put_back_as_a_whole():
    def run(model: Model, y: torch.Tensor) -> torch.Tensor:
        if 6 not in tables_made:
            tables[6] = table(6, y.device)
            tables_made.add(6)
        return y * tables[6]

    assert mismatches(audited(Model(run), 2)) == []
    assert (tables, tables_made) == ({}, set())


file_table = torch.zeros(3)


def test_what_a_file_counts_stays():
    def run(model: Model, y: torch.Tensor) -> torch.Tensor:
        tables_made.add(7)
        # Read, as it could be written.
        assert file_table.numpy().sum() == 0
        return y

    audited(Model(run))
    assert tables_made == {7}
    tables_made.clear()


def test_what_a_file_counts_is_taken_back_with_what_was_written_there():
    def run(model: Model, y: torch.Tensor) -> torch.Tensor:
        file_table.numpy()[len(tables_made)] = 1
        tables_made.add(7)
        return y

    audited(Model(run), 2)
    assert tables_made == set() and file_table.tolist() == [0, 0, 0]


# What other people's classes do


def refuses(*_: Any) -> Any:
    raise RuntimeError("not for you")


class WithoutAttributes:
    __getattr__ = refuses


class OfNoClass:
    __class__ = property(refuses)


class OfNoDictionary:
    __dict__ = property(refuses)  # type: ignore[assignment]


class OfNoEquals:
    __eq__ = refuses
    __hash__ = None  # type: ignore[assignment]


class LazyDict(OrderedDict):
    values = keys = items = __iter__ = __getitem__ = __setitem__ = refuses


class LazyList(list):
    __iter__ = __getitem__ = __setitem__ = __len__ = refuses


class LazySet(set):
    __iter__ = __len__ = clear = update = refuses


class LazyTuple(tuple):
    __iter__ = __len__ = refuses


STRANGE = {
    "attributes": WithoutAttributes,
    "class": OfNoClass,
    "dictionary": OfNoDictionary,
    "equals": OfNoEquals,
    "dict": LazyDict,
    "list": lambda: LazyList([1]),
    "set": lambda: LazySet([1]),
    "tuple": lambda: LazyTuple([1]),
    "array": lambda: np.array([0.5, 0.5]),
    "array of objects": lambda: np.array([object()]),
}


@pytest.mark.parametrize("attributes", [False, True])
@pytest.mark.parametrize("where", ["module", "class", "later"])
@pytest.mark.parametrize("way", STRANGE)
def test_objects_of_any_kind_are_left_alone(way, where, attributes):
    class Strange(Model):
        pass

    model, strange = Strange(), STRANGE[way]()
    if where != "later":
        if where == "module":
            # Modules themselves ask what they get for its class.
            vars(model)["strange"] = strange
        else:
            Strange.strange = strange  # type: ignore[attr-defined]

    def run(model: Any, y: torch.Tensor) -> torch.Tensor:
        model.linear.weight.zero_()
        model.linear.bias = None
        model.late = Strange.late = [strange, y]
        return y

    model.run = run
    weight, bias, values = model.linear.weight, model.linear.bias, model.linear.weight.tolist()
    report = audited(model, attributes=attributes)
    assert mismatches(report) == [] and report.fields[0].verdict == "right"
    assert model.linear.weight is weight and model.linear.bias is bias
    assert weight.tolist() == values
    assert not hasattr(model, "late") and "late" not in vars(Strange)


class Closed(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        if value is None:
            refuses()
        super().__setattr__(name, value)

    __delattr__ = refuses


def test_a_class_that_refuses_its_former_values_gets_them_back():
    class Owner(Model, metaclass=Closed):
        kept: Any = None

    def run(model: Any, y: torch.Tensor) -> torch.Tensor:
        Owner.kept = Owner.late = y
        model.linear.weight.zero_()
        return y

    model = Owner(run)
    values = model.linear.weight.tolist()
    audited(model, 2)
    assert Owner.kept is None and not hasattr(Owner, "late")
    assert model.linear.weight.tolist() == values


def test_a_failure_afterwards_keeps_nothing_from_being_put_back(monkeypatch):
    def run(model: Any, y: torch.Tensor) -> torch.Tensor:
        tables[6] = y
        model.kept = y
        model.linear.weight.zero_()
        return y

    model = Model(run)
    weight, values = model.linear.weight, model.linear.weight.tolist()
    monkeypatch.setattr(Session, "leaves", refuses)
    with pytest.raises(RuntimeError, match="not for you"):
        audited(model)
    assert model.linear.weight is weight and weight.tolist() == values
    assert not hasattr(model, "kept") and tables == {}


def test_numbers_and_names_are_not_looked_at():
    inside = [1, 2.0, "a", b"b", None, True, torch.float32]
    assert list(within([inside])) == [inside]
    assert list(within([dict(zip(inside, inside, strict=True))])) == [
        dict(zip(inside, inside, strict=True))
    ]


@pytest.mark.parametrize("compiled", ["script", "trace"])
def test_compiled_modules_are_refused(compiled):
    model = Model()
    model.linear = (
        torch.jit.script(nn.Linear(6, 6))
        if compiled == "script"
        else torch.jit.trace(nn.Linear(6, 6), torch.ones(4, 6))
    )
    with pytest.raises(CollateTypeError, match=r"is compiled by torch.jit.* audit the module that"):
        audited(model)
    assert model(torch.ones(4, 6)).shape == (4, 6)


# Where weights are


class Helper:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class Named(NamedTuple):
    x: Any


@dataclass
class Data:
    x: Any


@dataclass(frozen=True)
class Frozen:
    __slots__ = ("x",)
    x: Any


def enclosing(weight: torch.Tensor) -> Any:
    return lambda y: y @ weight


ELSEWHERE = {
    "list": lambda w: ([w], lambda held, y: y @ held[0]),
    "dict": lambda w: ({"w": w}, lambda held, y: y @ held["w"]),
    "tuple": lambda w: ((w,), lambda held, y: y @ held[0]),
    "object": lambda w: (Helper(w), lambda held, y: y @ held.weight),
    "closure": lambda w: (enclosing(w), lambda held, y: held(y)),
    "default": lambda w: ((lambda y, w=w: y @ w.t()), lambda held, y: held(y)),
}


@pytest.mark.parametrize("attributes", [False, True])
@pytest.mark.parametrize("way", ELSEWHERE)
def test_a_parameter_is_on_the_device_wherever_it_is_held(way, attributes):
    model: Any = Model()
    weight = model.linear.weight
    model.held, use = ELSEWHERE[way](weight)
    places = []

    def run(model: Any, y: torch.Tensor) -> torch.Tensor:
        places.extend([weight.device.type, weight.is_cuda])
        return use(model.held, y)

    model.run = run
    assert mismatches(audited(model, 2, attributes=attributes)) == []
    assert places == ["cuda", True] * 2
    assert weight.device.type == "cpu" and model.linear.weight is weight


def test_what_was_made_of_a_parameter_before_stays_on_the_cpu():
    model: Any = Model(lambda model, y: y @ model.turned)
    model.turned = model.linear.weight.detach().t()
    assert mismatches(audited(model)) == ["aten.mm.default"]
    # Module.to makes new buffers.
    model = Model(lambda model, y: y * model.held[0])
    model.register_buffer("scale", torch.ones(6))
    model.held = [model.scale]
    assert mismatches(audited(model)) == ["aten.mul.Tensor"]


ATTRIBUTES = {
    "named tuple": (lambda: Named(torch.ones(6)), lambda held, y: y * held.x),
    "dataclass": (lambda: Data([torch.ones(6)]), lambda held, y: y * held.x[0]),
    "frozen dataclass with slots": (lambda: Frozen(torch.ones(6)), lambda held, y: y * held.x),
    "dict of tuples": (lambda: {"a": (torch.ones(6), 1)}, lambda held, y: y * held["a"][0]),
    "list of modules": (lambda: [nn.Linear(6, 6)], lambda held, y: held[0](y)),
}


@pytest.mark.parametrize("way", ATTRIBUTES)
def test_plain_attributes_are_on_the_device_however_deep(way):
    made, use = ATTRIBUTES[way]
    model: Any = Model(lambda model, y: use(model.held, y))
    model.held = made()
    before, content = model.held, list(map(id, within([model.held])))
    assert mismatches(audited(model, 2, attributes=True)) == []
    assert model.held is before and list(map(id, within([before]))) == content
    assert all(not isinstance(x, VirtualTensor) for x in within([before]))
    assert len(mismatches(audited(model, 2))) == 1


def test_what_other_objects_hold_stays_where_it_is():
    def run(model: Any, y: torch.Tensor) -> torch.Tensor:
        assert model.lru.kept[6].is_cpu
        return y

    model: Any = Model(run)
    model.lru = LRU()
    model.lru.put(6, torch.ones(6))
    audited(model, attributes=True)


def test_weights_of_inference_mode_share_memory_as_before():
    seen = []
    with torch.inference_mode():
        model: Any = Model()
        model.register_buffer("whole", torch.zeros(8))
        model.register_buffer("part", model.whole[2:6:2])
        model.register_buffer("turned", torch.tensor([1 + 2j, 3 + 4j]).conj())

    def run(model: Any, y: torch.Tensor) -> torch.Tensor:
        model.whole.add_(1)
        seen.extend([model.part.tolist(), model.turned.tolist()])
        return y

    model.run = run
    audited(model, 2)
    assert seen == [[1, 1], [1 - 2j, 3 - 4j]] * 2
    assert model.whole.tolist() == [0] * 8 and model.part.tolist() == [0, 0]


# From one audit to the next


def remembering() -> dict[str, Callable[[Any], torch.Tensor]]:
    """Functions that remember a table where no audit looks."""
    cache: dict[str, torch.Tensor] = {}

    def enclosed(device: Any) -> torch.Tensor:
        return cache.setdefault(str(device), table(6, device))

    def default(device: Any, cache: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        return cache.setdefault(str(device), table(6, device))

    def attribute(device: Any) -> torch.Tensor:
        if not hasattr(attribute, "made"):
            attribute.made = table(6, device)[None][0]
        return attribute.made

    remembered = functools.lru_cache(lambda device: table(6, device))
    return {
        "closure": enclosed,
        "default argument": default,
        "attribute of a function": attribute,
        "lru_cache": remembered,
    }


@pytest.mark.parametrize("way", remembering())
def test_what_helpers_remember_is_on_the_device_again_in_the_next_audit(way):
    function, got = remembering()[way], []

    def run(model: Model, y: torch.Tensor) -> torch.Tensor:
        got.append(function(y.device))
        return y * got[-1]

    assert mismatches(audited(Model(run), 3)) == []
    assert len(set(map(id, got))) == 1
    [kept] = {id(x): x for x in got}.values()
    assert type(kept) is torch.Tensor and kept.device.type == "cpu"
    assert (kept + torch.ones(6)).tolist() == [1, 2, 3, 4, 5, 6]


def test_what_came_from_a_batch_is_not_on_the_device_again():
    kept: list[torch.Tensor] = []

    def run(model: Model, y: torch.Tensor) -> torch.Tensor:
        kept.append(y)
        return y + kept[0]

    assert mismatches(audited(Model(run))) == []
    found = audit(Model(run), [{"x": torch.ones(4, 6)}], {"x": Batched()})
    assert mismatches(found) == ["aten.add.Tensor"]


def test_weights_that_something_kept_are_on_the_cpu_again():
    kept: list[torch.Tensor] = []

    def run(model: Any, y: torch.Tensor) -> torch.Tensor:
        kept.append(model.linear.weight)
        return y

    model = Model(run)
    audited(model)
    weight = model.linear.weight
    found = audited(lambda x: weight.sum(), modules=[])
    assert found.other_events == () and found.fields[0].verdict == "unused"


# Writes past torch, and what is no value


def test_what_numpy_writes_to_a_plain_tensor_is_undone():
    def run(model: Any, y: torch.Tensor) -> torch.Tensor:
        model.table.numpy()[0] = 5
        model.array[0] = 7
        return y

    model: Any = Model(run)
    model.table, model.array = torch.zeros(3), np.zeros(3)
    table, array = model.table, model.array
    audited(model, 2)
    assert model.table is table and model.array is array
    assert table.tolist() == array.tolist() == [0, 0, 0]


def test_a_tensor_of_a_class_that_a_plain_one_replaced_is_back():
    class Owner(Model):
        table: Any = torch.zeros(3)
        calls = 0

    def run(model: Any, y: torch.Tensor) -> torch.Tensor:
        Owner.table, Owner.calls = torch.ones(3), 1
        return y

    before = Owner.table
    audited(Owner(run))
    assert Owner.table is before and Owner.calls == 0


def test_whether_gradients_are_wanted_is_as_before():
    def run(model: Any, y: torch.Tensor) -> torch.Tensor:
        model.plain.requires_grad_()
        model.held[0].requires_grad_(False)
        return y

    model: Any = Model(run)
    model.plain, model.held = torch.zeros(3), [nn.Parameter(torch.zeros(3)), deque([1])]
    audited(model)
    assert not model.plain.requires_grad and model.held[0].requires_grad


def test_objects_of_other_packages_are_left_alone_in_a_file() -> None:
    """They may lead to all that a process holds."""
    foreign = type("Foreign", (), {"__module__": "elsewhere.part"})()
    foreign.far, own = ["far"], type("Own", (), {"__module__": "model.part"})()
    own.near, own.foreign = [["near"]], foreign
    found = list(within([{"a": [own], "b": {"c": foreign}}], package="model"))
    assert own.near[0] in found and foreign in found
    assert foreign.far not in found
    assert foreign.far in list(within([own]))

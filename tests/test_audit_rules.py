"""What a device refuses, waits for and copies; what a model refuses; torch after an audit."""

from __future__ import annotations

import functools
import itertools
import linecache
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mmcollate import Batched, CollateTypeError
from mmcollate.audit import audit
from torch import nn


def audited(forward: Any, given: Any, keep: Any = (), **options: Any) -> Any:
    """The report; of plain functions as such that use no weights."""
    fields = {name: Batched(keep_on_cpu=name in keep) for name in given}
    if not isinstance(getattr(forward, "__self__", forward), nn.Module):
        options.setdefault("modules", [])
    return audit(forward, [given], fields, **options)


def verdicts(forward: Any, given: Any, keep: Any = (), *, fails: bool = False) -> dict[str, str]:
    found = audited(forward, given, keep)
    assert (found.error is not None) == fails, found.error
    return {field.field: field.verdict for field in found.fields}


def events(forward: Any, given: Any, keep: Any = ()) -> list[str]:
    """All events but device uses, in short, each once."""
    found = audited(forward, given, keep)
    assert found.error is None
    seen = [event for field in found.fields for event in field.events] + [*found.other_events]
    return [
        " ".join([event.kind, event.operation, *event.fields])
        for event in dict.fromkeys(seen)
        if event.kind != "device_use"
    ]


X = torch.arange(24, dtype=torch.float32).reshape(4, 6)

# Numbers of the CPU beside tensors of the device. RegisterCUDA.cpp checks the devices of whatever
# native_functions.yaml does not free of it; TensorIterator takes one tensor without dimensions.

REFUSED = {
    "embedding": (lambda x, k: F.embedding(k, x), torch.tensor(3)),
    "index_select": (lambda x, k: x.index_select(0, k), torch.tensor(3)),
    "gather": (lambda x, k: x.sum().gather(0, k), torch.tensor(0)),
    "take": (torch.take, torch.tensor(3)),
    "bucketize": (lambda x, k: torch.bucketize(k, x[0]), torch.tensor(2.5)),
    "searchsorted": (lambda x, k: torch.searchsorted(x[0], k), torch.tensor(2.5)),
    "baddbmm": (lambda x, k: torch.baddbmm(k, x[None], x.T[None]), torch.tensor(0.5)),
    "mask": (lambda x, k: x.masked_fill(k, 0.0), torch.tensor(True)),
    "index_fill": (lambda x, k: x.index_fill(0, k, 1.0), torch.tensor(3)),
    "index_add": (lambda x, k: x.index_add(0, k, x[:1]), torch.tensor(3)),
    "cat": (lambda x, k: torch.hstack([x[0, 0], k]), torch.tensor(0.5)),
    "stack": (lambda x, k: torch.stack([x.sum(), k]), torch.tensor(0.5)),
    "clamp": (lambda x, k: x.clamp(min=k), torch.tensor(0.5)),
    "logaddexp": (torch.logaddexp, torch.tensor(0.5)),
    "two numbers": (lambda x, k: torch.addcmul(x, k, k), torch.tensor(0.5)),
    "quantile": (torch.quantile, torch.tensor(0.5)),
}

TAKEN = {
    "add": (lambda x, k: x + k, torch.tensor(0.5)),
    "from the left": (lambda x, k: k - x, torch.tensor(0.5)),
    "in place": (lambda x, k: x.clone().mul_(k), torch.tensor(0.5)),
    "out": (lambda x, k: torch.add(x, k, out=torch.empty_like(x)), torch.tensor(0.5)),
    "compared": (lambda x, k: (x < k, x.clone().lt_(k)), torch.tensor(0.5)),
    "power": (lambda x, k: x**k, torch.tensor(2.0)),
    "floor_divide": (lambda x, k: x // k, torch.tensor(2.0)),
    "maximum": (lambda x, k: torch.maximum(k, x), torch.tensor(0.5)),
    "logical_and": (lambda x, k: x.logical_and(k), torch.tensor(True)),
    "lerp": (lambda x, k: torch.lerp(x, x * 2, k), torch.tensor(0.5)),
    "addcmul": (lambda x, k: torch.addcmul(x, x, k), torch.tensor(0.5)),
    "where": (lambda x, k: torch.where(k > 1, k, x), torch.tensor(0.5)),
    "foreach": (lambda x, k: torch._foreach_mul([x, x], k), torch.tensor(0.5)),
    "filled by mask": (lambda x, k: x.masked_fill(x > 1, k), torch.tensor(0.5)),
    "filled by index": (lambda x, k: x.index_fill(0, x[0, :1].long(), k), torch.tensor(0.5)),
    "put": (lambda x, k: x.clone().index_put_((x[0, :1].long(),), k), torch.tensor(0.5)),
    "row": (lambda x, k: x[k], torch.tensor(3)),
    "loss": (lambda x, k: 2 * torch.ops.aten.mse_loss(x, k), torch.tensor(0.5)),
}


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("mode", [lambda x: x, torch.inference_mode()], ids=["", "inference"])
def test_a_number_of_the_cpu_is_refused_by_all_but_pointwise_operations(way, mode):
    forward, k = REFUSED[way]
    found = mode(lambda x, k: forward(x, k) is None)
    assert verdicts(found, {"x": X, "k": k}, ["k"])["k"] == "wrong"
    assert verdicts(found, {"x": X, "k": k})["k"] == "right"


@pytest.mark.parametrize("way", TAKEN)
@pytest.mark.parametrize("mode", [lambda x: x, torch.inference_mode()], ids=["", "inference"])
def test_a_number_of_the_cpu_may_be_beside_tensors_of_the_device(way, mode):
    forward, k = TAKEN[way]
    given = {"x": X, "k": k}
    assert verdicts(mode(forward), given, ["k"])["k"] == "right"
    assert [x for x in events(mode(forward), given, ["k"]) if not x.startswith("host_read")] == []


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
def test_a_kept_number_looked_up_in_a_table_of_the_model_is_wrong():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = nn.Embedding(10, 6)

        def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
            return x + self.kinds(kind)

    given = {"x": X, "kind": torch.tensor(1)}
    assert verdicts(Model(), given, ["kind"])["kind"] == "wrong"
    assert verdicts(Model(), given)["kind"] == "right"


@pytest.mark.parametrize("fill", [torch.Tensor.masked_fill, torch.Tensor.masked_fill_])
def test_the_host_reads_a_value_that_is_filled_in(fill):
    def forward(x, k):
        fill(x.clone(), x > 1, k)

    assert events(forward, {"x": X, "k": torch.tensor(0.5)})[0].startswith("sync aten.masked_fill")
    assert verdicts(forward, {"x": X, "k": torch.tensor(0.5)})["k"] == "could be kept"


SCATTERED = {
    "slice": lambda x, k: torch.slice_scatter(x, k[:2], 0, 0, 2),
    "select": lambda x, k: torch.select_scatter(x, k[0], 0, 1),
    "diagonal": lambda x, k: torch.diagonal_scatter(x, k[:, 0]),
}


@pytest.mark.parametrize("way", SCATTERED)
def test_what_is_scattered_into_a_copy_comes_from_anywhere(way):
    given = {"x": X, "k": X + 1}
    assert verdicts(SCATTERED[way], given, ["k"])["k"] == "restored"
    there = []

    def back(x, k):
        there.append(SCATTERED[way](k, x).device.type)

    assert events(back, given, ["k"])[0].startswith("sync aten.")
    assert there == ["cpu"]


# Waits

SQUARE = torch.eye(4) * 2

WAITS = {
    "inverse": (torch.linalg.inv, SQUARE, "aten._linalg_check_errors.default"),
    "solved": (lambda x: torch.linalg.solve(x, x), SQUARE, "aten._linalg_check_errors.default"),
    "cholesky": (torch.cholesky, SQUARE, "aten.cholesky.default"),
    "histogram": (torch.histc, X, "aten.histc.default"),
    "drawn": (lambda x: torch.normal(0.0, x), X, "aten.normal.float_Tensor"),
    "segments": (
        lambda x: torch.segment_reduce(x[1], "sum", lengths=(x[0] * 0 + 1).long()),
        X,
        "aten.segment_reduce.default",
    ),
    "many in many": (lambda x: torch.isin(x[0], x), X, "aten.isin.Tensor_Tensor"),
}

NO_WAITS = {
    "inverse without check": (torch.linalg.inv_ex, SQUARE),
    "histogram of a range": (lambda x: torch.histc(x, 4, 0, 9), X),
    "drawn around": (lambda x: torch.normal(x, 1.0), X),
    "segments as they are": (
        lambda x: torch.segment_reduce(x[1], "sum", lengths=(x[0] * 0 + 1).long(), unsafe=True),
        X,
    ),
    "many in few": (lambda x: torch.isin(x, x[0, :2]), X),
}


@pytest.mark.filterwarnings("ignore:torch.cholesky")
@pytest.mark.parametrize("way", WAITS)
def test_the_host_waits(way):
    run, given, operation = WAITS[way]
    assert f"sync {operation} x" in events(run_alone(run), {"x": given})
    assert events(run_alone(run), {"x": given}, ["x"]) == []


@pytest.mark.parametrize("way", NO_WAITS)
def test_the_host_does_not_wait(way):
    run, given = NO_WAITS[way]
    assert events(run_alone(run), {"x": given}) == []


def run_alone(run: Any) -> Any:
    return lambda x: run(x) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_rules_are_those_of_a_real_device():
    wrong = []
    for table, refuses in ((REFUSED, True), (TAKEN, False)):
        for way, (run, k) in table.items():
            if raises(lambda run=run, k=k: run(X.cuda(), k)) != refuses:
                wrong.append(way)
    for table, waits in ((WAITS, True), (NO_WAITS, False)):
        for way, (run, given, *_) in table.items():
            there = given.cuda()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            if raises(lambda run=run, there=there: run(there)) != waits:
                wrong.append(way)
            torch.cuda.set_sync_debug_mode("default")
    assert wrong == []


def raises(run: Any) -> bool:
    try:
        run()
    except RuntimeError:
        return True
    return False


# Refusals


def asserting(condition: str) -> Any:
    """A forward with an ``assert`` that pytest does not rewrite."""
    source = f"def forward(x, k):\n    assert {condition}\n"
    linecache.cache["<asserting>"] = (len(source), None, source.splitlines(True), "<asserting>")
    names: dict[str, Any] = {}
    exec(compile(source, "<asserting>", "exec"), names)
    return names["forward"]


def compares_in_turn(x: torch.Tensor, k: torch.Tensor) -> None:
    if x.device.type != k.device.type:
        message = "together, please"
        raise ValueError(message)


def compares_in_a_set(x: torch.Tensor, k: torch.Tensor) -> None:
    if len({x.device, k.device}) != 1:
        raise ValueError


@pytest.mark.parametrize(
    "forward",
    ["k.device == x.device", compares_in_turn, compares_in_a_set],
    ids=["assert", "raise", "set"],
)
@pytest.mark.parametrize("kept", ["x", "k"])
def test_of_two_places_that_are_compared_that_on_the_cpu_is_wrong(forward, kept):
    forward = asserting(forward) if isinstance(forward, str) else forward
    found = audited(forward, {"x": X, "k": X}, [kept])
    by_name = {field.field: field for field in found.fields}
    [event] = by_name.pop(kept).events
    assert (event.kind, event.fields) == ("mismatch", (kept,))
    [other] = by_name.values()
    assert other.verdict == "unused"
    assert other.reason.startswith("the forward failed after it was asked")


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if self.proj.weight.device != k.device:
            raise ValueError
        return self.proj(x) * k


def test_a_place_may_be_compared_with_that_of_weights():
    assert verdicts(Weighed(), {"x": X, "k": X}, ["k"], fails=True)["k"] == "wrong"
    assert verdicts(Weighed(), {"x": X, "k": X})["k"] == "right"


def wants_each(x: torch.Tensor, k: torch.Tensor) -> None:
    for tensor in (k, x):
        if tensor.device.type != "cpu":
            raise ValueError


@pytest.mark.parametrize("forward", ["k.is_cpu and x.is_cpu", wants_each], ids=["and", "loop"])
def test_of_several_that_are_asked_in_turn_the_last_is_wrong(forward):
    forward = asserting(forward) if isinstance(forward, str) else forward
    found = verdicts(forward, {"x": X, "k": X}, ["k"], fails=True)
    assert found == {"x": "wrong", "k": "unused"}


def wants_no_index(k: torch.Tensor) -> None:
    if k.get_device() >= 0:
        raise ValueError


def tells_by_variable(k: torch.Tensor) -> bool:
    ok = k.is_cpu
    return ok


def wants_by_variable(k: torch.Tensor) -> None:
    tells_by_variable(k)
    ok = k.is_cpu
    if not ok:
        raise ValueError


def wants_by_torch(k: torch.Tensor) -> None:
    torch._assert(k.is_cpu, "on the host")


def wants_by_name(k: torch.Tensor) -> None:
    if str(k.device) != "cpu":
        raise ValueError


@pytest.mark.parametrize(
    "forward", [wants_no_index, wants_by_variable, wants_by_torch, wants_by_name]
)
def test_each_way_to_refuse_a_place(forward):
    assert verdicts(forward, {"k": X}, fails=True)["k"] == "wrong"
    assert audited(forward, {"k": X}, ["k"]).error is None


def made_there(k: torch.Tensor) -> None:
    if torch.ones(3, device=k.device).sum() > 2:
        raise ValueError("too many")


def other_variable(k: torch.Tensor) -> None:
    device = k.device
    if device.type == "cuda" and k.shape[0] > 2:
        raise ValueError("too many")


@pytest.mark.parametrize("forward", [made_there, other_variable])
def test_a_place_where_something_is_made_is_not_refused(forward):
    assert verdicts(forward, {"k": X}, fails=True)["k"] != "wrong"


def on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def wants_by_helper(x: torch.Tensor, k: torch.Tensor) -> None:
    if not on_host(k):
        raise ValueError


def test_a_forward_that_failed_after_a_question_says_so():
    found = audited(wants_by_helper, {"x": X, "k": X})
    by_name = {field.field: field for field in found.fields}
    assert by_name["k"].reason.startswith("the forward failed after it was asked at test_audit_ru")
    assert by_name["k"].reason.endswith(" where it is")
    assert by_name["x"].reason == "nothing touched it, until the forward failed"


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_what_torch_itself_asserts_is_a_mismatch():
    given = {"x": X, "k": torch.tensor([0, 2, 4])}

    def forward(x, k):
        return torch.nested.nested_tensor_from_jagged(x, k)

    assert verdicts(forward, given, ["k"])["k"] == "wrong"
    assert verdicts(forward, given) == {"x": "right", "k": "right"}


# Results


class Held:
    """What a forward returns, with iterators of its own."""

    def __init__(self, y: torch.Tensor, ids: Any) -> None:
        self.y, self.ids = y, ids


def test_iterators_in_objects_of_a_result_are_left_alone():
    ids = (number for number in range(9))
    for held in (ids, itertools.count(), itertools.cycle([1])):
        assert verdicts(lambda x, held=held: Held(x * 2, held), {"x": X})["x"] == "right"
    assert list(ids) == list(range(9))


def test_iterators_without_end_are_left_alone():
    forward = lambda x: [itertools.count(), itertools.repeat(x), x * 2]  # noqa: E731
    assert verdicts(forward, {"x": X})["x"] == "right"


RESULTS = {
    "generator in a tuple": lambda x: ((y * 2 for y in x),),
    "map in a dict": lambda x: {"all": [map(torch.neg, x)]},
    "key": lambda x: {x * 2: 1},
    "key of an object": lambda x: SimpleNamespace(known={x * 2: 1}),
    "parameters": lambda x: nn.ParameterList([nn.Parameter(x * 2)]),
    "buffer": lambda x: buffered(x * 2),
    "closure": lambda x: enclosed(x * 2),
    "default": lambda x: lambda y=x * 2: y,
    "partial": lambda x: [functools.partial(torch.add, x * 2)],
}


def enclosed(y: torch.Tensor) -> Any:
    return lambda: y


def buffered(y: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("y", y)
    return module


@pytest.mark.parametrize("way", RESULTS)
def test_a_tensor_anywhere_in_a_result_is_used(way):
    assert verdicts(RESULTS[way], {"x": X})["x"] == "right"


async def coroutine(x: torch.Tensor) -> torch.Tensor:
    return x * 2


async def generator(x: torch.Tensor) -> Any:
    yield x * 2


class Async(nn.Module):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class AsyncCall:
    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize(
    "forward",
    [coroutine, generator, Async(), Async().forward, AsyncCall(), functools.partial(coroutine)],
)
def test_an_async_forward_is_refused(forward):
    with pytest.raises(CollateTypeError, match="forward is async"):
        audit(forward, [{"x": X}], {"x": Batched()}, modules=[])


# Sparse tensors

SPARSE = {
    "coo": lambda x: x.to_sparse() @ x.T,
    "csr": lambda x: x.to_sparse_csr() @ x.T,
    "dense again": lambda x: x.to_sparse().to_dense() + x,
    "values": lambda x: x.to_sparse().coalesce().values() * x.sum(),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("way", SPARSE)
def test_sparse_tensors_are_followed(way):
    places = []

    def forward(x):
        made = SPARSE[way](x)
        places.append((x.to_sparse().device.type, x.to_sparse().is_cuda, made.is_cuda))
        return made

    assert [x for x in events(forward, {"x": X}) if x.startswith("mismatch")] == []
    assert places == [("cuda", True, True)]
    places.clear()
    assert [x for x in events(forward, {"x": X}, ["x"]) if x.startswith("mismatch")] == []
    assert places == [("cpu", False, False)]


def test_sparse_tensors_of_a_kept_field_meet_the_device():
    forward = lambda x, k: k.to_sparse() @ x.T  # noqa: E731
    assert verdicts(forward, {"x": X, "k": X}, ["k"])["k"] == "wrong"


# What is left of torch

COMPILES = """
import numpy as np, torch
from mmcollate import Batched
from mmcollate.audit import audit
model = torch.nn.Linear(6, 6)
audit(model, [{"input": torch.rand(4, 6)}], {"input": Batched()})
from torch._dynamo.trace_rules import get_torch_obj_rule_map
known = get_torch_obj_rule_map()
assert torch.from_numpy in known and torch.cuda.is_available in known
assert not [x for x in known if (getattr(x, "__module__", "") or "").startswith("mmcollate")]
double = torch.compile(lambda array: torch.from_numpy(array) * 2, backend="eager", fullgraph=True)
assert double(np.ones(3)).tolist() == [2, 2, 2]
"""


def test_torch_compiles_as_before_after_an_audit():
    subprocess.run([sys.executable, "-c", COMPILES], check=True)


LATE = """
import torch
from torch import from_numpy
from torch.cuda import Stream, current_stream, device_count, get_device_name, is_available
Device = torch.device
"""


def test_answers_that_a_module_holds_are_those_of_torch_afterwards():
    late = ModuleType("late")
    asked = []

    def forward(x):
        if not hasattr(late, "Device"):
            exec(LATE, vars(late))
        stream = late.Stream()
        asked.append((late.is_available(), late.device_count(), isinstance(stream, late.Stream)))
        return x.to(late.Device("cuda"))

    assert audited(forward, {"x": X}).error is None
    assert late.is_available() == torch.cuda.is_available()
    assert late.device_count() == torch.cuda.device_count()
    assert type(late.from_numpy(X.numpy())) is torch.Tensor
    assert late.Device("cpu") == torch.device("cpu")
    assert isinstance(torch.device("cpu"), late.Device)
    # In the next audit they are again what that one answers.
    assert audited(forward, {"x": X}).error is None
    assert asked == [(True, 1, True)] * 2


def test_default_device_and_dtype_are_as_before():
    def forward(x):
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("cuda")
        return x + torch.zeros(6)

    before = torch.get_default_dtype()
    assert verdicts(forward, {"x": X})["x"] == "right"
    assert torch.get_default_dtype() is before
    assert torch.zeros(1).device == torch.device("cpu")
    try:
        torch.set_default_device("meta")
        assert verdicts(forward, {"x": X})["x"] == "right"
        assert torch.zeros(1).device == torch.device("meta")
    finally:
        torch.set_default_device(None)


def test_random_state_of_the_device_is_answered():
    def forward(x):
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        return x * 2

    assert verdicts(forward, {"x": X})["x"] == "right"

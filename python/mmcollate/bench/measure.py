"""Timing by turns, and what is said of the times. Nothing here knows what is timed."""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Function = Callable[[], Any]
Quartiles = tuple[float, float, float]

WARM_BELOW = 1e-3
"""Seconds: shorter calls are made once more before each turn, since what the last arm left in the
caches would count."""

LEAST_FOR_P99 = 200
"""Calls: with fewer, the 99th percentile is but the slowest or the second slowest call."""


class Samples(NamedTuple):
    """Seconds a call, by arm and round."""

    seconds: dict[str, list[float]]
    repeats: dict[str, int]
    """Calls in one turn, by arm."""

    @property
    def rounds(self) -> int:
        return min(map(len, self.seconds.values()), default=0)


def interleaved(
    functions: Mapping[str, Function],
    *,
    seconds: float,
    rounds: int = 40,
    least: int = 5,
    before: Function | None = None,
    each_round: Function | None = None,
    order: random.Random | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Times the functions by turns, in a new random order each round.

    Args:
        functions: What is timed, by name; what they return is destroyed inside the timing.
        seconds: About how long, for all together.
        rounds: Most rounds.
        least: Rounds that are made even if they take longer.
        before: Called before each call, outside the timing; then a turn is one call.
        each_round: Called before each round.
        order: Where the order comes from.
        clock: What tells the seconds.
    """
    order = order or random.Random(0)
    once = {name: _second_call(function, clock) for name, function in functions.items()}
    turn = seconds / rounds / max(len(functions), 1)
    repeats = {
        name: 1 if before else max(1, int(turn / max(took, 1e-9))) for name, took in once.items()
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    start = clock()
    for done in range(rounds):
        if done >= least and clock() - start > seconds:
            break
        if each_round is not None:
            each_round()
        for name in order.sample(list(functions), len(functions)):
            function = functions[name]
            if before is not None:
                before()
            elif once[name] < WARM_BELOW:
                function()
            times[name].append(_timed(function, repeats[name], clock))
    return Samples(times, repeats)


def _second_call(function: Function, clock: Callable[[], float]) -> float:
    function()
    return _timed(function, 1, clock)


def _timed(function: Function, repeats: int, clock: Callable[[], float]) -> float:
    """Seconds a call."""
    loop = range(repeats)
    start = clock()
    for _ in loop:
        function()
    return (clock() - start) / repeats


def single_calls(
    functions: Mapping[str, Function],
    *,
    seconds: float,
    most: int = 1000,
    order: random.Random | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of calls that are timed one by one, by turns: for the tails."""
    order = order or random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in functions}
    start = clock()
    for _ in range(most):
        if clock() - start > seconds:
            break
        for name in order.sample(list(functions), len(functions)):
            times[name].append(_timed(functions[name], 1, clock))
    return times


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share ``q`` of them lies, interpolated."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def quartiles(values: Sequence[float]) -> Quartiles:
    """The middle half's ends, and the median between them."""
    return quantile(values, 0.25), quantile(values, 0.5), quantile(values, 0.75)


def ratio(base: Sequence[float], other: Sequence[float]) -> Quartiles:
    """Quartiles of ``base / other``, each of one round: more than 1 if ``other`` is faster."""
    return quartiles([a / b for a, b in zip(base, other, strict=True)])


def p99(values: Sequence[float]) -> float | None:
    """The 99th percentile; ``None`` of too few calls."""
    return quantile(values, 0.99) if len(values) >= LEAST_FOR_P99 else None


def fit(rows: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Coefficients of the linear model ``sum(coefficient * x) = y`` with the least sum of squared
    *relative* errors, so that short times count as much as long ones.

    Args:
        rows: ``(xs, y)``, at least as many as there are coefficients.
    """
    import torch

    left = torch.tensor([[x / y for x in xs] for xs, y in rows], dtype=torch.float64)
    right = torch.ones(len(rows), 1, dtype=torch.float64)
    solution: list[float] = torch.linalg.lstsq(left, right).solution.flatten().tolist()
    return solution

"""The measuring rule of every figure in this repository.

A *turn* of a contender is one untimed call, then at least three timed ones in a row; its result is their median.
Contenders take turns in rotating order, five rounds of it, so that each meets the machine's good and bad moments. A
ratio is formed within a round; of the five, the smallest and the median are quoted, and a bound counts as missed only
if the smallest misses it.

    measured = take_turns({"ours": turn(repeat(call, *args)), "numpy": turn(repeat(other, *args))})
    measured.ratio("ours", "numpy")         # Quote(smallest=..., median=...)
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["LEAST_SECONDS", "ROUNDS", "TIMED_CALLS", "Measured", "Quote", "quote", "repeat", "take_turns", "turn"]

ROUNDS = 5
TIMED_CALLS = 3
# What lies between two readings of the clock lasts at least this long: shorter calls are repeated, so that neither the
# clock nor the step from Python into a contender is part of the result.
LEAST_SECONDS = 0.001


class Quote(NamedTuple):
    """What is said of several measurements of one quantity."""

    smallest: float
    median: float


def quote(values: Iterable[float]) -> Quote:
    """Take the smallest and the median of some measurements."""
    values = list(values)
    return Quote(min(values), statistics.median(values))


class Measured:
    """Medians of every contender, one for each round, in seconds for one call.

    Parameters
    ----------
    seconds : dict of str to list of float
    """

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.seconds = seconds

    def time(self, name: str) -> Quote:
        """Return the seconds for one call of a contender."""
        return quote(self.seconds[name])

    def fastest(self, names: Iterable[str]) -> str:
        """Return the contender with the smallest median of all rounds."""
        return min(names, key=lambda name: statistics.median(self.seconds[name]))

    def ratio(self, name: str, *others: str) -> Quote:
        """Divide a contender's time by that of another, or of the fastest of several others, round by round."""
        other = self.fastest(others)
        return quote(a / b for a, b in zip(self.seconds[name], self.seconds[other], strict=True))


def repeat(call: Callable[..., object], *arguments: object, **keywords: object) -> Callable[[int], None]:
    """Make a plain function, with its arguments, something that runs a given number of times."""
    if keywords:
        call = functools.partial(call, **keywords)

    def run(number: int) -> None:
        for _ in itertools.repeat(None, number):
            call(*arguments)

    return run


def turn(
    run: Callable[[int], None],
    *,
    timed: int = TIMED_CALLS,
    least_seconds: float = LEAST_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], float]:
    """Make a function that takes one turn of a contender and returns its median, in seconds for one call.

    Parameters
    ----------
    run : callable
        `run(number)` calls the contender `number` times; see `repeat`.
    timed : int
        Timed calls in a turn, at least 3.
    least_seconds : float
        What a short contender is repeated for between two readings of the clock; its untimed call is repeated as
        often, and more often where that was too short.
    clock : callable
        Seconds, as `time.perf_counter`.

    Raises
    ------
    ValueError
        For fewer than three timed calls.
    """
    if timed < TIMED_CALLS:
        msg = f"`timed` must be at least {TIMED_CALLS}, got {timed}"
        raise ValueError(msg)
    number = 1

    def seconds(times: int) -> float:
        start = clock()
        run(times)
        return clock() - start

    def take() -> float:
        nonlocal number
        collecting = gc.isenabled()
        gc.disable()
        try:
            while (taken := seconds(number)) < least_seconds:
                wanted = number * least_seconds / taken if taken > 0 else math.inf
                number = int(max(2 * number, min(100 * number, wanted)))
            return statistics.median(seconds(number) for _ in range(timed)) / number
        finally:
            if collecting:
                gc.enable()

    return take


def take_turns(turns: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> Measured:
    """Let contenders take turns, in an order that rotates from round to round.

    Parameters
    ----------
    turns : dict of str to callable
        Each takes one turn and returns its median; see `turn`. It may run in another process.
    rounds : int

    Returns
    -------
    Measured
    """
    names = list(turns)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(turns[name]())
    return Measured(seconds)

"""The measuring rule of every figure: that of `lstmcell-bwd bench`, lstmcell_bwd/_measure.py of this repository.

It is read from its file, so that it is there for any version of the package, and for processes that do not have it.
"""

from benches import read

_rule = read("_measure")

LEAST_SECONDS = _rule.LEAST_SECONDS
ROUNDS = _rule.ROUNDS
TIMED_CALLS = _rule.TIMED_CALLS
Measured = _rule.Measured
Quote = _rule.Quote
quote = _rule.quote
repeat = _rule.repeat
take_turns = _rule.take_turns
turn = _rule.turn

__all__ = ["LEAST_SECONDS", "ROUNDS", "TIMED_CALLS", "Measured", "Quote", "quote", "repeat", "take_turns", "turn"]

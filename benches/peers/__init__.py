"""Other systems that compute the operator, side by side with this package; see `run` and `table`."""

from benches import ROOT

__all__ = ["RESULTS"]

RESULTS = ROOT / "benches" / "results"

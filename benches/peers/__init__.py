"""Other systems that compute the operator, side by side with this package; see `run` and `table`."""

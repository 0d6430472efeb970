"""Benchmarks of lstmcell_bwd. Not part of the installed package: importable where the repository's root is on sys.path.

`benches.limit` moves the operator's bytes, `benches.measure` is the measuring rule, `benches.data` makes the arrays.
"""

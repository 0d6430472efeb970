kernel_table: object  # a capsule; only _api looks into it
__test__: dict[str, str]  # Cython's, for doctest

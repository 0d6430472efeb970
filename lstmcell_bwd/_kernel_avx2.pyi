kernel_table: object  # a capsule; only _api looks into it

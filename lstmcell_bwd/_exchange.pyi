from collections.abc import Callable
from typing import Any, final

import numpy as np

__test__: dict[str, str]  # Cython's, for doctest

@final
class Exchange:
    def __init__(self, tensor_type: type, by_method: Callable[[Any], np.ndarray]) -> None: ...
    @property
    def has_table(self) -> bool: ...
    def array_of(self, tensor: Any) -> np.ndarray: ...

from collections.abc import Callable
from typing import Any

import numpy as np

__test__: dict[str, str]  # Cython's, for doctest

def connect(tensor_type: type, method: Callable[[Any], np.ndarray]) -> bool: ...
def array_of(tensor: Any) -> np.ndarray: ...

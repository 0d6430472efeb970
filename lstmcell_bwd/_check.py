"""What `lstmcell-bwd check` runs: both operators against the float64 reference, and a probe of the NPU's bias."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from functools import partial
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lstmcell_bwd import get_isa, lstm_cell_backward, lstm_cell_forward, reference, use_isa
from lstmcell_bwd._api import built_isas
from lstmcell_bwd._features import runnable_isas
from lstmcell_bwd._types import LSTMCellGradients, LSTMCellState
from lstmcell_bwd.errors import LSTMCellError, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Array: TypeAlias = NDArray[Any]

__all__ = [
    "OPERATORS",
    "TOLERANCES",
    "Case",
    "ForwardInputs",
    "Inputs",
    "Outcome",
    "Probe",
    "Target",
    "Tolerance",
    "data_types",
    "plan",
    "probe_bias",
    "run_cases",
    "targets",
    "within_tolerance",
]

SHAPES = ((1, 8), (2, 1), (5, 33), (64, 64), (33, 300), (700, 3), (4095, 8))
VARIANT_SHAPES = ((5, 33), (64, 64), (33, 300))
DATA = ("ordinary", "saturated", "wide")
PROBED_ROWS = (4094, 4095, 4096, 6105)
PROBED_HIDDEN = 8


# ---- the published tolerance -----------------------------------------------------------------------------------------


class Tolerance(NamedTuple):
    """What CANN allows its operators: a share of the elements within `rtol` and `atol`, and no error beyond a limit.

    Attributes
    ----------
    rtol, atol : float
        An element is within if |result - exact| <= atol + rtol * |exact|.
    largest : float
        The limit of |result - exact| / max(1, |exact|), for every element.
    share : float
        Least share of the elements that must be within.
    """

    rtol: float
    atol: float
    largest: float
    share: float = 0.99


TOLERANCES = {"float32": Tolerance(2.0**-10, 2.0**-16, 1e-2), "float16": Tolerance(2.0**-9, 2.0**-9, 1e-1)}


def within_tolerance(result: Array, exact: Array, tolerance: Tolerance) -> bool:
    """Whether an array agrees with the exact one as far as a tolerance asks for.

    Where the exact value rounds to an infinity of the result's dtype, that infinity is what is wanted.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.where(np.isinf(exact.astype(result.dtype)), exact.astype(result.dtype).astype(np.float64), exact)
        error = np.where(result == exact, 0, np.abs(result.astype(np.float64) - exact))
        size = np.where(np.isinf(exact), 0, np.abs(exact))
        within = error <= tolerance.atol + tolerance.rtol * size
        return bool(within.mean() >= tolerance.share and (error / np.maximum(1, size)).max() < tolerance.largest)


# ---- cases -----------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A device, with the instruction set where it is the CPU."""

    device: str
    isa: str | None

    @property
    def name(self) -> str:
        """For tables."""
        return self.device if self.isa is None else f"{self.device}, {self.isa}"


class Inputs(NamedTuple):
    """The arguments of one backward call, in their order; None for a missing gradient."""

    grad_hy: Array | None
    grad_cy: Array | None
    cx: Array
    cy: Array
    gates: Array


class ForwardInputs(NamedTuple):
    """The arguments of one forward call, likewise; None for a missing bias."""

    input_gates: Array
    hidden_gates: Array
    cx: Array
    input_bias: Array | None
    hidden_bias: Array | None


class Case(NamedTuple):
    """One call: its data, and one way of handing it over.

    Attributes
    ----------
    dtype : str
    shape : tuple of int
        (N, H).
    data : str
        One of `DATA`.
    missing : tuple of str
        The arguments that are None.
    variant : str
        "plain", or what differs from C-contiguous inputs and new outputs on one thread.
    operator : str
        One of `OPERATORS`.
    """

    dtype: str
    shape: tuple[int, int]
    data: str
    missing: tuple[str, ...] = ()
    variant: str = "plain"
    operator: str = "lstm_cell_backward"

    def __str__(self) -> str:
        """Return the case in words."""
        missing = "".join(f", no {name}" for name in self.missing)
        size = f"{self.dtype} {self.shape[0]}x{self.shape[1]}"
        return f"{self.operator}, {size}, {self.data} data{missing}, {self.variant}"


class Outcome(NamedTuple):
    """What came of one case.

    Attributes
    ----------
    target : Target
    case : Case
    errors : dict of str to float or None
        The largest error of each result, in the operator's measure; None where nothing was returned, or without bias.
    within_bounds, within_tolerance, same_bits : bool or None
        None where the question does not arise.
    error : str
        What was raised instead of a result.
    """

    target: Target
    case: Case
    errors: dict[str, float | None]
    within_bounds: bool | None
    within_tolerance: bool | None
    same_bits: bool | None
    error: str

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.error and False not in (self.within_bounds, self.within_tolerance, self.same_bits)

    @property
    def complaint(self) -> str:
        """What is wrong, in words."""
        if self.error:
            return self.error
        found = {
            "error above the promised bound": self.within_bounds,
            "outside CANN's tolerance": self.within_tolerance,
            "other bits than the first instruction set and layout gave": self.same_bits,
        }
        return "; ".join(text for text, good in found.items() if good is False)


def wide_rows(shape: tuple[int, ...], dtype: Any) -> Array:
    """Rows that are slices of longer ones."""
    return np.empty((*shape[:-1], shape[-1] + 5), dtype)[..., 3:-2]


def second_columns(shape: tuple[int, ...], dtype: Any) -> Array:
    """Every second element of a row."""
    return np.empty((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]


def column_major(shape: tuple[int, ...], dtype: Any) -> Array:
    """Columns that are contiguous."""
    return np.empty(shape[::-1], dtype).T


def reversed_axes(shape: tuple[int, ...], dtype: Any) -> Array:
    """Negative strides."""
    return np.flip(np.empty(shape, dtype))


def unaligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return data that begins at an odd address."""
    dtype = np.dtype(dtype)
    return np.ndarray(shape, dtype, np.empty(int(np.prod(shape)) * dtype.itemsize + 1, np.uint8).data, 1)


LAYOUTS: dict[str, Callable[[tuple[int, ...], Any], Array]] = {
    "rows of wider arrays": wide_rows,
    "every second column": second_columns,
    "column-major": column_major,
    "reversed": reversed_axes,
    "unaligned": unaligned,
}
CPU_VARIANTS = (*LAYOUTS, "other byte order", "in place", "without bias", "2 threads", "3 threads")
NPU_VARIANTS = (*LAYOUTS, "without bias", "arrays on the device", "rows of arrays on the device")


# ---- the operators ---------------------------------------------------------------------------------------------------


class Backward:
    """How `lstm_cell_backward` is called and judged."""

    results = LSTMCellGradients._fields
    missing: tuple[tuple[str, ...], ...] = ((), ("grad_hy",), ("grad_cy",), ("grad_hy", "grad_cy"))
    has_variant_without_bias = True
    measure = "units of eps * scale (0.5: perfect rounding); bias: of eps * sum of sizes (half types: of its bound)"

    @staticmethod
    def make_inputs(case: Case) -> Inputs:
        """Return the five inputs of a case, C-contiguous, with none of them missing."""
        rng = np.random.default_rng([*case.shape, DATA.index(case.data)])
        batch, hidden = case.shape
        dtype = named_dtype(case.dtype)
        strength = 6 if case.data == "saturated" else 2
        a = strength * rng.standard_normal((4, batch, hidden))
        i, f, o = 1 / (1 + np.exp(-a[[0, 1, 3]]))
        gates = np.concatenate([i, f, np.tanh(a[2]), o], axis=1)
        grad_hy, grad_cy, cx, cy = rng.standard_normal((4, batch, hidden))
        if case.data == "saturated":
            cy = np.copysign(rng.uniform(4, 40, cy.shape), cy)
        if case.data == "wide":
            grad_hy *= wide_factors(case.dtype, grad_hy.shape, rng)
            grad_cy *= wide_factors(case.dtype, grad_cy.shape, rng)
        return Inputs(*(array.astype(dtype) for array in (grad_hy, grad_cy, cx, cy, gates)))

    @staticmethod
    def run(*arguments: Any, **options: Any) -> LSTMCellGradients:
        """Call the operator."""
        return lstm_cell_backward(*arguments, **options)

    @staticmethod
    def shapes(batch: int, hidden: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of its results."""
        return (batch, 4 * hidden), (batch, hidden), (4 * hidden,)

    @staticmethod
    def in_place(inputs: Inputs) -> tuple[Array | None, ...]:
        """Return outputs that are inputs."""
        return inputs.gates, inputs.cx, None

    @staticmethod
    def exact(inputs: Inputs, dtype: Any) -> LSTMCellGradients:
        """Return the reference's results."""
        return reference.lstm_cell_backward(*inputs, dtype=dtype)

    @staticmethod
    def errors(result: LSTMCellGradients, inputs: Inputs, exact: LSTMCellGradients) -> tuple[float | None, ...]:
        """Return the largest error of each result, in units."""
        if result.grad_bias is None:
            exact = exact._replace(grad_bias=None)
        return reference.error_in_units(result, *inputs, exact)

    @staticmethod
    def bounds(dtype: str) -> tuple[float, ...]:
        """Return what the package promises of them."""
        return reference.bounds(named_dtype(dtype))


class Forward:
    """How `lstm_cell_forward` is called and judged."""

    results = LSTMCellState._fields
    missing: tuple[tuple[str, ...], ...] = ((), ("input_bias",), ("hidden_bias",), ("input_bias", "hidden_bias"))
    has_variant_without_bias = False
    measure = "shares of what the package allows itself (reference.forward_errors)"

    @staticmethod
    def make_inputs(case: Case) -> ForwardInputs:
        """Return the five inputs of a case, C-contiguous, with none of them missing."""
        rng = np.random.default_rng([*case.shape, DATA.index(case.data), 1])
        batch, hidden = case.shape
        dtype = named_dtype(case.dtype)
        strength = 12 if case.data == "saturated" else 2
        input_gates, hidden_gates = strength * rng.standard_normal((2, batch, 4 * hidden))
        input_bias, hidden_bias = rng.standard_normal((2, 4 * hidden))
        cx = rng.standard_normal((batch, hidden))
        if case.data == "saturated":
            cx = np.copysign(rng.uniform(4, 40, cx.shape), cx)
        if case.data == "wide":
            cx *= wide_factors(case.dtype, cx.shape, rng)
            input_gates *= wide_factors(case.dtype, input_gates.shape, rng)
            hidden_gates[:, ::2] -= input_gates[:, ::2]  # what is left of the sum is small
        return ForwardInputs(
            *(array.astype(dtype) for array in (input_gates, hidden_gates, cx, input_bias, hidden_bias))
        )

    @staticmethod
    def run(*arguments: Any, **options: Any) -> LSTMCellState:
        """Call the operator."""
        return lstm_cell_forward(*arguments, **options)

    @staticmethod
    def shapes(batch: int, hidden: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of its results."""
        return (batch, hidden), (batch, hidden), (batch, 4 * hidden)

    @staticmethod
    def in_place(inputs: ForwardInputs) -> tuple[Array | None, ...]:
        """Return outputs that are inputs."""
        return None, inputs.cx, inputs.input_gates

    @staticmethod
    def exact(inputs: ForwardInputs, dtype: Any) -> LSTMCellState:
        """Return the reference's results."""
        return reference.lstm_cell_forward(*inputs, dtype=dtype)

    @staticmethod
    def errors(result: LSTMCellState, inputs: ForwardInputs, exact: LSTMCellState) -> tuple[float | None, ...]:
        """Return the largest error of each result, as a share of what is allowed."""
        return tuple(float(share.max()) for share in reference.forward_errors(result, *inputs, exact))

    @staticmethod
    def bounds(dtype: str) -> tuple[float, ...]:
        """Return what the package promises of them."""
        return 1.0, 1.0, 1.0


OPERATORS: dict[str, type[Backward] | type[Forward]] = {"lstm_cell_backward": Backward, "lstm_cell_forward": Forward}


def data_types(device: str) -> list[str]:
    """Return the dtypes that a device has, bfloat16 only where ml_dtypes is installed."""
    if device != "cpu":
        return ["float32", "float16"]
    try:
        importlib.import_module("ml_dtypes")
    except ImportError:
        return ["float32", "float64", "float16"]
    return ["float32", "float64", "float16", "bfloat16"]


def named_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, bfloat16 included."""
    return np.dtype(importlib.import_module("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def targets(device: str) -> list[Target]:
    """Return the targets behind a device: on the CPU every instruction set that was built and can run."""
    if device != "cpu":
        return [Target(device, None)]
    return [Target(device, isa) for isa in built_isas() if isa in runnable_isas()]


def plan(device: str, operators: Sequence[str] = tuple(OPERATORS)) -> list[tuple[Target, Case]]:
    """All cases for a device. Cases that must have the same bits follow one another."""
    on_cpu = device == "cpu"
    # The NPU's operator computes 1 - t**2 and 1 - g**2 with cancellation, so it is not asked for more than CANN says.
    data = DATA if on_cpu else DATA[:2]
    cases = []
    for operator, dtype, shape, kind in product(operators, data_types(device), SHAPES, data):
        few = shape not in VARIANT_SHAPES
        for missing in OPERATORS[operator].missing[: 1 if few else None]:
            chosen = ["plain"]
            if not few and kind == "ordinary" and len(missing) < 2:
                chosen += variants(operator, device, dtype)
            cases += [
                (target, Case(dtype, shape, kind, missing, variant, operator))
                for target in targets(device)
                for variant in chosen
            ]
    return cases


def variants(operator: str, device: str, dtype: str) -> list[str]:
    """Return what can differ from a plain call."""
    left_out = set()
    if dtype == "bfloat16":  # which NumPy has in one byte order
        left_out.add("other byte order")
    if not OPERATORS[operator].has_variant_without_bias:
        left_out.add("without bias")
    return [variant for variant in (CPU_VARIANTS if device == "cpu" else NPU_VARIANTS) if variant not in left_out]


def wide_factors(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return factors of many magnitudes, as far as the dtype goes."""
    decades = {"float16": 1.5, "float64": 60}.get(dtype, 8)
    factors: Array = 10 ** rng.uniform(-decades, decades, shape)
    return factors


# ---- running ---------------------------------------------------------------------------------------------------------


def relaid(array: Array, layout: Callable[[tuple[int, ...], Any], Array]) -> Array:
    """Return the same values in another layout."""
    other = layout(array.shape, array.dtype)
    other[...] = array
    return other


def converted(inputs: Any, function: Callable[[Array], Any]) -> Any:
    """Return the same call with a function applied to all arrays that are not missing."""
    return inputs._make(None if array is None else function(array) for array in inputs)


def call(target: Target, case: Case, inputs: Any) -> Any:
    """Run a case as its variant says; the results are on the host."""
    operator: Any = OPERATORS[case.operator]
    options: dict[str, Any] = {"device": target.device}
    if target.device == "cpu":
        options["num_threads"] = int(case.variant[0]) if case.variant.endswith("threads") else 1
    given = converted(inputs, np.ndarray.copy)
    layout = LAYOUTS.get(case.variant)
    if layout is not None:
        given = converted(inputs, partial(relaid, layout=layout))
        options["out"] = tuple(layout(shape, named_dtype(case.dtype)) for shape in operator.shapes(*case.shape))
    elif case.variant == "other byte order":
        given = converted(inputs, lambda array: array.astype(array.dtype.newbyteorder()))
    elif case.variant == "in place":
        options["out"] = operator.in_place(given)
    elif case.variant == "without bias":
        options["has_bias"] = False
    elif case.variant.endswith("on the device"):
        index = int(target.device.partition(":")[2] or 0)
        given = converted(inputs, partial(on_device, index=index, rows=case.variant.startswith("rows")))
        result = operator.run(*given, **options)
        return result._make(array.to_numpy() for array in result)
    return operator.run(*given, **options)


def on_device(array: Array, index: int, rows: bool) -> Any:
    """Return an array on an NPU, or where it has several rows some rows of a longer one."""
    from lstmcell_bwd.npu import NPUArray

    if rows and array.ndim > 1:
        return NPUArray.from_numpy(np.pad(array, ((2, 1), (0, 0))), index)[2:-1]
    return NPUArray.from_numpy(array, index)


def same_bits(a: Array | None, b: Array | None) -> bool:
    """Whether two arrays have the same bits; NaN equals NaN, and an array that was not asked for is not compared."""
    if a is None or b is None:
        return True
    unsigned = f"u{a.dtype.itemsize}"
    equal = np.ascontiguousarray(a).view(unsigned) == np.ascontiguousarray(b).view(unsigned)
    return bool(np.all(equal | (np.isnan(a) & np.isnan(b))))


@contextmanager
def instruction_set(name: str | None) -> Iterator[None]:
    """Use an instruction set for a while."""
    before = get_isa()
    if name is not None:
        use_isa(name)
    try:
        yield
    finally:
        use_isa(before)


def run_cases(cases: Sequence[tuple[Target, Case]]) -> Iterator[Outcome]:
    """Run cases in their order, and judge each.

    Parameters
    ----------
    cases : sequence of (Target, Case)
        From `plan`.

    Yields
    ------
    Outcome
    """
    for data, group in groupby(cases, lambda pair: pair[1]._replace(variant="plain")):
        missing: dict[str, Any] = dict.fromkeys(data.missing)
        operator: Any = OPERATORS[data.operator]
        inputs = operator.make_inputs(data)._replace(**missing)
        exact = operator.exact(inputs, reference.wide_dtype(named_dtype(data.dtype)))
        first = None
        for target, case in group:
            try:
                with instruction_set(target.isa):
                    result = call(target, case, inputs)
            except LSTMCellError as error:
                nothing = dict.fromkeys(operator.results)
                yield Outcome(target, case, nothing, None, None, None, f"{type(error).__name__}: {error}")
                continue
            first = first or result
            yield judge(target, case, inputs, result, exact, first)


def judge(target: Target, case: Case, inputs: Any, result: Any, exact: Any, first: Any) -> Outcome:
    """Compare a result with the exact one, and on the CPU with the first result for the same data.

    The bounds and the bits are promises of the CPU's kernel; an NPU is held to CANN's tolerance.
    """
    operator: Any = OPERATORS[case.operator]
    errors = operator.errors(result, inputs, exact)
    tolerance = TOLERANCES.get(case.dtype)
    near = None
    if tolerance is not None:
        pairs = zip(result, exact, strict=True)
        near = all(within_tolerance(value, truth, tolerance) for value, truth in pairs if value is not None)
    bounded = bits = None
    if target.device == "cpu":
        bounds = operator.bounds(case.dtype)
        bounded = all(error <= bound for error, bound in zip(errors, bounds, strict=True) if error is not None)
        bits = all(same_bits(a, b) for a, b in zip(result, first, strict=True))
    return Outcome(target, case, dict(zip(operator.results, errors, strict=True)), bounded, near, bits, "")


# ---- the bias of the NPU's operator ----------------------------------------------------------------------------------


class Probe(NamedTuple):
    """The float32 bias gradient for one number of rows.

    Attributes
    ----------
    rows : int
    raw_error : float or None
        Largest error of the operator's own bias, called in two phases; None where the call failed.
    raw_right : bool
        Whether that is within CANN's tolerance.
    error : float
        Largest error of `lstm_cell_backward`, which avoids the defect.
    right : bool
    message : str
        Why the raw call failed.
    """

    rows: int
    raw_error: float | None
    raw_right: bool
    error: float
    right: bool
    message: str


def probe_bias(device: str) -> Iterator[Probe]:
    """Look for the operator's known defect: a wrong bias from 4095 rows on, at small hidden sizes.

    Parameters
    ----------
    device : str
        "npu" or "npu:<index>".

    Yields
    ------
    Probe
        For one row count after the other.
    """
    index = int(device.partition(":")[2] or 0)
    for rows in PROBED_ROWS:
        case = Case("float32", (rows, PROBED_HIDDEN), "ordinary")
        inputs = Backward.make_inputs(case)
        exact: Any = reference.lstm_cell_backward(*inputs).grad_bias
        split: Any = lstm_cell_backward(*inputs, device=device).grad_bias
        raw, message = raw_bias(inputs, index)
        yield Probe(
            rows,
            None if raw is None else float(np.abs(raw - exact).max()),
            raw is not None and within_tolerance(raw, exact, TOLERANCES["float32"]),
            float(np.abs(split - exact).max()),
            within_tolerance(split, exact, TOLERANCES["float32"]),
            message,
        )


def raw_bias(inputs: Inputs, index: int) -> tuple[Array | None, str]:
    """Return the bias gradient from the operator's two phases on a device, or None and the reason."""
    from lstmcell_bwd import aclnn
    from lstmcell_bwd.npu import NPUArray

    given: Inputs = converted(inputs, partial(NPUArray.from_numpy, device=index))
    rows, hidden = inputs.cx.shape
    shapes: list[tuple[int, ...]] = [(rows, 4 * hidden), (rows, hidden), (4 * hidden,)]
    outputs = [NPUArray.empty(shape, np.float32, index) for shape in shapes]
    status, size, executor = aclnn.aclnnThnnFusedLstmCellBackwardGetWorkspaceSize(
        *given, True, outputs[0], outputs[1], outputs[2]
    )
    if status == Status.ACLNN_SUCCESS:
        workspace = NPUArray.empty((size,), np.uint8, index)
        status = aclnn.aclnnThnnFusedLstmCellBackward(workspace, size, executor, None)
    if status != Status.ACLNN_SUCCESS:
        return None, f"status {int(status)}: {aclnn.aclGetRecentErrMsg()}"
    return outputs[2].to_numpy(), ""

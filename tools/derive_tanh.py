#!/usr/bin/env python3
"""Derive and verify the constants behind the tanh of the LSTM cell kernel.

The backward kernel needs ``tanh(cy)`` and ``1 - tanh(cy)**2``, with the same bits on every machine.  It
therefore uses nothing but IEEE additions, multiplications and one division, each rounded separately to
nearest even, in this order::

    x  = 2 * |cy|                           exact
    n  = (x * LOG2E + MAGIC) - MAGIC        nearest integer to x / ln 2
    r  = (n * LN2_HI - x) + n * LN2_LO      -(x - n ln 2), so |r| <= ln(2) / 2 plus a hair
    p  = r + (r * r) * Q(r)                 expm1(r); Q in Horner form
    g  = scale * p                          scale = 2**-n
    E  = scale + g                          exp(-x)
    em = g + (scale - 1)                    expm1(-x), free of cancellation; exactly p when n = 0
    D  = 1 + E
    q  = 1 / D
    t  = -(em * q), with the sign of cy     tanh(cy)
    s  = ((4 * E) * q) * q                  1 - tanh(cy)**2

The products n * LN2_HI and scale * p are exact for every |cy| that the kernel's fast rows treat, so that a fused
multiply-add gives the same sums; ``--exact`` goes through all of float32 to see it.

This script finds the polynomial Q (a minimax fit whose coefficients are rounded one after another), splits
ln 2, prints the constants ready to paste, and runs the sequence above, operation by operation, in NumPy.
NumPy rounds every operation of a ufunc call separately, so the simulation has the bits of the kernel.

Usage::

    python tools/derive_tanh.py             derive, print, measure
    python tools/derive_tanh.py --check     compare the constants in pyx/kernel.pxi with the derived ones
    python tools/derive_tanh.py --exact     multiply with every float32 number up to the limit in pyx/kernel.pxi

It needs mpmath and numpy.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import mpmath as mp
import numpy as np

KERNEL = Path(__file__).resolve().parents[1] / "pyx" / "kernel.pxi"

# 45 digits leave 29 for the error curve of a float64 fit, which is itself 1e-16 of the function.
DIGITS = 45

# n is rounded from a rounded product, so r may exceed ln(2)/2 slightly; the fit covers that.
FIT_MARGIN = mp.mpf(2) ** -12

FIT_POINTS = 400
ERROR_POINTS = 4001

# Numbers that `inexact_product` looks at together.
CHUNK = 1 << 22

# How t and s may be formed from E and em, with the operations that follow D.
VARIANTS = {
    "kernel": "D = 1 + E (the kernel): 1 division, 4 multiplications",
    "2+em": "D = 2 + em: 1 division, 4 multiplications",
    "w": "w = 1/(D*D), t = -(em*D)*w, s = 4E*w: 1 division, 5 multiplications",
    "two-div": "t = -em/D, s = 4E/(D*D): 2 divisions, 2 multiplications",
}


@dataclass(frozen=True)
class Format:
    """What differs between the two floating point types.

    Attributes
    ----------
    prefix : str
        Start of the constants' names in the kernel source.
    dtype : type
        NumPy scalar type.
    bits : int
        Width of the significand, so the unit roundoff is ``2**-bits``.
    n_bits : int
        Integers up to ``2**n_bits`` must multiply LN2_HI exactly.
    degree : int
        Degree of Q.
    digits : int
        Decimal digits that identify every number of the type.
    cy_min, cy_max : float
        Range of the sweep; above `cy_max` the factor ``2**-n`` is no longer a normal number.
    points : int
        Size of each of the four parts of the sweep.
    """

    prefix: str
    dtype: type
    bits: int
    n_bits: int
    degree: int
    digits: int
    cy_min: float
    cy_max: float
    points: int

    @property
    def magic(self):
        """Return the number whose addition rounds to an integer, of either sign."""
        return self.dtype(1.5 * 2.0 ** (self.bits - 1))

    @property
    def names(self):
        """Return the names of all constants, as they stand in the kernel source."""
        suffixes = ["LOG2E", "LN2_HI", "LN2_LO", *(f"Q{k}" for k in range(self.degree + 1))]
        return [f"{self.prefix}_{suffix}" for suffix in suffixes]

    def literal(self, value):
        """Write a value of this type as a decimal literal that reads back exactly."""
        text = f"{float(value):.{self.digits - 1}e}"
        # C reads the literal as a double before it narrows it, so this is the conversion that counts.
        assert self.dtype(float(text)) == value
        return text


# Degree 4 leaves an approximation error of 0.24 u in float32, beside almost 4 u from the roundings.  A run
# over every float32 number from 2**-13 to 43.66 (the sweep below only samples) found that degree 5 lowers the
# largest error of t from 1.91 to 1.82 eps and leaves that of s at 2.77 eps: not worth two more operations.
FORMATS = (
    Format("F32", np.float32, 24, 9, 4, 9, 1e-38, 43.6, 2_000_000),
    Format("F64", np.float64, 53, 12, 10, 17, 1e-300, 354.0, 25_000),
)


def round_to(value, bits):
    """Round an mpmath number to `bits` bits, to nearest even."""
    with mp.workprec(bits):
        return +value


def horner(coefficients, r):
    """Evaluate a polynomial, lowest coefficient first."""
    total = coefficients[-1]
    for c in coefficients[-2::-1]:
        total = total * r + c
    return total


def weighted_target(count):
    """Sample the interval and state the fit as a weighted linear problem.

    The relative error of ``p = r + r**2 Q`` is ``Q w - f`` with ``w = r**2 / expm1(r)`` and
    ``f = (expm1(r) - r) / expm1(r)``.

    Parameters
    ----------
    count : int
        Number of Chebyshev points.  The point 0, where everything is 0/0, is left out.

    Returns
    -------
    r, w, f : ndarray of mpf
    """
    half = mp.log(2) / 2 * (1 + FIT_MARGIN)
    angles = [mp.pi * (2 * i + 1) / (2 * count) for i in reversed(range(count))]
    r = np.array([half * mp.cos(a) for a in angles if abs(mp.cos(a)) > mp.mpf(10) ** -20], dtype=object)
    e = np.array([mp.expm1(v) for v in r], dtype=object)
    return r, r * r / e, (e - r) / e


def thin_out(peaks, error, wanted):
    """Drop peaks of an error curve until `wanted` are left, keeping their signs alternating.

    Parameters
    ----------
    peaks : list of int
        Positions of the largest error of each run of equal sign, in order.
    error : ndarray of mpf
        The error curve.
    wanted : int
        Number of peaks to keep.

    Returns
    -------
    list of int
    """
    peaks = list(peaks)
    while len(peaks) > wanted:
        size = [abs(error[j]) for j in peaks]
        last = len(peaks) - 1
        if len(peaks) == wanted + 1:
            peaks.pop(0 if size[0] < size[-1] else last)
            continue
        k = size.index(min(size))
        if 0 < k < last:
            # Without the smallest peak its neighbours have equal signs: only the larger one may stay.
            other = k - 1 if size[k - 1] < size[k + 1] else k + 1
            del peaks[max(k, other)], peaks[min(k, other)]
        else:
            peaks.pop(k)
    return peaks


def remez(samples, fixed, degree):
    """Find the best coefficients of Q above those already fixed.

    Parameters
    ----------
    samples : tuple of ndarray
        What `weighted_target` returned.
    fixed : list of mpf
        Lowest coefficients, rounded for good.
    degree : int
        Degree of Q.

    Returns
    -------
    list of mpf
        All coefficients, the fixed ones first.
    """
    r, w, f = samples
    k = len(fixed)
    free = degree + 1 - k
    residual = f - horner(fixed, r) * w if fixed else f
    weight = w * r**k
    # The weight may change its sign at 0; the optimal error alternates once that sign is divided out.
    sign = np.where(weight > 0, 1, -1)
    reference = [round(i * (len(r) - 1) / free) for i in range(free + 1)]
    for _ in range(50):
        matrix, right = mp.matrix(free + 1), mp.matrix(free + 1, 1)
        for i, j in enumerate(reference):
            for power in range(free):
                matrix[i, power] = weight[j] * r[j] ** power
            matrix[i, free] = int(sign[j]) * (-1) ** i
            right[i] = residual[j]
        solution = list(mp.lu_solve(matrix, right))
        error = (horner(solution[:free], r) * weight - residual) * sign
        if max(abs(error)) <= abs(solution[free]) * mp.mpf("1.0001"):
            return [*fixed, *solution[:free]]
        positive = error > 0
        runs = np.split(np.arange(len(r)), np.flatnonzero(positive[1:] != positive[:-1]) + 1)
        reference = thin_out([max(run, key=lambda j: abs(error[j])) for run in runs], error, free + 1)
    msg = f"the exchange did not converge (degree {degree}, {k} fixed)"
    raise RuntimeError(msg)


def fit_q(fmt, degree):
    """Derive rounded coefficients of Q.

    The coefficients are rounded one after another, and those still free are fitted again each time, so that
    they make up for the roundings already done.  The lowest is 1/2 throughout: this costs next to nothing.

    Parameters
    ----------
    fmt : Format
        The type to round to.
    degree : int
        Degree of Q.

    Returns
    -------
    list of mpf
    """
    samples = weighted_target(FIT_POINTS)
    q = [mp.mpf(1) / 2]
    while len(q) <= degree:
        q.append(round_to(remez(samples, q, degree)[len(q)], fmt.bits))
    return q


def approximation_error(q):
    """Return the largest relative error of ``r + r**2 Q(r)`` against ``expm1(r)``, in exact arithmetic."""
    r, w, f = weighted_target(ERROR_POINTS)
    return max(abs(horner(q, r) * w - f))


def derive(fmt, degree):
    """Derive all constants of one type.

    Parameters
    ----------
    fmt : Format
        The type.
    degree : int
        Degree of Q.

    Returns
    -------
    log2e, ln2_hi, ln2_lo : scalar
    q : list of scalar
        All of type ``fmt.dtype``.
    """
    hi = round_to(mp.log(2), fmt.bits - fmt.n_bits)
    exact = [1 / mp.log(2), hi, mp.log(2) - hi, *fit_q(fmt, degree)]
    log2e, ln2_hi, ln2_lo, *q = (fmt.dtype(float(round_to(v, fmt.bits))) for v in exact)
    return log2e, ln2_hi, ln2_lo, q


def even_odd(q, r, r2):
    """Evaluate a polynomial as two Horner chains in ``r2 = r * r``: no more operations, half the latency."""
    return horner(q[0::2], r2) + r * horner(q[1::2], r2)


def exponential(fmt, constants, cy, split=False):
    """Run the kernel's operations on positive `cy` as far as expm1.

    Parameters
    ----------
    fmt, constants, cy, split
        As for `simulate`.

    Returns
    -------
    n, p, scale : ndarray
    """
    log2e, ln2_hi, ln2_lo, q = constants
    one, two = fmt.dtype(1), fmt.dtype(2)
    x = two * cy
    n = (x * log2e + fmt.magic) - fmt.magic
    r = (n * ln2_hi - x) + n * ln2_lo
    r2 = r * r
    p = r + r2 * (even_odd(q, r, r2) if split else horner(q, r))
    return n, p, np.ldexp(one, -n.astype(np.int32))


def simulate(fmt, constants, cy, variant="kernel", split=False):
    """Run the kernel's operations on positive `cy`, each rounded separately.

    Parameters
    ----------
    fmt : Format
        The type.
    constants : tuple
        What `derive` returned.
    cy : ndarray
        Positive numbers of type ``fmt.dtype``.
    variant : str
        Key of `VARIANTS`.
    split : bool
        Evaluate Q by `even_odd` instead of Horner's rule.

    Returns
    -------
    E, t, s : ndarray
    """
    one, two, four = fmt.dtype(1), fmt.dtype(2), fmt.dtype(4)
    _, p, scale = exponential(fmt, constants, cy, split)
    g = scale * p
    e = scale + g
    em = g + (scale - one)
    d = two + em if variant == "2+em" else one + e
    if variant == "w":
        w = one / (d * d)
        t, s = -((em * d) * w), (four * e) * w
    elif variant == "two-div":
        t, s = -(em / d), (four * e) / (d * d)
    else:
        reciprocal = one / d
        t, s = -(em * reciprocal), ((four * e) * reciprocal) * reciprocal
    # A float64 anywhere in a float32 sequence would make the measured errors meaningless.
    assert e.dtype == t.dtype == s.dtype == fmt.dtype
    return e, t, s


def sweep(fmt):
    """Choose the values of cy: all scales, the usual scales, a line, and where n steps up.

    Returns
    -------
    ndarray
        Of type ``fmt.dtype``.
    """
    rng = np.random.default_rng(2024)
    log_min, log_one, log_max = np.log([fmt.cy_min, 1e-3, fmt.cy_max])
    steps = (np.arange(int(2 * fmt.cy_max / np.log(2))) + 0.5) * np.log(2) / 2
    around = 1 + np.linspace(-1, 1, fmt.points // len(steps)) * 2.0**-10
    parts = [
        np.exp(rng.uniform(log_min, log_max, fmt.points)),
        np.exp(rng.uniform(log_one, log_max, fmt.points)),
        np.linspace(0, 20, fmt.points + 1)[1:],
        np.outer(steps, around).ravel(),
    ]
    return np.minimum(np.concatenate(parts), fmt.cy_max).astype(fmt.dtype)


def reference(fmt, cy):
    """Compute exp(-2 cy), tanh(cy) and 1 - tanh(cy)**2 far more accurately than the type can hold.

    Parameters
    ----------
    fmt : Format
        The type.
    cy : ndarray
        Positive numbers of that type.

    Returns
    -------
    list of (high, low)
        Each value is the sum of two float64 arrays; for float32, plain float64 is enough.
    """
    if fmt.dtype is np.float32:
        x = 2 * cy.astype(np.float64)
        e, em = np.exp(-x), np.expm1(-x)
        return [(e, 0.0), (-em / (1 + e), 0.0), (4 * e / (1 + e) ** 2, 0.0)]
    rows = []
    for value in cy:
        x = 2 * mp.mpf(float(value))
        e, em = mp.exp(-x), mp.expm1(-x)
        exact = (e, -em / (1 + e), 4 * e / (1 + e) ** 2)
        rows.append([(float(v), float(v - float(v))) for v in exact])
    pairs = np.array(rows)
    return [(pairs[:, k, 0], pairs[:, k, 1]) for k in range(3)]


def measure(fmt, cy, exact, results):
    """Describe the largest relative errors of E, t and s in units of eps = 2u, and where they occur."""
    words = []
    for name, value, (high, low) in zip("Ets", results, exact, strict=True):
        error = np.abs((value.astype(np.float64) - high) - low) / high / float(np.finfo(fmt.dtype).eps)
        worst = error.argmax()
        words.append(f"{name} {error[worst]:.3f} (cy = {cy[worst]:.6g})")
    return ", ".join(words)


def report(fmt):
    """Print the constants of one type, their approximation error and the measured errors."""
    constants = {d: derive(fmt, d) for d in range(fmt.degree - 1, fmt.degree + 2)}
    *scalars, q = constants[fmt.degree]
    for name, value in zip(fmt.names, [*scalars, *q], strict=True):
        print(f"{name} = {fmt.literal(value)}  # {float(value).hex()}")
    cy = sweep(fmt)
    exact = reference(fmt, cy)
    print(f"\n{fmt.prefix}: largest relative errors at {len(cy)} points, in units of eps = 2u")
    for degree, candidate in constants.items():
        error = approximation_error([mp.mpf(float(c)) for c in candidate[3]])
        in_u = mp.nstr(error * 2**fmt.bits, 3)
        mark = "  <- chosen" if degree == fmt.degree else ""
        print(f"  Q of degree {degree}: approximation {mp.nstr(error, 4)} = {in_u} u{mark}")
        print(f"    {measure(fmt, cy, exact, simulate(fmt, candidate, cy))}")
    print("  Other arrangements, Q of the chosen degree:")
    for variant, description in VARIANTS.items():
        results = simulate(fmt, constants[fmt.degree], cy, variant)
        print(f"    {description}\n      {measure(fmt, cy, exact, results)}")
    results = simulate(fmt, constants[fmt.degree], cy, split=True)
    print("    kernel, Q as even + r * odd: same count, shorter chain")
    print(f"      {measure(fmt, cy, exact, results)}\n")


def check(source):
    """Compare the constants in the kernel source with the derived ones.

    Parameters
    ----------
    source : str
        Text of the kernel source, with lines of the form ``NAME = literal``.

    Returns
    -------
    list of str
        One complaint per constant that is missing, wrong or unknown.
    """
    complaints = []
    for fmt in FORMATS:
        *scalars, q = derive(fmt, fmt.degree)
        expected = dict(zip(fmt.names, [*scalars, *q], strict=True))
        pattern = rf"^[^#\n]*?\b({fmt.prefix}_(?:LOG2E|LN2_HI|LN2_LO|Q\d+))[ \t]*=[ \t]*([-+.\w]+)"
        found = re.findall(pattern, source, re.MULTILINE)
        missing = expected.keys() - {name for name, _ in found}
        complaints += [f"{name} is missing" for name in fmt.names if name in missing]
        for name, text in found:
            if name not in expected:
                complaints.append(f"{name} is not one of the derived constants")
                continue
            try:
                # The suffix of a C literal of type float carries no value.
                same = fmt.dtype(float(text.removesuffix("f"))) == expected[name]
            except ValueError:
                same = False
            if not same:
                complaints.append(f"{name} = {text}, but it should be {fmt.literal(expected[name])}")
    return complaints


def inexact_product(source):
    """Look for a float32 |cy| of the fast rows for which a product that the kernel takes for exact is not.

    Parameters
    ----------
    source : str
        Text of the kernel source, which defines FAST_LIMIT_F32 as the bits of the largest |cy|.

    Returns
    -------
    float or None
        The first one found. (Below 0.17 n is 0 and scale 1.)
    """
    fmt = FORMATS[0]
    constants = derive(fmt, fmt.degree)
    end = int(re.search(r"#define FAST_LIMIT_F32 (0x[0-9a-f]+)u", source)[1], 16) + 1
    begin = int(np.float32(0.17).view(np.uint32))
    for first in range(begin, end, CHUNK):
        cy = np.arange(first, min(first + CHUNK, end), dtype=np.uint32).view(np.float32)
        n, p, scale = exponential(fmt, constants, cy)
        for a, b in ((n, constants[1]), (scale, p)):
            wrong = (a * b).astype(np.float64) != a.astype(np.float64) * np.float64(b)
            if wrong.any():
                return float(cy[wrong.argmax()])
    return None


def main():
    """Run the script.

    Returns
    -------
    int
        Exit status: 1 if the check found something, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare pyx/kernel.pxi with the results")
    parser.add_argument("--exact", action="store_true", help="look for a product that is not exact")
    arguments = parser.parse_args()
    complaints = []
    with mp.workdps(DIGITS):
        if not arguments.check and not arguments.exact:
            for fmt in FORMATS:
                report(fmt)
            return 0
        source = KERNEL.read_text(encoding="utf-8")
        if arguments.check:
            complaints = check(source)
        if arguments.exact and (cy := inexact_product(source)) is not None:
            complaints.append(f"a product is not exact for cy = {cy:.9g}")
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if not complaints:
        print("nothing to complain of")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

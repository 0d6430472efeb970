"""Search for the inputs on which the operator's error is largest, in units of `lstmcell_bwd.reference`.

    python tools/search_worst_error.py float32 --seconds 60 --seed 1

Three stages: a dense sweep over cy (every binade from the smallest subnormal to the end of the range) with all other
factors 1 or one half; random elements of many kinds, among them magnitudes over the whole range of the type; and hill
climbing from the worst elements found, which changes one of an element's eight numbers at a time, by units in the
last place or by drawing it anew. The truth is the reference in float64, or in the long double for float64. Prints one
line per output with the largest error and the eight numbers that give it (as hexadecimal floats), and at last the
largest error of a bias over random batches.
"""

import argparse
import time

import numpy as np

from lstmcell_bwd import lstm_cell_backward, reference

INPUTS = ("grad_hy", "grad_cy", "cx", "cy", "i", "f", "g", "o")
OUTPUTS = ("d_i", "d_f", "d_g", "d_o", "grad_cx")


def dtype_of(name):
    """Return the dtype of a name."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def errors(elements):
    """Measure elements, an array of shape (8, count) of the dtype; returns the errors of OUTPUTS, shape (5, count)."""
    rows = elements.reshape(8, 1, -1)
    inputs = (*rows[:4], np.concatenate(rows[4:], axis=1))
    result = lstm_cell_backward(*inputs, has_bias=False)
    units = reference.errors_in_units(result, *inputs)
    return np.concatenate([units.grad_gates.reshape(4, -1), units.grad_cx])


def sweep(dtype, per_binade):
    """Elements that differ in cy only, `per_binade` of every binade."""
    limit = reference.limits(dtype)
    last = np.log2(-np.log(reference.limits(reference.arithmetic_dtype(dtype)).smallest_normal) / 2)
    exponents = np.arange(np.log2(limit.smallest_subnormal), last + 1)
    cy = np.exp2(exponents)[:, None] * (1 + np.arange(per_binade) / per_binade)
    elements = np.ones((8, cy.size))
    elements[1] = 0
    elements[3] = cy.ravel()
    elements[4:] = 0.5
    return elements.astype(dtype)


def draw(rng, dtype, count):
    """Random elements: what a forward pass gives, saturated ones, and magnitudes over the whole range."""
    limit = reference.limits(dtype)
    low, high = np.log2(limit.smallest_subnormal), np.log2(limit.largest)
    elements = rng.normal(size=(8, count))
    elements[3] *= rng.choice([0.1, 1, 3, 10, 20], count)
    elements[4:] = np.abs(elements[4:]) % 1
    elements[6] = elements[6] * 2 - 1
    near_one = rng.random((4, count)) < 0.1
    elements[4:][near_one] = 1 - np.exp2(rng.uniform(-24, -1, near_one.sum()))
    anything = rng.random((8, count)) < rng.choice([0, 0.2, 0.6], count)
    sizes = np.exp2(rng.uniform(low, high, anything.sum()) * rng.choice([1, 0.2], anything.sum()))
    elements[anything] = sizes * rng.choice([-1, 1], sizes.size)
    elements[3] = np.where(np.abs(elements[3]) > 400, elements[3] % 40, elements[3])
    cancelling = rng.random(count) < 0.2
    total = -elements[0] * elements[7] / np.cosh(np.minimum(np.abs(elements[3]), 300)) ** 2
    elements[1] = np.where(cancelling, total * (1 + np.exp2(rng.uniform(-30, 2, count))), elements[1])
    with np.errstate(all="ignore"):
        return elements.astype(dtype)


def mutate(rng, dtype, elements):
    """Change one number of each element: by a few units in the last place, or drawn anew."""
    changed = elements.copy()
    columns = np.arange(elements.shape[1])
    place = rng.integers(0, 8, columns.size)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    old = elements[place, columns]
    steps = np.round(np.exp2(rng.uniform(0, 10, columns.size))).astype(np.int64) * rng.choice([-1, 1], columns.size)
    near = (old.view(unsigned).astype(np.uint64) + steps.astype(np.uint64)).astype(unsigned).view(dtype)
    anew = draw(rng, dtype, columns.size)[place, columns]
    changed[place, columns] = np.where(rng.random(columns.size) < 0.8, near, anew)
    return changed


class Worst:
    """The worst elements seen so far, a population per output."""

    def __init__(self, dtype, size):
        self.elements = [np.ones((8, size), dtype) for _ in OUTPUTS]
        self.errors = [np.zeros(size) for _ in OUTPUTS]

    def summary(self):
        """Return the largest error of every output as text."""
        return ", ".join(f"{name} {float(units[-1]):.4f}" for name, units in zip(OUTPUTS, self.errors, strict=True))

    def take(self, elements):
        """Keep those of new elements that are worse than the population."""
        for k, units in enumerate(errors(elements)):
            size = self.errors[k].size
            best = np.argpartition(units, max(0, units.size - size))[-size:]
            both = np.concatenate([self.errors[k], units[best]])
            order = np.argsort(both)[-size:]
            self.elements[k] = np.concatenate([self.elements[k], elements[:, best]], axis=1)[:, order]
            self.errors[k] = both[order]


def worst_bias(rng, dtype, deadline):
    """Find the largest error of a bias over random batches."""
    largest, where = 0.0, None
    while time.monotonic() < deadline:
        batch, hidden = int(rng.integers(1, 400)), 64
        elements = draw(rng, dtype, batch * hidden).reshape(8, batch, hidden)
        if rng.random() < 0.5:
            elements = np.abs(elements)
        inputs = (*elements[:4], np.concatenate(elements[4:], axis=1))
        error = reference.error_in_units(lstm_cell_backward(*inputs), *inputs).grad_bias
        if error > largest:
            largest, where = error, (batch, hidden)
    return largest, where


def main():
    """Run the search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtype", choices=["float32", "float64", "float16", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dtype, rng = dtype_of(options.dtype), np.random.default_rng(options.seed)
    start = time.monotonic()
    worst, seen = Worst(dtype, 256), 0
    for part in np.array_split(sweep(dtype, 512 if dtype == np.float64 else 4096), 64, axis=1):
        worst.take(part)
        seen += part.shape[1]
    print(f"sweep over cy: {seen} elements, largest error", worst.summary())
    while time.monotonic() < start + options.seconds * 0.4:
        worst.take(draw(rng, dtype, 1 << 16))
        seen += 1 << 16
    print(f"random: {seen} elements so far, largest error", worst.summary())
    while time.monotonic() < start + options.seconds * 0.9:
        population = np.concatenate(worst.elements, axis=1)
        worst.take(np.concatenate([mutate(rng, dtype, population) for _ in range(32)], axis=1))
        seen += population.shape[1] * 32
    print(f"{options.dtype}: {seen} elements, bounds {reference.bounds(dtype)}")
    for name, elements, units in zip(OUTPUTS, worst.elements, worst.errors, strict=True):
        numbers = ", ".join(f"{n}={float(x).hex()}" for n, x in zip(INPUTS, elements[:, -1], strict=True))
        print(f"{name:8} {units[-1]:.4f} units at {numbers}")
    largest, where = worst_bias(rng, dtype, start + options.seconds)
    print(f"bias     {largest:.4f} units, found with (N, H) = {where}")


if __name__ == "__main__":
    main()

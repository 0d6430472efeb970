"""Writes the table of this package, the same-bytes limit and other systems from a results file into a page.

    python -m benches.peers.table NAME [--into benches/README.md] [--check]

What stands between the two marker lines of the page is replaced. With --check nothing is written, and the exit status
is 1 if the page does not say what the results file does.
"""

from __future__ import annotations

import argparse
import json
import sys

from benches.limit import VARIANTS
from benches.peers.run import RESULTS, ROOT

__all__ = ["BEGIN", "END", "replaced", "table"]

EXPLANATION = (
    "float32, `out=` or the like where a system has it. *lstmcell_bwd*: time of a call. *over the limit*: that time "
    "over the one in which this machine moves the same bytes (`benches/limit.c`). Other columns: the other system's "
    "time over ours, bold where it is the faster one. Each ratio is the median of five rounds, in brackets the "
    "smallest. All systems run in processes of their own, on as many CPUs as threads, and take turns."
)
BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"


def duration(seconds: float) -> str:
    """Write a time with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 100 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def table(results: dict) -> str:
    """Make the table: a row for each size and number of threads, a column for each contender.

    Parameters
    ----------
    results : dict
        As `benches.peers.run` writes it.

    Returns
    -------
    str
        Markdown.
    """
    names: list[str] = []
    for row in results["rows"]:
        names += [name for name in row["contenders"] if name not in names and name not in VARIANTS]
    others = [name for name in names if name not in ("lstmcell_bwd", "limit")]
    head = ["batch x hidden", "threads", "lstmcell_bwd", "over the limit", *others]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in results["rows"]:
        figures = row["contenders"]
        ours = figures["lstmcell_bwd"]
        limit = ours.get("over_limit")
        cells = [row["size"], str(row["threads"]), duration(ours["seconds"][1])]
        cells.append(f"{limit[1]:.2f} ({limit[0]:.2f})" if limit else "-")
        for name in others:
            if name not in figures:
                cells.append("-")
                continue
            smallest, median = figures[name]["over_ours"]
            text = f"{median:.1f} ({smallest:.1f})"
            cells.append(f"**{text}**" if median < 1 else text)
        lines.append("| " + " | ".join(cells) + " |")
    facts, versions = results["facts"], results["versions"]
    facts = results["facts"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
    missing = "; ".join(f"{name} ({reason})" for name, reason in sorted(results["missing"].items()))
    machine = ", ".join(f"{facts[name]}" for name in ("cpu", "system", "instruction_set", "compiler", "commit"))
    lines += ["", EXPLANATION, "", f"Measured on: {facts['cpus']} CPUs, {machine}. Versions: {versions}."]
    if missing:
        lines += ["", f"Not measured: {missing}."]
    return "\n".join(lines)


def replaced(text: str, new: str) -> str:
    """Return a text with what stands between the markers replaced.

    Raises
    ------
    ValueError
        Unless each marker is there once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        msg = f"the text must have one line {BEGIN} and after it one line {END}"
        raise ValueError(msg)
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Write the table into a page, or check it."""
    parser = argparse.ArgumentParser(description="write the table of benches/results/NAME.json into a page")
    parser.add_argument("name")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page differs")
    parser.add_argument("--into", default="benches/README.md", metavar="PAGE", help="from the repository's root")
    options = parser.parse_args()
    page = ROOT / options.into
    text = page.read_text()
    new = replaced(text, table(json.loads((RESULTS / f"{options.name}.json").read_text())))
    if options.check:
        return int(new != text)
    page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

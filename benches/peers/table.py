"""Writes the tables of this package, the same-bytes limit and other systems from a results file into the pages.

    python -m benches.peers.table [NAME] [--check]

What stands between the two marker lines of README.md (one row for each size) and of benches/README.md (all figures) is
replaced; the first marker names the results file. Without NAME it is the one that is named there already. With --check
nothing is written, and the exit status is 1 if a page does not say what its results file does.
"""

from __future__ import annotations

import argparse
import json
import re
import sys

from benches import ROOT
from benches.limit import VARIANTS
from benches.peers import RESULTS

__all__ = ["PAGES", "named", "replaced", "short_table", "table", "write"]

MEASURED_HOW = (
    "All systems run in processes of their own (the limit in ours), on as many CPUs as threads, and take turns."
)
EXPLANATION = (
    "float32, `out=` or the like where a system has it. *lstmcell_bwd*: time of a call. *over the limit*: that time "
    "over the one in which this machine moves the same bytes (`benches/limit.c`). Other columns: the other system's "
    "time over ours, bold where it is the faster one. Each ratio is the median of five rounds"
)
BEGIN, END = re.compile(r"<!-- peers:begin (\S+) -->"), "<!-- peers:end -->"


def duration(seconds: float) -> str:
    """Write a time with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 100 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def others_of(results: dict) -> list[str]:
    """Return the names of the other systems, in the order of their appearance."""
    names = dict.fromkeys(name for row in results["rows"] for name in row["contenders"])
    return [name for name in names if name not in ("lstmcell_bwd", "limit", *VARIANTS)]


def rows_of(results: dict) -> list[dict]:
    """Return the rows by the number of threads, then in the order in which the sizes were first measured."""
    sizes = list(dict.fromkeys(row["size"] for row in results["rows"]))
    return sorted(results["rows"], key=lambda row: (row["threads"], sizes.index(row["size"])))


def emphasised(text: str, lost: bool) -> str:
    """Write a ratio, bold where the other system is the faster one."""
    return f"**{text}**" if lost else text


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    """Write a table's lines."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def origin(results: dict) -> list[str]:
    """Say on what was measured, and what was not."""
    facts = results["facts"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
    missing = "; ".join(f"{name} ({reason})" for name, reason in sorted(results["missing"].items()))
    machine = ", ".join(f"{facts[name]}" for name in ("cpu", "system", "instruction_set", "compiler"))
    lines = ["", f"Measured on {facts['cpus']} CPUs, {machine}, commit {facts['commit']}, with {versions}."]
    return lines + (["", f"Not measured: {missing}."] if missing else [])


def table(results: dict) -> str:
    """Make the full table: a row for each size and number of threads, a column for each contender.

    Parameters
    ----------
    results : dict
        As `benches.peers.run` writes it.

    Returns
    -------
    str
        Markdown.
    """
    others = others_of(results)
    rows = []
    for row in rows_of(results):
        figures = row["contenders"]
        ours = figures["lstmcell_bwd"]
        cells = [row["size"], str(row["threads"]), duration(ours["seconds"][1])]
        limit = ours.get("over_limit")
        cells.append(f"{limit[1]:.2f} ({limit[0]:.2f})" if limit else "-")
        for name in others:
            ratio = figures.get(name, {}).get("over_ours")
            cells.append(emphasised(f"{ratio[1]:.1f} ({ratio[0]:.1f})", ratio[1] < 1) if ratio else "-")
        rows.append(cells)
    lines = markdown(["batch x hidden", "threads", "lstmcell_bwd", "over the limit", *others], rows)
    return "\n".join([*lines, "", f"{EXPLANATION}, in brackets the smallest. {MEASURED_HOW}", *origin(results)])


def short_table(results: dict) -> str:
    """Make the short table: a row for each size, medians alone, with one figure for each number of threads in a cell.

    Parameters
    ----------
    results : dict
        As `benches.peers.run` writes it.

    Returns
    -------
    str
        Markdown.
    """
    others = others_of(results)
    ordered = rows_of(results)
    threads = list(dict.fromkeys(row["threads"] for row in ordered))
    rows = []
    for size in dict.fromkeys(row["size"] for row in results["rows"]):
        figures = {row["threads"]: row["contenders"] for row in ordered if row["size"] == size}
        ours = {number: figures[number]["lstmcell_bwd"] for number in threads if number in figures}
        cells = [size, " / ".join(duration(ours[n]["seconds"][1]) if n in ours else "-" for n in threads)]
        limits = [ours.get(number, {}).get("over_limit") for number in threads]
        cells.append(" / ".join(f"{ratio[1]:.2f}" if ratio else "-" for ratio in limits))
        for name in others:
            ratios = [figures.get(number, {}).get(name, {}).get("over_ours") for number in threads]
            cells.append(" / ".join(emphasised(f"{r[1]:.1f}", r[1] < 1) if r else "-" for r in ratios))
        rows.append(cells)
    lines = markdown(["batch x hidden", "lstmcell_bwd", "over the limit", *others], rows)
    counts = " / ".join(map(str, threads))
    return "\n".join([*lines, "", f"Threads: {counts}. {EXPLANATION}. {MEASURED_HOW}", *origin(results)])


PAGES = {"README.md": short_table, "benches/README.md": table}


def parts(text: str) -> tuple[str, str, str]:
    """Cut a page into what stands before its markers, the name in the first one, and what stands behind them.

    Raises
    ------
    ValueError
        Unless each marker is there once, in order.
    """
    begin = BEGIN.findall(text)
    if len(begin) != 1 or text.count(END) != 1 or BEGIN.search(text).start() > text.index(END):
        msg = f"the text must have one line <!-- peers:begin NAME --> and after it one line {END}"
        raise ValueError(msg)
    return text[: BEGIN.search(text).start()], begin[0], text[text.index(END) + len(END) :]


def named(text: str) -> str:
    """Return the name of the results file that a page's table is made of."""
    return parts(text)[1]


def replaced(text: str, name: str, new: str) -> str:
    """Return a page with another table, made of the results file of that name."""
    before, _, after = parts(text)
    return f"{before}<!-- peers:begin {name} -->\n{new}\n{END}{after}"


def write(name: str | None = None, *, check: bool = False) -> list[str]:
    """Write the tables into the pages.

    Parameters
    ----------
    name : str or None
        The results file's name; None: the one that each page names.
    check : bool
        Write nothing.

    Returns
    -------
    list of str
        The pages that said something else.
    """
    changed = []
    for page, make in PAGES.items():
        text = (ROOT / page).read_text()
        results = name or named(text)
        new = replaced(text, results, make(json.loads((RESULTS / f"{results}.json").read_text())))
        if new != text:
            changed.append(page)
            if not check:
                (ROOT / page).write_text(new)
    return changed


def main() -> int:
    """Write the tables into the pages, or check them."""
    parser = argparse.ArgumentParser(description="write the tables of benches/results/NAME.json into the pages")
    parser.add_argument("name", nargs="?", help="of the results file; else the one that the pages name")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    options = parser.parse_args()
    changed = write(options.name, check=options.check)
    for page in changed:
        print(f"{page}: {'differs from its results file' if options.check else 'written'}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures this package, the same-bytes limit and other systems side by side; writes benches/results/NAME.json.

    python -m benches.peers.run NAME [--python tensorflow=PATH/TO/python] [--sizes ...] [--threads ...] [--only ...]

Every contender lives in a process of its own, with the same data, restricted to as many CPUs as it may use threads.
They stay alive and take turns on request, by the rule of `benches.measure`; a system that is not installed is left out,
and the file says so. `python -m benches.peers.table NAME` then writes the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import lstmcell_bwd
from benches import measure
from benches.facts import facts
from benches.limit import VARIANTS
from benches.peers.contenders import CONTENDERS

__all__ = ["RESULTS", "ROOT", "Worker", "measure_size"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benches" / "results"
SIZES = ("32x128", "64x512", "256x1024", "1024x256", "4096x1000", "4096x1024", "16384x256")
# CPUs first, before any library counts them.
START = """
import os, sys
os.sched_setaffinity(0, [int(cpu) for cpu in sys.argv.pop(1).split(",")])
sys.path.append(sys.argv.pop(1))
from benches.peers import worker
worker.main()
"""
THREAD_VARIABLES = ("OMP", "MKL", "OPENBLAS", "NUMBA", "NUMEXPR")


class ContenderError(RuntimeError):
    """A contender cannot run here; the message is its own."""


class Worker:
    """A contender's process."""

    def __init__(self, name: str, python: str, threads: int) -> None:
        counts = {f"{library}_NUM_THREADS": str(threads) for library in THREAD_VARIABLES}
        cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[-threads:])
        if name == "lstmcell_bwd":
            # The very package that this process has, whose facts go into the results.
            counts["PYTHONPATH"] = str(Path(lstmcell_bwd.__file__).parents[1])
        self.threads = threads
        self.process = subprocess.Popen(
            [python, "-P", "-c", START, cpus, str(ROOT), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | counts,
        )

    def ask(self, **request: object) -> dict:
        """Send a request and wait for its answer."""
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": f"the process ended with {self.process.wait()}"}
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer

    def prepare(self, size: tuple[int, int]) -> tuple[dict, dict[str, str]]:
        """Prepare a size; return the turns that can be taken and the versions of the packages behind them."""
        answer = self.ask(size=size, threads=self.threads)
        turns = {name: lambda name=name: self.ask(turn=name)["seconds"] for name in answer["turns"]}
        return turns, answer["versions"]

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def measure_size(workers: dict[str, Worker], size: str) -> tuple[dict[str, object], dict[str, str], dict[str, str]]:
    """Let all workers take turns at one size.

    Parameters
    ----------
    workers : dict of str to Worker
    size : str
        As "64x512": batch x hidden size.

    Returns
    -------
    row : dict
        For every contender its seconds for one call, its time over this package's (`over_ours`) and this package's
        over its own (`ours_over`); for this package also its time over the limit. Each as smallest and median of five.
    versions, missing : dict of str to str
        Versions of the packages behind the contenders; reasons of those that could not run.
    """
    batch, hidden = (int(word) for word in size.split("x"))
    turns, versions, missing = {}, {}, {}
    for name, worker in workers.items():
        try:
            new, packages = worker.prepare((batch, hidden))
        except ContenderError as error:
            missing[name] = str(error)
            continue
        turns |= new
        versions |= packages
    row: dict[str, object] = {}
    if "lstmcell_bwd" not in turns:
        return row, versions, missing
    measured = measure.take_turns(turns)
    for name in turns:
        row[name] = {
            "seconds": list(measured.time(name)),
            "over_ours": list(measured.ratio(name, "lstmcell_bwd")),
            "ours_over": list(measured.ratio("lstmcell_bwd", name)),
        }
    variants = [name for name in VARIANTS if name in turns]
    if variants:
        row["lstmcell_bwd"]["over_limit"] = list(measured.ratio("lstmcell_bwd", *variants))
        row["limit"] = row[measured.fastest(variants)]
    return row, versions, missing


def main() -> int:
    """Measure and write the results file; the exit status is 1 if this package could not run."""
    parser = argparse.ArgumentParser(description="measure this package, the limit and other systems side by side")
    parser.add_argument("name", help="the results go to benches/results/NAME.json")
    parser.add_argument("--python", action="append", default=[], metavar="CONTENDER=PATH", help="another interpreter")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="NxH")
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=tuple(CONTENDERS))
    options = parser.parse_args()
    pythons = dict(choice.split("=", 1) for choice in options.python)
    results: dict[str, object] = {"facts": facts(), "versions": {}, "missing": {}, "rows": []}
    for threads in options.threads:
        workers = {name: Worker(name, pythons.get(name, sys.executable), threads) for name in options.only}
        try:
            for size in options.sizes:
                row, versions, missing = measure_size(workers, size)
                results["versions"] |= versions
                results["missing"] |= missing
                results["rows"].append({"size": size, "threads": threads, "contenders": row})
                report(size, threads, row)
        finally:
            for worker in workers.values():
                worker.close()
    for name, reason in results["missing"].items():
        print(f"left out: {name}: {reason}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    return 1 if "lstmcell_bwd" in results["missing"] else 0


def report(size: str, threads: int, row: dict) -> None:
    """Print one size's figures: milliseconds, and the time over this package's."""
    texts = []
    for name, figures in row.items():
        if name not in VARIANTS:
            texts.append(f"{name} {figures['seconds'][1] * 1e3:.4g} ms ({figures['over_ours'][1]:.2f})")
    print(f"{size}, {threads} thread(s): {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

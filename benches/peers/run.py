"""Measures this package, the same-bytes limit and other systems side by side; writes benches/results/NAME.json.

    python -m benches.peers.run [NAME] [--python PATH] [--python tensorflow=PATH] [--resume] [--sizes ...]
                                [--threads ...] [--only ...] [--tables]

Every system lives in a process of its own, with the same data, restricted to as many CPUs as it may use threads; the
limit shares this package's process, and so its input arrays. They stay alive and take turns on request, by the rule of
`benches.measure`; a system that is not installed is left out, and the file says so. The file, named after the CPU
unless NAME is given, is written after every size; with --resume the sizes that it has are not measured again. With
--tables the tables of `benches.peers.table` are written too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lstmcell_bwd
from benches import ROOT, data, measure
from benches.facts import facts
from benches.limit import VARIANTS
from benches.peers import RESULTS, table
from benches.peers.contenders import CONTENDERS

__all__ = ["ContenderError", "Worker", "machine_name", "measure_size"]

THREADS = (1, 2)
# These run in the interpreter of this process unless told otherwise; --python PATH is for the others.
HERE = ("lstmcell_bwd", "numpy")
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
    """The process of one or more contenders."""

    def __init__(self, names: tuple[str, ...], python: str, threads: int) -> None:
        counts = {f"{library}_NUM_THREADS": str(threads) for library in THREAD_VARIABLES}
        cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[-threads:])
        if "lstmcell_bwd" in names:
            # The very package that this process has, whose facts go into the results.
            counts["PYTHONPATH"] = str(Path(lstmcell_bwd.__file__).parents[1])
        self.threads = threads
        self.process = subprocess.Popen(
            [python, "-P", "-c", START, cpus, str(ROOT), *names],
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

    def prepare(self, size: tuple[int, int]) -> tuple[dict, dict[str, str], dict[str, str]]:
        """Prepare a size; return the turns there are, the versions of packages, and why contenders cannot run."""
        answer = self.ask(size=size, threads=self.threads)
        turns = {name: lambda name=name: self.ask(turn=name)["seconds"] for name in answer["turns"]}
        return turns, answer["versions"], answer["missing"]

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def measure_size(workers: list[Worker], size: str) -> tuple[dict[str, object], dict[str, str], dict[str, str]]:
    """Let all workers take turns at one size.

    Parameters
    ----------
    workers : list of Worker
    size : str
        As "64x512": batch x hidden size.

    Returns
    -------
    row : dict
        For every contender its seconds for one call, its time over this package's (`over_ours`) and this package's
        over its own (`ours_over`); for this package also its time over the limit. Each as smallest and median of five.
    versions, missing : dict of str to str
        Versions of the packages behind the contenders; reasons of those that could not run.

    Raises
    ------
    ContenderError
        If this package cannot run, or a process ends, or a contender that could run stops in between.
    """
    turns, versions, missing = {}, {}, {}
    for worker in workers:
        new, packages, reasons = worker.prepare(data.shape(size))
        turns |= new
        versions |= packages
        missing |= reasons
    if "lstmcell_bwd" not in turns:
        raise ContenderError(missing.get("lstmcell_bwd", "it is not among the contenders"))
    row: dict[str, object] = {}
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


def start(only: tuple[str, ...], pythons: dict[str, str], threads: int) -> list[Worker]:
    """Start the processes: this package's, which is the limit's too, and those of the other systems in `only`."""
    own = ("lstmcell_bwd", "limit") if "limit" in only else ("lstmcell_bwd",)
    groups = [own, *((name,) for name in pythons if name in only and name not in own)]
    return [Worker(names, pythons[names[0]], threads) for names in groups]


def machine_name() -> str:
    """Return the CPU's name as a file's: "intel-xeon-processor"."""
    return "-".join(re.findall(r"[a-z0-9]+", re.sub(r"\((?:r|tm)\)", "", str(facts()["cpu"]).lower())))


def interpreters(choices: list[str]) -> dict[str, str]:
    """Return every contender's interpreter from the values of --python.

    Raises
    ------
    ValueError
        For a contender or a program that is not there.
    """
    pythons = dict.fromkeys((name for name in CONTENDERS if name != "limit"), sys.executable)
    for choice in sorted(choices, key=lambda choice: "=" in choice):
        name, _, path = choice.rpartition("=")
        if name and name not in pythons:
            msg = f"--python must be PATH or CONTENDER=PATH with one of {', '.join(pythons)}, got {choice}"
            raise ValueError(msg)
        if shutil.which(path) is None:
            msg = f"--python must name a program, got {path}"
            raise ValueError(msg)
        pythons |= dict.fromkeys((name,) if name else (other for other in pythons if other not in HERE), path)
    return pythons


def begun(file: Path, resume: bool) -> dict:
    """Return the results so far: none, or with `resume` those of the file, which must be of the same machine and code.

    Raises
    ------
    ValueError
        If they are not.
    """
    results = {"facts": facts(), "versions": {}, "missing": {}, "rows": []}
    if resume and file.exists():
        earlier = json.loads(file.read_text())
        if earlier["facts"] != results["facts"]:
            names = [name for name, value in results["facts"].items() if earlier["facts"].get(name) != value]
            msg = f"{file.name} cannot be resumed, these are others now: {', '.join(names)}"
            raise ValueError(msg)
        results = earlier
    return results


def main() -> int:
    """Measure and write the results file; the exit status is 1 if a size could not be measured."""
    parser = argparse.ArgumentParser(description="measure this package, the limit and other systems side by side")
    parser.add_argument("name", nargs="?", default=machine_name(), help="of the file benches/results/NAME.json")
    parser.add_argument("--python", action="append", default=[], metavar="[CONTENDER=]PATH", help="of other systems")
    parser.add_argument("--resume", action="store_true", help="keep what the results file has of the same code")
    parser.add_argument("--sizes", nargs="+", default=data.SIZES, metavar="NxH")
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=tuple(CONTENDERS))
    parser.add_argument("--tables", action="store_true", help="write the tables of the pages too")
    options = parser.parse_args()
    file = RESULTS / f"{options.name}.json"
    try:
        pythons = interpreters(options.python)
        results = begun(file, options.resume)
    except ValueError as error:
        parser.error(str(error))
    done = {(row["size"], row["threads"]) for row in results["rows"]}
    failures = 0
    for threads in options.threads:
        sizes = [size for size in options.sizes if (size, threads) not in done]
        workers = start(options.only, pythons, threads) if sizes else []
        try:
            for size in sizes:
                try:
                    row, versions, missing = measure_size(workers, size)
                except ContenderError as error:
                    print(f"{size}, {threads} thread(s): not measured: {error}", flush=True)
                    failures += 1
                    continue
                results["versions"] |= versions
                results["missing"] |= missing
                results["rows"].append({"size": size, "threads": threads, "contenders": row})
                results["rows"].sort(key=lambda row: (row["threads"], [*data.SIZES, row["size"]].index(row["size"])))
                file.parent.mkdir(exist_ok=True)
                file.write_text(json.dumps(results, indent=1) + "\n")
                report(size, threads, row)
        finally:
            for worker in workers:
                worker.close()
    for name, reason in results["missing"].items():
        print(f"left out: {name}: {reason}")
    if options.tables and not failures:
        table.write(options.name)
    return 1 if failures else 0


def report(size: str, threads: int, row: dict) -> None:
    """Print one size's figures: milliseconds, and the time over this package's."""
    texts = []
    for name, figures in row.items():
        if name not in VARIANTS:
            texts.append(f"{name} {figures['seconds'][1] * 1e3:.4g} ms ({figures['over_ours'][1]:.2f})")
    print(f"{size}, {threads} thread(s): {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

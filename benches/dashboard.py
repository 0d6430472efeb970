"""Builds the dashboard from a run over several commits, opens it in a browser, and checks that it shows graphs.

    python -m benches.dashboard [--commits 3] [--bench REGEX] [--keep-results]

Runs the asv suite with one sample for each benchmark on the newest commits that changed what is compiled or the
package, publishes the page to benches/.asv/html with its scripts beside it (they come from npm, see package.json; asv's
own page asks the network for them), and opens it in headless Chromium. A commit that gives no data, because it cannot
be built, is named and an older one taken. Exit status 1 if too few commits give data, or if a page does not show its
graph with data on it. `asv preview --config benches/asv.conf.json` shows the page.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from benches import ROOT, facts

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DashboardError", "columns_with_curves", "labels_in", "localised"]

BENCHES = Path(__file__).resolve().parent
CONFIG = BENCHES / "asv.conf.json"
HTML = BENCHES / ".asv" / "html"
RESULTS = BENCHES / ".asv" / "results"
SCREENSHOTS = BENCHES / ".asv" / "screenshots"
# One sample, no warm-up: enough to draw a graph, and the suite's tests of its own limits are elsewhere.
QUICK = [word for setting in ("rounds=1", "repeat=1", "warmup_time=0.0") for word in ("--attribute", setting)]
# Pages that are opened: benchmarks of times, of shares and of errors.
PAGES = ("calls.Grid.time_backward", "quality.Limit.track_fraction_of_limit", "quality.Error.track_largest_error")
SIZE = (1400, 900)
# The plot in the picture: to the right of the sidebar, below the bar. Curves run through most of its columns, a legend
# alone through a dozen.
PLOT = (slice(100, None), slice(250, None))
LEAST_COLUMNS = 500
LEAST_LABELS = 4


class DashboardError(RuntimeError):
    """The dashboard could not be built, or does not show what it should."""


def command(*words: str, where: Path = BENCHES, **options: object) -> str:
    """Run a command, showing its output unless it is captured; raise unless it succeeds."""
    print("$", *words, flush=True)
    try:
        done = subprocess.run(words, cwd=where, text=True, check=True, **options)
    except (OSError, subprocess.CalledProcessError) as error:
        msg = f"{words[0]} failed: {error}"
        raise DashboardError(msg) from error
    return done.stdout or ""


def newest_commits() -> list[str]:
    """Return the commits that changed the package or what it is compiled from, newest first."""
    words = ("git", "rev-list", "HEAD", "--", *facts.PACKAGE)
    return command(*words, where=ROOT, stdout=subprocess.PIPE).split()


def localised(page: str, scripts: dict[str, str]) -> str:
    """Return asv's page with scripts and styles from files beside it instead of from the network.

    Parameters
    ----------
    page : str
        index.html.
    scripts : dict of str to str
        File names, as at the end of an address, and the files beside the page that stand for them.

    Raises
    ------
    DashboardError
        If the page asks for something that is not among them.
    """

    def local(match: re.Match) -> str:
        attribute, name = match[1], match[2].rsplit("/", 1)[1]
        if name not in scripts:
            msg = f"asv's page asks for {name}, which benches/package.json does not bring"
            raise DashboardError(msg)
        return f'{attribute}="{scripts[name]}"'

    for tag in re.findall(r"<(?:script|link)\b[^>]*>", page):
        if re.search(r'(?:src|href)="https?:', tag):
            new = re.sub(r'(src|href)="(https?:[^"]*)"', local, tag)
            new = re.sub(r' (?:integrity|crossorigin|referrerpolicy)="[^"]*"', "", new)
            page = page.replace(tag, new)
    return page


def bring_scripts() -> None:
    """Put the scripts that asv's page needs beside it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(BENCHES / "package.json", folder)
        npm = ("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock", "--loglevel=error")
        command(*npm, where=Path(folder))
        modules = Path(folder, "node_modules")
        flot = modules / "jquery.flot"
        files = {
            "jquery-3.3.1.min.js": modules / "jquery/dist/jquery.min.js",
            "jquery.flot.min.js": flot / "jquery.flot.js",
            "jquery.flot.time.min.js": flot / "jquery.flot.time.js",
            "jquery.flot.selection.min.js": flot / "jquery.flot.selection.js",
            "jquery.flot.categories.min.js": flot / "jquery.flot.categories.js",
            "jquery.flot.orderBars.js": modules / "flot-orderbars/js/jquery.flot.orderBars.js",
            "stupidtable.min.js": modules / "stupid-table-plugin/stupidtable.min.js",
            "md5.min.js": modules / "blueimp-md5/js/md5.min.js",
            "bootstrap.min.js": modules / "bootstrap/dist/js/bootstrap.min.js",
            "bootstrap.min.css": modules / "bootstrap/dist/css/bootstrap.min.css",
        }
        vendor = HTML / "vendor"
        vendor.mkdir(exist_ok=True)
        for name, file in files.items():
            shutil.copy(file, vendor / name)
    index = HTML / "index.html"
    index.write_text(localised(index.read_text(), {name: f"vendor/{name}" for name in files}))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each request."""

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def browse(address: str, screenshot: Path) -> str:
    """Open an address in headless Chromium; return the page's text as drawn, and take a picture of it."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        msg = "no Chromium found (Debian's package is chromium)"
        raise DashboardError(msg)
    flags = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--window-size={SIZE[0]},{SIZE[1]}", "--virtual-time-budget=20000",
    )  # fmt: skip
    page = ""
    for action in (f"--screenshot={screenshot}", "--dump-dom"):
        with tempfile.TemporaryDirectory() as profile:
            words = (browser, *flags, f"--user-data-dir={profile}", action, address)
            page = command(*words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=180)
    return page


def labels_in(page: str) -> int:
    """Count the labels that Flot drew along the axes of a page's plot."""
    return len(re.findall(r'class="flot-tick-label[^>]*>[^<]+<', page))


def columns_with_curves(picture: np.ndarray) -> int:
    """Count the columns of a picture in which something is strongly coloured, as only curves and their legend are.

    Parameters
    ----------
    picture : ndarray of float, shape (height, width, 3 or more)
        Colours from 0 to 1, as matplotlib reads a PNG file.
    """
    colours = picture[..., :3]
    return int((colours.max(axis=-1) - colours.min(axis=-1) > 0.3).any(axis=0).sum())


def check_pages(pages: tuple[str, ...]) -> None:
    """Open the overview and some graphs; raise unless each shows what it should."""
    import matplotlib.image

    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    handler = functools.partial(Quiet, directory=HTML)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        overview = browse(address, SCREENSHOTS / "overview.png")
        for name in pages:
            if name not in overview:
                msg = f"the overview does not list {name}"
                raise DashboardError(msg)
            picture = SCREENSHOTS / f"{name}.png"
            labels = labels_in(browse(f"{address}#{name}", picture))
            columns = columns_with_curves(matplotlib.image.imread(picture)[PLOT])
            print(f"{name}: {labels} labels on the axes, curves in {columns} columns, {picture}")
            if labels < LEAST_LABELS or columns < LEAST_COLUMNS:
                msg = f"the page of {name} shows no graph with data: see {picture}"
                raise DashboardError(msg)
        server.shutdown()


def has_data(commit: str, names: tuple[str, ...], results: Path) -> bool:
    """Tell whether asv's results folder has a figure of each of some benchmarks for a commit.

    asv writes a file without figures for a commit that it cannot build.
    """
    found = set()
    for file in results.glob(f"*/{commit[:8]}-*.json"):
        document = json.loads(file.read_text())
        column = document["result_columns"].index("result")
        for name, columns in document["results"].items():
            values = (columns and columns[column]) or ()
            # None: it failed; NaN: it was skipped.
            if any(value is not None and not math.isnan(value) for value in values):
                found.add(name)
    return found.issuperset(names)


def run_suite(number: int, bench: str, names: tuple[str, ...]) -> None:
    """Run the suite on the newest commits until so many have data."""
    asv = (sys.executable, "-m", "asv", "run", *QUICK, *(("--bench", bench) if bench else ()))
    commits = newest_commits()
    # Not the whole history where nothing can be built.
    for commit in commits[: 2 * number]:
        # asv's status is 2 if any benchmark failed, on an old commit too; what counts is what it wrote.
        subprocess.run([*asv, "--skip-existing-commits", f"{commit}^!"], cwd=BENCHES)
        if has_data(commit, names, RESULTS):
            number -= 1
        else:
            print(f"no data of commit {commit[:8]}; an older one is taken")
        if not number:
            return
    msg = f"{number} more commit(s) with data are needed; {len(commits)} changed the package: a shallow clone?"
    raise DashboardError(msg)


def build(number: int, bench: str, pages: tuple[str, ...], keep: bool) -> None:
    """Run, publish and check."""
    if not keep:
        shutil.rmtree(RESULTS, ignore_errors=True)
    if facts.describe_to_asv() != 0:
        msg = "asv does not take the machine's description"
        raise DashboardError(msg)
    run_suite(number, bench, pages)
    command(sys.executable, "-m", "asv", "publish")
    bring_scripts()
    check_pages(pages)


def main() -> int:
    """Build and check; see the module's documentation for the exit status."""
    parser = argparse.ArgumentParser(description="build the dashboard and check it in a browser")
    parser.add_argument("--commits", type=int, default=3, help="how many commits to run, at least 3")
    parser.add_argument("--bench", default="", metavar="REGEX", help="run only these benchmarks (and open their pages)")
    parser.add_argument("--keep-results", action="store_true", help="add to earlier results instead of starting anew")
    options = parser.parse_args()
    if options.commits < 3:
        parser.error(f"--commits must be at least 3, got {options.commits}")
    pages = tuple(name for name in PAGES if re.search(options.bench, name))
    if not pages:
        parser.error(f"--bench must select at least one of {', '.join(PAGES)}, got {options.bench}")
    try:
        build(options.commits, options.bench, pages, options.keep_results)
    except DashboardError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

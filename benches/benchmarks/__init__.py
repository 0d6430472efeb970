"""The asv suite. Prints once per process what is being measured; data and measuring rule are those of `benches`.

Parameters are the same whatever is installed, on every machine and for every version of the package; what cannot be run
is skipped in `setup` with a reason.
"""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
# At the end: the package under test is the installed one, not the sources beside this folder.
if ROOT not in sys.path:
    sys.path.append(ROOT)

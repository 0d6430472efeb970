"""Check what an sdist and the wheels beside it contain: every tracked source, every compiled module, nothing else.

    python tools/check_dist.py FOLDER

Run in a Git work tree. Left out of the sdist are files that begin with a dot, and folders that do.
"""

import argparse
import platform
import subprocess
import tarfile
import zipfile
from pathlib import Path

METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


def tracked():
    """Return the files of the work tree that belong to an sdist."""
    listing = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout
    return {name for name in listing.splitlines() if not name.startswith(".")}


def sdist_files(path):
    """Return the files of an sdist without those that setuptools generates."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return {name for name in names if name not in ("PKG-INFO", "setup.cfg") and ".egg-info/" not in name}


def wheel_files(path):
    """Return the files of a wheel, compiled modules by their plain names, and of libraries only that there are some."""
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    found = set()
    for name in names:
        folder, _, rest = name.partition("/")
        if folder.endswith(".dist-info"):
            found.add(f"dist-info/{rest}")
        elif folder == "lstmcell_bwd.libs":
            found.add(f"libs/{rest.partition('-')[0]}")
        else:
            found.add(name.split(".")[0] + ".so" if name.endswith(".so") else name)
    return found


def wanted_in_wheel(sources, name):
    """Return what a wheel must hold: the package's sources, a module for each .pyx of this machine, the metadata."""
    modules = {Path(source).stem for source in sources if source.startswith("pyx/") and source.endswith(".pyx")}
    if platform.machine() != "x86_64":
        modules = {module for module in modules if "avx" not in module}
    wanted = {source for source in sources if source.startswith("lstmcell_bwd/")}
    wanted |= {f"lstmcell_bwd/_{module}.so" for module in modules}
    wanted |= {f"dist-info/{entry}" for entry in METADATA}
    if "manylinux" in name:  # repaired: with its own OpenMP runtime
        wanted |= {"libs/libgomp", "dist-info/sboms/auditwheel.cdx.json"}
    return wanted


def main():
    """Compare, print, and exit with 1 where something is missing or too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    sources = tracked()
    found = {path: (sdist_files(path), sources) for path in folder.glob("*.tar.gz")}
    found |= {path: (wheel_files(path), wanted_in_wheel(sources, path.name)) for path in folder.glob("*.whl")}
    if not found:
        parser.error(f"no sdist and no wheel in {folder}")
    good = True
    for path, (has, wanted) in found.items():
        good &= has == wanted
        print(f"{path.name}: {len(has)} files; missing {sorted(wanted - has)}; too much {sorted(has - wanted)}")
    raise SystemExit(not good)


if __name__ == "__main__":
    main()

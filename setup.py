"""The compiled parts of lstmcell_bwd. All metadata is in pyproject.toml; this file only describes extensions.

Environment variables read at build time
    LSTMCELL_BWD_REQUIRE_OPENMP=1   a compiler without working OpenMP is an error instead of a loud warning
    LSTMCELL_BWD_CYTHON_CHECKS=1    Cython's own run-time checks on (None, overflow, division), for the tests
    LSTMCELL_BWD_SANITIZE=LIST      build with -fsanitize=LIST (for example address,undefined), for the tests
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# One line per instruction-set level: the stub's name, the machines it is built for, and the flags of that stub alone.
# pyx/features.pyx asks the CPU for exactly the features whose flags stand here.
ISA_LEVELS = {
    "baseline": (None, []),
    "avx2": (("x86_64", "AMD64"), ["-mavx2", "-mf16c"]),
    "avx512": (
        ("x86_64", "AMD64"),
        [
            "-mavx512f",
            "-mavx512bw",
            "-mavx512dq",
            "-mavx512vl",
            "-mf16c",
            "-mprefer-vector-width=512",
            # No other results: 4 to 8 % faster in the core's caches than the generic tuning.
            "-mtune=skylake-avx512",
        ],
    ),
}

# What the kernels mark inline must be. The loops of a row have a constant length, and leave out what is not asked of
# them, only where they are part of the function that says so; the compiler's own choice goes by what is around them.
KERNEL_MACROS = [("CYTHON_INLINE", "inline __attribute__((always_inline))")]

# Bits matter: no contraction of a * b + c, no value-changing optimisation. -fno-trapping-math allows the vectoriser to
# evaluate both sides of a choice; only the sticky exception flags can tell.
COMMON_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]

OPENMP_PROBE = """
#include <omp.h>
#include <stdio.h>
int main(void) {
    int threads = 0;
    #pragma omp parallel num_threads(2) reduction(+:threads)
    threads += 1;
    printf("%d\\n", threads);
    return 0;
}
"""


def environment_switch(name):
    """Whether an environment variable is set to anything but nothing and 0."""
    return os.environ.get(name, "0") not in ("", "0")


def openmp_works(compiler):
    """Whether a program with two OpenMP threads compiles, links, runs and really has two."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(OPENMP_PROBE)
        try:
            objects = compiler.compile([str(source)], output_dir=folder, extra_postargs=["-fopenmp"])
            compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=["-fopenmp"])
            output = subprocess.run([Path(folder, "probe")], capture_output=True, check=True, timeout=60).stdout
        except Exception as error:
            print(f"OpenMP probe: {error}", file=sys.stderr)
            return False
    return int(output) >= 1


class BuildExtensions(build_ext):
    """build_ext that adds OpenMP where the probe finds it to work."""

    def build_extensions(self):
        """Build all extensions, with OpenMP or with a warning."""
        if openmp_works(self.compiler):
            for extension in self.extensions:
                extension.extra_compile_args.append("-fopenmp")
                extension.extra_link_args.append("-fopenmp")
        else:
            message = "this compiler cannot build a running OpenMP program: lstmcell_bwd will use one thread only"
            if environment_switch("LSTMCELL_BWD_REQUIRE_OPENMP"):
                raise RuntimeError(message)
            print("\n".join(["*" * len(message), message, "*" * len(message)]), file=sys.stderr)
        super().build_extensions()


def extensions():
    """One extension per instruction-set level, and the baseline modules around them."""
    sanitize = os.environ.get("LSTMCELL_BWD_SANITIZE", "")
    flags = list(COMMON_FLAGS)
    link_flags = []
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]
        flags.append("-fno-wrapv")  # Python's own flags hold -fwrapv, with which an overflow is no finding
        link_flags += [f"-fsanitize={sanitize}"]
    sources = {name: (name.removeprefix("_"), [], []) for name in ("_features", "_arguments", "_api", "_exchange")}
    for level, (machines, level_flags) in ISA_LEVELS.items():
        if machines is None or platform.machine() in machines:
            sources[f"_kernel_{level}"] = (f"kernel_{level}", level_flags, KERNEL_MACROS)
    return [
        Extension(
            f"lstmcell_bwd.{module}",
            [f"pyx/{source}.pyx"],
            depends=["pyx/simd.h", "pyx/kernel.pxi", "pyx/forward.pxi", "pyx/kernel_abi.pxi"],
            include_dirs=["pyx", numpy.get_include()],
            define_macros=[
                ("NPY_NO_DEPRECATED_API", "NPY_1_22_API_VERSION"),
                ("CYTHON_CLINE_IN_TRACEBACK", "0"),
                *macros,
            ],
            extra_compile_args=flags + level_flags,
            extra_link_args=list(link_flags),
        )
        for module, (source, level_flags, macros) in sources.items()
    ]


def cythonized(modules, checks):
    """Translate modules to C, with Cython's own run-time checks or without."""
    return cythonize(
        modules,
        build_dir="build/cython",
        compiler_directives={
            "language_level": 3,
            "nonecheck": checks,
            "overflowcheck": checks,
            "cdivision": not checks,
            "embedsignature": True,
        },
    )


# Never checked by Cython are the kernels: their arithmetic on the bits of numbers wraps around, and they divide by zero
# as IEEE 754 has it. The sanitizers watch them.
modules = extensions()
kernels = [module for module in modules if "_kernel_" in module.name]
others = [module for module in modules if module not in kernels]
setup(
    ext_modules=cythonized(kernels, False) + cythonized(others, environment_switch("LSTMCELL_BWD_CYTHON_CHECKS")),
    cmdclass={"build_ext": BuildExtensions},
)

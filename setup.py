"""Builds the optional C extension, or with HEADGATE_PURE=1 none. Everything else is in pyproject.toml."""

from __future__ import annotations

import os
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildSpeedups(build_ext):
    """Says what is lost if an extension cannot be built; an optional one is then left out."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            print(
                f"\nWARNING: the C extension {ext.name} was not built: {error}\n"
                "Headgate gives the same answers without it, but a check in memory takes about three times as long\n"
                "and a batch for Redis about 1.5 times. To build it, install a C compiler and the Python headers (on\n"
                "Debian, `apt install gcc python3-dev`) and reinstall. `headgate --version` says if it is in use.\n",
                file=sys.stderr,
            )
            raise


SPEEDUPS = Extension(
    "headgate._native",
    ["src/headgate/_native.c"],
    depends=glob("src/headgate/algorithms/*.h"),
    # -O3, with which many Pythons were built, is slower here: the longer code costs more than its loops gain.
    extra_compile_args=["-O2"],
    optional=True,
)

setup(
    cmdclass={"build_ext": BuildSpeedups},
    ext_modules=[] if os.environ.get("HEADGATE_PURE") == "1" else [SPEEDUPS],
)

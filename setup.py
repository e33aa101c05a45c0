"""The parts in C. Where there is no compiler for them they are left out, and Python does the same: decision 18."""

from glob import glob

from setuptools import Extension, setup

SOURCES = sorted(glob("src/headgate/**/_*.c", recursive=True))
HEADERS = glob("src/headgate/**/*.h", recursive=True)

setup(
    ext_modules=[
        Extension(
            source.removeprefix("src/").removesuffix(".c").replace("/", "."),
            [source],
            depends=HEADERS,
            # Not the -O3 that many a Python was built with: its longer code costs a request more than its loops gain.
            extra_compile_args=["-O2"],
            optional=True,
        )
        for source in SOURCES
    ]
)

"""The parts in C. Where there is no compiler for them they are left out, and Python does the same: decision 18."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(name, [f"src/{name.replace('.', '/')}.c"], depends=glob("src/headgate/algorithms/*.h"), optional=True)
        for name in ("headgate.stores._meter", "headgate.adapters._fields")
    ]
)

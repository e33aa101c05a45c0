"""The parts in C. Where there is no compiler for them they are left out, and Python does the same: decision 18."""

from setuptools import Extension, setup

HEADERS = [f"src/headgate/algorithms/{name}.h" for name in (
    "_exact", "_python", "fixed_window", "gcra", "leaky_bucket", "sliding_window", "token_bucket"
)]  # fmt: skip

setup(
    ext_modules=[
        Extension(name, [f"src/{name.replace('.', '/')}.c"], depends=HEADERS, optional=True)
        for name in ("headgate.stores._meter", "headgate.adapters._fields")
    ]
)

"""Machine code made on one machine for another: ``python tests/device/prebuilt.py FOLDER ARCHITECTURE`` compiles every
kernel into a folder, and NINFER_PREBUILT=FOLDER makes the measurements and tests here take it from there.

The package's own cache will not do, because its names tell compilers apart.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from ninfer._cuda import compile as compiler
from ninfer._cuda.device import kernel_sources


def name(source: compiler.Source, arch: str) -> str:
    return f"{source.name}-{arch}-{hashlib.blake2b(source.text.encode(), digest_size=8).hexdigest()}.cubin"


def build(folder: Path, arch: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sources = kernel_sources()
    for source, path in zip(sources, compiler.compile_all(sources, arch), strict=True):
        (folder / name(source, arch)).write_bytes(path.read_bytes())


def use(folder: Path) -> None:
    """Take machine code from the folder where it has it; compile the rest."""
    compile_one = compiler.cubin

    def cubin(source: compiler.Source, arch: str) -> Path:
        file = folder / name(source, arch)
        return file if file.exists() else compile_one(source, arch)

    compiler.cubin = cubin


def use_named() -> None:
    """``use`` the folder that NINFER_PREBUILT names, if it names one."""
    if folder := os.environ.get("NINFER_PREBUILT"):
        use(Path(folder))


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2])

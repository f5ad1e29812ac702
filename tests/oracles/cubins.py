"""What kernels take of a multiprocessor, as their machine code says. A cubin is an ELF file; ``.nv.info`` of it holds
attributes, most of them as a format, a code, a length and so many bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_ENTRY = 0x10  # in a symbol's st_other
_WITH_BYTES, _MAX_THREADS, _REGISTERS = 4, 0x05, 0x2F


class Needs(NamedTuple):
    """registers: of a thread. shared: bytes a block, besides those that a launch asks for. threads: the most that it
    may be launched with, 0 where it does not say."""

    registers: int
    shared: int
    threads: int

    def registers_of(self, threads: int) -> int:
        """What a block takes: whole warps, each a multiple of 256, which is 8 a thread."""
        return -(-threads // 32) * (-(-32 * self.registers // 256) * 256)


def needs(code: bytes) -> dict[str, Needs]:
    """Of every kernel of a cubin. One that may call functions takes as many registers as any of them."""
    sections = _sections(code)
    texts = sections[".strtab"][0]
    names, kernels = [], []
    for name, _, other, _, _, _ in struct.iter_unpack("<IBBHQQ", sections[".symtab"][0]):
        names.append(_text(texts, name))
        if other & _ENTRY:
            kernels.append(names[-1])
    registers = {names[symbol]: count for symbol, count in _attributes(sections[".nv.info"][0], _REGISTERS)}
    called = max((count for name, count in registers.items() if name not in kernels), default=0)
    found = {}
    for name in kernels:
        bounds = [x * y * z for x, y, z in _attributes(sections.get(f".nv.info.{name}", (b"", 0))[0], _MAX_THREADS)]
        shared = sections.get(f".nv.shared.{name}", (b"", 0))[1]
        found[name] = Needs(max(registers[name], called), shared, *(bounds or [0]))
    return found


def _sections(code: bytes) -> dict[str, tuple[bytes, int]]:
    """Contents and size by name; what is made when it is loaded has a size alone."""
    assert code[:6] == b"\x7fELF\x02\x01", "64 bits, little endian"
    (table,) = struct.unpack_from("<Q", code, 40)
    entry, count, names = struct.unpack_from("<3H", code, 58)
    heads = [struct.unpack_from("<2I4Q2I2Q", code, table + i * entry) for i in range(count)]
    texts = code[heads[names][4] :]
    return {_text(texts, head[0]): (code[head[4] : head[4] + head[5]], head[5]) for head in heads}


def _attributes(info: bytes, wanted: int) -> Iterator[tuple[int, ...]]:
    """The words of every attribute of that code."""
    at = 0
    while at < len(info):
        kind, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == _WITH_BYTES:
            if attribute == wanted:
                yield struct.unpack_from(f"<{length // 4}I", info, at)
            at += length


def _text(texts: bytes, begin: int) -> str:
    return texts[begin : texts.index(b"\0", begin)].decode()

"""The members of a tar, from its headers alone: a tenth of the time that tarfile takes, where the headers are plain."""

import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

# A plain header: name, mode, owner, size, time, checksum, file (0) or folder (5), link, ustar, owner, device, prefix. It has
# nothing but octal numbers, and no meaning that depends on what came before.
PLAIN = re.compile(
    rb"(.{100})(?:[0-7]{7}[\0 ]){3}([0-7]{11})[\0 ][0-7]{11}[\0 ]([0-7]{6})(?:\0 | \0|\0\0)([05]).{100}"
    rb"(?:ustar\x0000|ustar  \0).{64}(?:[0-7]{7}[\0 ]|\0{8}){2}(.{155})",
    re.DOTALL,
)
BLOCK = tarfile.BLOCKSIZE
# A caption's member and the next header lie within one read.
READ = 8192


class NotPlain(Exception):
    """A header that takes tarfile to understand or to refuse: of a long name, a sparse file, a damaged tar."""


def members(tar: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size in bytes) of each regular file, as tarfile finds them.

    Raises:
        tarfile.TarError: if the tar is damaged or truncated.
    """
    done = 0
    try:
        for member in _plain(tar):
            yield member
            done += 1
        return
    except NotPlain:
        pass
    for number, member in enumerate(_any(tar)):
        if number >= done:
            yield member


def _plain(tar: Path) -> Iterator[tuple[str, int, int]]:
    with tar.open("rb", buffering=0) as file:
        handle, size = file.fileno(), os.fstat(file.fileno()).st_size
        data, start, at = b"", 0, 0
        while True:
            if at + BLOCK > start + len(data):
                data, start = os.pread(handle, READ, at), at
            header = data[at - start : at - start + BLOCK]
            match = PLAIN.match(header)
            if match is None:
                if header == bytes(BLOCK):
                    return
                raise NotPlain
            name, length, checksum, kind, prefix = match.groups()
            if _sum(header) - sum(header[148:156]) + 256 != int(checksum, 8):  # the checksum counts as eight spaces
                raise NotPlain
            at += BLOCK
            if kind == b"5":
                continue
            length = int(length, 8)
            if at + length > size:
                raise NotPlain
            name, prefix = name.partition(b"\0")[0], prefix.partition(b"\0")[0]
            yield (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape"), at, length
            at += -(-length // BLOCK) * BLOCK


def _sum(header: bytes) -> int:
    """The sum of 512 bytes, quickly: the low half of Adler-32 is 1 + the sum modulo 65521, which 256 bytes cannot reach."""
    return (zlib.adler32(header[:256]) & 0xFFFF) + (zlib.adler32(header[256:]) & 0xFFFF) - 2


def _any(tar: Path) -> Iterator[tuple[str, int, int]]:
    size = tar.stat().st_size
    with tarfile.open(tar, "r:", encoding="utf-8", errors="surrogateescape") as file:
        try:
            for member in file:
                file.members = []  # pyright: ignore[reportAttributeAccessIssue] # tarfile would keep them all
                if not member.isreg() or member.issparse():
                    continue
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError(f"member {member.name} ends at byte {member.offset_data + member.size}")
                yield member.name, member.offset_data, member.size
        except (ValueError, OverflowError) as error:  # of a size that is none
            raise tarfile.ReadError(f"member at byte {file.offset}: {error}") from None
        end = file.offset
    # A reader stops at the first block that is no header. Only zeros there mean that the tar was finished.
    with tar.open("rb") as file:
        file.seek(end)
        if file.read(BLOCK) != bytes(BLOCK):
            raise tarfile.ReadError(f"no member and no end of the archive at byte {end}")

"""Errors of the toolkit: each has a stable code and says where, what was found, what was due."""

from __future__ import annotations

import os
from enum import IntEnum


class FormatCode(IntEnum):
    """Number and name of every rule a `.colibri` file can break (spec, section 12).

    The names, lower-cased with hyphens, are the `code` of the raised error; the numbers are the
    same in every language.
    """

    FILE_TOO_SMALL = 1
    BAD_MAGIC = 2
    UNSUPPORTED_VERSION = 3
    SUPERBLOCK_CHECKSUM = 4
    UNSUPPORTED_FEATURE = 5
    TRUNCATED = 6
    TRAILING_BYTES = 7
    SUPERBLOCK_CONFLICT = 8
    RESERVED_NOT_ZERO = 9
    BAD_ALIGNMENT = 10
    BAD_GEOMETRY = 11
    REGION_LENGTH = 12
    REGION_PLACEMENT = 13
    REGION_CHECKSUM = 14
    TABLE_COUNT = 20
    TABLE_LENGTH = 21
    BAD_STRING = 22
    DUPLICATE_NAME = 23
    BAD_DTYPE = 24
    BAD_LAYOUT = 25
    BAD_SEGMENT = 26
    BAD_SHAPE = 27
    SIZE_MISMATCH = 28
    BAD_INTERLEAVE = 29
    BAD_LAYER = 30
    BAD_PACK = 31
    BAD_TENSOR = 32
    BAD_FILE_ENTRY = 33
    BLOCK_MISALIGNED = 40
    BLOCK_OUT_OF_BOUNDS = 41
    BLOCK_SIZE = 42
    ABSENT_NOT_ZERO = 43
    EXTENT_OVERLAP = 44
    BAD_EXPERT_LAYOUT = 45
    BAD_VOLUME = 46
    VOLUME_DIGEST = 47
    VOLUME_MISSING = 48
    VOLUME_MISMATCH = 49
    METADATA_INVALID = 50
    METADATA_NOT_CANONICAL = 51
    BLOCK_CHECKSUM = 60
    TENSOR_CHECKSUM = 61
    FILE_CHECKSUM = 62
    PADDING_NOT_ZERO = 63
    SHORT_READ = 64
    BAD_MODEL = 70

    @property
    def text(self) -> str:
        """The code as errors carry it: `BAD_MAGIC` is `bad-magic`."""
        return self.name.lower().replace("_", "-")


def printable(text: str) -> str:
    """`text` with everything that is not to be printed as an escape.

    Names and values come out of files: control characters would steer the terminal that shows
    them, and characters that turn the direction of writing would show them as others.

    >>> print(printable("a" + chr(27) + "[31m" + chr(0x202E) + "b"))
    a\\x1b[31m\\u202eb
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ColibriError(Exception):
    """Root of every error the toolkit raises.

    Reads `where: found; required; remedy`. `code` is stable across releases; the words are not.
    """

    def __init__(
        self, code: str | FormatCode, where: object, found: str, required: str, remedy: str = ""
    ) -> None:
        self.code = code.text if isinstance(code, FormatCode) else code
        self.where = str(where)
        self.found = found
        self.required = required
        self.remedy = remedy
        parts = [part for part in (found, required, remedy) if part]
        self.message = printable(f"{self.where}: {'; '.join(parts)}")
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message


class FormatError(ColibriError, ValueError):
    """A `.colibri` file breaks a rule of its specification."""


class UsageError(ColibriError, ValueError):
    """A caller asked for what cannot be done: wrong argument, unknown name, wrong order."""


class StorageError(ColibriError, OSError):
    """The kernel refused or cut short an operation on a file; keeps `errno` and `filename`."""

    def __init__(
        self,
        code: str | FormatCode,
        where: object,
        found: str,
        required: str,
        remedy: str = "",
        *,
        errno: int | None = None,
    ) -> None:
        super().__init__(code, where, found, required, remedy)
        self.errno = errno
        self.filename = str(where)

    @classmethod
    def of(cls, error: OSError, where: object, doing: str, remedy: str = "") -> StorageError:
        """The kernel's `error`, met while `doing` something to the file `where`."""
        reason = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
        return cls(
            _os_code(error), where, f"{doing} failed: {reason}", "", remedy, errno=error.errno
        )


def _os_code(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "file-not-found"
    if isinstance(error, FileExistsError):
        return "file-exists"
    if isinstance(error, PermissionError):
        return "permission-denied"
    if isinstance(error, IsADirectoryError):
        return "is-a-directory"
    return {5: "io-error", 28: "disk-full"}.get(error.errno or 0, "os-error")

"""Headers of safetensors files: the data type, shape and position of each tensor, without its values.

The files are untrusted. Sizes are limited, and an entry must agree with the size of the file, before anything
is allocated for it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

from rlhf_core.config.redact import shown
from rlhf_core.system.files import LFS_POINTER, UnfitFile, header_copy, open_regular

_HEADER_LIMIT = 16 << 20
"""Maximum size of a header in bytes, enough for about 100,000 tensors."""
_AXIS_LIMIT = 1 << 48
"""Maximum length of an axis, far above that of existing models."""
_MAX_AXES = 16
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
    "C64": 8,
}  # fmt: skip
"""Bytes per element of the data types that use whole bytes."""


class BadHeader(ValueError):
    """The file is not a complete safetensors file. The message is a predicate without the file's name."""


def read_header(file: Path) -> dict[str, Any]:
    """Return the header entry of each tensor by name. Raises BadHeader.

    A host that has no weights can have a copy of the header (`header_copy`).
    """
    copy = header_copy(file)
    is_copy = copy.exists() and not file.exists()
    try:
        stream = open_regular(copy if is_copy else file)
    except FileNotFoundError as error:
        raise BadHeader(f"is missing ({error})") from error
    except UnfitFile as error:
        raise BadHeader(str(error).removeprefix(f"{file} ")) from error
    except OSError as error:
        raise BadHeader(f"cannot be read ({error.strerror})") from error
    with stream:
        return _parse_header(stream, has_tensors=not is_copy)


def _parse_header(stream: BinaryIO, *, has_tensors: bool) -> dict[str, Any]:
    """Parse the header of an open file: its length in 8 bytes, then a JSON object, then the tensors."""
    size = os.fstat(stream.fileno()).st_size
    start = stream.read(64)
    if start.startswith(LFS_POINTER):
        raise BadHeader("is a Git LFS pointer, not weights")
    if start.lstrip()[:1] == b"<":
        raise BadHeader("is not safetensors (it looks like HTML)")
    length = int.from_bytes(start[:8], "little")
    if size < 8 or length > min(size - 8, _HEADER_LIMIT):
        raise BadHeader(f"is not safetensors (its header would be {length} bytes, the file is {size})")
    stream.seek(8)
    end = 0
    try:
        header: dict[str, Any] = json.loads(stream.read(length))
        metadata = header.pop("__metadata__", None)
        if metadata is not None and not all(isinstance(value, str) for value in metadata.values()):
            raise BadHeader("is not safetensors (its __metadata__ must be texts by name)")
        for name, entry in header.items():
            problem = _entry_problem(entry)
            if problem is not None:
                raise BadHeader(f"is not safetensors (tensor {shown(name)} {problem})")
        # As safetensors requires it: one tensor after the other, from the first byte on.
        for begin, following in sorted(entry["data_offsets"] for entry in header.values()):
            if begin != end:
                raise BadHeader(f"is not safetensors (a tensor begins at {begin} instead of {end})")
            end = following
    # It is a ValueError, too.
    except BadHeader:
        raise
    # Any JSON can be in the file, so that every access above can fail with one of these.
    except (ValueError, AttributeError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise BadHeader("is not safetensors (its header is damaged)") from error
    if has_tensors and size != 8 + length + end:
        raise BadHeader(f"has {size} bytes instead of {8 + length + end}: cut short or damaged")
    return header


def _entry_problem(entry: Any) -> str | None:
    """Return the problem of a tensor's header entry, or None."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in _DTYPE_BYTES:
        return f"has the unknown dtype {shown(str(dtype))}"
    # The number of axes and their lengths are limited so that the product below stays small.
    if type(shape) is not list or len(shape) > _MAX_AXES:
        return f"has the impossible shape {shown(str(shape)[:80])}"
    # Not isinstance, which accepts `true` as an integer.
    if not all(type(axis) is int and 0 <= axis < _AXIS_LIMIT for axis in shape):
        return f"has the impossible shape {shown(str(shape)[:80])}"
    begin, end = offsets
    if type(begin) is not int or type(end) is not int:
        fits = False
    else:
        fits = end - begin == math.prod(shape) * _DTYPE_BYTES[dtype]
    if not fits:
        return f"has {shown(str(offsets)[:80])} for its bytes, which are not those of its shape {shape}"
    return None

"""Reads WebDataset shards: .tar files in which consecutive members with the same name are one row (007.jpg, 007.json,
007.question.txt).

Finding the rows reads only headers; a row is read from its byte range. Members are never extracted to disk, and only
regular files are read."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlrl.data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from vlrl.data.sources.json_rows import MOST_LINE, parse_line
from vlrl.data.values import short
from vlrl.errors import DataError

_FIELDS = {"txt": "text", "cls": "label"}
_BLOCK = 512
_MOST_HEADER = 64 << 10
"""Maximum bytes of an extended header, which holds a long name."""
_MOST_MEMBER = 2 << 30
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)


class _Member(NamedTuple):
    name: str
    begin: int
    """Offset of the member's first header."""
    data: int
    size: int


def row_spans(path: Path) -> np.ndarray:
    """Returns (first byte, end) of each row as [N, 2] int64. Raises DataError naming the shard and the member."""
    rows: list[list[int]] = []
    last = None
    with open(path, "rb") as file:
        for member in _members(path, file.fileno(), 0, os.fstat(file.fileno()).st_size):
            key = _parts(member.name)[0]
            if key is None:
                last = None
            elif key == last:
                rows[-1][1] = member.data + member.size
            else:
                rows.append([member.begin, member.data + member.size])
                last = key
    return np.array(rows, np.int64).reshape(-1, 2)


def row_at(path: Path, file: int, begin: int, end: int) -> tuple[str, dict[str, Any] | DataError]:
    """Returns (name, record) of the row in the bytes `begin` to `end` of a shard, which is open as the descriptor
    `file`. For an invalid row, the record is a DataError."""
    key, record, suffixes = "", {}, set[str]()
    try:
        for member in _members(path, file, begin, end):
            own, suffix = _parts(member.name)
            key, row_name = own or key, own or key
            if suffix in suffixes:
                return key, DataError(f"{path}: the member {short(member.name)} occurs twice in one row")
            suffixes.add(suffix)
            if row_name != key:
                return key, DataError(f"{path} has changed since it was indexed")
            _add(record, suffix, os.pread(file, member.size, member.data), f"{path}: the member {short(member.name)}")
    except DataError as error:
        return key, error
    return key, {"id": key, **record, "__key__": key}


def _add(record: dict[str, Any], suffix: str, data: bytes, name: str) -> None:
    """Adds the content `data` of one member to the record: an image, a video, the fields of a JSON object, or a text.
    The name of a text's field is the part of `suffix` before `.txt`."""
    field, _, kind = suffix.rpartition(".")
    if f".{kind}" in IMAGE_SUFFIXES:
        several = [*record.pop("images", []), *([record.pop("image")] if "image" in record else []), data]
        record |= {"image": data} if len(several) == 1 else {"images": several}
        return
    if f".{kind}" in VIDEO_SUFFIXES:
        record["video"] = data
        return
    try:
        text = data.decode("utf-8-sig") if len(data) <= MOST_LINE else None
    except UnicodeDecodeError:
        text = None
    if kind == "json":
        content = parse_line(text) if text is not None else DataError("not UTF-8 text")
        if isinstance(content, DataError):
            raise DataError(f"{name}: {content}")
        if isinstance(content, dict) and not field:
            record |= {k: v for k, v in content.items() if k not in ("image", "images", "video") or k not in record}
        else:
            record[field or kind] = content
    elif text is not None:
        record[field or _FIELDS.get(kind, kind)] = text.strip()
    else:
        record[suffix] = f"<{len(data)} bytes>"


def _parts(name: str) -> tuple[str | None, str]:
    """Splits a member's name into its row name and the lower-case suffix after the first dot; (None, "") if it has no
    suffix."""
    match = _KEY.fullmatch(name)
    return (match[1], match[2].lower()) if match else (None, "")


def _members(path: Path, file: int, begin: int, end: int) -> Iterator[_Member]:
    """Yields the regular files in a byte range. Skips folders, and raises DataError for anything else."""
    size, at, first, headers = os.fstat(file).st_size, begin, begin, dict[str, str]()
    while at < end:
        head = os.pread(file, _BLOCK, at)
        if head.strip(b"\0") == b"":  # the end, or padding after it
            return
        try:
            info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise DataError(f"{path}: the block at byte {at} is not a header of a tar file ({error}): rewrite the "
                            "file, and decompress compressed shards (.tar.gz)") from None
        name, length = headers.get("path", info.name), int(headers.get("size", info.size))
        where, data = f"{path}: the member {short(name)}", at + _BLOCK
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE):
            if not 0 <= info.size <= _MOST_HEADER:
                raise DataError(f"{where} has a header of {info.size} bytes, more than {_MOST_HEADER}: shorten the "
                                "name of the member")
            headers |= _long(info.type, os.pread(file, info.size, data), where)
            at = data + -(-info.size // _BLOCK) * _BLOCK
            continue
        if not 0 <= length <= _MOST_MEMBER or data + length > size:
            raise DataError(f"{where} has {length} bytes according to its header (at most {_MOST_MEMBER} are "
                            f"allowed), but the shard ends {size - data} bytes after the header: the shard is "
                            "truncated or damaged")
        if not info.isdir():
            _refuse(info, name, where)
            yield _Member(name.removeprefix("./"), first, data, length)
        at = first = data + -(-length // _BLOCK) * _BLOCK
        headers = {}


def _refuse(info: tarfile.TarInfo, name: str, where: str) -> None:
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise DataError(f"{where} is not a regular file but a link, a device or the like (type {info.type!r}), which "
                        "is not read: rewrite the shard without it")
    if name.startswith("/") or "\0" in name or ".." in name.split("/") or "\\" in name or not _is_text(name):
        raise DataError(f"{where} has a name that leads outside the shard, or is not text: rewrite the shard")


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _long(kind: bytes, data: bytes, where: str) -> dict[str, str]:
    text = data.decode("utf-8", "surrogateescape")
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": text.rstrip("\0")}
    if kind == tarfile.XGLTYPE:
        return {}
    fields = dict(re.findall(r"(?:\A|\n)\d{1,6} (path|size)=([^\n]*)(?=\n)", text))
    if not re.fullmatch(r"\d{1,15}", fields.get("size", "0")):
        raise DataError(f"{where}: its header gives an invalid size, {short(fields['size'])}")
    return fields

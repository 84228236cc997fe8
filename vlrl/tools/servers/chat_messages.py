"""Chat messages in OpenAI's form, as an agent loop sends them: read, and compared with what was recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.data.embedded import EmbeddedMedia, decode_base64
from vlrl.data.media import MediaAccess, media_source
from vlrl.errors import DataError, VlrlError
from vlrl.types import Media


class RequestError(VlrlError):
    """Why a call gets no reply, and its HTTP status."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Message:
    """A chat message: its role, and its texts and images in order."""

    role: str
    parts: tuple[tuple[str, str], ...]
    """(text, the text) or (image, a hash of its URL)."""
    media: tuple[Media, ...] = ()

    @property
    def text(self) -> str:
        return "".join(value for kind, value in self.parts if kind == "text")

    @property
    def content(self) -> list[dict[str, Any]]:
        """As chat templates take it."""
        return [{"type": "text", "text": value} if kind == "text" else {"type": "image"} for kind, value in self.parts]


def read(given: Any, access: MediaAccess, root: Path) -> list[Message]:
    """Returns messages in OpenAI's form; `access` says which hosts images may be fetched from. No file is read.

    Raises Refused with the place of what is none.
    """
    if not isinstance(given, list) or not given:
        raise RequestError(400, "messages: a list of messages")
    return [_message(one, f"messages[{i}]", access, root) for i, one in enumerate(given)]


def _message(given: Any, place: str, access: MediaAccess, root: Path) -> Message:
    role, content = (given.get("role"), given.get("content")) if isinstance(given, dict) else (None, None)
    if role not in ("system", "user", "assistant"):
        raise RequestError(400, f"{place}: the role is {str(role)[:40]!r}, expected system, user or assistant (results "
                      "of tools go into a message of the user)")
    listed: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(listed, list) or not listed:
        raise RequestError(400, f"{place}: the content is neither a text nor a list of parts")
    parts, media = [], []
    for k, part in enumerate(listed):
        where, kind = f"{place}.content[{k}]", part.get("type") if isinstance(part, dict) else None
        if kind == "text" and _is_text(part.get("text")):
            parts.append(("text", part["text"]))
        elif kind == "image_url" and isinstance(link := part.get("image_url"), dict):
            media.append(_image(link.get("url"), where, access, root))
            parts.append(("image", hashlib.sha256(link["url"].encode()).hexdigest()))
        else:
            raise RequestError(400, f'{where}: expected {{"type": "text", "text": ...}} or {{"type": "image_url", '
                          '"image_url": {"url": "data:image/png;base64,..."}}')
    return Message(role, tuple(parts), tuple(media))


def _image(url: Any, where: str, access: MediaAccess, root: Path) -> Media:
    """Returns an image by its data: URL, or by another one where data.urls allows it."""
    if not _is_text(url) or not url.startswith(("data:", "http://", "https://")):
        raise RequestError(400, f"{where}: url must be a data: URL")
    if not url.startswith("data:"):
        if not access.urls:
            raise RequestError(400, f"{where}: only data: URLs are read, as data.urls names no host that may be asked")
        try:
            return Media(source=media_source(url, root, access))
        except DataError as error:
            raise RequestError(400, f"{where}: {error}") from None
    try:
        data = decode_base64(url)
    except DataError as error:
        raise RequestError(400, f"{where}: {error}") from None
    if data is None or not url.startswith("data:image/"):
        raise RequestError(400, f"{where}: no data: URL with an image in base64")
    return Media(source=EmbeddedMedia(data, where))


def _is_text(value: Any) -> bool:
    """Returns whether a value is a text that UTF-8 can hold."""
    return isinstance(value, str) and value.encode("utf-8", "replace").decode() == value


def same(messages: Sequence[Message], recorded: Sequence[Message]) -> bool:
    """Returns whether a conversation is what was recorded."""
    return len(messages) == len(recorded) and not any(map(contradiction, messages, recorded))


def contradiction(given: Message, own: Message) -> str | None:
    """Returns the place in a message that is not what was recorded; None where all is."""
    if given.role != own.role:
        return ".role"
    if given.parts == own.parts or (given.role == "assistant" and given.text == own.text):
        return None
    for k, (a, b) in enumerate(zip(given.parts, own.parts, strict=False)):
        if a[0] == b[0] == "text" and a != b:
            at = next((i for i, (x, y) in enumerate(zip(a[1], b[1], strict=False)) if x != y),
                      min(len(a[1]), len(b[1])))
            return f".content[{k}] from character {at} on"
        if a != b:
            return f".content[{k}]"
    return f".content[{min(len(given.parts), len(own.parts))}]"

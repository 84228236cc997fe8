"""Chat requests and replies in OpenAI's format: parses messages and sampling fields, compares conversations."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlrl.config.rollout import RolloutSettings
from vlrl.data.embedded import EmbeddedMedia, decode_base64
from vlrl.data.media import MediaAccess, media_source
from vlrl.engine.base import Sampling
from vlrl.errors import DataError, VlrlError
from vlrl.rollout.generate import sampling_of
from vlrl.types import Completion, Media

IGNORED = {"model", "user", "metadata", "store", "messages"}
"""Request fields that do not affect sampling: they have no effect, or other code reads them."""


class RequestError(VlrlError):
    """An error that refuses a request, with its HTTP status."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Message:
    """A chat message: its role, and its texts and images in order."""

    role: str
    parts: tuple[tuple[str, str], ...]
    """The parts of the message in order, each as ("text", the text) or ("image", a hash of the image's URL)."""
    media: tuple[Media, ...] = ()

    @property
    def text(self) -> str:
        return "".join(value for kind, value in self.parts if kind == "text")

    @property
    def content(self) -> list[dict[str, Any]]:
        """The content of the message in the format of chat templates."""
        return [{"type": "text", "text": value} if kind == "text" else {"type": "image"} for kind, value in self.parts]


def read(messages: Any, access: MediaAccess, root: Path) -> list[Message]:
    """Returns the messages of a request. URLs of images are checked by media_source(url, root, access), where `access`
    names the hosts from which images may be downloaded. No local file is read.

    Raises RequestError naming the invalid message."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages must be a list of one or more messages")
    return [_message(one, f"messages[{i}]", access, root) for i, one in enumerate(messages)]


def _message(given: Any, place: str, access: MediaAccess, root: Path) -> Message:
    role, content = (given.get("role"), given.get("content")) if isinstance(given, dict) else (None, None)
    if role not in ("system", "user", "assistant"):
        raise RequestError(400, f"{place}: the role is {str(role)[:40]!r}, expected system, user or assistant (put the "
                      "results of tools into a user message)")
    listed: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(listed, list) or not listed:
        raise RequestError(400, f"{place}: the content is neither a string nor a list of parts")
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
    if not _is_text(url) or not url.startswith(("data:", "http://", "https://")):
        raise RequestError(400, f"{where}: url must be a data: URL")
    if not url.startswith("data:"):
        if not access.urls:
            raise RequestError(400, f"{where}: only data: URLs are accepted, as data.urls allows no downloads")
        try:
            return Media(source=media_source(url, root, access))
        except DataError as error:
            raise RequestError(400, f"{where}: {error}") from None
    try:
        data = decode_base64(url)
    except DataError as error:
        raise RequestError(400, f"{where}: {error}") from None
    if data is None or not url.startswith("data:image/"):
        raise RequestError(400, f"{where}: url is not a data: URL with an image in base64")
    return Media(source=EmbeddedMedia(data, where))


def _is_text(value: Any) -> bool:
    """Whether a value is a string that can be encoded as UTF-8."""
    return isinstance(value, str) and value.encode("utf-8", "replace").decode() == value


def read_sampling(body: Mapping[str, Any], rollout: RolloutSettings, temperature: float,
                  allowed: Mapping[str, Sequence[Any]], null: bool = False) -> Sampling:
    """The sampling parameters of a request: the argument `temperature`, and the token limit and stop strings in `body`.

    allowed: fields that have no effect -> the values that are accepted. null: whether fields that are not in `allowed`
    are accepted if their value is null. Raises RequestError for all other fields and values."""
    given = {name: value for name, value in body.items() if name not in IGNORED}
    limits = [given.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    limit = next((n for n in limits if n is not None), rollout.max_new_tokens)
    stop = given.pop("stop", None) or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(limit, int) or isinstance(limit, bool) or not 0 < limit <= rollout.max_new_tokens:
        raise RequestError(400, f"max_tokens={str(limit)[:40]}: give a number from 1 to rollout.max_new_tokens="
                           f"{rollout.max_new_tokens}, or raise this setting")
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(s, str) and s for s in stop):
        raise RequestError(400, "stop: give a string, or a list of at most 4 strings")
    for name, value in given.items():
        if value not in allowed.get(name, (None,) if null else ()):
            raise RequestError(400, f"the field {name[:60]!r} is not supported: leave it out")
    sampling = sampling_of(rollout, temperature, limit)
    return replace(sampling, stop=tuple(stop) or sampling.stop)


def chat_reply(id: str, model: str, answer: Completion, prompt_tokens: int, **more: Any) -> dict[str, Any]:
    """The reply to a request, in OpenAI's format, with the completion `answer` and further top-level fields `more`."""
    n = len(answer.tokens)
    return {"id": id, "object": "chat.completion", "created": int(time.time()), "model": model, **more,
            "choices": [{"index": 0, "finish_reason": answer.finish_reason, "logprobs": None,
                         "message": {"role": "assistant", "content": answer.text}}],
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": n, "total_tokens": prompt_tokens + n}}


def same(messages: Sequence[Message], recorded: Sequence[Message]) -> bool:
    """Whether the messages of a request equal the recorded messages in number, role and content."""
    return len(messages) == len(recorded) and not any(map(contradiction, messages, recorded))


def contradiction(given: Message, own: Message) -> str | None:
    """Where the message `given` first differs from the recorded message `own`, e.g. ".content[0]"; None if equal."""
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

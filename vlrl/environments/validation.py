"""Checks what an environment returned, makes it picklable, and computes fingerprints to compare observations."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from PIL import Image

from vlrl.config.url_entries import redacted
from vlrl.data.media import as_rgb
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.scalar import finite_number, truth_value
from vlrl.types import Media, Observation, Step

MOST_TEXT = 100_000  # maximum length in characters of an observation's text, and of `info` as JSON


class ProtocolError(Exception):
    """Raised when an environment or its server returns something malformed. The episode ends without a reward."""


def checked_observation(observation: Any) -> Observation:
    """Returns an observation with its images converted to RGB. Raises ProtocolError if the observation is invalid."""
    if isinstance(observation, Observation) and observation.results:
        return Observation.of_results([checked_observation(result) for result in observation.results])
    if not isinstance(observation, Observation) or not isinstance(observation.text, str):
        raise ProtocolError(f"the environment returned {type(observation).__name__}, expected an Observation with text")
    if len(observation.text) > MOST_TEXT:
        raise ProtocolError(f"an observation has {len(observation.text)} characters; at most {MOST_TEXT} are allowed")
    if not isinstance(observation.media, (list, tuple)) or not all(isinstance(m, Media) for m in observation.media):
        raise ProtocolError("the media of the observation must be a list of Media(source=...)")
    try:
        media = tuple(replace(m, source=_sendable(m.source)) for m in observation.media)
    except DataError as error:
        raise ProtocolError(f"the environment's observation: {error}") from None
    return replace(observation, text=observation.text.encode("utf-8", "replace").decode(), media=media)


def _sendable(source: Any) -> Any:
    if isinstance(source, (list, tuple)):
        return [*map(_sendable, source)]
    return as_rgb(source) if isinstance(source, Image.Image) else source


def checked_step(step: Any) -> Step:
    """Returns a step with parts as floats and the state as a string. Raises ProtocolError if the step is invalid."""
    if not isinstance(step, Step):
        raise ProtocolError(f"the environment returned {type(step).__name__}, expected a Step")
    if not isinstance(step.parts, Mapping):
        raise ProtocolError(f"Step.parts is {type(step.parts).__name__}, expected {{part: number}}")
    parts = {}
    for name, given in step.parts.items():
        value, _ = finite_number(given)
        if value is None:
            raise ProtocolError(f"the part {name!r} is {str(given)[:60]!r}, not a finite number")
        parts[str(name)] = value
    done = truth_value(step.done)
    if done is None:
        raise ProtocolError(f"Step.done is {str(step.done)[:60]!r}, expected True or False")
    state = None if step.state is None else str(step.state)[:MOST_TEXT]
    return Step(checked_observation(step.observation), parts, done, state, _info(step.info))


def _info(info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise ProtocolError(f"Step.info is {type(info).__name__}, expected {{name: value}}")
    try:
        text = json.dumps(dict(info), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"Step.info cannot be written as JSON: {error}") from None
    if len(text) > MOST_TEXT:
        raise ProtocolError(f"Step.info has {len(text)} characters as JSON; at most {MOST_TEXT} are allowed")
    return json.loads(text)




def fingerprint(shown: Observation | Step) -> str:
    """A hash of what affects the model or its reward: text, pixels or bytes of media, reward parts, state, done."""
    digest = hashlib.sha256()
    observation = shown.observation if isinstance(shown, Step) else shown
    if isinstance(shown, Step):
        digest.update(repr((sorted(shown.parts.items()), shown.state, shown.done)).encode("utf-8", "replace"))
    for piece in observation.results or [observation]:
        digest.update(f"{len(piece.text)} {len(piece.media)}:{piece.text}".encode("utf-8", "replace"))
        for media in piece.media:
            sources = media.source if isinstance(media.source, (list, tuple)) else [media.source]
            fields = (media.kind, media.start, media.end, media.fps, media.edits, len(sources))
            digest.update(repr(fields if media.times is None else (*fields, tuple(media.times))).encode())
            for source in sources:
                digest.update(_contents(source))
    return digest.hexdigest()


def _contents(source: Any) -> bytes:
    if isinstance(source, Image.Image):
        held = f"{source.mode} {source.size} ".encode() + source.tobytes()
    elif isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        with open(source, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    else:
        held = getattr(source, "data", source)
    return hashlib.sha256(held if isinstance(held, bytes) else repr(held).encode("utf-8", "replace")).digest()


def same(a: Observation, b: Observation) -> bool:
    """Whether two observations look the same to the model."""
    return fingerprint(a) == fingerprint(b)


# --- arguments of environments ----------------------------------------------------------------------------------------


def checked_names(value: Any, what: str) -> tuple[str, ...]:
    """Returns the names in `value` as strings. `what` is the argument's name for the message. Raises ConfigError if
    `value` is a string (whose characters would become the names), or if an element is neither a string nor an
    integer, e.g. because YAML reads `on` as true."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        raise ConfigError(f"{what}={value!r} must be a list: write {what}=[{value}]")
    wrong = next((name for name in value if isinstance(name, bool) or not isinstance(name, (str, int))), None)
    if wrong is not None:
        raise ConfigError(f"{what}: {wrong!r} is not a name: put the name in quotes")
    return tuple(map(str, value))


def checked_variables(value: Any, what: str) -> tuple[str, ...]:
    """Returns the names of environment variables in `value`. Raises ConfigError for a variable that is not set; `what`
    is the argument's name for the message."""
    variable_names = checked_names(value, what)
    missing = next((name for name in variable_names if name not in os.environ), None)
    if missing is not None:
        raise ConfigError(f"{what} names {missing!r}, which is not set: export this variable, or remove it from {what}")
    return variable_names


def checked_server_url(url: str, like: str) -> str:
    """Returns the URL of a server, with the scheme in lower case. Raises ConfigError for an invalid URL. A URL with a
    user name or password is invalid too, because addresses are printed and stored with runs; the message omits them.
    like: an example of a valid URL."""
    try:
        parts = urlsplit(url)
        secret, right = "@" in parts.netloc, parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        parts, secret, right = None, "@" in url, False
    if secret:
        raise ConfigError(f"the address {redacted(url)} has a user name or password: remove it from the address, "
                          "because addresses are printed and stored")
    if not right or parts is None:
        raise ConfigError(f"the environment's address {url!r} must look like {like}")
    return urlunsplit(parts)

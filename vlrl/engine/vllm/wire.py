"""The format of messages between trainer and vLLM servers: JSON that can hold prompts with their pixels without loss.

Images and video frames are PNGs, so the server sees the same pixels as the trainer. Pickle is not used."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

PROTOCOL = 2  # version of the protocol; trainer and server must have the same version
_FAST = 1  # zlib's compression level: pixels are sent over a local network


def pack(value: Any) -> bytes:
    """Encodes nested mappings, sequences, numbers and strings, which may contain images and arrays, as JSON."""
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def unpack(data: bytes) -> Any:
    """Inverse of `pack`. Raises ValueError for data that `pack` cannot have written."""
    return restore_arrays(parse(data))


def parse(data: bytes) -> Any:
    """Parses a message as JSON but leaves images and arrays encoded, so that a request can be checked before they are
    decoded. Raises ValueError as `unpack` does."""
    return _checked(json.loads, data)


def restore_arrays(value: Any) -> Any:
    """Decodes the images and arrays in the result of `parse`. Raises ValueError as `unpack` does."""
    return _checked(_restored, value)


def response_of(output: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a finished output of vLLM to plain data with one entry of "outputs" per completion: {"prompt": ids,
    "outputs": [{"tokens", "logprobs", "finish"}, ...]}.

    If the options have `logprob_token_ids`, "logprobs" contains the log-probabilities of these ids at the first
    position. If the options have `prompt_logprobs`, the entry "prompt_logprobs" has the log-probabilities of the
    prompt's tokens, with None for the first token."""
    out: dict[str, Any] = {"prompt": list(output.prompt_token_ids), "outputs": []}
    for completion in sorted(output.outputs, key=lambda o: o.index):
        ids = list(completion.token_ids)
        wanted = [options["logprob_token_ids"]] if options.get("logprob_token_ids") else [[i] for i in ids]
        logprobs = [float(at[i].logprob) for at, of in zip(completion.logprobs or [], wanted, strict=False) for i in of]
        out["outputs"].append({"tokens": ids, "logprobs": logprobs, "finish": completion.finish_reason})
    if output.prompt_logprobs is not None:
        pairs = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
        out["prompt_logprobs"] = [at and float(at[i].logprob) for at, i in pairs]
    return out


def _checked(read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except (TypeError, KeyError, OSError, RecursionError, Image.DecompressionBombError) as error:
        raise ValueError(f"the message is damaged: {error or type(error).__name__}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Image.Image):
        return {"$image": _png(value)}
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {"$pairs": [[_plain(k), _plain(v)] for k, v in value.items()]} if _special(value) else {
            k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [_plain(v) for v in value]}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to a server")


def _special(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping must be encoded as a list of pairs. This is necessary if a key is not a string (JSON would
    convert the key), or starts with "$" like the markers of this format."""
    return any(not isinstance(k, str) or k.startswith("$") for k in value)


def _array(value: np.ndarray) -> dict[str, Any]:
    if value.dtype == np.uint8 and value.ndim == 4 and value.shape[-1] == 3 and value.size:
        return {"$frames": [_png(Image.fromarray(frame)) for frame in value]}
    if value.dtype.hasobject:
        raise TypeError("an array of Python objects cannot be sent to a server")
    raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"$array": raw, "dtype": value.dtype.str, "shape": list(value.shape)}


def _png(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, format="PNG", compress_level=_FAST)
    return base64.b64encode(out.getvalue()).decode()


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "$image" in value:
        return _image(value["$image"])
    if "$frames" in value:
        return np.stack([np.asarray(_image(frame)) for frame in value["$frames"]])
    if "$array" in value:
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"an array of {dtype} is not accepted")
        return np.frombuffer(base64.b64decode(value["$array"]), dtype=dtype).reshape(value["shape"]).copy()
    if "$tuple" in value:
        return tuple(_restored(v) for v in value["$tuple"])
    if "$pairs" in value:
        return {_restored(k): _restored(v) for k, v in value["$pairs"]}
    return {k: _restored(v) for k, v in value.items()}


def _image(data: str) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(data)), formats=("PNG",))
    image.load()
    return image

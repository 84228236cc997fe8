"""Redaction of published files: removes paths and names of this machine, and secrets of its environment.

    private = PrivateWords.here(run.path)
    private.text("cannot read /home/ann/pictures/3.png")     # "cannot read 3.png"
    private.findings(text)                                      # ["the home folder"], for a refusal

Known private words of this machine are replaced everywhere. Other absolute paths are shortened only in strings that no
model has written."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.data.embedded import without_bytes

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?:^|_)KEY(?:$|_)|API_?KEY|WEBHOOK|COOKIE", re.IGNORECASE)
"""Pattern of the names of environment variables whose values are secret."""
_SHORTEST = 8  # smallest length of a secret; shorter values of such variables, such as on, true or 1, are not secret
_PATH = re.compile(r"(?<![\w.:/…<])(?:file://)?(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\\"'<>:|,;(){}\[\]]+[/\\])+"
                   r"([^\s/\\\"'<>:|,;(){}\[\]]*)")
"""Pattern of an absolute path with at least two components. Its group is the last component, which redaction keeps."""
_WHOLE = re.compile(r"(?:file://)?(?:~[\w-]*|[A-Za-z]:)?[/\\][^\n]*[^\n/\\][/\\][^\n]*")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]{1,15})://[^\s\"'<>]*", re.IGNORECASE)
_NAMES = ("the name of the host", "the name of the user")
_VALUE = "the value of"
_COMMON_HOSTS = {"localhost", "localhost.localdomain", ""}


@dataclass(frozen=True)
class PrivateWords:
    """Words that must not be published, and functions that replace them."""

    words: Mapping[str, str]  # private word -> its description in messages

    @classmethod
    def here(cls, *folders: Path) -> PrivateWords:
        """The private words of this machine: paths, host and user names, and the values of secret environment
        variables. The paths of `folders` are added."""
        words: dict[str, str] = {}
        for name, value in os.environ.items():
            if _SECRET.search(name) and len(value) >= _SHORTEST and not os.path.exists(value):
                words[value] = f"{_VALUE} {name}"
        places = {"the home folder": Path.home(), "the current folder": Path.cwd(),
                  "the folder for temporary files": Path(tempfile.gettempdir())}
        for what, place in [*places.items(), *(("a folder of the run", folder) for folder in folders)]:
            for path in (os.path.abspath(place), os.path.realpath(place)):
                if len(Path(path).parts) > 2 or (what == "the home folder" and len(path) > 1):
                    words.setdefault(path, what)  # /tmp says nothing about the machine
        for host in {socket.gethostname(), os.environ.get("HOSTNAME", "")} - _COMMON_HOSTS:
            words.setdefault(host, _NAMES[0])
        with contextlib.suppress(OSError, KeyError, ImportError):  # a user without an entry
            user = getpass.getuser()
            words |= {f"{user}@": _NAMES[1], f"/home/{user}": "the home folder"}
        return cls(words)

    def findings(self, text: str, vocabulary: bool = False) -> list[str]:
        """Descriptions of the private words that `text` contains. With `vocabulary`, the text is the vocabulary of a
        tokenizer. Then short words and the names of host and user are not reported, because they may be ordinary
        tokens."""
        return list(dict.fromkeys(what for word, what in self.words.items()
                                  if not (vocabulary and (what in _NAMES or len(word) < _SHORTEST))
                                  and _form(word, what).search(text)))

    def model_text(self, text: str) -> str:
        """A text with its private words replaced and nothing else changed. Used for texts that a model wrote and for
        texts of data rows."""
        for word in sorted(self.words, key=len, reverse=True):
            if word in text:
                text = _form(word, self.words[word]).sub("…", text)
        return text

    def text(self, text: str) -> str:
        """A text with its private words replaced and its absolute paths reduced to their last component. Used for
        messages and settings."""
        return self.model_text(_PATH.sub(r"\1", text))

    def value(self, value: Any) -> Any:
        """A JSON value with its strings redacted. Absolute paths are reduced to their last component, and embedded
        media to a hash."""
        if isinstance(value, str):
            return self._last(value) or self.text(str(without_bytes(value)))
        if isinstance(value, Mapping):
            return {self.model_text(str(key)): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, (list, tuple)) else value

    def config(self, value: Any) -> Any:
        """A model config as JSON, redacted like `value`, except that templates keep their paths."""
        if isinstance(value, str):
            return self._last(value) or self.model_text(value)
        if isinstance(value, Mapping):
            return {key: self.config(item) for key, item in value.items()}
        return [self.config(item) for item in value] if isinstance(value, list) else value

    def _last(self, text: str) -> str | None:
        if len(text) >= 4096 or not _WHOLE.fullmatch(text):
            return None
        return self.model_text(re.split(r"[/\\]", text.rstrip("/\\"))[-1])

    def json(self, text: str | None) -> str | None:
        """A JSON text with its values redacted as by `value`. Text that is not JSON is redacted as by `text`; None
        stays None."""
        if text is None:
            return None
        try:
            return json.dumps(self.value(json.loads(text)), ensure_ascii=False)
        except (ValueError, RecursionError):
            return self.text(text)

    def setting(self, text: str) -> str:
        """A word of a command line, or a setting, with private words replaced, paths reduced to their last component,
        and URLs reduced to their scheme."""
        return self.text(_URL.sub(lambda match: f"{match[1]}://…", re.sub(r"(?:\.\.[/\\])+", "", text)))


def _form(word: str, what: str) -> re.Pattern[str]:
    """The pattern that finds the private word `word`, which `what` describes. A name or path is only found as a
    complete word, a secret also inside other words."""
    if what.startswith(_VALUE):
        return re.compile(re.escape(word))
    return re.compile(r"(?<!\w)" + re.escape(word) + (r"(?!\w)" if word[-1].isalnum() else ""))

"""Removes paths, names and secrets of the machine that made a run from pages to be published.

    redact = Redactor(run_folder, ["gpu-box-7"])
    redact.words("cannot read /data/me/a.png")      # "cannot read …/a.png"

Prompts and answers are content: only names specific to this machine are removed from them. Messages, settings and data
rows also lose every absolute path."""

import html
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

INSTEAD = "…"
_PART = r"[^\s/\\'\"<>|,;:(){}\[\]]"
_PATH = re.compile(rf"(?<![\w.:/~…-])~?/(?:{_PART}+/)+({_PART}*)|\b[A-Za-z]:\\(?:{_PART}+\\)*({_PART}*)")
_FILE_URL = re.compile(r"file://[^\s'\"]*?([^/\s'\"]*)(?=[\s'\"]|$)")
_HOST = re.compile(r"\b([a-z][a-z0-9+.-]*)://[^\s'\"<>/]+[^\s'\"<>]*")
_USER = re.compile(r"(?<=://)[^\s/@'\"]+@")
_KEY = re.compile(r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[bp]-|AKIA|ya29\.)[\w.-]{12,}|"
                  r"(?i:(?<=bearer )[\w.~+/-]{12,})")
_SECRET_NAME = re.compile(r"(?i)(?:^|[._-])(?:\w+_)?(?:key|apikey|token|password|passwd|secret|credentials?|webhook)$")
_SECRET_FIELD = re.compile(r"(?i)(?:api_?key|password|passwd|secret|credentials?|(?:access|auth)_token)$")
_LEAST = 6  # characters of a secret or a name that is looked for in all texts
_MOST_DEPTH = 50


class Redactor:
    """Replaces texts that identify the machine or are secret: the run folder, `folders` and their parents, the home
    folder, host names, and the values of environment variables named like a key, token, password or secret."""

    def __init__(self, run: Path, hosts: Iterable[str] = (), folders: Iterable[Path] = (),
                 environment: Mapping[str, str] = os.environ):
        folders = [run.resolve(), Path(os.path.abspath(run)), Path.home(), *folders]
        above = {str(one) for folder in folders for one in (folder, *folder.parents) if len(one.parts) > 2}
        secrets = {value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) >= _LEAST}
        names = {name for name in (socket.gethostname(), *hosts) if len(name) >= 4 and name != "localhost"}
        odd = {name for name in names if len(name) >= _LEAST and re.search(r"[\d.-]", name)}  # other names may be words
        self._everywhere = _any_of([*above, *secrets], bounded={*odd, str(Path.home())} - {"/"})
        self._in_messages = _any_of([], bounded=names)

    def text(self, text: str) -> str:
        """Removes folders, secrets and host names of this machine from a text (plain, HTML or JSON)."""
        return self._everywhere.sub(INSTEAD, text)

    def words(self, text: str) -> str:
        """Removes absolute paths, network addresses, host names and access keys from a message or setting."""
        return self._in_messages.sub(INSTEAD, self._without_keys(_HOST.sub(rf"\1://{INSTEAD}", _named(text))))

    def value(self, value: Any, depth: int = _MOST_DEPTH) -> Any:
        """Removes absolute paths and access keys from a data row or other JSON value. Web addresses are kept, and
        values nested more than `depth` levels deep become None."""
        if isinstance(value, str):
            return self._without_keys(_USER.sub("", _named(value)))
        if not depth:
            return None
        if isinstance(value, Mapping):
            return {self._without_keys(str(k)): INSTEAD if isinstance(v, str) and _SECRET_FIELD.search(str(k)) and v
                    else self.value(v, depth - 1) for k, v in value.items()}
        return [self.value(v, depth - 1) for v in value] if isinstance(value, (list, tuple)) else value

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Redacts settings by dotted name. The value of a setting that holds a secret is replaced by "…"."""
        return {name: INSTEAD if isinstance(value, str) and value and _SECRET_NAME.search(name)
                else self._setting(value) for name, value in settings.items()}

    def _setting(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.words(value)
        if isinstance(value, Mapping):
            return self.settings(value)
        return [self._setting(v) for v in value] if isinstance(value, (list, tuple)) else value

    def _without_keys(self, text: str) -> str:
        return self._everywhere.sub(INSTEAD, _KEY.sub(INSTEAD, text))


def _named(text: str) -> str:
    text = _FILE_URL.sub(rf"{INSTEAD}/\1", text)
    return _PATH.sub(lambda match: f"{INSTEAD}/{match[1] or match[2] or ''}", text)


def _any_of(texts: Iterable[str], bounded: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of `texts`, longest first, also in the forms in which HTML and JSON escape them. The
    texts in `bounded` match only as whole words."""
    written = {form for text in texts for form in (text, html.escape(text), json.dumps(text)[1:-1],
                                                   json.dumps(html.escape(text))[1:-1])}
    pieces = [re.escape(form) for form in sorted(written, key=len, reverse=True)]
    pieces += [rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in sorted(bounded, key=len, reverse=True)]
    return re.compile("|".join(pieces) or r"(?!)")

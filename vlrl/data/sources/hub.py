"""Data sets of the Hugging Face Hub by name: `org/name@split`, `org/name/config@split`, `org/name@split#revision`.

    files, root = fetch_split(parse_hub_name("org/name@train"), cache_folder())     # local files of one commit

Only row and media files are downloaded, never code. The dataset card says which files belong to a split; if it does
not, the names of the files do. The revision is resolved to a commit, which a run stores (`pin`) so that a resumed run
uses the same files. Other names of files and folders never cause network access. HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE work as in `huggingface_hub`."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vlrl.config.paths import split_of_folder
from vlrl.data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from vlrl.errors import ConfigError, RunError, did_you_mean
from vlrl.store.files import read_json, write_text
from vlrl.store.run_folder import PINS

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:/(?P<config>[\w.-]{1,96}))?"
                   r"@(?P<split>\w[\w-]{0,95})(?:#(?P<revision>\w[\w./-]{0,199}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOGETHER = 8
"""Number of files that are downloaded at the same time."""


@dataclass(frozen=True)
class HubName:
    """The name of a split of a Hub data set."""

    repo: str
    config: str
    """The configuration; "" = the only configuration, or the default configuration."""
    split: str
    revision: str
    """A branch, tag or commit; "" = main."""

    def __str__(self) -> str:
        return (f"{self.repo}{f'/{self.config}' if self.config else ''}@{self.split}"
                f"{f'#{self.revision}' if self.revision else ''}")


def parse_hub_name(text: str) -> HubName | None:
    """Parses the name of a Hub data set with a split; returns None for any other string."""
    match = _NAME.fullmatch(text)
    return HubName(match["repo"], match["config"] or "", match["split"], match["revision"] or "") if match else None


def is_local(text: str) -> bool:
    """Whether a Hub name is also the name of a local file, or of a split of a local folder. If so, the local data are
    read."""
    return os.path.exists(text) or split_of_folder(text) is not None


def fetch_split(name: HubName, cache: Path) -> tuple[list[Path], Path]:
    """Downloads a split; returns its local row files (or its folder of images) and the root folder of its media.

    Raises ConfigError for an unknown data set, revision, configuration or split, or one without read access; the
    message does not name the setting. Raises RunError if the network or the cache fails."""
    commit, listing = _listing(name, cache)
    try:
        selection = selected(listing["files"], listing["configs"], name.config, name.split)
    except NoSuchSplit as error:
        near = did_you_mean(error.given, error.known)
        raise ConfigError(f"the data set {name.repo} has no {error.kind} {error.given!r}.{near} There are: "
                          f"{', '.join(error.known) or 'none'}") from None
    folder = _folder(name, cache) / commit
    _fetch(name, commit, folder, selection)
    return [folder / file for file in selection.read], folder if selection.read != (".",) else folder.parent


def commit_of(name: HubName, cache: Path) -> str:
    """Returns the commit that a name currently refers to. Raises the same errors as `fetch_split`."""
    return name.revision if _COMMIT.fullmatch(name.revision) else _listing(name, cache)[0]


def pin(names: Iterable[str], run: Path, cache: Path, resumed: bool) -> None:
    """Stores the commit of each Hub name in the run folder. A `resumed` run keeps the commits that are stored there."""
    before, commits = (read_json(run / PINS) or {}) if resumed else {}, {}
    for text in names:
        name = parse_hub_name(text)
        try:
            if name and not is_local(text):
                commits[text] = str(before.get(text) or commit_of(name, cache))
        except ConfigError as error:
            raise ConfigError(f"data.train or data.heldout={text!r}: {error}") from None
    if commits:
        write_text(run / PINS, json.dumps(commits, indent=1) + "\n")
    else:
        (run / PINS).unlink(missing_ok=True)


def pinned(text: str, run: str | Path) -> str:
    """Returns a Hub name whose revision is replaced by the commit that is stored in the run folder `run`. Returns any
    other string unchanged."""
    name = parse_hub_name(text) if run else None
    commit = (read_json(Path(run) / PINS) or {}).get(text) if name else None
    return str(replace(name, revision=commit)) if name and isinstance(commit, str) else text


def _folder(name: HubName, cache: Path) -> Path:
    return cache / "hub" / name.repo.replace("/", "--")


def _listing(name: HubName, cache: Path) -> tuple[str, Mapping[str, Any]]:
    folder, revision = _folder(name, cache), name.revision or "main"
    revisions = read_json(folder / "revisions.json") or {}
    known = revision if _COMMIT.fullmatch(revision) else revisions.get(revision)
    listing = read_json(folder / f"{known}.json") if known else None
    if listing and _COMMIT.fullmatch(revision):
        return revision, listing
    try:
        with _failures(name):
            from huggingface_hub import HfApi

            info = HfApi(library_name="vlrl").dataset_info(name.repo, revision=revision)
    except _NoNetwork as error:
        if not known or not listing:
            raise RunError(f"{error} It is not cached in {folder}; download the data set once with network "
                           "access, or use local files.") from None
        log.warning("%s Cached files of commit %s in %s are used.", error, known[:12], folder)
        return known, listing
    card = info.card_data.to_dict() if info.card_data else {}
    files = [one.rfilename for one in info.siblings or () if is_data(one.rfilename)]
    configs = card.get("configs") if isinstance(card.get("configs"), list) else []
    listing, commit = {"files": files, "configs": configs}, str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise ConfigError(f"the Hub returns no commit for {name.repo} at {revision!r}")
    write_text(folder / f"{commit}.json", json.dumps(listing, default=str), sync=False)
    write_text(folder / "revisions.json", json.dumps({**revisions, revision: commit}), sync=False)
    return commit, listing


def _fetch(name: HubName, commit: str, folder: Path, selection: Selection) -> None:
    def get(file: str) -> None:
        with _failures(name):
            from huggingface_hub import hf_hub_download

            hf_hub_download(name.repo, file, repo_type="dataset", revision=commit, local_dir=folder,
                            library_name="vlrl")

    # the library adds this file once a download is complete
    done = folder / ".cache/huggingface/download"
    missing = [file for file in selection.fetch
               if not ((folder / file).is_file() and (done / f"{file}.metadata").is_file())]
    if not missing:
        return
    log.info("downloading %d files of the data set %s at commit %s", len(missing), name.repo, commit[:12])
    try:
        with ThreadPoolExecutor(_TOGETHER) as pool:
            list(pool.map(get, missing))
    except _NoNetwork as error:
        raise RunError(f"{error} {len(missing)} of its files are not cached in {folder}; download the data set "
                       "once with network access, or use local files.") from None


class _NoNetwork(Exception):
    """Raised when the Hub cannot be reached or offline mode is on."""


@contextmanager
def _failures(name: HubName) -> Iterator[None]:
    from huggingface_hub import constants, errors

    where = f"the data set {name.repo} at {constants.ENDPOINT}"
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(f"{where} is gated: accept its terms on its page, and set HF_TOKEN to your "
                          "token") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(f"{where} does not exist, or is private: check the name, or set HF_TOKEN to a token that may "
                          "read it; a local file or folder of this name does not exist either") from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{where} has no revision {name.revision or 'main'!r}: name a branch, tag or commit after "
                          "'#'") from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{name.repo!r} is not a valid data set name: {error}") from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no network"
        raise _NoNetwork(f"{where}: {offline}.") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status == 401:
            raise ConfigError(f"{where} requires access: set HF_TOKEN to a token that may read it") from None
        raise _NoNetwork(f"{where} cannot be reached: status {status}.") from None
    except (errors.HTTPError, ConnectionError, TimeoutError) as error:  # of the library's HTTP client
        raise _NoNetwork(f"{where} cannot be reached: {type(error).__name__}.") from None
    except OSError as error:
        raise RunError(f"{where} cannot be downloaded: {error}. Free space, or set data.cache to another "
                       "folder.") from None


_ROWS = (".parquet", ".arrow", ".jsonl", ".ndjson", ".jsonl.gz", ".csv", ".tsv", ".json", ".tar")
"""Suffixes of row files. Of a split with several of these suffixes, only files with the first one are read."""
_OWN_MEDIA = (".parquet", ".arrow", ".tar")
"""Suffixes of row files that contain their media."""
_MEDIA = IMAGE_SUFFIXES + VIDEO_SUFFIXES
_BESIDE = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_NO_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "package.json", "config.json")
_ALIASES = {"training": "train", "testing": "test", "eval": "test", "evaluation": "test", "valid": "validation",
            "val": "validation", "dev": "validation"}
_SPLITS = ("train", "test", "validation", *_ALIASES)
_UNNAMED = "default configuration: name one, as in org/name/config@split, in place of"
_SHARD = re.compile(r"(?:^|/)(\w[\w.]*?)-\d{5}-of-\d{5}[^/]*$")


class NoSuchSplit(Exception):
    """Raised when a data set has no split, or no configuration, of the given name."""

    def __init__(self, kind: str, given: str, known: Sequence[str]):
        super().__init__(given)
        self.kind, self.given, self.known = kind, given, known


@dataclass(frozen=True)
class Selection:
    """The files of a split, relative to the repository."""

    read: tuple[str, ...]
    """The row files, or one folder of images."""
    fetch: tuple[str, ...]
    """All files to download: the row files and their media."""


def is_data(file: str) -> bool:
    """Whether a file may be downloaded: it holds rows or media, and its path has no "..", hidden folder or the like."""
    parts = file.split("/")
    plain = file.isprintable() and "\\" not in file and not any(p in ("", ".", "..") or p[0] == "." for p in parts)
    return plain and len(file) < 1000 and file.lower().endswith((*_ROWS, *_MEDIA)) and parts[-1] not in _NO_ROWS


def selected(files: Sequence[str], configs: Sequence[Any], config: str, split: str) -> Selection:
    """Returns the files of a split. `files` are all files of the repository, `configs` the configurations in its
    dataset card, `config` the name of one or "". Raises NoSuchSplit listing the existing splits or configurations."""
    files = [file for file in files if is_data(file)]
    entries = {str(one["config_name"]): one for one in configs if isinstance(one, Mapping) and one.get("config_name")}
    folders = {file.split("/")[0] for file in files if "/" in file}
    if config and config not in entries and config not in folders:
        raise NoSuchSplit("configuration", config, sorted(entries or folders))
    entry = entries.get(config) if config or not entries else _default(entries)
    inside = str((entry or {}).get("data_dir") or ("" if entry else config)).strip("/")
    files = [file for file in files if not inside or file.startswith(f"{inside}/")]
    by_card = _by_card((entry or {}).get("data_files"), files, inside)
    if not entry and not config:
        _one_configuration(files)
    splits = by_card or _by_name(files)
    name = split if split in splits else _ALIASES.get(split, split)
    if not splits.get(name):
        raise NoSuchSplit("split", split, sorted(splits))
    return _selection(splits[name], files)


def _default(entries: Mapping[str, Any]) -> Any:
    marked = [one for name, one in entries.items() if one.get("default") is True or name == "default"]
    if not marked and len(entries) > 1:
        raise NoSuchSplit(_UNNAMED, "", [*entries])
    return (marked or list(entries.values()))[0]


def _one_configuration(files: Sequence[str]) -> None:
    """Raises NoSuchSplit for a repository with several configurations in the layout of the Hub's parquet branch.

    That layout is <configuration>/<split>/0000.parquet; the rows of different configurations must not be mixed."""
    folders = sorted({file.split("/")[0] for file in files if re.fullmatch(r"[^/]+/[^/]+/\d{4}\.parquet", file)})
    if len(folders) > 1:
        raise NoSuchSplit(_UNNAMED, "", folders)


def _by_card(data_files: Any, files: Sequence[str], inside: str) -> dict[str, list[str]]:
    if isinstance(data_files, (str, list)) and (isinstance(data_files, str) or all(
            isinstance(one, str) for one in data_files)):
        data_files = {"train": data_files} if data_files else {}
    if isinstance(data_files, list):
        data_files = {one.get("split", "train"): one.get("path") for one in data_files if isinstance(one, Mapping)}
    splits: dict[str, list[str]] = {}
    for split, patterns in data_files.items() if isinstance(data_files, Mapping) else ():
        several = [patterns] if isinstance(patterns, str) else patterns if isinstance(patterns, list) else []
        fit = [_globs(f"{inside}/{one}" if inside else one) for one in several if isinstance(one, str)]
        splits[str(split)] = [file for file in files if any(_fits(file.split("/"), one) for one in fit)]
    return splits


def _fits(parts: Sequence[str], globs: Sequence[str]) -> bool:
    if not globs:
        return True
    if globs[0] == "**":
        return any(_fits(parts[i:], globs[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _fits(parts[1:], globs[1:])


def _globs(pattern: str) -> list[str]:
    """Splits a glob pattern at "/". A pattern that is long or has many "**" could take forever to match, and is
    replaced by one that matches nothing."""
    parts = pattern.removeprefix("./").rstrip("/").split("/")
    return parts if len(pattern) < 500 and parts.count("**") <= 3 else [""]


def _by_name(files: Sequence[str]) -> dict[str, list[str]]:
    """Returns the files of each split by their names: `test-00000-of-00002.parquet`, `data/val.jsonl`, `train/...`.

    If no name contains a split, all files belong to train."""
    splits: dict[str, list[str]] = {}
    for file in files:
        if name := _split_in_path(file):
            splits.setdefault(name, []).append(file)
    return splits or ({"train": list(files)} if files else {})


def _split_in_path(file: str) -> str:
    if (shard := _SHARD.search(file)) and shard[1] not in ("data", "part", "shard"):
        return _ALIASES.get(shard[1], shard[1])
    words = (word for part in file.split("/") for word in re.split(r"[-_. ]", part.lower()))
    return next((_ALIASES.get(word, word) for word in words if word in _SPLITS), "")


def _selection(chosen: Sequence[str], files: Sequence[str]) -> Selection:
    rows = [file for file in chosen if not file.lower().endswith(_MEDIA) and os.path.basename(file) not in _BESIDE]
    kind = next((kind for kind in _ROWS if any(file.lower().endswith(kind) for file in rows)), None)
    if kind is None:  # images beside metadata, or in a folder for each class
        return Selection((_image_folder(chosen),), tuple(sorted(chosen)))
    read = tuple(sorted(file for file in rows if file.lower().endswith(kind)))
    media = [] if kind in _OWN_MEDIA else [file for file in files if file.lower().endswith(_MEDIA)]
    return Selection(read, (*read, *sorted(media)))


def _image_folder(chosen: Sequence[str]) -> str:
    """Returns the folder of a split's images, which are the files `chosen`: the only folder that is named after the
    split, or "." for the entire repository."""
    folders = {"/".join(parts[:i + 1]) for file in chosen for parts in [file.split("/")[:-1]]
               for i, part in enumerate(parts)
               if (split := _split_in_path(f"{part}/x")) and split == _split_in_path(file)}
    return folders.pop() if len(folders) == 1 else "."

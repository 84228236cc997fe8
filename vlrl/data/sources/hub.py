"""Data sets of the Hugging Face Hub by name: `org/name@split`, `org/name/config@split`, `org/name@split#revision`.

    files, root = fetch_split(parse_hub_name("org/name@train"), cache_folder())     # local files of one commit

Only row and media files are downloaded, never code. The dataset card says which files belong to a split; without such a
card, file names do. The revision is resolved to a commit, which a run stores (`pin`) so that a resumed run uses the
same files. The network is used only for such names; HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE work as in
`huggingface_hub`."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlrl.config.paths import split_of_folder
from vlrl.data.sources.hub_files import NoSuchSplit, Selection, is_data, selected
from vlrl.errors import ConfigError, RunError, did_you_mean
from vlrl.store.files import read_json, write_text
from vlrl.store.run_folder import PINS

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:/(?P<config>[\w.-]{1,96}))?"
                   r"@(?P<split>\w[\w-]{0,95})(?:#(?P<revision>\w[\w./-]{0,199}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOGETHER = 8
"""Number of parallel downloads."""


@dataclass(frozen=True)
class HubName:
    """The name of a split of a Hub data set."""

    repo: str
    config: str
    """"" = the only configuration, or the default configuration."""
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
    """Whether a Hub name is also the name of a local file or of a split of a local folder, which then takes precedence.
    """
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


def pin(names: Iterable[str], run: Path, cache: Path, goes_on: bool) -> None:
    """Stores the commit of each Hub name in the run folder; a resumed run (`goes_on`) keeps the stored commits."""
    before, commits = (read_json(run / PINS) or {}) if goes_on else {}, {}
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
    """Returns a Hub name with the commit that the run folder `run` has stored for it as the revision; any other string
    unchanged."""
    name = parse_hub_name(text) if run else None
    commit = (read_json(Path(run) / PINS) or {}).get(text) if name else None
    return str(replace(name, revision=commit)) if name and isinstance(commit, str) else text


def _folder(name: HubName, cache: Path) -> Path:
    return cache / "hub" / name.repo.replace("/", "--")


def _listing(name: HubName, cache: Path) -> tuple[str, Mapping[str, Any]]:
    """Returns commit and file list of a data set from the Hub, or from the cache if there is no network."""
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
            raise RunError(f"{error} It is not cached in {folder}; download it once with network access, or use "
                           "local files.") from None
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
        raise RunError(f"{error} {len(missing)} of its files are not in {folder}.") from None


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

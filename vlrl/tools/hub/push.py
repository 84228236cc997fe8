"""Uploads files to a repository of the Hugging Face Hub in one commit. No other module sends anything to the Hub.

    push(HubTarget("org/name"), {"config.json": b"{}", "model.safetensors": Path("models/a/model.safetensors")})

The token is read from the environment variable HF_TOKEN; HF_ENDPOINT selects another Hub. Large files are sent first
and the commit last, so that a repository never shows an incomplete model. If the same call is repeated, files that the
Hub already has are not sent again.

HfApi.create_commit is used instead of upload_folder because some exported files are replaced by redacted content;
upload_folder would need a second copy of the weights in a staging folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlrl.errors import ConfigError, RunError, VlrlError

Files = Mapping[str, Path | bytes]  # name in the repository -> path of a file, or its content as bytes
_WEIGHTS = (".safetensors", ".safetensors.index.json")
"""Suffixes of weights files. Weights files of an earlier commit are deleted, unless the new commit has a file with the
same name."""


@dataclass(frozen=True)
class HubTarget:
    """A repository on the Hub and its visibility."""

    repo: str
    kind: Literal["model", "dataset"] = "model"
    public: bool = False

    @property
    def noun(self) -> str:
        return "data set" if self.kind == "dataset" else "model"


def token(repo: str) -> str:
    """The Hub token in HF_TOKEN. Raises ConfigError if HF_TOKEN is not set, or if HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{repo}: HF_HUB_OFFLINE is set, so nothing is sent. Unset it, or look at what would be sent "
                          "with --dry-run.")
    value = os.environ.get("HF_TOKEN", "").strip()
    if not value:
        raise ConfigError(f"{repo}: HF_TOKEN is not set. Set it to a token of the Hub with write access; tokens stored "
                          "elsewhere are not used.")
    return value


def check_name(target: HubTarget) -> None:
    """Raises ConfigError if the target's name is not a valid repository name."""
    from huggingface_hub import errors
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(target.repo)
    except errors.HFValidationError as error:
        raise ConfigError(f"{target.repo!r} is not a valid {target.noun} name: {error}") from None
    if target.repo.count("/") != 1:
        raise ConfigError(f"{target.repo!r} is not a valid {target.noun} name: write organisation/name or "
                          "user/name")


def sizes(files: Files) -> list[tuple[str, int]]:
    """Returns (name, size in bytes) of each file, sorted by name."""
    return sorted((name, len(one) if isinstance(one, bytes) else one.stat().st_size) for name, one in files.items())


def push(target: HubTarget, files: Files, message: str) -> str:
    """Uploads files to a repository as one commit; returns the URL of the repository, which is created if needed.

    Weights files of earlier commits that are not among `files` are deleted. Raises ConfigError for an invalid name or
    token, and if the repository is public although `target` is private. Raises RunError if the Hub refuses the upload
    or cannot be reached."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    check_name(target)
    api = HfApi(library_name="vlrl", token=token(target.repo))
    quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with _failures(target):
            _refuse_public(api, target)
            url = api.create_repo(target.repo, repo_type=target.kind, private=not target.public, exist_ok=True)
            old = [name for name in api.list_repo_files(target.repo, repo_type=target.kind)
                   if name.endswith(_WEIGHTS) and name not in files]
            added = [CommitOperationAdd(name, one) for name, one in sorted(files.items())]
            api.create_commit(target.repo, [*added, *(CommitOperationDelete(name) for name in old)],
                              repo_type=target.kind, commit_message=message)
    finally:
        if not quiet:
            enable_progress_bars()
    return str(url)


def licence_of(model: str) -> str | None:
    """The licence named in the model card of a model on the Hub; None if the card names none or cannot be read."""
    from huggingface_hub import HfApi, errors

    try:
        card = HfApi(library_name="vlrl", token=token(model)).model_info(model).card_data
    except (errors.HTTPError, errors.HFValidationError, OSError):
        return None
    licence = (card.to_dict() if card else {}).get("license")
    return licence if isinstance(licence, str) else None


def _refuse_public(api: Any, target: HubTarget) -> None:
    """Raises ConfigError if the repository exists and is public, but the target is private."""
    from huggingface_hub import errors

    if target.public:
        return
    try:
        existing = api.repo_info(target.repo, repo_type=target.kind)
    except errors.GatedRepoError:
        return
    except errors.RepositoryNotFoundError as error:
        if error.response is not None and error.response.status_code == 401:
            raise errors.HfHubHTTPError("not authorized", response=error.response) from None
        return
    if not existing.private:
        raise ConfigError(f"{target.repo} exists and is public: nothing is sent. Pass --public if the files may "
                          "be public, make the repository private, or name another repository.")


@contextmanager
def _failures(target: HubTarget) -> Iterator[None]:
    """A context manager that converts errors of the Hub, the network and huggingface_hub to RunErrors. The messages of
    these RunErrors contain nothing of the uploaded files."""
    from huggingface_hub import errors

    try:
        yield
    except VlrlError:
        raise
    except errors.HfHubHTTPError as error:
        raise _refused(target, error) from None
    except ValueError as error:
        raise RunError(f"{target.repo}: the Hub refuses the upload: {str(error).splitlines()[0][:300]}") from None
    except (errors.HTTPError, RuntimeError, OSError) as error:
        inner = error
        while inner is not None and not isinstance(inner, (errors.HTTPError, OSError)):
            inner = inner.__cause__  # the library wraps errors of single uploads
        if inner is None:
            raise
        if isinstance(inner, errors.HfHubHTTPError):
            raise _refused(target, inner) from None
        raise RunError(f"{target.repo}: the Hub cannot be reached, or the connection was lost: {type(inner).__name__}. "
                       "Nothing is visible on the Hub yet. Repeat the command to continue: files that have arrived are "
                       "not sent again.") from None


def _refused(target: HubTarget, error: Any) -> RunError:
    status = error.response.status_code if error.response is not None else 0
    way = {401: " HF_TOKEN is not a valid token there: set another token.",
           403: " Set HF_TOKEN to a token with write access."}.get(status, "")
    return RunError(f"{target.repo}: the Hub refused the request with status {status}.{way}")

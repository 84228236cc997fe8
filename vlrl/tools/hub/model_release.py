"""The files of a model release: the exported files without private words, the model card and the plot of the reward.

    release = prepare(Path("runs/a"), "org/name", exported, private)
    push(HubTarget("org/name"), release.files, "Model of a run of vlrl")

This module sends nothing, and does not change the exported folder: files with private words are replaced by redacted
copies."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlrl.errors import RunError
from vlrl.store import RunFolder, checkpoint
from vlrl.store.files import file_sha256, read_json, write_text
from vlrl.tools.experiments.report import plot_reward
from vlrl.tools.hub import rollout_dataset
from vlrl.tools.hub.export import ExportedModel
from vlrl.tools.hub.model_card import CURVE, Base, PublishedModel, base_of, card
from vlrl.tools.hub.redaction import PrivateWords
from vlrl.tools.run import is_run

RECORD = ".vlrl-export.json"
"""Name of a file in an exported folder that records what was exported, so that an interrupted push need not repeat the
export. The file itself is not sent."""
_VOCABULARY = {"tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"}
_HEADER = 100_000_000  # bytes of a safetensors header, at most


@dataclass(frozen=True)
class Release:
    """The files to publish, with the model card."""

    subject: PublishedModel
    card: str
    files: Mapping[str, Path | bytes]


def source_run(source: Path) -> tuple[Path, RunFolder | None, int | None]:
    """Returns three values: the path of a checkpoint, its run folder, and its number of completed steps. The checkpoint
    is `source`, or the newest checkpoint if `source` is a run folder. The run folder and the number are None if the
    checkpoint is not in a run folder."""
    path = checkpoint.find(source).path
    assert path
    if path.parent.name != "checkpoints" or not is_run(path.parent.parent):
        return path, None, None
    return path, RunFolder(path.parent.parent), checkpoint.step_of(path)


def prepare(source: Path, repo: str, exported: ExportedModel, private: PrivateWords,
            ask_licence: Callable[[str], str | None] = lambda name: None) -> Release:
    """Returns what is to be published of a model: the files for the repository `repo`, with the model card. `exported`
    is the model, exported from the checkpoint or run `source`. The words in `private` are redacted.

    `ask_licence(model)` returns the licence of a base model on the Hub, or None if the licence is not known. Raises
    RunError if a file contains private words that cannot be redacted."""
    _, run, step = source_run(source)
    subject = PublishedModel(repo=repo, exported=exported, run=run, step=step)
    if subject.config:
        base = base_of(subject.config.model.name)
    else:  # a checkpoint without a run: the base model in an adapter's config
        name = (read_json(exported.folder / "adapter_config.json") or {}).get("base_model_name_or_path")
        base = base_of(name) if isinstance(name, str) and name else None
    if base and base.on_hub and base.licence is None:
        base = replace(base, licence=ask_licence(base.name))
    text = card(subject, private, base)
    files: dict[str, Path | bytes] = {"README.md": text.encode()}
    if run is not None:
        with tempfile.TemporaryDirectory() as scratch:
            files[CURVE] = plot_reward(run, Path(scratch) / CURVE).read_bytes()
    for name in exported.files:
        if name not in ("README.md", CURVE) and not Path(name).name.startswith("."):
            files[name] = _published_file(exported.folder / name, private, base)
    for name, content in files.items():
        _refuse(name, content, private)
    return Release(subject, text, files)


def rollouts(source: Path, folder: Path, private: PrivateWords, with_media: bool) -> dict[str, Path | bytes]:
    """Exports the training rollouts of the run that `source` belongs to, as a data set in `folder`. Returns name in the
    data set -> file.

    Raises RunError if `source` is not in a run folder, or the run has stored no rollouts."""
    path, run, _ = source_run(source)
    if run is None:
        raise RunError(f"{path} is not in a run folder, so it has no rollouts: leave out --rollouts")
    rollout_dataset.export(run, folder, media=with_media, private=private)
    return rollout_dataset.files_of(folder)


# --- an earlier export ------------------------------------------------------------------------------------------


def record(source: Path, exported: ExportedModel, request: Mapping[str, Any]) -> None:
    """Writes the file RECORD into the exported folder. The file describes the export: its checkpoint (`source`, or the
    newest checkpoint of this run), its options `request`, and its files."""
    sizes = {name: (exported.folder / name).stat().st_size for name in exported.files}
    known = {**asdict(exported), "source": exported.source.name, "folder": ""}
    content = {"of": _digest(checkpoint.find(source).path), "asked": dict(request), "sizes": sizes, "exported": known}
    write_text(exported.folder / RECORD, json.dumps(content) + "\n")


def recorded(source: Path, folder: Path, request: Mapping[str, Any]) -> ExportedModel | None:
    """The exported model in `folder`, as described by the file RECORD. Returns None if there is no such file, if the
    export was made from another checkpoint than that of `source` or with other options than `request`, or if
    exported files have changed."""
    content = read_json(folder / RECORD)
    if (not content or content.get("of") != _digest(checkpoint.find(source).path) or
            content.get("asked") != dict(request)):
        return None
    sizes = content.get("sizes") or {}
    if any(not (folder / name).is_file() or (folder / name).stat().st_size != size for name, size in sizes.items()):
        return None
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in content["exported"].items()}
    return ExportedModel(**{**values, "folder": folder, "source": Path(values["source"])})


def _digest(path: Path | None) -> str:
    """A hash that identifies the checkpoint in `path`: the hash of its manifest or, without a manifest, of the names,
    sizes and modification times of its files."""
    assert path
    manifest = path / checkpoint.MANIFEST
    if manifest.is_file():
        return file_sha256(manifest)
    files = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in path.iterdir() if f.is_file())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


# --- files ------------------------------------------------------------------------------------------------------------


def _published_file(path: Path, private: PrivateWords, base: Base | None) -> Path | bytes:
    """What is published for the file `path`: the path itself or, for a JSON file with private words, its redacted
    content. In the config of an adapter, the name of the base model is replaced by the name of `base`."""
    if path.suffix != ".json" or path.name in _VOCABULARY or path.name.endswith(".index.json"):
        return path
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return path
    after = private.config(before)
    if path.name == "adapter_config.json" and base:
        after["base_model_name_or_path"] = base.name
    return path if after == before else (json.dumps(after, indent=2, ensure_ascii=False) + "\n").encode()


def _refuse(name: str, content: Path | bytes, private: PrivateWords) -> None:
    text = _text(name, content)
    findings = private.findings(text, vocabulary=name in _VOCABULARY) if text else []
    if findings:
        raise RunError(f"{name} would reveal {' and '.join(findings)}: nothing is sent. Remove these words from "
                       "the file in the checkpoint, or export the model and edit the file by hand.")


def _text(name: str, content: Path | bytes) -> str:
    """The text of a file that is searched for private words: the header of a weights file, "" for an image."""
    if name.endswith(".png"):
        return ""
    if isinstance(content, bytes):
        return content.decode("utf-8", "replace")
    if name.endswith(".safetensors"):
        with open(content, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return file.read(min(size, _HEADER)).decode("utf-8", "replace")
    return content.read_text(encoding="utf-8", errors="replace")

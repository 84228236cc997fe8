"""A run's model for the Hub: the exported files without what is private, its card, its curve, and its rollouts apart.

    release = prepare(Path("runs/a"), "org/name", exported, private)
    push(HubTarget("org/name"), release.files, "Model of a run of vlrl")

Nothing is sent here. What is exported is left as it is; the files of a release are copies where they had to change.
"""

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
from vlrl.tools.hub import rollout_dataset as publish
from vlrl.tools.hub.export import ExportedModel
from vlrl.tools.hub.model_card import CURVE, Base, PublishedModel, base_of, card
from vlrl.tools.hub.redaction import PrivateWords
from vlrl.tools.run import is_run

RECORD = ".vlrl-export.json"
"""In an exported folder: what it was made of, so that a push that was cut off need not export again. It is not sent."""
_VOCABULARY = {"tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"}
_HEADER = 100_000_000  # bytes of a safetensors header, at most


@dataclass(frozen=True)
class Release:
    """What would be sent."""

    subject: PublishedModel
    card: str
    files: Mapping[str, Path | bytes]


def source_run(source: Path) -> tuple[Path, RunFolder | None, int | None]:
    """Returns the checkpoint that a path means, the run that it lies in, and the steps that its weights completed."""
    path = checkpoint.find(source).path
    assert path
    if path.parent.name != "checkpoints" or not is_run(path.parent.parent):
        return path, None, None
    return path, RunFolder(path.parent.parent), checkpoint.step_of(path)


def prepare(source: Path, repo: str, exported: ExportedModel, private: PrivateWords,
            ask_licence: Callable[[str], str | None] = lambda name: None) -> Release:
    """Returns the files of a release of what was exported from `source`, with their card.

    ask_licence: of a base model of the Hub; None where it is not known. Raises RunError when a file holds something of
    this machine that cannot be taken out of it.
    """
    _, run, step = source_run(source)
    subject = PublishedModel(repo=repo, exported=exported, run=run, step=step)
    base = base_of(subject.config.model.name) if subject.config else _declared_base(exported)
    if base and base.on_hub and base.licence is None:
        base = replace(base, licence=ask_licence(base.name))
    text = card(subject, private, base)
    files: dict[str, Path | bytes] = {"README.md": text.encode()}
    if run is not None:
        files[CURVE] = _curve(run)
    for name in exported.files:
        if name not in ("README.md", CURVE) and not Path(name).name.startswith("."):
            files[name] = _clean(exported.folder / name, private, base)
    for name, content in files.items():
        _refuse(name, content, private)
    return Release(subject, text, files)


def rollouts(source: Path, folder: Path, private: PrivateWords, with_media: bool) -> dict[str, Path | bytes]:
    """Writes the training rollouts of the run of `source` into `folder`, and returns them as files of a data set.

    Raises RunError where there is no run, or where it kept none.
    """
    path, run, _ = source_run(source)
    if run is None:
        raise RunError(f"{path} lies in no run folder, so there are no rollouts: leave out --rollouts")
    publish.export(run, folder, media=with_media, private=private)
    return publish.files_of(folder)


# --- an export that is there ------------------------------------------------------------------------------------------


def record(source: Path, exported: ExportedModel, request: Mapping[str, Any]) -> None:
    """Notes in the exported folder what it was made of."""
    sizes = {name: (exported.folder / name).stat().st_size for name in exported.files}
    known = {**asdict(exported), "source": exported.source.name, "folder": ""}
    content = {"of": _digest(checkpoint.find(source).path), "asked": dict(request), "sizes": sizes, "exported": known}
    write_text(exported.folder / RECORD, json.dumps(content) + "\n")


def recorded(source: Path, folder: Path, request: Mapping[str, Any]) -> ExportedModel | None:
    """Returns the export that `folder` holds where it is one of the same checkpoint in the same form, else None."""
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
    """Tells one checkpoint from another by its manifest, or without one by its files."""
    assert path
    manifest = path / checkpoint.MANIFEST
    if manifest.is_file():
        return file_sha256(manifest)
    files = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in path.iterdir() if f.is_file())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


# --- files ------------------------------------------------------------------------------------------------------------


def _declared_base(exported: ExportedModel) -> Base | None:
    """Returns the base that an adapter names itself, of a checkpoint without a run."""
    name = (read_json(exported.folder / "adapter_config.json") or {}).get("base_model_name_or_path")
    return base_of(name) if isinstance(name, str) and name else None


def _curve(run: RunFolder) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        return plot_reward(run, Path(scratch) / CURVE).read_bytes()


def _clean(path: Path, private: PrivateWords, base: Base | None) -> Path | bytes:
    """Returns a file as it is, or a settings file without paths of this machine."""
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
        raise RunError(f"{name} would tell {' and '.join(findings)}: nothing is sent. Take it out of that file of the "
                       "checkpoint, or export it and change it by hand.")


def _text(name: str, content: Path | bytes) -> str:
    """Returns what can be read of a file as text: of weights their header."""
    if name.endswith(".png"):
        return ""
    if isinstance(content, bytes):
        return content.decode("utf-8", "replace")
    if name.endswith(".safetensors"):
        with open(content, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return file.read(min(size, _HEADER)).decode("utf-8", "replace")
    return content.read_text(encoding="utf-8", errors="replace")

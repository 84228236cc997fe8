"""The images and videos in a run folder, each stored once under the hash of its content. Imports no torch."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from pathlib import Path

from vlrl.store.files import replacing, suffix_of
from vlrl.types import LoadedMedia

_SUFFIXES = {"image": {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"},
             "video": {".mp4", ".mkv", ".webm", ".mov", ".avi", ".gif", ".m4v"}}


class MediaFiles:
    """The folder media/ of a run. `mode` is the setting `store.media`: copy, link or none."""

    def __init__(self, run: Path, mode: str):
        self.folder, self.mode = run / "media", mode
        self._stored: dict[str, str] = {}

    def write(self, media: LoadedMedia) -> str | None:
        """Stores an image or video once, and returns its path inside the run folder; None with `store.media=none`.

        A file is copied or linked unchanged, and the bytes of a file embedded in a row are written unchanged. Media
        without a file, or whose file has changed since it was loaded, are written from their pixels without loss, as
        PNG or (a video) as animated WebP."""
        if self.mode == "none":
            return None
        if media.sha256 not in self._stored:
            self._stored[media.sha256] = f"media/{self._put(media).name}"
        return self._stored[media.sha256]

    def _put(self, media: LoadedMedia) -> Path:
        suffix = media.path.suffix.lower() if media.path else ""
        if media.path and suffix in _SUFFIXES[media.kind]:
            target = self.folder / (media.sha256 + suffix)
            if target.exists() or _take(media.path, target, media.sha256, self.mode == "link"):
                return target
        data_suffix = suffix_of(media.data[:16]) if media.data else ""
        whole = data_suffix in _SUFFIXES[media.kind]
        target = self.folder / (media.sha256 + (data_suffix if whole else ".png" if media.kind == "image" else ".webp"))
        if not target.exists():
            with replacing(target) as temporary:
                temporary.write_bytes(media.data) if whole and media.data else _save_pixels(media, temporary)
        return target


def _take(source: Path, target: Path, sha256: str, link: bool) -> bool:
    if not source.is_file():
        return False
    if link:
        with replacing(target, sync=False) as temporary:
            temporary.symlink_to(source.resolve())
        return True
    with open(source, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            return False
        file.seek(0)
        with replacing(target) as temporary, open(temporary, "wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
    return True


def _save_pixels(media: LoadedMedia, path: Path) -> None:
    first, *rest = media.frames
    if media.kind == "image":
        first.save(path, format="PNG")
        return
    times = [1000 * t for t in media.timestamps] or [500 * i for i in range(len(media.frames))]
    shown = [max(1, round(b - a)) for a, b in itertools.pairwise(times)]  # milliseconds
    shown.append(shown[-1] if shown else 500)
    first.save(path, format="WEBP", save_all=True, append_images=rest, duration=shown, lossless=True, method=0)

"""Signatures (hashes) of the images and videos in rows, to find equal and similar media. Each file is read once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from vlrl.checks.image_similarity import WINDOWS, ImageSignature, Window, image_signature
from vlrl.config.schema import LimitsSettings
from vlrl.data.media import load, missing_file
from vlrl.errors import DataError
from vlrl.progress import Progress
from vlrl.store.files import file_sha256
from vlrl.tools.datasets.convert import UsableRow
from vlrl.types import Media


def read_signatures(items: Sequence[tuple[UsableRow, Media]], limits: LimitsSettings, progress: Progress,
                    windows: Sequence[Window] = WINDOWS) -> list[ImageSignature]:
    """The signature of the image or video in each pair (row, media) of `items`, in order. For a video, the signature
    only has the hash of the file's bytes.

    `windows` are the parts of an image that are hashed. Without windows, images are hashed by their bytes only, and a
    missing file has an empty hash. Raises DataError naming the row if a file cannot be read."""
    def read(one: tuple[UsableRow, Media]) -> ImageSignature:
        row, media = one
        try:
            if windows and media.kind == "image":
                loaded = load(media, limits)
                return image_signature(row.id, loaded.sha256, loaded.frames[0], windows)
            problem = missing_file(media.source)
            if problem and windows:
                raise DataError(problem)
            return ImageSignature(row.id, "" if problem else file_sha256(media.source))
        except (DataError, OSError) as error:
            raise DataError(f"{row.where}: row '{row.id}': {error}") from None

    signatures: list[ImageSignature] = []
    pool = ThreadPoolExecutor(4)
    try:
        for signature in pool.map(read, items):
            signatures.append(signature)
            progress("reading media", len(signatures), len(items))
    finally:  # Ctrl-C or a bad file: those in the queue are not waited for
        pool.shutdown(cancel_futures=True)
    return signatures

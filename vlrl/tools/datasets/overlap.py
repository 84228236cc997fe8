"""Finds held-out rows that overlap with training rows: with the same image (also resized, recompressed or cropped) or
with similar texts. Imports torch only for an embedder.

    report = overlap(Path("train.jsonl"), Path("heldout.jsonl"))
    report.shared[0]      # NearDuplicate(heldout="7", train="12", kind="crop", likeness=0.97)"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from vlrl.checks.image_similarity import NearDuplicate, similar_images
from vlrl.config.schema import LimitsSettings
from vlrl.errors import ConfigError
from vlrl.progress import Progress, no_progress
from vlrl.tools.datasets.convert import sound_rows
from vlrl.tools.datasets.signatures import read_signatures

KINDS = ("same", "look", "crop", "text", "words", "meaning")
"""Kinds of overlap between a held-out and a training row. same: they have the same media file. look: their images look
the same. crop: an image is a crop of the other row's image. text: the texts have the same words, or share at least
half of the 13-grams. words: nearly the same words. meaning: the embeddings of the texts are similar."""
N = 13  # number of words in an n-gram, as in evaluations of large language models (2005.14165, appendix C)
_TEXTS = ("question", "instruction", "expression", "caption", "text", "problem", "options")
_WORDS = 0.8  # minimum cosine of word vectors of texts that count as the same
_FEW = 8  # texts with fewer words must be equal
ALIKE = 0.9  # two texts count as the same if their embeddings have at least this cosine similarity
_COMMON = 0.01  # n-grams in more than this share of train rows belong to a template


@dataclass(frozen=True)
class Overlap:
    """Which rows of a held-out file overlap with a training file, and the number of rows in each file."""

    train: int
    heldout: int
    shared: tuple[NearDuplicate, ...]
    """The overlaps found, in the order of the held-out rows. A held-out row has at most one overlap of its images and
    one of its text; see KINDS."""

    @property
    def share(self) -> float:
        """Share of held-out rows that overlap with training rows."""
        return len({one.heldout for one in self.shared}) / self.heldout if self.heldout else 0.0


def overlap(train: Path, heldout: Path, *, root: Path | None = None, format: str = "auto",
            columns: Mapping[str, str] | None = None, limits: LimitsSettings | None = None,
            progress: Progress = no_progress, embedder: Path | None = None, alike: float = ALIKE) -> Overlap:
    """Finds held-out rows that overlap with training rows. Images are compared by their appearance, videos by their
    bytes, texts by their words. With `embedder` (the folder of a text model), texts without a match are also
    compared by embeddings. Two embeddings match if their cosine is at least `alike`.

    Texts are compared for rows without media. For rows with media, only long texts are compared, because the same short
    question is asked about many images. Raises DataError for a bad row and for media that cannot be read."""
    sides = [sound_rows(path, format, root, columns, "pixels") for path in (train, heldout)]
    known, own = (read_signatures([(row, one) for row in rows for one in row.media], limits or LimitsSettings(),
                                  progress) for rows in sides)
    pictures = similar_images(known, own, progress)
    said = [[(row.id, text_of(row.row), bool(row.media)) for row in rows] for rows in sides]
    texts = shared_texts(*said)
    if embedder:
        given_away = {one.heldout for one in texts}
        texts += shared_meanings(said[0], [one for one in said[1] if one[0] not in given_away], embedder, alike)
    order = {row.id: i for i, row in enumerate(sides[1])}
    return Overlap(len(sides[0]), len(sides[1]), tuple(sorted([*pictures, *texts], key=lambda s: order[s.heldout])))


# --- texts ------------------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """The words of a text, normalised: without case, accents, punctuation and variants of letters."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return re.findall(r"\w+", "".join(c for c in plain if not unicodedata.combining(c)))


def shared_texts(train: Sequence[tuple[str, str, bool]], heldout: Sequence[tuple[str, str, bool]]
                 ) -> list[NearDuplicate]:
    """Finds the held-out texts that also occur in the training texts. Each text is given as (id, text, whether the row
    has an image).

    Matches of kind `text` have the same words, or at least half of the held-out text's 13-grams occur in one training
    text. 13-grams of a template are ignored: those that occur in more than 1 % of the training texts and in more than 3
    texts. Matches of kind `words` have a cosine of at least 0.8 between word counts weighted by rarity, which finds
    reordered words and small changes. Texts with an image, or of fewer than 8 words, are compared by 13-grams only."""
    known = [(id, words(text), shown) for id, text, shown in train]
    whole = {tuple(own): id for id, own, shown in reversed(known) if not shown and own}
    grams, common = _grams(known)
    cosines = _Cosines([(id, own) for id, own, shown in known if not shown and len(own) >= _FEW])
    matches = []
    for id, text, shown in heldout:
        own = words(text)
        if not shown and tuple(own) in whole:
            matches.append(NearDuplicate(id, whole[tuple(own)], "text", 1.0))
        elif (best := _of_grams(own, grams, common)) and best[1] >= 0.5:
            matches.append(NearDuplicate(id, best[0], "text", best[1]))
        elif not shown and len(own) >= _FEW and (near := cosines.best(own)) and near[1] >= _WORDS:
            matches.append(NearDuplicate(id, near[0], "words", near[1]))
    return matches


def shared_meanings(train: Sequence[tuple[str, str, bool]], heldout: Sequence[tuple[str, str, bool]], embedder: Path,
                alike: float = ALIKE) -> list[NearDuplicate]:
    """Finds the held-out texts whose embedding has a cosine of at least `alike` with the embedding of a training text.
    The texts are given as in `shared_texts`, and `embedder` is the folder of a text model. Only texts of at least 8
    words without an image are compared. Each match has the nearest training text, and the kind `meaning`."""
    known, own = ([one for one in side if not one[2] and len(words(one[1])) >= _FEW] for side in (train, heldout))
    if not known or not own:
        return []
    table, matches = embed(embedder, [text for _, text, _ in known]), []
    for (id, _, _), vector in zip(own, embed(embedder, [text for _, text, _ in own]), strict=True):
        cosines = table @ vector
        if (nearest := float(cosines.max())) >= alike:
            matches.append(NearDuplicate(id, known[int(cosines.argmax())][0], "meaning", min(nearest, 1.0)))
    return matches


def _ngrams(own: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(own[i:i + N]) for i in range(len(own) - N + 1)}


def _grams(train: Sequence[tuple[str, list[str], bool]]) -> tuple[dict[tuple[str, ...], list[str]], set]:
    """Returns (n-gram -> ids of the training texts that contain it, the set of n-grams that belong to templates)."""
    ids_of: dict[tuple[str, ...], list[str]] = {}
    for id, own, _ in train:
        for gram in _ngrams(own):
            ids_of.setdefault(gram, []).append(id)
    most = max(3, _COMMON * len(train))
    return ids_of, {gram for gram, ids in ids_of.items() if len(ids) > most}


def _of_grams(own: Sequence[str], grams: Mapping[tuple[str, ...], Sequence[str]], common: set
              ) -> tuple[str, float] | None:
    """Returns (id of the training text that shares the most n-grams with the words `own`, share of the n-grams of `own`
    that occur in that text). N-grams in `common` are ignored. None if no n-gram is shared."""
    telling = _ngrams(own) - common
    counts = Counter(id for gram in telling for id in grams.get(gram, ()))
    if not counts:
        return None
    id, n = counts.most_common(1)[0]
    return id, n / len(telling)


class _Cosines:
    """The training texts as unit vectors over words, to find the training text with the highest cosine to another text.
    The entry of a word is its count in the text, multiplied by 1 + log(number of texts / number of texts with the
    word)."""

    def __init__(self, texts: Sequence[tuple[str, list[str]]]):
        self.ids = [id for id, _ in texts]
        having = Counter(word for _, own in texts for word in set(own))
        self.rarity = {word: math.log(len(texts) / n) + 1 for word, n in having.items()}
        self.unknown = math.log(len(texts) or 1) + 1
        self.place = {word: i for i, word in enumerate(having)}
        entries = [(row, self.place[word], value) for row, (_, own) in enumerate(texts)
                   for word, value in self._unit(own).items()]
        rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        self.table: Any = csr_array((values, (rows, columns)), shape=(len(texts), max(1, len(having))))

    def best(self, own: Sequence[str]) -> tuple[str, float] | None:
        if not self.ids:
            return None
        vector = np.zeros(max(1, len(self.place)))
        for word, value in self._unit(own).items():
            if word in self.place:
                vector[self.place[word]] = value
        cosines = self.table @ vector
        return self.ids[int(cosines.argmax())], float(min(cosines.max(), 1.0))

    def _unit(self, own: Sequence[str]) -> dict[str, float]:
        raw = {word: n * self.rarity.get(word, self.unknown) for word, n in Counter(own).items()}
        length = math.sqrt(sum(v * v for v in raw.values()))
        return {word: value / length for word, value in raw.items()}


def text_of(row: Mapping[str, Any]) -> str:
    """All text fields of a row that belong to its question, as one text."""
    parts = [row.get(name) for name in _TEXTS]
    return " ".join(" ".join(map(str, part)) if isinstance(part, list) else str(part) for part in parts if part)


_BATCH = 32


def embed(folder: Path, texts: Sequence[str]) -> np.ndarray:
    """The embeddings of texts by the model in `folder`: unit vectors [texts, width] in float32. A CLIP model embeds a
    text as its text features. Any other model embeds a text as the mean over the last hidden states of its tokens,
    as in sentence encoders (1908.10084). Texts are truncated to the model's maximum length.

    Raises ConfigError for a folder without a model and tokenizer. Nothing is downloaded, and no code in the folder is
    executed."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ConfigError(f"--embedder {folder} must be a model folder with config.json, weights and tokenizer")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(f"--embedder {folder} cannot be loaded: {error}") from error
    longest = min(tokenizer.model_max_length, _length(model.config))
    batches = []
    for start in range(0, len(texts), _BATCH):
        batch = tokenizer([*texts[start:start + _BATCH]], padding=True, truncation=True, max_length=longest,
                          return_tensors="pt")
        with torch.inference_mode():
            batches.append(_vectors(model, batch).float().numpy())
    vectors = np.concatenate(batches) if batches else np.zeros((0, 1), np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _vectors(model: Any, batch: Any) -> Any:
    if hasattr(model, "get_text_features"):
        given = model.get_text_features(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return getattr(given, "pooler_output", given)
    mask = batch["attention_mask"][:, :, None]
    return (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1).clamp(min=1)


def _length(config: Any) -> int:
    text = getattr(config, "text_config", None) or config
    return int(getattr(text, "max_position_embeddings", None) or 512)

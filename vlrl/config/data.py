"""The settings `data.*`: the data files that a task reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vlrl.config.base import Count, Positive, Settings
from vlrl.config.box_forms import parse_box_form

AnswerType = Literal["choice", "number", "count", "yes_no", "math", "chart", "ocr", "regression", "text"]


class DataSettings(Settings):
    """The data files that a task reads, and how they are read."""

    train: str = Field(default="", description=(
        "Training rows: a file, folder, pattern or Hub data set. Also a split of a folder (folder@train); of the "
        "Hub org/name@train, org/name/config@train or org/name@train#revision. Empty = the task generates "
        "samples."))
    heldout: str = Field(default="", description="Held-out rows to evaluate on, in the forms of data.train.")
    heldout_share: Annotated[float, Field(ge=0, le=0.5)] = Field(default=0.0, description=(
        "Share of data.train to hold out if data.heldout is empty. At most 1000 rows, chosen by data.seed; rows with "
        "the same group_key or picture stay together. 0 = none."))
    own_samples: bool = Field(default=True, description=(
        "Whether a task that generates samples uses them. false: use the rows of data.train (and of data.heldout "
        "if it is set) instead, e.g. answers exported from the inspector. true: setting these files is an error."))
    solutions: str = Field(default="", description=(
        "File of solutions to learn from. Lines of .jsonl with number, id, solution: only the rows that it lists "
        "are trained on, with these values as their `solution`. A stage of kind rounds writes such a file."))
    root: str = Field(default="", description="Folder that media paths are relative to; empty = the data file's "
                      "folder.")
    format: str = Field(default="auto", description="Format of the rows; auto = detected from their fields.")
    columns: Mapping[str, str] = Field(
        default_factory=dict, description=(
        "Field -> column of the files, e.g. {question: problem}. Known formats do not need it."))
    boxes: str = Field(default="auto", description=(
        "Form of boxes and points; auto = as the format of the rows defines. pixels of the original image, 0 to 1000 "
        "(norm1000), 0 to 1 (norm1), or pixels of the resized image (resized if each row states that size; "
        "resized:28:3136:1003520 = sides in multiples of 28, 3136 to 1003520 pixels). xywh- or xyxy- before the "
        "unit, or alone: [x, y, width, height] or two corners. With auto, a run does not start if the boxes of the "
        "file contradict their format."))
    answer_type: AnswerType | None = Field(default=None, description=(
        "Answer type of all rows without options; null = inferred. It takes precedence over the rows' own. null = "
        "the rows' own, or else inferred from the answers and questions of the file, as `vlrl data check` shows."))
    index: Literal["auto", "memory", "lazy"] = Field(default="auto", description=(
        "When rows are read. memory: all rows are read and checked at the start. lazy: a row is read when it is "
        "drawn, and a bad row is then skipped (data.quarantine) or stops the run; for files larger than memory. "
        "auto = lazy for files of at least 64 MiB in a format with one row per record."))
    stream: bool = Field(default=False, description=(
        "Read rows nearly in file order, for slow disks. Rows are read when they are drawn (data.index=lazy), and "
        "curriculum.name=uniform draws blocks of 1000 consecutive rows in shuffled order, mixed by "
        "data.shuffle_buffer."))
    shuffle_buffer: Positive = Field(default=1000, description=(
        "Consecutive rows that data.stream shuffles; 1 = none. More than 1000 mixes several blocks. Only row "
        "numbers are shuffled: no row is held in memory."))
    media_roots: tuple[str, ...] = Field(default=(), description=(
        "Further folders that media may lie in. They are reached by absolute paths, '..' or links. Media anywhere "
        "else make a row bad."))
    urls: bool | tuple[str, ...] = Field(default=False, description=(
        "Whether media may be URLs, and of which hosts. false, true (every public host, by https), or a list of "
        "hosts such as [images.example.org, '*.example.org', 'example.org:8443', 'http://example.org']. Private "
        "addresses are never contacted. See docs/security.md."))
    cache: str = Field(
        default="", description="Folder for downloads and row indexes. Empty = vlrl in the user's cache folder.")
    seed: int = Field(
        default=0, ge=-(2**63), lt=2**63, description=(
        "Seed of generated samples and of splits. It is independent of the training seed."))
    quarantine: bool = Field(default=False, description="Skip, count and list bad rows instead of stopping.")
    clip_cache_mib: Count = Field(default=256, description=(
        "Host memory (MiB) per process for decoded frames; 0 = off. A clip in several prompts or steps is decoded "
        "once; the least recently used are dropped first."))
    difficulty: str = Field(default="", description=(
        "File of per-row columns for samplers, by id. A .jsonl or .json with pass_at_k, difficulty, ..., as `vlrl "
        "data difficulty` writes it. Its columns take precedence over fields of the rows. Empty = only the fields "
        "of the rows."))
    workers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=2, description=(
        "Threads per process that load the next prompts' media. They work during a step; 0 = none."))

    @model_validator(mode="after")
    def _streams(self) -> DataSettings:
        if self.stream and self.index == "memory":
            raise ValueError("data.stream=true reads rows when they are drawn, and data.index=memory reads all "
                             "rows at the start: remove one of the two")
        return self

    @field_validator("boxes")
    @classmethod
    def _known_form(cls, value: str) -> str:
        parse_box_form(value)
        return value

    @field_validator("media_roots", "urls", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("urls")
    @classmethod
    def _hosts(cls, value: bool | tuple[str, ...]) -> bool | tuple[str, ...]:
        if isinstance(value, tuple):
            from vlrl.config.url_entries import parse_entry
            for entry in value:
                parse_entry(entry)
        return value

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields (name, value, reason) for data.shuffle_buffer and data.heldout_share if they have no effect."""
        if self.heldout and self.heldout_share:
            yield "data.heldout_share", self.heldout_share, f"data.heldout={self.heldout} is evaluated on instead"
        sampler, buffer = config.curriculum.name, self.shuffle_buffer
        if self.stream and sampler != "uniform":
            yield ("data.shuffle_buffer", buffer, f"curriculum.name={sampler} draws the prompts in its own order, and "
                   "rows are read in that order")
        elif not self.stream and buffer != type(self).model_fields["shuffle_buffer"].default:
            yield "data.shuffle_buffer", buffer, "data.stream=false shuffles all rows"

"""The settings `data.*`: the files of rows that a task reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vlrl.config.base import Count, Positive, Settings

AnswerType = Literal["choice", "number", "count", "yes_no", "math", "chart", "ocr", "regression", "text"]


class DataSettings(Settings):
    """The files of rows that a task reads."""

    train: str = Field(default="", description="Rows to train on: a file, a folder, a pattern (rows-*.parquet), a "
                       "split of a folder (folder@train), or a data set of the Hugging Face Hub (org/name@train, "
                       "org/name/config@train, org/name@train#revision); empty when the task draws its own.")
    heldout: str = Field(default="", description="Rows to evaluate on.")
    own_samples: bool = Field(
        default=True, description="false: the rows of data.train, and of data.heldout where it is given, are used in "
        "place of what a task with samples of its own draws, e.g. the answers that the inspector exports. true: such "
        "a task refuses these files.")
    solutions: str = Field(
        default="", description="A file of answers to learn from (.jsonl; number, id, solution): the training rows are "
        "those that it names, with these answers as their `solution`. A stage of kind rounds writes one.")
    root: str = Field(
        default="", description="Folder that media paths are relative to; empty = the data file's folder.")
    format: str = Field(default="auto", description="Format of the rows; auto recognises it by their fields.")
    columns: Mapping[str, str] = Field(
        default_factory=dict, description="Which column of the files stands for a field of the rows: "
        "{question: problem, answer: solution, images: image}. Known shapes need none.")
    boxes: Literal["auto", "pixels", "norm1000", "norm1", "xywh", "xywh-norm1000", "xywh-norm1"] = Field(
        default="auto", description="What boxes and points of the files are, where their format does not say: pixels "
        "of the original image, 0 to 1000 (norm1000) or shares (norm1); [x, y, width, height] in place of corners "
        "(xywh). auto = corners in pixels, and a warning where the file as a whole speaks against it.")
    answer_type: AnswerType | None = Field(
        default=None, description="answer_type of all rows that ask without options, before what their fields say; "
        "null = by the fields, else settled over the file by its answers and questions, as `vlrl data check` shows.")
    index: Literal["auto", "memory", "lazy"] = Field(
        default="auto", description="memory: all rows are read and checked at the start. lazy: a row is read when it "
        "is drawn, and a bad one is left out then (data.quarantine) or stops the run; for files larger than memory. "
        "auto = lazy for a large file (from 64 MiB) of a format that has one row per record.")
    stream: bool = Field(
        default=False, description="Read rows nearly in the order in which they lie on the disk, as slow disks and "
        "network file systems need: rows are read when they are drawn (data.index=lazy), and curriculum.name=uniform "
        "draws runs of 1000 neighbours in a shuffled order, mixed by data.shuffle_buffer.")
    shuffle_buffer: Positive = Field(
        default=1000, description="With data.stream: so many rows that follow one another are shuffled; 1 = none, more "
        "than 1000 mix rows from several places of the disk. What is shuffled are places: no row is held in memory."
    )
    media_roots: tuple[str, ...] = Field(
        default=(), description="Further folders that media paths may lead into, absolute or by '..' and links. A row "
        "whose media lie elsewhere is a bad row.")
    urls: bool | tuple[str, ...] = Field(
        default=False, description="Whether media may be URLs: false, true (every public host, by https), or hosts, as "
        "in [images.example.org, '*.example.org', 'example.org:8443', 'http://example.org']. Private addresses are "
        "never asked. See docs/security.md.")
    cache: str = Field(
        default="", description="Folder that keeps what was fetched from URLs and the Hub, and the places of rows in "
        "large files; empty = vlrl in the user's cache folder.")
    seed: int = Field(default=0, ge=-(2**63), lt=2**63,
                      description="Seed of drawn data and of fixed splits; apart from the training seed.")
    quarantine: bool = Field(default=False, description="Leave bad rows out, count and list them, instead of stopping.")
    clip_cache_mib: Count = Field(
        default=256, description="Host memory per process for decoded frames of video files, in MiB: a clip that "
        "several prompts or steps show is decoded once, and the least recently used leave first; 0 = off.")
    difficulty: str = Field(
        default="", description="Columns for samplers (pass_at_k, difficulty ...) by id (.jsonl, .json), as "
        "`vlrl data difficulty` writes them; they come before fields of the rows. Empty = those fields alone.")
    workers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=2, description="Threads per process that read and process the media of the next prompts while a step "
        "computes; 0 = none.")

    @model_validator(mode="after")
    def _streams(self) -> DataSettings:
        if self.stream and self.index == "memory":
            raise ValueError("data.stream=true reads rows when they are drawn, and data.index=memory all of them at "
                             "the start: leave one of them out")
        return self

    @field_validator("media_roots", "urls", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("urls")
    @classmethod
    def _hosts(cls, value: bool | tuple[str, ...]) -> bool | tuple[str, ...]:
        if isinstance(value, tuple):
            from vlrl.config.url_entries import parts

            for entry in value:
                parts(entry)
        return value

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields a buffer in which nothing is shuffled."""
        sampler, buffer = config.curriculum.name, self.shuffle_buffer
        if self.stream and sampler != "uniform":
            yield ("data.shuffle_buffer", buffer, f"curriculum.name={sampler} draws the prompts in its own order, and "
                   "rows are read there")
        elif not self.stream and buffer != type(self).model_fields["shuffle_buffer"].default:
            yield "data.shuffle_buffer", buffer, "data.stream=false shuffles all rows"

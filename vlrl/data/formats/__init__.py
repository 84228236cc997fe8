"""The ways in which other people write annotations, and canonical rows made of them.

    rows_in(Path("screenspot_v2.json"))         # [("screenspot_v2.json, row 1", {"id": ..., "instruction": ..., ...})]

Another format is one more entry of FORMATS: a function that recognises a record, and one that makes its rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.data.formats import aitw, driving, gui, labelled, pairs, qa, tables, talk, video, vqa
from vlrl.data.formats import annotated as a
from vlrl.data.formats import grounding as g
from vlrl.data.formats.answer_types import Tendency, TypeTable, settled
from vlrl.data.formats.box_forms import reread
from vlrl.data.formats.fields import Source, short
from vlrl.data.formats.lost import lost
from vlrl.data.formats.records import records
from vlrl.data.formats.shapes import shape_of
from vlrl.data.formats.whole import unique_ids
from vlrl.data.turns import carried
from vlrl.errors import ConfigError, DataError, did_you_mean

__all__ = ["FORMATS", "Format", "Source", "canonical", "check_columns", "check_format", "format_of", "recognised",
           "renamed", "rows_as", "rows_in"]
Row = dict[str, Any]
_QUESTIONS = ("qa", "problem_text", "mathvista", "vlm_r1", "video_r1")
"""Formats that read whatever asks and answers, also where a more particular one would know the words of an answer."""
_RIVALS = {**a.ROLES, "images": a.ROLES["image"], "question": (*qa.QUESTION, *talk.FIELDS), "answer": qa.ANSWER,
           "options": qa.OPTIONS[:3],
           **dict.fromkeys(talk.LISTS, talk.LISTS)}
"""What a field may be named to stand for -> the fields that could stand for the same."""
_CONTENT = frozenset(("image", "images", "video", "question"))
"""Canonical fields of which a line of a table has at least one."""


@dataclass(frozen=True)
class Format:
    """A way in which annotations are written. A record is one line of a .jsonl file, or one entry of a .json list."""

    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether a record has the fields of this format."""
    rows: Callable[[Mapping[str, Any], Source], Sequence[Row]]
    """The canonical rows that a record stands for. Raises DataError."""
    together: Callable[[g.Placed], g.Placed] | None = None
    """Looks at all rows of a file, (number, place, row) each: joins those of one image, tells each what all ask for."""
    several: bool = False
    """Whether one record may stand for several rows."""

    @property
    def alone(self) -> bool:
        """Whether every record is one row, whatever the others say."""
        return not self.several and self.together is None


def _is_canonical(record: Mapping[str, Any]) -> bool:
    """Returns whether a record says what to find in the canonical words, whatever else it has."""
    boxes = record.get("boxes")
    return "id" in record and (
        (isinstance(boxes, list) and all(isinstance(b, dict) and "box" in b for b in boxes))
        or isinstance(record.get("box"), list)
        or ("instruction" in record and "type" in (record.get("action") or ()))
        or any(name in record for name in ("answer_type", "plan", "responses")))


FORMATS: dict[str, Format] = {
    "mathvista": Format(qa.is_mathvista, qa.question_answer),
    "canonical": Format(_is_canonical, lambda record, source: [dict(record)]),
    "coco": Format(g.is_coco, g.coco, several=True),
    "label_studio": Format(a.is_label_studio, a.label_studio, a.ask_for_all),
    "lisa": Format(g.is_lisa, g.lisa, several=True),
    "table_question": Format(tables.is_table_question, tables.table_question),
    "statement": Format(vqa.is_statement, vqa.statement),
    "hallusion": Format(vqa.is_hallusion, vqa.hallusion),
    "natural_bench": Format(vqa.is_natural_bench, vqa.natural_bench, several=True),
    "visual7w": Format(vqa.is_visual7w, vqa.visual7w, several=True),
    "ocr_vqa": Format(vqa.is_ocr_vqa, vqa.ocr_vqa, several=True),
    "figure_qa": Format(vqa.is_figure_qa, vqa.figure_qa),
    "visual_genome": Format(vqa.is_visual_genome, vqa.visual_genome, several=True),
    "elements": Format(vqa.is_elements, vqa.elements, several=True),
    "ego4d_nlq": Format(vqa.is_ego4d_nlq, vqa.ego4d_nlq, several=True),
    "alphadrive": Format(driving.is_alphadrive, driving.alphadrive),
    "chosen_rejected": Format(pairs.is_chosen_rejected, pairs.chosen_rejected),
    "r1_reward": Format(pairs.is_r1_reward, pairs.r1_reward),
    "response_pair": Format(pairs.is_response_pair, pairs.response_pair, pairs.one_or_two),
    "captions": Format(video.is_captions, video.captions, several=True),
    "got10k": Format(video.is_got10k, video.got10k),
    "seed_bench_r1": Format(video.is_seed_bench_r1, video.seed_bench_r1),
    "next_gqa": Format(video.is_next_gqa, video.next_gqa),
    "videochat_span": Format(video.is_videochat_span, video.videochat_span),
    "video_r1": Format(video.is_video_r1, video.video_r1),
    "tvgbench": Format(video.is_tvgbench, video.tvgbench),
    "time_r1": Format(video.is_time_r1, video.time_r1),
    "clip_class": Format(video.is_clip_class, video.clip_class),
    "vlm_r1": Format(g.is_vlm_r1, g.vlm_r1),
    "aitw": Format(aitw.is_aitw, aitw.aitw, aitw.steps_before),
    "android_episode": Format(gui.is_android_episode, gui.android_episode, several=True),
    "android_step": Format(gui.is_android_step, gui.android_step),
    "gui_r1": Format(gui.is_gui_r1, gui.gui_r1),
    "gui_g2": Format(gui.is_gui_g2, gui.gui_g2),
    "gui_g1": Format(gui.is_gui_g1, gui.gui_g1),
    "screenspot_pro": Format(gui.is_screenspot_pro, gui.screenspot_pro),
    "screenspot": Format(gui.is_screenspot, gui.screenspot, gui.corners_or_sides),
    "problem_box": Format(g.is_problem_box, g.problem_box),
    "refcoco": Format(g.is_refcoco, g.refcoco, several=True),
    "problem_text": Format(qa.is_problem_text, qa.problem_text),
    "box_list": Format(a.is_box_list, a.box_list, a.ask_for_all),
    "qa": Format(qa.is_question_answer, qa.question_answer),
    "table": Format(a.is_table, a.table, a.one_row_per_image),
    "labelled": Format(labelled.is_labelled, labelled.labelled, labelled.choose_from_all),
    "unlabelled": Format(gui.is_unlabelled, gui.unlabelled),
}
"""By name, the most particular first: a record is of the first that recognises it, and canonical if none does; `auto`
takes the one that most records of a file are of."""


_ASKING = [FORMATS[name] for name in _QUESTIONS]


def rows_in(path: Path, format: str = "auto", root: Path | None = None,
            columns: Mapping[str, str] | None = None,
            roots: tuple[Path, ...] = (), taken: set[str] | None = None,
            shapes: Counter[str] | None = None, cache: str = "", answer_type: str | None = None,
            types: TypeTable | None = None, boxes: str = "auto") -> list[tuple[str, Row | DataError]]:
    """(place, canonical row) of every row of a file; what is no row of a known format gives its DataError instead.

    Ids that other people's records repeat become unique, among those `taken` by files before too; canonical rows keep
    theirs.

    Media lie under `root` (default: the file's folder) or `roots`; sizes that a format leaves out are read from their
    headers. `columns` says which field of the records stands for a canonical one. `shapes` counts what each record is
    recognised as. Types of answers that no field says are settled over the file, see answer_types; `answer_type` comes
    before, and `types` counts them. `boxes` says what boxes and points are, as data.boxes.

    Raises DataError when the file as a whole cannot be read, ConfigError for an unknown format.
    """
    check_format(format)
    path = Path(path)
    entries = records(path, recognised, cache)
    if columns:
        check_columns([f.record for f in entries], columns, path)
        entries = [f._replace(record=renamed(f.record, columns)) for f in entries]
    name = format if format != "auto" else format_of([f.record for f in entries])
    placed: g.Placed = []
    for where, id, record in entries:
        if shapes is not None and not isinstance(record, DataError):
            shapes[shape_of(record, name if format != "auto" else recognised(record) or name)] += 1
        if name == "canonical" and path.suffix.lower() in (".csv", ".tsv") and not isinstance(record, DataError):
            record = {"id": id, **record} if record.keys() & _CONTENT else _unknown(record)
        record_rows = rows_as(record, name, Source(id, root or path.parent, roots, boxes), sure=format != "auto")
        placed += [(len(placed) + n, where, row) for n, row in enumerate(record_rows)]
    placed = sorted((FORMATS[name].together or list)(placed), key=lambda entry: entry[0])
    if name != "canonical":
        unique_ids(path, [row for *_, row in placed], set() if taken is None else taken)
    tendency = Tendency.of(row for *_, row in placed)
    return [(where, settled(row, tendency, answer_type, types)) for _, where, row in placed]


def format_of(records: Sequence[Mapping[str, Any] | DataError]) -> str:
    """Returns the format of a file: the one that most of its records are recognised as; canonical where most are of
    none.
    """
    names = Counter(recognised(record) for record in records if not isinstance(record, DataError))
    known = [(name, count) for name, count in names.most_common() if name]
    return known[0][0] if known and known[0][1] >= names[None] else "canonical"


def rows_as(record: Mapping[str, Any] | DataError, name: str, source: Source, sure: bool = False
            ) -> Sequence[Row | DataError]:
    """Returns the rows of a record of a file of format `name`; unless that is `sure`, a record of another format has
    none.
    """
    if sure or name == "canonical" or isinstance(record, DataError):
        return canonical(record, name, source)
    own, plain = recognised(record), {k: v for k, v in record.items() if k != "id"}  # others have ids too
    asks = (own is None or name in _QUESTIONS) and any(_recognises(FORMATS[name], r) for r in (record, plain))
    if own == name or asks:
        return canonical(record, name, source)
    if own is None and (empty := qa.without_answer(record)):
        return [empty]
    of = f"format {own}" if own else f"no known format ({short(', '.join(record))})"  # an empty cell is no field
    return [DataError(f"its fields are those of {of}, and most of the file's rows are of format {name}. Mend it, move "
                      f"it to another file, or have all rows read in one way: data.format={name} (--format {name})")]


def canonical(record: Mapping[str, Any] | DataError, format: str = "auto",
              source: Source | None = None) -> Sequence[Row | DataError]:
    """Returns the rows of a record in the named format, or in the first that recognises it; or why it has none.

    Raises ConfigError for an unknown format.
    """
    check_format(format)
    if isinstance(record, DataError):
        return [record]
    chosen_format = FORMATS[format if format != "auto" else recognised(record) or "canonical"]
    if chosen_format is FORMATS["canonical"] and "id" not in record and (empty := qa.without_answer(record)):
        return [empty]
    try:
        beside = {} if chosen_format is FORMATS["canonical"] else carried(record)
        if chosen_format in _ASKING:
            qa.refuse_two_readings(record)
        kept, source = {k: v for k, v in record.items() if k not in beside}, source or Source()
        rows = chosen_format.rows(kept, source)
        if rows and chosen_format is not FORMATS["canonical"]:
            left = lost(_name_of(chosen_format), kept, rows, lambda less: chosen_format.rows(less, source))
            rows = [{**row, "meta": {**row.get("meta", {}), **left}} for row in rows] if left else rows
        return [reread({**row, **beside}, source.boxes) for row in rows] or [DataError(
            f"it holds nothing to ask: one of its lists ({short([k for k, v in record.items() if v == []])}) is empty")]
    except DataError as error:
        return [error]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:  # shapes nobody thought of
        return [DataError(f"it looks like a record of format {_name_of(chosen_format)}, but is not shaped like one: "
                          f"{type(error).__name__}: {str(error)[:200]}")]


def _name_of(format: Format) -> str:
    return next(name for name, known in FORMATS.items() if known is format)


def recognised(record: Mapping[str, Any] | DataError) -> str | None:
    """Returns the name of the first format that recognises a record."""
    if isinstance(record, DataError):
        return None
    return next((name for name, format in FORMATS.items() if _recognises(format, record)), None)


def check_format(format: str) -> None:
    """Raises ConfigError unless this is `auto` or the name of a format."""
    if format != "auto" and format not in FORMATS:
        raise ConfigError(f"data.format={format!r} is not known.{did_you_mean(format, FORMATS)} Known: auto, "
                          f"{', '.join(FORMATS)}.")


def _unknown(record: Mapping[str, Any]) -> DataError:
    return DataError(f"its columns are those of no known format: {short(', '.join(record))}. Name them as docs/data.md "
                     "does, or say which stands for what, e.g. --columns image=photo --columns xmin=left_edge")


def _recognises(format: Format, record: Mapping[str, Any]) -> bool:
    try:
        return format.recognises(record)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return False


def check_columns(records: Sequence[Mapping[str, Any] | DataError], columns: Mapping[str, str], path: Path) -> None:
    """Raises DataError for a column that `columns` names and none of the records has."""
    there = list(dict.fromkeys(str(name) for record in records if not isinstance(record, DataError) for name in record))
    for name, column in sorted(columns.items()) if records else ():
        if column not in there:
            raise DataError(f"{path}: none of {len(records)} rows looked at has a column {column!r}, which "
                            f"data.columns (--columns) names for {name!r}.{did_you_mean(column, there)} There are: "
                            f"{short(', '.join(there))}")


def renamed(record: dict[str, Any] | DataError, columns: Mapping[str, str]) -> dict[str, Any] | DataError:
    """Returns the record with fields under the names that they stand for, without others that could stand for the
    same.
    """
    if isinstance(record, DataError) or not columns:
        return record
    given = {name: record[field] for name, field in columns.items() if field in record}
    rivals = {n for name in given for n in _RIVALS.get(name, (name,))} | set(columns.values())
    return {**{k: v for k, v in record.items() if k not in rivals}, **given}

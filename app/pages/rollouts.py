"""The Rollouts page: a filtered and sorted list of groups or answers, and one open group with media and tokens."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from .. import AppError, cards, details, film, filters, flagging, tokens, turns
from ..controls import integer, target
from ..details import GroupView, RolloutView
from ..html import Html, chip, el, empty, join, link, note, number, visible
from ..index import GroupKey, GroupRow, Page, Query, RolloutKey, RolloutRow
from ..media import url
from ..site import Site, same

SIZE = 50
"""Number of rows on one page of the list."""
_THUMBNAIL = 96  # pixels
_FRAME = 320
_MARKUP = re.compile(r"<\|\w{1,40}\|>(?:(?:system|user|assistant)\b)?")  # markup that the chat template adds


def build(site: Site) -> None:
    """Adds the page to the app."""
    filter_form = gr.HTML(elem_id="v-filters", apply_default_css=False, js_on_load="vlrl.form(watch)")
    with gr.Column(elem_id="v-split"):
        listed = gr.HTML(elem_id="v-list", apply_default_css=False, js_on_load="vlrl.list(element, watch)")
        opened = gr.HTML(elem_id="v-group", apply_default_css=False, js_on_load="vlrl.found(watch)")
    mark = gr.HTML("", elem_classes="v-hidden", js_on_load="vlrl.marks(props)")
    said = gr.HTML(apply_default_css=False)
    marked = gr.HTML("", elem_classes="v-hidden", js_on_load="vlrl.marked(props, watch)")
    digests = site.digests(3)

    def show(where: dict[str, str], *before: str) -> tuple[Any, ...]:
        return same(before, (*form_and_list(site, where), group(site, where)))

    def tick(where: dict[str, str], *before: str) -> tuple[Any, ...]:
        return same(before, form_and_list(site, where))

    site.on_location(show, [filter_form, listed, opened, *digests], digests)
    site.on_tick(tick, [filter_form, listed, *digests[:2]], digests[:2])
    site.on(mark.change, lambda text: flagging.save_note(site, text), [mark], [said, marked], queue=False,
            show_progress="hidden", trigger_mode="multiple")


def form_and_list(site: Site, where: Mapping[str, str]) -> tuple[Html, Html]:
    """The filter form and the list for these URL parameters."""
    if not site.library.runs():
        return Html(""), empty(f"There is no run in {site.library.root} yet.", join(
            ["Make one in a minute, on a CPU: ", el("code", "vlrl train configs/quickstart.yaml")]))
    try:
        query = filters.site_query(site, where)
        rows = _list(site, query, where)
        return filters.form(site.index.facets(query.runs, budget_s=0.0)), rows  # one page reads files once
    except AppError as error:  # an invalid filter: the form stays, so that it can be corrected
        return filters.form(site.index.facets()), note(str(error), kind="bad")


def _list(site: Site, query: Query, where: Mapping[str, str]) -> Html:
    number_ = max(0, (integer(where, "at") or 1) - 1)
    rollouts = where.get("view") == "rollouts"
    page: Page[Any] = (site.index.rollouts if rollouts else site.index.groups)(query, number_, SIZE)
    row = _rollout_row if rollouts else _group_row
    open_key = _open_key(where)
    rewards = [r for one in page.rows for r in getattr(one, "rewards", ()) if r is not None]
    notes = flagging.noted(site, by=where.get("by", ""))
    by_key = {key: [note_] for key, note_ in notes.items()} if rollouts else flagging.of_groups(notes)
    scale = min([0.0, *rewards]), max([1e-9, *rewards])
    rows = [row(one, where, open_key, scale, flagging.chips(by_key.get(one.key, ()))) for one in page.rows]
    notes = [note(words, kind="warn") for words in page.notes[:5]]
    notes += [note(f"{len(page.notes) - 5} more files were skipped.", kind="warn")] if len(page.notes) > 5 else []
    reading = el("p", f"Still reading {page.pending} files …", class_="v-dim") if page.pending else ""
    count = _count(page, rollouts, where)
    if not rows:
        return el("div", count, reading, "" if page.pending else _none(where), *notes, class_="v")
    return el("div", count, reading, el("div", *rows, class_="v-rows"), _pager(page, where), *notes,
              class_=f"v v-{'rollouts' if rollouts else 'groups'}")


def _none(where: Mapping[str, str]) -> Html:
    if filters.set_filters(where):
        location = {k: where[k] for k in ("run", "kind", "view") if k in where}
        return empty("Nothing passes these filters.", link({"page": "rollouts", **location}, "Take the filters away"))
    return empty("There is no rollout yet.", "A run writes them after each step, unless store.rollouts is off.")


def _count(page: Page[Any], rollouts: bool, where: Mapping[str, str]) -> Html:
    words = f"{page.total:,} {'rollout' if rollouts else 'group'}{'' if page.total == 1 else 's'}"
    active = filters.set_filters(where)
    location = {k: where[k] for k in ("run", "kind", "view", "order", "sort", "dir") if k in where}
    clear = link({"page": "rollouts", **location}, "take all away") if active > 1 else ""
    keys = el("span", el("kbd", "?"), " keys", class_="v-dim v-hint")
    export = link({**filters.list_query(where), "page": "notes", "pick": "filter"}, "export", title="these as a file")
    return join([el("p", el("b", words), *filters.chips(where), clear, export if page.total else "", keys,
                    class_="v-count"), filters.presets(where)])


def _pager(page: Page[Any], where: Mapping[str, str]) -> Html:
    if page.pages < 2:
        return Html("")
    location, here = {**filters.list_query(where), "page": "rollouts"}, page.page + 1
    steps = (("« first", 1), ("‹ before", here - 1), ("next ›", here + 1), ("last »", page.pages))
    links = [link({**location, "at": to}, words, data_key="n" if to == here + 1 else "p" if to == here - 1 else None)
             if 1 <= to <= page.pages and to != here else el("span", words, class_="v-dim") for words, to in steps]
    links.insert(2, el("span", f"{here:,} of {page.pages:,}"))
    return el("nav", *links, class_="v-pager", aria_label="Pages of the list")


def _group_row(row: GroupRow, where: Mapping[str, str], open_key: GroupKey | None, scale: tuple[float, float],
               flags: Sequence[Html]) -> Html:
    spread = f"{number(row.mean)} ± {number(row.std)}" if row.n > 1 else number(row.mean)
    chips = [chip("zero variance", "warn") if row.zero_variance and row.n > 1 else "",
             chip(f"{row.truncated} cut off", "bad") if row.truncated else "",
             chip(f"{row.errors} errors", "bad") if row.errors else "",
             chip(f"{row.hits} of {row.n} fit") if row.hits < row.n else "", *flags]
    return _row(filters.open_query(where, row.key), _same(row.key, open_key), _picture(row.key.run, row.media),
                row.sample_id, _place(row.key, where), spread, _bars(row.rewards, *scale), chips,
                _MARKUP.sub(" ", row.prompt))


def _rollout_row(row: RolloutRow, where: Mapping[str, str], open_key: GroupKey | None, _: tuple[float, float],
                 flags: Sequence[Html]) -> Html:
    part = where.get("part")
    chips = [chip(f"{part} {number(row.parts.get(part))}") if part else "", chip(f"{row.length:,} tokens"),
             chip(f"{row.turns} turns") if row.turns is not None else "",
             chip(f"tool errors: {row.tool_errors}", "bad") if row.tool_errors else "",
             chip("cut off", "bad") if row.truncated else "",
             chip("error", "bad", (row.error or "")[:300]) if row.error else "", *flags]
    advantage = el("span", "A ", number(row.advantage, sign=True), class_="v-dim", title="advantage")
    advantage = advantage if row.key.source == "train" else Html("")  # evaluations have no advantages
    is_open = _same(row.group, open_key) and where.get("rollout") == str(row.key.index)
    return _row(filters.open_query(where, row.group, row.key.index), is_open, _picture(row.key.run, row.media),
                f"{row.sample_id} #{row.key.index}", _place(row.group, where), number(row.reward), advantage, chips,
                row.text)


def _row(where: Mapping[str, Any], is_open: bool, picture: Html, name: str, at: str, value: str, bars: Html,
         chips: Sequence[Any], text: str) -> Html:
    preview = visible(" ".join(text.split()))[:160]
    middle = el("span", el("span", el("b", name), el("span", at, class_="v-dim"), class_="v-line1"),
                el("span", preview, class_="v-line2 v-dim"), el("span", *chips, class_="v-chips"), class_="v-middle")
    return link(where, picture, middle, el("span", el("b", value), bars, class_="v-value"),
                class_=f"v-row{' v-open' if is_open else ''}", aria_current="true" if is_open else None)


def _place(key: GroupKey, where: Mapping[str, str]) -> str:
    run = "" if where.get("run") and where.get("in") != "all" else f"{key.run}, "
    return f"{run}{f'{key.split} after' if key.source == 'eval' else 'step'} {key.step}"


def _picture(run: str, name: str | None) -> Html:
    source = url(run, name, _THUMBNAIL) if name else None
    return el("span", el("img", src=source, alt="", loading="lazy") if source else "", class_="v-thumb")


def _bars(rewards: Sequence[float | None], low: float, high: float) -> Html:
    if sum(r is not None for r in rewards) < 2:
        return Html("")
    bars = [el("i", style=f"height:{2 + 16 * (0 if r is None else (r - low) / (high - low or 1)):.0f}px",
               class_=None if r is not None else "v-off") for r in rewards[:32]]
    return el("span", *bars, class_="v-bars", aria_hidden="true")


class MediaUrls:
    """Implements draw.Addresses with URLs on this server."""

    def picture(self, run: str, name: str, size: int | None) -> str | None:
        return url(run, name, size)

    def video(self, run: str, name: str) -> str | None:
        return url(run, name)

    def frames(self, run: str, name: str, seconds: Sequence[float]) -> Sequence[str | None]:
        return [f"{url(run, name, _FRAME)}&at={t:.4f}" for t in seconds]


def group(site: Site, where: Mapping[str, str]) -> Html:
    """The HTML of the group that the URL parameters open; empty if they name no group."""
    key = _open_key(where)
    if key is None:
        return Html("")
    try:
        stored = details.group(site.library, key.run, key.source, key.step, key.group, key.split)
        view = cards.ordered(details.with_marks(site.library, stored, site.trust_tasks), where.get("first", ""))
    except AppError as error:
        back = link({**filters.list_query(where), "page": "rollouts"}, "‹ to the list", data_key="u")
        return el("div", el("nav", back, class_="v-bar"), note(str(error), kind="bad"), class_="v")
    chosen = integer(where, "rollout")
    present = [r.index for r in view.rollouts]
    chosen = chosen if chosen in present else None
    neighbours = _neighbours(site, view.key, where)
    flags = flagging.on_cards(site, view, chosen, _after(present, chosen, view.key, neighbours[1], where),
                              where.get("by", ""))
    one = cards.reading_view(view, chosen, filters.list_query(where), flags) if where.get("read") == "yes" else None
    shown = cards.group(view, MediaUrls(), chosen, filters.list_query(where), notes=flags, answers=one)
    return el("div", _bar(site, view, chosen, where, neighbours), shown,
              _turns(site, view, chosen), _tokens(site, view, chosen, where), class_="v")


def _after(present: Sequence[int], chosen: int | None, key: GroupKey, after: GroupKey | None,
           where: Mapping[str, str]) -> dict[str, Any] | None:
    at = present.index(chosen) if chosen in present else 0
    tokens = {k: v for k, v in where.items() if k == "tokens"}
    if at + 1 < len(present):
        return {**filters.open_query(where, key, present[at + 1]), **tokens}
    return {**filters.open_query(where, after), **tokens} if after else None


def _same(key: GroupKey, opened: GroupKey | None) -> bool:
    return opened is not None and key == opened._replace(split=opened.split or key.split)


def _open_key(where: Mapping[str, str]) -> GroupKey | None:
    if not where.get("group") or not where.get("run"):
        return None
    split = where.get("split", "")
    source = where.get("source") or ("eval" if split not in ("", "train") else "train")
    return GroupKey(where["run"], source, split, integer(where, "step") or 0, where["group"])


def _bar(site: Site, view: GroupView, chosen: int | None, where: Mapping[str, str],
         neighbours: tuple[GroupKey | None, GroupKey | None]) -> Html:
    before, after = neighbours
    present = [r.index for r in view.rollouts]
    at = present.index(chosen) if chosen in present else -1
    left = present[at - 1] if at > 0 else None
    right = present[at + 1] if at + 1 < len(present) else None
    token_view = {k: v for k, v in where.items() if k == "tokens"}

    def to(words: str, key: GroupKey | None, rollout: int | None, letter: str, title: str, replace: bool) -> Html:
        if key is None:
            return el("span", words, class_="v-dim")
        return link({**filters.open_query(where, key, rollout), **token_view}, words, data_key=letter,
                    data_replace=replace, title=f"{title} ({letter})")

    shown = RolloutKey(*view.key, chosen if chosen is not None else present[0]) if present else None
    to_list = {**filters.list_query(where), "page": "rollouts"}
    return el("nav", link(to_list, "‹ list", data_key="u", title="the list (u)"),
              to("↑ group", before, None, "k", "the group before", False),
              to("↓ group", after, None, "j", "the next group", False),
              to("← answer", view.key if left is not None else None, left, "h", "the answer before", True),
              to("→ answer", view.key if right is not None else None, right, "l", "the next answer", True),
              *cards.view_links(where),
              link(target(shown, "notes"), "note", title="flag or comment on it") if shown else "",
              class_="v-bar", aria_label="Beside this group")


def _neighbours(site: Site, key: GroupKey, where: Mapping[str, str]) -> tuple[GroupKey | None, GroupKey | None]:
    try:
        query = filters.site_query(site, where)
        return site.index.neighbours(query, key)
    except AppError:
        return None, None


def _turns(site: Site, view: GroupView, chosen: int | None) -> Html:
    rollout = next((r for r in view.rollouts if chosen is None or r.index == chosen), None)
    if rollout is None or not turns.is_episode(rollout):
        return Html("")
    shown = turns.read(view, rollout, details.box_convention(site.library, view))
    keys = el("span", " ", el("kbd", "t"), " and then the arrow keys move through them", class_="v-dim")
    saved = [el("a", f"as {kind.upper()}", href=film.url(view, rollout, kind), download=True,
                title="what it showed, turn by turn") for kind in film.KINDS]
    head = el("h3", f"Turns of #{rollout.index}", keys, " ",
              join(saved, " ") if len(film.pictures(view, rollout)) > 1 else "")
    return el("section", head, turns.strip(view, rollout, shown, MediaUrls()), id="v-turns")


def _tokenizer(site: Site, run: str) -> Path | None:
    if file := site.library.file(run, "tokenizer.json"):
        return file
    saved = sorted((path.name for path in site.library.folder(run).checkpoints.glob("step-*")), reverse=True)
    return next(filter(None, (site.library.file(run, f"checkpoints/{name}/tokenizer.json") for name in saved)), None)


def _tokens(site: Site, view: GroupView, chosen: int | None, where: Mapping[str, str]) -> Html:
    answers: Sequence[RolloutView] = [r for r in view.rollouts if chosen is None or r.index == chosen]
    if not answers:
        return Html("")
    by = where.get("tokens", "")
    by = by if by in tokens.VIEWS else next(iter(tokens.VIEWS))
    buttons = [link({**where, "tokens": name}, words, class_="v-pick", data_replace=True,
                    aria_current="true" if name == by else None) for name, (words, _) in tokens.VIEWS.items()]
    texts = tokens.Texts.read(_tokenizer(site, view.key.run))
    return el("section", el("h3", f"Tokens of #{answers[0].index}"), el("div", *buttons, class_="v-picks"),
              tokens.answer(answers[0], by, texts), class_="v-about-tokens", id="v-tokens")

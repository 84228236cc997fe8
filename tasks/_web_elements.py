"""The elements of a page of the task `web` that can be acted on, with their names and states.

    page.ask(WATCH)                         # once, before any action: records what is pressed from then on
    state = page_state(page.ask(SEEN))      # role, name, position and state of each element; may raise PageFailed

An element is identified by its role and its name, as a person would do in an instruction. A check of a sub-goal is
therefore as readable as its instruction, and stays valid if other elements of the page move."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ._web_page import PageFailed

WATCH = """
() => {
  const words = text => String(text || '').replace(/\\s+/g, ' ').trim().slice(0, 200);
  const clicky = 'button tab link checkbox radio menuitem option switch treeitem'.split(' ');
  const typed = e => e.tagName === 'INPUT' ? (e.getAttribute('type') || 'text').toLowerCase() : '';
  const pointed = e => getComputedStyle(e).cursor === 'pointer';
  const listened = e => {  // what jQuery bound; the page's own listeners cannot be asked for
    try { const own = jQuery._data(e, 'events') || {}; return !!(own.click || own.mousedown || own.mouseup); }
    catch (error) { return false; }
  };
  const whole = '[role=button], [role=tab], [role=link], [role=menuitem], [role=option], [role=treeitem], button, a';
  const role = e => {
    if (e.parentElement && e.parentElement.closest(whole)) return '';  // part of it
    const given = e.getAttribute('role'), tag = e.tagName, type = typed(e);
    if (given === 'dialog' || clicky.includes(given)) return given;
    if (tag === 'BUTTON' || ['button', 'submit', 'reset', 'image'].includes(type)) return 'button';
    if (type === 'checkbox' || type === 'radio') return type;
    if (['text', 'password', 'email', 'search', 'tel', 'url', 'number'].includes(type) || tag === 'TEXTAREA')
      return 'field';
    if (tag === 'A' || e.classList.contains('alink')) return 'link';
    if (tag === 'INPUT' || tag === 'SELECT' || tag === 'BODY' || tag === 'HTML') return '';
    const own = e.onclick || e.hasAttribute('onclick') || listened(e) || (pointed(e) && !pointed(e.parentElement));
    return own && !e.querySelector(whole + ', input, textarea, select') ? 'text' : '';
  };
  const before = e => {  // a label that is not tied to its field
    let near = e.previousSibling;
    while (near && !words(near.textContent)) near = near.previousSibling;
    const plain = near && (near.nodeType === 3 || ['LABEL', 'SPAN', 'B', 'STRONG', 'DIV', 'P'].includes(near.tagName));
    return plain && !(near.querySelector && near.querySelector(whole)) ? words(near.textContent) : '';
  };
  const name = (e, kind) => {
    if (kind === 'dialog') {
      const title = document.getElementById(e.getAttribute('aria-labelledby') || '');
      return words(title ? title.textContent : e.getAttribute('aria-label'));
    }
    if (kind === 'checkbox' || kind === 'radio' || kind === 'field')
      return words(e.labels && e.labels.length ? e.labels[0].textContent : '') || words(e.getAttribute('aria-label')) ||
             words(e.getAttribute('placeholder')) || words(e.getAttribute('title')) || before(e);
    return words(e.tagName === 'INPUT' ? e.value : e.innerText || e.textContent) ||
           words(e.getAttribute('aria-label')) || words(e.getAttribute('title')) || words(e.getAttribute('alt'));
  };
  const box = e => {
    const rects = e.getClientRects();
    return rects.length ? rects[0] : e.getBoundingClientRect();
  };
  const shown = e => {
    const at = box(e), style = getComputedStyle(e);
    return at.width >= 1 && at.height >= 1 && style.visibility === 'visible' && style.opacity > 0.1;
  };
  const hit = (e, x, y) => {
    const top = document.elementFromPoint(x, y);
    return !!top && (e.contains(top) || [...(e.labels || [])].some(label => label.contains(top)));
  };
  const flag = (e, name) => e.getAttribute(name) === 'true' ? true : e.getAttribute(name) === 'false' ? false : null;
  const pressed = [];
  addEventListener('click', event => {
    if (!event.isTrusted) return;
    for (let e = event.target; e && e.getAttribute; e = e.parentElement) {
      const kind = role(e);
      if (kind && kind !== 'dialog') { pressed.push([kind, name(e, kind)]); break; }
    }
  }, true);
  const query = document.querySelector('#query');
  if (query) {  // its box stays, so that the page looks as its own task does
    query.style.setProperty('color', 'transparent', 'important');
    for (const e of query.querySelectorAll('*')) e.style.setProperty('visibility', 'hidden', 'important');
  }
  window.__seen = () => {
    const found = [];
    for (const e of document.body.querySelectorAll('*')) {
      if (e.closest('#query, #sync-task-cover, #reward-display, #click-canvas')) continue;
      const kind = role(e);
      if (!kind || !shown(e)) continue;
      const at = box(e), x = (at.left + at.right) / 2, y = (at.top + at.bottom) / 2;
      const open = flag(e, 'aria-expanded');
      found.push({role: kind, name: name(e, kind), at: [x, y], hit: kind !== 'dialog' && !e.disabled && hit(e, x, y),
        checked: kind === 'checkbox' || kind === 'radio' ? e.checked : null,
        value: kind === 'field' ? String(e.value) : null, fixed: kind === 'field' && e.readOnly,
        open: open === null ? flag(e, 'aria-selected') : open, focused: e === document.activeElement});
    }
    return {elements: found.slice(0, 2000), pressed: pressed.slice(-2000)};
  };
}
"""
"""A script that records presses and collects the elements. It also hides the page's own instruction without moving
anything, because sub-goals replace that instruction."""
SEEN = "() => window.__seen ? window.__seen() : null"


@dataclass(frozen=True)
class Element:
    """A visible element of a page, with a name."""

    role: str
    name: str
    at: tuple[float, float]
    """The centre of the element in CSS pixels; for a link over several lines, the centre of its first line."""
    hit: bool
    """Whether a click at the centre reaches the element."""
    checked: bool | None = None
    value: str | None = None
    """The text in a field; None for other elements."""
    fixed: bool = False
    """Whether a field is read-only."""
    open: bool | None = None
    focused: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.role, self.name


@dataclass(frozen=True)
class PageState:
    """The elements of a page and their states."""

    elements: tuple[Element, ...]
    pressed: frozenset[tuple[str, str]]
    """(role, name) of each element that was clicked so far."""

    def single(self) -> list[Element]:
        """The elements whose role and name occur only once on the page."""
        counts = Counter(one.key for one in self.elements)
        return [one for one in self.elements if counts[one.key] == 1]

    def of(self, role: str, name: str) -> list[Element]:
        return [one for one in self.elements if one.key == (role, name)]


def page_state(raw: Any) -> PageState:
    """Parses the result of the script SEEN. Raises PageFailed if the page has replaced that script."""
    try:
        elements = tuple(_element(one) for one in raw["elements"])
        return PageState(elements, frozenset((_text(role), _text(name)) for role, name in raw["pressed"]))
    except (KeyError, TypeError, ValueError) as error:
        raise PageFailed(f"the elements of the page cannot be read ({type(error).__name__})") from None


def _element(raw: Any) -> Element:
    x, y = (float(v) for v in raw["at"])
    return Element(_text(raw["role"]), _text(raw["name"]), (round(x, 1), round(y, 1)), raw["hit"] is True,
                   _flag(raw["checked"]), None if raw["value"] is None else str(raw["value"])[:1000],
                   raw["fixed"] is True, _flag(raw["open"]), raw["focused"] is True)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value[:200]


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


_MARKS = frozenset('"<>{}|\\')  # characters that would end the quotation, or be read as a mark of the prompt


def nameable(name: str, most: int = 60) -> bool:
    """Whether a name on a page may be quoted in an instruction. It must have at most `most` characters, be displayed as
    written (no control or bidirectional characters), and contain nothing with a special meaning in prompts."""
    return (0 < len(name) <= most and name.isprintable() and any(c.isalnum() for c in name)
            and not _MARKS & {*name} and not name.startswith("http"))


def askable(page: PageState) -> list[Element]:
    """The elements that an instruction can identify uniquely: by their name, or because there is only one field."""
    return [one for one in page.single() if nameable(one.name) or one.key == ("field", "")]

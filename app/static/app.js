// The browser's side of the inspector: location, links, forms and keys.
"use strict";

window.vlrl = (() => {
  const PAGES = document.currentScript.dataset.pages.split(" ");
  const CONTEXT = ["run", "set", "from", "to", "by"];  // kept from page to page: vlrl.app.controls
  const POLL_MS = 3000, TYPING_MS = 350, PATIENCE_MS = 10_000;
  const pages = {};  // name -> {props, trigger} of the page's location component
  let turn = 0, answered = 0;  // number of the location requested last, and of the one shown
  const waiting = [];  // keys pressed while an answer is awaited
  let late = 0, lost = false;  // the timer that ends the wait; whether it has expired

  // --- location ---

  function pageOf(query) {
    const page = query.get("page") || (query.has("step") || query.has("group") ? "rollouts" : "runs");
    return PAGES.includes(page) ? page : "runs";
  }

  const here = () => new URLSearchParams(location.search);
  const root = () => document.getElementById(`v-page-${pageOf(here())}`);

  // `?run=..&step=..` without a group is a filter on that step
  function settled(query) {
    if (pageOf(query) !== "rollouts" || query.has("group")) return query;
    query.set("page", "rollouts");
    for (const [name, filters] of [["step", ["from", "to"]], ["source", ["kind"]], ["split", ["set"]]]) {
      if (query.has(name)) for (const filter of filters) query.set(filter, query.get(name));
      query.delete(name);
    }
    return query;
  }

  function show() {
    const query = here(), page = pageOf(query);
    document.documentElement.dataset.page = page;
    document.documentElement.toggleAttribute("data-group", query.has("group"));
    document.documentElement.toggleAttribute("data-reading", query.has("group") && query.get("read") === "yes");
    document.title = `${query.get("run") || page} · vlrl`;
    const title = document.getElementById("v-title");
    if (title) title.textContent = page;
    for (const tab of document.querySelectorAll(".v-tab")) {
      if (!tab.classList.contains(`v-tab-${page}`)) {
        tab.removeAttribute("aria-current");
        continue;
      }
      tab.setAttribute("aria-current", "page");
      const row = tab.closest("ul");  // on a phone the tabs scroll
      row.scrollLeft = tab.offsetLeft - (row.clientWidth - tab.offsetWidth) / 2;
    }
    document.querySelectorAll(".v-tab").forEach(carry);
    fill(query);
    if (!pages[page]) return;  // the page requests its content once it is mounted
    turn += 1;
    pages[page].props.value = `?${query}#${turn}`;  // the number makes every visit a change
    wait();
  }

  // A request or its answer may be lost. Then the page reports it, and the next key acts on what is shown. An answer
  // that is only late still gets the keys that waited for it. Gradio sends no further request before an answer, except
  // after a reload.
  function wait() {
    clearTimeout(late);
    lost = false;
    late = setTimeout(() => unanswered(lost = true), PATIENCE_MS);
  }

  function giveUp() {
    if (!lost) return;
    lost = false;
    waiting.length = 0;
    answered = turn;
  }

  function unanswered(said) {
    let box = document.getElementById("v-late");
    if (!said) return box && box.remove();
    if (box) return;
    box = document.createElement("div");
    const again = document.createElement("button");
    Object.assign(box, {id: "v-late", className: "v v-note bad"});
    box.setAttribute("role", "alert");
    box.append(`The inspector has not answered for ${PATIENCE_MS / 1000} s: what is in view may be that of another ` +
               "address. ", again);
    Object.assign(again, {type: "button", textContent: "Load again", onclick: () => location.reload()});
    document.body.append(box);
  }

  function visit(search, replace) {
    const before = here(), query = settled(new URLSearchParams(search));
    const url = `${location.pathname}?${query}`;
    if (replace || url === location.pathname + location.search) history.replaceState(null, "", url);
    else history.pushState(null, "", url);
    if (query.get("group") !== before.get("group") || pageOf(query) !== pageOf(before)) scrollTo(0, 0);
    show();
  }

  function page(name, props, trigger) {
    pages[name] = {props, trigger};
    if (name === pageOf(here())) setTimeout(show, 0);
  }

  // Returns updates that make n components visible, when a page is first visited.
  function first(name, n) {
    const seen = pages[name].visited;
    pages[name].visited = true;
    return seen ? [] : Array(n).fill({__type__: "update", visible: true});
  }

  // The page now shows the location in the address: keys pressed meanwhile are meant for it.
  function atAnswer(props, watch) {
    watch("value", () => setTimeout(() => {
      answered = parseInt(props.value);
      if (answered === turn) clearTimeout(late), unanswered(lost = false);
      while (waiting.length && answered === turn) follow(waiting.shift());
    }, 0));
  }

  addEventListener("popstate", () => {
    waiting.length = 0;
    show();
  });
  setInterval(() => {
    const shown = pages[pageOf(here())];
    if (shown && shown.props.value && !document.hidden) shown.trigger("tick");
  }, POLL_MS);

  // --- links and forms ---

  // A link to another page keeps the selected run, split and steps, unless it names a run itself.
  function carry(link) {
    const to = new URLSearchParams(link.dataset.to = link.dataset.to || link.search || "?"), from = here();
    if (pageOf(to) === pageOf(from) && !link.matches(".v-tab") || ["run", "runs", "a"].some(name => to.has(name))) return;
    for (const name of CONTEXT) if (from.has(name) && !(name === "run" && from.get("in") === "all")) to.set(name, from.get(name));
    const search = `?${to}`;
    if (link.search !== search) link.search = search;
  }
  for (const kind of ["pointerover", "focusin"]) addEventListener(kind, event => {
    const link = event.target.closest && event.target.closest("a.go");
    if (link) carry(link);
  });

  addEventListener("click", event => {
    const link = event.target.closest && event.target.closest("a.go");
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    if (event.isTrusted) waiting.length = 0;
    carry(link);
    visit(link.search, "replace" in link.dataset);
  });

  const fields = form => [...form.elements].filter(field => field.name);
  const valueOf = field => field.type === "checkbox" ? (field.checked ? field.value : "") : field.value.trim();

  function ask(form) {
    const query = "keep" in form.dataset ? new URLSearchParams(form.dataset.keep) : here();
    for (const name of (form.dataset.drop || "").split(" ")) query.delete(name);
    for (const field of fields(form)) {
      const value = valueOf(field);
      if (value && value !== field.dataset.default) query.set(field.name, value);
      else query.delete(field.name);
    }
    visit(`?${query}`, true);
  }

  // Copies the address into the fields, except into a field that is being edited.
  function fill(query) {
    const all = query.get("in") === "all";
    for (const form of document.querySelectorAll(`#v-context form.go, #${root() ? root().id : "none"} form.go[data-drop]`)) {
      for (const field of fields(form)) {
        if (field === document.activeElement && field.type !== "select-one") continue;
        const said = all && field.name === "run" ? "" : query.get(field.name) || field.name === "kind" && query.get("source") ||
          field.dataset.default || "";
        const value = field.type === "number" && isNaN(said) ? "" : said;
        if (field.type === "select-one") offer(field, value);
        if (field.type === "checkbox") field.checked = value === field.value;
        else if (field.value !== value) field.value = value;
      }
    }
  }

  // A value that is not an option of its field, such as a deleted run, is shown as it is, as in controls.pick.
  function offer(field, value) {
    for (const option of field.querySelectorAll("[data-absent]")) if (option.value !== value) option.remove();
    if ([...field.options].some(option => option.value === value)) return;
    field.append(new Option(`${value} (not there)`, value));
    field.lastElementChild.dataset.absent = "";
  }

  function form(watch) {
    watch("value", () => setTimeout(() => fill(here()), 0));
    fill(here());
  }

  function list(element, watch) {
    const reveal = () => {
      const row = element.querySelector(".v-open"), box = document.getElementById("v-list");
      if (!row || box.scrollHeight <= box.clientHeight) return;
      const at = row.getBoundingClientRect(), frame = box.getBoundingClientRect();
      if (at.top < frame.top || at.bottom > frame.bottom) box.scrollTop += at.top - frame.top - frame.height / 3;
    };
    watch("value", () => setTimeout(reveal, 0));
    found(watch);
  }

  // An option selected by the server replaces one that the user selected before.
  new MutationObserver(changes => changes.forEach(({target}) => {
    if (target.matches("option") && !target.closest("form[data-drop]")) target.selected = target.hasAttribute("selected");
  })).observe(document.documentElement, {subtree: true, attributes: true, attributeFilter: ["selected"]});

  let typing = 0;
  addEventListener("input", event => {
    const form = event.target.form;
    if (!form || !form.classList.contains("go")) return;
    clearTimeout(typing);
    const waits = event.target.matches("input:not([type=checkbox])");
    typing = setTimeout(() => ask(form), waits ? TYPING_MS : 0);
  });
  addEventListener("submit", event => {
    if (!event.target.classList.contains("go")) return;
    event.preventDefault();
    clearTimeout(typing);
    ask(event.target);
  });

  // --- flags and comments ---

  const marking = {};  // kind -> props of the component that receives the notes to save
  let after = "", before = "";
  const marks = (props, kind = "") => { marking[kind] = props; };

  // While the note is saved, keys wait; then `next` opens, or the same location with the note.
  function mark(form, asked, next) {
    giveUp();
    const to = marking[form.dataset.kind || ""];
    if (!to || answered !== turn) return;
    turn += 1;
    [after, before] = [next, location.search];
    to.value = JSON.stringify({...asked, by: here().get("by"), key: form.dataset.mark, n: turn});
    wait();
  }

  function marked(props, watch) {
    watch("value", () => setTimeout(() => {
      if (parseInt(props.value) !== turn) return;
      if (after && location.search === before && !props.value.includes("failed")) visit(after);
      else show();
    }, 0));
  }

  addEventListener("click", event => {
    const button = event.target.closest && event.target.closest(".v-flags button");
    if (!button) return;
    const form = button.form, on = button.getAttribute("aria-pressed") === "true";
    if (button.dataset.archived) return mark(form, {archived: on ? "" : "yes"}, "");
    mark(form, {flag: on ? "" : button.dataset.flag}, on ? "" : form.dataset.next || "");
  });
  addEventListener("submit", event => {
    if (!event.target.matches(".v-flags")) return;
    event.preventDefault();
    const field = event.target.elements.comment || event.target.elements.tags;
    field.blur();
    if (field.value.trim() !== field.dataset.note) mark(event.target, {[field.name]: field.value}, "");
  });

  // --- search matches ---

  // Highlights matches of the search text in the list and in the open group, without changing the document.
  function lightUp() {
    if (!window.Highlight) return;
    CSS.highlights.delete("v-found");
    const text = here().get("text");
    let pattern = null;
    try { pattern = text && new RegExp(text, "gi"); } catch { return; }  // not every RE2 pattern is valid in a browser
    if (!pattern) return;
    const ranges = [], nodes = [...document.querySelectorAll("#v-list .v-line2, #v-group .v-text")].flatMap(leaves);
    for (const node of nodes) {
      for (const hit of node.data.matchAll(pattern)) {
        if (!hit[0] || ranges.length >= 5000) break;
        const range = new Range();
        range.setStart(node, hit.index);
        range.setEnd(node, hit.index + hit[0].length);
        ranges.push(range);
      }
    }
    CSS.highlights.set("v-found", new Highlight(...ranges));
  }

  function leaves(box) {
    const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) found.push(walker.currentNode);
    return found;
  }

  function found(watch) {
    watch("value", () => setTimeout(lightUp, 0));
  }

  // --- keys ---

  const KEYS = {ArrowLeft: "h", ArrowRight: "l", ArrowDown: "j", ArrowUp: "k", Escape: "u"};
  const writes = node => node.closest && node.closest("input, textarea, select, [contenteditable], [role=listbox]");
  const seen = node => node.offsetParent !== null;

  function move(rows, by) {
    const at = rows.indexOf(document.activeElement);
    const row = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by))];
    row.focus({preventScroll: true});
    row.scrollIntoView({block: "nearest"});
  }

  const WAYS = "hjklnpgbsro", MOST_WAITING = 50;

  function follow(key) {
    const link = [...root().querySelectorAll(`:is(a.go, .v-flags button)[data-key~="${CSS.escape(key)}"]`)].find(seen);
    if (link) link.click();
    return Boolean(link);
  }

  function pressed(key) {
    const inGroup = here().has("group"), rows = [...root().querySelectorAll("a.v-row")].filter(seen);
    if ((key === "j" || key === "k") && rows.length && !inGroup) return move(rows, key === "j" ? 1 : -1), true;
    giveUp();
    if (key === "u") waiting.length = 0;  // leaves the group, whatever else was pressed
    if (answered === turn || !WAYS.includes(key)) return follow(key);
    if (waiting.length < MOST_WAITING) waiting.push(key);  // the links shown belong to the previous location
    return true;
  }

  function along(event) {  // tokens, and turns of an episode
    const one = event.target.closest && event.target.closest(".v-tokens .v-tok, .v-turns .v-turn");
    const by = {ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling"}[event.key];
    if (!one || !by) return false;
    const next = one[by];
    if (next && next.hasAttribute("tabindex")) one.tabIndex = -1, next.tabIndex = 0, next.focus();
    return true;
  }

  function beside(event) {  // Gradio gives each radio button a name of its own: a browser's arrows would not choose
    const set = event.target.matches("input[type=radio]") && event.target.closest("fieldset, .block");
    const by = {ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1}[event.key];
    if (!set || !by) return false;
    const all = [...set.querySelectorAll("input[type=radio]")];
    const next = all[(all.indexOf(event.target) + by + all.length) % all.length];
    next.focus();
    next.click();
    return true;
  }

  function toAnswer() {
    const final = root().querySelector(".v-chosen .v-final") || root().querySelector(".v-card .v-final");
    if (final) final.scrollIntoView({block: "center", inline: "nearest"});
    return Boolean(final);
  }

  function toTurns() {
    const turn = [...root().querySelectorAll(".v-turns .v-turn[tabindex='0']")].find(seen);
    if (turn) turn.focus(), turn.scrollIntoView({block: "nearest", inline: "nearest"});
    return Boolean(turn);
  }

  addEventListener("click", event => {
    if (event.target.closest && event.target.closest(".v-jump")) toAnswer();
  });
  addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || !root()) return;
    const help = document.getElementById("v-keys");
    if (help && help.open) return;  // Escape closes it
    if (beside(event)) return event.preventDefault();
    if (writes(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (along(event)) return event.preventDefault();
    const inGroup = here().has("group");
    if (inGroup && (event.key === "ArrowUp" || event.key === "ArrowDown")) return;  // they scroll
    if (event.key === "?" && help) help.showModal();
    else if (event.key === "t" && toTurns()) event.preventDefault();
    else if (event.key === "a" && toAnswer()) event.preventDefault();
    else if (event.key === "y" && root().querySelector(".v-copy")) root().querySelector(".v-copy").click();
    else if (event.key === "c" && root().querySelector(".v-flags input")) root().querySelector(".v-flags input").focus();
    else if (event.key === "/" && root().querySelector("input[type=search]")) root().querySelector("input[type=search]").focus();
    else if (!pressed(KEYS[event.key] || event.key)) return;
    event.preventDefault();
  });

  history.replaceState(null, "", `${location.pathname}${location.search && "?" + settled(here())}`);
  document.documentElement.dataset.page = pageOf(here());
  return {page, visit, first, form, list, found, marks, marked, answered: atAnswer};
})();

// A bundle of one run: does in the browser, on the data files of the bundle, what the app's server does for its Rollouts
// page. Links, forms and keys are handled by app.js; queries have the meaning defined in vlrl.app.queries.
"use strict";

(() => {
  const SIZE = 50;  // rows on a page of the list
  const LIMITS = ["turns", "tokens", "media"];  // finish reasons of episodes ended by a limit
  const OPENED = ["source", "split", "step", "group", "rollout", "in"];
  const pieces = new Map();
  let run = null, texts = null;

  // --- data files, each a script that passes its JSON to vlrlBundle ---

  function piece(name) {
    if (!pieces.has(name)) {
      const waits = {};
      waits.done = new Promise((resolve, reject) => Object.assign(waits, {resolve, reject}));
      pieces.set(name, waits);
    }
    return pieces.get(name);
  }

  window.vlrlBundle = (name, value) => piece(name).resolve(value);

  function load(name) {
    const waits = piece(name);
    if (!waits.asked) {
      waits.asked = true;
      const script = document.createElement("script");
      script.src = `data/${name}.js`;
      script.onerror = () => {
        pieces.delete(name);
        waits.reject(new Error(`data/${name}.js cannot be read`));
      };
      document.head.append(script);
    }
    return waits.done;
  }

  async function loadTexts() {
    if (texts) return;
    const names = Array.from({length: run.texts}, (_, i) => `t${String(i).padStart(3, "0")}`);
    const all = (await Promise.all(names.map(load))).flat();
    run.groups.forEach((group, i) => { group.texts = all[i]; });
    texts = true;
  }

  // --- queries ---

  const number = text => text === undefined || text === null || text === "" ? null : Number(text);
  const yes = (said, value) => said !== "yes" && said !== "no" || (said === "yes") === value;

  function within(value, [low, high]) {
    if (low === null && high === null) return true;
    return value !== null && value !== undefined && (low === null || value >= low) && (high === null || value <= high);
  }

  function queryOf(where) {
    const ranges = {};
    for (const [name, names] of Object.entries(run.ranges)) {
      ranges[name] = names.map(one => number(where[one]));
      if (ranges[name].some(Number.isNaN)) throw new Error(`${names.join(", ")} in the address must be numbers`);
    }
    let pattern = null;
    try {
      pattern = where.text ? new RegExp(where.text, "iu") : null;
    } catch (error) {
      throw new Error(`the search text is not a valid regular expression: ${error.message}`);
    }
    const kind = where.kind || where.source || "train";
    return {where, ranges, pattern, kind, split: where.set || ("group" in where ? "" : where.split)};
  }

  function ofGroup(group, {where, ranges, kind, split}) {
    return (!["train", "eval"].includes(kind) || group.source === kind) && (!split || group.split === split) &&
      (!where.cat || group.category === where.cat) && (!where.sample || group.sample === where.sample) &&
      within(group.step, ranges.steps) && within(group.difficulty, ranges.difficulty) && yes(where.alike, group.alike);
  }

  function ofAnswer(group, answer, place, {where, ranges, pattern}) {
    const ended = !where.end || (where.end === "limit" ? LIMITS.includes(answer.end) : answer.end === where.end);
    return within(answer.reward, ranges.reward) && within(answer.advantage, ranges.advantage) &&
      within(answer.len, ranges.length) && within(answer.turns, ranges.turns) &&
      (!where.part || within(answer.parts[where.part], ranges.part_range)) && ended &&
      (!["yes", "no"].includes(where.tool) || !nulls(answer.tools) && yes(where.tool, answer.tools > 0)) &&
      yes(where.cut, answer.cut) && yes(where.err, answer.err) && yes(where.odd, Boolean(answer.odd)) &&
      (!["yes", "no"].includes(where.form) || (where.form === "no") === answer.bad) &&
      (!pattern || found(group, place, pattern));
  }

  function found(group, place, pattern) {
    const [prompt, answers] = group.texts;
    return pattern.test(prompt) || answers[place].some(text => text && pattern.test(text));
  }

  const compare = (a, b) => a < b ? -1 : a > b ? 1 : 0;
  const nulls = value => value === null || value === undefined;

  function byValue(of, down) {  // null comes last in both directions
    return (a, b) => {
      const [x, y] = [of(a), of(b)];
      if (nulls(x) || nulls(y)) return nulls(x) - nulls(y);
      return down ? compare(y, x) : compare(x, y);
    };
  }

  function sorted(rows, ...ways) {
    return rows.sort((a, b) => ways.reduce((so, way) => so || way(a, b), 0));
  }

  const NAMED = [byValue(g => g.source), byValue(g => g.split), byValue(g => g.group)];
  const NEWEST = byValue(g => g.step, true);

  function groupsOf(query) {
    const rows = [];
    for (const group of run.groups) {
      if (!ofGroup(group, query)) continue;
      const hits = group.answers.filter((answer, i) => ofAnswer(group, answer, i, query)).length;
      if (hits) rows.push({...group, hits});
    }
    const {order, dir} = query.where;
    const first = {best: [byValue(g => g.mean, true), NEWEST], worst: [byValue(g => g.mean), NEWEST],
                   mixed: [byValue(g => g.std && Number(g.std.toFixed(12)), true), NEWEST]}[order] ||
      [byValue(g => g.step, dir !== "up")];
    return sorted(rows, ...first, ...NAMED);
  }

  const SORTS = {reward: a => a.reward, advantage: a => a.advantage, length: a => a.len, index: a => a.i};
  const OF_GROUP = {difficulty: g => g.difficulty, sample_id: g => g.sample, category: g => g.category};

  function answersOf(query) {
    const rows = run.groups.filter(group => ofGroup(group, query)).flatMap(group => group.answers
      .filter((answer, i) => ofAnswer(group, answer, i, query)).map(answer => ({group, answer})));
    const {sort, dir, part} = query.where, down = dir !== "up";
    if (sort === "part" && !part)
      throw new Error("the list cannot be sorted by a reward part, because none is selected: select the part in the filters");
    const of = sort === "part" ? row => row.answer.parts[part] : SORTS[sort] ? row => SORTS[sort](row.answer)
      : row => (OF_GROUP[sort] || (g => g.step))(row.group);
    const inGroup = way => (a, b) => way(a.group, b.group);
    return sorted(rows, byValue(of, down), ...[NEWEST, ...NAMED].map(inGroup), byValue(row => row.answer.i));
  }

  // --- HTML: text of a model becomes text nodes, never tags ---

  function el(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.flat().filter(child => child !== "" && child !== null && child !== undefined));
    return made;
  }

  function link(where, attributes, ...children) {
    const query = new URLSearchParams(Object.entries(where).filter(([, value]) => value !== "" && !nulls(value)));
    return el("a", {href: `?${query}`, ...attributes, class: `go ${attributes.class || ""}`.trim()}, ...children);
  }

  const chip = (words, kind = "") => el("span", {class: `v-chip ${kind}`.trim()}, words);
  const dim = (...words) => el("span", {class: "v-dim"}, ...words);
  const note = (words, kind) => el("p", {class: `v-note ${kind}`, role: kind === "bad" ? "alert" : null}, words);

  function shown(value, sign = false) {
    if (nulls(value) || !Number.isFinite(value)) return "–";
    const words = Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
    return (sign && value > 0 ? "+" : "") + words.replace("-", "−");
  }

  // --- the list ---

  function keeps(where) {
    return Object.fromEntries(Object.entries(where).filter(([name]) => !OPENED.includes(name)));
  }

  function opened(where, group, rollout) {
    return {...keeps(where), page: "rollouts", run: run.run, source: group.source, split: group.split, step: group.step,
            group: group.group, rollout};
  }

  const isOpen = (where, group) => where.group === group.group && Number(where.step || 0) === group.step &&
    (!where.source || where.source === group.source) && (!where.split || where.split === group.split);

  function row(where, to, open, group, name, value, under, chips, text) {
    const thumb = group.thumb ? el("img", {src: group.thumb, alt: "", loading: "lazy"}) : "";
    const at = `${group.source === "eval" ? `${group.split} after` : "step"} ${group.step}`;
    const middle = el("span", {class: "v-middle"}, el("span", {class: "v-line1"}, el("b", {}, name), dim(at)),
                      el("span", {class: "v-line2 v-dim"}, text), el("span", {class: "v-chips"}, chips));
    return link(to, {class: `v-row${open ? " v-open" : ""}`, "aria-current": open ? "true" : null},
                el("span", {class: "v-thumb"}, thumb), middle, el("span", {class: "v-value"}, el("b", {}, value), under));
  }

  function groupRow(where, group, [low, high]) {
    const members = group.answers.filter(answer => !answer.aside), n = members.length;
    const rewards = members.map(answer => answer.reward);
    const cut = group.answers.filter(answer => answer.cut).length, errors = group.answers.filter(a => a.err).length;
    const spread = n > 1 ? `${shown(group.mean)} ± ${shown(group.alike ? 0 : group.std)}` : shown(group.mean);
    const bars = rewards.slice(0, 32).map(reward => {
      const height = 2 + 16 * (nulls(reward) ? 0 : (reward - low) / (high - low || 1));
      const bar = el("i", nulls(reward) ? {class: "v-off"} : {});
      bar.style.height = `${height.toFixed(0)}px`;
      return bar;
    });
    const chips = [group.alike && n > 1 ? chip("zero variance", "warn") : "", cut ? chip(`${cut} cut off`, "bad") : "",
                   errors ? chip(`${errors} errors`, "bad") : "", group.hits < n ? chip(`${group.hits} of ${n} fit`) : ""];
    return row(where, opened(where, group), isOpen(where, group), group, group.sample, spread,
               rewards.filter(r => !nulls(r)).length > 1 ? el("span", {class: "v-bars", "aria-hidden": "true"}, bars) : "",
               chips, group.prompt.replace(/<\|\w{1,40}\|>(?:(?:system|user|assistant)\b)?/g, " "));
  }

  function answerRow(where, {group, answer}) {
    const part = where.part;
    const chips = [part ? chip(`${part} ${shown(answer.parts[part])}`) : "", chip(`${answer.len} tokens`),
                   nulls(answer.turns) ? "" : chip(`${answer.turns} turns`),
                   answer.tools ? chip(`tool errors: ${answer.tools}`, "bad") : "",
                   answer.cut ? chip("cut off", "bad") : "", answer.err ? chip("error", "bad") : ""];
    const open = isOpen(where, group) && where.rollout === String(answer.i);
    return row(where, opened(where, group, answer.i), open, group, `${group.sample} #${answer.i}`, shown(answer.reward),
               group.source === "train" ? dim("A ", shown(answer.advantage, true)) : "", chips, answer.text);
  }

  // A link for each active filter, labelled as in the form, which removes the filter.
  function chipsOf(where) {
    const away = (words, ...names) => link(Object.fromEntries(Object.entries({...keeps(where), page: "rollouts"})
      .filter(([name]) => !names.includes(name) && name !== "at")),
      {class: "v-chip v-away", title: "take this filter away", "data-replace": true}, words.slice(0, 80), " ×");
    const form = document.querySelector("#v-filters form"), made = [];
    for (const name of ["set", "part", "cut", "end", "tool", "err", "cat", "alike", "form", "odd", "sample", "text"]) {
      const field = form.elements[name], option = field && field.selectedOptions && [...field.options].find(o => o.value === where[name]);
      const label = field ? field.getAttribute("aria-label").split(",")[0] : "Split";
      if (where[name]) made.push(away(`${label}: ${option ? option.textContent : where[name]}`, name));
    }
    for (const [name, [low, high]] of Object.entries(run.ranges)) {
      if (!where[low] && !where[high]) continue;
      const span = where[low] && where[high] ? `${where[low]} to ${where[high]}` : where[low] ? `≥ ${where[low]}` : `≤ ${where[high]}`;
      made.push(away(`${name === "part_range" ? where.part || "its value" : name} ${span}`, low, high));
    }
    return made;
  }

  function presets(where) {
    const context = Object.fromEntries(["run", "set", "from", "to", "kind", "sort", "dir"]
      .filter(name => where[name]).map(name => [name, where[name]]));
    const links = Object.entries(run.presets).map(([words, wanted]) => {
      const on = Object.entries(wanted).every(([name, value]) => where[name] === value);
      return link({page: "rollouts", ...context, ...(on ? {} : wanted)},
                  {class: "v-pick", "aria-current": on ? "true" : null}, words);
    });
    return el("nav", {class: "v-picks v-presets", "aria-label": "Often asked for"}, links);
  }

  function pager(where, here, last) {
    if (last < 2) return "";
    const base = {...keeps(where), page: "rollouts"};
    const steps = [["« first", 1], ["‹ before", here - 1], ["next ›", here + 1], ["last »", last]].map(([words, to]) =>
      to < 1 || to > last || to === here ? dim(words) : link({...base, at: to},
        {"data-key": to === here + 1 ? "n" : to === here - 1 ? "p" : null}, words));
    steps.splice(2, 0, el("span", {}, `${here} of ${last}`));
    return el("nav", {class: "v-pager", "aria-label": "Pages of the list"}, steps);
  }

  function listOf(query) {
    const {where} = query, alone = where.view === "rollouts", rows = alone ? answersOf(query) : groupsOf(query);
    const last = Math.max(1, Math.ceil(rows.length / SIZE)), at = Math.min(last, Math.max(1, parseInt(where.at) || 1));
    const page = rows.slice((at - 1) * SIZE, at * SIZE);
    const what = `${rows.length.toLocaleString("en")} ${alone ? "rollout" : "group"}${rows.length === 1 ? "" : "s"}`;
    const whole = run.groups.length < run.total ? dim(`${run.groups.length.toLocaleString("en")} of the run's ${
      run.total.toLocaleString("en")} groups are in this bundle`) : "";
    const keys = el("span", {class: "v-dim v-hint"}, el("kbd", {}, "?"), " keys");
    const count = el("p", {class: "v-count"}, el("b", {}, what), chipsOf(where), whole, keys);
    if (!page.length) return el("div", {class: "v"}, count, presets(where), nothing());
    const rewards = page.flatMap(one => (one.answers || []).map(a => a.reward)).filter(r => !nulls(r));
    const scale = [rewards.reduce((a, b) => Math.min(a, b), 0), rewards.reduce((a, b) => Math.max(a, b), 1e-9)];
    return el("div", {class: `v v-${alone ? "rollouts" : "groups"}`}, count, presets(where), el("div", {class: "v-rows"},
      page.map(one => alone ? answerRow(where, one) : groupRow(where, one, scale))), pager(where, at, last));
  }

  function nothing() {
    const [words, way] = run.groups.length ? ["Nothing passes these filters.", link({page: "rollouts"}, {}, "Take the filters away")]
      : ["There is no rollout in this bundle.", dim("The run had written none.")];
    return el("div", {class: "v v-empty"}, el("p", {}, words), way);
  }

  // --- the group ---

  function bar(query, group, chosen) {
    const {where} = query, rows = groupsOf(query), at = rows.findIndex(one => one.n === group.n);
    const present = group.answers.map(answer => answer.i), place = present.indexOf(chosen);
    const to = (words, one, rollout, key, title, replace) => one === undefined ? dim(words) :
      link(opened(where, one, rollout), {"data-key": key, "data-replace": replace, title: `${title} (${key})`}, words);
    return el("nav", {class: "v-bar", "aria-label": "Beside this group"},
      link({...keeps(where), page: "rollouts"}, {"data-key": "u", title: "the list (u)"}, "‹ list"),
      to("↑ group", at > 0 ? rows[at - 1] : undefined, null, "k", "the group before"),
      to("↓ group", at >= 0 ? rows[at + 1] : undefined, null, "j", "the next group"),
      to("← answer", place > 0 ? group : undefined, present[place - 1], "h", "the answer before", true),
      to("→ answer", place + 1 < present.length ? group : undefined, present[place + 1], "l", "the next answer", true));
  }

  // The HTML of a group is that of the app without a chosen answer; the chosen answer is highlighted here.
  function choose(box, chosen, turns) {
    const card = nulls(chosen) ? null : box.querySelector(`#v-answer-${chosen}`);
    if (card) {
      card.classList.add("v-chosen");
      card.setAttribute("aria-current", "true");
      for (const mark of box.querySelectorAll(".v-marks g[data-v-mark]")) {
        mark.classList.toggle("v-faint", !["t", String(chosen)].includes(mark.dataset.vMark));
      }
    }
    const strip = turns[chosen] || (nulls(chosen) ? Object.values(turns)[0] : "");
    if (strip) box.insertAdjacentHTML("beforeend", strip);
  }

  function atHome(box, where) {
    for (const way of box.querySelectorAll("a.go")) {
      const to = Object.fromEntries(new URLSearchParams(way.search));
      if (to.page !== "rollouts") way.replaceWith(el("b", {}, way.textContent));  // a page that is not in the bundle
      else way.search = `?${new URLSearchParams({...keeps(where), ...to})}`;
    }
  }

  async function groupOf(query) {
    const {where} = query;
    if (!("group" in where)) return null;
    const group = run.groups.find(one => isOpen(where, one));
    const back = link({...keeps(where), page: "rollouts"}, {"data-key": "u"}, "‹ to the list");
    if (!group) return el("div", {class: "v"}, el("nav", {class: "v-bar"}, back), note("This group is not in the bundle.", "bad"));
    const {html, turns} = await load(group.n), box = el("div", {});
    box.innerHTML = html;  // made and escaped by vlrl.app.cards; the page's policy lets no script of it run
    const chosen = group.answers.some(answer => String(answer.i) === where.rollout) ? Number(where.rollout) : null;
    choose(box, chosen, turns);
    atHome(box, where);
    return el("div", {class: "v"}, bar(query, group, chosen), box);
  }

  // --- the page of rollouts ---

  const calls = [], answered = {value: ""};
  let told = () => {};

  async function show(search) {
    const [query, turn] = search.split("#"), where = Object.fromEntries(new URLSearchParams(query));
    for (const name of Object.keys(where)) if (!where[name]) delete where[name];
    const [list, box] = [document.getElementById("v-list"), document.getElementById("v-group")];
    let made = [];
    try {
      run = run || await piece("index").done;
      if (where.text) await loadTexts();
      const asked = queryOf(where);
      made = [listOf(asked), await groupOf(asked)];
    } catch (error) {
      made = [el("div", {class: "v"}, note(error.message, "bad")), null];
    }
    if (latest !== search) return;  // another location was requested meanwhile
    list.replaceChildren(made[0]);
    box.replaceChildren(...(made[1] ? [made[1]] : []));
    const card = box.querySelector(".v-chosen");
    if (card) card.scrollIntoView({block: "nearest", inline: "nearest"});
    answered.value = turn;
    told();
    for (const call of calls) call();
  }

  let latest = "";
  const place = {get value() { return latest; }, set value(search) { show(latest = search); }};
  const overview = {get value() { return ""; }, set value(search) {
    answered.value = search.split("#")[1];
    told();
  }};
  const watch = (_, call) => calls.push(call);

  addEventListener("DOMContentLoaded", () => {
    const {vlrl} = window, index = document.querySelector('script[src="data/index.js"]');
    if (index) index.onerror = () => piece("index").reject(new Error("data/index.js cannot be read"));
    vlrl.answered(answered, (_, call) => { told = call; });
    vlrl.list(document.getElementById("v-list"), watch);
    vlrl.found(watch);
    vlrl.form(watch);
    vlrl.page("rollouts", place, () => {});
    vlrl.page("runs", overview, () => {});
  });
})();

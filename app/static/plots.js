// Plots as SVG: lines, dots with intervals, areas on each other, and cells; site.chart_value defines the data format.
// A drag zooms, a drag with Shift moves, a double click shows everything. Arrow keys go from point to point, + - 0 zoom.
"use strict";

vlrl.charts = (() => {
  const NS = "http://www.w3.org/2000/svg", NEAR_PX = 24, MOVED_PX = 5, CHAR_PX = 6.3, MOST_ROWS = 1000;
  const SHAPES = {
    circle: (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
    diamond: (x, y, r) => `M${x} ${y - 1.3 * r}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}z`,
    square: (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`};
  const DASHES = {dot: "2 3", dash: "6 4"};
  let plots = 0;

  function svg(name, attributes, ...inner) {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
    made.append(...inner);
    return made;
  }

  function html(name, properties, ...inner) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...inner);
    return made;
  }

  // --- numbers ---

  const round = value => Math.round(value * 10) / 10;
  const SUPER = {"-": "⁻", ...Object.fromEntries([..."⁰¹²³⁴⁵⁶⁷⁸⁹"].entries())};

  function power(value, digits) {
    const [mantissa, exponent] = value.toExponential(Math.max(0, digits)).split("e");
    return `${Number(mantissa)}×10${[...String(Number(exponent))].map(c => SUPER[c]).join("")}`.replace("-", "−");
  }

  // A number of the axis whose ticks are `step` apart.
  function tickText(value, step) {
    const size = Math.abs(value), digits = -Math.floor(Math.log10(step) + 1e-9);
    if (size < step / 1e6) return "0";
    if (size >= 1e6 || step < 1e-4) return power(value, Math.floor(Math.log10(size) + 1e-9) + digits);
    return value.toLocaleString("en", {maximumFractionDigits: Math.max(0, digits)}).replace("-", "−");
  }

  function numberText(value) {  // four digits
    const size = Math.abs(value);
    if (typeof value !== "number" || Number.isInteger(value) && size < 1e9) return String(value);
    return size && (size >= 1e6 || size < 1e-3) ? power(value, 3) : String(Number(value.toPrecision(4)));
  }

  function ticks({low, high}, count, whole) {
    let step = 10 ** Math.floor(Math.log10((high - low) / count));
    step *= [1, 2, 5, 10].find(f => f * step >= (high - low) / count * 0.999) || 10;
    if (whole) step = Math.max(1, step);
    const first = Math.ceil(low / step - 1e-9), found = [];
    for (let i = first; i * step <= high + 1e-9 * step && found.length < 99; i++) found.push(i * step);
    return {step, found};
  }

  const scale = (low, high, from, to) => ({low, high, at: v => from + (to - from) * (v - low) / (high - low),
                                           of: px => low + (high - low) * (px - from) / (to - from)});

  // --- traces ---

  // Points of each trace: places {x, y}, bounds {low, high} where it has them, and `go`, where a click leads.
  function read(figure) {
    const layout = figure.layout || {}, cells = figure.data.some(trace => trace.z), sums = new Map();
    const names = cells || (layout.xaxis || {}).type === "category"
      ? [...new Set(figure.data.flatMap(trace => trace.x))] : null;
    const series = figure.data.map((trace, number) => {
      const points = [], {customdata = [], meta = {}, error_y: bars} = trace;
      const add = point => points.push({...point, trace});
      if (trace.z) trace.z.forEach((row, j) => row.forEach((z, i) => add({x: i, y: j, z, go: customdata[j][i],
                                                                          words: trace.text[j][i]})));
      else trace.x.forEach((x, i) => {
        const value = trace.y[i], known = value !== null && value !== undefined;
        const place = names ? names.indexOf(x) : Number(x), base = trace.stackgroup ? sums.get(place) || 0 : 0;
        const y = known ? base + value : NaN, go = customdata[i] || (meta.go || "").replaceAll("{x}", encodeURIComponent(x));
        if (known && trace.stackgroup) sums.set(place, y);
        add({x: place, y, base, value, go, low: bars && y - bars.arrayminus[i], high: bars && y + bars.array[i]});
      });
      return {trace, points, number};
    });
    return {figure, layout, series, names, cells};
  }

  function bounds(values, margin, axis = {}) {
    const known = values.filter(Number.isFinite);
    if (axis.range) return axis.range;
    let low = Math.min(...known), high = Math.max(...known);
    if (!known.length) return [0, 1];
    if (axis.rangemode === "tozero") [low, high] = [Math.min(0, low), Math.max(0, high)];
    const apart = (high - low) * margin || (high > low ? 0 : Math.abs(high) * 0.1 || 1);
    return [axis.rangemode === "tozero" && low === 0 ? 0 : low - apart, high + apart];
  }

  // Where values lie on `width` x `height` pixels.
  function frame(drawn, width, height, zoom, shown) {
    const {layout, names, cells} = drawn, axes = [layout.yaxis || {}, layout.yaxis2], rows = cells && drawn.figure.data[0].y;
    const points = on => shown.filter(s => (s.trace.yaxis === "y2") === on).flatMap(s => s.points);
    const heights = on => points(on).flatMap(p => [p.y, ...(p.low === undefined ? [] : [p.low, p.high]), ...(
      p.trace.stackgroup ? [0] : [])]);
    const fullX = names ? [-0.5, names.length - 0.5] : bounds(shown.flatMap(s => s.points.map(p => p.x)), 0.02);
    const fullY = rows ? [-0.5, rows.length - 0.5] : bounds(heights(false), 0.06, axes[0]);
    const [x, y] = [zoom ? zoom.x : fullX, zoom ? zoom.y : fullY];
    const part = v => (v - fullY[0]) / (fullY[1] - fullY[0]), full2 = axes[1] ? bounds(heights(true), 0.06, axes[1]) : null;
    const y2 = full2 && y.map(v => full2[0] + part(v) * (full2[1] - full2[0]));  // it follows the zoom
    const marks = range => {
      const {step, found} = ticks({low: range[0], high: range[1]}, height < 250 ? 4 : 5);
      return found.map(v => [v, tickText(v, step)]);
    };
    const left = rows ? rows.map((text, i) => [i, text]).filter(([i]) => i >= y[0] && i <= y[1]) : marks(y);
    const right = y2 ? marks(y2) : [];
    const wide = labels => CHAR_PX * Math.max(0, ...labels.map(([, text]) => text.length));
    const titled = axis => axis && axis.title && axis.title.text ? 17 : 0;
    const area = {left: wide(left) + 8 + titled(axes[0]), right: width - (y2 ? wide(right) + 8 + titled(axes[1]) : cells ? 52 : 10),
                  top: 8, bottom: height - 34};
    const xs = scale(...x, area.left, area.right);
    const longest = names ? Math.max(...names.map(name => name.length)) : 8;
    const count = Math.max(2, Math.floor((area.right - area.left) / (CHAR_PX * longest + 20)));
    const {step, found} = ticks(xs, count, names || shown.every(s => s.points.every(p => Number.isInteger(p.x))));
    const below = found.map(v => [v, names ? names[v] || "" : tickText(v, step)]);
    return {area, full: {x: fullX, y: fullY}, x: xs, y: scale(...y, area.bottom, area.top),
            y2: y2 && scale(...y2, area.bottom, area.top), left, right, below};
  }

  const heightOf = (space, trace) => trace.yaxis === "y2" ? space.y2 : space.y;
  const title = axis => (axis && axis.title && axis.title.text) || "";
  const paint = trace => (trace.line || {}).color || (trace.marker || {}).color || "var(--v-accent)";

  function axes({layout, cells}, width, {area, x, y, y2, left, right, below}) {
    const middle = (area.top + area.bottom) / 2, made = [];
    const words = (text, at, more) => svg("text", {x: round(at[0]), y: round(at[1]), ...more}, text);
    const turned = (text, at) => words(text, [0, 0], {"text-anchor": "middle", transform: `translate(${at} ${middle}) rotate(-90)`});
    for (const [value, text] of left) {
      const at = round(y.at(value));
      if (!cells) made.push(svg("line", {x1: area.left, x2: area.right, y1: at, y2: at, class: "v-grid"}));
      made.push(words(text, [area.left - 5, at + 4], {"text-anchor": "end", class: "v-ytick"}));
    }
    for (const [value, text] of right) made.push(words(text, [area.right + 5, y2.at(value) + 4], {}));
    for (const [value, text] of below) {
      made.push(words(text, [x.at(value), area.bottom + 15], {"text-anchor": "middle", class: "v-xtick"}));
    }
    made.push(words(title(layout.xaxis), [(area.left + area.right) / 2, area.bottom + 30], {"text-anchor": "middle"}),
              turned(title(layout.yaxis), 11));
    if (y2) made.push(turned(title(layout.yaxis2), width - 6));
    if (cells) {
      const bar = [0, 0.25, 0.5, 0.75, 1].map((share, i) => [
        svg("rect", {x: area.right + 8, y: middle + 36 - 18 * i, width: 10, height: 18, class: "v-cell", "fill-opacity": share}),
        i % 2 ? "" : words(`${100 * share}%`, [area.right + 21, middle + 49 - 18 * i], {})]);
      made.push(...bar.flat().filter(Boolean));
    }
    return made;
  }

  function lines({trace, points}, space) {
    const {x} = space, y = heightOf(space, trace), pen = trace.line || {}, made = [];
    const pixels = points.map(p => [round(x.at(p.x)), round(y.at(p.y)), p]);
    if ((trace.mode || "").includes("lines")) {
      let path = "", open = false;
      for (const [px, py] of pixels) {
        path += Number.isNaN(py) ? "" : !open ? `M${px} ${py}` : pen.shape === "hv" ? `H${px}V${py}` : `L${px} ${py}`;
        open = !Number.isNaN(py);
      }
      if (trace.stackgroup) {
        const known = pixels.filter(([, py]) => !Number.isNaN(py)), back = [...known].reverse();
        const area = known.length ? `M${[...known.map(([px, py]) => `${px} ${py}`),
          ...back.map(([px, , p]) => `${px} ${round(y.at(p.base))}`)].join("L")}z` : "";
        made.push(svg("path", {d: area, fill: paint(trace), "fill-opacity": 0.5}));
      }
      made.push(svg("path", {d: path, fill: "none", stroke: paint(trace), "stroke-width": pen.width || 1.5,
                             "stroke-dasharray": DASHES[pen.dash], "stroke-linejoin": "round"}));
    }
    const bars = pixels.filter(([, , p]) => p.high > p.low)
      .map(([px, , p]) => `M${px} ${round(y.at(p.low))}V${round(y.at(p.high))}`).join("");
    if (bars) made.push(svg("path", {d: bars, stroke: paint(trace), "stroke-width": 1.2}));
    const dot = trace.marker || {}, alone = pixels.filter(([, py]) => !Number.isNaN(py)).length === 1;
    if ((trace.mode || "").includes("markers") || alone) {
      const shape = SHAPES[dot.symbol] || SHAPES.circle;
      const path = pixels.map(([px, py]) => Number.isNaN(py) ? "" : shape(px, py, (dot.size || 4) / 2)).join("");
      made.push(svg("path", {d: path, fill: dot.color || paint(trace), "fill-opacity": dot.opacity}));
    }
    return svg("g", {opacity: trace.opacity}, ...made);
  }

  const cell = ({x, y}) => p => svg("rect", {
    x: round(x.at(p.x - 0.5)) + 0.5, y: round(y.at(p.y + 0.5)) + 0.5, width: Math.max(0.5, x.at(1) - x.at(0) - 1),
    height: Math.max(0.5, y.at(0) - y.at(1) - 1), class: "v-cell", "fill-opacity": round(100 * p.z) / 100});

  // The tooltip of a point.
  function said({layout, names}, point) {
    const {trace} = point, place = `${title(layout.xaxis)} ${names ? names[point.x] : numberText(point.x)}`;
    if (trace.z) return [`${Math.round(100 * point.z)} %: ${point.words} group${point.words === 1 ? "" : "s"}`, `${title(layout.yaxis)}: ${trace.y[point.y]}`, place];
    const interval = point.high > point.low ? ` [${numberText(point.low)}, ${numberText(point.high)}]` : "";
    const kind = trace.tip ? `${trace.tip} ` : "";
    return [`${kind}${numberText(point.value)}${interval}`, place, trace.name];
  }

  // --- one plot ---

  class Plot {
    constructor(figure) {
      this.hidden = new Set();
      this.clip = `v-clip-${plots++}`;
      this.title = html("figcaption");
      this.keys = html("div", {className: "v-legend"});
      this.box = html("div", {className: "v-plot", tabIndex: 0});
      this.box.plot = this;
      this.tip = html("div", {className: "v-tip", hidden: true});
      this.tip.setAttribute("role", "status");
      this.box.setAttribute("role", "application");
      this.numbers = html("details", {className: "v-numbers"}, html("summary", {textContent: "numbers"}));
      this.numbers.addEventListener("toggle", () => this.tell());
      this.card = html("figure", {className: "v-chart"}, this.title, this.keys, this.box, this.numbers);
      this.card.dataset.id = figure.id;
      this.card.plot = this;
      this.listen();
      seen.observe(this.box);
      sized.observe(this.box);
      this.take(figure);
    }

    take(figure) {
      if (JSON.stringify(figure) === JSON.stringify(this.figure)) return;
      this.figure = figure;
      this.title.textContent = figure.title;
      this.box.setAttribute("aria-label", `${figure.title}. Arrow keys go from point to point, Enter opens it, plus, minus ` +
                                          "and 0 zoom; the numbers stand below.");
      this.box.style.height = `${(figure.layout || {}).height || 220}px`;
      this.drawn = read(figure);
      this.legend();
      this.at = null;
      this.tell();
      if (this.visible) this.draw();
    }

    shown() {
      return this.drawn.series.filter(({trace}) => !this.hidden.has(trace.name));
    }

    legend() {
      const named = (this.figure.layout || {}).showlegend ? this.figure.data.filter(t => t.showlegend !== false) : [];
      this.keys.replaceChildren(...named.map(trace => {
        const swatch = html("i", {className: "v-swatch"});
        swatch.style.background = paint(trace);
        const key = html("button", {type: "button", title: "show or hide it; with Shift it alone"}, swatch, trace.name);
        key.setAttribute("aria-pressed", String(!this.hidden.has(trace.name)));
        key.addEventListener("click", event => this.toggle(trace.name, event.shiftKey));
        return key;
      }));
    }

    toggle(name, alone) {
      const others = this.figure.data.map(t => t.name).filter(n => n !== name);
      const isAlone = others.every(n => this.hidden.has(n)) && !this.hidden.has(name);
      if (alone) this.hidden = new Set(isAlone ? [] : others);
      else if (!this.hidden.delete(name)) this.hidden.add(name);
      [...this.keys.children].forEach(key => key.setAttribute("aria-pressed", String(!this.hidden.has(key.textContent))));
      this.draw();
    }

    draw() {
      const width = this.box.clientWidth, height = this.box.clientHeight;
      if (!width) return;
      this.point(null);
      const shown = this.shown(), space = this.space = frame(this.drawn, width, height, this.zoom, shown), {area} = space;
      const field = {x: area.left, y: area.top, width: Math.max(0, area.right - area.left), height: area.bottom - area.top};
      const inside = this.drawn.cells ? shown.flatMap(s => s.points.map(cell(space))) : shown.map(s => lines(s, space));
      this.over = svg("g", {});
      this.box.replaceChildren(svg("svg", {width, height, class: "v-drawn", "aria-hidden": "true"},
        svg("clipPath", {id: this.clip}, svg("rect", {...field, x: field.x - 4, width: field.width + 8})),
        svg("rect", {...field, class: "v-field"}), ...axes(this.drawn, width, space),
        svg("g", {"clip-path": `url(#${this.clip})`}, ...inside), this.over), this.tip);
    }

    pixel(point) {
      return [this.space.x.at(point.x), heightOf(this.space, point.trace).at(point.y)];
    }

    nearest(px, py) {
      let best = null, least = this.drawn.cells ? Infinity : NEAR_PX ** 2;
      for (const {trace, points} of this.shown()) {
        if (trace.hoverinfo === "skip") continue;
        for (const point of points) {
          const [x, y] = this.pixel(point), apart = (x - px) ** 2 + (y - py) ** 2;
          if (apart < least) [best, least] = [point, apart];
        }
      }
      return best;
    }

    point(point) {
      this.tip.hidden = !point;
      this.now = point;
      if (this.over) this.over.replaceChildren();
      this.box.classList.toggle("v-leads", Boolean(point && point.go));
      if (!point) return;
      const [x, y] = this.pixel(point), [first, ...rest] = said(this.drawn, point);
      this.over.append(svg("circle", {cx: x, cy: y, r: 5, fill: "none", stroke: "currentColor", "stroke-width": 1.5}));
      this.tip.replaceChildren(html("b", {textContent: first}), ...rest.map(text => html("span", {textContent: text})));
      const room = this.box.clientWidth - this.tip.offsetWidth - 4;
      this.tip.style.left = `${Math.max(2, Math.min(room, x + 10))}px`;
      this.tip.style.top = `${y > this.box.clientHeight / 2 ? Math.max(0, y - this.tip.offsetHeight - 10) : y + 10}px`;
    }

    look(x, y) {  // {x, y}: bounds, or none for all
      this.zoom = x ? {x, y} : null;
      this.draw();
    }

    open() {
      if (this.now && this.now.go) vlrl.visit(this.now.go);
    }

    // --- mouse and keyboard ---

    listen() {
      const {box} = this, place = event => {
        const at = box.getBoundingClientRect();
        return [event.clientX - at.left, event.clientY - at.top];
      };
      let from = null, moved = false;
      box.addEventListener("pointerdown", event => {
        if (event.button || event.pointerType === "touch" || !this.space) return;
        [from, moved] = [{at: place(event), x: this.space.x, y: this.space.y}, false];
      });
      box.addEventListener("pointermove", event => {
        if (!this.space) return;
        const to = place(event);
        if (!from) return this.point(this.nearest(...to));
        if (!moved && Math.hypot(to[0] - from.at[0], to[1] - from.at[1]) < MOVED_PX) return;
        if (!moved) box.setPointerCapture(event.pointerId);
        moved = true;
        if (event.shiftKey) {
          const by = (axis, i) => [axis.low, axis.high].map(v => v + axis.of(from.at[i]) - axis.of(to[i]));
          return this.look(by(from.x, 0), by(from.y, 1));
        }
        this.point(null);
        const [x, width] = sides(from.at[0], to[0]), [y, height] = sides(from.at[1], to[1]);
        this.over.replaceChildren(svg("rect", {x, y, width, height, class: "v-band"}));
      });
      box.addEventListener("pointerup", event => {
        const to = place(event), begun = from;
        from = null;
        if (!begun || !moved || event.shiftKey) return;
        const range = (axis, i) => [axis.of(begun.at[i]), axis.of(to[i])].sort((a, b) => a - b);
        const wide = Math.abs(to[0] - begun.at[0]) > MOVED_PX, high = Math.abs(to[1] - begun.at[1]) > 3 * MOVED_PX;
        this.look(wide ? range(begun.x, 0) : [begun.x.low, begun.x.high], high ? range(begun.y, 1) : [begun.y.low, begun.y.high]);
      });
      box.addEventListener("pointerleave", () => from || this.point(null));
      box.addEventListener("click", event => {
        if (moved) return moved = false;
        this.point(this.nearest(...place(event)));
        this.open();
      });
      box.addEventListener("dblclick", () => this.look());
      box.addEventListener("keydown", event => {
        if (!event.ctrlKey && !event.metaKey && !event.altKey && this.space && this.key(event.key)) event.preventDefault();
      });
      box.addEventListener("blur", () => this.point(null));
    }

    key(key) {
      const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1], Home: [-1e9, 0], End: [1e9, 0]}[key];
      if (step) return this.go(...step), true;
      if (key === "0") return this.look(), true;
      if (key === "Enter" && this.now) return this.open(), true;
      const factor = {"+": 0.5, "=": 0.5, "-": 2}[key];
      if (!factor) return false;
      const {x, y} = this.space, at = this.at ? this.at.x : (x.low + x.high) / 2;
      this.look([at - (at - x.low) * factor, at + (x.high - at) * factor], [y.low, y.high]);
      if (this.at) this.point(this.at);
      return true;
    }

    // To the next point of the curve, or the nearest one of the next curve; in a heat map, to the neighbouring cell.
    go(along, across) {
      const all = this.shown().filter(s => s.trace.hoverinfo !== "skip")
        .map(s => s.points.filter(p => Number.isFinite(p.y))).filter(points => points.length);
      if (!all.length) return;
      let which = all.findIndex(points => points.includes(this.at)), at = which < 0 ? 0 : all[which].indexOf(this.at);
      if (which < 0) which = 0;
      else if (this.drawn.cells) at = all[0].findIndex(p => p.x === this.at.x + Math.sign(along) && p.y === this.at.y + across);
      else if (along) at = Math.min(all[which].length - 1, Math.max(0, at + along));
      else {
        which = (which - across + all.length) % all.length;
        const apart = all[which].map(p => Math.abs(p.x - this.at.x));
        at = apart.indexOf(Math.min(...apart));
      }
      if (at < 0) return;
      this.at = all[which][at];
      const {x, y} = this.space, out = this.at.x < x.low || this.at.x > x.high;
      if (out) this.look([this.at.x - (x.high - x.low) / 2, this.at.x + (x.high - x.low) / 2], [y.low, y.high]);
      this.point(this.at);
    }

    // The numbers as a table, made when it is opened.
    tell() {
      const old = this.numbers.querySelector(".v-scroll");
      if (old) old.remove();
      if (!this.numbers.open) return;
      const rows = this.drawn.series.flatMap(s => s.points).filter(p => p.z !== undefined || Number.isFinite(p.y));
      const lines = rows.slice(0, MOST_ROWS).map(point => html("tr", {}, ...said(this.drawn, point).reverse().map(
        text => html("td", {textContent: text}))));
      const more = rows.length > MOST_ROWS ? html("caption", {textContent: `the first ${MOST_ROWS} of ${rows.length}`}) : "";
      const heads = this.drawn.cells ? ["place", "class", "share"] : ["curve", "place", "value"];
      const head = html("thead", {}, html("tr", {}, ...heads.map(text => html("th", {textContent: text, scope: "col"}))));
      const grid = html("div", {className: "v-scroll", tabIndex: 0},
                        html("table", {className: "v-table"}, more, head, html("tbody", {}, ...lines)));
      grid.setAttribute("aria-label", `numbers of ${this.figure.title}`);
      grid.setAttribute("role", "region");
      this.numbers.append(grid);
    }
  }

  const sides = (a, b) => [Math.min(a, b), Math.abs(a - b)];
  const seen = new IntersectionObserver(entries => entries.forEach(({target, isIntersecting}) => {
    if (isIntersecting && !target.plot.visible) target.plot.visible = true, target.plot.draw();
  }), {rootMargin: "200px"});
  const sized = new ResizeObserver(entries => entries.forEach(({target}) => target.plot.visible && target.plot.draw()));

  return (element, props, watch) => {
    const update = () => {
      const box = element.querySelector(".v-charts"), figures = props.value ? JSON.parse(props.value) : [];
      const before = new Map([...box.children].map(child => [child.dataset.id, child]));
      figures.forEach((figure, i) => {
        const card = before.get(figure.id) || new Plot(figure).card;
        before.delete(figure.id);
        card.plot.take(figure);
        if (box.children[i] !== card) box.insertBefore(card, box.children[i] || null);
      });
      for (const gone of before.values()) {
        seen.unobserve(gone.plot.box);
        sized.unobserve(gone.plot.box);
        gone.remove();
      }
    };
    watch("value", update);
    update();
  };
})();

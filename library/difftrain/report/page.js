"use strict";
// What a page does beyond being read: charts that can be asked and zoomed, a lightbox, a filter. It loads nothing, and a
// page without it says the same. Texts of the data are only ever set as text.
(() => {
  const SVG = document.querySelector("svg")?.namespaceURI; // without a chart nothing is drawn
  const MARGIN = { left: 60, right: 14, top: 12, bottom: 36 };
  const one = (tag, attributes = {}, text = "") => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  };
  const shape = (parent, tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };

  // --- numbers as people read them

  const fixed = (value, digits = 5) => {
    if (!Number.isFinite(value)) return String(value);
    if (value === 0) return "0";
    const decimals = Math.max(0, Math.min(12, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
    const text = value.toFixed(decimals);
    const short = text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
    return Math.abs(value) >= 1e4 ? short.replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f") : short;
  };
  const span = (seconds) => {
    const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
    if (whole < 60) return `${fixed(seconds, 3)} s`;
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours} h ${pad(minutes)} min` : `${minutes} min ${pad(whole % 60)} s`;
  };
  const ticks = (low, high, about, least = 0) => {
    const raw = (high - low) / about || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = Math.max(least, power * [1, 2, 5, 10].find((factor) => power * factor >= raw * (1 - 1e-9)));
    const values = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) values.push(n * step);
    return values;
  };

  // --- one x axis for all charts of a page: steps, and by the run's own records time and images

  const record = document.querySelector("[data-axes]");
  const axes = record ? JSON.parse(record.dataset.axes) : {};
  const names = { step: "step", time: "time", images: "images seen" };
  const view = { axis: "step", smooth: 0 };
  const along = (step) => {
    if (view.axis === "step") return step;
    const xs = axes.step, ys = axes[view.axis];
    let low = 0, high = xs.length - 1;
    if (step <= xs[0]) return ys[0];
    if (step >= xs[high]) return ys[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= step) low = middle; else high = middle;
    }
    return ys[low] + ((step - xs[low]) / (xs[high] - xs[low] || 1)) * (ys[high] - ys[low]);
  };
  const x_text = (plot, x) => {
    if (plot.data.x !== "step" || view.axis === "step") return `${plot.data.x} ${fixed(x, 7)}`;
    return view.axis === "time" ? span(x) : `${fixed(Math.round(x), 9)} images`;
  };

  // a centred mean over a share of the points; of a thinned curve the means of its stretches, not its extremes
  const smoothed = (curve) => {
    const xs = curve.mx || curve.x, ys = curve.my || curve.y, n = ys.length;
    const half = Math.floor((n * view.smooth) / 200);
    if (!half || n < 8) return curve;
    const sums = [0];
    for (const y of ys) sums.push(sums[sums.length - 1] + y);
    const mean = (i) => {
      const reach = Math.min(half, i, n - 1 - i);
      return (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1);
    };
    return { ...curve, x: xs, y: ys.map((_, i) => mean(i)) };
  };

  // --- a chart, drawn as wide as it stands, so that its letters keep their size on a phone

  class Plot {
    constructor(box) {
      this.box = box;
      this.data = JSON.parse(box.dataset.plot);
      this.log = this.data.log;
      this.zoom = null;
      this.svg = box.querySelector("svg");
      this.tip = one("div", { class: "tip", hidden: "" });
      const tools = one("div", { class: "tools" });
      this.wide = one("button", { type: "button", hidden: "" }, "whole range");
      this.wide.onclick = () => { this.zoom = null; this.draw(); };
      tools.append(this.wide);
      if (this.data.curves.some((curve) => curve.y.some((y) => y > 0))) {
        const log = one("button", { type: "button", "aria-pressed": String(this.log) }, "log");
        log.onclick = () => {
          this.log = !this.log;
          log.setAttribute("aria-pressed", String(this.log));
          this.draw();
        };
        tools.append(log);
      }
      box.append(tools, this.tip);
      box.classList.add("live");
      this.listen();
    }

    series() {
      const moved = this.data.x === "step" && view.axis !== "step";
      return this.data.curves.map((raw) => {
        const curve = smoothed(raw), points = [];
        curve.y.forEach((y, i) => {
          const x = moved ? along(curve.x[i]) : curve.x[i];
          if (!this.log || y > 0) points.push([x, this.log ? Math.log10(y) : y, y]);
        });
        return { curve, points };
      });
    }

    draw() {
      const width = Math.max(240, Math.round(this.box.clientWidth)), height = width < 420 ? 220 : 250;
      const series = this.series();
      const all = series.flatMap(({ points }) => points);
      const svg = this.svg;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.wide.hidden = !this.zoom;
      this.shown = [];
      if (!all.length) return;

      // --- the ranges; while zoomed the y axis follows what is in sight
      const bounds = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
      let [left, right] = this.zoom || bounds(all.map((p) => p[0]));
      if (right - left < 1e-12) { left -= 0.5; right += 0.5; }
      const seen = all.filter((p) => p[0] >= left && p[0] <= right);
      let [low, high] = bounds((seen.length ? seen : all).map((p) => p[1]));
      if (this.data.zero && !this.log) { low = Math.min(low, 0); high = Math.max(high, 0); }
      if (high - low < 1e-9 * Math.max(Math.abs(low), Math.abs(high), 1e-30)) {
        const room = Math.abs(high) * 0.05 || 0.5;
        low -= room; high += room;
      }
      const room = 0.04 * (high - low);
      if (!(this.data.zero && low === 0)) low -= room;
      high += room;
      const margin = { ...MARGIN, right: this.data.ends ? 50 : MARGIN.right };
      const across = (x) => margin.left + ((x - left) / (right - left)) * (width - margin.left - margin.right);
      const down = (y) => height - margin.bottom - ((y - low) / (high - low)) * (height - margin.top - margin.bottom);
      this.scale = { left, right, across, width, margin, height };

      // --- axes
      const y_name = (tick) => (this.log ? (Number.isInteger(tick) ? `1e${tick}` : fixed(10 ** tick, 2)) : fixed(tick, 4));
      for (const tick of ticks(low, high, 5)) {
        shape(svg, "line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: down(tick), y2: down(tick) });
        shape(svg, "text", { class: "tick", x: margin.left - 6, y: down(tick) + 4, "text-anchor": "end" }, y_name(tick));
      }
      const by_step = this.data.x !== "step" || view.axis === "step";
      let unit = 1, label = by_step ? this.data.x : names[view.axis];
      if (!by_step && view.axis === "time") {
        [unit, label] = right > 7200 ? [3600, "time, hours"] : right > 180 ? [60, "time, minutes"] : [1, "time, seconds"];
      }
      for (const tick of ticks(left / unit, right / unit, width < 420 ? 4 : 6, unit === 1 ? 1 : 0)) {
        shape(svg, "text", { class: "tick", x: across(tick * unit), y: height - margin.bottom + 15, "text-anchor": "middle" },
          fixed(tick, 7));
      }
      shape(svg, "text", { class: "axis", x: (margin.left + width - margin.right) / 2, y: height - 4, "text-anchor": "middle" },
        label);
      for (const mark of this.data.marks) {
        const x = by_step ? mark : along(mark);
        if (x > left && x < right) {
          shape(svg, "line", { class: "mark", x1: across(x), x2: across(x), y1: margin.top, y2: height - margin.bottom });
        }
      }

      // --- curves, cut at the edges of the zoom
      const clip = `clip${plots.indexOf(this)}`;
      const frame = { x: margin.left, y: 0, width: width - margin.left - margin.right, height: height - margin.bottom + 1 };
      shape(shape(svg, "clipPath", { id: clip }), "rect", frame);
      const ends = [];
      for (const { curve, points } of series) {
        if (!points.length) continue;
        const style = curve.style, path = points.map((p) => `${across(p[0]).toFixed(1)},${down(p[1]).toFixed(1)}`).join(" ");
        const drawn = points.length === 1
          ? shape(svg, "circle", { class: `dot ${style}`, cx: across(points[0][0]), cy: down(points[0][1]), r: 3 })
          : shape(svg, "polyline", { class: `curve ${style}`, points: path, "clip-path": `url(#${clip})` });
        for (const [name, value] of Object.entries(curve.vars)) drawn.style.setProperty(name, value);
        this.shown.push({ curve, points });
        const last = points.filter((p) => p[0] <= right).pop();
        if (this.data.ends && last) ends.push({ y: down(last[1]), name: curve.name });
      }
      ends.sort((a, b) => a.y - b.y).reduce((above, end) => {
        end.y = Math.max(end.y, above + 11);
        return end.y;
      }, -Infinity);
      const over = ends.length ? Math.max(0, ends[ends.length - 1].y - (height - margin.bottom)) : 0;
      for (const end of ends) {
        shape(svg, "text", { class: "end", x: width - margin.right + 5, y: end.y - over + 4 }, end.name);
      }
      this.line = shape(svg, "line", { class: "hair", y1: margin.top, y2: height - margin.bottom, visibility: "hidden" });
      this.band = shape(svg, "rect", { class: "band", y: margin.top, height: height - margin.top - margin.bottom, width: 0 });
    }

    // --- the value under the pointer; what is dragged over is zoomed into

    listen() {
      const svg = this.svg;
      let from = null;
      const at = (event) => {
        const { left, right, width, margin } = this.scale, box = svg.getBoundingClientRect();
        const share = ((event.clientX - box.left) * width / box.width - margin.left) / (width - margin.left - margin.right);
        return left + Math.min(1, Math.max(0, share)) * (right - left);
      };
      svg.addEventListener("pointermove", (event) => {
        if (!this.shown.length) return;
        const x = at(event);
        this.say(x);
        if (from !== null) {
          const [a, b] = [from, x].sort((p, q) => p - q).map(this.scale.across);
          this.band.setAttribute("x", a);
          this.band.setAttribute("width", b - a);
        }
      });
      svg.addEventListener("pointerdown", (event) => {
        if (!this.shown.length || event.button) return;
        from = at(event);
        svg.setPointerCapture(event.pointerId);
      });
      svg.addEventListener("pointerup", (event) => {
        if (from === null) return;
        const [a, b] = [from, at(event)].sort((p, q) => p - q);
        from = null;
        if (this.scale.across(b) - this.scale.across(a) > 8) this.zoom = [a, b];
        this.draw();
      });
      svg.addEventListener("pointercancel", () => { from = null; this.draw(); });
      svg.addEventListener("pointerleave", () => {
        this.tip.hidden = true;
        if (this.line) this.line.setAttribute("visibility", "hidden");
      });
      svg.addEventListener("dblclick", () => { this.zoom = null; this.draw(); });
    }

    say(x) {
      const nearest = (points) => {
        let low = 0, high = points.length - 1;
        while (high - low > 1) {
          const middle = (low + high) >> 1;
          if (points[middle][0] <= x) low = middle; else high = middle;
        }
        return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
      };
      const hits = this.shown.map(({ curve, points }) => ({ name: curve.name, point: nearest(points) }));
      const there = hits.map((hit) => hit.point[0]).reduce((a, b) => (Math.abs(a - x) <= Math.abs(b - x) ? a : b));
      this.tip.replaceChildren(one("b", {}, x_text(this, there)));
      for (const { name, point } of hits) this.tip.append(one("span", {}, `${name} ${fixed(point[2])}`));
      this.tip.hidden = false;
      const place = this.scale.across(there), right = place > this.scale.width / 2;
      this.tip.style.left = right ? "" : `${place + 10}px`;
      this.tip.style.right = right ? `${this.scale.width - place + 10}px` : "";
      this.line.setAttribute("x1", place);
      this.line.setAttribute("x2", place);
      this.line.setAttribute("visibility", "visible");
    }
  }

  const plots = [...document.querySelectorAll("[data-plot]")].map((box) => new Plot(box));
  const redraw = () => plots.forEach((plot) => plot.draw());
  if (plots.length) {
    const bar = one("div", { class: "controls" });
    if (axes.step) {
      const choice = one("select", { "aria-label": "x axis" });
      for (const name of Object.keys(axes)) choice.append(one("option", { value: name }, names[name]));
      choice.onchange = () => {
        view.axis = choice.value;
        plots.forEach((plot) => { if (plot.data.x === "step") plot.zoom = null; });
        redraw();
      };
      const label = one("label", {}, "x axis ");
      label.append(choice);
      bar.append(label);
    }
    const slide = one("input", { type: "range", min: 0, max: 20, step: 1, value: 0, "aria-label": "smoothing" });
    const share = one("output", {}, "off");
    slide.oninput = () => {
      view.smooth = Number(slide.value);
      share.textContent = view.smooth ? `${view.smooth} %` : "off";
      redraw();
    };
    const label = one("label", {}, "smoothing ");
    label.append(slide, share);
    bar.append(label, one("span", {}, "point: values; drag: zoom; double click: whole range"));
    plots[0].box.closest("section").querySelector("h2").after(bar);
    redraw();
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
    document.addEventListener("toggle", redraw, true);
  }

  // --- pictures, as large as the window allows

  const pictures = [...document.querySelectorAll("img.zoom")];
  if (pictures.length) {
    const large = one("img", { alt: "" }), text = one("p"), dialog = one("dialog", { class: "lightbox" });
    const step = (by) => one("button", { type: "button", "aria-label": by < 0 ? "earlier" : "later" }, by < 0 ? "‹" : "›");
    const [before, after] = [step(-1), step(1)], close = one("button", { type: "button", "aria-label": "close" }, "×");
    dialog.append(large, text, before, after, close);
    document.body.append(dialog);
    let number = 0;
    const show = (next) => {
      number = (next + pictures.length) % pictures.length;
      const picture = pictures[number];
      large.src = picture.src;
      large.alt = picture.alt;
      large.className = picture.naturalWidth <= 128 ? "tiny" : "";
      text.textContent = picture.dataset.note || picture.alt;
      if (!dialog.open) dialog.showModal();
    };
    pictures.forEach((picture, i) => {
      picture.tabIndex = 0;
      picture.setAttribute("role", "button");
      picture.onclick = () => show(i);
      picture.onkeydown = (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(i); }
      };
    });
    before.onclick = () => show(number - 1);
    after.onclick = () => show(number + 1);
    close.onclick = () => dialog.close();
    large.onclick = () => dialog.close();
    dialog.onkeydown = (event) => {
      if (event.key === "ArrowLeft") show(number - 1);
      if (event.key === "ArrowRight") show(number + 1);
    };
    dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
  }
  for (const row of document.querySelectorAll(".strip")) row.scrollLeft = row.scrollWidth; // the newest are at its end

  // --- a filter over what stands in one section

  for (const form of document.querySelectorAll(".filter")) {
    const items = [...form.closest("section").querySelectorAll("[data-bucket]")];
    const [text, bucket] = [form.querySelector("input"), form.querySelector("select")], count = form.querySelector("output");
    const folds = [...form.closest("section").querySelectorAll("details")];
    const words = items.map((item) => item.textContent.toLowerCase());
    count.textContent = `${items.length} images`;
    form.hidden = false;
    form.oninput = () => {
      const asked = text.value.trim().toLowerCase();
      let shown = 0;
      items.forEach((item, i) => {
        item.hidden = !(words[i].includes(asked) && (!bucket.value || item.dataset.bucket === bucket.value));
        shown += !item.hidden;
      });
      if (asked || bucket.value) folds.forEach((fold) => { fold.open = true; });
      count.textContent = `${shown} of ${items.length}`;
    };
  }
})();

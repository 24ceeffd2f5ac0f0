// The step in time: the timeline and the memory under it, on canvases that share one view.

// ---- the part of the step that is seen, shared by both drawings --------------------------------

const timeline = data.timeline;
const LEAST = 200; // ns that fill the width at most

const view = {
  from: 0, to: timeline.end, drawings: [], waiting: false,

  set(from, to) {
    const span = Math.min(Math.max(to - from, LEAST), timeline.end);
    this.from = Math.min(Math.max(from, 0), timeline.end - span);
    this.to = this.from + span;
    this.draw();
  },
  zoom(factor, at = (this.from + this.to) / 2) {
    this.set(at - (at - this.from) * factor, at + (this.to - at) * factor);
  },
  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.drawings.forEach((draw) => draw());
      byId("span").textContent = `${duration(this.to - this.from)} of ${duration(timeline.end)}`;
    });
  },
};

// Room for lane names on the left; on a narrow page they stand above their lanes.
const isNarrow = () => window.innerWidth < 640;
const left = () => (isNarrow() ? 4 : 170);
const right = 8;

function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  const wide = Math.round(width * scale), high = Math.round(height * scale);
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.style.height = `${height}px`;
    canvas.width = wide;
    canvas.height = high;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

const pixels = (canvas) => canvas.clientWidth - left() - right;
const timeAt = (canvas, x) => view.from + ((x - left()) / pixels(canvas)) * (view.to - view.from);

function drawAxis(context, width, top, bottom) {
  const span = view.to - view.from, room = width - left() - right;
  const about = (span * (isNarrow() ? 90 : 110)) / room;
  const power = 10 ** Math.floor(Math.log10(about));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= about);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  context.textAlign = "center";
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    const x = left() + ((at - view.from) / span) * room;
    context.fillStyle = colours.line;
    context.fillRect(Math.round(x), top, 1, bottom - top);
    context.fillStyle = colours.faint;
    const text = moment(at, step);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(Math.max(x, left() + half), width - half), top - 5);
  }
}

function showTip(event, text) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const { width, height } = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, window.innerWidth - width - 6);
  const below = event.clientY + 18;
  tip.style.left = `${Math.max(x, 4)}px`;
  tip.style.top = `${below + height > window.innerHeight ? event.clientY - height - 12 : below}px`;
}

// ---- the timeline ---------------------------------------------------------------------------

const HEAD = 22;
let laneHeight = 20, tops = [], fullHeight = 0, pointed = null;

function placeLanes() {
  const name = isNarrow() ? 14 : 0;
  let y = HEAD, group = null;
  tops = timeline.lanes.map((lane) => {
    if (group !== null && lane.group !== group) y += 8;
    group = lane.group;
    const top = y + name;
    y += laneHeight + name + 2;
    return top;
  });
  fullHeight = y + 4;
}

// The first task of a lane that ends after a time; ends grow with starts, as tasks do not overlap.
function firstAfter(lane, time) {
  let low = 0, high = lane.start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.start[middle] + lane.length[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

function drawTimeline() {
  const canvas = byId("timeline").querySelector("canvas");
  placeLanes();
  const [context, width] = prepare(canvas, fullHeight);
  drawAxis(context, width, HEAD - 4, fullHeight);
  drawNames(context);
  context.save();
  context.beginPath();
  context.rect(left(), 0, width - left() - right, fullHeight);
  context.clip();
  const room = width - left() - right, perNs = room / (view.to - view.from);
  timeline.lanes.forEach((lane, number) => drawLane(context, lane, tops[number], perNs, room));
  if (byId("path").checked) drawPath(context, perNs);
  if (pointed) {
    const [number, task] = pointed, lane = timeline.lanes[number];
    const x = left() + (lane.start[task] - view.from) * perNs;
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    context.strokeRect(x, tops[number], Math.max(lane.length[task] * perNs, 2), laneHeight);
  }
  context.restore();
}

function drawNames(context) {
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = colours.ink;
  timeline.lanes.forEach((lane, number) => {
    const isFirst = number === 0 || timeline.lanes[number - 1].group !== lane.group;
    if (isNarrow()) {
      context.textAlign = "left";
      context.textBaseline = "alphabetic";
      context.fillText(`${lane.group} · ${lane.label}`, left(), tops[number] - 3);
      return;
    }
    const middle = tops[number] + laneHeight / 2;
    context.textBaseline = "middle";
    if (isFirst) {
      context.font = "600 12px system-ui, sans-serif";
      context.textAlign = "left";
      context.fillText(lane.group, 0, middle);
      context.font = "12px system-ui, sans-serif";
    }
    context.textAlign = "right";
    context.fillText(fitted(context, lane.label, left() - 62), left() - 6, middle);
  });
}

function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let most = text.length;
  while (most > 1 && context.measureText(`${text.slice(0, most)}…`).width > room) most -= 1;
  return `${text.slice(0, most)}…`;
}

// Tasks under a pixel are drawn together, a box a pixel: in the colour of the kind that takes most
// of it, as opaque as it is full. So a frame costs as many boxes as there are pixels, not tasks.
class Columns {
  constructor(context, top) {
    Object.assign(this, { context, top, at: null, run: null });
    this.full = new Float64Array(timeline.kinds.length);
  }

  add(x, wide, kind) {
    const column = Math.floor(x);
    if (column !== this.at) this.close();
    this.at = column;
    this.full[kind] += wide;
  }

  close() {
    if (this.at === null) return;
    const { full } = this;
    const kind = full.reduce((best, each, number) => (each > full[best] ? number : best), 0);
    const all = this.full.reduce((sum, each) => sum + each, 0);
    const shade = Math.min(Math.ceil(all * 8), 8) / 8, { run } = this;
    if (run && run.end === this.at && run.kind === kind && run.shade === shade) run.end += 1;
    else { this.flush(); this.run = { kind, shade, x: this.at, end: this.at + 1 }; }
    this.full.fill(0);
    this.at = null;
  }

  flush() {
    if (!this.run) return;
    const { context, run } = this;
    context.globalAlpha = run.shade;
    context.fillStyle = timeline.kinds[run.kind].colour;
    context.fillRect(run.x, this.top, run.end - run.x, laneHeight);
    context.globalAlpha = 1;
    this.run = null;
  }
}

function drawLane(context, lane, top, perNs, room) {
  context.fillStyle = colours.idle;
  context.fillRect(left(), top, room, laneHeight);
  const { start, length, kind, name } = lane, labels = [], columns = new Columns(context, top);
  for (let i = firstAfter(lane, view.from); i < start.length && start[i] < view.to; i += 1) {
    const x = left() + (start[i] - view.from) * perNs, wide = length[i] * perNs;
    if (wide < 1) {
      columns.add(x, wide, kind[i]);
      continue;
    }
    context.fillStyle = timeline.kinds[kind[i]].colour;
    context.fillRect(x, top, wide > 3 ? wide - 0.6 : wide, laneHeight);
    if (wide > 26) labels.push(i);
  }
  columns.close();
  columns.flush();
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const i of labels) {
    const from = Math.max(left() + (start[i] - view.from) * perNs, left());
    const to = Math.min(left() + (start[i] + length[i] - view.from) * perNs, left() + room);
    context.fillStyle = timeline.kinds[kind[i]].dark ? "#ffffff" : "#1c1c1c";
    const text = timeline.names[name[i]];
    if (to - from > 26 && text.length * 4.5 < 3 * (to - from)) {
      const shown = fitted(context, text, to - from - 6);
      context.fillText(shown, (from + to) / 2, top + laneHeight / 2 + 0.5);
    }
  }
}

// The critical path: a line under its tasks.
function drawPath(context, perNs) {
  context.fillStyle = colours.path;
  for (const [lane, start, length] of timeline.path) {
    if (start + length < view.from || start > view.to) continue;
    const x = left() + (start - view.from) * perNs;
    context.fillRect(x, tops[lane] + laneHeight - 4, Math.max(length * perNs, 0.6), 4);
  }
}

function taskAt(canvas, event) {
  const box = canvas.getBoundingClientRect(), y = event.clientY - box.top;
  const number = tops.findIndex((top) => y >= top - 1 && y <= top + laneHeight + 1);
  const time = timeAt(canvas, event.clientX - box.left);
  if (number < 0 || event.clientX - box.left < left()) return null;
  const lane = timeline.lanes[number], slack = (2 * (view.to - view.from)) / pixels(canvas);
  const task = firstAfter(lane, time - slack);
  let best = null, distance = slack;
  for (const each of [task, task + 1]) {
    if (each >= lane.start.length) continue;
    const before = lane.start[each] - time, after = time - lane.start[each] - lane.length[each];
    const off = Math.max(before, after, 0);
    if (off < distance || (off === 0 && best === null)) [best, distance] = [[number, each], off];
  }
  return best;
}

// How often the task ran before, of how many times: the microbatch, as a rule.
function runOf(lane, task) {
  let before = 0, all = 0;
  lane.name.forEach((name, each) => {
    if (name !== lane.name[task]) return;
    all += 1;
    before += each <= task;
  });
  return all > 1 ? `, run ${before} of ${all} in the step` : "";
}

function describeTask([number, task]) {
  const lane = timeline.lanes[number], start = lane.start[task], length = lane.length[task];
  const when = (ns) => moment(ns, Math.max(length, 5) / 5);
  return [
    timeline.names[lane.name[task]],
    `${timeline.kinds[lane.kind[task]].name}${runOf(lane, task)}`,
    `${duration(length)}, from ${when(start)} to ${when(start + length)}`,
    `${lane.group} · ${lane.label}`,
  ].join("\n");
}

function startTimeline() {
  const canvas = byId("timeline").querySelector("canvas");
  byId("legend").append(...timeline.kinds.map(legendItem));
  if (timeline.joined) {
    byId("timeline").after(element("p", { class: "note" },
      `Of ${timeline.joined.toLocaleString("en")} tasks, those that follow each other without `
      + "a gap are drawn as one."));
  }
  byId("closer").addEventListener("click", () => view.zoom(0.5));
  byId("farther").addEventListener("click", () => view.zoom(2));
  byId("whole").addEventListener("click", () => view.set(0, timeline.end));
  byId("path").addEventListener("change", () => view.draw());
  canvas.addEventListener("dblclick", (event) => view.zoom(0.4, timeAt(canvas, event.offsetX)));
  canvas.addEventListener("keydown", (event) => {
    const span = view.to - view.from;
    const acts = {
      "+": () => view.zoom(0.6), "=": () => view.zoom(0.6), "-": () => view.zoom(1 / 0.6),
      "0": () => view.set(0, timeline.end),
      ArrowLeft: () => view.set(view.from - span / 5, view.to - span / 5),
      ArrowRight: () => view.set(view.from + span / 5, view.to + span / 5),
    };
    if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
  });
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways) return;
    event.preventDefault();
    const perPixel = (view.to - view.from) / pixels(canvas);
    if (sideways) view.set(view.from + event.deltaX * perPixel, view.to + event.deltaX * perPixel);
    else view.zoom(Math.exp(event.deltaY * 0.0035), timeAt(canvas, event.offsetX));
  }, { passive: false });
  follow(canvas);
}

function legendItem({ name, colour: fill }) {
  const box = element("i");
  box.style.background = fill;
  return element("li", {}, box, name);
}

// Drag with one pointer to move, with two to zoom; without a button, point.
function follow(canvas) {
  const held = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, (event) => held.delete(event.pointerId));
  }
  canvas.addEventListener("pointerleave", () => {
    pointed = null;
    showTip(null, "");
    view.draw();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) {
      const found = taskAt(canvas, event);
      showTip(event, found ? describeTask(found) : "");
      if (String(found) !== String(pointed)) { pointed = found; view.draw(); }
      return;
    }
    const before = held.get(event.pointerId), perPixel = (view.to - view.from) / pixels(canvas);
    if (held.size === 1) {
      const moved = (before - event.clientX) * perPixel;
      view.set(view.from + moved, view.to + moved);
    } else {
      const other = [...held].find(([id]) => id !== event.pointerId)[1];
      const factor = Math.abs(before - other) / Math.max(Math.abs(event.clientX - other), 4);
      view.zoom(factor, timeAt(canvas, other - canvas.getBoundingClientRect().left));
    }
    held.set(event.pointerId, event.clientX);
  });
}

// ---- memory ---------------------------------------------------------------------------------

const MEMORY_HEIGHT = 190;
const CAPACITY_SHOWN = 1.6; // the capacity is a line where it is less than so many peaks

function drawMemory() {
  const canvas = byId("memory").querySelector("canvas");
  const [context, width] = prepare(canvas, MEMORY_HEIGHT);
  const curve = data.memory[Number(byId("rank").value)];
  const near = curve.capacity < CAPACITY_SHOWN * curve.peak;
  const top = near ? 1.12 * Math.max(curve.capacity, curve.peak) : 1.2 * curve.peak;
  const bottom = MEMORY_HEIGHT - 4, height = bottom - HEAD;
  const room = width - left() - right, perNs = room / (view.to - view.from);
  const y = (bytes) => bottom - (bytes / top) * height;
  drawAxis(context, width, HEAD - 4, bottom);
  context.save();
  context.beginPath();
  context.rect(left(), 0, room, MEMORY_HEIGHT);
  context.clip();
  const points = pointsSeen(curve, perNs);
  const below = new Float64Array(points.length);
  for (const layer of curve.layers) {
    drawLayer(context, curve, points, layer, below, (ns) => left() + (ns - view.from) * perNs, y);
  }
  context.restore();
  context.textBaseline = "middle";
  context.textAlign = isNarrow() ? "left" : "right";
  const mark = (bytes, words, name) => {
    context.fillStyle = colours[name];
    context.fillRect(left(), y(bytes), room, 1);
    const place = isNarrow() ? left() + 2 : left() - 6;
    context.fillText(words, place, isNarrow() ? y(bytes) - 7 : y(bytes));
  };
  mark(curve.peak, `peak ${size(curve.peak)}`, "faint");
  if (near) mark(curve.capacity, `capacity ${size(curve.capacity)}`, "bad");
  const verdict = curve.peak > curve.capacity ? ": too much." : ".";
  const most = `${size(curve.peak)} of the ${size(curve.capacity)}`;
  byId("memory-words").textContent = `At most ${most} of a device of ${curve.label}${verdict}`;
}

// The points of a curve in view, of those on one pixel the fullest and the last, which goes on.
function pointsSeen(curve, perNs) {
  const { times, layers } = curve, points = [];
  curve.totals ||= times.map((_, i) => layers.reduce((sum, layer) => sum + layer.nbytes[i], 0));
  let column = null, fullest = 0, last = 0;
  const close = () => {
    if (column === null) return;
    points.push(fullest);
    if (last !== fullest) points.push(last);
  };
  for (let i = 0; i < times.length && times[i] <= view.to; i += 1) {
    if (i + 1 < times.length && times[i + 1] < view.from) continue;
    const here = Math.floor((times[i] - view.from) * perNs);
    if (here !== column) {
      close();
      [column, fullest] = [here, i];
    } else if (curve.totals[i] > curve.totals[fullest]) fullest = i;
    last = i;
  }
  close();
  return points;
}

// One layer of the stack as a path of steps; `below` is where it stands, and grows by it.
function drawLayer(context, curve, points, layer, below, x, y) {
  const count = points.length;
  const starts = points.map((point) => x(curve.times[point]));
  const end = (i) => (i + 1 < count ? starts[i + 1] : x(timeline.end));
  context.fillStyle = layer.colour;
  context.beginPath();
  for (let i = 0; i < count; i += 1) {
    const height = y(below[i] + layer.nbytes[points[i]]);
    context.lineTo(starts[i], height);
    context.lineTo(end(i), height);
  }
  for (let i = count - 1; i >= 0; i -= 1) {
    context.lineTo(end(i), y(below[i]));
    context.lineTo(starts[i], y(below[i]));
  }
  context.fill();
  points.forEach((point, i) => { below[i] += layer.nbytes[point]; });
}

function startMemory() {
  const chooser = byId("rank"), canvas = byId("memory").querySelector("canvas");
  const fullest = data.memory.reduce((best, each, number) =>
    each.peak > data.memory[best].peak ? number : best, 0);
  const several = data.memory.length > 1;
  chooser.append(...data.memory.map(({ label }, number) =>
    element("option", { value: number },
      several && number === fullest ? `${label}, the fullest` : label)));
  chooser.value = fullest;
  chooser.hidden = !several;
  const names = new Map();
  data.memory.forEach((curve) => curve.layers.forEach((layer) => names.set(layer.name, layer)));
  byId("memory-legend").append(...[...names.values()].map(legendItem));
  chooser.addEventListener("change", () => view.draw());
  canvas.addEventListener("pointerleave", () => showTip(null, ""));
  canvas.addEventListener("pointermove", (event) => {
    const curve = data.memory[Number(chooser.value)], time = timeAt(canvas, event.offsetX);
    if (event.offsetX < left() || time > timeline.end) { showTip(null, ""); return; }
    let at = curve.times.findIndex((each) => each > time);
    at = (at < 0 ? curve.times.length : at) - 1;
    const parts = curve.layers.map((layer) => [layer.name, layer.nbytes[at]])
      .filter(([, bytes]) => bytes);
    const total = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
    showTip(event, [`${duration(Math.max(time, 0))}: ${size(total)}`,
      ...parts.map(([name, bytes]) => `${name} ${size(bytes)}`)].join("\n"));
  });
}

// ---- begin ----------------------------------------------------------------------------------

readColours();
fillWords();
fillTables();
startTimeline();
startMemory();
view.drawings.push(drawTimeline, drawMemory);
window.addEventListener("resize", () => view.draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  view.draw();
});
view.draw();

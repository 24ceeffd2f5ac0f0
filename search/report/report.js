"use strict";
// Fills the page from the JSON in it. Text goes in as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// The colours of the style, of the scheme that the reader prefers.
const colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "ink", "faint", "line", "idle", "path", "bad"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

const UNITS = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];

// 1234567 ns → "1.23 ms", as everywhere else on the page.
function duration(ns) {
  const [unit, length] = UNITS.find(([, each]) => Math.abs(ns) >= each) || UNITS[3];
  const value = ns / length;
  const decimals = unit === "ns" ? 0 : Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return `${value.toFixed(decimals)} ${unit}`;
}

// A moment of the step, told so exactly that moments `step` ns apart differ.
function moment(ns, step) {
  if (ns < 0.5) return "0";
  const [unit, length] = UNITS.find(([, each]) => ns >= each) || UNITS[3];
  const decimals = Math.min(Math.max(0, Math.ceil(Math.log10(length / step) - 1e-9)), 9);
  return `${(ns / length).toFixed(unit === "ns" ? 0 : decimals)} ${unit}`;
}

function size(bytes) {
  if (bytes >= 2 ** 30) return `${(bytes / 2 ** 30).toFixed(bytes < 10 * 2 ** 30 ? 2 : 0)} GiB`;
  if (bytes >= 2 ** 20) return `${Math.round(bytes / 2 ** 20)} MiB`;
  return `${Math.round(bytes / 1024)} KiB`;
}

// ---- words and figures ----------------------------------------------------------------------

function fillWords() {
  byId("summary").textContent = data.summary;
  for (const { what, value, note } of data.figures) {
    byId("figures").append(
      element("div", { class: "figure" }, element("span", {}, what), element("b", {}, value),
        element("span", {}, note)));
  }
  const { headline, stages, time } = data.words;
  byId("words").append(element("p", {}, headline), element("p", {}, time));
  for (const stage of stages) {
    const list = element("ul", {}, ...stage.splits.map((split) => element("li", {}, split)));
    byId("words").append(
      element("details", stages.length === 1 ? { open: "" } : {},
        element("summary", {}, stage.devices), element("p", {}, stage.operators), list,
        element("p", {}, stage.memory)));
  }
  byId("choice").append(...data.choice.map((sentence) => element("p", {}, sentence)));
  byId("bound").append(...data.certificate.map((sentence) => element("p", {}, sentence)));
  byId("made").append(...data.made.map(([what, how]) => element("div", {}, `${what}: ${how}`)));
}

// ---- tables ---------------------------------------------------------------------------------

const MAX_ROWS = 40;

// A table whose headings sort it. `shows` says which rows there are, `first` marks row 0, `bars`
// names a column of numbers that are drawn as bars too.
class Table {
  constructor(place, table, { first = false, bars = "", most = Infinity } = {}) {
    Object.assign(this, { table, first, most, sorted: null, falling: false, shows: () => true });
    const letters = (column) => Math.max(0, ...table.texts.map((row) => row[column].length));
    this.long = [...table.columns.keys()].filter((column) => letters(column) > 30);
    this.bar = table.columns.findIndex(([name]) => name === bars);
    const numbers = table.values.map((row) => row[this.bar]).filter((value) => value !== null);
    this.largest = Math.max(...numbers);
    this.body = element("tbody");
    this.more = element("button", { type: "button", hidden: "" });
    this.more.addEventListener("click", () => { this.most = Infinity; this.fill(); });
    place.append(
      element("div", { class: "scroll" },
        element("table", {}, element("thead", {}, this.heading()), this.body)), this.more);
    if (table.note) place.append(element("p", { class: "note" }, table.note));
    this.fill();
  }

  heading() {
    const cells = this.table.columns.map(([name, unit], column) => {
      const button = element("button", { type: "button", title: "sort" }, name);
      const cell = element("th", unit === "text" ? {} : { class: "number" }, button);
      button.addEventListener("click", () => {
        this.falling = this.sorted === column ? !this.falling : unit !== "text";
        this.sorted = column;
        this.cells.forEach((each) => each.removeAttribute("aria-sort"));
        cell.setAttribute("aria-sort", this.falling ? "descending" : "ascending");
        this.fill();
      });
      return cell;
    });
    this.cells = cells;
    return element("tr", {}, ...cells);
  }

  rows() {
    const rows = [...this.table.values.keys()].filter((row) => this.shows(row));
    if (this.sorted === null) return rows;
    const value = (row) => this.table.values[row][this.sorted];
    const sign = this.falling ? -1 : 1;
    return rows.sort((a, b) => {
      if (value(a) === null || value(b) === null) return (value(a) === null) - (value(b) === null);
      return sign * (value(a) < value(b) ? -1 : Number(value(a) > value(b)));
    });
  }

  fill() {
    const rows = this.rows();
    this.shown = rows.length;
    this.body.replaceChildren(...rows.slice(0, this.most).map((row) => this.line(row)));
    this.more.hidden = rows.length <= this.most;
    this.more.textContent = `show all ${rows.length} rows`;
  }

  line(row) {
    const line = element("tr", this.first && row === 0 ? { class: "first" } : {});
    this.table.columns.forEach(([name, unit], column) => {
      const text = name === "operator" ? "name" : this.long.includes(column) ? "words" : "";
      const kind = unit === "text" ? text : "number";
      const cell = element("td", kind ? { class: kind } : {}, this.table.texts[row][column]);
      const value = this.table.values[row][column];
      if (column === this.bar && value !== null) {
        const share = (100 * value) / this.largest;
        cell.style.background =
          `linear-gradient(to right, var(--bar) ${share}%, transparent ${share}%)`;
        cell.style.minWidth = "6.5rem";
      }
      line.append(cell);
    });
    return line;
  }
}

function fillTables() {
  new Table(byId("strategies"), data.strategies, { first: true, bars: "step" });
  new Table(byId("space"), data.space);
  new Table(byId("changes"), data.changes, { first: true, bars: "step" });
  const operators = new Table(byId("operators"), data.operators, { most: MAX_ROWS });
  const stages = [...new Set(data.operators.values.map((row) => row[2]))];
  const chooser = byId("stage");
  chooser.append(element("option", { value: "" }, "all stages"),
    ...stages.map((stage) => element("option", { value: stage }, `stage ${stage}`)));
  chooser.hidden = stages.length === 1;
  const update = () => {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    operators.shows = (row) => {
      const text = data.operators.texts[row].join(" ").toLowerCase();
      return (chooser.value === "" || String(data.operators.values[row][2]) === chooser.value)
        && words.every((word) => text.includes(word));
    };
    operators.fill();
    byId("count").textContent = `${operators.shown} of ${data.operators.values.length} operators`;
  };
  byId("filter").addEventListener("input", update);
  chooser.addEventListener("change", update);
  update();
}

// Tables and lists of facts that are updated in place: rows stay the same elements, so focus and scroll stay.

import { el, setText, textPart } from "./dom.js";
import { NONE } from "./words.js";

const SHORT = 10;

/** A column: its name, what its cells show of a row, and the part that shows it. On narrow screens a row shows its
 * first cell and those of columns that are `kept`; a button unfolds the others. An `optional` column is not there while
 * no row has a value in it. */
export function column(name, value, { part = textPart, numeric = false, kept = false, optional = false } = {}) {
  return { name, value, part, numeric, kept, optional };
}

/** Whether a cell shows nothing but a dash. */
function isEmpty(value) {
  if (value === null || value === undefined || value === NONE) return true;
  return value.text === NONE && !value.values?.some((each) => each !== null);
}

export class Table {
  #columns;
  #heads;
  #folds;
  #body = el("tbody", { role: "rowgroup" });
  #rows = new Map();
  #table;
  #empty;
  #all = el("button", { type: "button" });
  #shown = [[], () => ""];
  #showsAll = false;

  /** `empty` is what is said when there are no rows; `controls` stand beside the heading. */
  constructor(title, columns, empty, ...controls) {
    this.#columns = columns;
    this.#folds = columns.some(({ kept }) => kept);
    this.#heads = columns.map(({ name, numeric }) =>
      el("th", { scope: "col", role: "columnheader", class: numeric ? "numeric" : "" }, name));
    // Narrow screens show rows as blocks. Browsers then forget that this is a table unless the roles are written out.
    const head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...this.#heads));
    this.#table = el("table", { role: "table", "aria-label": title }, head, this.#body);
    this.#empty = el("p", { class: "empty" }, empty);
    this.element = el("section", {}, el("div", { class: "title" }, el("h2", {}, title), ...controls),
      this.#empty, this.#table, this.#all);
    this.#all.addEventListener("click", () => {
      this.#showsAll = true;
      this.update(...this.#shown);
    });
    this.update(...this.#shown);
  }

  /** Show these rows in this order: the first SHORT ones until the user asks for all. `keyOf` names a row: the row of the same name is changed in place. */
  update(rows, keyOf) {
    this.#shown = [rows, keyOf];
    const gone = new Set(this.#rows.keys());
    let place = this.#body.firstChild;
    for (const row of this.#showsAll ? rows : rows.slice(0, SHORT)) {
      const key = keyOf(row);
      if (!this.#rows.has(key)) this.#rows.set(key, this.#newRow());
      const { element, parts, cells } = this.#rows.get(key);
      gone.delete(key);
      this.#columns.forEach((column, index) => {
        const value = column.value(row);
        parts[index].set(value);
        cells[index].classList.toggle("none", isEmpty(value));
      });
      if (element === place) place = place.nextSibling;
      else this.#body.insertBefore(element, place);
    }
    for (const key of gone) {
      this.#rows.get(key).element.remove();
      this.#rows.delete(key);
    }
    this.#hideEmptyColumns();
    this.#table.hidden = rows.length === 0;
    this.#empty.hidden = rows.length > 0;
    this.#all.hidden = this.#showsAll || rows.length <= SHORT;
    setText(this.#all, `Show all ${rows.length}`);
  }

  #newRow() {
    const parts = this.#columns.map(({ part }) => part());
    const cells = this.#columns.map(({ name }, index) =>
      el("td", { role: "cell", "data-name": name, class: this.#classOf(this.#columns[index], index) }, parts[index].element));
    const element = el("tr", { role: "row", class: this.#folds ? "fold" : "" }, ...cells);
    if (this.#folds) cells[0].append(unfolding(element));
    return { element, parts, cells };
  }

  #classOf({ numeric, kept }, index) {
    return [numeric ? "numeric" : "", this.#folds && !kept && index > 0 ? "folds" : ""].join(" ").trim();
  }

  #hideEmptyColumns() {
    const rows = [...this.#rows.values()];
    this.#columns.forEach(({ optional }, index) => {
      if (!optional) return;
      const hidden = rows.every(({ cells }) => cells[index].classList.contains("none"));
      for (const cell of [this.#heads[index], ...rows.map(({ cells }) => cells[index])]) cell.hidden = hidden;
    });
  }
}

/** A button that unfolds a row; only narrow screens show it. */
function unfolding(row) {
  const button = el("button", { type: "button", class: "unfold", "aria-expanded": "false" }, "More");
  button.addEventListener("click", () => {
    const open = row.classList.toggle("open");
    button.setAttribute("aria-expanded", String(open));
    setText(button, open ? "Less" : "More");
  });
  return button;
}

/** Names and values below each other: `lines` are columns without a table. */
export class Facts {
  #lines;

  constructor(...lines) {
    this.#lines = lines.map((line) => ({ ...line, shown: line.part() }));
    const pairs = this.#lines.map(({ name, shown }) => el("div", {}, el("dt", {}, name), el("dd", {}, shown.element)));
    this.element = el("dl", {}, ...pairs);
  }

  update(row) {
    for (const { shown, value } of this.#lines) shown.set(value(row));
  }
}

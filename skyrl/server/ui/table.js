// Tables and lists of facts that are updated in place: rows stay the same elements, so focus and scroll stay.

import { el, setText, textPart } from "./dom.js";

const SHORT = 10;

/** A column: its name, what its cells show of a row, and the part that shows it. */
export function column(name, value, { part = textPart, numeric = false } = {}) {
  return { name, value, part, numeric };
}

export class Table {
  #columns;
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
    const names = columns.map(({ name, numeric }) =>
      el("th", { scope: "col", role: "columnheader", class: numeric ? "numeric" : "" }, name));
    // Narrow screens show rows as blocks. Browsers then forget that this is a table unless the roles are written out.
    const head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...names));
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
      const { element, parts } = this.#rows.get(key);
      gone.delete(key);
      parts.forEach((part, index) => part.set(this.#columns[index].value(row)));
      if (element === place) place = place.nextSibling;
      else this.#body.insertBefore(element, place);
    }
    for (const key of gone) {
      this.#rows.get(key).element.remove();
      this.#rows.delete(key);
    }
    this.#table.hidden = rows.length === 0;
    this.#empty.hidden = rows.length > 0;
    this.#all.hidden = this.#showsAll || rows.length <= SHORT;
    setText(this.#all, `Show all ${rows.length}`);
  }

  #newRow() {
    const parts = this.#columns.map(({ part }) => part());
    const cells = this.#columns.map(({ name, numeric }, index) =>
      el("td", { role: "cell", "data-name": name, class: numeric ? "numeric" : "" }, parts[index].element));
    return { element: el("tr", { role: "row" }, ...cells), parts };
  }
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

// The turns of an agent session as a tree. Knows no elements.

/** Turns by their ids, in the order in which they ended. A turn gets its `number` (from 1) and `depth`: how many branches lead to it. */
export class Tree {
  #turns = new Map();
  #children = new Map([[null, []]]);
  newest = null;

  get size() {
    return this.#turns.size;
  }

  add(given) {
    const parent = this.#turns.get(given.parent) ?? null;
    const children = this.#children.get(parent === null ? null : parent.id);
    const depth = parent === null ? 0 : parent.depth + (children.length > 0 ? 1 : 0);
    const turn = { ...given, number: this.size + 1, depth, continues: parent === null ? null : parent.number };
    children.push(turn);
    this.newest = turn;
    this.#turns.set(turn.id, turn);
    this.#children.set(turn.id, []);
  }

  /** The turn with this id; undefined if there is none. */
  find(id) {
    return this.#turns.get(id);
  }

  /** The turns from the first one to this one. */
  path(id) {
    const path = [];
    for (let turn = this.#turns.get(id); turn !== undefined; turn = this.#turns.get(turn.parent)) path.push(turn);
    return path.reverse();
  }

  /** All turns: below each one its branches, and then the turn that continued it first. */
  ordered() {
    const found = [];
    const waiting = this.#children.get(null).toReversed();
    while (waiting.length > 0) {
      const turn = waiting.pop();
      found.push(turn);
      const [first, ...branches] = this.#children.get(turn.id);
      if (first !== undefined) waiting.push(first, ...branches.toReversed()); // the last one is taken first
    }
    return found;
  }
}

// The sampled tokens of a turn, one by one: the darker a token, the less likely it was.

import { el } from "./dom.js";
import { count, number } from "./words.js";

const LIKELY = [0.9, 0.5, 0.1]; // the least probability of the shades p0, p1, p2; below is p3

/** The elements for tokens as the server gives them. A token without a text of its own is shown as its number. */
export function tokensOf({ ids, logprobs, texts, sampled }) {
  const shown = ids.map((id, index) => token(id, logprobs[index], texts?.[index]));
  const cut = sampled > ids.length ? [el("small", {}, `The first ${count(ids.length)} of ${count(sampled)} tokens.`)] : [];
  return [el("pre", { class: "tokens" }, ...shown), ...cut];
}

function token(id, logprob, text) {
  const shade = LIKELY.findIndex((least) => Math.exp(logprob) >= least);
  const about = `token ${id}, logprob ${number(logprob)}`;
  return el("mark", { class: `p${shade === -1 ? LIKELY.length : shade}`, title: about }, text || `⟨${id}⟩`);
}

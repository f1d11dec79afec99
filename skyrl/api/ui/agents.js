// Agent sessions: their table, and the words for their states and forks.

import { linkPart, statePart, timePart } from "./dom.js";
import { Table, column } from "./table.js";
import { count, number } from "./words.js";

const numeric = { numeric: true };

const ENDS = {
  called: "a client has ended it",
  turns: "it has had all its turns",
  tokens: "it has used all its tokens",
  bytes: "its messages are too large together",
  time: "its time is over",
  idle: "no request came for too long",
};

const FORKS = {
  system_changed: "the system prompt differs",
  user_changed: "a message of the user differs",
  tool_result_changed: "the result of a tool differs",
  tool_call_changed: "a tool call in an answer differs",
  thinking_changed: "the thinking in an answer differs",
  answer_changed: "the text of an answer differs",
  messages_dropped: "messages were left out",
  messages_inserted: "messages were put in",
  tools_changed: "the tools differ",
  branch: "continues an earlier turn again",
  asked_again: "the same request again",
  template_rewrites: "the template writes an earlier part otherwise now",
  not_extendable: "the template cannot continue the turn before it",
};

/** A session's state, and why it has ended. */
export function agentState({ state, end_reason: reason }) {
  return { state, sentence: reason === null ? "" : (ENDS[reason] ?? reason) };
}

/** Why a turn does not continue the newest one, and from which message on. */
export function forkText({ fork, forked_at: at }) {
  if (fork === null) return "";
  const reason = FORKS[fork] ?? fork;
  return at === null ? reason : `${reason}, from message ${at} on`;
}

export function agentHref(id) {
  return `#/agents/${encodeURIComponent(id)}`;
}

export function agentTable() {
  return new Table("Agent sessions", [
    column("session", (session) => ({ text: session.name || session.session_id, href: agentHref(session.session_id), more: session.name && session.session_id }),
      { part: linkPart }),
    column("model", (session) => session.model),
    column("state", agentState, { part: statePart, kept: true }),
    column("turns", (session) => count(session.turns), numeric),
    column("tokens sampled", (session) => count(session.sampled), numeric),
    column("forks", (session) => count(session.forks), numeric),
    column("reward", (session) => number(session.reward), numeric),
    column("last use", (session) => session.used_at, { part: timePart }),
  ], "No agent sessions. One appears when a client creates it.");
}

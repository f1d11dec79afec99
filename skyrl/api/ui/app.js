// The page: asks for the key, chooses the view by the address, and asks the server for its data every two seconds.

import { AgentView } from "./agent.js";
import { Api, Refused } from "./api.js";
import { BoxView } from "./box.js";
import { dropOldPlots } from "./chart.js";
import { setText, statePart, tickTimes } from "./dom.js";
import { readiness } from "./models.js";
import { OverviewView } from "./overview.js";
import { RunView } from "./run.js";
import { since } from "./words.js";

const POLL_MS = 2000;
const MAX_POLL_MS = 30000;
const STORED_KEY = "skyrl-key"; // in sessionStorage, and only if the user asks for that

const byId = (id) => document.getElementById(id);
const form = byId("ask");
const serverLine = statePart();
let api = null;
let view = null;
let request = null; // the AbortController of the newest request
let timer = null;
let failures = 0;
let answeredAt = null; // when the server answered last for this view

function viewOfAddress() {
  const [, page, id] = location.hash.split("/");
  if (page === "runs" && id) return new RunView(decode(id));
  if (page === "agents" && id) return new AgentView(decode(id), load);
  if (page === "box") return new BoxView();
  return new OverviewView(download);
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // an address that a user has cut; the server knows nothing of this name and says so
  }
}

function show() {
  if (api === null) return;
  view = viewOfAddress();
  api.forgetLast();
  answeredAt = null;
  byId("view").replaceChildren(view.element);
  dropOldPlots();
  view.element.querySelector("h1").focus();
  say("");
  poll();
}

async function poll() {
  clearTimeout(timer);
  request?.abort();
  const mine = new AbortController();
  request = mine;
  try {
    const answer = await api.get(view.path(), mine.signal);
    if (mine !== request) return;
    [failures, answeredAt] = [0, Date.now()];
    say("");
    if (answer !== null) update(answer);
  } catch (error) {
    if (mine !== request) return;
    if (error instanceof Refused && error.status === 401) return askForKey(error.message);
    failures += 1;
    sayFailure(error);
  }
  const wait = view.isBehind && failures === 0 ? 0 : Math.min(MAX_POLL_MS, POLL_MS * 2 ** Math.min(failures, 8));
  if (!document.hidden) timer = setTimeout(poll, wait);
}

function update(answer) {
  serverLine.set(readiness(answer.server));
  byId("server").hidden = byId("forget").hidden = false;
  byId("to-box").hidden = !answer.server.scopes.includes("admin");
  view.update(answer);
  dropOldPlots();
  document.title = `${view.title} · skyrl`;
}

// What is said about the connection

let failure = "";

function say(text) {
  failure = text;
  tick();
}

function sayFailure(error) {
  say(error instanceof Refused ? error.message : "The server does not answer.");
}

function tick() {
  tickTimes();
  const age = failure && answeredAt !== null ? ` What is shown is ${since(answeredAt)} old.` : "";
  setText(byId("notice"), failure + age);
}

/** An answer beside those of the view; null if there is none. */
async function load(path) {
  try {
    return await api.get(path);
  } catch (error) {
    sayFailure(error);
    return null;
  }
}

async function download(path, name) {
  try {
    await api.download(path, name);
  } catch (error) {
    sayFailure(error);
  }
}

// The key

function askForKey(refusal) {
  stop();
  byId("view").replaceChildren(form);
  dropOldPlots();
  form.hidden = false;
  setText(byId("refused"), refusal);
  byId("key").value = "";
  byId("key").focus();
}

function stop() {
  request?.abort();
  request = null;
  clearTimeout(timer);
  sessionStorage.removeItem(STORED_KEY);
  api = view = null;
  byId("server").hidden = byId("forget").hidden = byId("to-box").hidden = true;
  document.title = "skyrl";
  say("");
}

function takeKey(event) {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) return setText(byId("refused"), "A key has no spaces and only ASCII characters.");
  if (byId("keep").checked) sessionStorage.setItem(STORED_KEY, key);
  byId("key").value = "";
  start(key);
}

function start(key) {
  api = new Api(key);
  failures = 0;
  show();
}

form.addEventListener("submit", takeKey);
byId("forget").addEventListener("click", () => askForKey(""));
byId("server").append(serverLine.element);
window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => {
  if (api === null) return;
  if (document.hidden) clearTimeout(timer);
  else poll();
});
setInterval(tick, 1000);

const stored = sessionStorage.getItem(STORED_KEY);
if (stored === null) askForKey("");
else start(stored);

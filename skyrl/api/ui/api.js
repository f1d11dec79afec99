// Requests to the server with the user's key, which is sent as a header and is in no address.

import { setServerDate } from "./words.js";

/** The server has answered, but refuses: `message` is its own sentence. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Api {
  #key;
  #last = { path: null, etag: null };

  constructor(key) {
    this.#key = key;
  }

  /** The answer; null if the same path was asked last and the answer is the same. Throws Refused, and TypeError when
   * the server is away. */
  async get(path, signal) {
    const headers = { "X-API-Key": this.#key };
    if (path === this.#last.path) headers["If-None-Match"] = this.#last.etag;
    const response = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
    setServerDate(response.headers.get("date"));
    if (response.status === 304) return null;
    if (!response.ok) throw await refusal(response);
    const answer = await response.json();
    this.#last = { path, etag: response.headers.get("etag") };
    return answer;
  }

  /** Ask for the whole answer next time. */
  forgetLast() {
    this.#last = { path: null, etag: null };
  }

  /** Save an answer as a file of this name. */
  async download(path, name) {
    const response = await fetch(path, { headers: { "X-API-Key": this.#key }, cache: "no-store", credentials: "omit" });
    if (!response.ok) throw await refusal(response);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await response.blob());
    link.download = name;
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

async function refusal(response) {
  const answer = await response.json().catch(() => ({}));
  return new Refused(response.status, answer.detail ?? `the server answered with status ${response.status}`);
}

"""Embeddings for `tinker_cookbook.recipes.search_tool` without Google's API, and the documents that it searches.

    python examples/cookbook/embeddings.py serve --port 8020
    chroma run --path documents --port 8010
    python examples/cookbook/embeddings.py fill documents.jsonl --chroma-port 8010

`serve` answers as Google's Vertex API does for embeddings; the recipe finds it by these variables:

    export GOOGLE_VERTEX_BASE_URL=http://127.0.0.1:8020
    export GCP_VERTEXAI_PROJECT_NUMBER=none GCP_VERTEXAI_REGION=none
    export GOOGLE_APPLICATION_CREDENTIALS=examples/cookbook/credentials.json

That file has a token that is nobody's, so that Google's library asks nobody for one.

An embedding counts a text's words by their hashes: texts with common words are near each other. It knows no synonyms,
so it is good for trying the recipe, not for training with it. `fill` puts the texts of a file of JSON lines
(`{"text": …}`) with their embeddings into the collection `wiki_embeddings` of a Chroma server; it needs `chromadb`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DIMENSIONS = 768
"""Of an embedding, unless a request says another number."""
COLLECTION = "wiki_embeddings"


def embed(text: str, dimensions: int = DIMENSIONS) -> list[float]:
    """The text's embedding, of length 1, or 0 if the text has no word."""
    values = [0.0] * dimensions
    for word in re.findall(r"\w+", text.lower()):
        values[int.from_bytes(hashlib.sha256(word.encode()).digest()[:8]) % dimensions] += 1.0
    length = math.hypot(*values) or 1.0
    return [value / length for value in values]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to the body of an `embedContent`, or of a `batchEmbedContents`, which has several in `requests`."""
    if "requests" in request:
        return {"embeddings": [answer(each)["embedding"] for each in request["requests"]]}
    text = " ".join(part["text"] for part in request["content"]["parts"])
    dimensions = (request.get("embedContentConfig") or {}).get("outputDimensionality", DIMENSIONS)
    return {"embedding": {"values": embed(text, dimensions)}}


class Handler(BaseHTTPRequestHandler):
    """Answers `POST …/models/<any>:embedContent` and `…:batchEmbedContents`."""

    def do_POST(self) -> None:
        if not self.path.partition("?")[0].endswith((":embedContent", ":batchEmbedContents")):
            self.send_error(404)
            return
        said = json.dumps(answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def fill(file: Path, port: int) -> int:
    """Put the file's texts into the collection of the Chroma server on this machine. Returns their number."""
    import chromadb  # pyright: ignore[reportMissingImports]

    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    client = chromadb.HttpClient("localhost", port, settings=chromadb.Settings(anonymized_telemetry=False))
    collection = client.get_or_create_collection(COLLECTION, embedding_function=None)
    collection.add([str(number) for number in range(len(texts))], [embed(text) for text in texts], documents=texts)
    return len(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Embeddings and documents for search_tool.")
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve")
    serving.add_argument("--port", type=int, default=8020)
    filling = commands.add_parser("fill")
    filling.add_argument("file", type=Path)
    filling.add_argument("--chroma-port", type=int, default=8010)
    given = parser.parse_args()
    if given.command == "fill":
        print(f"{fill(given.file, given.chroma_port)} texts")
        return
    with ThreadingHTTPServer(("127.0.0.1", given.port), Handler) as server:
        print(f"embeds for http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()

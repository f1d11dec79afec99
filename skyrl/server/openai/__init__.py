"""The OpenAI-compatible endpoint behind its routes: fields, models, forwarding and streams. `skyrl.server.api.openai`
has the routes."""

"""The OpenAI-compatible endpoint behind its routes: fields, models, forwarding and streams. `skyrl.api.openai` has the
routes."""

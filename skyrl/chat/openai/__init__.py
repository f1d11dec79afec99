"""OpenAI's completions and chats: fields, models, forwarding and streams. `skyrl.api.routes.chats` has the routes."""

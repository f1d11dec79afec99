"""The files of the status page. `skyrl.server.api.ui` serves them."""

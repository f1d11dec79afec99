"""The files of the status page. `skyrl.api.ui` serves them."""

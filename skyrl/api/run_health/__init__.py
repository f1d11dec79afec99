"""How healthy a run is: its numbers against its own past, with a sentence for each that has left the usual.

Works on the steps of `skyrl.storage.db.run_steps`. Knows nothing of HTTP, of the page, or of what runs now.
"""

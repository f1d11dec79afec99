"""Load, null upstream and reports: what skyrl costs, side by side with the server that it forwards to."""

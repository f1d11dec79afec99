"""The status page: its files, the route that serves them (`page`), and what its script asks for."""

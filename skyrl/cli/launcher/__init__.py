"""`skyrl serve`: checks the machine, then starts the parts of one server and keeps them running."""

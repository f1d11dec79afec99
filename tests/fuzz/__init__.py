"""Random input to a real server: no input breaks the server, and no answer shows data of another tenant."""

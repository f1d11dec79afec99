"""Child processes: listening sockets, supervision, log lines, and the causes of failed starts."""

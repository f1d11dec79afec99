"""Child processes: sockets they listen on, how they are supervised, what their ends and their logs say."""

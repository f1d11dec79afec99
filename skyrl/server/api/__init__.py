"""The HTTP interface: its handlers decode a request, call a service and encode the answer. Holds no SQL."""

"""The handlers of the API: each decodes a request, calls a service and encodes the answer. Holds no SQL."""

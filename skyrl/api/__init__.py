"""The HTTP face: parse, authorise, call a service, encode. Holds no SQL and no HTTP client."""

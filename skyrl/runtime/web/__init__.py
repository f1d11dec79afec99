"""How every HTTP server of skyrl listens: connections with bounds, and the end of a server. Knows no routes."""

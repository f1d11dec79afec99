"""HTTP as every server and every client of skyrl speaks it: connections with bounds. Knows no routes."""

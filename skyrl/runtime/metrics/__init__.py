"""What each process counts and measures, in Prometheus' format. Knows names and numbers, not what they are of."""

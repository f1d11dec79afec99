"""How processes count, measure and publish, in Prometheus' format; what they measure of themselves and of storage."""

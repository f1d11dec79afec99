"""Traces of requests (OpenTelemetry): which requests are traced, and the spans that are sent to a collector.

Off by default. `context` decides and imports nothing; `spans` sends, and imports OpenTelemetry when it is opened.
"""

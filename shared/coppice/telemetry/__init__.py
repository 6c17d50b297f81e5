"""Logs, traces and the small metrics server of a process. Telemetry may lose itself; it never holds up a request."""

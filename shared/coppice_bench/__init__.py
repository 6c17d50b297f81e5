"""Measurements of the cache service: its core alone, over the session stream, and under load from traces."""

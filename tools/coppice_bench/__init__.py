"""Measurements of the cache service: its core alone, over its sessions, and under load from traces."""

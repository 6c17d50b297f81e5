"""Manifests of a stack: `coppice render kubernetes`."""

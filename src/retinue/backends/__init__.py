"""Backends: they execute runs."""

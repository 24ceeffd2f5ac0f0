"""Benchmarks: one module a question, each prints one JSON object a line."""

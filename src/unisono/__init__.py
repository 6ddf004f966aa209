"""Processes that work together: messages, collectives and groups."""

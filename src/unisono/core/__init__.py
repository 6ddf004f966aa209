"""The lowest layer: element types, memory, time, requests, tasks and works.

Modules here import one another, errors and config, and nothing above.
"""

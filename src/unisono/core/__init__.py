"""The foundation: element types, memory, time, tasks and works.

The lowest layer. Modules here import one another and the top-level errors and config, and nothing above.
"""

"""Starting ranks and bringing them together: tickets, the seed, joining, spawning, running.

A room: it imports the ground, and nothing of it knows what a backend or a communicator is.
"""

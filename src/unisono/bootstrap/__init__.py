"""How the ranks of a job meet: tickets, the seed, the join protocol, certificates.

Nothing here imports a backend, a communicator or the launcher.
"""

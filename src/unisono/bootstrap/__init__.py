"""How the ranks of a job meet: tickets, the seed, the join protocol, certificates.

A room: nothing here knows what a backend or a communicator is, nor how processes are started.
"""

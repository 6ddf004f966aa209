"""The algorithms of collectives: each is a pure function from rank, size and root to a plan.

An algorithm computes peers and slices. It does not choose, verify or run plans.
"""

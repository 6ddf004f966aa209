"""The algorithms of collectives: each is a pure function from a shape and a rank to a plan for all counts.

An algorithm computes peers and slices. It does not choose, verify or run plans.
"""

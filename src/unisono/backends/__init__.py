"""What moves bytes between ranks: each module is one way to do it, behind the contract.

A room: a backend imports the ground, and nothing of another backend but what it is made of.
"""

"""What moves bytes between ranks: each module is one way to do it, behind the contract.

A backend imports core/, messaging/ and plans/, and of other backends only what it is made of.
"""

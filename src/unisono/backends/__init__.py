"""The backends, which move bytes between ranks: each module is one, behind the contract.

A backend imports core/, messaging/ and plans/, and of other backends only those that it is made of.
"""

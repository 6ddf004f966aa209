"""What a user holds: communicators, their verbs, groups and worlds.

These modules may import everything below them: rpc/, backends/, simulation/, launcher/ and bootstrap/.
"""

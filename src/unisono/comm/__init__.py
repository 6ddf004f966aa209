"""What a user holds: communicators, their verbs, groups and worlds.

Above the rooms: these modules may use any of them.
"""

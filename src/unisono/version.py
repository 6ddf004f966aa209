"""The version of the package. The ranks of a world must have the same one."""

VERSION = "0.1.0"

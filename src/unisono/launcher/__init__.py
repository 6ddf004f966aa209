"""Starting and watching the processes of a job: `unisono run`, `uni.spawn`, mpiexec.

A room: it stands on bootstrap, and knows no backend or communicator.
"""
